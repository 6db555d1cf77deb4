#!/usr/bin/env python3
"""Model cards, and models to and from the Hub: upload.py, download.py and -e hub:NAME against a local server.

    python3 dev/test/hub.py TRAIN_GPT2 TRAIN_BERT        from the repository's root; uploads need `huggingface_hub`
"""
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile

from hub_server import Hub
from verdicts import CORPUS, contents, equal, failure, finish, holds, not_refused, read, run, script, skip
from verdicts import verdict, write

GPT2, BERT = map(os.path.abspath, sys.argv[1:3])
USE = GPT2.replace("train_", "use_")
work = tempfile.TemporaryDirectory()
W = work.name
shutil.copytree(CORPUS, W + "/data/builtin")
MODEL = "-e L=2,C=16,NH=2,T=16 -b 2 -l 1e-2 -u 3 -x 20 -v 5 -m 2 -s 0 -n 0"


def train(flags, *more, program=GPT2):
    return run(program, *flags.split(), *more, cwd=W)


def card(done, path, *patterns, lacks=()):
    """The card holds what matches each pattern, and nothing that matches one of `lacks`."""
    text = read(f"{W}/{path}/README.md")
    why = failure(done) or next((f"no {p!r}" for p in patterns if not re.search(p, text, re.M)), "")
    verdict(f"the card of {path}", why or next((f"it has {p!r}" for p in lacks if re.search(p, text, re.M)), ""))


def check_cards():
    done = train(MODEL, "-o", "straight")
    fingerprint = json.loads(read(W + "/straight/ckpt/00000020/trainer.json"))["train_data_fingerprint"]
    last = {}
    for line in read(W + "/straight/log.jsonl").splitlines():
        last.update(json.loads(line))
    card(done, "straight",
         r"^# GPT2LMHeadModel, [0-9,]+ parameters$", r"^After step 20 of 20 by `train_gpt2`, commit `",
         r"^- n_embd: `16`$", rf"^- training: built-in data, fingerprint `{fingerprint:08x}`; 40 sequences",
         r"^- validation: `val.bin`", r"^- --lr `0.01`$", r"^- --model `L=2,C=16,NH=2,T=16`$",
         rf"^\| loss of the last step \| {last['loss']:.3f}", rf"^\| `val_loss` \| {last['val_loss']:.3f}\d* \| 20 \|",
         r"^from transformers import AutoTokenizer, GPT2LMHeadModel$", lacks=["--(beta1|clip|output|threads)", W])
    # No folders of what was read, and nothing that Markdown or HTML takes for theirs.
    shutil.copytree(W + "/straight", W + "/hidden/start", ignore=shutil.ignore_patterns("ckpt", "log.jsonl"))
    shutil.copy(CORPUS + "/train.bin", W + "/hidden/train`|<b>\n.bin")
    done = train("-x 1 -v 0 -s 0 -n 0 -o odd -e hidden/start// -i", W + "/hidden/train`|<b>\n.bin")
    card(done, "odd", "^- --model `start`$", r"^- training: `train\?\|<b>\?.bin`, ", lacks=["hidden", "validation"])
    # The average of the weights has results of its own.
    done = train(MODEL + " --ema 0.9 -o average")
    card(done, "average/ema", "^The average of the weights of several steps", "^tokenizer = ",
         r"^\| `ema_val_loss` \| [0-9.]+ \| 20 \|", lacks=["<!--", "loss of the last", "`val_loss`"])
    done = train("-e L=1,C=16,NH=2,T=32 -x 2 -v 1 -n 0 -o bert", program=BERT)
    card(done, "bert", "^from transformers import AutoTokenizer, BertForPreTraining$", "`val_mlm_accuracy`")
    # A README of the user's own stays, in OUT, such as a card without the line that marks it; others are replaced.
    mine = re.sub("(?m)^<!--.*\n", "", read(W + "/straight/README.md"))
    write(W + "/kept/README.md", mine)
    done = train(MODEL + " --stop-after 2 -o kept")
    holds("a user's own card stays", read(W + "/kept/README.md") == mine and not done.stderr, done.stderr, done)
    shutil.copy(W + "/straight/README.md", W + "/kept/README.md")
    card(train("-y 1 -o kept --stop-after 10"), "kept", "^After step 10 of 20 ")


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


def use_cache(**variables):
    """The variables that name a cache are these, and no others."""
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    os.environ.update(variables, HOME=W + "/home")


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
        use_cache(**variables)
        same_text(f"-e hub:{name}, {variables}", f"hub:{name}")
    make_cached("cache", "me/other", "5555")
    same_text("-e hub: with a commit", "hub:me/cache@1111")
    card(train("-e hub:me/cache -x 2 -v 0 -s 0 -n 0 -o tuned"), "tuned", "^- --model `hub:me/cache`$")
    verdict("-e hub:, resumed", failure(train("-y 1 -o tuned -e hub:me/cache")))
    for name, model, ref in [("not in the cache", "me/none", None), ("no such revision", "me/cache@v2", None),
                             ("a ref to another directory", "me/cache", "../../models--me--other/snapshots/5555"),
                             ("half fetched", "me/cache", "1111")]:
        if ref:
            write(folder + "/refs/main", ref)
        if ref == "1111":
            os.remove(folder + "/snapshots/1111/model.safetensors")
        says = f"-e hub:{model}: is not in {W}/cache; fetch it once: python3 scripts/download.py {model}$"
        verdict(f"-e hub:, {name}", not_refused(train(f"-e hub:{model} -o none"), says))


# ---------------------------------------------------------------------------------------------------------
# Upload and download


def upload(*words):
    return script("scripts/upload.py", *words, cwd=W)


def download(name):
    return script("scripts/download.py", name, cwd=W)


def refused(command, pattern, done):
    verdict(f"{command}: {pattern}", not_refused(done, pattern))


def check_uploads(hub):
    there, os.environ["HF_ENDPOINT"] = hub.folder + "/me/model", hub.address
    os.mkdir(W + "/edited"), shutil.copy(W + "/straight/config.json", W + "/edited")
    for folder, name, says in [("none", "me/model", "none: is not a model directory"),
                               ("edited", "me/model", "has no weights"),
                               ("straight", "model", "is not ORGANIZATION/MODEL"),
                               ("straight", "me/model", "refuses your token, or there is none: hf auth login")]:
        refused("upload", says, upload(folder, name))
    os.environ["HF_TOKEN"] = "local"
    # Interrupted after the weights have arrived: they are not sent again.
    hub.fails = "POST .*/commit/"
    says = r"the test's own failure \(status 500\); give the same command again"
    refused("upload", says, upload("straight", "me/model"))
    done = upload("straight", "me/model")
    is_told = "/me/model now; load it with -e hub:me/model\n" in done.stdout
    holds("upload: given again", is_told, done.stdout, done)
    equal("upload: weights are sent once", sum(request.startswith("PUT") for request in hub.requests), 1)
    model = ["README.md", "config.json", "loss.svg", "merges.txt", "model.safetensors", "tokenizer.json",
             "tokenizer_config.json", "vocab.json"]
    ours = contents(W + "/straight")
    sent = contents(there)
    holds("upload: what a model needs, and no more", sent == {name: ours[name] for name in model}, sorted(sent))
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
    os.remove(hub.folder + "/me/bert/model.safetensors")
    for name, says in [("me/none", "me/none: .* has no such repository"), ("a b", "Repo id must"),
                       ("me/model@v2", "me/model: the repository has no such revision"),
                       ("me/bert", "me/bert: its repository has no model.safetensors")]:
        refused("download", says, download(name))
    hub.__exit__()
    refused("download", "download of me/new: http.* cannot be reached: .*refused", download("me/new"))
    os.environ["HF_ENDPOINT"] = hub.address.replace("//", "//tiger:p@ss@")
    done = upload("straight", "me/model")
    refused("upload", r"//\*\*\*@", done)
    holds("... and no part of a password is shown", not re.search("tiger|ss@", done.stderr), done.stderr)


check_cards()
check_caches()
use_cache(HF_HOME=W + "/hub_home", HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ.pop("HF_TOKEN", None)
write(W + "/without/huggingface_hub.py", "raise ImportError")
without = {**os.environ, "PYTHONPATH": W + "/without"}
for command in ("upload.py straight me/model", "download.py me/model"):
    done = script(*f"scripts/{command}".split(), cwd=W, env=without)
    refused(command, "huggingface_hub is missing: pip install", done)
if importlib.util.find_spec("huggingface_hub"):
    with Hub(W + "/server") as hub:
        check_uploads(hub)
        check_downloads(hub)
else:
    skip("hub", f"{sys.executable} has no huggingface_hub (pip install huggingface_hub)")
finish()
