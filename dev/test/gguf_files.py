#!/usr/bin/env python3
"""GGUF files by dev/export_gguf.py, read back with the package gguf's own reader and names; models that GGUF cannot
express.

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
SIZES = {"context_length": 32, "embedding_length": 48, "block_count": 2, "feed_forward_length": 96,
         "attention.head_count": 3}  # of the models below, but for what a case says
SPECIAL = {"[PAD]": ["padding"], "[UNK]": ["unknown"], "[CLS]": ["bos", "cls"], "[SEP]": ["seperator"],
           "[MASK]": ["mask"]}  # fmt: skip
TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def tensors_of(directory, arch, kind):
    """{name in GGUF: (type, shape, bytes)} as llama.cpp expects them of a model directory."""
    source, wanted = SafeTensors(os.path.join(directory, "model.safetensors")), {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], SIZES["block_count"])
    for name, entry in source.entries.items():
        new = names.get_name(name[5:] if name.startswith("bert.") else name, (".weight", ".bias"))
        if new and not name.startswith("cls."):
            values = source.get(name, entry["shape"])
            if arch == "gpt2" and ".h." in name and values.ndim == 2:  # [in, out] in DIR
                values = np.ascontiguousarray(values.T)
            is_matrix = values.ndim == 2 and new not in ("position_embd.weight", "token_types.weight")
            stored = gguf.GGMLQuantizationType[kind.upper() if is_matrix else "F32"]
            wanted[new] = stored, values.shape, gguf.quants.quantize(values, stored).tobytes()
    return wanted


def tokens_of(directory, arch, settings):
    """{number: (token in GGUF's spelling, type)}, and the keys that say more about them."""
    if arch == "gpt2":
        tree = json.loads(read(directory + "/tokenizer.json"))
        tokens = {i: (t, NORMAL) for t, i in tree["model"]["vocab"].items()}
        for t in tree["added_tokens"]:
            tokens[t["id"]] = t["content"], CONTROL if t["special"] else USER_DEFINED
        ids = {t: i for i, (t, _) in tokens.items()}
        special = {"bos": ids["<|endoftext|>"], "eos": ids[settings.get("eos_token", "<|endoftext|>")]}
        merges = tree["model"]["merges"] or ["<|endoftext|> <|endoftext|>"]
        keys = {"pre": "gpt-2", "merges": merges, "add_bos_token": False}
    else:
        lines = read(directory + "/vocab.txt").split("\n")[:-1]
        spelled = [line[2:] if line.startswith("##") and line != "##" else "\u2581" + line for line in lines]
        tokens = {i: (t, CONTROL) if t in SPECIAL else (spelled[i], NORMAL) for i, t in enumerate(lines)}
        special = {key: lines.index(t) for t, keys in SPECIAL.items() for key in keys}
        keys = {f"normalizer.{key}": settings["do_lower_case"] for key in ("lowercase", "strip_accents")}
    keys.update({f"{key}_token_id": i for key, i in special.items()})
    return tokens, {f"tokenizer.ggml.{key}": value for key, value in {"model": arch, **keys}.items()}


def faults_of(directory, kind, given):
    """Where OUT is not what a model directory says; given: keys that do not follow from others."""
    config, settings = (json.loads(read(f"{directory}/{name}.json")) for name in ("config", "tokenizer_config"))
    reader, arch = gguf.GGUFReader(OUT), config["model_type"]
    found = {t.name: (t.tensor_type, tuple(map(int, t.shape[::-1])), t.data.tobytes()) for t in reader.tensors}
    wanted = tensors_of(directory, arch, kind)
    yield from (f"tensor {name}" for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))

    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    found = dict(enumerate(zip(fields.pop("tokenizer.ggml.tokens"), fields.pop("tokenizer.ggml.token_type"))))
    tokens, keys = tokens_of(directory, arch, settings)
    wanted = {i: tokens.get(i, (found[i][0], UNUSED)) for i in range(config["vocab_size"])}
    yield from ["other tokens"] * (found != wanted)

    epsilon = config["layer_norm_epsilon" if arch == "gpt2" else "layer_norm_eps"]
    sizes = {f"{arch}.{key}": value for key, value in {**SIZES, "attention.layer_norm_epsilon": epsilon}.items()}
    keys.update({"general.architecture": arch, "general.name": os.path.basename(directory),
                 "general.file_type": TYPES[kind], "general.quantization_version": 2, **sizes, **given})
    if arch == "bert":
        keys.update({"bert.attention.causal": False, "tokenizer.ggml.token_type_count": 2})
    for key in fields.keys() | keys.keys():
        a, b = fields.get(key), keys.get(key)
        if a != b and not (isinstance(a, float) and abs(a - b) <= 1e-6 * abs(b)):
            yield f"{key} is {a!r}, not {b!r}"


def export(model, *flags):
    return script("dev/export_gguf.py", f"{W}/{model}", OUT, *flags)


def exported(name, model, *flags, kind="f32", **keys):
    """It is exported, and all of it is there; the file stays as OUT."""
    done = export(model, "--type", kind, *flags)
    verdict(name, failure(done) or "; ".join(faults_of(f"{W}/{model}", kind, keys)))
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
    exported("GPT-2, bf16", "gpt2", kind="bf16")
    # Tokens that were added behind the vocabulary: a special one, and one of the user's; and a merge.
    added = json.loads(read(W + "/untied/tokenizer.json"))["added_tokens"]
    added.append({**added[0], "id": 390, "content": "<|user|>"})
    added.append({**added[0], "id": 391, "content": "two words", "special": False})
    merge = ("sub", "tokenizer.json", r'"merges":\[\]', '"merges":["t h"]')
    model = edited("untied", merge, ("key", "tokenizer.json", "added_tokens", json.dumps(added)))
    sizes = {"gpt2.embedding_length": 64, "gpt2.attention.head_count": 2}
    exported("a head of its own, added tokens and rows without one, q8_0", model, kind="q8_0", **sizes)
    # A model tuned for chat: its template, in the settings or in a file of its own, and the token that ends an answer.
    chat = [("key", "tokenizer_config.json", *words) for words in (("chat_template", '"é"'), ("eos_token", '"e"'))]
    exported("a chat template", edited("gpt2", *chat), **{"tokenizer.chat_template": "é"})
    alone = edited("gpt2", *chat, ("put", "chat_template.jinja", "{{ 1 }}\n{{ 2 }}\n"))
    exported("... in a file of its own", alone, **{"tokenizer.chat_template": "{{ 1 }}\n{{ 2 }}"})
    # The same file without tokenizer.json, of tensors with the names of a wrapper, a tied embedding that save_model()
    # stored under the head's name alone, and a buffer of attention as older transformers stored it.
    export("gpt2")
    before = read(OUT, "rb")
    done = export(edited("gpt2", ("gone", "tokenizer.json"), ("copy", "transformer.ln_f.bias", "h.0.attn.bias", "1"),
                         ("prefix", "module."),
                         ("save_model", "module.transformer.wte.weight", "module.lm_head.weight")))
    is_same = read(OUT, "rb") == before and "no place" not in done.stdout
    holds("other names of the same tensors, vocab.json with merges.txt", is_same, done.stdout, done)


def check_bert():
    verdict("a vocabulary of bytes", not_refused(export("bert"), ".*is a vocabulary of bytes"))
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters)]
    write(W + "/bert/vocab.txt", "\n".join(words + ["the", "##ing", "é", "中", "#", "##"]) + "\n")
    exported("BERT, f16", "bert", "--pool", "cls", kind="f16", **{"bert.pooling_type": 2})
    lower = ("key", "tokenizer_config.json", "do_lower_case", "true")
    said = exported("BERT, lower case, f32", edited("bert", lower), **{"bert.pooling_type": 1})
    left = "no place for bert.pooler, cls.predictions, cls.seq_relationship; left out"
    holds("BERT: what is left out is named", left in said, said)


WTE = "transformer.wte.weight"
REFUSED = [  # model, what the line says, flags of the export, an edit
    ("gpt2", "activation_function\": .gelu. cannot be expressed in GGUF", "",
     ("key", "config.json", "activation_function", '"gelu"')),
    ("gpt2", "has the number .*vocab_size is 200", "", ("key", "config.json", "vocab_size", "200")),
    ("gpt2", f"--type q8_0: tensor {WTE} has rows of 48 values", "--type q8_0", ("set", WTE, "0", "1")),
    ("gpt2", f"tensor {WTE}: holds 100000, too large for f16", "--type f16", ("set", WTE, "0", "1e5")),
    ("gpt2", f"tensor {WTE}: holds values that are not finite", "", ("set", WTE, "0", "nan")),
    ("bert", r"vocab.txt: has no \[MASK\]", "", ("sub", "vocab.txt", r"\[MASK\]", "[MUSK]")),
    ("bert", "are both .* in GGUF", "", ("sub", "vocab.txt", "##a\n", "##▁b\n")),
]
for program, name, flags in [(sys.argv[1], "gpt2", "-e L=2,C=48,NH=3,F=96,T=32 -x 20 -l 1e-2"),
                             (sys.argv[1], "untied", "-e L=2,C=64,NH=2,F=96,T=32,V=400,tied=0 -x 2"),
                             (sys.argv[2], "bert", "-e L=2,C=48,NH=3,F=96,T=32 -x 2")]:
    data = CORPUS + ("/bert" if name == "bert" else "") + "/train.bin"
    done = run(os.path.abspath(program), *f"{flags} -v 0 -s 0 -n 0 -o {W}/{name} -i {data}".split())
    verdict(f"a {name} to export", failure(done))
    shutil.rmtree(f"{W}/{name}/ckpt")
check_gpt2()
check_bert()
for model, pattern, flags, words in REFUSED:
    folder, before = edited(model, words), os.listdir(W)
    why = not_refused(export(folder, *flags.split()), f".*{pattern}")
    verdict(f"refused: {pattern}", why or ("" if os.listdir(W) == before else "files are left"))
finish()
