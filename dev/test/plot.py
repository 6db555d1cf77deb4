#!/usr/bin/env python3
"""scripts/plot.py: what it reads of logs, and that pictures are written: `python3 dev/test/plot.py`."""
import importlib.util
import json
import os
import re
import sys
import tempfile

from verdicts import ROOT, equal, failure, finish, not_refused, read, script, skip, verdict, write

work = tempfile.TemporaryDirectory()
W = work.name
os.environ["MPLCONFIGDIR"] = W + "/mpl"
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import plot  # noqa: E402


def step(s, loss, **more):
    return {"step": s, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "ms": 500.0, "tok_s": 2000.0, "mfu": 0.4, **more}


def log(name, lines, end=""):
    write(f"{W}/{name}/log.jsonl", "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines) + end)


# Logs of both kinds of model; one that went back to step 3, with a torn line, a line that is not an object, nulls, and
# unknown members; one without steps; one without anything.
settings, nan = {"model": "d12", "steps": 300}, float("nan")
evaluated = [{"step": 0, "val_loss": 9.0}, {"step": 300, "val_loss": 3.0}, {"step": 300, "lambada_acc": 0.2},
             {"step": 300, "hellaswag_acc": 0.3, "hellaswag_acc_norm": 0.31, "lambada_perplexity": 90.0}]
accuracy = {"val_mlm_loss": 3.0, "val_mlm_accuracy": 0.4, "val_nsp_loss": 0.5, "val_nsp_accuracy": 0.8, "val_f1": 0.7}
losses = {"mlm_loss": 3.0, "nsp_loss": 0.6, "seq_s": 64.0}
log("gpt2", [settings, *(step(s, 9.0 - s / 50) for s in range(1, 301)), *evaluated])
log("bert", [settings, *(step(s, 3.6, **losses) for s in range(1, 11)), {"step": 10, "val_loss": 3.5, **accuracy}])
log("back", [settings, *(step(s, 5.0) for s in range(1, 6)), {"step": 5, "val_loss": 5.0}, '{"step": 6, "lo', "[1]",
             step(3, 4.0), step(4, None), step(5, nan), {"step": 2, "checkpoint_ms": 7, "new": "text", "odd": [1]}],
    end='{"step": 6, "loss"')
log("begun", [settings])
log("empty", [])

run = plot.Run(W + "/back")
seconds = [round(3600 * hours, 3) for hours in run.hours]
equal("a log that went back, torn, with null and NaN",
      repr((run.series("loss"), run.series("val_loss"), sorted(run.members), run.tokens, seconds)),
      repr((([1, 2, 3, 4, 5], [5.0, 5.0, 4.0, nan, nan]), ([], []),
            ["checkpoint_ms", "grad_norm", "loss", "lr", "mfu", "ms", "tok_s", "val_loss"],
            [0.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0], [0.0, 0.5, 1.0, 1.5, 2.0, 2.5])))

for name, words, pattern in [
    ("no log", [W], "holds no log.jsonl"),
    ("no file", [W + "/none"], "no such file"),
    ("an empty log", [W + "/empty"], "holds no step yet"),
    ("a log without steps", [W + "/begun"], "holds no step yet"),
    ("not a log", ["README.md"], "is not a log"),
    ("another kind of picture", [W + "/gpt2", "--output", "x.jpg"], "must end in .png, .svg"),
]:
    verdict(name, not_refused(script("scripts/plot.py", *words), f".*{pattern}"))
if not importlib.util.find_spec("matplotlib"):
    skip("pictures", f"{sys.executable} has no matplotlib (pip install matplotlib)")
    finish()
runs = [f"{W}/{name}" for name in ("gpt2", "bert", "back", "empty")]
done = script("scripts/plot.py", *runs, "--x", "tokens", "--output", W + "/all.svg")
verdict("several runs", failure(done) or ("" if "all.svg: 12 panels of 3 runs" in done.stdout else done.stdout))
is_named = re.fullmatch("warning: .*empty/log.jsonl: holds no step yet.*\n", done.stderr)
verdict("a warning of the empty log", "" if is_named else done.stderr)
titles = ["Training loss", "Validation loss", "HellaSwag accuracy", "LAMBADA accuracy", "LAMBADA perplexity",
          "Validation: f1", "Masked tokens: loss", "Next sentence: loss", "Validation accuracy", "Tokens per second",
          "Gradient norm", "Learning rate", "gpt2", "bert", "back", "training tokens"]
picture = read(W + "/all.svg")
verdict("panels and legend", ", ".join(title for title in titles if f"<!-- {title} -->" not in picture))
done = script("scripts/plot.py", W + "/bert", "--x", "hours")
is_drawn = "9 panels" in done.stdout and read(W + "/bert/plot.png", "rb")[1:4] == b"PNG"
verdict("OUT/plot.png", failure(done) or ("" if is_drawn else done.stdout))
done = script("scripts/plot.py", W + "/gpt2", "--output", W + "/none/x.png")
verdict("where nothing can be written", not_refused(done, ".*cannot be written"))
finish()
