#!/usr/bin/env python3
"""Do apps/tune/squad.h and squad_match.h cut, label, answer and score as `tokenizers` and the official scripts
do?

Every window of contexts and questions of odd characters, and of a file (ids, origins of tokens, labels); which
answer is chosen for made-up logits; how texts are normalized, with every character among them; exact match and F1 of
answers made to be hard, each of them and all together, of v1.1 and of v2.0. Labelling, answering and scoring are
written here from their definitions.

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

from tokenizers import BertWordPieceTokenizer

MOST_QUESTION, MOST_ANSWER = 64, 30
PUNCTUATION = set(string.punctuation)
counts = {"ok": 0, "FAIL": 0}


def report(name, differences, size):
    kind = "FAIL" if differences or not size else "ok"
    counts[kind] += 1
    print(
        f"{kind:4} {name}: " + (f"{len(differences)} of {size} differ: {differences[0]}" if differences else str(size))
    )


def run(*arguments):
    done = subprocess.run([str(a) for a in arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{arguments}: status {done.returncode}: {done.stderr.decode()}")
    return done.stdout.decode().split("\n")[:-1]


def questions_of(data):
    """(context, question) in the order of the file."""
    return [(p["context"], q) for a in data["data"] for p in a["paragraphs"] for q in p["qas"]]


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


def windows_of(library, question, context, T, stride):
    """(position of the second segment, ids, offsets in the context) of each window: the library cuts the context into
    what the question leaves. It would cut pairs too, but since 0.23.1 misses windows behind the first T tokens (its
    issue 2091)."""
    library.no_truncation()
    cls, sep = library.token_to_id("[CLS]"), library.token_to_id("[SEP]")
    head = [cls, *library.encode(question, add_special_tokens=False).ids, sep]
    encoding = library.encode(context, add_special_tokens=False)
    encoding.truncate(T - len(head) - 1, stride)
    for window in [encoding] + encoding.overflowing:
        yield len(head), [*head, *window.ids, sep], window.offsets


def wanted_windows(data, library, T, stride):
    found = []
    for number, (context, q) in enumerate(questions_of(data)):
        answers = q.get("answers")
        answer = answers and (answers[0]["answer_start"], answers[0]["answer_start"] + len(answers[0]["text"]))
        byte = [0]  # that a character begins at
        for c in context:
            byte.append(byte[-1] + len(c.encode()))
        for at, ids, origins in windows_of(library, q["question"], context, T, stride):
            first, last = label_of(at, origins, answer)
            origins = tuple((byte[begin], byte[end]) for begin, end in origins)
            found.append((number, at, first, last, tuple(ids), origins))
    return found


def our_windows(program, vocabulary, path, T, stride):
    found = []
    for line in run(program, "windows", vocabulary, path, T, stride, MOST_QUESTION, "evaluate"):
        head, ids, origins = line.split("\t")
        numbers = [int(n) for n in origins.split()]
        origins = tuple(zip(numbers[::2], numbers[1::2]))
        found.append((*map(int, head.split()), tuple(map(int, ids.split())), origins))
    return found


def check_windows(name, program, vocabulary, path, data, library, shapes):
    for T, stride in shapes:
        got = our_windows(program, vocabulary, path, T, stride)
        want = wanted_windows(data, library, T, stride)
        different = [f"{g} is not {w}" for g, w in zip(got, want) if g != w]
        if len(got) != len(want):
            different.append(f"{len(got)} windows, not {len(want)}")
        report(f"{name}: windows of {T} tokens that share {stride}", different, len(want))


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
            question = "".join(rng.choice(ODD[:40]) for _ in range(rng.choice([0, 1, 8, 20])))
            qas.append({"id": f"{number}.{q}", "question": question})
            if context:
                begin = rng.randrange(len(context))
                text = context[begin : begin + rng.choice([1, 1, 2, 5, 40])]
                qas[-1]["answers"] = [{"answer_start": begin, "text": text}]
        data["data"][0]["paragraphs"].append({"context": context, "qas": qas})
    return data


# ----------------------------------------------------------------------------------------------------------
# Answers


def made_up(example, position, end):
    bits = ((example * 512 + position) * 2 + end) * 2654435761 & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 2246822519 & 0xFFFFFFFF
    return (bits >> 9) + (1 << 22 if position == 0 else 0)


def wanted_answers(data, windows, is_v2):
    best, none = {}, {}  # of a question: (score, begin, end), in bytes; the score of no answer
    nothing = float("-inf"), 0, 0
    for example, (number, at, _, _, ids, origins) in enumerate(windows):
        start = [made_up(example, t, 0) for t in range(len(ids))]
        end = [made_up(example, t, 1) for t in range(len(ids))]
        none[number] = min(none.get(number, float("inf")), start[0] + end[0])
        top = best.get(number, nothing)
        for first in range(len(origins)):
            for last in range(first, min(first + MOST_ANSWER, len(origins))):
                score = start[at + first] + end[at + last]
                if score > top[0]:
                    top = score, origins[first][0], origins[last][1]
        best[number] = top
    answers = {}
    for number, (context, q) in enumerate(questions_of(data)):
        score, begin, end = best[number]
        text = context.encode()[begin:end].decode()
        answers[q["id"]] = "" if is_v2 and none[number] > score else text
    return answers


def check_answers(name, program, vocabulary, path, data, T, stride, is_v2, work):
    out = os.path.join(work, "predictions.json")
    windows = our_windows(program, vocabulary, path, T, stride)
    totals = run(program, "answer", vocabulary, path, T, stride, out)
    with open(out, encoding="utf-8") as f:
        got = json.load(f)
    want = wanted_answers(data, windows, is_v2)
    different = [f"{i}: {got.get(i)!r} is not {want[i]!r}" for i in want if got.get(i) != want[i]]
    report(f"{name}: answers, {sum(not a for a in got.values())} of them empty", different, len(want))
    check_totals(f"{name}: scores of these answers", totals, data, got, is_v2)


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
    parts = [[], [], []]
    for _, q in questions_of(data):
        if q.get("answers") or is_v2:
            one = match(answers[q["id"]], q, is_v2)
            parts[0].append(one)
            parts[1 if q["answers"] else 2].append(one)
    want = []
    for part in parts:
        n = len(part)
        want.append((n, *(100.0 * sum(one[i] for one in part) / n if n else 0.0 for i in (0, 1))))
    got = [tuple(float(x) for x in line.split()) for line in lines]
    shown = ", ".join(f"EM {e:.2f} F1 {f:.2f} of {n}" for n, e, f in want if n)
    report(f"{name}: {shown}", [] if got == want else [f"{got} is not {want}"], len(parts[0]))


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


def check_scores(name, program, vocabulary, path, data, is_v2, work, rounds):
    rng = random.Random(5)
    questions = [q for _, q in questions_of(data)]
    texts = [a["text"] for q in questions for a in q["answers"]]
    predictions = os.path.join(work, "predictions.json")
    for number in range(rounds):
        answers = {}
        for q in questions:
            gold = rng.choice([a["text"] for a in q["answers"]] or ["", rng.choice(texts)])
            answers[q["id"]] = scrambled(rng, gold, texts)
        with open(predictions, "w", encoding="utf-8") as f:
            json.dump(answers, f, ensure_ascii=bool(number % 2))
        lines = run(program, "score", vocabulary, path, predictions)
        got = [tuple(float(x) for x in line.split()) for line in lines[:-3]]
        want = [match(answers[q["id"]], q, is_v2) for q in questions]
        different = [f"{answers[q['id']]!r} for {q}: {g}, not {w}" for q, g, w in zip(questions, got, want) if g != w]
        different += [f"{len(got)} answers"] if len(got) != len(want) else []
        report(f"{name}: every score, round {number}", different, len(want))
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
    texts += [scrambled(rng, rng.choice(golds), golds) for _ in range(20000)]
    texts += ["".join(rng.choice(ODD) for _ in range(rng.randint(1, 30))) for _ in range(20000)]
    texts += ["".join(rng.choice(known) + rng.choice(["", "a", " an ", "The"]) for _ in range(9)) for _ in range(20000)]
    got = run(program, "normalize", write(work, "texts.json", texts))
    want = [normalized(text) for text in texts]
    different = [f"{t!r}: {json.loads(g)!r}, not {w!r}" for t, g, w in zip(texts, got, want) if json.loads(g) != w]
    report("normalized texts", different + ([] if len(got) == len(want) else [f"{len(got)} texts"]), len(want))


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
    texts = [q["answers"][0] for _, q in questions_of(data)]
    for number, (context, q) in enumerate(questions_of(data)):
        q["is_impossible"] = number % 3 == 1
        if q["is_impossible"]:
            q["plausible_answers"], q["answers"] = q["answers"], []
        elif number % 3 == 2:
            q["answers"].append({"answer_start": 0, "text": texts[number - 1]["text"]})
            q["answers"].append({"answer_start": 0, "text": "The"})
    data["version"] = "v2.0"
    return data


def write(work, name, data):
    path = os.path.join(work, name)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(data, f)
    return path


def make_vocabulary(folder):
    """Odd characters, alone and inside words, and some words."""
    words = {part for text in ODD for part in unicodedata.normalize("NFD", text.lower()) if not part.isspace()}
    words |= {"the", "un", "##aff", "##able", "inter", "##nation", "##al", "of", "##000"}
    parts = sorted("##" + word for word in words if word.isalpha())
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words), *parts]
    os.mkdir(folder)
    with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8", errors="surrogatepass") as f:
        f.write("\n".join(dict.fromkeys(lines)) + "\n")


def main(program, vocabulary=None, path=None):
    with tempfile.TemporaryDirectory() as work:
        if not vocabulary:
            vocabulary = os.path.join(work, "vocabulary")
            make_vocabulary(vocabulary)
        library = BertWordPieceTokenizer(os.path.join(vocabulary, "vocab.txt"), lowercase=True)
        odd = odd_file(random.Random(3), 300)
        odd_path = write(work, "odd.json", odd)
        check_windows("odd characters", program, vocabulary, odd_path, odd, library, [(384, 128), (72, 3)])
        check_answers("odd characters", program, vocabulary, odd_path, odd, 128, 50, False, work)
        base, data = os.path.basename(path or "odd characters"), odd
        if path:
            with open(path, encoding="utf-8") as f:
                data = json.load(f)
            check_windows(base, program, vocabulary, path, data, library, [(384, 128), (256, 0), (128, 50), (80, 12)])
            check_answers(base, program, vocabulary, path, data, 128, 50, False, work)
        data = answered(data)
        path, two = write(work, "one.json", data), second_version(data)
        two_path = write(work, "two.json", two)
        check_answers("v2.0", program, vocabulary, two_path, two, 384, 128, True, work)
        check_normalization(program, data, work)
        check_scores(base, program, vocabulary, path, data, False, work, 3)
        check_scores("v2.0", program, vocabulary, two_path, two, True, work, 3)
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, 0 skipped")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
