#!/bin/bash
# How many threads a trainer uses, and whether they spin: by the affinity mask and by what the user sets. Without the
# variables that run.sh and shell.sh export. test_base has the quotas of control groups.
#
#     bash dev/test/threads.sh ./train_gpt2          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
unset OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT

# The case NAME: VARIABLE is VALUE in a run that COMMAND starts, once it has made a step. $threads: how many it has
# then; besides those that compute there are others, which wait for data and for the disk.
expect_setting() { # NAME VARIABLE VALUE COMMAND...
    local pid found
    : >"$work/stdout"  # a line of the run before is not this one's
    "${@:4}" "$PROGRAM" -e L=1,C=16,NH=1,T=16 -b 64 -x 1000000 -v 0 -s 0 -n 0 -o '' >"$work/stdout" 2>"$work/stderr" &
    pid=$!
    until grep -q '^step' "$work/stdout" || ! kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    found=$(tr '\0' '\n' <"/proc/$pid/environ" | sed -n "s/^$2=//p")
    threads=$(ls "/proc/$pid/task" | wc -l)
    kill -9 "$pid"
    wait "$pid" 2>/dev/null
    verdict "$1" "$([ "$found" = "$3" ] || echo "$2 is '$found', not '$3'; $(tail -n 1 "$work/stderr")")"
}

expect_setting 'threads that wait spin for a bounded time' GOMP_SPINCOUNT 1000 env
expect_setting 'a policy of the user stays' GOMP_SPINCOUNT '' env OMP_WAIT_POLICY=active
expect_setting 'a count of the user stays' GOMP_SPINCOUNT 7 env GOMP_SPINCOUNT=7
# libgomp follows the mask; one CPU is one thread fewer than two.
cpus=$(taskset -cp $$ | sed 's/.*: //; s/[,-].*//')
expect_setting 'two threads on one CPU' OMP_NUM_THREADS 2 taskset -c "$cpus" env OMP_NUM_THREADS=2
two=$threads
expect_setting 'the mask is left to libgomp' OMP_NUM_THREADS '' taskset -c "$cpus"
verdict 'one thread on one CPU' "$([ "$two" = $((threads + 1)) ] || echo "$threads threads, and $two of two")"
finish
