#!/usr/bin/env python3
"""Runs a record of docs/records.md again: GPT-2 124M to a validation loss, and its seconds beside a fixed baseline's.

    python3 scripts/records.py TARGET [--seeds 1337 1338 1339] [--out out/records] -- ./train_gpt2cu -i TRAIN -j VAL

TARGET: a key of RECORDS. Before each seed, 200 steps of the baseline run on the same GPU. The baseline's seconds
are its number of steps times their mean, without the first 10. The record's seconds are the sum of its steps,
without validation and checkpoints. Prints "RESULT to_loss ..." with means over the seeds.

Exit status: 0 every seed reaches the target; 1 one does not, or its trainer fails; 2 wrong usage.
"""
import os
import pathlib
import statistics
import subprocess
import sys

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from user_error import Parser, Unreachable, UserError, parse_json, run  # noqa: E402

ADAMW = "--recipe gpt2-124m"  # 1,340 steps end at 3.9444, three seeds (c89b3ab)
LLMC_FLAGS = "-e d12 -b 64 -t 1024 -l 6e-4 -u 100 -q 0.1 -c 0.1"  # 1,340 steps end at 4.3036 (c89b3ab)
LLMC_SECONDS = 158.6  # llm.c itself with these flags, one H200, 1,340 steps: it ends at 4.8196 (c89b3ab)
NORMUON = "--recipe gpt2-124m-normuon"
RECORDS = {  # target: baseline, flags of the record
    "3.9444": (ADAMW, NORMUON),
    "4.3036": (LLMC_FLAGS, NORMUON + " --lr 7e-3 --warmup 100 --steps 740"),
    "4.8196": (LLMC_SECONDS, NORMUON + " --lr 1e-2 --warmup 60 --steps 450"),
}
BASELINE_STEPS = 1340


def train(command, flags, folder, *more):
    """One run: the milliseconds of its steps, and its validation losses."""
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ["-o", str(folder), "--overwrite", "1", "-m", "0", "-s", "0", "-n", "0"]
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        status = subprocess.run([*command, *flags.split(), *quiet, *more], stdout=output, stderr=output).returncode
    if status:
        raise Unreachable(f"{command[0]}: status {status}; {folder}/output.txt says why")
    lines = [parse_json(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["ms"] for line in lines if "ms" in line], [line["val_loss"] for line in lines if "val_loss" in line]


def main():
    parser = Parser(__doc__)
    parser.add_argument("target", choices=RECORDS)
    parser.add_argument("--seeds", nargs="+", default=["1337", "1338", "1339"])
    parser.add_argument("--out", default="out/records", type=pathlib.Path)
    parser.add_argument("command", nargs="+", help="the trainer with its data, after --")
    a = parser.parse_args()
    baseline, flags = RECORDS[a.target]
    seconds, losses, base = [], [], []
    for seed in a.seeds:
        if baseline == LLMC_SECONDS:
            base.append(LLMC_SECONDS)
        else:
            ms, _ = train(a.command, baseline, a.out / f"{a.target}_baseline_{seed}", "-x", "200", "-v", "0")
            base.append(statistics.mean(ms[10:]) / 1000 * BASELINE_STEPS)
        ms, validations = train(a.command, flags, a.out / f"{a.target}_{seed}", "-v", "1000000", "--seed", seed)
        if not validations:
            raise UserError("the trainer has no validation data; give -j")
        seconds.append(sum(ms) / 1000)
        losses.append(validations[-1])
        print(f"seed={seed} loss={losses[-1]:.4f} seconds={seconds[-1]:.2f} base_seconds={base[-1]:.2f}", flush=True)
    mean, base_mean = statistics.mean(seconds), statistics.mean(base)
    print(f"RESULT to_loss target={a.target} seconds={mean:.2f} base_seconds={base_mean:.2f} "
          f"ratio={mean / base_mean:.3f} steps={len(ms)} seeds={len(a.seeds)} "
          f"loss={statistics.mean(losses):.4f} worst={max(losses):.4f}")
    return int(max(losses) > float(a.target))


if __name__ == "__main__":
    sys.exit(run(main))
