#!/usr/bin/env python3
"""Compare the steps of a trainer in bf16 and in fp8: time, energy and clock, in turn on one GPU.

    python3 dev/reference/fp8_speed.py d12 --settle 400 --seconds 30 -- ./train_gpt2cu -e d12 -b 64 -t 1024 -i train.bin

Runs the command with --fp8 0, then with --fp8 2 (or --fp8-level), and both again (--turns 2). Steps count once --settle
steps and 15 seconds have passed (or --warm); after --seconds of them the run is stopped. Nothing is written by the runs.
Energy is that of NVML's counter, clocks are sampled ten times a second. Prints a line a run, then one for both:

    RESULT fp8 size=d12 B=64 T=1024 tok_s=N ratio=R joules=J mhz=M bf16_ms=.. fp8_ms=.. bf16_joules=.. bf16_mhz=..

ratio: the time of a bf16 step over that of an fp8 step, means over the turns. seq_s instead of tok_s for train_bertcu.
"""

import argparse
import ctypes
import os
import re
import subprocess
import sys
import threading
import time

STEP = re.compile(r"^step +(\d+)/\d+ \| loss .*\| ([0-9.]+) ms \|")


class Gpu:
    """The first visible GPU as NVML sees it."""

    def __init__(self):
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        if self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByIndex_v2(int(first), ctypes.byref(self.device)):
            sys.exit("fp8_speed: NVML does not answer")

    def joules(self):
        value = ctypes.c_ulonglong()
        if self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(value)):
            sys.exit("fp8_speed: this GPU has no energy counter")
        return value.value / 1000

    def mhz(self):
        value = ctypes.c_uint()
        self.nvml.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(value))  # 1: multiprocessors
        return value.value


def run(command, settle, warm, seconds, gpu, log):
    """One run: mean ms of the steps that count, joules a step, mean MHz, the last step."""
    clocks, times, began, joules, step, stop = [], [], 0.0, 0.0, 0, threading.Event()

    def sample():
        while not stop.wait(0.1):
            if began:
                clocks.append(gpu.mhz())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first = None
    with open(log, "w") as f:
        for line in process.stdout:
            f.write(line)
            found = STEP.match(line)
            if not found:
                continue
            now, step = time.monotonic(), int(found[1])
            first = first or now
            if began:
                times.append(float(found[2]))
                if now - began >= seconds:
                    break
            elif step >= settle and now - first >= warm:
                began, joules = now, gpu.joules()
    joules = gpu.joules() - joules
    stop.set()
    sampler.join()
    process.kill()
    process.wait()
    if len(times) < 10:
        sys.exit(f"fp8_speed: {' '.join(command)}: {len(times)} steps were measured; its output is in {log}")
    return sum(times) / len(times), joules / len(times), sum(clocks) / max(1, len(clocks)), step


def flag(command, name):
    return int(command[command.index(name) + 1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", help="name for the report")
    parser.add_argument("--settle", type=int, default=50, help="steps before those that count")
    parser.add_argument("--warm", type=float, default=15, help="seconds before those that count")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--fp8-level", default="2")
    parser.add_argument("--out", default=".", help="folder for the outputs of the runs")
    parser.add_argument("command", nargs="+", help="the trainer with -b and -t, without -x, -o and --fp8")
    a = parser.parse_args()

    gpu, means = Gpu(), {"0": [], a.fp8_level: []}
    for turn in range(a.turns):
        for level in means:
            command = a.command + "-x 1000000 -v 0 -s 0 -m 0 -n 0 --fp8".split() + [level, "-o", ""]
            log = os.path.join(a.out, f"fp8_{a.size}_{level}_{turn}.log")
            ms, joules, mhz, step = run(command, a.settle, a.warm, a.seconds, gpu, log)
            means[level].append((ms, joules, mhz))
            print(f"{a.size} --fp8 {level}: {ms:.2f} ms, {joules:.1f} J, {mhz:.0f} MHz up to step {step}", flush=True)
    (ms, joules, mhz), (fp8_ms, fp8_joules, fp8_mhz) = ([sum(x) / len(x) for x in zip(*m)] for m in means.values())
    batch, length = flag(a.command, "-b"), flag(a.command, "-t")
    bert = "bert" in a.command[0]
    rate = f"seq_s={1000 * batch / fp8_ms:.0f}" if bert else f"tok_s={1000 * batch * length / fp8_ms:.0f}"
    print(
        f"RESULT fp8 size={a.size} B={batch} T={length} {rate} ratio={ms / fp8_ms:.3f} joules={fp8_joules:.1f} "
        f"mhz={fp8_mhz:.0f} bf16_ms={ms:.2f} fp8_ms={fp8_ms:.2f} bf16_joules={joules:.1f} bf16_mhz={mhz:.0f}"
    )


if __name__ == "__main__":
    main()
