#!/usr/bin/env bash
# llm.c's files, from a Hugging Face directory by dev/export_llmc.py into the trainer and back:
#
#     bash dev/test/llmc_files.sh PROGRAM TEST_LLMC_FILES        from the repository's root
#
# PYTHON names the interpreter (default python3), which needs numpy; where it has transformers too, they load what a run
# from a checkpoint of llm.c leaves. LLMC_TEST_DATA names a folder with more models (docs/testing.md). Ends with `N
# passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-} python=${PYTHON:-python3} data=${LLMC_TEST_DATA:-}
test=$(realpath "${2:-build/test_llmc_files}")
. "$(dirname "$0")/shell.sh"
golden=$root/dev/reference/golden_gpt2_tied

if ! "$python" -c 'import numpy' 2>/dev/null; then
    skip export_llmc "$python has no numpy (pip install numpy)"
    finish
    exit
fi
export_llmc() { "$python" "$root/dev/export_llmc.py" "$@" >"$work/stdout" 2>"$work/stderr"; }
exported() { # NAME FLAG...
    local name=$1
    shift
    if export_llmc "$@"; then ok "$name"; else fail "$name" "$(tail -n 1 "$work/stderr")"; fi
}
compared() { # NAME same|rounded|tokens DIR FILE.bin
    if "$test" "${@:2}" >"$work/compared"; then ok "$1"; else fail "$1" "$(grep FAIL "$work/compared")"; fi
}
export_refused() { # NAME PATTERN FLAG...
    local name=$1 pattern=$2 why=
    shift 2
    rm -f "$box"/*
    export_llmc "$@"
    [ $? -eq 2 ] || why='exit status is not 2'
    [ "$(wc -l <"$work/stderr")" -eq 1 ] || why=${why:-"not one line: $(tail -n 2 "$work/stderr" | tr '\n' ' ')"}
    grep -Eq -- "^error: .*$pattern" "$work/stderr" || why=${why:-"'$(cat "$work/stderr")' does not match '$pattern'"}
    [ -z "$(ls "$box")" ] || why=${why:-"it left $(ls "$box")"}
    verdict "export refused: $name" "$why"
}

# ---------------------------------------------------------------------------------------------------------
# The same weights and logits to the bit, and the same tokens

exported 'golden model, version 3' "$golden" "$work/golden.bin"
compared 'golden model, version 3: weights and logits' same "$golden" "$work/golden.bin"
exported 'golden model, version 5' "$golden" "$work/golden5.bin" --version 5
compared 'golden model, version 5: weights and logits' rounded "$golden" "$work/golden5.bin"

run -e L=3,C=24,NH=2,T=16 -x 20 -l 1e-2 -v 0 -s 0 -n 0 -o "$box/hf"
verdict 'a model to export' "$(ended_with 0)"
mkdir "$work/export"
exported 'a trained model' "$box/hf" "$work/export/model.bin"
compared 'a trained model: weights and logits' same "$box/hf" "$work/export/model.bin"
compared 'a trained model: tokens' tokens "$box/hf" "$work/export/gpt2_tokenizer.bin"
exported '--tokens' "$box/hf" "$work/export/model.bin" --tokens "$work/list.bin"
cmp -s "$work/list.bin" "$work/export/gpt2_tokenizer.bin" || fail '--tokens' 'another list'

for place in weights-tiny-gpt2 gpt2-bpe; do
    [ -d "$data/$place" ] || skip "$place" "set LLMC_TEST_DATA to a folder with it (docs/testing.md)"
done
if [ -d "$data/weights-tiny-gpt2" ]; then
    cp -r "$data/weights-tiny-gpt2" "$work/tiny"
    chmod -R u+w "$work/tiny"
    cp "$data/gpt2-bpe/encoder.json" "$work/tiny" 2>/dev/null
    exported '50257 tokens, weights of transformers' "$work/tiny" "$work/tiny.bin"
    compared '50257 tokens: weights and logits' same "$work/tiny" "$work/tiny.bin"
    [ ! -f "$work/tiny/encoder.json" ] || compared '50257 tokens: the list' tokens "$work/tiny" "$work/gpt2_tokenizer.bin"
fi

# ---------------------------------------------------------------------------------------------------------
# Runs from a checkpoint

why=
run -e "$box/hf" --evaluate 1 -m 3
[ -z "$(ended_with 0)" ] || why=$(ended_with 0)
from_directory=$(cat "$work/stdout")
run -e "$work/export/model.bin" --evaluate 1 -m 3
why=${why:-$(ended_with 0)}
[ "$from_directory" = "$(cat "$work/stdout")" ] || why=${why:-"$(cat "$work/stdout"), not $from_directory"}
verdict '--evaluate 1 from .bin and from the directory' "$why"

# One step without a learning rate leaves the weights as they were.
run -e "$work/export/model.bin" -x 1 -l 0 -c 0 -v 0 -s 1 -g 4 -n 0 -o "$box/back"
why=$(ended_with 0)
cmp -s "$box/hf/model.safetensors" "$box/back/model.safetensors" || why=${why:-'model.safetensors is another'}
for file in config.json gpt2_tokenizer.bin sample.txt; do [ -s "$box/back/$file" ] || why=${why:-"$file is missing"}; done
verdict 'a Hugging Face directory from .bin' "$why"
accepted 'going on with it' -y 1 -o "$box/back"
if "$python" -c 'import transformers, torch' 2>/dev/null; then
    HF_HUB_OFFLINE=1 "$python" - "$box/back" >"$work/log" 2>&1 <<'EOP'
import sys
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
sys.exit(any(info.values()))
EOP
    verdict 'transformers load it' "$([ $? -eq 0 ] || tail -n 1 "$work/log")"
else skip 'transformers load it' "$python has no transformers"; fi

rm -rf "$box"/*
head -c 5000 "$work/export/model.bin" >"$box/cut.bin"
refused 'a checkpoint that is cut' 2 "$box/cut.bin: .*truncated" -e "$box/cut.bin" -o "$box/new"
cp "$work/export/model.bin" "$box/model.bin"
head -c 1500 "$work/export/gpt2_tokenizer.bin" >"$box/gpt2_tokenizer.bin"
refused 'a list of tokens that is cut' 2 "$box/gpt2_tokenizer.bin: .*truncated" -e "$box/model.bin" -o "$box/new"
refused '-t above a checkpoint' 2 '-t 17: the model knows 16 positions' -e "$work/export/model.bin" -t 17 -o "$box/new"
run -e "$work/golden.bin" --evaluate 1
verdict 'tokens beyond a checkpoint' "$(ended_with_error 2 'outside the vocabulary of 107')"

# ---------------------------------------------------------------------------------------------------------
# Models that llm.c's files cannot express

model=$work/model
broken() { # NAME PATTERN SED-SCRIPT
    rm -rf "$model" && cp -r "$golden" "$model"
    sed -i "$3" "$model/config.json"
    cmp -s "$golden/config.json" "$model/config.json" && { fail "export refused: $1" 'this test changed nothing'; return; }
    export_refused "$1" "config.json: .*$2" "$model" "$box/x.bin"
}
broken 'a head of its own'      'tie_word_embeddings.*True'   's/"tie_word_embeddings": true/"tie_word_embeddings": false/'
broken 'another activation'     'activation_function'         's/gelu_new/gelu/'
rm -rf "$model" && cp -r "$golden" "$model" && sed -i 's/"n_positions": 19/"n_positions": 18/' "$model/config.json"
export_refused 'another shape' 'wpe.weight.*\[19, 15\].*\[18, 15\]' "$model" "$box/x.bin"
rm -rf "$model" && cp -r "$golden" "$model" && truncate -s -5 "$model/model.safetensors"
export_refused 'truncated weights' 'data_offsets are damaged' "$model" "$box/x.bin"
cp -r "$golden/." "$model"
echo '{"a": 0, "<|endoftext|>": 2}' >"$model/vocab.json"
export_refused 'a gap in the tokens' 'no gaps' "$model" "$box/x.bin"
echo '{"a": 0, "b": 1}' >"$model/vocab.json"
export_refused 'no end of text' 'has no <.endoftext.>' "$model" "$box/x.bin"
printf '{"<|endoftext|>": 0, "%0300d": 1}\n' 0 >"$model/vocab.json"
export_refused 'a token that is too long' 'token 1 has 300 bytes' "$model" "$box/x.bin"
# Tokens of a model that was there before would be read as those of one without any.
mkdir "$work/older" && : >"$work/older/gpt2_tokenizer.bin"
export_refused 'the tokens of another model' 'older/gpt2_tokenizer.bin: would be taken for the tokens of .*holds no tokenizer' "$golden" "$work/older/model.bin"
verdict 'export refused: nothing is written beside them' "$([ "$(ls "$work/older")" = gpt2_tokenizer.bin ] || ls "$work/older")"
# No output replaces a file of another kind.
rm -rf "$model" && cp -r "$golden" "$model"
echo '{"a": 0, "<|endoftext|>": 1}' >"$model/vocab.json"
echo PK >"$model/pytorch_model.bin"
before=$(listing "$model")
export_refused 'onto weights of the model' 'pytorch_model.bin: exists and is not' "$model" "$model/pytorch_model.bin"
export_refused '--tokens onto the vocabulary' 'vocab.json: exists and is not' "$model" "$box/x.bin" --tokens "$model/vocab.json"
export_refused '--tokens onto the checkpoint' '--tokens .*x.bin: is OUT.bin too' "$model" "$box/x.bin" --tokens "$box/x.bin"
verdict 'export refused: no file is replaced' "$([ "$before" = "$(listing "$model")" ] || echo 'the model was changed')"
finish
