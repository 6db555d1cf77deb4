#!/usr/bin/env python3
"""Vectors of `use_bert --embed` against BERT in numpy.

    python3 dev/test/check_embed.py TRAIN_BERT USE_BERT        from the repository's root

Lines of mixed lengths, an empty one, one that is too long and one that ends with CR, by both poolings, in batches of 1
and of 5, in one window and in two. The reference computes in double precision, one line at a time.
"""
import math
import os
import sys
import tempfile

import numpy as np
from edit import load, save
from verdicts import CORPUS, failure, finish, run, verdict, write

LAYERS, CHANNELS, HEADS, POSITIONS = 2, 48, 3, 16
TOLERANCE = 1e-5
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + c for c in LETTERS)]
VOCABULARY += ["the", "##ing", "garden", ",", ".", "中"]
LINES = [("the garden", "the garden"), ("", ""), ("Sing, the garden.", "s ##ing , the garden ."),
         ("x " * 40, "x " * 40), ("ÉTÉ", "e ##t ##e"), ("[MASK] the", "[MASK] the"), ("中中 z", "中 中 z"), (" ", ""),
         ("b\r", "b"), ("the garden", "the garden")]  # fmt: skip


def make_model(program, folder):
    """A model of random weights: with those of one step all vectors would be alike. Returns them."""
    sizes = f"L={LAYERS},C={CHANNELS},NH={HEADS},T={POSITIONS},V=261,F=96"
    done = run(program, *f"-e {sizes} -x 1 -v 0 -s 0 -b 2 -n 0 -i {CORPUS}/bert/train.bin -o {folder}".split())
    verdict("a model", failure(done))
    path, rng, weights = folder + "/model.safetensors", np.random.default_rng(7), {}
    tensors = load(path)
    for name, (dtype, shape, _) in tensors.items():
        values = (rng.normal(size=shape) * 0.3 + name.endswith("LayerNorm.weight")).astype("<f4")
        tensors[name], weights[name.replace("bert.", "")] = (dtype, shape, values.tobytes()), values.astype(float)
    save(path, tensors)
    write(folder + "/vocab.txt", "\n".join(VOCABULARY) + "\n")
    write(folder + "/tokenizer_config.json", '{"do_lower_case": true}\n')
    return weights


def hidden_states(weights, tokens):
    def linear(x, name):
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    ids = [VOCABULARY.index(token) for token in ["[CLS]", *tokens][: POSITIONS - 1] + ["[SEP]"]]
    word, position, kind = (weights[f"embeddings.{x}_embeddings.weight"] for x in ("word", "position", "token_type"))
    x = norm(word[ids] + position[: len(ids)] + kind[0], "embeddings.LayerNorm")
    for layer in range(LAYERS):
        name, heads = f"encoder.layer.{layer}.", []
        q, k, v = (linear(x, f"{name}attention.self.{part}") for part in ("query", "key", "value"))
        for part in np.split(np.arange(CHANNELS), HEADS):
            scores = np.exp(q[:, part] @ k[:, part].T / math.sqrt(len(part)))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, part])
        x = norm(x + linear(np.hstack(heads), name + "attention.output.dense"), name + "attention.output.LayerNorm")
        h = linear(x, name + "intermediate.dense")
        h = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        x = norm(x + linear(h, name + "output.dense"), name + "output.LayerNorm")
    return x


def why_wrong(done, out, expected):
    """What the vectors differ in, or nothing."""
    if done.stderr or f" {len(expected)} vectors of 48 channels; {len(expected) // 10} line" not in done.stdout:
        return done.stderr.strip() or done.stdout
    ours = np.load(out)
    if ours.dtype != np.float32 or ours.shape != expected.shape:
        return f"{ours.dtype} {ours.shape}"
    off = np.abs(ours - expected).max()
    return "" if off <= TOLERANCE and not os.path.exists(out + ".tmp") else f"off by {off:.2e}"


def main(trainer, program):
    with tempfile.TemporaryDirectory() as folder:
        weights = make_model(os.path.abspath(trainer), folder)
        states = [hidden_states(weights, tokens.split()) for _, tokens in LINES]
        for pool, expected in (("mean", [s.mean(0) for s in states]), ("cls", [s[0] for s in states])):
            for batch, times in ((1, 1), (5, 1), (5, 450)):  # a window holds 4,096 lines
                write(folder + "/texts", "\n".join(line for line, _ in LINES * times))  # the last line has no end
                flags, out = ["--embed", folder + "/texts", "--pool", pool, "-b", batch], f"{folder}/{pool}{batch}.npy"
                done = run(os.path.abspath(program), "-e", folder, *flags, "--vectors", out)
                verdict(f"--embed --pool {pool} -b {batch} x {times}", why_wrong(done, out, np.stack(expected * times)))
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
