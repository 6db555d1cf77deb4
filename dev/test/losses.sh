#!/bin/bash
# What determines the numbers of a run, where sums of several runs are compared; equal.txt has what is the same or differs.
#
#     bash dev/test/losses.sh PROGRAM          from the repository's root
#
# The runs begin with one small model and do not learn, so losses differ by sequences and masks alone. Ends with
# `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

MODEL=(-e "$work/model")
still() { rm -rf "$work/run" && run -l 0 -v 0 -s 0 -n 0 -o "$work/run" "$@"; }
losses() { still "$@" && sed -nE 's/^\{"step": [0-9]+, "loss": ([^,}]+).*/\1/p' "$work/run/log.jsonl"; }

# The two numbers agree to 5 digits.
near() { # NAME NUMBER NUMBER
    verdict "$1" "$(awk -v x="$2" -v y="$3" 'BEGIN { if (x == 0 || (x - y) ^ 2 > (1e-5 * y) ^ 2) print x " against " y }')"
}

still -e L=1,C=16,NH=2,T=16 -x 1 && mv "$work/run" "$work/model" || fail 'a model to begin with' "$(tail -n 1 "$work/stderr")"
n=$(losses "${MODEL[@]}" -x 4 | sort -u | wc -l)
verdict 'every step takes other sequences' "$([ "$n" -eq 4 ] || echo "$n different losses in 4 steps")"
n=$(losses "${MODEL[@]}" -x 4 --overfit 1 --dropout 0.5 | sort -u | wc -l)
verdict 'dropout draws other masks in every step' "$([ "$n" -eq 4 ] || echo "$n different losses in 4 steps")"

case ${PROGRAM##*/} in train_bert*)
    # Each micro-batch counts the same: those of one step are, one by one, two steps.
    mean=$(losses "${MODEL[@]}" --loss-mean micro -b 2 -x 2 | awk '{s += $1 / 2} END {printf "%.9g", s}')
    near '--loss-mean micro is the mean of the micro-batches' "$(losses "${MODEL[@]}" --loss-mean micro -b 2 -d 64 -x 1)" "$mean"
    finish
    exit ;;
esac

# Targets that do not count: of four sequences of 16, 20 targets count in one file and the other 44 in another. In the first
# two sequences have none.
tokens() { tail -c +1025 data/builtin/train.bin | head -c 130; }
shard() { # FILE [MASK_BYTE...]
    local byte
    { little_endian 4 20240520; little_endian 4 1; little_endian 4 65; little_endian 4 0; little_endian 4 $(($# > 1))
      head -c 1004 /dev/zero
      tokens
      for byte in "${@:2}"; do little_endian 1 "$byte"; done; } >"$work/$1.bin"
}
shard all
shard some 255 255 31 0 0 0 0 0 0
shard rest 0 0 224 255 255 255 255 255 255
mean_of() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.9g", (20 * a + 44 * b) / 64 }'; }
counted() { losses "${MODEL[@]}" -i "$work/$1.bin" --shuffle 0 -x 1 "${@:2}"; }
for flags in '-b 4' '-b 1 -d 64'; do
    # shellcheck disable=SC2086
    near "the loss is a mean over what counts, $flags" "$(mean_of "$(counted some $flags)" "$(counted rest $flags)")" "$(counted all $flags)"
done
held_out() {
    run "${MODEL[@]}" -l 0 -s 0 -n 0 -i "$work/all.bin" -j "$work/$1.bin" -b 3 -x 1 -v 1 -o "$work/held" --overwrite 1
    sed -nE 's/.*"val_loss": ([^,}]+).*/\1/p' "$work/held/log.jsonl" | head -n 1
}
near 'validation is a mean over what counts' "$(mean_of "$(held_out some)" "$(held_out rest)")" "$(held_out all)"
finish
