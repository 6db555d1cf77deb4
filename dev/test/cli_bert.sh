#!/bin/bash
# The command line of train_bert and its errors for bad input, where they differ from train_gpt2 (cli.sh):
#
#     bash dev/test/cli_bert.sh PROGRAM          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
golden=$root/dev/reference/golden_bert

o=$box/out
SIZES=(-e L=1,C=16,NH=2,T=16)
TINY=("${SIZES[@]}" -v 0 -s 0 -n 0)
STEP='^step +[0-9]+/[0-9]+ \| loss [0-9.]+ \| lr [0-9.e+-]+ \| norm [0-9.]+ \| [0-9.]+ ms \| [0-9,]+ tok/s'

# ---------------------------------------------------------------------------------------------------------
# Flags and descriptors

f() { refused "flags: $1" 2 "$2" "${TINY[@]}" -o "$o" "${@:3}"; }
f 'unknown'                   "unknown flag '-zz'.*--help"                   -zz 1
f '-g, a flag of GPT-2'       "unknown flag '-g'"                            -g 8
f '-t 7'                      'sequences of 7 tokens are too short.*-t'      -t 7
f '-t above the model'        '-t 17: the model knows 16 positions'          -t 17
f '--nsp 2'                   "--nsp: '2' .*0\.\.1"                          --nsp 2
f '--mask-fraction 0'         "--mask-fraction: '0'"                         --mask-fraction 0
f '--pack 0'                  "--pack: '0'"                                  --pack 0
f '--optimizer sgd'           '--optimizer: .*adamw\|lamb\|muon'             --optimizer sgd
f '--loss-mean sum'           '--loss-mean: .*micro\|global'                 --loss-mean sum
f '--phase2 of no run'        "--phase2 $box/none: has no complete checkpoint" --phase2 "$box/none"
f '-d that is not a multiple' '-d 100: .*multiple of the 128 tokens'         -d 100
e() { refused "descriptor: $1" 2 "$2" -v 0 -s 0 -o "$o" -e "$3"; }
e 'no such size'              '-e bert-huge: '                               bert-huge
e 'a name on the Hub'         '-e bert-base-uncased: is neither .* hub:NAME'  bert-base-uncased
e 'unknown key'               '-e L=1,D=1: '                                 L=1,D=1
e 'neither tied nor untied'   '-e L=1,tied=2: '                              L=1,tied=2
e 'no layers'                 '"num_hidden_layers": 0 .*1\.\.4096'           L=0
e 'heads do not fit'          '15 channels cannot be cut into 2 heads'       L=1,C=15,NH=2
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
moved() { # NAME PATTERN FLAG...: train_bert itself is given a flag of another program
    "$PROGRAM" "${@:3}" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
    verdict "$1" "$(ended_with_error 2 "$2")"
}
moved 'flags: fine-tuning is another program' "'--task': it is a flag of ./finetune_bert" -o '' --task answer
moved 'flags: --task=classify' "'--task': it is a flag of ./finetune_bert" --task=classify
moved 'flags: filling in masks is another program' "'--fill': it is a flag of ./use_bert" -o '' --fill 'a [MASK]'
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

# Global means do not depend on how a step is split: losses agree in 6 digits.
cut_losses() { # SEQUENCES-IN-A-MICRO-BATCH
    run "${TINY[@]}" -b "$1" -d 128 -x 8 -l 1e-2 --dropout 0.1 -o "$box/cut$1"
    sed -nE 's/.*"loss": ([0-9.]{6}).*/\1/p' "$box/cut$1/log.jsonl" | tr '\n' ' '
}
read -ra whole <<<"$(cut_losses 8)"
read -ra parts <<<"$(cut_losses 2)"
why=
[ ${#whole[@]} -eq 8 ] && [ ${#parts[@]} -eq 8 ] || why='not 8 losses'
for i in "${!whole[@]}"; do  # in units of 1e-4; sums in another order drift apart
    difference=$((10#${whole[i]/./} - 10#${parts[i]/./}))
    [ ${difference#-} -le 5 ] || why=${why:-"step $((i + 1)): ${whole[i]} against ${parts[i]}"}
done
verdict 'global means do not depend on the micro-batch' "$why"

# Phase 2: another length, step 0, the weights and moments of phase 1.
accepted 'phase 1' -e L=1,C=16,NH=2,T=32 -t 16 -x 6 -v 0 -s 0 -n 0 -o "$box/phase1" --optimizer lamb
refused '--phase2 with another model' 2 'leave -e out' --phase2 "$box/phase1" -e L=9 -t 32 -x 4 -o "$box/new"
refused '--phase2 with another optimizer' 2 "--phase2 $box/phase1: has the moments of --optimizer lamb, .* adamw" \
    --phase2 "$box/phase1" -t 32 -x 4 -o "$box/new"
accepted 'another optimizer and -t, to evaluate' -e "$box/phase1" -t 32 --evaluate 1 -m 1
run --phase2 "$box/phase1" -t 32 -x 4 -u 2 -v 0 -s 0 -n 0 -o "$box/phase2" --optimizer lamb --stop-after 2
why=$(ended_with 0)
grep -q ' steps 1 to 4 ' "$work/stdout" || why=${why:-'it does not start at step 1'}
grep -q "^[0-9]* parameters, $box/phase1/ckpt/" "$work/stdout" || why=${why:-'the start checkpoint is not reported'}
run -y 1 -o "$box/phase2"
why=${why:-$(ended_with 0)}
run --phase2 "$box/phase1" -t 32 -x 4 -u 2 -v 0 -s 0 -n 0 -o "$box/phase2-straight" --optimizer lamb
cmp -s "$box/phase2/model.safetensors" "$box/phase2-straight/model.safetensors" || why=${why:-'the resumed run has another model'}
run -e "$box/phase1" -t 32 -x 4 -u 2 -v 0 -s 0 -n 0 -o "$box/afresh" --optimizer lamb
cmp -s "$box/afresh/model.safetensors" "$box/phase2-straight/model.safetensors" && why=${why:-'the moments were not loaded'}
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
refused '--fill of an unset variable' 2 "--fill '': is empty" --fill '' -o "$box/new"
refused '--fill without a mask' 2 "contains no \[MASK\]" -e "$o" --fill 'main'
refused '--fill, too long'      2 'has 20 tokens .*maximum is 16' -e "$o" --fill 'abcdefghijklmnopq[MASK]'
on_full_disk '--fill' -e "$o" --fill 'a[MASK]c'
refused '--fill without a model' 2 '--fill needs a trained model' --fill 'a[MASK]'
for source in "$box/none" bert-base-uncased; do
    refused "--fill -e ${source##*/}" 2 "-e $source: (no such file|is neither)" -e "$source" --fill 'a[MASK]'
    refused "--embed -e ${source##*/}" 2 "-e $source: (no such file|is neither)" -e "$source" --embed "$work/lines"
    refused "--explain -e ${source##*/}" 2 "-e $source: (no such file|is neither)" -e "$source" --explain 'a[MASK]' -o "$box/new"
done
refused '--fill without a vocabulary' 2 'no vocab.txt' -e "$golden" --fill 'a [MASK]'

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
: >"$work/empty"
refused '--embed of an unset variable' 2 "--embed '': is empty" --embed '' -o "$box/new"
refused '--embed of no lines'        2 'empty: has no lines' -e "$o" --embed "$work/empty" --vectors "$box/new"
refused '--embed of no file'         2 'none: cannot be' -e "$o" --embed "$work/none" --vectors "$box/new"
refused '--embed and --fill'         2 '--fill is given too' -e "$o" --embed "$work/lines" --fill 'a [MASK]'
refused '--embed without a model'    2 '--embed needs a trained model' --embed "$work/lines"
refused '--embed without a vocabulary' 2 'no vocab.txt' -e "$golden" --embed "$work/lines" --vectors "$box/new"
refused '--embed, no room for [SEP]' 2 'at least 2 tokens' -e "$o" -t 1 --embed "$work/lines" --vectors "$box/new"
refused '--vectors in no directory'  2 '--vectors .*cannot be written' -e "$o" --embed "$work/lines" --vectors "$box/none/v.npy"
for lines in 20 2000; do  # a full disk at the end, and while it is written
    yes text | head -n $lines >"$work/many"
    (trap '' XFSZ; ulimit -f 1; "$(use_program)" -e "$o" --embed "$work/many" --vectors "$box/v.npy" </dev/null >/dev/null 2>"$work/stderr")
    status=$?
    why=$(ended_with_error 1 'v.npy: cannot be written: File too large')$(ls "$box" | grep '^v')
    verdict "--embed of $lines lines on a full disk" "$why"
done
refused '--vectors, a directory'     2 '--vectors .*not a regular file' -e "$o" --embed "$work/lines" --vectors "$box"
# No output replaces an input or a file of a model, not through a link or as the temporary file either.
cp "$work/lines" "$box/lines.tmp" && ln -s out/vocab.txt "$box/linked"
for file in lines.tmp lines out/model.safetensors out/config.json linked; do
    refused "--vectors $file" 2 "--vectors .*${file%.tmp}.*(not a file of this flag|is an input)" \
        -e "$o" --embed "$box/lines.tmp" --vectors "$box/$file"
done
cp "$work/lines" "$box/lines.tmp.npy"
refused '--embed, whose .npy is not one' 2 'lines.tmp.npy: .*not a file of this flag' -e "$o" --embed "$box/lines.tmp"
: >"$work/empty.npy"
accepted '--vectors, an empty file' -e "$o" --embed "$work/lines" --vectors "$work/empty.npy"

# ---------------------------------------------------------------------------------------------------------
# Data

d=$box/data
mkdir "$d"
cp data/builtin/bert/train.bin "$d/good.bin"
head -c 500 "$d/good.bin" >"$d/half-header.bin"
head -c 90000 "$d/good.bin" >"$d/truncated.bin"
head -c 4000 "$PROGRAM" >"$d/foreign.bin"
: >"$d/empty.bin"
cp data/builtin/train.bin "$d/tokens.bin"
words() { local n; for n in "$@"; do little_endian 4 "$n"; done; }
# MAGIC VERSION TOKENS SENTENCES DOCUMENTS, then a vocabulary of 261 with the five ids at its end.
sentences() { words "$@" 261 256 257 258 259 260; head -c $((1024 - 44)) /dev/zero; }
{ sentences 20261121 1 40 2 1; head -c 80 /dev/zero; words 0 20 40 0 2; head -c 36 /dev/zero; } >"$d/one.bin"
{ sentences 20261121 3 40 2 1; head -c 80 /dev/zero; words 0 20 40 0 2; head -c 36 /dev/zero; } >"$d/version.bin"
bad_data() { refused "data: $1" 2 "$d/$2: .*$3" "${TINY[@]}" -x 2 -o "$box/new" -i "$d/$2" "${@:4}"; }
bad_data 'empty'                         empty.bin       'is empty'
bad_data 'ends inside the header'        half-header.bin 'truncated'
bad_data 'truncated'                     truncated.bin   'truncated'
bad_data 'foreign'                       foreign.bin     'not a file of sentences.*magic'
bad_data 'token shards without sentences' tokens.bin     'without sentences.*prepare_bert'
bad_data 'another version'               version.bin     'version 3'
bad_data 'one document, --nsp 1'         one.bin         'one document.*--nsp 0'
accepted 'data: one document, --nsp 0' "${TINY[@]}" -b 1 -x 1 -o '' -i "$d/one.bin" --nsp 0
refused 'data: a vocabulary that does not fit' 2 'vocabulary of 261 tokens.*larger than.* 260' -v 0 -s 0 -x 1 -o "$box/new" -e L=1,C=16,NH=2,T=16,V=260
cp data/builtin/bert/val.bin "$d/words.bin" && printf '\003' | dd of="$d/words.bin" bs=1 seek=40 conv=notrunc status=none
refused 'data: validation with another vocabulary' 2 'words.bin: was made with another vocabulary' "${TINY[@]}" -x 2 -o "$box/new" -j "$d/words.bin"
refused 'data: of another vocabulary than the model' 2 '\[MASK\] being 259, .*\[MASK\] being 260' -v 0 -s 0 -x 1 -o "$box/new" -e "$o" -i "$d/words.bin"
# The same size and special tokens: only the hash in the header differs.
cp data/builtin/bert/val.bin "$d/hash.bin" && printf '\001' | dd of="$d/hash.bin" bs=1 seek=44 conv=notrunc status=none
refused 'data: of another vocabulary of the same size' 2 'hash.bin: was made with another vocabulary than this vocab.txt, though both have 261' -v 0 -s 0 -x 1 -o "$box/new" -e "$o" -i "$d/hash.bin"
cp data/builtin/bert/val.bin "$d/hash2.bin" && printf '\002' | dd of="$d/hash2.bin" bs=1 seek=44 conv=notrunc status=none
refused 'data: files of two vocabularies' 2 'hash2.bin: its vocabulary differs from that of .*hash.bin' "${TINY[@]}" -x 1 -o "$box/new" -i "$d/hash*.bin"
cp "$d/words.bin" "$d/bits.bin" && printf '\004' | dd of="$d/bits.bin" bs=1 seek=40 conv=notrunc status=none
printf '\020' | dd of="$d/bits.bin" bs=1 seek=$(($(wc -c <"$d/bits.bin") - 8)) conv=notrunc status=none
refused 'data: other tokens that continue words' 2 'bits.bin: was made with another vocabulary' "${TINY[@]}" -x 1 -o "$box/new" -j "$d/bits.bin"
refused 'data: no such file' 2 'none.bin: no file matches' "${TINY[@]}" -o "$box/new" -i "$d/none.bin"

# ---------------------------------------------------------------------------------------------------------
# Model directories

good=$work/model m=$box/model
mkdir "$good"
cp "$o"/{config.json,model.safetensors,vocab.txt} "$good"
config() { # NAME PATTERN SED-SCRIPT
    rm -rf "$m" && cp -r "$good" "$m"
    sed "$3" "$good/config.json" >"$m/config.json"
    cmp -s "$good/config.json" "$m/config.json" && { fail "config.json: $1" 'the sed script changed nothing'; return; }
    refused "config.json: $1" 2 "config.json: .*$2" -v 0 -s 0 -n 0 -x 1 -o "$box/new" -e "$m"
}
key() { echo "key \"$1\""; }
config 'model_type gpt2'           "$(key model_type)"                   's/"bert"/"gpt2"/'
config 'activation relu'           "$(key hidden_act)"                   's/"gelu"/"relu"/'
config 'no layers'                 "$(key num_hidden_layers)"            's/"num_hidden_layers": 1/"num_hidden_layers": 0/'
config 'hidden_size missing'       "$(key hidden_size)"                  's/"hidden_size": 16, //'
config 'heads that do not fit'     '3 heads'                             's/"num_attention_heads": 2/"num_attention_heads": 3/'
config 'relative positions'        "$(key position_embedding_type)"      's/}$/, "position_embedding_type": "relative_key"}/'
config 'tie_word_embeddings a number' "$(key tie_word_embeddings)"       's/"tie_word_embeddings": true/"tie_word_embeddings": 1/'
config 'a decoder'                 "$(key is_decoder).*false"            's/}$/, "is_decoder": true}/'
config 'one token type'            "$(key type_vocab_size)"              's/"type_vocab_size": 2/"type_vocab_size": 1/'
config 'dropout above 1'           "$(key hidden_dropout_prob)"          's/"hidden_dropout_prob": 0/"hidden_dropout_prob": 1.5/'
config 'padding beyond the vocabulary' "$(key pad_token_id)"             's/"pad_token_id": 256/"pad_token_id": 261/'
config 'negative padding'          "$(key pad_token_id)"                 's/"pad_token_id": 256/"pad_token_id": -1/'
rm -rf "$m" && cp -r "$good" "$m" && sed -i 's/"pad_token_id": 256/"pad_token_id": null/' "$m/config.json"
accepted 'config.json: no padding' -v 0 -s 0 -n 0 -x 1 -o "$box/unpadded" -e "$m"
verdict 'config.json: no padding, written as null' "$(grep -q '"pad_token_id": null' "$box/unpadded/config.json" || echo 'it is not')"
rm -rf "$m" && cp -r "$good" "$m" && sed -i 's/"num_hidden_layers": 1/"num_hidden_layers": 2/' "$m/config.json"
accepted 'config.json alone: a model from scratch' -v 0 -s 0 -n 0 -x 1 -o '' -e "$m/config.json"
cp "$m/config.json" "$m/other_config.json"
refused 'a file that only ends in config.json' 2 'is neither a model directory' -v 0 -s 0 -x 1 -o "$box/new" -e "$m/other_config.json"
refused 'more layers than the weights' 2 'tensor "bert.encoder.layer.1\..*missing' -v 0 -s 0 -x 1 -o "$box/new" -e "$m"

finish
