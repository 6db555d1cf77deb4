#!/usr/bin/env bash
# Train a small model on stories about a small world, and let it speak: `make quickstart`, `make quickstart-bert`.
#
#     bash scripts/quickstart.sh TRAINER PROGRAM      train_gpt2 and use_gpt2, or those of BERT; writes out/quickstart*
#
# A step's line is shown every 500 steps. The exam's questions are answered by the most likely tokens; "notlast" has those
# whose answer is not the last person or place named.
set -eu -o pipefail
trainer=$1 program=${2:-}
every_500() { awk '!/ tok\/s / || /^step +[0-9]*[05]00\// { print; fflush() }'; }
train() { # output folder, flags...
    echo "$trainer ${*:2} -o $1 --overwrite 1"
    "$trainer" "${@:2}" -o "$1" --overwrite 1 | every_500
}
case $trainer in
    *train_gpt2*)
        # Two layers of 64 channels, 14,000 steps of 8 blocks.
        out=out/quickstart exam=data/builtin/exam.bin,data/builtin/notlast.bin
        train $out -e L=2,C=64,NH=8,T=64 -b 8 -x 14000 -l 2e-3 -u 100 -q 0.05 -c 0.1 -v 3500 -m 100 -h 3500 --choices $exam \
            -s 0 -n 7000
        printf '\nA story by the model:\n\n'
        "$program" -e $out --generate 63 --temperature 0.8 2>/dev/null | sed 's/<|endoftext|>.*//'
        echo
        ;;
    *train_bert*)
        # Without next sentences, half of which are pieces of stories that answer no question.
        out=out/quickstart-bert exam=data/builtin/bert/exam.bin,data/builtin/bert/notlast.bin
        train $out -e L=2,C=64,NH=4,T=72 -b 8 -x 40000 -l 2e-3 -u 500 --nsp 0 --mask-fraction 0.3 -v 10000 -h 10000 \
            --choices $exam -s 0 -n 20000
        echo "a unigram has a loss of $(cat data/builtin/bert/val_unigram.txt) on the validation words"
        "$program" -e $out --nsp 0 --fill "Anna takes the ball. Who has the ball? Anna has the ball. Tom goes to the park. \
Who has the ball? [MASK] has the ball. Mia goes to the barn. Where is Tom? Tom is in the [MASK]."
        ;;
    *) echo "error: usage: quickstart.sh TRAINER PROGRAM; '$trainer' is neither a train_gpt2 nor a train_bert" >&2; exit 2 ;;
esac
echo "log, loss plot and a Hugging Face model directory: $out"
