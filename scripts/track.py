#!/usr/bin/env python3
"""Send a run's log to an experiment tracker, Weights & Biases or MLflow: the settings, and each number at its step.

    track.py OUT                send what OUT/log.jsonl has and the tracker has not
    track.py OUT --follow       continue until Ctrl-C

The tracker is wandb or, where that is not installed, mlflow; its own settings choose the destination.

OUT/track.json has the tracker's run and what was sent, so the same command continues there. A step is sent once, even
if a resumed training cuts log.jsonl back and repeats it; if this program is killed, at most BATCH lines are sent again.
A new training in OUT (--overwrite 1), or another tracker or project, begins a new run.
"""
import json
import os
import sys
import time
from importlib.util import find_spec

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from user_error import (  # noqa: E402
    Parser, Unreachable, UserError, lock, need, parse_json, read_json, run, write_atomically
)  # fmt: skip

BATCH, POLL_SECONDS = 200, 2


class Wandb:
    def __init__(self, library, project, name, run_id, settings):
        self.run = library.init(project=project, name=name, id=run_id, resume="allow", config=settings)
        self.id, self.close = self.run.id, self.run.finish
        # Steps as a metric of their own: wandb would drop lines of its present step or an earlier one.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def send(self, lines):
        for step, numbers in lines:
            self.run.log({"step": step, **numbers})


class Mlflow:
    def __init__(self, library, project, name, run_id, settings):
        self.client, self.Metric, self.id = library.MlflowClient(), library.entities.Metric, run_id
        if run_id:
            return
        found = self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project)
        self.id = self.client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self.client.log_param(self.id, key, str(value)[:500])

    def send(self, lines):
        now = int(1000 * time.time())
        metrics = [self.Metric(key, value, now, step) for step, numbers in lines for key, value in numbers.items()]
        for i in range(0, len(metrics), 1000):  # the most that one call takes
            self.client.log_batch(self.id, metrics=metrics[i : i + 1000])

    def close(self):
        self.client.set_terminated(self.id)


TRACKERS = {"wandb": Wandb, "mlflow": Mlflow}


def parse_line(line):
    """An object; an empty one for a line that is torn."""
    try:
        value = parse_json(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read_log(path):
    """A run's settings, its lines with a step, and the first with a time, or None: no other training has the same. What
    follows the last line break is still being written."""
    with open(path, "rb") as f:
        settings, *lines = [*map(parse_line, f.read().split(b"\n")[:-1])] or [{}]
    lines = [line for line in lines if isinstance(line.get("step"), int)]
    return settings, lines, next((line for line in lines if "ms" in line), None)


def new_lines(lines, sent):
    """(step, numbers) of the lines after `sent`, the last step of each kind of line, which is advanced. The kind is the
    first member after the step: a checkpoint's line comes after those of later steps."""
    for line in lines:
        step, kind = line["step"], next((key for key in line if key != "step"), "")
        if step > sent.get(kind, -1):
            sent[kind] = step
            yield step, {k: float(v) for k, v in line.items() if k != "step" and isinstance(v, (int, float))}


def track(options):
    log, path = (os.path.join(options.out, name) for name in ("log.jsonl", "track.json"))
    state, tracker, count = read_json(path) if os.path.exists(path) else {}, None, 0
    if not isinstance(state, dict):
        raise UserError(f"{path}: is damaged; without it a new run of the tracker begins")
    other = "mlflow" if find_spec("mlflow") and not find_spec("wandb") else "wandb"
    module = options.to or state.get("tracker", other)
    library = need(module)
    wanted = {"tracker": module, "project": options.project or state.get("project", "llmc")}
    try:
        while True:
            settings, lines, first = read_log(log)
            if not first and not options.follow:
                raise UserError(f"{log}: holds no step of a run")
            if first and (not tracker or state["first"] != first):
                wanted["first"] = first
                if any(state.get(key) != value for key, value in wanted.items()):
                    state = {**wanted, "id": None, "sent": {}}
                name = os.path.basename(os.path.abspath(options.out))
                tracker = TRACKERS[module](library, wanted["project"], name, state["id"], settings)
                state["id"] = tracker.id
                write_atomically(path, json.dumps(state) + "\n")
            for i in range(0, len(lines) if first else 0, BATCH):
                if new := [*new_lines(lines[i : i + BATCH], state["sent"])]:
                    tracker.send(new)
                    write_atomically(path, json.dumps(state) + "\n")
                    count += len(new)
            if not options.follow:
                break
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        pass
    except (UserError, OSError):
        raise
    except Exception as e:
        raise Unreachable(f"{module}: {type(e).__name__}: {e}") from e
    if tracker:
        tracker.close()
    print(f"{options.out}: {count} lines sent to {module}, run {state.get('id')}")


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("out", metavar="OUT", help="directory of a run")
    parser.add_argument("--to", choices=TRACKERS, help="the tracker (default: the first that is installed)")
    parser.add_argument("--project", metavar="NAME", help="project or experiment (default: llmc)")
    parser.add_argument("--follow", action="store_true", help="continue until Ctrl-C")
    options = parser.parse_args(arguments)
    with lock(os.path.join(options.out, "track.lock"), f"{options.out}: another track.py is sending its log"):
        track(options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
