#!/bin/bash
# train_gpt2 without its rooms (-DNO_FP8 and so on, llmc/base/rooms.h): it trains as with them, and refuses the flags
# that need one.
#
#     bash dev/test/rooms.sh ./train_gpt2          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
TINY=(-b 2 -x 3 -s 0 -n 0)
SIZES=(-e L=2,C=32,NH=2,T=32,V=257)

run "${SIZES[@]}" "${TINY[@]}" -v 3 -o "$work/with"
why=$(ended_with 0)
PROGRAM=$work/train_gpt2
rooms=(FP8 MUON LAMB CHECKPOINT PROFILE TEXT CHOICES AVERAGE GRAPH IMPORT HOPPER)
(cd "$root" && "${CC:-cc}" -x c -std=c11 -D_GNU_SOURCE -I. -O1 -fopenmp -ffp-contract=off train_gpt2.cu -lm -pthread \
    -o "$PROGRAM" "${rooms[@]/#/-DNO_}") 2>"$work/stderr"
verdict 'it compiles' "$(cat "$work/stderr")"
run "${SIZES[@]}" "${TINY[@]}" -v 3 -o "$work/without"
why=${why:-$(ended_with 0)}
losses() { sed -nE 's/^\{"step": [0-9]+, "(val_)?loss": ([^,}]+).*/\2/p' "$work/$1/log.jsonl"; }
[ "$(losses with | wc -l)" -eq 5 ] || why=${why:-"not five losses: $(losses with)"}
verdict 'the same losses' "${why:-$(diff <(losses with) <(losses without))}"
verdict 'it says that it saves no model' "$(grep -q '^warning: built without checkpoint' "$work/stderr" || echo silent)"

without() { refused "$2 $3" 2 "^error: .*$3: built without $1\$" "${TINY[@]}" -v 0 -o "$work/out" "${@:2}"; }
touch "$work/model.bin"
without import -e "$work/model.bin"
without import -e hub:a/b
TINY+=("${SIZES[@]}")
without fp8 --fp8 1
without muon --optimizer normuon
without lamb --optimizer lamb
without checkpoint --resume 1
without profile --profile 2
without choices --choices set.bin
without average --ema 0.9
without graph --graph 1
finish
