#!/usr/bin/env python3
"""Compare the greedy text of use_gpt2 --generate with that of transformers' generate().

    python3 dev/reference/check_generate.py USE_GPT2 VOCABULARY

VOCABULARY holds GPT-2's encoder.json and vocab.bpe, or vocab.json and merges.txt. Small models with that vocabulary and
random weights, large enough that no two logits are nearly equal, continue prompts up to the model's last position, tied
and untied. Exit status: 0 all passed, 1 a check failed, 2 the arguments are unusable. Written for torch 2.11,
transformers 5.17, tokenizers 0.22.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

POSITIONS = 96
PROMPTS = ["Hello", "The quick brown fox\njumps over", "for (int i = 0; i < n; i++) {", "naïve café, 日本語 🙂 don't",
           "one <|endoftext|>two", " ", "a" * 70]


def small_model(folder, vocabulary, tied, heads):
    torch.manual_seed(heads)
    config = GPT2Config(n_layer=3, n_head=heads, n_embd=48, n_positions=POSITIONS, vocab_size=50257,
                        initializer_range=0.3, tie_word_embeddings=tied)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    for target, names in {"vocab.json": ("vocab.json", "encoder.json"), "merges.txt": ("merges.txt", "vocab.bpe")}.items():
        shutil.copyfile(next(vocabulary / name for name in names if (vocabulary / name).exists()), folder / target)


def byte_spellings():
    """What each byte is spelled as in GPT-2's vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def theirs(model, ids, count):
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                             do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0)
    return out[0].tolist()


def ours(program, folder, count, *flags):
    command = [program, "-e", str(folder), "--generate", str(count), "--temperature", "0", *flags]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout


def main():
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    program, vocabulary = str(Path(sys.argv[1]).resolve()), Path(sys.argv[2])
    passed = failed = 0

    def expect(name, got, wanted):
        nonlocal passed, failed
        passed, failed = passed + (got == wanted), failed + (got != wanted)
        print(f"ok   {name}" if got == wanted else f"FAIL {name}: {got[-200:]!r} where transformers has {wanted[-200:]!r}")

    spelled = byte_spellings()
    for tied, heads in ((True, 3), (False, 2)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            small_model(folder, vocabulary, tied, heads)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            tokenizer = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
            tokenizer.add_special_tokens(["<|endoftext|>"])
            tokens = {id: bytes(spelled[c] for c in text)
                      for text, id in json.loads((folder / "vocab.json").read_text()).items() if text != "<|endoftext|>"}
            tokens[50256] = b"<|endoftext|>"
            for prompt in PROMPTS:
                ids = tokenizer.encode(prompt).ids
                count = POSITIONS - len(ids)
                wanted = b"".join(tokens[id] for id in theirs(model, ids, count)) + b"\n"
                got = ours(program, folder, count, "--prompt", prompt)
                expect(f"{'tied' if tied else 'untied'}, {prompt[:20]!r}", got, wanted)
    print(f"{passed} passed, {failed} failed")
    return 0 if failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
