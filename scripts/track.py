#!/usr/bin/env python3
"""Send a run's log to an experiment tracker (Weights & Biases or MLflow), while it grows or afterwards.

    track.py OUT                                send the part of OUT/log.jsonl that was not sent yet
    track.py OUT --follow                       continue until Ctrl-C
    track.py OUT --to mlflow --project mine

OUT is the directory of a run. The tracker is wandb or, where that is not installed, mlflow, unless --to names it. The
tracker's own settings choose the destination (WANDB_MODE=offline, MLFLOW_TRACKING_URI and so on). It gets the settings,
every number of log.jsonl at its step, and the files loss.svg, plot.png, sample.txt, profile/profile.txt and
profile/profile.html when they change.

OUT/track.json records the tracker's run and the steps that were sent, so the same command continues there. Steps that
were sent are not sent again, also where a resumed training run has cut log.jsonl back. A new training run in OUT
(--overwrite 1) begins a new run of the tracker. If this program is killed, nothing is lost, and at most the last batch
of lines is sent twice. OUT/track.lock is locked meanwhile, so that two of these programs do not send the same.
"""
import itertools
import json
import os
import re
import secrets
import signal
import sys
import time
import zlib

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from user_error import Parser, Unreachable, UserError, lock, parse_json, read_json, run, write_atomically  # noqa: E402

BATCH_LINES = 200
POLL_SECONDS = 2.0
FILES = ["loss.svg", "plot.png", "sample.txt", "profile/profile.txt", "profile/profile.html"]


class NewTraining(Exception):
    """The log is of another training than the state."""


# ----------------------------------------------------------------------------------------------------------
# Trackers. Each is opened with an id of our own choice, which finds the same run again.


class Wandb:
    module = "wandb"

    def __init__(self, library, project, name, run_id, settings):
        self.run = library.init(project=project, name=name, id=run_id, resume="allow", config=settings)
        # Steps as a metric of their own: wandb would drop lines of its present step or an earlier one.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def send(self, step, numbers):
        self.run.log({"step": step, **numbers})

    def flush(self):
        pass

    def file(self, folder, name):
        self.run.save(os.path.join(folder, name), base_path=folder, policy="now")

    def close(self):
        self.run.finish()


class Mlflow:
    module = "mlflow"

    def __init__(self, library, project, name, run_id, settings):
        self.library, self.client, self.waiting = library, library.MlflowClient(), []
        experiment = self.client.get_experiment_by_name(project)
        experiment = experiment.experiment_id if experiment else self.client.create_experiment(project)
        found = self.client.search_runs([experiment], filter_string=f"tags.track_id = '{run_id}'")
        the_run = found[0] if found else self.client.create_run(experiment, tags={"track_id": run_id}, run_name=name)
        self.id, known = the_run.info.run_id, found[0].data.params if found else {}
        params = [library.entities.Param(k, str(v)[:500]) for k, v in settings.items() if k not in known]
        for i in range(0, len(params), 100):  # the most that one call takes
            self.client.log_batch(self.id, params=params[i : i + 100])

    def send(self, step, numbers):
        now = int(1000 * time.time())
        self.waiting += [self.library.entities.Metric(k, v, now, step) for k, v in numbers.items()]

    def flush(self):
        for i in range(0, len(self.waiting), 1000):
            self.client.log_batch(self.id, metrics=self.waiting[i : i + 1000])
        self.waiting = []

    def file(self, folder, name):
        self.client.log_artifact(self.id, os.path.join(folder, name), os.path.dirname(name) or None)

    def close(self):
        self.client.set_terminated(self.id)


TRACKERS = {kind.module: kind for kind in (Wandb, Mlflow)}


class Guarded:
    """A tracker whose failures are one line, whatever its library raises."""

    def __init__(self, kind, *arguments):
        self.module, self.tracker = kind.module, None
        self.tracker = self.call(UserError, kind, *arguments)

    def call(self, failure, function, *arguments):
        try:
            return function(*arguments)
        except Exception as e:
            raise failure(f"{self.module}: {type(e).__name__}: {e}") from e

    def __getattr__(self, name):
        return lambda *arguments: self.call(Unreachable, getattr(self.tracker, name), *arguments)


def find_tracker(name):
    """(class, library) of the named tracker, or of the first that is installed."""
    for module in [name] if name else TRACKERS:
        try:
            return TRACKERS[module], __import__(module)
        except ImportError:
            if name:
                raise UserError(f"the Python package '{name}' is missing; install it with: pip install {name}")
    raise UserError("no tracker is installed; install one of them: pip install wandb, or mlflow")


# ----------------------------------------------------------------------------------------------------------
# The log, and how much of it was sent


FORM = {"tracker": str, "project": str, "id": str, "settings": int, "first": (int, type(None)), "sent": dict,
        "files": dict}


class State:
    """OUT/track.json. `sent`: the last step of each kind of line that was sent, by its first member (a checkpoint's
    line comes after those of later steps); `files`: checksums; `settings` and `first`: checksums of the log's first two
    lines, which only a new training changes."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "track.json")
        self.values = None
        if not os.path.exists(self.path):
            return
        self.values = read_json(self.path)
        for key, kind in FORM.items():
            if not isinstance(self.values, dict) or not isinstance(self.values.get(key, FORM), kind):
                raise UserError(f"{self.path}: is damaged: no {key}; without the file a new run of the tracker begins")
        if self.values["tracker"] not in TRACKERS:
            raise UserError(f"{self.path}: is damaged: {self.values['tracker']!r} is none of {', '.join(TRACKERS)}")

    def begin(self, tracker, project, log):
        settings, first = log.checksums()
        self.values = {"tracker": tracker, "project": project, "id": secrets.token_hex(4), "settings": settings,
                       "first": first, "sent": {}, "files": {}}
        self.save()

    def is_of(self, log):
        """Whether the log is still of the training that it was."""
        settings, first = log.checksums()
        return settings == self.values["settings"] and self.values["first"] in (None, first)

    def save(self, **changes):
        self.values.update(changes)
        write_atomically(self.path, json.dumps(self.values, indent=1) + "\n")


def parse_line(line):
    """An object, or None for a line that is torn."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class Log:
    def __init__(self, folder):
        self.path, self.position, self.last = os.path.join(folder, "log.jsonl"), 0, b""

    def begin(self):
        """The first two lines, if they are there."""
        try:
            with open(self.path, "rb") as f:
                return [line for line in (f.readline(), f.readline()) if line.endswith(b"\n")]
        except OSError as e:
            raise UserError(f"{self.path}: cannot be read: {e.strerror}")

    def settings(self):
        value = next(map(parse_line, self.begin()), None)
        if value is None or "step" in value:
            raise UserError(f"{self.path}: does not begin with a run's settings")
        return value

    def checksums(self):
        """Of the first two lines; None for one that is not there yet."""
        return [*map(zlib.crc32, self.begin()), None, None][:2]

    def next_lines(self):
        """A batch of whole lines; the log from its beginning where the last one is there no more, as after a resume."""
        with open(self.path, "rb") as f:
            f.seek(self.position - len(self.last))
            if f.read(len(self.last)) != self.last:
                self.position, self.last = f.seek(0), b""
            lines = [line for line in itertools.islice(f, BATCH_LINES) if line.endswith(b"\n")]
        self.position += sum(map(len, lines))
        self.last = (lines or [self.last])[-1]
        return lines


def numbers_of(value):
    """(step, what to send, first member after it) of a line; step -1 where it has none."""
    step = value.get("step")
    step = step if isinstance(step, int) and not isinstance(step, bool) else -1
    members = [(k, v) for k, v in value.items() if k != "step"]
    numbers = {k: float(v) for k, v in members if isinstance(v, (int, float))}  # null: not finite
    return step, numbers, members[0][0] if members else ""


# ----------------------------------------------------------------------------------------------------------
# Sending


class Sender:
    def __init__(self, folder, log, state, tracker):
        self.folder, self.log, self.state, self.tracker = folder, log, state, tracker

    def send_lines(self):
        """Send what is new, batch by batch. Returns the number of lines."""
        count, values = 0, self.state.values
        if not self.state.is_of(self.log):
            raise NewTraining
        if values["first"] is None:
            self.state.save(first=self.log.checksums()[1])
        while lines := self.log.next_lines():
            sent = dict(values["sent"])
            for value in filter(None, map(parse_line, lines)):
                step, numbers, kind = numbers_of(value)
                if step > sent.get(kind, -1):
                    sent[kind] = step
                    self.tracker.send(step, numbers)
                    count += 1
            if sent != values["sent"]:
                self.tracker.flush()
                self.state.save(sent=sent)
        return count

    def send_files(self):
        sent = dict(self.state.values["files"])
        for name in FILES:
            try:
                with open(os.path.join(self.folder, name), "rb") as f:
                    checksum = zlib.crc32(f.read())
            except OSError:
                continue
            if sent.get(name) != checksum:
                self.tracker.file(self.folder, name)
                sent[name] = checksum
        if sent != self.state.values["files"]:
            self.state.save(files=sent)


def follow(sender, options):
    stopped = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(1))
    count = sender.send_lines()
    while options.follow and not stopped:
        time.sleep(POLL_SECONDS)
        count += sender.send_lines()
    sender.send_files()
    return count


def track(options):
    log = Log(options.out)
    log.settings()
    held = lock(os.path.join(options.out, "track.lock"), f"{options.out}: another track.py is sending its log; wait for it")
    state = State(options.out)
    if state.values is None:
        kind, library = find_tracker(options.to)
        state.begin(kind.module, options.project or "llmc", log)
    else:
        for name, given in (("tracker", options.to), ("project", options.project)):
            if given and given != state.values[name]:
                raise UserError(f"{state.path}: the run is in {name} {state.values[name]}, not {given}")
        kind, library = find_tracker(state.values["tracker"])
    name = options.name or os.path.basename(os.path.abspath(options.out))
    while True:
        tracker = Guarded(kind, library, state.values["project"], name, state.values["id"], log.settings())
        try:
            count = follow(Sender(options.out, log, state, tracker), options)
        except NewTraining:
            tracker.close()
            print(f"{log.path}: is of a new training; it gets a new run in {kind.module}", flush=True)
            state.begin(kind.module, state.values["project"], log)
            continue
        break
    tracker.close()
    held.close()
    step = max(state.values["sent"].values(), default=0)
    print(f"{options.out}: {count} lines sent to {kind.module}, run {state.values['id']}, up to step {step}")


# ----------------------------------------------------------------------------------------------------------
# Command line


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("out", metavar="OUT", help="directory of a run")
    parser.add_argument("--to", choices=list(TRACKERS), help="the tracker (default: the first that is installed)")
    parser.add_argument("--project", metavar="NAME", help="project or experiment (default: llmc)")
    parser.add_argument("--name", metavar="NAME", help="of the run (default: that of OUT)")
    parser.add_argument("--follow", action="store_true", help="continue until Ctrl-C")
    options = parser.parse_args(arguments)
    if options.project and not re.fullmatch(r"[\w. -]{1,100}", options.project):
        raise UserError(f"--project {options.project}: only letters, digits, dots, blanks, - and _, 100 at most")
    track(options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
