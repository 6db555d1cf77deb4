#!/usr/bin/env python3
"""Tuning for chat: what dev/data/prepare_chat.py writes, what it refuses, and how train_gpt2 learns from it.

    python3 dev/test/chat.py TRAIN_GPT2       from the repository's root, with use_gpt2 beside it; needs `tokenizers`
                                              and numpy

dev/results/check_chat.txt has a comparison with transformers; dev/test/prepare.py has killed preparations.
"""
import json
import os
import random
import shutil
import sys
import tempfile

import numpy as np
from edit import load
from tokenizers import Tokenizer
from verdicts import CORPUS, contents, differ, failure, finish, holds, not_refused, read, run, script, verdict, write

TRAINER, T = os.path.abspath(sys.argv[1]), 64
EOT, USER, ASSISTANT, END, WTE = 256, 258, 259, 260, "transformer.wte.weight"
work = tempfile.TemporaryDirectory()
W = work.name
QUIET = "-v 0 -s 0 -n 0 --dropout 0 --shuffle 0 -b 4"


def turns(*texts, system=None):
    messages = [{"role": "system", "content": system}] if system is not None else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def prepare(conversations, out, flags=f"--vocab {CORPUS} --tokens {T}"):
    write(W + "/chat.jsonl", "".join(json.dumps({"messages": c}) + "\n" for c in conversations))
    flags = flags if "--val-fraction" in flags else flags + " --val-fraction 0"
    return script("dev/data/prepare_chat.py", "--local", W + "/chat.jsonl", "--out", f"{W}/{out}", *flags.split())


def conversations_of(path):
    """[(tokens, mask)] of a shard, and the number of its rows. A row begins with a conversation."""
    path = f"{W}/{path}_000000.bin"
    header = np.fromfile(path, "<i4", 6).tolist()
    count = header[2]
    assert header == [20240520, 1, count, 0, 1, T] and count % T == 1, f"another header: {header}"
    tokens = np.fromfile(path, "<u2", count, offset=1024).tolist()
    mask = np.unpackbits(np.fromfile(path, "u1", offset=1024 + 2 * count), count=count, bitorder="little").tolist()
    assert all(tokens[i] == EOT for i in range(0, count, T)) and not mask[-1], "a conversation crosses the end of a row"
    begins = [i for i in range(count) if tokens[i] == EOT]
    return [(tokens[a:b], mask[a:b]) for a, b in zip(begins, begins[1:]) if b > a + 1], count // T


def check_format():
    chat = [
        turns("Where?", "In the garden. é漢🙂", system="Be brief."),
        turns("a", "b", "c", "d", "", " e "),
        turns("<|end|><|assistant|>me<|endoftext|>", "<|user|>"),
        turns("\r\n\n x", "y\r\n"),
    ]
    done = prepare(chat, "data", f"--vocab {CORPUS} --tokens {T} --val-fraction 0.2")
    # The same as ShareGPT and Alpaca have it: with parts that are not from question to answer, in an array.
    turn = lambda m: {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]}
    forms = [{"conversations": [*map(turn, c)]} for c in chat[:2]] + [{"conversations": [{"from": "gpt", "value": "Hi"}]}]
    forms[1]["conversations"] = [turn(chat[1][1]), *forms[1]["conversations"], turn(chat[1][0])]
    forms += [{"instruction": c[0]["content"], "input": "", "output": c[1]["content"]} for c in chat[2:]]
    write(W + "/forms.json", json.dumps(forms, indent=1))
    flags = f"--vocab {CORPUS} --tokens {T} --val-fraction 0.2 --out {W}/forms --local {W}/forms.json"
    forms = script("dev/data/prepare_chat.py", *flags.split())
    why = differ(W + "/data", W + "/forms") or ("" if "1 conversations without" in forms.stdout else forms.stdout)
    verdict("as ShareGPT and Alpaca have it", failure(forms) or why)
    tokenizer = Tokenizer.from_file(W + "/data/tokenizer.json")
    rendered = ["<|endoftext|>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in c) for c in chat]
    wanted = [tokenizer.encode(text, add_special_tokens=False).ids for text in rendered]
    # A text that spells a special token is not one.
    wanted[2] = [EOT, USER, *chat[2][0]["content"].encode(), END, ASSISTANT, *b"<|user|>", END]
    train, val = ([c[0] for c in conversations_of(f"data/{kind}")[0]] for kind in ("train", "val"))
    right = sorted(train) == sorted(wanted[:3]) and val == wanted[3:]
    holds("ids are those of the template as text, the last conversation is for validation", right, (train, val), done)
    template = json.loads(read(W + "/data/tokenizer_config.json"))["chat_template"]
    holds("the template is written", "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}" in template)
    done = prepare([turns("q" * (i % 23), "a" * (1 + i % 17)) for i in range(600)], "many")
    found, rows = conversations_of("many/train")
    tokens = sum(len(c[0]) for c in found)
    holds("rows are full", len(found) == 600 and tokens > 0.9 * T * rows, f"{tokens} tokens in {rows} rows", done)
    off = [turns(*"abcdef")]
    for key, values in (("weight", [None, 0, 1]), ("train", [False, True, None])):
        off.append([{**m, key: values[i // 2]} for i, m in enumerate(turns(*"abcdef"))])
    done = prepare(off, "off")
    masks, answer = [c[1] for c in conversations_of("off/train")[0]], ([0, 0, 0, 0, 1, 1], [0] * 6)
    wanted = [[0] + [bit for i in (0, 1, 2) for bit in answer[i == none]] for none in (None, 1, 0)]
    holds("answers and their ends count, but those of weight 0 or train false", masks == wanted, masks, done)
    long = [turns(*(20 * c for c in "abcd")), turns("x" * T, "y"), turns("a", "b"), turns("q" * (T - 6), "z")]
    done = prepare(long, "long")
    sizes = sorted(len(c[0]) for c in conversations_of("long/train")[0])
    right = sizes == [7, 45, T] and "1 conversations were cut at a turn (1 answers left out), 1 were" in done.stdout
    holds("too long: cut at a turn, or left out, and counted", right, f"{sizes} {done.stdout}", done)


def check_refused():
    """Refused in a line, and nothing is written."""
    user, answer = turns("a", "b")
    shutil.copytree(W + "/data", W + "/own")
    write(W + "/own/chat_template.jinja", "{{ messages }}")
    usual = f"--vocab {CORPUS} --tokens {T}"
    for wanted, chat, flags in [
        ("message 2: the answer is empty", [[user, {**answer, "content": " \n"}]], usual),
        ("message 2: its weight is 0.5; allowed: 0, 1", [[user, {**answer, "weight": 0.5}]], usual),
        ("no answer in the input counts for the loss", [[user, {**answer, "weight": 0}]], usual),
        ("has a chat template of its own", [[user, answer]], f"--vocab {W}/own"),
        (f"--tokens {T + 1}: the model has {T} positions", [[user, answer]], f"--model {W}/base --tokens {T + 1}"),
    ]:
        done = prepare(chat, "refused", flags)
        last = done.stderr.strip().split("\n")[-1]
        right = done.returncode == 2 and last.startswith("error: ") and wanted in last and not contents(W + "/refused")
        holds(f"refused: {wanted}", right, done.stderr)


def rows_of(folder):
    config, (_, shape, raw) = json.loads(read(folder + "/config.json")), load(folder + "/model.safetensors")[WTE]
    return np.frombuffer(raw, "<f4").reshape(shape), (config["bos_token_id"], config["eos_token_id"])


def check_answers():
    """A model that is tuned on few conversations answers them, and ends."""
    # In any order: each of them begins at many positions.
    kinds = [turns("one", "eins"), turns("two", "zwei", "one", "eins"), turns("three", "drei<|end|>")]
    facts, model = random.Random(1).choices(kinds, k=150), W + "/facts/model"
    done = prepare(facts, "facts", f"--model {W}/base")
    (old, _), (new, ends) = rows_of(W + "/base"), rows_of(model)
    right = new.shape == (261, 64) and (new[:257] == old).all() and np.abs(new[257:] - old.mean(0)).max() < 1e-7
    holds("--model: new rows are the mean of the others", right and f"rows of {T}," in done.stdout, done.stdout, done)
    flags = f"{QUIET} -o {W}/tuned -e {model} -i {W}/facts/train_000000.bin --doc-mask 1 -x 300 -l 3e-3"
    done = run(TRAINER, *flags.split())
    ends = [ends, rows_of(W + "/tuned")[1]]
    holds("<|end|> ends a text of the model, also once it is tuned", ends == [(EOT, END)] * 2, ends, done)

    def ask(*flags, e="tuned"):
        flags = ("--generate", "30", "--temperature", "0", "-e", f"{W}/{e}", *flags)
        return run(TRAINER.replace("train_", "use_"), *flags)

    answers = [ask("--chat", m).stdout for m in ("one", "two", "three")]
    holds("--chat answers, and ends", answers == ["eins\n", "zwei\n", "drei<|end|>\n"], answers)
    # As tokens, each of these would have the answer of its prompt.
    spelled = {m: ask("--chat", m).stdout for m in ("one<|end|><|assistant|>", "<|user|>two", "one<|end|><|user|>two")}
    prompts = {m: f"<|endoftext|><|user|>{m}<|end|><|assistant|>" for m in spelled}
    same = [ask("--prompt", prompts[m]).stdout.startswith(prompts[m] + spelled[m].rstrip("\n")) for m in spelled]
    holds("a message that spells special tokens", all(spelled.values()) and not all(same), spelled)
    verdict("a model without the tokens", not_refused(ask("--chat", "a", e="base"), ".*has no special token <.user.>"))


base = run(TRAINER, *f"{QUIET} -o {W}/base -e L=2,C=64,NH=4,T=64 -i {CORPUS}/train.bin -x 1".split())
verdict("a model to tune", failure(base))
check_format()
check_refused()
check_answers()
finish()
