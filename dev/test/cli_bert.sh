#!/bin/bash
# Vectors of texts, and output of train_bert and use_bert that rows of refuse.txt do not describe:
#
#     bash dev/test/cli_bert.sh PROGRAM          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

o=$box/out
SIZES=(-e L=1,C=16,NH=2,T=16)
TINY=("${SIZES[@]}" -v 0 -s 0 -n 0)

accepted 'a model' "${SIZES[@]}" -x 5 -v 2 -m 2 -s 5 -n 2 -o "$o"
# -m 0 takes all held-out sequences, whatever -b is.
of_all() { run -e "$o" --evaluate 1 -m 0 -b "$1" -o ''; sed -nE 's/^val loss ([0-9.]+).*/\1/p' "$work/stdout"; }
eight=$(of_all 8) more=$(of_all 999)
why=$(awk -v a="$eight" -v b="$more" 'BEGIN {if (a == "" || b == "" || (a - b) ^ 2 > 4e-10) print a " by 8, " b " by 999"}')
verdict '-m 0 takes all, with any -b' "$why"
on_full_disk '--fill' -e "$o" --fill 'a[MASK]c'
# ---------------------------------------------------------------------------------------------------------
# Vectors of texts; dev/test/check_embed.py checks their values

printf 'abc\n\nabcdefghijklmnopqrstuvw' >"$work/lines"
run -e "$o" --embed "$work/lines"
why=$(ended_with 0)
[ "$(cat "$work/stdout")" = "$work/lines.npy: 3 vectors of 16 channels; 1 line was cut to 16 tokens" ] || why=${why:-"$(cat "$work/stdout")"}
[ "$(wc -c <"$work/lines.npy")" = $((128 + 3 * 16 * 4)) ] || why=${why:-'another size'}
verdict '--embed' "$why"
run -y 1 -o "$o" --embed "$work/lines" --vectors "$work/again.npy"
verdict '--embed, -y 1' "$(ended_with 0)$(cmp "$work/lines.npy" "$work/again.npy" 2>&1)"
# 14 letters leave room for [CLS] and [SEP].
printf 'abcdefghijklmnopqrstuvw\nabcdefghijklmn\nabcdefghijklm\n' >"$work/cut"
run -e "$o" --embed "$work/cut" -b 1
vector() { tail -c +$((129 + 64 * $1)) "$work/cut.npy" | head -c 64 | cksum; } # LINE, from 0
why=$(ended_with 0)
[ "$(vector 0)" = "$(vector 1)" ] || why=${why:-'it is not the vector of the line without the rest'}
[ "$(vector 1)" != "$(vector 2)" ] || why=${why:-'all lines have one vector: this test checks nothing'}
verdict '--embed, a line that is cut' "$why"
on_full_disk '--embed' -e "$o" --embed "$work/lines"
printf 'abc\r\nabc\n' >"$work/crlf"
run -e "$o" --embed "$work/crlf"
verdict '--embed, a line that ends with CR' "$(ended_with 0)$(cmp <(tail -c +129 "$work/crlf.npy" | head -c 64) <(tail -c 64 "$work/crlf.npy") 2>&1)"
for lines in 20 2000; do  # a full disk at the end, and while it is written
    yes text | head -n $lines >"$work/many"
    (trap '' XFSZ; ulimit -f 1; "$(use_program)" -e "$o" --embed "$work/many" --vectors "$box/v.npy" </dev/null >/dev/null 2>"$work/stderr")
    status=$?
    why=$(ended_with_error 1 'v.npy: cannot be written: File too large')$(ls "$box" | grep '^v')
    verdict "--embed of $lines lines on a full disk" "$why"
done
cp "$work/lines" "$box/lines.tmp" && ln -s out/vocab.txt "$box/linked"
refused '--vectors through a link' 2 '--vectors .*linked.*(not a file of this flag|is an input)' \
    -e "$o" --embed "$box/lines.tmp" --vectors "$box/linked"
: >"$work/empty.npy"
accepted '--vectors, an empty file' -e "$o" --embed "$work/lines" --vectors "$work/empty.npy"

# ---------------------------------------------------------------------------------------------------------
# A file of one document

words() { local n; for n in "$@"; do little_endian 4 "$n"; done; }
# MAGIC VERSION TOKENS SENTENCES DOCUMENTS, then a vocabulary of 261 with the five ids at its end.
{ words 20261121 1 40 2 1 261 256 257 258 259 260; head -c 1060 /dev/zero; words 0 20 40 0 2; head -c 36 /dev/zero; } >"$box/one.bin"
refused 'one document, --nsp 1' 2 'one.bin: .*one document.*--nsp 0' "${TINY[@]}" -x 2 -o "$box/new" -i "$box/one.bin"
accepted 'one document, --nsp 0' "${TINY[@]}" -b 1 -x 1 -o '' -i "$box/one.bin" --nsp 0

finish
