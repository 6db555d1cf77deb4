#!/bin/bash
# dev/ladder/gpt2_in_one_file.c is the model that train_gpt2 trains: from the same weights and batches, both have the
# same losses.
#
#     bash dev/test/one_file.sh ./train_gpt2          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
SOURCE=$root/dev/ladder/gpt2_in_one_file.c
FLAGS=(-b 4 -x 20 -v 0 -s 0 -n 0)

verdict 'at most 500 lines, which include nothing of this repository' \
    "$(grep -n '#include *"' "$SOURCE"; wc -l "$SOURCE" | awk '$1 > 500')"
"${CC:-cc}" -O2 "$SOURCE" -lm -o "$work/one_file" 2>"$work/stderr"
verdict 'a C compiler and libm are enough, without a warning' "$(cat "$work/stderr")"
# From weights that have been trained for a while, so that no bias is 0.
run "${FLAGS[@]}" -e L=3,C=48,NH=3,T=33 -l 5e-3 -o "$work/start"
run "${FLAGS[@]}" -e "$work/start" --shuffle 0 -l 2e-3 -u 2 -q 0.05 -c 0.1 -o "$work/run"
why=$(ended_with 0)
theirs=$(sed -nE 's/^\{"step": [0-9]+, "loss": ([^,]+).*/\1/p' "$work/run/log.jsonl")
timeout 60 "$work/one_file" 20 "$work/start" >"$work/stdout" 2>"$work/stderr"
ours=$(sed -nE 's/^step .* loss //p' "$work/stdout")
[ "$(wc -l <<<"$ours")" -eq 20 ] || why=${why:-"it wrote no 20 losses; $(cat "$work/stderr")"}
why=${why:-$(paste <(echo "$ours") <(echo "$theirs") |
    awk '{d = $1 - $2; if (!(d <= 1e-5 && d >= -1e-5)) {print "step " NR ": " $1 ", train_gpt2 has " $2; exit}}')}
verdict 'losses of 20 steps' "$why"
verdict 'a sample comes out' "$([ "$(tail -n 1 "$work/stdout" | wc -c)" -gt 9 ] || tail -n 2 "$work/stdout")"
finish
