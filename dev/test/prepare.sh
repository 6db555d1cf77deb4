#!/usr/bin/env bash
# Data preparation and a real run on real text, where Python has the tokenizers library.
#
#     bash dev/test/prepare.sh TRAINER [TINYSHAKESPEARE.txt GPT2_BPE_FOLDER]
#
# Without the last two both are looked for in LLMC_TEST_DATA (docs/testing.md). PYTHON names the interpreter (default
# python3); TEST_DATA is the built dev/test/data.c, which shows files of sentences (default build/test_data).
set -u
trainer=$(realpath "$1") python=${PYTHON:-python3}
data=${LLMC_TEST_DATA:-}
text=${2:-$data/tinyshakespeare/input.txt} vocab=${3:-$data/gpt2-bpe}
passed=0 failed=0 skipped=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ok() { echo "ok   $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ "$failed" -eq 0 ]; exit; }

if ! "$python" -c 'import tokenizers' 2>/dev/null; then
    skip prepare_gpt2 "$python has no tokenizers library (pip install tokenizers)"
    finish
fi

# Two documents with the test corpus's own byte tokenizer: every byte a token, one separator before each document.
printf 'first document\n' >"$work/a.txt"
printf 'second, with \xc3\xa9\n' >"$work/b.txt"
if "$python" dev/data/prepare_gpt2.py --local "$work/a.txt" "$work/b.txt" --vocab build/test_corpus/builtin --val-tokens 4 \
    --out "$work/bytes" >"$work/log" 2>&1; then
    got=$(cat "$work"/bytes/val_*.bin "$work"/bytes/train_*.bin | wc -c)
    want=$((2 * 1024 + 2 * (2 + 15 + 16)))
    if [ "$got" -eq "$want" ]; then ok "bytes as tokens"; else fail "bytes as tokens" "$got bytes in the shards, not $want"; fi
else
    fail "bytes as tokens" "$(tail -n 1 "$work/log")"
fi
if "$python" dev/data/prepare_gpt2.py --local "$work/none.txt" --vocab build/test_corpus/builtin --out "$work/x" >/dev/null 2>"$work/log"; then
    fail "missing input" "accepted"
elif [ "$(wc -l <"$work/log")" -eq 1 ]; then ok "missing input is one line"; else fail "missing input" "more than one line"; fi

# A CR right before an LF is not text, any other one is: in a file, also where it is read in pieces, and in JSON.
"$python" - "$work" <<'END'
import json, sys

text = "a\r\nb\rc\n" + "x\r\n" * 70000 + "\r\rend\r"
for i in (1, 2):
    open(f"{sys.argv[1]}/cr{i}.txt", "w", newline="").write(text)
    open(f"{sys.argv[1]}/cr{i}.jsonl", "w", newline="").write(json.dumps({"text": text}) + "\r\n")
    open(f"{sys.argv[1]}/lf{i}.txt", "w", newline="").write(text.replace("\r\n", "\n"))
END
why=
for kind in cr1.txt cr1.jsonl lf1.txt; do
    "$python" dev/data/prepare_gpt2.py --local "$work/$kind" "$work/${kind/1/2}" --vocab build/test_corpus/builtin --val-tokens 4 --out "$work/$kind.out" >"$work/log" 2>&1 || why=$(tail -n 1 "$work/log")
    got=$(cat "$work/$kind.out"/*.bin | wc -c)
    [ "$got" -eq $((2 * 1024 + 2 * 2 * (1 + 6 + 140000 + 6))) ] || why=${why:-"$kind: $got bytes in the shards"}
    cat "$work/$kind.out"/*.bin | cmp -s - <(cat "$work/cr1.txt.out"/*.bin) || why=${why:-"$kind: other tokens"}
done
if [ -z "$why" ]; then ok "CRs"; else fail "CRs" "$why"; fi

# A tokenizer of one's own: the same in every run, of the library's ids, and taken by the trainer for prompts and by exports.
why=
for threads in 1 3; do
    RAYON_NUM_THREADS=$threads "$python" dev/data/prepare_gpt2.py --local "$work/cr1.txt" build/test_corpus/text/00*.md --train-vocab 400 \
        --val-fraction 0.1 --out "$work/bpe$threads" >"$work/log" 2>&1 || why=$(tail -n 1 "$work/log")
    for file in "$work"/bpe1/*; do cmp -s "$file" "$work/bpe$threads/${file##*/}" || why=${why:-"${file##*/} of run $threads is another"}; done
done
if [ -z "$why" ]; then ok "a tokenizer of 400, the same by three threads"; else fail "a tokenizer of 400" "$why"; fi
why=$("$python" - "$work" build/test_corpus/text/00*.md 2>&1 <<'END'
import array, glob, json, sys
from tokenizers import Tokenizer
work, texts = sys.argv[1], [sys.argv[1] + "/cr1.txt"] + sys.argv[2:]
tokenizer = Tokenizer.from_file(work + "/bpe1/tokenizer.json")
ids = array.array("H")
for kind in ("train", "val"):
    ids.frombytes(open(f"{work}/bpe1/{kind}_000000.bin", "rb").read()[1024:])
wanted = []
for path in texts:
    text = open(path, newline="", encoding="utf-8").read().replace("\r\n", "\n")
    assert "<|" not in text
    wanted += [399] + tokenizer.encode(text).ids
vocab = json.load(open(work + "/bpe1/vocab.json", encoding="utf-8"))
assert list(ids) == wanted, "the shards are not the library's ids"
assert len(vocab) == 400 and vocab["<|endoftext|>"] == 399 and tokenizer.token_to_id("<|endoftext|>") == 399, "other numbers"
assert len({i for i in ids if i >= 256}) > 100, "hardly a merge is used"
END
)
if [ -z "$why" ]; then ok "its ids are the library's"; else fail "its ids are the library's" "$(tail -n 1 <<<"$why")"; fi
prompt='Ünï "code"  1,234'
if "$trainer" -i "$work/bpe1/train_*.bin" -e L=1,C=32,NH=2,T=64 -b 2 -x 2 -v 0 -s 0 -n 0 -o "$work/own_bpe" >"$work/log" 2>&1 &&
    "${trainer%/*}/use_${trainer##*/train_}" -e "$work/own_bpe" --generate 1 --prompt "$prompt" >"$work/log" 2>&1 && grep -qF -- "$prompt" "$work/log" &&
    grep -q '"vocab_size": 400,' "$work/own_bpe/config.json" && grep -q '"eos_token_id": 399' "$work/own_bpe/config.json"
then ok "the trainer takes it, and prompts in it"; else fail "the trainer takes it" "$(tail -n 1 "$work/log")"; fi
if ! "$python" -c 'import gguf, numpy' 2>/dev/null; then skip "its GGUF file" "$python has no gguf"
elif "$python" dev/export_gguf.py "$work/own_bpe" "$work/own.gguf" >"$work/log" 2>&1 &&
    "$python" dev/test/read_gguf.py "$work/own_bpe" "$work/own.gguf" f32 >"$work/log" 2>&1
then ok "its GGUF file"; else fail "its GGUF file" "$(tail -n 2 "$work/log" | tr '\n' ' ')"; fi
"$python" dev/data/prepare_gpt2.py --local "$work/a.txt" --train-vocab 500 --val-tokens 2 --out "$work/few" >"$work/log" 2>&1
if grep -q -- '--train-vocab 500: no further pair occurs twice; the tokenizer has 2[56][0-9] tokens' "$work/log"; then ok "a text too short for so many tokens"
else fail "a text too short for so many tokens" "$(tail -n 1 "$work/log")"; fi
for case in '256;--train-vocab 256: the bytes and .* alone take 257' '99999999999;99999999999 is more than 16777216' "300 --vocab $work;not allowed with argument"; do
    # shellcheck disable=SC2086
    if "$python" dev/data/prepare_gpt2.py --local "$work/a.txt" --out "$work/x" --train-vocab ${case%;*} >/dev/null 2>"$work/log"; then
        fail "--train-vocab ${case%;*}" accepted
    elif [ "$(wc -l <"$work/log")" -eq 1 ] && grep -q -- "${case#*;}" "$work/log"; then ok "refused: --train-vocab ${case%% *}"
    else fail "--train-vocab ${case%;*}" "$(tail -n 1 "$work/log")"; fi
done

# A word of a million characters: the library's time grows with the square of a word's length.
"$python" -c 'print("ab" * 500000, end=" " * 100000)' >"$work/word.txt"
timeout -s KILL 300 "$python" dev/data/prepare_bert.py --local "$work/word.txt" --train-vocab 300 --val-fraction 0 --out "$work/word" >"$work/log" 2>&1
status=$?
if [ $status -eq 0 ]; then ok "a word without end"; else fail "a word without end" "status $status: $(tail -n 1 "$work/log")"; fi

# Tokenizers whose result would be another one in every run, or which are not byte-level: before anything is encoded.
"$python" - "$work" <<'END'
import json, os, sys
for name, key, value in (("dropout", "dropout", 0.5), ("metaspace", "pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"})):
    tree = json.load(open(sys.argv[1] + "/bpe1/tokenizer.json", encoding="utf-8"))
    (tree["model"] if key == "dropout" else tree)[key] = value
    os.makedirs(f"{sys.argv[1]}/tokenizer_{name}")
    json.dump(tree, open(f"{sys.argv[1]}/tokenizer_{name}/tokenizer.json", "w"))
END
"$python" dev/data/prepare_gpt2.py --local "$work/cr1.txt" build/test_corpus/text/00*.md --vocab "$work/tokenizer_dropout" --val-fraction 0.1 --out "$work/dropout" >"$work/log" 2>&1
cmp -s "$work/dropout/train_000000.bin" "$work/bpe1/train_000000.bin" && why= || why="other tokens: $(tail -n 1 "$work/log")"
grep -q 'tokenizer_dropout/tokenizer.json: its dropout of 0.5 is switched off' "$work/log" || why=${why:-not told}
! grep -q dropout "$work/dropout/tokenizer.json" || why=${why:-'the copy has it still'}
if [ -z "$why" ]; then ok "a tokenizer's dropout is off"; else fail "a tokenizer's dropout is off" "$why"; fi
bad_input() { # NAME PATTERN SCRIPT INPUT ARGUMENTS...: one line, and nothing is left
    local name=$1 pattern=$2 script=$3 input=$4
    shift 4
    "$python" "dev/data/prepare_$script.py" --local "$work/$input" --out "$work/bad" "$@" >/dev/null 2>"$work/log"
    if [ $? -eq 2 ] && [ "$(wc -l <"$work/log")" -eq 1 ] && grep -q "$pattern" "$work/log" && [ -z "$(ls -A "$work/bad" 2>/dev/null)" ]; then ok "refused: $name"
    else fail "refused: $name" "$(tail -n 1 "$work/log") $(ls -A "$work/bad" 2>/dev/null)"; fi
}
bad_input "Metaspace" 'its pre-tokenizer is Metaspace; only byte-level' gpt2 a.txt --vocab "$work/tokenizer_metaspace"
# Files that are not text say what they are.
printf 'PAR1\x15\xff' >"$work/a.parquet"
printf '\x28\xb5\x2f\xfd\xff' >"$work/a.jsonl.zst"
gzip -c "$work/a.txt" >"$work/a.GZ"
bad_input "Parquet" 'a.parquet: is a Parquet file; convert it to .jsonl' gpt2 a.parquet --vocab build/test_corpus/builtin
bad_input "Zstandard" 'a.jsonl.zst: is compressed with Zstandard; decompress it first' bert a.jsonl.zst --train-vocab 400
bad_input "gzip by another name" 'a.GZ: is compressed with gzip; decompress it first' chat a.GZ --vocab build/test_corpus/builtin
# JSON files: an array or lines of objects, not one document of source text.
echo '[{"text": "first document\n"}, {"text": "second, with \u00e9\n"}]' >"$work/array.json"
printf '{"text": "first document\\n"}\n{"text": "second, with \\u00e9\\n"}\n' >"$work/lines.json"
for kind in array lines; do
    "$python" dev/data/prepare_gpt2.py --local "$work/$kind.json" --vocab build/test_corpus/builtin --val-tokens 4 --out "$work/$kind" >"$work/log" 2>&1
    if cmp -s "$work/$kind/train_000000.bin" "$work/bytes/train_000000.bin"; then ok "a JSON file: $kind"; else fail "a JSON file: $kind" "$(tail -n 1 "$work/log")"; fi
done
echo '["a"]' >"$work/strings.json"
bad_input "a JSON array of strings" "document 1 is not an object with the key 'text'" gpt2 strings.json --vocab build/test_corpus/builtin
echo '[{"text": ' >"$work/half.json"
bad_input "half a JSON array" 'half.json: is not JSON' gpt2 half.json --vocab build/test_corpus/builtin

# What a preparation did not write stays: refused with a line, and nothing changes. What it wrote is replaced and removed.
listing() { (cd "$work/box" && find . -printf '%p %y %l\n' -type f -exec md5sum {} + | sort); }
theirs() { # NAME FILE: that the line names; SCRIPT ARGUMENTS...
    local name=$1 file=$2 script=$3 before after
    shift 3
    before=$(listing)
    "$python" "dev/data/prepare_$script.py" --local "$work/a.txt" --val-fraction 0 --out "$work/box/out" "$@" >/dev/null 2>"$work/log"
    if [ $? -ne 2 ] || [ "$(wc -l <"$work/log")" -ne 1 ] || ! grep -q "^error: $work/box/out/$file: \(was not\|is not in prepared.json\)" "$work/log"; then
        fail "theirs: $name" "$(tail -n 1 "$work/log")"
    else
        after=$(listing)
        if [ "$before" = "$after" ]; then ok "theirs: $name"; else fail "theirs: $name" "$(diff <(echo "$before") <(echo "$after"))"; fi
    fi
    rm -rf "$work/box"/out/*
}
mkdir -p "$work/box/out" "$work/box/mine"
echo mine | tee "$work/box/mine/preparation.lock" >"$work/box/mine/notes.txt"
builtin=(--vocab build/test_corpus/builtin)
mkdir "$work/box/out/preparation" && echo mine >"$work/box/out/preparation/notes.txt"
theirs "a directory of work" preparation gpt2 "${builtin[@]}"
ln -s ../mine "$work/box/out/preparation"
theirs "a link to one" preparation bert --train-vocab 400
echo '{}' >"$work/box/out/config.json"
theirs "a model" config.json gpt2 "${builtin[@]}"
cp "$work"/bytes/*_000000.bin "$work/box/out"
theirs "shards of GPT-2's form" train_000000.bin gpt2 "${builtin[@]}"
cp "$work"/bytes/*.json "$work/box/out" && ln -s ../mine/notes.txt "$work/box/out/train_000007.bin"
theirs "a link to a shard" train_000007.bin gpt2 "${builtin[@]}"
mkdir "$work/only" && cp build/test_corpus/builtin/tokenizer.json "$work/only" && echo mine >"$work/box/out/notes.txt" && why=
for given in "--vocab build/test_corpus/builtin --shard-tokens 4" "--vocab $work/only"; do
    # shellcheck disable=SC2086
    "$python" dev/data/prepare_gpt2.py --local "$work/a.txt" --val-fraction 0 --out "$work/box/out" $given >"$work/log" 2>&1 || why=$(tail -n 1 "$work/log")
done
[ "$(ls "$work/box/out" | tr '\n' ' ')" = "notes.txt prepared.json tokenizer.json train_000000.bin " ] || why=${why:-$(ls "$work/box/out" | tr '\n' ' ')}
if [ -z "$why" ]; then ok "its own earlier files are replaced and removed"; else fail "its own earlier files" "$why"; fi

# Sentences for BERT: what is in the files is what was in the text, whichever way it is marked.
show=${TEST_DATA:-build/test_data}
printf '[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\nsat\n##s\n.\n!\n?\ndr\nit\nsaid\n"\n3\n[\n]\nmask\n' >"$work/vocab.txt"
sentences() { # name, expected text, arguments of prepare_bert.py...
    local name=$1 want=$2
    shift 2
    if ! "$python" dev/data/prepare_bert.py --out "$work/bert" "$@" >"$work/log" 2>&1; then fail "$name" "$(tail -n 1 "$work/log")"; return; fi
    if diff <("$show" sentences "$work/bert/*.bin" "$work/bert" 2>&1) <(printf '%b' "$want") >"$work/log"; then ok "$name"
    else fail "$name" "$(head -n 3 "$work/log" | tr '\n' ' ')"; fi
}
if [ ! -x "$show" ]; then
    skip prepare_bert "no $show"
else
    given=(--vocab "$work/vocab.txt" --val-fraction 0)
    printf 'The cat. Sat\n\n\nIt sat!\nthe CATS\n   \n[MASK]\n' >"$work/lines.txt"
    sentences "sentences: one a line" 'the cat. sat\n\nit sat!\nthe cats\n\n[ mask ]\n\n' --local "$work/lines.txt" --lines "${given[@]}"
    printf 'Dr. Cat sat. "The cats sat!" said it. the\n\nIt sat? 3 cats...\n' >"$work/plain.txt"
    plain='dr. cat sat.\n" the cats sat! " said it. the\nit sat?\n3 cats...\n\n'
    sentences "sentences: plain text" "$plain" --local "$work/plain.txt" "${given[@]}"
    { printf '<doc id="1" title="It">\nIt\n\nThe cat. It sat.\n</doc>\n<doc id="2" title="The">\nThe\n</doc>\n'
      printf '<doc id="3" title="3">\nCats sat.\n</doc>\n'; } | gzip >"$work/wiki.gz"
    sentences "sentences: WikiExtractor" 'the cat.\nit sat.\n\ncats sat.\n\n' --local "$work/wiki.gz" "${given[@]}"
    printf '\xef\xbb\xbf  <doc id="1" title="It">\nIt\n\nThe cat.\n  </doc>\n' >"$work/marked"
    sentences "sentences: a byte order mark, an indented <doc>" 'the cat.\n\n' --local "$work/marked" "${given[@]}"
    { printf '\xef\xbb\xbf'; cat "$work/vocab.txt"; } >"$work/marked_vocab.txt"
    sentences "a vocabulary with a byte order mark" 'the cat. sat\n\nit sat!\nthe cats\n\n[ mask ]\n\n' --local "$work/lines.txt" --lines --vocab "$work/marked_vocab.txt" --val-fraction 0
    printf '\xef\xbb\xbfThe cat.\n' >"$work/marked.txt"
    sentences "sentences: plain text with a byte order mark" 'the cat.\n\n' --local "$work/marked.txt" "${given[@]}"
    printf '{"id": "1", "text": "The cat. It sat."}\n{"id": "2", "text": "Cats."}\n' >"$work/wiki_00"
    sentences "sentences: WikiExtractor --json" 'the cat.\nit sat.\n\ncats.\n\n' --local "$work/wiki_00" "${given[@]}"
    printf '{"text": "The cat."}\n' >"$work/3.mask"
    sentences "sentences: JSON that says it is something else" '[UNK] " [UNK] " [UNK] " the cat. " [UNK]\n\n' --local "$work/3.mask" "${given[@]}"
    sentences "sentences: a file for each document" 'the cat. sat\n\nit sat!\nthe cats\n\n[ mask ]\n\n' --local "$work/lines.txt" --lines \
        --vocab "$work/vocab.txt" --val-fraction 0 --shard-tokens 1 --processes 2
    if "$python" dev/data/prepare_gpt2.py --local "$work/a.txt" --vocab build/test_corpus/builtin --out "$work/bert" >/dev/null 2>"$work/log"; then
        fail "a folder of another kind" "taken over"
    elif [ "$(wc -l <"$work/log")" -eq 1 ] && grep -q 'another --out' "$work/log"; then ok "a folder of another kind is left alone"
    else fail "a folder of another kind" "$(tail -n 1 "$work/log")"; fi
    if [ "$(ls "$work"/bert/*.bin | wc -l)" -eq 3 ]; then ok "three files"; else fail "three files" "$(ls "$work/bert" | tr '\n' ' ')"; fi
    if "$python" dev/data/prepare_bert.py --local build/test_corpus/text/000.md --train-vocab 400 --out "$work/own" --lines >"$work/log" 2>&1 &&
        [ "$(wc -l <"$work/own/vocab.txt")" -eq 400 ] && [ "$(head -n 5 "$work/own/vocab.txt" | tr '\n' ' ')" = "[PAD] [UNK] [CLS] [SEP] [MASK] " ]; then
        ok "a vocabulary of 400"
    else fail "a vocabulary of 400" "$(tail -n 1 "$work/log")"; fi
    # The same in every run, although the library's arbitrary numbers decide between pairs of equal frequency.
    for again in 1 2 3; do
        RAYON_NUM_THREADS=$again "$python" dev/data/prepare_bert.py --local build/test_corpus/text/00*.md --train-vocab 1000 --out "$work/again$again" --lines >/dev/null 2>"$work/log"
    done
    if [ "$(cat "$work"/again?/vocab.txt | wc -l)" = 3000 ] && [ "$(md5sum <"$work/again1/vocab.txt")" = "$(md5sum <"$work/again2/vocab.txt")" ] &&
        cmp -s "$work/again1/train_000000.bin" "$work/again3/train_000000.bin"
    then ok "the same vocabulary, three times"; else fail "the same vocabulary" "$(diff "$work"/again[12]/vocab.txt | head -n 3 | tr '\n' ' ')"; fi
    if "$python" dev/data/prepare_bert.py --local build/test_corpus/text/000.md --train-vocab 40 --out "$work/x" --lines >/dev/null 2>"$work/log"; then
        fail "a vocabulary smaller than the text's characters" "accepted"
    elif [ "$(wc -l <"$work/log")" -eq 1 ] && grep -q 'characters of this text alone take' "$work/log"; then ok "a vocabulary smaller than the text's characters"
    else fail "a vocabulary smaller than the text's characters" "$(tail -n 1 "$work/log")"; fi
    # The trainer knows the words it was made with, and no others though they are as many.
    bert=$(dirname "$trainer")/train_bert
    if [ -x "$bert" ]; then
        small=(-e L=1,C=32,NH=2,V=400,T=64 -i "$work/own/train_*.bin" -j "$work/own/val_*.bin" -b 2 -t 32 -x 1 -v 0 -s 0 -n 0 --overwrite 1 -o "$work/run")
        if "$bert" "${small[@]}" >"$work/log" 2>&1 && [ -f "$work/run/vocab.txt" ]; then ok "the trainer takes the data's own words"
        else fail "the trainer takes the data's own words" "$(tail -n 1 "$work/log")"; fi
        { head -n 5 "$work/own/vocab.txt"; sed -n '$p; 6,399H; ${x; s/^\n//p}' "$work/own/vocab.txt"; } >"$work/run/vocab.txt"
        if "$bert" -e "$work/run" -i "$work/own/train_*.bin" -j "$work/own/val_*.bin" -b 2 -t 32 -x 1 -o "" >"$work/log" 2>&1; then
            fail "words in another order" "accepted"
        elif grep -q 'another vocabulary than this vocab.txt' "$work/log"; then ok "words in another order are refused"
        else fail "words in another order" "$(tail -n 1 "$work/log")"; fi
    else
        skip "the words of the data" "no $bert"
    fi
    if "$python" dev/data/prepare_bert.py --local "$work/plain.txt" --vocab "$work" --out "$work/x" >/dev/null 2>"$work/log"; then
        fail "one document for two sides" "accepted"
    elif [ "$(wc -l <"$work/log")" -eq 1 ] && grep -q 'cannot be divided' "$work/log"; then ok "one document cannot be divided"
    else fail "one document for two sides" "$(tail -n 1 "$work/log")"; fi
fi

# The published counts of tinyshakespeare as llm.c cuts it, and a small model that learns from it.
if [ ! -f "$text" ] || [ ! -d "$vocab" ]; then
    skip tinyshakespeare "set LLMC_TEST_DATA to a folder with tinyshakespeare and gpt2-bpe (docs/testing.md)"
    finish
fi
"$python" dev/data/prepare_gpt2.py --local "$text" --vocab "$vocab" --split-blank-lines --val-tokens 32768 \
    --out "$work/tinyshakespeare" >"$work/log" 2>&1
tokens() { echo $((($(cat "$work"/tinyshakespeare/$1_*.bin | wc -c) - 1024) / 2)); }
if [ "$(tokens train)" = 305260 ] && [ "$(tokens val)" = 32768 ]; then ok "tinyshakespeare: 305260 and 32768 tokens"
else fail "tinyshakespeare" "$(tokens train) training and $(tokens val) validation tokens, not 305260 and 32768"; fi
losses=$("$trainer" -i "$work/tinyshakespeare/train_*.bin" -j "$work/tinyshakespeare/val_*.bin" \
    -e L=1,C=64,NH=2,V=50257,T=128 -b 4 -x 200 -l 3e-3 -k constant -c 0 -v 200 -m 8 -s 0 -n 0 -o "" |
    sed -nE 's/.*val loss ([0-9.]+)/\1/p' | tr '\n' ' ')
read -r first last <<<"$losses"
if awk "BEGIN {exit !($first > 10.7 && $first < 10.95 && $last < 6.2)}"; then ok "tinyshakespeare: val loss $first -> $last in 200 steps"
else fail "tinyshakespeare" "val loss $first -> $last, wanted 10.8 -> under 6.2"; fi
finish
