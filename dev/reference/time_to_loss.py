#!/usr/bin/env python3
"""Time to loss: how much sooner Muon's recipes reach the loss of well-tuned AdamW.

    time_to_loss.py OUT [--minutes M] [--results FILE] [--short 335] [--long 1340] [--rates A,B,...] -- PROGRAM FLAGS...

PROGRAM FLAGS are what all runs share: model, data, batch, validation. The rest is in recipes that this script writes,
one per setting. Stages, each a sweep of scripts/sweep.py in OUT:

    rates      AdamW's rates, --short steps
    adamw      at the best one: other warm-up, last rate, weight decay, beta2, one by one
    muon       rates of muon and normuon, --muon-rates, --short steps
    additions  at each optimizer's best rate, one by one: what helped AdamW in the stage before ("tuned"), zero-out, an
               average, cautious decay
    finalists  each optimizer's two best rates with what helped it: AdamW --long steps, the others --fraction of them
               with a schedule of their own
    tuning     from each optimizer's best finalist on: a longer warm-up (of --warmups, shares of its steps), a higher
               rate, a shorter warm-up, a lower rate; the first that is better is the next to start from, until none is
    seeds      each optimizer's best run with two more seeds, in turn

Repeat the same command until it ends with status 0: finished runs are kept, and --minutes stops it in time, for short
loans of a GPU. --results keeps a line per finished run, with its flags, so that another machine can continue without
OUT. OUT/time_to_loss.md has the tables and the verdict, once there is a best run. A best rate or warm-up at the edge of
the sweep is reported as such. For a run with an average, the loss is the lower one of the weights' and the average's.
Seconds are of training steps alone.
"""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

SWEEP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "sweep.py")
OPTIMIZERS = ["adamw", "muon", "normuon"]
SEEDS = ["1337", "1338", "1339"]
START = {"warmup": "100", "final-lr": "0.1", "weight-decay": "0.1", "beta2": "0.95"}
OTHERS = [("warmup", "30"), ("warmup", "200"), ("final-lr", "0"), ("weight-decay", "0"), ("beta2", "0.99")]


class NotDone(Exception):
    """Time is up, or a run failed. results: those that there are."""

    def __init__(self, stage, results):
        super().__init__(stage)
        self.results = results


class Stages:
    def __init__(self, options):
        self.options, self.end = options, time.monotonic() + 60 * options.minutes if options.minutes else None
        self.tables, self.known = {}, []  # tables by stage
        if options.results and os.path.exists(options.results):
            with open(options.results, encoding="utf-8") as f:
                self.known = [json.loads(line) for line in f]

    def recipe(self, name, flags):
        path = os.path.join(self.options.out, "recipes", name + ".flags")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(f"--{flag} {value}\n" for flag, value in flags.items())
        return path

    def run(self, stage, recipes, seeds=None):
        """Run a stage: recipes is {name: flags}. Returns {name: a result for each seed}; without seeds {name: result}."""
        out = os.path.join(self.options.out, stage)
        paths = {name: self.recipe(name, flags) for name, flags in recipes.items()}
        runs = {}  # directory: (name, what tells the run from others)
        for seed in seeds or [None]:
            for name, path in paths.items():
                directory = (f"seed={seed}_" if seed else "") + "recipe=" + path.replace("/", ".")
                runs[os.path.join(out, directory)] = (name, {"stage": stage, "flags": recipes[name], "seed": seed})
        for directory, (_, key) in runs.items():
            for line in self.known:
                if line["run"] == key:
                    self.write(directory, "result.json", line["result"])
        command = [sys.executable, SWEEP, out] + (["--vary", "seed=" + ",".join(seeds)] if seeds else [])
        command += ["--vary", "recipe=" + ",".join(paths.values())]
        if self.end:
            left = (self.end - time.monotonic()) / 60
            if left < 0.05:
                raise NotDone(stage, {})
            command += ["--minutes", f"{left:.3f}"]
        if stage == "tuning":  # adds settings to a sweep that is already there
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(out, "sweep.json"))
        print(f"== {stage}", flush=True)
        status = subprocess.run(command + ["--"] + self.options.command).returncode
        results = {name: [] for name in recipes}
        for directory, (name, key) in runs.items():
            if os.path.exists(os.path.join(directory, "result.json")):
                results[name].append(self.result(directory))
                self.keep(key, results[name][-1])
        if status != 0:
            raise NotDone(stage, results)
        with open(os.path.join(out, "table.md"), encoding="utf-8") as f:
            table = f.read().replace(os.path.join(self.options.out, "recipes", ""), "").replace(".flags", "")
        self.tables[stage] = f"## {stage}\n\n{table}"
        return results if seeds else {name: each[0] for name, each in results.items()}

    @staticmethod
    def write(directory, name, value):
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, name), "w", encoding="utf-8") as f:
            json.dump(value, f)

    def keep(self, key, result):
        """Add a finished run to the file of --results, once."""
        if self.options.results and all(line["run"] != key for line in self.known):
            self.known.append({"run": key, "result": result})
            with open(self.options.results, "a", encoding="utf-8") as f:
                f.write(json.dumps(self.known[-1]) + "\n")

    @staticmethod
    def result(directory):
        """A run's result, with its loss: infinite if it diverged, the average's if that is lower."""
        with open(os.path.join(directory, "result.json"), encoding="utf-8") as f:
            result = json.load(f)
        if "loss" in result:
            return result
        result["loss"] = result["last"] if result["status"] == 0 and result["last"] is not None else float("inf")
        with open(os.path.join(directory, "log.jsonl"), encoding="utf-8") as f:
            averages = [json.loads(line).get("ema_val_loss") for line in f]
        averages = [loss for loss in averages if loss is not None]
        result["loss"] = min(result["loss"], averages[-1]) if averages else result["loss"]
        return result


def by_loss(results):
    return sorted(results, key=lambda name: results[name]["loss"])


def parse(arguments):
    if "--" not in arguments:
        sys.exit(__doc__)
    at = arguments.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--results")
    parser.add_argument("--short", type=int, default=335)
    parser.add_argument("--long", type=int, default=1340)
    parser.add_argument("--rates", default="6e-4,1.2e-3,1.8e-3,2.4e-3,3e-3,3.6e-3")
    parser.add_argument("--muon-rates", default="1.8e-3,2.4e-3,3.6e-3,5.4e-3,7.2e-3")
    parser.add_argument("--fraction", type=float, default=0.6)
    parser.add_argument("--warmups", default="0.3,0.45,0.6,0.75,0.9")
    options = parser.parse_args(arguments[:at])
    options.command = arguments[at + 1 :]
    return options


def rate_of(optimizer, name):
    return name[len(optimizer) + 1 :]


def main():
    options = parse(sys.argv[1:])
    s = Stages(options)
    report = ["# Time to loss", "", "`" + " ".join(sys.argv) + "`", ""]
    swept = {"adamw": options.rates.split(","), **{o: options.muon_rates.split(",") for o in OPTIMIZERS[1:]}}

    def plain(optimizer, rates):
        common = {"steps": str(options.short), "optimizer": optimizer, **START}
        return {f"{optimizer}_{rate}": {**common, "lr": rate} for rate in rates}

    first = s.run("rates", plain("adamw", swept["adamw"]))
    top = by_loss(first)[0]
    others = s.run("adamw", {f"{top}_{f}_{v}": {**plain("adamw", [rate_of("adamw", top)])[top], f: v} for f, v in OTHERS})
    tuned = {}
    for (flag, value), result in sorted(zip(OTHERS, others.values()), key=lambda each: -each[1]["loss"]):
        if result["loss"] < first[top]["loss"]:
            tuned[flag] = value  # of two values of a flag the better one stays
    report += ["tuned: " + (", ".join(f"`--{flag} {value}`" for flag, value in tuned.items()) or "nothing helped"), ""]
    muons = s.run("muon", {k: v for o in OPTIMIZERS[1:] for k, v in plain(o, swept[o]).items()})
    plains = {**first, **muons}
    ranked = {o: [name for name in by_loss(plains) if name.startswith(o + "_")] for o in OPTIMIZERS}

    def additions(steps):
        add = {
            "tuned": tuned,
            "zero-out": {"init": "zero-out"},
            "average": {"ema": "0.99", "ema-start": str(max(1, steps // 2))},
            "cautious": {"cautious-decay": "1"},
        }
        return {name: flags for name, flags in add.items() if flags}

    tried = {}
    for o in OPTIMIZERS:
        best = plain(o, [rate_of(o, ranked[o][0])])[ranked[o][0]]
        tried.update({f"{o}_{a}": {**best, **flags} for a, flags in additions(options.short).items()})
    added = s.run("additions", tried)
    helped = {
        o: [a for a in additions(options.short) if added[f"{o}_{a}"]["loss"] < plains[ranked[o][0]]["loss"]]
        for o in OPTIMIZERS
    }

    finals, steps = {}, {o: options.long if o == "adamw" else round(options.fraction * options.long) for o in OPTIMIZERS}
    for o in OPTIMIZERS:
        kept = {k: v for a in helped[o] for k, v in additions(steps[o])[a].items()}
        for name, flags in plain(o, [rate_of(o, name) for name in ranked[o][:2]]).items():
            finals[name + "_final"] = {**flags, "steps": str(steps[o]), **kept}
    finalists = s.run("finalists", finals)

    def best_final(optimizer):
        return next(name for name in by_loss(finalists) if name.startswith(optimizer + "_"))

    shares = [float(share) for share in options.warmups.split(",")]
    warmups = {}
    for o in OPTIMIZERS:
        rounded = {str(round(float(f"{share * steps[o]:.2g}"))) for share in shares}
        warmups[o] = sorted(rounded | {finals[best_final(o)]["warmup"]}, key=int)

    def is_of_grid(run):
        """Whether it is a run of this stage: as the best finalist, but for a rate and a warm-up that are swept."""
        flags, o = run["flags"], run["flags"]["optimizer"]
        alike = flags == {**finals[best_final(o)], "lr": flags["lr"], "warmup": flags["warmup"]}
        return alike and flags["lr"] in swept[o] and flags["warmup"] in warmups[o]

    def next_to_try(optimizer):
        """The first setting beside the best one that was not run: {name: flags}, empty if there is none."""
        best = finals[best_final(optimizer)]
        run = [(f["lr"], f["warmup"]) for f in finals.values() if f["optimizer"] == optimizer]
        rates, times = swept[optimizer], warmups[optimizer]
        rate, time_ = rates.index(best["lr"]), times.index(best["warmup"])
        for r, t in [(rate, time_ + 1), (rate + 1, time_), (rate, time_ - 1), (rate - 1, time_)]:
            if 0 <= r < len(rates) and 0 <= t < len(times) and (rates[r], times[t]) not in run:
                return {f"{optimizer}_{rates[r]}_warmup_{times[t]}": {**best, "lr": rates[r], "warmup": times[t]}}
        return {}

    def next_round():
        return {name: flags for o in OPTIMIZERS for name, flags in next_to_try(o).items()}

    tuning = {}
    earlier = {  # those in --results count too
        f"{run['flags']['optimizer']}_{run['flags']['lr']}_warmup_{run['flags']['warmup']}": run["flags"]
        for run in (line["run"] for line in s.known)
        if run["stage"] == "tuning" and is_of_grid(run)
    }
    more = earlier or next_round()
    while more:
        tuning.update(more)
        finals.update(more)
        finalists.update(s.run("tuning", tuning))
        more = next_round()
    best = {o: best_final(o) for o in OPTIMIZERS}
    left = None
    try:
        seeds = s.run("seeds", {best[o]: finals[best[o]] for o in OPTIMIZERS}, SEEDS[1:])
    except NotDone as stage:
        seeds, left = stage.results, stage

    header = "| | rate | warm-up | with | steps | seeds | loss, mean of the seeds | of AdamW's steps | of its seconds |"
    report += [header]
    report += ["|---|---|---|---|---:|---:|---:|---:|---:|"]
    runs = {o: [finalists[best[o]]] + seeds.get(best[o], []) for o in OPTIMIZERS}
    losses = {o: [r["loss"] for r in runs[o]] for o in OPTIMIZERS}
    seconds = {o: statistics.mean(r["seconds"] for r in runs[o]) for o in OPTIMIZERS}
    for o in OPTIMIZERS:
        rate, warmup = finals[best[o]]["lr"], finals[best[o]]["warmup"]
        edge = " (the edge of those swept)" if rate in (swept[o][0], swept[o][-1]) else ""
        tried_warmups = sorted({int(finals[name]["warmup"]) for name in finalists if name.startswith(o + "_")})
        edge_warmup = " (the edge of those swept)" if int(warmup) in (tried_warmups[0], tried_warmups[-1]) else ""
        spread = f" (+- {statistics.stdev(losses[o]):.4f})" if len(losses[o]) > 1 else ""
        report.append(
            f"| {o} | {rate}{edge} | {warmup}{edge_warmup} | {', '.join(helped[o])} | {steps[o]} | {len(losses[o])} | "
            f"{statistics.mean(losses[o]):.4f}{spread} | {steps[o] / steps['adamw']:.2f} | "
            f"{seconds[o] / seconds['adamw']:.2f} |"
        )
    goal = statistics.mean(losses["adamw"])
    for o in OPTIMIZERS[1:]:
        verdict = "reaches" if statistics.mean(losses[o]) <= goal else "does not reach"
        report.append(f"\n{o} {verdict} AdamW's {goal:.4f} in {options.fraction} of its steps.")
    with open(os.path.join(options.out, "time_to_loss.md"), "w", encoding="utf-8") as f:
        f.write("\n".join(report + ["", *s.tables.values()]) + "\n")
    print("\n".join(report))
    if left:
        raise left
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotDone as stage:
        print(f"{stage}: not done; call again with the same arguments", file=sys.stderr)
        sys.exit(1)
