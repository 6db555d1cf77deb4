#!/usr/bin/env python3
"""llm.c's files by dev/export_llmc.py, and what the trainer makes of them: the weights, losses and tokens of the model.

    python3 dev/test/llmc_files.py TRAIN_GPT2        from the repository's root; needs numpy

What the trainer refuses of such files: dev/test/refuse.txt.
"""
import os
import shutil
import sys
import tempfile

import numpy as np
from edit import edit
from edit import load as tensors
from runs import put_shard
from verdicts import CORPUS, ROOT, failure, finish, not_refused, run, script, verdict

TRAIN = os.path.abspath(sys.argv[1])
USE = TRAIN.replace("train_", "use_")
work = tempfile.TemporaryDirectory()
W = work.name


def weights(path):
    """A file's tensors, all of them F32."""
    return {name: np.frombuffer(raw, "<f4") for name, (_, _, raw) in tensors(path).items()}


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


def said(model, flags):
    done = run(USE, *f"-e {W}/{model} {flags}".split())
    return failure(done) or done.stdout


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
finish()
