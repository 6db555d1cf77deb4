#!/bin/bash
# dev/ladder/gpt2_in_one_file.c is the model that train_gpt2 trains: from the same weights and batches, both have the same
# losses.
#
#     bash dev/test/one_file.sh ./train_gpt2          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
SOURCE=$root/dev/ladder/gpt2_in_one_file.c

lines=$(wc -l <"$SOURCE")
verdict 'at most 450 lines' "$([ "$lines" -le 450 ] || echo "$lines")"
own=$(grep -n '#include *"' "$SOURCE")
verdict 'nothing of this repository is included' "$own"
"${CC:-cc}" -O2 "$SOURCE" -lm -o "$work/one_file" 2>"$work/stderr"
verdict 'a C compiler and libm are enough, without a warning' "$(cat "$work/stderr")"

# From weights that have been trained for a while, so that no bias is 0.
same_losses() { # SIZES
    local name="losses of 20 steps, $1" why theirs ours
    rm -rf "$work/start" "$work/run"
    run -e "$1" -b 4 -x 20 -l 5e-3 -v 0 -s 0 -n 0 -o "$work/start"
    why=$(ended_with 0)
    [ -n "$why" ] || run -e "$work/start" -b 4 -x 20 --shuffle 0 -l 2e-3 -u 2 -q 0.05 -c 0.1 -v 0 -s 0 -n 0 -o "$work/run"
    why=${why:-$(ended_with 0)}
    theirs=$(sed -nE 's/^\{"step": [0-9]+, "loss": ([^,]+).*/\1/p' "$work/run/log.jsonl")
    ours=$(timeout 60 "$work/one_file" 20 "$work/start" 2>"$work/stderr" | sed -nE 's/^step .* loss //p')
    [ "$(wc -l <<<"$ours")" -eq 20 ] || why=${why:-"it wrote no 20 losses; $(cat "$work/stderr")"}
    why=${why:-$(paste <(echo "$ours") <(echo "$theirs") |
        awk '{d = $1 - $2; if (!(d <= 1e-5 && d >= -1e-5)) {print "step " NR ": " $1 ", train_gpt2 has " $2; exit}}')}
    verdict "$name" "$why"
}
same_losses L=2,C=64,NH=4,T=64
same_losses L=3,C=48,NH=3,T=33

run_alone() { timeout 60 "$work/one_file" "$@" >"$work/stdout" 2>"$work/stderr"; status=$?; }
run_alone 60 "$work/start"
first=$(sed -nE 's/^step 1\/.* loss //p' "$work/stdout") last=$(sed -nE 's/^step 60\/.* loss //p' "$work/stdout")
verdict 'it learns' "$(awk -v a="$first" -v b="$last" 'BEGIN {if (!(b > 0 && b < a)) print "from " a " to " b}')"
verdict 'a sample comes out' "$([ "$(tail -n 1 "$work/stdout" | wc -c)" -gt 9 ] || tail -n 2 "$work/stdout")"
run_alone 5 "$work/nowhere"
verdict 'a model that is not there is a line' "$([ "$status" = 1 ] && grep -q '^error: cannot open .*nowhere' "$work/stderr" || cat "$work/stderr")"
finish
