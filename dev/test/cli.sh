#!/bin/bash
# The command line of train_gpt2 and its errors for bad input:
#
#     bash dev/test/cli.sh PROGRAM          from the repository's root
#
# A refusal is one line on stderr with the problem, its place and the remedy, and the right exit status; no file is
# created or changed. Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

SIZES=(-e L=1,C=16,NH=2,T=16)
QUIET=(-v 0 -s 0 -n 0)  # no validation, no samples, one checkpoint
TINY=("${SIZES[@]}" "${QUIET[@]}")
STEP='^step +[0-9]+/[0-9]+ \| loss [0-9.]+ \| lr [0-9.e+-]+ \| norm [0-9.]+ \| [0-9.]+ ms \| [0-9,]+ tok/s'

# ---------------------------------------------------------------------------------------------------------
# Flags

o=$box/out
f() { refused "flags: $1" 2 "$2" "${TINY[@]}" -o "$o" "${@:3}"; }
f 'unknown'                       "unknown flag '-zz'.*--help"                     -zz 1
for flag in '-pi --ranks-start' '-pn --ranks' '-pr --rank' '-pg --ranks-per-machine' '-ps --server' '-pf --rendezvous' --server-port; do
    for name in $flag; do f "$name, which MPI replaces" "unknown flag '$name': it was removed; use mpirun.*--help" "$name" 1; done
done
f 'unknown, near miss'            'did you mean --dropout'                         --droput 0.1
f 'unknown, from other trainers'  "'--batch-size'; did you mean --batch\?"         --batch-size 4
f 'unknown, close to another one' "'--larning-rate'; did you mean --lr\?"          --larning-rate 1
f 'unknown, one dash'             "'-lr'; did you mean --lr\?"                     -lr 1
f 'a word that is not a flag'     "'hello' is not a flag"                          hello
f 'a pattern without quotes'      "val.bin' is a file, not a flag; quote a pattern" -i data/builtin/*.bin
f '-b x'                          "-b --batch: 'x' .*allowed: 1\.\."               -b x
f '-b 0'                          "-b --batch: '0' .*allowed: 1\.\."               -b 0
f '-b -3'                         "-b --batch: '-3' "                              -b -3
f '-b 1.5'                        "-b --batch: '1.5' is not a whole number"        -b 1.5
f '-b 4x'                         "-b --batch: '4x' "                              -b 4x
f '-b beyond 64 bits'             "-b --batch: '99999999999999999999' "            -b 99999999999999999999
f '-b with an empty value'        '-b --batch: '                                   --batch=
f '-l nan'                        "-l --lr: 'nan' .*allowed: >= 0"                 -l nan
f '-l inf'                        "-l --lr: 'inf' "                                -l inf
f '-l -1'                         "-l --lr: '-1' is out of range"                  -l -1
f '-l 1e999'                      "-l --lr: '1e999' "                              -l 1e999
f '-l 1e-400'                     "-l --lr: '1e-400' is out of range"              -l 1e-400
f '-l 0x10'                       "-l --lr: '0x10' "                               -l 0x10
f '--eps 0'                       "--eps: '0' is out of range; allowed: 1.17549435e-38\.\.1" --eps 0
f '--eps below the normal floats' "--eps: '1e-46' is out of range"                 --eps 1e-46
f '-k, an unknown choice'         '-k --schedule: .*cosine\|linear\|constant'      -k cosin
f '-r 3'                          "-r --recompute: '3' .*0\.\.2"                   -r 3
f '--dropout 1'                   "--dropout: '1' "                                --dropout 1
f 'without a value, at the end'   '-b needs a value'                               -b
f 'without a value, before a flag'  '-b needs a value'                               -b -t 8
f 'twice'                         'batch is given twice'                           -b 2 -b 2
f 'twice, short and long'         'batch is given twice'                           -b 2 --batch=2
f '-d that is not a multiple'     '-d 100: .*multiple of the 64 tokens'            -d 100
f '-t above the model'            '-t 17: the model knows 16 positions'            -t 17
refused 'flags: micro-batch above 2^30 tokens' 2 '2\^30 tokens' -e L=1,C=16,NH=2,T=1048576 -b 65536 -o "$o"
f '-y 1 and --overwrite 1'        '-y 1 and --overwrite 1'                         -y 1 --overwrite 1
f '--override 1 without -y 1'     '--override 1 without -y 1'                      --override 1
f '--loss-scale 0.5'              '--loss-scale 0.5: is below 1'                   --loss-scale 0.5
f '-w 2'                          "-w --master-weights: '2' .*0\.\.1"              -w 2
f '--keep-best without validations' '--keep-best 1 goes by the validation loss'     --keep-best 1
f '--ema with --fp8'              '--ema does not combine with --fp8'               --ema 0.9 --fp8 1
f '--ema-start without --ema'     '--ema-start: needs --ema'                        --ema-start 5
f '--ema-start at the last step'  '--ema-start 5 leaves nothing to average: .* after step 5' \
    --ema 0.9 -x 5 --ema-start 5
f '--ema-start after the last step' '--ema-start 7 leaves nothing to average: .* after step 5' \
    --ema 0.9 -x 5 --ema-start 7
f 'a removed flag'              "unknown flag '--batch-ramp': it was removed; all"   --batch-ramp 4
f 'a removed flag with another' "unknown flag '--prompt-file': it was removed; use --prompt @FILE" --prompt-file=a
f 'a flag of another program'   "unknown flag '--prompt': it is a flag of ./use_gpt2; all"  --prompt a
f '--ema 1.5'                     "--ema: '1.5' .*0\.\.1"                           --ema 1.5
refused "flags: --keep-best 1 and -o ''" 2 "--keep-best 1 and -o ''" "${SIZES[@]}" -s 0 -n 0 -v 1 --keep-best 1 -o ''
f '-d of too many sequences'      '-d 1000000000000: 62500000000 sequences'        -d 1000000000000
refused "flags: -y 1 and -o ''" 2 "-y 1 and -o ''" "${TINY[@]}" -y 1 -o ''
refused 'flags: -t above the model, d12' 2 '-t 2000: the model knows 1024' -e d12 -t 2000 -o "$o"

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
# Model descriptors and -x 0

e() { refused "descriptor: $1" 2 "$2" -v 0 -s 0 -o "$o" -e "$3"; }
e 'no such size'        '-e d13: '                                 d13
e 'unknown key'         '-e L=1,Q=3: '                             L=1,Q=3
e 'without a number'    '-e L=1,C=: '                              L=1,C=
e 'no layers'           '-e L=0.*"n_layer": 0 .*1\.\.4096'        L=0,C=16,NH=2
e 'too many layers'     '"n_layer": 16777216 .*1\.\.4096'        L=16777216,C=1,NH=1
e 'too many heads'      '"n_head": 5000 .*1\.\.4096'             L=1,C=5000,NH=5000
e 'too many channels'   '"n_embd": 1048577 .*1\.\.1048576'       L=1,C=1048577,NH=1
e 'too many positions'  '"n_positions": 1048577 .*1\.\.1048576'  L=1,C=16,NH=2,T=1048577
e 'an MLP too wide'     '"n_inner": 4194305 .*4194304'           L=1,C=16,NH=2,F=4194305
refused 'descriptor: too many layers, -x 0' 2 '"n_layer": 16777216 ' -e L=16777216,C=1,NH=1 -x 0 -o "$o"
e 'heads do not fit'    '15 channels cannot be cut into 2 heads'   L=1,C=15,NH=2
e 'tied=2'              'tied.*0.*1'                               L=1,C=16,NH=2,tied=2
e 'no such directory'   "-e $box/no/such/dir: no such file or directory" "$box/no/such/dir"
e 'a name on the Hub'   '-e gpt2: is neither .* hub:NAME'          gpt2
refused '--generate, no such directory' 2 '-e ./none: no such file or directory' -e ./none --generate 3
e 'no such file'        'none.safetensors|config.json'             "$box/none.safetensors"

published() { # NAME TENSORS PARAMETERS
    local why before
    before=$(listing "$box")
    run -e "$1" -x 0 -o "$o"
    why=$(ended_with 0)
    [ -n "$why" ] || grep -q "^$2 tensors, $3 parameters$" "$work/stdout" || why="not $2 tensors, $3 parameters"
    [ -n "$why" ] || grep -q '^memory plan: ' "$work/stdout" || why='no memory plan'
    [ -n "$why" ] || [ "$(grep -c ' transformer\.' "$work/stdout")" -eq "$2" ] || why='the table is incomplete'
    [ -n "$why" ] || [ "$before" = "$(listing "$box")" ] || why='files were created or changed'
    verdict "-x 0, $1" "$why"
}
published d12 148 124439808
for what in '--generate 1' '--evaluate 1'; do
    # shellcheck disable=SC2086
    run -e d12 -x 0 -t 16 -b 1 $what
    why=$(ended_with 0)
    total=$(sed -nE 's/^memory plan of forward passes only: parameters 474\.8 MiB, optimizer 0\.0 MiB, .*together ([0-9]+)\..*/\1/p' "$work/stdout")
    [ "${total:-9999}" -lt 520 ] || why=${why:-"the plan is ${total:-not that of forward passes}"}
    verdict "-x 0, d12 $what" "$why"
done
published d24 292 354823168
published d36 436 774030080
published d48 580 1557611200

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

refused 'output: used, without -y or --overwrite' 2 "$o.*-y 1 .*--overwrite 1" "${TINY[@]}" -x 1 -o "$o"
run "${TINY[@]}" -x 3 -o "$box/off"
why=$(ended_with 0)
grep -q 'val loss\|sample after' "$work/stdout" && why=${why:-'something was not switched off'}
grep -q val_loss "$box/off/log.jsonl" && why=${why:-'a validation was logged'}
[ ! -e "$box/off/sample.txt" ] || why=${why:-'a sample was written'}
[ "$(ls "$box/off/ckpt")" = 00000003 ] || why=${why:-'not one checkpoint, at the end'}
verdict '-v 0 -s 0 -n 0' "$why"

before=$(listing "$box")
run "${SIZES[@]}" -x 2 -v 1 -m 1 -s 1 -g 4 -n 1 -o ''
why=$(ended_with 0)
[ "$before" = "$(listing "$box")" ] || why=${why:-'files were created or changed'}
grep -q 'sample after' "$work/stdout" || why=${why:-'no sample'}
verdict "-o '' writes nothing" "$why"

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
# With the smallest --eps, elements that never have a gradient remain finite: here the positions beyond -t.
for optimizer in adamw lamb; do
    run "${TINY[@]}" -t 8 -x 3 --optimizer $optimizer --eps 1.17549435e-38 -o "$work/eps" --overwrite 1
    why=$(ended_with 0)
    run -e "$work/eps" -t 16 --evaluate 1 -m 1
    grep -Eq '^val loss [0-9]+\.[0-9]+ ' "$work/stdout" || why=${why:-"'$(cat "$work/stdout")'"}
    verdict "--eps, the smallest, $optimizer" "$why"
done
refused '--evaluate 1 -y 1 without a run' 2 'new: has no complete checkpoint; ' -y 1 --evaluate 1 -m 1 -o "$box/new"
accepted '--overwrite 1 on a used output' "${TINY[@]}" -x 1 -o "$box/off" --overwrite 1

# ---------------------------------------------------------------------------------------------------------
# NaN

BLOWN=("${SIZES[@]}" -l 1e38 -x 4)
run "${BLOWN[@]}" -v 0 -s 0 -n 1 -o "$box/nan"
why=$(ended_with_error 3 'step 2: .*gradient of transformer\.[a-z0-9_.]+; .*nan/ckpt/00000001.*--on-nan skip')
[ -n "$why" ] || [ "$(ls "$box/nan/ckpt")" = 00000001 ] || why="checkpoints: $(ls "$box/nan/ckpt" | tr '\n' ' ')"
verdict 'NaN: stop reports the step, the tensor and the last good checkpoint' "$why"
run "${BLOWN[@]}" "${QUIET[@]}" -o "$box/nan-none"
verdict 'NaN: stop with no checkpoint' "$(ended_with_error 3 'step 2: .*checkpoint(:| is) none')"
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
run "${SIZES[@]}" -l 1e38 -x 4 "${QUIET[@]}" --loss-scale 65536 -o "$box/scaled-nan"
verdict 'loss scale: a loss that is NaN still stops the run' "$(ended_with_error 3 'step 2: loss nan.*checkpoint(:| is) none')"

# ---------------------------------------------------------------------------------------------------------
# Token shards

d=$box/data
mkdir "$d"
shard 20240520 1 100 200 >"$d/good.bin"
: >"$d/empty.bin"
head -c 500 data/builtin/train.bin >"$d/half-header.bin"
head -c 5000 data/builtin/train.bin >"$d/truncated.bin"
head -c 4000 "$PROGRAM" >"$d/foreign.bin"
shard 20240520 2 100 200 >"$d/version.bin"
shard 20240801 1 100 400 >"$d/version32.bin"
shard 20240522 1 100 200 >"$d/evaluation.bin"
shard 20240520 1 100 207 >"$d/longer.bin"
shard 20240520 1 0 0 >"$d/no-tokens.bin"
shard 20240520 1 10 20 >"$d/short.bin"
shard 20240520 1 $((0xFFFFFFFF)) 200 >"$d/huge-count.bin"
mkdir "$d/directory.bin"

bad_data() { # NAME FILE PATTERN
    refused "data: $1" 2 "$d/$2: .*$3" "${TINY[@]}" -x 2 -o "$box/new" -i "$d/$2"
}
accepted 'data: a valid shard'  "${TINY[@]}" -x 2 -b 1 -o '' -i "$d/good.bin"
bad_data 'empty'                        empty.bin        'is empty'
bad_data 'ends inside the header'       half-header.bin  'truncated'
bad_data 'truncated'                    truncated.bin    'truncated'
bad_data 'foreign'                      foreign.bin      'not a token shard.*magic'
bad_data 'wrong version'                version.bin      'version 2, .*version 1'
bad_data 'wrong version, 32 bits'       version32.bin    'version 1, .*version 7'
bad_data 'an evaluation set'            evaluation.bin   'evaluation set'
bad_data 'longer than its header says'  longer.bin       'damaged'
bad_data 'count beyond the file'        huge-count.bin   'truncated'
bad_data 'no tokens'                    no-tokens.bin    'no tokens'
bad_data 'too short for -t'             short.bin        'too few.*-t'
bad_data 'a directory'                  directory.bin    'regular file'
bad_data 'no such file'                 none.bin         'no file matches'
refused 'data: a glob that matches nothing' 2 'none_\*.bin: no file matches' "${TINY[@]}" -o "$box/new" -i "$d/none_*.bin"
cp "$d/good.bin" "$d/train[1].bin" && cp "$d/good.bin" "$d/val[1].bin" && : >"$d/train1.bin"
run "${SIZES[@]}" -x 1 -b 1 -v 1 -m 1 -s 0 -n 0 -o '' -i "$d/train[1].bin"
why=$(ended_with 0)
grep -q 'val loss' "$work/stdout" || why=${why:-'no validation on its neighbour'}
verdict 'data: a name with glob characters' "$why"
rm "$d/train1.bin" "$d/train[1].bin" "$d/val[1].bin"
refused 'data: one bad shard among good ones' 2 'empty.bin: is empty' "${TINY[@]}" -o "$box/new" -i "$d/[eg]*[yd].bin"
refused 'data: validation truncated' 2 'truncated.bin: .*truncated' "${TINY[@]}" -o "$box/new" -j "$d/truncated.bin"
refused 'data: validation matches nothing' 2 'none.bin: no file' "${TINY[@]}" -o "$box/new" -j "$d/none.bin"
refused 'data: --evaluate without validation data' 2 'needs validation data.*-j' "${TINY[@]}" -o '' -i "$d/good.bin" --evaluate 1

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
# Model directories: each case breaks a copy of one that the trainer wrote

good=$work/model
mkdir "$good"
cp "$o"/{config.json,model.safetensors,vocab.json,merges.txt,tokenizer.json} "$good"
m=$box/model
MODEL=(-v 0 -s 0 -n 0 -x 1 -o "$box/new" -e "$m")
fresh_model() { rm -rf "$m" && cp -r "$good" "$m"; }
fresh_model
accepted 'model: valid' -v 0 -s 0 -x 1 -o '' -e "$m"
accepted 'model: valid, by its .safetensors file' -v 0 -s 0 -x 1 -o '' -e "$m/model.safetensors"
refused 'model: -t above it' 2 '-t 17: the model knows 16 positions' "${MODEL[@]}" -t 17
rm "$m/config.json"
refused 'model: no config.json' 2 "$m/config.json: " "${MODEL[@]}"
fresh_model && rm "$m/model.safetensors"
refused 'model: no model.safetensors' 2 "$m/model.safetensors: " "${MODEL[@]}"
touch "$m/model.safetensors.index.json"
refused 'model: an empty index of shards' 2 "index.json: .*not valid JSON" "${MODEL[@]}"
fresh_model && rm "$m/model.safetensors" && touch "$m/pytorch_model.bin"
refused 'model: weights of PyTorch' 2 'pytorch_model.bin: holds weights as PyTorch writes them; .*GPT2LMHeadModel' "${MODEL[@]}"

config() { # NAME PATTERN SED-SCRIPT
    fresh_model
    sed "$3" "$good/config.json" >"$m/config.json"
    cmp -s "$good/config.json" "$m/config.json" && { fail "config.json: $1" 'this test changed nothing'; return; }
    refused "config.json: $1" 2 "config.json: .*$2" "${MODEL[@]}"
}
key() { echo "key \"$1\""; }
config 'empty'                          'not valid JSON'           'd'
config 'truncated'                      'not valid JSON'           's/"n_embd".*//'
config 'something after its end'        'not valid JSON'           's/}$/} x/'
config 'trailing comma'                 'not valid JSON'           's/}$/,}/'
config 'NaN'                            'not valid JSON'           's/1e-05/NaN/'
config 'invalid UTF-8'                  'not valid JSON'           's/gelu_new/gelu\xff/'
config 'a key twice'                    'not valid JSON'           's/}$/, "n_head": 2}/'
config 'an array'                       ''                         's/.*/[1, 2]/'
config 'nested too deep'                'not valid JSON'           "s/.*/$(printf '[%.0s' {1..100})/"
config 'n_layer a string'               "$(key n_layer)"           's/"n_layer": 1/"n_layer": "1"/'
config 'n_layer a fraction'             "$(key n_layer)"           's/"n_layer": 1/"n_layer": 1.5/'
config 'n_layer null'                   "$(key n_layer)"           's/"n_layer": 1/"n_layer": null/'
config 'n_layer 0'                      "$(key n_layer)"           's/"n_layer": 1/"n_layer": 0/'
config 'n_layer beyond sense'           "$(key n_layer)"           's/"n_layer": 1/"n_layer": 99999999999/'
config 'n_layer missing'                "$(key n_layer)"           's/"n_layer": 1, //'
config 'n_embd negative'                "$(key n_embd)"            's/"n_embd": 16/"n_embd": -16/'
config 'heads that do not fit'          '3 heads'                  's/"n_head": 2/"n_head": 3/'
config 'model_type bert'                "$(key model_type)"        's/"gpt2"/"bert"/'
config 'activation relu'                "$(key activation_function)" 's/"gelu_new"/"relu"/'
config 'activation a number'            "$(key activation_function)" 's/"gelu_new"/3/'
config 'tie_word_embeddings a string'   "$(key tie_word_embeddings)" 's/"tie_word_embeddings": true/"tie_word_embeddings": "yes"/'
config 'layer_norm_epsilon negative'    "$(key layer_norm_epsilon)" 's/1e-05/-1/'
config 'dropout above 1'                "$(key resid_pdrop)"       's/"resid_pdrop": 0/"resid_pdrop": 1.5/'
config 'scale_attn_by_inverse_layer_idx' "$(key scale_attn_by_inverse_layer_idx).*false" 's/}$/, "scale_attn_by_inverse_layer_idx": true}/'
config 'scale_attn_weights false'       "$(key scale_attn_weights).*true" 's/}$/, "scale_attn_weights": false}/'
config 'add_cross_attention'            "$(key add_cross_attention)" 's/}$/, "add_cross_attention": true}/'
fresh_model && sed -i 's/"n_positions": 16/"n_positions": 32/' "$m/config.json"
refused 'config.json: other sizes than the weights' 2 'model.safetensors: tensor "transformer.wpe.weight": .*\[32, 16\]' "${MODEL[@]}"
fresh_model && sed -i 's/"n_layer": 1/"n_layer": 2/' "$m/config.json"
refused 'config.json: more layers than the weights' 2 'model.safetensors: tensor "transformer.h.1\..*missing' "${MODEL[@]}"
fresh_model && sed -i 's/"tie_word_embeddings": true/"tie_word_embeddings": false/' "$m/config.json"
refused 'config.json: untied, but no head' 2 'model.safetensors: tensor "lm_head.weight" is missing' "${MODEL[@]}"
fresh_model && head -c 1000 "$good/tokenizer.json" >"$m/tokenizer.json"
refused 'tokenizer.json truncated' 2 "$m/tokenizer.json: .*JSON" "${MODEL[@]}"
fresh_model && rm "$m/tokenizer.json" && sed -i 's/"!": *33/"!":34/' "$m/vocab.json"
refused 'vocab.json with an id twice' 2 "$m/vocab.json: .*id 34" "${MODEL[@]}"
fresh_model && rm "$m/tokenizer.json" && sed -i 's/"!": *33/"!":-1/' "$m/vocab.json"
refused 'vocab.json with a negative id' 2 "$m/vocab.json: token \"!\"" "${MODEL[@]}"

# safetensors: 8 bytes of length, a JSON header, data.
weights=$good/model.safetensors
header_bytes=$(od -An -tu8 -N 8 "$weights" | tr -d ' ')
data_bytes=$(($(stat -c %s "$weights") - 8 - header_bytes))
tail -c +9 "$weights" | head -c "$header_bytes" >"$work/header"
rebuild() { # HEADER-FILE
    little_endian 8 "$(stat -c %s "$1")"
    cat "$1"
    tail -c "$data_bytes" "$weights"
}
header() { # NAME PATTERN SED-SCRIPT
    fresh_model
    sed "$3" "$work/header" >"$work/header2"
    cmp -s "$work/header" "$work/header2" && { fail "safetensors: $1" 'this test changed nothing'; return; }
    rebuild "$work/header2" >"$m/model.safetensors"
    refused "safetensors: $1" 2 "model.safetensors: .*$2" "${MODEL[@]}"
}
file() { refused "safetensors: $1" 2 "$m/model.safetensors: .*$2" "${MODEL[@]}"; }
entry() { grep -o "\"$1\":{[^}]*}" "$work/header"; }                   # of a tensor
begin_of() { entry "$1" | sed 's/.*\[\([0-9]*\),[0-9]*\]}/\1/'; }
end_of() { entry "$1" | sed 's/.*,\([0-9]*\)\]}/\1/'; }
WPE=transformer.wpe.weight FC=transformer.h.0.mlp.c_fc.weight LNF=transformer.ln_f.bias

fresh_model && rebuild "$work/header" >"$m/model.safetensors"
accepted 'safetensors: rebuilt unchanged' -v 0 -s 0 -x 1 -o '' -e "$m"
: >"$m/model.safetensors"; file 'empty' 'truncated'
printf 'abc' >"$m/model.safetensors"; file 'three bytes' 'truncated'
head -c -10 "$weights" >"$m/model.safetensors"; file 'truncated' 'inside|truncated|end'
head -c 300 "$weights" >"$m/model.safetensors"; file 'truncated inside the header' 'truncated'
{ cat "$weights"; printf 'more'; } >"$m/model.safetensors"; file 'bytes at the end' '4 bytes at its end'
{ little_endian 8 $((header_bytes + data_bytes + 1)); tail -c +9 "$weights"; } >"$m/model.safetensors"
file 'header longer than the file' 'header should have'
{ little_endian 8 -1; tail -c +9 "$weights"; } >"$m/model.safetensors"; file 'header of 2^64 - 1 bytes' 'header should have'
{ little_endian 8 0; tail -c +9 "$weights"; } >"$m/model.safetensors"; file 'no header' 'not a JSON object'
head -c 40000 "$PROGRAM" >"$m/model.safetensors"; file 'foreign' 'safetensors file'
header 'header not JSON'        'not valid JSON'                          's/^{/{{/'
header 'header an array'        'not a JSON object'                       's/.*/[]/'
header 'no tensors'             'belong to no tensor|missing'             's/.*/{}/'
header 'missing tensor'         "tensor \"$LNF\" is missing"              "s/\"$LNF\"/\"transformer.other\"/"
header 'unknown tensor'         'tensor "transformer.extra" is not part'  "s/\"$LNF\"/\"transformer.extra\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[$data_bytes,$data_bytes]},&/"
header 'a tensor twice'         'not valid JSON'                          "s/\"$LNF\"/\"$WPE\"/"
header 'overlapping offsets'    "tensor \"$WPE\": begins at"              "s/\[$(begin_of $WPE),$(end_of $WPE)\]/[$(($(begin_of $WPE) - 4)),$(($(end_of $WPE) - 4))]/"
header 'a gap'                  "tensor \"$WPE\": begins at"              "s/\"shape\":\[16,16\],\"data_offsets\":\[$(begin_of $WPE),$(end_of $WPE)\]/\"shape\":[15,16],\"data_offsets\":[$(($(begin_of $WPE) + 64)),$(end_of $WPE)]/"
header 'offsets beyond the data' 'truncated or damaged'                   "s/,$data_bytes\]/,$((data_bytes + 4))]/"
header 'offsets backwards'      'truncated or damaged'                    "s/\[$(begin_of $WPE),$(end_of $WPE)\]/[$(end_of $WPE),$(begin_of $WPE)]/"
header 'negative offset'        "tensor \"$WPE\": .*data_offsets"         "s/\[$(begin_of $WPE),$(end_of $WPE)\]/[-4,$(end_of $WPE)]/"
header 'offset a fraction'      "tensor \"$WPE\": .*data_offsets"         "s/\[$(begin_of $WPE),$(end_of $WPE)\]/[1.5,$(end_of $WPE)]/"
header 'shape that overflows'   "tensor \"$WPE\": "                       "s/\"shape\":\[16,16\]/\"shape\":[4294967296,4294967296,16]/"
header 'shape against offsets'  "tensor \"$WPE\": .*do not fit"           "s/\"shape\":\[16,16\]/\"shape\":[16,17]/"
header 'wrong shape'            "tensor \"$FC\": .*\[16, 64\]"            's/"shape":\[16,64\]/"shape":[64,16]/'
header 'wrong rank'             "tensor \"$FC\": .*\[16, 64\]"            's/"shape":\[16,64\]/"shape":[1024]/'
header 'nine dimensions'        "tensor \"$WPE\": .*dimensions"           's/"shape":\[16,16\]/"shape":[16,16,1,1,1,1,1,1,1]/'
header 'wrong dtype'            "tensor \"$LNF\": .*I32"                  "s/\"$LNF\":{\"dtype\":\"F32\"/\"$LNF\":{\"dtype\":\"I32\"/"
header 'unknown dtype'          "tensor \"$LNF\": .*Q4"                   "s/\"$LNF\":{\"dtype\":\"F32\"/\"$LNF\":{\"dtype\":\"Q4\"/"
header 'dtype of other size'    "tensor \"$LNF\": .*do not fit"           "s/\"$LNF\":{\"dtype\":\"F32\"/\"$LNF\":{\"dtype\":\"F64\"/"
header 'an entry without dtype' "tensor \"$LNF\": "                       "s/\"$LNF\":{\"dtype\":\"F32\",/\"$LNF\":{/"
header 'an entry a string'      "tensor \"$LNF\": "                       "s/\"$LNF\":{[^}]*}/\"$LNF\":\"x\"/"
header 'metadata of numbers'    '__metadata__'                            's/"format":"pt"/"format":3/'
header 'NUL in a name'          'its entry is not an object'              "s/\"$LNF\"/\"$LNF\\\\u0000\"/"

# ---------------------------------------------------------------------------------------------------------
# Output, disk and memory

fresh_model
: >"$box/plain"
refused 'output: below a regular file' 2 "$box/plain/x/.*-o" "${TINY[@]}" -x 1 -o "$box/plain/x"
refused 'output: a regular file' 2 "$box/plain.*-o" "${TINY[@]}" -x 1 -o "$box/plain"
refused 'output: /proc' 2 '/proc/x.*-o' "${TINY[@]}" -x 1 -o /proc/x
refused 'output: a name too long' 2 '-o' "${TINY[@]}" -x 1 -o "$box/$(printf 'x%.0s' {1..300})"
if [ "$(id -u)" -ne 0 ]; then
    mkdir "$box/locked" && chmod 555 "$box/locked"
    refused 'output: a directory without write permission' 2 "$box/locked.*-o" "${TINY[@]}" -x 1 -o "$box/locked/x"
    mkdir -p "$box/sealed/ckpt" && chmod 555 "$box/sealed/ckpt"
    refused 'output: ckpt without write permission' 2 "$box/sealed/ckpt.*-o" "${TINY[@]}" -x 1 -o "$box/sealed"
else
    skip 'output: a directory without write permission' 'root may write everywhere'
    skip 'output: ckpt without write permission' 'root may write everywhere'
fi
mkdir "$box/blocked" && : >"$box/blocked/ckpt"
refused 'output: ckpt is a file' 2 "$box/blocked/ckpt.*-o" "${TINY[@]}" -x 1 -o "$box/blocked"

# A foreign model is never replaced, with or without -y 1.
foreign=$box/foreign
cp -r "$good" "$foreign"
for resume in 0 1; do
    refused "output: a foreign model, -y $resume" 2 "$foreign/model.safetensors: .*--overwrite 1" "${TINY[@]}" -x 1 -y $resume -o "$foreign"
done
rm "$foreign/model.safetensors"
for resume in 0 1; do
    refused "output: a foreign config.json, -y $resume" 2 "$foreign/config.json: .*--overwrite 1" "${TINY[@]}" -x 1 -y $resume -o "$foreign"
done
accepted 'output: a foreign model, --overwrite 1' "${TINY[@]}" -x 1 --overwrite 1 -o "$foreign"

# Two processes: the second is refused as long as the first one lives.
shared=$box/shared
: >"$work/first"
"$PROGRAM" "${SIZES[@]}" -v 0 -s 0 -n 50 -nk 0 -x 1000000 -o "$shared" </dev/null >"$work/first" 2>&1 &
pid=$!
until [ -d "$shared/ckpt/00000050" ] || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
for flags in '-y 0' '-y 1' '--overwrite 1'; do
    run "${SIZES[@]}" -v 0 -s 0 -n 1 -x 1000000 -o "$shared" $flags
    verdict "output: in use by another process, $flags" "$(ended_with_error 2 "$shared: another process")"
done
run -y 1 --evaluate 1 -m 1 -o "$shared"
verdict 'output: in use by another process, --evaluate 1' "$(ended_with 0)"
kill -KILL $pid
{ wait $pid; } 2>/dev/null
accepted 'output: free again after SIGKILL' -y 1 --stop-after 50 -o "$shared"

# A failed save: one error at the end; the previous checkpoint remains, and no partial one.
failed_to_save() { # NAME OUT PATTERN
    local why
    why=$(ended_with_error 1 "$3" warnings)
    grep -q "^warning: $2/ckpt/0000000[0-9]: .*could not be saved" "$work/stderr" || why=${why:-'no warning with the checkpoint'}
    [ "$(ls "$2/ckpt" | tr '\n' ' ')" = '00000002 ' ] || why=${why:-"checkpoints: $(ls "$2/ckpt" | tr '\n' ' ')"}
    find "$2" -name '*.tmp' | grep -q . && why=${why:-'a .tmp was left'}
    verdict "$1" "$why"
}
accepted 'a run to resume' "${TINY[@]}" -x 4 --stop-after 2 -o "$box/limit"
(trap '' XFSZ; ulimit -f 40; "$PROGRAM" -y 1 -o "$box/limit" </dev/null >"$work/stdout" 2>"$work/stderr")
status=$?
failed_to_save 'write failure (ulimit -f)' "$box/limit" '00000004|limit'
accepted 'write failure: resumed after making room' -y 1 -o "$box/limit"

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
