#!/usr/bin/env python3
"""llm.c's files by dev/export_llmc.py, and what the trainer makes of them: the weights, losses and tokens of the model;
dev/import.py of them and of nanoGPT's.

    python3 dev/test/llmc_files.py TRAIN_GPT2        from the repository's root; needs numpy

What the trainer refuses of such files: dev/test/refuse.txt.
"""
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec

import numpy as np
from edit import edit
from edit import load as tensors
from runs import LIKE_TORCH, far_from_torch, put_shard
from verdicts import CORPUS, ROOT, failure, finish, holds, not_refused, run, script, skip, verdict

TRAIN = os.path.abspath(sys.argv[1])
USE = TRAIN.replace("train_", "use_")
work = tempfile.TemporaryDirectory()
W = work.name


def weights(path, kind="<f4"):
    """A file's tensors, all of them F32, or BF16 ("<u2")."""
    found = {name: np.frombuffer(raw, kind) for name, (_, _, raw) in tensors(path).items()}
    return {name: x if kind == "<f4" else (x.astype("<u4") << 16).view("<f4") for name, x in found.items()}


def nearest_bfloat16(x):
    """Of the two numbers of 8 significant bits next to x the nearer one; if both are as near, the even one."""
    low = x.view("<u4") & 0xFFFF0000
    below, above = low.view("<f4").astype("f8"), (low + np.uint32(0x10000)).view("<f4").astype("f8")
    from_below, from_above = abs(x - below), abs(above - x)
    takes_above = (from_above < from_below) | ((from_above == from_below) & (low >> 16 & 1 == 1))
    return np.where(takes_above, above, below).astype("<f4")


def check_weights(model, version, rounded):
    """Export a model; a step without a learning rate from the file leaves its weights."""
    os.mkdir(f"{W}/{model}-{version}")
    out = f"{W}/{model}-{version}/model.bin"
    why = failure(script("dev/export_llmc.py", f"{W}/{model}", out, "--version", version))
    flags = f"-e {out} -i {W}/low.bin -t 8 -b 1 -x 1 -l 0 -c 0 -v 0 -s 0 -n 0 --overwrite 1 -o {W}/back"
    why = why or failure(run(TRAIN, *flags.split()))
    wanted, found = weights(f"{W}/{model}/model.safetensors"), weights(f"{W}/back/model.safetensors")
    far = [name for name in wanted.keys() | found.keys() if not np.array_equal(rounded(wanted[name]), found[name])]
    verdict(f"{model}: weights of version {version}", why or ", ".join(far))
    why = failure(script("dev/import.py", out, f"{W}/{model}-{version}/dir"))
    again = weights(f"{W}/{model}-{version}/dir/model.safetensors", "<f4" if version == "3" else "<u2")
    far = [name for name in found.keys() | again.keys() if not np.array_equal(found[name], again[name])]
    verdict(f"{model}: dev/import.py of version {version}", why or ", ".join(far))


def said(model, flags):
    done = run(USE, *f"-e {W}/{model} {flags}".split())
    return failure(done) or done.stdout


def check_nanogpt(bias):
    """A ckpt.pt as nanoGPT writes it: weights, logits by transformers, and ours of 20 steps."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    at, sizes = f"{W}/nano{bias}", {"n_layer": 2, "n_head": 2, "n_embd": 24, "vocab_size": 104}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    torch.manual_seed(bias)
    model = GPT2LMHeadModel(GPT2Config(activation_function="gelu", initializer_range=0.1, n_positions=16, **sizes, **dropout))
    for name, x in model.named_parameters():
        x.data += 0.1 * torch.randn(x.shape) * (bias if name.endswith("bias") else 1)
    kept = {name: x for name, x in model.state_dict().items() if bias or name[-4:] != "bias"}
    state = {"_orig_mod." + name: x.T if x.ndim > 1 and ".c_" in name else x for name, x in kept.items()}
    saved = {"model": state, "model_args": {**sizes, "block_size": 16, "bias": bool(bias), "dropout": 0.0}, "optimizer": {},
             "iter_num": 5, "best_val_loss": torch.tensor(1.0), "config": {"dataset": "openwebtext"}}  # fmt: skip
    torch.save(saved, at + ".pt")
    why = failure(script("dev/import.py", at + ".pt", at))
    inputs = torch.arange(104).reshape(8, 13)
    off = (GPT2LMHeadModel.from_pretrained(at)(inputs).logits - model(inputs).logits).abs().max().item()
    holds(f"nanoGPT, bias={bias}: logits by transformers", not why and off <= 1e-5, why or off)
    why = failure(run(TRAIN, *f"-e {at} -i {W}/low.bin -t 16 -b 1 -s 0 {LIKE_TORCH} -o {at}-out".split()))
    ids = lambda step, n: torch.tensor([i * i % 97 for i in range(16 * step + n, 16 * step + n + 16)])
    loss_of = lambda step: torch.nn.functional.cross_entropy(model(ids(step, 0)[None]).logits[0], ids(step, 1))
    why = why or far_from_torch(at + "-out/log.jsonl", model, loss_of)
    verdict(f"nanoGPT, bias={bias}: losses of 20 steps", why)


put_shard(W + "/low.bin", [i * i % 97 for i in range(400)])
shutil.copytree(ROOT + "/dev/reference/golden_gpt2_tied", W + "/golden")
edit(W + "/golden", "set", "transformer.ln_f.bias", "0", "1.00390625")  # between two numbers of 8 bits
flags = f"-e L=3,C=24,NH=2,T=16 -x 20 -l 1e-2 -v 0 -s 0 -n 0 -i {CORPUS}/train.bin -o {W}/trained"
verdict("a model to export", failure(run(TRAIN, *flags.split())))
check_weights("golden", "5", nearest_bfloat16)
check_weights("trained", "3", lambda x: x)
evaluate = f"--evaluate 1 -i {W}/low.bin -j {W}/low.bin -t 8 -b 1"
# A sample that is drawn nearly evenly has most tokens. The end of text is the token that the list names.
edit(W + "/trained-3", "int", "gpt2_tokenizer.bin", "12", "1")
for what in (evaluate, evaluate + " --doc-mask 1", "--generate 2000 --temperature 50 --top-k 0 -t 8"):
    mine, theirs = said("trained", what), said("trained-3/model.bin", what)
    is_right = (mine == theirs) == ("--doc-mask" not in what)
    verdict(f"what use_gpt2 prints: {what.split(' ')[0]}", "" if is_right else f"{mine[-200:]} and {theirs[-200:]}")
done = run(TRAIN, *f"-y 1 --override 1 -x 2 -o {W}/back".split())
why = failure(done) or ("" if os.path.exists(W + "/back/gpt2_tokenizer.bin") else "there are none")
verdict("going on from a checkpoint of llm.c, whose tokens go along", why)
edit(W + "/golden", "key", "config.json", "activation_function", '"gelu"')
why = not_refused(script("dev/export_llmc.py", W + "/golden", W + "/x.bin"), "config.json: .*activation_function")
verdict("what llm.c does not know is refused", why)
absent = [name for name in ("torch", "transformers") if not find_spec(name)]
for bias in (0, 1):
    skip(f"nanoGPT, bias={bias}", f"{sys.executable} has no {absent[0]}") if absent else check_nanogpt(bias)
finish()
