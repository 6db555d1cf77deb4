#!/usr/bin/env bash
# GPT-2 124M from scratch on all GPUs of a machine: 0.5 million tokens per step, as published for the smallest GPT-3.
#
#     RANKS=8 DATA='data/web/train_*.bin' bash scripts/run_gpt2_124M.sh [flags]
#
# Needs: tokens in GPT-2's vocabulary (dev/data/prepare_gpt2.py makes them from text), train_* and val_* shards; GPUs of
# 80 GB for -b 64, else a smaller BATCH; mpirun if RANKS is above 1.
# Run it again to resume where it stopped. Measured: its steps (dev/BENCH.md, "Several GPUs"). Not run to its end yet.
set -eu
. "$(dirname "$0")/start.sh"
OUT=${OUT:-out/gpt2_124M} BATCH=${BATCH:-64}
start ./train_gpt2cu --recipe "${RECIPE:-llmc}" -b "$BATCH" -v 250 -m 100 -s 5000 -g 256 -n 1000 -nk 2 -nm 10000 -z 1
