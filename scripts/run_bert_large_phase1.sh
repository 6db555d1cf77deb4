#!/usr/bin/env bash
# BERT-large, phase 1 of the published recipe: sequences of 128, LAMB, 64 K sequences per step, 7,038 steps.
#
#     RANKS=8 DATA='data/books/train_*.bin' bash scripts/run_bert_large_phase1.sh [flags]
#
# Needs: sentences from dev/data/prepare_bert.py (train_* and val_* files); GPUs of 80 GB for -b 256. Run it again to
# resume where it stopped; phase 2 is run_bert_large_phase2.sh. Measured: the step on one GPU (dev/BENCH.md, "BERT-large
# on the GPU"); two GPUs, with as many micro-batches as eight would have, reach 100 % of linear scaling ("Several
# GPUs").
set -eu
. "$(dirname "$0")/start.sh"
OUT=${OUT:-out/bert_large_phase1} BATCH=${BATCH:-256}
start ./train_bertcu --recipe bert-large-phase1 -b "$BATCH" -v 200 -m 100 -s 0 -n 200 -nk 2 -z 1
