#!/usr/bin/env python3
"""scripts/track.py with stand-ins for the trackers (dev/test/trackers): `python3 dev/test/track.py`."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from verdicts import ROOT, equal, failure, finish, not_refused, read, script, verdict, write

work = tempfile.TemporaryDirectory()
OUT, RECORD = work.name + "/out", work.name + "/record"
os.environ.update(PYTHONPATH=ROOT + "/dev/test/trackers", TRACK_RECORD=RECORD)


def put(last, ms=3.0):
    """A log up to a step; a checkpoint has its line after those of later steps, and a line is being written."""
    steps = [{"step": s, "loss": 1 / s, "grad_norm": None, "ms": ms} for s in range(1, last + 1)]
    lines = [{"model": "d12"}, {"step": 0, "val_loss": 9.0}, *steps, {"step": 7, "ckpt_ms": 9.0}]
    write(OUT + "/log.jsonl", "".join(json.dumps(v) + "\n" for v in lines) + '{"step": 999, "lo')


def is_sent(name, done, first, last, ms=3.0):
    """Whether just these steps were sent, with those that are the first also the settings and the other lines."""
    wanted = ["0 model d12", "0 val_loss 9.0", "7 ckpt_ms 9.0"] * (first == 1)
    wanted += [f"{s} {number}" for s in range(first, last + 1) for number in (f"loss {1 / s}", f"ms {ms}")]
    equal(name, (failure(done), sorted(read(RECORD).splitlines())), ("", sorted(wanted)))
    write(RECORD, "")


for to in ("wandb", "mlflow"):
    for last, first in ((420, 1), (410, 421), (500, 421)):  # a resumed training cuts the log back, and repeats steps
        put(last)
        is_sent(f"{to}: up to step {last}", script("scripts/track.py", OUT, "--to", to), first, max(last, first - 1))
put(30, 4.0)
process = subprocess.Popen([sys.executable, "scripts/track.py", OUT, "--follow"], stderr=subprocess.PIPE, text=True)
time.sleep(4)
put(40, 4.0)
time.sleep(4)
process.send_signal(signal.SIGINT)
process.wait(60)
is_sent("a new training, --follow, Ctrl-C", process, 1, 40, 4.0)
del os.environ["TRACK_RECORD"]
verdict("a tracker that fails", not_refused(script("scripts/track.py", OUT, "--to", "wandb"), "wandb: KeyError: ", 1))
finish()
