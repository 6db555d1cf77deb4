#!/usr/bin/env python3
"""The matmuls of a training step in fp8 and in the build's own type, as a table in Markdown.

    ./train_gpt2cu -e d12 -b 64 -x 20 --profile 2 --profile-warmup 16 -v 0 -s 0 -n 0 --fp8 0 -o out/bf16
    ./train_gpt2cu -e d12 -b 64 -x 20 --profile 2 --profile-warmup 16 -v 0 -s 0 -n 0 --fp8 1 -o out/fp8
    python3 dev/reference/fp8_table.py d12 out/bf16/profile out/fp8/profile

A line per matmul: the layer's, and which of y = x w^T + b, dx = dy w and dw = dy^T x, all layers together. Time and
TFLOP/s are of all the op's kernels in the reported step. In bf16 these include GELU, its derivative and bias sums where
the op has them; in fp8 the rounding passes do (last line: their sum; twice as many in the first 16 steps).
"""

import argparse
import collections
import json
import pathlib
import re

LARGEST_FAST_SUM = 8192  # MATMUL_FAST_TERMS
PASSES = {"forward": ("y", "x E4M3, w E4M3"), "input": ("dx", "dy E5M2, w E4M3"), "weight": ("dw", "dy E5M2, x E4M3")}


def ops(profile):
    """The rows of the table of ops."""
    page = (profile / "profile.html").read_text()
    tables, _ = json.JSONDecoder().raw_decode(page, page.index('[{"id"'))
    table = next(t for t in tables if t["id"] == "ops")
    names = [name for name, _ in table["columns"]]
    return [dict(zip(names, row)) for row in table["rows"]]


def layer(IC, OC):
    if OC > 16 * IC:
        return "head"
    return {3: "qkv", 4: "fc"}.get(OC // IC, "attproj" if OC == IC else "fcproj" if IC == 4 * OC else f"{OC} x {IC}")


def products(rows):
    found = collections.OrderedDict()
    for row in rows:
        name = re.fullmatch(r"matmul(?:_gelu)?(?:_backward)?_(forward|input|weight)(_fp8)?", row["op"] or "")
        sizes = re.search(r"N=(\d+) IC=(\d+) OC=(\d+)", row["shapes"] or "")
        if not name or not sizes or not row["gflop"]:
            continue
        N, IC, OC = map(int, sizes.groups())
        key = (name[1], IC, OC)
        one = found.setdefault(key, {"N": N, "calls": 0, "ms": 0, "gflop": 0, "fp8": name[2] is not None})
        for part in ("calls", "ms", "gflop"):
            one[part] += row[part]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("plain", type=pathlib.Path)
    parser.add_argument("fp8", type=pathlib.Path)
    a = parser.parse_args()
    plain, rows = products(ops(a.plain)), ops(a.fp8)
    total = collections.Counter()
    print("| model | product | calls | operands | sums | bf16 ms | TFLOP/s | fp8 ms | TFLOP/s |")
    print("|---|---|---:|---|---|---:|---:|---:|---:|")
    for (kind, IC, OC), p in products(rows).items():
        was = plain.get((kind, IC, OC))
        if p["gflop"] < 1e-3 * sum(q["gflop"] for q in plain.values()) / len(plain):
            continue
        terms = {"forward": IC, "input": OC, "weight": p["N"]}[kind]
        name, operands = PASSES[kind]
        sums = f"{terms}, {'fast' if terms <= LARGEST_FAST_SUM else 'promoted'}" if p["fp8"] else f"{terms}, fp32"
        before = f"{was['ms']:.2f} | {was['gflop'] / was['ms']:.0f}" if was else "- | -"
        print(
            f"| {a.model} | {layer(IC, OC)} {name} | {p['calls']} | {operands if p['fp8'] else 'bf16'} | {sums} "
            f"| {before} | {p['ms']:.2f} | {p['gflop'] / p['ms']:.0f} |"
        )
        total["bf16"] += was["ms"] if was else 0
        total["fp8"] += p["ms"]
    rounding = sum(row["ms"] for row in rows if (row["op"] or "").startswith("quantize"))
    print(f"| {a.model} | all | | | | {total['bf16']:.2f} | | {total['fp8']:.2f} | |")
    print(f"| {a.model} | passes that round | | | | | | {rounding:.2f} | |")


if __name__ == "__main__":
    main()
