#!/bin/bash
# The text that tests train on and the stories of the built-in corpus never change: the same checksums, however their
# generators are compiled.
#
#     bash dev/test/text.sh build/test_text          from the repository's root
#
# Other bytes mean other losses in every test, so where this fails, repair the generator and leave the checksums alone.
# Only a new version of a file format changes those of its files.
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

text='2888961779 1502097'
made_by() { # PROGRAM
    rm -rf "$work/text" && mkdir "$work/text"
    "$1" "$work/text" 2>&1 && cat "$work"/text/* | cksum
}
same_text() { verdict "$1" "$([ "$2" = "$text" ] || echo "cksum '$2', not '$text'")"; }
same_text 'the text' "$(made_by "$PROGRAM")"
for flags in -O1 -O3 '-O1 -march=native' '-O3 -march=native'; do
    # shellcheck disable=SC2086
    ${CC:-gcc} -std=c11 -D_GNU_SOURCE $flags -I"$root" "$root/dev/test/text.c" -o "$work/generator" -lm
    same_text "the text by $flags" "$(made_by "$work/generator")"
done
same_text 'the text that the shards are made of' "$(cat "$root"/build/test_corpus/text/* | cksum)"
(cd data/builtin && find . -type f -exec cksum {} + | sort -k 3) >"$work/cksums"
verdict 'shards and vocabularies' "$(diff "$work/cksums" - <<'SUMS'
1540969543 29 ./bert/tokenizer_config.json
2505722221 2787868 ./bert/train.bin
2203518036 308828 ./bert/val.bin
3453359616 705 ./bert/vocab.txt
1946233733 14 ./merges.txt
1887735389 2793 ./tokenizer.json
1760691328 262 ./tokenizer_config.json
4162673219 2706506 ./train.bin
2253860790 300032 ./val.bin
213068388 2124 ./vocab.json
SUMS
)"

# The first MiB of the stories of two seeds.
stories='5be953d6bad303122640605af9e03af7204f2281439588c4c59cb1ab136e3b74 658778195e7315081ebcdee68a4d1c85ff0383e59d8d3da04a5bd95f5912969a'
stories_by() { # PROGRAM
    local seed sums=
    for seed in 1 2; do
        rm -rf "$work/stories" && "$1" "$work/stories" "$seed" 8200 >"$work/log" 2>&1 || { cat "$work/log"; return; }
        sums+=" $(tail -c +1025 "$work/stories/train.bin" | head -c 1048576 | sha256sum | cut -c 1-64)"
    done
    echo "${sums# }"
}
same_stories() { verdict "$1" "$([ "$2" = "$stories" ] || echo "SHA-256 '$2', not '$stories'")"; }
same_stories 'the stories' "$(stories_by "$root/build/builtin_corpus")"
for flags in -O1 '-O3 -march=native'; do
    # shellcheck disable=SC2086
    ${CC:-gcc} -std=c11 -D_GNU_SOURCE $flags -I"$root" "$root/dev/data/builtin_corpus.c" -o "$work/generator" -lm
    same_stories "the stories by $flags" "$(stories_by "$work/generator")"
done
"$work/generator" "$work/again" 2 8200 >"$work/log" 2>&1
verdict 'all files again' "$(diff -r "$work/stories" "$work/again")"
refused_by_generator() { # NAME PATTERN ARGUMENT...
    local pattern=$2 status
    "$work/generator" "${@:3}" >"$work/log" 2>&1
    status=$?
    verdict "$1" "$([ "$status" = 2 ] && grep -Eq "$pattern" "$work/log" || echo "status $status, $(cat "$work/log")")"
}
refused_by_generator 'a seed that is not a number' 'x7: is not a number' "$work/again" x7
refused_by_generator 'more blocks than fit a file of sentences' '50000001: is not a number from 0 to' "$work/again" 1 50000001
refused_by_generator 'no output directory' 'usage: builtin_corpus OUT_DIR'
finish
