#!/usr/bin/env python3
"""Extract the numbers of five published profiles from their texts: kernels, counts and times, but no sentences.

    python3 dev/reference/read_published.py FOLDER        FOLDER holds the texts that published/README.md names

Writes dev/reference/published/*.csv, which scripts/profile_reference.py compares with our own profiles. Ends with
status 1 if a total differs from the published one.
"""

import collections
import csv
import os
import re
import sys

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "published")


def check(what, found, expected, tolerance=0):
    if abs(found - expected) > tolerance:
        sys.exit(f"error: {what}: {found} where {expected} is published")


def write(name, header, rows):
    with open(os.path.join(OUT, name), "w", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    print(f"{name}: {len(rows)} rows")


def short(kernel):
    """A kernel's name without its result, template arguments, arguments and namespaces."""
    library = re.search(r"cutlass_\w+", kernel)
    if library: return library[0]
    name = re.sub(r"^void ", "", kernel.strip()).replace("<unnamed>::", "")
    return name if name.startswith("[") else re.split(r"[<(]", name)[0].strip().split("::")[-1].rstrip("…")


# ---------------------------------------------------------------------------------------------------------
# BERT: 265 kernels. Many of the backward pass are marked fprop there, so a kernel's direction, layer and part are those
# of the section that it stands in and of what its text says of it: here in order, with how many kernels a part has.

BERT = (
    ("forward", "", ((3, "attention mask"), (9, "embedding"))),
    ("forward", (0, 1), ((6, "query, key, value"), (10, "attention"), (2, "attention output"),
                         (3, "residual, layer norm 1"), (2, "MLP in, GELU"), (2, "MLP out"),
                         (3, "residual, layer norm 2"))),
    ("forward", "", ((4, "next sentence head"), (5, "masked token head"), (3, "next sentence head"), (7, "loss"))),
    ("backward", "", ((7, "loss"), (3, "next sentence head"), (10, "masked token head"), (9, "next sentence head"))),
    ("backward", (1, 0), ((4, "residual, layer norm 2"), (5, "MLP out, GELU"), (3, "MLP in"),
                          (4, "residual, layer norm 1"), (3, "attention output"), (11, "attention"),
                          (5, "query, key, value"), (1, "attention"), (7, "query, key, value"))),
    ("backward", "", ((11, "embedding"),)),
    ("optimizer", "", ((52, "optimizer"),)))


def bert(text):
    found = re.findall(r"^(\d+) ([fb]prop) (.*)$", text, re.M)
    check("kernels of BERT", len(found), 265)
    places = [(direction, layer, part) for direction, layers, parts in BERT for layer in layers or ("",)
              for n, part in parts for _ in range(n)]
    check("kernels in the parts of BERT", len(places), 265)
    rows = []
    for i, (index, marked, rest) in enumerate(found):
        check("a kernel's number", int(index), i + 1)
        words = rest.split()
        op = words[1] if len(words) > 2 and words[1] != "na" else ""
        direction, layer, part = places[i]
        # The sections and the layer's name, where it has one, agree.
        named = re.match(r"Enc_(\d)", words[0])
        if named: check(f"the layer of kernel {index}", layer, int(named[1]))
        rows.append((index, direction, layer, part, marked, words[0].strip("-"), op, words[-1]))
    write("bert_two_layers.csv",
          ("index", "direction", "layer", "part", "marked", "published_layer", "op", "kernel"), rows)


# ---------------------------------------------------------------------------------------------------------
# DLRM and NCF: only counts, by the directions that their texts give to ranges of kernels.

def recommenders(dlrm, ncf):
    rows = []
    for model, text, pattern, total, directions in (
            ("DLRM", dlrm, r"^\| (\d+) \| [fb]prop \| (\S+) ", 788,
             ((117, "forward"), (726, "backward"), (788, "optimizer"))),
            ("NCF", ncf, r"^(\d+) [fb]prop (\S+) ", 194,
             ((38, "forward"), (187, "backward"), (194, "optimizer")))):
        found = re.findall(pattern, text, re.M)
        check(f"kernels of {model}", len(found), total)
        counts = collections.Counter()
        for i, (index, layer) in enumerate(found):
            check(f"a kernel's number in {model}", int(index), i + 1)
            direction = next(name for last, name in directions if int(index) <= last)
            counts[direction, "embedding" if "Embedding" in layer else "the rest"] += 1
        rows += [(model, direction, part, n) for (direction, part), n in counts.items()]
        check(f"kernels counted of {model}", sum(counts.values()), total)
    write("recommenders.csv", ("model", "direction", "part", "kernels"), rows)


# ---------------------------------------------------------------------------------------------------------
# GPT-2 124M under nvprof: for each NVTX range how often it was entered, its host time, and the GPU activities inside.

UNITS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}


def milliseconds(text):
    number, unit = re.fullmatch(r"([\d.]+)([mun]?s)", text).groups()
    return float(number) * UNITS[unit]


def nvprof(text):
    rows, name, section = [], "everything", ""
    for line in text.splitlines():
        begins = re.search(r'Range "(.*)"', line)
        if begins: name = begins[1]
        section = next((s for s in ("GPU activities:", "API calls:", "Range:") if s in line), section)
        cells = re.search(r"[\d.]+%\s+(\S+)\s+(\d+)\s+\S+\s+\S+\s+\S+\s+(.*)$", line)
        if not cells or section == "API calls:": continue
        activity = "host" if section == "Range:" else short(cells[3])
        rows.append((name, activity, int(cells[2]), f"{milliseconds(cells[1]):.6g}"))
    launches = collections.defaultdict(collections.Counter)
    for name, activity, count, _ in rows: launches[name][activity] += count
    forward, backward = launches["gpt2_forward"], launches["gpt2_backward_and_reduce"]
    check("forward passes", forward["host"], 24)
    check("backward passes", backward["host"], 4)
    for activity in forward:
        if activity == "host" or activity.startswith("[CUDA"): continue
        check(activity, forward[activity] + backward[activity], launches["everything"][activity])
        in_layers = sum(launches[f"Layer {i}"][activity] for i in range(12))
        # The embedding, the first layer norm and the output layer's product are outside the layers.
        outside = 24 if activity.startswith(("encoder", "layernorm", "volta_sgemm_128x128_tn")) else 0
        check(f"{activity} in layers", in_layers, launches["everything"][activity] - outside)
    rows = [row for row in rows if row[0] not in ("InitOpt", "ncclCommInitRank")]
    write("gpt2_nvprof.csv", ("range", "activity", "count", "ms"), rows)


# ---------------------------------------------------------------------------------------------------------
# The "2.7B" transformer under nsys, in three modes: host ranges and GPU kernels of three warm-up passes and one more.

NSYS_ROW = re.compile(r"\s*[\d.]+\s+([\d,]+)\s+([\d,]+)\s+[\d,.]+\s+([\d,.]+)\s+[\d,]+\s+[\d,]+\s+[\d,.]+\s+"
                      r"(?:PushPop\s+:)?(.*)$")


def transformer(text):
    rows = []
    parts = re.split(r"^Profiling: size=2\.7B, context_length=512, type=(\w+)$", text, flags=re.M)[1:]
    published = {"forward": (844.668, 852.1, 1832), "backward": (2580.602, 2569.6, 5117),
                 "train": (2758.088, 2750.4, 6517)}
    for mode, report in zip(parts[::2], parts[1::2]):
        for table, title in (("range", "nvtx_sum"), ("kernel", "cuda_gpu_kern_sum")):
            body = report.split(f"Executing '{title}' stats report")[1].split("Executing '")[0]
            sums = collections.OrderedDict()
            for line in body.splitlines():
                cells = NSYS_ROW.match(line)
                if not cells: continue
                total, count, median = (float(cells[i].replace(",", "")) for i in (1, 2, 3))
                name = cells[4].strip() if table == "range" else short(cells[4])
                before = sums.get(name, (0, 0, 0))
                sums[name] = (before[0] + int(count), before[1] + total / 1e6, median / 1e6)
            for name, (count, total, median) in sums.items():
                rows.append((mode, table, name, count, f"{total:.6g}", f"{median:.6g}" if table == "range" else ""))
            if table == "range":
                check(f"the step, {mode}", sums["profiled_step"][1], published[mode][0], 0.001)
                check(f"layers, {mode}", sum(name.startswith("layer_") for name in sums), 32)
            else:
                check(f"GPU time a pass, {mode}", sum(s[1] for s in sums.values()) / 4, published[mode][1], 0.1)
                check(f"launches a pass, {mode}", round(sum(s[0] for s in sums.values()) / 4), published[mode][2])
    check("modes", len(set(r[0] for r in rows)), 3)
    write("transformer_2_7b.csv", ("mode", "table", "name", "count", "total_ms", "median_ms"), rows)


def main():
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        print("usage: read_published.py FOLDER (with the texts of the published profiles)", file=sys.stderr)
        sys.exit(2)

    def read(name):
        try:
            with open(os.path.join(sys.argv[1], name), encoding="utf-8") as f: return f.read()
        except OSError as error: sys.exit(f"error: {error.filename}: {error.strerror}")

    os.makedirs(OUT, exist_ok=True)
    bert(read("bert_kernels.txt"))
    recommenders(read("dlrm_kernels.txt"), read("ncf_kernels.txt"))
    nvprof(read("gpt2_nvprof.txt"))
    transformer(read("cs336_profile.txt"))


if __name__ == "__main__":
    main()
