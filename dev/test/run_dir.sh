#!/bin/bash
# A run's directory: which run owns it, what it holds, and what happens to a run that is stopped or loses its terminal:
#
#     bash dev/test/run_dir.sh PROGRAM          train_gpt2, from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
vocabulary=vocab.json
MODEL=(-e L=1,C=16,NH=2,T=16 -b 2 -s 0)
ENDLESS=("${MODEL[@]}" -x 1000000 -v 0)

# Under nohup SIGHUP is ignored, and a shell cannot change that.
default=()
! env --default-signal=HUP true 2>/dev/null || default=(env --default-signal=HUP)

# Start a run in the background, with "${starter[@]}", and wait until its output matches PATTERN.
starter=()
start() { # PATTERN FLAG...
    local pattern=$1
    shift
    : >"$work/stdout"
    "${starter[@]}" "$PROGRAM" "$@" </dev/null >"$work/stdout" 2>"$work/stderr" &
    pid=$!
    until grep -q "$pattern" "$work/stdout" || ! kill -0 $pid 2>/dev/null; do sleep 0.002; done
}

# Wait at most 20 seconds for its end.
join() {
    local i
    for ((i = 0; i < 2000; i++)); do kill -0 $pid 2>/dev/null || break; sleep 0.01; done
    kill -KILL $pid 2>/dev/null
    { wait $pid; status=$?; } 2>/dev/null
}

# ---------------------------------------------------------------------------------------------------------
# A directory that is moved, deleted or replaced while a run uses it

lost="^error: $work/out: was moved, deleted or replaced"
for flags in "-n 1" "-n 0"; do
    rm -rf "$work/out" "$work/elsewhere"
    start '^step *1[0-9]/' "${ENDLESS[@]}" $flags -o "$work/out"
    mv "$work/out" "$work/elsewhere"
    join
    why=$(ended_with_error 1 "$lost")
    [ ! -e "$work/out" ] || why=${why:-'the directory was created again'}
    run -y 1 -o "$work/elsewhere" --stop-after 20 --override 1
    [ "$flags" != '-n 1' ] || why=${why:-$(ended_with 0)}
    verdict "moved while a run with $flags uses it: the run ends and writes nothing more" "$why"
done

# The old run is stopped meanwhile, so that it finds another run's directory at its own path.
for name in 'checkpoints' 'the log'; do
    rm -rf "$work/out"
    every=1
    [ "$name" = checkpoints ] || every=0
    start '^step *1[0-9]/' "${ENDLESS[@]}" -n $every -o "$work/out"
    kill -STOP $pid
    rm -rf "$work/out"
    "$PROGRAM" "${MODEL[@]}" -x 3 -v 0 -n 1 -nk 0 -o "$work/out" </dev/null >/dev/null 2>"$work/other"
    before=$(listing "$work/out")
    kill -CONT $pid
    join
    why=$(ended_with_error 1 "$lost")
    [ "$before" = "$(listing "$work/out")" ] || why=${why:-"the new run's files changed"}
    [ ! -s "$work/other" ] || why=${why:-"the new run: $(head -n 1 "$work/other")"}
    verdict "another run at its path: the old one leaves $name alone" "$why"
done

# A file that is written after every step.
rm -rf "$work/out" "$work/elsewhere"
start '^step *1[0-9]/' "${ENDLESS[@]/#-s/--seed}" -s 1 -n 0 -o "$work/out"
kill -STOP $pid
mv "$work/out" "$work/elsewhere" && mkdir "$work/out" && : >"$work/out/.lock"
kill -CONT $pid
join
why=$(ended_with_error 1 "$lost")
[ "$(ls -A "$work/out")" = .lock ] || why=${why:-"written: $(ls -A "$work/out" | tr '\n' ' ')"}
verdict 'moved: no sample at the old path' "$why"

if prepare_ranks; then
    rm -rf "$work/out" "$work/elsewhere"
    : >"$work/stdout"
    mpirun --oversubscribe -np 2 "$PROGRAM" "${ENDLESS[@]}" -n 0 -o "$work/out" </dev/null >"$work/stdout" 2>"$work/stderr" &
    pid=$!
    until grep -q '^step *3/' "$work/stdout" || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
    mv "$work/out" "$work/elsewhere"
    join
    why=
    [ $status -eq 1 ] || why="exit status $status"
    [ "$(grep -c '^error: ' "$work/stderr")" -eq 1 ] || why=${why:-"stderr: $(head -n 3 "$work/stderr" | tr '\n' ' ')"}
    grep -q "$lost" "$work/stderr" || why=${why:-"stderr: $(head -n 3 "$work/stderr" | tr '\n' ' ')"}
    [ ! -e "$work/out" ] || why=${why:-'the directory was created again'}
    verdict 'moved while 2 ranks use it: all end, one line' "$why"
else
    skip 'moved under 2 ranks' "$why"
fi

# ---------------------------------------------------------------------------------------------------------
# Two runs in one directory

rm -rf "$work/out"
start '^step *3/' "${ENDLESS[@]}" -n 0 -o "$work/out"
kill -STOP $pid
run "${MODEL[@]}" -x 2 -v 0 -o "$work/out"
why=$(ended_with_error 2 "$work/out: another process is training there")
run "${MODEL[@]}" -x 2 -v 0 -o "$work/out" --overwrite 1
why=${why:-$(ended_with_error 2 "$work/out: another process is training there")}
kill -CONT $pid
kill -TERM $pid
join
verdict 'a second run in the same directory is refused' "${why:-$(ended_with 0)}"

# ---------------------------------------------------------------------------------------------------------
# The newest model in OUT may be edited

rm -rf "$work/out"
run "${MODEL[@]}" -x 4 -v 0 -n 0 --stop-after 2 -o "$work/out"
why=$(ended_with 0)
before=$(listing "$work/out/ckpt")
for file in config.json model.safetensors $vocabulary; do
    [ -f "$work/out/$file" ] || why=${why:-"$file is not shown"}
    printf ' ' >>"$work/out/$file"
done
[ "$before" = "$(listing "$work/out/ckpt")" ] || why=${why:-'the checkpoint changed too'}
run -y 1 -o "$work/out"
why=${why:-$(ended_with 0)}
[ ! -s "$work/stderr" ] || why=${why:-"stderr: $(head -n 1 "$work/stderr")"}
cmp -s "$work/out/model.safetensors" "$work/out/ckpt/00000004/model.safetensors" || why=${why:-'the newest model is not shown'}
[ -z "$(find "$work/out" -name '*.tmp')" ] || why=${why:-"left: $(find "$work/out" -name '*.tmp')"}
verdict 'editing the model in OUT does not change the checkpoint' "$why"

# ---------------------------------------------------------------------------------------------------------
# Names in OUT/ckpt

mv "$work/out/ckpt/00000004" "$work/out/ckpt/000000004"
mkdir "$work/out/ckpt/mine.tmp" && : >"$work/out/ckpt/mine.tmp/notes"
run -y 1 -o "$work/out"
why=$(ended_with 0)
[ "$(ls "$work/out/ckpt" | tr '\n' ' ')" = '000000004 00000002 00000004 mine.tmp ' ] || why=${why:-"ckpt: $(ls "$work/out/ckpt" | tr '\n' ' ')"}
grep -q ' steps 3 to 4 ' "$work/stdout" || why=${why:-'it did not go on from step 2'}
[ ! -s "$work/stderr" ] || why=${why:-"stderr: $(head -n 1 "$work/stderr")"}
[ -f "$work/out/ckpt/mine.tmp/notes" ] || why=${why:-"somebody's file was deleted"}
verdict 'only names that a run gives count as checkpoints' "$why"

# What no run has written is not removed, and no link is followed: a directory with a user's model, and a link to one.
foreign() { # PATH FLAG...
    local path=$1 kind
    shift
    for kind in directory link; do
        rm -rf "${box:?}"/*
        mkdir -p "$(dirname "$box/out/$path")" "$box/mine" && echo '{}' >"$box/mine/config.json"
        if [ $kind = link ]; then ln -s "$box/mine" "$box/out/$path"; else mv "$box/mine" "$box/out/$path"; fi
        run "${MODEL[@]}" -x 2 -v 0 -n 1 -nk 1 -o "$box/out" "$@"
        why=$(ended_with_error 2 "$box/out/$path: cannot be deleted: no run of this program has written it")
        [ ! -e "$box/out/log.jsonl" ] || why=${why:-'log.jsonl was written'}
        verdict "a user's $path, a $kind: stays" "${why:-$([ -f "$box/out/$path/config.json" ] || echo 'it was deleted')}"
    done
}
foreign ema --ema 0.9
foreign ckpt/00000001.tmp
foreign ckpt/00000001 --overwrite 1
# A checkpoint that lost its manifest is the run's own all the same.
rm -rf "${box:?}"/*
run "${MODEL[@]}" -x 2 -v 0 -n 1 -o "$box/out"
mv "$box/out/ckpt/00000001" "$box/out/ckpt/00000001.damaged"
rm "$box/out/ckpt/00000001.damaged/manifest.json" "$box/out/ckpt/00000002/manifest.json"
run "${MODEL[@]}" -x 1 -v 0 -n 0 -o "$box/out" --overwrite 1
why=$(ended_with 0)
verdict '--overwrite deletes damaged checkpoints' "${why:-$(ls "$box/out/ckpt" | grep -v '^00000001$')}"
rm -rf "${box:?}"/* && mkdir "$box/out" && echo mine >"$box/out/$vocabulary"
refused 'the file of another tokenizer in OUT: refused' 2 "^error: $box/out/$vocabulary: belongs to another tokenizer" \
    "${MODEL[@]}" -x 2 -v 0 -o "$box/out"
rm -rf "${box:?}"/*

# -nk leaves them, too.
rm -rf "$work/out" "$work/mine"
run "${MODEL[@]}" -x 4 -v 0 -n 2 -nk 1 --stop-after 2 -o "$work/out"
mkdir "$work/out/ckpt/00000001" "$work/mine" && ln -s "$work/mine" "$work/out/ckpt/00000000"
echo '{}' | tee "$work/out/ckpt/00000001/config.json" >"$work/mine/manifest.json"
run -y 1 -o "$work/out"
why=$(ended_with 0)
kept=$(cd "$work" && find out/ckpt mine ! -path '*/00000004/*' | sort | tr '\n' ' ')
[ "$kept" = 'mine mine/manifest.json out/ckpt out/ckpt/00000000 out/ckpt/00000001 out/ckpt/00000001/config.json out/ckpt/00000004 ' ] ||
    why=${why:-"left: $kept"}
verdict "-nk deletes no user's directory" "$why"

# ---------------------------------------------------------------------------------------------------------
# A run that begins late

# A new run takes OUT once it has read all that it needs. Here it stands still in a shard of 2^31 - 1 zeros, which it scans,
# while another run trains in OUT.
rm -rf "$work/out"
{ little_endian 4 20240520; little_endian 4 1; little_endian 4 2147483647; } >"$work/zeros.bin"
truncate -s $((1024 + 2 * 2147483647)) "$work/zeros.bin"
"$PROGRAM" "${MODEL[@]}" -i "$work/zeros.bin" -x 2 -v 0 -o "$work/out" </dev/null >"$work/late" 2>&1 &
late=$!
until ls -l /proc/$late/fd 2>/dev/null | grep -q zeros.bin || ! kill -0 $late 2>/dev/null; do sleep 0.01; done
kill -STOP $late
run "${MODEL[@]}" -x 3 -v 0 -o "$work/out"
why=$(ended_with 0)
before=$(listing "$work/out")
kill -CONT $late
wait $late
status=$?
[ $status -eq 2 ] && grep -q "^error: $work/out: another run has saved there since" "$work/late" || why=${why:-"status $status: $(tail -n 1 "$work/late")"}
[ "$before" = "$(listing "$work/out")" ] || why=${why:-"the other run's files changed"}
verdict 'a run leaves OUT alone if another one took it first' "$why"

# ---------------------------------------------------------------------------------------------------------
# Signals

rm -rf "$work/out"
starter=("${default[@]}")
start '^step *3/' "${ENDLESS[@]}" -n 0 -o "$work/out"
kill -HUP $pid
join
why=$(ended_with 0)
grep -q '^stopped by signal 1 after step [0-9]*, saved' "$work/stdout" || why=${why:-"$(tail -n 1 "$work/stdout")"}
verdict 'SIGHUP saves and ends' "$why"

rm -rf "$work/out"
starter=()
trap '' HUP
start '^step *3/' "${ENDLESS[@]}" -n 0 -o "$work/out"
trap 'exit 1' HUP
kill -HUP $pid
steps=$(grep -c '^step' "$work/stdout")
until [ "$(grep -c '^step' "$work/stdout")" -gt $((steps + 5)) ] || ! kill -0 $pid 2>/dev/null; do sleep 0.002; done
kill -TERM $pid
join
why=$(ended_with 0)
grep -q '^stopped by signal 15 ' "$work/stdout" || why=${why:-"$(tail -n 1 "$work/stdout")"}
verdict 'SIGHUP that was ignored at the start stays ignored' "$why"

# How a program ends if nobody reads its output.
unread() { # FLAG...
    rm -f "$work/status"
    set_command "$@"
    { sleep 0.05; timeout 60 "${command[@]}" </dev/null 2>"$work/stderr"; echo $? >"$work/status"; } | true
    status=$(cat "$work/status")
}
rm -rf "$work/out"
unread "${MODEL[@]}" -x 40 -v 0 -n 0 -o "$work/out"
why=$(ended_with 0)
[ "$(grep -c '"loss"' "$work/out/log.jsonl")" -eq 40 ] || why=${why:-"$(grep -c '"loss"' "$work/out/log.jsonl") losses in the log"}
[ -d "$work/out/ckpt/00000040" ] || why=${why:-'nothing was saved'}
verdict 'a closed pipe does not end a training run' "$why"
ends_unread() { # NAME FLAG...
    local name=$1
    shift
    unread "$@"
    verdict "a closed pipe ends $name" "$([ "$status" -eq 141 ] || echo "exit status $status")"
}
ends_unread --help --help
ends_unread '-x 0' "${MODEL[@]}" -x 0
ends_unread --evaluate -y 1 -o "$work/out" --evaluate 1
ends_unread --generate -y 1 -o "$work/out" --generate 20

# ---------------------------------------------------------------------------------------------------------
# A run that is stopped during a validation has the log of an uninterrupted one

steps_of() { grep '"step"' "$1/log.jsonl" | grep -v checkpoint_ms | sed -E 's/, "(ms|tok_s|seq_s|mfu|joules|mhz)": [^,}]*//g'; }
same_log() { # NAME
    local why=$2
    [ "$(steps_of "$work/out")" = "$(steps_of "$work/straight")" ] || why=${why:-"$(diff <(steps_of "$work/straight") <(steps_of "$work/out") | grep '^[<>]' | head -n 1)"}
    verdict "$1" "$why"
}
# Stopped during a long validation, which is repeated when the run is resumed.
rm -rf "$work/out" "$work/straight"
LONG=("${MODEL[@]}" -x 1 -v 1 -m 3000 -n 0)
run "${LONG[@]}" -o "$work/straight"
start '^step *1/1 .*lr' "${LONG[@]}" -o "$work/out"
kill -TERM $pid
join
why=$(ended_with 0)
if grep -q '^step *1/1 .*val loss' "$work/stdout"; then
    skip 'stopped while a validation was due' 'the validation was over before the signal came'
else
    run -y 1 -o "$work/out"
    why=${why:-$(ended_with 0)}
    run -y 1 -o "$work/out"
    same_log 'stopped while a validation was due: it is made up, once' "$why"
fi

# ---------------------------------------------------------------------------------------------------------
# Files that are not regular ones

rm -rf "$work/out"
run "${MODEL[@]}" -x 2 -v 0 -n 0 -o "$work/out"
fifo() { # NAME PATTERN FILE FLAG...: FILE becomes a FIFO, for one run
    local name=$1 pattern=$2 file=$3
    shift 3
    [ ! -e "$file" ] || mv "$file" "$work/real"
    mkfifo "$file"
    set_command "$@"
    timeout -k 5 10 "${command[@]}" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
    rm "$file"
    [ ! -e "$work/real" ] || mv "$work/real" "$file"
    verdict "a FIFO instead of $name" "$(ended_with_error 2 "$pattern" warnings)"
}
fifo "a checkpoint's model.safetensors" 'no complete checkpoint' "$work/out/ckpt/00000002/model.safetensors" -y 1 -o "$work/out" --evaluate 1
mkdir "$work/new"
fifo 'log.jsonl' 'log.jsonl: cannot be written' "$work/new/log.jsonl" "${MODEL[@]}" -x 1 -n 0 -v 0 -o "$work/new"
# A run warns of a file that it does not need, and continues.
rm -rf "$work/new" && mkdir "$work/new"
mkfifo "$work/new/loss.svg.tmp"
timeout -k 5 10 "$PROGRAM" "${MODEL[@]}" -x 1 -n 0 -v 0 -o "$work/new" </dev/null >"$work/stdout" 2>"$work/stderr"
status=$?
why=$(ended_with 0)
grep -q '^warning: .*loss.svg' "$work/stderr" || why=${why:-'no warning'}
verdict 'a FIFO instead of loss.svg.tmp' "$why"

# ---------------------------------------------------------------------------------------------------------
# Descriptors that are closed at the start

why=
for closed in '1' '1 2' '0 1 2'; do
    rm -rf "$work/new"
    mkdir "$work/new" && : >"$work/new/.lock"  # which is then the first file that a run opens
    (
        for fd in $closed; do eval "exec $fd>&-"; done
        exec "$PROGRAM" "${MODEL[@]}" -x 2 -v 0 -n 0 -o "$work/new"
    ) 2>/dev/null
    status=$?
    [ $status -eq 0 ] || why=${why:-"$closed: exit status $status"}
    [ ! -s "$work/new/.lock" ] || why=${why:-"$closed: in .lock: $(head -n 1 "$work/new/.lock")"}
    [ "$(grep -c '"loss"' "$work/new/log.jsonl")" -eq 2 ] || why=${why:-"$closed: the log is not whole"}
done
verdict 'closed standard descriptors' "$why"

# The largest loss scale, which is rounded to a larger one.
rm -rf "$work/new"
"$PROGRAM" "${MODEL[@]}" -x 2 -v 2 -m 3000 -n 0 --loss-scale 3e38 -o "$work/new" </dev/null >"$work/stdout" 2>"$work/stderr" &
pid=$!
until [ -s "$work/new/log.jsonl" ] || ! kill -0 $pid 2>/dev/null; do sleep 0.002; done  # then its first validation begins
kill -TERM $pid
join
why=$(ended_with 0)
if [ ! -d "$work/new/ckpt/00000000" ]; then skip '--loss-scale 3e38 is resumed' 'the validation was over before the signal came'
else
    run -y 1 -v 0 -o "$work/new"
    verdict '--loss-scale 3e38 is resumed' "${why:-$(ended_with 0)}"
fi

finish
