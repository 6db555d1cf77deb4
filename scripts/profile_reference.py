#!/usr/bin/env python3
"""Write pages that compare our profiles with published profiles of the same set-ups.

    python3 scripts/profile_reference.py RUNS [--pages FOLDER] [--commit NAME]

RUNS holds the outputs of the runs of scripts/profile_reference.sh: bert_two_layers, gpt2_124m, dlrm and ncf. A set-up
without a run is skipped with a message. FOLDER defaults to dev/results. --commit is the version that the pages name.
"""

import collections
import csv
import os
import re
import sys

sys.dont_write_bytecode = True  # no __pycache__ in scripts/
from profile_diff import Page, Parser, die, is_move, number, read_profile, run, write_page

HERE = os.path.dirname(os.path.abspath(__file__))
PUBLISHED = os.path.join(HERE, "..", "dev", "reference", "published")
ABOUT = "`dev/reference/published/README.md`"
DIRECTIONS = ("forward", "backward", "optimizer", "communication")


class Cost(collections.namedtuple("Cost", "launches ms")):
    def __add__(self, other): return Cost(self.launches + other.launches, self.ms + other.ms)
    def __sub__(self, other): return Cost(self.launches - other.launches, self.ms - other.ms)
    def __truediv__(self, n): return Cost(self.launches / n, self.ms / n)


NOTHING = Cost(0, 0)


def published(name):
    path = os.path.join(PUBLISHED, name)
    try:
        with open(path, newline="", encoding="utf-8") as f: return list(csv.DictReader(f))
    except OSError as error: die(f"{path}: {error.strerror}")


# ---------------------------------------------------------------------------------------------------------
# Our rows

def sizes(row):
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row["shapes"])}


def milliseconds(rows):
    return sum(row["ms"] for row in rows)


def cost_of(rows):
    return Cost(len(rows), milliseconds(rows))


def product_part(size, is_backward):
    """Which product of a block has these sizes."""
    if size["OC"] == 3 * size["IC"]: return "query, key, value"
    if size["OC"] == size["IC"]: return "attention output"
    if size["OC"] > size["IC"]: return "MLP in" if is_backward else "MLP in, GELU"
    return "MLP out, GELU" if is_backward else "MLP out"


def block_parts(rows):
    """What each row of a block does, by its op and shapes; None outside the blocks. Of the two residual additions the
    first in the forward pass, and in BERT the last in the backward pass, is attention's."""
    seen, parts = collections.Counter(), []
    for row in rows:
        op, is_backward, size = row["op"], row["direction"] == "backward", sizes(row)
        part = op
        if row["layer"] == "": part = None
        elif op.startswith("attention"): part = "attention"
        elif op.startswith("gelu"): part = "MLP out, GELU" if is_backward else "MLP in, GELU"
        elif "IC" in size and "OC" in size: part = product_part(size, is_backward)
        elif "layernorm" in op:
            seen[row["direction"], row["layer"]] += 1
            is_first = seen[row["direction"], row["layer"]] == 1
            part = f"residual, layer norm {2 if is_first == is_backward else 1}"
        parts.append(part)
    return parts


def counted(names):
    """3 x this + that."""
    return " + ".join(f"{n} x {name}" if n > 1 else name for name, n in collections.Counter(names).items()) or "-"


def kernel_label(kernel):
    """The name of a kernel; for a library's matmul only the library."""
    product = re.match(r"nvjet|cutlass|sm\d+_xmma|\w*gemm", kernel)
    return f"product ({product[0]})" if product else kernel.split("::")[-1]


def check_setup(profile, layers, channels):
    """Refuse a profile of another model than the page's."""
    found = {row["layer"] for row in profile.rows} - {""}
    widths = {size["C"] for size in map(sizes, profile.rows) if "C" in size}
    if found == {str(i) for i in range(layers)} and widths == {channels}: return
    wide = " and ".join(str(width) for width in sorted(widths)) or "unknown"
    die(f"{profile.folder}: is of {len(found)} layers, {wide} wide, where the set-up has {layers}, {channels} wide")


def put_run(page, profiles, commit):
    """How ours were run: what their profiles say, once if all runs agree. `profiles` is keyed by the runs' names."""
    facts = {run: {**profile.facts, "commit": commit} for run, profile in profiles.items()}
    rows = []
    for name in dict.fromkeys(name for run in facts.values() for name in run):
        values = {run: found.get(name, "not recorded") for run, found in facts.items()}
        if len(set(values.values())) == 1: rows.append([name, "all", next(iter(values.values()))])
        else: rows += [[name, run, value] for run, value in values.items()]
    page.heading("How ours was run")
    page.table(["what", "run", "value"], rows)


# ---------------------------------------------------------------------------------------------------------
# BERT with two layers: kernels counted, and which of theirs one of ours replaces

BERT_SEQUENCES, BERT_ROWS = 4, 512
BERT_BLOCK = ("query, key, value", "attention", "attention output", "residual, layer norm 1", "MLP in, GELU", "MLP in",
              "MLP out", "MLP out, GELU", "residual, layer norm 2")
BERT_OUTSIDE = ("attention mask", "layer norm weights in fp32", "embedding", "masked token head", "next sentence head",
                "loss", "optimizer", "communication")


def bert_part_outside(row):
    op, size = row["op"], sizes(row)
    if row["direction"] in ("optimizer", "communication"): return row["direction"]
    if op.startswith("cast_to_fp32"): return "layer norm weights in fp32"
    if "embedding" in op or (op.startswith(("layernorm", "dropout")) and size.get("N") == BERT_ROWS): return "embedding"
    if op.startswith(("classifier", "accuracy")): return "loss"
    if op.startswith("next_sentence") or size.get("M", size.get("N")) == BERT_SEQUENCES: return "next sentence head"
    return "masked token head" if op.startswith(("matmul", "gelu", "layernorm", "gather")) else op


def put_bert_parts(page, theirs, ours, layer, directions):
    """Which ops are fused: the parts of a layer, or those outside the layers, with the kernels of both sides."""
    order = BERT_BLOCK if layer else BERT_OUTSIDE
    rows = []
    for direction in directions:
        here = [[row for row in group if row["direction"] == direction and row["layer"] == layer]
                for group in (theirs, ours)]
        parts = dict.fromkeys(row["part"] for group in here for row in group)
        for part in sorted(parts, key=lambda p: order.index(p) if p in order else len(order)):
            their, our = ([row for row in group if row["part"] == part] for group in here)
            rows.append([direction, part, len(their), len(our), number(1e3 * milliseconds(our), 1) if our else "",
                         counted(row["name"] for row in their),
                         counted(kernel_label(row["kernel"]) for row in our)])
    page.table(["direction", "part", "published>", "ours>", "our us>", "theirs are", "ours are"], rows)


def bert_page(profiles, commit):
    profile = profiles["step"]
    check_setup(profile, 2, 1024)
    theirs = [row for row in published("bert_two_layers.csv") for _ in range(int(row["kernels"]))]
    parts = [part or bert_part_outside(row) for row, part in zip(profile.rows, block_parts(profile.rows))]
    ours = [dict(row, part=part) for row, part in zip(profile.rows, parts) if not is_move(row)]
    moves = [row for row in profile.rows if is_move(row)]
    page = Page()
    page.heading(f"BERT with two layers: {len(theirs)} published kernels, {len(ours)} of ours", 1)
    page.paragraph(
        "A training step of BERT with two layers of BERT-large's size, B=4 T=128, dropout 0.1, LAMB. Published: "
        f"PyTorch in fp16 under PyProf on a T4, kernel by kernel but without times ({ABOUT}). Ours: one step of "
        "`train_bertcu` in bf16. It compares what is launched; our times stand beside it. "
        "`scripts/profile_reference.sh` made this page.")
    put_run(page, profiles, commit)

    page.heading("Kernels by direction")
    rows = []
    for direction in DIRECTIONS:
        groups = [[row for row in group if row["direction"] == direction] for group in (theirs, ours, moves)]
        if any(groups): rows.append([direction, *map(len, groups), number(milliseconds(groups[1] + groups[2]))])
    rows.append(["total", len(theirs), len(ours), len(moves), number(milliseconds(profile.rows))])
    page.table(["direction", "published>", "ours>", "our copies and fills>", "our ms>"], rows)
    page.paragraph("The published list has no copies and fills. Ours are the batch on its way to the GPU, what the log "
                   "prints on its way back, and zeros for sums.")

    page.heading("A layer: what is fused where")
    put_bert_parts(page, theirs, ours, "0", ("forward", "backward"))
    page.paragraph("This is layer 0; layer 1 is the same in theirs. With dropout attention has a kernel that draws its "
                   "bits beforehand; in the backward pass the same kernel sums up what each row needs.")
    page.heading("Outside the layers")
    put_bert_parts(page, theirs, ours, "", DIRECTIONS)
    return page


# ---------------------------------------------------------------------------------------------------------
# GPT-2 124M under nvprof: kernels by task

GPT2_LAYERS, GPT2_CHANNELS, GPT2_LENGTH = 12, 768, 1024
GPT2_THEIR_SEQUENCES = 4
GPT2_RANGES = {"forward": "gpt2_forward", "backward": "gpt2_backward_and_reduce",
               "gradient norm": "gpt2_calculate_grad_norm", "AdamW": "gpt2_update"}
GPT2_TASKS = ((r"\[CUDA|copy_|fill_", "copies and fills"), (r"matmul_backward_bias", "bias gradients"),
              (r"sgemm|matmul", "products"), (r"attention|softmax|permute", "attention"), (r"gelu", "GELU"),
              (r"layernorm|residual", "layer norm, residual"), (r"encoder|embedding|wte|wpe", "embedding"),
              (r"classifier", "loss"), (r"", "the rest"))


def gpt2_task(name):
    """The purpose of a kernel or an op by its name; both programs have the same ops."""
    return next(task for pattern, task in GPT2_TASKS if re.search(pattern, name))


def gpt2_row_task(row):
    kernel = row["kernel"]
    return gpt2_task(kernel if is_move(row) or kernel.startswith("matmul_backward_bias") else row["op"])


def gpt2_phase(row):
    if row["direction"] != "optimizer": return row["direction"]
    return "gradient norm" if row["op"].startswith("global_norm") else "AdamW"


def read_nvprof():
    """Count and total time by range and activity."""
    found = collections.defaultdict(dict)
    for row in published("gpt2_nvprof.csv"):
        found[row["range"]][row["activity"]] = Cost(int(row["count"]), float(row["ms"]))
    return found


def their_tasks(found, phase):
    """The activities of one pass by task, without what only the first step does: fills of the optimizer's buffers and
    copies of weights. Products inside attention's range belong to it."""
    tasks = collections.defaultdict(lambda: NOTHING)
    activities, inside = dict(found[GPT2_RANGES[phase]]), found[f"attention_{phase}"]
    passes = activities.pop("host").launches
    for name, cost in activities.items():
        if phase == "AdamW" and not name.startswith("adamw"): continue
        tasks["attention"] += inside.get(name, NOTHING) / passes
        tasks[gpt2_task(name)] += (cost - inside.get(name, NOTHING)) / passes
    return {task: cost for task, cost in tasks.items() if cost.launches > 0.5}


def micro(microseconds):
    return number(microseconds, 1 if microseconds < 1000 else 0)


def put_gpt2_tasks(page, rows, sequences):
    page.heading("By task")
    found, cells, their_ms = read_nvprof(), [], 0
    for phase in GPT2_RANGES:
        theirs, ours = their_tasks(found, phase), collections.defaultdict(lambda: NOTHING)
        for row in rows:
            if gpt2_phase(row) == phase: ours[gpt2_row_task(row)] += cost_of([row])
        both = {task: (theirs.get(task, NOTHING), ours.get(task, NOTHING)) for task in [*theirs, *ours]}
        is_pass = phase in ("forward", "backward")  # an update takes the same time for any batch
        their_ms += sum(their.ms for their, _ in both.values())
        for task, (their, our) in sorted(both.items(), key=lambda item: -item[1][0].ms):
            cells.append([phase, task, f"{their.launches:.0f}", our.launches, number(their.ms, 2), number(our.ms, 2),
                          micro(1e3 * their.ms / GPT2_THEIR_SEQUENCES) if is_pass and their.launches else "",
                          micro(1e3 * our.ms / sequences) if is_pass and our.launches else ""])
    cells.append(["together", "", "", len(rows), number(their_ms, 2), number(milliseconds(rows), 2), "", ""])
    page.table(["phase", "task", "their launches>", "ours>", "their GPU ms>", "our GPU ms>", "theirs, us a sequence>",
                "ours>"], cells)
    page.paragraph(
        "Theirs are means of 24 forward and 4 backward passes and 4 updates. Our products include the biases, and GELU "
        "and its gradient where cuBLASLt adds them to a product or where they run with it. The loss and its gradient "
        "are one kernel in both, counted in the backward pass. Our copies in the forward pass are the batch on its way "
        "to the GPU, those beside AdamW what the log prints; fills are zeros for sums and for the library's counters.")


def gpt2_page(profiles, commit):
    profile = profiles["step"]
    check_setup(profile, GPT2_LAYERS, GPT2_CHANNELS)
    tokens = next((sizes(row).get("N", 0) for row in profile.rows if row["op"].startswith("embedding")), 0)
    sequences = tokens // GPT2_LENGTH
    if sequences == 0 or tokens % GPT2_LENGTH:
        die(f"{profile.folder}: has {tokens} tokens in a step, which are not sequences of {GPT2_LENGTH}")
    page = Page()
    page.heading("GPT-2 124M: kernels beside llm.c's under nvprof", 1)
    page.paragraph(
        "Published: llm.c's `train_gpt2cu -e gpt2_124M.bin` in fp32 under nvprof, with cuBLAS for attention, B=4 "
        f"T=1024 on a GPU that is not named, of a T4's class ({ABOUT}). Ours: `train_gpt2cu` in bf16, B={sequences} "
        "T=1024. The model is the same; batch, precision and GPU are not. So times of the passes are given for one "
        "sequence of 1,024 tokens, and the counts of launches say most. `scripts/profile_reference.sh` made this page.")
    put_run(page, profiles, commit)
    put_gpt2_tasks(page, profile.rows, sequences)
    return page


# ---------------------------------------------------------------------------------------------------------
# DLRM and NCF: kernels counted

def recommenders_page(profiles, commit):
    """`profiles` by what the page calls the model."""
    page, theirs = Page(), published("recommenders.csv")
    page.heading("DLRM and NCF (NeuMF): published kernels and ours", 1)
    page.paragraph(
        "A training step of each at the published size: DLRM with 26 tables of about 100,000 rows of 128 and B=32,768, "
        "SGD; NCF with MovieLens 20M's 138,493 users and 26,744 items and B=1,048,576, Adam. Published: PyTorch in "
        f"mixed precision under PyProf on a T4, kernels counted ({ABOUT}). Ours: one step of `train_dlrmcu` and of "
        "`train_ncfcu` in bf16 with fp32 tables. `scripts/profile_reference.sh` made this page.")
    put_run(page, profiles, commit)
    page.heading("Kernels by direction")
    rows = []
    for model, profile in profiles.items():
        moves = [row for row in profile.rows if is_move(row)]
        ours = [row for row in profile.rows if not is_move(row)]
        for direction in DIRECTIONS + ("",):
            count = sum(int(row["kernels"]) for row in theirs
                        if row["model"] == model and direction in (row["direction"], ""))
            mine, moved = ([row for row in group if direction in (row["direction"], "")] for group in (ours, moves))
            if count or mine or moved:
                rows.append([model, direction or "total", count, len(mine), len(moved),
                             number(milliseconds(mine + moved))])
    page.table(["model", "direction", "published>", "ours>", "our copies and fills>", "our ms>"], rows)
    page.paragraph("The published list has no copies and fills. Ours are what the sort of the ids needs, DLRM's batch "
                   "on its way to the GPU, and what the log prints on its way back. Times are added up, though the "
                   "sort runs beside other kernels.")
    for model, profile in profiles.items():
        page.heading(f"{model}: every launch of a step")
        page.table(["direction", "op", "kernel", "us>"],
                   [[row["direction"], row["op"], kernel_label(row["kernel"]), number(1e3 * row["ms"], 1)]
                    for row in profile.rows])
    return page


# ---------------------------------------------------------------------------------------------------------

# Each page with the runs that it needs, by their folders and by what the page calls them.
PAGES = {
    "profile_bert_two_layers.md": (bert_page, {"bert_two_layers": "step"}),
    "profile_gpt2_124m.md": (gpt2_page, {"gpt2_124m": "step"}),
    "profile_recommenders.md": (recommenders_page, {"dlrm": "DLRM", "ncf": "NCF"}),
}


def main():
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUNS", help="the folder with the runs' outputs")
    parser.add_argument("--pages", default=os.path.join(HERE, "..", "dev", "results"), help="where to write the pages")
    parser.add_argument("--commit", default="not recorded", help="the sources that were run, where profiles do not say")
    args = parser.parse_args()
    if not os.path.isdir(args.runs):
        die(f"{args.runs}: there is no such folder; scripts/profile_reference.sh makes the runs")

    absent = [name for _, runs in PAGES.values() for name in runs if not os.path.isdir(os.path.join(args.runs, name))]
    if len(absent) == sum(len(runs) for _, runs in PAGES.values()):
        die(f"{args.runs}: has none of the runs {', '.join(absent)}")
    for page, (make, runs) in PAGES.items():
        profiles = {label: read_profile(os.path.join(args.runs, name))
                    for name, label in runs.items() if name not in absent}
        if profiles: write_page(os.path.join(args.pages, page), make(profiles, args.commit))
    for name in absent: print(f"left out: {args.runs} has no {name}")


if __name__ == "__main__":
    sys.exit(run(main))
