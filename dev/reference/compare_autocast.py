#!/usr/bin/env python3
"""Our trainer beside transformers: the same weights, the same batches, the same AdamW; how far apart are the losses?

    python3 dev/reference/compare_autocast.py ./train_gpt2cu                    bf16 of ours against PyTorch's autocast
    python3 dev/reference/compare_autocast.py build/fp32/train_gpt2cu --exact 1e-4
    python3 dev/reference/compare_autocast.py ./train_gpt2 --tiny --exact 1e-4  on a CPU, in seconds

For each seed transformers makes a GPT-2 in fp32 and writes it; our trainer starts from that directory and trains on a
shard of exactly the batches needed, in their order; PyTorch trains the same model in fp32 (TF32 off) and again under
bf16 autocast. The three start from the same fp32 weights. A figure is the mean over all steps and seeds of |loss - fp32
loss|. Exit status 0 if ours is at most --ratio times autocast's; with --exact, if no loss of ours is further than that
from fp32's, and no autocast is run.
Written for torch 2.11, transformers 5.17.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

BETAS, EPS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.95), 1e-8, 0.1, 1.0
MAGIC, VERSION, HEADER = 20240520, 1, 256  # of a shard of uint16 tokens


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


def make_model(a, vocabulary, seed):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=a.seq_len, n_embd=a.channels, n_layer=a.layers, n_head=a.heads,
        activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=vocabulary - 1, eos_token_id=vocabulary - 1,
    )
    return GPT2LMHeadModel(config).float()


def train_ours(a, folder, shard, out):
    command = [
        a.trainer, "-e", folder, "-i", shard, "-o", out, "-b", a.batch, "-t", a.seq_len, "-x", a.steps, "-l", a.lr,
        "-c", WEIGHT_DECAY, "--beta1", BETAS[0], "--beta2", BETAS[1], "--eps", EPS, "--clip", MAX_NORM, "--shuffle", 0,
        "--dropout", 0, "-k", "constant", "-u", 0, "-v", 0, "-s", 0, "-n", 0, "--overwrite", 1,
    ]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"error: {a.trainer} ended with status {done.returncode}\n{done.stdout[-2000:]}")
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def train_theirs(a, folder, batches, autocast):
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).to(a.device).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=BETAS, eps=EPS)
    losses = []
    for inputs, targets in batches:
        with torch.autocast(a.device, torch.bfloat16, enabled=autocast):
            logits = model(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def make_batches(a, tokens):
    windows = torch.from_numpy(tokens.astype(np.int64)).to(a.device)
    size = a.batch * a.seq_len
    for step in range(a.steps):
        window = windows[step * size : (step + 1) * size + 1]
        yield window[:-1].view(a.batch, a.seq_len), window[1:].view(a.batch, a.seq_len)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", help="our program; its own build says in which precision it computes")
    parser.add_argument("--tokens", default="data/builtin/train.bin", help="shard to take text from")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--channels", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("-b", "--batch", type=int, default=8)
    parser.add_argument("-t", "--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--ratio", type=float, default=2.0)
    parser.add_argument("--exact", type=float, default=0, help="ours is fp32: the largest difference of any loss")
    parser.add_argument("--tiny", action="store_true", help="2 layers, 48 channels, 2 x 32 tokens")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    if a.tiny:
        a.layers, a.channels, a.heads, a.batch, a.seq_len = 2, 48, 3, 2, 32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    logging.disable_progress_bar()

    text = read_shard(a.tokens)
    vocabulary = 257 if text.max() < 257 else 50257
    need = a.steps * a.batch * a.seq_len + 1
    if len(text) < need:
        raise SystemExit(f"error: {a.tokens} holds {len(text)} tokens, {need} are needed")
    ours_all, autocast_all = [], []
    for seed in range(a.seeds):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            start = seed * (len(text) - need) // max(a.seeds - 1, 1)
            tokens = text[start : start + need]
            write_shard(folder / "train.bin", tokens)
            make_model(a, vocabulary, seed).save_pretrained(folder / "model")
            ours = train_ours(a, folder / "model", folder / "train.bin", folder / "out")
            exact = train_theirs(a, folder / "model", make_batches(a, tokens), False)
            rounded = exact if a.exact else train_theirs(a, folder / "model", make_batches(a, tokens), True)
        if len(ours) != a.steps:
            raise SystemExit(f"error: {a.trainer} logged {len(ours)} losses of {a.steps}")
        ours_all.append(np.abs(np.subtract(ours, exact)))
        autocast_all.append(np.abs(np.subtract(rounded, exact)))
        print(f"RESULT compare_autocast seed={seed} first_loss={exact[0]:.6f} last_loss={exact[-1]:.6f} "
              f"ours_mean={ours_all[-1].mean():.3e} ours_max={ours_all[-1].max():.3e} "
              + ("" if a.exact else f"autocast_mean={autocast_all[-1].mean():.3e} "
                 f"autocast_max={autocast_all[-1].max():.3e}"), flush=True)
    ours, autocast = np.concatenate(ours_all), np.concatenate(autocast_all)
    model = f"L={a.layers} C={a.channels} NH={a.heads} V={vocabulary} B={a.batch} T={a.seq_len} steps={a.steps}"
    if a.exact:
        print(f"RESULT compare_fp32 {model} seeds={a.seeds} max={ours.max():.3e} tol={a.exact:.0e}")
        return int(not ours.max() <= a.exact)
    print(f"RESULT compare_autocast {model} seeds={a.seeds} ours_mean={ours.mean():.3e} "
          f"autocast_mean={autocast.mean():.3e} ratio={ours.mean() / autocast.mean():.3f} tol={a.ratio:g}")
    return int(not ours.mean() <= a.ratio * autocast.mean())


if __name__ == "__main__":
    sys.exit(main())
