#!/usr/bin/env python3
"""Model cards, and models to and from the Hub: upload.py, download.py and -e hub:NAME against a local server.

    python3 dev/test/hub.py TRAIN_GPT2        from the repository's root; uploads need `huggingface_hub`
"""
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile

from hub_server import Hub
from verdicts import CORPUS, contents, finish, holds, not_refused, read, run, script, skip
from verdicts import verdict, write

TRAINER = os.path.abspath(sys.argv[1])
work = tempfile.TemporaryDirectory()
W = work.name
shutil.copytree(CORPUS, W + "/data/builtin")
MODEL = "-e L=2,C=16,NH=2,T=16 -b 2 -l 1e-2 -u 3 -x 20 -v 5 -m 2 -s 0 -n 0"


def train(flags, *more):
    return run(TRAINER, *flags.split(), *more, cwd=W)


def card(done, path, *patterns, lacks="<b>"):
    """The card holds what matches each pattern, and nothing that matches `lacks`."""
    text = read(f"{W}/{path}/README.md")
    wrong = [p for p in patterns if not re.search(p, text, re.M)] + re.findall(lacks, text)
    holds(f"the card of {path}", not wrong, wrong, done)


def check_cards():
    done = train(MODEL, "-o", "straight")
    fingerprint = json.loads(read(W + "/straight/ckpt/00000020/trainer.json"))["train_data_fingerprint"]
    last = {}
    for line in read(W + "/straight/log.jsonl").splitlines():
        last.update(json.loads(line))
    card(done, "straight",
         r"^After step 20 of 20 by `train_gpt2`, commit `", r"^- validation: `val.bin`",
         rf"^- training: built-in data, fingerprint `{fingerprint:08x}`; 40 sequences", r"^- --lr `0.01`$",
         rf"^\| loss of the last step \| {last['loss']:.3f}", rf"^\| `val_loss` \| {last['val_loss']:.3f}\d* \| 20 \|",
         lacks=f"--(?:beta1|clip|output|threads)|{W}")
    # No folders of what was read, and nothing that Markdown or HTML takes for theirs.
    shutil.copytree(W + "/straight", W + "/hidden/start", ignore=shutil.ignore_patterns("ckpt", "log.jsonl"))
    shutil.copy(CORPUS + "/train.bin", W + "/hidden/train`|<b>\n.bin")
    done = train("-x 1 -v 0 -s 0 -n 0 -o odd -e hidden/start// -i", W + "/hidden/train`|<b>\n.bin")
    card(done, "odd", "^- --model `start`$", r"^- training: `train\?\|<b>\?.bin`, ", lacks="hidden|validation")
    # The average of the weights has results of its own.
    card(train(MODEL + " --ema 0.9 -o average"), "average/ema", "^The average of the weights of several steps",
         r"^\| `ema_val_loss` \| [0-9.]+ \| 20 \|", lacks="<!--|loss of the last|`val_loss`")
    # A README of the user's own stays, such as a card without the line that marks it; others are replaced.
    mine = re.sub("(?m)^<!--.*\n", "", read(W + "/straight/README.md"))
    write(W + "/kept/README.md", mine)
    done = train(MODEL + " --stop-after 2 -o kept")
    holds("a user's own card stays", read(W + "/kept/README.md") == mine and not done.stderr, done.stderr, done)
    shutil.copy(W + "/straight/README.md", W + "/kept/README.md")
    card(train("-y 1 -o kept --stop-after 10"), "kept", "^After step 10 of 20 ")
    card(train("-y 1 -o kept -v 0 --stop-after 12"), "kept", "^After step 12 ", r"^\| `val_loss` \| [0-9.]+ \| 10 ")


def same_text(name, source):
    """The same text as from the directory."""
    use = [TRAINER.replace("train_", "use_"), "--generate", "4", "--temperature", "0", "-e"]
    found, wanted = (run(*use, e, cwd=W).stdout for e in (source, "straight"))
    holds(name, found == wanted != "", repr(found))


def check_caches():
    """-e hub:NAME reads the cache of huggingface_hub, wherever variables say that it is."""
    for cache, name, variables in [
        ("home/.cache/huggingface/hub", "me/home", {}),
        ("home/hf/hub", "one", {"HF_HOME": "~/hf", "XDG_CACHE_HOME": W + "/xdg"}),
        ("cache", "me/cache", {"HF_HUB_CACHE": W + "/cache"}),
    ]:
        folder = f"{W}/{cache}/models--{name.replace('/', '--')}"
        shutil.copytree(W + "/hidden/start", folder + "/snapshots/1111")
        write(folder + "/refs/main", "1111")
        os.environ.update(variables, HOME=W + "/home")
        same_text(f"-e hub:{name}, {variables}", f"hub:{name}")
    same_text("-e hub: with a commit", "hub:me/cache@1111")
    card(train("-e hub:me/cache -x 2 -v 0 -s 0 -n 0 -o tuned"), "tuned", "^- --model `hub:me/cache`$")
    shutil.copytree(folder, W + "/cache/models--me--other")
    write(folder + "/refs/main", "../../models--me--other/snapshots/1111")
    says = f"-e hub:me/cache: is not in {W}/cache; fetch it once: python3 scripts/download.py me/cache$"
    verdict("a ref that names another directory", not_refused(train("-e hub:me/cache -o none"), says))


def refused(command, says):
    verdict(f"{command}: {says}", not_refused(script(*f"scripts/{command}".split(), cwd=W), says))


def check_hub(hub):
    """A model there and back, and what can be wrong."""
    refused("upload.py none me/model", "none: is not a model directory")
    refused("upload.py straight me/model", "refuses your token, or there is none: hf auth login")
    os.environ["HF_TOKEN"] = "local"
    shutil.copy(W + "/straight/ckpt/00000020/optimizer.safetensors", W + "/straight")
    done = script("scripts/upload.py", "straight", "me/model", cwd=W)
    holds("upload", "/me/model now; load it with -e hub:me/model\n" in done.stdout, done.stdout, done)
    kept = ["README.md", "config.json", "loss.svg", "merges.txt", "model.safetensors", "tokenizer.json",
            "tokenizer_config.json", "vocab.json"]
    ours, sent = contents(W + "/straight"), contents(hub.folder + "/me/model")
    holds("what a model needs was sent, and no more", sent == {name: ours[name] for name in kept}, sorted(sent))
    done = script("scripts/download.py", "me/model", cwd=W)
    snapshots = W + "/hub_home/hub/models--me--model/snapshots"
    holds("download", done.stdout == f"{snapshots}/{os.listdir(snapshots)[0]}\n", done.stdout, done)
    same_text("download, then -e hub:", "hub:me/model")
    refused("download.py me/none", "me/none: .* has no such repository")
    os.remove(hub.folder + "/me/model/model.safetensors")
    refused("download.py me/model", "me/model: its repository has no model.safetensors")
    os.environ["HF_ENDPOINT"] = "http://tiger:p@ss@127.0.0.1:1"
    secret = r"//\*\*\*@127.0.0.1:1 cannot be reached: (?!.*(tiger|ss@))"
    refused("download.py me/new", secret)


for variable in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_TOKEN"):
    os.environ.pop(variable, None)
check_cards()
check_caches()
del os.environ["HF_HUB_CACHE"]
os.environ.update(HF_HOME=W + "/hub_home", HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1")
if importlib.util.find_spec("huggingface_hub"):
    with Hub(W + "/server") as hub:
        os.environ["HF_ENDPOINT"] = hub.address
        check_hub(hub)
else:
    skip("hub", f"{sys.executable} has no huggingface_hub (pip install huggingface_hub)")
finish()
