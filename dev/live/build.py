#!/usr/bin/env python3
"""docs/live/index.html, in which GPT-2 trains in the reader's browser: one file, of the programs and sources below.

    python3 dev/live/build.py            compile and write the page; `make live` calls it with build/zig's Python
    python3 dev/live/build.py --check    whether the page that is there was made from these sources

Both programs are compiled to WebAssembly by zig's C compiler, which ZIG names.
"""
import base64
import hashlib
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PAGE = "docs/live/index.html"
HEAD, EXPLAIN, SOURCE = "llmc/profile/head.html", "apps/explain/page.html", "dev/ladder/gpt2_in_one_file.c"
SOURCES = [HEAD, EXPLAIN, SOURCE, *("dev/data/" + name for name in ("builtin_corpus.c", "corpus_files.h", "world.h")),
           *("dev/live/" + name for name in "page.html worker.js live.c wasi.h build.py".split())]  # fmt: skip
TARGET = "--target=wasm32-wasi -std=c11 -s -I. -Ibuild".split()
CORPUS = ("-Os -D_GNU_SOURCE -D_WASI_EMULATED_PROCESS_CLOCKS -D_WASI_EMULATED_GETPID -include dev/live/wasi.h "
          "dev/data/builtin_corpus.c -lwasi-emulated-getpid").split()  # fmt: skip
MODEL = "-O2 -msimd128 -mexec-model=reactor -finstrument-functions dev/live/live.c".split()
POLICY = "script-src 'unsafe-inline'", "script-src 'unsafe-inline' 'wasm-unsafe-eval'; worker-src blob:"


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def sources_hash():
    return hashlib.sha256("\0".join(read(path) for path in SOURCES).encode()).hexdigest()


def compiled(name, flags):
    out = f"build/live/{name}.wasm"
    os.makedirs(os.path.join(ROOT, "build", "live"), exist_ok=True)
    subprocess.run([*os.environ.get("ZIG", "zig").split(), "cc", *TARGET, *flags, "-o", out], cwd=ROOT, check=True)
    with open(os.path.join(ROOT, out), "rb") as f:
        return base64.b64encode(f.read()).decode()


def check():
    """Why the page is not that of the sources, or nothing."""
    page = read(PAGE) if os.path.exists(os.path.join(ROOT, PAGE)) else ""
    if f'<meta name="sources" content="{sources_hash()}">' not in page:
        return f"{PAGE}: not made from these sources; make live"
    return ""


def main():
    if sys.argv[1:] == ["--check"]:
        sys.exit(check() or 0)
    head, marker = read(HEAD), "/*DATA*/null"
    data = {"corpus": compiled("corpus", CORPUS), "model": compiled("model", MODEL), "source": read(SOURCE),
            "worker": read("dev/live/worker.js"), "head": head, "explain": read(EXPLAIN)}  # fmt: skip
    made = f'<meta name="sources" content="{sources_hash()}">\n<title>'
    page = head.replace(*POLICY).replace(marker, json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"))
    os.makedirs(os.path.dirname(os.path.join(ROOT, PAGE)), exist_ok=True)
    with open(os.path.join(ROOT, PAGE), "w", encoding="utf-8") as f:
        f.write(page + read("dev/live/page.html").replace("<title>", made, 1))
    print(f"{PAGE}: {os.path.getsize(os.path.join(ROOT, PAGE))} bytes")
    sys.exit(check() or 0)


if __name__ == "__main__":
    main()
