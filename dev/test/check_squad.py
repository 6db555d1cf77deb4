#!/usr/bin/env python3
"""Do apps/tune/squad_files.h and squad_match.h cut, label and normalize as `tokenizers` and the official scripts do?

Every window of contexts and questions of odd characters, and of a file: ids, origins of tokens, labels. How texts are
compared, with every character among them; labels and normalization are written here from their definitions.

    check_squad.py TEST_SQUAD [VOCABULARY_FOLDER FILE]

TEST_SQUAD is the built dev/test/squad.c. Without a file, only odd characters are compared, with a vocabulary made of
them. `make test-full` takes folder and file from LLMC_TEST_DATA (docs/testing.md).
"""

import json
import os
import random
import re
import string
import sys
import tempfile
import unicodedata

from tokenizers import BertWordPieceTokenizer
from verdicts import failure, finish, run, verdict

MOST_QUESTION = 16  # as in squad.c
PUNCTUATION = set(string.punctuation)


def compare(name, got, want, names=None):
    """One case: two lists are the same."""
    different = [f"{n!r}: {g!r}, not {w!r}" for n, g, w in zip(names or want, got, want) if g != w]
    different += [] if len(got) == len(want) else [f"{len(got)}, not {len(want)}"]
    verdict(f"{name}: {len(want)}", different[0] if different else "" if want else "there is nothing to compare")


def lines_of(*command):
    done = run(*command)
    if done.returncode:
        raise SystemExit(f"{command}: {failure(done)}")
    return done.stdout.split("\n")[:-1]


def questions_of(data):
    """(context, question) in the order of the file."""
    return [(p["context"], q) for a in data["data"] for p in a["paragraphs"] for q in p["qas"]]


def write(work, name, data):
    path = os.path.join(work, name)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(data, f)
    return path


# ----------------------------------------------------------------------------------------------------------
# Data

ODD = [
    *"abcdefgh THE.,!?'\"-_$()[]",
    *("\u00e9", "\u00c9", "e\u0301", "\u00df", "\u0130", "\u0131", "\u01c5", "\u1e9e", "\u03a3", "\u03c2", "\ufb01"),
    *("\u00a0", "\u2003", "\u3000", "\u2028", "\n", "\t", "\u200b", "\u00ad", "\ufeff", "\u0000", "\ufffd", "\u0001"),
    *("\u4e2d", "\u56fd", "\u3042", "\u30ac", "\uac00", "\ub098\ub2e4", "\U0001f600", "\U0001d400", "\U00020000"),
    *("\u0410", "\u0439", "\u05d0\u05b0", "\u0627\u064b", "\u0e01\u0e33", "\u201c", "\u201d", "\u2019", "\u2014"),
    *(" the ", " of ", "[SEP]", "[CLS]", "[MASK]", "[UNK]", "unaffable", "internationalization", "x" * 101, "1,000"),
]


def odd_file(rng, paragraphs):
    """Contexts and questions of odd characters, with answers anywhere."""
    data = {"version": "1.1", "data": [{"title": "", "paragraphs": []}]}
    for number in range(paragraphs):
        context = "".join(rng.choice(ODD) for _ in range(rng.choice([0, 1, 3, 30, 100, 300])))
        qas = []
        for q in range(3):
            question = "".join(rng.choice(ODD[:40]) for _ in range(rng.choice([0, 1, 8, 20, 60])))
            qas.append({"id": f"{number}.{q}", "question": question})
            if context:
                begin = rng.randrange(len(context))
                text = context[begin : begin + rng.choice([1, 1, 2, 5, 40])]
                qas[-1]["answers"] = [{"answer_start": begin, "text": text}]
        data["data"][0]["paragraphs"].append({"context": context, "qas": qas})
    return data


def make_vocabulary(folder):
    """Odd characters, alone and inside words, and some words."""
    words = {part for text in ODD for part in unicodedata.normalize("NFD", text.lower()) if not part.isspace()}
    words |= {"the", "un", "##aff", "##able", "inter", "##nation", "##al", "of", "##000"}
    parts = sorted("##" + word for word in words if word.isalpha())
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words), *parts]
    os.mkdir(folder)
    with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8", errors="surrogatepass") as f:
        f.write("\n".join(dict.fromkeys(lines)) + "\n")


# ----------------------------------------------------------------------------------------------------------
# Windows


def label_of(context_at, origins, answer):
    """First and last position of an answer (begin, end) in characters, (0, 0) where the window does not hold it."""
    if not answer or not origins or origins[0][0] > answer[0] or origins[-1][1] < answer[1]:
        return 0, 0
    first = max(i for i, (begin, _) in enumerate(origins) if begin <= answer[0])
    last = min(i for i, (_, end) in enumerate(origins) if end >= answer[1])
    # Tokens that come from one character pass each other.
    return context_at + min(first, last), context_at + max(first, last)


def wanted_windows(data, library, T, stride):
    """Number of the question, position of the second segment, label, ids, origins in bytes of each window: the library
    cuts the context into what the question leaves. It would cut pairs too, but since 0.23.1 misses windows behind the
    first T tokens (its issue 2091)."""
    library.no_truncation()
    cls, sep = library.token_to_id("[CLS]"), library.token_to_id("[SEP]")
    for number, (context, q) in enumerate(questions_of(data)):
        answers = q.get("answers")
        answer = answers and (answers[0]["answer_start"], answers[0]["answer_start"] + len(answers[0]["text"]))
        byte = [0]  # that a character begins at
        for c in context:
            byte.append(byte[-1] + len(c.encode()))
        head = [cls, *library.encode(q["question"], add_special_tokens=False).ids[:MOST_QUESTION], sep]
        encoding = library.encode(context, add_special_tokens=False)
        encoding.truncate(T - len(head) - 1, stride)
        for window in [encoding] + encoding.overflowing:
            first, last = label_of(len(head), window.offsets, answer)
            origins = tuple((byte[begin], byte[end]) for begin, end in window.offsets)
            yield number, len(head), first, last, (*head, *window.ids, sep), origins


def our_windows(program, vocabulary, path, T, stride):
    for line in lines_of(program, "windows", vocabulary, path, T, stride):
        head, ids, origins = (tuple(map(int, part.split())) for part in line.split("\t"))
        yield *head, ids, tuple(zip(origins[::2], origins[1::2]))


def check_windows(name, program, vocabulary, path, data, shapes):
    library = BertWordPieceTokenizer(os.path.join(vocabulary, "vocab.txt"), lowercase=True)
    for T, stride in shapes:
        got = list(our_windows(program, vocabulary, path, T, stride))
        want = list(wanted_windows(data, library, T, stride))
        compare(f"{name}: windows of {T} tokens that share {stride}", got, want)


# ----------------------------------------------------------------------------------------------------------
# Texts as evaluate-v1.1.py and evaluate-v2.0.py compare them


def normalized(text):
    text = "".join(c for c in text.lower().replace("\u03c2", "\u03c3") if c not in PUNCTUATION)  # one small sigma
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def check_normalization(program, work):
    """Every character inside, before and after words, and texts of many."""
    rng = random.Random(7)
    # Our tables are of Unicode 14; of later Pythons only what is old is compared.
    is_later = tuple(map(int, unicodedata.unidata_version.split("."))) > (14, 0, 0)
    category = unicodedata.ucd_3_2_0.category if is_later else unicodedata.category
    known = [chr(c) for c in range(0x110000) if category(chr(c)) not in ("Cn", "Cs")]
    texts = [f"b{c}a {c}the{c} an{c}B {c}" for c in known]
    for _ in range(20000):
        texts.append("".join(rng.choice(ODD) for _ in range(rng.randint(1, 30))))
        texts.append("".join(rng.choice(known) + rng.choice(["", "a", " an ", "The"]) for _ in range(9)))
    got = [json.loads(line) for line in lines_of(program, "normalize", write(work, "texts.json", texts))]
    compare("normalized texts", got, [normalized(text) for text in texts], texts)


def main(program, vocabulary=None, path=None):
    with tempfile.TemporaryDirectory() as work:
        if not vocabulary:
            vocabulary = os.path.join(work, "vocabulary")
            make_vocabulary(vocabulary)
        odd = odd_file(random.Random(3), 300)
        check_windows("odd characters", program, vocabulary, write(work, "odd.json", odd), odd, [(384, 128), (72, 3)])
        if path:
            with open(path, encoding="utf-8") as f:
                data = json.load(f)
            shapes = [(384, 128), (256, 0), (128, 50), (80, 12)]
            check_windows(os.path.basename(path), program, vocabulary, path, data, shapes)
        check_normalization(program, work)
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
