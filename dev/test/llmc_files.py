#!/usr/bin/env python3
"""llm.c's files by dev/export_llmc.py, and what the trainer makes of them: the weights, losses and tokens of the model.

    python3 dev/test/llmc_files.py TRAIN_GPT2        from the repository's root; needs numpy

LLMC_TEST_DATA names a folder with a model of transformers and GPT-2's tokens (docs/testing.md). What the trainer
refuses of such files: dev/test/refuse.txt.
"""
import os
import shutil
import sys
import tempfile

import numpy as np
from edit import edit
from edit import load as tensors
from runs import put_shard
from verdicts import CORPUS, ROOT, contents, failure, finish, not_refused, read, run, script, skip, verdict

TRAIN = os.path.abspath(sys.argv[1])
USE = TRAIN.replace("train_", "use_")
DATA = os.environ.get("LLMC_TEST_DATA", "")
work = tempfile.TemporaryDirectory()
W = work.name


def export(model, out, *flags):
    return script("dev/export_llmc.py", f"{W}/{model}", f"{W}/{out}", *flags)


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


def same_weights(model, version, out):
    """Why a step without a learning rate from OUT does not leave the weights of a model, or nothing."""
    flags = f"-e {W}/{out} -i {W}/low.bin -t 8 -b 1 -x 1 -l 0 -c 0 -v 0 -s 0 -n 0 --overwrite 1 -o {W}/back"
    done = run(TRAIN, *flags.split())
    if done.returncode:
        return failure(done)
    wanted, found = weights(f"{W}/{model}/model.safetensors"), weights(f"{W}/back/model.safetensors")
    if wanted.keys() != found.keys():
        return f"other tensors: {sorted(wanted.keys() ^ found.keys())}"
    rounded = {name: nearest_bfloat16(x) if version == "5" else x for name, x in wanted.items()}
    return ", ".join(name for name, x in rounded.items() if not np.array_equal(x, found[name]))


def same_words(flags, *models):
    """Why use_gpt2 does not print the same of two models, or nothing."""
    one, other = (run(USE, *f"-e {W}/{model} {flags}".split()) for model in models)
    differs = "" if one.stdout == other.stdout else f"{other.stdout[:200]!r}, not {one.stdout[:200]!r}"
    return failure(one) or failure(other) or differs


def check_model(model):
    """Weights and losses to the bit. The tokens are those of a sample that is drawn nearly evenly."""
    for version in ("3", "5"):
        out = f"{model}-{version}/model.bin"
        os.mkdir(os.path.dirname(f"{W}/{out}"))
        done = export(model, out, "--version", version)
        verdict(f"{model}: weights of version {version}", failure(done) or same_weights(model, version, out))
    out = f"{model}-3/model.bin"
    verdict(f"{model}: losses", same_words(f"--evaluate 1 -i {W}/low.bin -j {W}/low.bin -t 8 -b 1", model, out))
    if os.path.exists(f"{W}/{model}-3/gpt2_tokenizer.bin"):
        verdict(f"{model}: tokens", same_words("--generate 2000 --temperature 50 --top-k 0 -t 8", model, out))


END = "<|endoftext|>"
VOCABULARY = f'{{"a": 0, "{END}": 1}}'
REFUSED = [  # what the line says, flags of the export, edits of a model without a tokenizer; X is the folder of OUT.bin
    ("config.json: .*tie_word_embeddings.*True", "", ("key", "config.json", "tie_word_embeddings", "false")),
    ("config.json: .*activation_function", "", ("key", "config.json", "activation_function", '"gelu"')),
    (r"wpe.weight.*\[19, 15\].*\[18, 15\]", "", ("key", "config.json", "n_positions", "18")),
    ("data_offsets are damaged", "", ("cut", "model.safetensors", "-5")),
    ("no gaps", "", ("put", "vocab.json", f'{{"a": 0, "{END}": 2}}')),
    ("has no <.endoftext.>", "", ("put", "vocab.json", '{"a": 0, "b": 1}')),
    ("token 1 has 300 bytes", "", ("put", "vocab.json", f'{{"{END}": 0, "{300 * "0"}": 1}}')),
    ("X/old.bin: would be taken for the tokens of .*holds no tokenizer", "--tokens X/old.bin"),
    ("X/foreign: exists and is not", "--tokens X/foreign", ("put", "vocab.json", VOCABULARY)),
    ("--tokens .*x.bin: is OUT.bin too", "--tokens X/x.bin", ("put", "vocab.json", VOCABULARY)),
]


def check_refusals():
    for pattern, flags, *edits in REFUSED:
        shutil.rmtree(f"{W}/edited", ignore_errors=True)
        shutil.copytree(f"{W}/golden", f"{W}/edited")
        os.mkdir(f"{W}/edited/X")
        for words in [*edits, ("put", "X/old.bin", ""), ("put", "X/foreign", "PK")]:
            edit(f"{W}/edited", *words)
        before = contents(f"{W}/edited")
        why = not_refused(export("edited", "edited/X/x.bin", *flags.replace("X", f"{W}/edited/X").split()), pattern)
        verdict(f"refused: {pattern}", why or ("" if contents(f"{W}/edited") == before else "files were changed"))


put_shard(W + "/low.bin", [i * i % 97 for i in range(400)])
shutil.copytree(ROOT + "/dev/reference/golden_gpt2_tied", W + "/golden")
edit(W + "/golden", "set", "transformer.ln_f.bias", "0", "1.00390625")  # between two numbers of 8 bits
flags = f"-e L=3,C=24,NH=2,T=16 -x 20 -l 1e-2 -v 0 -s 0 -n 0 -i {CORPUS}/train.bin -o {W}/trained"
verdict("a model to export", failure(run(TRAIN, *flags.split())))
check_model("golden")
check_model("trained")
edit(W + "/trained-3", "int", "gpt2_tokenizer.bin", "12", "1")
masked = same_words(f"--evaluate 1 -i {W}/low.bin -j {W}/low.bin -t 8 --doc-mask 1", "trained", "trained-3/model.bin")
verdict("the end of text is the token that the list names", "" if masked else "it is the last token")
verdict("going on from a checkpoint of llm.c", failure(run(TRAIN, *f"-y 1 --override 1 -x 2 -o {W}/back".split())))
verdict("... whose tokens go along", "" if read(W + "/back/gpt2_tokenizer.bin", "rb") else "there are none")
if all(os.path.isdir(f"{DATA}/{name}") for name in ("weights-tiny-gpt2", "gpt2-bpe")):
    os.mkdir(W + "/tiny")
    for name in ("weights-tiny-gpt2/config.json", "weights-tiny-gpt2/model.safetensors", "gpt2-bpe/encoder.json"):
        shutil.copyfile(f"{DATA}/{name}", f"{W}/tiny/{os.path.basename(name)}")
    check_model("tiny")
else:
    skip("50257 tokens", "LLMC_TEST_DATA has no weights-tiny-gpt2 or gpt2-bpe (docs/testing.md)")
check_refusals()
finish()
