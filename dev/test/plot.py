#!/usr/bin/env python3
"""scripts/plot.py: what it reads of logs, and what its pictures have: `python3 dev/test/plot.py`."""
import importlib.util
import json
import os
import sys
import tempfile

from verdicts import ROOT, equal, failure, finish, read, script, skip, verdict, write

work = tempfile.TemporaryDirectory()
W = work.name
os.environ["MPLCONFIGDIR"] = W + "/mpl"
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import plot  # noqa: E402


def log(name, lines):
    lines = [{"model": "d12"}, *lines]
    write(f"{W}/{name}/log.jsonl", "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))


def step(s, loss, **more):
    return {"step": s, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "ms": 500.0, "tok_s": 2000.0, "mfu": 0.4, **more}


# Logs of both kinds of model; one that went back to step 3, with a torn line, a line that is not an object, nulls, and
# unknown members.
nan, accuracy = float("nan"), {"val_mlm_loss": 3.0, "val_mlm_accuracy": 0.4, "val_nsp_loss": 0.5, "val_f1": 0.7}
log("gpt2", [*(step(s, 9.0 - s / 50, val_loss=3.0, lambada_perplexity=90.0) for s in range(1, 301))])
log("bert", [*(step(s, 3.6, mlm_loss=3.0, nsp_loss=0.6) for s in range(1, 11)), {"step": 10, **accuracy}])
log("back", [*(step(s, 5.0, val_loss=5.0) for s in range(1, 6)), '{"step": 6, "lo', "[1]", step(3, 4.0), step(4, None),
             step(5, nan), {"step": 2, "checkpoint_ms": 7, "new": "text", "odd": [1]}, '{"step": 6, "l'])
run = plot.Run(W + "/back")
equal("a log that went back, torn, with null and NaN",
      repr((run.series("loss"), run.series("val_loss"), sorted(run.members))),
      repr((([1, 2, 3, 4, 5], [5.0, 5.0, 4.0, nan, nan]), ([1, 2], [5.0, 5.0]),
            ["checkpoint_ms", "grad_norm", "loss", "lr", "mfu", "ms", "tok_s", "val_loss"])))
if not importlib.util.find_spec("matplotlib"):
    skip("pictures", f"{sys.executable} has no matplotlib (pip install matplotlib)")
    finish()
done = script("scripts/plot.py", "gpt2", "bert", "back", "--output", "all.svg", cwd=W)
verdict("several runs", failure(done) or ("" if "all.svg: 10 panels of 3 runs" in done.stdout else done.stdout))
picture = read(W + "/all.svg") if done.returncode == 0 else ""
verdict("panels", ", ".join(title for title in ("LAMBADA perplexity", "bert") if f"<!-- {title} -->" not in picture))
finish()
