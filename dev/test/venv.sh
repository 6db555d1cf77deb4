#!/usr/bin/env bash
# A Python environment at $1 with what dev/data and scripts/plot.py need. No error where it cannot be made, or not all of it:
# the users of what is missing are then skipped.
set -u
has() { "$1/bin/python" -c "import $2" 2>/dev/null; }  # ENVIRONMENT MODULES
needed="tokenizers, numpy" more="datasets, tqdm, matplotlib, tensorboard"
[ -x "$1/bin/python" ] && has "$1" "$needed, $more" && exit 0
mkdir -p "$(dirname "$1")"
if ! python3 -m venv "$1" || ! "$1/bin/python" -m pip install -q ${needed//,/}; then
    rm -rf "$1"
    echo "no Python environment with tokenizers and numpy; tests of data preparation will be skipped"
    exit 0
fi
"$1/bin/python" -m pip install -q ${more//,/} || echo "no $more: tests of plots and of data sets from the net will be skipped"
