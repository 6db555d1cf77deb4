#!/usr/bin/env python3
"""Preparation of data: what is read and written, what is refused and spared, stops, and the net's stand-ins.

    python3 dev/test/prepare.py        from the repository's root; needs `tokenizers` and numpy

Data sets need `datasets`.
"""
import contextlib
import glob
import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib.util import find_spec

import numpy as np
from hub_server import Hub
from tokenizers import Tokenizer
from verdicts import (
    CORPUS, ROOT, contents, differ, failure, finish, holds, not_refused, read, script, skip, verdict, write
)  # fmt: skip

sys.path.insert(0, os.path.join(ROOT, "dev", "data"))
import documents  # noqa: E402
import prepare_bert  # noqa: E402
import prepare_chat  # noqa: E402
import prepare_gpt2  # noqa: E402

# Nothing here may reach, or be kept from, the real net.
for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
    os.environ.pop(name, None)
work = tempfile.TemporaryDirectory()
W = work.name
os.environ.update(HF_HOME=W + "/hf", HF_HUB_DISABLE_TELEMETRY="1", no_proxy="127.0.0.1")
VOCAB = {"gpt2": CORPUS, "bert": W + "/vocab.txt", "chat": CORPUS}
MAINS = {"gpt2": (prepare_gpt2.parse, prepare_gpt2.main), "bert": (prepare_bert.parse, prepare_bert.prepare),
         "chat": (prepare_chat.parse, prepare_chat.prepare)}  # fmt: skip
FILES = ["--local", *(f"{W}/jsonl/part{i}.jsonl" for i in range(3)), "--text-key", "body"]
TEXTS = sorted(glob.glob("build/test_corpus/text/00*.md"))


def words_of(kind, out, *arguments):
    vocab = [] if "--train-vocab" in arguments or "--vocab" in arguments else ["--vocab", VOCAB[kind]]
    return [f"dev/data/prepare_{kind}.py", *vocab, "--out", out, *arguments]


def prepare(kind, out, *arguments):
    """A preparation in this process, whose workers start with it."""
    more = () if kind == "chat" or "--processes" in arguments else ("--processes", "1")
    words, told = words_of(kind, out, *arguments, *more), (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(told[0]), contextlib.redirect_stderr(told[1]):
        status = documents.run(*MAINS[kind], words[1:])
    return subprocess.CompletedProcess(words, status, told[0].getvalue(), told[1].getvalue())


def same(name, done, out, wanted, says=""):
    verdict(name, failure(done) or ("" if says in done.stdout else f"it does not say {says!r}") or differ(out, wanted))


def refused(name, pattern, kind, *arguments, status=2):
    """Refused in a line, and nothing is written."""
    done = prepare(kind, W + "/refused", *arguments)
    left = os.path.isdir(W + "/refused") and os.listdir(W + "/refused")
    verdict(f"refused: {name}", not_refused(done, f"{pattern}", status) or (f"it left {left}" if left else ""))
    shutil.rmtree(W + "/refused", ignore_errors=True)


def tokens_in(out, kinds=("val", "train")):
    paths = [path for kind in kinds for path in sorted(glob.glob(f"{out}/{kind}_*.bin"))]
    return np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths]).tolist()


# ----------------------------------------------------------------------------------------------------------
# What is read


DOCUMENTS = ["first document\n", "second, with é\n"]
LINES = [json.dumps({"text": text}) for text in DOCUMENTS]
WIKI = "".join(f'<doc id="{i}" title="T">\n{text}</doc>\n' for i, text in enumerate(DOCUMENTS))
MARK = "\ufeff"


def archive():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as f:
        for i, text in enumerate(DOCUMENTS):
            entry = tarfile.TarInfo(f"{i}.json")  # plain text by another name
            entry.size = len(text.encode())
            f.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


def check_forms():
    """The same documents in every form that a file can have."""
    forms = {"a.txt": DOCUMENTS[0], "b.txt": DOCUMENTS[1].replace("\n", "\r\n"), "a.jsonl": "\r\n".join(LINES),
             "a.json": f"[{','.join(LINES)}]", "lines.json": "\n".join(LINES),
             "wiki": MARK + WIKI.replace("\n", "\r\n"), "wiki_00": "\n".join(LINES),
             "a.tar.gz": archive(), "wiki.gz": gzip.compress(WIKI.encode())}  # fmt: skip
    if find_spec("zstandard") and find_spec("pyarrow"):
        import pyarrow.parquet
        import zstandard

        forms["a.jsonl.zst"] = b"".join(zstandard.compress(f"{line}\n".encode()) for line in LINES)
        pyarrow.parquet.write_table(pyarrow.table({"id": [0, 1], "text": DOCUMENTS}), table := io.BytesIO())
        forms["a.parquet"] = table.getvalue()
    else:
        skip("Parquet and Zstandard", f"{sys.executable} has no pyarrow or no zstandard")
    for name, text in forms.items():
        write(f"{W}/form/{name}", text)
    for names in (["a.txt", "b.txt"], *([name] for name in list(forms)[2:])):
        done = prepare("gpt2", W + "/out", "--local", *(f"{W}/form/{name}" for name in names), "--val-tokens", "4")
        end = "" if names[0] in ("wiki", "wiki.gz") else "\n"  # <doc> is on lines of its own
        wanted = [t for text in DOCUMENTS for t in (256, *(text.rstrip() + end).encode())]
        holds(f"documents as {names}", not done.returncode and tokens_in(W + "/out") == wanted, "other tokens", done)


def check_eos():
    """A tokenizer without <|endoftext|> has another token between documents."""
    for name in ("vocab.json", "merges.txt"):
        write(f"{W}/eos/{name}", read(f"{CORPUS}/{name}").replace("<|endoftext|>", "</s>"))
    write(W + "/eos/special_tokens_map.json", '{"eos_token": {"content": "</s>"}}')
    done = prepare("gpt2", W + "/eos_out", *FILES, "--vocab", W + "/eos")
    holds("eos_token is the separator", tokens_in(W + "/eos_out") == tokens_in(W + "/gpt2"), "other tokens", done)


WORDS = '[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat ##s . ! ? dr it said " 3 [ ] mask'.split()
SENTENCES = [  # file, text, flags, what is found
    ("lines.txt", "The cat. Sat\n\n\nIt sat!\nthe CATS\n   \n[MASK]\n", "--lines",
     "the cat . sat\n\nit sat !\nthe cat ##s\n\n[ mask ]\n\n"),
    ("plain.txt", MARK + 'Dr. Cat sat. "The cats sat!" said it. the\n\nIt sat? 3 cats...\n', "",
     'dr . cat sat .\n" the cat ##s sat ! " said it . the\nit sat ?\n3 cat ##s . . .\n\n'),
    ("titles", '<doc id="1" title="It">\nIt\n\nThe cat. It sat.\n</doc>\n  <doc id="2" title="The">\nThe\n</doc>\n', "",
     "the cat .\nit sat .\n\n"),
]


def sentences_in(path):
    """The sentences of a file, a line each; a blank line comes after each document."""
    tokens, sentences, documents = np.fromfile(path, "<i4", 5)[2:].tolist()
    ids = np.fromfile(path, "<u2", tokens, offset=1024)
    numbers = np.fromfile(path, "<u4", sentences + documents + 2, offset=1024 + -(-2 * tokens // 4) * 4)
    begin, first, text = numbers[: sentences + 1], numbers[sentences + 1 :], ""
    for i in range(sentences):
        text += "\n" if i and i in first else ""
        text += " ".join(WORDS[k] for k in ids[begin[i] : begin[i + 1]]) + "\n"
    return text + "\n"


def check_sentences():
    """Sentences of a text, whichever way they are marked."""
    write(W + "/words/vocab.txt", MARK + "\n".join(WORDS) + "\n")
    for name, text, flags, wanted in SENTENCES:
        write(f"{W}/sentences/{name}", text)
        given = ["--local", f"{W}/sentences/{name}", "--vocab", W + "/words", "--val-fraction", "0"]
        done = prepare("bert", W + "/bert_out", *given, *flags.split())
        found = "".join(map(sentences_in, sorted(glob.glob(W + "/bert_out/*.bin"))))
        verdict(f"sentences: {name}", failure(done) or ("" if found == wanted else repr(found)))


def check_refusals():
    write(W + "/bad/a.parquet", b"PAR1\x15\xff")
    write(W + "/bad/a.GZ", gzip.compress(b"text"))
    tree = json.loads(read(CORPUS + "/tokenizer.json"))
    tree["pre_tokenizer"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}
    write(W + "/metaspace/tokenizer.json", json.dumps(tree))
    for name, kind, flags, pattern in [
        ("Parquet", "gpt2", f"--local {W}/bad/a.parquet", "(a.parquet: cannot be read|pip install pyarrow)"),
        ("gzip by another name", "chat", f"--local {W}/bad/a.GZ", "is compressed with gzip; decompress it first"),
        ("Metaspace", "gpt2", f"--local {TEXTS[0]} --vocab {W}/metaspace", "is Metaspace; only byte-level"),
        ("few tokens", "gpt2", f"--local {TEXTS[0]} --train-vocab 256", "the bytes and .* alone take 257"),
        ("onto the vocabulary", "bert", f"--local {TEXTS[0]} --vocab {W}/refused/vocab.txt", "would be overwritten"),
        ("a data set of many parts", "gpt2", "--dataset http://a:b@c:d:e", r"http://\*\*\*@c:d:e: is not NAME"),
    ]:
        refused(name, pattern, kind, *flags.split())


# ----------------------------------------------------------------------------------------------------------
# Vocabularies that are made


def check_vocabularies():
    """The same in every run, by any number of threads; GPT-2's ids are those of the library."""
    for kind, *flags in (("gpt2", "400", "--val-fraction", "0.1"), ("bert", "1000", "--lines")):
        for threads in ("1", "3"):
            os.environ["RAYON_NUM_THREADS"] = threads
            words = words_of(kind, f"{W}/{kind}_own{threads}", "--local", *TEXTS, "--train-vocab", *flags)
            done = script(*words, "--processes", "1")
        same(f"{kind}: a vocabulary, the same by three threads", done, f"{W}/{kind}_own1", f"{W}/{kind}_own3")
    del os.environ["RAYON_NUM_THREADS"]
    tokenizer = Tokenizer.from_file(W + "/gpt2_own1/tokenizer.json")
    wanted = [i for path in TEXTS for i in (399, *tokenizer.encode(read(path)).ids)]
    holds("its ids are the library's", tokens_in(W + "/gpt2_own1", ("train", "val")) == wanted, "other ids")


# ----------------------------------------------------------------------------------------------------------
# What a preparation did not write stays: refused with a line, and nothing changes


def check_theirs():
    out = W + "/box/out"
    for file, kind in (("preparation/notes.txt", "gpt2"), ("config.json", "bert"), ("train_000000.bin", "gpt2")):
        write(f"{out}/{file}", "mine")
        before = contents(W + "/box")
        why = not_refused(prepare(kind, out, "--local", TEXTS[0]), "out/.*: (was not|is not in prepared.json)")
        verdict(f"theirs: {file}", why or ("" if contents(W + "/box") == before else "something has changed"))
        shutil.rmtree(out)
    write(out + "/notes.txt", "mine")
    for flags in ("--shard-tokens 4000", ""):
        done = prepare("gpt2", out, "--local", TEXTS[0], "--val-fraction", "0", *flags.split())
    left = set(os.listdir(out)) - set(os.listdir(CORPUS))
    right = left == {"notes.txt", "prepared.json", "train_000000.bin"}
    holds("its own earlier files are replaced and removed", right, left, done)


# ----------------------------------------------------------------------------------------------------------
# Preparations that are interrupted


def make_text():
    """Documents of very different lengths, also empty ones, of several bytes a character; their vocabulary."""
    rng, words = random.Random(7), read(TEXTS[0]).split() + ["é漢🙂"]
    texts = [" ".join(rng.choices(words, k=rng.choice([0, 1, 20, 300, 900]))) for _ in range(1300)]
    texts[18] = "A line.\n\n\nAnother one. And a third!\n" * 40
    words = sorted({c for text in texts for c in text.lower() if not c.isspace()})
    write(VOCAB["bert"], "\n".join([*WORDS[:5], *words, *("##" + w for w in words)]) + "\n")
    for i in range(3):
        write(f"{W}/jsonl/part{i}.jsonl", "".join(json.dumps({"body": text}) + "\n" for text in texts[i::3]))
    return texts[::3] + texts[1::3] + texts[2::3]


def interrupted(number, kind, out, *arguments):
    """A preparation that got a signal once it had saved. Its workers end with it: they hold its pipes open."""
    words = words_of(kind, out, *arguments, "--save-every", "0")
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not os.path.exists(out + "/preparation/state.json"):
        time.sleep(0.01)
    process.send_signal(number)
    told = process.communicate(timeout=60)
    return subprocess.CompletedProcess(words, process.returncode, *told)


def check_interruptions():
    out, wanted, two = W + "/stopped", W + "/gpt2", (*FILES, "--processes", "2")
    done = interrupted(signal.SIGTERM, "gpt2", out, *two)
    verdict("SIGTERM", not_refused(done, "interrupted; .* the same command continues", 1))
    done = prepare("gpt2", out, *FILES, "--limit-tokens", "5000")
    verdict("other settings", not_refused(done, "another --limit-tokens"))
    same("then the same command", prepare("gpt2", out, *FILES), out, wanted, "continuing from there")
    for kind in ("gpt2", "bert"):
        out = f"{W}/killed_{kind}"
        holds(f"{kind}: killed in time", interrupted(signal.SIGKILL, kind, out, *two).returncode < 0)
        same(f"{kind}: killed", prepare(kind, out, *FILES), out, f"{W}/{kind}", "continuing from there")


def check_limits():
    """The first tokens only."""
    flags = [*FILES, "--val-fraction", "0"]
    prepare("gpt2", W + "/all", *flags)
    prepare("gpt2", W + "/limited", *flags, *"--limit-tokens 900001 --processes 2 --shard-tokens 70000".split())
    right = tokens_in(W + "/limited") == tokens_in(W + "/all")[:900001]
    holds("--limit-tokens, GPT-2", right, "not the first 900001")


# ----------------------------------------------------------------------------------------------------------
# From the net


def check_datasets(hub, texts):
    import pyarrow
    import pyarrow.parquet

    # Parquet files with several row groups, which are cut elsewhere than the .jsonl files.
    stories = W + "/net/roneneldan/TinyStories"
    os.makedirs(stories + "/data")
    for i in range(5):
        table = pyarrow.table({"id": list(range(260)), "text": texts[i * 260 : (i + 1) * 260]})
        pyarrow.parquet.write_table(table, f"{stories}/data/train-{i:05d}-of-00005.parquet", row_group_size=70)
    words = words_of("gpt2", W + "/data_jsonl", "--dataset", W + "/jsonl:::body", "--processes", "3")
    same("a directory of .jsonl files", script(*words), W + "/data_jsonl", W + "/gpt2")
    refused("no such column", "no column 'story'; there are id, text", "gpt2", "--dataset", stories + ":::story")
    os.environ["HF_ENDPOINT"] = hub.address
    done = script(*words_of("bert", W + "/hub_bert", "--dataset", "tinystories", "--processes", "2"))
    same("by name, of the hub", done, W + "/hub_bert", W + "/bert")


def main():
    texts = make_text()
    for check in (check_forms, check_sentences, check_vocabularies, check_theirs, check_refusals):
        check()
    for kind in ("gpt2", "bert"):
        verdict(f"prepare_{kind}.py", failure(prepare(kind, f"{W}/{kind}", *FILES)))
    for check in (check_eos, check_interruptions, check_limits):
        check()
    with Hub(W + "/net") as hub:
        if find_spec("datasets"):
            check_datasets(hub, texts)
        else:
            skip("datasets", f"{sys.executable} has no datasets library (pip install datasets)")
    finish()


main()
