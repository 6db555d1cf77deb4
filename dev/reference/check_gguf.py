#!/usr/bin/env python3
"""Compare what llama.cpp computes from dev/export_gguf.py's files with what transformers computes from the directories.

    python3 -m venv build/llama && build/llama/bin/pip install llama-cpp-python gguf torch transformers tokenizers
    build/llama/bin/python dev/reference/check_gguf.py DIR...

llama-cpp-python comes as source only: building it takes about 13 minutes on two cores. Each DIR is a GPT-2 or a BERT
with a tokenizer and at least 128 positions. Prints a line per check and ends with status 1 if one failed. On the CPU:

GPT-2   Token ids of 1,000 hostile lines are equal. Logits of f32 are within 5e-3 of transformers' in float32, and at 98 %
        of places within 1e-4 of a reference whose GELU is rounded to fp16 before and after, like llama.cpp's table. At
        the other places an input of GELU is rounded the other way. llama.cpp (keys and values in f32, no flash attention)
        is about as near to that reference in float64 as the reference in float32 is: half as near, or by 0.5 % of places.
        Logits of f16, bf16 and q8_0 are compared with the dequantised weights in the same reference: within 5e-3 plus the
        change from rounding the inputs of matmuls as llama.cpp does. Along transformers' greedy text of 100 tokens the
        choice is the same wherever the two best logits are further apart than twice that.
BERT    Token ids of 1,000 hostile lines are equal; vectors by mean and by cls are within 1e-3 of transformers'.
"""
import os
import random
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import llama_cpp
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, BertModel, GPT2LMHeadModel
from transformers.utils import logging

EXPORT = os.path.join(os.path.dirname(__file__), "..", "export_gguf.py")
KINDS = "f32", "f16", "bf16", "q8_0"
NEW, TEXTS = 100, 16
failed = 0


def report(name, is_right, text):
    global failed
    failed += not is_right
    print(f"{'ok  ' if is_right else 'FAIL'} {name}: {text}", flush=True)


def hostile_lines(count):
    """Mixtures of scripts, spaces, contractions, controls, marks and special tokens' spellings, the same in every run."""
    rng = random.Random(7)
    words = ["the", "It's", "we'LL", "don't", "naïve", "ＦＵＬＬ", "Straße", "İstanbul", "中文字", "日本語", "한국어", "עברית", "العربية",
             "हिन्दी", "e\u0301", "ﬁ", "½", "²", "٣", "\u00ad", "\u200b", "🙂", "👩‍👩‍👧", "<|endoftext|>", "[MASK]", "[CLS]", "##ing",
             "--", "...", "'s", "'", "\"", "a_b", "x=1", "3.14", "1e-5", "C++", "http://a.b/c?d=e&f", "\u2581", "\u0120", "z" * 30]  # fmt: skip
    gaps = ["", " ", "  ", "   ", "\t", " \t", "\u00a0", "\u3000", "\u2009", " \u00a0 "]
    return ["".join(w + rng.choice(gaps) for w in rng.choices(words, k=rng.randrange(1, 12))) for _ in range(count)]


def exported(directory, kind, folder, *flags):
    path = os.path.join(folder, f"{kind}{''.join(flags)}.gguf")
    command = [sys.executable, EXPORT, directory, path, "--type", kind, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    return path if done.returncode == 0 else done.stderr.strip()


def check_tokens(directory, model):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    lines, different = hostile_lines(1000), []
    for line in lines:
        theirs = model.tokenize(line.encode(), add_bos=False, special=False)
        if theirs != tokenizer.encode(line, add_special_tokens=False, split_special_tokens=True):
            different.append(line)
    text = f"{len(different)} of {len(lines)} hostile lines differ"
    report("token ids", not different, text + (f", first {different[0]!r}" if different else ""))
    return tokenizer


# ----------------------------------------------------------------------------------------------------------
# GPT-2


class HalfGelu(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().to(x.dtype)


def load_dequantised(model, path):
    """The file's matrices in place of the model's."""
    tensors = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        model.transformer.wte.weight.copy_(tensors["token_embd.weight"].view_as(model.transformer.wte.weight))
        if "output.weight" in tensors:
            model.lm_head.weight.copy_(tensors["output.weight"].view_as(model.lm_head.weight))
        for i, block in enumerate(model.transformer.h):
            parts = {"attn_qkv": block.attn.c_attn, "attn_output": block.attn.c_proj, "ffn_up": block.mlp.c_fc}
            for name, part in {**parts, "ffn_down": block.mlp.c_proj}.items():
                part.weight.copy_(tensors[f"blk.{i}.{name}.weight"].view(part.weight.shape[::-1]).T)


def round_inputs(model, kind):
    """Round what goes into matrix products as llama.cpp does for a type of weights."""

    def rounded(module, arguments):
        x = arguments[0]
        if kind == "f16":
            return (x.half().float(),)
        if kind == "bf16":
            return (x.bfloat16().float(),)
        values = np.ascontiguousarray(x.detach().numpy())
        q = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        return (torch.from_numpy(gguf.quants.dequantize(q, gguf.GGMLQuantizationType.Q8_0).reshape(values.shape)),)

    parts = [model.lm_head]
    for block in model.transformer.h:
        parts += [block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj]
    return [part.register_forward_pre_hook(rounded) for part in parts]


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def llama_logits(path, texts, n_ctx):
    model = llama_cpp.Llama(path, n_ctx=n_ctx, logits_all=True, type_k=0, type_v=0, verbose=False, n_threads=1, flash_attn=False)
    results = []
    for tokens in texts:
        model.reset()
        model.eval(tokens)
        results.append(np.array(model.scores[: len(tokens)]))
    return model, results


def distance(a, b):
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b))


def reference(directory):
    return GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def check_places(name, a, b):
    """(median, share within 1e-4) of the distances at all places."""
    places = np.concatenate([np.abs(x - y).max(-1) for x, y in zip(a, b)])
    median, share = float(np.median(places)), float((places <= 1e-4).mean())
    print(f"     {name}: median {median:.2e}, {100 * share:.2f} % of places within 1e-04, all within {places.max():.2e}")
    return median, share


def check_greedy(name, theirs, ours, bound):
    """`ours` [positions, V] of transformers, which chose; `theirs` of llama.cpp along the same tokens."""
    best = np.sort(ours, axis=-1)
    is_clear = best[:, -1] - best[:, -2] > 2 * bound
    same = ours.argmax(-1) == theirs.argmax(-1)
    text = f"same choice at {int((same & is_clear).sum())} of {int(is_clear.sum())} clear places, {int((~is_clear).sum())} are not clear"
    report(f"{name} greedy text", bool((same | ~is_clear).all()), text)


def check_gpt2(directory, folder):
    model = reference(directory)
    positions, start = model.config.n_positions, [model.config.eos_token_id]
    torch.manual_seed(7)
    with torch.no_grad():
        drawn = model.generate(torch.tensor([start] * TEXTS), do_sample=True, max_new_tokens=min(positions, 64) - 1, pad_token_id=0)
        texts = drawn.tolist()
        text = model.generate(torch.tensor([start]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)[0].tolist()
    texts.append(text)
    plain = [logits_of(model, t) for t in texts]
    for kind in KINDS:
        path = exported(directory, kind, folder)
        if not path.endswith(".gguf"):
            print(f"     {kind}: {path}")
            continue
        llama, theirs = llama_logits(path, texts, positions)
        if kind == "f32":
            check_tokens(directory, llama)
        model = reference(directory)
        load_dequantised(model, path)
        for block in model.transformer.h:
            block.mlp.act = HalfGelu()
        expected, bound = [logits_of(model, t) for t in texts], 5e-3
        if kind == "f32":
            d = distance(theirs, plain)
            report("f32 logits", d <= bound, f"within {d:.2e} of transformers', allowed {bound:.0e}")
            # Where an input of GELU is between two fp16 values, 1e-7 more or less decides which of them it becomes.
            near = check_places("llama.cpp from float32", theirs, expected)
            report("f32 logits, GELU in fp16", near[0] <= 1e-5 and near[1] >= 0.98, "as said above")
            exact = [logits_of(model.double(), t) for t in texts]
            near, ours = check_places("llama.cpp from float64", theirs, exact), check_places("float32 from float64", expected, exact)
            model.float()
            report("f32 logits, as near to float64", near[0] <= 2 * ours[0] and near[1] >= ours[1] - 0.005, "as said above")
        else:
            hooks = round_inputs(model, kind)
            bound += distance([logits_of(model, t) for t in texts], expected)
            for hook in hooks:
                hook.remove()
            d = distance(theirs, expected)
            report(f"{kind} logits", d <= bound, f"within {d:.2e} of the dequantised weights', allowed {bound:.2e}")
            bound += distance(expected, plain)
        check_greedy(kind, theirs[-1][len(start) - 1 : -1], plain[-1][len(start) - 1 : -1], bound)
        del llama


# ----------------------------------------------------------------------------------------------------------
# BERT


def check_bert(directory, folder):
    model = BertModel.from_pretrained(directory, dtype=torch.float32, add_pooling_layer=False, attn_implementation="eager").eval()
    lines = [line for line in hostile_lines(60)]
    for pool in ("mean", "cls"):
        path = exported(directory, "f32", folder, "--pool", pool)
        llama = llama_cpp.Llama(path, embedding=True, n_ctx=model.config.max_position_embeddings, verbose=False, n_threads=1)
        tokenizer = check_tokens(directory, llama) if pool == "mean" else tokenizer
        worst = 0
        for line in lines:
            ids = tokenizer.encode(line, split_special_tokens=True)
            if len(ids) > model.config.max_position_embeddings:
                continue
            with torch.no_grad():
                hidden = model(torch.tensor([ids])).last_hidden_state[0]
            expected = (hidden.mean(0) if pool == "mean" else hidden[0]).numpy()
            theirs = np.array(llama.embed(line, normalize=False), dtype=np.float32)
            worst = max(worst, float(np.abs(theirs - expected).max()))
        report(f"{pool} vectors", worst <= 1e-3, f"within {worst:.2e} of transformers', allowed 1e-03")


def main(directories):
    if not directories:
        print("usage: check_gguf.py DIR...", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    print(f"llama-cpp-python {llama_cpp.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    for directory in directories:
        with tempfile.TemporaryDirectory() as folder:
            kind = AutoConfig.from_pretrained(directory).model_type
            print(f"{directory}: {kind}")
            (check_bert if kind == "bert" else check_gpt2)(directory, folder)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
