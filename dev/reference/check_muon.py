#!/usr/bin/env python3
"""Compare whole steps of Muon with torch.optim.Muon:

    make build/muon_steps && dev/reference/check_muon.py

Ten steps at rate 1e-2 with decay, for matrices with more, as many and fewer rows than columns.
torch.optim.Muon computes Newton-Schulz in bf16. With the same loop in fp32 instead, its weights must agree within 1e-6,
relative to a weight that is larger than 1 (they are of standard deviation 1; fp32 has steps of 2.4e-7 at 2 to 4).
As it is, the sum of ten steps must agree within 5 % of its length. NorMuon and cautious decay, which PyTorch lacks, are
compared with the formulas in float64. Needs torch 2.9 or later and numpy. Ends with "N passed, N failed".
"""

import struct
import subprocess
import sys

import numpy as np
import torch

STEPS, RATE, DECAY, MOMENTUM, BETA2 = 10, 1e-2, 0.1, 0.95, 0.95
SHAPES = [(96, 32), (128, 128), (48, 160)]
A, B, C = 3.4445, -4.7750, 2.0315


def ours(w, grads, normuon=0, cautious=0):
    head = struct.pack("<5i3d", *w.shape, len(grads), normuon, cautious, RATE, DECAY, MOMENTUM)
    data = b"".join(x.astype(np.float32).tobytes() for x in [w, *grads])
    out = subprocess.run(["build/muon_steps"], input=head + data, stdout=subprocess.PIPE, check=True).stdout
    return np.frombuffer(out, np.float32).reshape(len(grads), *w.shape).astype(np.float64)


def iterate(x):
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.T if tall else x


def theirs(w, grads, in_fp32):
    def newton_schulz(grad, ns_coefficients, ns_steps, eps):
        x = grad / grad.norm().clamp(min=eps)
        return iterate(x)

    module = sys.modules["torch.optim._muon"]
    kept = module._zeropower_via_newtonschulz
    if in_fp32:
        module._zeropower_via_newtonschulz = newton_schulz
    p = torch.nn.Parameter(torch.tensor(w, dtype=torch.float32))
    optimizer = torch.optim.Muon([p], lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    found = []
    for g in grads:
        p.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step()
        found.append(p.detach().numpy().astype(np.float64))
    module._zeropower_via_newtonschulz = kept
    return np.stack(found)


def formula(w, grads, normuon, cautious):
    rows, cols = w.shape
    m, v, found = np.zeros_like(w), np.zeros(max(rows, cols)), []
    for g in grads:
        m = MOMENTUM * m + (1 - MOMENTUM) * g
        u = (1 - MOMENTUM) * g + MOMENTUM * m
        norm = np.linalg.norm(u)
        o = iterate(u / max(norm, 1e-7))
        if normuon:
            v = BETA2 * v + (1 - BETA2) * np.mean(o * o, axis=1 if rows >= cols else 0)
            r = np.maximum(v, 1e-10) ** -0.5
            scaled = o * (r[:, None] if rows >= cols else r[None, :])
            o = scaled * np.linalg.norm(o) / max(np.linalg.norm(scaled), 1e-10)
        decays = (o * w >= 0) if cautious else 1
        w = w * (1 - RATE * DECAY * decays) - RATE * 0.2 * max(rows, cols) ** 0.5 * o
        found.append(w)
    return np.stack(found)


def distance(got, want):
    return (np.abs(got - want) / np.maximum(1, np.abs(want))).max()


def main():
    rng, results = np.random.default_rng(24), []

    def judge(name, error, limit):
        results.append(error <= limit)
        print("%-4s %-62s %.1e of %.0e" % ("ok" if error <= limit else "FAIL", name, error, limit))

    for rows, cols in SHAPES:
        w = rng.standard_normal((rows, cols)).astype(np.float32).astype(np.float64)
        grads = [rng.standard_normal((rows, cols)).astype(np.float32).astype(np.float64) * 0.1 for _ in range(STEPS)]
        got, shape = ours(w, grads), "%d x %d" % (rows, cols)
        judge("torch.optim.Muon in fp32, %s" % shape, distance(got, theirs(w, grads, True)), 1e-6)
        error = np.abs(got - theirs(w, grads, False)).max() / (RATE * 0.2 * max(rows, cols) ** 0.5)
        judge("torch.optim.Muon as it is, part of lr * s, %s" % shape, error, 0.05)
        for normuon, cautious in [(1, 0), (0, 1), (1, 1)]:
            error = distance(ours(w, grads, normuon, cautious), formula(w, grads, normuon, cautious))
            names = [n for n, on in [("NorMuon", normuon), ("cautious", cautious)] if on]
            judge("formula in float64: %s, %s" % (", ".join(names), shape), error, 1e-6)
    print("%d passed, %d failed" % (sum(results), len(results) - sum(results)))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
