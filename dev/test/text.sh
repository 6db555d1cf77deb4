#!/bin/bash
# What tests train on and the built-in corpus never change: the same bytes, however the generator is compiled.
#
#     bash dev/test/text.sh dev/test/text.py          from the repository's root
#
# Other bytes mean other losses in every test, so where this fails, repair the generator and leave the checksums alone.
# Only a new version of a file format changes those of its files. The built-in corpus of this checksum is what its
# generator says: its losses are those of the choices it makes, any tokenizer encodes a word as its token, and no
# question of the exam is answered in the training set.
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

same() { # NAME FOLDER SUM
    local sum
    sum=$(cd "$2" && find . -type f -exec cksum {} + | sort -k 3 | cksum)
    verdict "$1" "$([ "$sum" = "$3" ] || echo "cksum '$sum', not '$3'")"
}
same 'what suites train on' data/builtin '2023498141 330'
"$PROGRAM" "$work/made"
same 'the text' "$work/made/text" '3170146585 3709'
same 'shards and vocabularies' "$work/made/builtin" '2023498141 330'
for flags in -O1 '-O3 -march=native'; do
    # shellcheck disable=SC2086
    ${CC:-gcc} -std=c11 -D_GNU_SOURCE $flags -I"$root" "$root/dev/data/builtin_corpus.c" -o "$work/corpus" -lm &&
        "$work/corpus" "$work/stories" 2 8200 >/dev/null
    same "the built-in corpus by $flags" "$work/stories" '1715739093 531'
    rm -rf "$work/stories"
done
finish
