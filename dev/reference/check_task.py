#!/usr/bin/env python3
"""Fine-tune the same model on the same examples with finetune_bert and with transformers, and compare.

    make finetune_bert
    python3 dev/reference/check_task.py classify
    python3 dev/reference/check_task.py answer

transformers makes a small BERT with random weights, with its head and without dropout. Both train it with AdamW for
--steps steps on examples in the order of the file, which are made here: sentences with labels, or questions. The
tokenizers library tokenizes the examples here; then they are cut into windows and padded. Prints the largest difference
of the losses of a step, at most 1e-4, and the scores of the saved model on held-out examples, by transformers and
as finetune_bert reports them. Run with torch 2.11, transformers 5.17.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys

import torch
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification, BertTokenizerFast
from transformers.utils import logging

GOOD = "good great fine lovely superb nice happy bright".split()
BAD = "bad awful poor ugly dull sad grim dark".split()
OTHER = "the a film plot actor scene was is very really this that and with for of".split()
B, T, LR, DECAY, EPS = 8, 128, 1e-3, 0.01, 1e-6
TOLERANCE = 1e-4  # of the loss of a step


def sentences(count, seed):
    """Labelled sentences of which one word tells the label; every third is a pair, whose second sentence tells it."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        label = draw.randrange(2)
        words = [draw.choice(OTHER) for _ in range(draw.randrange(3, 12))]
        words.insert(draw.randrange(len(words) + 1), draw.choice(GOOD if label else BAD))
        first = " ".join(draw.choice(OTHER) for _ in range(draw.randrange(2, 9)))
        made.append((label, first, " ".join(words)))
    return made


def questions(count, seed):
    """SQuAD's JSON; an answer is two words that nothing else says, in contexts of up to three windows."""
    draw, paragraphs = random.Random(seed), []
    for i in range(count):
        words = [draw.choice(OTHER) for _ in range(draw.randrange(10, 250))]
        at = draw.randrange(len(words))
        words[at:at] = [draw.choice(GOOD), draw.choice(BAD)]
        answer = {"text": " ".join(words[at : at + 2]), "answer_start": len(" ".join(words[:at] + [""]))}
        qa = {"id": f"{seed}-{i}", "question": "what was the scene", "answers": [answer]}
        paragraphs.append({"context": " ".join(words), "qas": [qa]})
    return {"version": "1.1", "data": [{"title": "made", "paragraphs": paragraphs}]}


def classify_features(path, tokenizer):
    features = []
    for line in open(path, encoding="utf-8"):
        label, a, b = line.rstrip("\n").split("\t")
        f = tokenizer(a, b, truncation=True, max_length=T)
        features.append((f["input_ids"], f["token_type_ids"], [int(label)]))
    return features


def answer_features(path, tokenizer):
    """Windows that share T // 3 tokens, with the answer's first and last token; [CLS] twice where one does not hold all of it.

    They are cut here: tokenizers 0.23.2 leaves out windows of long texts when it truncates with a stride."""
    features = []
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    for article in json.load(open(path, encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            context = tokenizer(paragraph["context"], add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = context["input_ids"], context["offset_mapping"]
            for qa in paragraph["qas"]:
                begin = qa["answers"][0]["answer_start"]
                end = begin + len(qa["answers"][0]["text"])
                question = [cls] + tokenizer(qa["question"], add_special_tokens=False)["input_ids"] + [sep]
                room = T - len(question) - 1
                for first in range(0, len(ids), room - T // 3):
                    last = min(first + room, len(ids))
                    label = [0, 0]
                    if offsets[first][0] <= begin and offsets[last - 1][1] >= end:
                        label = [max(t for t in range(first, last) if offsets[t][0] <= begin),
                                 min(t for t in range(first, last) if offsets[t][1] >= end)]
                        label = [t - first + len(question) for t in label]
                    types = [0] * len(question) + [1] * (last - first + 1)
                    features.append((question + ids[first:last] + [sep], types, label))
                    if last == len(ids):
                        break
    return features


def padded(batch):
    longest = max(len(ids) for ids, _, _ in batch)
    rows = lambda k, fill: torch.tensor([f[k] + [fill] * (longest - len(f[k])) for f in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _, _ in batch])
    return {"input_ids": rows(0, 0), "token_type_ids": rows(1, 0), "attention_mask": mask}


def with_labels(task, batch):
    labels = torch.tensor([f[2] for f in batch])
    if task != "answer":
        return {**padded(batch), "labels": labels[:, 0]}
    return {**padded(batch), "start_positions": labels[:, 0], "end_positions": labels[:, 1]}


def train(task, model, features, steps):
    """The losses of each step. Questions go one by one: transformers would let an answer begin in the padding of a batch."""
    plain = [p for n, p in model.named_parameters() if n.endswith("bias") or "LayerNorm" in n]
    decayed = [p for n, p in model.named_parameters() if not (n.endswith("bias") or "LayerNorm" in n)]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=EPS)
    losses = []
    model.train()
    for step in range(steps):
        batch = [features[i % len(features)] for i in range(step * B, (step + 1) * B)]
        parts = [batch] if task != "answer" else [[feature] for feature in batch]
        optimizer.zero_grad()
        losses.append(0.0)
        for part in parts:
            loss = model(**with_labels(task, part)).loss / len(parts)
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def evaluate(task, model, features):
    """Mean loss over examples, and for classes the share that is right."""
    total, right = 0.0, 0
    model.eval()
    with torch.no_grad():
        for feature in features:
            out = model(**with_labels(task, [feature]))
            total += out.loss.item()
            right += task == "classify" and int(out.logits.argmax()) == feature[2][0]
    return total / len(features), right / len(features)


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description="Compare fine-tuning with transformers.")
    parser.add_argument("task", choices=["classify", "answer"])
    parser.add_argument("--program", default="./finetune_bert")
    parser.add_argument("--work", default="/tmp/check_task")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(1)
    start, out = os.path.join(args.work, "start"), os.path.join(args.work, "out")
    os.makedirs(start, exist_ok=True)
    vocab = os.path.join(start, "vocab.txt")
    with open(vocab, "w", encoding="utf-8") as f:
        f.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + GOOD + BAD + OTHER + ["what"]))
    tokenizer = BertTokenizerFast(vocab, do_lower_case=True)
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=256, max_position_embeddings=512, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0, attn_implementation="eager")
    kind = BertForQuestionAnswering if args.task == "answer" else BertForSequenceClassification
    kind(config).save_pretrained(start)

    suffix = "json" if args.task == "answer" else "tsv"
    files = [os.path.abspath(os.path.join(args.work, f"{part}.{suffix}")) for part in ("train", "val")]
    for i, path in enumerate(files):
        with open(path, "w", encoding="utf-8") as f:
            if args.task == "answer":
                json.dump(questions(200 if i == 0 else 50, i), f)
            else:
                f.writelines("\t".join(map(str, row)) + "\n" for row in sentences(2000 if i == 0 else 400, i))
    of_file = answer_features if args.task == "answer" else classify_features
    features = [of_file(path, tokenizer) for path in files]

    program, flags = os.path.abspath(args.program), f"--task {args.task} -t {T} --stride {T // 3} -b {B}".split()
    settings = f"-x {args.steps} --shuffle 0 -l {LR} -k constant -c {DECAY} --beta2 0.999 --eps {EPS} --dropout 0"
    run([program, "-e", start, "-i", files[0], "-o", out, *f"{settings} -v 0 -n 0 --overwrite 1".split(), *flags])
    ours = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"), encoding="utf-8")]
    ours = [line["loss"] for line in ours if "loss" in line and "step" in line]
    theirs = train(args.task, kind.from_pretrained(start, attn_implementation="eager"), features[0], args.steps)
    worst = max(abs(a - b) for a, b in zip(ours, theirs))
    print(f"{args.steps} steps: loss {theirs[0]:.6f} to {theirs[-1]:.6f}, largest difference {worst:.2e}")

    model, info = kind.from_pretrained(out, output_loading_info=True, attn_implementation="eager")
    strange = [f"{what}: {sorted(info[what])}" for what in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[what]]
    if strange:
        sys.exit(f"{out}: {strange[0]}")
    said = run([program, "-e", out, "-j", files[1], "--evaluate", "1", *flags])
    loss, right = evaluate(args.task, model, features[1])
    our_loss = float(re.search(r"val loss ([0-9.]+)", said)[1])
    print(f"held out, {len(features[1])} sequences: loss {loss:.6f}, finetune_bert reports {said.strip()}")
    failed = worst > TOLERANCE or abs(ours[0] - theirs[0]) > 1e-6 or len(ours) != args.steps or abs(loss - our_loss) > TOLERANCE
    if args.task == "classify":
        accuracy = float(re.search(r"accuracy ([0-9.]+)", said)[1])
        print(f"transformers: accuracy {right:.6f}")
        failed |= abs(accuracy - right) > 1.01 / len(features[1])
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
