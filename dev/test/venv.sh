#!/usr/bin/env bash
# A Python environment at $1 with what dev/data, dev/export_gguf.py, scripts/plot.py, scripts/upload.py and the notebook
# of docs need. No error where it cannot be made, or not all of it:
# a line says so, and the users of what is missing are then skipped. Gives up soon where no package index answers.
set -u
has() { # ENVIRONMENT MODULES
    "$1/bin/python" -c "import importlib.util as u; exit(not all(map(u.find_spec, '$2'.split(', '))))" 2>/dev/null
}
get() { timeout 900 "$1/bin/python" -m pip --disable-pip-version-check --retries 0 --timeout 5 install -q ${2//,/} >/dev/null 2>&1; }
needed="tokenizers, numpy" more="gguf, datasets, tqdm, matplotlib, huggingface_hub, nbclient, ipykernel"
[ -x "$1/bin/python" ] && has "$1" "$needed, $more" && exit 0
mkdir -p "$(dirname "$1")"
if ! python3 -m venv "$1" >/dev/null 2>&1 || ! get "$1" "$needed"; then
    rm -rf "$1"
    echo "no Python environment with $needed (no venv, or no package index): tests of data preparation are skipped"
    exit 0
fi
get "$1" "$more" || echo "no $more (no package index): tests of plots, of data sets from the net, of GGUF files, of uploads and of the notebook are skipped"
