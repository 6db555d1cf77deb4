#!/usr/bin/env python3
"""Make the golden files that test_bert compares against: a tiny BERT of transformers, computed in float64.

    python3 dev/reference/make_goldens_bert.py

Last made with Python 3.11, torch 2.15.0, transformers 5.24.0, safetensors 0.8.0, on a CPU.
It writes dev/reference/golden_bert, holding

    config.json, model.safetensors   BertForPreTraining as save_pretrained writes it, float32
    golden.safetensors
        tokens, types     I32 [3, 13]        padded on the right with tokens that are not [PAD], under a mask of 0
        lengths           I32 [3]
        masked            I32 [M, 3]         sequence, position and target of each masked token
        next              I32 [3]            0: the second segment follows, 1: it is random
        logits            F64 [M, V]         of the masked tokens
        next_logits       F64 [3, 2]
        loss              F64 [2]            mean over masked tokens, mean over sequences
        grad.NAME         F64                of their sum
        lamb, adamw       F64 [2, 10]        ten steps on this batch: before each, the loss and the norm of all gradients

The weights are rounded to float32 before anything is computed, so both sides start from the same values. Sizes are odd
on purpose: no vocabulary, width, head or length is a multiple of a vector. Every bias and LayerNorm weight is random
too, so that a missing one shows. The padding has tokens of all kinds: their values must not matter. One token that is
attended to is [PAD] itself, whose embedding transformers does not train through the look-up.

LAMB is You et al., arXiv 1904.00962, as in NVIDIA's BERT: all gradients clipped to a norm of 1, bias correction, one
trust ratio per tensor. Biases and LayerNorm have no trust ratio and no decay.
"""

import platform
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForPreTraining

SEED = 1337
VOCAB, POSITIONS, WIDTH, LAYERS, HEADS, INNER = 107, 19, 15, 3, 3, 33
LENGTHS = (13, 7, 13)
STEPS = 10
# A rate at which bf16 stays near: at 1e-2 the norms of AdamW under autocast are 0.12 from float64 within ten steps, at
# 1e-3 they are 0.014.
LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 1e-3, (0.9, 0.999), 1e-6, 0.01, 1.0


def build_model():
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=INNER, max_position_embeddings=POSITIONS, hidden_act="gelu", hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )
    model = BertForPreTraining(config).float()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 2:
                # Wide enough for attention to prefer some tokens and for the logits to be near 1 in size.
                p.copy_(noise / WIDTH**0.5)
            else:
                p.copy_(0.2 * noise + (1.0 if name.endswith("LayerNorm.weight") else 0.0))
    return model


def make_batch():
    generator = torch.Generator().manual_seed(SEED + 1)
    B, T = len(LENGTHS), max(LENGTHS)
    tokens = torch.randint(1, VOCAB, (B, T), generator=generator)
    tokens[0, 3] = 0
    tokens[0, 1] = VOCAB - 1
    mask = torch.arange(T)[None, :] < torch.tensor(LENGTHS)[:, None]
    types = torch.stack([(torch.arange(T) >= n // 2).long() for n in LENGTHS])
    labels = torch.full((B, T), -100)
    masked = []
    for b, positions in enumerate(((2, 5, 11), (3,), (1, 6))):
        for position in positions:
            target = int(torch.randint(0, VOCAB, (1,), generator=generator))
            masked.append((b, position, target))
            labels[b, position] = target
    return tokens, types, mask.long(), labels, torch.tensor([0, 1, 1]), torch.tensor(masked)


def losses_of(model, batch):
    tokens, types, mask, labels, following, masked = batch
    out = model(input_ids=tokens, token_type_ids=types, attention_mask=mask)
    logits = out.prediction_logits
    # Not the model's own loss: that one goes through float32.
    mlm = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    nsp = torch.nn.functional.cross_entropy(out.seq_relationship_logits, following)
    return logits[masked[:, 0], masked[:, 1]], out.seq_relationship_logits, mlm, nsp


def plain(name):
    return name.endswith("bias") or "LayerNorm" in name


class Lamb:
    def __init__(self, model):
        self.named = list(model.named_parameters())
        self.m = [torch.zeros_like(p) for _, p in self.named]
        self.v = [torch.zeros_like(p) for _, p in self.named]
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        norm = torch.stack([p.grad.norm() for _, p in self.named]).norm()
        shrink = MAX_NORM / norm if norm > MAX_NORM else 1.0
        for (name, p), m, v in zip(self.named, self.m, self.v):
            g = p.grad * shrink
            m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
            v.mul_(BETAS[1]).add_(g * g, alpha=1 - BETAS[1])
            u = m / (1 - BETAS[0] ** self.t) / ((v / (1 - BETAS[1] ** self.t)).sqrt() + EPS)
            ratio = 1.0
            if not plain(name):
                u = u + WEIGHT_DECAY * p
                if p.norm() > 0 and u.norm() > 0:
                    ratio = p.norm() / u.norm()
            p.sub_(LR * ratio * u)


class AdamW:
    def __init__(self, model):
        named = list(model.named_parameters())
        self.parameters = [p for _, p in named]
        self.optimizer = torch.optim.AdamW(
            [{"params": [p for n, p in named if not plain(n)], "weight_decay": WEIGHT_DECAY},
             {"params": [p for n, p in named if plain(n)], "weight_decay": 0.0}],
            lr=LR, betas=BETAS, eps=EPS)

    def step(self):
        norm = torch.stack([p.grad.norm() for p in self.parameters]).norm()
        if norm > MAX_NORM:
            for p in self.parameters:
                p.grad.mul_(MAX_NORM / norm)
        self.optimizer.step()


def train(model, batch, rule):
    optimizer = rule(model)
    history = torch.zeros(2, STEPS, dtype=torch.float64)
    for step in range(STEPS):
        model.zero_grad()
        _, _, mlm, nsp = losses_of(model, batch)
        (mlm + nsp).backward()
        history[0, step] = (mlm + nsp).item()
        history[1, step] = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        optimizer.step()
    return history


def make_golden(folder):
    model = build_model()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    names = sorted(load_file(folder / "model.safetensors"))

    model = model.double().train()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    batch = make_batch()
    tokens, types, _, _, following, masked = batch
    logits, next_logits, mlm, nsp = losses_of(model, batch)
    (mlm + nsp).backward()
    parameters = dict(model.named_parameters())
    assert sorted(parameters) == names, "model.safetensors does not hold exactly the parameters"
    golden = {
        "tokens": tokens.int(), "types": types.int(), "lengths": torch.tensor(LENGTHS).int(),
        "masked": masked.int(), "next": following.int(),
        "logits": logits.detach().clone(), "next_logits": next_logits.detach().clone(),
        "loss": torch.stack([mlm, nsp]).detach(),
    }
    for name in names:
        assert parameters[name].dtype == parameters[name].grad.dtype == torch.float64
        golden["grad." + name] = parameters[name].grad.clone()
    for key, rule in (("lamb", Lamb), ("adamw", AdamW)):
        model.load_state_dict(start)
        golden[key] = train(model, batch, rule)

    made_with = (f"seed {SEED}, python {platform.python_version()}, torch {torch.__version__.split('+')[0]}, "
                 f"transformers {transformers.__version__}, safetensors {safetensors.__version__}")
    save_file(golden, folder / "golden.safetensors", metadata={"made_with": made_with})
    for path in folder.iterdir():
        path.chmod(0o644)  # save_pretrained and save_file make them private
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name}: {len(names)} tensors, {sum(p.numel() for p in parameters.values())} parameters, "
          f"loss {mlm:.6f} + {nsp:.6f}, after ten steps {golden['lamb'][0, -1]:.6f} (LAMB), "
          f"{golden['adamw'][0, -1]:.6f} (AdamW), {size} bytes")


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    make_golden(Path(__file__).resolve().parent / "golden_bert")


if __name__ == "__main__":
    main()
