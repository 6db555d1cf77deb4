#!/usr/bin/env python3
"""Write pages that compare our profiles with published profiles of the same set-ups.

    python3 scripts/profile_reference.py RUNS [--pages FOLDER] [--commit NAME]

RUNS holds the outputs of the runs of scripts/profile_reference.sh: bert_two_layers, gpt2_124m, transformer_forward,
transformer_backward, transformer_train, dlrm, ncf, and optionally the transformer's with _fp32. A set-up without a run
is skipped with a message. FOLDER defaults to dev/results. --commit is the version that the pages name if the profiles
do not.
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


def of_layer(rows, layer, direction):
    return [row for row in rows if row["layer"] == str(layer) and row["direction"] == direction]


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
    """How ours were run: the command (a profile's title) and its other facts, once if all runs agree. `profiles` is keyed by
    the runs' names."""
    facts = {run: dict([("command", profile.title or "not recorded")] + profile.facts)
             for run, profile in profiles.items()}
    names = list(dict.fromkeys(name for run in facts.values() for name in run))
    if "commit" not in [name.lower() for name in names]:
        names.append("commit")
        for run in facts.values(): run["commit"] = commit
    rows = []
    for name in names:
        values = {run: found.get(name, "not recorded") for run, found in facts.items()}
        if len(set(values.values())) == 1: rows.append([name, "all", next(iter(values.values()))])
        else: rows += [[name, run, value] for run, value in values.items()]
    page.heading("How ours was run")
    if len(profiles) > 1: page.table(["what", "run", "value"], rows)
    else: page.table(["what", "value"], [[row[0], row[2]] for row in rows])


# ---------------------------------------------------------------------------------------------------------
# BERT with two layers: kernels counted, and which of theirs one of ours replaces

BERT_SEQUENCES = 4
BERT_BLOCK = ("query, key, value", "attention", "attention output", "residual, layer norm 1", "MLP in, GELU", "MLP in",
              "MLP out", "MLP out, GELU", "residual, layer norm 2")
BERT_OUTSIDE = ("attention mask", "layer norm weights in fp32", "embedding", "masked token head", "next sentence head",
                "loss", "optimizer", "communication")
BERT_HOW = {
    ("forward", "attention mask"): "sequences are packed without padding: there is nothing to mask",
    ("forward", "embedding"): "three look-ups, their sum, dropout and layer norm in one pass",
    ("forward", "query, key, value"): "one product for all three; the bias is part of it",
    ("forward", "attention"): "scores stay on the chip; softmax and dropout happen there",
    ("forward", "attention output"): "the bias is part of the product",
    ("forward", "residual, layer norm 1"): "dropout, addition and layer norm in one pass",
    ("forward", "MLP in, GELU"): "BERT's GELU has a kernel: products offer the tanh form only",
    ("forward", "MLP out"): "the bias is part of the product",
    ("forward", "residual, layer norm 2"): "dropout, addition and layer norm in one pass",
    ("forward", "masked token head"): "runs on the masked tokens only",
    ("forward", "loss"): "in the backward pass, with its gradient",
    ("backward", "query, key, value"): "one product a gradient, which adds the residual's",
    ("backward", "attention"): "probabilities are computed, and dropout drawn, again",
    ("backward", "attention output"): "the bias's gradient came with the layer norm",
    ("backward", "residual, layer norm 1"): "one pass, with the gradient of the bias before it",
    ("backward", "MLP out, GELU"): "GELU's gradient and the bias's in one pass",
    ("backward", "MLP in"): "the product adds the residual's gradient",
    ("backward", "residual, layer norm 2"): "one pass, with the gradient of the bias before it",
    ("backward", "loss"): "loss and gradient in one pass over the logits",
    ("backward", "next sentence head"): "tanh, classes, loss and their gradients in one kernel",
    ("backward", "embedding"): "tokens are sorted, then each table's row is added up once",
    ("optimizer", "optimizer"): "one buffer of all parameters: norm, moments and update are a launch each",
}


def bert_part_outside(row):
    op, size = row["op"], sizes(row)
    if row["direction"] in ("optimizer", "communication"): return row["direction"]
    if op.startswith("cast_to_fp32"): return "layer norm weights in fp32"
    if "embedding" in op or op == "layernorm_dropout_backward": return "embedding"
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
                         counted(row["op"] or row["kernel"] for row in their),
                         counted(kernel_label(row["kernel"]) for row in our), BERT_HOW.get((direction, part), "")])
    page.table(["direction", "part", "published>", "ours>", "our us>", "theirs are", "ours are", "how"], rows)


def bert_page(profile, commit):
    check_setup(profile, 2, 1024)
    theirs = published("bert_two_layers.csv")
    parts = [part or bert_part_outside(row) for row, part in zip(profile.rows, block_parts(profile.rows))]
    ours = [dict(row, part=part) for row, part in zip(profile.rows, parts) if not is_move(row)]
    moves = [row for row in profile.rows if is_move(row)]
    page = Page(True)
    page.heading(f"BERT with two layers: {len(theirs)} published kernels, {len(ours)} of ours", 1)
    page.paragraph(
        "A training step of BERT with two layers of BERT-large's size, B=4 T=128, dropout 0.1, LAMB. Published: "
        f"PyTorch in fp16 under PyProf on a T4, kernel by kernel but without times ({ABOUT}). Ours: one step of "
        "`train_bertcu` in bf16. It compares what is launched; our times stand beside it. "
        "`scripts/profile_reference.sh` made this page.")
    put_run(page, {"step": profile}, commit)

    page.heading("Kernels by direction")
    rows = []
    for direction in DIRECTIONS:
        groups = [[row for row in group if row["direction"] == direction] for group in (theirs, ours, moves)]
        if any(groups): rows.append([direction, *map(len, groups), number(milliseconds(groups[1] + groups[2]))])
    rows.append(["total", len(theirs), len(ours), len(moves), number(milliseconds(profile.rows))])
    page.table(["direction", "published>", "ours>", "our copies and fills>", "our ms>"], rows)
    page.paragraph("The published list has no copies and fills. Ours are the batch on its way to the GPU, what the log "
                   "prints on its way back, and zeros for sums.")

    page.heading("Kernels by layer")
    rows = []
    for direction, layer in (("forward", ""), ("forward", "0"), ("forward", "1"), ("backward", "1"), ("backward", "0"),
                             ("backward", ""), ("optimizer", "")):
        n, m = (len([row for row in group if (row["direction"], row["layer"]) == (direction, layer)])
                for group in (theirs, ours))
        rows.append([direction, layer or "outside", n, m, f"{n / m:.1f}" if m else ""])
    page.table(["direction", "layer", "published>", "ours>", "times>"], rows)

    page.heading("A layer: what is fused where")
    put_bert_parts(page, theirs, ours, "0", ("forward", "backward"))
    page.paragraph("This is layer 0; layer 1 is the same in theirs. With dropout attention has a kernel that draws its "
                   "bits beforehand; in the backward pass the same kernel sums up what each row needs.")
    page.heading("Outside the layers")
    put_bert_parts(page, theirs, ours, "", DIRECTIONS)

    page.heading("Other published profiles of this kind, for scale")
    rows = []
    recommenders = published("recommenders.csv")
    for model in ("DLRM", "NCF"):
        here = [row for row in recommenders if row["model"] == model]
        rows.append([model] + [sum(int(row["kernels"]) for row in here if key in (row["direction"], row["part"], ""))
                               for key in DIRECTIONS[:3] + ("", "embedding")])
    for name, group in (("BERT, two layers", theirs), ("BERT, two layers, ours", ours)):
        rows.append([name] + [sum(key in (row["direction"], row["part"], "") for row in group)
                              for key in DIRECTIONS[:3] + ("", "embedding")])
    page.table(["model", "forward>", "backward>", "optimizer>", "total>", "of them in embeddings>"], rows)
    page.paragraph("DLRM and NCF (PyTorch under PyProf on a T4, 2020) are recommenders: small networks between large "
                   "embedding tables, whose gradients are sorted and added up by many kernels. "
                   "`profile_recommenders.md` has ours.")
    return page


# ---------------------------------------------------------------------------------------------------------
# GPT-2 124M under nvprof: ranges and kernels

GPT2_LAYERS, GPT2_CHANNELS, GPT2_LENGTH, GPT2_VOCABULARY = 12, 768, 1024, 50257
GPT2_THEIR_SEQUENCES = 4
GPT2_PASSES = {"forward": 24, "backward": 4}  # of the published profile, which has 20 validation batches too
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


def their_pass(found, phase):
    """The host's time and the activities of one pass of a phase, without what only the first step does: fills of the
    optimizer's buffers and copies of weights."""
    activities = dict(found[GPT2_RANGES[phase]])
    host = activities.pop("host")
    if phase == "AdamW": activities = {name: cost for name, cost in activities.items() if name.startswith("adamw")}
    return host.ms / host.launches, {name: cost / host.launches for name, cost in activities.items()}


def their_tasks(found, phase):
    """The activities of one pass by task. Products inside attention's range belong to it."""
    tasks = collections.defaultdict(lambda: NOTHING)
    for name, cost in their_pass(found, phase)[1].items():
        inside = found[f"attention_{phase}"].get(name, NOTHING) / GPT2_PASSES[phase]
        tasks["attention"] += inside
        tasks[gpt2_task(name)] += cost - inside
    return {task: cost for task, cost in tasks.items() if cost.launches > 0.5}


def their_layer(found, layer):
    """Activities of a layer in one forward pass and one backward pass. Its range holds all passes of both: what both
    launch is divided by the counts, and its time by the mean times, of the whole passes."""
    whole = {phase: their_pass(found, phase)[1] for phase in GPT2_PASSES}
    layers = {phase: {} for phase in GPT2_PASSES}
    for name, cost in found[f"Layer {layer}"].items():
        if name == "host": continue
        counts = {"forward": int(whole["forward"].get(name, NOTHING).launches / GPT2_LAYERS)}
        counts["backward"] = (cost.launches - counts["forward"] * GPT2_PASSES["forward"]) / GPT2_PASSES["backward"]
        means = {phase: whole[phase][name].ms / whole[phase][name].launches for phase in counts if counts[phase]}
        likely = {phase: GPT2_PASSES[phase] * counts[phase] * mean for phase, mean in means.items()}
        for phase, time in likely.items():
            layers[phase][name] = Cost(counts[phase], cost.ms * time / sum(likely.values()) / GPT2_PASSES[phase])
    return layers


def launches(counts):
    """Kernels + copies and fills, from pairs of name and count."""
    counts = list(counts)
    moves = sum(n for name, n in counts if gpt2_task(name) == "copies and fills")
    return f"{sum(n for _, n in counts) - moves:.0f} + {moves:.0f}"


def their_launches(activities):
    return launches((name, cost.launches) for name, cost in activities.items())


def our_launches(rows):
    return launches((row["kernel"], 1) for row in rows)


def micro(microseconds):
    return number(microseconds, 1 if microseconds < 1000 else 0)


def gpt2_flops(sequences):
    """(6 N + 12 L C T) for each token, N without position embeddings: as the trainers count for MFU."""
    C, L, T = GPT2_CHANNELS, GPT2_LAYERS, GPT2_LENGTH
    parameters = L * (12 * C * C + 13 * C) + 2 * C + GPT2_VOCABULARY * C
    return sequences * T * (6 * parameters + 12 * L * C * T)


class Gpt2:
    """Both profiles, each with the microseconds per sequence that one of its milliseconds stands for."""

    def __init__(self, profile):
        check_setup(profile, GPT2_LAYERS, GPT2_CHANNELS)
        tokens = next((sizes(row).get("N", 0) for row in profile.rows if row["op"].startswith("embedding")), 0)
        self.sequences = tokens // GPT2_LENGTH
        if self.sequences == 0 or tokens % GPT2_LENGTH:
            die(f"{profile.folder}: has {tokens} tokens in a step, which are not sequences of {GPT2_LENGTH}")
        self.profile, self.rows, self.found = profile, profile.rows, read_nvprof()
        self.theirs, self.ours = 1e3 / GPT2_THEIR_SEQUENCES, 1e3 / self.sequences


def put_gpt2_ranges(page, g):
    page.heading("Ranges")
    page.paragraph(
        "GPU time of one pass each; theirs are means of 24 forward and 4 backward passes and 4 updates. Their host "
        "time is what the range took to launch its kernels, or to wait. The first step's filling of the optimizer's "
        "buffers is left out. Launches are kernels + copies and fills.")
    ours, everything = collections.defaultdict(list), {}
    for row in g.rows: ours[gpt2_phase(row)].append(row)
    rows, their_ms = [], 0
    for phase, name in GPT2_RANGES.items():
        (host, activities), our = their_pass(g.found, phase), ours.pop(phase, [])
        ms = sum(cost.ms for cost in activities.values())
        is_pass = phase in GPT2_PASSES
        rows.append([phase, name, their_launches(activities), our_launches(our), number(host, 2), number(ms, 2),
                     number(milliseconds(our), 2), micro(ms * g.theirs) if is_pass else "",
                     micro(milliseconds(our) * g.ours) if is_pass else ""])
        their_ms += ms
        for activity, cost in activities.items(): everything[activity] = everything.get(activity, NOTHING) + cost
    for phase, our in ours.items():
        rows.append([phase, "-", "", our_launches(our), "", "", number(milliseconds(our), 2), "", ""])
    our_ms = milliseconds(g.rows)
    rows.append(["together", "", their_launches(everything), our_launches(g.rows), "", number(their_ms, 2),
                 number(our_ms, 2), "", ""])
    page.table(["phase", "their range", "their launches>", "ours>", "their host ms>", "their GPU ms>", "our GPU ms>",
                "theirs, us a sequence>", "ours>"], rows)
    rates = [gpt2_flops(n) / ms / 1e9 for n, ms in ((GPT2_THEIR_SEQUENCES, their_ms), (g.sequences, our_ms))]
    page.paragraph(
        f"Model flops over the time together, (6 N + 12 L C T) a token: theirs {rates[0]:.1f} TFLOP/s, ours "
        f"{rates[1]:.1f} TFLOP/s. Our copies in the forward pass are the batch on its way to the GPU, those beside "
        "AdamW what the log prints; fills are zeros for sums and for the library's counters.")


def put_gpt2_tasks(page, g):
    page.heading("By task")
    rows = []
    for phase in GPT2_PASSES:
        theirs, ours = their_tasks(g.found, phase), collections.defaultdict(lambda: NOTHING)
        for row in g.rows:
            if gpt2_phase(row) == phase: ours[gpt2_row_task(row)] += cost_of([row])
        both = {task: (theirs.get(task, NOTHING), ours.get(task, NOTHING)) for task in [*theirs, *ours]}
        for task, (their, our) in sorted(both.items(), key=lambda item: -item[1][0].ms):
            rows.append([phase, task, f"{their.launches:.0f}", our.launches,
                         micro(their.ms * g.theirs) if their.launches else "",
                         micro(our.ms * g.ours) if our.launches else ""])
    page.table(["pass", "task", "their launches>", "ours>", "theirs, us a sequence>", "ours>"], rows)
    page.paragraph(
        "Our products include the biases, and GELU and its gradient where cuBLASLt adds them to a product or where "
        "they run with it. The loss and its gradient are one kernel in both, counted in the backward pass.")


def put_gpt2_layers(page, g):
    page.heading("Layers")
    rows = []
    for layer in range(GPT2_LAYERS):
        rows.append([layer])
        for direction, activities in their_layer(g.found, layer).items():
            our = of_layer(g.rows, layer, direction)
            ms = sum(cost.ms for cost in activities.values())
            rows[-1] += [their_launches(activities), our_launches(our), micro(ms * g.theirs),
                         micro(milliseconds(our) * g.ours)]
    columns = ["their launches>", "ours>", "theirs, us a sequence>", "ours>"]
    page.table(["layer", "forward: " + columns[0]] + columns[1:] + ["backward: " + columns[0]] + columns[1:], rows)
    page.paragraph("nvprof's range of a layer holds both passes. Kernels that both launch are divided by the counts "
                   "and mean times of the whole passes.")

    layer = GPT2_LAYERS // 2
    for direction, activities in their_layer(g.found, layer).items():
        page.heading(f"Layer {layer}, {direction}, kernel by kernel")
        page.table(["theirs, by time", "launches>", "us a sequence>"],
                   [[name, f"{cost.launches:.0f}", micro(cost.ms * g.theirs)]
                    for name, cost in sorted(activities.items(), key=lambda item: -item[1].ms)])
        page.text("")
        page.table(["ours, in order: op", "shapes", "kernel", "us>", "us a sequence>"],
                   [[row["op"], row["shapes"], row["kernel"], number(1e3 * row["ms"], 2), number(row["ms"] * g.ours, 2)]
                    for row in of_layer(g.rows, layer, direction)])


def gpt2_page(profile, commit):
    g = Gpt2(profile)
    page = Page(True)
    page.heading("GPT-2 124M: ranges and kernels beside llm.c's under nvprof", 1)
    page.paragraph(
        "Published: llm.c's `train_gpt2cu -e gpt2_124M.bin` in fp32 under nvprof, with cuBLAS for attention, B=4 "
        f"T=1024 on a GPU that is not named, of a T4's class ({ABOUT}). Ours: `train_gpt2cu` in bf16, B={g.sequences} "
        "T=1024. The model is the same; batch, precision and GPU are not. So times of the passes are given for one "
        "sequence of 1,024 tokens, and the counts of launches say most. `scripts/profile_reference.sh` made this page.")
    put_run(page, {"step": profile}, commit)
    for put in (put_gpt2_ranges, put_gpt2_tasks, put_gpt2_layers): put(page, g)
    return page


# ---------------------------------------------------------------------------------------------------------
# The "2.7B" transformer in three modes

L, C, F, V, B, T = 32, 2560, 10240, 10000, 4, 512
PASSES = 4  # of the published totals: three to warm up, and the measured one
MODES = {"forward": "forward", "backward": "forward + backward", "train": "train"}
KINDS = ("matrix products", "attention", "optimizer", "the rest", "together")
RANGES = (  # theirs, with a note about ours; dots are nesting
    ("forward_pass", ""), (". token_embeddings", ""), (". attention_sublayer", ""), (". . attention projections", ""),
    (". . rope encoding", "ours has learned positions, added with the token's"),
    (". . causal mask construction", "inside our attention kernel"), (". . scaled_dot_product_attention", ""),
    (". . . computing attention scores", "inside our attention kernel"),
    (". . . computing softmax", "inside our attention kernel"), (". . . final matmul", "inside our attention kernel"),
    (". . output projection", ""), (". ffn_sublayer", ""), (". final_norm", "in our last layer's second layer norm"),
    (". lm_head", ""), ("loss_computation", "ours with its gradient"), ("backward_pass", ""), ("optimizer_step", ""))
ATTENTION_PARTS = {"query, key, value": "attention projections", "attention": "scaled_dot_product_attention",
                   "attention output": "output projection"}


def transformer_flops(mode, products):
    """Of one step: 2 for each weight and token, with `products` matrices in an MLP, and attention without its mask;
    three times that with a backward pass."""
    forward = 2 * B * T * (L * (4 * C * C + products * C * F) + C * V) + 4 * B * T * T * C * L
    return forward * (1 if mode == "forward" else 3)


def transformer_parameters():
    """Theirs: RMSNorm, no biases, no positions. Ours: layer norms and biases, and learned positions."""
    return (L * (4 * C * C + 3 * C * F + 2 * C) + 2 * V * C + C,
            L * (4 * C * C + 2 * C * F + F + 9 * C) + 2 * V * C + T * C + 2 * C)


def row_ranges(row, part):
    """The names of all ranges that contain our row."""
    if row["direction"] == "optimizer": return ["optimizer_step"]
    if row["op"].startswith("classifier"): return ["loss_computation"]
    if row["direction"] == "backward": return ["backward_pass"]
    if row["direction"] != "forward": return []
    if part in ATTENTION_PARTS: return ["forward_pass", "attention_sublayer", ATTENTION_PARTS[part]]
    if part: return ["forward_pass", "attention_sublayer" if part.endswith("norm 1") else "ffn_sublayer"]
    inner = {"embedding": "token_embeddings", "matmul": "lm_head", "layernorm": "attention_sublayer"}
    return ["forward_pass"] + [name for op, name in inner.items() if row["op"].startswith(op)]


def our_ranges(rows):
    found = collections.defaultdict(lambda: NOTHING)
    for row, part in zip(rows, block_parts(rows)):
        for name in row_ranges(row, part): found[name] += cost_of([row])
    return found


def our_kinds(rows):
    kinds = collections.defaultdict(lambda: NOTHING)
    for row in rows:
        kind = ("optimizer" if row["direction"] == "optimizer" else "attention" if row["op"].startswith("attention")
                else "matrix products" if row["op"].startswith("matmul") else "the rest")
        kinds[kind] += cost_of([row])
        kinds["together"] += cost_of([row])
    return kinds


class Transformer:
    """The published figures."""

    def __init__(self):
        self.rows = {(row["mode"], row["table"], row["name"]): row for row in published("transformer_2_7b.csv")}

    def host(self, mode, name):
        """Of a range in one pass: the median times how often a pass enters it. None for a range that the mode lacks."""
        row = self.rows.get((mode, "range", name))
        return row and float(row["median_ms"]) * max(1, int(row["count"]) / PASSES)

    def kinds(self, mode):
        """GPU time of one pass."""
        kinds = collections.defaultdict(lambda: NOTHING)
        for (found, table, name), row in self.rows.items():
            if (found, table) != (mode, "kernel"): continue
            kind = ("matrix products" if re.search(r"gemm|cutlass", name) else "optimizer" if "multi_tensor" in name
                    else "the rest")
            cost = Cost(int(row["count"]), float(row["total_ms"])) / PASSES
            kinds[kind] += cost
            kinds["together"] += cost
        return kinds


def step_ms(profile):
    """The time of a step without profiling, if it was measured."""
    return profile.step["plain_ms"] if profile.step.get("plain_ms", 0) > 0 else profile.step["span_ms"]


def put_transformer_steps(page, theirs, profiles):
    page.heading("The step")
    rows = []
    for (mode, label), profile in profiles.items():
        before, now = theirs.host(mode, "profiled_step"), step_ms(profile)
        work = [transformer_flops(mode, products) / 1e12 for products in (3, 2)]
        rates = [1e3 * work[0] / before, 1e3 * work[1] / now]
        rows.append([label, number(before, 1), number(now, 1), f"{before / now:.1f}", number(work[0], 2),
                     number(work[1], 2), number(rates[0], 1), number(rates[1], 1), f"{rates[1] / rates[0]:.1f}"])
    page.table(["mode", "their ms>", "our ms>", "times>", "their TFLOP>", "ours>", "their TFLOP/s>", "ours>", "times>"],
               rows)
    page.paragraph(
        "Their ms are the host's, of a step that waits for the GPU; ours are those of steps that are not profiled. "
        "Work is counted alike for both: 2 flops for each weight in a product and token, attention without its mask, "
        "and three times that with a backward pass. Ours is in bf16 where nothing else is said, "
        "theirs in fp32 without TF32.")


def put_transformer_kinds(page, theirs, profiles):
    page.heading("GPU time by kind")
    rows = []
    for (mode, label), profile in profiles.items():
        there, here = theirs.kinds(mode), our_kinds(profile.rows)
        for kind in KINDS:
            their, our = there.get(kind), here.get(kind)
            if their or our:
                rows.append([label, kind, f"{their.launches:.0f}" if their else "", our.launches if our else "",
                             number(their.ms, 1) if their else "", number(our.ms, 2) if our else ""])
    page.table(["mode", "kind", "their launches>", "ours>", "their GPU ms>", "our GPU ms>"], rows)
    page.paragraph(
        "A pass of theirs is a quarter of what nsys added up over three warm-up passes and the measured one. Their "
        "attention is two products and many elementwise kernels, which are in those rows.")


def put_transformer_ranges(page, theirs, profiles):
    page.heading("Ranges: their host time, our GPU time, ms a pass")
    modes = [mode for mode in MODES if any(mode == key[0] for key in profiles)]
    ours = {key: our_ranges(profile.rows) for key, profile in profiles.items()}
    rows = []
    for indented, note in RANGES:
        name = indented.replace(". ", "")
        cells = [number(theirs.host(mode, name), 1) for mode in modes]
        cells += [number(ours[key][name].ms) if ours[key][name].launches else "" for key in profiles]
        if any(cells): rows.append([indented] + cells + [note])
    their_columns = [f"theirs: {MODES[mode]}>" for mode in modes]
    page.table(["range"] + their_columns + [f"ours: {label}>" for _, label in profiles] + ["note"], rows)
    page.paragraph(
        "Dots show nesting: nested ranges do not add up. Inside a pass theirs are host times, medians over all passes "
        "times the entries of a pass. Such a range ends when its kernels are launched, not when they have run: it says "
        "where the host spent its time and where it had to wait, and only the passes end with a wait. In ours a "
        "residual addition and the layer norm after it are one kernel, in the range of the branch that is added.")

    page.heading("Layers, ms")
    trained = [key for key in profiles if key[0] != "forward"]
    rows = []
    for layer in range(L):
        rows.append([layer] + [number(theirs.host(mode, f"layer_{layer}"), 2) for mode in modes])
        for direction, keys in (("forward", profiles), ("backward", trained)):
            rows[-1] += [number(milliseconds(of_layer(profiles[key].rows, layer, direction))) for key in keys]
    page.table(["layer"] + their_columns + [f"our forward: {label}>" for _, label in profiles]
               + [f"our backward: {label}>" for _, label in trained], rows)
    page.paragraph("Theirs are host times of the forward pass, medians of four: early layers only queue kernels, the "
                   "last ones wait until the queue has room. Ours are GPU times.")


def transformer_page(profiles, commit):
    """`profiles` by mode and by what the page calls it."""
    for profile in profiles.values(): check_setup(profile, L, C)
    theirs, ours = (f"{n / 1e9:.2f} billion" for n in transformer_parameters())
    page = Page(True)
    page.heading("The \"2.7B\" transformer: three modes beside their published ranges", 1)
    page.paragraph(
        "32 layers, 2560 wide, 32 heads, d_ff 10240, vocabulary 10,000, B=4 T=512: the largest size of Stanford "
        f"CS336's assignment 2, published with an nsys profile (PyTorch, fp32, an A100 of 80 GB by its kernels; "
        f"{ABOUT}). `scripts/profile_reference.sh` made this page.")
    page.paragraph(
        f"**It is not the same model.** Theirs has {theirs} parameters: its MLP is SwiGLU, with three matrices of 2560 "
        f"x 10240. Ours has {ours}: GELU with two, biases, and learned positions. The rest agrees, an output layer of "
        "its own included. So a step of ours is less work, and TFLOP/s are compared as well as times.")
    put_run(page, {label: profile for (_, label), profile in profiles.items()}, commit)
    for put in (put_transformer_steps, put_transformer_kinds, put_transformer_ranges):
        put(page, Transformer(), profiles)
    return page


# ---------------------------------------------------------------------------------------------------------
# DLRM and NCF: kernels counted

RECOMMENDERS = {"dlrm": "DLRM", "ncf": "NCF"}


def recommenders_page(profiles, commit):
    """`profiles` by what the page calls the model."""
    page, theirs = Page(True), published("recommenders.csv")
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

def main():
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUNS", help="the folder with the runs' outputs")
    parser.add_argument("--pages", default=os.path.join(HERE, "..", "dev", "results"), help="where to write the pages")
    parser.add_argument("--commit", default="not recorded", help="the sources that were run, where profiles do not say")
    args = parser.parse_args()
    if not os.path.isdir(args.runs):
        die(f"{args.runs}: there is no such folder; scripts/profile_reference.sh makes the runs")

    absent = []

    def read(name):
        folder = os.path.join(args.runs, name)
        if os.path.isdir(folder): return read_profile(folder)
        if not name.endswith("_fp32"): absent.append(name)

    pages = [("profile_bert_two_layers.md", read("bert_two_layers"), bert_page),
             ("profile_gpt2_124m.md", read("gpt2_124m"), gpt2_page)]
    modes = {(mode, title + end.replace("_", ", ")): read(f"transformer_{mode}{end}")
             for end in ("", "_fp32") for mode, title in MODES.items()}
    modes = {key: profile for key, profile in modes.items() if profile}
    pages.append(("profile_transformer_2_6b.md", modes, transformer_page))
    recommenders = {model: read(name) for name, model in RECOMMENDERS.items()}
    recommenders = {model: profile for model, profile in recommenders.items() if profile}
    pages.append(("profile_recommenders.md", recommenders, recommenders_page))
    if not any(found for _, found, _ in pages): die(f"{args.runs}: has none of the runs {', '.join(absent)}")
    for name, found, make in pages:
        if found: write_page(os.path.join(args.pages, name), make(found, args.commit))
    for name in absent: print(f"left out: {args.runs} has no {name}")


if __name__ == "__main__":
    sys.exit(run(main))
