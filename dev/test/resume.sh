#!/bin/bash
# What comes over a run from outside: signals, kills, a full disk, a second run, an output that nobody reads. What it
# resumes from is in equal.txt, what it refuses in refuse.txt, a directory that another run took in run.c.
#
#     bash dev/test/resume.sh PROGRAM [SEED]          train_gpt2, from the repository's root
#
# SEED chooses the moments of the kills; it is printed. Ends with `N passed, N failed, N skipped`; exit status 1 if one
# failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
seed=${2:-$(date +%s)}
RANDOM=$seed
TINY=(-e L=1,C=16,NH=2,T=16 -b 2 -v 0)
# All that could depend on a run's position, in a run that is long enough to be hit.
LONG=(-e L=2,C=16,NH=2,T=16 -b 2 -d 128 --dropout 0.1 -l 1e-2 -u 3 -q 0.1 -c 0.1 -s 0 -x 80 -v 0)
out=$work/out long=$work/long

# Start a run in the background, in a new OUT, and wait until its output matches PATTERN. Under nohup SIGHUP is ignored,
# and a shell cannot change that.
starter=(env --default-signal=HUP)
start() { # PATTERN FLAG...
    : >"$work/stdout"
    "${starter[@]}" "$PROGRAM" "${@:2}" -o "$out" </dev/null >"$work/stdout" 2>"$work/stderr" &
    pid=$!
    until grep -q "$1" "$work/stdout" || ! kill -0 $pid 2>/dev/null; do sleep 0.002; done
}
# Wait at most 20 seconds for its end.
join() {
    local i
    {
        for ((i = 0; i < 2000; i++)); do kill -0 $pid || break; sleep 0.01; done
        kill -KILL $pid
        wait $pid
        status=$?
    } 2>/dev/null
}
log_of() { grep '"step"' "$1/log.jsonl" | grep -v checkpoint_ms | sed -E 's/, "(ms|tok_s|mfu)": [^,}]*//g'; }
# Why OUT's last run did not end as the long one did, or nothing.
unlike_long() {
    local file
    for file in ckpt/00000080/{model,optimizer}.safetensors model.safetensors; do
        cmp -s "$out/$file" "$long/$file" || { echo "$file differs"; return; }
    done
    diff <(log_of "$out") <(log_of "$long") | grep -m 1 '^[<>]'
    find "$out" -name '*.tmp' | head -n 1
}
# Resume the run in OUT, to the same end.
resumed() {
    run -y 1 -o "$out"
    why=${why:-$(ended_with 0)}
    why=${why:-$(cat "$work/stderr")}
    why=${why:-$(unlike_long)}
}

t=${EPOCHREALTIME/[.,]/}
run "${LONG[@]}" -n 1 -o "$long"
window=$(((${EPOCHREALTIME/[.,]/} - t) / 4000))
verdict 'a run without an interruption' "$(ended_with 0)"
for signal in TERM INT HUP; do
    rm -rf "$out"
    start '^step *3/' "${LONG[@]}" -n 0
    kill -$signal $pid 2>/dev/null
    join
    why=$(ended_with 0)
    [ ! -d "$out/ckpt/00000080" ] || { skip "SIG$signal" 'the run was over before the signal came'; continue; }
    grep -q "^stopped by signal [0-9]* after step $((10#0$(ls "$out/ckpt"))), saved" "$work/stdout" ||
        why=${why:-"$(tail -n 1 "$work/stdout")"}
    resumed
    verdict "SIG$signal saves and ends, resumed" "$why"
done
rm -rf "$out"
starter=()
trap '' HUP  # as nohup does it
start '^step *3/' "${LONG[@]}" -n 0
trap 'exit 1' HUP
kill -HUP $pid
join
verdict 'SIGHUP that was ignored at the start stays ignored' "$(ended_with 0)$(unlike_long)"

# Kill OUT's run after a random time, again and again; a run that reaches its end is compared and started again.
kills=12 killed=0 why=
is_sanitized && kills=6
rm -rf "$out"
for ((n = 0; n < 10 * kills && killed < kills; n++)); do
    start . "${LONG[@]}" -n 1 -y 1
    delay=$((RANDOM % (window + 20)))
    sleep $((delay / 1000)).$(printf %03d $((delay % 1000)))
    kill -KILL $pid 2>/dev/null
    join
    # LeakSanitizer inspects a process from another one, which may hold the lock a moment longer.
    is_sanitized && [ -e "$out/.lock" ] && flock -w 10 "$out/.lock" true
    why=${why:-$(grep -v 'starting a new run' "$work/stderr" | head -n 1)}
    if [ $status -eq 137 ]; then killed=$((killed + 1))
    else
        why=${why:-$(ended_with 0)$(unlike_long)}
        rm -rf "$out"
    fi
done
run "${LONG[@]}" -n 1 -y 1 -o "$out"
verdict "killed $killed times, seed $seed" "${why:-$(ended_with 0)$(unlike_long)}"

rm -rf "$out"
run "${LONG[@]}" -n 0 --stop-after 70 -o "$out"
(trap '' XFSZ; ulimit -f 60; "$PROGRAM" -y 1 -o "$out" </dev/null >"$work/stdout" 2>"$work/stderr")
status=$?
why=$(ended_with 1)
grep -q '^warning: .*ckpt/00000080: .*could not be saved' "$work/stderr" || why=${why:-'no warning names it'}
[ "$(ls "$out/ckpt")" = 00000070 ] || why=${why:-"checkpoints: $(ls "$out/ckpt" | tr '\n' ' ')"}
resumed
verdict 'after a write failure the checkpoint before it stays' "$why"

rm -rf "$out"
start '^step *3/' "${TINY[@]}" -x 1000000 -s 0 -n 0
kill -STOP $pid
run "${TINY[@]}" -x 2 -s 0 -o "$out" --overwrite 1
verdict 'a second run in the same directory is refused' "$(ended_with_error 2 "$out: another process is training")"
kill -KILL $pid
wait $pid 2>/dev/null

# The checkpoint of a run that is stopped is written in the background.
rm -rf "$out"
starter=(bash -c 'trap "" XFSZ; ulimit -f 60; exec "$@"' -)
start '^step *3/' "${LONG[@]}" -n 100
kill -TERM $pid
join
verdict 'a signal, then a write failure' "$(ended_with 1)$(grep ', saved$' "$work/stdout")"

rm -rf "$out"
"$PROGRAM" "${TINY[@]}" -x 40 -s 0 -n 0 -o "$out" </dev/null 2>"$work/stderr" | true
status=${PIPESTATUS[0]}
why=$(ended_with 0)
[ "$(grep -c '"loss"' "$out/log.jsonl") $(ls "$out/ckpt")" = '40 00000040' ] || why=${why:-'it is not whole'}
verdict 'a closed pipe does not end a training run' "$why"

# The recipes of scripts/recipes, with a tiny model
for file in "$root"/scripts/recipes/*.flags; do
    trainer=$PROGRAM
    [[ $file != *bert* ]] || trainer=${PROGRAM/%gpt2/bert}
    PROGRAM=$trainer run --recipe "$file" -e L=1,C=16,NH=2,T=1024 -b 1 -d 0 -x 0 -o ''
    verdict "the recipe ${file##*/}" "$(ended_with 0)"
done
finish
