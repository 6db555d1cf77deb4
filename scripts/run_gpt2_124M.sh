#!/usr/bin/env bash
# GPT-2 124M from scratch on all GPUs of a machine: 0.5 million tokens a step, as published for GPT-3's size of that name.
#
#     RANKS=8 DATA='data/web/train_*.bin' bash scripts/run_gpt2_124M.sh [flags]
#
# Needs: tokens in GPT-2's vocabulary (dev/data/prepare_gpt2.py makes them from text), train_* and val_* shards; GPUs of
# 80 GB for -b 64, else a smaller BATCH; mpirun where RANKS is above 1.
# Goes on where it stopped when started again. Reached: dev/BENCH.md, "Several GPUs".
set -eu
cd "$(dirname "$0")/.."
RANKS=${RANKS:-$(nvidia-smi -L | wc -l)} BATCH=${BATCH:-64} OUT=${OUT:-out/gpt2_124M} DATA=${DATA:?"name the token shards: DATA='folder/train_*.bin'"}
make -s gpu
start=
[ "$RANKS" -eq 1 ] || start="mpirun -np $RANKS --bind-to none"
if [ -d "$OUT/ckpt" ]; then exec $start ./train_gpt2cu -y 1 -o "$OUT" "$@"; fi
exec $start ./train_gpt2cu -i "$DATA" -e d12 -b "$BATCH" -t 1024 -d 524288 -o "$OUT" \
    -l 6e-4 -u 700 -q 0.0 -c 0.1 -v 250 -m 100 -s 5000 -g 256 -n 1000 -nk 2 -nm 10000 -z 1 "$@"
