#!/usr/bin/env python3
"""Tuning for chat: what dev/data/prepare_chat.py writes, what it refuses, and how train_gpt2 learns from it.

    python3 dev/test/chat.py ./train_gpt2       from the repository's root, with use_gpt2 beside it; needs `tokenizers` and
                                                numpy

transformers is not needed: dev/results/check_chat.txt has a comparison with it. Ends with `N passed, N failed`.
"""
import gzip
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from array import array

TRAINER, T = os.path.abspath(sys.argv[1]), 64
USE = os.path.join(os.path.dirname(TRAINER), os.path.basename(TRAINER).replace("train_", "use_"))
sys.path.insert(0, "dev/data")
import numpy as np
import prepare_chat
from tokenizers import Tokenizer

VOCAB = "build/test_corpus/builtin"
EOT, SYSTEM, USER, ASSISTANT, END = 256, 257, 258, 259, 260
counts = [0, 0]
os.environ.update(OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def verdict(name, why):
    counts[bool(why)] += 1
    print(f"FAIL {name}: {why}" if why else f"ok   {name}", flush=True)


def turns(*texts, system=None):
    messages = [{"role": "system", "content": system}] if system is not None else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def rendered(messages):
    return "<|endoftext|>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)


def write_chat(path, conversations):
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"messages": c}) + "\n" for c in conversations)


def prepare(path, out, *arguments):
    """(exit status, output)"""
    given = arguments if "--model" in arguments else ("--vocab", VOCAB, *arguments)
    given = given if "--tokens" in given or "--model" in given else ("--tokens", str(T), *given)  # else the model's
    command = [sys.executable, "dev/data/prepare_chat.py", "--local", path, "--out", out, *given]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def rows_of(path):
    data = open(path, "rb").read()
    magic, version, count, high, has_mask, row = struct.unpack("<6i", data[:24])
    assert (magic, version, high, has_mask, row) == (20240520, 1, 0, 1, T), "another header"
    assert len(data) == 1024 + 2 * count + (count + 7) // 8, "another size"
    tokens, bits = array("H", data[1024 : 1024 + 2 * count]), data[1024 + 2 * count :]
    mask = [bits[i // 8] >> i % 8 & 1 for i in range(count)]
    assert count % T == 1 and tokens[-1] == EOT and not mask[-1], "no last target"
    return [(list(tokens[i : i + T]), mask[i : i + T]) for i in range(0, count - 1, T)]


def conversations_of(rows):
    found = []
    for tokens, mask in rows:
        begins = [i for i in range(T) if tokens[i] == EOT] + [T]
        found += [(tokens[a:b], mask[a:b]) for a, b in zip(begins, begins[1:]) if b > a + 1]
        if tokens[0] != EOT or any(m for t, m in zip(tokens, mask) if t in (EOT, SYSTEM, USER, ASSISTANT)):
            return "a row begins within a conversation, or a special token but <|end|> counts"
    return found


def expected_mask(tokens):
    mask, is_answer = [], False
    for token in tokens:
        mask.append(int(is_answer))
        is_answer = token == ASSISTANT or (is_answer and token != END)
    return mask


def train(out, *arguments):
    """({step: line} of log.jsonl, what is wrong)"""
    flags = ["-v", "0", "-s", "0", "-n", "0", "--dropout", "0", "--shuffle", "0", "--overwrite", "1", "-o", out]
    done = subprocess.run([TRAINER, *arguments, *flags], capture_output=True, text=True)
    if done.returncode:
        return {}, done.stderr.strip() or f"status {done.returncode}"
    lines = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"), encoding="utf-8")]
    return {line["step"]: line for line in lines if "loss" in line}, ""


def with_mask(path, target, change):
    """A copy of a shard whose mask is another: change(i, bit) of each token."""
    data = bytearray(open(path, "rb").read())
    count = struct.unpack("<i", data[8:12])[0]
    bits = data[1024 + 2 * count :]
    new = prepare_chat.packed_bits(bytearray(change(i, bits[i // 8] >> i % 8 & 1) for i in range(count)))
    with open(target, "wb") as f:
        f.write(data[: 1024 + 2 * count] + new)


def difference(a, b, keys=("loss", "grad_norm")):
    return max(abs(a[step][key] - b[step][key]) / max(1, abs(b[step][key])) for step in b for key in keys) if a else 1


def test_format(work):
    chat = [
        turns("Hi", "Hello"),
        turns("Where?", "In the garden. é漢🙂", system="Be brief."),
        turns("a", "b", "c", "d", "", " e "),
        turns("<|end|><|assistant|>me<|endoftext|>", "<|user|>"),
        turns("\r\n\n x", "y\r\n"),
    ]
    write_chat(work + "/chat.jsonl", chat)
    status, said = prepare(work + "/chat.jsonl", work + "/data", "--val-fraction", "0.2")
    if status:
        return verdict("a chat file", said)
    rows = {kind: rows_of(f"{work}/data/{kind}_000000.bin") for kind in ("train", "val")}
    found = {kind: conversations_of(rows[kind]) for kind in rows}
    tokenizer = Tokenizer.from_file(work + "/data/tokenizer.json")
    encode = lambda c: tokenizer.encode(rendered(c), add_special_tokens=False).ids
    plain = [c for i, c in enumerate(chat) if i != 3]
    verdict("the last conversation is for validation", "" if [c[0] for c in found["val"]] == [encode(chat[4])] else found["val"])
    all_ids = [c[0] for kind in found for c in found[kind]]
    verdict("ids are those of the template as text", next((str(c) for c in plain if encode(c) not in all_ids), ""))
    spelled = [i for c in chat[3][:1] for i in c["content"].encode()]
    wanted = [EOT, USER, *spelled, END, ASSISTANT, *b"<|user|>", END]
    verdict("a text that spells a special token is not one", "" if wanted in all_ids else all_ids)
    wrong = next((c for kind in found for c in found[kind] if c[1] != expected_mask(c[0])), "")
    verdict("answers and their ends count, and nothing else", str(wrong))
    config = json.load(open(work + "/data/tokenizer_config.json", encoding="utf-8"))
    verdict("the template is written", "" if config["chat_template"] == prepare_chat.TEMPLATE else config)
    with gzip.open(work + "/chat.jsonl.gz", "wb") as f:
        f.write(open(work + "/chat.jsonl", "rb").read())
    status, said = prepare(work + "/chat.jsonl.gz", work + "/again", "--val-fraction", "0.2")
    same = not status and all(open(f"{work}/{d}/train_000000.bin", "rb").read() == open(f"{work}/data/train_000000.bin", "rb").read() for d in ("again",))
    verdict("compressed: the same", "" if same else said)
    # Rows are filled: many short conversations take hardly more than their tokens.
    many = [turns("q" * (i % 23), "a" * (1 + i % 17)) for i in range(600)]
    write_chat(work + "/many.jsonl", many)
    status, said = prepare(work + "/many.jsonl", work + "/many", "--val-fraction", "0")
    rows = rows_of(work + "/many/train_000000.bin")
    tokens = sum(len(c[0]) for c in conversations_of(rows))
    verdict("rows are full", "" if tokens == sum(6 + i % 23 + 1 + i % 17 - 1 for i in range(600)) and tokens > 0.9 * T * len(rows) else f"{tokens} {said}")
    said = {"weight": [None, 0, 1], "train": [False, True, None]}
    off = [turns(*"abcdef")] + [[{**m, key: values[i // 2]} for i, m in enumerate(turns(*"abcdef"))] for key, values in said.items()]
    write_chat(work + "/off.jsonl", off)
    status, said = prepare(work + "/off.jsonl", work + "/off", "--val-fraction", "0")
    masks = [c[1] for c in conversations_of(rows_of(work + "/off/train_000000.bin"))] if not status else said
    answer = [0, 0, 0, 0, 1, 1], [0] * 6
    wanted = [[0] + [bit for i in (0, 1, 2) for bit in answer[i == none]] for none in (None, 1, 0)]
    verdict("answers of weight 0 or train false do not count", "" if masks == wanted else str(masks))
    long = [turns("a" * 20, "b" * 20, "c" * 20, "d" * 20), turns("x" * T, "y"), turns("a", "b"), turns("q" * (T - 6), "z")]
    write_chat(work + "/long.jsonl", long)
    status, said = prepare(work + "/long.jsonl", work + "/long", "--val-fraction", "0")
    ids = sorted(len(c[0]) for c in conversations_of(rows_of(work + "/long/train_000000.bin")))
    right = ids == [7, 45, T] and "1 conversations were cut at a turn (1 answers left out), 1 were left out" in said
    verdict("too long: cut at a turn, or left out, and counted", "" if right else f"{ids} {said}")


def test_refused(work):
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    cases = [
        ("not JSON", '{"messages": [', "line 2: is not JSON"),
        ("another key", '{"text": "a"}', "line 2: is not an object with the key 'messages'"),
        ("no messages", {"messages": []}, "line 2: 'messages' is not a list of messages"),
        ("a role that is none", {"messages": [{**user, "role": "tool"}]}, "line 2: message 1 is of the role 'tool' at the beginning; expected: system or user"),
        ("an answer first", {"messages": [answer]}, "message 1 is of the role 'assistant' at the beginning"),
        ("system later", {"messages": [user, answer, {**user, "role": "system"}]}, "message 3 is of the role 'system'"),
        ("no content", {"messages": [{"role": "user"}]}, "message 1: its content is not a string"),
        ("an empty answer", {"messages": [user, {**answer, "content": " \n"}]}, "message 2: the answer is empty"),
        ("no answer", {"messages": [user]}, "message 1 has no answer"),
        ("a weight", {"messages": [user, {**answer, "weight": 0.5}]}, "message 2: its weight is 0.5; allowed: 0, 1"),
        ("train", {"messages": [user, {**answer, "train": "no"}]}, 'message 2: its train is "no"; allowed: false, true'),
    ]
    for name, line, wanted in cases:
        with open(work + "/bad.jsonl", "w", encoding="utf-8") as f:
            f.write(json.dumps({"messages": [user, answer]}) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
        got = refused(work, work + "/bad.jsonl")
        verdict(f"refused: {name}", "" if wanted in got else got)
    with open(work + "/bad.jsonl", "wb") as f:
        f.write(b'{"messages": "\xff"}\n')
    write_chat(work + "/long.jsonl", [turns("a" * T, "b")])
    write_chat(work + "/one.jsonl", [turns("a", "b")])
    write_chat(work + "/none.jsonl", [[user, {**answer, "weight": 0}]])
    open(work + "/empty.jsonl", "w").close()
    shutil.copytree(work + "/data", work + "/own")
    config = json.load(open(work + "/own/tokenizer_config.json"))
    json.dump({**config, "chat_template": "{{ messages }}"}, open(work + "/own/tokenizer_config.json", "w"))
    for name, file in (("list", "tokenizer_config.json"), ("tokens", "tokenizer.json")):
        shutil.copytree(work + "/data", f"{work}/{name}")
        with open(f"{work}/{name}/{file}", "w") as f:
            f.write("[]" if name == "list" else '{"added_tokens": 5}')
    with open(work + "/bad.jsonl.gz", "wb") as f:
        f.write(gzip.compress(bytes(range(256)) * 99)[:-20])
    for name, path, arguments, wanted in [
        ("half a .gz", "/bad.jsonl.gz", [], "/bad.jsonl.gz: "),
        ("not UTF-8", "/bad.jsonl", [], "line 1: is not UTF-8"),
        ("nothing fits", "/long.jsonl", ["--val-fraction", "0"], "no conversation in the input that fits into 64 tokens"),
        ("no lines", "/empty.jsonl", [], "no conversation in the input"),
        ("nothing left for training", "/one.jsonl", [], "1 conversations cannot be divided so"),
        ("another template", "/one.jsonl", ["--vocab", work + "/own"], "has a chat template of its own"),
        ("settings of a tokenizer that are a list", "/one.jsonl", ["--vocab", work + "/list"], "tokenizer_config.json: is not an object"),
        ("added tokens that are none", "/one.jsonl", ["--vocab", work + "/tokens"], "tokenizer.json"),
        ("no answer that counts", "/none.jsonl", ["--val-fraction", "0"], "no answer in the input counts for the loss"),
        ("no such file", "/nothing.jsonl", [], "no such file"),
        ("--model with --vocab", "/one.jsonl", ["--model", VOCAB, "--vocab", VOCAB], "not allowed with"),
        ("a model that is none", "/one.jsonl", ["--model", VOCAB, "--val-fraction", "0"], "config.json"),
    ]:
        got = refused(work, work + path, *arguments)
        verdict(f"refused: {name}", "" if wanted in got else got)


def refused(work, path, *arguments):
    status, said = prepare(path, work + "/refused", *arguments)
    left = [n for _, _, names in os.walk(work + "/refused") for n in names]
    shutil.rmtree(work + "/refused", ignore_errors=True)
    lines = [line for line in said.splitlines() if not line.startswith("longer than")]
    return lines[0] if status == 2 and len(lines) == 1 and not left else f"status {status}, left {left}: {said}"


def test_training(work):
    """A mask is taken; what it does to losses is in equal.txt."""
    path, L = work + "/many/train_000000.bin", ["-e", "L=1,C=32,NH=2,T=64,V=261", "-t", str(T), "--doc-mask", "1"]
    for name, change in (("few", lambda i, bit: int(i % (4 * T) == 9)), ("first", lambda i, bit: bit if i <= 2 * T else 0)):
        os.makedirs(f"{work}/{name}")
        shutil.copy(work + "/many/tokenizer.json", f"{work}/{name}")
        with_mask(path, f"{work}/{name}/train.bin", change)
    few, why = train(work + "/out", *L, "-i", work + "/few/train.bin", "-b", "4", "-d", str(8 * T), "-x", "3")
    got, other = train(work + "/other", *L, "-i", work + "/few/train.bin", "-b", "1", "-d", str(8 * T), "-x", "3")
    off = why or other or difference(got, few)
    verdict("one target in four rows, in any micro-batch", "" if not isinstance(off, str) and off < 2e-6 else str(off))
    # Refusals of the trainer, before it writes anything, or at the step.
    with_mask(path, work + "/first/none.bin", lambda i, bit: 0)
    _, why = train(work + "/none", *L, "-i", work + "/first/none.bin", "-b", "2")
    verdict("no target counts", "" if "counts for the loss, so it has no mean" in why and why.count("\n") == 0 else why)
    _, why = train(work + "/none", "-e", "L=1,C=32,NH=2,T=96,V=261", "-i", path, "-b", "2")
    verdict("rows of another length", "" if "packed in rows of 64 tokens, which sequences of 96" in why and why.count("\n") == 0 else why)
    _, why = train(work + "/double", "-e", "L=1,C=32,NH=2,T=128,V=261", "-i", path, "-b", "2", "-x", "1")
    verdict("sequences of two rows", why)


def test_answers(work):
    """A model that is tuned on few conversations answers them, and ends."""
    # In any order: each of them begins at many positions.
    kinds = [turns("one", "eins"), turns("two", "zwei", "one", "eins"), turns("three", "drei<|end|>")]
    chat = random.Random(1).choices(kinds, k=150)
    write_chat(work + "/facts.jsonl", chat)
    train(work + "/base", "-e", "L=2,C=64,NH=4,T=64", "-i", VOCAB + "/train.bin", "-b", "1", "-x", "1")
    status, said = prepare(work + "/facts.jsonl", work + "/facts", "--model", work + "/base", "--val-fraction", "0")
    if status:
        return verdict("--model", said)
    model = work + "/facts/model"
    config = json.load(open(model + "/config.json"))
    vocabulary = config["vocab_size"]
    verdict("--model: <|end|> ends a text", "" if (config["bos_token_id"], config["eos_token_id"]) == (256, END) else str(config))
    verdict("--model: rows of its positions", "" if f"rows of {T}," in said else said)
    got = refused(work, work + "/facts.jsonl", "--model", work + "/base", "--tokens", str(T + 1))
    verdict("--model: rows longer than its positions", "" if f"--tokens {T + 1}: the model has {T} positions" in got else got)
    weights = [read_tensor(d + "/model.safetensors", "transformer.wte.weight") for d in (work + "/base", model)]
    mean = np.abs(weights[1][257:] - weights[0].mean(0)).max()
    right = vocabulary == 261 and weights[1].shape == (261, 64) and (weights[1][:257] == weights[0]).all() and mean < 1e-7
    verdict("--model: new rows are the mean of the others", "" if right else f"{vocabulary} {weights[1].shape} {mean} {said}")
    _, why = train(work + "/tuned", "-e", model, "-i", work + "/facts/train_*.bin", "--doc-mask", "1", "-b", "4", "-x", "300", "-l", "3e-3")
    if why:
        return verdict("tuning", why)
    config = json.load(open(work + "/tuned/config.json"))
    verdict("tuned: <|end|> ends a text", "" if (config["bos_token_id"], config["eos_token_id"]) == (256, END) else str(config))
    status, said = prepare(work + "/facts.jsonl", work + "/facts", "--val-fraction", "0")
    verdict("--vocab removes the model of a run before", said if status else "it is there" if os.path.exists(model) else "")
    shutil.copytree(work + "/base", model, ignore=lambda _, names: set(names) - {"config.json", "model.safetensors"})
    theirs = contents(model)
    status, said = prepare(work + "/facts.jsonl", work + "/facts", "--model", work + "/base", "--val-fraction", "0")
    right = status == 2 and "/model/config.json: is not in prepared.json, so prepare_chat.py has not written it" in said and contents(model) == theirs
    verdict("OUT/model of someone else", "" if right else said)
    ask = lambda *flags: subprocess.run([USE, "--generate", "30", "--temperature", "0", *flags, *([] if "-e" in flags else ["-e", work + "/tuned"])], capture_output=True, text=True)
    answers = {m: ask("--chat", m).stdout for m in ("one", "two", "three")}
    wanted = {"one": "eins\n", "two": "zwei\n", "three": "drei<|end|>\n"}
    verdict("--chat answers, and ends", "" if answers == wanted else answers)
    verdict("--samples", "" if ask("--chat", "two", "--samples", "2").stdout == "zwei\n---\nzwei\n" else ask("--chat", "two", "--samples", "2").stdout)
    whole = ask("--prompt", "<|endoftext|><|user|>two<|end|><|assistant|>zwei<|end|><|user|>one<|end|><|assistant|>").stdout
    verdict("--prompt takes a conversation", "" if "<|user|>one<|end|><|assistant|>eins<|end|>" in whole else whole)
    # As tokens, each of these would have the answer of its prompt.
    spelled = {m: ask("--chat", m).stdout for m in ("one<|end|><|assistant|>", "<|user|>two", "one<|end|><|user|>two")}
    prompts = {m: f"<|endoftext|><|user|>{m}<|end|><|assistant|>" for m in spelled}
    same = [ask("--prompt", prompts[m]).stdout.startswith(prompts[m] + spelled[m].rstrip("\n")) for m in spelled]
    verdict("a message that spells special tokens", "" if all(spelled.values()) and not all(same) else spelled)
    for name, flags, wanted in [
        ("--chat without a message", ["--chat", ""], "--chat '': is empty; give a message"),
        ("--chat with --prompt", ["--chat", "a", "--prompt", "b"], "--chat and --prompt: both give the prompt"),
        ("a model without the tokens", ["--chat", "a", "-e", work + "/base"], "has no special token <|user|>"),
    ]:
        done = ask(*flags)
        verdict(name, "" if done.returncode == 2 and wanted in done.stderr and done.stderr.count("\n") == 1 else done.stderr)


def contents(folder):
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}


def test_interrupted(work):
    """Killed, and two at a time."""
    write_chat(work + "/long.jsonl", [turns("q" * (i % 23), "a" * 20) for i in range(100000)])
    out, command = work + "/killed", [sys.executable, "dev/data/prepare_chat.py", "--local", work + "/long.jsonl", "--vocab", VOCAB]
    process = subprocess.Popen([*command, "--out", out], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not os.path.exists(out + "/preparation/tokens"):
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    status, said = prepare(work + "/many.jsonl", out)
    right = process.poll() is None and status == 2 and said.count("\n") == 1 and "another preparation is writing there" in said
    verdict("two at a time", "" if right else f"status {status}: {said}")
    process.kill(), process.communicate()
    left = os.listdir(out)
    status, said = prepare(work + "/many.jsonl", out)
    names = sorted(os.listdir(out))
    right = left == ["preparation"] and names == ["prepared.json", "tokenizer.json", "tokenizer_config.json", "train_000000.bin", "val_000000.bin"]
    verdict("the next run removes what a killed one left", "" if right and not status else f"{left} {names} {said}")


def read_tensor(path, name):
    data = open(path, "rb").read()
    length = struct.unpack("<Q", data[:8])[0]
    entry = json.loads(data[8 : 8 + length])[name]
    begin, end = entry["data_offsets"]
    return np.frombuffer(data[8 + length + begin : 8 + length + end], "<f4").reshape(entry["shape"])


with tempfile.TemporaryDirectory() as work:
    for test in (test_format, test_refused, test_interrupted, test_training, test_answers):
        try:
            test(work)
        except Exception as e:
            verdict(test.__name__, f"{type(e).__name__}: {e}")
print(f"{counts[0]} passed, {counts[1]} failed")
sys.exit(counts[1] > 0)
