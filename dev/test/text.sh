#!/bin/bash
# The text that tests train on never changes: the same checksums, however the generator is compiled.
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
finish
