#!/usr/bin/env python3
"""Texts by use_gpt2 --generate: equal to tokens that are generated one by one, without cached ones before them, also
beyond the model's positions; prompts from files and pipes. What flags change is in equal.txt, the rest in refuse.txt.

    python3 dev/test/generate.py TRAIN_GPT2        from the repository's root, with use_gpt2 beside it
"""
import os
import shutil
import subprocess
import sys
import tempfile

from verdicts import CORPUS, equal, failure, finish, holds, read, run, skip, verdict, write

TRAINER = os.path.abspath(sys.argv[1])
USE = TRAINER.replace("train_", "use_")
work = tempfile.TemporaryDirectory()
os.chdir(work.name)
shutil.copytree(CORPUS, "data/builtin")
for out, flags in (("tied", "-e L=2,C=32,NH=2,T=24 -x 40 -l 5e-3 -s 0"),
                   ("untied", "-e L=3,C=24,NH=3,T=24,tied=0 -x 40 -l 5e-3 -s 0"),
                   ("young", "-e L=2,C=32,NH=2,T=24 -x 8 -s 4 -g 60")):
    verdict(f"a model: {flags}", failure(run(TRAINER, *f"{flags} -b 8 -v 0 -n 0 -o {out}".split())))


def text(flags, before=(), stdin=subprocess.DEVNULL):
    words = [*before, USE, *flags.split()]
    return subprocess.run(words, stdin=stdin, capture_output=True, timeout=120).stdout[:-1]


# Each token is that of a run of its own, whose prompt is what the model sees of the text before it: up to `window`
# tokens; longer texts move by a quarter of it.
for flags, prompt, tokens, window in [
    ("-e tied --temperature 0", b"static ", 40, 20),
    ("-e tied --temperature 0.8 --top-k 5 --top-p 0.9", b"static ", 17, 24),
    ("-e untied --temperature 0", b"static ", 40, 20),
    ("-e tied --temperature 0", b"i", 20, 4),
]:
    write("begin", prompt)
    whole, begin, why = text(f"{flags} --prompt @begin -t {window} --generate {tokens}"), 0, ""
    for i in range(len(prompt), len(prompt) + tokens):
        begin += window // 4 if i - begin > window else 0
        write("begin", whole[begin:i])
        if not why and text(f"{flags} --prompt @begin --generate 1") != whole[begin : i + 1]:
            why = f"token {i} is another"
    verdict(f"the cache: {flags}, {tokens} tokens", why or ("" if len(whole) == i + 1 else "a token is not a byte"))

# Prompts from elsewhere.
write("prompt", "void f(")
GREEDY = "-e tied --generate 50 --temperature 0 --prompt "
wanted = text(GREEDY + "@prompt")
equal("a text of 50 tokens", len(wanted), 57)
for stdin in ("-", "@-"):
    equal(f"--prompt {stdin}", text(GREEDY + stdin, stdin=open("prompt")), wanted)
if not shutil.which("mpirun") or b"__asan_init" in read(USE, "rb"):
    skip("standard input of mpirun", "mpirun was not found, or there are sanitizers")
else:
    found = text(GREEDY + "-", before="mpirun --oversubscribe --bind-to none -np 2".split(), stdin=open("prompt"))
    equal("standard input of mpirun reaches all ranks", found, wanted)

three = text("-e tied --generate 50 --samples 3").split(b"\n---\n")
holds("--samples 3", len({*three}) == 3 and three[0] == text("-e tied --generate 50"), three)
# More than are generated together, so there are two groups.
many, one = (text(f"-e tied --generate 50 --temperature 0 {more}") for more in ("--samples 30", ""))
equal("the most likely text, 30 times", many.split(b"\n---\n"), [one] * 30)
# Nearly random, so that each token depends on where the window begins.
sample = read("young/sample.txt", "rb")
equal("a sample of a run is a text of its checkpoint", text("-y 1 -o young --generate 60"), sample)
finish()
