#!/bin/bash
# What determines the numbers of a run: the seed, the order of the data, dropout, how a step is divided, what is
# validated.
#
#     bash dev/test/losses.sh PROGRAM          from the repository's root; with mpirun also on two ranks
#
# The runs begin with one small model and do not learn, so losses differ by sequences and masks alone. Ends with
# `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
case ${PROGRAM##*/} in train_bert*) is_bert=1 ;; *) is_bert=0 ;; esac

SIZES=L=1,C=16,NH=2,T=16
MODEL=(-e "$work/model")
HIGH=4294967297  # 1, but for the upper half of its 64 bits

# LAUNCH starts the program, or several ranks of it.
LAUNCH=(timeout --foreground 120)
train() { # FLAG...
    rm -rf "$work/run"
    set_command -s 0 -n 0 -o "$work/run" "$@"
    "${LAUNCH[@]}" "${command[@]}" </dev/null >"$work/stdout" 2>"$work/stderr"
}
still() { train -l 0 -v 0 "$@"; }
# A column of log.jsonl, one value a line.
column() { sed -nE "s/^\{\"step\": [0-9]+, .*\"$1\": ([^,}]+).*/\1/p; s/^\{\"step\": [0-9]+, \"$1\": ([^,}]+).*/\1/p" "$work/run/log.jsonl"; }
losses() { still "$@" && column loss; }
weights() { still "$@" && cksum <"$work/run/model.safetensors"; }
different() { sort -u | wc -l; }

# What FUNCTION prints for the FLAGs and for the others must be "the-same" or "others"; the flags behind are for both.
compare() { # NAME the-same|others FUNCTION "FLAGS" "FLAGS" FLAG...
    local name=$1 wanted=$2 what=$3 first second got=others why=
    # shellcheck disable=SC2086
    first=$($what $4 "${@:6}") && second=$($what $5 "${@:6}") || why="a run failed: $(tail -n 1 "$work/stderr")"
    [ "$first" != "$second" ] || got=the-same
    [ -n "$first" ] && [ "$got" = "$wanted" ] || why=${why:-"$4 gives ${first//$'\n'/ }, $5 ${second//$'\n'/ }"}
    verdict "$name" "$why"
}

# Header of a file of N tokens.
shard() { little_endian 4 20240520; little_endian 4 1; little_endian 4 "$1"; head -c 1012 /dev/zero; }

# The two numbers, or as many pairs of them, agree to 5 digits.
near() { # NAME "NUMBERS" "NUMBERS"
    local why
    why=$(awk -v a="$2" -v b="$3" 'BEGIN {
        n = split(a, x); if (n == 0 || split(b, y) != n) bad = 1
        for (i = 1; i <= n; i++) if (x[i] == 0 || (x[i] - y[i]) ^ 2 > (1e-5 * y[i]) ^ 2) bad = 1
        if (bad) print a " against " b }')
    verdict "$1" "${why//$'\n'/ }"
}

still -e $SIZES -x 1 && mv "$work/run" "$work/model" || fail 'a model to begin with' "$(tail -n 1 "$work/stderr")"

# ---------------------------------------------------------------------------------------------------------
# The seed, all 64 bits of it; the order of the data

for other in 2 $HIGH; do
    compare "initial weights, --seed 1 and $other" others weights '--seed 1' "--seed $other" -e $SIZES -x 1
    compare "order of the data, --seed 1 and $other" others losses '--seed 1' "--seed $other" "${MODEL[@]}" -x 3
done
compare 'the same seed twice' the-same losses '--seed 1' '--seed 1' "${MODEL[@]}" -x 3 --dropout 0.5

# Data whose order --shuffle 0 fixes, so that of the seed's work dropout is left.
if [ $is_bert = 1 ]; then
    # Labelled texts in bytes, a different one in each line.
    mkdir "$work/texts" && cp data/builtin/bert/vocab.txt data/builtin/bert/tokenizer_config.json "$work/texts"
    for i in {10..49}; do printf '%d\t%s\n' $((i % 2)) "$i$((i * i))"; done >"$work/texts/train.tsv"
    TEXTS=(--task classify -i "$work/texts/train.tsv" -j "$work/texts/train.tsv" -b 4)
    still "${TEXTS[@]}" "${MODEL[@]}" --labels 2 -x 1 && mv "$work/run" "$work/classifier"
    FIXED=("${TEXTS[@]}" -e "$work/classifier" -x 3)
    compare 'order of labelled texts, --seed 1 and 2' others losses '--seed 1' '--seed 2' "${FIXED[@]}"
else
    FIXED=("${MODEL[@]}" -x 3 -b 2)
    # The first six sequences of the data, in a file of their own.
    { shard 97; tail -c +1025 data/builtin/train.bin | head -c 194; } >"$work/six.bin"
    compare '--shuffle 0 begins with the first sequences' the-same losses '-i data/builtin/train.bin' "-i $work/six.bin" "${FIXED[@]}" --shuffle 0
fi
compare '--shuffle 0, --seed 1 and 2' the-same losses '--seed 1' '--seed 2' "${FIXED[@]}" --shuffle 0
for other in 2 $HIGH; do
    compare "dropout, --seed 1 and $other" others losses '--seed 1' "--seed $other" "${FIXED[@]}" --shuffle 0 --dropout 0.5
done

# ---------------------------------------------------------------------------------------------------------
# One batch again and again; the masks of each step

n=$(losses "${MODEL[@]}" -x 4 | different)
verdict 'every step takes other sequences' "$([ "$n" -eq 4 ] || echo "$n different losses in 4 steps")"
n=$(losses "${MODEL[@]}" -x 4 --overfit 1 | different)
verdict '--overfit 1 takes the same ones' "$([ "$n" -eq 1 ] || echo "$n different losses in 4 steps")"
n=$(losses "${MODEL[@]}" -x 4 --overfit 1 --dropout 0.5 | different)
verdict 'dropout draws other masks in every step' "$([ "$n" -eq 4 ] || echo "$n different losses in 4 steps")"

# ---------------------------------------------------------------------------------------------------------
# A step in micro-batches, on several ranks

step_of() { still "${MODEL[@]}" "$@" -x 1 && column loss && column grad_norm; }
near 'loss and gradients of a step in four micro-batches' "$(step_of -b 1 -d 64)" "$(step_of -b 4)"
if [ $is_bert = 1 ]; then
    # Each micro-batch counts the same: those of one step are, one by one, two steps.
    mean=$(losses "${MODEL[@]}" --loss-mean micro -b 2 -x 2 | awk '{s += $1 / 2} END {printf "%.9g", s}')
    near '--loss-mean micro is the mean of the micro-batches' "$(losses "${MODEL[@]}" --loss-mean micro -b 2 -d 64 -x 1)" "$mean"
fi
means=(global)
[ $is_bert = 0 ] || means+=(micro)
for mean in "${means[@]}"; do
    name="loss and gradients of two ranks, $mean mean"
    prepare_ranks || { skip "$name" "$why"; continue; }
    flags=(-b 2 -d 64)
    [ $is_bert = 0 ] || flags+=(--loss-mean "$mean")
    one=$(step_of "${flags[@]}")
    LAUNCH+=(mpirun --oversubscribe --bind-to none -np 2)
    two=$(step_of "${flags[@]}")
    LAUNCH=(timeout --foreground 120)
    near "$name" "$two" "$one"
done

# ---------------------------------------------------------------------------------------------------------
# Validation

val_loss() { train -l 0 "$@" && column val_loss; }
evaluated() { run "${MODEL[@]}" --evaluate 1 "$@" && sed -nE 's/^val loss ([0-9.]+).*/\1/p' "$work/stdout"; }
near '-m 3 is three batches' "$(evaluated -m 3 -b 2)" "$(evaluated -m 1 -b 6)"
for model in model classifier; do
    [ -d "$work/$model" ] || continue
    flags=(-e "$work/$model" -x 2 -v 1 -m 2)
    [ $model = model ] || flags+=("${TEXTS[@]}")
    compare "validation without dropout, $model" the-same val_loss '--dropout 0' '--dropout 0.5' "${flags[@]}"
done

if [ $is_bert = 0 ]; then
    # Every eighth token begins a document, in the middle of a sequence too.
    { shard 97
      for i in {0..96}; do little_endian 2 $((i % 8 == 4 ? 256 : 65 + i % 13)); done; } >"$work/documents.bin"
    DOCUMENTS=("${MODEL[@]}" -i "$work/documents.bin" -j "$work/documents.bin" -x 2 -b 2)
    compare 'documents kept apart in training' others losses '--doc-mask 0' '--doc-mask 1' "${DOCUMENTS[@]}"
    compare 'documents kept apart in validation' others val_loss '--doc-mask 0' '--doc-mask 1' "${DOCUMENTS[@]}" -v 1
fi

# ---------------------------------------------------------------------------------------------------------
# Targets that do not count: of four sequences of 16, 20 targets count in one file and the other 44 in another. In the first
# two sequences have none.

if [ $is_bert = 0 ]; then
    tokens() { tail -c +1025 data/builtin/train.bin | head -c 130; }
    masked_shard() { # MASK_BYTE...
        { little_endian 4 20240520; little_endian 4 1; little_endian 4 65; little_endian 4 0; little_endian 4 1
          head -c 1004 /dev/zero
          tokens
          for byte; do little_endian 1 "$byte"; done; }
    }
    { shard 65; tokens; } >"$work/all.bin"
    masked_shard 255 255 31 0 0 0 0 0 0 >"$work/some.bin"
    masked_shard 0 0 224 255 255 255 255 255 255 >"$work/rest.bin"
    masked_shard 255 255 255 255 255 255 255 255 255 >"$work/ones.bin"
    counted() { still "${MODEL[@]}" -i "$work/$1.bin" --shuffle 0 -x 1 "${@:2}" && column loss && column grad_norm; }
    mean_of() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.9g", (20 * a + 44 * b) / 64 }'; }
    near 'a mask of ones is none' "$(counted ones -b 2 -d 64)" "$(counted all -b 2 -d 64)"
    first() { counted "$@" | head -n 1; }
    for flags in '-b 4' '-b 1 -d 64'; do
        # shellcheck disable=SC2086
        near "the loss is a mean over what counts, $flags" "$(mean_of "$(first some $flags)" "$(first rest $flags)")" "$(first all $flags)"
    done
    one=$(counted some -b 4)
    near 'a step of which two micro-batches have no target' "$(counted some -b 1 -d 64)" "$one"
    if prepare_ranks; then
        LAUNCH+=(mpirun --oversubscribe --bind-to none -np 2)
        near 'a rank without a target' "$(counted some -b 2 -d 64)" "$one"
        LAUNCH=(timeout --foreground 120)
    else skip 'a rank without a target' "$why"; fi
    held_out() { val_loss "${MODEL[@]}" -i "$work/all.bin" -j "$work/$1.bin" -b 3 -x 1 -v 1 | head -n 1; }
    near 'validation is a mean over what counts' "$(mean_of "$(held_out some)" "$(held_out rest)")" "$(held_out all)"
fi

# ---------------------------------------------------------------------------------------------------------
# Learning rates

rates_are() { # "RATES" FLAG...
    train "${MODEL[@]}" -v 0 -l 1e-3 -x "$(wc -w <<<"$1")" "${@:2}"
    local got
    got=$(column lr | tr '\n' ' ')
    verdict "learning rates, ${*:2}" "$([ "$got" = "$1 " ] || echo "they are $got")"
}
rates_are '0.0005 0.001 0.001 0.001'         -k constant -u 2
rates_are '0.001 0.00075 0.0005 0.00025'     -q 0 -k poly
rates_are '0.001 0.0005625 0.00025 6.25e-05' -q 0 -k poly --poly-power 2
rates_are '0.001 0.001 0.001 0.001 0.001 0.001 0.001 0.001 0.001 0.000292893219' -q 0 -k wsd

finish
