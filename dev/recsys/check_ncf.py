#!/usr/bin/env python3
"""NeuMF on prepared ratings in PyTorch: the same initial values, batches, split and rivals as train_ncf.

    python3 dev/recsys/check_ncf.py RATINGS.bin [--seed N] [--steps N] [--log OUT/log.jsonl]

Needs torch and numpy. Prints HR@10 and NDCG@10 after the last step. With --log it compares the losses
of that run's first 100 steps, within 1e-5, and ends with "N passed, N failed". Sizes and settings are
the trainer's defaults.
"""
import argparse
import json
import math
import sys
import numpy as np
import torch
import torch.nn.functional as F

SITE_INIT, SITE_SHUFFLE, SITE_NEGATIVE, SITE_RIVAL = 0, 5, 12, 13
FACTORS, E, LAYERS, NEGATIVES, RIVALS, B, EPOCHS = 32, 64, (64, 32, 32), 4, 99, 1024, 13
NEGATIVE_DRAWS = 64
M32 = np.uint64(0xFFFFFFFF)


def philox(c0, c1, c2, c3, key):
    """Philox4x32-10 of arrays of counters: four arrays of 32 bits."""
    c = [np.asarray(x, dtype=np.uint64) for x in np.broadcast_arrays(c0, c1, c2, c3)]
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ k0, b & M32, (a >> np.uint64(32)) ^ c[3] ^ k1, a & M32]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & M32, (k1 + np.uint64(0xBB67AE85)) & M32
    return c


def stream(seed, step, layer, site):
    r = philox(step & 0xFFFFFFFF, step >> 32, layer, site, seed)
    return int(r[1]) << 32 | int(r[0])


def uniform(bits):
    return (bits.astype(np.float64) + 0.5) / 2**32


def permute(i, n, key):
    half = 1
    while half < 32 and 1 << 2 * half < n:
        half += 1
    mask, i = np.uint64((1 << half) - 1), i.astype(np.uint64)
    open_ = np.ones(len(i), dtype=bool)
    while open_.any():
        left, right = i[open_] >> np.uint64(half), i[open_] & mask
        for k in range(4):
            left, right = right, left ^ (philox(right, k, 0, 0, key)[0] & mask)
        i[open_] = left << np.uint64(half) | right
        open_ = i >= n
    return i.astype(np.int64)


def below(bits, n):
    return (bits * np.uint64(n) >> np.uint64(32)).astype(np.int64)


class Ratings:
    def __init__(self, path):
        data = np.fromfile(path, dtype=np.int32)
        self.users, self.items, pairs = (int(x) for x in data[2:5])
        self.pair = data[256:256 + 2 * pairs].reshape(-1, 2).astype(np.int64)
        self.held_out = data[256 + 2 * pairs:].astype(np.int64)
        self.rated = np.zeros((self.users, self.items), dtype=bool)  # in training
        self.rated[self.pair[:, 0], self.pair[:, 1]] = True
        self.samples = pairs * (1 + NEGATIVES)
        self.steps = self.samples // B

    def batch(self, seed, step):
        epoch, first = step // self.steps, step % self.steps * B
        p = permute(np.arange(first, first + B), self.samples, stream(seed, epoch, 0, SITE_SHUFFLE))
        positive = p % (1 + NEGATIVES) == 0
        pair = self.pair[p // (1 + NEGATIVES)]
        key, drawn, rated = stream(seed, epoch, 0, SITE_NEGATIVE), np.zeros(B, dtype=np.int64), np.ones(B, dtype=bool)
        for draw in range(NEGATIVE_DRAWS):
            drawn[rated] = below(philox(p[rated], 0, draw, 0, key)[0], self.items)
            rated = self.rated[pair[:, 0], drawn]
        items = np.where(positive, pair[:, 1], drawn)
        return torch.from_numpy(pair[:, 0].copy()), torch.from_numpy(items), torch.from_numpy(positive.astype(np.float32))

    def rivals(self, seed):
        seen = [{int(x)} for x in self.held_out]
        for user, item in self.pair:
            seen[user].add(int(item))
        rows = []
        for user in range(self.users):
            draws, row = below(philox(np.arange(8 * RIVALS), 0, 0, 0, stream(seed, user, 0, SITE_RIVAL))[0], self.items), []
            for item in draws.tolist():
                if len(row) < RIVALS and item not in seen[user] and item not in row:
                    row.append(item)
            assert len(row) == RIVALS
            rows.append([int(self.held_out[user])] + row)
        return torch.tensor(rows)


class NeuMF(torch.nn.Module):
    def __init__(self, data, seed):
        super().__init__()
        self.w, number = torch.nn.ParameterList(), 0
        for out, inputs in zip(LAYERS + (1,), (2 * E,) + LAYERS[:-1] + (FACTORS + LAYERS[-1],)):
            limit = math.sqrt(3 / inputs) if out == 1 else math.sqrt(6 / (inputs + out))
            for shape, bound in (((out, inputs), limit), ((out,), 1 / math.sqrt(inputs))):
                self.add(shape, seed, number, lambda r: bound * (2 * uniform(r[0]) - 1))
                number += 1
        for shape in ((data.users, FACTORS), (data.items, FACTORS), (data.users, E), (data.items, E)):
            normal = lambda r: 0.01 * np.sqrt(-2 * np.log(uniform(r[0]))) * np.cos(2 * np.pi * uniform(r[1]))
            self.add(shape, seed, number, normal)
            number += 1

    def add(self, shape, seed, number, values):
        n = math.prod(shape)
        values = values(philox(np.arange(n), 0, 0, 0, stream(seed, number, 0, SITE_INIT))).astype(np.float32)
        self.w.append(torch.nn.Parameter(torch.from_numpy(values.reshape(shape).copy())))

    def forward(self, u, i):
        w, layers = self.w, len(LAYERS)
        mf_user, mf_item, mlp_user, mlp_item = w[2 * layers + 2:]
        h = torch.cat([mlp_user[u], mlp_item[i]], -1)
        for k in range(layers):
            h = F.relu(F.linear(h, w[2 * k], w[2 * k + 1]))
        x = torch.cat([mf_user[u] * mf_item[i], h], -1)
        return F.linear(x, w[2 * layers], w[2 * layers + 1]).squeeze(-1)


def evaluate(model, rivals):
    with torch.no_grad():
        users = torch.arange(len(rivals))[:, None].expand_as(rivals)
        scores = model(users, rivals)
    above = (scores[:, 1:] >= scores[:, :1]).sum(1)
    hits = above < 10
    gain = torch.where(hits, math.log(2) / torch.log(above + 2.0), torch.zeros(len(rivals)))
    return hits.float().mean().item(), gain.mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--steps", type=int, default=0, help="0: all epochs")
    parser.add_argument("--log", help="compare losses with this log.jsonl")
    options = parser.parse_args()
    data = Ratings(options.ratings)
    model = NeuMF(data, options.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(options.steps or EPOCHS * data.steps):
        users, items, labels = data.batch(options.seed, step)
        loss = F.binary_cross_entropy_with_logits(model(users, items), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    hits, gain = evaluate(model, data.rivals(options.seed))
    print(f"PyTorch, seed {options.seed}, {len(losses)} steps: HR@10 {hits:.4f}, NDCG@10 {gain:.4f} "
          f"with {RIVALS} negatives, pool unseen")
    if not options.log:
        return 0
    with open(options.log) as f:
        ours = [line["loss"] for line in map(json.loads, f) if "loss" in line and "lr" in line]
    n = min(100, len(losses), len(ours))
    worst = max(abs(a - b) for a, b in zip(losses[:n], ours[:n]))
    good = n == 100 and worst <= 1e-5
    print(f"{'ok  ' if good else 'FAIL'} losses of {n} steps: largest difference {worst:.2g}")
    print(f"{int(good)} passed, {int(not good)} failed")
    return 0 if good else 1


sys.exit(main())
