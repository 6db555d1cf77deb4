#!/usr/bin/env python3
"""Make the golden files that test_gpt2 compares against: a tiny GPT-2 of transformers, computed in float64.

    python3 dev/reference/make_goldens.py

Last made with Python 3.11, torch 2.15.0, transformers 5.24.0, safetensors 0.8.0, on a CPU.
It writes dev/reference/golden_gpt2_tied and golden_gpt2_untied, each holding

    config.json, model.safetensors   as save_pretrained writes them, float32
    golden.safetensors
        tokens, targets   I32 [3, 13]        targets are the tokens moved by one
        logits            F32 [3, 13, V]
        loss              F32 [1]            mean over the 39 targets;          also loss.f64
        grad.NAME         F32                of that loss, layout as NAME has it in model.safetensors
        losses, norms     F32 [10]           ten AdamW steps on this batch: before each step, the loss and the norm
                                             of the gradient before clipping;   also losses.f64, norms.f64

The weights are rounded to float32 before anything is computed, so both sides start from the same values. Stored results
are computed in float64 and rounded once. Sizes are odd on purpose: no vocabulary, width, head or length is a multiple
of a vector. Every bias and LayerNorm weight is random too, so that a missing one shows in the logits (except the keys'
bias: softmax cancels it, and its gradient is zero except for rounding).
"""

import platform
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

SEED = 1337
VOCAB, POSITIONS, WIDTH, LAYERS, HEADS = 107, 19, 15, 2, 3  # both folders together are under 200 KB
B, T = 3, 13
STEPS = 10
LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def build_model(tied):
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=VOCAB - 1, eos_token_id=VOCAB - 1, tie_word_embeddings=tied, attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config).float()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 2:
                # Wide enough for attention to prefer some tokens and for the logits to be near 1 in size.
                p.copy_(noise / WIDTH**0.5)
            else:
                p.copy_(0.2 * noise + (1.0 if ".ln_" in name and name.endswith("weight") else 0.0))
    return model


def make_batch():
    sequences = torch.randint(0, VOCAB, (B, T + 1), generator=torch.Generator().manual_seed(SEED + 1))
    sequences[0, 0] = VOCAB - 1  # the table's last row, as an input
    sequences[-1, -1] = VOCAB - 1  # and as a target
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def mean_loss(model, tokens, targets):
    # Not the model's own loss: that one goes through float32.
    logits = model(tokens).logits
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model, tokens, targets):
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        _, loss = mean_loss(model, tokens, targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())
        losses.append(loss.item())
        optimizer.step()
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64)


def make_golden(folder, tied):
    model = build_model(tied)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    names = sorted(load_file(folder / "model.safetensors"))

    model = model.double().train()
    tokens, targets = make_batch()
    logits, loss = mean_loss(model, tokens, targets)
    loss.backward()
    parameters = dict(model.named_parameters())
    assert sorted(parameters) == names, "model.safetensors does not hold exactly the parameters"
    golden = {
        "tokens": tokens.int(),
        "targets": targets.int(),
        "logits": logits.detach().float(),
        "loss": loss.detach().float().reshape(1),
        "loss.f64": loss.detach().reshape(1),
    }
    for name in names:
        assert parameters[name].dtype == parameters[name].grad.dtype == torch.float64
        golden["grad." + name] = parameters[name].grad.float()

    losses, norms = train(model, tokens, targets)
    golden.update({"losses": losses.float(), "losses.f64": losses, "norms": norms.float(), "norms.f64": norms})
    made_with = (f"seed {SEED}, python {platform.python_version()}, torch {torch.__version__.split('+')[0]}, "
                 f"transformers {transformers.__version__}, safetensors {safetensors.__version__}")
    save_file(golden, folder / "golden.safetensors", metadata={"made_with": made_with})
    for path in folder.iterdir():
        path.chmod(0o644)  # save_pretrained and save_file make them private

    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name}: {len(names)} tensors, {sum(p.numel() for p in parameters.values())} parameters, "
          f"loss {losses[0]:.6f} -> {losses[-1]:.6f}, norms {norms.min():.3f} to {norms.max():.3f}, {size} bytes")


def main():
    here = Path(__file__).resolve().parent
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    make_golden(here / "golden_gpt2_tied", True)
    make_golden(here / "golden_gpt2_untied", False)


if __name__ == "__main__":
    main()
