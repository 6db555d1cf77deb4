#!/usr/bin/env python3
"""PyTorch's attention at the shapes of our bench: FlashAttention-2 and cuDNN, forward and backward, bf16.

    python3 dev/reference/bench_attention.py

Prints one line per shape and backend:

    RESULT attention peer=fa2 B=32 H=12 T=1024 D=64 mask=causal forward_ms=... forward_tflops=... backward_ms=...

Inputs are normal random numbers; Q, K and V are parts of one [B, T, 3, H, D] tensor, as after a QKV projection. Times
are the median of 30 runs by CUDA events after a warm-up of 5. Before each run, a read of 256 MB evicts the operands
from the L2. Flops as in dev/ops: 4 (forward) or 10 (backward) times pairs of query and key times H times D; a causal
mask has T (T + 1) / 2 pairs.
"""

import statistics

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = [  # B, H, T, D, causal
    (32, 12, 1024, 64, True),
    (64, 12, 1024, 64, True),
    (16, 25, 1024, 64, True),
    (256, 16, 128, 64, False),
    (64, 16, 512, 64, False),
    (8, 16, 4096, 128, True),
]
PEERS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
WARMUP, RUNS = 5, 30


def median_ms(run, flush):
    for _ in range(WARMUP):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
    for start, stop in events:
        flush.sum()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def bench(B, H, T, D, causal, peer, flush):
    qkv = torch.randn(B, T, 3, H, D, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in qkv.unbind(2))
    flops = B * H * D * (T * (T + 1) / 2 if causal else T * T)
    shape = f"peer={peer} B={B} H={H} T={T} D={D} mask={'causal' if causal else 'full'}"
    try:
        with sdpa_kernel([PEERS[peer]]):
            forward = median_ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), flush)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            dout = torch.randn_like(out)
            backward = median_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), flush)
    except RuntimeError as error:
        print(f"skip attention {shape}: {str(error).splitlines()[0]}", flush=True)
        return
    print(f"RESULT attention {shape} forward_ms={forward:.4f} forward_tflops={4e-9 * flops / forward:.1f} "
          f"backward_ms={backward:.4f} backward_tflops={10e-9 * flops / backward:.1f}", flush=True)


def main():
    if not torch.cuda.is_available():
        raise SystemExit("error: this PyTorch sees no GPU")
    torch.manual_seed(1337)
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", flush=True)
    flush = torch.zeros(64 << 20, device="cuda")
    for shape in SHAPES:
        for peer in PEERS:
            bench(*shape, peer, flush)


if __name__ == "__main__":
    main()
