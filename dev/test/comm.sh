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
    timeout --foreground 60 mpirun --oversubscribe --bind-to none -np "$1" "$PROGRAM" "${@:2}" </dev/null \
        >"$work/stdout" 2>"$work/stderr"
    status=$?
}
# The case NAME: the last start ended with STATUS and said PATTERN.
says() { # NAME STATUS PATTERN
    local why
    why=$(ended_with "$2")
    [ -n "$why" ] || grep -Eq "$3" "$work/stdout" "$work/stderr" || why="not said: $3; $(cat "$work"/std*)"
    verdict "$1" "$why"
}

run collectives
says 'one process' 0 '^1 ranks: [1-9][0-9]* passed, 0 failed'
mpi='start them with mpirun -np 4, or srun --mpi=pmix -K -n 4$'
WORLD_SIZE=4 run collectives
says 'torchrun is refused' 2 "^error: torchrun started 4 ranks without MPI; $mpi"
SLURM_STEP_NUM_TASKS=4 run collectives
says 'srun without MPI is refused' 2 "^error: srun started 4 ranks without MPI; $mpi"
prepare_ranks || { skip mpirun "$why"; finish; exit; }
OMPI_COMM_WORLD_SIZE=4 run collectives
says 'mpirun of another MPI is refused' 2 '^error: mpirun started 4 ranks, but MPI sees 1: '
for n in 2 4; do
    start $n collectives
    says "$n ranks" 0 "^$n ranks: [1-9][0-9]* passed, 0 failed"
done
# Nobody has an unfinished checkpoint.
mkdir out
start 3 save out none 0
says 'a rank without the shared directory' 0 '^warning: .*/00000001: .*rank 2: find rank 0.s directory: -o must be'
start 3 save out out 1
says 'a rank with other weights' 1 '^error: step 1: rank 2 holds other weights than rank 0'
verdict 'no checkpoint is left' "$(find out -name '0*')"
finish
