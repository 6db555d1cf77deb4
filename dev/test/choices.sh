#!/usr/bin/env bash
# Multiple-choice sets, from text by dev/data/hellaswag.py and lambada.py into the trainer:
#
#     bash dev/test/choices.sh PROGRAM          from the repository's root
#
# PYTHON names the interpreter (default python3), which needs the tokenizers library; if it has transformers too, both
# must have the same scores. Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-} python=${PYTHON:-python3}
. "$(dirname "$0")/shell.sh"

if ! "$python" -c 'import tokenizers' 2>/dev/null; then
    skip hellaswag "$python has no tokenizers library (pip install tokenizers)"
    finish
    exit
fi
prepare() { # hellaswag|lambada FILE FLAG...
    PYTHONDONTWRITEBYTECODE=1 "$python" "$root/dev/data/$1.py" --local "$2" --vocab data/builtin "${@:3}" >"$work/log" 2>"$work/stderr"
}
prepared() { # NAME hellaswag|lambada FILE FLAG...
    if prepare "${@:2}"; then ok "$1"; else fail "$1" "$(tail -n 1 "$work/stderr")"; fi
}
prepare_refused() { # NAME PATTERN hellaswag|lambada TEXT FLAG...
    local why=
    printf '%b' "$4" >"$work/text"
    prepare "$3" "$work/text" --out "$box/x.bin" "${@:5}"
    [ $? -eq 2 ] || why='exit status is not 2'
    [ "$(wc -l <"$work/stderr")" -eq 1 ] || why=${why:-"not one line: $(tail -n 2 "$work/stderr" | tr '\n' ' ')"}
    grep -Eq -- "$2" "$work/stderr" || why=${why:-"'$(cat "$work/stderr")' does not match '$2'"}
    [ -z "$(ls "$box")" ] || why=${why:-"it left $(ls "$box")"}
    verdict "refused: $1" "$why"
}
words() { od -An -v -tu2 -w2 -j 1024 "$1" | tr -d ' ' | tr '\n' ' '; }  # of a set, without its header

# ---------------------------------------------------------------------------------------------------------
# Files: with the built-in corpus's tokenizer a token is a byte, and 256 ends a text

printf 'a\n1\nb\ncd\ne\nf\n' >"$work/six.txt"
prepared 'six lines' hellaswag "$work/six.txt" --out "$work/six.bin"
want='65535 40 0 1 4 1 97 2 32 98 3 32 99 100 2 32 101 2 32 102 '
[ "$(words "$work/six.bin")" = "$want" ] || fail 'six lines' "$(words "$work/six.bin")"
[ "$(od -An -td4 -w16 -N 16 "$work/six.bin" | tr -s ' ')" = ' 20240522 1 1 40' ] || fail 'its header' 'it is another'
printf '%s\n' '{"ctx": "a", "endings": ["b", "cd", "e", "f"], "label": 1, "ind": 5}' >"$work/six.jsonl"
sed 's/$/\r/' "$work/six.txt" >"$work/crlf.txt" && printf '\n' >>"$work/crlf.txt"
prepared 'six lines, ends of Windows' hellaswag "$work/crlf.txt" --out "$work/crlf.bin"
why=
cmp -s "$work/six.bin" "$work/crlf.bin" || why='another set'
verdict 'six lines, ends of Windows: the same set' "$why"
prepared 'jsonl' hellaswag "$work/six.jsonl" --out "$work/jsonl.bin"
cmp -s "$work/six.bin" "$work/jsonl.bin" || fail 'jsonl' 'not the same as from six lines'
printf '%s\n' '{"ctx": "", "endings": ["b"], "label": "0"}' '{"ctx": "a", "endings": ["b", "c", "d", "e", "f", "g"], "label": 5}' >"$work/any.jsonl"
prepared 'any number of endings' hellaswag "$work/any.jsonl" --out "$work/any.bin"
want='65535 20 0 0 1 1 256 2 32 98 65535 50 1 5 6 1 97 2 32 98 2 32 99 2 32 100 2 32 101 2 32 102 2 32 103 '
[ "$(words "$work/any.bin")" = "$want" ] || fail 'any number of endings' "$(words "$work/any.bin")"
printf '%s\n' '{"activity_label": "X", "ctx_a": "a [b] c [title]", "ctx_b": "the D", "endings": ["e [f]", "g"], "label": 0}' >"$work/lm.jsonl"
prepared '--lm-eval' hellaswag "$work/lm.jsonl" --lm-eval --out "$work/lm.bin"
want=$(printf 'X: a c. The d' | od -An -v -tu1 -w1 | tr -d ' ' | tr '\n' ' ')
[ "$(words "$work/lm.bin")" = "65535 56 0 0 2 13 ${want}3 32 101 32 2 32 103 2 1 " ] || fail '--lm-eval' "$(words "$work/lm.bin")"
cat "$work/six.txt" "$work/six.txt" "$work/six.txt" >"$work/three.txt"
prepared '--limit' hellaswag "$work/three.txt" --limit 2 --out "$work/two.bin"
[ "$(words "$work/two.bin" | grep -o 65535 | wc -l)" -eq 2 ] || fail '--limit' 'not two examples'
printf '%s\n' '{"text": "a b cd\n"}' >"$work/cloze.jsonl"
prepared 'lambada' lambada "$work/cloze.jsonl" --out "$work/cloze.bin"
[ "$(words "$work/cloze.bin")" = '65535 26 0 0 1 3 97 32 98 3 32 99 100 ' ] || fail 'lambada' "$(words "$work/cloze.bin")"
for i in {0..65536}; do echo '{"text": "a b"}'; done >"$work/many.jsonl"
prepared '65,537 examples' lambada "$work/many.jsonl" --out "$work/many.bin"
[ "$(words "$work/many.bin" | tr ' ' '\n' | tail -n 9 | tr '\n' ' ')" = '65535 20 0 0 1 1 97 2 32 98 ' ] ||
    [ "$(words "$work/many.bin" | grep -o '65535 [0-9]* [0-9]* ' | tail -n 1)" = '65535 20 0 ' ] || fail '65,537 examples' 'the last number is not 0'

prepare_refused 'no such label'      'line 2: its label is .4.'           hellaswag 'a\n4\nb\nc\nd\ne\n'
prepare_refused 'nothing'            'no examples in it'                  hellaswag ''
prepare_refused 'no JSON'            'line 1 is not JSON'                 hellaswag '{"ctx": \n'
prepare_refused 'no endings'         "'endings' are not a list"           hellaswag '{"ctx": "a", "endings": [], "label": 0}\n'
prepare_refused 'lm-eval, no letter' 'example 0: its texts'           hellaswag '{"activity_label": "X", "ctx_a": "a", "ctx_b": "b", "endings": ["c", "[d]"], "label": 0}\n' --lm-eval
prepare_refused 'six lines, lm-eval' 'needs the fields of a .jsonl'       hellaswag 'a\n1\nb\nc\nd\ne\n' --lm-eval
prepare_refused 'one word'           'has no two words'                   lambada   '{"text": "word"}\n'
# ---------------------------------------------------------------------------------------------------------
# The trainer: a text's next words against those of another place, and clozes

"$python" - "$root/build/test_corpus/text/000.md" "$work" <<'EOP'
import json, random, sys
words = [w[:8] for w in open(sys.argv[1], encoding="utf-8").read().split()]
random.seed(1)
with open(f"{sys.argv[2]}/set.jsonl", "w") as f, open(f"{sys.argv[2]}/word.jsonl", "w") as g:
    for i in range(0, 150, 3):
        endings = [" ".join(words[j : j + random.randint(1, 3)]) for j in (i + 5, *random.sample(range(len(words) - 3), i // 3 % 4))]
        order = list(range(len(endings)))
        random.shuffle(order)
        example = {"ctx": " ".join(words[i : i + 5]), "endings": [endings[k] for k in order], "label": order.index(0)}
        f.write(json.dumps(example) + "\n")
        g.write(json.dumps({"text": " ".join(words[i : i + 5])[:-1] + " a" * (i // 3 % 3)}) + "\n")
EOP
prepared 'a set of many lengths' hellaswag "$work/set.jsonl" --out "$work/hellaswag_val.bin"
prepared 'a set of clozes' lambada "$work/word.jsonl" --out "$work/lambada_test.bin"
sets=$work/hellaswag_val.bin,$work/lambada_test.bin
run -e L=2,C=32,NH=2,T=96 -b 4 -x 120 -l 1e-2 -v 0 -s 0 -n 0 -h 50 --choices "$sets" -o "$work/model"
why=$(ended_with 0)
for step in 50 100 120; do
    grep -Eq "^step +$step/120 \| hellaswag acc 0\.[0-9]{6}, acc_norm 0\.[0-9]{6} \(50 examples\)$" "$work/stdout" || why=${why:-"no hellaswag at step $step"}
    grep -Eq "^step +$step/120 \| lambada acc [01]\.[0-9]{6}, perplexity [0-9.]+ \(50 examples\)$" "$work/stdout" || why=${why:-"no lambada at step $step"}
    grep -Eq "^\{\"step\": $step, \"hellaswag_acc\": [0-9.e-]+, \"hellaswag_acc_norm\": [0-9.e-]+\}$" "$work/model/log.jsonl" || why=${why:-"no hellaswag in log.jsonl at step $step"}
    grep -Eq "^\{\"step\": $step, \"lambada_acc\": [0-9.e-]+, \"lambada_perplexity\": [0-9.e+]+\}$" "$work/model/log.jsonl" || why=${why:-"no lambada in log.jsonl at step $step"}
done
verdict '-h 50 --choices' "$why"

evaluate() { run -e "$work/model" --evaluate 1 -m 1 --choices "$sets" "$@"; }
evaluate -b 4
verdict '--evaluate 1 --choices' "$(ended_with 0)"
grep -E '^(hellaswag|lambada)' "$work/stdout" >"$work/figures"
[ "$(wc -l <"$work/figures")" -eq 2 ] || fail '--evaluate 1 --choices' 'not a line a set'
for flags in '-b 1' '-b 64' '-b 4 --threads 2'; do
    evaluate $flags
    why=$(ended_with 0)
    grep -E '^(hellaswag|lambada)' "$work/stdout" | cmp -s - "$work/figures" || why=${why:-"$(grep hella "$work/stdout"), not $(grep hella "$work/figures")"}
    verdict "the same with $flags" "$why"
done
if prepare_ranks; then
    timeout --foreground 180 mpirun --oversubscribe --bind-to none -np 2 "$(use_program)" -e "$work/model" --evaluate 1 -m 1 \
        --choices "$sets" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
    why=$(ended_with 0)
    grep -E '^(hellaswag|lambada)' "$work/stdout" | cmp -s - "$work/figures" || why=${why:-'other figures'}
    verdict 'the same on two ranks' "$why"
else skip 'the same on two ranks' "$why"; fi
if "$python" -c 'import transformers, torch' 2>/dev/null; then
    compared() { # NAME SET T FILE
        read -r acc second < <(sed -nE "s/^${2%_*} acc ([0-9.]+), [a-z_]+ ([0-9.]+) .*/\1 \2/p" "$4")
        "$python" "$root/dev/reference/check_choices.py" "$work/model" "$work/$2.bin" "$3" "$acc" "$second" >"$work/log" 2>&1
        verdict "$1" "$([ $? -eq 0 ] || tail -n 2 "$work/log" | tr '\n' ' ')"
    }
    compared 'transformers count the same clozes' lambada_test 96 "$work/figures"
    # Sequences that are shorter than most examples.
    evaluate -t 32 -b 3
    compared 'transformers count the same choices, contexts cut' hellaswag_val 32 "$work/stdout"
else skip 'transformers count the same' "$python has no transformers"; fi

prepare_refused 'onto its input' 'text: exists and is not' hellaswag 'a\n0\nb\nc\nd\ne\n' --out "$work/text"
finish
