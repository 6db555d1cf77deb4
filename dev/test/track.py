#!/usr/bin/env python3
"""scripts/track.py with stand-ins for the trackers (dev/test/trackers/), which record their calls.

    python3 dev/test/track.py        from the repository's root

dev/results/check_track.txt has a run with the trackers themselves.
"""
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from verdicts import ROOT, equal, finish, not_refused, read, verdict, write

SCRIPT, TRACKERS = (os.path.join(ROOT, *path) for path in (("scripts", "track.py"), ("dev", "test", "trackers")))
sys.path.append(TRACKERS)
import record  # noqa: E402

SETTINGS = {"model": "d12", "lr": 0.001, "steps": 1000, "output": "out"}
CHANGED = {**SETTINGS, "lr": 0.01, "override": 1}
BATCH_NUMBERS = 200 * 4  # in a batch of lines, at most
KILLS = 6


def lines_of(first, last):
    for step in range(first, last + 1):
        yield {"step": step, "loss": 5 - step / 1000, "lr": 0.001, "grad_norm": None if step % 7 == 0 else 1.5, "ms": 3}
        if step % 50 == 0:
            yield {"step": step, "val_loss": 5.5 - step / 1000}
        if step % 50 == 3 and step > 50:  # after the lines of later steps
            yield {"step": step - 3, "checkpoint_ms": 100 + step}


class Case:
    """A run's directory in `folder`, and the calls recorded of a tracker."""

    def __init__(self, folder, tracker):
        self.tracker, self.out, self.record = tracker, folder + "/out", folder + "/record"
        os.makedirs(self.out)
        self.write([SETTINGS])

    def write(self, values, torn=""):
        """A whole log."""
        write(self.out + "/log.jsonl", "".join(json.dumps(v) + "\n" for v in values) + torn)

    def append(self, values):
        with open(self.out + "/log.jsonl", "a", encoding="utf-8") as f:
            f.write("".join(json.dumps(v) + "\n" for v in values))

    def start(self, *flags, trackers=TRACKERS, slow="0", fails=""):
        more = {"PYTHONPATH": trackers, "TRACK_RECORD": self.record, "TRACK_SLOW": slow, "TRACK_FAILS": fails}
        command = [sys.executable, "-S", SCRIPT, self.out, *(["--to", self.tracker] if self.tracker else []), *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env={**os.environ, **more}, text=True, **pipes)

    def run(self, *flags, **settings):
        process = self.start(*flags, **settings)
        out, error = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def calls(self, name):
        return record.calls(name, self.record)

    def why_not(self, last, more=0):
        """Why not all numbers up to step `last` are there once, in one run, but for `more` that are there again. Of
        equal ones a database keeps one; what is not finite is not sent."""
        found, seen = collections.Counter(), set()
        for c in self.calls("log"):
            for key, value in c["numbers"].items():
                one = (c["step"], key, value)
                found[one] += not (self.tracker == "mlflow" and (*one, c["at"]) in seen)
                seen.add((*one, c.get("at")))
        wanted = {(v["step"], k, x) for v in lines_of(1, last) for k, x in v.items() if k != "step" and x is not None}
        if set(found) != wanted:
            return f"{len(found)} numbers, not {len(wanted)}"
        if sum(found.values()) > len(found) + more:
            return f"{sum(found.values()) - len(found)} numbers too many"
        return "" if len({c["run"] for c in self.calls("log")}) == 1 else "several runs"


def check_log(tracker, folder):
    case = Case(folder, tracker)
    for name in ("loss.svg", "other.txt"):
        write(f"{case.out}/{name}", "picture")
    begun, cut = [SETTINGS, *lines_of(1, 420)], [SETTINGS, *lines_of(1, 430)]
    overridden = [SETTINGS, *lines_of(1, 500), CHANGED, *lines_of(501, 510)]
    for name, log, torn, last in [
        ("every number at its step, no torn line", begun, '{"step": 421, "lo', 420),
        ("what came since", [SETTINGS, *lines_of(1, 450)], "", 450),
        ("a log that a resume has cut back", cut, "", 450),
        ("... and its new lines", [SETTINGS, *lines_of(1, 500)], "", 500),
        # Resumed with --override 1, which writes the settings once more; then killed, and resumed before that.
        ("settings that a resume overrides", [*overridden, *lines_of(511, 520)], "", 520),
        ("... which is resumed once more", overridden, "", 520),
        ("... and goes on with those settings", [*overridden, *lines_of(511, 530)], "", 530),
    ]:
        case.write(log, torn)
        done = case.run("--project", "mine")
        verdict(f"{tracker}: {name}", done.stderr.strip() or case.why_not(last))
    equal(f"{tracker}: files", [os.path.basename(c["path"]) for c in case.calls("file")], ["loss.svg"])
    given = case.calls("params")[0]["params"] if tracker == "mlflow" else case.calls("init")[0]["config"]
    equal(f"{tracker}: settings", given, {k: str(v) if tracker == "mlflow" else v for k, v in SETTINGS.items()})
    notes = [c["text"] for c in case.calls("note")]
    verdict(f"{tracker}: notes", "" if "steps up to 450 are not sent again" in notes[0] else str(notes))
    # The same command with --overwrite 1: its first steps are those of another run.
    runs = {c["run"] for c in case.calls("log")}
    case.write([SETTINGS, *({**line, "ms": 4} for line in lines_of(1, 30))])
    done = case.run()
    sent = [c for c in case.calls("log") if c["run"] not in runs]
    steps, runs = ({c[key] for c in sent} for key in ("step", "run"))
    equal(f"{tracker}: a new training is a new run", (steps, len(runs)), (set(range(1, 31)), 1))
    verdict(f"{tracker}: and it says so", "" if "is of a new training" in done.stdout else done.stdout + done.stderr)


def check_kills(folder):
    case, rng, last, kills, pending = Case(folder, "wandb"), random.Random(11), 1500, 0, 0
    case.append(lines_of(1, last))
    while kills < KILLS and last < 6000:
        process = case.start(slow="0.0003")
        time.sleep(rng.uniform(0.03, 0.15))
        is_late = process.poll() is not None
        process.kill()
        process.communicate()
        if is_late:  # all is sent: let the log grow, so that there is something to be killed at
            case.append(lines_of(last + 1, last + 600))
            last += 600
            continue
        kills, state = kills + 1, case.out + "/track.json"
        pending += os.path.exists(state) and json.loads(read(state))["batch"] is not None
    why = case.run().stderr.strip() or case.why_not(last, more=pending * BATCH_NUMBERS)
    verdict(f"{kills} kills, {pending} in a batch", why or ("" if kills == KILLS else "too few"))


def check_follow(folder):
    case = Case(folder, "wandb")
    case.append(lines_of(1, 10))
    process, deadline = case.start("--follow"), time.monotonic() + 30

    def wait_for(count):
        while time.monotonic() < deadline and len(case.calls("log")) < count:
            time.sleep(0.05)

    wait_for(10)
    verdict("two of one run at once", not_refused(case.run(), ".*out: another track.py is sending its log"))
    case.append(lines_of(11, 20))
    wait_for(20)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    verdict("--follow sends what comes, and ends by Ctrl-C", error.strip() or case.why_not(20) or ("" if "up to step 20" in out else out))


def check_refusals(folder):
    case, empty = Case(folder, "wandb"), folder + "/none"
    case.append(lines_of(1, 3))
    os.mkdir(empty)
    done = case.run(trackers=empty)
    verdict("a tracker that is not installed", not_refused(done, "the Python package 'wandb' is missing; install it"))
    for call, status in (("init", 2), ("log", 1)):
        why = not_refused(case.run(fails=call), "wandb: RuntimeError: no API key configured log in first", status)
        verdict(f"a tracker that fails: {call}", why)
    os.remove(case.out + "/track.json")
    case.tracker = None
    verdict("no tracker at all", not_refused(case.run(trackers=empty), "no tracker is installed"))
    done = case.run()
    verdict("the first that is installed", "" if "3 lines sent to wandb" in done.stdout else done.stderr)
    done = case.run("--to", "mlflow")
    verdict("another tracker than before", not_refused(done, ".*the run is in tracker wandb, not mlflow"))


with tempfile.TemporaryDirectory() as folder:
    for tracker in ("wandb", "mlflow"):
        check_log(tracker, f"{folder}/{tracker}")
    check_kills(folder + "/kills")
    check_follow(folder + "/follow")
    check_refusals(folder + "/refusals")
finish()
