#!/usr/bin/env python3
"""A GPT-2 training step in PyTorch, to compare with ./train_gpt2cu.

    python3 dev/reference/gpt2.py -b 64 -t 1024 --size d12

It runs what an experienced PyTorch user would: fp32 weights under bf16 autocast, torch.compile, scaled dot product
attention (FlashAttention-2 or cuDNN), fused AdamW, clipping at 1.0, a vocabulary padded to 50304. The tokens are random
and already on the GPU, so it does less than the trainer: no data loading, no log. Prints one line:

    RESULT torch_gpt2 size=d12 B=64 T=1024 attention=flash mode=compile ms=... tok_s=... mfu=... memory_gib=...

ms is the median step by CUDA events. mfu counts (6 N + 12 L C T) flops per token, N without position embeddings,
relative to 989.4 TFLOP/s, the dense bf16 peak of an H100 or H200. --float8 needs torchao.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import peer

# layers, heads, channels
SIZES = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600)}
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
VOCAB, PADDED_VOCAB = 50257, 50304
PEAK_FLOPS = 989.4e12


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(channels)
        self.attn = nn.Linear(channels, 3 * channels)
        self.attn_proj = nn.Linear(channels, channels)
        self.ln_2 = nn.LayerNorm(channels)
        self.fc = nn.Linear(channels, 4 * channels)
        self.fc_proj = nn.Linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.attn(self.ln_1(x)).split(C, dim=2))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(heads.transpose(1, 2).reshape(B, T, C))
        return x + self.fc_proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, layers, heads, channels, positions):
        super().__init__()
        self.wte = nn.Embedding(PADDED_VOCAB, channels)
        self.wpe = nn.Embedding(positions, channels)
        self.h = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 / ((2 * layers) ** 0.5 if "_proj" in name else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # the head is the embedding
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    parser = peer.options(__doc__, SIZES, batch=64, seq_len=1024)
    parser.add_argument("--attention", default="flash", choices=ATTENTION)
    a = parser.parse_args()
    peer.begin()
    layers, heads, channels = SIZES[a.size]
    model = Gpt2(layers, heads, channels, max(a.seq_len, 1024)).cuda()
    run, mode = peer.to_run(model, a)
    optimizer = peer.adamw(model, 0.1, lr=3e-4, betas=(0.9, 0.95))
    tokens = torch.randint(VOCAB, (a.batch, a.seq_len + 1), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss():
        with sdpa_kernel([ATTENTION[a.attention]]):
            return run(inputs, targets)

    ms = peer.step_ms(loss, model, optimizer, a.steps)

    parameters = sum(p.numel() for p in model.parameters()) - model.wpe.weight.numel()
    tokens_per_second = a.batch * a.seq_len / ms * 1e3
    mfu = (6 * parameters + 12 * layers * channels * a.seq_len) * tokens_per_second / PEAK_FLOPS
    print(
        f"RESULT torch_gpt2 size={a.size} B={a.batch} T={a.seq_len} attention={a.attention}"
        f" mode={mode} ms={ms:.2f} tok_s={tokens_per_second:.0f} mfu={mfu:.4f}"
        f" memory_gib={torch.cuda.max_memory_allocated() / 2**30:.1f} torch={torch.__version__}",
        flush=True,
    )


if __name__ == "__main__":
    main()
