#!/usr/bin/env python3
"""Time to loss: how much sooner Muon's recipes reach the loss of well-tuned AdamW.

    time_to_loss.py OUT [--minutes M] [--short 335] [--long 1340] [--rates A,B,...] -- PROGRAM FLAGS...

PROGRAM FLAGS are what all runs share: model, data, batch, validation. Stages, each a sweep of scripts/sweep.py in OUT:

    adamw      AdamW's rates, --short steps; then adamw_more: betas and weight decay at the best one
    muon       rates of muon and normuon, --short steps
    additions  at each optimizer's best rate: zero-out, an average, a ramp, cautious decay, one by one
    finalists  the two best rates of each optimizer, --long steps
    seeds      each optimizer's best rate with the additions that helped it, three seeds: AdamW --long steps, the others 0.6
               of them with a schedule of their own

Call it again with the same arguments until it ends with status 0: finished runs stay, and with --minutes it stops in time,
so that it fits into short loans of a GPU. OUT/time_to_loss.md has the tables and the verdict. A rate at the edge of those
swept is reported as such. Seconds are of training steps alone.
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
FRACTION = 0.6


class NotDone(Exception):
    """Time is up, or a run failed."""


class Stages:
    def __init__(self, options):
        self.options, self.end = options, time.monotonic() + 60 * options.minutes if options.minutes else None
        self.tables = []

    def recipe(self, name, *lines):
        """A file of flags, whose name is the setting in the tables."""
        path = os.path.join(self.options.out, "recipes", name + ".flags")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as f:
            f.write("\n".join(lines) + "\n")
        return path

    def run(self, name, steps, variations):
        """Run a stage. Returns its results: (settings, result), the best first."""
        out = os.path.join(self.options.out, name)
        command = [sys.executable, SWEEP, out]
        for flag, values in variations:
            command += ["--vary", f"{flag}={','.join(values)}"]
        if self.end:
            left = (self.end - time.monotonic()) / 60
            if left < 0.05:
                raise NotDone(name)
            command += ["--minutes", f"{left:.3f}"]
        print(f"== {name}", flush=True)
        if subprocess.run(command + ["--"] + self.options.command + ["-x", str(steps)]).returncode != 0:
            raise NotDone(name)
        results = []
        for each in sorted(os.listdir(out)):
            path = os.path.join(out, each, "result.json")
            if os.path.exists(path):
                with open(path, encoding="utf-8") as f:
                    results.append((self.settings(each, variations), json.load(f)))
        with open(os.path.join(out, "table.md"), encoding="utf-8") as f:
            self.tables.append(f"## {name}, {steps} steps\n\n{f.read().replace(self.options.out + '/recipes/', '')}")
        results = [r for r in results if r[1]["status"] == 0 and r[1]["last"] is not None]
        return sorted(results, key=lambda r: r[1]["last"])

    @staticmethod
    def settings(directory, variations):
        """The settings in a run's name, in the order of the flags."""
        found, rest = {}, directory
        for i, (flag, values) in enumerate(variations):
            rest = rest[len(flag) + 1 :]
            value = max((v for v in values if rest.startswith(v.replace("/", "."))), key=len)
            found[flag], rest = value, rest[len(value) + 1 :]
        return found


def additions_of(stages, optimizer, rate, total_batch_steps):
    base = [f"--optimizer {optimizer}", f"--lr {rate}"]
    if optimizer != "adamw":
        base.append(f"--embedding-lr {rate}")
    add = {
        "zero-out": ["--init zero-out"],
        "ema": ["--ema 0.99", f"--ema-start {max(1, total_batch_steps // 2)}"],
        "ramp": [f"--batch-ramp {max(2, total_batch_steps // 5)}"],
        "cautious": ["--cautious-decay 1"],
    }
    return base, add


def best_of(results, optimizer):
    return [r for r in results if r[0].get("optimizer", "adamw") == optimizer]


def main():
    arguments = sys.argv[1:]
    if "--" not in arguments:
        sys.exit(__doc__)
    at = arguments.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--short", type=int, default=335)
    parser.add_argument("--long", type=int, default=1340)
    parser.add_argument("--rates", default="6e-4,1.2e-3,1.8e-3,2.4e-3,3.6e-3")
    parser.add_argument("--no-ramp", action="store_true", help="a step is one micro-batch")
    options = parser.parse_args(arguments[:at])
    options.command = arguments[at + 1 :]
    s, rates = Stages(options), options.rates.split(",")
    report = ["# Time to loss", "", "`" + " ".join(sys.argv) + "`", ""]

    adamw = s.run("adamw", options.short, [("optimizer", ["adamw"]), ("lr", rates)])
    best = {"adamw": adamw[0][0]["lr"]}
    more = s.run(
        "adamw_more",
        options.short,
        [("lr", [best["adamw"]]), ("beta2", ["0.95", "0.99"]), ("weight-decay", ["0.1", "0"])],
    )
    tuned = [f"--beta2 {more[0][0]['beta2']}", f"--weight-decay {more[0][0]['weight-decay']}"]
    muon = s.run("muon", options.short, [("optimizer", ["muon", "normuon"]), ("lr", rates)])
    for optimizer in ("muon", "normuon"):
        best[optimizer] = best_of(muon, optimizer)[0][0]["lr"]
    short = {o: (adamw if o == "adamw" else best_of(muon, o))[0][1]["last"] for o in OPTIMIZERS}
    for optimizer in OPTIMIZERS:
        edge = " (at the edge of those swept)" if best[optimizer] in (rates[0], rates[-1]) else ""
        report.append(f"- {optimizer}: best rate {best[optimizer]}{edge}")

    helped, files = {o: [] for o in OPTIMIZERS}, []
    for optimizer in OPTIMIZERS:
        base, add = additions_of(s, optimizer, best[optimizer], options.short)
        if options.no_ramp:
            del add["ramp"]
        files += [s.recipe(f"{optimizer}_{name}", *base, *tuned, *lines) for name, lines in add.items()]
        files.append(s.recipe(f"{optimizer}_plain", *base, *tuned))
    added = s.run("additions", options.short, [("recipe", files)])
    losses = {os.path.basename(r[0]["recipe"])[:-6]: r[1]["last"] for r in added}
    for optimizer in OPTIMIZERS:
        for name in ("zero-out", "ramp", "cautious"):  # an average is judged by its own loss, in the log
            if losses.get(f"{optimizer}_{name}", 9e9) < losses.get(f"{optimizer}_plain", short[optimizer]):
                helped[optimizer].append(name)

    final_files = []
    for optimizer in OPTIMIZERS:
        ranked = [r[0]["lr"] for r in (adamw if optimizer == "adamw" else best_of(muon, optimizer))][:2]
        for rate in ranked:
            base, _ = additions_of(s, optimizer, rate, options.long)
            final_files.append(s.recipe(f"{optimizer}_{rate}", *base, *tuned))
    finalists = s.run("finalists", options.long, [("recipe", final_files)])
    seeds = {}
    for optimizer in OPTIMIZERS:
        name = next(
            os.path.basename(r[0]["recipe"])[:-6]
            for r in finalists
            if os.path.basename(r[0]["recipe"]).startswith(optimizer + "_")
        )
        steps = options.long if optimizer == "adamw" else round(FRACTION * options.long)
        base, add = additions_of(s, optimizer, name.split("_")[1], steps)
        lines = [line for a in helped[optimizer] for line in add[a]]
        path = s.recipe(f"final_{optimizer}", *base, *tuned, *lines)
        runs = s.run(f"seeds_{optimizer}", steps, [("recipe", [path]), ("seed", SEEDS)])
        seeds[optimizer] = (steps, [r[1]["last"] for r in runs], [r[1]["seconds"] for r in runs])
    report += ["", "| | rate | with | steps | loss, mean of three seeds | of AdamW's steps | of its seconds |", "|---|---|---|---:|---:|---:|---:|"]
    steps0, losses0, seconds0 = seeds["adamw"]
    for optimizer in OPTIMIZERS:
        steps, each, seconds = seeds[optimizer]
        report.append(
            f"| {optimizer} | {best[optimizer]} | {', '.join(helped[optimizer])} | {steps} | {statistics.mean(each):.4f} "
            f"(+- {statistics.stdev(each):.4f}) | {steps / steps0:.2f} | {sum(seconds) / sum(seconds0):.2f} |"
        )
    goal = statistics.mean(losses0)
    for optimizer in OPTIMIZERS[1:]:
        verdict = "reaches" if statistics.mean(seeds[optimizer][1]) <= goal else "does not reach"
        report.append(f"\n{optimizer} {verdict} AdamW's {goal:.4f} in {FRACTION} of its steps.")
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
