#!/usr/bin/env python3
"""Compare the vectors of `train_bert --embed` with those of sentence-transformers.

    python3 -m venv build/st && build/st/bin/pip install sentence-transformers
    build/st/bin/python dev/reference/check_embed.py DIR LINES.txt [TRAIN_BERT]

Both poolings, with and without scaling to length 1, on the same directory, in float32 on the CPU. Exit status: 0, or 1
if a value differs by more than 1e-5.
"""
import os
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import sentence_transformers
import torch
import transformers
from sentence_transformers import SentenceTransformer, models

TOLERANCE = 1e-5


def main(directory, texts, program="./train_bert"):
    print(f"sentence-transformers {sentence_transformers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    with open(texts, encoding="utf-8", newline="\n") as f:
        lines = f.read().split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    encoder = models.Transformer(directory)
    failed = False
    for pool in ("mean", "cls"):
        theirs = SentenceTransformer(modules=[encoder, models.Pooling(encoder.get_word_embedding_dimension(), pool)], device="cpu")
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "vectors.npy")
            flags = ["--embed", texts, "--pool", pool, "-b", "16", "--vectors", out]
            subprocess.run([program, "-e", directory, *flags], check=True, stdout=subprocess.DEVNULL)
            ours = np.load(out)
        expected = theirs.encode(lines, convert_to_numpy=True)
        error = float(np.abs(ours - expected).max())
        failed |= not error <= TOLERANCE
        print(f"{pool}: {len(lines)} lines, within {error:.2e}, allowed {TOLERANCE:.0e}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
