#!/usr/bin/env python3
"""Fine-tuning: classes of texts, numbers of pairs, and answers in contexts, from files to scores.

    dev/test/tasks.py PROGRAM          finetune_bert, from the repository's root

What is refused is in refuse.txt, what must be the same in equal.txt. Ends with `N passed, N failed, N skipped`; exit
status 1 if one failed.
"""

import json
import math
import os
import random
import re
import shutil
import sys
from importlib.util import find_spec

sys.dont_write_bytecode = True
from runs import LIKE_TORCH, Runs, far_from_torch  # noqa: E402
from verdicts import finish, skip, verdict, write  # noqa: E402

NAMES = ("low", "middle", "top")  # thirds of the alphabet
FEW = "(21 of 150 examples; -m 0 takes all)"


class Failed(Exception):
    """Why a case fails."""


def check(good, why):
    if not good:
        raise Failed(why)


class Task:
    """Runs of one task in a folder of files, on train, val and asked, which is val without what is to be predicted."""

    def __init__(self, runs, name, flags, put):
        self.runs, self.name, self.flags = runs, name, flags
        self.at = lambda file: os.path.join(runs.files, file)
        for file, count in (("train", 600), ("val", 150), ("asked", 150)):
            with open(self.at(f"{name}-{file}"), "w", encoding="utf-8") as f:
                put(f, random.Random(count), count, file == "asked")

    def run(self, flags):
        """What a run prints; it must end well and warn of nothing."""
        result = self.runs.start(self.runs.command(f"[tune] {self.flags} {flags}")[0], self.runs.files)
        why = result.wrong() or result.stderr
        check(not why, why)
        return result.stdout

    def read(self, file):
        with open(self.at(file), encoding="utf-8") as f:
            return f.read()

    def learn(self, flags, keys, least):
        """Train; the keys' last values in the log, each at least LEAST, and config.json."""
        sizes = "-e L=1,C=32,NH=2,T=128 -n 0 -l 3e-3 -u 10 -b 16 -v 1000"
        self.run(f"{sizes} {flags} -i {self.name}-train -j {self.name}-val -o {self.name}")
        log = self.read(self.name + "/log.jsonl")
        found = [float(re.findall(rf'"{key}": ([0-9.e+-]+)', log)[-1]) for key in keys]
        check(min(found) >= least, f"{keys} are {found}, not {least}")
        return found, json.loads(self.read(self.name + "/config.json"))

    def evaluate(self, flags):
        """What an evaluation prints, and its predictions."""
        out = self.name + "-said"
        said = self.run(f"-e {self.name} --evaluate 1 -b 7 --predictions {out} {flags}")
        return said, self.read(out)


def put_classes(f, draw, count, is_asked):
    for _ in range(count):
        third = draw.randrange(3)
        text = "".join(draw.choices("abcdefghijklmnopqrstuvwx"[8 * third : 8 * third + 8], k=draw.randrange(5, 25)))
        f.write(text + "\n" if is_asked else f"{NAMES[third]}\t{text}\n")


def classes(runs):
    """Classes are learnt, the model names them, and predictions are those that are scored."""
    task = Task(runs, "classes", "--task classify", put_classes)
    (accuracy, f1), config = task.learn("--labels 3 --epochs 4", ("val_accuracy", "val_f1"), 0.95)
    check(task.read("classes/log.jsonl").count('"loss"') == 150, "four epochs of 600 examples are not 150 steps of 16")
    check(config["architectures"] == ["BertForSequenceClassification"], "another architecture")
    check(config["id2label"] == {str(i): name for i, name in enumerate(NAMES)}, "no names of classes")
    said, whole = task.evaluate("-j classes-val")
    header, *rows = whole.splitlines()
    check(header == "prediction\tname\tprobability", "no header")
    right = [a.split("\t")[1] == b.split("\t")[0] for a, b in zip(rows, task.read("classes-val").splitlines())]
    check(len(rows) == 150 and abs(sum(right) / 150 - accuracy) < 1e-5, f"{sum(right)} of {len(rows)} are right")
    check(f"accuracy {accuracy}" in said and f", F1 {f1}" in said and said.endswith(" (150 examples)\n"), said)
    said, few = task.evaluate("-j classes-val -m 3")  # the first 3 micro-batches of 7
    check(few.splitlines() == [header] + rows[:21], "-m 3: other predictions, or not 21 of them")
    check(f" accuracy {sum(right[:21]) / 21:.6f}, " in said and FEW in said, said)
    # Wrong labels of many texts; the third class does not occur, and counts for nothing.
    texts = [line.split("\t")[1] for line in task.read("classes-val").splitlines()]
    kept = [(row.split("\t")[1], text) for row, text in zip(rows, texts) if row.split("\t")[1] != NAMES[2]]
    pairs = [(NAMES[i % 3 % 2], name) for i, (name, _) in enumerate(kept)]
    with open(task.at("classes-wrong"), "w", encoding="utf-8") as f:
        f.writelines(f"{label}\t{text}\n" for (label, _), (_, text) in zip(pairs, kept))
    said, labels = task.evaluate("-j classes-wrong")[0], [label for label, _ in pairs]
    f1 = sum(pairs.count((n, n)) / (labels.count(n) + [b for _, b in pairs].count(n)) for n in NAMES[:2])
    check(f" F1 {f1:.6f} " in said, f"the mean of the classes' F1 is {f1}: {said}")
    # A prediction for every line, also for an empty one.
    with open(task.at("classes-asked"), "a", encoding="utf-8", newline="") as f:
        f.write("\n\r\n")
    said, asked = task.evaluate("-j classes-asked")
    check(said == "nothing to compare with: the class is predicted of 152 texts\n", said)
    check(asked.startswith(whole) and len({*asked.splitlines()[151:]}) == 1, "other predictions")


def put_rated(f, draw, count, is_asked):
    """Half of how many of a pair's letters are a, less how many are b, in STS-B's columns."""
    columns = "index genre filename year old_index source1 source2 sentence1 sentence2 score".split()
    f.write("\t".join(columns[: 9 if is_asked else 10]) + "\r\n")
    for i in range(count):
        pair = ["".join(draw.choices("abcdef", k=draw.randrange(3, 9))) for _ in range(2)]
        score = [] if is_asked else [f"{('|'.join(pair).count('a') - '|'.join(pair).count('b')) / 2:g}"]
        f.write("\t".join([str(i), "main", "made", "2012", str(i), "none", "none", *pair, *score]) + "\r\n")


def ranks_of(values):
    """Equal ones have the mean of their ranks, here twice as large."""
    return [sum((x < y) + (x <= y) for x in values) for y in values]


def correlation(a, b):
    a, b = ([x - sum(c) / len(c) for x in c] for c in (a, b))
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def numbers(runs):
    """Numbers are learnt, and the loss is the mean squared error of the predictions."""
    task = Task(runs, "rated", "--task classify", put_rated)
    (pearson, _), config = task.learn("--labels 1 --epochs 5", ("val_pearson", "val_spearman"), 0.9)
    check(config["problem_type"] == "regression", 'no "regression" in config.json')
    said, whole = task.evaluate("-j rated-val")
    pattern = rf"val loss ([0-9.]+) \| Pearson {pearson}[.0-9]*, Spearman ([0-9.]+) \(150 examples\)\n"
    found = re.fullmatch(pattern, said)
    check(found, said)
    scores = [float(line.split("\t")[9]) for line in task.read("rated-val").splitlines()[1:]]
    given = list(map(float, whole.splitlines()[1:]))
    loss = sum((x - y) ** 2 for x, y in zip(scores, given)) / 150
    check(abs(loss - float(found[1])) < 3e-4, f"the mean squared error of the predictions is {loss}: {said}")
    of_ranks = correlation(ranks_of(scores), ranks_of(given))
    check(abs(of_ranks - float(found[2])) < 1e-5, f"the correlation of ranks is {of_ranks}: {said}")
    check(task.evaluate("-j rated-asked")[1] == whole, "other predictions without scores")


def put_questions(f, draw, count, is_asked):
    """Which word begins with a capital letter and ends with a digit?"""
    paragraphs = []
    for i in range(count):
        words = ["".join(draw.choices("abcdefgh", k=draw.randrange(2, 6))) for _ in range(draw.randrange(4, 24))]
        at = draw.randrange(len(words))
        words[at] = draw.choice("ABCD") + words[at] + draw.choice("1234")
        asked = {"id": str(i), "question": "which?"}
        if not is_asked:
            asked["answers"] = [{"text": words[at], "answer_start": len(" ".join(words[:at] + [""]))}]
        paragraphs.append({"context": " ".join(words), "qas": [asked]})
    json.dump({"version": "1.1", "data": [{"paragraphs": paragraphs}]}, f)


def answers(runs):
    """Answers are learnt, and predictions are those that are scored."""
    task = Task(runs, "answers", "--task answer --stride 16", put_questions)
    _, config = task.learn("--epochs 4", ("val_exact_match", "val_f1"), 80)
    check(config["architectures"] == ["BertForQuestionAnswering"], "another architecture")
    paragraphs = json.loads(task.read("answers-val"))["data"][0]["paragraphs"]
    gold = [p["qas"][0]["answers"][0]["text"].lower() for p in paragraphs]
    said, predicted = task.evaluate("-j answers-val")
    given = json.loads(predicted).values()
    right = 100 * sum(x.lower() == y for x, y in zip(given, gold)) / 150
    check(f"exact match {right:.4f}, F1 " in said and " (150 questions" in said and len(given) == 150, said)
    said, without = task.evaluate("-j answers-asked")
    check(said == "nothing to compare with: the answer is predicted of 150 questions\n", said)
    check(without == predicted, "other predictions without answers")


def theirs(runs):
    """Of fine-tuned models of transformers, vectors of the encoder and losses with a new head are those of transformers."""
    import numpy
    import torch
    import transformers as hf

    torch.manual_seed(1)
    words = "[PAD] [UNK] [CLS] [SEP] [MASK]".split() + [mark + chr(97 + i) for mark in ("", "##") for i in range(26)]
    config = hf.BertConfig(vocab_size=57, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                           max_position_embeddings=64, num_labels=5, initializer_range=0.1)  # fmt: skip
    task = Task(runs, "other", "--task classify --dropout 0 --labels 3", put_classes)
    rows = [line.split("\t") for line in task.read("other-train").splitlines()]
    for kind in ("TokenClassification", "QuestionAnswering", "SequenceClassification"):
        getattr(hf, "BertFor" + kind)(config).save_pretrained(task.at("theirs"))
        write(task.at("theirs/vocab.txt"), "\n".join(words) + "\n")
        embed = [runs.program.replace("finetune_", "use_"), *"-e theirs --embed other-asked --vectors v.npy".split()]
        done, tokenizer = runs.start(embed, runs.files), hf.AutoTokenizer.from_pretrained(task.at("theirs"))
        encoder, ids = hf.BertModel.from_pretrained(task.at("theirs")).eval(), lambda text: tokenizer(text, return_tensors="pt")
        wanted = [encoder(**ids(text))[0].mean(1)[0].detach().numpy() for text in task.read("other-asked").splitlines()]
        off = numpy.abs(numpy.load(task.at("v.npy")) - wanted).max()
        check("left out: " in done.stdout and off <= 1e-5, f"{kind}: vectors are off by {off:.1e}; {done}")
    task.run(f"-e theirs --new-head 1 -i other-train -b 4 {LIKE_TORCH.replace('-x 20 -l 1e-3', '-x 1 -l 0')} -o start")
    task.run(f"-e theirs --new-head 1 -i other-train -b 4 {LIKE_TORCH} -o other")
    model = hf.BertForSequenceClassification.from_pretrained(task.at("start")).eval()  # without dropout
    loss_of = lambda label, text: model(**ids(text), labels=torch.tensor([NAMES.index(label)])).loss / 4
    why = far_from_torch(task.at("other/log.jsonl"), model, lambda i: sum(loss_of(*row) for row in rows[4 * i : 4 * i + 4]))
    check(not why, why)


def main(program):
    runs = Runs(program)
    try:
        for name in ("vocab.txt", "tokenizer_config.json"):  # next to the files
            shutil.copy(f"{runs.files}/data/builtin/bert/{name}", runs.files)
        missing = [name for name in ("numpy", "torch", "transformers") if not find_spec(name)]
        for name in missing:
            skip(theirs.__doc__, f"{sys.executable} has no {name}")
        for case in (classes, numbers, answers, *([] if missing else [theirs])):
            try:
                case(runs)
                verdict(case.__doc__)
            except Failed as why:
                verdict(case.__doc__, str(why))
    finally:
        runs.remove()
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
