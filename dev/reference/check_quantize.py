#!/usr/bin/env python3
"""Compare llmc/ops/quantize on the CPU, its reference and its launcher, with PyTorch, byte for byte.

    dev/reference/check_quantize.py

Compares all 65,536 values of bf16, at several scales, in both formats, with x.float().mul(scale).clamp(-max,
max).to(dtype). (PyTorch's plain conversion saturates or not, depending on format and version.) NaN is 0x7f here,
whatever its sign; PyTorch keeps the sign. Then the transposes of tensors with any number of rows, padded with zeros to
a multiple of 16. Needs torch and gcc.
"""

import ctypes
import os
import subprocess
import sys
import tempfile

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FORMATS = [("E4M3", torch.float8_e4m3fn, 448.0), ("E5M2", torch.float8_e5m2, 57344.0)]
SCALES = [2.0**e for e in (-120, -20, -6, 0, 1, 5, 9, 14, 20, 120)]

WRAPPER = r"""
#include "llmc/ops/quantize/quantize.h"
void run(int launcher, uint8_t* y, uint8_t* yt, Fp8Stats* stats, float* scale, int format, float* x, int N, int C) {
    QuantizeOutput out = {y, yt, stats, scale, (Fp8Format)format};
    Context ctx;
    context_init(&ctx);
    if (launcher) quantize(out, quantize_plain(x), N, C, &ctx);
    else quantize_ref(out, x, N, C);
    context_free(&ctx);
}
"""


class Stats(ctypes.Structure):
    _fields_ = [("clipped", ctypes.c_uint64), ("flushed", ctypes.c_uint64), ("amax", ctypes.c_float)]


def build(folder):
    source, library = os.path.join(folder, "quantize.c"), os.path.join(folder, "quantize.so")
    with open(source, "w") as f:
        f.write(WRAPPER)
    subprocess.run(["gcc", "-std=c11", "-D_GNU_SOURCE", "-O2", "-fopenmp", "-ffp-contract=off", "-shared", "-fPIC", "-I" + ROOT,
                    source, "-o", library, "-lm"], check=True)
    return ctypes.CDLL(library)


def quantize(library, launcher, x, scale, format):
    """Bytes y [N, C] and yt [C, Np], and the statistics."""
    N, C = x.shape
    y = torch.full((N, C), 0xA5, dtype=torch.uint8)
    yt = torch.full((C, (N + 15) // 16 * 16), 0xA5, dtype=torch.uint8)
    stats = Stats(0, 0, 0)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (y, yt, x)]
    library.run(launcher, pointers[0], pointers[1], ctypes.byref(stats), ctypes.byref(ctypes.c_float(scale)), format, pointers[2], N, C)
    return y, yt, stats


def of_pytorch(x, scale, dtype, largest):
    return torch.where(x.isnan(), torch.tensor(0x7F, dtype=torch.uint8),
                       x.mul(scale).clamp(-largest, largest).to(dtype).view(torch.uint8))


def main():
    passed = failed = 0
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float().reshape(256, 256)
    tensors = [("every bf16 number", patterns)]
    for N, C in ((1, 16), (15, 32), (17, 48), (100, 768)):
        tensors.append((f"N={N} C={C}", torch.randn(N, C, generator=torch.Generator().manual_seed(N)).bfloat16().float()))
    with tempfile.TemporaryDirectory() as folder:
        library = build(folder)
        for number, (name, dtype, largest) in enumerate(FORMATS):
            for what, x in tensors:
                for scale in SCALES if x is patterns else [32.0]:
                    want = of_pytorch(x, scale, dtype, largest)
                    finite = x[~x.isnan()]
                    top = 0x7E if number == 0 else 0x7B
                    want_stats = [(want & 0x7F == top).sum().item(), (want & 0x7F == 0).sum().item(), finite.abs().max().item()]
                    for launcher in (0, 1):
                        y, yt, stats = quantize(library, launcher, x, scale, number)
                        rows = x.shape[0]
                        wrong = (y != want).sum().item()
                        same = wrong == 0 and torch.equal(yt[:, :rows], want.t()) and yt[:, rows:].count_nonzero() == 0
                        same = same and [stats.clipped, stats.flushed] == want_stats[:2]
                        same = same and (x.isnan().any().item() or stats.amax == want_stats[2])
                        passed, failed = passed + same, failed + (not same)
                        print(f"{'ok  ' if same else 'FAIL'} {name} scale={scale:g} {what}, {'launcher' if launcher else 'reference'}: "
                              f"{wrong} of {x.numel()} bytes differ, {stats.clipped} clipped, {stats.flushed} flushed")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
