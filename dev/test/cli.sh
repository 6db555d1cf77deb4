#!/bin/bash
# --help, the number of threads, and how programs end where the disk or the memory is full. What they print and write is
# in refuse.txt.
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
why=$(ended_with 0)$(cat "$work/stderr")
awk 'length > 100 { exit 1 }' "$work/stdout" || why=${why:-'lines of more than 100 columns'}
grep -qx 'Optimization' "$work/stdout" || why=${why:-'not by topic'}
for key in $(head -n 1 "$o/log.jsonl" | grep -o '"[a-z0-9-]*": ' | tr -d '": '); do
    grep -q -- " --$key " "$work/stdout" || why="the log has the setting --$key, and --help has not"
done
verdict '--help' "$why"

# Threads by the affinity mask and by what the user sets; those that wait spin for a bounded time.
threads() { # WANTED COMMAND...
    local said
    said=$(env -u OMP_NUM_THREADS -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT OMP_DISPLAY_ENV=verbose "${@:2}" "$PROGRAM" \
        "${TINY[@]}" -x 1 -o '' </dev/null 2>&1 |
        sed -nE "s/.*GOMP_SPINCOUNT = '([0-9]+)'.*/spins \1/p; s/.* ([0-9]+) CPU threads.*/threads \1/p" | tail -n 2)
    verdict "${*:2}: $1" "$([ "$(xargs <<<"$said")" = "$1" ] || echo "it says $said")"
}
threads 'spins 1000 threads 1' taskset -c "$(taskset -cp $$ | sed 's/.*: //; s/[,-].*//')"
threads 'spins 7 threads 2' env GOMP_SPINCOUNT=7 OMP_NUM_THREADS=2
threads 'spins 30000000000 threads 2' env OMP_WAIT_POLICY=active OMP_NUM_THREADS=2

# Where standard output is closed, no file gets its number. The lock would be the first.
mkdir "$work/closed" && : >"$work/closed/.lock"
"$PROGRAM" "${TINY[@]}" -x 2 -o "$work/closed" </dev/null >&- 2>"$work/stderr"
status=$?
why=$(ended_with 0)
[ ! -s "$work/closed/.lock" ] || why=${why:-"in .lock: $(head -n 1 "$work/closed/.lock")"}
verdict 'a closed standard output' "$why"

# Standard output on a full disk. A run trains and saves all the same.
on_full_disk() { # STATUS PATTERN FLAG...
    set_command "${@:3}"
    timeout --foreground $run_limit "${command[@]}" </dev/null >/dev/full 2>"$work/stderr"
    status=$?
    sed -i '/ tokens\/s$/d; /^warning: .*the checkpoint could not be saved/d' "$work/stderr"  # the first of --generate
    verdict "standard output on a full disk: ${*:3}" "$(ended_with_error "$1" "$2")"
}
unwritten='standard output could not be written'
printf 'abc\n' >"$work/lines"
case $PROGRAM in
    *bert*) on_full_disk 1 "$unwritten" -e "$o" --embed "$work/lines" ;;
    *) on_full_disk 1 "$unwritten" -e "$o" -o '' --generate 5 ;;
esac
on_full_disk 1 "$unwritten" "${TINY[@]}" -x 2 -o "$work/quiet"
[ -s "$work/quiet/ckpt/00000002/model.safetensors" ] || fail 'training on a full disk' 'nothing was saved'
on_full_disk 3 'step [23]: loss' "${TINY[@]}" -l 1e38 -x 4 -o ''
trap '' XFSZ
ulimit -S -f 8  # KiB, too few for a checkpoint
on_full_disk 1 'the state after step 2 could not be saved' "${TINY[@]}" -x 2 -o "$work/unsaved"
ulimit -S -f hard

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
[ "$before" = "$(listing "$box")" ] || fail 'too little memory' 'files were created or changed'
within 320000 "$(use_program)" -e $large --evaluate 1 -m 1
verdict '... and enough for --evaluate 1' "$(ended_with 0)"
finish
