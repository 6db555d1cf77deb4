#!/bin/bash
# --help, and how programs end where the disk or the memory is full. What they print and write is in refuse.txt.
#
#     bash dev/test/cli.sh PROGRAM          a trainer, from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

o=$box/out
TINY=(-e L=1,C=16,NH=2,T=16 -v 0 -s 0 -n 0)
accepted 'a model' "${TINY[@]}" -x 2 -o "$o"

run --help
why=$(ended_with 0)
[ -n "$why" ] || [ ! -s "$work/stderr" ] || why='stderr is not empty'
awk 'length > 100 { exit 1 }' "$work/stdout" || why=${why:-'lines of more than 100 columns'}
grep -qx 'Optimization' "$work/stdout" || why=${why:-'not by topic'}
for key in $(head -n 1 "$o/log.jsonl" | grep -o '"[a-z0-9-]*": ' | tr -d '": '); do
    grep -q -- " --$key " "$work/stdout" || why="the log has the setting --$key, and --help has not"
done
verdict '--help' "$why"

# ---------------------------------------------------------------------------------------------------------
# Standard output and files on a full disk. A run trains and saves all the same.

case $PROGRAM in
    *bert*)
        printf 'abc\n' >"$work/lines"
        cases=('--fill [MASK]' "--embed $work/lines")
        yes text | head -n 2000 >"$work/many"
        (trap '' XFSZ; ulimit -f 1; "$(use_program)" -e "$o" --embed "$work/many" \
            --vectors "$box/v.npy" </dev/null >/dev/null 2>"$work/stderr")
        status=$?
        verdict '--embed on a full disk' "$(ended_with_error 1 'v.npy: cannot be written: File too large')$(ls "$box" | grep '^v')"
        ;;
    *) cases=(--help '--evaluate 1 -m 1' '--generate 5' '--explain a' '-x 0') ;;
esac
for what in "${cases[@]}"; do
    # shellcheck disable=SC2086
    on_full_disk "$what" -e "$o" -o "$work/explained" $what
done
on_full_disk 'training' "${TINY[@]}" -x 2 -o "$work/quiet"
[ -s "$work/quiet/ckpt/00000002/model.safetensors" ] || fail 'standard output on a full disk: training' 'nothing was saved'
on_full_disk 'a loss that is not finite' -3 'step [23]: loss' "${TINY[@]}" -l 1e38 -x 4 -o ''

# ---------------------------------------------------------------------------------------------------------
# Memory

if is_sanitized; then
    skip 'too little memory' 'AddressSanitizer reserves more than any limit allows'
    finish
    exit
fi
before=$(listing "$box")
within() { # KIB PROGRAM FLAG...
    (ulimit -v "$1"; "${@:2}" --threads 1 </dev/null >"$work/stdout" 2>"$work/stderr")
    status=$?
}
# Weights of 100 MiB, and 300 MiB of gradients and moments, which only training has.
large=L=8,C=512,NH=8,V=512,T=16
within 320000 "$PROGRAM" -e $large -x 1 -o "$box/new"
verdict 'too little memory to train' "$(ended_with_error 2 'needs [0-9.]+ MiB, but [0-9.]+ MiB are available.*-r 2')"
within 320000 "$(use_program)" -e $large --evaluate 1 -m 1
verdict '... and enough for --evaluate 1' "$(ended_with 0)"
within 58000 "$PROGRAM" -x 1 -v 0 -s 0 -o "$box/new"
if [ $status -eq 0 ] || [ $status -eq 127 ]; then
    skip 'an allocation fails' 'the limit is not between plan and process here'
else verdict 'an allocation fails' "$(ended_with_error 1 'out of memory: ')"; fi
[ "$before" = "$(listing "$box")" ] || fail 'too little memory' 'files were created or changed'
finish
