#!/usr/bin/env python3
"""Test scripts/track.py with the real trackers, offline, and check that dev/test/trackers/ has the same signatures.

    python3 -m venv build/track && build/track/bin/pip install wandb mlflow
    build/track/bin/python dev/reference/check_track.py

A log of 1,000 steps is sent to each tracker in two parts; the second is killed midway. Then the tracker's data is read
back. Ends with status 1 if a number is missing or wrong, or more than one batch is there twice.
"""
import collections
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(HERE, "..", "..", "scripts", "track.py")
STAND_INS = os.path.join(HERE, "..", "test", "trackers")
STEPS, BATCH_LINES = 1000, 200


def lines_of(first, last):
    return [{"step": s, "loss": 5 - s / 1000, "grad_norm": 1.5} for s in range(first, last + 1)]


def records_of(path):
    """The records of a .wandb file: LevelDB's log format after seven bytes, in blocks of 32 KiB."""
    with open(path, "rb") as f:
        data = f.read()
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
        if kind in (0, 1, 4):
            whole = b""


def read_wandb(folder):
    from wandb.proto import wandb_internal_pb2

    for path, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".wandb"):
                for data in records_of(os.path.join(path, name)):
                    record = wandb_internal_pb2.Record()
                    record.ParseFromString(data)
                    row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                    for key in ("loss", "grad_norm"):
                        if key in row:
                            yield row["step"], key, row[key]


def read_mlflow(folder):
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("mine").experiment_id
    for run in client.search_runs([experiment]):
        for key in ("loss", "grad_norm"):
            for m in client.get_metric_history(run.info.run_id, key):
                yield m.step, key, m.value


def signature_faults(name):
    real = importlib.import_module(name)
    sys.path.append(STAND_INS)
    spec = importlib.util.spec_from_file_location(f"stand_in_{name}", os.path.join(STAND_INS, f"{name}.py"))
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    pairs = []
    if hasattr(stand_in, "init"):
        pairs.append(("init", stand_in.init, real.init))
    real_class = {"wandb": "Run", "mlflow": "MlflowClient"}[name]
    for method, ours in vars(getattr(stand_in, real_class)).items():
        if not method.startswith("_"):
            pairs.append((method, ours, getattr(getattr(real, real_class), method)))
    for call, ours, theirs in pairs:
        known = inspect.signature(theirs).parameters
        for parameter in list(inspect.signature(ours).parameters)[1 if call != "init" else 0 :]:
            if parameter not in known:
                yield f"{name}.{call} has no parameter {parameter}"


def read_back(name, folder):
    """In a process of its own: the libraries take their settings from the environment when they are imported."""
    done = subprocess.run([sys.executable, __file__, "--read", name, folder], check=True, capture_output=True, text=True)
    return map(tuple, json.loads(done.stdout.strip().split("\n")[-1]))


def check(name):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        os.mkdir(out)
        environment = {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
        environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        os.environ.update(environment)
        command = [sys.executable, SCRIPT, out, "--to", name, "--project", "mine"]
        values = [{"model": "d12", "steps": STEPS}, *lines_of(1, STEPS // 2)]
        with open(os.path.join(out, "log.jsonl"), "w") as f:
            f.write("".join(json.dumps(v) + "\n" for v in values))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(os.path.join(out, "log.jsonl"), "a") as f:
            f.write("".join(json.dumps(v) + "\n" for v in lines_of(STEPS // 2 + 1, STEPS)))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        state, pending = os.path.join(out, "track.json"), None
        while process.poll() is None and not pending:
            pending = json.load(open(state))["batch"]
            time.sleep(0.001)
        process.kill()
        process.wait()
        time.sleep(5)  # wandb's service writes what it was given
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = collections.Counter(read_back(name, folder))
    wanted = {(v["step"], key, v[key]) for v in lines_of(1, STEPS) for key in ("loss", "grad_norm")}
    twice = {k[0] for k, n in found.items() if n > 1}
    is_right = set(found) == wanted and len(twice) <= BATCH_LINES
    version = importlib.import_module(name).__version__
    print(f"{'ok  ' if is_right else 'FAIL'} {name} {version}: {len(found)} of {len(wanted)} numbers, {len(twice)} steps twice", flush=True)
    return not is_right


READERS = {"wandb": read_wandb, "mlflow": read_mlflow}


def main():
    failed = 0
    for name in READERS:
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"skip {name}: is not installed")
            continue
        for fault in signature_faults(name):
            print(f"FAIL {fault}")
            failed += 1
        failed += check(name)
    return failed > 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        print(json.dumps(list(READERS[sys.argv[2]](sys.argv[3]))))
        sys.exit(0)
    sys.exit(main())
