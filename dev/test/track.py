#!/usr/bin/env python3
"""scripts/track.py with stand-ins for the trackers (dev/test/trackers/), which record their calls.

    python3 dev/test/track.py        from the repository's root

Every number once at its step, files, a log that grows, one that a resume has cut back, kills at random, and bad
input. dev/results/check_track.txt has a run with the trackers themselves. Ends with `N passed, N failed`.
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

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "scripts", "track.py")
TRACKERS = os.path.join(ROOT, "dev", "test", "trackers")
sys.path.append(TRACKERS)
import record  # noqa: E402
SETTINGS = {"model": "d12", "lr": 0.001, "steps": 1000, "output": "out"}
BATCH_LINES = 200
KILLS = 6
passed = failed = 0


def verdict(name, why):
    global passed, failed
    passed, failed = passed + (not why), failed + bool(why)
    print(f"FAIL {name}: {why}" if why else f"ok   {name}", flush=True)


def lines_of(first, last):
    for step in range(first, last + 1):
        yield {"step": step, "loss": 5 - step / 1000, "lr": 0.001, "grad_norm": None if step % 7 == 0 else 1.5, "ms": 3}
        if step % 50 == 0:
            yield {"step": step, "val_loss": 5.5 - step / 1000}
        if step % 50 == 3 and step > 50:  # after the lines of later steps
            yield {"step": step - 3, "checkpoint_ms": 100 + step}


def expected(last):
    """{(step, key): value}, without what is not finite."""
    return {(v["step"], k): x for v in lines_of(1, last) for k, x in v.items() if k != "step" and x is not None}


class Case:
    """A run's directory in `folder`, and the calls recorded of a tracker."""

    def __init__(self, folder, tracker):
        self.folder, self.tracker = folder, tracker
        self.out, self.record = os.path.join(folder, "out"), os.path.join(folder, "record")
        os.makedirs(self.out)
        self.write([SETTINGS])

    def write(self, values, mode="a"):
        with open(os.path.join(self.out, "log.jsonl"), mode) as f:
            f.write("".join(json.dumps(v) + "\n" for v in values))

    def command(self, *flags, trackers=TRACKERS, slow="0", fails=""):
        environment = {**os.environ, "PYTHONPATH": trackers, "TRACK_RECORD": self.record, "TRACK_SLOW": slow, "TRACK_FAILS": fails}
        command = [sys.executable, "-S", SCRIPT, self.out, *(["--to", self.tracker] if self.tracker else []), *flags]
        return {"args": command, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def run(self, *flags, **settings):
        return subprocess.run(**self.command(*flags, **settings))

    def calls(self, name):
        return record.calls(name, self.record)

    def counts(self):
        """{(step, key, value): times}; equal ones of a database once."""
        found = collections.Counter()
        seen = set()
        for c in self.calls("log"):
            for key, value in c["numbers"].items():
                one = (c["step"], key, value, c.get("at"))
                found[one[:3]] += not (self.tracker == "mlflow" and one in seen)
                seen.add(one)
        return found

    def why_not(self, last):
        """Why not all numbers up to step `last` are there once."""
        found, wanted = self.counts(), expected(last)
        if set(found) != {(*k, v) for k, v in wanted.items()}:
            return f"{len(found)} numbers, not {len(wanted)}"
        if len({c["run"] for c in self.calls("log")}) != 1:
            return "several runs"
        more = [k for k, n in found.items() if n > 1]
        return f"{len(more)} numbers more than once, {more[:2]}" if more else ""


def error_of(done, status, pattern):
    line = done.stderr.strip()
    if done.returncode != status or "\n" in line or not line.startswith("error: ") or pattern not in line:
        return f"status {done.returncode}, {line[-200:]!r} instead of {pattern!r}"
    return ""


def check_log(tracker, folder):
    case = Case(folder, tracker)
    case.write(lines_of(1, 420))
    with open(os.path.join(case.out, "log.jsonl"), "a") as f:
        f.write('{"step": 421, "lo')  # torn, or not complete yet
    for name in ("loss.svg", "other.txt"):
        with open(os.path.join(case.out, name), "w") as f:
            f.write("picture")
    done = case.run("--project", "mine")
    verdict(f"{tracker}: every number at its step", done.stderr.strip() or case.why_not(420))
    files = [os.path.basename(c["path"]) for c in case.calls("file")]
    verdict(f"{tracker}: files", "" if files == ["loss.svg"] else str(files))
    config = case.calls("params")[0]["params"] if tracker == "mlflow" else case.calls("init")[0]["config"]
    wanted = {k: str(v) for k, v in SETTINGS.items()} if tracker == "mlflow" else SETTINGS
    verdict(f"{tracker}: settings", "" if config == wanted else str(config))
    # The rest of the line, more steps, and one more number of a step that was sent.
    with open(os.path.join(case.out, "log.jsonl"), "r+") as f:
        text = f.read()
        f.seek(0)
        f.truncate()
        f.write(text[: text.rindex("\n") + 1])
    case.write(lines_of(421, 450))
    done = case.run()
    verdict(f"{tracker}: what came since", done.stderr.strip() or case.why_not(450))
    # A resume cuts the log back to step 430; 431 to 500 are trained again or anew.
    case.write([SETTINGS, *lines_of(1, 430)], "w")
    done = case.run()
    case.write(lines_of(431, 500))
    done = case.run() if done.returncode == 0 else done
    notes = case.calls("note")
    why = done.stderr.strip() or case.why_not(500)
    why = why or ("" if notes and "steps up to 450 are not sent again" in notes[0]["text"] else f"notes: {notes}")
    verdict(f"{tracker}: a log that was cut back", why)
    # Resumed with --override 1, which writes the settings once more; then killed, and resumed before that.
    changed = {**SETTINGS, "lr": 0.01, "override": 1}
    case.write([changed, *lines_of(501, 520)])
    done = case.run()
    case.write([SETTINGS, *lines_of(1, 500), changed, *lines_of(501, 510)], "w")
    done = case.run() if done.returncode == 0 else done
    notes = [c["text"] for c in case.calls("note") if "from step 501 on with other settings: lr 0.01 (before: 0.001)" in c["text"]]
    count = "".join(notes[-1:]).count("from step 501")
    why = done.stderr.strip() or case.why_not(520) or ("" if count == 1 else f"notes: {notes}")
    config = case.calls("change")[-1]["config"] if tracker == "wandb" else {**SETTINGS, "lr": 0.01}
    verdict(f"{tracker}: settings that a resumed run overrides", why or ("" if config == {**SETTINGS, "lr": 0.01} else str(config)))
    # The same command with --overwrite 1: its first steps are those of another run.
    runs = {c["run"] for c in case.calls("log")}
    case.write([SETTINGS, *({**line, "ms": 4} for line in lines_of(1, 30))], "w")
    done = case.run()
    sent = [c for c in case.calls("log") if c["run"] not in runs]
    why = done.stderr.strip() or ("" if {c["step"] for c in sent} == set(range(1, 31)) and len({c["run"] for c in sent}) == 1 else str(len(sent)))
    verdict(f"{tracker}: a new training begins a new run", why or ("" if "is of a new training" in done.stdout else done.stdout))


def check_kills(tracker, folder):
    case, rng, last = Case(folder, tracker), random.Random(11), 1500
    case.write(lines_of(1, last))
    kills, sends = 0, []
    while kills < KILLS:
        process = subprocess.Popen(**case.command(slow="0.0003"))
        time.sleep(rng.uniform(0.03, 0.15))
        if process.poll() is not None:
            process.communicate()
            # All is sent: let the log grow, so that there is something to be killed at.
            if last < 6000:
                case.write(lines_of(last + 1, last + 600))
                last += 600
            else:
                break
            continue
        process.kill()
        process.communicate()
        kills += 1
        state = os.path.join(case.out, "track.json")
        sends.append(json.load(open(state))["batch"] if os.path.exists(state) else None)
    done = case.run()
    pending = sum(b is not None for b in sends)
    most = pending * BATCH_LINES * 4  # a line has four numbers at most
    why = done.stderr.strip()
    found, wanted = case.counts(), expected(last)
    if not why and set(found) != {(*k, v) for k, v in wanted.items()}:
        why = f"{len(found)} numbers, not {len(wanted)}"
    more = sum(n - 1 for n in found.values())
    if not why and more > most:
        why = f"{more} numbers too many; {pending} batches were interrupted"
    if not why and (kills < KILLS or len({c["run"] for c in case.calls("log")}) != 1):
        why = f"{kills} kills"
    verdict(f"{tracker}: {KILLS} kills, {pending} in a batch, {more} numbers sent again", why)


def check_follow(folder):
    case = Case(folder, "wandb")
    case.write(lines_of(1, 10))
    process = subprocess.Popen(**case.command("--follow"))
    deadline = time.monotonic() + 30

    def wait_for(count):
        while time.monotonic() < deadline and len(case.calls("log")) < count:
            time.sleep(0.05)

    wait_for(10)
    verdict("two of one run at once", error_of(case.run(), 2, "out: another track.py is sending its log"))
    case.write(lines_of(11, 20))
    wait_for(20)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    verdict("--follow sends what comes, and ends by Ctrl-C", error.strip() or case.why_not(20) or ("" if "up to step 20" in out else out))


def check_refusals(folder):
    case = Case(folder, "wandb")
    case.write(lines_of(1, 3))
    empty = os.path.join(folder, "none")
    os.mkdir(empty)
    verdict("a tracker that is not installed", error_of(case.run(trackers=empty), 2, "'wandb' is missing; install it with: pip"))
    for call, status in (("init", 2), ("log", 1)):
        done = case.run(fails=call)
        verdict(f"a tracker that fails: {call}", error_of(done, status, "wandb: RuntimeError: no API key configured log in first"))
    os.remove(os.path.join(case.out, "track.json"))
    case.tracker = None
    verdict("no tracker at all", error_of(case.run(trackers=empty), 2, "no tracker is installed"))
    done = case.run()
    verdict("the first that is installed", "" if done.returncode == 0 and "3 lines sent to wandb" in done.stdout else done.stderr)
    verdict("another tracker than before", error_of(case.run("--to", "mlflow"), 2, "the run is in tracker wandb, not mlflow"))
    case.write([{**SETTINGS, "lr": 1}], "w")
    done = case.run()
    verdict("another run's log", done.stderr.strip() or ("" if "0 lines sent to wandb" in done.stdout and "new training" in done.stdout else done.stdout))
    case.write([SETTINGS])
    with open(os.path.join(case.out, "track.json"), "w") as f:
        f.write('{"tracker": ')
    verdict("a damaged track.json", error_of(case.run(), 2, "track.json: cannot be read as JSON"))


def main():
    with tempfile.TemporaryDirectory() as folder:
        for tracker in ("wandb", "mlflow"):
            check_log(tracker, os.path.join(folder, tracker))
        check_kills("wandb", os.path.join(folder, "kills"))
        check_follow(os.path.join(folder, "follow"))
        check_refusals(os.path.join(folder, "refusals"))
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
