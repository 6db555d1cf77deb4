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
TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
VOCABULARY = json.loads(read(CORPUS + "/vocab.json"))
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the ##ing é 中 a ##a # ##".split()
SPELLED = "[PAD] [UNK] [CLS] [SEP] [MASK] \u2581the ing \u2581é \u2581中 \u2581a a \u2581# \u2581##".split()
TOKENS = {  # number: (token in GGUF's spelling, its type)
    "gpt2": {i: (t, NORMAL if i < 256 else CONTROL) for t, i in VOCABULARY.items()},
    "bert": {i: (t, NORMAL if i >= 5 else CONTROL) for i, t in enumerate(SPELLED)},
}
KEYS = {
    "gpt2": {"pre": "gpt-2", "merges": ["<|endoftext|> <|endoftext|>"], "add_bos_token": False, "bos_token_id": 256,
             "eos_token_id": 256},
    "bert": {"padding_token_id": 0, "unknown_token_id": 1, "bos_token_id": 2, "cls_token_id": 2,
             "seperator_token_id": 3, "mask_token_id": 4, "token_type_count": 2, "normalizer.lowercase": False,
             "normalizer.strip_accents": False},
}  # fmt: skip


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


def faults_of(directory, kind, more, given):
    """Where OUT is not what a model directory says; more tokens than those of the corpus, other keys of the file."""
    config = json.loads(read(directory + "/config.json"))
    reader, arch = gguf.GGUFReader(OUT), config["model_type"]
    found = {t.name: (t.tensor_type, tuple(map(int, t.shape[::-1])), t.data.tobytes()) for t in reader.tensors}
    wanted = tensors_of(directory, arch, kind)
    yield from (f"tensor {name}" for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    found = dict(enumerate(zip(fields.pop("tokenizer.ggml.tokens"), fields.pop("tokenizer.ggml.token_type"))))
    tokens = {**TOKENS[arch], **more}
    wanted = {i: tokens.get(i, (found[i][0], UNUSED)) for i in range(config["vocab_size"])}
    yield from (f"token {i}: {found[i]}" for i in wanted if found[i] != wanted[i])
    keys = {"general.architecture": arch, "general.name": os.path.basename(directory), "general.file_type": TYPES[kind],
            "general.quantization_version": 2, "tokenizer.ggml.model": arch}
    keys.update({f"tokenizer.ggml.{key}": value for key, value in KEYS[arch].items()})
    keys.update({f"{arch}.{key}": value for key, value in SIZES.items()})
    keys.update({f"{arch}.attention.layer_norm_epsilon": np.float32(1e-5 if arch == "gpt2" else 1e-12), **given})
    yield from (f"{k}: {fields.get(k)}" for k in fields.keys() | keys.keys() if fields.get(k) != keys.get(k))


def export(model, *flags):
    return script("dev/export_gguf.py", f"{W}/{model}", OUT, *flags)


def exported(name, model, *flags, kind="f32", more={}, **keys):
    """It is exported, and all of it is there."""
    done = export(model, "--type", kind, *flags)
    verdict(name, failure(done) or "; ".join([*faults_of(f"{W}/{model}", kind, more, keys)][:10]))
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
    model = edited("untied", ("sub", "tokenizer.json", r'"merges":\[\]', '"merges":["t h"]'),
                   ("key", "tokenizer.json", "added_tokens", json.dumps(added)))
    more = {390: ("<|user|>", CONTROL), 391: ("two words", USER_DEFINED)}
    keys = {"gpt2.embedding_length": 64, "gpt2.attention.head_count": 2, "tokenizer.ggml.merges": ["t h"]}
    exported("a head of its own, added tokens and rows without one, q8_0", model, kind="q8_0", more=more, **keys)
    # A model tuned for chat: its template, and the token that ends an answer.
    chat = [("key", "tokenizer_config.json", *words) for words in (("chat_template", '"é"'), ("eos_token", '"e"'))]
    keys = {"tokenizer.ggml.eos_token_id": VOCABULARY["e"], "tokenizer.chat_template": "é"}
    exported("a chat template", edited("gpt2", *chat), **keys)
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
    write(W + "/bert/vocab.txt", "\n".join(WORDS) + "\n")
    usual = {"bert.attention.causal": False, "bert.pooling_type": 1}
    exported("BERT, f16", "bert", "--pool", "cls", kind="f16", **{**usual, "bert.pooling_type": 2})
    usual.update({"tokenizer.ggml.normalizer.lowercase": True, "tokenizer.ggml.normalizer.strip_accents": True})
    said = exported("BERT, f32", edited("bert", ("key", "tokenizer_config.json", "do_lower_case", "true")), **usual)
    left = "no place for bert.pooler, cls.predictions, cls.seq_relationship; left out"
    holds("BERT: what is left out is named", left in said, said)


WTE = "transformer.wte.weight"
REFUSED = [  # model, what the line says, flags of the export, an edit
    ("gpt2", "activation_function\": .gelu. cannot be expressed in GGUF", "",
     ("key", "config.json", "activation_function", '"gelu"')),
    ("gpt2", "has the number .*vocab_size is 200", "", ("key", "config.json", "vocab_size", "200")),
    ("gpt2", f"tensor {WTE}: holds values that are not finite", "", ("set", WTE, "0", "nan")),
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
