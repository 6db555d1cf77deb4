#!/usr/bin/env python3
"""Runs a record of docs/records.md again, and its seconds beside those of a fixed baseline: GPT-2 124M to a validation
loss, or a small BERT to 55.0 % of the masked tokens.

    python3 scripts/records.py TARGET [--seeds 1337 1338 1339] [--out out/records] -- ./train_gpt2cu -i TRAIN -j VAL

TARGET: a key of RECORDS. Before each seed, 200 steps of the baseline run on the same GPU. The baseline's seconds
are its number of steps times their mean, without the first 10. The record's seconds are the sum of its steps,
without validation and checkpoints. Prints "RESULT to_loss ..." or "RESULT bert_accuracy ..." with means over the seeds.

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
BERT_ADAMW = "--recipe bert-small"  # 63,000 steps end at 55.0 %, one seed (dev/results/enwiki_bert.md)
RECORDS = {  # target: baseline, flags of the record
    "3.9444": (ADAMW, NORMUON),
    "4.3036": (LLMC_FLAGS, NORMUON + " --lr 7e-3 --warmup 100 --steps 740"),
    "4.8196": (LLMC_SECONDS, NORMUON + " --lr 1e-2 --warmup 60 --steps 450"),
    "55.0": (BERT_ADAMW, "--recipe bert-small-normuon"),
}
BASELINE_STEPS = {ADAMW: 1340, LLMC_FLAGS: 1340, BERT_ADAMW: 63000}


def train(command, flags, folder, *more):
    """One run: the milliseconds of its steps, and its validations."""
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ["-o", str(folder), "--overwrite", "1", "-m", "0", "-s", "0", "-n", "0"]
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        status = subprocess.run([*command, *flags.split(), *quiet, *more], stdout=output, stderr=output).returncode
    if status:
        raise Unreachable(f"{command[0]}: status {status}; {folder}/output.txt says why")
    lines = [parse_json(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["ms"] for line in lines if "ms" in line], [line for line in lines if "val_loss" in line]


def main():
    parser = Parser(__doc__)
    parser.add_argument("target", choices=RECORDS)
    parser.add_argument("--seeds", nargs="+", default=["1337", "1338", "1339"])
    parser.add_argument("--out", default="out/records", type=pathlib.Path)
    parser.add_argument("command", nargs="+", help="the trainer with its data, after --")
    a = parser.parse_args()
    baseline, flags = RECORDS[a.target]
    is_bert = baseline == BERT_ADAMW
    what = "accuracy" if is_bert else "loss"
    seconds, results, base = [], [], []
    for seed in a.seeds:
        if baseline == LLMC_SECONDS:
            base.append(LLMC_SECONDS)
        else:
            ms, _ = train(a.command, baseline, a.out / f"{a.target}_baseline_{seed}", "-x", "200", "-v", "0")
            base.append(statistics.mean(ms[10:]) / 1000 * BASELINE_STEPS[baseline])
        ms, validations = train(a.command, flags, a.out / f"{a.target}_{seed}", "-v", "1000000", "--seed", seed)
        if not validations:
            raise UserError("the trainer has no validation data; give -j")
        seconds.append(sum(ms) / 1000)
        results.append(100 * validations[-1]["val_mlm_accuracy"] if is_bert else validations[-1]["val_loss"])
        print(f"seed={seed} {what}={results[-1]:.4f} seconds={seconds[-1]:.2f} base_seconds={base[-1]:.2f}", flush=True)
    mean, base_mean, worst = statistics.mean(seconds), statistics.mean(base), (min if is_bert else max)(results)
    print(f"RESULT {'bert_accuracy' if is_bert else 'to_loss'} target={a.target} seconds={mean:.2f} "
          f"base_seconds={base_mean:.2f} ratio={mean / base_mean:.3f} steps={len(ms)} seeds={len(a.seeds)} "
          f"{what}={statistics.mean(results):.4f} worst={worst:.4f}")
    return int(worst < float(a.target) if is_bert else worst > float(a.target))


if __name__ == "__main__":
    sys.exit(run(main))
