#!/usr/bin/env bash
# What only a GPU can show: builds on the machine it runs on, tests every kernel against its reference, the trainer end to
# end, the sanitizers, and measures. Each part fits ten minutes.
#
#     bash scripts/gpu_check.sh [--part build|ops|e2e|san|bench] [--out FOLDER]      (no part: all of them)
#
# Writes FOLDER/gpu_check.txt (default out/gpu_check): "RESULT name key=value ..." for every figure, "N passed, N failed"
# at its end, and the whole logs beside it. Exit status 0 only if everything passed.
set -u
cd "$(dirname "$0")/.."
parts="build ops e2e san bench" out=out/gpu_check
while [ $# -gt 0 ]; do
    case $1 in
        --part) parts=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        *) echo "usage: gpu_check.sh [--part build|ops|e2e|san|bench] [--out FOLDER]" >&2; exit 2 ;;
    esac
done
mkdir -p "$out"
report=$out/gpu_check.txt
passed=0 failed=0
say() { echo "$*" | tee -a "$report"; }
ok() { passed=$((passed + 1)); say "ok   $*"; }
bad() { failed=$((failed + 1)); say "FAIL $*"; }
check() { # name, command...: passes if the command does
    local name=$1 log
    log=$out/${1// /_}.log
    shift
    if "$@" >"$log" 2>&1; then ok "$name"; else bad "$name (the end of its log follows)"; tail -n 12 "$log" | tee -a "$report"; fi
}
totals() { # add the totals of a test program's log
    local p f
    p=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$out/$1.log" | tail -n 1 | sed -nE 's/^([0-9]+) passed.*/\1/p')
    f=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$out/$1.log" | tail -n 1 | sed -nE 's/.* ([0-9]+) failed.*/\1/p')
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0}))
    say "$1: ${p:-0} passed, ${f:-0} failed"
    grep '^FAIL' "$out/$1.log" | head -n 20 | tee -a "$report"
}
tests() { # name, command...: a program that counts its own tests
    local name=$1
    shift
    "$@" >"$out/$name.log" 2>&1 || { grep -qE '^[0-9]+ passed, [0-9]+ failed' "$out/$name.log" || { bad "$name ended early"; tail -n 5 "$out/$name.log" | tee -a "$report"; }; }
    totals "$name"
}
median_ms() { # log.jsonl: the median of "ms" without the first five steps
    sed -nE 's/.*"step": ([0-9]+), "loss".*"ms": ([0-9.]+).*/\1 \2/p' "$1" | awk '$1 > 5 {print $2}' | sort -n | awk '{a[NR] = $1} END {print a[int((NR + 1) / 2)]}'
}
field() { sed -nE "s/.*\"$2\": ([0-9.eE+-]+).*/\1/p" "$1" | tail -n 1; }

: >"$report"
say "gpu_check of commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown) on $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), $(nvcc --version | tail -n 2 | head -n 1)"

for part in $parts; do
    say "== $part"
    case $part in
        build)
            make -s -j "$(nproc)" train_gpt2 data/builtin/train.bin train_gpt2cu build/bf16/opscu build/bf16/test_gpt2cu \
                >"$out/build.log" 2>&1 && ok build_bf16 || { bad build_bf16; tail -n 20 "$out/build.log" | tee -a "$report"; }
            check build_fp32 make -s -j "$(nproc)" PRECISION=fp32 build/fp32/opscu build/fp32/test_gpt2cu build/fp32/train_gpt2cu
            if grep -i spill "$out"/build*.log; then bad "no register spills"; else ok "no register spills"; fi
            ;;
        ops)
            tests ops_bf16 build/bf16/opscu test
            tests ops_fp32 build/fp32/opscu test
            ;;
        e2e)
            tests gpt2_fp32 build/fp32/test_gpt2cu
            tests gpt2_bf16 build/bf16/test_gpt2cu
            run="-e L=4,C=128,NH=4,V=257,T=256 -b 4 -x 20 --dropout 0.1 -v 0 -s 0 -n 0 --overwrite 1"
            check cpu_20_steps ./train_gpt2 $run -o "$out/cpu"
            check gpu_20_steps build/fp32/train_gpt2cu $run -o "$out/gpu"
            check gpu_20_steps_again build/fp32/train_gpt2cu $run -o "$out/gpu2"
            check bf16_20_steps ./train_gpt2cu $run -o "$out/bf16"
            check bf16_20_steps_again ./train_gpt2cu $run -o "$out/bf16_2"
            worst=$(paste <(sed -nE 's/.*"loss": ([0-9.]+),.*/\1/p' "$out/cpu/log.jsonl") <(sed -nE 's/.*"loss": ([0-9.]+),.*/\1/p' "$out/gpu/log.jsonl") |
                awk '{d = $1 - $2; if (d < 0) d = -d; if (d > m) m = d; n++} END {print (n == 20 ? m + 0 : 99)}')
            say "RESULT cpu_against_gpu_fp32 steps=20 max_loss_difference=$worst tol=1e-4"
            if awk "BEGIN {exit !($worst <= 1e-4)}"; then ok cpu_against_gpu_fp32; else bad cpu_against_gpu_fp32; fi
            if cmp -s "$out/gpu/model.safetensors" "$out/gpu2/model.safetensors"; then ok "fp32 repeats bit for bit"; else bad "fp32 repeats bit for bit"; fi
            if cmp -s "$out/bf16/model.safetensors" "$out/bf16_2/model.safetensors"; then ok "bf16 repeats bit for bit"; else bad "bf16 repeats bit for bit"; fi
            check bf16_first_10 ./train_gpt2cu $run --stop-after 10 -o "$out/bf16_3"
            check bf16_resumed ./train_gpt2cu -y 1 -o "$out/bf16_3"
            if cmp -s "$out/bf16/model.safetensors" "$out/bf16_3/model.safetensors"; then ok "bf16 resumed equals straight"; else bad "bf16 resumed equals straight"; fi
            rm -rf "$out"/{cpu,gpu,gpu2,bf16,bf16_2,bf16_3}/ckpt
            ;;
        san)
            # Every op at its test sizes under each tool. cuBLASLt's own kernels are not ours to check: racecheck and
            # initcheck leave matmul out.
            for tool in memcheck racecheck initcheck synccheck; do
                for op in layernorm dropout gather gelu classifier embedding adamw global_norm sum attention matmul; do
                    [ "$op" = matmul ] && [ $tool != memcheck ] && continue
                    check "$tool $op" timeout 200 compute-sanitizer --tool $tool --error-exitcode 9 build/bf16/opscu test $op
                done
            done
            ;;
        bench)
            check bench_ops build/bf16/opscu bench
            grep -E "GFLOP|TFLOP|GB/s" "$out/bench_ops.log" | tee -a "$report"
            for size in "d12 64" "d24 32" "d36 16" "d48 16"; do
                read -r model batch <<<"$size"
                check "train_$model" ./train_gpt2cu -e "$model" -b "$batch" -t 1024 -x 55 -v 0 -s 0 -n 0 --overwrite 1 --profile 5 -o "$out/train_$model"
                ms=$(median_ms "$out/train_$model/log.jsonl")
                say "RESULT train_gpt2cu size=$model B=$batch T=1024 ms=$ms tok_s=$(awk "BEGIN {print int($batch * 1024 / ${ms:-1e9} * 1000)}") mfu=$(field "$out/train_$model/log.jsonl" mfu)"
                sed -n '/^op  /,$p' "$out/train_$model.log" | tee -a "$report"
                rm -rf "$out/train_$model/ckpt" "$out/train_$model"/*.safetensors
            done
            ;;
    esac
done
say "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
