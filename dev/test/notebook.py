#!/usr/bin/env python3
"""Run docs/train_gpt2.ipynb as its readers do, with few steps, in an empty folder: `python3 dev/test/notebook.py`.

It clones this repository, and its push goes to the local server dev/test/hub_server.py. Needs nbclient, ipykernel and
matplotlib; the push needs huggingface_hub.
"""
import importlib.util
import json
import os
import re
import sys
import tempfile

from hub_server import Hub
from verdicts import ROOT, contents, finish, read, run, skip, verdict

NOTEBOOK = os.path.join(ROOT, "docs", "train_gpt2.ipynb")
LIMIT = 300  # seconds of a cell


def check_text():
    """A failing command stops its cell, and no output is committed: what can be seen without running it."""
    for cell in json.loads(read(NOTEBOOK))["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        wrong = [line for line in lines if line.lstrip().startswith("!") or "get_ipython" in line]
        wrong += [line for i, line in enumerate(lines) if line.startswith("%") and (i or line != "%%bash -e")]
        if lines[0] == "%%bash -e" and "set -o pipefail" not in lines and re.search(r"(?<!\|)\|(?!\|)", "\n".join(lines)):
            wrong.append("a pipe without set -o pipefail")
        wrong += ["an output is committed"] * bool(cell["outputs"] or cell["execution_count"])
        verdict(f"cell {cell['id']}", "; ".join(wrong))


def execute(folder):
    """The notebook as run in an empty folder, and the error that ended it."""
    import nbclient
    import nbformat

    os.mkdir(folder)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    try:
        nbclient.NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": folder}}).execute()
        return notebook, ""
    except nbclient.exceptions.CellExecutionError as e:
        return notebook, re.sub(r"\x1b\[[0-9;]*m", "", str(e)).strip()


def check_run(work, hub):
    has_hub = importlib.util.find_spec("huggingface_hub") is not None
    os.environ.update(
        PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"], REPOSITORY="file://" + ROOT, STEPS="60",
        HUB_NAME="me/small-world" if has_hub else "", HF_ENDPOINT=hub.address, HF_TOKEN="local", HF_HUB_DISABLE_XET="1",
        HF_HOME=work + "/hf", HOME=work, IPYTHONDIR=work + "/ipython", JUPYTER_CONFIG_DIR=work + "/jupyter",
        MPLBACKEND="agg",
    )  # fmt: skip
    for variable in ("OUT", "MAKEFLAGS", "MAKELEVEL"):
        os.environ.pop(variable, None)
    notebook, why = execute(work + "/reader")
    verdict("every cell runs", why[-600:].replace("\n", " | "))
    outputs = {cell["id"]: cell.get("outputs", []) for cell in notebook["cells"]}
    printed = {i: "".join(o.get("text", "") for o in found) for i, found in outputs.items()}
    made = contents(work + "/reader/small_world/out/notebook")
    size = {name: len(data) for name, data in made.items()}
    losses = [line["loss"] for line in map(json.loads, made.get("log.jsonl", b"").splitlines()) if "loss" in line]
    is_learnt = len(losses) == 60 and losses[-1] < losses[0] - 0.5 and size.get("model.safetensors", 0) > 100000
    verdict("the model has learnt", "" if is_learnt else f"{len(losses)} losses {losses[:1]}, {losses[-1:]}; {size}")
    verdict("training is shown", "" if "val loss" in printed["train"] else printed["train"][-200:])
    shown = [o for o in outputs["show"] if "image/png" in o.get("data", {})]
    verdict("the plot", "" if size.get("plot.png", 0) > 5000 and shown else "there is none")
    is_told = len(printed["generate"].strip()) > 20 and size.get("story.txt")
    verdict("the story", "" if is_told else repr(printed["generate"]))
    verdict("the card is shown", "" if "GPT2LMHeadModel" in printed["push"] else printed["push"][:200])
    if has_hub:
        sent = contents(hub.folder + "/me/small-world")
        wrong = {"README.md", "config.json", "model.safetensors", "tokenizer.json"} - set(sent)
        verdict("the push", f"the server lacks {wrong}; {printed['push'][-200:]}" if wrong else "")
    else:
        skip("the push", f"{sys.executable} has no huggingface_hub (pip install huggingface_hub)")
    os.environ["REPOSITORY"] = f"file://{work}/none"
    _, why = execute(work + "/wrong")
    is_ended = "git clone" in why and "returned non-zero" in why
    verdict("a failing shell cell ends the run", "" if is_ended else f"it ended with {why!r}")


check_text()
missing = [name for name in ("nbclient", "nbformat", "ipykernel", "matplotlib") if not importlib.util.find_spec(name)]
if missing:
    skip("the notebook", f"{sys.executable} has no {', '.join(missing)} (pip install nbclient ipykernel matplotlib)")
elif run("git", "-C", ROOT, "rev-parse", "HEAD").returncode:
    skip("the notebook", "this is no clone, so there is nothing to clone from")
else:
    with tempfile.TemporaryDirectory() as work, Hub(work + "/server") as hub:
        check_run(work, hub)
finish()
