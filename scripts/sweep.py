#!/usr/bin/env python3
"""Try settings of a trainer: all combinations of some values, one process a GPU.

    sweep.py out/sweep --vary lr=6e-4,1.2e-3,2.4e-3 --vary optimizer=adamw,muon -- ./train_gpt2cu -e d12 -i ... -x 335

--vary NAME=A,B,C     the values of the trainer's flag --NAME; "recipe" and "seed" are flags like any other
--gpus 0,1,2          one process at a time on each of these GPUs; default: all that nvidia-smi lists; the CPU if none
--jobs N              on the CPU: N processes that share the cores (default 1)
--metric NAME         key of log.jsonl whose last value ranks the runs (default val_loss): the lowest is the best, but
                      the highest of val_mlm_accuracy and the like

The same command continues an interrupted sweep: finished runs are kept, and a stopped run resumes from its last
checkpoint (-n of the trainer) or, without one, starts again. A run that diverged counts as finished. Each run has a
directory in out/sweep; one that no sweep has made is refused. If this program is killed, its running trainers save and
stop. Whenever a run ends, table.md is written: a row for each run, the best first.

Exit status: 0 all runs are done; 1 some failed, are left or did not log the metric; 2 wrong usage.
"""
import collections
import concurrent.futures
import ctypes
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from user_error import FAILED, Parser, UserError, lock, parse_json, read_json, run, write_atomically, writing  # noqa: E402

RESULT = {"status", "last", "steps", "seconds"}  # keys of a run's result.json
DIVERGED = 3  # the trainer's exit status
MARK = "# sweep.py: "  # begins the output of a run, and shows that the run's directory is a sweep's
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)
stopping = threading.Event()


# ----------------------------------------------------------------------------------------------------------
# The runs


def read_variation(text):
    """(name, values) of --vary."""
    name, _, values = text.partition("=")
    name, values = name.lstrip("-"), values.split(",")
    if not name or "" in values:
        raise UserError(f"--vary {text}: is not NAME=VALUE,VALUE,...")
    return name, values


def name_of(settings):
    return "_".join(f"{name}={value.replace('/', '.')}" for name, value in settings)


class Trial:
    """One run: its settings, its directory, and what is known of its result."""

    def __init__(self, sweep, settings):
        self.settings = settings
        self.name = name_of(settings)
        self.out = os.path.join(sweep, self.name)
        self.result, path = None, os.path.join(self.out, "result.json")
        if os.path.lexists(path):
            self.result = read_json(path)
            if not isinstance(self.result, dict) or not RESULT <= self.result.keys():
                raise UserError(f"{path}: is not the result of a run; delete it, and the run is repeated")

    def command(self, base):
        flags = [word for name, value in self.settings for word in (f"--{name}", value)]
        return base + flags + ["-o", self.out, "-y", "1"]

    def check_directory(self):
        """A run writes only into a directory that it makes, or that an earlier run of a sweep has made."""
        try:
            with open(os.path.join(self.out, "output.txt"), "rb") as f:
                is_own = MARK.encode().startswith(f.read(len(MARK)))  # a kill can leave it empty
        except OSError:
            is_own = not os.path.lexists(self.out) or (os.path.isdir(self.out) and not os.listdir(self.out))
        if os.path.islink(self.out) or not is_own:
            raise UserError(f"{self.out}: was not made by a sweep of this version; move it away, or choose another directory")

    def finish(self, status, metric, output):
        """Record the result, unless the run failed or was stopped before its end: then this is the trainer's last line."""
        if status not in (0, DIVERGED) or re.match("stopped by signal", output.strip().split("\n")[-1]):
            return
        self.result = {"status": status, **read_log(os.path.join(self.out, "log.jsonl"), metric)}
        write_atomically(os.path.join(self.out, "result.json"), json.dumps(self.result))


def is_higher_better(metric):
    return any(word in metric for word in ("acc", "exact_match", "f1", "pearson", "spearman", "mfu", "tok_s", "seq_s"))


def read_log(path, metric):
    """Steps, seconds of training, and the last value of the metric: NaN if it was null there, null if there is none."""
    last, steps, seconds = None, 0, {}
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            for line in f:
                try:
                    entry = parse_json(line)
                except ValueError:
                    continue
                if not isinstance(entry, dict):
                    continue
                if isinstance(entry.get("ms"), (int, float)):
                    steps = entry["step"]
                    seconds[steps] = entry["ms"] / 1e3
                if metric in entry and isinstance(entry[metric], (int, float, type(None))):
                    last = math.nan if entry[metric] is None else entry[metric]
    except OSError:
        pass
    return {"last": last, "steps": steps, "seconds": round(sum(seconds.values()), 3)}


def end_with(parent):
    """In a new process: when the sweep is killed, the trainer saves and stops."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was killed before that
        os._exit(FAILED)


def work(queue, mutex, place, options, on_end):
    """Run trials on one GPU, or on a share of the CPU, until none is left."""
    environment = {**os.environ, **place}
    while not stopping.is_set():
        with mutex:
            if not queue:
                return
            trial = queue.pop(0)
        os.makedirs(trial.out, exist_ok=True)
        log, command, parent = os.path.join(trial.out, "output.txt"), trial.command(options.command), os.getpid()
        with open(log, "wb") as out:
            out.write(f"{MARK}{shlex.join(command)}\n".encode(errors="surrogateescape"))
            out.flush()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
                preexec_fn=lambda: end_with(parent),
            )
            while process.poll() is None:
                if stopping.wait(0.1):
                    process.send_signal(signal.SIGTERM)  # the trainer saves and stops
                    process.wait()
        with open(log, encoding="utf-8", errors="replace") as f:
            output = f.read().partition("\n")[2]
        with mutex:
            trial.finish(process.returncode, options.metric, output)
            on_end(trial, process.returncode, output)


# ----------------------------------------------------------------------------------------------------------
# The results


def shown(trial):
    """The metric of a run that is done."""
    if trial.result["status"] == DIVERGED:
        return "diverged"
    last = trial.result["last"]
    return "is not in log.jsonl" if last is None else f"{last:.4f}" if isinstance(last, float) else str(last)


def score(trial, metric):
    """For sorting: the best first, then what diverged, then what is not done."""
    r = trial.result
    if r is None:
        return (2, 0)
    is_known = r["status"] == 0 and r["last"] is not None and math.isfinite(r["last"])
    return (0, -r["last"] if is_higher_better(metric) else r["last"]) if is_known else (1, 0)


def write_table(path, trials, metric):
    names = [name for name, _ in trials[0].settings]
    lines = ["| " + " | ".join(names + [metric, "steps", "seconds"]) + " |", "|" + "---|" * (len(names) + 3)]
    for trial in sorted(trials, key=lambda trial: score(trial, metric)):
        r, values = trial.result, [value for _, value in trial.settings]
        rest = [shown(trial), str(r["steps"]), f"{r['seconds']:.1f}"] if r else ["not done", "", ""]
        lines.append("| " + " | ".join(values + rest) + " |")
    write_atomically(path, "\n".join(lines) + "\n")


# ----------------------------------------------------------------------------------------------------------


def places(options):
    """Where processes run: the variables of each GPU's, or of each share of the CPU."""
    if options.gpus is None and options.jobs is None:
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        except OSError:
            listed = ""
        options.gpus = ",".join(str(i) for i in range(listed.count("GPU ")))
    if options.gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in options.gpus.split(",")]
    jobs = options.jobs or 1
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return [{} if jobs == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}] * jobs


def parse():
    parser = Parser(__doc__)
    parser.add_argument("out")
    parser.add_argument("--vary", action="append", required=True, type=read_variation)
    parser.add_argument("--gpus")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--metric", default="val_loss")
    parser.add_argument("command", nargs="+", help="the trainer and its flags, after --")
    options = parser.parse_args()
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: must be at least 1")
    if not shutil.which(options.command[0]):
        raise UserError(f"{options.command[0]}: there is no such program")
    return options


def claim(options):
    """The directory belongs to one command, whose other options may change, and to one process at a time. Returns the lock."""
    path = os.path.join(options.out, "sweep.json")
    mine = {"command": options.command, "vary": [list(each) for each in options.vary], "metric": options.metric}
    os.makedirs(options.out, exist_ok=True)
    f = lock(path, f"{options.out}: another sweep is running there; wait for it, or choose another directory")
    try:
        f.seek(0)
        text = f.read()
        if text and parse_json(text) != mine:
            raise UserError(f"{path}: is of another sweep; choose another directory, or delete it")
    except ValueError:
        raise UserError(f"{path}: is damaged; delete it, the finished runs stay")
    if not text:
        with writing(path):
            json.dump(mine, f, indent=1)
            f.flush()
    return f


def main():
    options = parse()
    names = [name for name, _ in options.vary]
    combined = [list(zip(names, each)) for each in itertools.product(*[values for _, values in options.vary])]
    name, count = collections.Counter(map(name_of, combined)).most_common(1)[0]
    if count > 1:
        raise UserError(f"{name}: would be the directory of several runs; give each value once, and files other names")
    held = claim(options)
    trials = [Trial(options.out, settings) for settings in combined]
    queue, mutex = [t for t in trials if t.result is None], threading.Lock()
    for trial in queue:
        trial.check_directory()

    def on_end(trial, status, output):
        if trial.result is None:
            last = output.strip().splitlines()[-1:] or ["no output"]
            print(f"{trial.name}: status {status}: {last[0]}", flush=True)
        else:
            steps, seconds = trial.result["steps"], trial.result["seconds"]
            print(f"{trial.name}: {options.metric} {shown(trial)}, {steps} steps, {seconds:.1f} s", flush=True)
        write_table(os.path.join(options.out, "table.md"), trials, options.metric)

    print(f"{len(trials)} runs, {len(trials) - len(queue)} of them done", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    where = places(options)
    with concurrent.futures.ThreadPoolExecutor(len(where)) as pool:
        workers = [pool.submit(work, queue, mutex, place, options, on_end) for place in where]
        while concurrent.futures.wait(workers, 0.05).not_done:
            if any(worker.done() and worker.exception() for worker in workers):
                stopping.set()
    for worker in workers:
        worker.result()  # raises what it failed with
    write_table(os.path.join(options.out, "table.md"), trials, options.metric)
    left = sum(t.result is None for t in trials)
    print(f"{os.path.join(options.out, 'table.md')}: {len(trials) - left} of {len(trials)} runs")
    held.close()
    return FAILED if left or any(t.result["status"] == 0 and t.result["last"] is None for t in trials) else 0


if __name__ == "__main__":
    sys.exit(run(main))
