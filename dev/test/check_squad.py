#!/usr/bin/env python3
"""Do apps/tune/squad.h and squad_match.h cut, label, answer and score as `tokenizers` and the official scripts do?

Every window of contexts and questions of odd characters, and of a file (ids, origins of tokens, labels); which answer
is chosen for made-up logits; how texts are normalized, with every character among them; exact match and F1 of answers
made to be hard, each of them and all together, of v1.1 and of v2.0. Labelling, answering and scoring are written here
from their definitions; only the windows need the library.

    check_squad.py TEST_SQUAD [VOCABULARY_FOLDER FILE]

TEST_SQUAD is the built dev/test/squad.c. Without a file, only odd characters are compared, with a vocabulary made of
them. `make test` takes folder and file from LLMC_TEST_DATA (docs/testing.md).
Prints a line a case and `N passed, N failed, N skipped`.
"""

import collections
import copy
import json
import os
import random
import re
import string
import subprocess
import sys
import tempfile
import unicodedata

MOST_QUESTION, MOST_ANSWER = 16, 30  # as in squad.c
PUNCTUATION = set(string.punctuation)
counts = {"ok": 0, "FAIL": 0, "skip": 0}


def report(name, different, size):
    kind = "FAIL" if different or not size else "ok"
    counts[kind] += 1
    print(f"{kind:4} {name}: " + (f"{len(different)} of {size} differ: {different[0]}" if different else str(size)))


def compare(name, got, want, names=None):
    pairs = zip(names or want, got, want)
    different = [f"{n!r}: {g!r}, not {w!r}" for n, g, w in pairs if g != w]
    report(name, different + ([] if len(got) == len(want) else [f"{len(got)}, not {len(want)}"]), len(want))


def run(*arguments):
    done = subprocess.run([str(a) for a in arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{arguments}: status {done.returncode}: {done.stderr.decode()}")
    return done.stdout.decode().split("\n")[:-1]


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


def answered(data):
    """The questions that have an answer, which the scripts need."""
    data = copy.deepcopy(data)
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = [q for q in paragraph["qas"] if q.get("answers")]
    return data


def second_version(data):
    """The file as one of v2.0: a third of the questions has no answer, others have several."""
    data = copy.deepcopy(data)
    texts = [q["answers"][0]["text"] for _, q in questions_of(data)]
    for number, (context, q) in enumerate(questions_of(data)):
        q["is_impossible"] = number % 3 == 1
        if q["is_impossible"]:
            q["plausible_answers"], q["answers"] = q["answers"], []
        elif number % 3 == 2:
            q["answers"] += [{"answer_start": 0, "text": text} for text in (texts[number - 1], "The")]
    data["version"] = "v2.0"
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
    for line in run(program, "windows", vocabulary, path, T, stride):
        head, ids, origins = (tuple(map(int, part.split())) for part in line.split("\t"))
        yield *head, ids, tuple(zip(origins[::2], origins[1::2]))


def check_windows(name, program, vocabulary, path, data, shapes):
    try:
        from tokenizers import BertWordPieceTokenizer
    except ImportError:
        counts["skip"] += 1
        print(f"skip {name}: windows: {sys.executable} has no tokenizers library (pip install tokenizers)")
        return
    library = BertWordPieceTokenizer(os.path.join(vocabulary, "vocab.txt"), lowercase=True)
    for T, stride in shapes:
        got = list(our_windows(program, vocabulary, path, T, stride))
        want = list(wanted_windows(data, library, T, stride))
        compare(f"{name}: windows of {T} tokens that share {stride}", got, want)


# ----------------------------------------------------------------------------------------------------------
# Answers


def made_up(example, position, end):
    bits = ((example * 512 + position) * 2 + end) * 2654435761 & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 2246822519 & 0xFFFFFFFF
    return (bits >> 9) + (1 << 22 if position == 0 else 0)


def wanted_answers(data, windows, is_v2):
    best, none = {}, {}  # of a question: (score, begin, end), in bytes; the score of no answer
    for example, (number, at, _, _, ids, origins) in enumerate(windows):
        start, end = ([made_up(example, t, which) for t in range(len(ids))] for which in (0, 1))
        none[number] = min(none.get(number, float("inf")), start[0] + end[0])
        top = best.get(number, (float("-inf"), 0, 0))
        for first in range(len(origins)):
            for last in range(first, min(first + MOST_ANSWER, len(origins))):
                score = start[at + first] + end[at + last]
                if score > top[0]:
                    top = score, origins[first][0], origins[last][1]
        best[number] = top
    answers = {}
    for number, (context, q) in enumerate(questions_of(data)):
        score, begin, end = best[number]
        answers[q["id"]] = "" if is_v2 and none[number] > score else context.encode()[begin:end].decode()
    return answers


def check_answers(name, program, vocabulary, path, data, shape, is_v2, work):
    out = os.path.join(work, "predictions.json")
    windows = our_windows(program, vocabulary, path, *shape)
    totals = run(program, "answer", vocabulary, path, *shape, out)
    with open(out, encoding="utf-8") as f:
        got = json.load(f)
    want = wanted_answers(data, windows, is_v2)
    name = f"{name}: answers, {sum(not a for a in got.values())} of them empty"
    compare(name, [got.get(i) for i in want], list(want.values()), want)
    check_totals(f"{name}: their scores", totals, data, got, is_v2)


# ----------------------------------------------------------------------------------------------------------
# Scores, as evaluate-v1.1.py and evaluate-v2.0.py define them


def normalized(text):
    text = "".join(c for c in text.lower().replace("\u03c2", "\u03c3") if c not in PUNCTUATION)  # one small sigma
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1_of(answer, gold, is_v2):
    a, b = normalized(answer).split(), normalized(gold).split()
    if is_v2 and (not a or not b):
        return float(a == b)
    common = sum((collections.Counter(a) & collections.Counter(b)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(a), common / len(b)
    return 2 * precision * recall / (precision + recall)


def match(answer, q, is_v2):
    golds = [a["text"] for a in q["answers"]]
    if is_v2:
        golds = [g for g in golds if normalized(g)] or [""]
    return max(float(normalized(answer) == normalized(g)) for g in golds), max(f1_of(answer, g, is_v2) for g in golds)


def check_totals(name, lines, data, answers, is_v2):
    parts = [[], [], []]  # all, those with an answer, those without
    for _, q in questions_of(data):
        if q.get("answers") or is_v2:
            one = match(answers[q["id"]], q, is_v2)
            parts[0].append(one)
            parts[1 if q["answers"] else 2].append(one)
    want = [(len(p), *(100.0 * sum(one[i] for one in p) / len(p) if p else 0.0 for i in (0, 1))) for p in parts]
    compare(name, [tuple(map(float, line.split())) for line in lines], want)


def scrambled(rng, text, others):
    """An answer that has something of the text and something else."""
    words = text.split()
    odd = "".join(rng.choice(ODD) for _ in range(rng.randint(1, 12)))
    accents = "".join(rng.choice(["e\u0301", "\u00e9", "\u0130", "\u1e9e", c, c.upper()]) for c in text)
    space = rng.choice(["\u00a0", "\u2003", "\x1f", "\x85", "\u200b", "\t\n", "  ", *"\u4e2d\u0301\ufb01\u2019"])
    return rng.choice([
        text, "", odd, accents,
        text.swapcase() + rng.choice(["", ".", "\u00a0", "\u2019s", "\n\"'"]),
        rng.choice(["the ", "a ", "AN\u3000", "The-", "\u201cthe\u201d "]) + text,
        text.translate({ord(c): None for c in string.punctuation}),
        rng.choice(string.punctuation).join(words),
        space.join(words),
        " ".join(rng.sample(words, len(words))),
        " ".join(words[: rng.randint(0, len(words))] * 2),
        text + " " + rng.choice(others),
        rng.choice(["a", "the", "!", "a the an", "\u4e2d", "_", "\u00a0", "\u3002", "\ud55c\uad6d the"]),
        rng.choice(others),
    ])  # fmt: skip


def check_scores(name, program, vocabulary, path, data, is_v2, work):
    rng = random.Random(5)
    questions = [q for _, q in questions_of(data)]
    texts = [a["text"] for q in questions for a in q["answers"]]
    for number in range(3):
        golds = [rng.choice([a["text"] for a in q["answers"]] or ["", rng.choice(texts)]) for q in questions]
        answers = {q["id"]: scrambled(rng, gold, texts) for q, gold in zip(questions, golds)}
        lines = run(program, "score", vocabulary, path, 384, 128, write(work, "predictions.json", answers))
        got = [tuple(map(float, line.split())) for line in lines[:-3]]
        want = [match(answers[q["id"]], q, is_v2) for q in questions]
        compare(f"{name}: every score, round {number}", got, want, answers.values())
        check_totals(f"{name}: all scores, round {number}", lines[-3:], data, answers, is_v2)


def check_normalization(program, data, work):
    """Every character inside, before and after words, and texts made to be hard."""
    rng = random.Random(7)
    # Our tables are of Unicode 14; of later Pythons only what is old is compared.
    is_later = tuple(map(int, unicodedata.unidata_version.split("."))) > (14, 0, 0)
    category = unicodedata.ucd_3_2_0.category if is_later else unicodedata.category
    known = [chr(c) for c in range(0x110000) if category(chr(c)) not in ("Cn", "Cs")]
    texts = [f"b{c}a {c}the{c} an{c}B {c}" for c in known]
    golds = [a["text"] for _, q in questions_of(data) for a in q["answers"]]
    for _ in range(20000):
        texts.append(scrambled(rng, rng.choice(golds), golds))
        texts.append("".join(rng.choice(ODD) for _ in range(rng.randint(1, 30))))
        texts.append("".join(rng.choice(known) + rng.choice(["", "a", " an ", "The"]) for _ in range(9)))
    got = [json.loads(line) for line in run(program, "normalize", write(work, "texts.json", texts))]
    compare("normalized texts", got, [normalized(text) for text in texts], texts)


def main(program, vocabulary=None, path=None):
    with tempfile.TemporaryDirectory() as work:
        if not vocabulary:
            vocabulary = os.path.join(work, "vocabulary")
            make_vocabulary(vocabulary)
        data = odd_file(random.Random(3), 300)
        files = {"odd characters": (write(work, "odd.json", data), data, [(384, 128), (72, 3)])}
        if path:
            with open(path, encoding="utf-8") as f:
                data = json.load(f)
            files[os.path.basename(path)] = path, data, [(384, 128), (256, 0), (128, 50), (80, 12)]
        for name, (file, questions, shapes) in files.items():
            check_windows(name, program, vocabulary, file, questions, shapes)
            check_answers(name, program, vocabulary, file, questions, (128, 50), False, work)
        one, two = answered(data), second_version(answered(data))
        two_path = write(work, "two.json", two)
        check_answers("v2.0", program, vocabulary, two_path, two, (128, 50), True, work)
        check_normalization(program, one, work)
        check_scores("v1.1", program, vocabulary, write(work, "one.json", one), one, False, work)
        check_scores("v2.0", program, vocabulary, two_path, two, True, work)
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
