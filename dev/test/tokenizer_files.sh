#!/usr/bin/env bash
# The tokenizer of a run goes into every checkpoint, whatever becomes of the directory that it came from; a vocabulary that
# is too small for the data is found before step 0; a tokenizer may lack bytes that no prompt needs.
#
#     bash dev/test/tokenizer_files.sh GPT2 BERT          the trainers, from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
bert=$(realpath "${2:-}") || exit 2
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
gpt2=$PROGRAM
QUIET=(-v 0 -s 0)
SMALL=L=1,C=16,NH=2,T=16

# Why not all checkpoints in OUT have FILE, as it is in ORIGINAL.
has_all() { # OUT FILE ORIGINAL
    local dir count=0
    for dir in "$1"/ckpt/*/; do
        count=$((count + 1))
        cmp -s "$dir/$2" "$3" || { echo "$dir has not the $2 that the run began with"; return; }
    done
    [ "$count" -gt 0 ] || echo "$1 has no checkpoint"
}

# ---------------------------------------------------------------------------------------------------------
# BERT: resumed twice, with -nk 1, which deletes the checkpoint that was resumed from

PROGRAM=$bert
m=$work/bert_model
mkdir "$m" && cp data/builtin/bert/vocab.txt data/builtin/bert/tokenizer_config.json "$m"
accepted 'a BERT'  -e L=1,C=16,NH=2,T=100,V=261 -b 2 -x 1 "${QUIET[@]}" -n 0 -o "$work/begin"
cp "$work/begin/config.json" "$work/begin/model.safetensors" "$m"
for i in 1 2 3 4 5 6 7 8; do printf 'a\tblue sky %d\nb\tred sand %d\n' $i $i; done >"$work/c.tsv"
printf '{"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": "the sky is blue", "qas": [%s, %s]}]}]}' \
    '{"id": "1", "question": "sky?", "answers": [{"text": "blue", "answer_start": 11}]}' \
    '{"id": "2", "question": "what?", "answers": [{"text": "sky", "answer_start": 4}]}' >"$work/q.json"
for task in classify answer; do
    [ $task = classify ] && file=$work/c.tsv || file=$work/q.json
    RUN=(--task $task -e "$m" -i "$file" --stride 16 -b 2 -x 8 -n 2 "${QUIET[@]}")
    run "${RUN[@]}" -o "$work/whole"
    why=$(ended_with 0)
    run "${RUN[@]}" -nk 1 -o "$work/parts" --stop-after 2
    why=${why:-$(ended_with 0)}
    for stop in 6 8; do
        run --task $task -y 1 -o "$work/parts" --stop-after $stop
        why=${why:-$(ended_with 0)}
        why=${why:-$(has_all "$work/parts" vocab.txt "$m/vocab.txt")}
    done
    cmp -s "$work/whole/model.safetensors" "$work/parts/model.safetensors" || why=${why:-'another model than without a stop'}
    why=${why:-$(has_all "$work/parts" tokenizer_config.json "$m/tokenizer_config.json")}
    cmp -s "$work/parts/vocab.txt" "$m/vocab.txt" || why=${why:-'OUT has no vocab.txt'}
    verdict "--task $task: a run that is resumed twice keeps its tokenizer" "$why"
    rm -rf "$work/whole" "$work/parts"
done

# A run whose -e is renamed after step 1 and whose first checkpoint comes at its end.
moved() { # NAME FILE DIRECTORY FLAG...
    local why='' pid i
    set_command -e "$3" "${@:4}" -x 1000000 "${QUIET[@]}" -n 0 -o "$work/moved"
    timeout --foreground 120 "${command[@]}" \
        </dev/null >"$work/stdout" 2>"$work/stderr" &
    pid=$!
    for ((i = 0; i < 1000; i++)); do
        grep -q '"step": 1,' "$work/moved/log.jsonl" 2>/dev/null && break
        sleep 0.02
    done
    mv "$3" "$3.away"
    kill -TERM "$pid"
    wait "$pid"
    status=$?
    why=$(ended_with 0)
    why=${why:-$(has_all "$work/moved" "$2" "$3.away/$2")}
    verdict "$1" "$why"
    rm -rf "$work/moved"
    mv "$3.away" "$3"
}
moved 'BERT: -e is renamed during the run' vocab.txt "$m" --task classify -i "$work/c.tsv" -t 16 -b 2

# ---------------------------------------------------------------------------------------------------------
# GPT-2: a tokenizer whose end of text is token 0, only next to the model

PROGRAM=$gpt2
m=$work/gpt2_model
mkdir "$m" "$work/plain"
# Documents that token 0 begins, of other lengths than those that token 256 would begin.
{
    little_endian 4 20240520; little_endian 4 1; little_endian 4 4096
    head -c 1012 /dev/zero
    for token in 0 97 98 256 99 100 101 0; do little_endian 2 $token; done >"$work/pattern"
    for ((i = 0; i < 512; i++)); do cat "$work/pattern"; done
} >"$work/plain/train.bin"
accepted 'a GPT-2' -e $SMALL -b 2 -x 1 "${QUIET[@]}" -n 0 -o "$m"
rm -r "$m/ckpt" "$m"/tokenizer*.json  # vocab.json and merges.txt alone
sed -i -e 's/"<|endoftext|>":256/"<|endoftext|>":0/' -e 's/"Ā":0,/"Ā":256,/' "$m/vocab.json"
grep -q '"<|endoftext|>":0\b' "$m/vocab.json" || fail 'a tokenizer whose end of text is 0' 'vocab.json is not as expected'
RUN=(-e "$m" -i "$work/plain/train.bin" --doc-mask 1 -b 2 -d 64 -x 8 -n 2 "${QUIET[@]}")
run "${RUN[@]}" -o "$work/whole"
why=$(ended_with 0)
run "${RUN[@]}" -nk 1 -o "$work/parts" --stop-after 2
why=${why:-$(ended_with 0)}
for stop in 6 8; do
    run -y 1 -o "$work/parts" --stop-after $stop
    why=${why:-$(ended_with 0)}
    why=${why:-$(has_all "$work/parts" vocab.json "$m/vocab.json")$(has_all "$work/parts" merges.txt "$m/merges.txt")}
done
verdict 'GPT-2: a run that is resumed twice keeps its tokenizer' "$why"
why=
for file in model.safetensors config.json ckpt/00000008/optimizer.safetensors; do
    cmp -s "$work/whole/$file" "$work/parts/$file" || why="$why another $file than without a stop;"
done
grep -q '"eos_token_id": 0,' "$work/parts/config.json" || why="$why another end of text"
verdict 'GPT-2: a run that is resumed twice keeps its end of text' "$why"
# The tokenizer of a model without one is next to -i, even if only -j is read.
mkdir "$work/bare" "$work/beside" && cp "$m/config.json" "$m/model.safetensors" "$work/bare"
cp "$m/vocab.json" "$m/merges.txt" "$work/plain/train.bin" "$work/beside"
run -e "$m" --evaluate 1 -j "$work/plain/train.bin" --doc-mask 1
expected=$(cat "$work/stdout")
run -e "$work/bare" --evaluate 1 -i "$work/beside/train.bin" -j "$work/plain/train.bin" --doc-mask 1
why=$(ended_with 0)
[ "$(cat "$work/stdout")" = "$expected" ] || why=${why:-"'$(cat "$work/stdout")', not '$expected'"}
run -e "$work/bare" --evaluate 1 -j "$work/plain/train.bin" --doc-mask 1
[ "$(cat "$work/stdout")" != "$expected" ] || why=${why:-'this test says nothing'}
verdict 'GPT-2: --evaluate 1 -j with the tokenizer next to -i' "$why"
if is_sanitized; then skip 'two ranks keep the tokenizer' 'with sanitizers'
elif prepare_ranks; then
    rm -rf "$work/parts"
    why=
    for stop in 2 6 8; do
        flags=(-y 1 -o "$work/parts")
        [ $stop -gt 2 ] || flags=("${RUN[@]}" -nk 1 -o "$work/parts")
        timeout 120 mpirun --oversubscribe --bind-to none -np 2 "$PROGRAM" "${flags[@]}" --stop-after $stop \
            </dev/null >"$work/stdout" 2>"$work/stderr"
        status=$?
        why=${why:-$(ended_with 0)}
        why=${why:-$(has_all "$work/parts" vocab.json "$m/vocab.json")}
    done
    verdict 'two ranks keep the tokenizer' "$why"
else skip 'two ranks keep the tokenizer' "$why"; fi

# ---------------------------------------------------------------------------------------------------------
# The largest token of the data

# A shard of 40,000 tokens below 200, two of which are TOKEN.
shard() { # FILE TOKEN [WIDTH]
    local width=${3:-2} magic=20240520 version=1
    [ "$width" = 2 ] || magic=20240801 version=7
    {
        little_endian 4 $magic; little_endian 4 $version; little_endian 4 40000
        head -c 1012 /dev/zero
        head -c $((30000 * width)) /dev/zero
        little_endian "$width" "$2"; little_endian "$width" "$2"
        head -c $((9998 * width)) /dev/zero
    } >"$1"
}
TINY=(-b 2 -x 2 "${QUIET[@]}" -n 0)
d=$work/shards
mkdir "$d"
shard "$d/train.bin" 300
shard "$d/val.bin" 290 4
# NAME V SHARD TOKEN [OUT]
too_small() { refused "$1" 2 "$3: token $4 at position 30000 is outside the vocabulary of $2;" -e $SMALL,V="$2" -i "$d/train.bin" "${TINY[@]}" -o "${5-$box/new}"; }
too_small 'a token that the model does not have' 300 "$d/train.bin" 300
shard "$d/train.bin" 280
too_small 'a token of the validation data' 290 "$d/val.bin" 290
too_small 'the same with -o empty' 290 "$d/val.bin" 290 ''
line='^largest token: 290 in 2 shards, the model has 291; scanned [0-9.]+ GB at [0-9.e-]+ GB/s$'
SCAN=(-e $SMALL,V=291 -i "$d/train.bin" "${TINY[@]}" -o "$work/scan")
run "${SCAN[@]}"
verdict 'a scan says how fast it was' "$(ended_with 0)$(grep -Eq "$line" "$work/stdout" || echo 'it does not')"
cp "$m"/{vocab.json,merges.txt} "$d"
too_small 'a tokenizer that is larger than the model' 200 "$d/train.bin" 280

# A scan of 20 GB, without a block on the disk, that is stopped while it reads: /proc says when SIGTERM is not caught.
mkdir "$work/large"
{ little_endian 4 20240520; little_endian 4 1; little_endian 4 50000000; head -c 1012 /dev/zero; } >"$work/large/train_0.bin"
truncate -s $((1024 + 2 * 50000000)) "$work/large/train_0.bin"
for ((i = 1; i < 200; i++)); do ln "$work/large/train_0.bin" "$work/large/train_$i.bin"; done
"$PROGRAM" -e $SMALL -i "$work/large/train_*.bin" "${TINY[@]}" -o "$work/stopped" </dev/null >"$work/stdout" 2>"$work/stderr" &
pid=$!
is_scanning() {
    local caught
    # The data first: once it is open, the handlers of the start are in place.
    ls -l /proc/$pid/fd 2>/dev/null | grep -q large/train_ || return
    caught=$(sed -n 's/^SigCgt:[[:space:]]*/0x/p' /proc/$pid/status 2>/dev/null)
    [ -n "$caught" ] && ! ((caught & 1 << 14))
}
until is_scanning || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
kill -TERM $pid 2>/dev/null
{ wait $pid; status=$?; } 2>/dev/null
verdict 'a signal ends a scan' "$(ended_with 143)$([ ! -e "$work/stopped" ] || echo 'something was written')"
rm -r "$work/large"
if is_sanitized; then skip 'two ranks scan' 'with sanitizers'
elif prepare_ranks; then
    rm -r "$work/scan" "$d"/*.json "$d"/merges.txt
    timeout 120 mpirun --oversubscribe --bind-to none -np 2 "$PROGRAM" "${SCAN[@]}" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
    verdict 'two ranks scan' "$(ended_with 0)$(grep -Eq "$line" "$work/stdout" || echo 'they do not say so')"
else skip 'two ranks scan' "$why"; fi

finish
