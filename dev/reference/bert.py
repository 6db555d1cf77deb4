#!/usr/bin/env python3
"""A BERT pre-training or fine-tuning step in PyTorch, to compare with ./train_bertcu and ./finetune_bertcu.

    python3 dev/reference/bert.py -b 256 -t 128 --size large
    python3 dev/reference/bert.py -b 32 --size base --classify TRAIN.tsv --vocab MODEL/vocab.txt

It runs what an experienced PyTorch user would: fp32 weights under bf16 autocast, torch.compile, scaled dot product
attention, dropout 0.1 at all sites, a vocabulary padded to 30528, masked-token logits of the masked rows only. The
sequences are full, so there is no padding to compute and no mask. The optimizer is clipping at 1.0 and fused AdamW:
less work than the LAMB of ./train_bertcu, whose trust ratios need two norms per tensor. The tokens are random and
already on the GPU: no data loading, no log. Prints one line:

    RESULT torch_bert size=large B=256 T=128 optimizer=adamw mode=compile ms=... seq_s=... mfu=... memory_gib=...

ms is the median step by CUDA events. mfu counts, per token, 6 flops for each weight of the blocks and 12 C for each
token it attends to, and the heads for the rows they are computed for, relative to 989.4 TFLOP/s, the dense bf16 peak of
an H100 or H200. ./train_bertcu counts the same. --float8 needs torchao.

--classify takes the file's lines, a label and a text, in batches padded to their longest line, with a mask, and
compiles one step for all lengths. It needs transformers, for the tokens.
"""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

import peer

# layers, heads, channels
SIZES = {"large": (24, 16, 1024), "base": (12, 12, 768)}
VOCAB, PADDED_VOCAB, POSITIONS = 30522, 30528, 512
DROPOUT, MASKED, EPS = 0.1, 0.15, 1e-12
PEAK_FLOPS = 989.4e12


class Block(nn.Module):
    """Layernorm after the sum with the residual."""

    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.attn = nn.Linear(channels, 3 * channels)
        self.attn_proj = nn.Linear(channels, channels)
        self.ln_1 = nn.LayerNorm(channels, eps=EPS)
        self.fc = nn.Linear(channels, 4 * channels)
        self.fc_proj = nn.Linear(4 * channels, channels)
        self.ln_2 = nn.LayerNorm(channels, eps=EPS)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.attn(x).split(C, dim=2))
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=DROPOUT)
        branch = self.attn_proj(heads.transpose(1, 2).reshape(B, T, C))
        x = self.ln_1(x + F.dropout(branch, DROPOUT))
        return self.ln_2(x + F.dropout(self.fc_proj(F.gelu(self.fc(x))), DROPOUT))


class Bert(nn.Module):
    def __init__(self, layers, heads, channels):
        super().__init__()
        self.word = nn.Embedding(PADDED_VOCAB, channels)
        self.position = nn.Embedding(POSITIONS, channels)
        self.token_type = nn.Embedding(2, channels)
        self.ln = nn.LayerNorm(channels, eps=EPS)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.transform = nn.Linear(channels, channels)
        self.ln_t = nn.LayerNorm(channels, eps=EPS)
        self.decoder_bias = nn.Parameter(torch.zeros(PADDED_VOCAB))
        self.pooler = nn.Linear(channels, channels)
        self.next = nn.Linear(channels, 2)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, types, masked_rows, masked_targets, next_labels, mask=None):
        x = self.word(tokens) + self.position.weight[: tokens.shape[1]] + self.token_type(types)
        x = F.dropout(self.ln(x), DROPOUT)
        for block in self.blocks:
            x = block(x, mask)
        next_logits = self.next(torch.tanh(self.pooler(x[:, 0])))
        loss = F.cross_entropy(next_logits.float(), next_labels)
        if masked_rows is None:
            return loss
        masked = self.ln_t(F.gelu(self.transform(x.flatten(0, 1)[masked_rows])))
        logits = F.linear(masked, self.word.weight, self.decoder_bias)  # the head is the embedding
        return F.cross_entropy(logits.float(), masked_targets) + loss


def read_batches(a):
    """Of --classify. The next-sentence head, which has two classes too, is the classifier."""
    from transformers import BertTokenizerFast

    rows = [line.rstrip("\n").split("\t") for line in open(a.classify, encoding="utf-8")]
    ids = BertTokenizerFast(a.vocab, do_lower_case=True)([text for _, text in rows])["input_ids"]
    for i in range(0, len(rows) - a.batch + 1, a.batch):
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(x) for x in ids[i : i + a.batch]], batch_first=True).cuda()
        types, mask = torch.zeros_like(tokens), (tokens > 0)[:, None, None, :]  # the id of [PAD] is 0
        for x, dim in ((tokens, 1), (types, 1), (mask, 3)):
            torch._dynamo.maybe_mark_dynamic(x, dim)
        labels = torch.tensor([int(label) for label, _ in rows[i : i + a.batch]]).cuda()
        yield tokens, types, None, None, labels, mask


def make_batch(batch, seq_len, masked):
    """Full sequences of two halves; `masked` positions of each are predicted."""
    tokens = torch.randint(1000, VOCAB, (batch, seq_len), device="cuda")
    types = (torch.arange(seq_len, device="cuda") >= seq_len // 2).long().expand(batch, -1).contiguous()
    positions = torch.rand(batch, seq_len, device="cuda").argsort(1)[:, :masked].sort(1).values
    rows = (positions + seq_len * torch.arange(batch, device="cuda")[:, None]).flatten()
    targets = torch.randint(VOCAB, rows.shape, device="cuda")
    return tokens, types, rows, targets, torch.randint(2, (batch,), device="cuda")


def main():
    options = peer.options(__doc__, SIZES, batch=256, seq_len=128)
    options.add_argument("--classify", metavar="TSV", help="fine-tune a classifier on these lines")
    options.add_argument("--vocab", help="of --classify: vocab.txt")
    a = options.parse_args()
    peer.begin()
    layers, heads, channels = SIZES[a.size]
    model = Bert(layers, heads, channels).cuda()
    run, mode = peer.to_run(model, a)
    optimizer = peer.adamw(model, 0.01, lr=1e-4, betas=(0.9, 0.999), eps=1e-6)
    masked = round(MASKED * a.seq_len)
    batches = list(read_batches(a)) if a.classify else [make_batch(a.batch, a.seq_len, masked)]
    order = itertools.cycle(batches)
    ms = peer.step_ms(lambda: run(*next(order)), model, optimizer, a.steps)
    if a.classify:
        return print(f"RESULT torch_bert_classify size={a.size} B={a.batch} mode={mode} ms={ms:.2f}", flush=True)

    sequences = a.batch / ms * 1e3
    blocks = layers * (6 * 12 * channels**2 * a.seq_len + 12 * channels * a.seq_len**2)
    heads_flops = 6 * (VOCAB * channels + channels**2) * masked + 6 * channels**2
    print(
        f"RESULT torch_bert size={a.size} B={a.batch} T={a.seq_len} optimizer=adamw"
        f" mode={mode} ms={ms:.2f} seq_s={sequences:.0f}"
        f" mfu={(blocks + heads_flops) * sequences / PEAK_FLOPS:.4f}"
        f" memory_gib={torch.cuda.max_memory_allocated() / 2**30:.1f} torch={torch.__version__}",
        flush=True,
    )


if __name__ == "__main__":
    main()
