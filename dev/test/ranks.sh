#!/bin/bash
# How several ranks start, what they refuse, and how all end if one is killed, stopped or cut off. That they train to the
# same result is in equal.txt.
#
#     bash dev/test/ranks.sh PROGRAM [SEED]   from the repository's root; needs mpirun
#
# SEED chooses who is killed when; it is printed. Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
seed=${2:-$(date +%s)}
RANDOM=$seed
case ${PROGRAM##*/} in
    train_bert*) model="-e L=3,C=16,NH=2,T=16 -t 16" ;;
    *) model="-e L=3,C=16,NH=2,T=16" ;;
esac
prepare_ranks || { skip ranks "$why"; finish; exit; }
common="$model -d 128 -x 20 --dropout 0.1 -l 1e-3 -u 3 -q 0.1 -c 0.1 -v 10 -m 4 -s 0 -n 0 --bucket 0"

# Like run(), with RANKS ranks.
launch() { # RANKS FLAG...
    local ranks=$1
    shift
    timeout --foreground 180 mpirun --oversubscribe --bind-to none -np "$ranks" "$PROGRAM" "$@" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
}
# ---------------------------------------------------------------------------------------------------------
# The start

run $common -b 2 -o one
verdict 'one rank' "$(ended_with 0)"

# Open MPI binds each rank to one core by default; its host work gets the rank's share of the CPUs all the same.
threads() { # LAUNCHER...: what the run says
    timeout --foreground 180 env -u OMP_NUM_THREADS "$@" "$PROGRAM" $common -b 2 -x 1 -o '' </dev/null 2>"$work/stderr" |
        grep -o '[0-9]* CPU threads'
}
if [ "$(env -u OMP_NUM_THREADS nproc)" -gt 1 ]; then
    all=$(threads) shared=$(threads mpirun -np 1) bound=$(threads mpirun --bind-to core -np 1)
    verdict 'mpirun without a binding: as many threads as without mpirun' "$([ "$shared" = "$all" ] || echo "$shared, not $all")"
    limited=$(threads taskset -c "$(taskset -cp $$ | sed 's/.*[ ,-]//')" mpirun -np 1)
    verdict 'taskset mpirun: one thread' "$([ "$limited" = '1 CPU threads' ] || echo "$limited")"
    verdict 'mpirun --bind-to core: one thread' "$([ "$bound" = '1 CPU threads' ] || echo "$bound")"
else skip 'threads of a rank' 'one CPU'; fi

# Without -d a resumed run keeps its step's size.
launch 4 $model -b 2 -x 4 -v 0 -s 0 -n 0 -o kept --stop-after 2
launch 2 -y 1 -o kept
why=$(ended_with 0)
grep -q '"step": 4' kept/log.jsonl || why=${why:-'the run did not end'}
verdict 'a step keeps its size if the number of ranks changes' "$why"
launch 2 -y 1 --override 1 -x 6 -o kept
why=$(ended_with 0)
grep -q '"step_sequences": 8' kept/ckpt/00000006/trainer.json || why=${why:-"$(grep -o '"step_sequences": [0-9]*' kept/ckpt/00000006/trainer.json)"}
verdict '--override 1 of other flags keeps it too' "$why"
run -y 1 --override 1 -d 0 -x 7 -o kept
why=$(ended_with 0)
grep -q '"step_sequences": 2' kept/ckpt/00000007/trainer.json || why=${why:-"$(grep -o '"step_sequences": [0-9]*' kept/ckpt/00000007/trainer.json)"}
verdict '--override 1 -d 0 makes a step one micro-batch' "$why"
launch 3 $model -b 2 -x 4 -v 0 -s 0 -n 0 -o kept3 --stop-after 2
launch 2 -y 1 -o kept3
grep -q 'sequences in a step' "$work/stderr" && why= || why="stderr: $(head -n 3 "$work/stderr" | tr '\n' ' ')"
verdict 'a step that cannot be split between the ranks is refused' "$why"
run -y 1 --evaluate 1 -m 3 -o kept3
why=$(ended_with 0) loss=$(grep '^val loss' "$work/stdout")
PROGRAM=$(use_program) launch 2 -y 1 --evaluate 1 -m 3 -o kept3
why=${why:-$(ended_with 0)}
why=${why:-$(awk -v alone="${loss#val loss }" -v two="$(sed -n 's/^val loss //p' "$work/stdout")" 'BEGIN {d = alone - two; if (two == "" || d > 1e-5 || d < -1e-5) print alone " alone, " two " of two"}')}
verdict 'but any number of ranks can evaluate the model' "$why"
PROGRAM=$(use_program) launch 2 $model -x 0 --evaluate 1
why=$(ended_with 0)$(grep 'memory plan' "$work/stdout" | grep -E 'gradients|optimizer [^0]|optimizer 0[.][^0]')
verdict 'without training, no memory for gradients or optimizer state' "$why"

# ---------------------------------------------------------------------------------------------------------
# Ends

# Start 4 ranks in the background; OUT.child.RANK holds their processes, $long is mpirun's.
begin() { # OUT FLAG...
    local out=$1
    shift
    rm -f "$out".child.*
    mpirun --oversubscribe --bind-to none -np 4 bash -c 'echo $$ >"$0.child.$OMPI_COMM_WORLD_RANK"; exec "$@"' \
        "$work/$out" "$PROGRAM" $model -b 2 -v 0 -s 0 -o "$out" "$@" </dev/null >"$work/stdout" 2>"$work/stderr" &
    long=$!
}
# Whether a process runs; one that has ended may wait for init to notice.
is_alive() { grep -q '^State:.[^ZX]' "/proc/$1/status" 2>/dev/null; }
# Wait for $long to end. mpirun itself can hang for ever if a rank dies while it connects to mpirun (Open MPI 4.1): if all ranks
# of OUT have ended, mpirun is killed, and that is not a failure.
await_end() { # OUT
    local i child alive=0
    for ((i = 0; i < 600; i++)); do
        kill -0 $long 2>/dev/null || break
        sleep 0.1
    done
    if kill -0 $long 2>/dev/null; then
        for child in $(cat "$1".child.*); do is_alive "$child" && alive=$((alive + 1)); done
        echo "after 60 s mpirun runs, and $alive ranks"
        kill -KILL $long
        [ $alive -gt 0 ] || start=$SECONDS  # nobody waited for a rank
    fi
    wait $long
    status=$?
}
# begin() an endless run, and wait for a checkpoint.
begin_long() { # OUT FLAG...
    local out=$1 i
    begin "$@" -x 100000 -n 5
    for ((i = 0; i < 300; i++)); do
        [ -d "$out/ckpt" ] && [ "$(ls "$out/ckpt" | grep -vc tmp)" -gt 0 ] && return
        sleep 0.1
    done
}
# Rank VICTIM gets SIGNAL in a step: all end within SECONDS, as PATTERN says, and the run resumes from a whole checkpoint.
# No save is due meanwhile, because ranks wait longer for a save than for a step.
loses() { # SIGNAL VICTIM SECONDS PATTERN
    local out=$1$2 why= child i
    launch 4 $model -b 2 -v 0 -s 0 -n 0 -z 1 -x 100000 --stop-after 5 -o "$out"
    begin "$out" -n 0 -z 1 -x 100000 -y 1 --timeout 5
    for ((i = 0; i < 300; i++)); do grep -q '"step": 10,' "$out/log.jsonl" && break || sleep 0.1; done
    start=$SECONDS
    kill "-$1" "$(cat "$out.child.$2")"
    await_end "$out"
    echo "rank $2, SIG$1: $((SECONDS - start)) s"
    [ $((SECONDS - start)) -le "$3" ] || why="it took $((SECONDS - start)) s"
    for child in $(cat "$out".child.*); do
        for ((i = 0; i < 50; i++)); do is_alive "$child" && sleep 0.1 || break; done  # the machine may be busy
        ! is_alive "$child" || why=${why:-"process $child still runs"}
    done
    grep -Eq "$4" "$work/stderr" || why=${why:-"stderr does not say so: $(tail -n 4 "$work/stderr" | tr '\n' ' ')"}
    [ $status -ne 0 ] || why=${why:-'mpirun ended with 0'}
    [ "$1" != STOP ] || [ $status -eq 4 ] || why=${why:-"exit status $status"}
    verdict "SIG$1 to rank $2: all end" "$why"
    launch 2 -y 1 -o "$out" --stop-after 8
    why=$(ended_with 0)
    ! grep -q 'damaged\|not used' "$work/stdout" "$work/stderr" || why=${why:-"$(grep -h 'damaged\|not used' "$work/stdout" "$work/stderr" | head -n 1)"}
    verdict 'after that: resumed' "$why"
}
loses KILL 0 15 "rank 0 with PID .* exited on signal 9"
loses KILL 2 15 "rank 2 with PID .* exited on signal 9"
loses STOP 2 15 "^error: rank [0-3] of 4: has waited in step [0-9]+ for 5 s; another rank is stopped"
# Five kills at random moments: the run ends with the bits of an undisturbed one, and every checkpoint it resumes from is
# complete. It is endless, so that each kill finds it at work even on a fast machine; the undisturbed run makes as many
# steps.
echo "seed $seed"
endless="-x 1000000 -n 20 -z 1 --dropout 0.1"
why=
for ((kill = 0; kill < 5; kill++)); do
    begin disturbed $endless -y 1
    for ((i = 0; i < 100; i++)); do
        [ "$(ls disturbed.child.* 2>/dev/null | wc -l)" -eq 4 ] && break
        sleep 0.05
    done
    sleep "$((RANDOM % 2)).$((RANDOM % 10))"
    start=$SECONDS
    kill -KILL "$(cat disturbed.child.$((RANDOM % 4)))" || why=${why:-"kill $kill: the rank had ended: $(tail -n 2 "$work/stderr" | tr '\n' ' ')"}
    await_end disturbed
    [ $((SECONDS - start)) -lt 60 ] || why=${why:-"kill $kill: it took $((SECONDS - start)) s"}
    ! grep -q 'damaged\|not used' "$work/stdout" "$work/stderr" || why=${why:-"kill $kill: $(grep -h 'damaged\|not used' "$work/stdout" "$work/stderr" | head -n 1)"}
done
newest=$(ls disturbed/ckpt | grep -v tmp | tail -n 1)
steps=$((10#${newest:-0} + 30))
echo "$steps steps"
launch 4 $model -b 2 -v 0 -s 0 $endless -y 1 -o disturbed --stop-after $steps  # with all flags: a slow machine may have saved nothing
why=${why:-$(ended_with 0)}
launch 4 $model -b 2 -v 0 -s 0 $endless -o undisturbed --stop-after $steps
why=${why:-$(ended_with 0)}
newest=$(printf %08d $steps)
for file in undisturbed/ckpt/$newest/*.safetensors; do
    cmp -s "$file" "disturbed/ckpt/$newest/${file##*/}" || why=${why:-"${file##*/} differs"}
done
verdict 'five SIGKILLs at any moment: the same bits in the end' "$why"
begin_long signal
kill -TERM "$(cat signal.child.3)"
await_end signal
why=$(ended_with 0)
grep -q 'stopped by signal' "$work/stdout" || why=${why:-'the signal is not reported'}
newest=$(ls signal/ckpt | grep -v tmp | tail -n 1)
grep -q "\"step\": $((10#$newest))," signal/log.jsonl && [ "$(tail -n 1 signal/log.jsonl | grep -c "\"step\": $((10#$newest))")" -eq 1 ] || why=${why:-"the newest checkpoint, $newest, is not the last step's"}
verdict 'SIGTERM to one rank: all end with 0, saved' "$why"

launch 2 $model -x 0
verdict '-x 0: all end with 0' "$(ended_with 0)"
launch 2 $model -b 2 -x 20 -l 1e30 --clip 0 -v 0 -s 0 -o ''
why=$(ended_with 3)
[ "$(grep -c '^error: step' "$work/stderr")" -eq 1 ] || why=${why:-"not one line of it: $(grep -m 3 '^error' "$work/stderr" | tr '\n' ' ')"}
verdict 'numbers that are not finite: all end with 3, one line' "$why"
case ${PROGRAM##*/} in train_gpt2*)
    launch 2 $model -b 2 -x 3 -v 0 -s 2 -g 100000 --timeout 1 -o ''
    verdict 'a sample longer than the timeout: nobody hangs' "$(ended_with 0)" ;;
esac

# Two machines, which are network namespaces on a bridge, with one rank each; then the second one is disconnected.
machines="llmc$$"
forget_machines() {
    ip netns del "${machines}0" 2>/dev/null
    ip netns del "${machines}1" 2>/dev/null
    for name in "br$$" "v0$$" "v1$$"; do ip link del "$name" 2>/dev/null; done
}
make_machines() {
    ip link add "br$$" type bridge && ip addr add 10.93.57.254/24 dev "br$$" && ip link set "br$$" up || return 1
    local i
    for i in 0 1; do
        ip netns add "$machines$i" && ip link add "v$i$$" type veth peer name eth0 netns "$machines$i" &&
            ip link set "v$i$$" master "br$$" up && ip -n "$machines$i" addr add 10.93.57.1$i/24 dev eth0 &&
            ip -n "$machines$i" link set eth0 up && ip -n "$machines$i" link set lo up || return 1
    done
}
if ! command -v ip >/dev/null || ! make_machines 2>/dev/null; then
    forget_machines
    skip 'two machines, a cable cut' 'network namespaces cannot be made here'
else
    # Without a save, for which ranks wait longer than for a step.
    flags="$model -b 2 -x 10000000 -v 0 -s 0 -n 0 -z 1 --timeout 5 -o machines"
    PMIX_MCA_ptl_base_if_include=10.93.57.0/24 timeout --foreground 90 mpirun --oversubscribe --bind-to none \
        --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include 10.93.57.0/24 --mca oob_tcp_if_include 10.93.57.0/24 \
        -np 1 ip netns exec "${machines}0" "$PROGRAM" $flags : -np 1 ip netns exec "${machines}1" "$PROGRAM" $flags \
        </dev/null >"$work/stdout" 2>"$work/stderr" &
    long=$!
    for ((i = 0; i < 300; i++)); do
        grep -qs '"step": 10,' machines/log.jsonl && break
        sleep 0.1
    done
    why=
    [ "$i" -lt 300 ] || why="they do not train: $(tail -n 3 "$work/stderr" | tr '\n' ' ')"
    start=$SECONDS
    ip link set "v1$$" down
    wait $long
    status=$?
    forget_machines
    [ $((SECONDS - start)) -le 20 ] || why=${why:-"it took $((SECONDS - start)) s"}
    for i in 0 1; do
        grep -q "^error: rank $i of 2: has waited in step [0-9]* for 5 s" "$work/stderr" || why=${why:-"no line of rank $i: $(tail -n 4 "$work/stderr" | tr '\n' ' ')"}
    done
    [ $status -eq 4 ] || why=${why:-"exit status $status"}
    verdict 'two machines, a cable cut: both end, status 4' "$why"
fi

# ---------------------------------------------------------------------------------------------------------
# Ranks that disagree

# Refused if rank 1 is started with other flags, or in another directory: disagree NAME PATTERN "FLAG... OF RANK 0" "FLAG... OF RANK 1" [DIRECTORY OF RANK 1]
disagree() {
    local why=
    timeout --foreground 60 mpirun --oversubscribe --bind-to none -np 1 "$PROGRAM" $3 : -np 1 -wdir "${5:-$work}" "$PROGRAM" $4 </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
    grep -q "ranks 0 and 1 disagree about $2" "$work/stderr" && [ $status -eq 2 ] || why="status $status, stderr: $(head -n 3 "$work/stderr" | tr '\n' ' ')"
    verdict "ranks that disagree are refused: $1" "$why"
}
here="$common -b 2 -o one"
disagree 'settings' "the settings.*--lr 0.001' / '--lr 0.002'" "$common -b 2 -o new" "${common/-l 1e-3/-l 2e-3} -b 2 -o new"
disagree '-y' 'the settings.*--resume' "-y 1 -o one" "$here"
disagree '--overwrite' 'the settings.*--overwrite' "$here" "$here --overwrite 1"
PROGRAM=$(use_program) disagree '-m' 'the settings.*--val-batches' "$model --evaluate 1" "$model --evaluate 1 -m 3"
disagree '--stop-after' 'the settings.*--stop-after' "$common -b 2 -o new" "$common -b 2 -o new --stop-after 3"
mkdir elsewhere elsewhere/data && cp -r data/builtin elsewhere/data
run $common -b 2 -o elsewhere/one --seed 7
for zero in 0 1; do
    begins="${common#"$model"} -z $zero -b 2 -e one -o $work/new"
    disagree "weights, -z $zero" 'the initial weights' "$begins" "$begins" "$work/elsewhere"
done
finish
