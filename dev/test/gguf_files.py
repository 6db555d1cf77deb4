#!/usr/bin/env python3
"""GGUF files by dev/export_gguf.py, read back with the package gguf's own reader, names and dequantiser; models that
GGUF cannot express.

    python3 dev/test/gguf_files.py TRAIN_GPT2 TRAIN_BERT        from the repository's root; needs numpy and gguf
"""
import json
import os
import shutil
import sys
import tempfile

import gguf
import numpy as np
from edit import edit
from verdicts import CORPUS, ROOT, failure, finish, holds, not_refused, read, run, script, verdict, write

sys.path.insert(0, os.path.join(ROOT, "dev"))
from model_dir import SafeTensors  # noqa: E402

work = tempfile.TemporaryDirectory()
W = work.name
OUT = W + "/model.gguf"
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


# ----------------------------------------------------------------------------------------------------------
# Is all of a model directory in the file? Every tensor must have the name, the shape and the values that llama.cpp
# expects, rounded to its type; every key and token what the directory says. Anything else is a fault too.


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
        tree = json.loads(read(directory + "/tokenizer.json"))
        tokens = {i: (t, NORMAL) for t, i in tree["model"]["vocab"].items()}
        for t in tree["added_tokens"]:
            tokens[t["id"]] = t["content"], CONTROL if t["special"] else USER_DEFINED
        ids = {t: i for i, (t, _) in tokens.items()}
        merges = [m if isinstance(m, str) else " ".join(m) for m in tree["model"]["merges"]]
        special = {"bos": ids["<|endoftext|>"], "eos": ids[settings.get("eos_token", "<|endoftext|>")]}
        keys = {"pre": "gpt-2", "merges": merges or ["<|endoftext|> <|endoftext|>"], "add_bos_token": False}
    else:
        lines = read(directory + "/vocab.txt").split("\n")[:-1]
        spelled = [line[2:] if line.startswith("##") and line != "##" else "\u2581" + line for line in lines]
        tokens = {i: (t, CONTROL) if t in SPECIAL else (spelled[i], NORMAL) for i, t in enumerate(lines)}
        special = {key: lines.index(t) for t, keys in SPECIAL.items() for key in keys}
        keys = {f"normalizer.{key}": settings["do_lower_case"] for key in ("lowercase", "strip_accents")}
    keys.update({f"{key}_token_id": i for key, i in special.items()})
    return tokens, {f"tokenizer.ggml.{key}": value for key, value in {"model": arch, **keys}.items()}


def faults_of(directory, kind, given):
    """What is wrong in OUT; given: keys, without their "gpt2." or "bert.", and their values."""
    config, settings = (json.loads(read(f"{directory}/{name}.json")) for name in ("config", "tokenizer_config"))
    reader, arch = gguf.GGUFReader(OUT), config["model_type"]
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tokens, keys = tokens_of(directory, arch, settings)
    found = dict(enumerate(zip(fields.pop("tokenizer.ggml.tokens"), fields.pop("tokenizer.ggml.token_type"))))
    wanted = {i: tokens.get(i, (found[i][0], UNUSED)) for i in range(config["vocab_size"])}
    keys.update({"general.architecture": arch, "general.name": os.path.basename(directory),
                 "general.file_type": TYPES[kind], "general.quantization_version": 2,
                 **{f"{arch}.{new}": config[old] for old, new in KEYS[arch].items()}})
    if arch == "bert":
        keys.update({"bert.attention.causal": False, "tokenizer.ggml.token_type_count": config["type_vocab_size"]})
    elif settings.get("chat_template"):
        keys["tokenizer.chat_template"] = settings["chat_template"]
    keys.update(given)
    faults = list(tensor_faults(reader, directory, arch, kind, config)) + ["other tokens"] * (found != wanted)
    for key in fields.keys() | keys.keys():
        a, b = fields.get(key), keys.get(key)
        if a != b and not (isinstance(a, float) and abs(a - b) <= 1e-6 * abs(b)):
            faults.append(f"{key} is {a!r}, not {b!r}")
    return "; ".join(faults[:10])


def export(model, *flags):
    return script("dev/export_gguf.py", f"{W}/{model}", OUT, *flags)


def exported(name, model, *flags, kind="f32", **keys):
    """It is exported, and all of it is there; the last file stays as OUT."""
    done = export(model, "--type", kind, *flags)
    verdict(name, failure(done) or faults_of(f"{W}/{model}", kind, {k.replace("__", "."): v for k, v in keys.items()}))
    return done.stdout


def same_file(name, model):
    """Exported, the same bytes as those of OUT now."""
    before, done = read(OUT, "rb"), export(model)
    holds(name, read(OUT, "rb") == before, "other bytes", done)
    return done.stdout


def edited(model, *edits):
    """A copy of a model after edits (dev/test/edit.py), in a folder of the same name, which is in the file."""
    shutil.rmtree(W + "/edited", ignore_errors=True)
    shutil.copytree(f"{W}/{model}", f"{W}/edited/{model}")
    for words in edits:
        edit(f"{W}/edited/{model}", *words)
    return f"edited/{model}"


def check_gpt2():
    """Three heads of 16, an MLP of another width than 4 C; one with a head of its own and more rows than tokens."""
    for kind in ("bf16", "f32"):
        exported(f"GPT-2, {kind}", "gpt2", kind=kind, gpt2__feed_forward_length=96)
    # vocab.json and merges.txt alone say the same as tokenizer.json.
    same_file("vocab.json and merges.txt", edited("gpt2", ("gone", "tokenizer.json")))
    # The names of a wrapper's state, a tied embedding that save_model() stored under the head's name alone, and
    # buffers of attention as older transformers stored them.
    said = same_file("other names of the same tensors", edited(
        "gpt2", ("copy", "transformer.ln_f.bias", "h.0.attn.bias", "1"),
        ("copy", "transformer.ln_f.bias", "transformer.h.1.attn.masked_bias", "1"), ("prefix", "module."),
        ("save_model", "module.transformer.wte.weight", "module.lm_head.weight")))
    verdict("buffers are not named", said if "no place" in said else "")
    exported("q8_0, with a head of its own and 16 rows without a token", "untied", kind="q8_0")
    # Tokens that were added behind the vocabulary: a special one, and one of the user's; and a merge.
    added = json.loads(read(W + "/untied/tokenizer.json"))["added_tokens"]
    added.append({**added[0], "id": 390, "content": "<|user|>"})
    added.append({**added[0], "id": 391, "content": "two words", "special": False})
    merge = ("sub", "tokenizer.json", r'"merges":\[\]', '"merges":["t h"]')
    exported("added tokens", edited("untied", merge, ("key", "tokenizer.json", "added_tokens", json.dumps(added))))
    # A model tuned for chat: its template, in the settings or in a file of its own, and the token that ends an answer.
    template = ("key", "tokenizer_config.json", "chat_template", json.dumps("{{ messages[0].content }} é"))
    end = ("key", "tokenizer_config.json", "eos_token", '"e"')
    exported("a chat template", edited("gpt2", template, end))
    alone = edited("gpt2", template, end, ("put", "chat_template.jinja", "{{ 1 }}\n{{ 2 }}\n"))
    exported("... in a file of its own", alone, tokenizer__chat_template="{{ 1 }}\n{{ 2 }}")


def check_bert():
    verdict("a vocabulary of bytes", not_refused(export("bert"), ".*is a vocabulary of bytes"))
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters)]
    words += ["the", "ing", "##ing", "é", "中", "#", "##"]
    write(W + "/bert/vocab.txt", "\n".join(words) + "\n")
    exported("BERT, f16", "bert", "--pool", "cls", kind="f16", bert__pooling_type=2)
    said = exported("BERT, f32", "bert", bert__pooling_type=1)
    left = "no place for bert.pooler, cls.predictions, cls.seq_relationship; left out"
    holds("BERT: what is left out is named", left in said, said)
    same_file("BERT, a vocabulary with a byte order mark", edited("bert", ("sub", "vocab.txt", "^", r"\xef\xbb\xbf")))
    lower = ("key", "tokenizer_config.json", "do_lower_case", "true")
    exported("BERT, lower case", edited("bert", lower), bert__pooling_type=1)


WTE = "transformer.wte.weight"
REFUSED = [  # model, what the line says, flags of the export, an edit
    ("gpt2", "activation_function\": .gelu. cannot be expressed in GGUF", "",
     ("key", "config.json", "activation_function", '"gelu"')),
    ("gpt2", "has the number .*vocab_size is 200", "", ("key", "config.json", "vocab_size", "200")),
    ("gpt2", "--type q8_0: tensor transformer.wte.weight has rows of 48 values", "--type q8_0", ()),
    ("gpt2", "tensor transformer.wte.weight: holds 100000, too large for f16", "--type f16", ("set", WTE, "0", "1e5")),
    ("gpt2", "tensor transformer.wte.weight: holds values that are not finite", "", ("set", WTE, "0", "nan")),
    ("bert", 'tokenize_chinese_chars" is False', "",
     ("key", "tokenizer_config.json", "tokenize_chinese_chars", "false")),
    ("bert", r"vocab.txt: has no \[MASK\]", "", ("sub", "vocab.txt", r"\[MASK\]", "[MUSK]")),
    ("bert", "are both .* in GGUF", "", ("sub", "vocab.txt", "##a\n", "##▁b\n")),
]


def check_refusals():
    for model, pattern, flags, words in REFUSED:
        before = sorted(os.listdir(W))
        why = not_refused(export(edited(model, *filter(None, [words])), *flags.split()), f".*{pattern}")
        verdict(f"refused: {pattern}", why or ("" if sorted(os.listdir(W)) == before else "files are left"))
    shutil.copy(W + "/bert/config.json", OUT)
    verdict("onto a file of another kind", not_refused(export("bert"), ".*model.gguf: exists and is not"))
    holds("... which stays", read(OUT) == read(W + "/bert/config.json"), "it is another")


for program, name, flags in [(sys.argv[1], "gpt2", "-e L=2,C=48,NH=3,F=96,T=32 -x 20 -l 1e-2"),
                             (sys.argv[1], "untied", "-e L=1,C=64,NH=2,T=16,V=400,tied=0 -x 2"),
                             (sys.argv[2], "bert", "-e L=2,C=48,NH=3,F=96,T=32 -x 2")]:
    data = CORPUS + ("/bert" if name == "bert" else "") + "/train.bin"
    done = run(os.path.abspath(program), *f"{flags} -v 0 -s 0 -n 0 -o {W}/{name} -i {data}".split())
    verdict(f"a {name} to export", failure(done))
    shutil.rmtree(f"{W}/{name}/ckpt")
check_gpt2()
check_bert()
check_refusals()
finish()
