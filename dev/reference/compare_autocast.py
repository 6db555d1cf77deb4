#!/usr/bin/env python3
"""Compare the losses of our trainer with those of transformers: the same weights, batches and AdamW.

    python3 dev/reference/compare_autocast.py ./train_gpt2cu                    bf16 of ours against PyTorch's autocast
    python3 dev/reference/compare_autocast.py build/fp32/train_gpt2cu --exact 1e-4
    python3 dev/reference/compare_autocast.py ./train_bertcu --bert --dump build/bf16/test_bertcu

For each seed transformers makes and saves a GPT-2 (--bert: a BERT) in fp32. Our trainer starts from that directory;
PyTorch trains the same model on the same batches in fp32 (TF32 off) and again under bf16 autocast. All three start from
the same fp32 weights. GPT-2 reads a shard with exactly the batches needed, in their order. BERT's sequences are the
ones that our trainer draws for the seed, as written by test_bert (--dump); PyTorch pads them and masks the padding.

The error is the mean of |loss - fp32 loss| over all steps and seeds. Exit status 0 if ours is at most --ratio times
autocast's. --exact instead requires each of our losses to be that close to fp32's, and runs no autocast. --final
requires the mean of our last 20 losses to be that close to autocast's, relatively, and runs no fp32; --losses writes
both curves. Written for torch 2.11, transformers 5.17.
"""

import argparse
import glob
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

MAX_NORM, FINAL_STEPS = 1.0, 20
MAGIC, VERSION, HEADER = 20240520, 1, 256  # of a shard of uint16 tokens
SENTENCES_MAGIC, IGNORED = 20261121, -100


def run(command):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"error: {command[0]} ended with status {done.returncode}\n{done.stdout[-2000:]}")


def read_shard(path):
    header = np.fromfile(path, dtype=np.int32, count=HEADER)
    if len(header) < HEADER or header[0] != MAGIC or header[1] != VERSION:
        raise SystemExit(f"error: {path}: not a shard of uint16 tokens")
    return np.fromfile(path, dtype=np.uint16, offset=4 * HEADER)


def write_shard(path, tokens):
    header = np.zeros(HEADER, dtype=np.int32)
    header[:3] = MAGIC, VERSION, len(tokens)
    with open(path, "wb") as f:
        f.write(header.tobytes())
        f.write(tokens.astype(np.uint16).tobytes())


class Gpt2:
    """Next tokens: windows of a shard, one after the other."""

    name, model_class, lr, tokens = "gpt2", GPT2LMHeadModel, 6e-4, "data/builtin/train.bin"
    betas, eps, weight_decay = (0.9, 0.95), 1e-8, 0.1

    def __init__(self, a):
        self.a, self.text = a, read_shard(a.tokens)
        self.vocabulary = 257 if self.text.max() < 257 else 50257
        self.need = a.steps * a.batch * a.seq_len + 1
        if len(self.text) < self.need:
            raise SystemExit(f"error: {a.tokens} holds {len(self.text)} tokens, {self.need} are needed")

    def make_model(self):
        a = self.a
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=self.vocabulary, n_positions=a.seq_len, n_embd=a.channels, n_layer=a.layers, n_head=a.heads,
            activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=self.vocabulary - 1, eos_token_id=self.vocabulary - 1,
        ))

    def prepare(self, seed, folder):
        """Write the seed's text; returns the flags that name it for our trainer."""
        start = seed * (len(self.text) - self.need) // max(self.a.seeds - 1, 1)
        self.window = self.text[start : start + self.need]
        write_shard(folder / "train.bin", self.window)
        return ["-i", folder / "train.bin", "--shuffle", 0]

    def batches(self):
        B, T = self.a.batch, self.a.seq_len
        tokens = torch.from_numpy(self.window.astype(np.int64)).to(self.a.device)
        for begin in range(0, self.a.steps * B * T, B * T):
            window = tokens[begin : begin + B * T + 1]
            yield window[:-1].view(B, T), window[1:].view(B, T)

    def loss(self, model, inputs, targets):
        return cross_entropy(model(inputs).logits.flatten(0, 1).float(), targets.flatten())


class Bert:
    """Masked tokens and next sentences, as our trainer draws them."""

    name, model_class, lr, tokens = "bert", BertForPreTraining, 1e-4, "data/builtin/bert/train.bin"
    betas, eps, weight_decay = (0.9, 0.999), 1e-6, 0.01

    def __init__(self, a):
        self.a = a
        files = sorted(glob.glob(a.tokens))
        header = np.fromfile(files[0], dtype=np.int32, count=HEADER) if files else np.zeros(1)
        if header[0] != SENTENCES_MAGIC:
            raise SystemExit(f"error: {a.tokens}: no file of sentences")
        self.vocabulary = int(header[5])

    def make_model(self):
        a = self.a
        return BertForPreTraining(BertConfig(
            vocab_size=self.vocabulary, hidden_size=a.channels, num_hidden_layers=a.layers,
            num_attention_heads=a.heads, intermediate_size=4 * a.channels, max_position_embeddings=a.seq_len,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ))

    def prepare(self, seed, folder):
        a, drawn = self.a, folder / "drawn.safetensors"
        run([a.dump, "batches", a.tokens, a.seq_len, a.steps * a.batch, seed, drawn])
        self.drawn = {name: tensor.to(a.device) for name, tensor in load_file(drawn).items()}
        return ["-i", a.tokens, "--seed", seed]

    def batches(self):
        d, B = self.drawn, self.a.batch
        starts, next_targets = d["cu_seqlens"].long(), d["next_targets"].long()
        targets = torch.full_like(d["tokens"], IGNORED)
        targets[d["masked_rows"].long()] = d["targets"]
        for first in range(0, self.a.steps * B, B):
            lengths = starts[first + 1 : first + B + 1] - starts[first : first + B]
            here = slice(starts[first], starts[first + B])
            is_real = torch.arange(lengths.max(), device=lengths.device) < lengths[:, None]

            def padded(values, padding):
                rows = torch.full(is_real.shape, padding, device=values.device)
                rows[is_real] = values[here].long()
                return rows

            inputs = {"input_ids": padded(d["tokens"], 0), "token_type_ids": padded(d["types"], 0)}
            inputs["attention_mask"] = is_real.long()
            yield inputs, padded(targets, IGNORED), next_targets[first : first + B]

    def loss(self, model, inputs, targets, next_targets):
        out = model(**inputs)
        masked = cross_entropy(out.prediction_logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        return masked + cross_entropy(out.seq_relationship_logits.float(), next_targets)


def train_ours(a, task, model, data, out):
    run([
        a.trainer, "-e", model, *data, "-o", out, "-b", a.batch, "-t", a.seq_len, "-x", a.steps, "-l", a.lr,
        "-c", task.weight_decay, "--beta1", task.betas[0], "--beta2", task.betas[1], "--eps", task.eps,
        "--clip", MAX_NORM, "--dropout", 0, "-k", "constant", "-u", a.warmup, "-v", 0, "-s", 0, "-n", 0,
        "--overwrite", 1,
    ])
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    if len(losses) != a.steps:
        raise SystemExit(f"error: {a.trainer} logged {len(losses)} losses of {a.steps}")
    return losses


def train_theirs(a, task, folder, autocast):
    model = task.model_class.from_pretrained(folder, dtype=torch.float32).to(a.device).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": task.weight_decay},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=task.betas, eps=task.eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / max(a.warmup, 1)))
    losses = []
    for batch in task.batches():
        with torch.autocast(a.device, torch.bfloat16, enabled=autocast):
            loss = task.loss(model, *batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def compare_final(a, label, ours, theirs):
    """Returns whether the last losses of the two curves are far apart."""
    if a.losses:
        rows = [f"{i + 1} {x:.6f} {y:.6f}\n" for i, (x, y) in enumerate(zip(ours, theirs))]
        Path(a.losses).write_text("step ours autocast\n" + "".join(rows))
    x, y = np.mean(ours[-FINAL_STEPS:]), np.mean(theirs[-FINAL_STEPS:])
    print(f"RESULT compare_final {label} last={FINAL_STEPS} ours={x:.6f} autocast={y:.6f} relative={x / y - 1:.3e} "
          f"tol={a.final:g}")
    return int(not abs(x / y - 1) <= a.final)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", help="our program; its own build says in which precision it computes")
    parser.add_argument("--bert", action="store_true", help="the trainer is train_bert")
    parser.add_argument("--tokens", help="text to train on: a shard; --bert: a glob (default: the built-in corpus)")
    parser.add_argument("--dump", default="build/test_bert", help="--bert: the test program that writes batches down")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--channels", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("-b", "--batch", type=int, default=8)
    parser.add_argument("-t", "--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, help="peak (default: 6e-4; --bert: 1e-4)")
    parser.add_argument("--warmup", type=int, default=0, help="steps")
    parser.add_argument("--ratio", type=float, default=2.0)
    parser.add_argument("--exact", type=float, default=0, help="ours is fp32: the largest difference of any loss")
    parser.add_argument("--final", type=float, default=0, help="largest relative difference of the last losses; one seed")
    parser.add_argument("--losses", help="--final: file for the losses of every step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    kind = Bert if a.bert else Gpt2
    if a.final:
        a.seeds = 1
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    logging.disable_progress_bar()

    a.tokens = a.tokens or kind.tokens
    a.lr = a.lr or kind.lr
    task = kind(a)
    label = (f"model={task.name} L={a.layers} C={a.channels} NH={a.heads} V={task.vocabulary} B={a.batch} T={a.seq_len} "
             f"steps={a.steps}")
    ours_all, autocast_all = [], []
    for seed in range(a.seeds):
        torch.manual_seed(seed)
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            data = task.prepare(seed, folder)
            task.make_model().float().save_pretrained(folder / "model")
            ours = train_ours(a, task, folder / "model", data, folder / "out")
            exact = None if a.final else train_theirs(a, task, folder / "model", False)
            rounded = exact if a.exact else train_theirs(a, task, folder / "model", True)
        if a.final:
            return compare_final(a, label, ours, rounded)
        ours_all.append(np.abs(np.subtract(ours, exact)))
        autocast_all.append(np.abs(np.subtract(rounded, exact)))
        print(f"RESULT compare_autocast model={task.name} seed={seed} first_loss={exact[0]:.6f} "
              f"last_loss={exact[-1]:.6f} ours_mean={ours_all[-1].mean():.3e} ours_max={ours_all[-1].max():.3e} "
              + ("" if a.exact else f"autocast_mean={autocast_all[-1].mean():.3e} "
                 f"autocast_max={autocast_all[-1].max():.3e}"), flush=True)
    ours, autocast = np.concatenate(ours_all), np.concatenate(autocast_all)
    if a.exact:
        print(f"RESULT compare_fp32 {label} seeds={a.seeds} max={ours.max():.3e} tol={a.exact:.0e}")
        return int(not ours.max() <= a.exact)
    print(f"RESULT compare_autocast {label} seeds={a.seeds} ours_mean={ours.mean():.3e} "
          f"autocast_mean={autocast.mean():.3e} ratio={ours.mean() / autocast.mean():.3f} tol={a.ratio:g}")
    return int(not ours.mean() <= a.ratio * autocast.mean())


if __name__ == "__main__":
    sys.exit(main())
