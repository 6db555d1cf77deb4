#!/usr/bin/env bash
# BERT-large, phase 2: sequences of 512, 32 K sequences a step, 1,563 steps, from phase 1's weights and moments.
#
#     RANKS=8 DATA='data/books/train_*.bin' PHASE1=out/bert_large_phase1 bash scripts/run_bert_large_phase2.sh [flags]
#
# Needs: what phase 1 needed, and its run.
# Goes on where it stopped when started again. Reached: dev/BENCH.md, "Several GPUs".
set -eu
cd "$(dirname "$0")/.."
RANKS=${RANKS:-$(nvidia-smi -L | wc -l)} BATCH=${BATCH:-64} OUT=${OUT:-out/bert_large_phase2} DATA=${DATA:?"name the files: DATA='folder/train_*.bin'"}
PHASE1=${PHASE1:-out/bert_large_phase1}
make -s gpu
start=
[ "$RANKS" -eq 1 ] || start="mpirun -np $RANKS --bind-to none"
if [ -d "$OUT/ckpt" ]; then exec $start ./train_bertcu -y 1 -o "$OUT" "$@"; fi
exec $start ./train_bertcu -i "$DATA" --phase2 "$PHASE1" -b "$BATCH" -t 512 -d $((32768 * 512)) -x 1563 -o "$OUT" \
    --optimizer lamb -l 4e-3 -k poly --poly-power 0.5 -u 200 -c 0.01 --beta2 0.999 --eps 1e-6 --dropout 0.1 \
    -v 100 -m 100 -s 0 -n 100 -nk 2 -z 1 "$@"
