#!/usr/bin/env bash
# Directories of models as others write them: heads that differ from a tied embedding, names, shards, and what config.json
# says besides the sizes. What is refused is in refuse.txt.
#
#     bash dev/test/model_dir.sh TRAIN_GPT2 TRAIN_BERT        from the repository's root
#
# PYTHON names the interpreter (default python3), which needs nothing but its standard library. Ends with
# `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-} python=${PYTHON:-python3} bert=$(realpath "${2:-train_bert}")
. "$(dirname "$0")/shell.sh"
gpt2=$PROGRAM
[ -x "$bert" ] || { echo "usage: bash $0 TRAIN_GPT2 TRAIN_BERT" >&2; exit 2; }
if ! "$python" -c '' 2>/dev/null; then
    skip model_dir "$python does not run"
    finish
    exit
fi

edit() { "$python" "$root/dev/test/edit.py" "$@" || fail "edit $*" 'this test is broken'; }
# A copy of the model SOURCE as $m, changed by each COMMAND, whose words are separated by spaces.
changed() { # SOURCE COMMAND...
    local source=$1 command
    shift
    m=$work/changed
    rm -rf "$m" && cp -r "$source" "$m"
    for command; do edit "$m" $command; done
}
printed() { sed -nE 's/^val loss ([0-9.a-z-]+).*/\1/p' "$work/stdout"; }

# ---------------------------------------------------------------------------------------------------------
# The models: a GPT-2, a BERT and a classifier

g=$work/gpt2 b=$work/bert c=$work/classifier
mkdir "$g" "$b" "$c"
NO=(-v 0 -s 0 -n 0)
# Make DIR the model of the run that has ended, with these files of its tokenizer.
take() { # DIR FILE...
    local dir=$1 file
    for file in config.json model.safetensors "${@:2}"; do cp "$work/run/$file" "$dir"; done
    rm -r "$work/run"
}
run -e L=2,C=16,NH=2,T=16 -x 3 -l 1e-2 "${NO[@]}" -o "$work/run"
verdict 'a GPT-2' "$(ended_with 0)"
take "$g" vocab.json merges.txt tokenizer.json
PROGRAM=$bert
run -e L=2,C=16,NH=2,T=96 -x 3 -b 2 -l 1e-2 "${NO[@]}" -o "$work/run"
verdict 'a BERT' "$(ended_with 0)"
take "$b" vocab.txt tokenizer_config.json
printf 'no\tab\nyes\tcd\nno\tba\nyes\tdc\n' >"$b/examples.tsv"
TSV=(--task classify -b 2 -i "$b/examples.tsv" -j "$b/examples.tsv")
run -e "$b" "${TSV[@]}" -x 2 "${NO[@]}" -o "$work/run"
verdict 'a classifier' "$(ended_with 0)"
take "$c" vocab.txt tokenizer_config.json

# One multiple-choice example: "a", then " b", " cd", " e" or " f".
{ little_endian 4 20240522; little_endian 4 1; little_endian 4 1; little_endian 4 40; head -c 1008 /dev/zero
  for word in 65535 40 0 1 4 1 97 2 32 98 3 32 99 100 2 32 101 2 32 102; do little_endian 2 $word; done; } >"$work/choices.bin"

# ---------------------------------------------------------------------------------------------------------
# Weights that are finite but make losses that are not: --on-nan skip goes on

PROGRAM=$gpt2
changed "$g" 'set transformer.ln_f.weight all 3e38'
run -e "$m" -x 1 -v 1 -m 1 -s 0 -o '' --on-nan skip
why=$(ended_with 0)
grep -q '^warning: step 0: the validation loss is nan$' "$work/stderr" || why=${why:-'no warning'}
verdict 'losses: GPT-2, --on-nan skip' "$why"
run -e "$m" -x 1 -v 0 -s 0 -h 1 --choices "$work/choices.bin" -o '' --on-nan skip
why=$(ended_with 0)
grep -q '^warning: step 1: a loss on choices is nan$' "$work/stderr" || why=${why:-'no warning'}
verdict 'losses: GPT-2, multiple choice, --on-nan skip' "$why"
# ---------------------------------------------------------------------------------------------------------
# A tied config and a head in the file. Twice the embedding as a head is to the bit what twice the last layernorm is: that
# is how the loss is known here; with transformers 5.23 all of these had the same losses to 1e-6.

evaluate() { # a model, into $loss
    run -e "$1" --evaluate 1 -m 2
    loss=$(printed)
}
heads() { # WHAT MODEL EMBEDDING HEAD LAYERNORM
    local what=$1 plain doubled why
    evaluate "$2"
    plain=$loss
    changed "$2" "scale $5.weight 2" "scale $5.bias 2"
    evaluate "$m"
    doubled=$loss
    why=$(ended_with 0)
    [ -n "$plain" ] && [ "$plain" != "$doubled" ] || why=${why:-'this test compares nothing'}
    changed "$2" "copy $3 $4 1"
    evaluate "$m"
    [ "$loss" = "$plain" ] && [ ! -s "$work/stderr" ] || why=${why:-"$loss, not $plain; $(cat "$work/stderr")"}
    verdict "heads: $what, the embedding" "$why"
    changed "$2" "copy $3 $4 2"
    evaluate "$m"
    why=$(ended_with 0)
    [ "$loss" = "$doubled" ] || why=${why:-"$loss, not $doubled"}
    grep -q "^warning: $m/model.safetensors: tensor \"$4\" differs from \"$3\", " "$work/stderr" || why=${why:-"no warning: $(cat "$work/stderr")"}
    verdict "heads: $what, another one" "$why"
    run -e "$m" -x 4 --stop-after 2 "${NO[@]}" -o "$work/untied"
    run -y 1 -x 4 "${NO[@]}" -o "$work/untied"
    why=$(ended_with 0)
    [ ! -s "$work/stderr" ] || why=${why:-"said on the way: $(cat "$work/stderr")"}
    run -e "$m" -x 4 "${NO[@]}" -o "$work/straight"
    cmp -s "$work/untied/model.safetensors" "$work/straight/model.safetensors" || why=${why:-'stopped and resumed is not straight'}
    grep -q '"tie_word_embeddings": false' "$work/untied/config.json" || why=${why:-'config.json does not say so'}
    grep -aq "\"$4\"" "$work/untied/model.safetensors" || why=${why:-'it is not saved'}
    evaluate "$work/straight"
    why=${why:-$(ended_with 0)}
    [ ! -s "$work/stderr" ] || why=${why:-"read again: $(cat "$work/stderr")"}
    verdict "heads: $what, trained" "$why"
    rm -rf "$work/untied" "$work/straight"
}
PROGRAM=$gpt2
heads GPT-2 "$g" transformer.wte.weight lm_head.weight transformer.ln_f
PROGRAM=$bert
heads BERT "$b" bert.embeddings.word_embeddings.weight cls.predictions.decoder.weight cls.predictions.transform.LayerNorm

# The decoder's bias is what is added, whatever the other one is.
bias=cls.predictions.bias of_decoder=cls.predictions.decoder.bias
changed "$b" "set $bias all 0.5" "set $bias 97 2"
evaluate "$m"
want=$loss
cp -r "$m" "$work/biased"
changed "$work/biased" "copy $bias $of_decoder 1"
evaluate "$m"
why=$(ended_with 0)
[ "$loss" = "$want" ] && [ ! -s "$work/stderr" ] || why=${why:-"the same bias: $loss, not $want; $(cat "$work/stderr")"}
changed "$work/biased" "copy $bias $of_decoder 1" "set $bias all -1" "set $bias 98 3"
evaluate "$m"
[ "$loss" = "$want" ] || why=${why:-"another bias: $loss, not $want"}
grep -q "^warning: .*tensor \"$of_decoder\" differs from \"$bias\"" "$work/stderr" || why=${why:-"no warning: $(cat "$work/stderr")"}
verdict 'heads: BERT, the bias' "$why"
evaluate "$b"
want=$loss
changed "$b" "copy bert.embeddings.word_embeddings.weight cls.predictions.decoder.weight 1" 'key config.json tie_word_embeddings false'
evaluate "$m"
why=$(ended_with 0)
[ "$loss" = "$want" ] || why=${why:-"$loss, not $want"}
verdict 'heads: BERT, a config that is untied' "$why"
changed "$b" 'key config.json tie_word_embeddings false'
run -e "$m" --evaluate 1 -m 1
why=$(ended_with 0)
grep -q ': lacks what is initialised instead: cls.predictions.decoder.weight$' "$work/stdout" || why=${why:-"said '$(head -n 1 "$work/stdout")'"}
verdict 'heads: BERT, untied but none in the file' "$why"

# ---------------------------------------------------------------------------------------------------------
# Other names: of a wrapper's state, and of tied tensors that save_model() stores once

named() { # NAME MODEL COMMAND...: after the commands still the same model
    local name=$1 why
    evaluate "$2"
    local want=$loss
    changed "${@:2}"
    evaluate "$m"
    why=$(ended_with 0)
    [ -n "$want" ] && [ "$loss" = "$want" ] && [ ! -s "$work/stderr" ] || why=${why:-"$loss, not $want; $(cat "$work/stderr")"}
    verdict "names: $name" "$why"
}
PROGRAM=$gpt2
wte=transformer.wte.weight
named 'GPT-2 by save_model' "$g" "save_model $wte lm_head.weight"
named 'of DistributedDataParallel and torch.compile' "$g" 'prefix module._orig_mod.'
named 'of torch.compile and Lightning, by save_model' "$g" 'prefix _orig_mod.model.' "save_model _orig_mod.model.$wte _orig_mod.model.lm_head.weight"
named 'with a prefix, in shards' "$g" 'prefix model.' shard
PROGRAM=$bert
named 'BERT by save_model' "$b" 'save_model bert.embeddings.word_embeddings.weight cls.predictions.decoder.weight'
named 'BERT of a wrapper' "$b" 'prefix module.'

# ---------------------------------------------------------------------------------------------------------
# Shards

of_shards() { # NAME MODEL FLAG...
    local name=$1 source=$2 why
    shift 2
    run -e "$source" "$@" -x 2 "${NO[@]}" -o "$work/whole"
    changed "$source" shard
    run -e "$m" "$@" -x 2 "${NO[@]}" -o "$work/sharded"
    why=$(ended_with 0)
    cmp -s "$work/whole/model.safetensors" "$work/sharded/model.safetensors" || why=${why:-'another model'}
    verdict "shards: $name" "$why"
    rm -rf "$work/whole" "$work/sharded"
}
PROGRAM=$bert
of_shards BERT "$b"
of_shards 'a classifier' "$c" "${TSV[@]}"
PROGRAM=$gpt2
of_shards GPT-2 "$g"
# ---------------------------------------------------------------------------------------------------------
# What the saved config.json and trainer.json say

says() { # NAME FILE PATTERN
    verdict "$1" "$(ended_with 0)$(grep -Eq "$3" "$2" || echo "$(basename "$2") does not match '$3'")"
}
for kind in gelu gelu_new; do
    PROGRAM=$gpt2
    changed "$g" "key config.json activation_function \"$kind\""
    run -e "$m" -x 1 "${NO[@]}" -o "$work/run"
    says "config.json: GPT-2 with $kind" "$work/run/config.json" "\"activation_function\": \"$kind\""
    rm -rf "$work/run"
    PROGRAM=$bert
    changed "$b" "key config.json hidden_act \"$kind\""
    run -e "$m" -x 1 "${NO[@]}" -o "$work/run"
    says "config.json: BERT with $kind" "$work/run/config.json" "\"hidden_act\": \"$kind\""
    rm -rf "$work/run"
done

# Only the classifier's dropout differs.
dropped() { # DROPOUT OUT
    changed "$b" 'key config.json hidden_dropout_prob 0' 'key config.json attention_probs_dropout_prob 0' "key config.json classifier_dropout $1"
    run -e "$m" "${TSV[@]}" -x 2 "${NO[@]}" -o "$work/$2"
}
dropped 0.5 half
says 'classifier_dropout: is saved' "$work/half/config.json" '"classifier_dropout": 0.5'
dropped 0 none
why=$(ended_with 0)
cmp -s "$work/half/model.safetensors" "$work/none/model.safetensors" && why=${why:-'0.5 is as 0'}
dropped null hidden
cmp -s "$work/hidden/model.safetensors" "$work/none/model.safetensors" || why=${why:-'null is not as hidden_dropout_prob'}
verdict 'classifier_dropout: is used' "$why"

# The built-in tokenizer's end of text is 256; a vocabulary may have more behind it.
PROGRAM=$gpt2
LARGER=(-e L=1,C=16,NH=2,T=256,V=300 -x 1 -b 4 "${NO[@]}")
run "${LARGER[@]}" -o "$work/larger"
says "end of text: the tokenizer's" "$work/larger/config.json" '"bos_token_id": 256, "eos_token_id": 256'

# A run that has had more sequences than 32 bits count.
run -e L=1,C=16,NH=2,T=16 -b 2 -x 4 --stop-after 2 "${NO[@]}" -o "$work/long"
edit "$work/long/ckpt/00000002" key trainer.json samples 6000000000
edit "$work/long/ckpt/00000002" seal
run -y 1 -o "$work/long"
says 'samples: beyond 32 bits' "$work/long/ckpt/00000004/trainer.json" '"samples": 6000000004,'
finish
