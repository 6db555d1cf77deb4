#!/usr/bin/env bash
# The recommenders' trainers from outside: data preparation, refusals in one line with status 2, and runs that were
# stopped or had other threads, which equal the straight one bit for bit. Then DLRM's AUC.
#
#     bash dev/recsys/trainer.sh TRAIN_DLRM TRAIN_NCF
set -u
dlrm=$(realpath "$1") ncf=$(realpath "$2")
PROGRAM=$ncf
# shellcheck source=dev/test/shell.sh
. dev/test/shell.sh
check() { # what, command...
    local what=$1
    shift
    if "$@"; then ok "$what"; else fail "$what" "${*:1:2}"; fi
}
prepare() { python3 "$root/dev/data/prepare_recsys.py" "$@" 2>&1; }
criteo() { prepare "$@" --format criteo; }
# Memory is limited, but not for AddressSanitizer, which needs the address space.
refused() { # instead of that of shell.sh: what, part of the message, command...
    local what=$1 part=$2 out status
    shift 2
    out=$( (is_sanitized || ulimit -v 1500000; "$@") 2>&1)
    status=$?
    if [ "$status" -eq 2 ] && [ "$(wc -l <<<"$out")" -eq 1 ] && grep -qF -- "$part" <<<"$out"; then ok "$what"
    else fail "$what" "status $status: $out"; fi
}
put() { printf "$2" | dd of="$1" bs=1 seek="$3" conv=notrunc 2>/dev/null; } # file, bytes, place

# --- ratings: 60 users, 50 items, 8 ratings each
awk 'BEGIN { for (u = 1; u <= 60; u++) for (k = 0; k < 8; k++)
    print u "\t" (u * 7 + k * k * 3) % 50 + 1 "\t3\t" 1000 + (u * 31 + k * 17) % 400 }' >u.data
sed 's/\t/::/g' u.data >ratings.dat
{ echo userId,movieId,rating,timestamp; sed 's/\t/,/g' u.data; } >ratings.csv
{ echo user,item,stars,when; awk '{ printf "A%03d,B%03d,%s,%s\n", $1, $2, $3, $4 }' u.data; } >texts.csv
for form in u.data ratings.dat ratings.csv texts.csv; do prepare $form --out $form.bin >/dev/null; done
check "four forms of ratings give one file, also ids that are text" \
    test "$(cksum u.data.bin ratings.dat.bin ratings.csv.bin texts.csv.bin | cut -d' ' -f1 | uniq | wc -l)" -eq 1
# Two of user 7's ratings are the newest: the later line is held out. Items 10, 20, 30 become 0, 1, 2.
printf '7\t20\t3\t5\n7\t30\t1\t9\n7\t10\t4\t9\n' >tie.data
prepare tie.data --out tie.bin >/dev/null
check "pairs by time, of equal times the later line held out" \
    test "$(od -An -v -w4 -td4 -j1024 tie.bin | tr -s ' \n' ' ')" = " 0 1 0 2 0 "

# --- clicks: a line has label, 13 integers, 26 categories. Integer i is i, but the first is missing, -9 or 5. In the
# first table bb is the most frequent of the training samples; cc and dd are held out only.
click() { printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$(seq -s$'\t' 2 13)" "$3" "$(seq -s$'\t' 2 25)" "$4"; }
{ click 1 '' aa 1; click 0 -9 bb 2; click 1 5 bb ''; click 0 5 cc 3; click 1 5 dd ''; } >clicks.tsv
criteo clicks.tsv --out c.bin --held-out 2 --threshold 1 >/dev/null
columns() { od -An -v -w160 -t"$1" -j1024 c.bin | awk "{ printf \"%s %s %s, \", $2 }"; } # type, three of each record
check "header: 26 tables, 13 numbers, 3 and 2 samples; the first table has 2 values and the others" \
    test "$(od -An -v -td4 -N36 c.bin | tr -s ' \n' ' ')" = " 20261124 1 26 13 3 0 2 0 3 "
check "labels; ids by frequency, 0 for a value without a training sample; a missing category is a value" \
    test "$(columns d4 '$1, $15, $40')" = "1 2 2, 0 1 3, 1 1 1, 0 0 0, 1 0 1, "
check "ln(x + 3); a missing integer counts as 0, -9 as -2" test "$(columns f4 '$2, $3, ""')" = \
    "1.0986123 1.609438 , 0 1.609438 , 2.0794415 1.609438 , 2.0794415 1.609438 , 2.0794415 1.609438 , "
criteo clicks.tsv --out rare.bin --held-out 2 --threshold 2 >/dev/null
check "--threshold 2 leaves bb" test "$(od -An -td4 -j32 -N4 rare.bin | tr -d ' ')" = 2
split -l 2 clicks.tsv day_
criteo day_aa day_ab day_ac --out days.bin --held-out 2 >/dev/null
check "three files give the file of one" cmp -s c.bin days.bin
sed '2s/^0/7/' clicks.tsv >label.tsv
refused "a label that is not 0 or 1" "label.tsv:2: label '7'" criteo label.tsv --out x.bin
sed '3s/5/five/' clicks.tsv >integer.tsv
refused "an integer that is none" "integer.tsv:3: 'five'" criteo integer.tsv --out x.bin --held-out 1

# --- refusals
run_ncf() { # a small run; variables before the command replace its settings
    "$ncf" -i "${data:-u.data.bin}" -e "${model:-F=4,E=4,H=8-4}" -b "${batch:-64}" -x 300 -v 50 -n 10 \
        --eval-negatives "${rivals:-20}" --eval-pool "${pool:-unseen}" -l "${lr:-1e-3}" "$@"
}
run_dlrm() {
    "$dlrm" -e "${model:-bottom=16-8,top=16}" --tables 4 --rows "${rows:-30}" --samples "${samples:-8000}" \
        --held-out "${held_out:-500}" -b "${batch:-64}" -l "${lr:-1}" -x 300 -v 50 -n 10 "$@"
}
of_file() { "$dlrm" -i "$1" -e bottom=8,top=8 -b 2 -l 1 -x 3 -o "" "${@:2}"; }
cp u.data.bin bad.bin && put bad.bin '\377\377\377\177' 1028
head -c 2000 u.data.bin >short.bin
cp c.bin id.bin && put id.bin '\3' $((1024 + 2 * 160 + 56))
cp c.bin number.bin && put number.bin '\0\0\300\177' 1028
head -c 1124 c.bin >cut.bin
refused "training without ratings" "no ratings: give" "$ncf" -o ""
data=bad.bin refused "an item out of range" "pair 0: user" run_ncf -o ""
data=short.bin refused "ratings that are cut short" "bytes instead of" run_ncf -o ""
model=F=4 refused "not a model" "is not like" run_ncf -o ""
rivals=45 refused "more rivals than unseen items" "has only" run_ncf -o ""
batch=20 refused "a batch smaller than a user's rivals" "must be above --eval-negatives" run_ncf -o ""
refused "train_ncf has no --optimizer" "unknown flag '--optimizer'" run_ncf -o "" --optimizer lamb
refused "train_dlrm has no --beta1: SGD" "unknown flag '--beta1'" run_dlrm -o "" --beta1 0.8
refused "no evaluation of random weights" "needs a trained model" run_dlrm -o "" --evaluate 1
refused "an id out of range" "sample 2: a label" of_file id.bin
refused "a NaN among the numbers" "sample 0: a label" of_file number.bin
refused "clicks that are cut short" "which are not 3 and 2 samples" of_file cut.bin
refused "ratings for train_dlrm" "is not a file of clicks" of_file u.data.bin
refused "flags of generated data beside a file" "--rows: is of generated data" of_file c.bin --rows 9
rows=2000000000 refused "more rows than 2^31" "rows; 2147483646 are known" run_dlrm -o ""
model=bottom=16-9,top=16 refused "a width that is not a multiple of 8" "multiples of 8" run_dlrm -o ""
batch=8001 refused "a batch larger than the data" "an epoch has" run_dlrm -o ""
if is_sanitized; then skip "models larger than memory" "no limit of memory"
else
    model=F=256,E=4096,H=4096-4096-4096-4096-4096-256 refused "an MLP larger than memory" "are available" run_ncf -o ""
    rows=100000000 refused "tables larger than memory" "are available" run_dlrm -o ""
fi
check "clicks of a file are trained on" grep -q "AUC 0.*of 2 held-out" <(of_file c.bin)
# All held-out labels are 1, those for training are not.
{ head -n 3 clicks.tsv; sed -n '5p;5p' clicks.tsv; } >ones.tsv
criteo ones.tsv --out ones.bin --held-out 2 >/dev/null
check "the AUC is that of the held-out samples" grep -qE "AUC -?nan of 2 held-out" <(of_file ones.bin)

# --- the same bits
results() {
    grep -oE '"step": [0-9]+, "(loss|val_loss|hr_at_10)": .*' "$1/log.jsonl" | sed -E 's/"(ms|tok_s|mfu)": [^,}]*//g'
}
output() { results "$1" && cksum <"$1/model.safetensors"; }
acts() { # trainer, flag...: dev/test/equal.txt has flags that are not the recommenders' own
    "run_$1" -o other --overwrite 1 "${@:2}" >/dev/null
    check "train_$1 ${*:2} acts" test "$(output "$1-whole")" != "$(output other)"
}
score() { grep -oE '(HR@10|AUC) .*' | tail -n 1; }
for trainer in 'ncf 32' 'dlrm 125'; do # and the steps of an epoch
    set -- $trainer
    run=run_$1 whole=$1-whole
    last=$($run -o $whole | score)
    check "train_$1: 300 steps and 7 evaluations are logged" test "$(results $whole | wc -l)" -eq 307
    $run -o $1-parts --stop-after 125 >/dev/null && $run -o $1-parts -y 1 >/dev/null
    check "train_$1: resumed after 125 steps: the same weights and log" test "$(output $1-parts)" = "$(output $whole)"
    OMP_NUM_THREADS=3 $run -o $1-threads >/dev/null
    check "train_$1: three threads: the same weights and log" test "$(output $1-threads)" = "$(output $whole)"
    check "train_$1: --evaluate 1 gives the last score of the run" \
        test "$($run -o $whole -y 1 --evaluate 1 | score)" = "${last:-none}"
    # Without updates, a step's loss is that of its samples.
    lr=0 $run -o order --overwrite 1 >/dev/null
    grep -o '"loss": [0-9.]*' order/log.jsonl | head -n $((2 * $2)) >losses
    check "train_$1: two epochs have two orders" test "$(sort losses | uniq -d | wc -l)" -lt 2
done
for flag in negatives=2 dropout=0.5 beta1=0.5 seed=7; do acts ncf "--${flag%=*}" "${flag#*=}"; done
acts dlrm --seed 7
rows=9 acts dlrm
samples=4000 acts dlrm
held_out=100 acts dlrm
refused "a resumed run keeps its data" "contradicts" run_dlrm -o dlrm-whole -y 1 --seed 9
run_dlrm -o dlrm-profile --profile 2 >/dev/null
check "--profile writes a report" grep -q interaction_forward dlrm-profile/profile/kernels.csv
pooled=$(pool=all rivals=30 run_ncf -o ncf-whole -y 1 --evaluate 1 | score)
check "a score names its rivals" grep -q "with 30 negatives, pool all" <<<"$pooled"

# --- DLRM within 0.005 of the true logit's AUC, which is between 0.75 and 0.85 (with the default settings: dev/LOG.md).
auc() { "$dlrm" -o "" --rows 20 --samples 700000 -l 3 -v 20000 | score; }
if is_sanitized; then skip "AUC" "too slow under AddressSanitizer"
else
    check "AUC of DLRM and of the true logit" awk \
        '{ exit !($NF >= 0.75 && $NF <= 0.85 && $2 >= $NF - 0.005 && $2 <= $NF + 0.005) }' <(auc)
fi
finish
