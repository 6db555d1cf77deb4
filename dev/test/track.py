#!/usr/bin/env python3
"""scripts/track.py with stand-ins for the trackers (dev/test/trackers/), which record their calls.

    python3 dev/test/track.py        from the repository's root

dev/results/check_track.txt has a run with the trackers themselves.
"""
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from verdicts import ROOT, equal, finish, holds, not_refused, verdict, write

SCRIPT, TRACKERS = (os.path.join(ROOT, *path) for path in (("scripts", "track.py"), ("dev", "test", "trackers")))
sys.path.insert(0, TRACKERS)
import wandb  # noqa: E402

SETTINGS = {"model": "d12", "lr": 0.001, "steps": 1000, "output": "out"}
BATCH_NUMBERS = 200 * 4  # in a batch of lines, at most


def lines_of(first, last):
    for step in range(first, last + 1):
        yield {"step": step, "loss": 5 - step / 1000, "lr": 0.001, "grad_norm": None if step % 7 == 0 else 1.5, "ms": 3}
        if step % 50 == 0:
            yield {"step": step, "val_loss": 5.5 - step / 1000}
        if step % 50 == 3 and step > 50:  # after the lines of later steps
            yield {"step": step - 3, "checkpoint_ms": 100 + step}


class Case:
    """A run's directory in `folder`, and the calls recorded of a tracker."""

    def __init__(self, folder, tracker, last=0):
        self.tracker, self.out, self.record = tracker, folder + "/out", folder + "/record"
        os.makedirs(self.out)
        self.append([SETTINGS, *lines_of(1, last)])

    def append(self, values, mode="a"):
        with open(self.out + "/log.jsonl", mode, encoding="utf-8") as f:
            f.write("".join(json.dumps(v) + "\n" for v in values))

    def start(self, *flags, trackers=TRACKERS, slow="0", fails=""):
        more = {"PYTHONPATH": trackers, "TRACK_RECORD": self.record, "TRACK_SLOW": slow, "TRACK_FAILS": fails}
        if self.tracker and "--to" not in flags:
            flags = ("--to", self.tracker, *flags)
        command = [sys.executable, "-S", SCRIPT, self.out, *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env={**os.environ, **more}, text=True, **pipes)

    def run(self, *flags, **settings):
        process = self.start(*flags, **settings)
        out, error = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def calls(self, name):
        return wandb.calls(name, self.record)

    def wait_for(self, count):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(self.calls("log")) < count:
            time.sleep(0.05)

    def why_not(self, done, last, more=0):
        """Why not all finite numbers up to step `last` are there once, in one run; `more` may be there again."""
        found = collections.Counter((c["step"], *one) for c in self.calls("log") for one in c["numbers"].items())
        wanted = {(v["step"], k, x) for v in lines_of(1, last) for k, x in v.items() if k != "step" and x is not None}
        if done.stderr or set(found) != wanted:
            return done.stderr.strip() or f"{len(found)} numbers, not {len(wanted)}"
        if sum(found.values()) > len(found) + more:
            return f"{sum(found.values()) - len(found)} numbers too many"
        return "" if len({c["run"] for c in self.calls("log")}) == 1 else "several runs"


def check_log(tracker, folder):
    case, changed = Case(folder, tracker), {**SETTINGS, "lr": 0.01, "override": 1}
    for name in ("loss.svg", "other.txt"):
        write(f"{case.out}/{name}", "picture")
    for name, parts, last in [
        ("every number at its step", [(1, 420)], 420),
        ("a log that a resume has cut back", [(1, 410)], 420),
        ("... and its new lines", [(1, 500)], 500),
        # Resumed with --override 1, which writes the settings once more; then killed, and resumed before that.
        ("settings that a resume overrides", [(1, 500), changed, (501, 520)], 520),
        ("... which is resumed once more", [(1, 500), changed, (501, 510)], 520),
        ("... and goes on with those settings", [(1, 500), changed, (501, 530)], 530),
    ]:
        case.append([SETTINGS], "w")
        for part in parts:
            case.append([part] if part is changed else lines_of(*part))
        with open(case.out + "/log.jsonl", "a") as f:
            f.write('{"step": 999, "lo')  # a torn line
        verdict(f"{tracker}: {name}", case.why_not(case.run("--project", "mine"), last))
    equal(f"{tracker}: files", [os.path.basename(c["path"]) for c in case.calls("file")], ["loss.svg"])
    given = case.calls("params")[0]["params"] if tracker == "mlflow" else case.calls("init")[0]["config"]
    equal(f"{tracker}: settings", given, {k: str(v) if tracker == "mlflow" else v for k, v in SETTINGS.items()})
    # The same command with --overwrite 1: its first steps are those of another run.
    before = {c["run"] for c in case.calls("log")}
    case.append([SETTINGS, *({**line, "ms": 4} for line in lines_of(1, 30))], "w")
    done = case.run()
    sent = [c for c in case.calls("log") if c["run"] not in before]
    right = {c["step"] for c in sent} == {*range(1, 31)} and len({c["run"] for c in sent}) == 1
    holds(f"{tracker}: a new training is a new run", right and "is of a new training" in done.stdout, done.stdout, done)


def check_kill(folder):
    case = Case(folder, "wandb", 1000)
    process = case.start(slow="0.0003")
    case.wait_for(500)
    process.kill(), process.communicate()
    verdict("killed", case.why_not(case.run(), 1000, more=BATCH_NUMBERS))


def check_follow(folder):
    """What comes is sent, also where a resumed run cuts the log back and goes on."""
    case = Case(folder, "wandb", 10)
    process = case.start("--follow")
    case.wait_for(10)
    verdict("two of one run at once", not_refused(case.run(), ".*out: another track.py is sending its log"))
    case.append(lines_of(11, 20))
    case.wait_for(20)
    case.append([SETTINGS, *lines_of(1, 15)], "w")
    time.sleep(3)
    case.append(lines_of(16, 30))
    case.wait_for(30)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    why = case.why_not(subprocess.CompletedProcess([], process.returncode, out, error), 30)
    verdict("--follow sends what comes, and ends by Ctrl-C", why or ("" if "up to step 30" in out else out))


def check_refusals(folder):
    case, empty = Case(folder, "wandb", 3), folder + "/none"
    os.mkdir(empty)
    done = case.run(trackers=empty)
    verdict("a tracker that is not installed", not_refused(done, "the Python package 'wandb' is missing; install it"))
    for call, status in (("init", 2), ("log", 1)):
        why = not_refused(case.run(fails=call), "wandb: RuntimeError: no API key configured log in first", status)
        verdict(f"a tracker that fails: {call}", why)
    done = case.run("--to", "mlflow")
    verdict("another tracker than before", not_refused(done, ".*the run is in tracker wandb, not mlflow"))
    os.remove(case.out + "/track.json")
    case.tracker = None
    verdict("no tracker at all", not_refused(case.run(trackers=empty), "no tracker is installed"))
    done = case.run()
    holds("the first that is installed", "3 lines sent to wandb" in done.stdout, done.stderr)


with tempfile.TemporaryDirectory() as folder:
    for tracker in ("wandb", "mlflow"):
        check_log(tracker, f"{folder}/{tracker}")
    check_kill(folder + "/kill")
    check_follow(folder + "/follow")
    check_refusals(folder + "/refusals")
finish()
