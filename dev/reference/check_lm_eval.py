#!/usr/bin/env python3
"""Compare a GPT-2 directory's acc and acc_norm on HellaSwag by lm-evaluation-harness with the trainer's.

    python3 -m venv build/lm_eval && build/lm_eval/bin/pip install 'lm_eval[hf]' tokenizers
    build/lm_eval/bin/python dev/reference/check_lm_eval.py ./train_gpt2 FILE [--limit N] DIR...

FILE is a local hellaswag_val.jsonl, or its text with six lines per example (dev/data/hellaswag.py), which is converted.
The harness runs its own task, "hellaswag", with FILE as data set, in float32 on the CPU. Prints a line per DIR and ends
with status 1 if a result differs. Results: dev/results/lm_eval.md.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import lm_eval
import torch
import transformers
import yaml
from lm_eval.tasks import TaskManager

PREPARE = os.path.join(os.path.dirname(__file__), "..", "data", "hellaswag.py")


def examples(path):
    """Lines of JSON with the fields that the harness reads."""
    with open(path, encoding="utf-8") as f:
        lines = f.read().splitlines()
    if lines[0].startswith("{"):
        return lines
    made = []
    for context, label, *endings in (lines[i : i + 6] for i in range(0, len(lines) - 5, 6)):
        activity, _, text = context.partition(": ")
        a, _, b = text.rpartition(". ")
        fields = {"ctx_a": a + "." if a else text, "ctx_b": b if a else ""}
        made.append(json.dumps({"activity_label": activity, "endings": endings, "label": int(label), **fields}))
    return made


def by_harness(directory, data, folder):
    """acc and acc_norm by the harness's own task, reading local lines."""
    home = os.path.join(os.path.dirname(lm_eval.__file__), "tasks", "hellaswag")
    with open(os.path.join(home, "hellaswag.yaml"), encoding="utf-8") as f:
        text = f.read().replace("task: hellaswag", "task: hellaswag_local").replace("utils.process_docs", "task_utils.process_docs")
    with open(os.path.join(home, "utils.py"), encoding="utf-8") as f, open(os.path.join(folder, "task_utils.py"), "w") as to:
        to.write(f.read())
    text = re.sub("dataset_path: .*", "dataset_path: json", text)
    text = re.sub("dataset_name: .*", "dataset_kwargs: " + json.dumps({"data_files": {"validation": data}}), text)
    text = re.sub("training_split: .*", "training_split: null", text)
    with open(os.path.join(folder, "hellaswag_local.yaml"), "w", encoding="utf-8") as f:
        f.write(text)
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": directory, "dtype": "float32"},
        tasks=["hellaswag_local"],
        task_manager=TaskManager(include_path=folder),
        batch_size=16,
        device="cpu",
        bootstrap_iters=0,
        log_samples=False,
    )["results"]["hellaswag_local"]
    return found["acc,none"], found["acc_norm,none"]


def by_trainer(program, directory, data, folder):
    file = os.path.join(folder, "hellaswag_val.bin")
    subprocess.run([sys.executable, PREPARE, "--local", data, "--vocab", directory, "--lm-eval", "--out", file], check=True)
    command = [os.path.abspath(program), "-e", directory, "--evaluate", "1", "-m", "1", "--choices", file]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return tuple(map(float, re.search(r"^hellaswag acc ([\d.]+), acc_norm ([\d.]+) ", printed, re.M).groups()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="TRAIN_GPT2")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("directories", metavar="DIR", nargs="+")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N examples only")
    options = parser.parse_args()
    print(f"lm_eval {lm_eval.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    lines, failed = examples(options.file)[: options.limit], 0
    for directory in map(os.path.abspath, options.directories):
        with tempfile.TemporaryDirectory() as folder:
            data = os.path.join(folder, "hellaswag_val.jsonl")
            with open(data, "w", encoding="utf-8") as f:
                f.write("\n".join(lines) + "\n")
            ours, theirs = by_trainer(options.program, directory, data, folder), by_harness(directory, data, folder)
        same = all(abs(a - b) < 1e-6 for a, b in zip(ours, theirs))
        failed += not same
        print(f"{'ok  ' if same else 'FAIL'} {os.path.basename(directory)}, {len(lines)} examples: acc {ours[0]:.6f} and "
              f"{theirs[0]:.6f}, acc_norm {ours[1]:.6f} and {theirs[1]:.6f} (trainer, harness)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
