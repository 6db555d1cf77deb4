#!/usr/bin/env python3
"""Is all of a model directory in a GGUF file? Read back with the package gguf's own reader and dequantiser.

    python3 dev/test/read_gguf.py DIR FILE.gguf TYPE [KEY=VALUE...]

Every tensor must have the name, the shape and the values that llama.cpp expects, rounded to TYPE; every key and token
what DIR's files say; KEYs, without their "gpt2." or "bert.", the VALUEs given. Anything else in the file is a failure
too. Ends with "read DIR: N tensors, N keys, N tokens" or a line for each fault, and status 1.
"""
import json
import os
import re
import sys

import gguf
import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from model_dir import SafeTensors  # noqa: E402

# From a part of a name in DIR to that in GGUF; what is not named is left out of the file.
GPT2 = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output", "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}  # fmt: skip
BERT = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
}  # fmt: skip
KEYS = {
    "gpt2": {"n_positions": "context_length", "n_embd": "embedding_length", "n_layer": "block_count",
             "n_inner": "feed_forward_length", "n_head": "attention.head_count",
             "layer_norm_epsilon": "attention.layer_norm_epsilon"},
    "bert": {"max_position_embeddings": "context_length", "hidden_size": "embedding_length",
             "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
             "num_attention_heads": "attention.head_count", "layer_norm_eps": "attention.layer_norm_epsilon"},
}  # fmt: skip
faults = []


def check(is_right, text):
    if not is_right:
        faults.append(text)


def name_of(name, arch):
    """The name in GGUF and whether the matrix is turned, or None."""
    if arch == "bert" and not name.startswith("bert."):
        return None
    layer = re.match(r"(?:transformer\.|bert\.)?(?:h|encoder\.layer)\.(\d+)\.(.*)\.(weight|bias)$", name)
    if layer:
        number, part, kind = layer.groups()
        new = (GPT2 if arch == "gpt2" else BERT).get(part)
        return new and (f"blk.{number}.{new}.{kind}", arch == "gpt2")
    part, kind = re.fullmatch(r"(?:transformer\.|bert\.)?(.*)\.(weight|bias)", name).groups()
    new = (GPT2 if arch == "gpt2" else BERT).get(part)
    return new and (f"{new}.{kind}", False)


def rounded(values, kind):
    """(values as TYPE says them, the greatest error that this may have)."""
    if kind == "f16":
        return values.astype(np.float16).astype(np.float32), 0
    if kind == "bf16":
        bits = values.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32), 0
    if kind == "q8_0":  # half a step of the block's scale, which is itself rounded to f16: 127 steps of 2^-11 of it
        scale = np.abs(values.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
        return values, np.broadcast_to(scale * (0.5 + 127 / 2048) + 1e-7, (scale.size, 32)).reshape(values.shape)
    return values, 0


def check_tensors(reader, directory, arch, kind, config):
    source = SafeTensors(os.path.join(directory, "model.safetensors"))
    found = {t.name: t for t in reader.tensors}
    for name, entry in source.entries.items():
        new = name_of(name, arch)
        if not new or (new[0] == "output.weight" and config["tie_word_embeddings"]):
            continue
        tensor = found.pop(new[0], None)
        if tensor is None:
            faults.append(f"{new[0]} is missing")
            continue
        values = np.ascontiguousarray(source.get(name, entry["shape"]).T if new[1] else source.get(name, entry["shape"]))
        is_matrix = values.ndim == 2 and new[0] not in ("position_embd.weight", "token_types.weight")
        wanted = kind if is_matrix else "f32"
        check(tensor.tensor_type.name.lower() == wanted, f"{new[0]} is {tensor.tensor_type.name}")
        check(list(tensor.shape)[::-1] == list(values.shape), f"{new[0]} has the shape {tensor.shape}")
        back = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        expected, error = rounded(values, wanted)
        check((np.abs(back - expected) <= error).all(), f"{new[0]} has other values")
    check(not found, f"unknown tensors: {sorted(found)}")


def settings_of(directory):
    with open(os.path.join(directory, "tokenizer_config.json"), encoding="utf-8") as f:
        return json.load(f)


def tokens_of(directory, arch):
    """{number: (token in GGUF's spelling, type)} and the numbers of special tokens."""
    path = os.path.join(directory, "tokenizer.json")
    if arch == "gpt2":
        tree = json.load(open(path, encoding="utf-8"))
        merges = [m if isinstance(m, str) else " ".join(m) for m in tree["model"]["merges"]]
        tokens = {i: (t, 1) for t, i in tree["model"]["vocab"].items()}
        tokens.update((t["id"], (t["content"], 3 if t["special"] else 4)) for t in tree["added_tokens"])
        ids = {t: i for i, (t, _) in tokens.items()}
        end = settings_of(directory).get("eos_token", "<|endoftext|>")
        return tokens, {"bos": ids["<|endoftext|>"], "eos": ids[end]}, merges or ["<|endoftext|> <|endoftext|>"]
    lines = open(os.path.join(directory, "vocab.txt"), encoding="utf-8").read().split("\n")[:-1]
    special = {"[PAD]": ["padding"], "[UNK]": ["unknown"], "[CLS]": ["bos", "cls"], "[SEP]": ["seperator"], "[MASK]": ["mask"]}
    tokens = {}
    for i, line in enumerate(lines):
        part = line[2:] if line.startswith("##") and line != "##" else "\u2581" + line
        tokens[i] = (line, 3) if line in special else (part, 1)
    return tokens, {key: lines.index(t) for t, keys in special.items() for key in keys}, None


def main(directory, path, kind, given):
    config = json.load(open(os.path.join(directory, "config.json"), encoding="utf-8"))
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    arch = fields.pop("general.architecture")
    check(arch == config["model_type"], f"the architecture is {arch}")
    check_tensors(reader, directory, arch, kind, config)
    tokens, special, merges = tokens_of(directory, arch)
    size = config["vocab_size"]
    check(len(fields["tokenizer.ggml.tokens"]) == size, f"{len(fields['tokenizer.ggml.tokens'])} tokens, not {size}")
    found = zip(fields.pop("tokenizer.ggml.tokens"), fields.pop("tokenizer.ggml.token_type"))
    for i, pair in enumerate(found):
        check(pair == tokens.get(i, (pair[0], 5)), f"token {i} is {pair}, not {tokens.get(i)}")
    types = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
    wanted = {
        "general.name": os.path.basename(directory), "general.file_type": types[kind],
        "general.quantization_version": 2, "tokenizer.ggml.model": arch,
        **{f"tokenizer.ggml.{key}_token_id": i for key, i in special.items()},
        **{f"{arch}.{new}": config[old] for old, new in KEYS[arch].items()},
    }  # fmt: skip
    if arch == "gpt2":
        wanted.update({"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": merges})
        wanted["tokenizer.ggml.add_bos_token"] = False
        template = settings_of(directory).get("chat_template")
        wanted.update({"tokenizer.chat_template": template} if template else {})
    else:
        lower = settings_of(directory)["do_lower_case"]
        wanted.update({f"tokenizer.ggml.normalizer.{key}": lower for key in ("lowercase", "strip_accents")})
        wanted.update({"bert.attention.causal": False, "tokenizer.ggml.token_type_count": config["type_vocab_size"]})
    for pair in given:
        key, value = pair.split("=")
        wanted[key.replace("*", arch)] = json.loads(value)
    count = len(wanted)
    for key, value in wanted.items():
        actual = fields.pop(key, None)
        is_close = isinstance(value, float) and isinstance(actual, float) and abs(actual - value) <= 1e-6 * abs(value)
        check(is_close or actual == value, f"{key} is {actual!r}, not {value!r}")
    check(not fields, f"unknown keys: {sorted(fields)}")
    for fault in faults[:10]:
        print(f"FAULT {fault}")
    print(f"read {directory}: {len(reader.tensors)} tensors, {count} keys, {size} tokens")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
