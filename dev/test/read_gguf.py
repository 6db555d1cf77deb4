#!/usr/bin/env python3
"""Is all of a model directory in a GGUF file? Read back with the package gguf's own reader, names and dequantiser.

    python3 dev/test/read_gguf.py DIR FILE.gguf TYPE [KEY=VALUE...]

Every tensor must have the name, the shape and the values that llama.cpp expects, rounded to TYPE; every key and token
what DIR's files say; KEYs, without their "gpt2." or "bert.", the VALUEs given. Anything else in the file is a failure
too. Ends with "read DIR: N tensors, N keys, N tokens" or a line for each fault, and status 1.
"""
import json
import os
import sys

import gguf
import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from model_dir import SafeTensors  # noqa: E402

KEYS = {
    "gpt2": {"n_positions": "context_length", "n_embd": "embedding_length", "n_layer": "block_count",
             "n_inner": "feed_forward_length", "n_head": "attention.head_count",
             "layer_norm_epsilon": "attention.layer_norm_epsilon"},
    "bert": {"max_position_embeddings": "context_length", "hidden_size": "embedding_length",
             "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
             "num_attention_heads": "attention.head_count", "layer_norm_eps": "attention.layer_norm_epsilon"},
}  # fmt: skip
SPECIAL = {"[PAD]": ["padding"], "[UNK]": ["unknown"], "[CLS]": ["bos", "cls"], "[SEP]": ["seperator"],
           "[MASK]": ["mask"]}  # fmt: skip
TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def load(*path):
    with open(os.path.join(*path), encoding="utf-8") as f:
        return json.load(f)


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


def tensor_faults(reader, directory, arch, kind, config):
    source, found = SafeTensors(os.path.join(directory, "model.safetensors")), {t.name: t for t in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config[next(k for k in KEYS[arch] if "layer" in k)])
    for name, entry in source.entries.items():
        new = names.get_name(name[5:] if name.startswith("bert.") else name, (".weight", ".bias"))
        if not new or name.startswith("cls.") or (new == "output.weight" and config["tie_word_embeddings"]):
            continue
        tensor = found.pop(new, None)
        if tensor is None:
            yield f"{new} is missing"
            continue
        values = source.get(name, entry["shape"])
        if arch == "gpt2" and ".h." in name and values.ndim == 2:  # [in, out] in DIR
            values = np.ascontiguousarray(values.T)
        wanted = kind if values.ndim == 2 and new not in ("position_embd.weight", "token_types.weight") else "f32"
        if (tensor.tensor_type.name.lower(), list(tensor.shape)[::-1]) != (wanted, list(values.shape)):
            yield f"{new} is {tensor.tensor_type.name} {tensor.shape}"
            continue
        back, (expected, error) = gguf.quants.dequantize(tensor.data, tensor.tensor_type), rounded(values, wanted)
        if not (np.abs(back.reshape(values.shape) - expected) <= error).all():
            yield f"{new} has other values"
    if found:
        yield f"unknown tensors: {sorted(found)}"


def tokens_of(directory, arch, settings):
    """{number: (token in GGUF's spelling, type)}, and the keys that say more about them."""
    if arch == "gpt2":
        tree = load(directory, "tokenizer.json")
        tokens = {i: (t, NORMAL) for t, i in tree["model"]["vocab"].items()}
        for t in tree["added_tokens"]:
            tokens[t["id"]] = t["content"], CONTROL if t["special"] else USER_DEFINED
        ids = {t: i for i, (t, _) in tokens.items()}
        merges = [m if isinstance(m, str) else " ".join(m) for m in tree["model"]["merges"]]
        special = {"bos": ids["<|endoftext|>"], "eos": ids[settings.get("eos_token", "<|endoftext|>")]}
        keys = {"pre": "gpt-2", "merges": merges or ["<|endoftext|> <|endoftext|>"], "add_bos_token": False}
    else:
        with open(os.path.join(directory, "vocab.txt"), encoding="utf-8") as f:
            lines = f.read().split("\n")[:-1]
        spelled = [line[2:] if line.startswith("##") and line != "##" else "\u2581" + line for line in lines]
        tokens = {i: (t, CONTROL) if t in SPECIAL else (spelled[i], NORMAL) for i, t in enumerate(lines)}
        special = {key: lines.index(t) for t, keys in SPECIAL.items() for key in keys}
        keys = {f"normalizer.{key}": settings["do_lower_case"] for key in ("lowercase", "strip_accents")}
    keys.update({f"{key}_token_id": i for key, i in special.items()})
    return tokens, {f"tokenizer.ggml.{key}": value for key, value in {"model": arch, **keys}.items()}


def main(directory, path, kind, given):
    config, settings = load(directory, "config.json"), load(directory, "tokenizer_config.json")
    reader, arch = gguf.GGUFReader(path), config["model_type"]
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    faults = list(tensor_faults(reader, directory, arch, kind, config))
    tokens, keys = tokens_of(directory, arch, settings)
    found = list(zip(fields.pop("tokenizer.ggml.tokens"), fields.pop("tokenizer.ggml.token_type")))
    wanted = [tokens.get(i, (found[i : i + 1] or [("", 0)])[0][:1] + (UNUSED,)) for i in range(config["vocab_size"])]
    faults += [f"token {i} is {a}, not {b}" for i, (a, b) in enumerate(zip(found, wanted)) if a != b]
    faults += [f"{len(found)} tokens, not {len(wanted)}"] * (len(found) != len(wanted))
    keys.update({"general.architecture": arch, "general.name": os.path.basename(directory),
                 "general.file_type": TYPES[kind], "general.quantization_version": 2,
                 **{f"{arch}.{new}": config[old] for old, new in KEYS[arch].items()}})
    if arch == "bert":
        keys.update({"bert.attention.causal": False, "tokenizer.ggml.token_type_count": config["type_vocab_size"]})
    elif settings.get("chat_template"):
        keys["tokenizer.chat_template"] = settings["chat_template"]
    keys.update((key.replace("*", arch), json.loads(value)) for key, value in (pair.split("=") for pair in given))
    for key, value in keys.items():
        actual = fields.pop(key, None)
        is_close = isinstance(value, float) and isinstance(actual, float) and abs(actual - value) <= 1e-6 * abs(value)
        faults += [f"{key} is {actual!r}, not {value!r}"] * (actual != value and not is_close)
    faults += [f"unknown keys: {sorted(fields)}"] * bool(fields)
    for fault in faults[:10]:
        print(f"FAULT {fault}")
    print(f"read {directory}: {len(reader.tensors)} tensors, {len(keys)} keys, {len(found)} tokens")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
