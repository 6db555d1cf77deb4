#!/bin/bash
# Kills, signals, damage and what else can come between a run and its resumption must not change the result by a bit.
# Plain equalities are rows of equal.txt, refusals of refuse.txt.
#
#     bash dev/test/resume.sh PROGRAM [SEED]          from the repository's root
#
# SEED chooses the moments of the kills; it is printed. Ends with `N passed, N failed, N skipped`; exit status 1 if one
# failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
case ${PROGRAM##*/} in
    train_bert*) data=data/builtin/bert/train.bin tokenizer=vocab.txt ;;
    *) data=data/builtin/train.bin tokenizer='vocab.json merges.txt' ;;
esac
seed=${2:-$(date +%s)}
RANDOM=$seed

# Dropout, four micro-batches a step, warm-up, decay and shuffling: all that could depend on a run's position.
MODEL=(-e L=2,C=16,NH=2,T=16 -b 2 -d 128 --dropout 0.1 -l 1e-2 -u 3 -q 0.1 -c 0.1 -s 0)
SHORT=("${MODEL[@]}" -x 20 -v 5 -m 2 -n 0)
last=00000020

# A run's losses: its log without times.
losses() { grep '"loss"' "$1/log.jsonl" | sed 's/, "ms".*//'; }
validations() { grep '"val_loss"' "$1/log.jsonl"; }

# Print why the run in OUT differs from that in REFERENCE after the same step, or nothing.
same_run() { # OUT REFERENCE STEP
    local file
    for file in model optimizer; do
        cmp -s "$1/ckpt/$3/$file.safetensors" "$2/ckpt/$3/$file.safetensors" || { echo "$file.safetensors differs"; return; }
    done
    cmp -s "$1/model.safetensors" "$2/ckpt/$3/model.safetensors" || { echo "$1 does not show the newest model"; return; }
    cmp -s <(losses "$1") <(losses "$2") || { echo "the losses in log.jsonl differ"; return; }
    cmp -s <(validations "$1") <(validations "$2") || { echo "the validation losses in log.jsonl differ"; return; }
    if find "$1" -name '*.tmp' | grep -q .; then echo "left behind: $(find "$1" -name '*.tmp' | head -n 1)"; fi
}

# Run and compare with a reference.
same() { # NAME OUT REFERENCE STEP FLAG...
    local name=$1 out=$2 reference=$3 step=$4 why
    shift 4
    run "$@" -o "$out"
    why=$(ended_with 0)
    [ -n "$why" ] || [ ! -s "$work/stderr" ] || why="stderr: $(head -n 1 "$work/stderr")"
    verdict "$name" "${why:-$(same_run "$out" "$reference" "$step")}"
}

# ---------------------------------------------------------------------------------------------------------
# Equalities without an interruption

straight=$work/straight
run "${SHORT[@]}" -o "$straight"
why=$(ended_with 0)
[ "$(losses "$straight" | wc -l)" -eq 20 ] || why=${why:-'not 20 losses in log.jsonl'}
verdict 'straight' "$why"
# ---------------------------------------------------------------------------------------------------------
# Stopped and resumed

half=$work/half
run "${SHORT[@]}" --stop-after 10 -o "$half"
why=$(ended_with 0)
[ "$(ls "$half/ckpt")" = 00000010 ] || why=${why:-"checkpoints: $(ls "$half/ckpt" | tr '\n' ' ')"}
verdict '--stop-after 10' "$why"
again() { rm -rf "$work/again" && cp -a "$half" "$work/again"; }
again
# Print why the average of "recipe-half" is not that of "recipe", or nothing.
same_average() {
    cmp -s "$work/recipe-half/ema/model.safetensors" "$work/recipe/ema/model.safetensors" || echo 'the averages differ'
    grep '"ema_val_loss"' "$work/recipe-half/log.jsonl" | cmp -s - "$work/wanted" || echo 'losses of the average differ'
}
# Killed between the last checkpoint and the average, which is a model of its own.
run "${SHORT[@]}" --ema 0.9 -o "$work/recipe"
grep '"ema_val_loss"' "$work/recipe/log.jsonl" >"$work/wanted"
cp -a "$work/recipe" "$work/recipe-half"
rm -r "$work/recipe-half/ema" && sed -i '/"step": 20, "ema_val_loss"/d' "$work/recipe-half/log.jsonl"
run -y 1 -o "$work/recipe-half"
why=$(ended_with 0)
verdict 'killed before the average is saved' "${why:-$(same_average)}"
rm -rf "$work/recipe" "$work/recipe-half"
# The loss does not improve with a rate of 0: the first validation stays the best, and its checkpoint the only older one.
run -e L=2,C=16,NH=2,T=16 -s 0 -x 20 -m 2 -l 0 -v 2 -nk 1 -n 4 --keep-best 1 --stop-after 8 -o "$work/best-kept"
why=$(ended_with 0)
run -y 1 -o "$work/best-kept"
why=${why:-$(ended_with 0)}
[ "$(ls "$work/best-kept/ckpt" | tr '\n' ' ')" = '00000002 00000020 ' ] || why=${why:-"checkpoints: $(ls "$work/best-kept/ckpt" | tr '\n' ' ')"}
verdict 'the best checkpoint stays' "$why"
rm -rf "$work/best-kept"
# Given later, --keep-best counts from then on: there is no checkpoint of step 2.
run -e L=2,C=16,NH=2,T=16 -s 0 -x 20 -m 2 -l 0 -v 2 -nk 1 -n 4 --stop-after 8 -o "$work/best-later"
run -y 1 --keep-best 1 --stop-after 16 -o "$work/best-later"
why=$(ended_with 0)
run -y 1 -o "$work/best-later"
why=${why:-$(ended_with 0)}
kept=$(ls "$work/best-later/ckpt" | tr '\n' ' ')
[ "$kept" = '00000010 00000020 ' ] || why=${why:-"checkpoints: $kept"}
grep -q '^lowest validation loss: .* after step 10$' "$work/stdout" || why=${why:-"$(grep '^lowest' "$work/stdout")"}
verdict '--keep-best in a resumed run names a checkpoint that exists' "$why"
rm -rf "$work/best-later"
# The checkpoint of a validation that a resumed run makes up, and that becomes the best, stays. So does the checkpoint if
# the run was killed just after it logged the validation.
run -e L=2,C=16,NH=2,T=16 -s 0 -x 4 -m 2 -l 0 -v 0 -n 4 -nk 1 -o "$work/made-up"
cp -a "$work/made-up" "$work/made-up-killed"
echo '{"step": 4, "val_loss": 1}' >>"$work/made-up-killed/log.jsonl"
run -y 1 -v 4 --keep-best 1 -o "$work/made-up"
why=$(ended_with 0)
for out in "$work/made-up" "$work/made-up-killed"; do
    run -y 1 -v 4 --keep-best 1 --override 1 -x 12 -o "$out"
    why=${why:-$(ended_with 0)}
    kept=$(ls "$out/ckpt" | tr '\n' ' ')
    [ "$kept" = '00000004 00000012 ' ] || why=${why:-"$out: checkpoints: $kept"}
done
verdict 'the best by a validation that comes later stays' "$why"
rm -rf "$work"/made-up*
run "${SHORT[@]}" --ema 0.9 --ema-start 9 --stop-after 7 -o "$work/average"
why=$(grep -q '^no average of the weights: --ema-start 9 is not reached$' "$work/stdout" || cat "$work/stdout")
verdict 'a run that ends before --ema-start says so' "$why"
run -y 1 --override 1 --ema-start 7 -o "$work/average"
verdict 'an average cannot begin before the step of the checkpoint' "$(ended_with_error 2 'can only begin later')"
run -y 1 --override 1 --ema 0 -x 21 -o "$work/average"
why=$(ended_with 0)
[ ! -e "$work/average/ema" ] || why=${why:-'the average of step 20 is still there'}
verdict 'a resumed run without its average' "$why"
rm -rf "$work/average"

# What the first lines say of a run without steps, and of one that is shorter than its warm-up.
run -e L=2,C=16,NH=2,T=16 -b 2 -l 1e-2 -x 20 -u 80 -v 0 -s 0 -n 0 -o "$work/short"
why=$(grep -q '^the warm-up (-u 80) is longer than the run: the learning rate ends at 0.25 of -l$' "$work/stdout" ||
    echo 'not a word about the warm-up')
grep -q '"step": 20, .*"lr": 0.0025,' "$work/short/log.jsonl" || why=${why:-'it ends at another rate'}
run -y 1 --override 1 -x 18 -o "$work/short"
why=${why:-$(ended_with 0)}
grep -q '| no steps left: step 20 is done, the last one is 18 |' "$work/stdout" ||
    why=${why:-'it does not say that it is done'}
verdict 'the first lines of a run' "$why"
rm -rf "$work/short"

# A recipe: flags of the command line override its flags, and a resumed run takes them from trainer.json. An editor may
# have begun it with a byte order mark.
printf -- '\xEF\xBB\xBF--lr 2e-2\n--optimizer muon\n--init zero-out\n' >"$work/r.flags"
run "${SHORT[@]}" --optimizer muon --init zero-out -o "$work/flags"
why=$(ended_with 0)
run "${SHORT[@]}" --recipe "$work/r.flags" --stop-after 7 -o "$work/recipe"
grep -q '"lr": "*0.01[",]' "$work/recipe/ckpt/00000007/trainer.json" || why=${why:-'the command line does not win'}
cp "$work/r.flags" "$work/kept.flags"
echo '--rate 1' >"$work/r.flags"
run -y 1 --recipe "$work/r.flags" --stop-after 12 -o "$work/recipe"
why=${why:-$(ended_with 0)}
rm "$work/r.flags"
cp -a "$work/recipe" "$work/recipe-damaged"
run -y 1 --recipe "$work/r.flags" -o "$work/recipe"
why=${why:-$(ended_with 0)}
verdict 'a recipe, resumed after it changed and was deleted' "${why:-$(same_run "$work/recipe" "$work/flags" $last)}"
# A new run reads it: with -y 1 if there is no checkpoint, or no usable one.
run -y 1 "${SHORT[@]}" --recipe "$work/kept.flags" -o "$work/recipe-new"
why=$(ended_with 0)
verdict 'a recipe of a new run with -y 1' "${why:-$(same_run "$work/recipe-new" "$work/flags" $last)}"
for step in 07 12; do flip_byte "$work/recipe-damaged/ckpt/000000$step/optimizer.safetensors" 5000; done
mv "$work/recipe-damaged" "$work/out"
printf -- '-o elsewhere\n' >>"$work/kept.flags"  # the directory is chosen by now: the default
run -y 1 "${SHORT[@]}" --recipe "$work/kept.flags"
why=$(ended_with 0)
verdict 'a recipe, all checkpoints damaged' "${why:-$(same_run "$work/out" "$work/flags" $last)}"
mkfifo "$work/pipe"
{ echo '--lr 1' >"$work/pipe"; } 2>/dev/null & # without it, a trainer that waits for the pipe would never end
run --recipe "$work/pipe" -x 1 -o ''
{ kill $! && wait $!; } 2>/dev/null
verdict 'a recipe that is a pipe' "$(ended_with_error 2 'pipe: is not a regular file')"
for file in "$root"/scripts/recipes/*.flags; do  # those of this trainer, with a tiny model
    case ${file##*/}/${PROGRAM##*/} in *bert*/train_bert* | *bert*/finetune*) ;; *bert*) continue ;; */train_bert*) continue ;; esac
    run --recipe "$file" -e L=1,C=16,NH=2,T=1024 -b 1 -d 0 -x 0 -o ''
    verdict "the recipe ${file##*/}" "$(ended_with 0)"
done
rm -rf "$work"/recipe* "$work/flags" "$work/out"

cp $data "$work/data.bin"
run "${MODEL[@]}" -i "$work/data.bin" -x 20 -v 0 -n 0 --stop-after 10 -o "$work/moved"
flip_byte "$work/data.bin" 2000
run -y 1 -o "$work/moved"
verdict 'changed training data is refused' "$(ended_with_error 2 'data.bin: .*--override 1')"
run -y 1 -o "$work/moved" --override 1
verdict 'changed training data, --override 1' "$(ended_with 0)"

# With nothing to resume, a new run starts.
for state in 'no such directory' 'no checkpoints'; do
    rm -rf "$work/none"
    [ "$state" = 'no such directory' ] || mkdir -p "$work/none/ckpt"
    run "${SHORT[@]}" -y 1 -o "$work/none"
    why=$(ended_with 0)
    grep -q '^warning: .*none.*starting a new run' "$work/stderr" || why=${why:-'no word of starting a new run'}
    verdict "$state: a new run starts" "${why:-$(same_run "$work/none" "$straight" $last)}"
done
# But not from a command that only gives -o: the default model would replace the run's.
find "$work/none" -type f ! -name log.jsonl -delete
rm -rf "$work/none/ckpt"
run -y 1 -o "$work/none"
verdict 'no checkpoints, and no model or data given' "$(ended_with_error 2 "-y 1: the run in $work/none has no complete checkpoint; .*-e and -i")"

# ---------------------------------------------------------------------------------------------------------
# Signals and kills: a run long enough to be hit

LONG=("${MODEL[@]}" -x 80 -v 0)
end=00000080
long=$work/long
run "${LONG[@]}" -n 0 -o "$long"
verdict 'straight, 80 steps' "$(ended_with 0)"

for signal in TERM INT; do
    out=$work/$signal
    : >"$work/stdout"
    "$PROGRAM" "${LONG[@]}" -n 0 -o "$out" </dev/null >"$work/stdout" 2>"$work/stderr" &
    pid=$!
    until grep -q '^step *3/' "$work/stdout" || ! kill -0 $pid 2>/dev/null; do sleep 0.002; done
    kill -$signal $pid 2>/dev/null
    wait $pid
    status=$?
    why=$(ended_with 0)
    step=$(ls "$out/ckpt" 2>/dev/null | tail -n 1)
    if [ -z "$why" ] && [ "$step" = $end ]; then
        skip "SIG$signal" 'the run was over before the signal came'
        continue
    fi
    grep -q "^stopped by signal [0-9]* after step $((10#${step:-0})), saved" "$work/stdout" || why=${why:-'no line: stopped by signal'}
    verdict "SIG$signal saves and ends" "$why"
    same "SIG$signal, resumed" "$out" "$long" $end -y 1
done

# A signal during validation: the validation is not logged, and the step before it is saved.
out=$work/cut
: >"$work/stdout"
"$PROGRAM" "${MODEL[@]}" -x 120 -v 1 -m 0 -n 0 -o "$out" </dev/null >"$work/stdout" 2>"$work/stderr" &
pid=$!
until grep -q '^step *1/' "$work/stdout" || ! kill -0 $pid 2>/dev/null; do sleep 0.002; done
sleep 0.05
kill -TERM $pid 2>/dev/null
t0=${EPOCHREALTIME/[.,]/}
wait $pid
status=$?
why=$(ended_with 0)
[ $((${EPOCHREALTIME/[.,]/} - t0)) -lt 3000000 ] || why=${why:-'it took more than three seconds'}
grep -q '^stopped by signal 15 after step [0-9]*, saved' "$work/stdout" || why=${why:-"$(tail -n 1 "$work/stdout")"}
[ "$(grep -c 'val loss' "$work/stdout")" -le "$(grep -c '^step .* lr ' "$work/stdout")" ] || why=${why:-'half a validation was told'}
verdict 'SIGTERM during validation saves and ends' "$why"

# How long a process lives before its first step, and how long 20 steps with checkpoints take, in ms.
milliseconds() { local t=${EPOCHREALTIME/[.,]/}; echo $((t / 1000)); }
t0=$(milliseconds); run "${LONG[@]}" -n 0 --stop-after 1 -o "$work/time1"
t1=$(milliseconds); run "${LONG[@]}" -n 1 --stop-after 20 -o "$work/time20"
t2=$(milliseconds)
start=$((t1 - t0)) window=$((t2 - t1 - (t1 - t0) + 20))

# Kill OUT's run after a random time, again and again; a run that reaches its end is compared and started again.
kills=12
is_sanitized && kills=6
killed=0 torn=0 ended=0 why= n=0
out=$work/kill
while [ $killed -lt $kills ] && [ -z "$why" ] && [ $n -lt $((10 * kills)) ]; do
    n=$((n + 1))
    "$PROGRAM" "${LONG[@]}" -n 1 -y 1 -o "$out" </dev/null >"$work/stdout" 2>"$work/stderr" &
    pid=$!
    delay=$((start / 2 + (RANDOM * 32768 + RANDOM) % (start / 2 + window + 1)))
    sleep $((delay / 1000)).$(printf %03d $((delay % 1000)))
    kill -KILL $pid 2>/dev/null
    { wait $pid; } 2>/dev/null
    status=$?
    # LeakSanitizer inspects a process from another one, which may hold the lock a moment longer.
    is_sanitized && [ -e "$out/.lock" ] && flock -w 10 "$out/.lock" true
    grep -v 'starting a new run' "$work/stderr" | grep -q . && why="stderr: $(grep -v 'starting a new run' "$work/stderr" | head -n 1)"
    if [ $status -eq 137 ]; then
        killed=$((killed + 1))
        find "$out" -name '*.tmp' 2>/dev/null | grep -q . && torn=$((torn + 1))
    else
        why=${why:-$(ended_with 0)}
        why=${why:-$(same_run "$out" "$long" $end)}
        ended=$((ended + 1))
        rm -rf "$out"
    fi
done
if [ -z "$why" ]; then
    run "${LONG[@]}" -n 1 -y 1 -o "$out"
    why=$(ended_with 0)
    why=${why:-$(same_run "$out" "$long" $end)}
fi
[ -z "$why" ] || why="$why (after $killed kills, seed $seed)"
verdict "killed $killed times (SIGKILL), $torn of them while a checkpoint was written, seed $seed" "$why"

# Killed after the rename that commits a checkpoint and before its model is copied to OUT.
out=$work/unshown
run "${MODEL[@]}" -x 20 -v 5 -m 2 -n 10 -o "$out"
cp "$out/ckpt/00000010/model.safetensors" "$work/older" && rm "$out/model.safetensors" && mv "$work/older" "$out/model.safetensors"
ln "$out/ckpt/$last/model.safetensors" "$out/model.safetensors.tmp"
same 'killed between the commit and showing it' "$out" "$straight" $last -y 1

# ---------------------------------------------------------------------------------------------------------
# Damage

three=$work/three  # checkpoints of steps 5, 10 and 15
run "${MODEL[@]}" -x 20 -v 5 -m 2 -n 5 -nk 3 --stop-after 15 -o "$three"
verdict 'three checkpoints' "$([ "$(ls "$three/ckpt" | tr '\n' ' ')" = '00000005 00000010 00000015 ' ] || echo "$(ls "$three/ckpt")")"
sick=$work/sick
newest=$sick/ckpt/00000015
fresh_copy() { rm -rf "$sick" && cp -a "$three" "$sick"; }
fresh_copy
recovers() { # NAME FILE: the damage is reported, and the run continues from step 10
    local why
    run -y 1 -o "$sick"
    why=$(ended_with 0)
    grep -q "^warning: $newest/$2: .*not used" "$work/stderr" || why=${why:-"$2 is not named; stderr: $(head -n 1 "$work/stderr")"}
    [ "$(wc -l <"$work/stderr")" -eq 1 ] || why=${why:-'stderr is not one line'}
    grep -q ' steps 11 to 20 ' "$work/stdout" || why=${why:-'it did not go on from step 10'}
    [ -d "$newest.damaged" ] || why=${why:-'the damaged checkpoint was not kept'}
    why=${why:-$(same_run "$sick" "$straight" $last)}
    verdict "damaged: $1" "$why"
}
damaged_byte() { # FILE POSITION
    fresh_copy
    flip_byte "$newest/$1" "$2"
    recovers "byte $2 of $1" "$1"
}
for file in model.safetensors optimizer.safetensors trainer.json manifest.json config.json $tokenizer; do
    damaged_byte $file $((RANDOM % $(stat -c %s "$newest/$file")))
done
damaged_byte manifest.json 0
for file in model.safetensors trainer.json manifest.json; do
    fresh_copy && rm "$newest/$file"
    recovers "$file missing" $file
done
fresh_copy && truncate -s -1 "$newest/optimizer.safetensors"
recovers 'optimizer.safetensors a byte short' optimizer.safetensors
fresh_copy && : >"$newest/manifest.json"
recovers 'manifest.json empty' manifest.json

fresh_copy
for file in "$newest/config.json" "$sick/ckpt/00000010/trainer.json"; do flip_byte "$file" 10; done
run -y 1 -o "$sick"
why=$(ended_with 0)
[ "$(grep -c '^warning: .*not used' "$work/stderr")" -eq 2 ] || why=${why:-'not both are named'}
grep -q ' steps 6 to 20 ' "$work/stdout" || why=${why:-'it did not go on from step 5'}
verdict 'damaged: the two newest' "${why:-$(same_run "$sick" "$straight" $last)}"

all_damaged() { fresh_copy && for step in 05 10 15; do flip_byte "$sick/ckpt/000000$step/optimizer.safetensors" 5000; done; }
all_damaged
run "${SHORT[@]}" -y 1 -o "$sick"
why=$(ended_with 0)
[ "$(grep -c '^warning: .*optimizer.safetensors: .*not used' "$work/stderr")" -eq 3 ] || why=${why:-'not all are named'}
grep -q '^warning: .*starting a new run' "$work/stderr" || why=${why:-'no word of starting a new run'}
[ "$(ls "$sick/ckpt" | grep -c damaged)" -eq 3 ] || why=${why:-'not all are kept'}
verdict 'damaged: all; a new run starts and keeps them' "${why:-$(same_run "$sick" "$straight" $last)}"

# Killed after they were renamed and before the first save: OUT still belongs to the run.
all_damaged
for step in 05 10 15; do mv "$sick/ckpt/000000$step" "$sick/ckpt/000000$step.damaged"; done
run "${SHORT[@]}" -o "$sick"
verdict 'damaged: all renamed, refused without -y' "$(ended_with_error 2 "$sick/.*--overwrite 1")"
run "${SHORT[@]}" -y 1 -o "$sick"
why=$(ended_with 0)
verdict 'damaged: all renamed, a new run starts' "${why:-$(same_run "$sick" "$straight" $last)}"
run "${SHORT[@]}" --overwrite 1 -o "$sick"
why=$(ended_with 0)
[ "$(ls "$sick/ckpt" | tr '\n' ' ')" = "$last " ] || why=${why:-"left: $(ls "$sick/ckpt" | tr '\n' ' ')"}
verdict 'damaged: --overwrite 1 deletes them too' "$why"

# A damaged checkpoint of a later step must not cause good ones to be deleted.
all_damaged
run "${MODEL[@]}" -x 20 -v 5 -m 2 -y 1 -n 1 -nk 1 --stop-after 5 -o "$sick"
run -y 1 -o "$sick"
why=$(ended_with 0)
grep -q ' steps 6 to 20 ' "$work/stdout" || why=${why:-'it did not go on from step 5'}
verdict 'damaged: later ones do not count for -nk' "${why:-$(same_run "$sick" "$straight" $last)}"

# If a checkpoint cannot be written, the one before it stays.
again
(trap '' XFSZ; ulimit -f 60; "$PROGRAM" -y 1 -o "$work/again" </dev/null >"$work/stdout" 2>"$work/stderr")
status=$?
why=$(ended_with 1)
grep -q '^warning: .*ckpt/00000020: .*could not be saved' "$work/stderr" || why=${why:-'no warning names the checkpoint'}
[ "$(ls "$work/again/ckpt")" = 00000010 ] || why=${why:-"checkpoints: $(ls "$work/again/ckpt" | tr '\n' ' ')"}
verdict 'after a write failure the checkpoint before it stays' "$why"
same 'a write failure, resumed' "$work/again" "$straight" $last -y 1

finish
