#!/usr/bin/env bash
# A Python environment at $1 with what dev/data needs. No error where it cannot be made: its users are then skipped.
set -u
[ -x "$1/bin/python" ] && "$1/bin/python" -c 'import tokenizers, numpy' 2>/dev/null && exit 0
mkdir -p "$(dirname "$1")"
if python3 -m venv "$1" && "$1/bin/python" -m pip install -q tokenizers numpy; then exit 0; fi
rm -rf "$1"
echo "no Python environment with tokenizers and numpy; tests of data preparation will be skipped"
