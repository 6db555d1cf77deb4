#!/bin/bash
# What runs of train_bert and use_bert print and write, where that differs from GPT-2's (cli.sh):
#
#     bash dev/test/cli_bert.sh PROGRAM          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

o=$box/out
SIZES=(-e L=1,C=16,NH=2,T=16)
TINY=("${SIZES[@]}" -v 0 -s 0 -n 0)
STEP='^step +[0-9]+/[0-9]+ \| loss [0-9.]+ \| lr [0-9.e+-]+ \| norm [0-9.]+ \| [0-9.]+ ms \| [0-9,]+ tok/s'

# ---------------------------------------------------------------------------------------------------------
# -x 0

published() { # NAME TENSORS PARAMETERS FLAG...
    local why before
    before=$(listing "$box")
    run -e "$1" -x 0 -o "$o" "${@:4}"
    why=$(ended_with 0)
    [ -n "$why" ] || grep -q "^$2 tensors, $3 parameters$" "$work/stdout" || why="not $2 tensors, $3 parameters"
    [ -n "$why" ] || grep -q '^memory plan: ' "$work/stdout" || why='no memory plan'
    [ -n "$why" ] || [ "$before" = "$(listing "$box")" ] || why='files were created or changed'
    verdict "-x 0, $1 ${*:4}" "$why"
}
published bert-base 206 110106428
published bert-large 398 336226108
published bert-base 202 109514298 --nsp 0

run -e bert-base -x 0 -b 1 --evaluate 1
why=$(ended_with 0)
grep -q '^memory plan of forward passes only: parameters 420\.2 MiB, optimizer 0\.0 MiB, ' "$work/stdout" || why=${why:-'another plan'}
verdict '-x 0, bert-base --evaluate 1' "$why"

run --help
why=$(ended_with 0)
for flag in -i -j -e -o -y -b -t -d -x -k -l -u -q -c -r -w -a -v -m -s -n -nk -nm --phase2 --pack --optimizer --nsp; do
    grep -Eq -- "^ +(-[a-z]+[, ]+)?$flag[ ,]" "$work/stdout" || why=${why:-"$flag is missing"}
done
awk 'length > 100 { exit 1 }' "$work/stdout" || why=${why:-'lines of more than 100 columns'}
verdict '--help' "$why"

# ---------------------------------------------------------------------------------------------------------
# Output and files of a run

run "${SIZES[@]}" -x 5 -v 2 -m 2 -s 5 -n 2 -o "$o"
why=$(ended_with 0)
[ -n "$why" ] || [ ! -s "$work/stderr" ] || why="stderr is not empty: $(head -n 1 "$work/stderr")"
[ "$(grep -Ec "$STEP" "$work/stdout")" -eq 5 ] || why=${why:-'not one line per step'}
[ "$(grep -c '^step [0-9]*/5 | val loss [0-9.]*$' "$work/stdout")" -eq 4 ] || why=${why:-'no validation at 0, 2, 4 and 5'}
grep -q '^[0-9]* parameters, .* training tokens, at most 128 a step.* steps 1 to 5 ' "$work/stdout" || why=${why:-'no line about the run'}
grep -q '^sample after step 5:$' "$work/stdout" || why=${why:-'no sample at the end'}
grep -aq '\[MASK\]' "$o/sample.txt" || why=${why:-'no masks in the sample'}
verdict 'stdout of a run' "$why"
why=
N='-?[0-9][0-9.e+-]*'
[ "$(grep -Ec "^\{\"step\": [0-9]+, \"loss\": $N, .*\"tok_s\": $N, .*\"mlm_loss\": $N, \"nsp_loss\": $N, \"seq_s\": $N\}$" "$o/log.jsonl")" -eq 5 ] || why='not 5 lines of steps'
[ "$(grep -Ec "^\{\"step\": [0-9]+, \"val_loss\": $N, \"val_mlm_loss\": $N, \"val_mlm_accuracy\": $N, \"val_nsp_loss\": $N, \"val_nsp_accuracy\": $N\}$" "$o/log.jsonl")" -eq 4 ] || why=${why:-'not 4 lines of validations'}
verdict 'log.jsonl' "$why"
why=
for file in config.json model.safetensors vocab.txt tokenizer_config.json log.jsonl loss.svg; do
    [ -s "$o/$file" ] || why=${why:-"$file is missing"}
done
grep -q '"architectures": \["BertForPreTraining"\]' "$o/config.json" || why=${why:-'not BertForPreTraining'}
verdict 'files of a run' "$why"

# The saved model has the validation loss that was logged.
run -y 1 -o "$o" --evaluate 1
why=$(ended_with 0)
logged=$(sed -n 's/.*"val_loss": \([0-9.]\{6\}\).*/\1/p' "$o/log.jsonl" | tail -n 1)
grep -q "^val loss $logged.*masked tokens: .* % correct | next sentence: " "$work/stdout" || why=${why:-"val loss $(cat "$work/stdout"), logged $logged"}
verdict '--evaluate 1' "$why"
# -m 0 takes all held-out sequences, whatever -b is.
of_all() { run -e "$o" --evaluate 1 -m 0 -b "$1" -o ''; sed -nE 's/^val loss ([0-9.]+).*/\1/p' "$work/stdout"; }
eight=$(of_all 8) more=$(of_all 999)
why=$(awk -v a="$eight" -v b="$more" 'BEGIN {if (a == "" || b == "" || (a - b) ^ 2 > 4e-10) print a " by 8, " b " by 999"}')
verdict '-m 0 takes all, with any -b' "$why"
accepted '--nsp 0'                 "${SIZES[@]}" -x 2 -v 2 -m 1 -s 2 -o "$box/plain" --nsp 0
why=
grep -q '"architectures": \["BertForMaskedLM"\]' "$box/plain/config.json" || why='not BertForMaskedLM'
grep -q 'nsp' <(tail -n 2 "$box/plain/log.jsonl") && why=${why:-'its log has losses of next sentences'}
run -e "$box/plain" -x 1 -v 0 -s 0 -o ''
why=${why:-$(ended_with 0)}
grep -q 'lacks what is initialised instead: bert.pooler.dense.weight, .*cls.seq_relationship.bias$' "$work/stdout" || why=${why:-'the missing tensors are not reported'}
verdict 'a BertForMaskedLM: missing heads are initialised' "$why"
accepted 'a BertForPreTraining without its head' -e "$o" -x 1 -v 1 -m 1 -s 0 -o '' --nsp 0
accepted 'LAMB, whole words' "${TINY[@]}" -x 3 -o '' --optimizer lamb --whole-word-masking 1
accepted 'several sequences a row' "${SIZES[@]}" -t 16 -x 3 -v 3 -m 1 -s 3 -o '' --pack 3
accepted 'the published mean, four micro-batches' "${TINY[@]}" -b 2 -d 128 -x 3 -o '' --loss-mean micro

run -e L=1,C=16,NH=2,T=32 -t 16 -x 2 -v 0 -s 0 -n 0 -o "$box/phase1" --optimizer lamb
run --phase2 "$box/phase1" -t 32 -x 2 -v 0 -s 0 -n 0 -o "$box/phase2" --optimizer lamb
why=$(ended_with 0)
grep -q ' steps 1 to 2 ' "$work/stdout" || why=${why:-'it does not start at step 1'}
grep -q "^[0-9]* parameters, $box/phase1/ckpt/" "$work/stdout" || why=${why:-'the start checkpoint is not reported'}
verdict 'phase 2' "$why"

# ---------------------------------------------------------------------------------------------------------
# Fill-mask

run -e "$o" --fill 'ma[MASK]n(voi[MASK])'
why=$(ended_with 0)
[ "$(head -n 1 "$work/stdout")" = 'ma[MASK]n(voi[MASK])' ] || why=${why:-"the text is $(head -n 1 "$work/stdout")"}
[ "$(wc -l <"$work/stdout")" -ge 4 ] || why=${why:-'not a line of predictions for each mask'}
verdict '--fill' "$why"
run -y 1 -o "$o" --fill '[MASK]'
verdict '--fill, -y 1' "$(ended_with 0)"
on_full_disk '--fill' -e "$o" --fill 'a[MASK]c'
# ---------------------------------------------------------------------------------------------------------
# Vectors of texts; dev/test/check_embed.py checks their values

printf 'abc\n\nabcdefghijklmnopqrstuvw' >"$work/lines"
run -e "$o" --embed "$work/lines"
why=$(ended_with 0)
[ "$(cat "$work/stdout")" = "$work/lines.npy: 3 vectors of 16 channels; 1 line was cut to 16 tokens" ] || why=${why:-"$(cat "$work/stdout")"}
[ "$(wc -c <"$work/lines.npy")" = $((128 + 3 * 16 * 4)) ] || why=${why:-'another size'}
verdict '--embed' "$why"
run -y 1 -o "$o" --embed "$work/lines" --vectors "$work/again.npy"
verdict '--embed, -y 1' "$(ended_with 0)$(cmp "$work/lines.npy" "$work/again.npy" 2>&1)"
# 14 letters leave room for [CLS] and [SEP].
printf 'abcdefghijklmnopqrstuvw\nabcdefghijklmn\nabcdefghijklm\n' >"$work/cut"
run -e "$o" --embed "$work/cut" -b 1
vector() { tail -c +$((129 + 64 * $1)) "$work/cut.npy" | head -c 64 | cksum; } # LINE, from 0
why=$(ended_with 0)
[ "$(vector 0)" = "$(vector 1)" ] || why=${why:-'it is not the vector of the line without the rest'}
[ "$(vector 1)" != "$(vector 2)" ] || why=${why:-'all lines have one vector: this test checks nothing'}
verdict '--embed, a line that is cut' "$why"
on_full_disk '--embed' -e "$o" --embed "$work/lines"
printf 'abc\r\nabc\n' >"$work/crlf"
run -e "$o" --embed "$work/crlf"
verdict '--embed, a line that ends with CR' "$(ended_with 0)$(cmp <(tail -c +129 "$work/crlf.npy" | head -c 64) <(tail -c 64 "$work/crlf.npy") 2>&1)"
for lines in 20 2000; do  # a full disk at the end, and while it is written
    yes text | head -n $lines >"$work/many"
    (trap '' XFSZ; ulimit -f 1; "$(use_program)" -e "$o" --embed "$work/many" --vectors "$box/v.npy" </dev/null >/dev/null 2>"$work/stderr")
    status=$?
    why=$(ended_with_error 1 'v.npy: cannot be written: File too large')$(ls "$box" | grep '^v')
    verdict "--embed of $lines lines on a full disk" "$why"
done
cp "$work/lines" "$box/lines.tmp" && ln -s out/vocab.txt "$box/linked"
refused '--vectors through a link' 2 '--vectors .*linked.*(not a file of this flag|is an input)' \
    -e "$o" --embed "$box/lines.tmp" --vectors "$box/linked"
: >"$work/empty.npy"
accepted '--vectors, an empty file' -e "$o" --embed "$work/lines" --vectors "$work/empty.npy"

# ---------------------------------------------------------------------------------------------------------
# A file of one document

words() { local n; for n in "$@"; do little_endian 4 "$n"; done; }
# MAGIC VERSION TOKENS SENTENCES DOCUMENTS, then a vocabulary of 261 with the five ids at its end.
{ words 20261121 1 40 2 1 261 256 257 258 259 260; head -c 1060 /dev/zero; words 0 20 40 0 2; head -c 36 /dev/zero; } >"$box/one.bin"
refused 'one document, --nsp 1' 2 'one.bin: .*one document.*--nsp 0' "${TINY[@]}" -x 2 -o "$box/new" -i "$box/one.bin"
accepted 'one document, --nsp 0' "${TINY[@]}" -b 1 -x 1 -o '' -i "$box/one.bin" --nsp 0
mkdir "$work/unpadded" && cp "$o"/{config.json,model.safetensors,vocab.txt} "$work/unpadded"
sed -i 's/"pad_token_id": 256/"pad_token_id": null/' "$work/unpadded/config.json"
accepted 'config.json: no padding' "${TINY[@]:2}" -x 1 -o "$box/unpadded" -e "$work/unpadded"
verdict 'config.json: no padding, written as null' "$(grep -q '"pad_token_id": null' "$box/unpadded/config.json" || echo 'it is not')"

finish
