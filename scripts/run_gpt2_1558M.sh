#!/usr/bin/env bash
# GPT-2 1558M from scratch on all GPUs of a machine: 1 million tokens per step.
#
#     RANKS=8 DATA='data/web/train_*.bin' bash scripts/run_gpt2_1558M.sh [flags]
#
# Needs: as run_gpt2_124M.sh. By the memory plan (-x 0 prints it), with 4 ranks and -z 1 a rank keeps 9.3 GB of weights and
# gradients, 4.7 GB of the optimizer's state and 2.7 GB of activations a sequence: -b 16 is for GPUs of 80 GB, -b 8 -r 1 for
# 48 GB.
# Run it again to resume where it stopped. Measured: its steps (dev/BENCH.md, "Several GPUs"). Not run to its end yet.
set -eu
. "$(dirname "$0")/start.sh"
OUT=${OUT:-out/gpt2_1558M} BATCH=${BATCH:-16}
start ./train_gpt2cu --recipe gpt2-1558m -b "$BATCH" -v 300 -m 50 -s 5000 -g 256 -n 1000 -nk 2 -nm 10000 -z 1
