#!/usr/bin/env python3
"""Model cards, and models to and from the Hub: upload.py, download.py and -e hub:NAME against a local server.

    python3 dev/test/hub.py TRAIN_GPT2 TRAIN_BERT        from the repository's root; uploads need `huggingface_hub`
"""
import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import unittest.mock

from hub_server import Hub
from verdicts import CORPUS, contents, equal, failure, finish, holds, not_refused, read, run, script, skip
from verdicts import verdict, write

GPT2, BERT = map(os.path.abspath, sys.argv[1:3])
USE, TUNE = GPT2.replace("train_", "use_"), BERT.replace("train_", "finetune_")
work = tempfile.TemporaryDirectory()
W = work.name
shutil.copytree(CORPUS, W + "/data/builtin")
BASE = "-e L=2,C=16,NH=2,T=16 -b 2 -l 1e-2 -u 3 -s 0"
MODEL = BASE + " -x 20 -v 5 -m 2 -n 0"


def train(flags, *more, program=GPT2):
    return run(program, *flags.split(), *more, cwd=W)


def card(name, done, path, *patterns, lacks=()):
    """The card holds what matches each pattern, and nothing that matches one of `lacks`."""
    text = read(f"{W}/{path}/README.md")
    why = failure(done) or next((f"no {p!r}" for p in patterns if not re.search(p, text, re.M)), "")
    verdict(f"a card: {name}", why or next((f"it has {p!r}" for p in lacks if re.search(p, text, re.M)), ""))


# ---------------------------------------------------------------------------------------------------------
# Cards


def check_cards():
    done = train(MODEL, "-o", "straight")
    fingerprint = json.loads(read(W + "/straight/ckpt/00000020/trainer.json"))["train_data_fingerprint"]
    last = {}
    for line in read(W + "/straight/log.jsonl").splitlines():
        last.update(json.loads(line))
    card("a run", done, "straight",
         r"^# GPT2LMHeadModel, [0-9,]+ parameters$",
         r"^After step 20 of 20 by `train_gpt2`, commit `(unknown|.*[0-9a-f]{7}.*)`",
         r"^- n_embd: `16`$", rf"^- training: built-in data, fingerprint `{fingerprint:08x}`; 40 sequences",
         r"^- validation: `val.bin`", r"^- --lr `0.01`$", r"^- --model `L=2,C=16,NH=2,T=16`$",
         rf"^\| loss of the last step \| {last['loss']:.3f}", rf"^\| `val_loss` \| {last['val_loss']:.3f}\d* \| 20 \|",
         r"^from transformers import AutoTokenizer, GPT2LMHeadModel$",
         lacks=["--(beta1|clip|output|threads)", W])
    # Names of files with what Markdown and HTML could take for theirs.
    odd = "odd/train`|<b>\n.bin"
    os.mkdir(W + "/odd"), shutil.copy(CORPUS + "/train.bin", f"{W}/{odd}")
    for name, given, shown in [("a pattern", "odd/train*.bin", r"train\*.bin"),
                               ("an odd name", odd, r"train\?\|<b>\?.bin")]:
        done = train(BASE + " -x 1 -v 0 --overwrite 1 -o new", "-i", given)
        card(name, done, "new", f"^- training: `{shown}`, ", lacks=["validation"])
    shutil.copytree(W + "/straight", W + "/hidden/start", ignore=shutil.ignore_patterns("ckpt", "log.jsonl"))
    done = train("-x 1 -v 0 -s 0 -n 0 -o slashes -e", W + "/hidden/start//")
    card("no path of a model", done, "slashes", "^- --model `start`$", lacks=["hidden"])
    # The average of the weights has results of its own.
    done = train(BASE + " -d 64 -x 10 -v 5 -m 2 -n 0 --ema 0.9 -o average")
    card("the average", done, "average/ema", "^The average of the weights of several steps",
         r"^\| `ema_val_loss` \| [0-9.]+ \| 10 \|", "^tokenizer = ", lacks=["<!--", "loss of the last", "`val_loss`"])
    card("the weights beside it", done, "average", r"^\| `val_loss` \| [0-9.]+ \| 10 \|", lacks=["average", "ema_val"])
    done = train("-e L=1,C=16,NH=2,T=32 -x 2 -v 1 -n 0 -o bert", program=BERT)
    card("BERT", done, "bert", "^from transformers import AutoTokenizer, BertForPreTraining$", "`val_mlm_accuracy`")
    write(W + "/c.tsv", "0\tone\n1\ttwo\n")
    done = train("-e bert --task classify --labels 2 -i c.tsv -j c.tsv -t 16 -x 2 -n 0 -v 1 -o task", program=TUNE)
    card("a classifier", done, "task", "BertForSequenceClassification.from_pretrained", "^- --model `bert`$",
         "`val_accuracy`")
    # A README of the user's own stays, in OUT; a card is replaced by the next one.
    unmarked = re.sub("(?m)^<!--.*\n", "", read(W + "/straight/README.md"))
    for name, text, flags in [
        ("a user's own, a new run", "My notes\n", MODEL + " --stop-after 2"),
        ("a card without the line that marks it", unmarked, "-y 1 --stop-after 6"),
    ]:
        write(W + "/kept/README.md", text)
        done = train(flags, "-o", "kept")
        checkpoint = f"{W}/kept/ckpt/{int(flags.split()[-1]):08d}/README.md"
        why = failure(done) or done.stderr or ("" if read(W + "/kept/README.md") == text else "it was replaced")
        verdict(f"{name} stays", why or ("" if os.path.getsize(checkpoint) else "the checkpoint has none"))
    shutil.copy(W + "/straight/README.md", W + "/kept/README.md")
    card("replaced by the next one", train("-y 1 -o kept --stop-after 10"), "kept", "^After step 10 of 20 ")


# ---------------------------------------------------------------------------------------------------------
# -e hub:NAME, from a cache as huggingface_hub lays it out


def make_cached(cache, name, commit):
    """A model in a cache, whose files are links."""
    folder = f"{W}/{cache}/models--{name.replace('/', '--')}"
    for file, data in contents(W + "/hidden/start").items():
        write(f"{folder}/blobs/{file}", data)
        os.makedirs(f"{folder}/snapshots/{commit}", exist_ok=True)
        os.symlink(f"../../blobs/{file}", f"{folder}/snapshots/{commit}/{file}")
    write(folder + "/refs/main", commit)
    return folder


@contextlib.contextmanager
def environment(**values):
    """The variables that name a cache are these, and no others."""
    names = ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    with unittest.mock.patch.dict(os.environ, {"HOME": W + "/home"}):
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(values)
        yield


def same_text(name, source):
    """The same text as from the directory."""
    texts = [run(USE, "-e", e, "--generate", "4", "--temperature", "0", cwd=W).stdout for e in (source, "straight")]
    holds(name, texts[0] == texts[1] and texts[0], repr(texts[0]))


def check_caches():
    for cache, name, variables in [
        ("home/.cache/huggingface/hub", "me/home", {}),
        ("xdg/huggingface/hub", "me/xdg", {"XDG_CACHE_HOME": W + "/xdg"}),
        ("home/hf/hub", "one", {"HF_HOME": "~/hf", "XDG_CACHE_HOME": W + "/xdg"}),
        ("cache", "me/cache", {"HF_HUB_CACHE": W + "/cache", "HF_HOME": W + "/hf"}),
    ]:
        folder = make_cached(cache, name, "1111")
        with environment(**variables):
            same_text(f"-e hub:{name}, {variables}", f"hub:{name}")
    make_cached("cache", "me/other", "5555")
    with environment(HF_HUB_CACHE=W + "/cache"):
        same_text("-e hub: with a commit", "hub:me/cache@1111")
        done = train("-e hub:me/cache -x 2 -v 0 -s 0 -n 0 -o tuned")
        card("-e hub:", done, "tuned", "^- --model `hub:me/cache`$")
        verdict("-e hub:, resumed", failure(train("-y 1 -o tuned -e hub:me/cache")))
        for name, model, ref in [("not in the cache", "me/none", None), ("no such revision", "me/cache@v2", None),
                                 ("a ref to another directory", "me/cache", "../../models--me--other/snapshots/5555"),
                                 ("half fetched", "me/cache", "1111")]:
            if ref:
                write(folder + "/refs/main", ref)
            if ref == "1111":
                os.remove(folder + "/snapshots/1111/model.safetensors")
            pattern = f"-e hub:{model}: is not in {W}/cache; fetch it once: python3 scripts/download.py {model}$"
            why = not_refused(train(f"-e hub:{model} -o none"), pattern)
            verdict(f"-e hub:, {name}", why or ("it left files" if os.path.exists(W + "/none") else ""))


# ---------------------------------------------------------------------------------------------------------
# Upload and download


def upload(*words):
    return script("scripts/upload.py", *words, cwd=W)


def download(*words):
    return script("scripts/download.py", *words, cwd=W)


def refused(name, pattern, done):
    verdict(name, not_refused(done, pattern))


def check_directories():
    """What is refused before anything is sent."""
    os.mkdir(W + "/edited"), shutil.copy(W + "/straight/config.json", W + "/edited")
    refused("upload: no directory", "none: is not a model directory", upload("none", "me/model"))
    refused("upload: no weights", "has no weights", upload("edited", "me/model"))
    refused("upload: a name without an organization", "is not ORGANIZATION/MODEL", upload("straight", "model"))
    write(W + "/without/huggingface_hub.py", "raise ImportError")
    with unittest.mock.patch.dict(os.environ, {"PYTHONPATH": W + "/without"}):
        for name, done in (("upload", upload("straight", "me/model")), ("download", download("me/model"))):
            refused(f"{name}: the package is missing", "huggingface_hub is missing: pip install", done)


def check_uploads(hub):
    there = hub.folder + "/me/model"
    says = "refuses your token, or there is none: hf auth login, or set HF_TOKEN$"
    refused("upload: no token", says, upload("straight", "me/model"))
    os.environ["HF_TOKEN"] = "local"
    # Interrupted after the weights have arrived: they are not sent again.
    hub.fails = "POST .*/commit/"
    says = r"the test's own failure \(status 500\); give the same command again"
    refused("upload: the server fails", says, upload("straight", "me/model"))
    equal("upload: nothing is there yet", os.listdir(there), [])
    done = upload("straight", "me/model")
    is_told = re.search("straight: is .*/me/model now; load it with -e hub:me/model$", done.stdout, re.M)
    holds("upload: given again", is_told, done.stdout, done)
    equal("upload: weights are sent once", sum(request.startswith("PUT") for request in hub.requests), 1)
    sent, ours = contents(there), contents(W + "/straight")
    equal("upload: what a model needs, and no more", sorted(sent),
          ["README.md", "config.json", "loss.svg", "merges.txt", "model.safetensors", "tokenizer.json",
           "tokenizer_config.json", "vocab.json"])
    verdict("upload: the same bytes", ", ".join(name for name in sent if sent[name] != ours[name]))
    verdict("upload: a checkpoint", failure(upload("bert/ckpt/00000002", "me/bert")))
    left = [name for name in os.listdir(hub.folder + "/me/bert") if re.search("optimizer|trainer|manifest", name)]
    equal("upload: without its optimizer", left, [])


def check_downloads(hub):
    done = download("me/model")
    snapshots = W + "/hub_home/hub/models--me--model/snapshots"
    where = f"{snapshots}/{os.listdir(snapshots)[0]}\n"
    holds("download", done.stdout == where, f"{done.stdout!r}, not {where!r}", done)
    same_text("download, then -e hub:", "hub:me/model")
    hub.requests.clear()
    why = failure(download("hub:me/model"))
    verdict("download: once", why or ", ".join(r for r in hub.requests if "GET" in r and "/resolve/" in r))
    refused("download: no such repository", "me/none: .* has no such repository", download("me/none"))
    refused("download: no such revision", "me/model: the repository has no such revision", download("me/model@v2"))
    refused("download: no name", "Repo id must", download("a b"))
    os.remove(hub.folder + "/me/bert/model.safetensors")
    refused("download: no weights", "me/bert: its repository has no model.safetensors", download("me/bert"))


def check_no_network(address):
    says = "cannot be reached: .*refused"
    refused("download: no network", f"download of me/new: http.* {says}", download("me/new"))
    os.environ["HF_ENDPOINT"] = address.replace("//", "//tiger:p@ss@")
    done = upload("straight", "me/model")
    refused("upload: no network, and no password is shown", r"//\*\*\*@", done)
    holds("... nor a part of it", not re.search("tiger|ss@", done.stderr), done.stderr)


check_cards()
check_caches()
check_directories()
if importlib.util.find_spec("huggingface_hub"):
    own = {"HF_HOME": W + "/hub_home", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    with environment(**own), Hub(W + "/server") as hub:
        os.environ.pop("HF_TOKEN", None)
        os.environ["HF_ENDPOINT"] = hub.address
        check_uploads(hub)
        check_downloads(hub)
        hub.__exit__()
        check_no_network(hub.address)
else:
    skip("hub", f"{sys.executable} has no huggingface_hub (pip install huggingface_hub)")
finish()
