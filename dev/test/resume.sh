#!/bin/bash
# What comes over a run from outside: signals, kills, a full disk, a directory that is moved or that another run takes,
# an output that nobody reads. What it resumes from is in equal.txt, what it refuses in refuse.txt.
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
ENDLESS=("${TINY[@]}" -x 1000000)
# All that could depend on a run's position, in a run that is long enough to be hit.
LONG=(-e L=2,C=16,NH=2,T=16 -b 2 -d 128 --dropout 0.1 -l 1e-2 -u 3 -q 0.1 -c 0.1 -s 0 -x 80 -v 0)
out=$work/out long=$work/long

# Start a run in the background, by "${starter[@]}", and wait until its output matches PATTERN.
starter=()
start() { # PATTERN FLAG...
    : >"$work/stdout"
    "${starter[@]}" "$PROGRAM" "${@:2}" </dev/null >"$work/stdout" 2>"$work/stderr" &
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
# Why OUT's last run did not end as REFERENCE did, or nothing.
unlike() { # OUT REFERENCE
    local file last
    last=$(ls "$2/ckpt" | tail -n 1)
    for file in ckpt/$last/{model,optimizer}.safetensors model.safetensors; do
        cmp -s "$1/$file" "$2/$file" || { echo "$file differs"; return; }
    done
    diff <(log_of "$1") <(log_of "$2") | grep -m 1 '^[<>]'
    find "$1" -name '*.tmp' | head -n 1
}
# Resume the run in OUT, to the same end.
resumed() { # REFERENCE
    run -y 1 -o "$out"
    why=${why:-$(ended_with 0)}
    why=${why:-$(cat "$work/stderr")}
    why=${why:-$(unlike "$out" "$1")}
}

# ---------------------------------------------------------------------------------------------------------
# Signals and kills

run "${LONG[@]}" -n 0 -o "$long"
verdict 'a run without an interruption' "$(ended_with 0)"
# Under nohup SIGHUP is ignored, and a shell cannot change that.
starter=(env --default-signal=HUP)
for signal in TERM INT HUP; do
    rm -rf "$out"
    start '^step *3/' "${LONG[@]}" -n 0 -o "$out"
    kill -$signal $pid 2>/dev/null
    join
    why=$(ended_with 0)
    [ ! -d "$out/ckpt/00000080" ] || { skip "SIG$signal" 'the run was over before the signal came'; continue; }
    grep -q "^stopped by signal [0-9]* after step $((10#0$(ls "$out/ckpt"))), saved" "$work/stdout" ||
        why=${why:-"$(tail -n 1 "$work/stdout")"}
    resumed "$long"
    verdict "SIG$signal saves and ends, resumed" "$why"
done
starter=()
rm -rf "$out"
trap '' HUP
start '^step *3/' "${ENDLESS[@]}" -s 0 -n 0 -o "$out"
trap 'exit 1' HUP
kill -HUP $pid
steps=$(grep -c '^step' "$work/stdout")
until [ "$(grep -c '^step' "$work/stdout")" -gt $((steps + 5)) ] || ! kill -0 $pid 2>/dev/null; do sleep 0.002; done
kill -TERM $pid
join
why=$(ended_with 0)
verdict 'SIGHUP that was ignored at the start stays ignored' \
    "${why:-$(grep -q '^stopped by signal 15 ' "$work/stdout" || tail -n 1 "$work/stdout")}"

# Stopped during a long validation, which is made up, once.
VALIDATED=(-e L=1,C=16,NH=2,T=16 -b 2 -s 0 -x 1 -v 1 -m 3000 -n 0)
run "${VALIDATED[@]}" -o "$work/validated"
rm -rf "$out"
start '^step *1/1 .*lr' "${VALIDATED[@]}" -o "$out"
kill -TERM $pid
join
why=$(ended_with 0)
if grep -q '^step *1/1 .*val loss' "$work/stdout"; then
    skip 'SIGTERM in a validation' 'it was over before the signal came'
else
    run -y 1 -o "$out"
    resumed "$work/validated"
    verdict 'SIGTERM in a validation, which is made up, once' "$why"
fi

# Kill OUT's run after a random time, again and again; a run that reaches its end is compared and started again.
t=${EPOCHREALTIME/[.,]/}
run "${LONG[@]}" -n 1 --stop-after 20 -o "$work/timed"
window=$(((${EPOCHREALTIME/[.,]/} - t) / 1000))
kills=12 killed=0 torn=0 why=
is_sanitized && kills=6
rm -rf "$out"
for ((n = 0; n < 10 * kills && killed < kills; n++)); do
    start . "${LONG[@]}" -n 1 -y 1 -o "$out"
    delay=$((RANDOM % (window + 20)))
    sleep $((delay / 1000)).$(printf %03d $((delay % 1000)))
    kill -KILL $pid 2>/dev/null
    join
    # LeakSanitizer inspects a process from another one, which may hold the lock a moment longer.
    is_sanitized && [ -e "$out/.lock" ] && flock -w 10 "$out/.lock" true
    why=${why:-$(grep -v 'starting a new run' "$work/stderr" | head -n 1)}
    if [ $status -eq 137 ]; then
        killed=$((killed + 1))
        find "$out" -name '*.tmp' 2>/dev/null | grep -q . && torn=$((torn + 1))
    else
        why=${why:-$(ended_with 0)$(unlike "$out" "$long")}
        rm -rf "$out"
    fi
done
run "${LONG[@]}" -n 1 -y 1 -o "$out"
why=${why:-$(ended_with 0)$(unlike "$out" "$long")}
verdict "killed $killed times, $torn of them while a checkpoint was written, seed $seed" "$why"

# If a checkpoint cannot be written, the one before it stays.
rm -rf "$out"
run "${LONG[@]}" -n 0 --stop-after 70 -o "$out"
(trap '' XFSZ; ulimit -f 60; "$PROGRAM" -y 1 -o "$out" </dev/null >"$work/stdout" 2>"$work/stderr")
status=$?
why=$(ended_with 1)
grep -q '^warning: .*ckpt/00000080: .*could not be saved' "$work/stderr" || why=${why:-'no warning names it'}
[ "$(ls "$out/ckpt")" = 00000070 ] || why=${why:-"checkpoints: $(ls "$out/ckpt" | tr '\n' ' ')"}
resumed "$long"
verdict 'after a write failure the checkpoint before it stays' "$why"

# ---------------------------------------------------------------------------------------------------------
# A directory that is moved, or that another run takes

lost="^error: $out: was moved, deleted or replaced"
rm -rf "$out"
start '^step *1[0-9]/' "${ENDLESS[@]}" -n 1 -s 1 -o "$out"
kill -STOP $pid
mv "$out" "$work/elsewhere"
"$PROGRAM" "${TINY[@]}" -x 3 -s 0 -n 1 -nk 0 -o "$out" </dev/null >/dev/null 2>"$work/other"
before=$(listing "$out")
kill -CONT $pid
join
why=$(ended_with_error 1 "$lost")
[ "$before" = "$(listing "$out")" ] || why=${why:-"the new run's files changed"}
verdict "another run at its path: the old one leaves it alone" "${why:-$(cat "$work/other")}"
if prepare_ranks; then
    rm -rf "$out" "$work/elsewhere"
    starter=(mpirun --oversubscribe -np 2)
    start '^step *3/' "${ENDLESS[@]}" -s 0 -n 0 -o "$out"
    starter=()
    mv "$out" "$work/elsewhere"
    join
    sed -i '/^\(error\|warning\): /!d' "$work/stderr"
    why=$(ended_with_error 1 "$lost")
    [ ! -e "$out" ] || why=${why:-'the directory was created again'}
    verdict 'moved while 2 ranks use it: all end, one line' "$why"
else skip 'moved under 2 ranks' "$why"; fi

rm -rf "$out"
start '^step *3/' "${ENDLESS[@]}" -s 0 -n 0 -o "$out"
kill -STOP $pid
why=
for overwrite in 0 1; do
    run "${TINY[@]}" -x 2 -s 0 -o "$out" --overwrite $overwrite
    why=${why:-$(ended_with_error 2 "$out: another process is training there")}
done
kill -CONT $pid
kill -TERM $pid
join
verdict 'a second run in the same directory is refused' "${why:-$(ended_with 0)}"

# ---------------------------------------------------------------------------------------------------------
# Output that nobody reads

unread() { # FLAG...
    rm -f "$work/status"
    set_command "$@"
    { sleep 0.05; timeout 60 "${command[@]}" </dev/null 2>"$work/stderr"; echo $? >"$work/status"; } | true
    status=$(cat "$work/status")
}
rm -rf "$out"
unread "${TINY[@]}" -x 40 -s 0 -n 0 -o "$out"
why=$(ended_with 0)
[ "$(grep -c '"loss"' "$out/log.jsonl") $(ls "$out/ckpt")" = '40 00000040' ] || why=${why:-'it is not whole'}
verdict 'a closed pipe does not end a training run' "$why"
for flags in --help "-y 1 -o $out --generate 20"; do
    # shellcheck disable=SC2086
    unread $flags
    verdict "a closed pipe ends $flags" "$([ "$status" -eq 141 ] || echo "exit status $status")"
done
# Closed at the start.
why=
for closed in '1' '1 2' '0 1 2'; do
    rm -rf "$out"
    mkdir "$out" && : >"$out/.lock"  # which is then the first file that a run opens
    (
        for fd in $closed; do eval "exec $fd>&-"; done
        exec "$PROGRAM" "${TINY[@]}" -x 2 -s 0 -n 0 -o "$out"
    ) 2>/dev/null
    status=$?
    [ $status -eq 0 ] && [ ! -s "$out/.lock" ] && [ "$(grep -c '"loss"' "$out/log.jsonl")" -eq 2 ] ||
        why="$closed: status $status, .lock: $(head -n 1 "$out/.lock"), $(wc -l <"$out/log.jsonl") lines in the log"
done
verdict 'closed standard descriptors' "$why"

# ---------------------------------------------------------------------------------------------------------
# The recipes of scripts/recipes, with a tiny model

for file in "$root"/scripts/recipes/*.flags; do
    trainer=$PROGRAM
    [[ $file != *bert* ]] || trainer=${PROGRAM/%gpt2/bert}
    PROGRAM=$trainer run --recipe "$file" -e L=1,C=16,NH=2,T=1024 -b 1 -d 0 -x 0 -o ''
    verdict "the recipe ${file##*/}" "$(ended_with 0)"
done
finish
