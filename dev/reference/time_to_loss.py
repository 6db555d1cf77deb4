#!/usr/bin/env python3
"""Time to loss: how much sooner Muon's recipes reach the loss of well-tuned AdamW.

    time_to_loss.py OUT [--minutes M] [--short 335] [--long 1340] [--rates A,B,...] -- PROGRAM FLAGS...

PROGRAM FLAGS are what all runs share: model, data, batch, validation. Everything else is in recipes that are written
here, one for each setting. Stages, each a sweep of scripts/sweep.py in OUT:

    rates      AdamW's rates, --short steps
    adamw      at the best one: other warm-up, last rate, weight decay, beta2, one by one; what helps, all optimizers get
    muon       rates of muon and normuon, --muon-rates, --short steps
    additions  at each optimizer's best rate: zero-out, an average, cautious decay, a ramp (--ramp), one by one
    finalists  each optimizer's two best rates with what helped it: AdamW --long steps, the others --fraction of them
               with a schedule of their own
    seeds      each optimizer's best finalist with two more seeds, in turn

Call it again with the same arguments until it ends with status 0: finished runs stay, and with --minutes it stops in time,
so that it fits into short loans of a GPU. OUT/time_to_loss.md has the tables and the verdict. A rate at the edge of those
swept is reported as such. The loss of a run with an average is the lower one of the weights' and the average's. Seconds
are of training steps alone.
"""
import argparse
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
OTHERS = {"warmup": "30", "final-lr": "0", "weight-decay": "0", "beta2": "0.99"}


class NotDone(Exception):
    """Time is up, or a run failed."""


class Stages:
    def __init__(self, options):
        self.options, self.end = options, time.monotonic() + 60 * options.minutes if options.minutes else None
        self.tables = []

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
        command = [sys.executable, SWEEP, out] + (["--vary", "seed=" + ",".join(seeds)] if seeds else [])
        command += ["--vary", "recipe=" + ",".join(paths.values())]
        if self.end:
            left = (self.end - time.monotonic()) / 60
            if left < 0.05:
                raise NotDone(stage)
            command += ["--minutes", f"{left:.3f}"]
        print(f"== {stage}", flush=True)
        if subprocess.run(command + ["--"] + self.options.command).returncode != 0:
            raise NotDone(stage)
        with open(os.path.join(out, "table.md"), encoding="utf-8") as f:
            table = f.read().replace(os.path.join(self.options.out, "recipes", ""), "").replace(".flags", "")
        self.tables.append(f"## {stage}\n\n{table}")
        results = {name: [] for name in recipes}
        for seed in seeds or [None]:
            for name, path in paths.items():
                run = (f"seed={seed}_" if seed else "") + "recipe=" + path.replace("/", ".")
                results[name].append(self.result(os.path.join(out, run)))
        return results if seeds else {name: each[0] for name, each in results.items()}

    @staticmethod
    def result(run):
        """A run's result, with its loss: infinite if it diverged, the average's if that is lower."""
        with open(os.path.join(run, "result.json"), encoding="utf-8") as f:
            result = json.load(f)
        loss = result["last"] if result["status"] == 0 and result["last"] is not None else float("inf")
        average = os.path.join(run, "ema.json")  # kept beside the result, as logs are large
        if not os.path.exists(average):
            last = None
            with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as f:
                for line in f:
                    last = json.loads(line).get("ema_val_loss", last)
            with open(average, "w", encoding="utf-8") as f:
                json.dump(last, f)
        with open(average, encoding="utf-8") as f:
            last = json.load(f)
        result["loss"] = min(loss, last) if last is not None else loss
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
    parser.add_argument("--short", type=int, default=335)
    parser.add_argument("--long", type=int, default=1340)
    parser.add_argument("--rates", default="6e-4,1.2e-3,1.8e-3,2.4e-3,3.6e-3")
    parser.add_argument("--muon-rates", default="1.2e-3,1.8e-3,2.4e-3,3.6e-3")
    parser.add_argument("--fraction", type=float, default=0.6)
    parser.add_argument("--ramp", action="store_true", help="a step is several micro-batches")
    options = parser.parse_args(arguments[:at])
    options.command = arguments[at + 1 :]
    return options


def additions(steps, options):
    add = {
        "zero-out": {"init": "zero-out"},
        "average": {"ema": "0.99", "ema-start": str(max(1, steps // 2))},
        "cautious": {"cautious-decay": "1"},
    }
    if options.ramp:
        add["ramp"] = {"batch-ramp": str(max(2, steps // 5))}
    return add


def rate_of(optimizer, name):
    return name[len(optimizer) + 1 :]


def main():
    options = parse(sys.argv[1:])
    s, short = Stages(options), {"steps": str(options.short)}
    report = ["# Time to loss", "", "`" + " ".join(sys.argv) + "`", ""]
    swept = {"adamw": options.rates.split(","), **{o: options.muon_rates.split(",") for o in OPTIMIZERS[1:]}}

    def plain(optimizer, rates, flags):
        return {f"{optimizer}_{r}": {**short, "optimizer": optimizer, "lr": r, **flags} for r in rates}

    # AdamW by itself. What helps it beside its rate is no property of AdamW's, so the others get it too.
    first = s.run("rates", plain("adamw", swept["adamw"], START))
    top = by_loss(first)[0]
    at_best = {**short, "optimizer": "adamw", "lr": rate_of("adamw", top), **START}
    more = s.run("adamw", {f"{top}_{flag}_{value}": {**at_best, flag: value} for flag, value in OTHERS.items()})
    base = dict(START)
    for (flag, value), result in zip(OTHERS.items(), more.values()):
        if result["loss"] < first[top]["loss"]:
            base[flag] = value
    report += ["Common to all: " + ", ".join(f"`--{flag} {value}`" for flag, value in base.items()) + ".", ""]
    muons = s.run("muon", {k: v for o in OPTIMIZERS[1:] for k, v in plain(o, swept[o], base).items()})
    ranked = {"adamw": by_loss(first)}
    for o in OPTIMIZERS[1:]:
        ranked[o] = [name for name in by_loss(muons) if name.startswith(o + "_")]

    flags = {o: {**short, "optimizer": o, "lr": rate_of(o, ranked[o][0]), **base} for o in OPTIMIZERS}
    tried = {f"{o}_{a}": {**flags[o], **add} for o in OPTIMIZERS for a, add in additions(options.short, options).items()}
    added = s.run("additions", {"adamw_tuned": flags["adamw"], **tried})
    bar = {"adamw": added["adamw_tuned"]["loss"], **{o: muons[ranked[o][0]]["loss"] for o in OPTIMIZERS[1:]}}
    helped = {o: [a for a in additions(1, options) if added[f"{o}_{a}"]["loss"] < bar[o]] for o in OPTIMIZERS}

    finals, steps = {}, {o: options.long if o == "adamw" else round(options.fraction * options.long) for o in OPTIMIZERS}
    for o in OPTIMIZERS:
        kept = {k: v for a in helped[o] for k, v in additions(steps[o], options)[a].items()}
        for name in ranked[o][:2]:
            rate = rate_of(o, name)
            finals[f"{o}_{rate}_final"] = {"steps": str(steps[o]), "optimizer": o, "lr": rate, **base, **kept}
    finalists = s.run("finalists", finals)
    best = {o: next(name for name in by_loss(finalists) if name.startswith(o + "_")) for o in OPTIMIZERS}
    seeds = s.run("seeds", {best[o]: finals[best[o]] for o in OPTIMIZERS}, SEEDS[1:])

    report += ["| | rate | with | steps | loss, mean of three seeds | of AdamW's steps | of its seconds |"]
    report += ["|---|---|---|---:|---:|---:|---:|"]
    losses = {o: [finalists[best[o]]["loss"]] + [r["loss"] for r in seeds[best[o]]] for o in OPTIMIZERS}
    seconds = {o: sum(r["seconds"] for r in seeds[best[o]]) for o in OPTIMIZERS}  # those that ran in turn
    for o in OPTIMIZERS:
        rate = rate_of(o, best[o])[: -len("_final")]
        edge = " (the edge of those swept)" if rate in (swept[o][0], swept[o][-1]) else ""
        report.append(
            f"| {o} | {rate}{edge} | {', '.join(helped[o])} | {steps[o]} | {statistics.mean(losses[o]):.4f} "
            f"(+- {statistics.stdev(losses[o]):.4f}) | {steps[o] / steps['adamw']:.2f} | {seconds[o] / seconds['adamw']:.2f} |"
        )
    goal = statistics.mean(losses["adamw"])
    for o in OPTIMIZERS[1:]:
        verdict = "reaches" if statistics.mean(losses[o]) <= goal else "does not reach"
        report.append(f"\n{o} {verdict} AdamW's {goal:.4f} in {options.fraction} of its steps.")
    with open(os.path.join(options.out, "time_to_loss.md"), "w", encoding="utf-8") as f:
        f.write("\n".join(report + [""] + s.tables) + "\n")
    print("\n".join(report))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotDone as stage:
        print(f"{stage}: not done; call again with the same arguments", file=sys.stderr)
        sys.exit(1)
