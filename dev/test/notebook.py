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
from verdicts import ROOT, contents, finish, holds, read, run, skip, verdict

NOTEBOOK = os.path.join(ROOT, "docs", "train_gpt2.ipynb")


def check_text():
    """A failing command stops its cell, and no output is committed: what can be seen without running it."""
    for cell in json.loads(read(NOTEBOOK))["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        wrong = [line for line in lines if line[0:1] in "!%" and line not in ("", "%%bash -e")]
        if lines[0] == "%%bash -e" and "set -o pipefail" not in lines and re.search(r"[^|]\|[^|]", "\n".join(lines)):
            wrong.append("a pipe without set -o pipefail")
        wrong += ["an output is committed"] * bool(cell["outputs"] or cell["execution_count"])
        verdict(f"cell {cell['id']}", "; ".join(wrong))


def execute(folder):
    """What the cells have left, by their names, and the error that ended them."""
    import nbclient
    import nbformat

    os.mkdir(folder)
    notebook, why = nbformat.read(NOTEBOOK, as_version=4), ""
    try:
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    except nbclient.exceptions.CellExecutionError as e:
        why = re.sub(r"\x1b\[[0-9;]*m", "", str(e)).strip()
    return {cell["id"]: cell.get("outputs", []) for cell in notebook["cells"]}, why


def check_run(work, hub):
    has_hub = importlib.util.find_spec("huggingface_hub") is not None
    os.environ.update(
        PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"], REPOSITORY="file://" + ROOT, STEPS="60",
        HUB_NAME="me/small-world" if has_hub else "", HF_ENDPOINT=hub.address, HF_TOKEN="local", HF_HUB_DISABLE_XET="1",
        HOME=work, HF_HOME=work + "/hf", IPYTHONDIR=work + "/ipython", MPLBACKEND="agg",
    )  # fmt: skip
    for variable in ("OUT", "MAKEFLAGS", "MAKELEVEL"):
        os.environ.pop(variable, None)
    outputs, why = execute(work + "/reader")
    verdict("every cell runs", why[-600:].replace("\n", " | "))
    printed = {i: "".join(o.get("text", "") for o in found) for i, found in outputs.items()}
    made = contents(work + "/reader/small_world/out/notebook")
    losses = [line["loss"] for line in map(json.loads, made.get("log.jsonl", b"").splitlines()) if "loss" in line]
    holds("the model has learnt", len(losses) == 60 and losses[-1] < losses[0] - 0.5, losses)
    holds("training is shown", "val loss" in printed["train"], printed["train"][-200:])
    holds("the plot", "plot.png" in made and any("image/png" in o.get("data", {}) for o in outputs["show"]))
    holds("the story", len(printed["generate"].strip()) > 20 and made.get("story.txt"), printed["generate"])
    holds("the card is shown", "GPT2LMHeadModel" in printed["push"], printed["push"][:200])
    if has_hub:
        wrong = {"README.md", "config.json", "model.safetensors"} - set(contents(hub.folder + "/me/small-world"))
        verdict("the push", f"the server lacks {wrong}; {printed['push'][-200:]}" if wrong else "")
    os.environ["REPOSITORY"] = f"file://{work}/none"
    _, why = execute(work + "/wrong")
    holds("a failing shell cell ends the run", "git clone" in why and "returned non-zero" in why, why)


check_text()
missing = [name for name in ("nbclient", "nbformat", "ipykernel", "matplotlib") if not importlib.util.find_spec(name)]
if missing or run("git", "-C", ROOT, "rev-parse", "HEAD").returncode:
    skip("the notebook", f"{sys.executable} has no {', '.join(missing)}" if missing else "this is no clone")
else:
    with tempfile.TemporaryDirectory() as work, Hub(work + "/server") as hub:
        check_run(work, hub)
finish()
