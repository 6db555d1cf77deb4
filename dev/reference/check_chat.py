#!/usr/bin/env python3
"""Fine-tune the same model on the same conversations with train_gpt2 and with transformers, and compare.

    make train_gpt2
    python3 -m venv build/chat && build/chat/bin/pip install torch transformers tokenizers numpy
    build/chat/bin/python dev/reference/check_chat.py > dev/results/check_chat.txt

transformers makes a small GPT-2 with random weights, without dropout, with the built-in corpus's tokenizer.
dev/data/prepare_chat.py adds the special tokens and packs conversations that are made here. Compared and checked:
- each packed conversation's ids against apply_chat_template's, and its mask against the turns;
- the losses of --steps steps with AdamW in two micro-batches, without ranks and with two, against transformers' model, whose
  loss is given the number of all targets of the step (num_items_in_batch), and whose attention mask keeps conversations apart;
- the loss of validation, and the greedy answer to a message.
"""
import argparse
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from array import array

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

LR, DECAY, T, B, MICRO = 1e-3, 0.1, 128, 4, 2
NAMES, PLACES = "Ben Mia Anna Tom Zoë".split(), "park garden barn house école".split()


def conversations(count):
    draw, made = random.Random(5), []
    for i in range(count):
        messages = [{"role": "system", "content": "Answer\nbriefly. "}] if i % 3 == 0 else []
        for _ in range(draw.choice([1, 1, 2, 3])):
            who, where = draw.choice(NAMES), draw.choice(PLACES)
            messages.append({"role": "user", "content": draw.choice(["", " ", "\n"]) + f"{who} is in the {where}. Where?"})
            messages.append({"role": "assistant", "content": draw.choice(["", " "]) + f"In the {where}" + "." * draw.choice([0, 1])})
        made.append(messages)
    return made


def read_shard(path):
    """Rows of (tokens, whether each counts as a target)."""
    data = open(path, "rb").read()
    magic, _, low, high, has_mask, length = struct.unpack("<6i", data[:24])
    count = high << 32 | low
    assert (magic, has_mask, length) == (20240520, 1, T)
    tokens, bits = array("H", data[1024 : 1024 + 2 * count]), data[1024 + 2 * count :]
    counts = [bits[i // 8] >> i % 8 & 1 for i in range(count)]
    return [(list(tokens[i : i + T]), counts[i : i + T]) for i in range(0, count - 1, T)]


def cut(row, end_of_text):
    """The conversations of a row."""
    begins = [i for i, token in enumerate(row[0]) if token == end_of_text] + [T]
    return [(tuple(row[0][a:b]), tuple(row[1][a:b])) for a, b in zip(begins, begins[1:])]


def expected(messages, tokenizer):
    """ids by the template, and the mask by the turns."""
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    mask = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = len(tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False))
            end = len(tokenizer.apply_chat_template(messages[: i + 1], return_dict=False))
            mask[begin:end] = [1] * (end - begin)
    return tuple(ids), tuple(mask)


def inputs_of(rows, end_of_text):
    """What transformers takes: ids, labels, and an attention mask within conversations."""
    ids = torch.tensor([row[0] for row in rows])
    labels = torch.where(torch.tensor([row[1] for row in rows]) > 0, ids, -100)
    document = (ids == end_of_text).cumsum(1)
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(T, T).tril().bool()
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def mean_loss(model, rows, end_of_text, targets):
    return model(**inputs_of(rows, end_of_text), num_items_in_batch=torch.tensor(targets)).loss


def targets_of(rows):
    return sum(sum(row[1][1:]) for row in rows)


def train(model, rows, steps, end_of_text):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(steps):
        batch = [rows[i % len(rows)] for i in range(step * B * MICRO, (step + 1) * B * MICRO)]
        targets = targets_of(batch)
        optimizer.zero_grad()
        losses.append(0.0)
        for i in range(0, len(batch), B):
            loss = mean_loss(model, batch[i : i + B], end_of_text, targets)
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description="Compare tuning for chat with transformers.")
    parser.add_argument("--program", default="./train_gpt2")
    parser.add_argument("--tokenizer", default="data/builtin")
    parser.add_argument("--work", default="/tmp/check_chat")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.manual_seed(1)
    shutil.rmtree(args.work, ignore_errors=True)
    start, data, out = (os.path.join(args.work, name) for name in ("start", "data", "out"))
    shutil.copytree(args.tokenizer, start, ignore=shutil.ignore_patterns("*.bin", "bert", "*entropy*"))
    size = len(json.load(open(os.path.join(start, "vocab.json"), encoding="utf-8")))
    config = GPT2Config(vocab_size=size, n_positions=T, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, attn_implementation="eager")
    GPT2LMHeadModel(config).save_pretrained(start)
    made = conversations(600)
    with open(os.path.join(args.work, "chat.jsonl"), "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"messages": m}) + "\n" for m in made)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"commit {commit}, torch {torch.__version__}, transformers {transformers.__version__}, tokenizers {tokenizers.__version__}")
    print(run([sys.executable, "dev/data/prepare_chat.py", "--local", os.path.join(args.work, "chat.jsonl"), "--model", start,
               "--tokens", str(T), "--val-fraction", "0.1", "--out", data]).replace(args.work, "...").strip())

    tokenizer = AutoTokenizer.from_pretrained(data)
    eot = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    wanted = sorted(expected(m, tokenizer) for m in made)
    rows = {kind: read_shard(os.path.join(data, f"{kind}_000000.bin")) for kind in ("train", "val")}
    packed = sorted(c for kind in rows for row in rows[kind] for c in cut(row, eot) if len(c[0]) > 1)
    wanted = [c for c in wanted if len(c[0]) <= T]
    whole = sum(c in set(wanted) for c in packed)
    print(f"{whole} of {len(packed)} packed conversations are those of apply_chat_template, ids and mask; "
          f"{len(made) - len(wanted)} of {len(made)} are longer than {T} tokens and were cut or left out")
    failed = whole != len(wanted) or len(packed) - whole > len(made) - len(wanted)

    flags = ["-i", os.path.join(data, "train_*.bin"), "-e", os.path.join(data, "model"), "--doc-mask", "1", "-t", str(T), "-d", str(B * MICRO * T),
             "-x", str(args.steps), "--shuffle", "0", "-l", str(LR), "-k", "constant", "-c", str(DECAY), "-v", "0", "-s", "0",
             "-n", "0", "--dropout", "0", "--overwrite", "1"]
    model = AutoModelForCausalLM.from_pretrained(os.path.join(data, "model"), attn_implementation="eager")
    embedding = model.transformer.wte.weight.detach()
    error = (embedding[size:] - embedding[:size].mean(0)).abs().max().item()
    print(f"{len(embedding) - size} new rows of the embedding are the mean of the others within {error:.1e}")
    failed |= error > 1e-7 or len(embedding) != size + 4
    theirs = train(model, rows["train"], args.steps, eot)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    for name, command, b in [("one rank, two micro-batches", [], B), ("two ranks", mpirun, B)]:
        if command and not shutil.which(command[0]):
            print(f"{name}: not run, there is no mpirun")
            continue
        run(command + [os.path.abspath(args.program), "-b", str(b), "-o", out] + flags)
        ours = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"), encoding="utf-8")]
        ours = [line["loss"] for line in ours if "loss" in line and "step" in line]
        worst = max(abs(a - b) for a, b in zip(ours, theirs))
        print(f"{name}: {len(ours)} steps, loss {theirs[0]:.6f} to {theirs[-1]:.6f}, largest difference {worst:.2e}, allowed 1e-5")
        failed |= worst > 1e-5 or len(ours) != args.steps

    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        loss = mean_loss(model, rows["val"], eot, targets_of(rows["val"])).item()
    said = run([os.path.abspath(args.program), "-e", out, "-j", os.path.join(data, "val_*.bin"), "-i", flags[1], "--evaluate", "1", "-b", "3", "-m", "0",
                "-t", str(T), "--doc-mask", "1"])
    ours = float(re.search(r"val loss ([0-9.]+)", said)[1])
    print(f"held out: transformers {loss:.6f}, train_gpt2 {ours:.6f}, allowed 1e-5")
    failed |= abs(loss - ours) > 1e-5

    message = "Tom is in the barn. Where? <|end|> <|assistant|>"
    special = {t: tokenizer.convert_tokens_to_ids(t) for t in ("<|user|>", "<|end|>", "<|assistant|>")}
    plain = lambda text: AutoTokenizer.from_pretrained(data, split_special_tokens=True).encode(text, add_special_tokens=False)
    prompt = torch.tensor([[eot, special["<|user|>"], *plain(message), special["<|end|>"], special["<|assistant|>"]]])
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, eos_token_id=special["<|end|>"], pad_token_id=eot)[0, len(prompt[0]):]
    theirs = tokenizer.decode(answer, skip_special_tokens=True)
    ours = run([os.path.abspath(args.program), "-e", out, "--generate", "20", "--temperature", "0", "--chat", message])
    print(f"greedy answer to a message that spells special tokens: {theirs!r}, {'the same' if ours == theirs + chr(10) else repr(ours)}")
    failed |= ours != theirs + "\n"
    print("FAILED" if failed else "all within what is allowed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
