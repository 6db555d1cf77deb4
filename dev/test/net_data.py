#!/usr/bin/env python3
"""Data from stand-ins for the net (dev/test/hub_server.py), preparations that are killed, parts that are joined.

    python3 dev/test/net_data.py        from the repository's root; needs `tokenizers`, for data sets `datasets` too
"""
import contextlib
import fcntl
import gzip
import hashlib
import importlib.util
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from hub_server import Hub
from verdicts import CORPUS, ROOT, contents, differ, failure, finish, not_refused, read, script, skip, verdict, write

if not importlib.util.find_spec("tokenizers"):
    skip("net_data", f"{sys.executable} has no tokenizers library (pip install tokenizers)")
    finish()
sys.path.insert(0, os.path.join(ROOT, "dev", "data"))
import documents  # noqa: E402
import net  # noqa: E402
import prepare_bert  # noqa: E402
import prepare_gpt2  # noqa: E402

# Nothing here may reach, or be kept from, the real net.
for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
    os.environ.pop(name, None)
work = tempfile.TemporaryDirectory()
W = work.name
os.environ.update(HF_HOME=W + "/hf", HF_HUB_DISABLE_TELEMETRY="1", no_proxy="127.0.0.1")
VOCAB = {"gpt2": CORPUS, "bert": W + "/vocab.txt"}
FILES = ["--local", *(f"{W}/jsonl/part{i}.jsonl" for i in range(3)), "--text-key", "body"]
SHORT = ["--local", *(f"{W}/short/part{i}.jsonl" for i in range(3)), "--text-key", "body"]


def make_text():
    """Documents of very different lengths, also empty ones, of several bytes a character; their vocabulary."""
    rng, words = random.Random(7), read("build/test_corpus/text/000.md").split()
    sizes = [rng.choice([1, 20, 300, 900]) for _ in range(1300)]
    texts = [" ".join(rng.choices(words, k=size) + ["é漢🙂"] * rng.randrange(3)) for size in sizes]
    texts[17] = texts[640] = ""
    texts[18] = "A line.\n\n\nAnother one. And a third!\n" * 40
    words = sorted({c for text in texts for c in text.lower() if not c.isspace()})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *("##" + w for w in words)]
    write(VOCAB["bert"], "\n".join(words) + "\n")
    for i in range(3):
        lines = [json.dumps({"body": text, "n": i}) + "\n" for text in texts[i::3]]
        write(f"{W}/jsonl/part{i}.jsonl", "".join(lines))
        write(f"{W}/short/part{i}.jsonl", "".join(lines[:90]))
    write(W + "/one.jsonl", "".join(read(f"{W}/short/part{i}.jsonl") for i in range(3)))
    return texts[::3] + texts[1::3] + texts[2::3]


def words_of(kind, out, *arguments):
    return [f"dev/data/prepare_{kind}.py", "--vocab", VOCAB[kind], "--shard-tokens", "400000", "--out", out, *arguments]


def prepare(kind, out, *arguments):
    return script(*words_of(kind, out, *arguments))


def same(name, done, out, wanted, says=""):
    verdict(name, failure(done) or ("" if says in done.stdout else f"it does not say {says!r}") or differ(out, wanted))


def refused(name, pattern, *arguments, status=2):
    """Refused in a line, and nothing is written."""
    done = prepare("gpt2", W + "/refused", *arguments)
    left = os.path.isdir(W + "/refused") and os.listdir(W + "/refused")
    verdict(name, not_refused(done, pattern, status) or (f"it left {left}" if left else ""))
    shutil.rmtree(W + "/refused", ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------
# Preparations that are interrupted


def interrupted(by, kind, out, *arguments):
    """A preparation that was interrupted by by(its number, those of its workers) once it had saved anew."""
    state, words = out + "/preparation/state.json", words_of(kind, out, *arguments, "--save-every", "0")
    before, children = os.path.exists(state) and read(state), []
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        time.sleep(0.01)
        with contextlib.suppress(OSError):
            if read(state) != before:
                children = [int(pid) for pid in read(f"/proc/{process.pid}/task/{process.pid}/children").split()]
                by(process.pid, children)
                break
    done = subprocess.CompletedProcess(words, process.wait(), *process.communicate())
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        if time.monotonic() > end:
            verdict("workers end with their parent", f"{children} have not")
            break
        time.sleep(0.05)
    return done


def kill(pid, _):
    os.kill(pid, signal.SIGKILL)


def survives(name, kind, out, wanted, *arguments):
    """Killed three times and finished, the same as undisturbed."""
    kills = sum(interrupted(kill, kind, out, *arguments).returncode < 0 for _ in range(3))
    same(f"{name}, killed three times", prepare(kind, out, *arguments), out, wanted, "continuing from there")
    verdict("... two of them in time", "" if kills >= 2 else f"only {kills}")


def check_interruptions():
    out, wanted = W + "/stopped", W + "/gpt2"
    interrupted(kill, "gpt2", out, *FILES, "--processes", "1")
    done = prepare("gpt2", out, *FILES, "--limit-tokens", "5000")
    verdict("other settings", not_refused(done, "another --limit-tokens"))
    with open(out + "/preparation/preparation.lock", "a") as f:
        fcntl.lockf(f, fcntl.LOCK_EX)
        verdict("two at a time", not_refused(prepare("gpt2", out, *FILES), "another preparation is writing"))
    done = prepare("gpt2", out, *FILES, "--restart")
    same("--restart starts again", done, out, wanted)
    verdict("... and continues nothing", "it does" if "continuing" in done.stdout else "")
    for name, by, pattern in [
        ("SIGTERM", lambda pid, _: os.kill(pid, signal.SIGTERM), "interrupted; .* the same command continues"),
        ("a worker that is killed", lambda _, workers: os.kill(workers[-1], signal.SIGKILL),
         "a worker process was killed"),
    ]:
        verdict(name, not_refused(interrupted(by, "gpt2", out, *FILES, "--processes", "2"), pattern, 1))
        same(f"{name}, then the same command", prepare("gpt2", out, *FILES), out, wanted, "continuing from there")


def check_limits():
    """The first tokens only: for BERT of whole documents, by any number of processes."""
    tokens = {}
    for out, kind, *arguments in [("all", "gpt2"), ("limited", "gpt2", "--limit-tokens", "900001", "--processes", "2"),
                                  ("bert1", "bert", "--limit-tokens", "90001", "--processes", "1"),
                                  ("bert2", "bert", "--limit-tokens", "90001", "--processes", "2")]:
        prepare(kind, f"{W}/{out}", *FILES, "--val-fraction", "0", *arguments)
        found = sorted(contents(f"{W}/{out}").items())
        tokens[out] = b"".join(data[1024:] for name, data in found if name.startswith("train"))
    verdict("--limit-tokens, GPT-2", "" if tokens["limited"] == tokens["all"][: 2 * 900001] else "not the first 900001")
    is_right = tokens["bert1"] == tokens["bert2"] and 2 * 90001 <= len(tokens["bert1"]) < 2 * 120000
    verdict("--limit-tokens, BERT", "" if is_right else f"{[len(tokens[name]) for name in ('bert1', 'bert2')]} bytes")


# ----------------------------------------------------------------------------------------------------------
# Parts: joined they are what one run makes, and what cannot be joined is named

MAINS = {"gpt2": (prepare_gpt2.parse, prepare_gpt2.main), "bert": (prepare_bert.parse, prepare_bert.prepare)}


def part(kind, out, *arguments):
    """A preparation in this process, in small blocks: what is wrong, or nothing."""
    words = words_of(kind, out, "--processes", "1", "--shard-tokens", "60000", *arguments)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = documents.run(*MAINS[kind], words[1:])
    return "" if status == 0 else f"status {status}: {said.getvalue()}"


def make_parts(kind, out, count, *arguments):
    numbers = random.Random(count).sample(range(1, count + 1), count)
    return next(filter(None, (part(kind, out, "--part", f"{k}/{count}", *arguments) for k in numbers)), "")


def set_incomplete(path):
    write(path, json.dumps({**json.loads(read(path)), "complete": False}))


# What happens to parts 1 to 3 of 3 in a folder, and what --join says.
DAMAGES = [
    ("part 2 of 3: not in", lambda p: shutil.rmtree(p + "/2-of-3")),
    ("part 3/3: is there twice", lambda p: shutil.copytree(p + "/3-of-3", p + "/copy")),
    ("part 2/3: is of another preparation, with another --limit-tokens",
     lambda p: (shutil.rmtree(p + "/2-of-3"), shutil.copytree(W + "/limited_three/parts/2-of-3", p + "/2-of-3"))),
    ("part 2/3: is not finished", lambda p: set_incomplete(p + "/2-of-3/state.json")),
    ("part 1/3: ", lambda p: os.truncate(p + "/1-of-3/tokens", 10)),
    ("holds no state.json", lambda p: os.remove(p + "/3-of-3/state.json")),
    ("holds no parts to join", lambda p: [shutil.rmtree(f"{p}/{k}-of-3") for k in (1, 2, 3)]),
]


def check_parts():
    net.BATCH_CHARACTERS = 15000  # several blocks a file
    one_file = ["--local", W + "/one.jsonl", *SHORT[-2:]]
    limited = ["--limit-tokens", "150001", "--val-fraction", "0.05"]
    for kind in MAINS:
        for count, arguments in ((3, SHORT), (5, one_file), (4, SHORT + limited)):
            one, out = f"{W}/{kind}_one{count}", f"{W}/{kind}_parts{count}"
            why = part(kind, one, *arguments) or make_parts(kind, out, count, *arguments)
            verdict(f"{kind}: {count} parts", why or part(kind, out, *arguments, "--join") or differ(one, out))
    why = make_parts("gpt2", W + "/three", 3, *SHORT)
    verdict("three parts", why or make_parts("gpt2", W + "/limited_three", 3, *SHORT, "--limit-tokens", "9000"))
    for wanted, damage in DAMAGES:
        out = W + "/damaged"
        shutil.copytree(W + "/three", out)
        damage(out + "/parts")
        said, left = part("gpt2", out, *SHORT, "--join"), os.listdir(out)
        is_line = said.startswith("status 2: error:") and said.count("\n") == 1
        is_right = is_line and wanted in said and left == ["parts"]
        verdict(f"--join: {wanted}", "" if is_right else f"{said or 'accepted'}; {left}")
        shutil.rmtree(out)
    for text in ("0/3", "4/3", "a/b"):
        refused(f"--part {text}", "from 1 to N", *SHORT, "--part", text)


# ----------------------------------------------------------------------------------------------------------
# From the net


def check_addresses(hub):
    text, url = read(W + "/jsonl/part0.jsonl", "rb"), hub.address + "/files/"
    data = gzip.compress(text)
    write(W + "/net/files/part0.jsonl.gz", data)
    digest, there = hashlib.sha256(data).hexdigest(), ("--url", url + "part0.jsonl.gz", "--text-key", "body")
    prepare("gpt2", W + "/part", "--local", W + "/jsonl/part0.jsonl", "--text-key", "body")
    same("a file by its address", prepare("gpt2", W + "/url", *there, "--sha256", digest), W + "/url", W + "/part")
    refused("another sha256", f"has the sha256 {digest}, not 0000", *there, "--sha256", "0" * 64)
    refused("no such file there", "404", "--url", url + "none.txt")
    refused("no server there", r"http://\*\*\*@127.0.0.1:1/x.txt: cannot be fetched",
            "--url", "http://tiger:ftp@127.0.0.1:1/x.txt", status=1)
    refused("--sha256 without --url", "belongs to --url", *FILES, "--sha256", digest)
    refused("--revision without --dataset", "belongs to --dataset", *FILES, "--revision", "main")
    hub.cut = 1000
    refused("a connection that ends early", r"ended after 1000 of \d+ bytes", *there, status=1)
    hub.cut = None
    # What was fetched and is refused does not stay: the same command fetches it anew.
    for case, content in (("an empty file", ""), ("the same address once it has text", text)):
        write(W + "/net/files/moved.txt", content)
        done = prepare("gpt2", W + "/moved", "--url", url + "moved.txt")
        verdict(case, failure(done) if content else not_refused(done, "no text in the input"))


CARD = """---
dataset_info:
- config_name: 20231101.en
  features: [{name: id, dtype: int64}, {name: text, dtype: string}]
  splits: [{name: train, num_bytes: 1, num_examples: 1300}]
  download_size: 1
  dataset_size: 1
configs:
- config_name: 20231101.en
  data_files: [{split: train, path: 20231101.en/train-*}]
---
"""


def check_datasets(hub, texts):
    import pyarrow
    import pyarrow.parquet

    # Parquet files with several row groups, which are cut elsewhere than the .jsonl files.
    for place in ("roneneldan/TinyStories/data", "wikimedia/wikipedia/20231101.en"):
        os.makedirs(f"{W}/net/{place}")
        for i in range(5):
            table = pyarrow.table({"id": list(range(260)), "text": texts[i * 260 : (i + 1) * 260]})
            pyarrow.parquet.write_table(table, f"{W}/net/{place}/train-{i:05d}-of-00005.parquet", row_group_size=70)
    write(W + "/net/wikimedia/wikipedia/README.md", CARD)
    parquet, jsonl = W + "/net/roneneldan/TinyStories", W + "/jsonl:::body"
    words = ("--dataset", jsonl, "--processes", "3")
    survives("a directory of .jsonl files", "gpt2", W + "/data_jsonl", W + "/gpt2", *words)
    refused("no such column", "no column 'story'; there are id, text", "--dataset", parquet + ":::story")
    refused("no such split", "cannot be opened", "--dataset", parquet + "::test")
    refused("a column of numbers", "'id' of document 1 is not a string", "--dataset", parquet + ":::id")
    # By name, from a hub. A data set that changes between two parts of a preparation is read as it was.
    os.environ["HF_ENDPOINT"] = hub.address
    same("of the hub", prepare("gpt2", W + "/stories", "--dataset", "tinystories"), W + "/stories", W + "/gpt2")
    words, out, commits = ("--dataset", "wikipedia", "--processes", "2"), W + "/hub_bert", []
    for go_on in (lambda: interrupted(kill, "bert", out, *words), lambda: prepare("bert", out, *words)):
        hub.requests.clear()
        done = go_on()
        read_from = [request.partition("wikipedia/resolve/")[2][:40] for request in hub.requests]
        commits.append({commit for commit in read_from if commit})
        write(W + "/net/wikimedia/wikipedia/notes.txt", "Another commit.")
    same("of the hub, BERT, killed", done, out, W + "/bert", "continuing from there")
    verdict("it is read as it was", "" if commits[0] == commits[1] and len(commits[0]) == 1 else f"commits {commits}")
    refused("no such data set", "cannot be opened: .*Not Found", "--dataset", "nobody/nothing")


def main():
    texts = make_text()
    for kind in VOCAB:
        verdict(f"prepare_{kind}.py", failure(prepare(kind, f"{W}/{kind}", *FILES)))
    survives("files", "gpt2", W + "/killed", W + "/gpt2", *FILES, "--processes", "2")
    for check in (check_interruptions, check_limits, check_parts):
        check()
    with Hub(W + "/net") as hub:
        check_addresses(hub)
        write(W + "/without/datasets.py", "raise ImportError")
        os.environ["PYTHONPATH"] = W + "/without"
        refused("the library is missing", "pip install datasets", "--dataset", "fineweb")
        del os.environ["PYTHONPATH"]
        refused("too many parts of a name", "is not NAME", "--dataset", "a:b:c:d:e")
        if importlib.util.find_spec("datasets"):
            check_datasets(hub, texts)
        else:
            skip("datasets", f"{sys.executable} has no datasets library (pip install datasets)")
    finish()


main()
