#!/usr/bin/env python3
"""Check that a profile adds up, and that it agrees with other tools.

    check_profile.py OUT/profile [--overhead PERCENT] [--waits-of OTHER/profile] [--ncu FILE.csv] [--listing FILE.csv]

Rows and gaps must add up to the step's time within 1 per cent, or 30 us for a launch before the first row and the
host's wait after the last one; neither of these may be negative. Every row must belong to an op, and no launch may be
dropped. --overhead: the profiled step must not be slower than the plain one by more than this. --waits-of: in the step,
the host must not wait for the GPU, nor a stream for an event, more often than in the other profile's step, and no more
numbers may be copied to the host. --ncu: `ncu --csv --page raw` of one step; its kernels must have the same names,
equally often. --listing: the output of kernel_list.c for the same program without --profile, step after step; the ten
heaviest kernels must take the same time within 5 per cent. A GPU lowers its clock after some steps at full load, which
a profiled run does not sustain, so each launch is compared in the step where it was fastest. Prints one line "RESULT
..." and a line per failure; exit status 1 if there is one.
"""
import argparse
import collections
import csv
import pathlib
import subprocess
import sys


def read_step(profile):
    """The step's numbers; None for an unknown one."""
    rows = csv.DictReader((profile / "summary.csv").open(newline=""))
    return {row["name"]: float(row["value"]) if row["value"] else None for row in rows if row["kind"] == "number"}


def short(name):
    """The name without return type and arguments; of a CUTLASS kernel, the argument that tells it apart."""
    name = name.removeprefix("void ")
    head = name.split("<")[0].split("(")[0]
    if head.startswith("cutlass::") and "<" in name:
        return short(name.split("<", 1)[1].rstrip(">"))
    return head.split("::")[-1].split(",")[0]


def is_kernel(row):
    return not row["kernel"].startswith(("copy_", "fill_"))


def add_up(step):
    """Not of before_ms and after_ms, which are what is left of the step's time: with them every sum is right."""
    parts = ("kernels_ms", "gap_host_ms", "gap_stream_ms", "gap_kernels_ms")
    return sum(step[part] for part in parts) - step["overlap_ms"]


def demangled(names):
    lines = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return lines.split("\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("profile", type=pathlib.Path)
    parser.add_argument("--overhead", type=float)
    parser.add_argument("--waits-of", type=pathlib.Path)
    parser.add_argument("--ncu", type=pathlib.Path)
    parser.add_argument("--listing", type=pathlib.Path)
    args = parser.parse_args()
    step = read_step(args.profile)
    rows = list(csv.DictReader((args.profile / "kernels.csv").open(newline="")))
    failures = []
    total, profiled, plain = add_up(step), step["profiled_ms"], step["plain_ms"]
    if not abs(total - profiled) <= max(0.01 * profiled, 0.03):
        failures.append(f"rows and gaps are {total:.3f} ms, the step is {profiled:.3f} ms")
    for key in ("before_ms", "after_ms"):
        if step[key] is not None and step[key] < -0.001:
            failures.append(f"{key} is {step[key]:.3f}: the step ends before its rows do, or begins after them")
    for key in ("unattributed", "dropped"):
        if step[key] != 0:
            failures.append(f"{step[key]:.0f} launches are {key}")
    result = f"RESULT profile rows={len(rows)} rows_and_gaps_ms={total:.3f} profiled_ms={profiled:.3f}"
    if plain is not None:
        overhead = 100 * (profiled / plain - 1)
        if args.overhead is not None and not overhead <= args.overhead:
            failures.append(f"profiling makes the step {overhead:.1f} % slower")
        result += f" plain_ms={plain:.3f} overhead_percent={overhead:.1f}"
    elif args.overhead is not None:
        failures.append("there is no plain step to compare with")

    if args.waits_of:
        other = read_step(args.waits_of)
        for key in ("host_waits", "stream_waits", "readbacks"):
            if step[key] > other[key]:
                failures.append(f"{key}: {step[key]:.0f} in a step, {other[key]:.0f} in {args.waits_of}")
            result += f" {key}={step[key]:.0f}/{other[key]:.0f}"

    if args.ncu:
        lines = [line for line in args.ncu.read_text().split("\n") if line.startswith('"')]
        theirs = collections.Counter(short(r["Kernel Name"]) for r in csv.DictReader(lines) if r["ID"].isdigit())
        ours = collections.Counter(short(r["full_name"]) for r in rows if is_kernel(r))
        for name in sorted(ours.keys() | theirs.keys()):
            if ours[name] != theirs[name]:
                failures.append(f"{name}: {ours[name]} here, {theirs[name]} of ncu")
        result += f" ncu_kernels={theirs.total()}"

    if args.listing:
        times, ours = collections.defaultdict(list), collections.defaultdict(list)
        lines = [line.split(",", 1) for line in args.listing.read_text().splitlines()]
        for (nanoseconds, _), name in zip(lines, demangled([line[1] for line in lines])):
            times[short(name)].append(int(nanoseconds) / 1e3)
        for row in rows:
            if is_kernel(row):
                ours[short(row["full_name"])].append(float(row["min_us"] or row["us"]))
        worst = 0
        for name in sorted(ours, key=lambda name: -sum(ours[name]))[:10]:
            launches = len(ours[name])
            steps = [times[name][i : i + launches] for i in range(0, len(times[name]) - launches + 1, launches)]
            theirs = sum(min(step[k] for step in steps) for k in range(launches)) if steps else float("nan")
            difference = 100 * (sum(ours[name]) / theirs - 1)
            worst = max(worst, abs(difference))
            if not abs(difference) <= 5:
                failures.append(f"{name}: {sum(ours[name]):.2f} us here, {theirs:.2f} us in the plain listing")
        result += f" listing_worst_percent={worst:.1f}"

    print(result)
    for failure in failures:
        print("FAIL", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
