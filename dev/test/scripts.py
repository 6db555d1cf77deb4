#!/usr/bin/env python3
"""Every Python script that users run: with good input, hostile files, a full disk, and standard output on a full disk.

    python3 dev/test/scripts.py TRAIN_GPT2 TRAIN_BERT     from the repository's root

Needs numpy and tokenizers, and gguf and matplotlib for the scripts that do. A script gets each of its files in every form
of one list: it ends with one line that names the file and with status 2, or accepts what the table allows. What it renames
into place was flushed before, and the directory after (dev/test/recorder).
"""
import concurrent.futures
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile

from verdicts import CORPUS, ROOT, contents, finish, not_refused, read, run, skip, verdict
from verdicts import write as put

RECORDER, TRACKERS = (os.path.join(ROOT, "dev", "test", name) for name in ("recorder", "trackers"))
HOSTILE = {  # what a file holds; None: it is missing; "": it is a directory
    "missing": None,
    "a directory": "",
    "empty": b"",
    "nested": b'{"messages":' * 50000,
    "a list": b'[{"a": 1}, null]\n',
    "an object": b'{"a": {"a": [null]}}\n',
    "latin-1": b'{"text": "caf\xe9"} \xff\n',
}
TEXT = {"nested", "a list", "an object"}
# A script, its arguments in a folder that has all input, the last name of what it writes, {file: forms it accepts}.
CASES = [
    ("scripts/sweep.py", "sweep --vary lr=1 --metric loss -- ./trainer", "sweep",
     {"sweep/sweep.json": {"empty", "missing"}, "sweep/lr=1/result.json": {"missing"}}),
    ("scripts/records.py", "3.9444 -- ./trainer", None, {}),
    ("scripts/track.py", "run", "track.json", {"run/log.jsonl": {}, "run/track.json": {"missing", "an object"}}),
    ("scripts/plot.py", "run", "plot.png", {"run/log.jsonl": {}}),
    ("scripts/profile_diff.py", "profile profile", None, {"profile/kernels.csv": {}, "profile/summary.csv": {}}),
    ("scripts/profile_trace.py", "profile", None, {"profile/kernels.csv": {}}),
    ("scripts/profile_reference.py", "runs --pages out", None,
     {"runs/gpt2_124m/kernels.csv": {}, "runs/gpt2_124m/summary.csv": {}}),
    ("scripts/upload.py", "sharded me/model", None, {"sharded/model.safetensors.index.json": {}}),
    ("scripts/download.py", "", None, {}),
    ("dev/export_gguf.py", "gpt2 x.gguf", "x.gguf",
     {"gpt2/config.json": {}, "gpt2/model.safetensors": {}, "gpt2/tokenizer.json": {"missing"},
      "gpt2/tokenizer_config.json": {"missing", "a list", "an object"}}),
    ("dev/export_gguf.py", "plain x.gguf", "x.gguf", {"plain/vocab.json": {}, "plain/merges.txt": TEXT | {"empty"}}),
    ("dev/export_llmc.py", "gpt2 x.bin", "x.bin",
     {"gpt2/config.json": {}, "gpt2/model.safetensors": {}, "gpt2/tokenizer.json": {"missing"}}),
    ("dev/import.py", "llmc/model.bin new", "model.safetensors", {"llmc/model.bin": {}}),
    ("dev/data/prepare_gpt2.py", "--local a.txt --vocab whole --val-fraction 0 --processes 1 --out out", "out",
     {"a.txt": TEXT, "whole/tokenizer.json": {}}),
    ("dev/data/prepare_gpt2.py", "--local a.jsonl --vocab plain --processes 1 --out out", "out",
     {"a.jsonl": {}, "plain/vocab.json": {}, "plain/merges.txt": {"empty"}}),
    ("dev/data/prepare_bert.py", "--local a.txt --vocab words --lines --val-fraction 0 --processes 1 --out out", "out",
     {"a.txt": TEXT, "words/vocab.txt": {}}),
    ("dev/data/prepare_chat.py", "--local chat.jsonl --model gpt2 --out out", "out",
     {"chat.jsonl": {}, "gpt2/config.json": {}, "gpt2/model.safetensors": {},
      "gpt2/tokenizer.json": {"missing", "a directory"},
      "gpt2/tokenizer_config.json": {"missing", "a directory", "an object"}}),
    ("dev/data/prepare_recsys.py", "ratings.csv --out x.bin", "x.bin", {"ratings.csv": {}}),
    ("dev/data/hellaswag.py", "--local h.jsonl --vocab gpt2 --out x.bin", "x.bin", {"h.jsonl": {}}),
    ("dev/data/lambada.py", "--local l.jsonl --vocab gpt2 --out x.bin", "x.bin", {"l.jsonl": {}}),
]
PACKAGES = "numpy tokenizers gguf matplotlib huggingface_hub wandb mlflow".split()
NEEDS = {"dev/export_gguf.py": "gguf", "scripts/plot.py": "matplotlib"}
work = tempfile.TemporaryDirectory()
W = work.name


def make_input(gpt2, bert):
    """Everything that a script can read, in the folder that is returned."""
    folder = W + "/input/"
    for program, name, size, data in ((gpt2, "gpt2", "T=64", "train.bin"), (bert, "words", "T=32", "bert/train.bin")):
        run(os.path.abspath(program), *f"-e L=1,C=32,NH=1,{size} -x 2 -v 0 -s 0 -n 0 -i {CORPUS}/{data}".split(),
            "-o", folder + name, check=True)
        shutil.rmtree(f"{folder}{name}/ckpt")
    letters = [chr(97 + i) for i in range(26)] + [f"##{chr(97 + i)}" for i in range(26)]
    os.mkdir(folder + "llmc")
    run(sys.executable, "dev/export_llmc.py", folder + "gpt2", folder + "llmc/model.bin", check=True)
    put(folder + "words/vocab.txt", "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + letters) + "\n")
    for name, left_out in (("plain", ["tokenizer.json"]), ("whole", ["vocab.json", "merges.txt"])):
        shutil.copytree(folder + "gpt2", folder + name, ignore=shutil.ignore_patterns(*left_out))
    put(folder + "trainer", """#!/bin/sh\necho '{"step": 1, "ms": 1, "loss": 2}' >sweep/lr=1/log.jsonl\n""")
    os.chmod(folder + "trainer", 0o755)
    steps = "".join(f'{{"step": {i}, "loss": {9 / i}, "ms": 5}}\n' for i in range(1, 9))
    put(folder + "run/log.jsonl", '{"model": "d12"}\n' + steps)
    for name in ("profile", "runs/gpt2_124m"):
        columns = "direction,layer,op,shapes,kernel,stream,start_us,us,gflop,mbyte"
        put(f"{folder}{name}/kernels.csv", f"{columns}\nforward,0,matmul,N=1,gemm,7,0,5,1,1\n")
        put(f"{folder}{name}/summary.csv", "kind,name,value\nnumber,span_ms,1\n")
    put(folder + "sharded/config.json", "{}")
    put(folder + "a.txt", "one line of text\nand another\n\na second text\n\n" * 40)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = {"a": {"text": "some text"}, "h": {"ctx": "a", "endings": ["b"], "label": 0}, "chat": {"messages": chat}}
    for name, line in {**lines, "l": lines["a"]}.items():
        put(f"{folder}{name}.jsonl", (json.dumps(line) + "\n") * 200)
    put(folder + "ratings.csv", "".join(f"{u},{i},3,{u + i}\n" for u in range(1, 9) for i in range(1, 9)))
    return folder


class Case:
    def __init__(self, row, folder):
        self.script, self.arguments, self.writes, self.reads = row
        self.name, self.folder = f"{self.script} {self.arguments}".strip(), folder

    def run(self, change=None, stdout=subprocess.PIPE, most=None, without=""):
        """Run it in a copy of the input after a change, with files of `most` bytes: (what has ended, faults that were
        recorded, whether anything was). Temporary files that are left are faults too."""
        copy = tempfile.mkdtemp(dir=W)
        shutil.copytree(self.folder, copy, dirs_exist_ok=True)
        record, command = f"{copy}.record", [sys.executable, os.path.join(ROOT, self.script)]
        env = {**os.environ, "PYTHONPATH": f"{RECORDER}:{without or TRACKERS}", "TRACK_RECORD": f"{copy}.calls",
               "RENAMES_RECORD": record, "RENAMES_BELOW": copy, "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        if change:
            path, text = os.path.join(copy, change[0]), HOSTILE[change[1]]
            if os.path.exists(path):
                os.remove(path)
            if text == "":
                os.makedirs(path)
            elif text is not None:
                put(path, text)
        before = {*contents(copy)}
        limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))) if most else None
        done = run(*command, *self.arguments.split(), stdout=stdout, preexec_fn=limit, cwd=copy, env=env)
        recorded = read(record).split("\n") if os.path.exists(record) else []
        found = [line for line in recorded if line.startswith("FAULT")]
        found += [f"it left {name}" for name in {*contents(copy)} - before if ".tmp" in name]
        shutil.rmtree(copy)
        return done, "; ".join(found), recorded

    def good(self):
        done, why, recorded = self.run()
        why = why or ("" if recorded or not self.writes else "it renamed nothing")
        if self.writes and done.returncode != 0 or "Traceback" in done.stderr:
            why = f"status {done.returncode}: {done.stderr[-300:]}"
        yield "what it renames is flushed", why
        done, _, _ = self.run(without=W + "/without")
        yield "without packages", done.stderr[-300:] if "Traceback" in done.stderr else ""

    def hostile(self, path, form):
        done, why, _ = self.run((path, form))
        folder, base = os.path.split(path)
        why = not_refused(done, f"({re.escape(base)}|{re.escape(folder or base)})") or why
        yield f"{path} is {form}", "" if form in self.reads[path] and done.returncode == 0 else why

    def full(self):
        if self.writes:
            done, why, _ = self.run(most=16)
            yield "a full disk", not_refused(done, f"{re.escape(self.writes)}", 1) or why
            with open("/dev/full", "w") as full:
                done, _, _ = self.run(stdout=full)
            yield "standard output on a full disk", not_refused(done, "standard output: ", 1)


def main():
    absent = {script for script, module in NEEDS.items() if not importlib.util.find_spec(module)}
    for script in absent:
        skip(script, f"{sys.executable} has no {NEEDS[script]} (pip install {NEEDS[script]})")
    for name in PACKAGES:
        put(f"{W}/without/{name}.py", "raise ImportError")
    folder, os.environ["MPLCONFIGDIR"] = make_input(*sys.argv[1:3]), W + "/mpl"
    run(sys.executable, "-c", "import matplotlib.font_manager")  # makes its cache, which a full disk would refuse
    cases = [Case(row, folder) for row in CASES if row[0] not in absent]
    tasks = [(case, task, ()) for case in cases for task in (case.good, case.full)]
    tasks += [(case, case.hostile, (path, form)) for case in cases for path in case.reads for form in HOSTILE]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [(case, pool.submit(lambda f, a: list(f(*a)), task, arguments)) for case, task, arguments in tasks]
        for case, task in started:
            for name, why in task.result():
                verdict(f"{case.name}: {name}", why)
    finish()


if __name__ == "__main__":
    main()
