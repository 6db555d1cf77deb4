#!/usr/bin/env bash
# GGUF files of trained models by dev/export_gguf.py, read back by dev/test/read_gguf.py; models that GGUF cannot
# express.
#
#     bash dev/test/gguf.sh TRAIN_GPT2 TRAIN_BERT        from the repository's root
#
# PYTHON names the interpreter (default python3), which needs numpy and gguf. Ends with `N passed, N failed, N skipped`; exit
# status 1 if one failed.
set -u
bert=$(realpath "${2:-}") || exit 2
PROGRAM=${1:-} python=${PYTHON:-python3}
. "$(dirname "$0")/shell.sh"

if ! "$python" -c 'import gguf, numpy' 2>/dev/null; then
    skip gguf "$python has no gguf (pip install gguf)"
    finish
    exit
fi
export_gguf() { "$python" "$root/dev/export_gguf.py" "$@" >"$work/stdout" 2>"$work/stderr"; }
exported() { # NAME DIR TYPE [FLAG... [-- KEY=VALUE...]]
    local name=$1 dir=$2 type=$3 why=
    shift 3
    local flags=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do flags+=("$1"); shift; done
    [ $# -eq 0 ] || shift
    export_gguf "$dir" "$work/model.gguf" --type "$type" "${flags[@]}" || why=$(tail -n 1 "$work/stderr")
    [ -n "$why" ] || "$python" "$root/dev/test/read_gguf.py" "$dir" "$work/model.gguf" "$type" "$@" >"$work/read" 2>&1 ||
        why=$(tail -n 3 "$work/read" | tr '\n' ' ')
    verdict "$name" "$why"
}
export_refused() { # NAME PATTERN DIR [FLAG...]
    local name=$1 pattern=$2 dir=$3 why=
    shift 3
    rm -f "$box"/x.*
    export_gguf "$dir" "$box/x.gguf" "$@"
    [ $? -eq 2 ] || why='exit status is not 2'
    [ "$(wc -l <"$work/stderr")" -eq 1 ] || why=${why:-"not one line: $(tail -n 2 "$work/stderr" | tr '\n' ' ')"}
    grep -Eq -- "^error: .*$pattern" "$work/stderr" || why=${why:-"'$(cat "$work/stderr")' does not match '$pattern'"}
    [ -z "$(ls "$box" | grep '^x\.')" ] || why=${why:-"it left $(ls "$box")"}
    verdict "refused: $name" "$why"
}

edit() { "$python" "$root/dev/test/edit.py" "$@" || fail "edit $*" "this test is broken"; }
has() { grep -Eq -- "$1" "$2" || echo "${2##*/} has no '$1': $(head -c 300 "$2")"; } # PATTERN FILE

# ---------------------------------------------------------------------------------------------------------
# GPT-2: three heads of 16, an MLP of another width than 4 C, also with a head of its own and more rows than tokens

run -e L=2,C=48,NH=3,F=96,T=32 -x 20 -l 1e-2 -v 0 -s 0 -n 0 -o "$work/gpt2"
verdict 'a GPT-2 to export' "$(ended_with 0)"
for type in f32 f16 bf16; do exported "GPT-2, $type" "$work/gpt2" $type -- '*.feed_forward_length=96'; done
run -e L=1,C=64,NH=2,T=16,V=400,tied=0 -x 2 -v 0 -s 0 -n 0 -o "$work/untied"
verdict 'a GPT-2 with a head of its own' "$(ended_with 0)"
exported 'GPT-2 with a head of its own and 16 rows without a token' "$work/untied" f32
verdict 'GPT-2 with a head of its own: one tensor more' "$(has ' 17 tensors' "$work/stdout")"
exported 'GPT-2, q8_0' "$work/untied" q8_0
export_gguf "$work/gpt2" "$work/again.gguf" && export_gguf "$work/gpt2" "$work/model.gguf"
verdict 'the same bytes again' "$(cmp "$work/again.gguf" "$work/model.gguf" 2>&1)"
# vocab.json and merges.txt alone say the same as tokenizer.json; a vocabulary of bytes has no merges at all.
cp -r "$work/gpt2" "$work/plain" && rm "$work/plain/tokenizer.json"
mkdir "$work/named" && mv "$work/plain" "$work/named/gpt2"
export_gguf "$work/named/gpt2" "$work/model.gguf"
verdict 'vocab.json and merges.txt' "$(cmp "$work/again.gguf" "$work/model.gguf" 2>&1)$(cat "$work/stderr")"
# The names of a wrapper's state, a tied embedding that save_model() stored under the head's name alone, and buffers of
# attention as older transformers stored them.
rm -r "$work/named/gpt2" && cp -r "$work/gpt2" "$work/named/gpt2"
edit "$work/named/gpt2" copy transformer.ln_f.bias h.0.attn.bias 1
edit "$work/named/gpt2" copy transformer.ln_f.bias transformer.h.1.attn.masked_bias 1
edit "$work/named/gpt2" prefix module.
edit "$work/named/gpt2" save_model module.transformer.wte.weight module.lm_head.weight
export_gguf "$work/named/gpt2" "$work/model.gguf"
verdict 'other names of the same tensors' "$(cmp "$work/again.gguf" "$work/model.gguf" 2>&1)$(cat "$work/stderr")"
verdict 'buffers are not named' "$(! grep 'no place' "$work/stdout")"
# Tokens that were added behind the vocabulary: a special one, and one of the user's.
cp -r "$work/untied" "$work/added"
"$python" - "$work/added/tokenizer.json" <<'EOP'
import json, sys
tree = json.load(open(sys.argv[1]))
for k, (content, special) in enumerate([("<|user|>", True), ("two words", False)]):
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 390 + k, "content": content, "special": special})
json.dump(tree, open(sys.argv[1], "w"))
EOP
exported 'added tokens' "$work/added" f32
cp -r "$work/gpt2" "$work/bytes"
"$python" - "$work/bytes/tokenizer.json" <<'EOP'
import json, sys
tree = json.load(open(sys.argv[1]))
tree["model"]["merges"] = []
json.dump(tree, open(sys.argv[1], "w"))
EOP
exported 'no merges' "$work/bytes" f32
# A model tuned for chat: its template, and the token that ends an answer.
cp -r "$work/gpt2" "$work/chat"
set_template() { # TEMPLATE, as JSON
    "$python" - "$work/chat/tokenizer_config.json" "$1" <<'EOP'
import json, sys
settings = json.load(open(sys.argv[1]))
settings.update(chat_template=json.loads(sys.argv[2]), eos_token="e")
json.dump(settings, open(sys.argv[1], "w"))
EOP
}
set_template '"{{ messages[0].content }} é"'
exported 'a chat template' "$work/chat" f32 -- 'tokenizer.chat_template="{{ messages[0].content }} é"'
mkdir "$work/chat2" && cp "$work"/chat/*.json "$work/chat/model.safetensors" "$work/chat2"
printf '{{ 1 }}\n{{ 2 }}\n' >"$work/chat2/chat_template.jinja"
exported 'a chat template in a file of its own' "$work/chat2" f32 -- 'tokenizer.chat_template="{{ 1 }}\n{{ 2 }}"'
set_template 5
export_refused 'a chat template that is none' 'its chat template is not a text' "$work/chat"

# ---------------------------------------------------------------------------------------------------------
# BERT, whose vocabulary of bytes is replaced by one of words

PROGRAM=$bert
run -e L=2,C=48,NH=3,F=96,T=32 -x 2 -v 0 -s 0 -n 0 -o "$work/bert"
verdict 'a BERT to export' "$(ended_with 0)"
export_refused 'a vocabulary of bytes' 'is a vocabulary of bytes' "$work/bert"
{ printf '[%s]\n' PAD UNK CLS SEP MASK; printf '%s\n' {a..z} \#\#{a..z} the ing \#\#ing é 中 \# \#\#; } >"$work/bert/vocab.txt"
exported 'BERT, f32' "$work/bert" f32 -- bert.pooling_type=1
verdict 'BERT: what is left out is named' "$(has 'no place for bert.pooler, cls.predictions, cls.seq_relationship; left out' "$work/stdout")"
for type in f16 bf16; do exported "BERT, $type" "$work/bert" $type --pool cls -- bert.pooling_type=2; done
sed -i 's/"do_lower_case": false/"do_lower_case": true/' "$work/bert/tokenizer_config.json"
exported 'BERT, lower case' "$work/bert" f32 -- bert.pooling_type=1
mkdir "$work/marked" && cp -r "$work/bert" "$work/marked" && sed -i $'1s/^/\xef\xbb\xbf/' "$work/marked/bert/vocab.txt"
export_gguf "$work/marked/bert" "$work/marked/model.gguf"
verdict 'BERT, a vocabulary with a byte order mark' "$(cmp "$work/model.gguf" "$work/marked/model.gguf" 2>&1)"

# ---------------------------------------------------------------------------------------------------------
# Models that GGUF cannot express

edited() { # NAME PATTERN FILE SED-SCRIPT [FLAG...]: refused after a change of a file of $model
    rm -rf "$work/edited" && cp -r "$model" "$work/edited"
    sed -i "$4" "$work/edited/$3"
    cmp -s "$model/$3" "$work/edited/$3" && { fail "refused: $1" 'this test changed nothing'; return; }
    export_refused "$1" "$2" "$work/edited" "${@:5}"
}
model=$work/gpt2
edited 'GELU by erf'         'activation_function": .gelu. cannot be expressed in GGUF' config.json 's/gelu_new/gelu/'
edited 'another shape'       'wpe.weight.*\[32, 48\].*\[31, 48\]' config.json 's/"n_positions": 32/"n_positions": 31/'
edited 'too many tokens'     'has the number .*vocab_size is 200' config.json 's/"vocab_size": [0-9]*/"vocab_size": 200/'
edited 'a normalizer'        'normalizer" is'                 tokenizer.json 's/"normalizer": *null/"normalizer": {"type": "NFC"}/'
edited 'a space first'       'add_prefix_space" is True'      tokenizer.json 's/"add_prefix_space": *false/"add_prefix_space": true/'
edited 'no end of text'      'has no <.endoftext.>'           tokenizer.json 's/<|endoftext|>/<|end|>/g'
export_refused 'rows that are not a multiple of 32' '--type q8_0: tensor transformer.wte.weight has rows of 48 values' "$model" --type q8_0
rm -rf "$work/edited" && cp -r "$model" "$work/edited" && rm "$work/edited"/*.txt "$work/edited"/*to*.json "$work/edited/vocab.json"
export_refused 'no tokenizer' 'holds neither tokenizer.json nor vocab.json' "$work/edited"
rm -rf "$work/edited" && cp -r "$model" "$work/edited" && truncate -s -5 "$work/edited/model.safetensors"
export_refused 'truncated weights' 'data_offsets are damaged' "$work/edited"
poked() { # VALUE: the first embedding of $work/edited, a copy of $model, becomes VALUE
    rm -rf "$work/edited" && cp -r "$model" "$work/edited" && edit "$work/edited" set transformer.wte.weight 0 "$1"
}
poked 1e5
export_refused 'too large for f16' 'tensor transformer.wte.weight: holds 100000, too large for f16' "$work/edited" --type f16
poked nan
export_refused 'not a number' 'tensor transformer.wte.weight: holds values that are not finite' "$work/edited"
model=$work/untied
poked 8.4e6
export_refused 'too large for q8_0' 'tensor transformer.wte.weight: holds 8.4e.06, too large for q8_0' "$work/edited" --type q8_0
poked 8.3e6
exported 'GPT-2, q8_0 of a large weight' "$work/edited" q8_0
model=$work/bert
edited 'ideographs not split'    'tokenize_chinese_chars" is False' tokenizer_config.json 's/{/{"tokenize_chinese_chars": false, /'
edited 'no [MASK]'               'vocab.txt: has no \[MASK\]'     vocab.txt 's/\[MASK\]/[MUSK]/'
edited 'a token twice'           'a token is there twice'         vocab.txt 's/^##a$/##b/'
edited 'tokens that fall together' 'are both .* in GGUF'          vocab.txt 's/^##a$/##▁b/'
cp "$model/config.json" "$box/config.gguf"
export_gguf "$model" "$box/config.gguf"
verdict 'refused: onto a file of another kind' \
    "$(has '^error: .*config.gguf: exists and is not' "$work/stderr")$(cmp "$model/config.json" "$box/config.gguf" 2>&1)"
finish
