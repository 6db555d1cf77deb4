#!/usr/bin/env bash
# What ranks exchange, and starts that are refused:
#
#     bash dev/test/comm.sh TEST_COMM          from the repository's root
#
# TEST_COMM is dev/test/comm.c. Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
PROGRAM=${1:-}
set -u
. "$(dirname "$0")/shell.sh"
# This script may itself run under a launcher.
for name in $(compgen -e | grep -E '^(OMPI_COMM|PMI|SLURM|WORLD_SIZE$)'); do unset "$name"; done

start() { # RANKS FLAG...
    timeout --foreground 60 mpirun --oversubscribe --bind-to none -np "$1" "$PROGRAM" "${@:2}" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
}
says() { # STATUS PATTERN: why the last start did not end so, or nothing
    local why
    why=$(ended_with "$1")
    [ -n "$why" ] || grep -Eq "$2" "$work/stdout" "$work/stderr" || why="not said: $2; $(cat "$work/stdout" "$work/stderr")"
    echo "$why"
}

run collectives
verdict 'one process' "$(says 0 '^1 ranks: 10 passed, 0 failed')"
refused_start() { # VARIABLE PATTERN
    (export "$1" && run who && says 2 "$2") >why
    verdict "$1 without its ranks is refused" "$(cat why)"
}
for variable in WORLD_SIZE=4 SLURM_STEP_NUM_TASKS=4; do
    refused_start $variable \
        '^error: (srun|torchrun) started 4 ranks without MPI; start them with mpirun -np 4, or srun --mpi=pmix -K -n 4$'
done
if ! prepare_ranks; then
    skip mpirun "$why"
    finish
    exit
fi
refused_start OMPI_COMM_WORLD_SIZE=4 '^error: mpirun started 4 ranks, but MPI sees 1: '
for n in 1 2 4; do
    start $n collectives
    verdict "$n ranks" "$(says 0 "^$n ranks: $((n == 1 ? 10 : 13 * n)) passed, 0 failed")"
done
start 2 who
verdict 'local ranks' "$([ "$(sort "$work/stdout" | tr '\n' ';')" = 'rank 0 of 2, local 0 of 2;rank 1 of 2, local 1 of 2;' ] || cat "$work/stdout")"
# Nobody has an unfinished checkpoint.
saves() { # NAME STATUS PATTERN OUT LAST_OUT LAST_WEIGHT
    mkdir -p out
    start 3 save "${@:4}"
    verdict "$1" "$(says "$2" "$3")$(find out -name '0*')"
}
saves 'a rank without the shared directory' 0 '^warning: .*/00000001: .*rank 2: find rank 0.s directory: -o must be' out none 0
saves 'a rank with other weights' 1 '^error: step 1: rank 2 holds other weights than rank 0' out out 1
start 3 disagree 1 '--lr 0.001' '--lr 0.0003'
verdict 'ranks that disagree' "$(says 2 "^error: ranks 0 and 1 disagree about settings: '--lr 0.0003' / '--lr 0.001'$")"
long=$(printf %0500d 0)
start 3 disagree 2 "$long -b 4" "$long -b 5"
verdict 'ranks that disagree about a long line' "$(says 2 "^error: ranks 0 and 2 disagree about settings: '5' / '4'$")"
finish
