#!/usr/bin/env bash
# Data preparation and a real run on real text, where Python has the tokenizers library.
#
#     bash dev/test/prepare.sh TRAINER [TINYSHAKESPEARE.txt GPT2_BPE_FOLDER]
#
# Without the last two it looks for ../shared/data. PYTHON names the interpreter (default python3).
set -u
trainer=$(realpath "$1") python=${PYTHON:-python3}
text=${2:-../shared/data/tinyshakespeare/input.txt} vocab=${3:-../shared/data/gpt2-bpe}
passed=0 failed=0 skipped=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ok() { echo "ok   $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ "$failed" -eq 0 ]; exit; }

if ! "$python" -c 'import tokenizers' 2>/dev/null; then
    skip prepare_gpt2 "$python has no tokenizers library (pip install tokenizers)"
    finish
fi

# Two documents with the built-in corpus's own byte tokenizer: every byte a token, one separator before each document.
printf 'first document\n' >"$work/a.txt"
printf 'second, with \xc3\xa9\n' >"$work/b.txt"
if "$python" dev/data/prepare_gpt2.py --local "$work/a.txt" "$work/b.txt" --vocab data/builtin --val-tokens 4 \
    --out "$work/bytes" >"$work/log" 2>&1; then
    got=$(cat "$work"/bytes/val_*.bin "$work"/bytes/train_*.bin | wc -c)
    want=$((2 * 1024 + 2 * (2 + 15 + 16)))
    if [ "$got" -eq "$want" ]; then ok "bytes as tokens"; else fail "bytes as tokens" "$got bytes in the shards, not $want"; fi
else
    fail "bytes as tokens" "$(tail -n 1 "$work/log")"
fi
if "$python" dev/data/prepare_gpt2.py --local "$work/none.txt" --vocab data/builtin --out "$work/x" >/dev/null 2>"$work/log"; then
    fail "missing input" "accepted"
elif [ "$(wc -l <"$work/log")" -eq 1 ]; then ok "missing input is one line"; else fail "missing input" "more than one line"; fi

# The published counts of tinyshakespeare as llm.c cuts it, and a small model that learns from it.
if [ ! -f "$text" ] || [ ! -d "$vocab" ]; then
    skip tinyshakespeare "no $text or $vocab"
    finish
fi
"$python" dev/data/prepare_gpt2.py --local "$text" --vocab "$vocab" --split-blank-lines --val-tokens 32768 \
    --out "$work/tinyshakespeare" >"$work/log" 2>&1
tokens() { echo $((($(cat "$work"/tinyshakespeare/$1_*.bin | wc -c) - 1024) / 2)); }
if [ "$(tokens train)" = 305260 ] && [ "$(tokens val)" = 32768 ]; then ok "tinyshakespeare: 305260 and 32768 tokens"
else fail "tinyshakespeare" "$(tokens train) training and $(tokens val) validation tokens, not 305260 and 32768"; fi
losses=$("$trainer" -i "$work/tinyshakespeare/train_*.bin" -j "$work/tinyshakespeare/val_*.bin" -e L=4,C=128,NH=4,V=50257,T=256 \
    -b 4 -t 256 -x 300 -l 3e-4 -k constant -c 0 -v 300 -m 0 -s 0 -n 0 -o "" | sed -nE 's/.*val loss ([0-9.]+)/\1/p' | tr '\n' ' ')
read -r first last <<<"$losses"
if awk "BEGIN {exit !($first > 10.7 && $first < 10.95 && $last < 6.2)}"; then ok "tinyshakespeare: val loss $first -> $last in 300 steps"
else fail "tinyshakespeare" "val loss $first -> $last, wanted 10.8 -> under 6.2"; fi
finish
