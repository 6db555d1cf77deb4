#!/usr/bin/env python3
"""Vectors of `use_bert --embed` against BERT in numpy.

    python3 dev/test/check_embed.py TRAIN_BERT USE_BERT        from the repository's root

Lines of mixed lengths, an empty one, one that is too long and one that ends with CR, by both poolings, in batches of 1
and of 5. The reference computes in double precision, one line at a time, with the tokens of the library
`tokenizers`. Ends with `N passed, N failed`.
"""
import math
import os
import subprocess
import sys
import tempfile

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from model_dir import SafeTensors  # noqa: E402
from verdicts import finish, verdict  # noqa: E402

LAYERS, CHANNELS, HEADS, POSITIONS = 2, 48, 3, 16
TOLERANCE = 1e-5
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]
VOCABULARY = SPECIAL + LETTERS + ["##" + c for c in LETTERS] + ["the", "##ing", "garden", ",", ".", "中"]
LINES = ["the garden", "", "Sing, the garden.", "x " * 40, "ÉTÉ", "[MASK] the", "中中 z", " ", "b\r", "the garden"]


def make_model(program, folder):
    sizes = f"L={LAYERS},C={CHANNELS},NH={HEADS},T={POSITIONS},V=261,F=96"
    flags = ["-e", sizes, "-x", "1", "-v", "0", "-s", "0"]
    flags += ["-i", os.path.abspath("build/test_corpus/builtin/bert/train.bin"), "-b", "2", "-n", "0", "-o", folder]
    subprocess.run([program, *flags], check=True, capture_output=True)
    # With the weights of one step all vectors would be alike, and the tokens are those of bytes.
    path, rng = os.path.join(folder, "model.safetensors"), np.random.default_rng(7)
    file, data = SafeTensors(path), bytearray(open(path, "rb").read())
    for name, entry in file.entries.items():
        begin, end = (file.data + offset for offset in entry["data_offsets"])
        values = rng.normal(size=(end - begin) // 4) * 0.3 + name.endswith("LayerNorm.weight")
        data[begin:end] = values.astype("<f4").tobytes()
    with open(path, "wb") as f:
        f.write(data)
    with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8") as f:
        f.write("\n".join(VOCABULARY) + "\n")
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        f.write('{"do_lower_case": true}\n')


def encode(line):
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    ids = [VOCABULARY.index("[CLS]"), *tokenizer.encode(line, add_special_tokens=False).ids]
    return [*ids[: POSITIONS - 1], VOCABULARY.index("[SEP]")]


def hidden_states(weights, ids):
    def get(name):
        return weights.get("bert." + name, weights.entries["bert." + name]["shape"]).astype(np.float64)

    def linear(x, name):
        return x @ get(f"{name}.weight").T + get(f"{name}.bias")

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * get(f"{name}.weight") + get(f"{name}.bias")

    part = "embeddings.{}_embeddings.weight"
    x = get(part.format("word"))[ids] + get(part.format("position"))[: len(ids)] + get(part.format("token_type"))[0]
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        q, k, v = (linear(x, f"{name}attention.self.{part}") for part in ("query", "key", "value"))
        heads = []
        for part in np.split(np.arange(CHANNELS), HEADS):
            scores = np.exp(q[:, part] @ k[:, part].T / math.sqrt(len(part)))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, part])
        x = norm(x + linear(np.concatenate(heads, -1), f"{name}attention.output.dense"), f"{name}attention.output.LayerNorm")
        h = linear(x, f"{name}intermediate.dense")
        h = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        x = norm(x + linear(h, f"{name}output.dense"), f"{name}output.LayerNorm")
    return x


def why_wrong(program, folder, flags, out, expected):
    """What the vectors differ in, or nothing."""
    done = subprocess.run([program, "-e", folder, *flags, "--vectors", out], capture_output=True, text=True)
    if done.stderr or "10 vectors of 48 channels; 1 line was cut to 16 tokens" not in done.stdout:
        return done.stderr.strip() or done.stdout
    ours = np.load(out)
    if ours.dtype != np.float32 or ours.shape != expected.shape:
        return f"{ours.dtype} {ours.shape}"
    if not np.abs(ours - expected).max() <= TOLERANCE:
        return f"off by {np.abs(ours - expected).max():.2e}"
    alike = np.abs(expected[0] - expected[2]).max() < 0.01
    return "vectors that do not differ, or a file left behind" if alike or os.path.exists(out + ".tmp") else ""


def main(trainer, program):
    with tempfile.TemporaryDirectory() as folder:
        make_model(os.path.abspath(trainer), folder)
        texts = os.path.join(folder, "texts")
        with open(texts, "wb") as f:
            f.write("\n".join(LINES).encode())  # the last line has no end
        weights = SafeTensors(os.path.join(folder, "model.safetensors"))
        states = [hidden_states(weights, encode(line.rstrip("\r"))) for line in LINES]
        for pool in ("mean", "cls"):
            expected = np.stack([s.mean(0) if pool == "mean" else s[0] for s in states])
            for batch in ("1", "5"):
                flags = ["--embed", texts, "--pool", pool, "-b", batch]
                out = os.path.join(folder, f"{pool}{batch}.npy")
                why = why_wrong(os.path.abspath(program), folder, flags, out, expected)
                verdict(f"--embed --pool {pool} -b {batch}", why)
    finish()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: check_embed.py TRAIN_BERT USE_BERT (from the repository's root)")
    main(*sys.argv[1:])
