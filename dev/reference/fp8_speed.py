#!/usr/bin/env python3
"""Compare the steps of a trainer in bf16 and in fp8: time, energy and clock, in turn on one GPU.

    python3 dev/reference/fp8_speed.py d12 --settle 400 --seconds 30 -- ./train_gpt2cu -e d12 -b 64 -t 1024 -i train.bin

Runs the command with --fp8 0, then with --fp8 1, and both again (--turns 2). Both processes stay alive, and one is
stopped by a signal during the other's turn, so that the steps to --settle are trained only once. With --apart each turn
is a new run. A turn is measured for --seconds, once --settle steps of the run and 15 seconds of the turn (or --warm)
have passed. Energy is from NVML's counter; clocks are sampled ten times a second. Prints a line per turn, then one for
all:

    RESULT fp8 size=d12 B=64 T=1024 tok_s=N ratio=R joules=J mhz=M bf16_ms=.. fp8_ms=.. bf16_joules=.. bf16_mhz=..

ratio: time of a bf16 step / time of an fp8 step, means over the turns. train_bertcu gives seq_s instead of tok_s. The
runs write nothing; what they print is in OUT/fp8_SIZE_0_0.log and the like.
"""

import argparse
import ctypes
import os
import re
import signal
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


class Trainer:
    """A run of the trainer. Between turns it is stopped by a signal: then it has no work on the GPU."""

    def __init__(self, command, log):
        self.command, self.log = command, log
        self.steps = []  # (time when its line came, step, ms)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        with open(self.log, "w") as f:
            for line in self.process.stdout:
                f.write(line)
                found = STEP.match(line)
                if found:
                    self.steps.append((time.monotonic(), int(found[1]), float(found[2])))

    def alive(self):
        if self.process.poll() is not None:
            sys.exit(f"fp8_speed: {' '.join(self.command)}: ended; its output is in {self.log}")

    def turn(self, settle, warm, seconds, gpu):
        """Mean ms of the steps that count, joules a step, mean MHz, the last step."""
        self.process.send_signal(signal.SIGCONT)
        before, clocks, joules, began, first = len(self.steps), [], 0.0, None, None
        while began is None or time.monotonic() - began < seconds:
            time.sleep(0.1)
            self.alive()
            if len(self.steps) == before:
                continue
            first = first or self.steps[before][0]
            if began:
                clocks.append(gpu.mhz())
            elif self.steps[-1][1] >= settle and time.monotonic() - first >= warm:
                start = len(self.steps)
                while len(self.steps) == start:  # begin with a step's end
                    time.sleep(0.001)
                    self.alive()
                start = len(self.steps)
                began, joules = time.monotonic(), gpu.joules()
        while len(self.steps) == start or self.steps[-1][0] < began + seconds:
            time.sleep(0.001)
            self.alive()
        times, joules = [ms for _, _, ms in self.steps[start:]], gpu.joules() - joules
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(1)  # for what is on the GPU
        if len(times) < 10:
            sys.exit(f"fp8_speed: {' '.join(self.command)}: {len(times)} steps were measured; its output is in {self.log}")
        return sum(times) / len(times), joules / len(times), sum(clocks) / max(1, len(clocks)), self.steps[-1][1]

    def end(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()


def flag(command, name):
    return int(command[command.index(name) + 1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", help="name for the report")
    parser.add_argument("--settle", type=int, default=50, help="steps before those that count")
    parser.add_argument("--warm", type=float, default=15, help="seconds before those that count, in each turn")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--apart", action="store_true", help="one run at a time: both do not fit into memory")
    parser.add_argument("--out", default=".", help="folder for the logs of the runs")
    parser.add_argument("command", nargs="+", help="the trainer with -b and -t, without -x, -o and --fp8")
    a = parser.parse_args()

    gpu, means, running = Gpu(), {0: [], 1: []}, {}
    try:
        for turn in range(a.turns):
            for fp8 in means:
                name = os.path.join(a.out, f"fp8_{a.size}_{fp8}")
                command = a.command + f"-x 1000000 -v 0 -s 0 -n 0 --fp8 {fp8}".split() + ["-o", ""]
                if fp8 not in running:
                    running[fp8] = Trainer(command, f"{name}_{turn}.log")
                ms, joules, mhz, step = running[fp8].turn(a.settle, a.warm, a.seconds, gpu)
                means[fp8].append((ms, joules, mhz))
                print(f"{a.size} --fp8 {fp8}: {ms:.2f} ms, {joules:.1f} J, {mhz:.0f} MHz up to step {step}", flush=True)
                if a.apart:
                    running.pop(fp8).end()
    finally:
        for trainer in running.values():
            trainer.end()
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
