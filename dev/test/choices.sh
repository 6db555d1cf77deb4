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
prepare_refused() { # NAME PATTERN hellaswag|lambada TEXT FLAG...
    printf '%b' "$4" >"$work/text"
    prepare "$3" "$work/text" --out "$box/x.bin" "${@:5}"
    status=$?
    verdict "refused: $1" "$(ended_with_error 2 "$2")$(ls "$box")"
}
words() { od -An -v -tu2 -w2 -j 1024 "$1" | tr -d ' ' | tr '\n' ' '; }  # of a set, without its header
makes() { # NAME hellaswag|lambada TEXT WORDS FLAG...: the text becomes these words; $made is the set
    local why=
    made=$work/$((passed + failed)).bin
    printf '%b' "$3" >"$work/made.txt"
    prepare "$2" "$work/made.txt" --out "$made" "${@:5}" || why=$(tail -n 1 "$work/stderr")
    [ "$(words "$made")" = "$4" ] || why=${why:-"$(words "$made")"}
    verdict "$1" "$why"
}

# ---------------------------------------------------------------------------------------------------------
# Files: with the built-in corpus's tokenizer a token is a byte, and 256 ends a text

want='65535 40 0 1 4 1 97 2 32 98 3 32 99 100 2 32 101 2 32 102 '
makes 'six lines, ends of Windows, an empty line' hellaswag 'a\r\n1\r\nb\r\ncd\r\ne\r\nf\r\n\n' "$want"
makes 'jsonl' hellaswag '{"ctx": "a", "endings": ["b", "cd", "e", "f"], "label": 1, "ind": 5}\n' "$want"
makes 'any number of endings' hellaswag \
    '{"ctx": "", "endings": ["b"], "label": "0"}\n{"ctx": "a", "endings": ["b", "c", "d"], "label": 2}\n' \
    '65535 20 0 0 1 1 256 2 32 98 65535 32 1 2 3 1 97 2 32 98 2 32 99 2 32 100 '
context=$(printf 'X: a c. The d' | od -An -v -tu1 -w1 | tr -d ' ' | tr '\n' ' ')
example='{"activity_label": "X", "ctx_a": "a [b] c [title]", "ctx_b": "the D", "endings": ["e [f]", "g"], "label": 0}\n'
makes '--lm-eval' hellaswag "$example" "65535 56 0 0 2 13 ${context}3 32 101 32 2 32 103 2 1 " --lm-eval
makes 'lambada' lambada '{"text": "a b cd\\n"}\n' '65535 26 0 0 1 3 97 32 98 3 32 99 100 '

prepare_refused 'no such label'      'line 2: its label is .4.'           hellaswag 'a\n4\nb\nc\nd\ne\n'
prepare_refused 'nothing'            'no examples in it'                  hellaswag ''
prepare_refused 'lm-eval, no letter' 'example 0: its texts'           hellaswag '{"activity_label": "X", "ctx_a": "a", "ctx_b": "b", "endings": ["c", "[d]"], "label": 0}\n' --lm-eval
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
prepare hellaswag "$work/set.jsonl" --out "$work/hellaswag_val.bin"
prepare lambada "$work/word.jsonl" --out "$work/lambada_test.bin"
sets=$work/hellaswag_val.bin,$work/lambada_test.bin
accepted '-h 50 --choices' -e L=2,C=32,NH=2,T=96 -b 4 -x 120 -l 1e-2 -v 0 -s 0 -n 0 -h 50 --choices "$sets" \
    -o "$work/model"
line='hellaswag acc 0\.[0-9]{6}, acc_norm 0\.|lambada acc [01]\.[0-9]{6}, perplexity '
sed -nE "s/^step 120\/120 \| ($line)/\1/p" "$work/stdout" >"$work/figures"
figures() { # FLAG...: the two lines are those of training's last evaluation
    run -e "$work/model" --evaluate 1 -m 1 --choices "$sets" "$@"
    grep -E '^(hellaswag|lambada)' "$work/stdout" >"$work/now"
    why=$(ended_with 0)$(cmp "$work/now" "$work/figures" 2>&1)
    [ "$(wc -l <"$work/now")" -eq 2 ] || why+='not a line a set'
    verdict "--evaluate 1 --choices $*" "$why"
}
# On ranks: dev/test/exam.sh.
for flags in '-b 4' '-b 1' '-b 64 --threads 2'; do figures $flags; done
if "$python" -c 'import transformers, torch' 2>/dev/null; then
    compared() { # NAME SET T FILE
        read -r acc second < <(sed -nE "s/^${2%_*} acc ([0-9.]+), [a-z_]+ ([0-9.]+) .*/\1 \2/p" "$4")
        "$python" "$root/dev/reference/check_choices.py" "$work/model" "$work/$2.bin" "$3" "$acc" "$second" >"$work/log" 2>&1
        verdict "$1" "$([ $? -eq 0 ] || tail -n 2 "$work/log" | tr '\n' ' ')"
    }
    compared 'transformers count the same clozes' lambada_test 96 "$work/figures"
    # Sequences that are shorter than most examples.
    run -e "$work/model" --evaluate 1 -m 1 --choices "$sets" -t 32 -b 3
    compared 'transformers count the same choices, contexts cut' hellaswag_val 32 "$work/stdout"
else skip 'transformers count the same' "$python has no transformers"; fi

finish
