#!/usr/bin/env python3
"""--explain: the page, its numbers, the files of tensors, and the answers to texts that cannot be explained.

    python3 dev/test/explain.py TRAIN_GPT2 TRAIN_BERT     from the repository's root, with use_gpt2 and use_bert beside

Small models are trained for a few steps. What the page says is computed again from the files of tensors, the weights
and the trainer's own validation loss; dev/reference/check_explain.py compares the tensors with `transformers`.
"""
import base64
import json
import math
import os
import re
import struct
import sys
import tempfile

from edit import load
from runs import numbers as floats
from runs import put_shard
from verdicts import equal, failure, finish, not_refused, read, verdict, write
from verdicts import run as run_program

GPT2, BERT = map(os.path.abspath, sys.argv[1:3])
USES = "--explain", "--explain-tensors", "--evaluate"
L = 2
work = tempfile.TemporaryDirectory()
W = work.name


def run(program, *flags):
    """A trainer's run; with flags that use a model, one of the program beside it that has them."""
    if any(flag in flags for flag in USES):
        program = os.path.join(os.path.dirname(program), os.path.basename(program).replace("train_", "use_"))
    return run_program(program, *flags, limit=120)


def numbers(text, kind):
    raw = base64.b64decode(text)
    return struct.unpack(f"<{len(raw) // struct.calcsize(kind)}{kind}", raw)


def row(tensor, i):
    shape, values = tensor
    return values[i * shape[-1] : (i + 1) * shape[-1]]


def difference(ours, theirs, tolerance=1e-6):
    """Why two lists of numbers differ."""
    if len(ours) != len(theirs):
        return f"{len(ours)} numbers, not {len(theirs)}"
    scale = max(map(abs, theirs), default=1) or 1
    worst = max((abs(a - b) for a, b in zip(ours, theirs)), default=0)
    return "" if worst <= tolerance * scale else f"differs by {worst:.3g} of {scale:.3g}"


def norm(values):
    return math.sqrt(math.fsum(x * x for x in values))


class Page:
    """What a run of --explain has written: its page, the data in it, and the tensors by name as (shape, values)."""

    def __init__(self, program, *flags, out="page", tensors=True):
        done = run(program, "-o", f"{W}/{out}", *(["--explain-tensors", "1"] if tensors else []), *flags)
        self.why, self.folder = failure(done), f"{W}/{out}/explain"
        if self.why:
            return
        self.text = read(self.folder + "/explain.html")
        data = re.search(r'<script id="data" type="application/json">(.*?)</script>', self.text, re.S)[1]
        self.data = json.loads(data)
        self.tensors, self.gradients = (self.load(name) for name in ("activations", "gradients"))

    def load(self, name):
        path = f"{self.folder}/{name}.safetensors"
        found = load(path) if os.path.exists(path) else {}
        return {k: (tensor[1], floats(tensor)) for k, tensor in found.items()}

    def names(self):
        return sorted(os.listdir(self.folder))


# ---------------------------------------------------------------------------------------------------------
# The page


def map_fault(t, tensor):
    """Why a heat map does not show its tensor: of each cell the element of the largest absolute value, the first of
    equal ones."""
    (shape, values), high, wide = tensor, t["high"], t["wide"]
    rows, columns = -(-t["rows"] // high), -(-t["columns"] // wide)
    if rows > 1024 or columns > 128 or (t["columns"] > 1 and rows > 128):
        return f"{rows} x {columns} cells are too many"
    width, wanted = shape[1] if len(shape) == 2 else 1, []
    for r in range(0, shape[0], high):
        for c in range(0, width, wide):
            inside = [values[i * width + k] for i in range(r, min(r + high, shape[0]))
                      for k in range(c, min(c + wide, width))]
            wanted.append(max(inside, key=abs))
    if list(numbers(t["values"], "f")) != wanted:
        return "other cells"
    return difference([t["norm"], t["min"], t["max"]], [norm(values), min(values), max(values)])


def attention_fault(page, tensors):
    """Why the 8-bit maps do not show the probabilities, or why these are none."""
    T = page["T"]
    for l, layer in enumerate(page["attention"]["layers"]):
        p, shown = tensors[f"h.{l}.att_probs"][1], base64.b64decode(layer)
        for at in range(0, len(p), T):
            weights = p[at : at + T]
            if abs(math.fsum(weights) - 1) > 1e-5:
                return f"layer {l}: the probabilities add up to {math.fsum(weights)}"
            if page["causal"] and any(weights[at // T % T + 1 :]):
                return f"layer {l}: a token attends to a later one"
        if len(shown) != len(p) or max(abs(b - 255 * math.sqrt(x)) for b, x in zip(shown, p)) > 0.51:
            return f"layer {l}: other bytes"
    return ""


def lens_fault(page, tensors):
    """The guesses after the last layer are those of the logits."""
    n, top = len(page["predicted"]), page["top"]
    ids, p = numbers(page["lens_id"], "i"), numbers(page["lens_p"], "f")
    if page["lens_layers"] != L + 1 or len(ids) != (L + 1) * n * top:
        return f"{len(ids)} guesses of {page['lens_layers']} layers"
    for i in range(n):
        guesses = slice((L * n + i) * top, (L * n + i + 1) * top)
        odds = [math.exp(x) for x in row(tensors["logits"], i)]
        best = sorted(range(len(odds)), key=lambda v: -odds[v])[:top]
        why = difference(p[guesses], [odds[v] / math.fsum(odds) for v in best], 1e-5)
        if why or list(ids[guesses]) != best:
            return f"row {i}: {why or 'other tokens'}"
    return ""


def ops_fault(page, tensors):
    listed = [t["name"] for t in page["tensors"]]
    written = [listed[i] for op in page["ops"] for i in op["tensors"]]
    if sorted(written) != sorted(listed) or sorted(listed) != sorted(tensors):
        return f"tensors without an op or twice: {sorted(set(listed) ^ set(written))}"
    return next((f"{op['op']} has no formula" for op in page["ops"] if not op.get("formula")), "")


def check_common(name, shown):
    text, page, tensors = shown.text, shown.data, shown.tensors
    links = re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*\"", text)
    is_whole = not links and text.rstrip().endswith("</html>") and len(text) < 20e6
    verdict(f"{name}: one file, without links", "" if is_whole else f"links {links}")
    verdict(f"{name}: every op is described, every tensor is of one op", ops_fault(page, tensors))
    bad = [(t["name"], map_fault(t, tensors[t["name"]])) for t in page["tensors"] if t["ndim"] < 3]
    verdict(f"{name}: heat maps", "; ".join(f"{n}: {why}" for n, why in bad if why))
    verdict(f"{name}: attention maps", attention_fault(page, tensors))
    verdict(f"{name}: guesses after the last layer", lens_fault(page, tensors))
    names = [r["name"] for r in page["residual"]]
    norms = [x for r in page["residual"] for x in numbers(r["norms"], "f")]
    wanted = [norm(row(tensors[n], t)) for n in names for t in range(page["T"])]
    why = difference(norms, wanted) if len(names) == 2 * L + 1 else f"{names}"
    verdict(f"{name}: norms of the residual stream", why)
    # The losses and grad.logits from the logits.
    losses, gradient, targets = [], [], page["targets"][: tensors["logits"][0][0]]
    labels = sum(y >= 0 for y in targets)
    for i, y in enumerate(targets):
        odds = [math.exp(x) for x in row(tensors["logits"], i)]
        total = math.fsum(odds)
        losses.append(-math.log(odds[y] / total) if y >= 0 else 0)
        gradient += [(x / total - (v == y)) / labels if y >= 0 else 0 for v, x in enumerate(odds)]
    verdict(f"{name}: losses of the tokens", difference(tensors["losses"][1], losses, 1e-5))
    verdict(f"{name}: the loss is their mean", difference([page["loss"]], [math.fsum(losses) / labels]))
    verdict(f"{name}: gradient of the logits", difference(tensors["grad.logits"][1], gradient, 1e-5))


def check_sums(name, shown, sums, prefix, biases):
    """Of each layer: a tensor is the sum of two others; a bias' gradient is that of a tensor, summed over tokens."""
    value = lambda part: shown.tensors[part][1]
    for l in range(L):
        why = [difference(value(total), [a + b for a, b in zip(value(x), value(y))]) for total, x, y in sums(l)]
        verdict(f"{name}: layer {l}, sums", "; ".join(filter(None, why)))
        for bias, part in biases:
            (_, columns), values = shown.tensors[f"grad.h.{l}.{part}"]
            wanted = [math.fsum(values[c::columns]) for c in range(columns)]
            key = f"{prefix}{l}.{bias}.bias"
            verdict(f"{name}: gradient of {key}", difference(shown.gradients[key][1], wanted, 1e-5))


# ---------------------------------------------------------------------------------------------------------
# Models


def check_gpt2(model):
    name, words = "a language model", "Anna takes the ball."
    explain = lambda *flags, **more: Page(GPT2, "-e", model, "--explain", *flags, **more)
    shown = explain(words, out="gpt2")
    verdict(f"{name}: runs", shown.why)
    page, tensors, gradients = shown.data, shown.tensors, shown.gradients
    check_common(name, shown)
    text_of = lambda data: "".join(data["vocabulary"][str(t)] for t in data["tokens"])
    equal(f"{name}: tokens", text_of(page), words)
    check_sums(name, shown, lambda l: [(f"h.{l}.mid", f"h.{l - 1}.out" if l else "embedded", f"h.{l}.attproj"),
                                       (f"h.{l}.out", f"h.{l}.mid", f"h.{l}.fcproj")], "transformer.h.",
               [("mlp.c_proj", "out"), ("mlp.c_fc", "fc_pre"), ("attn.c_proj", "mid"), ("attn.c_attn", "qkv")])
    wanted = tensors["grad.embedded"][1]
    verdict(f"{name}: gradient of wpe", difference(gradients["transformer.wpe.weight"][1][: len(wanted)], wanted, 1e-5))
    norms = [[p["grad_norm"], norm(gradients[p["name"]][1])] for p in page["parameters"]]
    verdict(f"{name}: norms of parameter gradients", difference(*zip(*norms)))
    # The trainer's own loss of the same tokens.
    put_shard(W + "/shard.bin", page["tokens"])
    files = ("-i", W + "/shard.bin", "-j", W + "/shard.bin")
    done = run(GPT2, "-e", model, "--evaluate", "1", *files, "-b", "1", "-t", page["T"] - 1)
    own = re.search("val loss ([0-9.]+)", done.stdout)
    why = difference([page["loss"]], [float(own[1])], 1e-4) if own else done.stderr
    verdict(f"{name}: the loss is that of --evaluate 1", why)

    markup = "a</script><!--b"
    other = explain(markup, out="markup")
    data = other.text.split('type="application/json">')[1].split("</script>")[0]
    verdict("a text does not end the page's script", "" if text_of(other.data) == markup and "<" not in data else data)
    # A loss scale, here 65536, divides out exactly. A text in a file is the same text.
    write(W + "/words", words)
    for flags in ((words, "--loss-scale", "65536"), (f"@{W}/words",)):
        other = explain(*flags, out="again")
        is_same = (other.data, other.tensors, other.gradients) == (page, tensors, gradients)
        verdict(f"--explain {' '.join(flags)}: the same page and files", other.why or ("" if is_same else "others"))
    # One token has no next one: no backward pass, the page says why, and files of an earlier text do not stay.
    one = explain("A", out="gpt2")
    is_right = "no next one" in one.data.get("why_no_loss", "") and "loss" not in one.data
    is_right = is_right and not any(t.startswith("grad.") for t in one.tensors)
    is_right = is_right and one.names() == ["activations.safetensors", "explain.html"]
    verdict("one token", "" if is_right else f"{one.names()}")
    equal("--explain-tensors 0: the page alone", explain("A", out="gpt2", tensors=False).names(), ["explain.html"])


def check_resumed():
    """-y 1 restores the settings of the run in -o, of which the batch and fp8 must not reach --explain."""
    for program, words, *kind in ((GPT2, "Anna takes the ball."), (BERT, "Anna takes the [MASK=ball].", "--nsp", "0")):
        out = f"resumed_{os.path.basename(program)}"
        run(program, *"-e L=2,C=16,NH=2,T=32 -b 3 -x 2 -v 0 -s 0 -n 0 --fp8 1 -o".split(), f"{W}/{out}", *kind)
        own = Page(program, "-y", "1", "--explain", words, out=out)
        other = Page(program, "-e", f"{W}/{out}", "--explain", words, out=out + "_other")
        is_same = not own.why and (own.tensors, own.gradients) == (other.tensors, other.gradients)
        verdict(f"-y 1 of {out}: the same tensors as with -e", own.why or ("" if is_same else "others"))


def check_bert(model):
    name = "a masked language model"
    explain = lambda *flags, **more: Page(BERT, "-e", model, "--explain", *flags, **more)
    shown = explain("Anna takes the [MASK=ball]. Who has the [MASK]? Anna has [MASK=the] ball.", out="bert")
    verdict(f"{name}: runs", shown.why)
    page, tensors = shown.data, shown.tensors
    check_common(name, shown)
    piece = page["vocabulary"]
    equal(f"{name}: tokens and labels",
          ([piece.get(str(t)) for t in page["targets"]], [piece[str(page["tokens"][i])] for i in page["predicted"]]),
          (["ball", None, "the"], ["[MASK]"] * 3))
    check_sums(name, shown, lambda l: [(f"h.{l}.mid", f"h.{l - 1}.ln2" if l else "ln0", f"h.{l}.attproj"),
                                       (f"h.{l}.out", f"h.{l}.ln1", f"h.{l}.fcproj")], "bert.encoder.layer.",
               [("output.dense", "out"), ("intermediate.dense", "fc_pre"), ("attention.output.dense", "mid")])
    last = [x for i in page["predicted"] for x in row(tensors[f"grad.h.{L - 1}.ln2"], i)]
    verdict(f"{name}: gradient of the last layer's output", difference(last, tensors["grad.masked"][1]))
    why = not_refused(run(BERT, "-o", model, "-y", "1", "--explain", "a [MASK]"), ".*give its model with -e")
    verdict("refused: -y 1 with next-sentence prediction", why)
    bare = explain("Anna takes the [MASK].", out="bare")
    is_right = "[MASK=word]" in bare.data.get("why_no_loss", "") and "grad.logits" not in bare.tensors
    verdict("a bare [MASK]: no backward pass, and the page says why", "" if is_right else "no")


# ---------------------------------------------------------------------------------------------------------
# What is answered in a line

OF_GPT2 = [
    ("--explain '': is empty", "--explain", ""),
    ("cannot be read", "--explain", f"@{W}/absent"),
    ("byte 2 of the text is not UTF-8", "--explain", b"a\xff"),
    (r"the text has \d+ tokens; the model takes 4", "-t", "4", "--explain", "Anna takes the ball."),
    ("does not combine", "--explain", "a", "--generate", "3"),
    ("needs --explain", "--explain-tensors", "1"),
    (".*-o, which is empty", "-o", "", "--explain", "a"),
    (".*no tokenizer", "-e", "L=1,C=16,NH=2,T=16", "--explain", "a"),
]
OF_BERT = [
    (r"\[MASK=ball the\]: is 2 tokens", "--explain", "Anna takes [MASK=ball the]."),
    (r"\[MASK=\S+\]: is not in the vocabulary", "--explain", "Anna takes [MASK=\u4e2d]."),
    ("no closing bracket", "--explain", "Anna takes [MASK=ball."),
    ("nothing to predict", "--explain", "Anna takes the ball."),
]


def check_refusals(gpt2, bert):
    for program, model, rows in ((GPT2, gpt2, OF_GPT2), (BERT, bert, OF_BERT)):
        for pattern, *flags in rows:
            usual = [word for flag, value in (("-e", model), ("-o", W + "/refused")) if flag not in flags
                     for word in (flag, value)]
            verdict(f"refused: {flags}"[:90], not_refused(run(program, *usual, *flags), f".*{pattern}"))


MODELS = W + "/gpt2_model", W + "/bert_model"
for program, model, corpus in zip((GPT2, BERT), MODELS, ("build/test_corpus/builtin", "data/builtin/bert")):
    quiet = "-e L=2,C=16,NH=2,T=32 -x 8 -l 1e-2 -v 0 -s 0 -n 0 -b 8".split()
    verdict(f"a model to explain, {corpus}", failure(run(program, *quiet, "-i", corpus + "/train.bin", "-o", model)))
check_gpt2(MODELS[0])
check_resumed()
check_bert(MODELS[1])
check_refusals(*MODELS)
finish()
