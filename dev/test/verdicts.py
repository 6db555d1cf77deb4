"""What tests in Python share: counted cases, runs of programs, and what a refusal is: a status and one line."""

import copy
import os
import re
import subprocess
import sys
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CORPUS = os.path.join(ROOT, "build", "test_corpus", "builtin")
counts, lock = {"passed": 0, "failed": 0, "skipped": 0}, threading.Lock()
# One thread, and none that spins; several ranks on one core.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0", LC_ALL="C.UTF-8")
os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def verdict(name, why=""):
    """Count a case, which is good where `why` is empty."""
    with lock:
        counts["failed" if why else "passed"] += 1
    print(f"FAIL {name}: {why}" if why else f"ok   {name}", flush=True)


def holds(name, right, found="", done=None):
    """Count a case, which is good where the program `done` has succeeded and what it left is right, else `found`."""
    verdict(name, (failure(done) if done else "") or ("" if right else str(found) or "it is not so"))


def skip(name, why):
    counts["skipped"] += 1
    print(f"skip {name}: {why}", flush=True)


def finish():
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    sys.exit(counts["failed"] > 0)


def equal(name, found, wanted):
    verdict(name, "" if found == wanted else f"{found!r}, not {wanted!r}")


def run(*command, limit=300, **settings):
    """A program that has ended, with what it printed."""
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **settings}
    return subprocess.run([str(word) if not isinstance(word, bytes) else word for word in command], timeout=limit,
                          stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", **settings)


def script(path, *arguments, **settings):
    """A script of the project that has ended."""
    return run(sys.executable, os.path.join(ROOT, path), *arguments, **settings)


def failure(done):
    """Why a run has not succeeded, or nothing."""
    return "" if done.returncode == 0 else f"status {done.returncode}: {done.stderr.strip()[-300:]}"


def not_refused(done, pattern, status=2):
    """Why a run has not ended with this status and one line of an error that matches, or nothing."""
    line = done.stderr.strip()
    if done.returncode != status or "\n" in line or not re.search(f"^error: .*{pattern}", line):
        return f"status {done.returncode}, {line[-400:]!r}, where {status} and {pattern!r} are promised"
    return ""


def changed(tree, place, value):
    """A copy of JSON whose value at PLACE, keys and numbers with "." between, is another; ...: is not there."""
    tree = copy.deepcopy(tree)
    *above, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    node = tree
    for key in above:
        node = node[key]
    node[last] = value
    if value is ...:
        del node[last]
    return tree


def read(path, mode="r"):
    with open(path, mode, encoding=None if "b" in mode else "utf-8") as f:
        return f.read()


def write(path, text):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as f:
        f.write(text if isinstance(text, bytes) else text.encode())


def contents(folder):
    """{path below the folder: bytes} of all files."""
    paths = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    return {os.path.relpath(path, folder): read(path, "rb") for path in paths}


def differ(a, b):
    """Why two folders do not hold the same files, or nothing."""
    a, b = contents(a), contents(b)
    return ", ".join(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))
