#!/usr/bin/env python3
"""Multiple-choice sets: from text by dev/data/hellaswag.py and lambada.py, refused, counted, and in the trainer.

    dev/test/choices.py TEST_CHOICES GPT2        from the repository's root; needs `tokenizers`

TEST_CHOICES is the built dev/test/choices.c, whose model is made up; its counts must be those of plain loops here.
Where there is transformers, it must have the scores of a real model too.
"""
import importlib.util
import json
import math
import os
import random
import re
import struct
import sys
import tempfile

from verdicts import CORPUS, equal, failure, finish, not_refused, read, run, script, skip, verdict, write

V = 1000


def words_of(number, label, texts, characters=()):
    """An example of a set: texts are the tokens of its context and of its endings."""
    words = [65535, 0, number, label, len(texts) - 1]
    for tokens in texts:
        words += [len(tokens), *tokens]
    words += characters
    words[1] = 2 * len(words)
    return words


def put_set(path, version, examples):
    words = sum(examples, [])
    header = struct.pack("<4i", 20240522, version, len(examples), 0).ljust(1024, b"\0")
    write(path, header + struct.pack(f"<{len(words)}H", *words))
    return path


# ----------------------------------------------------------------------------------------------------------
# From text: with the built-in corpus's tokenizer a token is a byte, and 256 ends a text

FOUR = words_of(0, 1, [b"a", b" b", b" cd", b" e", b" f"])
JSON = '{"ctx": "a", "endings": ["b", "cd", "e", "f"], "label": %d, "ind": 5}'
LM_EVAL = '{"activity_label": "X", "ctx_a": "a [b] c [title]", "ctx_b": "the D", "label": 0, "endings": ["e [f]", %s]}'
MADE = [  # name, script and flags, text, the set or what is said
    ("four endings, ends of Windows, an empty line", "hellaswag", JSON % 1 + "\r\n\n", FOUR),
    ("any number of endings", "hellaswag",
     '{"ctx": "", "endings": ["b"], "label": "0"}\n{"ctx": "a", "endings": ["b", "c", "d"], "label": 2}\n',
     words_of(0, 0, [[256], b" b"]) + words_of(1, 2, [b"a", b" b", b" c", b" d"])),
    ("--lm-eval", "hellaswag --lm-eval", LM_EVAL % '"g"', words_of(0, 0, [b"X: a c. The d", b" e ", b" g"], [2, 1])),
    ("lambada", "lambada", '{"text": "a b cd\\n"}\n', words_of(0, 0, [b"a b", b" cd"])),
    ("no such label", "hellaswag", JSON % 4, "line 1: its label is .4."),
    ("--lm-eval, no letter", "hellaswag --lm-eval", LM_EVAL % '"[d]"', "example 0: its texts"),
]  # fmt: skip


def prepare(name, text, out):
    write(out + ".txt", text)
    name, *flags = name.split()
    return script(f"dev/data/{name}.py", "--local", out + ".txt", "--vocab", CORPUS, "--out", out, *flags)


def check_made(work):
    for i, (name, how, text, wanted) in enumerate(MADE):
        out = f"{work}/{i}.bin"
        done = prepare(how, text, out)
        if isinstance(wanted, str):
            verdict(f"refused: {name}", not_refused(done, wanted) or ("it left a set" if os.path.exists(out) else ""))
            continue
        verdict(name, failure(done))
        words = list(memoryview(read(out, "rb")[1024:]).cast("H"))
        equal("... its set", words, wanted)


# ----------------------------------------------------------------------------------------------------------
# What is refused: of two examples, and of one with characters

FIRST, SECOND = 1024, 1024 + 2 * 12
REFUSED = [  # version, place, form and value of a number, what is said
    (1, 4, "i", 3, "version 3, but only versions 1 and 2"),
    (1, 4, "i", 2, "example 0: its header gives 24 bytes, but its texts take 28"),
    (1, 8, "i", 3, "gives 3 examples, but 46 bytes"),
    (1, SECOND, "H", 65534, "example 1 begins with 65534 and has the number 1, not with 65535"),
    (1, FIRST + 6, "H", 2, "example 0: its label is 2, but it has 2 endings"),
    (1, SECOND + 10, "H", 40, "ends inside example 1 of 2"),
    (1, FIRST + 12, "H", V, f"example 0: token {V} is outside the vocabulary of {V}"),
    (2, FIRST + 24, "H", 0, "example 0: an ending has no characters"),
]


def check_refused(program, work):
    first = [[1, 2], [3], [4]]
    sets = {1: [words_of(0, 1, first), words_of(1, 0, [[1], [3], [4]])], 2: [words_of(0, 1, first, [5, 6])]}
    for version, place, form, value, wanted in REFUSED:
        path = put_set(work + "/set.bin", version, sets[version])
        data = bytearray(read(path, "rb"))
        done = run(program, path, V)
        struct.pack_into("<" + form, data, place, value)
        write(path, bytes(data))
        verdict(f"refused: {wanted}", failure(done) or not_refused(run(program, path, V), wanted))


# ----------------------------------------------------------------------------------------------------------
# Counting


def model(tokens):
    """What choices.c says of the last token: its loss, and whether it is the likeliest."""
    u = 0
    for token in tokens:
        u = (u * 31 + token) % 2**32
    u ^= u >> 15
    return math.nan if u % 100 == 0 else u % 5, u // 100 % 4 != 0


def best_of(losses):
    """The first of the smallest, -1 where none is finite."""
    best = min(range(len(losses)), key=losses.__getitem__)
    return best if losses[best] < math.inf else -1


def counts(examples, T):
    """Without micro-batches: contexts give way at their left where an example is longer than T."""
    correct = correct_norm = cloze_loss = not_finite = 0
    for label, context, endings, characters in examples:
        losses, all_right = [], True
        for ending in endings:
            tokens = (context + ending)[-T - 1 :]
            said = [model(tokens[: len(tokens) - k]) for k in range(len(ending))]
            losses.append(sum(loss for loss, _ in said))
            all_right = all_right and all(right for _, right in said)
        not_finite += sum(map(math.isnan, losses))
        cloze_loss += losses[0] if len(endings) == 1 else 0
        losses = [math.inf if math.isnan(loss) else loss for loss in losses]
        means = [loss / n for loss, n in zip(losses, characters or map(len, endings))]
        correct += all_right if len(endings) == 1 else best_of(losses) == label
        correct_norm += best_of(means) == label
    return [len(examples), correct, correct_norm, cloze_loss, not_finite]


def check_counts(program, work, most, version):
    """Micro-batches of all shapes, for one rank and several."""
    rng, examples = random.Random(most + version), []
    for _ in range(500):
        texts = [rng.choices(range(V), k=rng.randint(1, 7)) for _ in range(rng.randint(1, most))]
        characters = [rng.randint(1, 9) for _ in texts] if version == 2 else []
        context = rng.choices(range(V), k=rng.randint(1, 20))
        examples.append((rng.randrange(len(texts)), context, texts, characters))
    words = [words_of(i, label, [context, *texts], c) for i, (label, context, texts, c) in enumerate(examples)]
    path = put_set(work + "/set.bin", version, words)
    for shape in ((28, 28, 1), (9, 7, 2), (1000, 40, 3)):
        done = run(program, path, V, *shape)
        got, want = [*map(float, done.stdout.split())], counts(examples, shape[1])
        same = len(got) == 5 and all(g == w or (math.isnan(g) and math.isnan(w)) for g, w in zip(got, want))
        name = f"{most} endings at most, version {version}: micro-batches of {shape}"
        verdict(name, failure(done) or ("" if same and 50 < want[1] < 450 else f"{got}, not {want}"))


# ----------------------------------------------------------------------------------------------------------
# The trainer: a text's next words against those of other places


def figures(done, step=""):
    """The scores of the set, as they are printed."""
    return re.findall(step + r"hellaswag acc (0\.\d{6}), acc_norm (0\.\d{6}) \(50 examples\)$", done.stdout, re.M)


def check_trainer(trainer, work):
    """A run's scores are those of its model."""
    rng, words, lines = random.Random(1), [w[:8] for w in read("build/test_corpus/text/000.md").split()], ""
    for i in range(0, 150, 3):
        endings = [" ".join(words[j : j + 2]) for j in (i + 5, *rng.sample(range(len(words) - 3), 3))]
        order = rng.sample(range(4), 4)
        example = {"ctx": " ".join(words[i : i + 5]), "endings": [endings[k] for k in order], "label": order.index(0)}
        lines += json.dumps(example) + "\n"
    path, out = work + "/hellaswag_val.bin", work + "/model"
    verdict("the set", failure(prepare("hellaswag", lines, path)))
    flags = f"-e L=2,C=32,NH=2,T=96 -b 4 -x 120 -l 1e-2 -v 0 -s 0 -n 0 -h 50 -o {out} --choices {path}".split()
    done = run(trainer, *flags, "-i", CORPUS + "/train.bin")
    last = figures(done, r"step 120/120 \| ")
    verdict("-h 50 --choices", failure(done) or ("" if last else done.stdout))
    evaluate = f"-e {out} --evaluate 1 -m 1 --choices {path} -b 64 --threads 2".split()
    done = run(trainer.replace("train_gpt2", "use_gpt2"), *evaluate, "-j", CORPUS + "/val.bin")
    equal("--evaluate 1 --choices", figures(done), last)
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        done = script("dev/reference/check_choices.py", out, path, 96, *last[0])
        verdict("transformers count the same", failure(done))
    else:
        skip("transformers count the same", f"{sys.executable} has no transformers")


def main(program, trainer):
    program, trainer = os.path.abspath(program), os.path.abspath(trainer)
    with tempfile.TemporaryDirectory() as work:
        check_made(work)
        check_refused(program, work)
        for most, version in ((6, 1), (1, 1), (6, 2)):
            check_counts(program, work, most, version)
        check_trainer(trainer, work)
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
