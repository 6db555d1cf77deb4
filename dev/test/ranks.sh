#!/bin/bash
# How several ranks share the CPUs, and how all end if one is killed or stopped. That they train to the same result is
# in equal.txt, what they refuse in refuse.txt.
#
#     bash dev/test/ranks.sh PROGRAM          from the repository's root; needs mpirun
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
prepare_ranks || { skip ranks "$why"; finish; exit; }
model="-e L=3,C=16,NH=2,T=16 -t 16 -b 2 -v 0 -s 0"

# Open MPI binds each rank to one core by default; its host work gets the rank's share of the CPUs all the same.
threads() { # LAUNCHER...: what the run says
    timeout --foreground 180 env -u OMP_NUM_THREADS "$@" "$PROGRAM" $model -x 1 -n 0 -o '' </dev/null 2>&1 |
        grep -o '[0-9]* CPU threads'
}
if [ "$(env -u OMP_NUM_THREADS nproc)" -gt 1 ]; then
    verdict 'mpirun without a binding: as many threads as without mpirun' \
        "$(diff <(threads env) <(threads mpirun -np 1))"
    verdict '--bind-to core: one thread' "$(diff <(echo '1 CPU threads') <(threads mpirun --bind-to core -np 1))"
else skip 'threads of a rank' 'one CPU'; fi

# Start 4 ranks in OUT in the background; OUT.child.RANK holds their processes, $long is mpirun's.
begin() { # OUT FLAG...
    mpirun --oversubscribe --bind-to none -np 4 \
        bash -c 'echo $$ >"$0.child.$OMPI_COMM_WORLD_RANK"; exec "$@"' "$work/$1" "$PROGRAM" $model -x 100000 -z 1 \
        -o "$@" </dev/null >"$work/stdout" 2>"$work/stderr" &
    long=$!
    for ((i = 0; i < 300; i++)); do ! grep -qs '"step": 10,' "$1/log.jsonl" || break; sleep 0.1; done
}
# Whether a process runs; one that has ended may wait for init to notice.
is_alive() { grep -q '^State:.[^ZX]' "/proc/$1/status" 2>/dev/null; }
# Wait for $long to end. mpirun itself can hang for ever if a rank dies while it connects to mpirun (Open MPI 4.1): if
# all ranks of OUT have ended, mpirun is killed, and that is not a failure.
await_end() { # OUT
    local i child
    for ((i = 0; i < 300; i++)); do kill -0 $long 2>/dev/null || break; sleep 0.1; done
    for child in $(cat "$1".child.*); do
        for ((i = 0; i < 50; i++)); do is_alive "$child" && sleep 0.1 || break; done  # the machine may be busy
        ! is_alive "$child" || why=${why:-"process $child still runs"}
    done
    kill -KILL $long 2>/dev/null
    wait $long
    status=$?
}
# Rank VICTIM gets SIGNAL in a step: all end, as PATTERN says, and the run resumes from a whole checkpoint. No save is
# due meanwhile, because ranks wait longer for a save than for a step.
loses() { # SIGNAL VICTIM PATTERN
    local out=$1$2
    why=
    begin "$out" -n 5 --stop-after 5
    await_end "$out"
    begin "$out" -y 1 -n 0 --timeout 5
    kill "-$1" "$(cat "$out.child.$2")"
    await_end "$out"
    grep -Eq "$3" "$work/stderr" || why=${why:-"stderr does not say so: $(tail -n 4 "$work/stderr")"}
    [ $status -ne 0 ] || why=${why:-'mpirun ended with 0'}
    [ "$1" != STOP ] || [ $status -eq 4 ] || why=${why:-"exit status $status"}
    verdict "SIG$1 to rank $2: all end" "$why"
    run -y 1 -o "$out" --stop-after 8
    verdict 'after that: resumed' "$(ended_with 0)$(grep -h 'damaged\|not used' "$work"/std* | head -n 1)"
}
loses KILL 0 "rank 0 with PID .* exited on signal 9"
loses STOP 2 "^error: rank [0-3] of 4: has waited in step [0-9]+ for 5 s; another rank is stopped"

begin signal -n 5
why=
kill -TERM "$(cat signal.child.3)"
await_end signal
why=${why:-$(ended_with 0)}
grep -q 'stopped by signal' "$work/stdout" || why=${why:-'the signal is not reported'}
newest=$(ls signal/ckpt | grep -v tmp | tail -n 1)
tail -n 1 signal/log.jsonl | grep -q "\"step\": $((10#0$newest))," || why=${why:-"$newest is not the last step"}
verdict 'SIGTERM to one rank: all end with 0, saved' "$why"
finish
