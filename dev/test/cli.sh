#!/bin/bash
# What a run of train_gpt2 prints and writes, and how it ends where the disk or the memory is full or numbers are not finite.
# What is refused at the start is in refuse.txt.
#
#     bash dev/test/cli.sh PROGRAM          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

SIZES=(-e L=1,C=16,NH=2,T=16)
QUIET=(-v 0 -s 0 -n 0)  # no validation, no samples, one checkpoint
TINY=("${SIZES[@]}" "${QUIET[@]}")
o=$box/out
STEP='^step +[0-9]+/[0-9]+ \| loss [0-9.]+ \| lr [0-9.e+-]+ \| norm [0-9.]+ \| [0-9.]+ ms \| [0-9,]+ tok/s'

# ---------------------------------------------------------------------------------------------------------
# Flags

run --help
why=$(ended_with 0)
[ -n "$why" ] || [ ! -s "$work/stderr" ] || why='stderr is not empty'
for flag in -i -j -e -o -y -b -t -d -x -k -l -u -q -c -r -w -a -v -m -s -g -n -nk -nm --help; do
    grep -Eq -- "^ +$flag " "$work/stdout" || why="$flag is missing"
done
awk 'length > 100 { exit 1 }' "$work/stdout" || why=${why:-'lines of more than 100 columns'}
grep -qx 'Optimization' "$work/stdout" || why=${why:-'not by topic'}
cp "$work/stdout" "$work/help"
verdict '--help' "$why"
on_full_disk '--help' --help
"$PROGRAM" --help 2>"$work/stderr" | head -n 1 >/dev/null
status=${PIPESTATUS[0]}
verdict '--help into a closed pipe' "$([[ $status == @(0|141) && ! -s $work/stderr ]] || echo "status $status: $(cat "$work/stderr")")"

# ---------------------------------------------------------------------------------------------------------
# Output and files of a run

run "${SIZES[@]}" -x 5 -v 2 -m 2 -s 5 -g 8 -n 2 -o "$o"
why=$(ended_with 0)
[ -n "$why" ] || [ ! -s "$work/stderr" ] || why="stderr is not empty: $(head -n 1 "$work/stderr")"
[ "$(grep -Ec "$STEP" "$work/stdout")" -eq 5 ] || why=${why:-'not one line per step'}
[ "$(grep -c '^step [0-9]*/5 | val loss [0-9.]*$' "$work/stdout")" -eq 4 ] || why=${why:-'no validation at 0, 2, 4 and 5'}
grep -q '^[0-9]* parameters, .* training tokens, 64 a step.* steps 1 to 5 ' "$work/stdout" || why=${why:-'no line about the run'}
grep -q '^memory plan: ' "$work/stdout" || why=${why:-'no memory plan'}
grep -q '^sample after step 5:$' "$work/stdout" || why=${why:-'no sample at the end'}
verdict 'stdout of a run' "$why"

why=
NUMBER='-?[0-9][0-9.e+-]*'
log_lines() { # PATTERN COUNT
    [ "$(grep -Ec "$1" "$o/log.jsonl")" -eq "$2" ] || why=${why:-"not $2 lines of the form $1"}
}
log_lines "^\{\"step\": [1-5], \"loss\": $NUMBER, \"lr\": $NUMBER, \"grad_norm\": $NUMBER, \"ms\": $NUMBER, \"tok_s\": $NUMBER, \"mfu\": $NUMBER\}\$" 5
log_lines "^\{\"step\": [0245], \"val_loss\": $NUMBER\}\$" 4
log_lines "^\{\"step\": [245], \"checkpoint_ms\": $NUMBER, \"checkpoint_write_s\": $NUMBER, \"checkpoint_gb_s\": $NUMBER, \"checkpoint_wait_ms\": $NUMBER\}\$" 3
log_lines '^\{"train-data": .*"steps": 5, .*\}$' 1
[ "$(wc -l <"$o/log.jsonl")" -eq 13 ] || why=${why:-'other lines'}
head -n 1 "$o/log.jsonl" | grep -q '"train-data"' || why=${why:-'the first line does not hold the settings'}
verdict 'log.jsonl' "$why"

why=
for key in $(head -n 1 "$o/log.jsonl" | grep -o '"[a-z0-9-]*": ' | tr -d '": '); do
    grep -q -- " --$key " "$work/help" || why="--$key is not in --help"
done
verdict 'every setting is in --help' "$why"

why=
for file in config.json model.safetensors vocab.json merges.txt tokenizer.json log.jsonl loss.svg sample.txt; do
    [ -s "$o/$file" ] || why="$file is missing"
done
grep -q '^<svg ' "$o/loss.svg" && tail -n 1 "$o/loss.svg" | grep -q '^</svg>$' || why=${why:-'loss.svg is not an SVG picture'}
[ "$(ls "$o/ckpt" | tr '\n' ' ')" = '00000004 00000005 ' ] || why=${why:-"checkpoints: $(ls "$o/ckpt" | tr '\n' ' ')"}
find "$o" -name '*.tmp' | grep -q . && why=${why:-'a .tmp was left'}
verdict 'files of a run' "$why"

run "${SIZES[@]}" -x 1 -v 0 -s 1 -g 3000 -n 0 -o "$box/nul"
why=$(ended_with 0)
zeros() { tr -dc '\0' <"$1" | wc -c; }
[ "$(zeros "$box/nul/sample.txt")" -gt 0 ] || why=${why:-'the sample has no NUL: this test checks nothing'}
[ "$(zeros "$work/stdout")" -eq "$(zeros "$box/nul/sample.txt")" ] || why=${why:-'the terminal does not show the sample of sample.txt'}
verdict 'a sample with NUL bytes is printed completely' "$why"

before=$(listing "$box")
run -e "$o" --evaluate 1 -m 2
why=$(ended_with 0)
grep -Eq '^val loss [0-9]\.[0-9]+ \| 2 of [0-9]+ micro-batches, 8 of [0-9]+ sequences; -m 0 takes all$' "$work/stdout" ||
    why=${why:-'no line with the val loss and the number of micro-batches'}
[ "$before" = "$(listing "$box")" ] || why=${why:-'files were created or changed'}
verdict '--evaluate 1' "$why"

# On all held-out text, whose last micro-batch is smaller, and without the built-in corpus.
mkdir "$work/alone" && cp "$(use_program)" "$work/alone/program"
{
    little_endian 4 20240520; little_endian 4 1; little_endian 4 500
    head -c 1012 /dev/zero
    tail -c +1025 data/builtin/val.bin | head -c 1000
} >"$work/alone/some.bin"
of_all() { # -b FLAG...: loss
    (cd "$work/alone" && ./program -e "$o" --evaluate 1 -j some.bin -m 0 -b "$@" >"$work/stdout" 2>"$work/stderr" </dev/null)
    sed -nE 's/^val loss ([0-9.]+).*/\1/p' "$work/stdout"
}
for documents in 0 1; do
    why= one=$(of_all 31 --doc-mask $documents)
    grep -q '| all 1 micro-batches, 31 sequences$' "$work/stdout" || why="'$(head -n 1 "$work/stdout" "$work/stderr")'"
    for b in 4 7 50; do
        other=$(of_all $b --doc-mask $documents)
        awk -v a="$one" -v b="$other" 'BEGIN { exit !(a > 1 && (a - b) ^ 2 < 9e-12) }' || why=${why:-"-b 31 '$one', -b $b '$other'"}
    done
    grep -q '31 sequences$' "$work/stdout" || why=${why:-'-b above the number of sequences: other sequences'}
    verdict "--evaluate 1 -j -m 0: the mean of all windows, --doc-mask $documents" "$why"
done
for what in '--evaluate 1 -m 1' '--generate 5' '--explain a' '-x 0'; do
    # shellcheck disable=SC2086
    on_full_disk "$what" -e "$o" -o "$work/explained" $what
done
# A run trains and saves all the same.
on_full_disk 'training' "${TINY[@]}" -x 2 -o "$work/quiet"
[ -s "$work/quiet/ckpt/00000002/model.safetensors" ] || fail 'standard output on a full disk: training' 'nothing was saved'
on_full_disk 'a loss that is not finite' -3 'step 2: loss' "${TINY[@]}" -l 1e38 -x 4 -o ''

# ---------------------------------------------------------------------------------------------------------
# NaN

BLOWN=("${SIZES[@]}" -l 1e38 -x 4)
run "${BLOWN[@]}" -o "$box/nan-skip" --on-nan skip -v 2 -m 1 -s 4 -g 4
why=$(ended_with 0)
[ "$(grep -c '^warning: step [234]: loss ' "$work/stderr")" -eq 3 ] || why=${why:-'not a warning for each skipped update'}
[ "$(grep -c '^warning: step [24]: the validation loss is nan$' "$work/stderr")" -eq 2 ] || why=${why:-'not a warning for each validation'}
[ "$(wc -l <"$work/stderr")" -eq 5 ] || why=${why:-'other lines on stderr'}
grep -q '^{"step": 4, "loss": null, ' "$box/nan-skip/log.jsonl" || why=${why:-'the log has no null'}
grep -q -- '-nan' "$work/stdout" "$work/stderr" && why=${why:-'a NaN was printed with a sign'}
grep -qi 'nan\b' <(tail -n +2 "$box/nan-skip/log.jsonl") && why=${why:-'log.jsonl contains nan, which is not valid JSON'}
[ "$(ls "$box/nan-skip/ckpt")" = 00000004 ] || why=${why:-'the run was not saved at its end'}
verdict 'NaN: skip continues' "$why"

# ---------------------------------------------------------------------------------------------------------
# Loss scaling, on a single repeated token, whose gradient is large

shard() { # MAGIC VERSION COUNT BYTES-OF-TOKENS
    little_endian 4 "$1"; little_endian 4 "$2"; little_endian 4 "$3"
    head -c 1012 /dev/zero
    head -c "$4" /dev/zero
}
shard 20240520 1 2000 4000 >"$work/same.bin"
SAME=("${TINY[@]}" -i "$work/same.bin")
# The first step overflows; each later scale is compared with the previous one.
run "${SAME[@]}" -x 8 --loss-scale 3e38 -o "$box/overflow"
why=$(ended_with 0)
[ -n "$why" ] || [ ! -s "$work/stderr" ] || why="stderr is not empty: $(head -n 1 "$work/stderr")"
grep -q '^step 1/8 .*norm inf .*gradients overflowed: update skipped' "$work/stdout" || why=${why:-'no message about the overflow'}
overflows=$(grep -c overflowed "$work/stdout")
wrong=$(sed -nE 's/.*"grad_norm": (null|[0-9.]+), .*"loss_scale": ([0-9.e+]+)\}$/\1 \2/p' "$box/overflow/log.jsonl" |
    awk -v overflows="$overflows" 'BEGIN { scale = 3e38 }
        { if ($2 / scale < 0.999 || $2 / scale > 1.001) printf "step %d has scale %s; ", NR, $2 }
        $1 == "null" { scale /= 2; nulls++ }
        END { if (NR != 8 || nulls != overflows) printf "%d steps logged, %d of them overflows", NR, nulls }')
why=${why:-$wrong}
grep -q "\"updates\": $((8 - overflows)), \"loss_scale\": [0-9.e+]*, \"loss_scale_good_steps\": [0-9]" "$box/overflow/ckpt/00000008/trainer.json" ||
    why=${why:-'the checkpoint lacks the scale or the number of updates'}
verdict 'loss scale: an overflow halves it and skips the update' "$why"

# ---------------------------------------------------------------------------------------------------------
# Token shards

d=$box/data
mkdir "$d"
shard 20240520 1 100 200 >"$d/good.bin"
cp "$d/good.bin" "$d/train[1].bin" && cp "$d/good.bin" "$d/val[1].bin" && : >"$d/train1.bin"
run "${SIZES[@]}" -x 1 -b 1 -v 1 -m 1 -s 0 -n 0 -o '' -i "$d/train[1].bin"
why=$(ended_with 0)
grep -q 'val loss' "$work/stdout" || why=${why:-'no validation on its neighbour'}
verdict 'data: a name with glob characters' "$why"
rm "$d/train1.bin" "$d/train[1].bin" "$d/val[1].bin"
# Tokens are checked when their batch is read: the run has begun, so its log may be there, but no model.
{ shard 20240520 1 100 100; little_endian 2 257; head -c 98 /dev/zero; } >"$d/outside.bin"
SMALL=(-e L=1,C=16,NH=2,T=16,V=257 -s 0 -n 0 -x 9 -b 1 --shuffle 0 -o "$box/outside")
OUTSIDE='outside.bin: token 257 at position 50 is outside the vocabulary of 257'
for where in training validation; do
    before=$(listing "$d")
    if [ $where = training ]; then run "${SMALL[@]}" -v 0 -i "$d/outside.bin"
    else run "${SMALL[@]}" -i "$d/good.bin" -j "$d/outside.bin" -v 1; fi
    why=$(ended_with_error 2 "$OUTSIDE")
    [ "$before" = "$(listing "$d")" ] || why=${why:-'the data was changed'}
    [ ! -e "$box/outside/model.safetensors" ] || why=${why:-'a model was written'}
    rm -rf "$box/outside"
    verdict "data: token outside the vocabulary, in $where" "$why"
done

# ---------------------------------------------------------------------------------------------------------
# Output, disk and memory

if [ "$(id -u)" -ne 0 ]; then
    mkdir "$box/locked" && chmod 555 "$box/locked"
    refused 'output: a directory without write permission' 2 "$box/locked.*-o" "${TINY[@]}" -x 1 -o "$box/locked/x"
fi

# A failed save: one error at the end; the previous checkpoint remains, and no partial one.
failed_to_save() { # NAME OUT PATTERN
    local why
    why=$(ended_with_error 1 "$3" warnings)
    grep -q "^warning: $2/ckpt/0000000[0-9]: .*could not be saved" "$work/stderr" || why=${why:-'no warning with the checkpoint'}
    [ "$(ls "$2/ckpt" | tr '\n' ' ')" = '00000002 ' ] || why=${why:-"checkpoints: $(ls "$2/ckpt" | tr '\n' ' ')"}
    find "$2" -name '*.tmp' | grep -q . && why=${why:-'a .tmp was left'}
    verdict "$1" "$why"
}
mkdir "$work/small"
if [ "$(id -u)" -eq 0 ] && mount -t tmpfs -o size=360k none "$work/small" 2>/dev/null; then
    mounted=$work/small
    accepted 'full disk: the first checkpoint' "${TINY[@]}" -x 4 --stop-after 2 -o "$work/small/out"
    room=$(($(df -k --output=avail "$work/small" | tail -n 1)))
    [ "$room" -le 40 ] || head -c $(((room - 40) * 1024)) /dev/zero >"$work/small/filler"
    run -y 1 -o "$work/small/out"
    failed_to_save 'full disk' "$work/small/out" '00000004|small/out'
    rm "$work/small/filler"
    accepted 'full disk: resumed after making room' -y 1 -o "$work/small/out"
    head -c 1000000 /dev/zero >"$work/small/filler" 2>/dev/null
    run "${TINY[@]}" -x 1 -o "$work/small/new"
    verdict 'full disk: from the first byte' "$(ended_with_error 1 "$work/small/new" warnings)"
    umount "$work/small" && mounted=
else
    skip 'full disk' 'a tmpfs cannot be mounted here'
fi

if is_sanitized; then
    skip 'too little memory' 'AddressSanitizer reserves more than any limit allows'
else
    before=$(listing "$box")
    (ulimit -v 400000; "$PROGRAM" -e d12 -x 1 --threads 1 -o "$box/new" </dev/null >"$work/stdout" 2>"$work/stderr")
    status=$?
    why=$(ended_with_error 2 'needs [0-9.]+ MiB, but [0-9.]+ MiB are available.*-b')
    [ "$before" = "$(listing "$box")" ] || why=${why:-'files were created or changed'}
    verdict 'too little memory: detected before the start' "$why"
    # Weights of 100 MiB, and 300 MiB of gradients and moments, which only training has.
    (ulimit -v 320000; "$PROGRAM" -e L=8,C=512,NH=8,V=512,T=16 -x 1 --threads 1 -o "$box/new" </dev/null >"$work/stdout" 2>"$work/stderr")
    status=$?
    verdict 'too little memory: to train' "$(ended_with_error 2 'needs [0-9.]+ MiB, but .*-r 2')"
    for what in '--generate 3' '--evaluate 1 -m 1'; do
        # shellcheck disable=SC2086
        (ulimit -v 320000; "$(use_program)" -e L=8,C=512,NH=8,V=512,T=16 $what --threads 1 </dev/null >"$work/stdout" 2>"$work/stderr")
        status=$?
        verdict "too little memory to train, enough for $what" "$(ended_with 0)"
    done
    (ulimit -v 58000; "$PROGRAM" -x 1 -v 0 -s 0 --threads 1 -o "$box/new" </dev/null >"$work/stdout" 2>"$work/stderr")
    status=$?
    if [ $status -eq 0 ] || [ $status -eq 127 ]; then
        skip 'too little memory: an allocation fails' 'the limit is not between plan and process here'
    else
        why=$(ended_with_error 1 'out of memory: ')
        [ "$before" = "$(listing "$box")" ] || why=${why:-'files were created or changed'}
        verdict 'too little memory: an allocation fails' "$why"
    fi
fi

finish
