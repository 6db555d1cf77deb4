#!/bin/bash
# What tests train on and the built-in corpus never change: the same bytes, however their generators are compiled.
#
#     bash dev/test/text.sh build/test_text          from the repository's root
#
# Other bytes mean other losses in every test, so where this fails, repair the generator and leave the checksums alone.
# Only a new version of a file format changes those of its files. The built-in corpus of these checksums is what its
# generator says: its losses are those of the choices it makes, any tokenizer encodes a word as its token, and no
# question of the exam is answered in the training set.
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

sum() { (cd "$1" && find . -type f -exec cksum {} + | sort -k 3 | cksum); }
same() { verdict "$1" "$([ "$2" = "$3" ] || echo "cksum '$2', not '$3'")"; }
text='3170146585 3709' builtin='2023498141 330' corpus='1715739093 531'
same 'what suites train on' "$(sum data/builtin)" "$builtin"
generators() { # NAME PROGRAM_OF_TEXT PROGRAM_OF_CORPUS
    "$2" "$work/made" >/dev/null && "$3" "$work/stories" 2 8200 >/dev/null
    same "$1: the text" "$(sum "$work/made/text")" "$text"
    same "$1: shards and vocabularies" "$(sum "$work/made/builtin")" "$builtin"
    same "$1: the built-in corpus" "$(sum "$work/stories")" "$corpus"
    rm -r "$work/made" "$work/stories"
}
generators 'as built' "$PROGRAM" "$root/build/builtin_corpus"
for flags in -O1 '-O3 -march=native'; do
    for source in test/text data/builtin_corpus; do
        # shellcheck disable=SC2086
        ${CC:-gcc} -std=c11 -D_GNU_SOURCE $flags -I"$root" "$root/dev/$source.c" -o "$work/${source#*/}" -lm
    done
    generators "$flags" "$work/text" "$work/builtin_corpus"
done
finish
