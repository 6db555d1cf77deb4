#!/usr/bin/env bash
# What only a GPU can show: builds on the machine it runs on, tests every kernel against its reference, the trainer end to
# end, training beside PyTorch, the sanitizers, the profiler, and measures. Each part fits ten minutes.
#
#     bash scripts/gpu_check.sh [--part PARTS] [--out FOLDER]      PARTS: "build bert", say; without it all of them:
#
#     build    programs in three precisions              ops      kernels against their references
#     e2e      train_gpt2cu from end to end              train    the same beside transformers
#     bert     train_bertcu, both of that                bench bert_bench    speed, beside PyTorch's
#     tasks    train_bertcu fine-tuned, also beside transformers
#     san      the ops under compute-sanitizer           tools    our ranges in ncu
#     profile  the reports of --profile, beside ncu and a plain listing of kernels
#     ranks    all GPUs together: speed, the same result, killed ranks, checkpoints. Not among "all of them"
#
# Writes FOLDER/gpu_check.txt (default out/gpu_check): "RESULT name key=value ..." for every figure, "N passed, N failed"
# at its end, and the whole logs beside it. Exit status 0 only if everything passed. From the environment:
#   GPU_CHECK_DATA     shards of GPT-2 tokens to train on, a glob; the built-in corpus where unset
#   GPU_CHECK_BERT_DATA    files of prepare_bert.py for BERT to train on, a glob; the built-in corpus where unset
#   GPU_CHECK_OPS      ops that part san runs, "gelu gather"; all where unset
#   GPU_CHECK_SAN_SECONDS    that a tool may take with one op (default 560)
#   GPU_CHECK_PROFILE  pieces of part profile: "gpt2 bert published tools ranks"; all where unset
#   GPU_CHECK_RANKS    pieces of part ranks: "d12 d48 bert_large 124M 1558M phase1 curves kills checkpoints"; all where
#                      unset, which with four GPUs is more than ten minutes
#   GPU_CHECK_TORCH_BERT    another BERT training step in PyTorch for part bert_bench, a script and its flags: it is also given
#                      -B batch -T length, and prints a line "RESULT ... ms=..." as dev/reference/bert.py does
#   GPU_CHECK_COMMIT   what the sources are, where git cannot say it; else the first line of .commit
#   PYTHON             an interpreter with PyTorch and transformers (default python3)
set -u
cd "$(dirname "$0")/.."
usage="usage: gpu_check.sh [--part 'build ops e2e train bert tasks san tools profile bench bert_bench ranks'] [--out FOLDER]"
parts="build ops e2e train bert tasks san tools profile bench bert_bench" out=out/gpu_check
while [ $# -gt 0 ]; do
    case $1 in
        --part) parts=${2:?$usage}; shift 2 ;;
        --out) out=${2:?$usage}; shift 2 ;;
        --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3}
mkdir -p "$out" && out=$(cd "$out" && pwd)
report=$out/gpu_check.txt
passed=0 failed=0
say() { echo "$*" | tee -a "$report"; }
ok() { passed=$((passed + 1)); say "ok   $*"; }
bad() { failed=$((failed + 1)); say "FAIL $*"; }
log_of() { echo "$out/$(tr -c 'A-Za-z0-9_\n' _ <<<"$1").log"; }
judge() { # name, status: of the command whose log has that name
    if [ "$2" = 0 ]; then ok "$1"; else bad "$1 (the end of its log follows)"; tail -n 12 "$(log_of "$1")" | tee -a "$report"; return 1; fi
}
check() { # name, command...: passes if the command does
    "${@:2}" >"$(log_of "$1")" 2>&1
    judge "$1" $?
}
# Where nothing is timed, commands run two at a time: begin some, then finish them all.
begun=()
begin() { # name, command...: check it, later
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
    begun+=("$1")
    {
        "${@:2}" >"$(log_of "$1")" 2>&1
        echo $? >"$(log_of "$1").status"
    } &
}
finish() {
    local name
    wait
    for name in "${begun[@]}"; do
        judge "$name" "$(cat "$(log_of "$name").status")"
        rm -f "$(log_of "$name").status"
    done
    begun=()
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
quiet="-v 0 -s 0 -n 0 --overwrite 1"
train() { # build, name, flags...: a run into $out/name, which its log names
    check "run $2" "$1" "${@:3}" $quiet -o "$out/$2"
}
begin_train() { # the same, later
    begin "run $2" "$1" "${@:3}" $quiet -o "$out/$2"
}
expect_near() { # name, run, run, tol: losses of all steps
    local worst
    worst=$(paste <(column "$out/$2/log.jsonl" loss) <(column "$out/$3/log.jsonl" loss) |
        awk 'NF == 2 {d = $1 - $2; if (d < 0) d = -d; if (d > m) m = d; n++} NF != 2 {n = -1e9} END {print (n > 0 ? m + 0 : 99)}')
    say "RESULT $1 steps=$(column "$out/$2/log.jsonl" loss | wc -l) max_loss_difference=$worst tol=$4"
    if awk "BEGIN {exit !($worst <= $4)}"; then ok "$1"; else bad "$1"; fi
}
whole() { # run: the directories of its whole checkpoints, the newest last
    find "$out/$1/ckpt" -maxdepth 1 -name '*[0-9]' 2>/dev/null | sort
}
step_of() { # run: that its newest checkpoint is of; 0 where there is none
    local newest
    newest=$(whole "$1" | tail -n 1)
    echo $((10#0${newest##*/}))
}
expect_same() { # name, run, run: weights, moments and master weights of the newest checkpoints, bit for bit
    local file a b files
    a=$(whole "$2" | tail -n 1) b=$(whole "$3" | tail -n 1)
    # With -z 1 each rank has a file of the optimizer's state.
    files=$(find "${a:-/dev/null}" -name '*.safetensors' -printf '%f\n' | sort)
    if [[ $files != *model.* || $files != *optimizer* ]]; then bad "$1: $2 has no checkpoint of model and optimizer"; return; fi
    if [ "$files" != "$(find "${b:-/dev/null}" -name '*.safetensors' -printf '%f\n' | sort)" ]; then bad "$1: $3 has other files"; return; fi
    for file in $files; do
        if ! cmp -s "$a/$file" "$b/$file"; then bad "$1: $file differs"; return; fi
    done
    ok "$1"
}
forget() { # runs: their weights; the logs stay
    local run
    for run; do rm -rf "$out/$run/ckpt" "$out/$run"/*.safetensors; done
}
explained() { # name, profile, flags of check_profile.py: it adds up
    check "explained $1" "$python" dev/reference/check_profile.py "${@:2}"
    results "explained $1"
}
same_training() { # prefix of runs, CPU build, fp32 build, bf16 build, steps before the interruption, flags...
    local p=$1 cpu=$2 fp32=$3 bf16=$4 stop=$5
    shift 5
    begin_train "$cpu" "${p}cpu" "$@"
    for again in "" _again; do
        begin_train "$fp32" "${p}fp32$again" "$@"
        begin_train "$bf16" "${p}bf16$again" "$@"
    done
    begin_train "$bf16" "${p}bf16_resumed" "$@" --stop-after "$stop"
    finish
    check "run ${p}bf16_resumed, resumed" "$bf16" -y 1 -o "$out/${p}bf16_resumed"
    expect_near "${p}cpu_against_gpu_fp32" "${p}cpu" "${p}fp32" 1e-4
    expect_same "${p}fp32 repeats bit for bit" "${p}fp32" "${p}fp32_again"
    expect_same "${p}bf16 repeats bit for bit" "${p}bf16" "${p}bf16_again"
    expect_same "${p}bf16 resumed equals straight" "${p}bf16" "${p}bf16_resumed"
    forget "$p"{cpu,fp32,fp32_again,bf16_again,bf16_resumed}
}
count_gpus() { # those that CUDA_VISIBLE_DEVICES leaves
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then tr , '\n' <<<"$CUDA_VISIBLE_DEVICES"; else nvidia-smi -L; fi | wc -l
}
at_least() { # number, limit, what: the gate
    if awk "BEGIN {exit !(${1:-0} >= $2)}"; then ok "$3"; else bad "$3"; fi
}
bert_large() { # name, batch, flags...: its step without a file written; sets ms and seq_s
    local name=$1 batch=$2 mfu
    shift 2
    check "run $name" timeout 150 ./train_bertcu -e bert-large -b "$batch" "$@" $bert_recipe -x 35 $quiet -o ""
    read -r ms mfu < <(sed -nE 's/^step .*\| ([0-9.]+) ms \|.*mfu ([0-9.]+)%.*/\1 \2/p' "$(log_of "run $name")" |
        tail -n +6 | sort -n | awk '{line[NR] = $0} END {print line[int((NR + 1) / 2)]}')
    seq_s=$(awk "BEGIN {print int($batch / ${ms:-1e9} * 1000)}")
    say "RESULT train_bertcu size=large lengths=$name B=$batch optimizer=lamb dropout=0.1 ms=${ms:-none} seq_s=$seq_s mfu_percent=${mfu:-none}"
}

: >"$report"
commit=${GPU_CHECK_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || head -n 1 .commit 2>/dev/null || echo unknown)}
say "gpu_check of commit $commit, GPU_CHECK_DATA=${GPU_CHECK_DATA:+set} GPU_CHECK_BERT_DATA=${GPU_CHECK_BERT_DATA:+set}, on $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), $(nvcc --version | tail -n 2 | head -n 1)"

for part in $parts; do
    say "== $part"
    started=$SECONDS
    case $part in
        build)
            check build_cpu make -s -j "$(nproc)" cpu
            # One make for each precision: which one is a variable of the Makefile.
            for precision in bf16 fp32 fp16; do
                case $precision in
                    bf16) more="build/bf16/test_bertcu train_gpt2cu train_bertcu" ;;
                    fp32) more="build/fp32/test_bertcu build/fp32/train_bertcu" ;;
                    fp16) more= ;;
                esac
                make -s -j 6 PRECISION=$precision build/$precision/{opscu,test_gpt2cu,train_gpt2cu} $more \
                    >"$out/build_$precision.log" 2>&1 && : >"$out/build_$precision.done" &
            done
            wait
            for precision in bf16 fp32 fp16; do
                if [ -e "$out/build_$precision.done" ]; then ok "build_$precision"; else bad "build_$precision"; tail -n 20 "$out/build_$precision.log" | tee -a "$report"; fi
                rm -f "$out/build_$precision.done"
            done
            if grep -iE 'warning|spill|serialized' "$out"/build_*.log | tee -a "$report" | grep -q .; then bad "no warnings, no register spills"; else ok "no warnings, no register spills"; fi
            ;;
        ops)
            for precision in bf16 fp32 fp16; do tests ops_$precision build/$precision/opscu test; done
            ;;
        e2e)
            for precision in fp32 bf16 fp16; do tests gpt2_$precision build/$precision/test_gpt2cu; done
            fp32=build/fp32/train_gpt2cu bf16=./train_gpt2cu
            small="-e L=4,C=128,NH=4,V=257,T=256 -b 4 -x 20 --dropout 0.1"
            same_training "" ./train_gpt2 $fp32 $bf16 10 $small

            # Where two ways differ in rounding only, fp32 losses differ by some 1e-7, and AdamW, which divides small
            # gradients by their own size, makes of that 1e-6 within 20 steps. bf16 rounds each activation to 1 part in
            # 512: two ways drift apart as bf16 and fp32 do, some 1e-3 (compare_autocast.py measures that).
            near_fp32=1e-5 near_bf16=5e-3
            many="-e L=4,C=128,NH=4,V=257,T=256 -d 16384 -x 20 --dropout 0.1"
            # Channels of 124M, so that the kernels are those of a real run. --autotune 0: the same algorithms in all of them.
            wide="-e L=2,C=768,NH=12,V=257,T=1024 -b 4 -x 8 --dropout 0.1 --autotune 0"
            begin_train $bf16 bf16_explicit $small --attention explicit
            for precision in fp32 bf16; do
                begin_train ${!precision} ${precision}_1x64 $many -b 64
                begin_train ${!precision} ${precision}_4x16 $many -b 16
                for r in 0 1 2; do begin_train ${!precision} ${precision}_recompute_$r $wide -ge 0 -r $r; done
            done
            for r in 0 1 2; do begin_train $bf16 bf16_epilogue_recompute_$r $wide -ge 2 -r $r; done
            finish
            expect_near flash_against_explicit bf16 bf16_explicit $near_bf16
            for precision in fp32 bf16; do
                near=near_$precision
                expect_near accumulation_1x64_against_4x16_$precision ${precision}_1x64 ${precision}_4x16 "${!near}"
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
            forget bf16 bf16_explicit {fp32,bf16}_{1x64,4x16} plans plans_straight \
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

            # Both start from the same fp32 weights. With warm-up: without it the loss leaps at step 9, and PyTorch's own
            # fp32 is 8e-4 from its fp64 there.
            check compare_fp32 "$python" dev/reference/compare_autocast.py build/fp32/train_gpt2cu --tokens "$shard" --seeds 1 \
                --warmup 20 --exact 1e-4
            results compare_fp32
            # Ours in bf16 may be twice as far from fp32 as PyTorch's autocast is.
            big="--layers 12 --channels 768 --heads 12 -t 512"
            check compare_autocast "$python" dev/reference/compare_autocast.py ./train_gpt2cu --tokens "$shard" $big
            results compare_autocast
            ;;
        bert)
            for precision in fp32 bf16; do tests bert_$precision build/$precision/test_bertcu; done
            same_training bert_ ./train_bert build/fp32/train_bertcu ./train_bertcu 5 -e L=4,C=128,NH=4,T=64 -b 8 -x 10 --dropout 0.1
            forget bert_bf16

            # BERT-base, dropout off, on the batches that ours draws.
            compare() { # name, flags...
                begin "$1" "$python" dev/reference/compare_autocast.py ./train_bertcu --bert --dump build/bf16/test_bertcu \
                    --tokens "${GPU_CHECK_BERT_DATA:-data/builtin/bert/train.bin}" --layers 12 --channels 768 --heads 12 -t 128 -b 32 "${@:2}"
            }
            compare compare_autocast_bert --steps 50 --seeds 3 --ratio 2
            compare compare_final_bert --steps 200 --warmup 20 --final 0.01 --losses "$out/compare_final_bert.txt"
            finish
            results compare_autocast_bert
            results compare_final_bert
            ;;
        tasks)
            tests tasks bash dev/test/tasks.sh build/fp32/train_bertcu
            # The same examples and first weights for both: fp32 against transformers, then CPU against GPU with dropout.
            for task in classify answer; do
                work=$out/task_$task
                case $task in classify) suffix=tsv more=(--labels 2) ;; *) suffix=json more=(--stride 42) ;; esac
                check "transformers $task" "$python" dev/reference/check_task.py $task --program build/fp32/train_bertcu --work "$work"
                say "$(grep steps: "$(log_of "transformers $task")")"
                same_training "${task}_" ./train_bert build/fp32/train_bertcu ./train_bertcu 7 -e "$work/start" --task $task \
                    -i "$work/train.$suffix" "${more[@]}" -t 128 -b 8 -x 20 -l 1e-3 --dropout 0.1
                forget "${task}_bf16" "task_$task/out"
                rm -rf "$work/start"
            done
            ;;
        san)
            # The ops at their test sizes under each tool, some at a time. cuBLASLt's own kernels are not ours to check: memcheck,
            # which asks nothing of them but to stay inside their operands, sees all of matmul, the others only our kernels.
            # What these read is filled by the test, or cleared by device_scratch(), before cuBLASLt writes to it: initcheck,
            # which cannot see that, knows it as initialised. racecheck ends with an error of its own where cuBLASLt runs:
            # it sees matmul_epilogue, our kernels without the products.
            ops="attention layernorm dropout gather gelu classifier embedding adamw lamb loss_scale global_norm next_sentence accuracy widen narrow matmul matmul_epilogue"
            names=()
            for tool in memcheck racecheck initcheck synccheck; do
                for op in ${GPU_CHECK_OPS:-$ops}; do
                    [ "$tool $op" = "racecheck matmul" ] || names+=("$tool $op")
                done
            done
            # initcheck does not see what cuBLASLt's kernels store through the copy engine, so it cannot judge who reads it.
            san() {
                local which=  # kernels
                [ "$1" = initcheck ] && which="--kernel-name-exclude kernel_substring=_softmax_kernel"
                [ "$2" = matmul ] && [ "$1" != memcheck ] && which="--kernel-name kernel_substring=matmul_"
                timeout ${GPU_CHECK_SAN_SECONDS:-560} compute-sanitizer --tool "$1" $which --error-exitcode 9 build/bf16/opscu test "$2" >"$out/$1_$2.log" 2>&1
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
                profile=$(sed -n '/^Where the time/,/^the whole profile/p' "$(log_of "run train_$model")")
                rest=$(awk '/^= from the first row/ {all = $(NF - 1)} /^By op/ {exit} /^(matmul|attention) +[0-9]/ {part += $3} END {printf "%.2f", all - part}' <<<"$profile")
                say "RESULT train_gpt2cu size=$model B=$batch T=1024 ms=$ms tok_s=$speed mfu=$(sed -nE "s/.*\"ms\": $ms,.*\"mfu\": ([0-9.]+).*/\1/p" "$out/train_$model/log.jsonl" | head -n 1) other_ms=$rest"
                say "$profile"
                if [ "$gate" -gt 0 ]; then
                    at_least "$speed" "$gate" "$model reaches $gate tokens/s"
                fi
                explained "train_$model" "$out/train_$model/profile"
                forget "train_$model"
            done
            ;;
        bert_bench)
            bert_recipe="--optimizer lamb --dropout 0.1 --short-sequences 0"
            sentences() { # folder, flags...: text whose sequences have chosen lengths
                mkdir -p "$out/$1"
                check "$1" "$python" dev/reference/make_sentences.py "$out/$1/train.bin" "${@:2}"
            }
            beside() { # name, script and flags...: PyTorch's step beside ours, at $batch and $T
                check "$1" timeout 240 "$python" "${@:2}"
                results "$1"
                say "RESULT compare size=large B=$batch T=$T peer=$1 torch_ms_over_ours=$(sed -nE 's/^RESULT .* ms=([0-9.]+) .*/\1/p' "$(log_of "$1")" |
                    awk "{print \$1 / ${full_ms:-1e9}}")"
            }
            # Batch, length, and the full sequences a second that it must reach.
            for shape in "256 128 1850" "64 512 420"; do
                read -r batch T gate <<<"$shape"
                sentences full_$T --shortest "$T"
                sentences varied_$T --shortest $((T / 2 + 1)) --longest "$T"
                bert_large full_$T "$batch" -t "$T" -i "$out/full_$T/train.bin"
                full=$seq_s full_ms=$ms
                at_least "$full" "$gate" "BERT-large reaches $gate full sequences/s, T=$T"
                bert_large varied_$T "$batch" -t "$T" -i "$out/varied_$T/train.bin" --pack 2
                say "RESULT varied_over_full T=$T ratio=$(awk "BEGIN {print $seq_s / ($full + 1e-9)}")"
                at_least "$seq_s" "1.25 * $full + 1e-9" "lengths from T/2 to T: 1.25 times the rate of full ones, T=$T"
                beside torch_bert_$T dev/reference/bert.py -b "$batch" -t "$T"
                if [ -n "${GPU_CHECK_TORCH_BERT:-}" ]; then
                    beside other_torch_bert_$T $GPU_CHECK_TORCH_BERT -B "$batch" -T "$T"
                fi
            done
            # The step whose kernels others have counted: two layers of BERT-large.
            train ./train_bertcu bert_kernels -e L=2,C=1024,NH=16,T=512,V=30522 -b 4 -t 128 -i "$out/full_128/train.bin" $bert_recipe -x 40 --profile 3
            ms=$(median_ms "$out/bert_kernels/log.jsonl")
            read -r kernels fills copies < <(awk -F, 'NR == 1 {next} $6 ~ /^copy_/ {copies++; next} $6 ~ /^fill_/ {fills++; next} {kernels++}
                END {if (kernels) print kernels, fills + 0, copies + 0}' "$out/bert_kernels/profile/kernels.csv")
            say "RESULT bert_kernels L=2 C=1024 B=4 T=128 optimizer=lamb kernels=${kernels:-none} fills=$fills copies=$copies ms=$ms"
            at_least 80 "${kernels:-1e9}" "a step of two layers takes 80 kernels at most"
            at_least 2 "${ms:-1e9}" "a step of two layers takes 2 ms at most"
            explained bert_kernels "$out/bert_kernels/profile"
            forget bert_kernels
            rm -rf "$out"/{full,varied}_{128,512}
            ;;
        profile)
            # The reports of --profile: they add up, agree with other tools, and say so where CUPTI is not theirs.
            mkdir -p "$out/reports"
            reported() { # name, command...: a profiled run whose report is kept
                train "${@:2:1}" "profile_$1" "${@:3}" -x 65 --profile 5
                explained "profile_$1" "$out/profile_$1/profile" --overhead 10
                for file in profile.txt profile.md profile.html; do cp "$out/profile_$1/profile/$file" "$out/reports/$1.${file#*.}"; done
                sed 's/^/     /' "$out/profile_$1/profile/profile.txt" | sed -n '1,/^     By kernel/p' | cut -c 1-200 | tee -a "$report"
                forget "profile_$1"
            }
            profile_gpt2() {
                reported gpt2_124m ./train_gpt2cu -e d12 -b 64 -t 1024
                train ./train_gpt2cu plain_gpt2_124m -e d12 -b 64 -t 1024 -x 65
                say "RESULT profile_off size=d12 ms=$(median_ms "$out/plain_gpt2_124m/log.jsonl") with_profile_ms=$(median_ms "$out/profile_gpt2_124m/log.jsonl")"
                forget plain_gpt2_124m
            }
            profile_bert() {
                mkdir -p "$out/full_128"
                check full_128 "$python" dev/reference/make_sentences.py "$out/full_128/train.bin" --shortest 128
                reported bert_large_phase1 ./train_bertcu -e bert-large -b 256 -t 128 -i "$out/full_128/train.bin" --optimizer lamb --dropout 0.1 --short-sequences 0
                rm -rf "$out/full_128"
            }
            profile_published() {
                check "published set-ups" env PYTHON="$python" bash scripts/profile_reference.sh --out "$out/published" --pages "$out/reports"
                for run in "$out"/published/*/profile; do
                    name=$(basename "$(dirname "$run")")
                    explained "published $name" "$run" --overhead 10
                    for file in profile.txt profile.md; do cp "$run/$file" "$out/reports/$name.${file#*.}"; done
                done
            }
            profile_tools() {
                # The same step in ncu, which sees kernels only, and in a listing that is not ours; untimed choices are the same ones.
                # Kernels are as long as the clock lets them be: both runs begin on a GPU that has been idle, and are compared at the same steps.
                same="-e L=4,C=768,NH=12,V=50257,T=1024 -b 16 -t 1024 --autotune 0"
                sleep 5
                train ./train_gpt2cu profile_same $same -x 15 --profile 5
                check ncu_step ncu --clock-control none --cache-control none --nvtx --nvtx-include "step 12/" --metrics gpu__time_duration.sum --csv --page raw \
                    --log-file "$out/ncu_step.csv" ./train_gpt2cu $same -x 12 $quiet -o ""
                check kernel_list gcc -shared -fPIC dev/reference/kernel_list.c -o "$out/kernel_list.so" -I/usr/local/cuda/include -L/usr/local/cuda/extras/CUPTI/lib64 -L/usr/local/cuda/lib64 -lcupti
                sleep 5
                check plain_listing env KERNEL_LIST="$out/kernel_list.csv" CUDA_INJECTION64_PATH="$out/kernel_list.so" ./train_gpt2cu $same -x 15 $quiet -o ""
                explained "profile_same and ncu" "$out/profile_same/profile" --ncu "$out/ncu_step.csv"
                explained "profile_same and a plain listing" "$out/profile_same/profile" --listing "$out/kernel_list.csv"
                forget profile_same
                tiny="-e L=4,C=256,NH=4,V=257,T=256 -b 4 -x 12 --profile 2 --autotune 0"
                check "profile under ncu" ncu --clock-control none --metrics gpu__time_duration.sum --launch-count 20 ./train_gpt2cu $tiny $quiet -o "$out/profile_ncu"
                check "profile beside another tool" env KERNEL_LIST=/dev/null CUDA_INJECTION64_PATH="$out/kernel_list.so" ./train_gpt2cu $tiny $quiet -o "$out/profile_other"
                for name in "profile under ncu" "profile beside another tool"; do
                    check "$name: a line says so" grep -Eq '^warning: (CUPTI: )?another tool profiles this process' "$(log_of "$name")"
                done
                # CUPTI's library out of sight, where this may be done.
                hide='for f in $(find / -xdev -name "libcupti.so*" -type f 2>/dev/null); do mount --bind /dev/null "$f" || exit 9; done; exec "$@"'
                if unshare -m bash -c "$hide" _ ./train_gpt2cu $tiny $quiet -o "$out/profile_none" >"$out/profile_none.log" 2>&1; then
                    check "without CUPTI a line says so" grep -q '^warning: CUPTI .* is not found' "$out/profile_none.log"
                    check "without CUPTI ops are timed" grep -q '^times .*of ops, between CUDA events' "$out/profile_none.log"
                else
                    say "skip without CUPTI: $(tail -n 1 "$out/profile_none.log")"
                fi
            }
            profile_ranks() {
                gpus=$(count_gpus)
                if [ "$gpus" -gt 1 ]; then
                    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
                    check "profile of $gpus ranks" mpirun -np "$gpus" --bind-to none ./train_gpt2cu -e d12 -b 64 -t 1024 -z 1 --bucket 16 -x 20 --profile 5 $quiet -o "$out/profile_ranks"
                    for ((i = 0; i < gpus; i++)); do explained "rank $i of $gpus" "$out/profile_ranks/profile/rank_$i"; done
                    grep -E '^(overlap|slowest) ' "$(log_of "profile of $gpus ranks")" | tee -a "$report"
                    cp "$out/profile_ranks/profile/rank_0/profile.txt" "$out/reports/gpt2_124m_${gpus}_ranks.txt"
                    forget profile_ranks
                else
                    say "skip ranks: one GPU"
                fi
            }
            for piece in ${GPU_CHECK_PROFILE:-gpt2 bert published tools ranks}; do
                case $piece in
                    gpt2 | bert | published | tools | ranks) profile_$piece ;;
                    *) bad "no piece of part profile is called $piece" ;;
                esac
            done
            ;;
        ranks)
            # One process a GPU. `launch` starts as many as it is told, on the first GPUs.
            gpus=$(count_gpus)
            export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
            launch() { # ranks, command...
                if [ "$1" = 1 ]; then "${@:2}"; else mpirun -np "$1" --bind-to none --oversubscribe "${@:2}"; fi
            }
            # Mean of the last two thirds of a run's steps. Not their median: at the power limit steps swing by 10 % within a second, few of
            # them long, and it takes them some seconds to settle (dev/LOG.md).
            step_ms() { sed -nE 's/^step .*\| ([0-9.]+) ms \|.*/\1/p' "$(log_of "$1")" | awk '{a[NR] = $1} END {for (i = int(NR / 3) + 1; i <= NR; i++) {s += a[i]; n++} if (n) printf "%.1f", s / n}'; }
            # What the GPUs do from sample to sampled, five times a second. The latter prints means over the samples at work, and in
            # what part of these the power limit held the clock down.
            sample() {
                nvidia-smi --query-gpu=power.draw,clocks.sm,clocks_event_reasons.sw_power_cap,utilization.gpu --format=csv,noheader,nounits -lms 200 >"$out/power.csv" 2>/dev/null &
                sampler=$!
            }
            sampled() {
                kill "$sampler" 2>/dev/null
                wait "$sampler" 2>/dev/null
                awk -F', *' '$4 > 90 && $1 > 300 {n++; w += $1; mhz += $2; capped += $3 == "Active"} END {if (n) printf "watts=%.0f mhz=%.0f capped=%.2f", w / n, mhz / n, capped / n; else printf "watts=none"}' "$out/power.csv"
                rm -f "$out/power.csv"
            }
            # Linear is what the GPUs do each on its own, at the same time, with the same matmul algorithms as together. Sums run beside
            # the backward pass (--bucket 16) or after it, at once; which is faster depends on the model. Where a step has several
            # micro-batches all GPUs work together, with the default of --bucket: a sum is a small part of such a step.
            scaling() { # name, sequences a GPU, tokens a sequence, micro-batches, steps, command...
                local name=$1 batch=$2 T=$3 micro=$4 steps=$5 first=2 i n way ms power of_linear best mean slowest alone=() ways=()
                shift 5
                set -- "$@" --autotune 0
                for way in "-z 0" "-z 1"; do ways+=("$way --bucket 16" "$way --bucket 1000000"); done
                ways+=("-z 1 --reduce bf16")
                [ "$micro" = 1 ] || first=$gpus ways=("-z 0" "-z 1")
                sample
                for ((i = 0; i < gpus; i++)); do
                    CUDA_VISIBLE_DEVICES=$i "$@" -b "$batch" -t "$T" -d $((batch * T * micro)) -x "$steps" $quiet -o "" >"$(log_of "$name alone $i")" 2>&1 &
                done
                wait $(jobs -p | grep -vx "$sampler")
                power=$(sampled)
                for ((i = 0; i < gpus; i++)); do alone[i]=$(step_ms "$name alone $i"); done
                say "RESULT ranks_alone run=$name B=$batch T=$T micro_batches=$micro ms=$(paste -sd, <(printf '%s\n' "${alone[@]}")) $power"
                for ((n = first; n <= gpus; n *= 2)); do
                    slowest=$(printf '%s\n' "${alone[@]:0:n}" | sort -n | tail -n 1)
                    mean=$(printf '%s\n' "${alone[@]:0:n}" | awk '{s += 1 / $1} END {print NR / s}')
                    best=0
                    for way in "${ways[@]}"; do
                        sample
                        check "$name on $n GPUs, $way" launch "$n" "$@" -b "$batch" -t "$T" -d $((n * batch * T * micro)) -x "$steps" $way $quiet -o ""
                        power=$(sampled)
                        ms=$(step_ms "$name on $n GPUs, $way")
                        of_linear=$(awk "BEGIN {printf \"%.4f\", $mean / ${ms:-1e9}}")
                        best=$(awk "BEGIN {print ($of_linear > $best ? $of_linear : $best)}")
                        say "RESULT ranks run=$name ranks=$n flags='$way' B=$batch T=$T micro_batches=$micro ms=${ms:-none} tok_s=$(awk "BEGIN {print int($n * $batch * $T * $micro / ${ms:-1e9} * 1000)}")" \
                            "of_linear=$of_linear of_slowest=$(awk "BEGIN {printf \"%.4f\", $slowest / ${ms:-1e9}}") $power"
                    done
                    if [ "$n" -ge 4 ]; then at_least "$best" 0.97 "$name on $n GPUs: 97 % of linear"; fi
                done
            }
            # Runs of 17 seconds, of steps of one micro-batch: nothing costs more, as all gradients are summed after each.
            ranks_d12() { scaling d12 64 1024 1 160 ./train_gpt2cu -e d12; }
            ranks_d48() { scaling d48 16 1024 1 56 ./train_gpt2cu -e d48; }
            ranks_bert_large() { scaling_bert_large bert-large 1 140; }
            # As scripts/run_gpt2_124M.sh, run_gpt2_1558M.sh and run_bert_large_phase1.sh train: half a million tokens, a million tokens,
            # 64 K sequences a step, or as many as whole micro-batches make. On eight GPUs 124M's step is one micro-batch.
            ranks_124M() { [ "$gpus" -ge 8 ] && say "skip 124M: as d12" || scaling 124M 64 1024 $((524288 / (65536 * gpus))) $((30 * gpus)) ./train_gpt2cu -e d12; }
            ranks_1558M() { scaling 1558M 16 1024 $((1048576 / (16384 * gpus))) $((2 * gpus)) ./train_gpt2cu -e d48; }
            ranks_phase1() { scaling_bert_large phase1 $((65536 / (256 * gpus))) 8; }
            scaling_bert_large() { # name, micro-batches, steps
                "$python" dev/reference/make_sentences.py "$out/sentences.bin" --shortest 128 >/dev/null
                scaling "$1" 256 128 "$2" "$3" ./train_bertcu -e bert-large -i "$out/sentences.bin" --optimizer lamb --dropout 0.1 --short-sequences 0
                rm -f "$out/sentences.bin"
            }

            # The same sequences in every step, whatever the number of ranks: bf16 rounds sums of other orders, by some 1e-3 in a loss
            # (part e2e measures the same for micro-batches); and twice the same bits. At a low rate: at 6e-4 after 10 steps of warm-up
            # the run itself leaps (norms of 14 and 31 after step 10), which makes differences of 0.3 out of those of 1e-4 before; and
            # with the same matmul algorithms in all of them.
            ranks_curves() {
                local n way curve=(-e d12 -b 16 -t 1024 -d 65536 -x 20 -n 10 -l 1e-4 -u 20 -v 0 -s 0 --overwrite 1 --autotune 0)
                [ -z "${GPU_CHECK_DATA:-}" ] || curve+=(-i "$GPU_CHECK_DATA")
                for n in 1 2 4; do
                    [ $n -le "$gpus" ] || continue
                    check "curve of $n" launch $n ./train_gpt2cu "${curve[@]}" -z 1 -o "$out/curve_$n"
                    [ $n -gt 1 ] || continue
                    expect_near "losses of $n ranks against one" curve_$n curve_1 5e-3
                    check "$n ranks: weights_hash in the log at each checkpoint" [ "$(grep -c weights_hash "$out/curve_$n/log.jsonl")" = 2 ]
                done
                check "curve again" launch "$gpus" ./train_gpt2cu "${curve[@]}" -z 1 -o "$out/curve_again"
                check "curve once more" launch "$gpus" ./train_gpt2cu "${curve[@]}" -z 1 -o "$out/curve_more"
                expect_same "$gpus ranks repeat bit for bit" curve_again curve_more
                # Two numbers have one sum, in whatever order.
                for way in "-z 0" "-z 1" "-z 1 --reduce bf16"; do
                    check "curve of 2, $way, sums beside" launch 2 ./train_gpt2cu "${curve[@]}" $way --bucket 16 -o "$out/curve_beside"
                    check "curve of 2, $way, sums after" launch 2 ./train_gpt2cu "${curve[@]}" $way --bucket 1000000 -o "$out/curve_after"
                    expect_same "2 ranks, $way, sums beside and after the backward pass: the same bits" curve_beside curve_after
                done
                # What is joined by NVLink, by the driver and by the trainer.
                nvidia-smi nvlink --status 2>/dev/null | grep -q 'Link 0: [0-9]' && way='at once' || way='bucket by bucket'
                check "gradients summed $way by default" grep -q "gradients summed $way" "$(log_of "curve of 2")"
                check "curve to step 10" launch "$gpus" ./train_gpt2cu "${curve[@]}" -z 1 -o "$out/curve_stopped" --stop-after 10
                check "curve from step 10" launch "$gpus" ./train_gpt2cu -y 1 -z 1 -o "$out/curve_stopped"
                expect_same "$gpus ranks resumed equal straight" curve_stopped curve_more
                forget curve_{1,2,4,again,more,beside,after,stopped}
            }

            await() { # seconds, command...: until it succeeds, while $running, a launch in the background, runs
                local end=$((SECONDS + $1))
                shift
                until "$@"; do
                    kill -0 "$running" 2>/dev/null && [ $SECONDS -lt $end ] || return 1
                    sleep 0.05
                done
            }
            # Kill a rank of $running by chance. Counts in `named` if the others name that very process, in `late` if after 60 s not
            # all have ended.
            named=0 late=0
            kill_one() { # log
                local launcher ranks victim i
                launcher=$(pgrep -d , -P "$running")
                ranks=$(pgrep -x train_gpt2cu -P "$running${launcher:+,$launcher}")
                victim=$(shuf -n 1 <<<"$ranks")
                [ -z "$victim" ] || kill -KILL "$victim"
                for ((i = 0; i < 600; i++)); do
                    kill -0 "$running" $ranks 2>/dev/null || break
                    sleep 0.1
                done
                if [ "$i" = 600 ]; then
                    late=$((late + 1))
                    kill -KILL "$running" ${launcher//,/ } $ranks 2>/dev/null
                fi
                wait "$running"
                if grep -Eqs "rank [0-9]+ of $gpus \(.*, process ${victim:-none}\) is gone" "$1"; then named=$((named + 1)); else say "     $1 does not name process ${victim:-none}"; fi
            }

            # One of the ranks is killed at a moment of chance while they train: the others end and name it, the run goes on from a
            # whole checkpoint and comes to the bits of a run that nobody disturbed. It has no end of its own, so that every kill
            # finds it at work however fast the machine is.
            ranks_kills() {
                local small="-e L=4,C=256,NH=4,V=257,T=256 -b 4 -x 100000 -k constant -n 50 -nk 3 -v 0 -s 0 -z 1 --autotune 0" i log steps damaged
                rm -rf "$out"/disturbed "$out"/disturbed_?.log
                named=0 late=0
                for ((i = 0; i < 10; i++)); do
                    log=$out/disturbed_$i.log
                    launch "$gpus" ./train_gpt2cu $small -y 1 -o "$out/disturbed" >"$log" 2>&1 &
                    running=$!
                    await 60 grep -qs '^step ' "$log" && sleep "$(awk "BEGIN {srand($RANDOM); print 0.3 + 1.7 * rand()}")"
                    kill_one "$log"
                done
                steps=$(($(step_of disturbed) + 50))
                check "disturbed, to its end" launch "$gpus" ./train_gpt2cu -y 1 -o "$out/disturbed" --stop-after $steps
                check "undisturbed" launch "$gpus" ./train_gpt2cu $small --overwrite 1 -o "$out/undisturbed" --stop-after $steps
                damaged=$(cat "$out"/disturbed_?.log "$(log_of "disturbed, to its end")" | grep -c 'damaged\|not used')
                say "RESULT killed times=10 named=$named later_than_60_s=$late damaged=$damaged steps=$steps"
                check "named by the others, ten times" [ $named = 10 ]
                check "within 60 s all have ended, ten times" [ $late = 0 ]
                check "killed ten times, no checkpoint damaged" [ "$damaged" = 0 ]
                expect_same "killed ten times, equal to undisturbed" disturbed undisturbed
                forget disturbed undisturbed
            }

            # What a run's first checkpoint cost. Between the line of the step that it is of and its own, log.jsonl has the steps that
            # ran while it was written; only the terminal says how much of checkpoint_ms was waiting for its end. With --async-checkpoint
            # the rest is the copy and, the first time, pinning the host's memory for it.
            checkpoint_cost() { # run, name of its log, what it is called in the report
                local log=$out/$1/log.jsonl step waited beside
                step=$(grep -sm 1 checkpoint_ms "$log" | sed -nE 's/^\{"step": ([0-9]+),.*/\1/p')
                if [ -z "$step" ]; then bad "$2: no checkpoint in $log"; return; fi
                waited=$(sed -nE "s/^.*\"step\": $step, .*\"checkpoint_wait_ms\": ([0-9.e+-]+).*/\1/p" "$log" | head -n 1)
                beside=$(column <(sed "1,/\"step\": $step, \"loss\"/d; /\"step\": $step, \"checkpoint_ms\"/q" "$log") ms | sort -n |
                    awk '{a[NR] = $1} END {print "steps_beside=" NR " median_ms=" (NR ? a[int((NR + 1) / 2)] : "none") " largest_ms=" (NR ? a[NR] : "none")}')
                say "RESULT $3 step=$step $(sed -nE 's/^.*"checkpoint_ms": ([^,]+), "checkpoint_write_s": ([^,]+), "checkpoint_gb_s": ([^,}]+).*/checkpoint_ms=\1 write_s=\2 gb_s=\3/p' "$log" | head -n 1)" \
                    "waited_ms=${waited:-0} $beside before_median_ms=$(median_ms <(sed "/\"step\": $step, \"loss\"/q" "$log"))"
            }

            # What a checkpoint of 1558M costs the steps: written while they wait, and beside them. 120 steps take 20 s, in which the
            # first is written before the second begins. While that one is written a rank is killed: the run goes on from the first.
            ranks_checkpoints() {
                local d48="-e d48 -b 8 -t 1024 -x 2000 -v 0 -s 0 -z 1 --autotune 0 --overwrite 1" status step
                local waits="d48 saved, --async-checkpoint 0" goes_on="d48 saved, --async-checkpoint 1" cut="d48 killed while it wrote"
                rm -rf "$out"/saved_{0,1}
                check "$waits" launch "$gpus" ./train_gpt2cu $d48 -n 20 --stop-after 20 --async-checkpoint 0 -o "$out/saved_0"
                checkpoint_cost saved_0 "$waits" "d48_checkpoint async=0"
                rm -rf "$out/saved_0"

                writes_another() { [ -n "$(whole saved_1)" ] && compgen -G "$out/saved_1/ckpt/*.tmp/optimizer*" >/dev/null; }
                launch "$gpus" ./train_gpt2cu $d48 -n 120 -nk 2 --async-checkpoint 1 -o "$out/saved_1" >"$(log_of "$goes_on")" 2>&1 &
                running=$! named=0 late=0
                await 150 writes_another
                status=$?
                kill_one "$(log_of "$goes_on")"
                judge "$goes_on" $status
                checkpoint_cost saved_1 "$goes_on" "d48_checkpoint async=1"
                step=$(step_of saved_1)
                say "RESULT d48_cut complete=$(whole saved_1 | wc -l) newest=$step unfinished=$(find "$out/saved_1/ckpt" -name '*.tmp' | wc -l) named=$named later_than_60_s=$late"
                check "$cut: unfinished" [ "$(find "$out/saved_1/ckpt" -name '*.tmp' | wc -l)" = 1 ]
                check "$cut: named by the others, all ended" [ "$named $late" = "1 0" ]
                check "$cut: resumed" launch "$gpus" ./train_gpt2cu -y 1 -o "$out/saved_1" --stop-after $((step + 3))
                if [ "$step" -gt 0 ] && grep -q "^step *$((step + 1))/" "$(log_of "$cut: resumed")" && ! grep -q 'damaged\|not used' "$(log_of "$cut: resumed")"
                then ok "$cut: from the newest whole checkpoint"; else bad "$cut: from the newest whole checkpoint"; fi
                rm -rf "$out/saved_1"
            }

            for piece in ${GPU_CHECK_RANKS:-d12 d48 bert_large 124M 1558M phase1 curves kills checkpoints}; do
                piece_started=$SECONDS
                case $piece in
                    d12 | d48 | bert_large | 124M | 1558M | phase1 | curves | kills | checkpoints) if [ "$gpus" -gt 1 ]; then "ranks_$piece"; else say "skip $piece: one GPU"; fi ;;
                    *) bad "no piece of part ranks is called $piece" ;;
                esac
                say "ranks, $piece: $((SECONDS - piece_started)) s"
            done
            ;;
        *) bad "no part is called $part" ;;
    esac
    say "part $part: $((SECONDS - started)) s"
done
say "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
