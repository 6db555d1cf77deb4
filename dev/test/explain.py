#!/usr/bin/env python3
"""--explain: the page, its numbers, and the files of tensors. What is refused is in refuse.txt.

    python3 dev/test/explain.py TRAIN_GPT2 TRAIN_BERT     from the repository's root, with use_gpt2 and use_bert beside

What the page says of small models is computed again from the files of tensors and the trainer's own validation loss.
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
from verdicts import equal, failure, finish, holds, read, run, verdict, write

GPT2, BERT = map(os.path.abspath, sys.argv[1:3])
L, WORDS = 2, "Anna takes the ball."
work = tempfile.TemporaryDirectory()
W = work.name
MODELS = {GPT2: W + "/gpt2_model", BERT: W + "/bert_model"}


def use(program, *flags):
    return run(program.replace("train_", "use_"), *flags, limit=120)


def values(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


class Page:
    """What a run of --explain has written: its page, the data in it, and the tensors by name."""

    def __init__(self, program, *flags, out="page", model=None):
        done = use(program, "-o", f"{W}/{out}", *(model or ["-e", MODELS[program]]), "--explain-tensors", "1", *flags)
        verdict(f"{os.path.basename(program)} {flags} runs", failure(done))
        self.folder, self.faults = f"{W}/{out}/explain", []
        self.text = read(self.folder + "/explain.html")
        self.json = re.search(r'<script id="data" type="application/json">(.*?)</script>', self.text, re.S)[1]
        self.data, self.tensors = json.loads(self.json), {}
        for name in ("activations", "gradients"):
            path = f"{self.folder}/{name}.safetensors"
            for key, (_, shape, raw) in load(path).items() if os.path.exists(path) else ():
                self.tensors[key] = np.frombuffer(raw, "<f4").reshape(shape).astype(float)

    def text_of(self):
        return "".join(self.data["vocabulary"][str(t)] for t in self.data["tokens"])

    def near(self, what, ours, theirs, tolerance=1e-6):
        """Two arrays of numbers must be near each other."""
        ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
        if ours.shape != theirs.shape or np.abs(ours - theirs).max() > tolerance * (np.abs(theirs).max() or 1):
            self.faults.append(f"{what}: {ours.ravel()[:5]}, not {theirs.ravel()[:5]}")

    def check_maps(self):
        """A cell of a heat map shows the element of the largest absolute value, the first of equal ones. The 8-bit maps
        of attention show the probabilities, which add up to 1; a causal token attends to no later one."""
        for t in self.data["tensors"]:
            if t["ndim"] < 3:
                name, x, high, wide = t["name"], self.tensors[t["name"]], t["high"], t["wide"]
                x = x.reshape(len(x), -1)
                cells = np.pad(x, ((0, -len(x) % high), (0, -x.shape[1] % wide)))
                cells = cells.reshape(len(cells) // high, high, -1, wide).swapaxes(1, 2).reshape(-1, high * wide)
                places = np.abs(cells).argmax(1)
                self.near(name, values(t["values"], "<f4"), cells[range(len(cells)), places], 0)
                if high * wide > 1:
                    self.near(name + ", places", values(t["places"], "u1"), places, 0)
                self.near(name, [t["norm"], t["min"], t["max"]], [np.linalg.norm(x), x.min(), x.max()])
                self.near(name + " is small", len(cells) <= (1024 if x.shape[1] == 1 else 128 * 128), True)
        for l, layer in enumerate(self.data["attention"]["layers"]):
            p = self.tensors[f"h.{l}.att_probs"].reshape(-1, self.data["T"], self.data["T"])
            self.near("sums", p.sum(2), np.ones(p.shape[:2]), 1e-5)
            self.near("bytes", values(layer, "u1"), 255 * np.sqrt(p.ravel()), 0.51 / 255 / np.sqrt(p.max()))
            self.near("later tokens", np.triu(p, 1) * self.data["causal"], 0 * p)

    def check_logits(self):
        """Guesses after the last layer, losses and the gradient of the logits follow from the logits."""
        page, odds = self.data, np.exp(self.tensors["logits"])
        odds /= odds.sum(1, keepdims=True)
        guesses = odds[: len(page["predicted"])]
        best = np.argsort(-guesses, 1, "stable")[:, : page["top"]]
        wanted = np.take_along_axis(guesses, best, 1)
        shown = values(page["lens_p"], "<f4").reshape(L + 1, *best.shape)[L]
        self.near("guesses", values(page["lens_id"], "<i4").reshape(L + 1, *best.shape)[L], best)
        self.near("their p", shown / wanted[:, :1], wanted / wanted[:, :1], 1e-5)
        y = np.array(page["targets"][: len(odds)])
        at, labels = np.flatnonzero(y >= 0), (y >= 0).sum()
        losses, gradient = np.zeros(len(odds)), np.where(y >= 0, odds.T, 0).T / labels
        losses[at] = -np.log(odds[at, y[at]])
        gradient[at, y[at]] -= 1 / labels
        self.near("losses", self.tensors["losses"], losses, 1e-5)
        self.near("mean", page["loss"], losses.sum() / labels)
        self.near("gradient", self.tensors["grad.logits"], gradient, 1e-5)

    def check(self, layers, prefix, biases):
        """The sums of a layer: of tensors, and of gradients that are those of biases."""
        page, tensors = self.data, self.tensors
        links = re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*\"", self.text)
        is_file = not links and self.text.rstrip().endswith("</html>") and len(self.text) < 20e6
        holds("one file, without links", is_file, links)
        listed, saved = [t["name"] for t in page["tensors"]], load(self.folder + "/activations.safetensors")
        of_ops = [listed[i] for op in page["ops"] for i in op["tensors"]]
        is_whole = sorted(of_ops) == sorted(listed) == sorted(saved) and all(op.get("formula") for op in page["ops"])
        holds("every op is described, every tensor is of one op", is_whole, {*listed} ^ {*of_ops})
        self.check_maps()
        self.check_logits()
        self.near("rows of the residual stream", len(page["residual"]), 2 * L + 1)
        for row in page["residual"]:
            self.near(row["name"], values(row["norms"], "<f4"), np.linalg.norm(tensors[row["name"]], axis=1))
        for row in page["parameters"]:
            self.near(row["name"], row["grad_norm"], np.linalg.norm(tensors[row["name"]]))
        for l in range(L):
            for total, a, b in layers(f"h.{l}.", f"h.{l - 1}." if l else ""):
                self.near(total, tensors[total], tensors[a] + tensors[b])
            for bias, part in biases:
                key = f"{prefix}{l}.{bias}.bias"
                self.near(key, tensors[key], tensors[f"grad.h.{l}.{part}"].sum(0), 1e-5)


def check_gpt2():
    text = 7 * WORDS  # more than 128 tokens: a cell of a heat map has several rows
    shown = Page(GPT2, "--explain", text, out="gpt2")
    page = shown.data
    shown.check(lambda h, last: [(h + "mid", last + "out" if last else "embedded", h + "attproj"),
                                 (h + "out", h + "mid", h + "fcproj")], "transformer.h.",
                [("mlp.c_proj", "out"), ("mlp.c_fc", "fc_pre"), ("attn.c_proj", "mid"), ("attn.c_attn", "qkv")])
    # The trainer's own loss of the same tokens.
    put_shard(W + "/shard.bin", page["tokens"])
    flags = f"-e {MODELS[GPT2]} --evaluate 1 -i {W}/shard.bin -j {W}/shard.bin -b 1 -t {page['T'] - 1}"
    own = re.search("val loss ([0-9.]+)", use(GPT2, *flags.split()).stdout) or [0, "nan"]
    shown.near("the loss of --evaluate 1", page["loss"], float(own[1]), 1e-4)
    verdict("the numbers of a language model", "; ".join(shown.faults))
    equal("its tokens", shown.text_of(), text)
    markup = "a</script><!--b"
    write(W + "/words", markup)
    other = Page(GPT2, "--explain", f"@{W}/words")
    holds("a file's text does not end the page's script", other.text_of() == markup and "<" not in other.json)
    # One token has no next one: no backward pass, the page says why, and files of an earlier text do not stay.
    one, files = Page(GPT2, "--explain", "A", out="gpt2"), ["activations.safetensors", "explain.html"]
    is_right = "no next one" in one.data["why_no_loss"] and not any(t.startswith("grad.") for t in one.tensors)
    holds("one token", is_right and sorted(os.listdir(one.folder)) == files)


def check_bert():
    shown = Page(BERT, "--explain", "Anna takes the [MASK=ball]. Who has the [MASK]? Anna has [MASK=the] ball.")
    page, tensors, piece = shown.data, shown.tensors, shown.data["vocabulary"]
    shown.check(lambda h, last: [(h + "mid", last + "ln2" if last else "ln0", h + "attproj"),
                                 (h + "out", h + "ln1", h + "fcproj")], "bert.encoder.layer.",
                [("output.dense", "out"), ("intermediate.dense", "fc_pre"), ("attention.output.dense", "mid")])
    shown.near("the last gradient", tensors[f"grad.h.{L - 1}.ln2"][page["predicted"]], tensors["grad.masked"])
    verdict("the numbers of a masked language model", "; ".join(shown.faults))
    equal("its tokens and labels",
          ([piece.get(str(t)) for t in page["targets"]], [piece[str(page["tokens"][i])] for i in page["predicted"]]),
          (["ball", None, "the"], ["[MASK]"] * 3))


for program, model in MODELS.items():
    corpus = "build/test_corpus/builtin" if program == GPT2 else "data/builtin/bert"
    kind = "" if program == GPT2 else " --nsp 0"
    quiet = f"-e L=2,C=16,NH=2,T=256 -t 32 -x 8 -l 1e-2 -v 0 -s 0 -n 0 -b 8 --fp8 1 -i {corpus}/train.bin -o {model}"
    verdict(f"a model to explain, {corpus}", failure(run(program, *(quiet + kind).split())))
check_gpt2()
check_bert()
# -y 1 restores the settings of the run in -o, of which the batch and fp8 must not reach --explain.
for program, words in ((GPT2, WORDS), (BERT, "Anna takes the [MASK=ball].")):
    other = Page(program, "--explain", words).tensors
    own = Page(program, "--explain", words, out=os.path.basename(MODELS[program]), model=["-y", "1"]).tensors
    holds("-y 1: the tensors of -e", own.keys() == other.keys() and all((own[k] == other[k]).all() for k in own))
finish()
