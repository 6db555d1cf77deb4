#!/usr/bin/env python3
"""Tuning for chat: what dev/data/prepare_chat.py writes, what it refuses, and how train_gpt2 learns from it.

    python3 dev/test/chat.py ./train_gpt2       from the repository's root, with use_gpt2 beside it; needs `tokenizers` and
                                                numpy

transformers is not needed: dev/results/check_chat.txt has a comparison with it.
"""
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
from runs import put_shard
from tokenizers import Tokenizer
from verdicts import CORPUS, ROOT, contents, failure, finish, holds, not_refused, read, run, script, verdict, write

sys.path.insert(0, os.path.join(ROOT, "dev", "data"))  # which adds dev
import prepare_chat  # noqa: E402
from model_dir import Weights  # noqa: E402

TRAINER, T = os.path.abspath(sys.argv[1]), 64
USE = os.path.join(os.path.dirname(TRAINER), os.path.basename(TRAINER).replace("train_", "use_"))
EOT, SYSTEM, USER, ASSISTANT, END = 256, 257, 258, 259, 260
work = tempfile.TemporaryDirectory()
W = work.name


def turns(*texts, system=None):
    messages = [{"role": "system", "content": system}] if system is not None else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def rendered(messages):
    return "<|endoftext|>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)


def write_chat(path, conversations):
    write(path, "".join(json.dumps({"messages": c}) + "\n" for c in conversations))


def prepare(path, out, *arguments):
    given = [] if "--model" in arguments else ["--tokens", T]
    given += [] if {"--model", "--vocab"} & {*arguments} else ["--vocab", CORPUS]
    given += [] if "--val-fraction" in arguments else ["--val-fraction", "0"]
    return script("dev/data/prepare_chat.py", "--local", path, "--out", out, *given, *arguments)


def conversations_of(path):
    """[(tokens, mask)] of a shard, and the number of its rows. A row begins with a conversation."""
    header = np.fromfile(path, "<i4", 6).tolist()
    count = header[2]
    assert header == [20240520, 1, count, 0, 1, T] and count % T == 1, f"another header: {header}"
    tokens = np.fromfile(path, "<u2", count, offset=1024).tolist()
    mask = np.unpackbits(np.fromfile(path, "u1", offset=1024 + 2 * count), count=count, bitorder="little").tolist()
    assert all(tokens[i] == EOT for i in range(0, count, T)) and not mask[-1], "a conversation crosses the end of a row"
    begins = [i for i in range(count) if tokens[i] == EOT]
    return [(tokens[a:b], mask[a:b]) for a, b in zip(begins, begins[1:]) if b > a + 1], count // T


def expected_mask(tokens):
    mask, is_answer = [], False
    for token in tokens:
        mask.append(int(is_answer))
        is_answer = token == ASSISTANT or (is_answer and token != END)
    return mask


def train(out, flags, *more):
    fixed = f"-v 0 -s 0 -n 0 --dropout 0 --shuffle 0 --overwrite 1 -o {W}/{out}"
    return run(TRAINER, *flags.split(), *more, *fixed.split())


def check_format():
    chat = [
        turns("Hi", "Hello"),
        turns("Where?", "In the garden. é漢🙂", system="Be brief."),
        turns("a", "b", "c", "d", "", " e "),
        turns("<|end|><|assistant|>me<|endoftext|>", "<|user|>"),
        turns("\r\n\n x", "y\r\n"),
    ]
    write_chat(W + "/chat.jsonl", chat)
    done = prepare(W + "/chat.jsonl", W + "/data", "--val-fraction", "0.2")
    verdict("a chat file", failure(done))
    found = {kind: conversations_of(f"{W}/data/{kind}_000000.bin")[0] for kind in ("train", "val")}
    tokenizer = Tokenizer.from_file(W + "/data/tokenizer.json")
    wanted = [tokenizer.encode(rendered(c), add_special_tokens=False).ids for c in chat]
    # A text that spells a special token is not one.
    wanted[3] = [EOT, USER, *chat[3][0]["content"].encode(), END, ASSISTANT, *b"<|user|>", END]
    ids = {kind: [c[0] for c in found[kind]] for kind in found}
    holds("ids are those of the template as text", sorted(ids["train"]) == sorted(wanted[:4]), ids)
    verdict("the last conversation is for validation", "" if ids["val"] == wanted[4:] else str(ids["val"]))
    wrong = next((c for kind in found for c in found[kind] if c[1] != expected_mask(c[0])), "")
    verdict("answers and their ends count, and nothing else", str(wrong))
    config = json.loads(read(W + "/data/tokenizer_config.json"))
    holds("the template is written", config["chat_template"] == prepare_chat.TEMPLATE, config)
    # Rows are filled: many short conversations take hardly more than their tokens.
    write(W + "/many.jsonl.gz", gzip.compress("".join(
        json.dumps({"messages": turns("q" * (i % 23), "a" * (1 + i % 17))}) + "\n" for i in range(600)).encode()))
    done = prepare(W + "/many.jsonl.gz", W + "/many")
    found, rows = conversations_of(W + "/many/train_000000.bin")
    tokens = sum(len(c[0]) for c in found)
    right = tokens == sum(6 + i % 23 + i % 17 for i in range(600)) and tokens > 0.9 * T * rows
    holds("rows are full", right, f"{tokens} tokens in {rows} rows", done)
    said = {"weight": [None, 0, 1], "train": [False, True, None]}
    off = [turns(*"abcdef")] + [[{**m, key: values[i // 2]} for i, m in enumerate(turns(*"abcdef"))] for key, values in said.items()]
    write_chat(W + "/off.jsonl", off)
    done = prepare(W + "/off.jsonl", W + "/off")
    masks, answer = [c[1] for c in conversations_of(W + "/off/train_000000.bin")[0]], ([0, 0, 0, 0, 1, 1], [0] * 6)
    wanted = [[0] + [bit for i in (0, 1, 2) for bit in answer[i == none]] for none in (None, 1, 0)]
    holds("answers of weight 0 or train false do not count", masks == wanted, str(masks), done)
    long = [turns("a" * 20, "b" * 20, "c" * 20, "d" * 20), turns("x" * T, "y"), turns("a", "b"), turns("q" * (T - 6), "z")]
    write_chat(W + "/long.jsonl", long)
    done = prepare(W + "/long.jsonl", W + "/long")
    sizes = sorted(len(c[0]) for c in conversations_of(W + "/long/train_000000.bin")[0])
    right = sizes == [7, 45, T] and "1 conversations were cut at a turn (1 answers left out), 1 were" in done.stdout
    holds("too long: cut at a turn, or left out, and counted", right, f"{sizes} {done.stdout}", done)


def refused(name, wanted, path, *arguments):
    """Refused in a line, and nothing is written."""
    done = prepare(W + path, W + "/refused", *arguments)
    left = contents(W + "/refused")
    verdict(f"refused: {name}", not_refused(done, f"{wanted}") or (f"it left {list(left)}" if left else ""))
    shutil.rmtree(W + "/refused", ignore_errors=True)


def check_refused():
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    good = json.dumps({"messages": [user, answer]}).encode()
    for wanted, line in [
        ("line 2: is not JSON", b'{"messages": ['),
        ("line 2: is not UTF-8", b'{"messages": "\xff"}'),
        ("line 2: is not an object with the key 'messages'", b'{"text": "a"}'),
        ("line 2: 'messages' is not a list of messages", []),
        ("message 1 is of the role 'tool' at the beginning; expected: system or user", [{**user, "role": "tool"}]),
        ("message 1 is of the role 'assistant' at the beginning", [answer]),
        ("message 3 is of the role 'system'", [user, answer, {**user, "role": "system"}]),
        ("message 1: its content is not a string", [{"role": "user"}]),
        ("message 2: the answer is empty", [user, {**answer, "content": " \n"}]),
        ("message 1 has no answer", [user]),
        ("message 2: its weight is 0.5; allowed: 0, 1", [user, {**answer, "weight": 0.5}]),
        ('message 2: its train is "no"; allowed: false, true', [user, {**answer, "train": "no"}]),
    ]:
        line = line if isinstance(line, bytes) else json.dumps({"messages": line}).encode()
        write(W + "/bad.jsonl", good + b"\n" + line + b"\n")
        refused(wanted, wanted, "/bad.jsonl")
    write_chat(W + "/huge.jsonl", [turns("a" * T, "b")])
    write_chat(W + "/one.jsonl", [turns("a", "b")])
    write_chat(W + "/none.jsonl", [[user, {**answer, "weight": 0}]])
    shutil.copytree(W + "/data", W + "/own")
    config = json.loads(read(W + "/own/tokenizer_config.json"))
    write(W + "/own/tokenizer_config.json", json.dumps({**config, "chat_template": "{{ messages }}"}))
    for path, arguments, wanted in [
        ("/one.jsonl", "--val-fraction 0.5", "1 conversations cannot be divided so"),
        ("/one.jsonl", f"--vocab {W}/own", "has a chat template of its own"),
        ("/one.jsonl", f"--model {CORPUS}", "config.json"),
        ("/one.jsonl", f"--model {W}/base --tokens {T + 1}", f"--tokens {T + 1}: the model has {T} positions"),
        ("/none.jsonl", "", "no answer in the input counts for the loss"),
    ]:
        refused(wanted, wanted, path, *arguments.split())
    done = prepare(W + "/huge.jsonl", W + "/refused")
    right = done.returncode == 2 and "no conversation in the input that fits into 64 tokens" in done.stderr
    verdict("refused: nothing fits", "" if right else done.stderr)


def check_interrupted():
    """Killed, and two at a time."""
    write_chat(W + "/long.jsonl", [turns("q" * (i % 23), "a" * 20) for i in range(100000)])
    out = W + "/killed"
    words = ["dev/data/prepare_chat.py", "--local", W + "/long.jsonl", "--vocab", CORPUS, "--out", out]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not os.path.exists(out + "/preparation/tokens"):
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    why = not_refused(prepare(W + "/many.jsonl.gz", out), ".*another preparation is writing there")
    verdict("two at a time", why or ("" if process.poll() is None else "the first had ended"))
    process.kill(), process.communicate()
    left, done = os.listdir(out), prepare(W + "/many.jsonl.gz", out)
    names = {*os.listdir(out)}
    right = names == {"prepared.json", "tokenizer.json", "tokenizer_config.json", "train_000000.bin"}
    holds("the next run removes what a killed one left", right and left == ["preparation"], f"{left} {names}", done)


def check_training():
    """A mask is taken; what it does to losses is in equal.txt."""
    path, small = W + "/many/train_000000.bin", f"-e L=1,C=32,NH=2,V=261 -b 2 -i {W}/no_target/train.bin"
    os.makedirs(W + "/no_target"), shutil.copy(W + "/many/tokenizer.json", W + "/no_target")
    put_shard(W + "/no_target/train.bin", [EOT] * (8 * T + 1), [0] * (8 * T + 1))
    done = train("none", f"{small} -t {T}")
    is_named = "counts for the loss, so it has no mean" in done.stderr
    holds("no target counts", done.returncode and is_named, done.stderr)
    done = train("none", f"-e L=1,C=32,NH=2,T=96,V=261 -b 2 -i {path}")
    verdict("rows of another length", not_refused(done, "packed in rows of 64 tokens, which sequences of 96"))
    verdict("sequences of two rows", failure(train("double", f"-e L=1,C=32,NH=2,T=128,V=261 -b 2 -x 1 -i {path}")))


def rows_of(folder):
    config = json.loads(read(folder + "/config.json"))
    wte = Weights(folder, "transformer.").get("transformer.wte.weight", (config["vocab_size"], 64))
    return wte, (config["bos_token_id"], config["eos_token_id"])


def check_answers():
    """A model that is tuned on few conversations answers them, and ends."""
    # In any order: each of them begins at many positions.
    kinds = [turns("one", "eins"), turns("two", "zwei", "one", "eins"), turns("three", "drei<|end|>")]
    write_chat(W + "/facts.jsonl", random.Random(1).choices(kinds, k=150))
    model = W + "/facts/model"
    done = prepare(W + "/facts.jsonl", W + "/facts", "--model", W + "/base")
    holds("--model: rows of its positions", f"rows of {T}," in done.stdout, done.stdout, done)
    (old, _), (new, ends) = rows_of(W + "/base"), rows_of(model)
    right = new.shape == (261, 64) and (new[:257] == old).all() and np.abs(new[257:] - old.mean(0)).max() < 1e-7
    verdict("--model: new rows are the mean of the others", "" if right else str(new.shape))
    done = train("tuned", f"-e {model} -i {W}/facts/train_000000.bin --doc-mask 1 -b 4 -x 300 -l 3e-3")
    ends = [ends, rows_of(W + "/tuned")[1]]
    holds("<|end|> ends a text of the model, also once it is tuned", ends == [(EOT, END)] * 2, ends, done)

    def ask(*flags, e=W + "/tuned"):
        return run(USE, "--generate", "30", "--temperature", "0", "-e", e, *flags)

    answers = {m: ask("--chat", m).stdout for m in ("one", "two", "three")}
    wanted = {"one": "eins\n", "two": "zwei\n", "three": "drei<|end|>\n"}
    holds("--chat answers, and ends", answers == wanted, answers)
    holds("--samples", ask("--chat", "two", "--samples", "2").stdout == "zwei\n---\nzwei\n", "other answers")
    whole = ask("--prompt", "<|endoftext|><|user|>two<|end|><|assistant|>zwei<|end|><|user|>one<|end|><|assistant|>").stdout
    holds("--prompt takes a conversation", "<|user|>one<|end|><|assistant|>eins<|end|>" in whole, whole)
    # As tokens, each of these would have the answer of its prompt.
    spelled = {m: ask("--chat", m).stdout for m in ("one<|end|><|assistant|>", "<|user|>two", "one<|end|><|user|>two")}
    prompts = {m: f"<|endoftext|><|user|>{m}<|end|><|assistant|>" for m in spelled}
    same = [ask("--prompt", prompts[m]).stdout.startswith(prompts[m] + spelled[m].rstrip("\n")) for m in spelled]
    holds("a message that spells special tokens", all(spelled.values()) and not all(same), spelled)
    for wanted, flags, e in [
        ("--chat '': is empty; give a message", ["--chat", ""], W + "/tuned"),
        ("--chat and --prompt: both give the prompt", ["--chat", "a", "--prompt", "b"], W + "/tuned"),
        ("has no special token <.user.>", ["--chat", "a"], W + "/base"),
    ]:
        verdict(f"refused: {wanted}", not_refused(ask(*flags, e=e), f".*{wanted}"))
    # The model of a run before is removed; that of someone else stays.
    done = prepare(W + "/facts.jsonl", W + "/facts")
    holds("--vocab removes the model of a run before", not os.path.exists(model), "it is there", done)
    shutil.copytree(W + "/base", model, ignore=lambda _, names: {*names} - {"config.json", "model.safetensors"})
    theirs = contents(model)
    done = prepare(W + "/facts.jsonl", W + "/facts", "--model", W + "/base")
    why = not_refused(done, "/model/config.json: is not in prepared.json")
    verdict("OUT/model of someone else", why or ("" if contents(model) == theirs else "it is another"))


done = train("base", f"-e L=2,C=64,NH=4,T=64 -i {CORPUS}/train.bin -b 1 -x 1")
verdict("a model to tune", failure(done))
for check in (check_format, check_refused, check_interrupted, check_training, check_answers):
    check()
finish()
