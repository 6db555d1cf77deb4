"""Shared by the PyTorch peers, gpt2.py and bert.py: options, AdamW, and a timed training step on the GPU."""

import argparse
import statistics

import torch
from torch import nn


def options(description, sizes, batch, seq_len):
    """A parser with the options of both; the first of `sizes` is the default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--size", default=next(iter(sizes)), choices=sizes)
    parser.add_argument("-b", "--batch", type=int, default=batch)
    parser.add_argument("-t", "--seq-len", type=int, default=seq_len)
    parser.add_argument("--steps", type=int, default=30, help="timed steps, after a warm-up of 5")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--float8", action="store_true", help="the blocks' linear layers in fp8 by torchao, tensorwise")
    return parser


def begin():
    """Before the model is made."""
    if not torch.cuda.is_available():
        raise SystemExit("error: this PyTorch sees no GPU")
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")


def to_run(model, a):
    """The model as the options ask for it; its name for the RESULT line."""
    if a.float8:
        from torchao.float8 import convert_to_float8_training

        heads = ("pooler", "next", "transform")  # BERT's, some of whose sizes are not multiples of 16
        convert_to_float8_training(model, module_filter_fn=lambda module, name: name not in heads)
    name = ("eager" if a.eager else "compile") + ("+float8" if a.float8 else "")
    return model if a.eager else torch.compile(model), name


def adamw(model, weight_decay, **rest):
    """Fused; matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, fused=True, **rest)


def step_ms(loss_of, model, optimizer, steps):
    """Median milliseconds of `steps` steps by CUDA events, after 5 to warm up. loss_of() runs the forward pass."""

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(5):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize()
    if not torch.isfinite(loss):
        raise SystemExit("error: the loss is not finite")
    return statistics.median(start.elapsed_time(end) for start, end in zip(events, events[1:]))
