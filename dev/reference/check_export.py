#!/usr/bin/env python3
"""Check that transformers loads a model directory that we wrote, and computes the same logits.

    python3 dev/reference/check_export.py MODEL_DIR LOGITS.safetensors

LOGITS.safetensors holds "tokens" I32 [B, T] and our "logits" F32 [B, T, V]. The directory is loaded as it is, in
float32; a missing, unexpected or mismatched tensor is a failure. If it holds a tokenizer, a text must survive encoding
and decoding. Exit status: 0 all passed, 1 a check failed, 2 the arguments are unusable. Written for torch 2.11,
transformers 5.17, safetensors 0.8.
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # "as it stands": nothing may be fetched to complete it

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

TOLERANCE = 1e-5
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
TEXT = "Hello world, it's 1 test.\n  Two spaces; an é."


def check_loading(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {key: value for key, value in info.items() if value}
    print(f"loaded {type(model).__name__}, {sum(p.numel() for p in model.parameters())} parameters, "
          f"tied={model.config.tie_word_embeddings}, problems: {problems or 'none'}")
    return model.eval(), not problems


def check_logits(model, tokens, ours):
    with torch.no_grad():
        theirs = model(tokens.long()).logits
    if ours.shape != theirs.shape:
        print(f"logits have shape {list(ours.shape)}, transformers gives {list(theirs.shape)}")
        return False
    ours, theirs = ours.double(), theirs.double()
    error = ((ours - theirs).abs() / theirs.abs().clamp(min=1)).max().item()
    print(f"RESULT check_export max_error={error:.3e} tol={TOLERANCE:.0e}")
    return error <= TOLERANCE  # false for NaN


def check_tokenizer(folder):
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        print("no tokenizer files")
        return True
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    print(f"tokenizer {type(tokenizer).__name__}: {TEXT!r} -> {len(ids)} tokens {ids[:12]}... -> {back!r}")
    return back == TEXT


def main():
    if len(sys.argv) != 3:
        print("usage: check_export.py MODEL_DIR LOGITS.safetensors", file=sys.stderr)
        return 2
    folder, path = Path(sys.argv[1]), Path(sys.argv[2])
    if not folder.is_dir() or not path.is_file():
        print(f"check_export: {folder if not folder.is_dir() else path} does not exist", file=sys.stderr)
        return 2
    result = load_file(path)
    for name, dtype, ndim in (("tokens", torch.int32, 2), ("logits", torch.float32, 3)):
        if name not in result or result[name].dtype != dtype or result[name].ndim != ndim:
            print(f"check_export: {path} needs {name!r}, {dtype} with {ndim} dimensions", file=sys.stderr)
            return 2
    logging.disable_progress_bar()
    model, loading_ok = check_loading(folder)
    logits_ok = check_logits(model, result["tokens"], result["logits"])
    tokenizer_ok = check_tokenizer(folder)
    for what, ok in (("loading", loading_ok), ("logits", logits_ok), ("tokenizer", tokenizer_ok)):
        if not ok:
            print(f"FAIL {what}")
    return 0 if loading_ok and logits_ok and tokenizer_ok else 1


if __name__ == "__main__":
    sys.exit(main())
