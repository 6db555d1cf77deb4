#!/usr/bin/env python3
"""--explain: the page, its numbers, the files of tensors, and the answers to texts that cannot be explained.

    python3 dev/test/explain.py TRAIN_GPT2 TRAIN_BERT     from the repository's root, with use_gpt2 and use_bert beside

Small models are trained for a few steps. What the page says is computed again from the files of tensors, the weights
and the trainer's own validation loss.
"""
import base64
import json
import os
import re
import sys
import tempfile

import numpy as np
from edit import load
from runs import put_shard
from verdicts import equal, failure, finish, holds, not_refused, read, run, verdict, write

GPT2, BERT = map(os.path.abspath, sys.argv[1:3])
L, WORDS, MASKED = 2, "Anna takes the ball.", "Anna takes the [MASK=ball]."
work = tempfile.TemporaryDirectory()
W = work.name
MODELS = {GPT2: W + "/gpt2_model", BERT: W + "/bert_model"}


def use(program, *flags):
    return run(program.replace("train_", "use_"), *flags, limit=120)


def values(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


def tensors_of(path):
    found = load(path) if os.path.exists(path) else {}
    return {k: np.frombuffer(raw, "<f4").reshape(shape).astype(float) for k, (_, shape, raw) in found.items()}


def near(what, ours, theirs, tolerance=1e-6):
    """[why two arrays of numbers differ], or nothing."""
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    is_near = ours.shape == theirs.shape and np.abs(ours - theirs).max() <= tolerance * (np.abs(theirs).max() or 1)
    return [] if is_near else [f"{what}: {ours.ravel()[:5]}, not {theirs.ravel()[:5]}"]


def no_fault(name, *faults):
    verdict(name, "; ".join(sum(faults, [])))


class Page:
    """What a run of --explain has written: its page, the data in it, and the tensors by name."""

    def __init__(self, program, *flags, out="page", model=None):
        done = use(program, "-o", f"{W}/{out}", *(model or ["-e", MODELS[program]]), "--explain-tensors", "1", *flags)
        verdict(f"{os.path.basename(program)} {flags} runs", failure(done))
        self.folder = f"{W}/{out}/explain"
        self.text = read(self.folder + "/explain.html")
        self.json = re.search(r'<script id="data" type="application/json">(.*?)</script>', self.text, re.S)[1]
        self.data = json.loads(self.json)
        self.tensors = tensors_of(self.folder + "/activations.safetensors")
        self.gradients = tensors_of(self.folder + "/gradients.safetensors")

    def is_like(self, other):
        """Whether another run has left the same tensors."""
        a, b = {**self.tensors, **self.gradients}, {**other.tensors, **other.gradients}
        return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)

    def names(self):
        return sorted(os.listdir(self.folder))


# ---------------------------------------------------------------------------------------------------------
# The page


def map_faults(t, tensor):
    """A cell of a heat map shows the element of the largest absolute value, the first of equal ones."""
    x, high, wide = tensor.reshape(len(tensor), -1), t["high"], t["wide"]
    blocks = [x[r : r + high, c : c + wide].ravel() for r in range(0, len(x), high) for c in range(0, x.shape[1], wide)]
    is_small = len(blocks) <= (1024 if x.shape[1] == 1 else 128 * 128)
    return ([] if is_small else [f"{t['name']}: {len(blocks)} cells"]) + near(
        t["name"], values(t["values"], "<f4"), [b[np.abs(b).argmax()] for b in blocks], 0) + near(
        t["name"], [t["norm"], t["min"], t["max"]], [np.linalg.norm(x), x.min(), x.max()])


def attention_faults(page, tensors):
    """The 8-bit maps show the probabilities, which add up to 1; a causal token attends to no later one."""
    faults = []
    for l, layer in enumerate(page["attention"]["layers"]):
        p = tensors[f"h.{l}.att_probs"].reshape(-1, page["T"], page["T"])
        faults += near("sums", p.sum(2), np.ones(p.shape[:2]), 1e-5)
        faults += ["a later token"] * bool(page["causal"] and np.triu(p, 1).any())
        faults += near("bytes", values(layer, "u1"), 255 * np.sqrt(p.ravel()), 0.51 / 255 / np.sqrt(p.max()))
    return faults


def check_common(name, shown, sums, prefix, biases):
    """Some tensors of a layer are the `sums` of two others, and the gradients of `biases` those of tensors, summed."""
    text, page, tensors = shown.text, shown.data, shown.tensors
    links = re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*\"", text)
    is_file = not links and text.rstrip().endswith("</html>") and len(text) < 20e6
    holds(f"{name}: one file, without links", is_file, links)
    listed = [t["name"] for t in page["tensors"]]
    of_ops = [listed[i] for op in page["ops"] for i in op["tensors"]]
    is_whole = sorted(of_ops) == sorted(listed) == sorted(tensors) and all(op.get("formula") for op in page["ops"])
    holds(f"{name}: every op is described, every tensor is of one op", is_whole, {*listed} ^ {*of_ops})
    no_fault(f"{name}: heat maps", *(map_faults(t, tensors[t["name"]]) for t in page["tensors"] if t["ndim"] < 3))
    no_fault(f"{name}: attention maps", attention_faults(page, tensors))
    of_rows = {r["name"]: values(r["norms"], "<f4") for r in page["residual"]}
    equal(f"{name}: layers of the residual stream", len(of_rows), 2 * L + 1)
    no_fault("... and their norms", *(near(n, of_rows[n], np.linalg.norm(tensors[n], axis=1)) for n in of_rows))

    # Guesses after the last layer, losses and grad.logits from the logits.
    odds = np.exp(tensors["logits"])
    odds /= odds.sum(1, keepdims=True)
    shape, rows = (L + 1, len(page["predicted"]), page["top"]), np.arange(len(page["predicted"]))
    ids, p = (values(page[key], kind).reshape(shape)[L] for key, kind in (("lens_id", "<i4"), ("lens_p", "<f4")))
    best = np.argsort(-odds[rows], 1, "stable")[:, : page["top"]]
    wanted = np.take_along_axis(odds[rows], best, 1)
    no_fault(f"{name}: guesses after the last layer", near("tokens", ids, best),
             near("p", p / wanted[:, :1], wanted / wanted[:, :1], 1e-5))
    y = np.array(page["targets"][: len(odds)])
    at, labels = np.flatnonzero(y >= 0), (y >= 0).sum()
    losses, gradient = np.zeros(len(odds)), np.where(y >= 0, odds.T, 0).T / labels
    losses[at] = -np.log(odds[at, y[at]])
    gradient[at, y[at]] -= 1 / labels
    no_fault(f"{name}: losses and gradient of the logits", near("losses", tensors["losses"], losses, 1e-5),
             near("mean", page["loss"], losses.sum() / labels),
             near("gradient", tensors["grad.logits"], gradient, 1e-5))
    for l in range(L):
        faults = [near(total, tensors[total], tensors[a] + tensors[b]) for total, a, b in sums(l)]
        for bias, part in biases:
            key = f"{prefix}{l}.{bias}.bias"
            faults.append(near(key, shown.gradients[key], tensors[f"grad.h.{l}.{part}"].sum(0), 1e-5))
        no_fault(f"{name}: layer {l}, sums and gradients of biases", *faults)


# ---------------------------------------------------------------------------------------------------------
# Models


def check_gpt2():
    name, shown = "a language model", Page(GPT2, "--explain", WORDS, out="gpt2")
    page, tensors, gradients = shown.data, shown.tensors, shown.gradients
    check_common(name, shown, lambda l: [(f"h.{l}.mid", f"h.{l - 1}.out" if l else "embedded", f"h.{l}.attproj"),
                                         (f"h.{l}.out", f"h.{l}.mid", f"h.{l}.fcproj")], "transformer.h.",
                 [("mlp.c_proj", "out"), ("mlp.c_fc", "fc_pre"), ("attn.c_proj", "mid"), ("attn.c_attn", "qkv")])
    text_of = lambda data: "".join(data["vocabulary"][str(t)] for t in data["tokens"])
    equal(f"{name}: tokens", text_of(page), WORDS)
    wanted, of_wpe = tensors["grad.embedded"], gradients["transformer.wpe.weight"]
    norms = [(p["grad_norm"], np.linalg.norm(gradients[p["name"]])) for p in page["parameters"]]
    no_fault(f"{name}: gradients of parameters", near("wpe", of_wpe[: len(wanted)], wanted, 1e-5),
             near("norms", *zip(*norms)))
    # The trainer's own loss of the same tokens.
    put_shard(W + "/shard.bin", page["tokens"])
    flags = f"-e {MODELS[GPT2]} --evaluate 1 -i {W}/shard.bin -j {W}/shard.bin -b 1 -t {page['T'] - 1}"
    own = re.search("val loss ([0-9.]+)", use(GPT2, *flags.split()).stdout) or [0, "nan"]
    no_fault(f"{name}: the loss is that of --evaluate 1", near("", page["loss"], float(own[1]), 1e-4))

    markup = "a</script><!--b"
    other = Page(GPT2, "--explain", markup)
    holds("a text does not end the page's script", text_of(other.data) == markup and "<" not in other.json, other.json)
    write(W + "/words", WORDS)
    other = Page(GPT2, "--explain", f"@{W}/words")
    holds("--explain @FILE: the same page and files", other.data == page and other.is_like(shown))
    # One token has no next one: no backward pass, the page says why, and files of an earlier text do not stay.
    one = Page(GPT2, "--explain", "A", out="gpt2")
    is_right = "no next one" in one.data.get("why_no_loss", "") and not any(t.startswith("grad.") for t in one.tensors)
    holds("one token", is_right and one.names() == ["activations.safetensors", "explain.html"], one.names())


def check_bert():
    text = "Anna takes the [MASK=ball]. Who has the [MASK]? Anna has [MASK=the] ball."
    name, shown = "a masked language model", Page(BERT, "--explain", text)
    page, tensors = shown.data, shown.tensors
    check_common(name, shown, lambda l: [(f"h.{l}.mid", f"h.{l - 1}.ln2" if l else "ln0", f"h.{l}.attproj"),
                                         (f"h.{l}.out", f"h.{l}.ln1", f"h.{l}.fcproj")], "bert.encoder.layer.",
                 [("output.dense", "out"), ("intermediate.dense", "fc_pre"), ("attention.output.dense", "mid")])
    piece = page["vocabulary"]
    equal(f"{name}: tokens and labels",
          ([piece.get(str(t)) for t in page["targets"]], [piece[str(page["tokens"][i])] for i in page["predicted"]]),
          (["ball", None, "the"], ["[MASK]"] * 3))
    no_fault(f"{name}: gradient of the last layer's output",
             near("", tensors[f"grad.h.{L - 1}.ln2"][page["predicted"]], tensors["grad.masked"]))
    why = not_refused(use(BERT, "-o", MODELS[BERT], "-y", "1", "--explain", "a [MASK]"), ".*give its model with -e")
    verdict("refused: -y 1 with next-sentence prediction", why)
    bare = Page(BERT, "--explain", "Anna takes the [MASK].")
    is_right = "[MASK=word]" in bare.data.get("why_no_loss", "") and "grad.logits" not in bare.tensors
    holds("a bare [MASK]: no backward pass, and the page says why", is_right)


def check_resumed(program, words, *kind):
    """-y 1 restores the settings of the run in -o, of which the batch and fp8 must not reach --explain."""
    out = "resumed_" + os.path.basename(program)
    run(program, *"-e L=2,C=16,NH=2,T=32 -b 3 -x 2 -v 0 -s 0 -n 0 --fp8 1 -o".split(), f"{W}/{out}", *kind)
    own = Page(program, "--explain", words, out=out, model=["-y", "1"])
    other = Page(program, "--explain", words, model=["-e", f"{W}/{out}"])
    holds("-y 1: the same tensors as with -e", own.is_like(other))


# What is answered in a line.
REFUSED = [
    (GPT2, "--explain '': is empty", "--explain", ""),
    (GPT2, "cannot be read", "--explain", f"@{W}/absent"),
    (GPT2, "byte 2 of the text is not UTF-8", "--explain", b"a\xff"),
    (GPT2, r"the text has \d+ tokens; the model takes 4", "-t", "4", "--explain", WORDS),
    (GPT2, "needs --explain", "--explain-tensors", "1"),
    (GPT2, ".*-o, which is empty", "-o", "", "--explain", "a"),
    (GPT2, ".*no tokenizer", "-e", "L=1,C=16,NH=2,T=16", "--explain", "a"),
    (BERT, r"\[MASK=ball the\]: is 2 tokens", "--explain", "Anna takes [MASK=ball the]."),
    (BERT, r"\[MASK=\S+\]: is not in the vocabulary", "--explain", "Anna takes [MASK=\u4e2d]."),
    (BERT, "nothing to predict", "--explain", WORDS),
]
for program, model in MODELS.items():
    corpus = "build/test_corpus/builtin" if program == GPT2 else "data/builtin/bert"
    quiet = f"-e L=2,C=16,NH=2,T=32 -x 8 -l 1e-2 -v 0 -s 0 -n 0 -b 8 -i {corpus}/train.bin -o {model}"
    verdict(f"a model to explain, {corpus}", failure(run(program, *quiet.split())))
check_gpt2()
check_bert()
check_resumed(GPT2, WORDS)
check_resumed(BERT, MASKED, "--nsp", "0")
for program, pattern, *flags in REFUSED:
    usual = {"-e": MODELS[program], "-o": W + "/refused"}
    usual = [word for flag in usual if flag not in flags for word in (flag, usual[flag])]
    verdict(f"refused: {flags}"[:90], not_refused(use(program, *usual, *flags), f".*{pattern}"))
finish()
