#!/usr/bin/env python3
"""Fine-tuning: classes of texts, numbers of pairs, and answers in contexts, from files to scores.

    dev/test/tasks.py PROGRAM          finetune_bert, from the repository's root

What is refused is in refuse.txt, what must be the same in equal.txt. Ends with `N passed, N failed, N skipped`; exit
status 1 if one failed.
"""

import json
import os
import random
import re
import shutil
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from runs import Runs, put_examples  # noqa: E402
from verdicts import finish, verdict  # noqa: E402

LETTERS = "abcdefghijklmnopqrstuvwx"
NAMES = ("low", "middle", "top")  # thirds of the alphabet


class Failed(Exception):
    """Why a case fails."""


def check(good, why):
    if not good:
        raise Failed(why)


class Tasks:
    """Runs in one folder of files."""

    def __init__(self, program):
        self.runs = Runs(program)
        self.at = lambda name: os.path.join(self.runs.files, name)
        put_examples(self.at)
        for name in ("vocab.txt", "tokenizer_config.json"):  # next to the examples
            shutil.copy(self.at("texts/" + name), self.at(name))

    def run(self, flags):
        """What a run prints; it must end well and warn of nothing."""
        result = self.runs.start(self.runs.command("[tune] " + flags)[0], self.runs.files)
        why = result.wrong() or result.stderr
        check(not why, why)
        return result.stdout

    def put(self, name, lines):
        with open(self.at(name), "w", encoding="utf-8", newline="") as f:
            f.writelines(line + "\n" for line in lines)

    def lines(self, name):
        with open(self.at(name), encoding="utf-8", newline="") as f:
            return f.read().split("\n")[:-1]

    def json(self, name):
        return json.loads("\n".join(self.lines(name)))

    def last(self, out, key):
        return float(re.findall(rf'"{key}": ([0-9.e+-]+)', "\n".join(self.lines(out + "/log.jsonl")))[-1])


def put_classes(tasks):
    draw = random.Random(1)
    for name, count in (("train", 600), ("val", 150)):
        rows = []
        for _ in range(count):
            third = draw.randrange(3)
            text = "".join(draw.choice(LETTERS[8 * third : 8 * third + 8]) for _ in range(draw.randrange(5, 25)))
            rows.append(f"{NAMES[third]}\t{text}")
        tasks.put(name + ".tsv", rows)


def classes(tasks):
    """Classes are learnt, the model names them, and predictions are those that are scored."""
    size = "--task classify --labels 3 -e L=1,C=32,NH=2,T=64 -n 0 -l 3e-3 -u 10 -b 16"
    tasks.run(f"{size} -i train.tsv -j val.tsv --epochs 4 -v 50 -o classes")
    steps = sum('"loss"' in line for line in tasks.lines("classes/log.jsonl"))
    check(steps == 150, f"four epochs of 600 examples are {steps} steps of 16, not 150")
    accuracy, f1 = tasks.last("classes", "val_accuracy"), tasks.last("classes", "val_f1")
    check(min(accuracy, f1) >= 0.95, f"accuracy {accuracy}, F1 {f1}, not 0.95")
    config = tasks.json("classes/config.json")
    check(config["architectures"] == ["BertForSequenceClassification"], "another architecture")
    check(config["id2label"] == {str(i): name for i, name in enumerate(NAMES)}, "no names of classes")
    says = "--task classify -e classes --evaluate 1 -b 7"  # 0 labels are as many as the model has
    said = tasks.run(f"{says} -j val.tsv --predictions all.tsv")
    header, *rows = tasks.lines("all.tsv")
    check(header == "prediction\tname\tprobability", "no header")
    labels = [line.split("\t")[0] for line in tasks.lines("val.tsv")]
    right = [row.split("\t")[1] == label for row, label in zip(rows, labels)]
    check(len(rows) == 150 and abs(sum(right) / 150 - accuracy) < 1e-5, f"{sum(right)} of {len(rows)} are right")
    pattern = rf"val loss [0-9.]+ \| accuracy {accuracy}[.0-9]*, F1 {f1}[.0-9]* \(150 examples\)\n"
    check(re.fullmatch(pattern, said), said)
    # The first 3 micro-batches of 7.
    said = tasks.run(f"{says} -j val.tsv -m 3 --predictions few.tsv")
    check(tasks.lines("few.tsv") == [header] + rows[:21], "-m 3: other predictions, or not 21 of them")
    check(f" accuracy {sum(right[:21]) / 21:.6f}, " in said and "(21 of 150 examples; -m 0 takes all)" in said, said)
    # Without labels: a prediction for every line, also for an empty one.
    texts = [line.split("\t")[1] for line in tasks.lines("val.tsv")]
    tasks.put("texts.tsv", texts[:70] + ["", "\r"] + texts[70:])
    said = tasks.run(f"{says} -j texts.tsv --predictions unlabelled.tsv")
    check(said == "nothing to compare with: the class is predicted of 152 texts\n", said)
    found = tasks.lines("unlabelled.tsv")
    check(found[71] == found[72] and found[:71] + found[73:] == [header] + rows, "other predictions")
    tasks.put("long.tsv", [f"{i % 3}\t{5 * text}\t{4 * text}" for i, text in enumerate(texts)])
    tasks.run(f"{size} -i long.tsv -x 2 -v 0 -o ''")


def whole_tokenizer(tasks):
    """A model whose tokenizer is tokenizer.json alone; it is saved with the model that is trained."""
    shutil.copytree(tasks.at("classes"), tasks.at("whole"))
    ids = {token: i for i, token in enumerate(tasks.lines("classes/vocab.txt"))}
    special = [{"id": ids[t], "content": t, "special": True} for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")]
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    model.update(max_input_chars_per_word=100, vocab=ids)
    normal = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": False}
    text = {"added_tokens": special, "normalizer": {**normal, "strip_accents": None}, "model": model}
    text["pre_tokenizer"] = {"type": "BertPreTokenizer"}
    tasks.put("whole/tokenizer.json", [json.dumps(text)])
    for name in ("whole/vocab.txt", "whole/tokenizer_config.json", "vocab.txt", "tokenizer_config.json"):
        os.remove(tasks.at(name))
    tasks.run("--task classify -e whole -j val.tsv --evaluate 1 -b 7 --predictions whole.tsv")
    check(tasks.lines("whole.tsv") == tasks.lines("all.tsv"), "other predictions")
    tasks.run("--task classify -e whole -i train.tsv -n 0 -b 16 -x 1 -v 0 -o whole-tuned")
    check(tasks.json("whole-tuned/tokenizer.json") == text, "tokenizer.json is not beside the model")


def put_rated(tasks):
    """Half of how many of a pair's letters are a, less how many are b, in STS-B's columns."""
    draw = random.Random(1)
    columns = "index genre filename year old_index source1 source2 sentence1 sentence2 score".split()
    for name, count in (("rated", 600), ("rated-val", 100)):
        rows = ["\t".join(columns) + "\r"]
        for i in range(count):
            pair = ["".join(draw.choice("abcdef") for _ in range(draw.randrange(3, 9))) for _ in range(2)]
            score = ("".join(pair).count("a") - "".join(pair).count("b")) / 2
            rows.append("\t".join([str(i), "main", "made", "2012", str(i), "none", "none", *pair, f"{score:g}\r"]))
        tasks.put(name + ".tsv", rows)


def numbers(tasks):
    """Numbers are learnt, and the loss is the mean squared error of the predictions."""
    size = "--task classify --labels 1 -e L=1,C=32,NH=2,T=64 -n 0 -l 3e-3 -u 10 -b 16"
    tasks.run(f"{size} -i rated.tsv -j rated-val.tsv --epochs 5 -v 1000 -o rated")
    pearson, spearman = tasks.last("rated", "val_pearson"), tasks.last("rated", "val_spearman")
    check(min(pearson, spearman) >= 0.9, f"Pearson {pearson}, Spearman {spearman}, not 0.9")
    check(tasks.json("rated/config.json")["problem_type"] == "regression", 'no "regression" in config.json')
    says = "--task classify -e rated --evaluate 1 -b 7"
    said = tasks.run(f"{says} -j rated-val.tsv --predictions said")
    found = re.fullmatch(rf"val loss ([0-9.]+) \| Pearson {pearson}[.0-9]*, Spearman [0-9.]+ \(100 examples\)\n", said)
    check(found, said)
    scores = [float(line.split("\t")[9]) for line in tasks.lines("rated-val.tsv")[1:]]
    loss = sum((x - float(y)) ** 2 for x, y in zip(scores, tasks.lines("said")[1:])) / 100
    check(abs(loss - float(found[1])) < 3e-4, f"the mean squared error of the predictions is {loss}: {said}")
    tasks.put("rated-test.tsv", ["\t".join(line.split("\t")[:9]) for line in tasks.lines("rated-val.tsv")])
    tasks.run(f"{says} -j rated-test.tsv --predictions again")
    check(tasks.lines("again") == tasks.lines("said"), "other predictions without scores")


def put_questions(tasks):
    """Which word begins with a capital letter and ends with a digit?"""
    for name, count in (("train", 600), ("val", 60), ("asked", 60)):
        draw, paragraphs = random.Random(count), []  # those of val are asked again
        for i in range(count):
            words = ["".join(draw.choices("abcdefgh", k=draw.randrange(2, 6))) for _ in range(draw.randrange(4, 24))]
            at = draw.randrange(len(words))
            words[at] = draw.choice("ABCD") + words[at] + draw.choice("1234")
            asked = {"id": str(i), "question": "which?"}
            if name != "asked":
                asked["answers"] = [{"text": words[at], "answer_start": len(" ".join(words[:at] + [""]))}]
            paragraphs.append({"context": " ".join(words), "qas": [asked]})
        tasks.put(name + ".json", [json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]})])


def answers(tasks):
    """Answers are learnt, and predictions are those that are scored."""
    size = "--task answer -e L=1,C=32,NH=2,T=128 --stride 16 -n 0 -l 3e-3 -u 10 -b 16"
    tasks.run(f"{size} -i train.json -j val.json --epochs 4 -v 1000 -o answers")
    exact, f1 = tasks.last("answers", "val_exact_match"), tasks.last("answers", "val_f1")
    check(min(exact, f1) >= 80, f"exact match {exact}, F1 {f1}, not 80")
    check(tasks.json("answers/config.json")["architectures"] == ["BertForQuestionAnswering"], "another architecture")
    gold = [p["qas"][0]["answers"][0]["text"] for p in tasks.json("val.json")["data"][0]["paragraphs"]]
    says = "--task answer -e answers --evaluate 1 --stride 16 -b 5"
    given = []
    for more, of in ((" -j val.json", ""), (" -j val.json -m 4", " of 60")):  # a question may have several windows
        said = tasks.run(f"{says}{more} --predictions said.json")
        given.append(list(tasks.json("said.json").values()))
        right = 100 * sum(x.lower() == y.lower() for x, y in zip(given[-1], gold)) / len(given[-1])
        check(f"exact match {right:.4f}, F1 " in said and f" ({len(given[-1])}{of} questions" in said, said)
    check(len(given[0]) == 60 and 10 < len(given[1]) <= 20, f"{len(given[0])} and {len(given[1])} answers")
    check(given[0][: len(given[1])] == given[1], "-m 4: other predictions")
    said = tasks.run(f"{says} -j asked.json --predictions said.json")
    check(said == "nothing to compare with: the answer is predicted of 60 questions\n", said)
    check(list(tasks.json("said.json").values()) == given[0], "other predictions without answers")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    tasks = Tasks(sys.argv[1])
    try:
        for put in (put_classes, put_rated, put_questions):
            put(tasks)
        for case in (classes, numbers, answers, whole_tokenizer):
            try:
                case(tasks)
                verdict(case.__doc__)
            except Failed as why:
                verdict(case.__doc__, str(why))
    finally:
        tasks.runs.remove()
    finish()


if __name__ == "__main__":
    main()
