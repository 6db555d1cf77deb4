#!/usr/bin/env python3
"""Planted faults: does a test fail for each of the one-line faults in dev/mutants.txt?

    dev/mutants.py [--only NAME] [--minutes N] build and test each fault in a copy of the sources, as many at a time as there
                                               are CPUs (--jobs N: N at a time); begin none after N minutes
    dev/mutants.py --check                     see, in less than a second, that the list still fits the sources
    dev/mutants.py --list                      names, files, tests

A fault survives if one of its tests does not detect it: the tests have a hole. The unchanged sources must pass the same
tests first, so that a test that always fails kills nothing. A fault that does not compile is an error in the list. A test
is stopped at its first line that begins with FAIL. A test that takes ten times as long as without the fault, and at least
a minute, has detected it too.

An entry of the list, after an empty line:

    NAME  what is wrong
    FILE
    -old line
    +new line                       without it the old line is deleted
    : TEST                          a key of TESTS below; if there are several, each must fail

Lines that begin with a space, before or after, are context to locate an old line that is not unique. Spaces at the ends
of lines do not count. Builds use -O1, which takes half the time.

Exit status: 0; 1 if a fault survived; 2 if the list, the command line or the sources are wrong.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIST = os.path.join("dev", "mutants.txt")
LEAST = 30
MAKE = ["make", "OPT=-O1 -march=native"]
SHORTEST, FACTOR, LONGEST_BUILD = 60, 10, 900  # limits in seconds; FACTOR: times the time without a fault
LARGEST_LOG = 64 << 20  # bytes; a program that writes more is in a loop

DATA = ["build/test_corpus/builtin/train.bin"]
# What is built and what is run. "ops OP", "grad OP" and so on: one op of the harness. "equal GROUP", "refuse GROUP": a group of
# the rows of equal.txt or refuse.txt.
TESTS = {
    "ops": (["build/ops"], ["build/ops", "test"]),
    "grad": (["build/ops_double"], ["build/ops_double", "grad"]),
    "ops_80": (["build/emulated/bf16/ops_80"], ["build/emulated/bf16/ops_80", "test"]),
    "ops_90a": (["build/emulated/bf16/ops_90a"], ["build/emulated/bf16/ops_90a", "test"]),
    "graph": (["build/emulated/bf16/train_bert", "build/emulated/bf16/finetune_bert"] + DATA, [sys.executable, "dev/test/equal.py", "build/emulated/bf16/train_bert", "graph"]),
    "text": (["build/test_text", "build/builtin_corpus"] + DATA, ["bash", "dev/test/text.sh", "build/test_text"]),
    "base": (["build/test_base"], ["build/test_base"]),
    "data": (["build/test_data"] + DATA, ["build/test_data"]),
    "world": (["build/test_world"], ["build/test_world"]),
    "bpe": (["build/test_bpe"], ["build/test_bpe"]),
    "llmc_files": (["build/profile_page.inc", "build/test_llmc_files"], ["build/test_llmc_files"]),
    "examples": (["build/profile_page.inc", "build/test_examples"], ["build/test_examples"]),
    "squad": (["build/profile_page.inc", "build/test_squad"], ["build/test_squad"]),
    "run": (["build/test_run"] + DATA, ["build/test_run"]),
    "order": (["build/test_order"], ["build/test_order"]),
    "gpt2": (["build/test_gpt2"], ["build/test_gpt2"]),
    "gpt2_double": (["build/test_gpt2_double"], ["build/test_gpt2_double"]),
    "bert": (["build/test_bert"], ["build/test_bert"]),
    "bert_double": (["build/test_bert_double"], ["build/test_bert_double"]),
    "dlrm": (["build/test_dlrm"], ["build/test_dlrm"]),
    "ncf": (["build/test_ncf"], ["build/test_ncf"]),
    "recsys": (["build/train_dlrm", "build/train_ncf"] + DATA, ["bash", "dev/recsys/trainer.sh", "build/train_dlrm", "build/train_ncf"]),
    "tokenizer_files": (["train_gpt2", "use_gpt2", "train_bert", "use_bert", "finetune_bert"] + DATA, ["bash", "dev/test/tokenizer_files.sh", "./train_gpt2", "./train_bert"]),
    "choices": (["build/profile_page.inc", "build/test_choices"], ["build/test_choices"]),
    "hub": (["train_gpt2", "use_gpt2", "train_bert", "use_bert", "finetune_bert"] + DATA, ["bash", "dev/test/hub.sh", "./train_gpt2", "./train_bert"]),
    "gguf": (["train_gpt2", "train_bert"] + DATA, ["bash", "dev/test/gguf.sh", "./train_gpt2", "./train_bert"]),
    "cli": (["train_gpt2", "use_gpt2"] + DATA, ["bash", "dev/test/cli.sh", "./train_gpt2"]),
    "explain": (["train_gpt2", "use_gpt2", "train_bert", "use_bert", "data/builtin/bert/train.bin"] + DATA, ["python3", "dev/test/explain.py", "./train_gpt2", "./train_bert"]),
    "chat": (["train_gpt2", "use_gpt2"] + DATA, [sys.executable, "dev/test/chat.py", "./train_gpt2"]),
    "cli_bert": (["train_bert", "use_bert"] + DATA, ["bash", "dev/test/cli_bert.sh", "./train_bert"]),
    "ladder": (["build/profile_page.inc"], ["bash", "dev/test/ladder.sh"]),
    "exercises": (["build/profile_page.inc"], ["bash", "dev/test/exercises.sh"]),
    "one_file": (["train_gpt2"] + DATA, ["bash", "dev/test/one_file.sh", "./train_gpt2"]),
    "rooms": (["train_gpt2"] + DATA, ["bash", "dev/test/rooms.sh", "./train_gpt2"]),
    "scripts": (["train_gpt2", "train_bert"] + DATA, ["bash", "-c", '"${PYTHON:-python3}" dev/test/scripts.py ./train_gpt2 ./train_bert']),
    "sweep": (["train_gpt2"] + DATA, ["bash", "dev/test/sweep.sh", "./train_gpt2"]),
    "exam": (["train_bert", "use_bert", "data/builtin/bert/train.bin"] + DATA, ["bash", "dev/test/exam.sh", "./train_bert"]),
    "model_dir": (["train_gpt2", "use_gpt2", "train_bert", "use_bert", "finetune_bert"] + DATA, ["bash", "dev/test/model_dir.sh", "./train_gpt2", "./train_bert"]),
    "flags": (["train_gpt2"] + DATA, ["bash", "dev/test/flags.sh", "./train_gpt2"]),
    "tasks": (["finetune_bert", "train_bert"] + DATA, ["bash", "dev/test/tasks.sh", "./finetune_bert"]),
    "resume": (["train_gpt2", "use_gpt2", "train_bert"] + DATA, ["bash", "dev/test/resume.sh", "./train_gpt2"]),
    "fp8": (["train_gpt2"] + DATA, ["bash", "dev/test/fp8.sh", "./train_gpt2"]),
    "docs": (["train_gpt2", "use_gpt2", "train_bert", "use_bert", "finetune_bert", "build/ops", "data/builtin/bert/train.bin"], ["bash", "dev/test/docs.sh", "build"]),
    "ranks": (["train_gpt2", "use_gpt2"] + DATA, ["bash", "dev/test/ranks.sh", "./train_gpt2"]),
    "late": (["train_gpt2", "build/late/train_gpt2"] + DATA, [sys.executable, "dev/test/equal.py", "./train_gpt2", "late"]),
    "late_bert": (["train_bert", "build/late/train_bert"] + DATA, [sys.executable, "dev/test/equal.py", "./train_bert", "late"]),
    "equal": (["train_gpt2"] + DATA, [sys.executable, "dev/test/equal.py", "./train_gpt2"]),
    "equal_bert": (["train_bert", "finetune_bert"] + DATA, [sys.executable, "dev/test/equal.py", "./train_bert"]),
    "refuse": (["train_gpt2", "use_gpt2"] + DATA, [sys.executable, "dev/test/refuse.py", "./train_gpt2"]),
    "refuse_bert": (["train_bert", "use_bert", "finetune_bert"] + DATA, [sys.executable, "dev/test/refuse.py", "./train_bert"]),
}
OPS = ("ops", "grad", "ops_80", "ops_90a", "equal", "equal_bert", "refuse", "refuse_bert")  # tests that take a name


class ListError(Exception):
    """An error in the list or the sources, as one line."""


# ---------------------------------------------------------------------------------------------------------
# The list


class Mutant:
    def __init__(self, line):
        self.line = line  # line of the list where the entry begins
        self.name = self.title = self.path = ""
        self.context, self.tests = [], []  # context: (mark, text) in the order of the file

    def of(self, mark):
        return [text for kind, text in self.context if kind == mark]

    def fail(self, what):
        raise ListError(f"{LIST}:{self.line}: {self.name}: {what}")

    def check_form(self):
        old, new = self.of("-"), self.of("+")
        if not re.fullmatch(r"[a-z0-9-]+", self.name) or not self.title:
            self.fail("must begin with a name of small letters, digits and hyphens, two spaces, and what is wrong")
        if len(old) != 1 or len(new) > 1:
            self.fail("must have one line that begins with '-', and at most one with '+'")
        if new == old:
            self.fail("the new line is the old one")
        if not self.tests:
            self.fail("names no test")
        for test in self.tests:
            name, *op = test.split()
            if name not in TESTS or len(op) != (name in OPS):
                self.fail(f"there is no test called '{test}'; there are: {', '.join(t + ' NAME' * (t in OPS) for t in TESTS)}")

    def applied(self, root):
        """The text of the file with the fault."""
        try:
            with open(os.path.join(root, self.path), encoding="utf-8") as f:
                lines = f.read().split("\n")
        except OSError as e:
            self.fail(f"{self.path}: {e.strerror}")
        there = [text for mark, text in self.context if mark != "+"]
        stripped = [line.strip() for line in lines]
        places = [i for i in range(len(lines)) if stripped[i : i + len(there)] == there]
        if len(places) != 1:
            self.fail(f"{self.path}: has the old text {len(places)} times, not once: {self.of('-')[0]}")
        at = places[0] + [mark for mark, _ in self.context if mark != "+"].index("-")
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at : at + 1] = [indent + text for text in self.of("+")]
        return "\n".join(lines)


def read_list():
    with open(os.path.join(ROOT, LIST), encoding="utf-8") as f:
        lines = f.read().split("\n")
    mutants, current = [], None
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            continue
        if not line.strip():
            current = None
        elif current is None:
            current = Mutant(number)
            current.name, _, current.title = line.partition("  ")
            mutants.append(current)
        elif not current.path:
            current.path = line.strip()
        elif line[0] in " -+":
            current.context.append((line[0], line[1:].strip()))
        elif line[0] == ":":
            current.tests.append(line[1:].strip())
        else:
            raise ListError(f"{LIST}:{number}: begins with none of '-', '+', ':' and a space")
    names = [m.name for m in mutants]
    for m in mutants:
        m.check_form()
        if names.count(m.name) > 1:
            m.fail("there are two of this name")
    if len(mutants) < LEAST:
        raise ListError(f"{LIST}: holds {len(mutants)} faults, fewer than {LEAST}")
    return mutants


# ---------------------------------------------------------------------------------------------------------
# Processes


class Processes:
    """The running commands, each in its own process group."""

    def __init__(self):
        self.lock, self.running, self.stopped = threading.Lock(), set(), False

    def end(self, process):
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass
            try:
                process.wait(patience)
                if number == signal.SIGTERM:
                    continue  # the rest of the group may still exist
            except subprocess.TimeoutExpired:
                pass

    def stop_all(self):
        with self.lock:
            self.stopped = True
            running = list(self.running)
        for process in running:
            self.end(process)

    def run(self, command, folder, log, limit, watch):
        """The exit status of a command; "FAIL" if `watch` is set and it printed such a line, "time" if it did not end in time or
        printed too much."""
        environment = dict(os.environ, OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0", TMPDIR=os.path.join(folder, "tmp"))
        python = os.path.join(ROOT, "build", "venv", "bin", "python")
        if os.path.exists(python):
            environment.setdefault("PYTHON", python)  # it has the packages that some tests need
        with open(log, "wb") as out:
            with self.lock:
                if self.stopped:
                    raise KeyboardInterrupt
                process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                           env=environment, start_new_session=True)  # fmt: skip
                self.running.add(process)
        try:
            began = time.monotonic()
            while process.poll() is None:
                time.sleep(0.2)
                if watch and first_failure(log):
                    return "FAIL"
                if time.monotonic() - began > limit or os.path.getsize(log) > LARGEST_LOG:
                    return "time"
            return process.returncode
        finally:
            self.end(process)
            with self.lock:
                self.running.discard(process)


def first_failure(log):
    with open(log, encoding="utf-8", errors="replace") as f:
        for line in f:
            if line.startswith("FAIL"):
                return line.strip()
    return ""


def evidence_of(status, log):
    ended = "did not end in time" if status == "time" else f"exit status {status}"
    return first_failure(log) or f"{ended}: {last_line(log)}"


def last_line(log):
    with open(log, encoding="utf-8", errors="replace") as f:
        lines = [line.strip() for line in f if line.strip()]
    return lines[-1] if lines else "no output"


# ---------------------------------------------------------------------------------------------------------
# Copies of the sources, their tests


def copy_sources(folder):
    """Tracked files and untracked ones that git does not ignore: nothing that make writes."""
    listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    if listing.returncode != 0:
        raise ListError(f"git ls-files: {listing.stderr.decode().strip()}; the sources must be in a git repository")
    for name in listing.stdout.decode().split("\0"):
        source, target = os.path.join(ROOT, name), os.path.join(folder, name)
        if name and os.path.isfile(source):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy2(source, target)
    os.makedirs(os.path.join(folder, "tmp"))


def command_of(test):
    name, *op = test.split()
    targets, command = TESTS[name]
    return targets, command + op


class Runner:
    def __init__(self, work, jobs, end):
        self.work, self.base = work, os.path.join(work, "base")
        self.jobs, self.end = jobs, end
        self.processes, self.limits = Processes(), {}

    def build(self, folder, targets):
        """The error of the build, or nothing."""
        log = os.path.join(folder, "tmp", "build.log")
        status = self.processes.run(MAKE + targets, folder, log, LONGEST_BUILD, False)
        if status == "time":
            return f"the build did not end within {LONGEST_BUILD} s"
        return first_error(log) if status != 0 else ""

    def begin(self, tests):
        """Build what all tests need without a fault."""
        copy_sources(self.base)
        for test in tests:
            wrong = self.build(self.base, [f"-j{self.jobs}"] + command_of(test)[0])
            if wrong:
                raise ListError(f"the unchanged sources do not build: {wrong}")

    def try_unchanged(self, test):
        """Run a test in a copy of the unchanged sources, which must pass."""
        folder, began = os.path.join(self.work, "unchanged_" + test), time.monotonic()
        log = os.path.join(folder, "tmp", "test.log")
        shutil.copytree(self.base, folder, symlinks=True)
        status = self.processes.run(command_of(test)[1], folder, log, 3600, True)
        if status != 0:
            raise ListError(f"the unchanged sources fail '{test}': {evidence_of(status, log)}")
        seconds = time.monotonic() - began
        shutil.rmtree(folder, ignore_errors=True)
        self.limits[test] = SHORTEST + FACTOR * seconds
        print(f"{'passes':9} {'unchanged':32} {test:16} {seconds:4.0f} s", flush=True)

    def try_one(self, mutant):
        """The result for the fault: killed, SURVIVED, ERROR or skip; the deciding tests, seconds, and the evidence."""
        folder, began = os.path.join(self.work, mutant.name), time.monotonic()
        if began > self.end:
            return "skip", ", ".join(mutant.tests), 0, "no time was left"
        shutil.copytree(self.base, folder, symlinks=True)
        log, blind, evidence = os.path.join(folder, "tmp", "test.log"), [], ""
        try:
            with open(os.path.join(folder, mutant.path), "w", encoding="utf-8") as f:
                f.write(mutant.applied(self.base))
            for test in mutant.tests:
                targets, command = command_of(test)
                wrong = self.build(folder, targets)
                if wrong:
                    return "ERROR", test, time.monotonic() - began, f"does not compile: {wrong}"
                status = self.processes.run(command, folder, log, self.limits[test], True)
                if status == 0:
                    blind.append(test)
                else:
                    evidence = evidence or evidence_of(status, log)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if blind:
            return "SURVIVED", ", ".join(blind), time.monotonic() - began, mutant.title
        return "killed", ", ".join(mutant.tests), time.monotonic() - began, evidence


def first_error(log):
    with open(log, encoding="utf-8", errors="replace") as f:
        lines = [line.strip() for line in f]
    return next((line for line in lines if " error: " in line or "***" in line), last_line(log))


def run_all(mutants, jobs, minutes):
    results, tests = [], sorted({test for m in mutants for test in m.tests})
    began, work = time.monotonic(), tempfile.mkdtemp(prefix="mutants.")
    runner = Runner(work, jobs, began + 60 * minutes)
    try:
        runner.begin(tests)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            waiting = {}
            try:
                waiting = {pool.submit(runner.try_unchanged, test): None for test in tests}
                for done in concurrent.futures.as_completed(waiting):
                    done.result()
                waiting = {pool.submit(runner.try_one, m): m for m in mutants}
                for done in concurrent.futures.as_completed(waiting):
                    result, tests, seconds, evidence = done.result()
                    results.append(result)
                    print(f"{result:9} {waiting[done].name:32} {tests:16} {seconds:4.0f} s  {evidence}", flush=True)
            except BaseException:
                for future in waiting:
                    future.cancel()
                runner.processes.stop_all()
                raise
    finally:
        runner.processes.stop_all()
        shutil.rmtree(work, ignore_errors=True)
    killed, skipped = results.count("killed"), results.count("skip")
    print(f"{time.monotonic() - began:.0f} s with {jobs} at a time")
    print(f"{killed} passed, {len(results) - killed - skipped} failed, {skipped} skipped")
    return len(results) - killed - skipped


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="The list is dev/mutants.txt.")
    parser.add_argument("--only", metavar="NAME", action="append", help="only this fault; may be repeated")
    parser.add_argument("--jobs", metavar="N", type=int, default=len(os.sched_getaffinity(0)), help="faults at a time (default: the CPUs)")
    parser.add_argument("--minutes", metavar="N", type=float, default=1e9, help="begin no fault after N minutes")
    parser.add_argument("--check", action="store_true", help="only check that the list fits the sources")
    parser.add_argument("--list", action="store_true", help="print the list")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        mutants = read_list()
        chosen = [m for m in mutants if not options.only or m.name in options.only]
        for name in options.only or []:
            if name not in [m.name for m in mutants]:
                parser.error(f"--only {name}: no fault is called so; --list names them")
        for m in chosen:
            m.applied(ROOT)
        if options.list:
            for m in chosen:
                print(f"{m.name:32} {m.path:28} {', '.join(m.tests):24} {m.title}")
        if options.check or options.list:
            print(f"{len(chosen)} faults fit the sources")
            return 0
        return 1 if run_all(chosen, options.jobs, options.minutes) else 0
    except ListError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
