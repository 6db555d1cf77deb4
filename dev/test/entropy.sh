#!/usr/bin/env bash
# The entropy of the built-in corpus as a test of the trainer: no model can have a smaller loss on average. A model that
# is more than three standard errors below it has seen what it should predict.
#
#     bash dev/test/entropy.sh PROGRAM          from the repository's root, after make
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
stories=$root/data/builtin
[ -f "$stories/val_entropy.txt" ] || { echo "$stories is missing; run make data/builtin/train.bin first" >&2; exit 2; }

# Of the first BLOCKS blocks of the validation data: the generator's mean loss, and what a model's mean loss must not be
# below: the bound less three standard errors of the generator's loss.
entropy_of() { # BLOCKS
    awk -v n="$1" 'NR == 1 { T = $1; bound = $2; next }
        NR <= n + 1 { sum += $1; squares += $1 * $1 }
        END { mean = sum / n; error = sqrt((squares / n - mean * mean) / (n - 1)) / T
              printf "%.4f %.6f\n", mean / T, bound - 3 * error }' "$stories/val_entropy.txt"
}
# Train and validate on stories. Sets the last validation's $loss, and $mean and $least of its BLOCKS blocks.
train() { # BLOCKS FLAG...
    read -r mean least < <(entropy_of "$1")
    run -e L=1,C=64,NH=2,T=64 -b 8 -m $(($1 / 8)) -j "$stories/val.bin" -s 0 -n 0 -o out --overwrite 1 "${@:2}"
    loss=$(sed -n 's/.*"val_loss": \([^,}]*\).*/\1/p' out/log.jsonl | tail -n 1)
}
is_below() { awk -v loss="$loss" -v least="$least" 'BEGIN { exit !(loss < least) }'; }

train 1600 -i "$stories/train.bin" -x 600 -v 600 -l 8e-3 -u 50
verdict 'a run on stories' "$(ended_with 0)"
verdict "the generator's loss is printed" "$(grep -q "loss $mean on these tokens" "$work/stdout" || echo "not $mean: $(grep generator "$work/stdout")")"
verdict 'a trained model is not below the entropy' "$(! is_below || echo "validation loss $loss, below $least: it sees its targets")"

# Blocks of 64 are the generator's.
run -e L=1,C=16,NH=2,T=128 -i "$stories/train.bin" -j "$stories/val.bin" -x 1 -v 1 -m 1 -s 0 -n 0 -o ''
verdict 'a validation on other blocks' "$(ended_with 0; grep 'the generator' "$work/stdout")"

# Trained on the same blocks that validate it.
train 8 -i "$stories/val.bin" --shuffle 0 --overfit 1 -x 300 -v 300 -l 8e-3 -u 50
verdict 'a model that has seen the validation text is' "$(is_below || echo "validation loss $loss, not below $least")"
finish
