#!/bin/bash
# GPT-2 in one file (dev/ladder) is the model that train_gpt2 trains: from the same weights and batches, both have the
# same losses.
#
#     bash dev/test/one_file.sh ./train_gpt2            gpt2_in_one_file.c, from the repository's root
#     bash dev/test/one_file.sh ./train_gpt2 build/emulated/bf16/gpt2_in_one_file
#                                                       gpt2_in_one_file.cu on the CPU (dev/emulator), and its build in
#                                                       fp32, at the same place in the folder fp32
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-} emulated=${2:+$PWD/$2}
. "$(dirname "$0")/shell.sh"
FLAGS=(-x 20 -v 0 -s 0 -n 0)

# Why the losses in $work/stdout are not train_gpt2's, or nothing. `tolerance`: of their relative difference.
differ() { # tolerance
    local ours
    ours=$(sed -nE 's/^step .* loss //p' "$work/stdout")
    [ "$(wc -l <<<"$ours")" -eq 20 ] || { echo "it wrote no 20 losses; $(cat "$work/stderr")"; return; }
    paste <(echo "$ours") <(sed -nE 's/^\{"step": [0-9]+, "loss": ([^,]+).*/\1/p' "$work/run/log.jsonl") |
        awk -v most="$1" '{d = ($1 - $2) / $2; if (!(d <= most && d >= -most)) {
            print "step " NR ": " $1 ", train_gpt2 has " $2; exit}}'
}

# Weights that have been trained for a while, so that no bias is 0, and a run from them.
trainer() { # sizes, learning rate before, batch, learning rate
    run -b 4 "${FLAGS[@]}" -e "$1" -l "$2" -o "$work/start"
    run -b "$3" "${FLAGS[@]}" -e "$work/start" --shuffle 0 -l "$4" -u 2 -q 0.05 -c 0.1 -o "$work/run"
    ended_with 0
}

is_short() { # lines, source
    verdict "at most $1 lines, which include nothing of this repository" \
        "$(grep -n '#include *"' "$2"; wc -l "$2" | awk -v most="$1" '$1 > most')"
}

has_sample() { verdict 'a sample comes out' "$([ "$(tail -n 1 "$work/stdout" | wc -c)" -gt 9 ] || tail -n 2 "$work/stdout")"; }

if [ -n "$emulated" ]; then
    is_short 1000 "$root/dev/ladder/gpt2_in_one_file.cu"
    # Two tiles of queries, the second not full; padding behind the vocabulary; rows of several sequences.
    why=$(trainer L=2,C=128,NH=2,T=70 2e-3 2 5e-4)
    for precision in fp32 bf16; do
        timeout 600 "${emulated/bf16/$precision}" 20 "$work/start" 2 data/builtin/train.bin 5e-4 \
            >"$work/stdout" 2>"$work/stderr"
        verdict "losses of 20 steps, $precision" "${why:-$(differ $([ $precision = fp32 ] && echo 1e-5 || echo 2e-3))}"
    done
    has_sample
else
    source=$root/dev/ladder/gpt2_in_one_file.c
    is_short 500 "$source"
    "${CC:-cc}" -O2 "$source" -lm -o "$work/one_file" 2>"$work/stderr"
    verdict 'a C compiler and libm are enough, without a warning' "$(cat "$work/stderr")"
    why=$(trainer L=3,C=48,NH=3,T=33 5e-3 4 2e-3)
    timeout 60 "$work/one_file" 20 "$work/start" >"$work/stdout" 2>"$work/stderr"
    verdict 'losses of 20 steps' "${why:-$(differ 4e-6)}"
    has_sample
fi
finish
