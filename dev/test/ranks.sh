#!/bin/bash
# How several ranks share the CPUs, and how all end if one is killed or stopped. That they train to the same result is
# in equal.txt, what they refuse in refuse.txt.
#
#     bash dev/test/ranks.sh PROGRAM [SEED]   from the repository's root; needs mpirun
#
# SEED chooses who is killed when; it is printed. Ends with `N passed, N failed, N skipped`; exit status 1 if one
# failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
seed=${2:-$(date +%s)}
RANDOM=$seed
prepare_ranks || { skip ranks "$why"; finish; exit; }
model="-e L=3,C=16,NH=2,T=16 -t 16 -b 2 -v 0 -s 0"

mpi=(mpirun --oversubscribe --bind-to none)
# Like run(), with RANKS ranks.
launch() { # RANKS FLAG...
    timeout --foreground 180 "${mpi[@]}" -np "$1" "$PROGRAM" "${@:2}" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
}
# Start 4 ranks in the background; OUT.child.RANK holds their processes, $long is mpirun's.
begin() { # OUT FLAG...
    rm -f "$1".child.*
    "${mpi[@]}" -np 4 bash -c 'echo $$ >"$0.child.$OMPI_COMM_WORLD_RANK"; exec "$@"' \
        "$work/$1" "$PROGRAM" $model -o "$@" </dev/null >"$work/stdout" 2>"$work/stderr" &
    long=$!
}
# Whether a process runs; one that has ended may wait for init to notice.
is_alive() { grep -q '^State:.[^ZX]' "/proc/$1/status" 2>/dev/null; }
# Wait for $long to end. mpirun itself can hang for ever if a rank dies while it connects to mpirun (Open MPI 4.1): if
# all ranks of OUT have ended, mpirun is killed, and that is not a failure.
await_end() { # OUT
    local i child alive=0
    for ((i = 0; i < 600; i++)); do kill -0 $long 2>/dev/null || break; sleep 0.1; done
    if kill -0 $long 2>/dev/null; then
        for child in $(cat "$1".child.*); do ! is_alive "$child" || alive=$((alive + 1)); done
        echo "after 60 s mpirun runs, and $alive ranks"
        kill -KILL $long
        [ $alive -gt 0 ] || start=$SECONDS  # nobody waited for a rank
    fi
    wait $long
    status=$?
}
wait_for_step() { # STEP OUT
    local i
    for ((i = 0; i < 300; i++)); do ! grep -qs "\"step\": $1," "$2/log.jsonl" || return 0; sleep 0.1; done
    return 1
}
first_lines() { tail -n 4 "$work/stderr" | tr '\n' ' '; }
unused() { grep -h 'damaged\|not used' "$work/stdout" "$work/stderr" | head -n 1; }

# Open MPI binds each rank to one core by default; its host work gets the rank's share of the CPUs all the same.
threads() { # WHO LAUNCHER...: what the run says
    timeout --foreground 180 env -u OMP_NUM_THREADS "${@:2}" "$PROGRAM" $model -x 0 -o '' </dev/null 2>&1 |
        grep -o '[0-9]* CPU threads' >"$work/$1"
}
if [ "$(env -u OMP_NUM_THREADS nproc)" -gt 1 ]; then
    threads all &
    threads shared mpirun -np 1 &
    threads bound mpirun --bind-to core -np 1 &
    threads limited taskset -c "$(taskset -cp $$ | sed 's/.*[ ,-]//')" mpirun -np 1 &
    wait
    verdict 'mpirun without a binding: as many threads as without mpirun' "$(diff all shared)"
    verdict 'taskset, --bind-to core: one thread' "$(grep -v '^1 CPU' bound limited)"
else skip 'threads of a rank' 'one CPU'; fi

# ---------------------------------------------------------------------------------------------------------
# Ends

# Rank VICTIM gets SIGNAL in a step: all end within SECONDS, as PATTERN says, and the run resumes from a whole
# checkpoint. No save is due meanwhile, because ranks wait longer for a save than for a step.
launch 4 $model -n 0 -z 1 -x 100000 --stop-after 5 -o five
loses() { # SIGNAL VICTIM SECONDS PATTERN
    local out=$1$2 why= child i
    cp -r five "$out"
    begin "$out" -n 0 -z 1 -x 100000 -y 1 --timeout 5
    wait_for_step 10 "$out"
    start=$SECONDS
    kill "-$1" "$(cat "$out.child.$2")"
    await_end "$out"
    echo "rank $2, SIG$1: $((SECONDS - start)) s"
    [ $((SECONDS - start)) -le "$3" ] || why="it took $((SECONDS - start)) s"
    for child in $(cat "$out".child.*); do
        for ((i = 0; i < 50; i++)); do is_alive "$child" && sleep 0.1 || break; done  # the machine may be busy
        ! is_alive "$child" || why=${why:-"process $child still runs"}
    done
    grep -Eq "$4" "$work/stderr" || why=${why:-"stderr does not say so: $(first_lines)"}
    [ $status -ne 0 ] || why=${why:-'mpirun ended with 0'}
    [ "$1" != STOP ] || [ $status -eq 4 ] || why=${why:-"exit status $status"}
    verdict "SIG$1 to rank $2: all end" "$why"
    launch 2 -y 1 -o "$out" --stop-after 8
    why=$(ended_with 0)
    verdict 'after that: resumed' "${why:-$(unused)}"
}
loses KILL 0 15 "rank 0 with PID .* exited on signal 9"
loses KILL 2 15 "rank 2 with PID .* exited on signal 9"
loses STOP 2 15 "^error: rank [0-3] of 4: has waited in step [0-9]+ for 5 s; another rank is stopped"

# Kills at random moments: the run ends with the bits of an undisturbed one, and every checkpoint it resumes from is
# complete. It is endless, so that each kill finds it at work even on a fast machine; the undisturbed run makes as many
# steps.
echo "seed $seed"
endless="-x 1000000 -n 20 -z 1 --dropout 0.1"
why=
for kill in 1 2 3; do
    begin disturbed $endless -y 1
    for ((i = 0; i < 100; i++)); do [ "$(ls disturbed.child.* 2>/dev/null | wc -l)" -ne 4 ] || break; sleep 0.05; done
    sleep "$((RANDOM % 2)).$((RANDOM % 10))"
    start=$SECONDS
    kill -KILL "$(cat disturbed.child.$((RANDOM % 4)))" || why=${why:-"kill $kill: the rank had ended: $(first_lines)"}
    await_end disturbed
    [ $((SECONDS - start)) -lt 60 ] || why=${why:-"kill $kill: it took $((SECONDS - start)) s"}
    why=${why:-$(unused)}
done
newest=$(ls disturbed/ckpt | grep -v tmp | tail -n 1)
steps=$((10#${newest:-0} + 30))
echo "$steps steps"
for out in disturbed undisturbed; do  # with all flags: a slow machine may have saved nothing
    [ $out = disturbed ] && resume='-y 1' || resume=
    launch 4 $model $endless $resume -o $out --stop-after $steps
    why=${why:-$(ended_with 0)}
done
newest=$(printf %08d $steps)
for file in undisturbed/ckpt/$newest/*.safetensors; do
    cmp -s "$file" "disturbed/ckpt/$newest/${file##*/}" || why=${why:-"${file##*/} differs"}
done
verdict 'three SIGKILLs at any moment: the same bits in the end' "$why"

begin signal -x 100000 -n 5
wait_for_step 10 signal
kill -TERM "$(cat signal.child.3)"
await_end signal
why=$(ended_with 0)
grep -q 'stopped by signal' "$work/stdout" || why=${why:-'the signal is not reported'}
newest=$(ls signal/ckpt | grep -v tmp | tail -n 1)
tail -n 1 signal/log.jsonl | grep -q "\"step\": $((10#$newest))," || why=${why:-"$newest is not the last step"}
verdict 'SIGTERM to one rank: all end with 0, saved' "$why"

# The weights of rank 1 are another model's.
mkdir elsewhere elsewhere/data && cp -r data/builtin elsewhere/data
for out in one elsewhere/one; do run $model -x 1 -n 0 --seed ${#out} -o $out; done
begins="-b 2 -x 9 -v 0 -s 0 -n 0 -z 1 -e one -o $work/new"
timeout --foreground 60 "${mpi[@]}" -np 1 "$PROGRAM" $begins : -np 1 -wdir elsewhere "$PROGRAM" $begins </dev/null \
    >"$work/stdout" 2>"$work/stderr"
status=$?
why=$(ended_with 2)
grep -q 'ranks 0 and 1 disagree about the initial weights' "$work/stderr" || why=${why:-$(first_lines)}
verdict 'ranks that begin with other weights are refused' "$why"
finish
