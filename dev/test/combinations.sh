#!/bin/bash
# What recipes add, combined with Muon, NorMuon and sharding: trained ten steps and stopped and resumed in the middle, every
# number finite and the same bits; one, two and four ranks; a run that is killed thirty times. A table for dev/results.
#
#     bash dev/test/combinations.sh PROGRAM [SEED] [KILLS]    from the repository's root; needs mpirun
#
# About two minutes, so it is not part of make test: resume.sh has two of these combinations.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
RANDOM=${2:-7}
kills=${3:-30}
base="-t 16 -b 2 -d 256 -x 10 -l 1e-2 -u 2 -q 0.1 -c 0.1 -v 5 -m 2 -s 0 -n 0"
sizes=L=2,C=16,NH=2,T=16
declare -A flags=([zero-out]="-e $sizes --init zero-out" [tied=0]="-e $sizes,tied=0" [ema]="-e $sizes --ema 0.9 --ema-start 2")
order="zero-out tied=0 ema"

launch() { # RANKS FLAG...: a run that must end without an error
    local ranks=$1
    shift
    if [ "$ranks" -eq 1 ]; then "$PROGRAM" "$@" </dev/null >"$work/stdout" 2>"$work/stderr"
    else mpirun --allow-run-as-root --oversubscribe --bind-to none -np "$ranks" "$PROGRAM" "$@" </dev/null >"$work/stdout" 2>"$work/stderr"; fi
    status=$?
    [ $status -eq 0 ] || fail "$ranks ranks: $*" "$(ended_with 0)"
}
losses() { grep -hE '"(loss|val_loss|ema_val_loss)"' "$1/log.jsonl" | sed 's/, "ms".*//'; }
finite() { [ "$(losses "$1" | grep -c '"loss"')" -eq 10 ] && ! losses "$1" | grep -qE 'null|nan|inf'; }
same() { # OUT REFERENCE
    local f files
    files=$(cd "$2" && find ckpt/00000010 ema -name '*.safetensors' 2>/dev/null)
    [ -n "$files" ] || return 1
    for f in $files; do cmp -s "$1/$f" "$2/$f" || return 1; done
    cmp -s <(losses "$1") <(losses "$2")
}

echo "| optimizer | with | -z 0, one rank | -z 1, two ranks | last loss |"
echo "|---|---|---|---|---|"
for optimizer in muon normuon; do
    for with in $order; do
        row="| $optimizer | $with |" why=
        for zero in 0 1; do
            rm -rf whole half
            all="$base ${flags[$with]} --optimizer $optimizer -z $zero"
            [ $zero = 1 ] && all=${all/-b 2/-b 1}
            launch $((zero + 1)) $all -o whole
            launch $((zero + 1)) $all --stop-after 5 -o half
            launch $((zero + 1)) -y 1 -o half
            grep -q '| steps 6 to 10 |' "$work/stdout" || row+=' not resumed,' why=no
            finite whole && row+=' finite,' || row+=' not finite,' why=no
            same half whole && row+=' same bits |' || row+=' other bits |' why=no
        done
        echo "$row $(losses whole | sed -nE 's/.*"loss": ([0-9.]+).*/\1/p' | tail -n 1) |"
        if [ -z "$why" ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    done
done
echo
if [[ $PROGRAM != *bert* ]]; then  # BERT masks each of equal sequences in its own way
    # All sequences are equal and each rank has two micro-batches, so that sums of gradients are exact.
    { printf '\x88\xd8\x34\x01\x01\0\0\0\x01\x04\0\0' && head -c 1012 /dev/zero
      for _ in {1..64}; do printf 'a\0b\0c\0a\0d\0e\0a\0f\0g\0h\0b\0i\0j\0k\0l\0m\0'; done && printf 'a\0'; } >equal.bin
    for with in $order; do
        why=
        for ranks in 1 2 4; do
            launch $ranks -t 16 -i equal.bin -x 8 -b 1 -d $((32 * ranks)) -l 1e-2 -v 0 -s 0 -n 0 ${flags[$with]} \
                --optimizer normuon -z 1 -o "equal$ranks"
            files=$(cd equal1 && find . -maxdepth 2 -name model.safetensors)
            [ -n "$files" ] || why='there is no model'
            for f in $files; do
                cmp -s "equal$ranks/$f" "equal1/$f" || why="$ranks ranks: $f differs"
            done
        done
        verdict "1, 2 and 4 ranks, -z 1, normuon with $with: the same bits" "$why"
        rm -rf equal1 equal2 equal4
    done
fi

# Killed at random while it saves after every step; the last process ends by itself.
together="-e $sizes,tied=0 --init zero-out --ema 0.9 --keep-best 1 --optimizer normuon"
why= long="${base/-x 10/-x 600} $together"
launch 1 $long -o whole600
long=${long/-n 0/-n 1}
killed=0
"$PROGRAM" $long -o killed </dev/null >/dev/null 2>&1 & pid=$!
while [ $killed -lt "$kills" ]; do
    sleep 0.$((1 + RANDOM % 4))$((RANDOM % 10))
    kill -KILL $pid 2>/dev/null || break
    wait $pid 2>/dev/null
    killed=$((killed + 1)) again="-y 1"
    ls killed/ckpt 2>/dev/null | grep -qE '^[0-9]+$' || again="$long --overwrite 1"
    "$PROGRAM" $again -o killed </dev/null >/dev/null 2>&1 & pid=$!
done
wait $pid || why="the last process ended with status $?"
[ $killed = "$kills" ] || why="only $killed kills of $kills hit the run"
for f in ckpt/00000600/model ckpt/00000600/optimizer ema/model; do cmp -s "killed/$f.safetensors" "whole600/$f.safetensors" || why="$f differs"; done
[ "$(losses whole600 | grep -c '"loss"')" -eq 600 ] || why=${why:-'no run of 600 steps to compare with'}
cmp -s <(losses killed) <(losses whole600) || why=${why:-'the losses differ'}
verdict "killed $killed times (SIGKILL), all of these together: the same bits" "$why"
finish
