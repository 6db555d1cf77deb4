#!/usr/bin/env bash
# GPT-2 1558M from scratch on all GPUs of a machine: 1 million tokens a step.
#
#     RANKS=8 DATA='data/web/train_*.bin' bash scripts/run_gpt2_1558M.sh [flags]
#
# Needs: as run_gpt2_124M.sh. With 4 ranks and -z 1 a rank keeps 9.4 GB of weights and gradients, 4.7 GB of the optimizer's
# state, and 3.6 GB of activations a sequence: -b 16 fits 80 GB, -b 8 -r 1 fits 48 GB.
# Goes on where it stopped when started again. Reached: dev/BENCH.md, "Several GPUs".
set -eu
cd "$(dirname "$0")/.."
RANKS=${RANKS:-$(nvidia-smi -L | wc -l)} BATCH=${BATCH:-16} OUT=${OUT:-out/gpt2_1558M} DATA=${DATA:?"name the token shards: DATA='folder/train_*.bin'"}
make -s gpu
start=
[ "$RANKS" -eq 1 ] || start="mpirun -np $RANKS --bind-to none"
if [ -d "$OUT/ckpt" ]; then exec $start ./train_gpt2cu -y 1 -o "$OUT" "$@"; fi
exec $start ./train_gpt2cu -i "$DATA" -e d48 -b "$BATCH" -t 1024 -d 1048576 -o "$OUT" \
    -l 6e-4 -k cosine -u 700 -q 0.1 -c 0.1 -v 300 -m 50 -s 5000 -g 256 -n 1000 -nk 2 -nm 10000 -z 1 "$@"
