#!/usr/bin/env python3
"""The losses of ten steps of the golden cases of test_dlrm.cu and test_ncf.cu, by PyTorch in double precision.

    python3 dev/recsys/golden.py        # needs torch (2.15.0 made them); prints the arrays of both tests

Step s's loss is the one before update s + 1. DLRM: SGD, lr 1. NCF: Adam, lr .0045, betas .25 and .5, eps 1e-8, dense.
"""
import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)


def hash01(t, n):
    values = []
    for i in range(n):
        h = (i + t * 1000003) * 2654435761 % 2**32
        h ^= h >> 16
        h = h * 2246822519 % 2**32
        h ^= h >> 13
        values.append(h / 2**32)
    return torch.tensor(values)


def tensor(t, *shape):
    return ((hash01(t, torch.Size(shape).numel()) - 0.5) * 0.2).view(shape).requires_grad_()


def steps(parameters, forward, optimizer):
    losses = []
    for _ in range(10):
        loss = forward()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def dlrm():
    B, rows = 6, [11, 12, 13, 14]
    tables = [tensor(t, r, 8) for t, r in enumerate(rows)]
    w = [tensor(10, 16, 5), tensor(11, 16), tensor(12, 8, 16), tensor(13, 8), tensor(14, 16, 24), tensor(15, 16),
         tensor(16, 1, 16), tensor(17, 1)]
    x = 2 * hash01(30, B * 5).view(B, 5) - 1
    ids = torch.tensor([[(7 * b + 3 * t + 1) % rows[t] for t in range(4)] for b in range(B)])
    y = torch.tensor([float((5 * b + 2) % 3 == 0) for b in range(B)])
    i, j = torch.tril_indices(5, 5, -1)

    def forward():
        bottom = F.relu(F.linear(F.relu(F.linear(x, w[0], w[1])), w[2], w[3]))
        v = torch.stack([bottom] + [tables[t][ids[:, t]] for t in range(4)], 1)
        z = torch.cat([bottom, torch.bmm(v, v.transpose(1, 2))[:, i, j], torch.zeros(B, 6)], 1)
        logit = F.linear(F.relu(F.linear(z, w[4], w[5])), w[6], w[7]).view(-1)
        return F.binary_cross_entropy_with_logits(logit, y)

    return steps(tables + w, forward, torch.optim.SGD(tables + w, lr=1.0))


def ncf():
    B = 10
    mf_user, mf_item, mlp_user, mlp_item = tensor(40, 9, 4), tensor(41, 7, 4), tensor(42, 9, 4), tensor(43, 7, 4)
    w = [tensor(44, 8, 8), tensor(45, 8), tensor(46, 4, 8), tensor(47, 4), tensor(48, 1, 8), tensor(49, 1)]
    u = torch.tensor([(4 * b + 1) % 9 for b in range(B)])
    i = torch.tensor([(3 * b + 2) % 7 for b in range(B)])
    y = torch.tensor([float(b % 5 == 0) for b in range(B)])

    def forward():
        h = torch.cat([mlp_user[u], mlp_item[i]], 1)
        h = F.relu(F.linear(F.relu(F.linear(h, w[0], w[1])), w[2], w[3]))
        logit = F.linear(torch.cat([mf_user[u] * mf_item[i], h], 1), w[4], w[5]).view(-1)
        return F.binary_cross_entropy_with_logits(logit, y)

    parameters = [mf_user, mf_item, mlp_user, mlp_item] + w
    return steps(parameters, forward, torch.optim.Adam(parameters, lr=0.0045, betas=(0.25, 0.5), eps=1e-8))


for name, losses in (("DLRM", dlrm()), ("NCF", ncf())):
    text = [f"{loss:.14f}" for loss in losses]
    print(f"static const double {name}_LOSSES[] = {{" + ", ".join(text) + "};")
