#!/usr/bin/env bash
# Compare the speed of our trainer and PyTorch (dev/reference/gpt2.py), in turn on the same GPU.
#
#     bash scripts/compare_peers.sh [--rounds N] [SIZE:BATCH ...]        default: --rounds 2 d12:64 d48:16
#
# PYTHON is an interpreter that has PyTorch with CUDA (default python3). Each round runs ours, then PyTorch's, so that a
# warming GPU slows both. Prints "RESULT name key=value ..." for each run and the ratio of the last round. Both times are
# the median step in milliseconds, T=1024, bf16. Ours includes data loading and logging, but not the first 5 steps, which
# choose matmul algorithms. Exit status 0 only if every run gave a time.
set -u
cd "$(dirname "$0")/.."
rounds=2 cases=()
while [ $# -gt 0 ]; do
    case $1 in
        --rounds) rounds=${2:?--rounds needs a number}; shift 2 ;;
        d*:*) cases+=("$1"); shift ;;
        --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "usage: compare_peers.sh [--rounds N] [SIZE:BATCH ...]; see --help" >&2; exit 2 ;;
    esac
done
[ ${#cases[@]} -gt 0 ] || cases=(d12:64 d48:16)
python=${PYTHON:-python3} steps=55 failed=0 ours='' theirs=''
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
[ -x ./train_gpt2cu ] || { echo "error: ./train_gpt2cu is not built; run make on a machine with nvcc" >&2; exit 2; }
"$python" -c 'import torch' 2>/dev/null || { echo "error: $python has no PyTorch; set PYTHON=... to an interpreter that has it" >&2; exit 2; }

field() { sed -nE "s/.* $2=([^ ]+).*/\1/p" <<<"$1"; }
column() { # log.jsonl, key: its values in the steps after the fifth
    sed -nE "s/.*\"step\": ([0-9]+), \"loss\".*\"$2\": ([0-9.]+).*/\1 \2/p" "$1" | awk '$1 > 5 {print $2}'
}
median() { sort -n | awk '{a[NR] = $1} END {if (NR) print (a[int((NR + 1) / 2)] + a[int(NR / 2) + 1]) / 2}'; }

run_ours() { # size batch
    local out=$work/$1
    ours=''
    ./train_gpt2cu -e "$1" -b "$2" -t 1024 -x $steps -v 0 -s 0 -n 0 --overwrite 1 -o "$out" >"$work/log" 2>&1 &&
        ours=$(column "$out/log.jsonl" ms | median)
    if [ -n "$ours" ]; then
        echo "RESULT train_gpt2cu size=$1 B=$2 T=1024 ms=$ours tok_s=$(awk "BEGIN {printf \"%.0f\", $2 * 1024000 / $ours}")" \
            "mfu=$(column "$out/log.jsonl" mfu | median)"
    else
        failed=1
        echo "FAIL train_gpt2cu size=$1 B=$2" && tail -n 5 "$work/log"
    fi
    rm -rf "$out"
}
run_theirs() { # size batch
    local line
    line=$("$python" dev/reference/gpt2.py --size "$1" -b "$2" -t 1024 2>"$work/log" | grep '^RESULT')
    theirs=$(field "$line" ms)
    if [ -n "$theirs" ]; then echo "$line"; else failed=1 && echo "FAIL torch_gpt2 size=$1 B=$2" && tail -n 5 "$work/log"; fi
}

echo "compare_peers on $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), commit ${GPU_CHECK_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || head -n 1 .commit 2>/dev/null || echo unknown)}"
for case in "${cases[@]}"; do
    size=${case%%:*} batch=${case##*:}
    for ((round = 0; round < rounds; round++)); do
        run_ours "$size" "$batch"
        run_theirs "$size" "$batch"
    done
    [ -n "$ours" ] && [ -n "$theirs" ] &&
        echo "RESULT compare size=$size B=$batch T=1024 torch_ms_over_ours=$(awk "BEGIN {printf \"%.3f\", $theirs / $ours}")"
done
exit $failed
