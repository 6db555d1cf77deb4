#!/usr/bin/env bash
# Model cards, and models to and from the Hub: scripts/upload.py, scripts/download.py and -e hub:NAME against the local
# server dev/test/hub_server.py.
#
#     bash dev/test/hub.sh TRAIN_GPT2 TRAIN_BERT        from the repository's root
#
# PYTHON names the interpreter (default python3), which needs huggingface_hub for uploads and downloads. Ends with
# `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
bert=$(realpath "${2:-}") || exit 2
PROGRAM=${1:-} python=${PYTHON:-python3}
. "$(dirname "$0")/shell.sh"
gpt2=$PROGRAM
trap 'kill $server 2>/dev/null; cleanup' EXIT
server=

# ---------------------------------------------------------------------------------------------------------
# Cards

has() { grep -Eq -- "$1" "$2" || echo "${2##*/} has no '$1'; "; } # PATTERN FILE
BASE=(-e L=2,C=16,NH=2,T=16 -b 2 -l 1e-2 -u 3 -s 0)
MODEL=("${BASE[@]}" -x 20 -v 5 -m 2 -n 0)
run "${MODEL[@]}" -o "$work/straight"
card=$work/straight/README.md
why=$(ended_with 0)
verdict 'a card' "$why$(has '^# GPT2LMHeadModel, [0-9,]+ parameters$' "$card")$(has '^After step 20 of 20 by `train_gpt2' "$card"
    has 'commit `(unknown|.*[0-9a-f]{7}.*)`' "$card"
    has '^- n_embd: `16`$' "$card"
    has "training: built-in data, fingerprint \`$(printf %08x "$(sed -nE 's/.*"train_data_fingerprint": ([0-9]+).*/\1/p' "$work/straight/ckpt/00000020/trainer.json")")\`; 40 sequences" "$card"
    has 'validation: `val.bin`' "$card"
    has '^- --lr `0.01`$' "$card"
    has '^- --model `L=2,C=16,NH=2,T=16`$' "$card"
    has '^from transformers import AutoTokenizer, GPT2LMHeadModel$' "$card")"
verdict 'a card: only settings that differ from the defaults' "$(grep -E -- '--(beta1|clip|output|threads)' "$card")"
logged() { grep "\"$1\"" "$work/straight/log.jsonl" | tail -n 1 | sed -E "s/.*\"$1\": ([0-9.]{5}).*/\1/"; } # KEY: four digits
verdict 'a card: losses' "$(has "^\| loss of the last step \| $(logged loss)" "$card")$(has "^\| \`val_loss\` \| $(logged val_loss)[0-9]* \| 20 \|" "$card")"
verdict 'a card: no paths' "$(grep -F "$work" "$card")"
run "${MODEL[@]}" --stop-after 10 -o "$work/half"
verdict 'a card: of the checkpoint' "$(ended_with 0)$(has '^After step 10 of 20 ' "$work/half/README.md")"

# Names of files with what Markdown and HTML could take for theirs.
mkdir "$work/odd" && cp data/builtin/train.bin "$work/odd/train\`|<b>
.bin"
run "${BASE[@]}" -x 1 -v 0 -i "$work/odd/train*.bin" -o "$work/new"
verdict 'a card: a pattern' "$(ended_with 0)$(has '^- training: `train\*.bin`, ' "$work/new/README.md")"
run "${BASE[@]}" -x 1 -v 0 -i "$work/odd/train\`|<b>
.bin" -o "$work/new" --overwrite 1
verdict 'a card: an odd name stays in its quotes' "$(ended_with 0)$(has '^- training: `train\?\|<b>\?.bin`, ' "$work/new/README.md")"

mkdir -p "$work/hidden/start" && cp "$work"/straight/{*.json,*.txt,model.safetensors} "$work/hidden/start"
run -e "$work/hidden/start//" -x 1 -v 0 -s 0 -n 0 -o "$work/slashes"
verdict 'a card: no path of a directory that ends with /' "$(ended_with 0)$(has '^- --model `start`$' "$work/slashes/README.md")$(grep -F hidden "$work/slashes/README.md")"

# Two ranks; no validation; the average of the weights, which has results of its own.
verdict 'a card without -v: no validation data' "$(grep 'validation' "$work/slashes/README.md")"
AVERAGE=("${BASE[@]}" -d 64 -x 10 -v 5 -m 2 -n 0 --ema 0.9)
run "${AVERAGE[@]}" -o "$work/average"
average=$work/average/ema/README.md
verdict 'a card of the average' "$(ended_with 0)$(has '^The average of the weights of several steps' "$average"
    has '^\| `ema_val_loss` \| [0-9.]+ \| 10 \|' "$average"; has '^tokenizer = ' "$average"; grep -E '<!--|loss of the last|`val_loss`' "$average")"
verdict 'a card of the weights beside it' "$(has '^\| `val_loss` \| [0-9.]+ \| 10 \|' "$work/average/README.md"; grep -E 'average|ema_val' "$work/average/README.md")"
if "$python" -c 'import transformers, torch' 2>/dev/null; then
    for name in '' ema/; do  # -v has two batches of two windows
        key=${name:+ema_}val_loss
        loss=$(sed -nE 's/^\{"step": 10, .*"'$key'": ([0-9.]+).*/\1/p' "$work/average/log.jsonl")
        HF_HUB_OFFLINE=1 "$python" "$root/dev/reference/check_val_loss.py" "$work/average/$name" \
            "$work/data/builtin/val.bin" 16 4 "$loss" >"$work/log" 2>&1
        verdict "transformers load ${name:-OUT} and compute its $key" "$([ $? -eq 0 ] || tail -n 1 "$work/log")"
    done
else skip 'transformers load the average' "$python has no transformers"; fi
if prepare_ranks; then
    timeout 120 mpirun --oversubscribe --bind-to none -np 2 "$gpt2" "${AVERAGE[@]}" -o "$work/ranks" >"$work/stdout" 2>"$work/stderr"
    status=$?
    losses() { sed -E '/loss/s/\| [0-9.]+ \|/| |/' "$1"; } # sums of two ranks are rounded elsewhere
    for name in '' ema/; do
        verdict "a card of two ranks, ${name}README.md" "$(ended_with 0)$(diff <(losses "$work/ranks/${name}README.md") <(losses "$work/average/${name}README.md") 2>&1)"
    done
else skip 'a card of two ranks' "$why"; fi

# Three questions: a context of two tokens, an ending of one.
{
    little_endian 4 20240522
    for value in 1 3 6; do little_endian 4 $value; done
    head -c 1008 /dev/zero
    for i in 0 1 2; do for value in 65535 20 $i 0 1 2 5 6 1 7; do little_endian 2 $value; done; done
} >"$work/exam.bin"
run "${BASE[@]}" -x 2 -v 0 -h 1 --choices "$work/exam.bin" -o "$work/exam"
verdict 'a card: an exam' "$(ended_with 0)$(has '^\| `exam_acc` \| [0-9.]+ \| 2 \|' "$work/exam/README.md")$(has 'exam_perplexity' "$work/exam/README.md")"
# A README of the user's own.
own() { # NAME: OUT/README.md as it is stays during a resumed run
    local before why
    before=$(ls -l "$work/kept/README.md" && cat "$work/kept/README.md" 2>/dev/null </dev/null)
    run -y 1 -o "$work/kept" --stop-after "$2"
    why=$(ended_with 0)
    [ ! -s "$work/stderr" ] || why=${why:-"stderr: $(head -n 1 "$work/stderr")"}
    [ "$before" = "$(ls -l "$work/kept/README.md" && cat "$work/kept/README.md" 2>/dev/null </dev/null)" ] || why=${why:-'it was replaced'}
    [ -s "$work/kept/ckpt/$(printf %08d "$2")/README.md" ] || why=${why:-'the checkpoint has none'}
    verdict "$1" "$why"
}
mkdir "$work/kept" && echo 'My notes' >"$work/kept/README.md"
run "${MODEL[@]}" --stop-after 2 -o "$work/kept"
verdict "a user's README.md stays in a new run" "$(ended_with 0)$(has '^My notes$' "$work/kept/README.md")"
own "a user's README.md stays in a resumed run" 4
sed '/<!--/d' "$card" >"$work/kept/README.md"
own 'a card without the line that marks it stays' 6
cp "$card" "$work/kept/README.md"
run -y 1 -o "$work/kept" --stop-after 10
verdict 'a card is replaced by the next one' "$(ended_with 0)$(has '^After step 10 of 20 ' "$work/kept/README.md")"

PROGRAM=$bert
run -e L=1,C=16,NH=2,T=32 -x 2 -v 1 -n 0 -o "$work/bert"
card=$work/bert/README.md
verdict 'a card of BERT' "$(ended_with 0)$(has '^from transformers import AutoTokenizer, BertForPreTraining$' "$card")$(has '`val_mlm_accuracy`' "$card")"
printf '0\tone\n1\ttwo\n' >"$work/c.tsv"
run -e "$work/bert" --task classify --labels 2 -i "$work/c.tsv" -j "$work/c.tsv" -t 16 -x 2 -n 0 -v 1 -o "$work/task"
card=$work/task/README.md
verdict 'a card of a classifier' "$(ended_with 0)$(has 'BertForSequenceClassification.from_pretrained' "$card")$(has '^- --model `bert`$' "$card")$(has '`val_accuracy`' "$card")"
PROGRAM=$gpt2

# ---------------------------------------------------------------------------------------------------------
# -e hub:NAME, from a cache as huggingface_hub lays it out

unset HF_HUB_CACHE HF_HOME XDG_CACHE_HOME
export HOME=$work/home
cached() { # FOLDER NAME COMMIT: a model in a cache, whose files are links
    local folder=$1/models--${2/\//--}
    mkdir -p "$folder/blobs" "$folder/refs" "$folder/snapshots/$3"
    for file in "$work"/straight/*.json "$work"/straight/*.txt "$work"/straight/model.safetensors; do
        cp "$file" "$folder/blobs" && ln -s "../../blobs/${file##*/}" "$folder/snapshots/$3/${file##*/}"
    done
    printf %s "$3" >"$folder/refs/main"
}
TEXT=(--generate 4 --temperature 0)
run -e "$work/straight" "${TEXT[@]}"
cp "$work/stdout" "$work/text"
from_hub() { # NAME SOURCE: the same text as from the directory
    run -e "$2" "${TEXT[@]}"
    verdict "$1" "$(ended_with 0)$(cmp "$work/stdout" "$work/text" 2>&1)"
}
cached "$work/home/.cache/huggingface/hub" me/home 1111
from_hub '-e hub:, in the home directory' hub:me/home
from_hub '-e hub:, a commit' hub:me/home@1111
cached "$work/xdg/huggingface/hub" me/xdg 2222
XDG_CACHE_HOME=$work/xdg from_hub '-e hub:, XDG_CACHE_HOME' hub:me/xdg
cached "$work/home/hf/hub" one 3333
HF_HOME='~/hf' XDG_CACHE_HOME=$work/xdg from_hub '-e hub:, HF_HOME, a name without organization' hub:one
cached "$work/cache" me/cache 4444
export HF_HUB_CACHE=$work/cache
HF_HOME=$work/hf from_hub '-e hub:, HF_HUB_CACHE' hub:me/cache
run -e hub:me/cache -x 2 -v 0 -s 0 -n 0 -o "$work/tuned"
verdict '-e hub:, trained on' "$(ended_with 0)$(has '^- --model `hub:me/cache`$' "$work/tuned/README.md")"
run -y 1 -o "$work/tuned" -e hub:me/cache
verdict '-e hub:, resumed' "$(ended_with 0)"
refused '-e hub:, not in the cache' 2 "-e hub:me/none: is not in $work/cache; fetch it once: python3 scripts/download.py me/none$" -e hub:me/none -o "$box/new"
refused '-e hub:, no such revision' 2 'download.py me/cache@v2$' -e hub:me/cache@v2 -o "$box/new"
cached "$work/cache" me/other 5555
printf %s ../../models--me--other/snapshots/5555 >"$work/cache/models--me--cache/refs/main"
refused '-e hub:, a ref that names another directory' 2 'download.py me/cache$' -e hub:me/cache -o "$box/new"
rm "$work/cache/models--me--cache/snapshots/4444/model.safetensors"
printf 4444 >"$work/cache/models--me--cache/refs/main"
refused '-e hub:, half fetched' 2 'download.py me/cache$' -e hub:me/cache -o "$box/new"
# ---------------------------------------------------------------------------------------------------------
# Upload and download

script() { # NAME FLAG...: a script of scripts/, at most a minute
    timeout 60 "$python" "$root/scripts/$1.py" "${@:2}" >"$work/stdout" 2>"$work/stderr" </dev/null
    status=$?
}
script_refused() { # NAME PATTERN SCRIPT FLAG...
    script "${@:3}"
    local why
    why=$(ended_with_error 2 "$2")
    verdict "$1" "$why"
}
unset HF_HUB_CACHE HF_TOKEN
export HF_HOME=$work/hub_home HF_HUB_DISABLE_XET=1 HF_HUB_DISABLE_TELEMETRY=1
script_refused 'upload: no directory' 'none: is not a model directory' upload "$work/none" me/model
mkdir "$work/edited" && cp "$work/straight/config.json" "$work/edited"
script_refused 'upload: no weights' 'has no weights' upload "$work/edited" me/model
cp "$work/straight/model.safetensors" "$work/edited/model-00001-of-00002.safetensors"
echo '{"weight_map": []}' >"$work/edited/model.safetensors.index.json"
script_refused 'upload: an index that is none' 'does not say where the weights are' upload "$work/edited" me/model
script_refused 'upload: a name without an organization' 'is not ORGANIZATION/MODEL' upload "$work/straight" model
if ! "$python" -c 'import huggingface_hub' 2>/dev/null; then
    script_refused 'upload: the package is missing' 'huggingface_hub is missing' upload "$work/straight" me/model
    script_refused 'download: the package is missing' 'huggingface_hub is missing' download me/model
    skip hub "$python has no huggingface_hub (pip install huggingface_hub)"
    finish
    exit
fi
"$python" "$root/dev/test/hub_server.py" "$work/server" >"$work/address" &
server=$!
for _ in {1..100}; do [ ! -s "$work/address" ] || break; sleep 0.1; done
HF_ENDPOINT=$(cat "$work/address")
export HF_ENDPOINT
requests() { grep -c "$1" "$work/server/.requests"; }

script_refused 'upload: no token' 'refuses your token, or there is none: hf auth login, or set HF_TOKEN$' upload "$work/straight" me/model
export HF_TOKEN=local
# Interrupted after the weights have arrived: they are not sent again.
echo 'POST .*/commit/' >"$work/server/.fail"
script_refused 'upload: the server fails' "the test's own failure \(status 500\); give the same command again" upload "$work/half" me/model
verdict 'upload: nothing is there yet' "$(ls "$work/server/me/model")"
script upload "$work/half" me/model
why=$(ended_with 0)
[ "$(requests '^PUT')" -eq 1 ] || why=${why:-"$(requests '^PUT') times weights were sent"}
verdict 'upload: given again, weights are not sent again' "$why$(has '^.*/half: is .*/me/model now; load it with -e hub:me/model$' "$work/stdout")"
verdict 'upload: what a model needs, and no more' "$(diff <(ls "$work/server/me/model") - <<'END'
README.md
config.json
loss.svg
merges.txt
model.safetensors
tokenizer.json
tokenizer_config.json
vocab.json
END
)"
verdict 'upload: the same bytes' "$(for file in "$work"/server/me/model/*; do cmp "$file" "$work/half/${file##*/}" 2>&1; done)"
script upload "$work/bert/ckpt/00000002" me/bert
verdict 'upload: a checkpoint, without its optimizer' "$(ended_with 0; ls "$work/server/me/bert" | grep -E 'optimizer|trainer|manifest'; has BertForPreTraining "$work/server/me/bert/config.json")"

script download me/model
verdict 'download' "$(ended_with 0; [ "$(cat "$work/stdout")" = "$(ls -d "$HF_HOME"/hub/models--me--model/snapshots/*)" ] || echo 'not the directory of the cache')"
from_hub 'download, then -e hub:' hub:me/model
before=$(requests '^GET .*/resolve/')
script download hub:me/model
verdict 'download: once' "$(ended_with 0; [ "$(requests '^GET .*/resolve/')" -eq "$before" ] || echo 'files were fetched again')"
script_refused 'download: no such repository' 'me/none: .* has no such repository' download me/none
script_refused 'download: no such revision' 'me/model: the repository has no such revision' download me/model@v2
script_refused 'download: no name' "Repo id must" download 'a b'
rm "$work/server/me/bert/model.safetensors"
script_refused 'download: no weights' 'me/bert: its repository has no model.safetensors' download me/bert
kill $server
wait $server 2>/dev/null
script_refused 'upload: no network' 'upload to me/model: http.* cannot be reached: .*refused' upload "$work/half" me/model
script_refused 'download: no network' 'download of me/new: http.* cannot be reached: .*refused' download me/new
for secret in ftp tiger:p@ss; do
    HF_ENDPOINT=${HF_ENDPOINT/:\/\//:\/\/$secret@} script_refused "upload: HF_ENDPOINT with $secret@" '//\*\*\*@' upload "$work/half" me/model
    verdict "upload: $secret is not shown" "$(grep -E 'ftp|tiger|ss@' "$work/stderr")"
done
"$python" -m venv --without-pip "$work/bare" && python=$work/bare/bin/python
script_refused 'upload: the package is missing' 'huggingface_hub is missing: pip install' upload "$work/straight" me/model
script_refused 'download: the package is missing' 'huggingface_hub is missing: pip install' download me/model
finish
