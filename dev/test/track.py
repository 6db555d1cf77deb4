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

from verdicts import ROOT, equal, failure, finish, not_refused, read, run, verdict, write

TRACKERS = os.path.join(ROOT, "dev", "test", "trackers")
SETTINGS = {"model": "d12", "lr": 0.001, "steps": 1000, "output": "out"}
BATCH_NUMBERS = 200 * 4  # in a batch of lines, at most


def lines_of(first, last, ms=3):
    for step in range(first, last + 1):
        yield {"step": step, "loss": 5 - step / 1000, "grad_norm": None if step % 7 == 0 else 1.5, "ms": ms}
        if step % 50 == 0:
            yield {"step": step, "val_loss": 5.5 - step / 1000}
        if step % 50 == 3 and step > 50:  # after the lines of later steps
            yield {"step": step - 3, "checkpoint_ms": 100 + step}


class Case:
    """A run's directory in `folder`, and the calls recorded of a tracker."""

    def __init__(self, folder, tracker, last=0):
        self.tracker, self.out, self.record = tracker, folder + "/out", folder + "/record"
        self.put(SETTINGS, *lines_of(1, last))

    def put(self, *values):
        write(self.out + "/log.jsonl", "".join(json.dumps(v) + "\n" for v in values) + '{"step": 999, "lo')  # torn

    def run(self, *flags, start=run, trackers=TRACKERS, **settings):
        command = [sys.executable, "-S", ROOT + "/scripts/track.py", self.out, "--to", self.tracker, *flags]
        return start(*command, env={**os.environ, "PYTHONPATH": trackers, "TRACK_RECORD": self.record, **settings})

    def sent(self):
        """{run: {(step, name, value): how often}}, settings and files, as they were sent."""
        runs, settings, files, run = collections.defaultdict(collections.Counter), {}, [], None
        for name, arguments, values in map(json.loads, read(self.record).splitlines()):
            if name == "init":
                run, settings = values["id"], settings or values["config"]
            elif name == "log":
                runs[run].update((arguments[0]["step"], *item) for item in arguments[0].items() if item[0] != "step")
            elif name == "log_batch":
                runs[arguments[0]].update(map(tuple, values.get("metrics", ())))
                settings = settings or dict(values["params"])
            elif name in ("save", "log_artifact"):
                files.append(os.path.basename(arguments[name == "log_artifact"]))
        return runs, settings, files

    def why_not(self, done, *trainings, more=0):
        """Why not all finite numbers of each training are there once, in its own run; `more` may be there again."""
        runs = list(self.sent()[0].values())
        wanted = [{(v["step"], k, x) for v in lines for k, x in v.items() if k != "step" and x} for lines in trainings]
        twice = sum(sum(run.values()) - len(run) for run in runs)
        is_right = [set(run) for run in runs] == wanted and twice <= more
        found = f"{[*map(len, runs)]} numbers, {twice} of them twice, not {[*map(len, wanted)]}"
        return failure(done) or ("" if is_right else found)


def check_log(tracker, folder):
    case, changed = Case(folder, tracker), {**SETTINGS, "lr": 0.01, "override": 1}
    for name in ("loss.svg", "other.txt"):
        write(f"{case.out}/{name}", "picture")
    for name, lines, last in [
        ("every number at its step", lines_of(1, 420), 420),
        ("a log that a resume has cut back", lines_of(1, 410), 420),
        ("... and its new lines, with other settings", [*lines_of(1, 450), changed, *lines_of(451, 500)], 500),
    ]:
        case.put(SETTINGS, *lines)
        verdict(f"{tracker}: {name}", case.why_not(case.run("--project", "mine"), lines_of(1, last)))
    _, settings, files = case.sent()
    equal(f"{tracker}: files", files, ["loss.svg"])
    equal(f"{tracker}: settings", {k: str(v) for k, v in settings.items()}, {k: str(v) for k, v in SETTINGS.items()})
    # The same command with --overwrite 1: its first steps are those of another run.
    case.put(SETTINGS, *lines_of(1, 30, ms=4))
    why = case.why_not(case.run(), lines_of(1, 500), lines_of(1, 30, ms=4))
    verdict(f"{tracker}: a new training is a new run", why)


def wait_for(case, step):
    deadline = time.monotonic() + 60
    while not os.path.exists(case.record) or f'"step": {step},' not in read(case.record):
        assert time.monotonic() < deadline, f"step {step} has not come"
        time.sleep(0.05)


def check_follow(case):
    """What comes is sent, also where a resumed run cuts the log back and goes on."""
    process = case.run("--follow", start=lambda *words, env: subprocess.Popen(words, env=env))
    wait_for(case, 20)
    verdict("two of one run at once", not_refused(case.run(), ".*out: another track.py is sending its log"))
    case.put(SETTINGS, *lines_of(1, 15))
    time.sleep(3)
    case.put(SETTINGS, *lines_of(1, 30))
    wait_for(case, 30)
    process.send_signal(signal.SIGINT)
    equal("--follow ends by Ctrl-C", process.wait(60), 0)
    verdict("... and has sent what came", case.why_not(case.run(), lines_of(1, 30)))


def check_refusals(case):
    done = case.run(trackers="")
    verdict("a tracker that is not installed", not_refused(done, "the Python package 'wandb' is missing; install it"))
    failed = case.run(TRACK_FAILS="log")
    verdict("a tracker that fails", not_refused(failed, "wandb: RuntimeError: no API key configured log in first", 1))
    case.tracker = "mlflow"
    verdict("another tracker than before", not_refused(case.run(), ".*the run is in tracker wandb, not mlflow"))


with tempfile.TemporaryDirectory() as folder:
    for tracker in ("wandb", "mlflow"):
        check_log(tracker, f"{folder}/{tracker}")
    case = Case(folder + "/kill", "wandb", 1000)
    equal("it is killed", case.run(TRACK_DIES="500").returncode, -signal.SIGKILL)
    verdict("... and sends what is left", case.why_not(case.run(), lines_of(1, 1000), more=BATCH_NUMBERS))
    check_follow(Case(folder + "/follow", "wandb", 20))
    check_refusals(Case(folder + "/refusals", "wandb", 3))
finish()
