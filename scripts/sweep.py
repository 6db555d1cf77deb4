#!/usr/bin/env python3
"""Try settings of a trainer: all combinations of some values, or random ones, one process a GPU.

    sweep.py out/sweep --vary lr=6e-4,1.2e-3,2.4e-3 --vary optimizer=adamw,muon -- ./train_gpt2cu -e d12 -i ... -x 335
    sweep.py out/sweep --vary lr=1e-4:1e-2 --vary weight-decay=0,0.1 --random 20 -- ./train_gpt2cu ...

--vary NAME=A,B,C     the values of the trainer's flag --NAME; "recipe" and "seed" are flags like any other
--vary NAME=LOW:HIGH  with --random: a value between both, drawn evenly on a logarithmic scale
--random N            N random combinations instead of all (--random-seed: others)
--gpus 0,1,2          one process at a time on each of these GPUs; default: all that nvidia-smi lists; the CPU if none
--jobs N              on the CPU: N processes that share the cores (default 1)
--metric NAME         key of log.jsonl whose last value ranks the runs (default val_loss): the lowest is the best, but
                      the highest of val_mlm_accuracy and the like
--minutes M           after M minutes start no more runs, and save and stop the running ones

The same command continues an interrupted sweep: finished runs are kept, and a stopped run resumes from its last
checkpoint (-n of the trainer) or, without one, starts again. A run that diverged counts as finished. Each run has a
directory in out/sweep; one that no sweep has made is refused. If this program is killed, its running trainers save and
stop. Whenever a run ends, two files are written: table.md, a row for each run, the best first; and
sweep.svg, the metric over the first numeric setting, a line for each combination of the others.

Exit status: 0 all runs are done; 1 some failed, are left or did not log the metric; 2 wrong usage.
"""
import collections
import concurrent.futures
import ctypes
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from user_error import FAILED, Parser, UserError, lock, parse_json, read_json, run, write_atomically, writing  # noqa: E402

DIVERGED = 3  # the trainer's exit status
COLOURS = "#4269d0 #efb118 #ff725c #6cc5b0 #3ca951 #ff8ab7 #a463f2 #97bbf5 #9c6b4e #9498a0".split()
MARK = "# sweep.py: "  # begins the output of a run, and shows that the run's directory is a sweep's
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)
stopping = threading.Event()


# ----------------------------------------------------------------------------------------------------------
# The runs


def read_variation(text):
    name, equals, values = text.partition("=")
    name = name.lstrip("-")
    if not name or not equals or not values or "" in values.split(","):
        raise UserError(f"--vary {text}: is not NAME=VALUE,VALUE,... or NAME=LOW:HIGH")
    if len(set(values.split(","))) <= values.count(","):
        raise UserError(f"--vary {text}: a value is there twice")
    bounds = values.split(":")
    try:
        low, high = map(float, bounds)
    except ValueError:
        return name, values.split(",")
    if not 0 < low < high < math.inf:
        raise UserError(f"--vary {text}: needs 0 < LOW < HIGH")
    return name, (low, high)


def combinations(variations, count, seed):
    """The settings of each run: lists of (name, text)."""
    if count is None:
        for name, values in variations:
            if isinstance(values, tuple):
                raise UserError(f"--vary {name}={values[0]:g}:{values[1]:g}: a range needs --random N")
        return [list(zip([n for n, _ in variations], each)) for each in itertools.product(*[v for _, v in variations])]
    draw, found, tries = random.Random(seed), [], 0
    while len(found) < count and tries < 100 * count:
        tries += 1
        one = []
        for name, values in variations:
            if isinstance(values, tuple):
                value = f"{math.exp(draw.uniform(math.log(values[0]), math.log(values[1]))):.3g}"
            else:
                value = draw.choice(values)
            one.append((name, value))
        if one not in found:
            found.append(one)
    return found


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
            if not is_result(self.result):
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


def is_result(value):
    keys = {"status": int, "metric": str, "last": (int, float, type(None)), "steps": int, "seconds": (int, float)}
    return isinstance(value, dict) and all(isinstance(value.get(key, keys), kind) for key, kind in keys.items())


def is_higher_better(metric):
    return any(word in metric for word in ("accuracy", "exact_match", "f1", "tok_s", "seq_s"))


def read_log(path, metric):
    """Steps, seconds of training, and the last and best value of the metric.

    The last is NaN if the trainer logged null, and null if there is none. The best is of finite values after step 0.
    """
    values, steps, seconds = [], 0, {}
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
                    values.append((entry.get("step", 1), math.nan if entry[metric] is None else entry[metric]))
    except OSError:
        pass
    trained = [value for step, value in values if step > 0 and math.isfinite(value)]
    return {
        "metric": metric,
        "last": values[-1][1] if values else None,
        "best": (max if is_higher_better(metric) else min)(trained) if trained else None,
        "steps": steps,
        "seconds": round(sum(seconds.values()), 3),
    }


def end_with(parent):
    """In a new process: when the sweep is killed, the trainer saves and stops."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was killed before that
        os._exit(FAILED)


def work(queue, mutex, place, options, on_end):
    """Run trials on one GPU, or on a share of the CPU, until none is left."""
    environment = dict(os.environ)
    if place["gpu"] is not None:
        environment["CUDA_VISIBLE_DEVICES"] = place["gpu"]
    elif place["threads"]:
        environment.setdefault("OMP_NUM_THREADS", str(place["threads"]))
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


def number(value, digits=4):
    return "" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def score(trial):
    """For sorting: the best first, then what diverged, then what is not done."""
    r = trial.result
    if r is None:
        return (2, 0)
    sign = -1 if is_higher_better(r["metric"]) else 1
    is_known = r["status"] == 0 and r["last"] is not None and math.isfinite(r["last"])
    return (0, sign * r["last"]) if is_known else (1, 0)


def write_table(path, trials, metric):
    names = [name for name, _ in trials[0].settings]
    lines = ["| " + " | ".join(names + [metric, "best", "steps", "seconds"]) + " |", "|" + "---|" * (len(names) + 4)]
    for trial in sorted(trials, key=score):
        r = trial.result
        if r is None:
            rest = ["not done", "", "", ""]
        else:
            last = "diverged" if r["status"] == DIVERGED else number(r["last"])
            rest = [last, number(r.get("best")), number(r["steps"]), number(r["seconds"], 1)]
        lines.append("| " + " | ".join([value for _, value in trial.settings] + rest) + " |")
    write_atomically(path, "\n".join(lines) + "\n")


def is_number(text):
    try:
        return float(text) > 0
    except ValueError:
        return False


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def write_plot(path, trials, metric):
    """The metric over the first setting with several numeric values, a line for each combination of the others."""
    names = [name for name, _ in trials[0].settings]
    done = [t for t in trials if score(t)[0] == 0]
    axis = None
    for i in range(len(names)):
        values = {t.settings[i][1] for t in trials}
        if axis is None and len(values) > 1 and all(map(is_number, values)):
            axis = i
    if axis is None or not done:
        return False
    lines = {}
    for t in done:
        others = ", ".join(f"{n} {v}" for i, (n, v) in enumerate(t.settings) if i != axis)
        lines.setdefault(others, []).append((float(t.settings[axis][1]), t.result["last"]))
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = [y for points in lines.values() for _, y in points]
    low, high = min(ys), max(ys)
    width, height, left, top = 720, 360, 70, 20
    span_x, span_y = math.log(xs[-1] / xs[0]) or 1, (high - low) or 1
    at_x = lambda x: left + (width - left - 20) * (0.03 + 0.94 * math.log(x / xs[0]) / span_x)
    at_y = lambda y: top + (height - top - 50) * (0.95 - 0.9 * (y - low) / span_y)
    total = height + 18 * len(lines)
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for x in xs:
        svg.append(f'<text x="{at_x(x):.1f}" y="{height - 30}" text-anchor="middle">{x:g}</text>')
    for y in sorted({low, high, (low + high) / 2}):
        svg.append(f'<text x="{left - 8}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:.4g}</text>')
        svg.append(f'<line x1="{left}" x2="{width - 20}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}" stroke="#ddd"/>')
    svg.append(f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">{escape(names[axis])}</text>')
    svg.append(f'<text x="{left}" y="14">{escape(metric)}</text>')
    for i, (name, points) in enumerate(sorted(lines.items())):
        colour, y = COLOURS[i % len(COLOURS)], height + 18 * i
        points.sort()
        path_of = " ".join(f"{at_x(px):.1f},{at_y(py):.1f}" for px, py in points)
        svg.append(f'<polyline points="{path_of}" fill="none" stroke="{colour}" stroke-width="2"/>')
        svg += [f'<circle cx="{at_x(px):.1f}" cy="{at_y(py):.1f}" r="3" fill="{colour}"/>' for px, py in points]
        svg.append(f'<rect x="{left}" y="{y - 4}" width="12" height="4" fill="{colour}"/>')
        svg.append(f'<text x="{left + 18}" y="{y + 2}">{escape(name) or "all"}</text>')
    write_atomically(path, "\n".join(svg + ["</svg>"]) + "\n")
    return True


# ----------------------------------------------------------------------------------------------------------


def places(options):
    """Where processes run: on each GPU, or on the CPU."""
    if options.gpus is None and options.jobs is None:
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        except OSError:
            listed = ""
        options.gpus = ",".join(str(i) for i in range(listed.count("GPU ")))
    if options.gpus:
        return [{"gpu": gpu, "threads": None} for gpu in options.gpus.split(",")]
    jobs = options.jobs or 1
    threads = max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else None
    return [{"gpu": None, "threads": threads} for _ in range(jobs)]


def parse(arguments):
    parser = Parser(__doc__)
    parser.add_argument("out")
    parser.add_argument("--vary", action="append", default=[])
    parser.add_argument("--random", type=int)
    parser.add_argument("--random-seed", type=int, default=1)
    parser.add_argument("--gpus")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--metric", default="val_loss")
    parser.add_argument("--minutes", type=float)
    if "--" not in arguments:
        if {"-h", "--help"} & set(arguments):
            parser.parse_args(arguments)
        raise UserError("give the trainer and its flags after --")
    at = arguments.index("--")
    options = parser.parse_args(arguments[:at])
    options.command = arguments[at + 1 :]
    if not options.command:
        raise UserError("give the trainer and its flags after --")
    if not options.vary:
        raise UserError("give at least one --vary NAME=VALUES")
    if options.random is not None and options.random < 1:
        raise UserError(f"--random {options.random}: must be at least 1")
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: must be at least 1")
    if options.minutes is not None and options.minutes <= 0:
        raise UserError(f"--minutes {options.minutes:g}: must be more than 0")
    if not shutil.which(options.command[0]):
        raise UserError(f"{options.command[0]}: there is no such program")
    return options


def claim(options, variations):
    """The directory belongs to one command, whose other options may change, and to one process at a time. Returns the lock."""
    path = os.path.join(options.out, "sweep.json")
    mine = {"command": options.command, "vary": [[n, list(v)] for n, v in variations], "metric": options.metric}
    mine["random"] = [options.random, options.random_seed] if options.random else None
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
    options = parse(sys.argv[1:])
    variations = [read_variation(text) for text in options.vary]
    names = [name for name, _ in variations]
    if len(set(names)) < len(names):
        raise UserError(f"--vary {names}: a name is there twice")
    combined = combinations(variations, options.random, options.random_seed)
    name, count = collections.Counter(map(name_of, combined)).most_common(1)[0]
    if count > 1:
        raise UserError(f"{name}: would be the directory of several runs; name their files differently")
    held = claim(options, variations)
    trials = [Trial(options.out, settings) for settings in combined]
    queue, mutex = [t for t in trials if t.result is None], threading.Lock()
    for trial in queue:
        trial.check_directory()

    def on_end(trial, status, output):
        if trial.result is None:
            last = output.strip().splitlines()[-1:] or ["no output"]
            print(f"{trial.name}: status {status}: {last[0]}", flush=True)
        else:
            r = trial.result
            value = "diverged" if r["status"] == DIVERGED else number(r["last"])
            value = value or "is not in log.jsonl"
            print(f"{trial.name}: {options.metric} {value}, {r['steps']} steps, {r['seconds']:.1f} s", flush=True)
        write_table(os.path.join(options.out, "table.md"), trials, options.metric)
        write_plot(os.path.join(options.out, "sweep.svg"), trials, options.metric)

    print(f"{len(trials)} runs, {len(trials) - len(queue)} of them done", flush=True)
    for number_ in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number_, lambda *_: stopping.set())
    end = time.monotonic() + options.minutes * 60 if options.minutes else math.inf
    where = places(options)
    with concurrent.futures.ThreadPoolExecutor(len(where)) as pool:
        workers = [pool.submit(work, queue, mutex, place, options, on_end) for place in where]
        while concurrent.futures.wait(workers, 0.05).not_done:
            if time.monotonic() > end or any(worker.done() and worker.exception() for worker in workers):
                stopping.set()
    for worker in workers:
        worker.result()  # raises what it failed with
    write_table(os.path.join(options.out, "table.md"), trials, options.metric)
    write_plot(os.path.join(options.out, "sweep.svg"), trials, options.metric)
    left = sum(t.result is None for t in trials)
    print(f"{os.path.join(options.out, 'table.md')}: {len(trials) - left} of {len(trials)} runs")
    held.close()
    return FAILED if left or any(t.result["status"] == 0 and t.result["last"] is None for t in trials) else 0


if __name__ == "__main__":
    sys.exit(run(main))
