#!/usr/bin/env bash
# What only a GPU can show: builds on the machine it runs on, tests every kernel against its reference, the trainer end to
# end, training beside PyTorch, the sanitizers, the profiler's ranges, and measures. Each part fits ten minutes.
#
#     bash scripts/gpu_check.sh [--part build|ops|e2e|train|san|tools|bench] [--out FOLDER]      (no part: all of them)
#
# Writes FOLDER/gpu_check.txt (default out/gpu_check): "RESULT name key=value ..." for every figure, "N passed, N failed"
# at its end, and the whole logs beside it. Exit status 0 only if everything passed. From the environment:
#   GPU_CHECK_DATA     shards of GPT-2 tokens to train on, a glob; the built-in corpus where unset
#   GPU_CHECK_COMMIT   what the sources are, where git cannot say it; else the first line of .commit
#   PYTHON             an interpreter with PyTorch and transformers (default python3)
set -u
cd "$(dirname "$0")/.."
usage="usage: gpu_check.sh [--part build|ops|e2e|train|san|tools|bench] [--out FOLDER]"
parts="build ops e2e train san tools bench" out=out/gpu_check
while [ $# -gt 0 ]; do
    case $1 in
        --part) parts=${2:?$usage}; shift 2 ;;
        --out) out=${2:?$usage}; shift 2 ;;
        --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3}
mkdir -p "$out"
report=$out/gpu_check.txt
passed=0 failed=0
say() { echo "$*" | tee -a "$report"; }
ok() { passed=$((passed + 1)); say "ok   $*"; }
bad() { failed=$((failed + 1)); say "FAIL $*"; }
log_of() { echo "$out/$(tr -c 'A-Za-z0-9_\n' _ <<<"$1").log"; }
check() { # name, command...: passes if the command does
    local name=$1 log
    log=$(log_of "$1")
    shift
    if "$@" >"$log" 2>&1; then ok "$name"; else bad "$name (the end of its log follows)"; tail -n 12 "$log" | tee -a "$report"; return 1; fi
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
results() { grep '^RESULT' "$(log_of "$1")" | tee -a "$report"; }
column() { # log.jsonl, key: its values, a step a line
    sed -nE "s/.*\"step\": [0-9]+, \"loss\".*/&/; s/.*\"$2\": ([0-9.eE+-]+).*/\1/p" <(grep '"loss": [0-9]' "$1")
}
median_ms() { column "$1" ms | tail -n +6 | sort -n | awk '{a[NR] = $1} END {print a[int((NR + 1) / 2)]}'; }
train() { # build, name, flags...: a run into $out/name, which its log names
    local build=$1 name=$2
    shift 2
    check "run $name" "$build" "$@" -v 0 -s 0 -n 0 --overwrite 1 -o "$out/$name"
}
expect_near() { # name, run, run, tol: losses of all steps
    local worst
    worst=$(paste <(column "$out/$2/log.jsonl" loss) <(column "$out/$3/log.jsonl" loss) |
        awk 'NF == 2 {d = $1 - $2; if (d < 0) d = -d; if (d > m) m = d; n++} NF != 2 {n = -1e9} END {print (n > 0 ? m + 0 : 99)}')
    say "RESULT $1 steps=$(column "$out/$2/log.jsonl" loss | wc -l) max_loss_difference=$worst tol=$4"
    if awk "BEGIN {exit !($worst <= $4)}"; then ok "$1"; else bad "$1"; fi
}
expect_same() { # name, run, run: weights, moments and master weights, bit for bit
    local file a b
    for file in model.safetensors optimizer.safetensors; do
        a=$(find "$out/$2" -name $file | sort | tail -n 1) b=$(find "$out/$3" -name $file | sort | tail -n 1)
        if [ -z "$a" ] || [ -z "$b" ] || ! cmp -s "$a" "$b"; then bad "$1: $file differs"; return; fi
    done
    ok "$1"
}
forget() { # runs: their weights; the logs stay
    local run
    for run; do rm -rf "$out/$run/ckpt" "$out/$run"/*.safetensors; done
}

: >"$report"
commit=${GPU_CHECK_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || head -n 1 .commit 2>/dev/null || echo unknown)}
say "gpu_check of commit $commit on $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), $(nvcc --version | tail -n 2 | head -n 1)"

for part in $parts; do
    say "== $part"
    started=$SECONDS
    case $part in
        build)
            check build_cpu make -s -j "$(nproc)" cpu
            # One make for each precision: which one is a variable of the Makefile.
            for precision in bf16 fp32 fp16; do
                make -s -j 4 PRECISION=$precision build/$precision/{opscu,test_gpt2cu,train_gpt2cu} $([ $precision = bf16 ] && echo train_gpt2cu) \
                    >"$out/build_$precision.log" 2>&1 && : >"$out/build_$precision.done" &
            done
            wait
            for precision in bf16 fp32 fp16; do
                if [ -e "$out/build_$precision.done" ]; then ok "build_$precision"; else bad "build_$precision"; tail -n 20 "$out/build_$precision.log" | tee -a "$report"; fi
                rm -f "$out/build_$precision.done"
            done
            if grep -iE 'warning|spill' "$out"/build_*.log | tee -a "$report" | grep -q .; then bad "no warnings, no register spills"; else ok "no warnings, no register spills"; fi
            ;;
        ops)
            for precision in bf16 fp32 fp16; do tests ops_$precision build/$precision/opscu test; done
            ;;
        e2e)
            for precision in fp32 bf16 fp16; do tests gpt2_$precision build/$precision/test_gpt2cu; done
            fp32=build/fp32/train_gpt2cu bf16=./train_gpt2cu
            small="-e L=4,C=128,NH=4,V=257,T=256 -b 4 -x 20 --dropout 0.1"
            train ./train_gpt2 cpu $small
            train $fp32 fp32 $small
            train $fp32 fp32_again $small
            train $bf16 bf16 $small
            train $bf16 bf16_again $small
            expect_near cpu_against_gpu_fp32 cpu fp32 1e-4
            expect_same "fp32 repeats bit for bit" fp32 fp32_again
            expect_same "bf16 repeats bit for bit" bf16 bf16_again
            train $bf16 bf16_resumed $small --stop-after 10
            check "run bf16_resumed, resumed" $bf16 -y 1 -o "$out/bf16_resumed"
            expect_same "bf16 resumed equals straight" bf16 bf16_resumed

            # Where two ways differ in rounding only, fp32 losses differ by some 1e-7, and AdamW, which divides small
            # gradients by their own size, makes of that 1e-6 within 20 steps. bf16 rounds each activation to 1 part in
            # 512: two ways drift apart as bf16 and fp32 do, some 1e-3 (compare_autocast.py measures that).
            near_fp32=1e-5 near_bf16=5e-3
            train $bf16 bf16_explicit $small --attention explicit
            expect_near flash_against_explicit bf16 bf16_explicit $near_bf16
            many="-e L=4,C=128,NH=4,V=257,T=256 -d 16384 -x 20 --dropout 0.1"
            for precision in fp32 bf16; do
                build=${!precision} near=near_$precision
                train $build ${precision}_1x64 $many -b 64
                train $build ${precision}_4x16 $many -b 16
                expect_near accumulation_1x64_against_4x16_$precision ${precision}_1x64 ${precision}_4x16 "${!near}"
            done

            # Channels of 124M, so that the kernels are those of a real run. --autotune 0: the same algorithms in all of them.
            wide="-e L=2,C=768,NH=12,V=257,T=1024 -b 4 -x 8 --dropout 0.1 --autotune 0"
            for r in 0 1 2; do
                for precision in bf16 fp32; do train ${!precision} ${precision}_recompute_$r $wide -ge 0 -r $r; done
                train $bf16 bf16_epilogue_recompute_$r $wide -ge 2 -r $r
            done
            for r in 1 2; do
                for precision in bf16 fp32; do
                    expect_same "recompute $r bit for bit, $precision" ${precision}_recompute_0 ${precision}_recompute_$r
                done
                # The epilogue applies GELU before its input is rounded, the recomputation after.
                expect_near epilogue_recompute_$r bf16_epilogue_recompute_0 bf16_epilogue_recompute_$r $near_bf16
            done

            # Large enough for timed matmul algorithms: a resumed run takes those of its checkpoint and times none anew.
            plans="-e L=2,C=768,NH=12,V=257,T=1024 -b 8 -x 8 -v 0 -s 0 -n 0 --overwrite 1"
            rm -rf "$out"/plans*
            check plans_first_4 ./train_gpt2cu $plans --stop-after 4 -o "$out/plans"
            mkdir -p "$out/plans_straight" && mv "$out/plans/matmul_plans.txt" "$out/plans_straight"
            check plans_straight ./train_gpt2cu $plans -o "$out/plans_straight"
            check plans_resumed ./train_gpt2cu -y 1 -o "$out/plans"
            if cmp -s "$out/plans/model.safetensors" "$out/plans_straight/model.safetensors" && [ ! -e "$out/plans/matmul_plans.txt" ]
            then ok "resumed with the checkpoint's matmul algorithms"; else bad "resumed with the checkpoint's matmul algorithms"; fi
            forget cpu fp32 fp32_again bf16 bf16_again bf16_resumed bf16_explicit {fp32,bf16}_{1x64,4x16} plans plans_straight \
                {bf16,fp32,bf16_epilogue}_recompute_{0,1,2}
            ;;
        train)
            if [ -n "${GPU_CHECK_DATA:-}" ]; then
                text=(-i "$GPU_CHECK_DATA" -e d12 -b 16 -t 1024) shard=$(compgen -G "$GPU_CHECK_DATA" | head -n 1)
            else
                text=(-e L=6,C=384,NH=6,T=256 -b 32) shard=data/builtin/train.bin
            fi
            # fp16 loses small gradients without its loss scaling: within 1 % of bf16 after 200 steps of real text.
            for precision in bf16 fp16; do
                train build/$precision/train_gpt2cu text_$precision "${text[@]}" -x 200 -l 6e-4 -u 20
                forget text_$precision
            done
            read -r bf16 fp16 < <(for precision in bf16 fp16; do
                column "$out/text_$precision/log.jsonl" loss | tail -n 20 | awk '{s += $1} END {printf "%.6f ", (NR == 20 ? s / NR : 0)}'; done; echo)
            say "RESULT fp16_against_bf16 steps=200 bf16=$bf16 fp16=$fp16 relative=$(awk "BEGIN {print $fp16 / ($bf16 + 1e-30) - 1}") tol=0.01"
            if awk "BEGIN {d = $fp16 - $bf16; if (d < 0) d = -d; exit !($bf16 > 0 && $fp16 > 0 && d <= 0.01 * $bf16)}"
            then ok fp16_against_bf16; else bad fp16_against_bf16; fi

            # Both start from the same fp32 weights: ours in bf16 may be twice as far from fp32 as PyTorch's autocast is.
            big="--layers 12 --channels 768 --heads 12 -t 512"
            check compare_fp32 "$python" dev/reference/compare_autocast.py build/fp32/train_gpt2cu --tokens "$shard" --seeds 1 --exact 1e-4
            results compare_fp32
            check compare_autocast "$python" dev/reference/compare_autocast.py ./train_gpt2cu --tokens "$shard" $big
            results compare_autocast
            ;;
        san)
            # Every op at its test sizes under each tool, some at a time. cuBLASLt's own kernels are not ours to check:
            # racecheck and initcheck leave matmul out.
            names=()
            for tool in memcheck racecheck initcheck synccheck; do
                for op in attention layernorm dropout gather gelu classifier embedding adamw loss_scale global_norm sum matmul; do
                    [ "$op" = matmul ] && [ $tool != memcheck ] && continue
                    names+=("$tool $op")
                done
            done
            # initcheck does not see what cuBLASLt's kernels store through the copy engine, so it cannot judge who reads it.
            san() {
                local skip=
                [ "$1" = initcheck ] && skip="--kernel-name-exclude kernel_substring=_softmax_kernel"
                timeout 560 compute-sanitizer --tool "$1" $skip --error-exitcode 9 build/bf16/opscu test "$2" >"$out/$1_$2.log" 2>&1
                echo $? >"$out/$1_$2.status"
            }
            export -f san
            export out
            printf '%s\n' "${names[@]}" | xargs -P 8 -I{} bash -c 'san $1' _ {}
            for name in "${names[@]}"; do
                status=$(cat "$out/${name/ /_}.status") && rm -f "$out/${name/ /_}.status"
                if [ "$status" = 0 ]; then ok "$name"; else bad "$name ended with $status"; tail -n 12 "$out/${name/ /_}.log" | tee -a "$report"; fi
            done
            ;;
        tools)
            # Our ranges choose what ncu measures: the kernels of one layer's forward pass in one step, and no others.
            tiny="-e L=4,C=256,NH=4,V=257,T=256 -b 4 -x 3 --autotune 0 -v 0 -s 0 -n 0"
            for range in "step 2" "step 2/forward/layer 2" "step 2/backward/layer 2"; do
                name=ncu_$(tr -d ' ' <<<"${range//\//_}")
                # One range alone needs a slash to be looked for among nested ones.
                filter=$range
                [[ $range == */* ]] || filter=$range/
                rm -f "$out/$name.csv"
                check "$name" ncu --clock-control none --nvtx --nvtx-include "$filter" --metrics gpu__time_duration.sum --csv --page raw \
                    --log-file "$out/$name.csv" ./train_gpt2cu $tiny -o ""
                "$python" -c 'import csv, sys
rows = [r for r in csv.DictReader(l for l in sys.stdin if l.startswith("\"")) if r["ID"].isdigit()]
print("\n".join(r["Kernel Name"] for r in rows))' <"$out/$name.csv" >"$out/$name.kernels"
                say "RESULT ncu range=\"$range\" kernels=$(wc -l <"$out/$name.kernels")"
            done
            count() { grep -cE "$2" "$out/ncu_step2$1.kernels"; }
            all=$(count '' .) forward=$(count _forward_layer2 .) backward=$(count _backward_layer2 .)
            sed 's/^/     /' "$out/ncu_step2_forward_layer2.kernels" | cut -c 1-120 | tee -a "$report"
            if [ "$forward" -ge 7 ] && [ "$backward" -ge 10 ] && [ $((4 * (forward + backward))) -lt "$all" ]
            then ok "ncu: one layer is a part of the step"; else bad "ncu: one layer is a part of the step"; fi
            if [ "$(count _forward_layer2 attention_forward)" = 1 ] && [ "$(count _forward_layer2 layernorm_forward)" = 2 ] &&
                [ "$(count _forward_layer2 'backward|adamw|embedding|classifier')" = 0 ] &&
                [ "$(count _backward_layer2 layernorm_backward_kernel)" = 2 ] && [ "$(count _backward_layer2 'forward|adamw|embedding|classifier')" = 0 ]
            then ok "ncu: the kernels are those of the layer"; else bad "ncu: the kernels are those of the layer"; fi
            ;;
        bench)
            check bench_ops build/bf16/opscu bench
            grep -E "^RESULT|GFLOP|GB/s" "$(log_of bench_ops)" | tee -a "$report"
            if check bench_attention "$python" dev/reference/bench_attention.py; then
                results bench_attention
                # Ours and PyTorch's in one line a shape, TFLOP/s forward/backward.
                sed -nE 's/^attention_(forward|backward) +B=([0-9]+) T=([0-9]+) NH=([0-9]+) HS=([0-9]+) (CAUSAL|FULL) p=0 +[0-9.]+ us .*\) +([0-9.]+) GFLOP.*/B=\2 H=\4 T=\3 D=\5 mask=\L\6\E|ours|\1|\7/p' "$(log_of bench_ops)" |
                    awk -F'|' '{print $1 "|" $2 "|" $3 "|" $4 / 1000}' >"$out/attention.txt"
                sed -nE 's/^RESULT attention peer=([a-z0-9]+) (B=.* mask=[a-z]+) .*forward_tflops=([0-9.]+) .*backward_tflops=([0-9.]+)/\2|\1|forward|\3\n\2|\1|backward|\4/p' \
                    "$(log_of bench_attention)" >>"$out/attention.txt"
                awk -F'|' '{v[$1, $2, $3] = sprintf("%.0f", $4)} !seen[$1]++ {order[n++] = $1}
                    function pair(s, who) {return v[s, who, "forward"] "/" v[s, who, "backward"]}
                    END {for (i = 0; i < n; i++) {s = order[i]; if (v[s, "fa2", "forward"] == "") continue
                        print "RESULT attention_compare " s " ours=" pair(s, "ours") " fa2=" pair(s, "fa2") " cudnn=" pair(s, "cudnn") \
                            " at_least_fa2=" (v[s, "ours", "forward"] + 0 >= v[s, "fa2", "forward"] + 0 && v[s, "ours", "backward"] + 0 >= v[s, "fa2", "backward"] + 0 ? "yes" : "no") \
                            " above_cudnn=" (v[s, "ours", "forward"] + 0 > v[s, "cudnn", "forward"] + 0 && v[s, "ours", "backward"] + 0 > v[s, "cudnn", "backward"] + 0 ? "yes" : "no")}}' \
                    "$out/attention.txt" | tee -a "$report" >"$out/attention_compare.txt"
                cat "$out/attention_compare.txt"
                gate="B=32 H=12 T=1024 D=64 mask=causal"
                if grep -q "$gate .*at_least_fa2=yes" "$out/attention_compare.txt"; then ok "attention at least as fast as FlashAttention-2"
                else bad "attention at least as fast as FlashAttention-2"; fi
            fi
            # Size, batch, and the tokens a second that it must reach.
            for size in "d12 64 580000" "d24 32 0" "d36 16 0" "d48 16 51000"; do
                read -r model batch gate <<<"$size"
                train ./train_gpt2cu "train_$model" -e "$model" -b "$batch" -t 1024 -x 55 --profile 5
                ms=$(median_ms "$out/train_$model/log.jsonl")
                speed=$(awk "BEGIN {print int($batch * 1024 / ${ms:-1e9} * 1000)}")
                profile=$(sed -n '/^op  /,$p' "$(log_of "run train_$model")")
                rest=$(awk '/^step  / {all = $2} /^(matmul|attention)/ {for (i = 3; i <= NF; i++) if ($i ~ /%/) {part += $(i - 1); break}} END {printf "%.2f", all - part}' <<<"$profile")
                say "RESULT train_gpt2cu size=$model B=$batch T=1024 ms=$ms tok_s=$speed mfu=$(column "$out/train_$model/log.jsonl" mfu | tail -n 1) other_ms=$rest"
                say "$profile"
                if [ "$gate" -gt 0 ]; then
                    if [ "$speed" -ge "$gate" ]; then ok "$model reaches $gate tokens/s"; else bad "$model reaches $gate tokens/s"; fi
                fi
                check "train_$model: every kernel has a scope" grep -q ', 0 without a scope$' "$out/train_$model/kernels.txt"
                forget "train_$model"
            done
            ;;
        *) bad "no part is called $part" ;;
    esac
    say "part $part: $((SECONDS - started)) s"
done
say "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
