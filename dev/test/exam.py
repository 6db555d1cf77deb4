#!/usr/bin/env python3
"""Clozes that BERT fills in: --choices and -h of train_bert.

    python3 dev/test/exam.py TRAIN_BERT        from the repository's root, after make
"""
import os
import re
import struct
import sys
import tempfile

from verdicts import ROOT, finish, holds, not_refused, read, run, verdict, write

BERT = os.path.abspath(sys.argv[1])
DATA = os.path.join(ROOT, "data", "builtin", "bert")
FILES = f"-i {DATA}/train.bin -j {DATA}/val.bin"
SETS = f"--choices {DATA}/exam.bin,{DATA}/notlast.bin"
CONTEXT = "Anna goes to the park . Ben takes the ball . Where is Anna ? Anna is in the"
work = tempfile.TemporaryDirectory()
os.chdir(work.name)


def train(flags):
    return run(BERT, *f"-s 0 {FILES} {flags}".split())


def evaluate(flags):
    return run(BERT.replace("train_", "use_"), *f"-e model --evaluate 1 -m 1 {FILES} {flags}".split())


def put_set(path, context, *endings):
    """A set of one example; the first of the endings is correct."""
    numbers = []
    for text in (context, *endings):
        ids = [VOCABULARY.index(word) for word in text.split()]
        numbers += [len(ids), *ids]
    head = struct.pack("<4I", 20240522, 1, 1, 200).ljust(1024, b"\0")
    numbers = [65535, 2 * (5 + len(numbers)), 0, 0, len(endings), *numbers]
    write(path, head + struct.pack(f"<{len(numbers)}H", *numbers))


VOCABULARY = read(DATA + "/vocab.txt").split("\n")
# The exam during a run, then of its model: the same figures, however it is cut.
done = train(f"-e L=1,C=32,NH=2,T=72 -b 8 -x 40 -l 4e-3 -u 10 -v 0 -h 40 {SETS} -n 0 -o model")
figures = r"exam acc 0\.\d{6}, chance 0\.1\d{5}, perplexity [\d.]+ \(2000 examples\)"
said = re.search(f"step +40/40 \\| ({figures})", done.stdout)
holds("-h 40 --choices", said and '"notlast_acc": ' in read("model/log.jsonl"), done.stdout, done)
done = evaluate(f"{SETS} -b 32 --threads 2")
holds("--evaluate 1", said and said[1] in done.stdout and "val loss" in done.stdout, done.stdout, done)

# One cloze is what --fill says of the same text.
fill = run(BERT.replace("train_", "use_"), "-e", "model", "--fill", CONTEXT + " [MASK] .").stdout.split("\n")[-2]
words, chances = fill.split()[::2], [float(p.strip(",")) for p in fill.split()[1::2]]
for i in range(2):
    put_set(f"set{i}.bin", CONTEXT, words[i] + " .")
done = evaluate("--choices set0.bin,set1.bin")
said = re.findall(r"^set\d acc (\d)\.0+, perplexity ([\d.]+) ", done.stdout, re.M)
right = len(said) == 2 and all(abs(1 / float(s[1]) - p) < 0.00051 for s, p in zip(said, chances))
right = right and [acc for acc, _ in said] == ["1", "0"]
holds("a cloze has the probability that --fill shows", right, f"{said}, but --fill: {fill}", done)
# With room for 14 tokens, [CLS] and [SEP] included, the last ten of the context are left.
put_set("long.bin", CONTEXT, "barn .")
put_set("short.bin", " ".join(CONTEXT.split()[-10:]), "barn .")
done = evaluate("-t 14 --choices long.bin,short.bin")
long, short = re.findall("^(?:long|short) (.*)", done.stdout, re.M) or ("", "none")
right = long == short and done.stderr.count("long.bin: its longest example") == 1
holds("a context that is too long is cut at its beginning", right, done.stdout + done.stderr, done)

put_set("two.bin", CONTEXT, "park .", "barn .")
done = train("-e L=1,C=16,NH=2,T=72 -o new --choices two.bin")
verdict("several endings", not_refused(done, "two.bin: has examples of several endings; BERT fills in clozes"))
finish()
