#!/usr/bin/env python3
"""GGUF files by dev/export_gguf.py, read back by dev/test/read_gguf.py; models that GGUF cannot express.

    python3 dev/test/gguf_files.py TRAIN_GPT2 TRAIN_BERT        from the repository's root; needs numpy and gguf
"""
import importlib.util
import json
import os
import shutil
import sys
import tempfile

from edit import edit
from verdicts import CORPUS, failure, finish, not_refused, read, run, script, skip, verdict, write

if not importlib.util.find_spec("gguf"):
    skip("gguf", f"{sys.executable} has no gguf (pip install gguf)")
    finish()
work = tempfile.TemporaryDirectory()
W = work.name
OUT = W + "/model.gguf"


def export(model, *flags):
    return script("dev/export_gguf.py", f"{W}/{model}", OUT, *flags)


def exported(name, model, kind="f32", *flags, keys=()):
    """It is exported, and all of it is there; the last file stays as OUT."""
    done = export(model, "--type", kind, *flags)
    back = script("dev/test/read_gguf.py", f"{W}/{model}", OUT, kind, *keys)
    verdict(name, failure(done) or (back.stdout + back.stderr if back.returncode else ""))
    return done.stdout


def same_file(name, model):
    """Exported, the same bytes as those of OUT now."""
    before, done = read(OUT, "rb"), export(model)
    verdict(name, failure(done) or ("" if read(OUT, "rb") == before else "other bytes"))
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
    for kind in ("bf16", "f16", "f32"):
        exported(f"GPT-2, {kind}", "gpt2", kind, keys=["*.feed_forward_length=96"])
    same_file("the same bytes again", "gpt2")
    # vocab.json and merges.txt alone say the same as tokenizer.json.
    same_file("vocab.json and merges.txt", edited("gpt2", ("gone", "tokenizer.json")))
    # The names of a wrapper's state, a tied embedding that save_model() stored under the head's name alone, and
    # buffers of attention as older transformers stored them.
    said = same_file("other names of the same tensors", edited(
        "gpt2", ("copy", "transformer.ln_f.bias", "h.0.attn.bias", "1"),
        ("copy", "transformer.ln_f.bias", "transformer.h.1.attn.masked_bias", "1"), ("prefix", "module."),
        ("save_model", "module.transformer.wte.weight", "module.lm_head.weight")))
    verdict("buffers are not named", said if "no place" in said else "")
    said = exported("GPT-2 with a head of its own and 16 rows without a token", "untied")
    verdict("... one tensor more", "" if " 17 tensors" in said else said)
    exported("GPT-2, q8_0", "untied", "q8_0")
    # Tokens that were added behind the vocabulary: a special one, and one of the user's. The test corpus' own have no
    # merges.
    added = json.loads(read(W + "/untied/tokenizer.json"))["added_tokens"]
    added.append({**added[0], "id": 390, "content": "<|user|>"})
    added.append({**added[0], "id": 391, "content": "two words", "special": False})
    exported("added tokens", edited("untied", ("key", "tokenizer.json", "added_tokens", json.dumps(added))))
    exported("a merge", edited("gpt2", ("sub", "tokenizer.json", r'"merges":\[\]', '"merges":["t h"]')))
    # A model tuned for chat: its template, in the settings or in a file of its own, and the token that ends an answer.
    template = ("key", "tokenizer_config.json", "chat_template", json.dumps("{{ messages[0].content }} é"))
    end = ("key", "tokenizer_config.json", "eos_token", '"e"')
    exported("a chat template", edited("gpt2", template, end))
    jinja = ("put", "chat_template.jinja", "{{ 1 }}\n{{ 2 }}\n")
    keys = ['tokenizer.chat_template="{{ 1 }}\\n{{ 2 }}"']
    exported("... in a file of its own", edited("gpt2", template, end, jinja), keys=keys)


def check_bert():
    verdict("a vocabulary of bytes", not_refused(export("bert"), ".*is a vocabulary of bytes"))
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters)]
    words += ["the", "ing", "##ing", "é", "中", "#", "##"]
    write(W + "/bert/vocab.txt", "\n".join(words) + "\n")
    for kind in ("f16", "bf16"):
        exported(f"BERT, {kind}", "bert", kind, "--pool", "cls", keys=["bert.pooling_type=2"])
    said = exported("BERT, f32", "bert", keys=["bert.pooling_type=1"])
    left = "no place for bert.pooler, cls.predictions, cls.seq_relationship; left out"
    verdict("BERT: what is left out is named", "" if left in said else said)
    same_file("BERT, a vocabulary with a byte order mark", edited("bert", ("sub", "vocab.txt", "^", r"\xef\xbb\xbf")))
    lower = ("key", "tokenizer_config.json", "do_lower_case", "true")
    exported("BERT, lower case", edited("bert", lower), keys=["bert.pooling_type=1"])


WTE = "transformer.wte.weight"
REFUSED = [  # model, what the line says, flags of the export, edits
    ("gpt2", "its chat template is not a text", "", ("key", "tokenizer_config.json", "chat_template", "5")),
    ("gpt2", "activation_function\": .gelu. cannot be expressed in GGUF", "",
     ("key", "config.json", "activation_function", '"gelu"')),
    ("gpt2", r"wpe.weight.*\[32, 48\].*\[31, 48\]", "", ("key", "config.json", "n_positions", "31")),
    ("gpt2", "has the number .*vocab_size is 200", "", ("key", "config.json", "vocab_size", "200")),
    ("gpt2", 'normalizer" is', "", ("key", "tokenizer.json", "normalizer", '{"type": "NFC"}')),
    ("gpt2", 'add_prefix_space" is True', "",
     ("sub", "tokenizer.json", r'"add_prefix_space": *false', '"add_prefix_space": true')),
    ("gpt2", "has no <.endoftext.>", "",
     ("key", "tokenizer.json", "added_tokens", "[]"), ("sub", "tokenizer.json", r"<.endoftext.>", "x")),
    ("gpt2", "--type q8_0: tensor transformer.wte.weight has rows of 48 values", "--type q8_0"),
    ("gpt2", "holds neither tokenizer.json nor vocab.json", "", ("gone", "tokenizer.json"), ("gone", "vocab.json")),
    ("gpt2", "data_offsets are damaged", "", ("cut", "model.safetensors", "-5")),
    ("gpt2", "tensor transformer.wte.weight: holds 100000, too large for f16", "--type f16", ("set", WTE, "0", "1e5")),
    ("gpt2", "tensor transformer.wte.weight: holds values that are not finite", "", ("set", WTE, "0", "nan")),
    ("untied", r"tensor transformer.wte.weight: holds 8.4e\+06, too large for q8_0", "--type q8_0",
     ("set", WTE, "0", "8.4e6")),
    ("bert", 'tokenize_chinese_chars" is False', "",
     ("key", "tokenizer_config.json", "tokenize_chinese_chars", "false")),
    ("bert", r"vocab.txt: has no \[MASK\]", "", ("sub", "vocab.txt", r"\[MASK\]", "[MUSK]")),
    ("bert", "a token is there twice", "", ("sub", "vocab.txt", "##a\n", "##b\n")),
    ("bert", "are both .* in GGUF", "", ("sub", "vocab.txt", "##a\n", "##▁b\n")),
]


def check_refusals():
    exported("q8_0 of a large weight", edited("untied", ("set", WTE, "0", "8.3e6")), "q8_0")
    for model, pattern, flags, *edits in REFUSED:
        before = sorted(os.listdir(W))
        why = not_refused(export(edited(model, *edits), *flags.split()), f".*{pattern}")
        verdict(f"refused: {pattern}", why or ("" if sorted(os.listdir(W)) == before else "files are left"))
    shutil.copy(W + "/bert/config.json", OUT)
    verdict("onto a file of another kind", not_refused(export("bert"), ".*model.gguf: exists and is not"))
    verdict("... which stays", "" if read(OUT) == read(W + "/bert/config.json") else "it is another")


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
