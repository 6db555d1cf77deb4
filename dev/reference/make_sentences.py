#!/usr/bin/env python3
"""Write sentences of random tokens from which train_bert draws sequences of chosen lengths, to measure its speed.

    python3 dev/reference/make_sentences.py train.bin --shortest 128
    python3 dev/reference/make_sentences.py train.bin --shortest 65 --longest 128

A document is one sentence. With `--short-sequences 0` train_bert makes every sequence as long as -t allows, from two
documents' sentences. With `--pack 2` a sequence is as long as its own sentence and its special tokens: here uniform
from --shortest to --longest = -t. If --shortest is above half of -t, no two share a row, so -b is the number of
sequences in both cases. dev/data/prepare_bert.py describes the format; the vocabulary has BERT's size.
"""

import argparse

import numpy as np

MAGIC, VERSION, HEADER = 20261121, 1, 256
VOCAB, SPECIAL = 30522, (0, 100, 101, 102, 103)  # [PAD] [UNK] [CLS] [SEP] [MASK]
SPECIAL_TOKENS = 3  # of a sequence: [CLS], two [SEP]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--shortest", type=int, required=True, help="tokens of a sequence, special ones too")
    parser.add_argument("--longest", type=int, default=0, help="0: all are as long as the shortest")
    parser.add_argument("--documents", type=int, default=10000)
    a = parser.parse_args()

    random = np.random.default_rng(1337)
    lengths = random.integers(a.shortest, max(a.longest, a.shortest), a.documents, endpoint=True) - SPECIAL_TOKENS
    if lengths.min() < 1:
        parser.error(f"--shortest {a.shortest}: a sequence has {SPECIAL_TOKENS} special tokens and at least one more")
    tokens = random.integers(1000, VOCAB, lengths.sum()).astype("<u2")
    header = np.zeros(HEADER, "<i4")
    header[:11] = MAGIC, VERSION, len(tokens), a.documents, a.documents, VOCAB, *SPECIAL
    starts = np.concatenate([[0], np.cumsum(lengths)])
    with open(a.out, "wb") as f:
        f.write(header.tobytes() + tokens.tobytes() + bytes(-tokens.nbytes % 4))
        f.write(starts.astype("<u4").tobytes())
        f.write(np.arange(a.documents + 1, dtype="<u4").tobytes())
        f.write(bytes((VOCAB + 31) // 32 * 4))  # no token continues a word


if __name__ == "__main__":
    main()
