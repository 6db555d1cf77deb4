#!/usr/bin/env bash
# BERT-large, phase 2: sequences of 512, 32 K sequences per step, 1,563 steps, from phase 1's weights and moments.
#
#     RANKS=8 DATA='data/books/train_*.bin' PHASE1=out/bert_large_phase1 bash scripts/run_bert_large_phase2.sh [flags]
#
# Needs: the data of phase 1 and its run.
# Run it again to resume where it stopped. Measured: the step on one GPU (dev/BENCH.md, "BERT-large on the GPU"). Not
# run on several GPUs yet.
set -eu
. "$(dirname "$0")/start.sh"
OUT=${OUT:-out/bert_large_phase2} BATCH=${BATCH:-64}
start ./train_bertcu --recipe bert-large-phase2 --phase2 "${PHASE1:-out/bert_large_phase1}" -b "$BATCH" \
    -v 100 -m 100 -s 0 -n 100 -nk 2 -z 1
