#!/usr/bin/env bash
# NeuMF's trainer from outside: data preparation, refusals in one line with status 2, and runs that were stopped, killed or
# had other threads, which equal the straight one bit for bit.
#
#     bash dev/recsys/trainer.sh TRAIN_NCF
set -u
trainer=$(realpath "$1") passed=0 failed=0
here=$PWD work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ok() { passed=$((passed + 1)); echo "ok   $1"; }
fail() { failed=$((failed + 1)); echo "FAIL $1"; }
check() { # what, command...
    local what=$1
    shift
    if "$@"; then ok "$what"; else fail "$what"; fi
}
prepare() { python3 "$here/dev/data/prepare_recsys.py" "$@" 2>&1; }
refused() { # what, part of the message, command...
    local what=$1 part=$2 out status
    shift 2
    out=$("$@" 2>&1)
    status=$?
    if [ "$status" -eq 2 ] && [ "$(wc -l <<<"$out")" -eq 1 ] && grep -qF -- "$part" <<<"$out"; then ok "$what"
    else fail "$what: status $status: $out"; fi
}
cd "$work" || exit 1

# --- data: 60 users, 50 items, 8 ratings each
awk 'BEGIN { for (u = 1; u <= 60; u++) for (k = 0; k < 8; k++)
    print u "\t" (u * 7 + k * k * 3) % 50 + 1 "\t3\t" 1000 + (u * 31 + k * 17) % 400 }' >u.data
sed 's/\t/::/g' u.data >ratings.dat
{ echo userId,movieId,rating,timestamp; sed 's/\t/,/g' u.data; } >ratings.csv
prepare u.data --out r.bin >/dev/null || fail "preparation"
for form in ratings.dat ratings.csv; do
    prepare $form --out form.bin >/dev/null
    check "$form gives the file of u.data" cmp -s r.bin form.bin
done
# Two of user 7's ratings are the newest: the later line is held out. Items 10, 20, 30 become 0, 1, 2.
printf '7\t20\t3\t5\n7\t30\t1\t9\n7\t10\t4\t9\n' >tie.data
prepare tie.data --out tie.bin >/dev/null
check "pairs by time, of equal times the later line held out" \
    test "$(od -An -v -w4 -td4 -j1024 tie.bin | tr -s ' \n' ' ')" = " 0 1 0 2 0 "
printf '1\t2\t3\n' >columns.data
refused "a missing column" "is not user, item, rating and time" prepare columns.data --out x.bin
: >none.data
refused "an empty file of ratings" "holds no ratings" prepare none.data --out x.bin
refused "no file of ratings" "no such file" prepare nothing.data --out x.bin

# --- refusals
run() { # a small run; variables before the command replace its settings, exec=exec replaces the shell
    ${exec:-} "$trainer" -i "${data:-r.bin}" -e "${model:-F=4,E=4,H=8-4}" -b "${batch:-64}" -x 300 -v 50 -n 10 \
        --eval-negatives "${rivals:-20}" --eval-pool "${pool:-unseen}" "$@"
}
cp r.bin bad.bin
printf '\377\377\377\177' | dd of=bad.bin bs=1 seek=1028 conv=notrunc 2>/dev/null
head -c 2000 r.bin >short.bin
: >empty.bin
data=bad.bin refused "an item out of range" "pair 0: user" run -o ""
data=short.bin refused "a file that is cut short" "bytes instead of" run -o ""
data=empty.bin refused "an empty file" "is not a file of ratings" run -o ""
refused "no data" "-i is needed" "$trainer" -o ""
limited() { (ulimit -v 1500000 && run "$@"); }
model=F=4096,E=4096,H=4096-4096-4096-4096-4096 refused "a model larger than memory" "MiB are available" limited -o ""
model=F=4 refused "not a model" "is not like" run -o ""
model=F=4,E=4,H=6 refused "a width that is not a multiple of 4" "multiples of 4" run -o ""
rivals=45 refused "more rivals than unseen items" "has only" run -o ""
batch=20 refused "a batch smaller than a user's rivals" "must be above --eval-negatives" run -o ""
batch=4096 refused "a batch larger than an epoch" "an epoch has" run -o ""
refused "a flag of other trainers" "does not have it" run -o "" --clip 1

# --- the same bits
results() { grep -oE '"step": [0-9]+, "(loss|hr_at_10)": .*' "$1/log.jsonl" | sed -E 's/"(ms|tok_s|mfu)": [^,}]*//g'; }
same() { # what, directory
    if cmp -s whole/model.safetensors "$2/model.safetensors" && diff <(results whole) <(results "$2") >/dev/null; then ok "$1"
    else fail "$1"; fi
}
run -o whole >/dev/null || fail "a run"
check "300 steps and 7 evaluations are logged" test "$(results whole | wc -l)" -eq 307
run -o parts --stop-after 125 >/dev/null && run -o parts -y 1 >/dev/null
same "resumed after 125 steps: the same weights and log" parts
kills=0
for at in 35 80 125 170 215; do
    exec 3< <(exec=exec run -o killed -y 1 2>/dev/null)
    pid=$!
    while read -r line <&3; do
        if [[ $line =~ ^step\ +([0-9]+)/ ]] && [ "${BASH_REMATCH[1]}" -ge $at ]; then break; fi
    done
    kill -KILL $pid
    wait $pid
    [ $? -ne 137 ] || kills=$((kills + 1))
    exec 3<&-
done 2>/dev/null
check "five SIGKILLs hit the run" test $kills -eq 5
run -o killed -y 1 >/dev/null 2>&1
same "five SIGKILLs: the same weights and log" killed
OMP_NUM_THREADS=3 run -o threads >/dev/null
same "three threads: the same weights and log" threads
run -o other --lazy-adam 1 >/dev/null
check "--lazy-adam 1 is another optimizer" test "$(cksum <whole/model.safetensors)" != "$(cksum <other/model.safetensors)"

# --- evaluation
score() { grep -oE 'HR@10 .*' | tail -n 1; }
last=$(run -o whole -y 1 --evaluate 1 | score)
logged=$(run -o again | score)
check "--evaluate 1 gives the last score of the run" test -n "$last" -a "$last" = "$logged"
pooled=$(pool=all rivals=30 run -o whole -y 1 --evaluate 1 | score)
check "a score names its rivals" grep -q "with 30 negatives, pool all" <<<"$pooled"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
