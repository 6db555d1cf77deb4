#!/usr/bin/env bash
# Clozes that BERT fills in: --choices and -h of train_bert.
#
#     bash dev/test/exam.sh PROGRAM          from the repository's root, after make
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
stories=$root/data/builtin/bert
[ -f "$stories/exam.bin" ] || { echo "$stories is missing; run make data/builtin/bert/train.bin first" >&2; exit 2; }
sets=$stories/exam.bin,$stories/notlast.bin
data=(-i "$stories/train.bin" -j "$stories/val.bin")

# The exam during a run, then of its model: the same figures, however it is cut.
run -e L=1,C=32,NH=2,T=72 -b 8 -x 60 -l 4e-3 -u 10 -v 0 -h 40 --choices "$sets" "${data[@]}" -s 0 -n 0 -o model
why=$(ended_with 0)
for step in 40 60; do
    said="^step +$step/60 \| exam acc 0\.[0-9]{6}, chance 0\.1[0-9]{5}, perplexity [0-9.]+ \(2000 examples\)$"
    logged="^\{\"step\": $step, \"notlast_acc\": [0-9.e-]+, \"notlast_perplexity\": [0-9.e+]+\}$"
    grep -Eq "$said" "$work/stdout" || why=${why:-"no exam at step $step"}
    grep -Eq "$logged" model/log.jsonl || why=${why:-"step $step is not in log.jsonl"}
done
verdict '-h 40 --choices' "$why"
sed -nE 's/^step +60\/60 \| (exam|notlast)/\1/p' "$work/stdout" >figures
for way in '-b 8' '-b 32 --threads 2'; do
    # shellcheck disable=SC2086
    run -e model --evaluate 1 -m 1 --choices "$sets" "${data[@]}" $way
    why=$(ended_with 0)
    grep -q '^val loss' "$work/stdout" || why=${why:-'no validation loss'}
    grep -E '^(exam|notlast)' "$work/stdout" | cmp -s - figures || why=${why:-"$(grep exam "$work/stdout"), not $(head -n 1 figures)"}
    verdict "--evaluate 1 $way" "$why"
done

# A run that was killed before the last exam of a step resumes with it.
run_to_eight() {
    run -e L=1,C=16,NH=2,T=72 -b 4 -x 8 -v 0 -s 0 -n 4 -h 4 --choices "$sets" -i "$stories/train.bin" -o killed "$@"
}
run_to_eight
sed -i '/"step": 8, "notlast_acc"/d' killed/log.jsonl
run_to_eight -y 1
why=$(ended_with 0)
[ "$(grep -o '"step": 8, "[a-z]*_acc"' killed/log.jsonl | tr '\n' ' ')" = '"step": 8, "exam_acc" "step": 8, "notlast_acc" ' ] || why=${why:-"$(tail -n 2 killed/log.jsonl)"}
verdict 'a missing result when a run resumes' "$why"

# ---------------------------------------------------------------------------------------------------------
# One cloze is what --fill says of the same text

id() { echo $(($(grep -nxF -- "$1" "$stories/vocab.txt" | cut -d : -f 1) - 1)); }
# A set of one example: a context, and endings of words, the first of which is correct.
write_set() { # FILE CONTEXT ENDING...
    local word texts=("${@:2}") numbers=()
    for text in "${texts[@]}"; do
        numbers+=("$(wc -w <<<"$text")")
        for word in $text; do numbers+=("$(id "$word")"); done
    done
    { for word in 20240522 1 1 200; do little_endian 4 "$word"; done
      head -c 1008 /dev/zero
      for word in 65535 $((2 * (5 + ${#numbers[@]}))) 0 0 $(($# - 2)) "${numbers[@]}"; do little_endian 2 "$word"; done; } >"$1"
}
context='Anna goes to the park . Ben takes the ball . Where is Anna ? Anna is in the'
run -e model --fill "$context [MASK] ."
guesses=$(tail -n 1 "$work/stdout" | sed 's/^ *//')
write_set first.bin "$context" "$(cut -d ' ' -f 1 <<<"$guesses") ."
write_set second.bin "$context" "$(cut -d ' ' -f 3 <<<"$guesses") ."
run -e model --evaluate 1 -m 1 --choices first.bin,second.bin "${data[@]}"
why=$(ended_with 0)
for set in first second; do
    case $set in first) acc=1 at=2 ;; *) acc=0 at=4 ;; esac
    probability=$(cut -d ' ' -f $at <<<"$guesses" | tr -d ,)
    sed -nE "s/^$set acc $acc\.0{6}, perplexity ([0-9.]+) .*/\1/p" "$work/stdout" |
        awk -v p="$probability" '{ good = 1 / $1 - p < 0.00051 && p - 1 / $1 < 0.00051 } END { exit !good }' ||
        why=${why:-"$(grep "^$set" "$work/stdout"), but --fill: $guesses"}
done
verdict "a cloze has the probability that --fill shows" "$why"

# With room for 14 tokens, [CLS] and [SEP] included, the last ten of the context are left.
write_set long.bin "$context" 'barn .'
write_set short.bin "$(cut -d ' ' -f 10- <<<"$context")" 'barn .'
run -e model --evaluate 1 -t 14 -m 1 --choices long.bin,short.bin "${data[@]}"
why=$(ended_with 0)
[ "$(grep -c 'long.bin: its longest example' "$work/stderr")" = 1 ] || why=${why:-'no warning'}
[ "$(grep '^long' "$work/stdout" | cut -d ' ' -f 2-)" = "$(grep '^short' "$work/stdout" | cut -d ' ' -f 2-)" ] || why=${why:-"$(grep acc "$work/stdout" | tr '\n' ' ')"}
verdict 'a context that is too long is cut at its beginning' "$why"

TINY=(-e L=1,C=16,NH=2,T=72 -v 0 -s 0 -n 0 -i "$stories/train.bin" -o "$box/new")
write_set two.bin "$context" 'park .' 'barn .'
refused 'several endings' 2 'two.bin: has examples of several endings; BERT fills in clozes' "${TINY[@]}" --choices two.bin
write_set wide.bin "$context" 'park . Anna goes to the park .'
refused 'an ending that does not fit' 2 'one of its endings has 8 tokens' "${TINY[@]}" -t 10 --choices wide.bin
finish
