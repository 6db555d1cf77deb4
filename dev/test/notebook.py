#!/usr/bin/env python3
"""Run docs/train_gpt2.ipynb as its readers do, with few steps, in an empty folder: `python3 dev/test/notebook.py`.

It clones this repository, and its push goes to the local server dev/test/hub_server.py. Needs nbclient, ipykernel,
matplotlib and huggingface_hub.
"""
import importlib.util
import json
import os
import sys
import tempfile

from hub_server import Hub
from verdicts import ROOT, contents, finish, holds, run, skip, verdict

NOTEBOOK = os.path.join(ROOT, "docs", "train_gpt2.ipynb")


def check_run(work, hub):
    import nbclient
    import nbformat

    os.environ.update(
        PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"], REPOSITORY="file://" + ROOT, STEPS="60",
        HUB_NAME="me/small-world", HF_ENDPOINT=hub.address, HF_TOKEN="local", HF_HUB_DISABLE_XET="1",
        HOME=work, HF_HOME=work + "/hf", IPYTHONDIR=work + "/ipython", MPLBACKEND="agg",
    )  # fmt: skip
    for variable in ("OUT", "MAKEFLAGS", "MAKELEVEL"):
        os.environ.pop(variable, None)
    os.mkdir(work + "/reader")
    notebook, why = nbformat.read(NOTEBOOK, as_version=4), ""
    try:
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": work + "/reader"}}).execute()
    except nbclient.exceptions.CellExecutionError as e:
        why = str(e)
    verdict("every cell runs", why[-600:].replace("\n", " | "))
    printed = {cell["id"]: "".join(o.get("text", "") for o in cell.get("outputs", [])) for cell in notebook["cells"]}
    made = contents(work + "/reader/small_world/out/notebook")
    losses = [line["loss"] for line in map(json.loads, made.get("log.jsonl", b"").splitlines()) if "loss" in line]
    holds("the model has learnt", len(losses) == 60 and losses[-1] < losses[0] - 0.5, losses)
    is_pushed = {"README.md", "config.json", "model.safetensors"} <= {*contents(hub.folder + "/me/small-world")}
    holds("the card is shown, and pushed", "GPT2LMHeadModel" in printed["push"] and is_pushed, printed["push"][-200:])


needed = ("nbclient", "nbformat", "ipykernel", "matplotlib", "huggingface_hub")
missing = [name for name in needed if not importlib.util.find_spec(name)]
if missing or run("git", "-C", ROOT, "rev-parse", "HEAD").returncode:
    skip("the notebook", f"{sys.executable} has no {', '.join(missing)}" if missing else "this is no clone")
else:
    with tempfile.TemporaryDirectory() as work, Hub(work + "/server") as hub:
        check_run(work, hub)
finish()
