#!/usr/bin/env bash
# Directories of models as others write them: weights that are not finite, heads that differ from a tied embedding,
# shards, files of PyTorch, and what config.json says besides the sizes.
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

# edit DIR COMMAND...: change the model or checkpoint in DIR.
#     set TENSOR INDEX VALUE      one element of a tensor of model.safetensors, all of them where INDEX is all
#     copy TENSOR NEW FACTOR      a new tensor, FACTOR times TENSOR
#     scale TENSOR FACTOR         a tensor
#     drop TENSOR                 leave it out
#     shard                       split model.safetensors in two, with an index
#     prefix TEXT                 before every name, as the state of a wrapper has it
#     save_model TENSOR NEW       TENSOR under the name NEW, as save_model() of safetensors.torch stores two tied tensors
#     key FILE KEY JSON           a key of a JSON file
#     seal                        make the manifest fit the files
cat >"$work/edit.py" <<'END'
import array, json, os, struct, sys, zlib

folder, command, *rest = sys.argv[1:]
at = lambda name: os.path.join(folder, name)

def load(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[8 + n + v["data_offsets"][0] : 8 + n + v["data_offsets"][1]]) for k, v in header.items()}

def save(path, tensors, **aliases):
    header, begin = {"__metadata__": {"format": "pt", **aliases}}, 0
    for k, (dtype, shape, raw) in tensors.items():
        header[k] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(raw)]}
        begin += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))

if command == "key":
    path = at(rest[0])
    value = json.load(open(path))
    value[rest[1]] = json.loads(rest[2])
    json.dump(value, open(path, "w"))
elif command == "seal":
    files = []
    for name in sorted(os.listdir(folder)):
        if name != "manifest.json":
            data = open(at(name), "rb").read()
            files.append('\n  {"name": "%s", "bytes": %d, "crc32": "%08x"}' % (name, len(data), zlib.crc32(data)))
    text = '{"files": [' + ",".join(files) + "],\n"
    open(at("manifest.json"), "w").write(text + '"crc32": "%08x"}\n' % zlib.crc32(text.encode()))
else:
    file = "optimizer.safetensors" if rest and rest[0][:2] in ("m.", "v.") else "model.safetensors"
    tensors = load(at(file))
    if command == "shard":
        names = list(tensors)
        parts = {"model-00001-of-00002.safetensors": names[1::2], "model-00002-of-00002.safetensors": names[::2]}
        for name, part in parts.items():
            save(at(name), {k: tensors[k] for k in part})
        json.dump({"metadata": {}, "weight_map": {k: name for name, part in parts.items() for k in part}}, open(at(file + ".index.json"), "w"))
        os.remove(at(file))
        sys.exit()
    if command == "prefix":
        save(at(file), {rest[0] + name: tensor for name, tensor in tensors.items()})
        sys.exit()
    if command == "save_model":
        tensors[rest[1]] = tensors.pop(rest[0])
        save(at(file), tensors, **{rest[0]: rest[1]})
        sys.exit()
    dtype, shape, raw = tensors[rest[0]]
    values = array.array("f", raw)
    if command == "set" and rest[1] == "all":
        values = array.array("f", [float(rest[2])] * len(values))
    elif command == "set":
        values[int(rest[1])] = float(rest[2])
    elif command in ("copy", "scale"):
        values = array.array("f", [float(rest[-1]) * x for x in values])
    if command == "drop":
        del tensors[rest[0]]
    else:
        tensors[rest[1] if command == "copy" else rest[0]] = (dtype, shape, values.tobytes())
    save(at(file), tensors)
END
edit() { "$python" "$work/edit.py" "$@" || fail "edit $*" 'this test is broken'; }
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
# The models: a GPT-2, a BERT, a classifier and a model that answers

g=$work/gpt2 b=$work/bert c=$work/classifier a=$work/answers
mkdir "$g" "$b" "$c" "$a"
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
printf '{"version": "1", "data": [{"title": "t", "paragraphs": [{"context": "abc def ghi", "qas": [{"id": "1", "question": "which?", "answers": [{"text": "def", "answer_start": 4}]}]}]}]}' >"$b/examples.json"
TSV=(--task classify -b 2 -i "$b/examples.tsv" -j "$b/examples.tsv") JSON=(--task answer -b 2 --stride 4 -i "$b/examples.json" -j "$b/examples.json")
run -e "$b" "${TSV[@]}" -x 2 "${NO[@]}" -o "$work/run"
verdict 'a classifier' "$(ended_with 0)"
take "$c" vocab.txt tokenizer_config.json
run -e "$b" "${JSON[@]}" -x 2 "${NO[@]}" -o "$work/run"
verdict 'answers' "$(ended_with 0)"
take "$a" vocab.txt tokenizer_config.json

# One multiple-choice example: "a", then " b", " cd", " e" or " f".
{ little_endian 4 20240522; little_endian 4 1; little_endian 4 1; little_endian 4 40; head -c 1008 /dev/zero
  for word in 65535 40 0 1 4 1 97 2 32 98 3 32 99 100 2 32 101 2 32 102; do little_endian 2 $word; done; } >"$work/choices.bin"

# ---------------------------------------------------------------------------------------------------------
# Weights that are not finite, and weights that are but make losses that are not

PROGRAM=$gpt2
changed "$g" 'set transformer.h.1.mlp.c_fc.bias 5 nan'
not_finite() { refused "not finite: $1" 3 "model.safetensors: tensor \"$2\": holds values that are not finite" "${@:3}"; }
fc=transformer.h.1.mlp.c_fc.bias
not_finite 'GPT-2, --evaluate'  $fc -e "$m" --evaluate 1 -m 1
not_finite 'GPT-2, --choices'   $fc -e "$m" --evaluate 1 -m 1 --choices "$work/choices.bin"
not_finite 'GPT-2, --generate'  $fc -e "$m" --generate 4
not_finite 'GPT-2, training'    $fc -e "$m" -x 1 -o "$box/new"
not_finite 'GPT-2, --on-nan skip' $fc -e "$m" -x 1 -o "$box/new" --on-nan skip
changed "$g" 'set transformer.h.0.attn.c_attn.weight 700 -inf'
not_finite 'GPT-2, a turned matrix' transformer.h.0.attn.c_attn.weight -e "$m" --evaluate 1 -m 1
run -e L=1,C=16,NH=2,T=16 -x 4 --stop-after 2 "${NO[@]}" -o "$work/resumed"
edit "$work/resumed/ckpt/00000002" set m.transformer.wpe.weight 3 inf
edit "$work/resumed/ckpt/00000002" seal
refused 'not finite: a checkpoint' 3 'optimizer.safetensors: tensor "m.transformer.wpe.weight": .*not finite' -y 1 -o "$work/resumed"
# The square of a gradient may be infinite where all else is finite.
edit "$work/resumed/ckpt/00000002" set m.transformer.wpe.weight 3 0
for value in inf -inf nan; do
    edit "$work/resumed/ckpt/00000002" set v.transformer.wpe.weight 3 $value
    edit "$work/resumed/ckpt/00000002" seal
    [ $value = inf ] || refused "not finite: a second moment, $value" 3 'tensor "v.transformer.wpe.weight": .*not finite' -y 1 -o "$work/resumed"
    [ $value != inf ] || accepted 'an infinite second moment' -y 1 -o "$work/resumed" --stop-after 3 -nk 0
    rm -rf "$work/resumed/ckpt/00000003"
done
changed "$g" 'set transformer.ln_f.weight all 3e38'
refused 'losses: GPT-2' 3 'the validation loss is nan' -e "$m" --evaluate 1 -m 1
refused 'losses: GPT-2, a validation in a training' 3 'step 0: the validation loss is nan; .*--on-nan skip' -e "$m" -x 1 -v 1 -m 1 -s 0 -o ''
run -e "$m" -x 1 -v 1 -m 1 -s 0 -o '' --on-nan skip
why=$(ended_with 0)
grep -q '^warning: step 0: the validation loss is nan$' "$work/stderr" || why=${why:-'no warning'}
verdict 'losses: GPT-2, --on-nan skip' "$why"
run -e "$m" --evaluate 1 -j data/builtin/val.bin -m 1 --choices "$work/choices.bin"
verdict 'losses: GPT-2, one line' "$(ended_with_error 3 'the validation loss is nan')"
# Of finite losses but for the example's: its second token's position alone is beyond all.
run -e "$g" -x 1 -v 0 -s 0 -n 0 -h 1 --choices "$work/choices.bin" -o '' --on-nan skip
verdict 'losses: sound multiple choice' "$(ended_with 0)"
refused 'losses: GPT-2, multiple choice in a training' 3 'step 1: (loss nan, gradient norm nan|a loss on choices is nan)' \
    -e "$m" -x 1 -v 0 -s 0 -h 1 --choices "$work/choices.bin" -o ''
run -e "$m" -x 1 -v 0 -s 0 -h 1 --choices "$work/choices.bin" -o '' --on-nan skip
why=$(ended_with 0)
grep -q '^warning: step 1: a loss on choices is nan$' "$work/stderr" || why=${why:-'no warning'}
verdict 'losses: GPT-2, multiple choice, --on-nan skip' "$why"
# One channel alone, so that products overflow and no infinities are added up to NaN.
changed "$g" 'set transformer.ln_f.weight all 0' 'set transformer.ln_f.weight 0 3e38' 'scale transformer.wte.weight 1e3'
for temperature in 0 1; do
    refused "losses: GPT-2, --generate with --temperature $temperature" 3 '--generate: the model.s logits are not finite' \
        -e "$m" --generate 2 --temperature $temperature
done

PROGRAM=$bert
changed "$b" 'set bert.encoder.layer.1.output.dense.weight 9 nan'
dense=bert.encoder.layer.1.output.dense.weight
not_finite 'BERT, --evaluate'   $dense -e "$m" --evaluate 1 -m 1
not_finite 'BERT, --fill'       $dense -e "$m" --fill 'a [MASK] c'
not_finite 'BERT, training'     $dense -e "$m" -x 1 -o "$box/new"
changed "$c" 'set classifier.weight 3 nan'
not_finite 'classify, --predictions' classifier.weight -e "$m" "${TSV[@]}" --evaluate 1 --predictions "$box/new"
changed "$a" 'set qa_outputs.bias 1 inf'
not_finite 'answer, --predictions' qa_outputs.bias -e "$m" "${JSON[@]}" --evaluate 1 --predictions "$box/new"
changed "$b" 'set cls.predictions.transform.LayerNorm.weight all 3e38'
refused 'losses: BERT' 3 'the validation loss is (nan|inf)' -e "$m" --evaluate 1 -m 1
refused 'losses: BERT, a validation in a training' 3 'step 0: the validation loss is (nan|inf)' -e "$m" -x 1 -v 1 -m 1 -s 0 -o ''
refused 'losses: BERT, --fill' 3 '--fill: the model.s logits are not finite' -e "$m" --fill 'a [MASK] c'
changed "$b" 'set bert.encoder.layer.1.output.LayerNorm.weight all 3e38'
refused 'losses: BERT, --embed' 3 'the vector of line 1 is not finite' -e "$m" --embed "$b/examples.tsv" --vectors "$work/v.npy"
changed "$c" 'set bert.pooler.dense.bias all 9' 'set classifier.weight all 3e38'
refused 'losses: classify, --predictions' 3 'a prediction is nan' -e "$m" "${TSV[@]}" --evaluate 1 --predictions "$box/new"
cut -f 2 "$b/examples.tsv" >"$b/texts.tsv"
refused 'losses: classify, --predictions without labels' 3 'a prediction is nan' \
    -e "$m" --task classify -j "$b/texts.tsv" --evaluate 1 --predictions "$box/new"
changed "$a" 'set qa_outputs.weight all 3e38'
refused 'losses: answer, --predictions' 3 'a prediction is nan' -e "$m" "${JSON[@]}" --evaluate 1 --predictions "$box/new"

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
changed "$g" 'prefix model.' "copy model.$wte loss.weight 1"
refused 'names: a prefix of some' 2 "tensor \"$wte\" is missing" -e "$m" --evaluate 1 -m 1
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
cp -r "$m" "$work/shards"
one=model-00001-of-00002.safetensors two=model-00002-of-00002.safetensors index=model.safetensors.index.json
broken() { refused "shards: $1" "$2" "$3" -e "$m" --evaluate 1 -m 1; }
changed "$work/shards" && rm "$m/$two"
broken 'one is missing' 2 "$m/$two: is missing, but $index names it"
changed "$work/shards" && sed -i "s/\"transformer.wpe.weight\": \"$one\"/\"transformer.wpe.weight\": \"$two\"/" "$m/$index"
broken 'a tensor is in another one' 2 "$index: tensor \"transformer.wpe.weight\": is not in $m/$two"
changed "$work/shards" && cp "$g/model.safetensors" "$m/$two"
broken 'a tensor is in two' 2 "tensor \"[a-z0-9_.]*\": is in $m/model-0000[12]-of-00002.safetensors too"
for name in "../changed/$two" "$m/$two" "sub/$two" '..' ''; do
    changed "$work/shards" && sed -i "s|\"$two\"|\"$name\"|" "$m/$index"
    broken "a name of '${name##"$m"}'" 2 "$index: tensor \".*\": is not mapped to a file in the same directory"
done
changed "$work/shards" && sed -i "s/\"$two\"/2/" "$m/$index"
broken 'a name that is a number' 2 "$index: tensor \".*\": is not mapped to a file"
changed "$work/shards" 'key model.safetensors.index.json weight_map []'
broken 'a map that is an array' 2 "$index: key \"weight_map\""
changed "$work/shards" && truncate -s -4 "$m/$one"
broken 'one is truncated' 2 "$m/$one: .*truncated"
changed "$work/shards" && "$python" "$work/edit.py" "$g" key config.json x 0 && cp "$g/model.safetensors" "$work/one" &&
    mv "$m/$one" "$m/model.safetensors" && edit "$m" set transformer.wpe.weight 3 nan && mv "$m/model.safetensors" "$m/$one"
broken 'not finite' 3 "$m/$one: tensor \"transformer.wpe.weight\": holds values that are not finite"
changed "$g" && echo '{' >"$m/$index"
accepted 'shards: model.safetensors comes first' -e "$m" --evaluate 1 -m 1

# ---------------------------------------------------------------------------------------------------------
# Weights that only PyTorch reads

recipe() { # NAME ARCHITECTURES PATTERN [FILE [FRAMEWORK]]
    changed "$g" "key config.json architectures $2" && mv "$m/model.safetensors" "$m/${4:-pytorch_model.bin}"
    refused "recipe: $1" 2 "${4:-pytorch_model.bin}: holds weights as ${5:-PyTorch} writes them; .*$3" -e "$m" -x 1 -o "$box/new"
}
by() { echo "transformers: transformers.$1.from_pretrained..$work/changed..\\.save_pretrained.NEW.,"; }
recipe TensorFlow '["GPT2LMHeadModel"]' 'transformers 4: .*changed., from_tf=True.\.save_pretrained' tf_model.h5 TensorFlow
recipe Flax '["GPT2LMHeadModel"]' 'transformers 4: .*changed., from_flax=True.\.save_pretrained' flax_model.msgpack Flax
recipe GPT-2 '["GPT2LMHeadModel"]' "$(by GPT2LMHeadModel)"
recipe shards '["GPT2LMHeadModel"]' "$(by GPT2LMHeadModel)" pytorch_model.bin.index.json
recipe 'no head' '["BertModel"]' "$(by BertModel)"
recipe 'no class' null 'class, which config.json does not name'
recipe 'a name that is none' '["A\u0022);x"]' 'class, which config.json does not name'

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

# fp8 of earlier versions: 2 is now 1, whose scales are of four matmuls of the layer and the output matrix. Their 1 left out
# the output matrix.
run -e L=1,C=16,NH=2,T=16 -x 4 --stop-after 2 --fp8 1 "${NO[@]}" -o "$work/fp8"
cp -r "$work/fp8" "$work/first"
run -y 1 -o "$work/first"
earlier() { # SED_SCRIPT
    sed -i -E "$1" "$work/fp8/ckpt/00000002/trainer.json" && edit "$work/fp8/ckpt/00000002" seal
}
earlier 's/"fp8": 1,/"fp8": 2, "fp8-fusion": 3,/'
cp -r "$work/fp8" "$work/second"
accepted 'fp8: 2 of an earlier version is 1' -y 1 -o "$work/second"
cmp -s "$work/first/model.safetensors" "$work/second/model.safetensors" && why= || why='the models differ'
verdict 'fp8: resumed with the same bits' "$why"
earlier 's/"fp8-fusion": 3/"fp8-fusion": 0/'
refused 'fp8: without fusion' 2 "the run has --fp8-fusion '0'; that flag was removed, and only '1.2.3' can go on" -y 1 -o "$work/fp8"
earlier 's/"fp8": 2, "fp8-fusion": 0,/"fp8": 1,/; s/("fp8": "[0-9a-f]{1632})[0-9a-f]*/\1/'
refused 'fp8: 1 of an earlier version' 2 'not the state of this model.s 5 fp8 layers.*--fp8 1, which left out the output matrix' -y 1 -o "$work/fp8"
accepted 'fp8: it goes on without fp8' -y 1 --fp8 0 --override 1 -o "$work/fp8"
finish
