#!/usr/bin/env python3
"""Run docs/train_gpt2.ipynb as its readers do, with few steps, in an empty folder: `python3 dev/test/notebook.py`.

It clones this repository, and its push goes to the local server dev/test/hub_server.py. Afterwards the model, the plot, the
story and the pushed files must be there. Needs nbclient, ipykernel and matplotlib; the push needs huggingface_hub. Ends with
`N passed, N failed, N skipped`; exit status 1 if one failed.
"""
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NOTEBOOK = os.path.join(ROOT, "docs", "train_gpt2.ipynb")
LIMIT = 300  # seconds of a cell
counts = {"passed": 0, "failed": 0, "skipped": 0}


def count(kind, text):
    counts[kind] += 1
    print({"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}[kind], text, flush=True)


def verdict(name, why):
    count("failed" if why else "passed", f"{name}: {why}" if why else name)


def finish():
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    sys.exit(1 if counts["failed"] else 0)


def check_text(cells):
    """What can be seen without running it."""
    for cell in cells:
        lines = "".join(cell["source"]).splitlines()
        wrong = [line for line in lines if line.lstrip().startswith("!") or "get_ipython" in line]
        if any(line.startswith("%") and line != "%%bash -e" for line in lines) or "%%bash -e" in lines[1:]:
            wrong.append("a magic that is not %%bash -e in the first line")
        if lines[0] == "%%bash -e" and "set -o pipefail" not in lines and re.search(r"(?<!\|)\|(?!\|)", "\n".join(lines)):
            wrong.append("a pipe without set -o pipefail")
        verdict(f"cell {cell['id']}: a failing command stops it", "; ".join(wrong))
        verdict(f"cell {cell['id']}: no output is committed", "there is one" if cell["outputs"] or cell["execution_count"] else "")


def main():
    with open(NOTEBOOK, encoding="utf-8") as f:
        tree = json.load(f)
    check_text([cell for cell in tree["cells"] if cell["cell_type"] == "code"])
    missing = [name for name in ("nbclient", "nbformat", "ipykernel", "matplotlib") if not importlib.util.find_spec(name)]
    if missing or subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True).returncode:
        count("skipped", f"the notebook: {sys.executable} has no {', '.join(missing)} (pip install nbclient ipykernel matplotlib)"
              if missing else "the notebook: this is no clone, so there is nothing to clone from")
        finish()
    with tempfile.TemporaryDirectory() as work:
        run(work)
    finish()


def run(work):
    import nbclient
    import nbformat

    has_hub = importlib.util.find_spec("huggingface_hub") is not None
    server_folder, name = os.path.join(work, "server"), "me/small-world"
    server = subprocess.Popen([sys.executable, os.path.join(ROOT, "dev", "test", "hub_server.py"), server_folder],
                              stdout=subprocess.PIPE, text=True)
    os.environ.update(
        PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
        REPOSITORY="file://" + ROOT, STEPS="60", HUB_NAME=name if has_hub else "",
        HF_ENDPOINT=server.stdout.readline().strip(), HF_TOKEN="local", HF_HUB_DISABLE_XET="1", HF_HOME=os.path.join(work, "hf"),
        HOME=work, IPYTHONDIR=os.path.join(work, "ipython"), JUPYTER_CONFIG_DIR=os.path.join(work, "jupyter"), MPLBACKEND="agg",
    )  # fmt: skip
    for variable in ("OUT", "MAKEFLAGS", "MAKELEVEL"):
        os.environ.pop(variable, None)

    def execute(folder):
        """The notebook as run in an empty folder, and the error that ended it."""
        os.mkdir(os.path.join(work, folder))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = nbclient.NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": os.path.join(work, folder)}})
        try:
            client.execute()
            return notebook, ""
        except nbclient.exceptions.CellExecutionError as e:
            return notebook, re.sub(r"\x1b\[[0-9;]*m", "", str(e)).strip()

    try:
        notebook, why = execute("reader")
        verdict("every cell runs", why[-600:].replace("\n", " | "))
        outputs = {cell["id"]: cell.get("outputs", []) for cell in notebook["cells"]}
        printed = {i: "".join(o.get("text", "") for o in found) for i, found in outputs.items()}
        out = os.path.join(work, "reader", "small_world", "out", "notebook")

        def size(*path):
            path = os.path.join(out, *path)
            return os.path.getsize(path) if os.path.isfile(path) else 0

        verdict("the model", "" if size("config.json") and size("model.safetensors") > 100000 else f"not in {out}")
        with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as f:
            losses = [line["loss"] for line in map(json.loads, f) if "loss" in line]
        verdict("the model has learnt", "" if len(losses) == 60 and losses[-1] < losses[0] - 0.5 else f"losses {losses[:1]}, {losses[-1:]}")
        verdict("training is shown", "" if "val loss" in printed["train"] else printed["train"][-200:])
        shown = [o["data"] for o in outputs["show"] if "image/png" in o.get("data", {})]
        verdict("the plot", "" if size("plot.png") > 5000 and shown else "there is none")
        verdict("the story", "" if len(printed["generate"].strip()) > 20 and size("story.txt") else repr(printed["generate"]))
        verdict("the card is shown", "" if "GPT2LMHeadModel" in printed["push"] else printed["push"][:200])
        if has_hub:
            sent = os.path.join(server_folder, name)
            files = sorted(os.listdir(sent)) if os.path.isdir(sent) else []
            wrong = [f for f in ("README.md", "config.json", "model.safetensors", "tokenizer.json") if f not in files]
            verdict("the push", f"the server lacks {wrong}; {printed['push'][-200:]}" if wrong else "")
        else:
            count("skipped", f"the push: {sys.executable} has no huggingface_hub (pip install huggingface_hub)")
        os.environ["REPOSITORY"] = "file://" + os.path.join(work, "none")
        _, why = execute("wrong")
        verdict("a failing shell cell ends the run", "" if "git clone" in why and "returned non-zero" in why else f"it ended with {why!r}")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
