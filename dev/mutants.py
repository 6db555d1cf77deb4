#!/usr/bin/env python3
"""Planted faults: does a test fail for each of the one-line faults in dev/mutants.txt?

    dev/mutants.py [--only NAME]... [--jobs N]  build and test each fault in a copy of the sources, N at a time (as
                                                many as there are CPUs)
    dev/mutants.py --check                      see, in less than a second, that the list still fits the sources
    dev/mutants.py --list                       names, files, tests

A fault survives if one of its tests does not detect it: the tests have a hole. The unchanged sources must pass the
same tests first, so that a test that always fails kills nothing. A fault that does not compile is an error in the
list. A test is stopped at its first line that begins with FAIL. A test that takes ten times as long as without the
fault, and at least a minute, has detected it too.

An entry of the list, after an empty line:

    NAME  what is wrong
    FILE : TEST                     a suite of dev/test/suites.txt, with more words for its command, such as "ops gelu",
                                    or ops_80 or ops_90a (kernels on the CPU); several, with ", " between, must all fail
    -old line
    +new line                       without it the old line is deleted

Lines that begin with a space, before or after, are context to locate an old line that is not unique. Spaces at the ends
of lines do not count. Builds use -O1, which takes half the time.

Exit status: 0; 1 if a fault survived; 2 if the list, the command line or the sources are wrong.
"""

import argparse
import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIST = os.path.join("dev", "mutants.txt")
MAKE = ["make", "OPT=-O1 -march=native"]
VENV = os.path.join(ROOT, "build", "venv", "bin", "python")  # it has the packages that some tests need
PYTHON = os.environ.get("PYTHON") or (VENV if os.path.exists(VENV) else sys.executable)
SHORTEST, FACTOR, LONGEST_BUILD = 60, 10, 900  # limits in seconds; FACTOR: times the time without a fault
LARGEST_LOG = 64 << 20  # bytes; a program that writes more is in a loop

E = "build/emulated/bf16"
ALSO = {
    "+corpus": ["build/test_corpus/builtin/train.bin"],
    "+builtin": ["data/builtin/bert/train.bin"],
    "+apps": ["use_gpt2", "use_bert", "finetune_bert"],
}
VARIABLES = {"T": ".", "B": "build", "E": E, "OPS": "build/ops", "OP": "", "PYTHON": PYTHON}


def read_suites():
    """What is built for a suite of dev/test/suites.txt, as dev/test/run.sh does it, and the command that runs it."""
    suites = {f"ops_{arch}": ([f"{E}/ops_{arch}"], [f"{E}/ops_{arch}", "test"]) for arch in ("80", "90a")}
    with open(os.path.join(ROOT, "dev", "test", "suites.txt"), encoding="utf-8") as f:
        rows = [string.Template(line).safe_substitute(VARIABLES).split() for line in f if line[0] not in "#\n"]
    for name, _, _, needs, *command in rows:
        more = [ALSO.get(need, [need[1:]]) for need in needs.split(",") if need.startswith("+")]
        programs = [word for word in command if re.match(r"build/|\./(train|use|finetune)_", word) and word != E]
        if any(word.startswith(("./", E)) for word in programs):
            more.append(ALSO["+corpus"])
        suites[name] = programs + sum(more, []), command
    return suites


def suite_of(test):
    """Targets and command of "SUITE WORD...": "ops gelu" is one op; "equal ranks" is the suite ranks_equal."""
    name, *words = test.split()
    if words and f"{words[0]}_{name}" in SUITES:
        return SUITES[f"{words[0]}_{name}"]
    targets, command = SUITES.get(name, (None, None))
    return command and (targets, command + words)


SUITES = read_suites()


class ListError(Exception):
    """An error in the list or the sources, as one line."""


# ---------------------------------------------------------------------------------------------------------
# The list


class Mutant:
    def __init__(self, entry):
        first, *rest = entry.split("\n")
        self.name, _, self.title = first.partition("  ")
        self.path, _, tests = rest.pop(0).partition(" : ") if rest else ("", "", "")
        self.tests = tests.split(", ") if tests else []
        self.context = [(line[0], line[1:].strip()) for line in rest]  # in the order of the file
        old, new = ([text for kind, text in self.context if kind == mark] for mark in "-+")
        self.check(re.fullmatch(r"[a-z0-9-]+", self.name) and self.title, "begins with no name of a-z0-9- and a title")
        self.check({mark for mark, _ in self.context} <= set(" -+"), "a line begins with none of '-', '+', ' '")
        self.check(len(old) == 1 and len(new) < 2, "must have one line that begins with '-', and at most one with '+'")
        self.check(new != old, "the new line is the old one")
        self.check(self.tests, "names no test")
        for test in self.tests:
            self.check(suite_of(test), f"there is no suite called '{test}'; there are: {', '.join(SUITES)}")
        self.old, self.new = old[0], new

    def check(self, good, what):
        if not good:
            raise ListError(f"{LIST}: {self.name}: {what}")

    def applied(self, root):
        """The text of the file with the fault."""
        path = os.path.join(root, self.path)
        self.check(os.path.isfile(path), f"there is no file {self.path}")
        with open(path, encoding="utf-8") as f:
            lines = f.read().split("\n")
        there = [text for mark, text in self.context if mark != "+"]
        stripped = [line.strip() for line in lines]
        places = [i for i in range(len(lines)) if stripped[i : i + len(there)] == there]
        self.check(len(places) == 1, f"{self.path}: has the old text {len(places)} times, not once: {self.old}")
        at = places[0] + [mark for mark, _ in self.context if mark != "+"].index("-")
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at : at + 1] = [indent + text for text in self.new]
        return "\n".join(lines)


def read_list():
    with open(os.path.join(ROOT, LIST), encoding="utf-8") as f:
        text = re.sub(r"^#.*\n", "", f.read(), flags=re.M)
    mutants = [Mutant(entry) for entry in re.split(r"\n\s*\n", text.strip())]
    names = [m.name for m in mutants]
    for m in mutants:
        m.check(names.count(m.name) == 1, "there are two of this name")
    return mutants


class Processes:
    """The running commands, each in its own process group."""

    def __init__(self):
        self.lock, self.running, self.stopped = threading.Lock(), set(), False

    def end(self, process):
        for number in (signal.SIGTERM, signal.SIGKILL):  # the second for what is left of its group
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(10)
        process.wait()

    def stop_all(self):
        with self.lock:
            self.stopped = True
            running = list(self.running)
        for process in running:
            self.end(process)

    def run(self, command, folder, log, limit, watch):
        """The exit status; "FAIL" if `watch` is set and such a line came; "time": it did not end or printed too much."""
        environment = dict(os.environ, OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0", PYTHON=PYTHON,
                           TMPDIR=os.path.join(folder, "tmp"))  # fmt: skip
        with open(log, "wb") as out, self.lock:
            if self.stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                       env=environment, start_new_session=True)  # fmt: skip
            self.running.add(process)
        try:
            began = time.monotonic()
            while process.poll() is None:
                time.sleep(0.2)
                if watch and first_line(log, "^FAIL"):
                    return "FAIL"
                if time.monotonic() - began > limit or os.path.getsize(log) > LARGEST_LOG:
                    return "time"
            return process.returncode
        finally:
            self.end(process)
            with self.lock:
                self.running.discard(process)


def first_line(log, pattern, otherwise=""):
    """The first line of a log that matches; otherwise `otherwise`, and the last line behind it."""
    with open(log, encoding="utf-8", errors="replace") as f:
        lines = [line.strip() for line in f if line.strip()] or ["no output"]
    return next((line for line in lines if re.search(pattern, line)), otherwise and otherwise + ": " + lines[-1])


def evidence_of(status, log):
    return first_line(log, "^FAIL", "did not end in time" if status == "time" else f"exit status {status}")


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


class Runner:
    def __init__(self, work, jobs):
        self.work, self.base, self.jobs = work, os.path.join(work, "base"), jobs
        self.processes, self.limits = Processes(), {}

    def build(self, folder, targets):
        """The error of the build, or nothing."""
        log = os.path.join(folder, "tmp", "build.log")
        status = self.processes.run(MAKE + targets, folder, log, LONGEST_BUILD, False)
        if status == "time":
            return f"the build did not end within {LONGEST_BUILD} s"
        return first_line(log, r" error: |\*\*\*", "the build failed") if status != 0 else ""

    def begin(self, tests):
        """Build what all tests need without a fault."""
        copy_sources(self.base)
        for test in tests:
            wrong = self.build(self.base, [f"-j{self.jobs}"] + suite_of(test)[0])
            if wrong:
                raise ListError(f"the unchanged sources do not build: {wrong}")

    def try_unchanged(self, test):
        """Run a test in a copy of the unchanged sources, which must pass."""
        folder, began = os.path.join(self.work, "unchanged_" + test), time.monotonic()
        log = os.path.join(folder, "tmp", "test.log")
        shutil.copytree(self.base, folder, symlinks=True)
        status = self.processes.run(suite_of(test)[1], folder, log, 3600, True)
        if status != 0:
            raise ListError(f"the unchanged sources fail '{test}': {evidence_of(status, log)}")
        seconds = time.monotonic() - began
        shutil.rmtree(folder, ignore_errors=True)
        self.limits[test] = SHORTEST + FACTOR * seconds
        print(f"{'passes':9} {'unchanged':32} {test:16} {seconds:4.0f} s", flush=True)

    def try_one(self, mutant):
        """The result for the fault: killed, SURVIVED or ERROR; the deciding tests, seconds, and the evidence."""
        folder, began = os.path.join(self.work, mutant.name), time.monotonic()
        shutil.copytree(self.base, folder, symlinks=True)
        log, blind, evidence = os.path.join(folder, "tmp", "test.log"), [], ""
        try:
            with open(os.path.join(folder, mutant.path), "w", encoding="utf-8") as f:
                f.write(mutant.applied(self.base))
            for test in mutant.tests:
                targets, command = suite_of(test)
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


def run_all(mutants, jobs):
    survived, began, work = 0, time.monotonic(), tempfile.mkdtemp(prefix="mutants.")
    runner, tests = Runner(work, jobs), sorted({test for m in mutants for test in m.tests})
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        runner.begin(tests)
        for done in concurrent.futures.as_completed([pool.submit(runner.try_unchanged, test) for test in tests]):
            done.result()
        waiting = {pool.submit(runner.try_one, m): m for m in mutants}
        for done in concurrent.futures.as_completed(waiting):
            result, tests, seconds, evidence = done.result()
            survived += result != "killed"
            print(f"{result:9} {waiting[done].name:32} {tests:16} {seconds:4.0f} s  {evidence}", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        runner.processes.stop_all()
        pool.shutdown()
        shutil.rmtree(work, ignore_errors=True)
    print(f"{time.monotonic() - began:.0f} s with {jobs} at a time")
    print(f"{len(mutants) - survived} passed, {survived} failed")
    return survived


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="The list is dev/mutants.txt.")
    parser.add_argument("--only", metavar="NAME", action="append", help="only this fault; may be repeated")
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", metavar="N", type=int, default=cpus, help="faults at a time (default: the CPUs)")
    parser.add_argument("--check", action="store_true", help="only check that the list fits the sources")
    parser.add_argument("--list", action="store_true", help="print the list")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        mutants = read_list()
        unknown = set(options.only or []) - {m.name for m in mutants}
        if unknown:
            parser.error(f"--only {min(unknown)}: no fault is called so; --list names them")
        chosen = [m for m in mutants if not options.only or m.name in options.only]
        for m in chosen:
            m.applied(ROOT)
            if options.list:
                print(f"{m.name:32} {m.path:28} {', '.join(m.tests):24} {m.title}")
        if options.check or options.list:
            print(f"{len(chosen)} faults fit the sources")
            return 0
        return 1 if run_all(chosen, options.jobs) else 0
    except ListError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
