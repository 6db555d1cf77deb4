#!/usr/bin/env python3
"""Compare the gradients of runs tensor by tensor, such as those of an fp8 step with those of fp32.

    step="-x 1 -l 0 --beta1 0 --clip 0 -n 0 -v 0 -s 0"
    build/fp32/train_gpt2cu -e d12 -b 16 -d 65536 $step -o out/fp32
    ./train_gpt2cu          -e d12 -b 16 -d 65536 $step -o out/fp8 --fp8 1
    ./train_gpt2            -e d12 -b 16 -d 65536 $step -o out/cpu --fp8 1
    python3 dev/reference/fp8_gradients.py out/fp32 out/fp8 out/cpu

With --beta1 0 the first moment in a checkpoint is the gradient of its last step; with a rate of 0 the weights do not
change. For the gradients of a trained model, pass its directory as -e. Prints, per tensor and for each run after the
first, the cosine with the first run's gradient and the ratio of the norms. Then a line per run:

    RESULT fp8_gradients run=out/fp8 weights=50 cosine_min=C cosine_median=C norm_min=R norm_max=R

The exit status is 1 if the second run has a weight (a matrix) whose cosine is below 0.99 or whose norm is more than 5 %
off, or if the median of the cosines is below 0.997.
"""

import argparse
import glob
import json
import os
import sys

import numpy as np


class Gradients:
    """The first moments in a run's newest checkpoint."""

    def __init__(self, run):
        files = sorted(glob.glob(os.path.join(run, "ckpt", "*", "optimizer.safetensors")))
        if not files:
            sys.exit(f"fp8_gradients: {run}: has no ckpt/*/optimizer.safetensors")
        self.run, self.file = run, files[-1]
        with open(self.file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
        self.start = 8 + size
        self.tensors = {name[2:]: t for name, t in header.items() if name.startswith("m.")}

    def read(self, name):
        tensor = self.tensors[name]
        begin, end = tensor["data_offsets"]
        assert tensor["dtype"] == "F32", f"{self.file}: {name} is {tensor['dtype']}"
        return np.fromfile(self.file, "<f4", (end - begin) // 4, offset=self.start + begin).astype(np.float64)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="directories (-o) of the runs; the first is the reference")
    a = parser.parse_args()
    want, *others = map(Gradients, a.runs)
    found = {g.run: [] for g in others}
    print("cosine and ratio of norms:", *found)
    for name, tensor in want.tensors.items():
        x, line = want.read(name), f"{name:60}"
        for g in others:
            y = g.read(name)
            sizes = np.linalg.norm(x), np.linalg.norm(y)
            cosine = float(x @ y / (sizes[0] * sizes[1])) if sizes[0] * sizes[1] > 0 else float(sizes[0] == sizes[1])
            ratio = float(sizes[1] / sizes[0]) if sizes[0] > 0 else 1.0
            line += f" {cosine:9.6f} {ratio:8.5f}"
            if len(tensor["shape"]) == 2:
                found[g.run].append((cosine, ratio))
        print(line)
    good = True
    for run, weights in found.items():
        cosines, ratios = zip(*weights)
        print(
            f"RESULT fp8_gradients run={run} weights={len(weights)} cosine_min={min(cosines):.5f} "
            f"cosine_median={np.median(cosines):.5f} norm_min={min(ratios):.4f} norm_max={max(ratios):.4f}"
        )
        if run == others[0].run:
            good = min(cosines) >= 0.99 and np.median(cosines) >= 0.997
            good = good and all(abs(ratio - 1) <= 0.05 for ratio in ratios)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
