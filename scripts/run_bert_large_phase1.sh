#!/usr/bin/env bash
# BERT-large, phase 1 of the published recipe: sequences of 128, LAMB, 64 K sequences a step, 7,038 steps.
#
#     RANKS=8 DATA='data/books/train_*.bin' bash scripts/run_bert_large_phase1.sh [flags]
#
# Needs: sentences as dev/data/prepare_bert.py writes them, train_* and val_* files; GPUs of 80 GB for -b 256.
# Goes on where it stopped when started again; phase 2 is run_bert_large_phase2.sh. Reached: dev/BENCH.md, "Several GPUs".
set -eu
cd "$(dirname "$0")/.."
RANKS=${RANKS:-$(nvidia-smi -L | wc -l)} BATCH=${BATCH:-256} OUT=${OUT:-out/bert_large_phase1} DATA=${DATA:?"name the files: DATA='folder/train_*.bin'"}
make -s gpu
start=
[ "$RANKS" -eq 1 ] || start="mpirun -np $RANKS --bind-to none"
if [ -d "$OUT/ckpt" ]; then exec $start ./train_bertcu -y 1 -o "$OUT" "$@"; fi
exec $start ./train_bertcu -i "$DATA" -e bert-large -b "$BATCH" -t 128 -d $((65536 * 128)) -x 7038 -o "$OUT" \
    --optimizer lamb -l 6e-3 -k poly --poly-power 0.5 -u 2000 -c 0.01 --beta2 0.999 --eps 1e-6 --dropout 0.1 \
    -v 200 -m 100 -s 0 -n 200 -nk 2 -z 1 "$@"
