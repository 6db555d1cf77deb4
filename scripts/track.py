#!/usr/bin/env python3
"""Send a run's log to an experiment tracker (Weights & Biases or MLflow), while it grows or afterwards.

    track.py OUT                                send the part of OUT/log.jsonl that was not sent yet
    track.py OUT --follow                       continue until Ctrl-C
    track.py OUT --to mlflow --project mine

OUT is the directory of a run. The tracker is wandb or, where that is not installed, mlflow, unless --to names it. The
tracker's own settings choose the destination (WANDB_MODE=offline, MLFLOW_TRACKING_URI and so on). It gets the settings,
every number of log.jsonl at its step, and the files loss.svg, plot.png, sample.txt, profile/profile.txt and
profile/profile.html when they change.

OUT/track.json records the tracker's run and how much was sent, so the same command continues there. If a resumed
training run has cut log.jsonl back, steps that were already sent are not sent again, and a note in the tracker's run
says so. A new training run in OUT (--overwrite 1) begins a new run of the tracker. If this program is killed, nothing
is lost, and at most the last batch of lines is sent twice. OUT/track.lock is locked meanwhile, so that two of these
programs do not send the same. Of two equal values mlflow with a database keeps one; wandb keeps both.
"""
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

    def send(self, step, numbers, at):
        self.run.log({"step": step, **numbers})

    def flush(self):
        pass

    def note(self, text):
        self.run.notes = f"{self.run.notes or ''}{text}\n"

    def file(self, folder, name):
        self.run.save(os.path.join(folder, name), base_path=folder, policy="now")

    def close(self):
        self.run.finish()


class Mlflow:
    module = "mlflow"

    def __init__(self, library, project, name, run_id, settings):
        self.library, self.client, self.waiting, self.notes = library, library.MlflowClient(), [], ""
        experiment = self.client.get_experiment_by_name(project)
        experiment = experiment.experiment_id if experiment else self.client.create_experiment(project)
        found = self.client.search_runs([experiment], filter_string=f"tags.track_id = '{run_id}'")
        if found:
            self.id, self.notes = found[0].info.run_id, found[0].data.tags.get("mlflow.note.content", "")
        else:
            self.id = self.client.create_run(experiment, tags={"track_id": run_id}, run_name=name).info.run_id
        known = found[0].data.params if found else {}
        params = [library.entities.Param(k, str(v)[:500]) for k, v in settings.items() if k not in known]
        for i in range(0, len(params), 100):  # the most that one call takes
            self.client.log_batch(self.id, params=params[i : i + 100])

    def send(self, step, numbers, at):
        self.waiting += [self.library.entities.Metric(k, v, int(at * 1000), step) for k, v in numbers.items()]

    def flush(self):
        for i in range(0, len(self.waiting), 1000):
            self.client.log_batch(self.id, metrics=self.waiting[i : i + 1000])
        self.waiting = []

    def note(self, text):
        self.notes += f"{text}\n"
        self.client.set_tag(self.id, "mlflow.note.content", self.notes)

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


FORM = {"tracker": str, "project": str, "id": str, "settings": int, "first": (int, type(None)),
        "position": int, "line": int, "step": int, "kinds": dict, "batch": (list, type(None)), "files": dict}


class State:
    """OUT/track.json. `position`: bytes of log.jsonl that were sent, the last of which are `line` (a checksum); `step`: the
    last step that was sent; `kinds`: the same of each kind of line, by its first member (a checkpoint's line comes after
    those of later steps); `batch`: [end, time] of a batch that may or may not have arrived; `settings` and `first`:
    checksums of the log's first two lines, which only a new training changes."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "track.json")
        self.values = None
        if not os.path.exists(self.path):
            return
        self.values = read_json(self.path)
        for key, kind in FORM.items():
            if not isinstance(self.values, dict) or not isinstance(self.values.get(key, FORM), kind):
                raise UserError(f"{self.path}: is damaged: {key} is missing; without the file a new run of the tracker begins")
        if self.values["tracker"] not in TRACKERS:
            raise UserError(f"{self.path}: is damaged: {self.values['tracker']!r} is none of {', '.join(TRACKERS)}")

    def begin(self, tracker, project, log):
        settings, first = log.checksums()
        self.values = {"tracker": tracker, "project": project, "id": secrets.token_hex(4), "settings": settings,
                       "first": first, "position": 0, "line": 0, "step": -1, "kinds": {}, "batch": None, "files": {}}
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
        self.path = os.path.join(folder, "log.jsonl")

    def read(self, position, most):
        """[(line, where it ends)] of whole lines from `position` on."""
        lines = []
        try:
            with open(self.path, "rb") as f:
                f.seek(position)
                while len(lines) < most:
                    line = f.readline()
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    lines.append((line, position))
        except OSError as e:
            raise UserError(f"{self.path}: cannot be read: {e.strerror}")
        return lines

    def settings(self):
        first = self.read(0, 1)
        value = parse_line(first[0][0]) if first else None
        if value is None or "step" in value:
            raise UserError(f"{self.path}: does not begin with a run's settings")
        return value

    def checksums(self):
        """Of the first two lines; None for one that is not there yet."""
        found = [zlib.crc32(line) for line, _ in self.read(0, 2)]
        return (found + [None, None])[:2]

    def has_line(self, end, checksum):
        """Whether the line that ends there is still the one with this checksum."""
        if end == 0:
            return True
        with open(self.path, "rb") as f:
            begin = max(0, end - (1 << 20))
            f.seek(begin)
            data = f.read(end - begin)
        return len(data) == end - begin and data.endswith(b"\n") and zlib.crc32(data[:-1].rpartition(b"\n")[2]) == checksum


def numbers_of(value):
    """(step, what to send, first member after it), or None where the line has no step."""
    step = value.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return None
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
        if not self.log.has_line(values["position"], values["line"]):
            self.tracker.note(f"log.jsonl was cut back by a resumed run; steps up to {values['step']} are not sent again")
            self.state.save(position=0, line=0, batch=None)
        while True:
            end, at = values["batch"] or (None, time.time())
            lines = self.log.read(values["position"], BATCH_LINES)
            if end is not None:  # the same batch as before the kill, with the same times
                lines = [line for line in lines if line[1] <= end]
            if not lines:
                if values["batch"] is None:
                    return count
                self.state.save(batch=None)
                continue
            self.state.save(batch=[lines[-1][1], at])
            step, kinds = values["step"], dict(values["kinds"])
            for line, _ in lines:
                value = parse_line(line)
                found = numbers_of(value) if value else None
                if not found or found[0] <= kinds.get(found[2], -1):
                    continue
                kinds[found[2]] = found[0]
                step = max(step, found[0])
                self.tracker.send(found[0], found[1], at)
                count += 1
            self.tracker.flush()
            last = zlib.crc32(lines[-1][0][:-1])
            self.state.save(position=lines[-1][1], line=last, step=step, kinds=kinds, batch=None)

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
    print(f"{options.out}: {count} lines sent to {kind.module}, run {state.values['id']}, up to step {state.values['step']}")


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
