#!/usr/bin/env bash
# The checks that need a GPU: build on this machine, test every kernel against its reference and the trainers end to end,
# compare training with PyTorch, run the sanitizers and the profiler, and benchmark. Each part takes at most ten minutes.
#
#     bash scripts/gpu_check.sh [--part PARTS] [--out FOLDER]      PARTS: "build bert", for example. Without it:
#                                                                  all parts except flags, fp8, ranks and older
#
#     build    programs in three precisions              ops      kernels against their references
#     e2e      train_gpt2cu end to end                   train    the same compared with transformers
#     bert     train_bertcu end to end and compared      bench bert_bench    speed, compared with PyTorch
#     tasks    finetune_bertcu, also compared with transformers
#     graph    --graph: the same bits as without, and the time of small steps
#     san      the ops under compute-sanitizer           tools    our NVTX ranges in ncu
#     scratch  planned and used scratch memory of attention's backward pass
#     fp8      --fp8: the same bits again, resumed and on several GPUs; gradients; waits; memory; losses; speed
#              and energy
#     flags    the effect of every flag, including those of the GPU build only
#     older    code for GPUs of compute capability 7.5, 8.6 and 8.9, from PTX, with the kernels chosen there
#     profile  the reports of --profile, compared with ncu and a plain listing of kernels
#     ranks    all GPUs together: speed, equal results, killed ranks, checkpoints
#
# Writes FOLDER/gpu_check.txt (default out/gpu_check): "RESULT name key=value ..." for every result and, at the end, "N
# passed, N failed". Full logs are in the same folder. Exit status 0 only if everything passed. Environment:
#   GPU_CHECK_DATA     a glob of shards of GPT-2 tokens to train on (default: the test corpus)
#   GPU_CHECK_BERT_DATA    a glob of files of prepare_bert.py for BERT to train on (default: the test corpus)
#   GPU_CHECK_OPS      ops for part san, "gelu gather" for example (default: all)
#   GPU_CHECK_BEFORE   folders with builds of train_gpt2cu and train_bertcu of other commits for part scratch to compare
#                      with
#   GPU_CHECK_SAN_SECONDS    limit for one tool on one op (default 560)
#   GPU_CHECK_PROFILE  pieces of part profile (default: "gpt2 bert published tools ranks")
#   GPU_CHECK_RANKS    pieces of part ranks (default: "d12 d48 bert_large 124M 1558M phase1 curves kills checkpoints",
#                      which take more than ten minutes on four GPUs)
#   GPU_CHECK_FP8      pieces of part fp8 (default: "tests bits ranks gradients waits memory curves speed"; speed takes
#                      more than ten minutes on fewer than four GPUs)
#   GPU_CHECK_TORCH_BERT    another BERT training step in PyTorch for part bert_bench: a script and its flags. It also gets
#                      -B batch -T length and prints a line "RESULT ... ms=..." as dev/reference/bert.py does
#   GPU_CHECK_OLDER_OPS    ops for part older (default: all)
#   GPU_CHECK_COMMIT   name of the sources if git cannot tell (default: the first line of .commit)
#   PYTHON             an interpreter with PyTorch and transformers (default python3)
set -u
cd "$(dirname "$0")/.."
usage="usage: gpu_check.sh [--part 'build ops e2e train bert tasks graph san scratch tools profile bench bert_bench flags fp8 ranks older'] [--out FOLDER]"
parts="build ops e2e train bert tasks graph san scratch tools profile bench bert_bench" out=out/gpu_check
while [ $# -gt 0 ]; do
    case $1 in
        --part) parts=${2:?$usage}; shift 2 ;;
        --out) out=${2:?$usage}; shift 2 ;;
        --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
# Losses are compared on the test corpus, because the built-in corpus changes.
gpt2_text=build/test_corpus/builtin/train.bin bert_text=build/test_corpus/builtin/bert/train.bin
python=${PYTHON:-python3}
mkdir -p "$out" && out=$(cd "$out" && pwd)
report=$out/gpu_check.txt
passed=0 failed=0
say() { echo "$*" | tee -a "$report"; }
ok() { passed=$((passed + 1)); say "ok   $*"; }
bad() { failed=$((failed + 1)); say "FAIL $*"; }
log_of() { echo "$out/$(tr -c 'A-Za-z0-9_\n' _ <<<"$1").log"; }
judge() { # name, exit status of the command with that log
    if [ "$2" = 0 ]; then ok "$1"; else bad "$1 (the end of its log follows)"; tail -n 12 "$(log_of "$1")" | tee -a "$report"; return 1; fi
}
check() { # name, command...: passes if the command does
    "${@:2}" >"$(log_of "$1")" 2>&1
    judge "$1" $?
}
# Commands that are not timed run two at a time: begin several, then finish them all.
begun=() at_once=2
begin() { # name, command...: check it, later
    while [ "$(jobs -rp | wc -l)" -ge $at_once ]; do wait -n; done
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
totals() { # add up the totals in a test program's log
    local p f
    p=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$out/$1.log" | tail -n 1 | sed -nE 's/^([0-9]+) passed.*/\1/p')
    f=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$out/$1.log" | tail -n 1 | sed -nE 's/.* ([0-9]+) failed.*/\1/p')
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0}))
    say "$1: ${p:-0} passed, ${f:-0} failed"
    grep '^FAIL' "$out/$1.log" | head -n 20 | tee -a "$report"
}
tests() { # name, command...: a program that prints its own totals
    local name=$1
    shift
    "$@" >"$out/$name.log" 2>&1 || { grep -qE '^[0-9]+ passed, [0-9]+ failed' "$out/$name.log" || { bad "$name ended early"; tail -n 5 "$out/$name.log" | tee -a "$report"; }; }
    totals "$name"
}
results() { grep '^RESULT' "$(log_of "$1")" | tee -a "$report"; }
column() { # log.jsonl, key: its values, one step per line
    sed -nE "s/.*\"step\": [0-9]+, \"loss\".*/&/; s/.*\"$2\": ([0-9.eE+-]+).*/\1/p" <(grep '"loss": [0-9]' "$1")
}
median_ms() { column "$1" ms | tail -n +6 | sort -n | awk '{a[NR] = $1} END {print a[int((NR + 1) / 2)]}'; }
quiet="-v 0 -s 0 -n 0 --overwrite 1"
train() { # build, name, flags...: a run into $out/name
    check "run $2" "$1" "${@:3}" $quiet -o "$out/$2"
}
begin_train() { # the same, later
    begin "run $2" "$1" "${@:3}" $quiet -o "$out/$2"
}
expect_near() { # name, run, run, tol, [key of log.jsonl]: losses, or else these numbers, of all steps
    local worst key=${5:-loss}
    worst=$(paste <(column "$out/$2/log.jsonl" "$key") <(column "$out/$3/log.jsonl" "$key") |
        awk 'NF == 2 {d = $1 - $2; if (d < 0) d = -d; if (d > m) m = d; n++} NF != 2 {n = -1e9} END {print (n > 0 ? m + 0 : 99)}')
    say "RESULT $1 steps=$(column "$out/$2/log.jsonl" loss | wc -l) max_${key}_difference=$worst tol=$4"
    if awk "BEGIN {exit !($worst <= $4)}"; then ok "$1"; else bad "$1"; fi
}
whole() { # run: the directories of its complete checkpoints, newest last
    find "$out/$1/ckpt" -maxdepth 1 -name '*[0-9]' 2>/dev/null | sort
}
step_of() { # run: step of its newest checkpoint, 0 without one
    local newest
    newest=$(whole "$1" | tail -n 1)
    echo $((10#0${newest##*/}))
}
expect_same() { # name, run, run: weights, moments and master weights of the newest checkpoints, bit for bit
    local file a b files
    a=$(whole "$2" | tail -n 1) b=$(whole "$3" | tail -n 1)
    # With -z 1 each rank writes a file of optimizer state.
    files=$(find "${a:-/dev/null}" -name '*.safetensors' -printf '%f\n' | sort)
    if [[ $files != *model.* || $files != *optimizer* ]]; then bad "$1: $2 has no checkpoint of model and optimizer"; return; fi
    if [ "$files" != "$(find "${b:-/dev/null}" -name '*.safetensors' -printf '%f\n' | sort)" ]; then bad "$1: $3 has other files"; return; fi
    for file in $files; do
        if ! cmp -s "$a/$file" "$b/$file"; then bad "$1: $file differs"; return; fi
    done
    ok "$1"
}
# One process per GPU, on the first GPUs.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
launch() { # ranks, command...
    if [ "$1" = 1 ]; then "${@:2}"; else mpirun -np "$1" --bind-to none --oversubscribe "${@:2}"; fi
}
forget() { # runs: delete their weights, keep the logs
    local run
    for run; do rm -rf "$out/$run/ckpt" "$out/$run"/*.safetensors; done
}
explained() { # name, profile, flags of check_profile.py: the profile adds up
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
count_gpus() { # of CUDA_VISIBLE_DEVICES, if it is set
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then tr , '\n' <<<"$CUDA_VISIBLE_DEVICES"; else nvidia-smi -L; fi | wc -l
}
gpu_at() { # index, from 0: what CUDA_VISIBLE_DEVICES calls that GPU
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then cut -d , -f $(($1 + 1)) <<<"$CUDA_VISIBLE_DEVICES"; else echo "$1"; fi
}
at_least() { # number, limit, name
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
            check build_cpu make -s -j "$(nproc)" cpu "$gpt2_text"
            # One make per precision, which is a variable of the Makefile.
            for precision in bf16 fp32 fp16; do
                case $precision in
                    bf16) more="build/bf16/test_bertcu train_gpt2cu train_bertcu finetune_bertcu" ;;
                    fp32) more="build/fp32/test_bertcu build/fp32/train_bertcu build/fp32/finetune_bertcu" ;;
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
            small="-i $gpt2_text -e L=4,C=128,NH=4,V=257,T=256 -b 4 -x 20 --dropout 0.1"
            same_training "" ./train_gpt2 $fp32 $bf16 10 $small

            # Two ways that differ only in rounding differ by about 1e-7 in fp32 losses. AdamW divides small gradients
            # by their own size and turns that into 1e-6 within 20 steps. bf16 rounds each activation to 1 part in 512,
            # so two ways drift apart like bf16 and fp32, by about 1e-3 (compare_autocast.py measures that).
            near_fp32=1e-5 near_bf16=5e-3
            many="-i $gpt2_text -e L=4,C=128,NH=4,V=257,T=256 -d 16384 -x 20 --dropout 0.1"
            # 124M's channels, so that the kernels are those of a real run. --autotune 0: the same algorithms in all
            # runs.
            wide="-i $gpt2_text -e L=2,C=768,NH=12,V=257,T=1024 -b 4 -x 8 --dropout 0.1 --autotune 0"
            begin_train $bf16 bf16_explicit $small --attention materialized
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

            # Large enough for timed matmul algorithms: a resumed run uses those of its checkpoint and times none.
            plans="-i $gpt2_text -e L=2,C=768,NH=12,V=257,T=1024 -b 8 -x 8 -v 0 -s 0 -n 0 --overwrite 1"
            rm -rf "$out"/plans*
            check plans_first_4 ./train_gpt2cu $plans --stop-after 4 -o "$out/plans"
            mkdir -p "$out/plans_straight" && mv "$out/plans/matmul_plans.txt" "$out/plans_straight"
            check plans_straight ./train_gpt2cu $plans -o "$out/plans_straight"
            check plans_resumed ./train_gpt2cu -y 1 -o "$out/plans"
            if cmp -s "$out/plans/model.safetensors" "$out/plans_straight/model.safetensors" && [ ! -e "$out/plans/matmul_plans.txt" ]
            then ok "resumed with the checkpoint's matmul algorithms"; else bad "resumed with the checkpoint's matmul algorithms"; fi
            # One long document among 300 of about 400 tokens, with dropout: one thread for each pair of a row and a
            # position in the longest sequence would be too many.
            "$python" - "$out/documents.bin" <<'END'
import array, random, sys
random.seed(5)
tokens = []
while len(tokens) < 2 * 131072 + 1:
    many = 20000 if len(tokens) % 131072 < 800 else random.randint(1, 800)
    tokens += [256] + [random.choice(b"etaoin shrdlu") for _ in range(many)]
del tokens[2 * 131072 + 1 :]
header = [20240520, 1, len(tokens)] + [0] * 253
open(sys.argv[1], "wb").write(array.array("i", header).tobytes() + array.array("H", tokens).tobytes())
END
            documents="-i $out/documents.bin -e L=2,C=128,NH=16,V=257,T=8192 -t 8192 -b 16 --doc-mask 1 --dropout 0.1 -x 2"
            train $fp32 documents_fp32 $documents
            train $bf16 documents_bf16 $documents
            train $bf16 documents_bf16_again $documents
            expect_near "documents at T=8192, bf16 against fp32" documents_bf16 documents_fp32 $near_bf16
            check "documents at T=8192 repeat" diff <(column "$out/documents_bf16/log.jsonl" loss) <(column "$out/documents_bf16_again/log.jsonl" loss)
            rm -f "$out/documents.bin"
            forget documents_{fp32,bf16,bf16_again}
            forget bf16 bf16_explicit {fp32,bf16}_{1x64,4x16} plans plans_straight \
                {bf16,fp32,bf16_epilogue}_recompute_{0,1,2}
            ;;
        train)
            if [ -n "${GPU_CHECK_DATA:-}" ]; then
                text=(-i "$GPU_CHECK_DATA" -e d12 -b 16 -t 1024) shard=$(compgen -G "$GPU_CHECK_DATA" | head -n 1)
            else
                text=(-i "$gpt2_text" -e L=6,C=384,NH=6,T=256 -b 32) shard=$gpt2_text
            fi
            # fp16 loses small gradients without loss scaling. With it: within 1 % of bf16 after 200 steps of real text.
            for precision in bf16 fp16; do
                train build/$precision/train_gpt2cu text_$precision "${text[@]}" -x 200 -l 6e-4 -u 20
                forget text_$precision
            done
            read -r bf16 fp16 < <(for precision in bf16 fp16; do
                column "$out/text_$precision/log.jsonl" loss | tail -n 20 | awk '{s += $1} END {printf "%.6f ", (NR == 20 ? s / NR : 0)}'; done; echo)
            say "RESULT fp16_against_bf16 steps=200 bf16=$bf16 fp16=$fp16 relative=$(awk "BEGIN {print $fp16 / ($bf16 + 1e-30) - 1}") tol=0.01"
            if awk "BEGIN {d = $fp16 - $bf16; if (d < 0) d = -d; exit !($bf16 > 0 && $fp16 > 0 && d <= 0.01 * $bf16)}"
            then ok fp16_against_bf16; else bad fp16_against_bf16; fi

            # Both start from the same fp32 weights. With warm-up: without it the loss jumps at step 9, where PyTorch's
            # fp32 differs from its own fp64 by 8e-4.
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
            same_training bert_ ./train_bert build/fp32/train_bertcu ./train_bertcu 5 -i "$bert_text" -e L=4,C=128,NH=4,T=64 -b 8 -x 10 --dropout 0.1
            forget bert_bf16

            # BERT-base without dropout, on the batches that our trainer draws. Warmed up for 20 steps only, it diverges
            # for a while on the test corpus, in PyTorch too, and comes back by two ways that are 6 % apart.
            compare() { # name, flags...
                begin "$1" "$python" dev/reference/compare_autocast.py ./train_bertcu --bert --dump build/bf16/test_bertcu \
                    --tokens "${GPU_CHECK_BERT_DATA:-$bert_text}" --layers 12 --channels 768 --heads 12 -t 128 -b 32 "${@:2}"
            }
            compare compare_autocast_bert --steps 50 --seeds 3 --ratio 2
            compare compare_final_bert --steps 200 --warmup 100 --final 0.01 --losses "$out/compare_final_bert.txt"
            finish
            results compare_autocast_bert
            results compare_final_bert
            ;;
        tasks)
            tests tasks bash dev/test/tasks.sh build/fp32/finetune_bertcu
            # The same examples and initial weights for both: fp32 against transformers, then CPU against GPU with
            # dropout.
            for task in classify answer; do
                work=$out/task_$task
                case $task in classify) suffix=tsv more=(--labels 2) ;; *) suffix=json more=(--stride 42) ;; esac
                check "transformers $task" "$python" dev/reference/check_task.py $task --program build/fp32/finetune_bertcu --work "$work"
                say "$(grep steps: "$(log_of "transformers $task")")"
                # finetune_bert writes no samples.
                quiet="-v 0 -n 0 --overwrite 1" same_training "${task}_" ./finetune_bert build/fp32/finetune_bertcu ./finetune_bertcu 7 -e "$work/start" --task $task \
                    -i "$work/train.$suffix" "${more[@]}" -t 128 -b 8 -x 20 -l 1e-3 --dropout 0.1
                forget "${task}_bf16" "task_$task/out"
                rm -rf "$work/start"
            done
            ;;
        graph)
            begin graph_gpt2 bash dev/test/graph.sh ./train_gpt2cu
            begin graph_bert bash dev/test/graph.sh ./train_bertcu
            finish
            totals graph_gpt2
            totals graph_bert
            # Small steps without and with graphs, in turn. All runs have the matmul algorithms that the first one timed.
            in_turn() { # name, program, flags...
                local name=$1 way run
                rm -rf "$out"/graph_{0,1} "$out/plans.txt"
                for way in 0 1 0 1; do
                    run=graph_$way
                    [ -e "$out/plans.txt" ] || cp "$out/graph_0/matmul_plans.txt" "$out/plans.txt" 2>/dev/null
                    rm -rf "$out/$run" && mkdir "$out/$run"
                    [ ! -e "$out/plans.txt" ] || cp "$out/plans.txt" "$out/$run/matmul_plans.txt"
                    check "$name, --graph $way" timeout 60 "${@:2}" $quiet --graph $way -o "$out/$run"
                    say "RESULT graph run='$name' graph=$way ms=$(median_ms "$out/$run/log.jsonl") $(grep '^graphs: ' "$(log_of "$name, --graph $way")")"
                done
                expect_same "$name: the same bits" graph_0 graph_1
                forget graph_{0,1}
            }
            # Where Python has no numpy, the test corpus: fewer of its tokens are masked.
            mkdir -p "$out/full_128" && full_128=$out/full_128/train.bin
            "$python" dev/reference/make_sentences.py "$full_128" --shortest 128 >"$(log_of full_128)" 2>&1 || full_128=$bert_text
            in_turn "two layers of BERT-large" ./train_bertcu -e L=2,C=1024,NH=16,T=512,V=30522 -b 4 -t 128 -i "$full_128" \
                --optimizer lamb --dropout 0.1 --short-sequences 0 -k poly -u 40 -x 400
            in_turn "GPT-2 124M, 128 tokens" ./train_gpt2cu -i "$gpt2_text" -e d12 -b 1 -t 128 --dropout 0.1 -q 0.1 -u 20 -x 200
            in_turn "GPT-2 of 4 layers, C=256" ./train_gpt2cu -i "$gpt2_text" -e L=4,C=256,NH=4,V=257,T=256 -b 4 --dropout 0.1 -q 0.1 -x 400
            rm -rf "$out/full_128"
            ;;
        san)
            # The ops at their test sizes under each tool, several at a time. cuBLASLt's kernels are not ours to check:
            # memcheck checks all of matmul, because it only tests that accesses stay inside the operands; the other
            # tools check only our kernels. The memory that those read is filled by the test or cleared by
            # device_scratch() before cuBLASLt writes to it, so initcheck, which cannot see cuBLASLt's stores, counts it
            # as initialised. racecheck fails by itself on cuBLASLt: it runs matmul_epilogue, our kernels without the
            # products.
            ops="attention attention_documents layernorm dropout gather gelu classifier embedding adamw lamb \
loss_scale global_norm next_sentence accuracy cast_to_fp32 cast_bf16 matmul matmul_epilogue \
layernorm_fp8 quantize linear linear_input mean_bias target_rounding fp8_scales"
            names=()
            for tool in memcheck racecheck initcheck synccheck; do
                for op in ${GPU_CHECK_OPS:-$ops}; do
                    case $tool\ $op in
                        racecheck\ matmul) ;;
                        *) names+=("$tool $op") ;;
                    esac
                done
            done
            # initcheck does not see stores of cuBLASLt's kernels through the copy engine, so it cannot judge kernels
            # that read them.
            san() {
                local which=  # kernels
                [ "$1" = initcheck ] && which="--kernel-name-exclude kernel_substring=_softmax_kernel"
                [[ $1 != memcheck && $2 =~ ^matmul(_hopper)?$ ]] && which="--kernel-name kernel_substring=matmul_"
                local log=$out/$1_$2.log status
                timeout ${GPU_CHECK_SAN_SECONDS:-560} compute-sanitizer --tool "$1" $which --error-exitcode 9 \
                    build/bf16/opscu test "$2" >"$log" 2>&1
                status=$?
                # racecheck does not see all synchronization in cuBLASLt's kernels either, and ends with an error
                # of its own if they are excluded. So of linear's races those count that are in our kernels.
                if [ "$1 $2 $status" = "racecheck linear 9" ] && grep -q '^[0-9]* passed, 0 failed' "$log" &&
                    grep -q 'Race reported' "$log" && ! grep 'Race reported' "$log" | grep -qv nvjet; then status=0; fi
                echo $status >"$out/$1_$2.status"
            }
            export -f san
            export out
            printf '%s\n' "${names[@]}" | xargs -P 8 -I{} bash -c 'san $1' _ {}
            for name in "${names[@]}"; do
                status=$(cat "$out/${name/ /_}.status") && rm -f "$out/${name/ /_}.status"
                if [ "$status" = 0 ]; then ok "$name"; else bad "$name ended with $status"; tail -n 12 "$out/${name/ /_}.log" | tee -a "$report"; fi
            done
            ;;
        scratch)
            # The memory plan's line and a profiled run's "scratch", planned and used, in MiB. GPT-2 124M takes 40 MiB
            # for sums in slots of blocks (211 with sums of all heads); BERT's phase 1 takes none (207 once).
            scratch_of() { # name, folder, trainer, flags...
                check "scratch of $1" "$2/$3" "${@:4}" -x 12 --profile 2 $quiet -o "$out/scratch"
                say "RESULT scratch run='$1' $(sed -nE 's/^scratch +([0-9.]+) +([0-9.]+).*/planned_mib=\1 taken_mib=\2/p' "$out/scratch/profile/profile.txt")" \
                    "ms=$(median_ms "$out/scratch/log.jsonl") $(grep -E '^attention_backward_hopper' "$out/scratch/profile/profile.txt" | head -n 1)"
                say "$("$2/$3" "${@:4}" -x 0 | grep '^memory plan')"
                forget scratch
            }
            mkdir -p "$out/full_128"
            check full_128 "$python" dev/reference/make_sentences.py "$out/full_128/train.bin" --shortest 128
            for folder in . ${GPU_CHECK_BEFORE:-}; do
                scratch_of "GPT-2 124M, -b 64, $folder" "$folder" train_gpt2cu -e d12 -b 64 -t 1024
                scratch_of "GPT-2 124M, -b 8, heads divided, $folder" "$folder" train_gpt2cu -e d12 -b 8 -t 1024
                scratch_of "BERT-large phase 1, $folder" "$folder" train_bertcu -e bert-large -b 256 -t 128 -i "$out/full_128/train.bin" \
                    --optimizer lamb --dropout 0.1 --short-sequences 0
                scratch_of "BERT-large phase 2, $folder" "$folder" train_bertcu -e bert-large -b 64 -t 512 --optimizer lamb --dropout 0.1
            done
            rm -rf "$out/full_128"
            ;;
        flags)
            tests flags_gpt2 bash dev/test/flags.sh ./train_gpt2cu
            tests flags_bert bash dev/test/flags.sh ./train_bertcu
            tests flags_tune bash dev/test/flags.sh ./finetune_bertcu
            tests flags_fp32 bash dev/test/flags.sh build/fp32/train_gpt2cu --tf32
            ;;
        tools)
            # ncu selects by our NVTX ranges: exactly the kernels of one layer's forward pass in one step.
            tiny="-e L=4,C=256,NH=4,V=257,T=256 -b 4 -x 3 --autotune 0 -v 0 -s 0 -n 0"
            for range in "step 2" "step 2/forward/layer 2" "step 2/backward/layer 2"; do
                name=ncu_$(tr -d ' ' <<<"${range//\//_}")
                # A single name needs a slash to match a nested range.
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
                # Ours and PyTorch's in one line per shape, TFLOP/s forward/backward.
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
            # Size, batch and the tokens/s to reach.
            for size in "d12 64 580000" "d24 32 0" "d36 16 0" "d48 16 51000"; do
                read -r model batch gate <<<"$size"
                train ./train_gpt2cu "train_$model" -e "$model" -b "$batch" -t 1024 -x 55 --profile 5
                ms=$(median_ms "$out/train_$model/log.jsonl")
                speed=$(awk "BEGIN {print int($batch * 1024 / ${ms:-1e9} * 1000)}")
                profile=$(sed -n '/^Where the step/,/^whole profile/p' "$(log_of "run train_$model")")
                rest=$(awk '/^= start of the first row/ {all = $(NF - 1)} /^By op/ {exit} /^(matmul|attention) +[0-9]/ {part += $3} END {printf "%.2f", all - part}' <<<"$profile")
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
            sentences() { # folder, flags...: text with chosen sequence lengths
                mkdir -p "$out/$1"
                check "$1" "$python" dev/reference/make_sentences.py "$out/$1/train.bin" "${@:2}"
            }
            against() { # name, script and flags...: PyTorch's step compared with ours, at $batch and $T
                check "$1" timeout 240 "$python" "${@:2}"
                results "$1"
                say "RESULT compare size=large B=$batch T=$T peer=$1 torch_ms_over_ours=$(sed -nE 's/^RESULT .* ms=([0-9.]+) .*/\1/p' "$(log_of "$1")" |
                    awk "{print \$1 / ${full_ms:-1e9}}")"
            }
            # Batch, length and the full sequences/s to reach.
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
                against torch_bert_$T dev/reference/bert.py -b "$batch" -t "$T"
                if [ -n "${GPU_CHECK_TORCH_BERT:-}" ]; then
                    against other_torch_bert_$T $GPU_CHECK_TORCH_BERT -B "$batch" -T "$T"
                fi
            done
            # The published step whose kernels are counted: two layers of BERT-large.
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
        older)
            # PTX alone, which this GPU's driver compiles when a program starts, and LLMC_TEST_DEVICE for the kernels
            # that the launchers choose on such a GPU. Heads of 128 are materialized on 7.5, which a line says. Shared
            # memory is compared without cuBLASLt's kernels, which are those of the GPU that is here.
            gpus="75_fp16 75_fp32 86_bf16 89_bf16" at_once=8
            small="-i $gpt2_text -e L=2,C=256,NH=4,V=257,T=256 -b 4 -x 20 --dropout 0.1"
            for gpu in $gpus; do
                begin "build_$gpu" make -s -j 4 B="build/ptx$gpu" ARCH= PTX="${gpu%_*}" PRECISION="${gpu#*_}" \
                    "build/ptx$gpu/${gpu#*_}/opscu" "build/ptx$gpu/${gpu#*_}/train_gpt2cu"
            done
            begin_train ./train_gpt2 older_cpu $small
            finish
            for gpu in $gpus; do
                folder=build/ptx$gpu/${gpu#*_} device=LLMC_TEST_DEVICE=${gpu%_*}
                # shellcheck disable=SC2086
                begin "ops_$gpu" env $device "$folder/opscu" test ${GPU_CHECK_OLDER_OPS:-}
                begin "run older_$gpu" env $device "$folder/train_gpt2cu" $small -n 0 -s 0 -v 0 --profile 2 -o "$out/older_$gpu"
                begin "run heads_$gpu" env $device "$folder/train_gpt2cu" ${small/NH=4/NH=2} -n 0 -s 0 -v 0 --profile 2 -o "$out/heads_$gpu"
            done
            finish
            for gpu in $gpus; do
                totals "ops_$gpu"
                case $gpu in 75_fp32) near=1e-4 ;; *) near=5e-3 ;; esac
                expect_near "older_${gpu}_against_the_CPU" older_cpu "older_$gpu" $near
                check "shared_$gpu" "$python" - "${gpu%_*}" "$out/older_$gpu" "$out/heads_$gpu" <<'END'
import csv, re, sys
rows = [row for run in sys.argv[2:] for row in csv.DictReader(open(run + "/profile/kernels.csv", newline=""))]
own = {row["kernel"]: int(float(row["shared_bytes"])) for row in rows
       if row["shared_bytes"] and not re.search("nvjet|cutlass|cublas|gemm|xmma|splitK", row["full_name"] or row["kernel"])}
most = max(own, key=own.get)
print(f"RESULT older gpu={sys.argv[1]} kernels={len(own)} most_shared_bytes={own[most]} in={most}")
print("kernels:", ", ".join(sorted(own)))
assert own[most] <= (65536 if sys.argv[1] == "75" else 101376) and not any("hopper" in name for name in own)
END
                results "shared_$gpu"
                grep -h '^kernels' "$(log_of "shared_$gpu")" | tee -a "$report"
            done
            # Heads of 128 need more shared memory than 7.5 has.
            if grep -q 'heads of 128 channels is materialized' "$(log_of "run heads_75_fp16")" &&
                ! grep -q 'is materialized' "$(log_of "run heads_86_bf16")"
            then ok "heads of 128 on 7.5"; else bad "heads of 128 on 7.5"; fi
            at_once=2
            ;;
        profile)
            # The reports of --profile add up and agree with other tools; a warning says so if CUPTI is missing or in
            # use.
            mkdir -p "$out/reports"
            reported() { # name, command...: a profiled run; its report is kept
                train "${@:2:1}" "profile_$1" "${@:3}" -x 65 --profile 5
                explained "profile_$1" "$out/profile_$1/profile" --overhead 10
                for file in profile.txt profile.html; do cp "$out/profile_$1/profile/$file" "$out/reports/$1.${file#*.}"; done
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
                    cp "$run/profile.txt" "$out/reports/$name.txt"
                done
            }
            profile_tools() {
                # The same step in ncu, which sees only kernels, and in a listing by another tool; without --autotune
                # the matmul algorithms are the same. Kernel times depend on the clock, so both runs begin on an idle
                # GPU and are compared at the same steps.
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
                check "profile under another tool" env KERNEL_LIST=/dev/null CUDA_INJECTION64_PATH="$out/kernel_list.so" ./train_gpt2cu $tiny $quiet -o "$out/profile_other"
                for name in "profile under ncu" "profile under another tool"; do
                    check "$name: a line says so" grep -Eq '^warning: (CUPTI: )?another tool profiles this process' "$(log_of "$name")"
                done
                # Without CUPTI's library, if this shell may hide it.
                hide='for f in $(find / -xdev -name "libcupti.so*" -type f 2>/dev/null); do mount --bind /dev/null "$f" || exit 9; done; exec "$@"'
                if unshare -m bash -c "$hide" _ ./train_gpt2cu $tiny $quiet -o "$out/profile_none" >"$out/profile_none.log" 2>&1; then
                    check "without CUPTI a line says so" grep -q '^warning: CUPTI .* is not found' "$out/profile_none.log"
                    check "without CUPTI ops are timed" grep -q '^times .*of ops, by CUDA events' "$out/profile_none.log"
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
        fp8)
            gpus=$(count_gpus)
            text=${GPU_CHECK_DATA:-$gpt2_text}
            fp8_run=(-i "$text" -e d12 -b 16 -t 1024 -d 65536 -x 24 -n 12 -l 1e-4 -u 20 -v 0 -s 0 --overwrite 1
                --autotune 0 --fp8 2)
            fp8_tests() {
                begin fp8_gpt2 bash dev/test/fp8.sh ./train_gpt2cu
                begin fp8_bert bash dev/test/fp8.sh ./train_bertcu
                finish
                totals fp8_gpt2
                totals fp8_bert
            }
            # The same run twice, and stopped after step 12 and resumed. Scales are measured until step 16.
            fp8_same() { # ranks, flags...
                local n=$1 what="fp8, ranks=$1${2:+, ${*:2}}" run=(launch "$1" ./train_gpt2cu)
                [ "$n" = 1 ] || run+=(-z 1)
                check "$what" "${run[@]}" "${fp8_run[@]}" "${@:2}" -o "$out/fp8_straight"
                check "$what, again" "${run[@]}" "${fp8_run[@]}" "${@:2}" -o "$out/fp8_again"
                expect_same "$what: repeated, the same bits" fp8_again fp8_straight
                check "$what, to step 12" "${run[@]}" "${fp8_run[@]}" "${@:2}" --stop-after 12 -o "$out/fp8_stopped"
                check "$what, from step 12" "${run[@]}" -y 1 -o "$out/fp8_stopped"
                expect_same "$what: resumed, the same bits" fp8_stopped fp8_straight
                forget fp8_{straight,again,stopped}
            }
            fp8_bits() {
                fp8_same 1
                fp8_same 1 --fp8-exclude-forward attn.c_attn --fp8-steps 18
            }
            scales_of() { # run: scales and largest elements of its newest checkpoint
                grep -o '"fp8": "[0-9a-f]*"' "$(whole "$1" | tail -n 1)/trainer.json"
            }
            same_scales() { # run, run
                [ -n "$(scales_of "$1")" ] && [ "$(scales_of "$1")" = "$(scales_of "$2")" ]
            }
            # All losses, gradients and scales at a rate of 0, and the losses of five steps at 1e-4. While weights
            # change, the order of a sum decides how some of them are rounded, and in fp8 such differences grow
            # within 20 steps.
            fp8_ranks() {
                local n log="$out/fp8_straight/log.jsonl" still=("${fp8_run[@]/#1e-4/0}") five=("${fp8_run[@]/#24/5}")
                [ "$gpus" -gt 1 ] || { say "skip fp8 on several GPUs: one GPU"; return; }
                check "fp8, one rank, -l 0" ./train_gpt2cu "${still[@]}" -o "$out/fp8_still_1"
                check "fp8, one rank, five steps" ./train_gpt2cu "${five[@]}" -o "$out/fp8_five_1"
                for ((n = 2; n <= gpus; n *= 2)); do
                    check "fp8, ranks=$n, -l 0" launch "$n" ./train_gpt2cu -z 1 "${still[@]}" -o "$out/fp8_still"
                    expect_near "fp8, ranks=$n, -l 0: losses of one" fp8_still fp8_still_1 1e-5
                    expect_near "fp8, ranks=$n, -l 0: gradient norms of one" fp8_still fp8_still_1 1e-4 grad_norm
                    check "fp8, ranks=$n, -l 0: scales of one" same_scales fp8_still fp8_still_1
                    check "fp8, ranks=$n, five steps" launch "$n" ./train_gpt2cu -z 1 "${five[@]}" -o "$out/fp8_five"
                    expect_near "fp8, ranks=$n, five steps: losses of one" fp8_five fp8_five_1 1e-3
                    fp8_same "$n"
                    check "fp8, $n ranks: weights_hash at each checkpoint" [ "$(grep -c weights_hash "$log")" = 2 ]
                done
                forget fp8_{still,five}{,_1}
            }
            # Of d12, new and after 400 steps in fp8, on the same 65,536 tokens.
            fp8_gradients() {
                local start level step=(-i "$text" -b 16 -t 1024 -d 65536 -x 1 -l 0 --beta1 0 --clip 0 -v 0 -s 0
                    --overwrite 1)
                check "fp8: 400 steps" ./train_gpt2cu -i "$text" -e d12 -b 64 -t 1024 -x 400 -l 6e-4 -u 100 -c 0.1 \
                    --fp8 2 $quiet -o "$out/fp8_trained"
                for start in d12 "$out/fp8_trained"; do
                    check "fp8: gradients in fp32" build/fp32/train_gpt2cu -e "$start" "${step[@]}" -o "$out/fp8_fp32"
                    for level in 2 0; do
                        check "fp8: gradients with --fp8 $level" \
                            ./train_gpt2cu -e "$start" "${step[@]}" --fp8 $level -o "$out/fp8_$level"
                    done
                    check "fp8: gradients of ${start##*/}" \
                        "$python" dev/reference/fp8_gradients.py "$out"/fp8_{fp32,2,0}
                    results "fp8: gradients of ${start##*/}"
                done
                forget fp8_{trained,fp32,2,0}
            }
            fp8_waits() {
                local level what="fp8: no more waits and readbacks than in bf16"
                for level in 0 2; do
                    check "fp8: profile with --fp8 $level" ./train_gpt2cu -i "$text" -e d12 -b 64 -t 1024 -x 26 \
                        --fp8 $level --profile 3 --profile-warmup 20 $quiet -o "$out/fp8_waits_$level"
                done
                check "$what" "$python" dev/reference/check_profile.py "$out/fp8_waits_2/profile" \
                    --waits-of "$out/fp8_waits_0/profile"
                results "$what"
                forget fp8_waits_{0,2}
            }
            # Sizes whose speed and memory are compared: name, flags of fp8_speed.py, command.
            fp8_bert_text=${GPU_CHECK_BERT_DATA:-$bert_text}
            fp8_bert="./train_bertcu -e bert-large -i $fp8_bert_text --optimizer lamb"
            fp8_bert+=" --dropout 0.1 --short-sequences 0 -l 1e-3 -u 100"
            fp8_gpt2="-t 1024 -i $text -l 6e-4 -u 100 -c 0.1"
            fp8_sizes=(
                "d12 --settle 400 -- ./train_gpt2cu -e d12 -b 64 $fp8_gpt2"
                "bert-large --settle 400 -- $fp8_bert -b 256 -t 128"
                "bert-large512 --settle 400 -- $fp8_bert -b 64 -t 512"
                "d48 --apart --settle 150 -- ./train_gpt2cu -e d48 -b 16 $fp8_gpt2")
            # The memory plan, and what was allocated after three steps.
            fp8_memory() {
                local size level name
                set -f # the trainers expand their globs
                for size in "${fp8_sizes[@]}"; do
                    for level in 0 2; do
                        name="fp8: memory of ${size%% *} with --fp8 $level"
                        check "$name" ${size#*-- } --fp8 $level -x 3 --profile 1 --profile-warmup 1 $quiet \
                            -o "$out/fp8_memory"
                        say "RESULT fp8_memory size=${size%% *} fp8=$level" "$(sed -nE \
                            's/^together +([0-9.]+) +([0-9.]+)$/planned_mib=\1 allocated_mib=\2/p' \
                            "$out/fp8_memory/profile/profile.txt")"
                    done
                done
                set +f
                forget fp8_memory
            }
            last_of() { # run, key of log.jsonl
                sed -nE "s/.*\"$2\": ([0-9.eE+-]+).*/\1/p" "$out/$1/log.jsonl" | tail -n 1
            }
            # BERT of 4 layers for 12,000 steps: its accuracy at most 0.5 points lower. BERT-large for 300
            # steps: its loss at most 0.5 % higher.
            fp8_curves() {
                local level run name small="./train_bertcu -e L=4,C=512,NH=8,V=30522,T=512 -b 256 -t 128 -x 12000
                    -u 2000 -l 7e-4 -k linear -c 0.01 --dropout 0.1 -v 12000 -i $fp8_bert_text"
                [ "$gpus" -gt 1 ] || at_once=1
                set -f
                for run in "small $small" "large $fp8_bert -b 256 -t 128 -x 300 -v 300"; do
                    for level in 0 2; do
                        begin "fp8: curve of ${run%% *} with --fp8 $level" \
                            env CUDA_VISIBLE_DEVICES="$(gpu_at $((level / 2 % gpus)))" ${run#* } \
                            -j "${fp8_bert_text/train/val}" -m 0 -s 0 -n 0 --overwrite 1 --fp8 $level \
                            -o "$out/fp8_${run%% *}_$level"
                    done
                    finish
                done
                set +f
                at_once=2
                for name in fp8_{small,large}_{0,2}; do
                    say "RESULT fp8_curve run=$name $(grep -h '"val_' "$out/$name/log.jsonl" | tail -n 1)"
                done
                check "fp8: accuracies of small" awk "BEGIN {d = $(last_of fp8_small_2 val_mlm_accuracy) - \
                    $(last_of fp8_small_0 val_mlm_accuracy); exit !(d > -0.005)}"
                check "fp8: losses of large" awk "BEGIN {r = $(last_of fp8_large_2 val_loss) / \
                    $(last_of fp8_large_0 val_loss); exit !(r < 1.005)}"
                forget fp8_{small,large}_{0,2}
            }
            # Means of 30 s after 15 s, in turn on one GPU, after 400 steps (d48: 150). Every GPU takes its share of the
            # sizes.
            fp8_speed_on() { # GPU
                local i
                set -f
                for ((i = $1; i < ${#fp8_sizes[@]}; i += gpus)); do
                    CUDA_VISIBLE_DEVICES=$(gpu_at "$1") "$python" dev/reference/fp8_speed.py \
                        ${fp8_sizes[i]/ -- / --seconds 30 --out $out -- } || return
                done
            }
            fp8_speed() {
                local i
                at_once=$gpus
                for ((i = 0; i < gpus && i < 4; i++)); do begin "fp8 speed on GPU $i" fp8_speed_on $i; done
                finish
                at_once=2
                for ((i = 0; i < gpus && i < 4; i++)); do results "fp8 speed on GPU $i"; done
            }
            for piece in ${GPU_CHECK_FP8:-tests bits ranks gradients waits memory curves speed}; do
                case $piece in
                    tests | bits | ranks | gradients | waits | memory | curves | speed)
                        piece_started=$SECONDS
                        fp8_$piece
                        say "fp8, $piece: $((SECONDS - piece_started)) s"
                        ;;
                    *) bad "no piece of part fp8 is called $piece" ;;
                esac
            done
            ;;
        ranks)
            gpus=$(count_gpus)
            # Mean of the last two thirds of a run's steps. Not their median: at the power limit step times vary by 10 %
            # within a second, few of them long, and take some seconds to settle (dev/LOG.md).
            step_ms() { sed -nE 's/^step .*\| ([0-9.]+) ms \|.*/\1/p' "$(log_of "$1")" | awk '{a[NR] = $1} END {for (i = int(NR / 3) + 1; i <= NR; i++) {s += a[i]; n++} if (n) printf "%.1f", s / n}'; }
            # `sample` records the GPUs' power and clocks five times a second. `sampled` stops that and prints the means
            # over busy samples, and the fraction of them in which the power limit lowered the clock.
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
            # Linear speed: all GPUs run at the same time, each on its own, with the same matmul algorithms as together.
            # The all-reduce overlaps with the backward pass (--bucket 16) or runs once after it; which is faster
            # depends on the model. Steps of several micro-batches run on all GPUs with the default --bucket: the
            # all-reduce is a small part.
            scaling() { # name, sequences a GPU, tokens a sequence, micro-batches, steps, command...
                local name=$1 batch=$2 T=$3 micro=$4 steps=$5 first=2 i n way ms power of_linear best mean slowest alone=() ways=()
                shift 5
                set -- "$@" --autotune 0
                for way in "-z 0" "-z 1"; do ways+=("$way --bucket 16" "$way --bucket 1000000"); done
                ways+=("-z 1 --reduce bf16")
                [ "$micro" = 1 ] || first=$gpus ways=("-z 0" "-z 1")
                sample
                for ((i = 0; i < gpus; i++)); do
                    CUDA_VISIBLE_DEVICES=$(gpu_at $i) "$@" -b "$batch" -t "$T" -d $((batch * T * micro)) -x "$steps" \
                        $quiet -o "" >"$(log_of "$name alone $i")" 2>&1 &
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
            # Runs of 17 seconds with one micro-batch per step, the most expensive case: all gradients are summed after
            # each.
            ranks_d12() { scaling d12 64 1024 1 160 ./train_gpt2cu -e d12; }
            ranks_d48() { scaling d48 16 1024 1 56 ./train_gpt2cu -e d48; }
            ranks_bert_large() { scaling_bert_large bert-large 1 140; }
            # As in scripts/run_gpt2_124M.sh, run_gpt2_1558M.sh and run_bert_large_phase1.sh: half a million tokens, a
            # million tokens, 64 K sequences per step, rounded to whole micro-batches. On eight GPUs 124M's step is one
            # micro-batch.
            ranks_124M() { [ "$gpus" -ge 8 ] && say "skip 124M: as d12" || scaling 124M 64 1024 $((524288 / (65536 * gpus))) $((30 * gpus)) ./train_gpt2cu -e d12; }
            ranks_1558M() { scaling 1558M 16 1024 $((1048576 / (16384 * gpus))) $((2 * gpus)) ./train_gpt2cu -e d48; }
            ranks_phase1() { scaling_bert_large phase1 $((65536 / (256 * gpus))) 8; }
            scaling_bert_large() { # name, micro-batches, steps
                "$python" dev/reference/make_sentences.py "$out/sentences.bin" --shortest 128 >/dev/null
                scaling "$1" 256 128 "$2" "$3" ./train_bertcu -e bert-large -i "$out/sentences.bin" --optimizer lamb --dropout 0.1 --short-sequences 0
                rm -f "$out/sentences.bin"
            }

            # Every step has the same sequences for any number of ranks. Sums of another order round differently in
            # bf16, by about 1e-3 in a loss (part e2e measures the same for micro-batches). Two equal runs give the same
            # bits. The learning rate is low: at 6e-4 after 10 warm-up steps the run itself jumps (norms of 14 and 31
            # after step 10), which turns differences of 1e-4 into 0.3. All runs use the same matmul algorithms.
            ranks_curves() {
                local n way curve=(-i "${GPU_CHECK_DATA:-$gpt2_text}" -e d12 -b 16 -t 1024 -d 65536 -x 20 -n 10 -l 1e-4 -u 20 -v 0 -s 0 --overwrite 1 --autotune 0)
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
                # The sum of two numbers does not depend on their order.
                for way in "-z 0" "-z 1" "-z 1 --reduce bf16"; do
                    check "curve of 2, $way, overlapped" launch 2 ./train_gpt2cu "${curve[@]}" $way --bucket 16 -o "$out/curve_overlapped"
                    check "curve of 2, $way, after it" launch 2 ./train_gpt2cu "${curve[@]}" $way --bucket 1000000 -o "$out/curve_after"
                    expect_same "2 ranks, $way, gradient sums overlapped with or after the backward pass: the same bits" curve_overlapped curve_after
                done
                # Whether the GPUs are joined by NVLink, by the driver and by the trainer.
                nvidia-smi nvlink --status 2>/dev/null | grep -q 'Link 0: [0-9]' && way='at once' || way='bucket by bucket'
                check "gradients summed $way by default" grep -q "gradients summed $way" "$(log_of "curve of 2")"
                check "curve to step 10" launch "$gpus" ./train_gpt2cu "${curve[@]}" -z 1 -o "$out/curve_stopped" --stop-after 10
                check "curve from step 10" launch "$gpus" ./train_gpt2cu -y 1 -z 1 -o "$out/curve_stopped"
                expect_same "$gpus ranks resumed equal straight" curve_stopped curve_more
                forget curve_{1,2,4,again,more,overlapped,after,stopped}
            }

            await() { # seconds, command...: until it succeeds, as long as $running, a launch in the background, runs
                local end=$((SECONDS + $1))
                shift
                until "$@"; do
                    kill -0 "$running" 2>/dev/null && [ $SECONDS -lt $end ] || return 1
                    sleep 0.05
                done
            }
            # Kill a random rank of $running. Counts in `named` if the others name that process, in `late` if not all
            # have ended after 60 s.
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

            # Kill a random rank at a random moment of training: the others end and name it, the run resumes from a
            # complete checkpoint and reaches the same bits as an undisturbed run. The run has no end of its own, so
            # that every kill finds it running on any machine.
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

            # The cost of a run's first checkpoint. The steps that ran while it was written are in log.jsonl between the
            # line of its step and its own. checkpoint_wait_ms is the part of checkpoint_ms spent waiting for the end of
            # a write. With --async-checkpoint the rest is the copy and, the first time, pinning host memory for it.
            checkpoint_cost() { # run, name of its log, its name in the report
                local log=$out/$1/log.jsonl step waited during
                step=$(grep -sm 1 checkpoint_ms "$log" | sed -nE 's/^\{"step": ([0-9]+),.*/\1/p')
                if [ -z "$step" ]; then bad "$2: no checkpoint in $log"; return; fi
                waited=$(sed -nE "s/^.*\"step\": $step, .*\"checkpoint_wait_ms\": ([0-9.e+-]+).*/\1/p" "$log" | head -n 1)
                during=$(column <(sed "1,/\"step\": $step, \"loss\"/d; /\"step\": $step, \"checkpoint_ms\"/q" "$log") ms | sort -n |
                    awk '{a[NR] = $1} END {print "steps_during=" NR " median_ms=" (NR ? a[int((NR + 1) / 2)] : "none") " largest_ms=" (NR ? a[NR] : "none")}')
                say "RESULT $3 step=$step $(sed -nE 's/^.*"checkpoint_ms": ([^,]+), "checkpoint_write_s": ([^,]+), "checkpoint_gb_s": ([^,}]+).*/checkpoint_ms=\1 write_s=\2 gb_s=\3/p' "$log" | head -n 1)" \
                    "waited_ms=${waited:-0} $during before_median_ms=$(median_ms <(sed "/\"step\": $step, \"loss\"/q" "$log"))"
            }

            # The cost of a 1558M checkpoint, written while the steps wait and in the background. 120 steps take 20 s,
            # in which the first checkpoint is complete before the second begins. A rank is killed while the second is
            # written; the run resumes from the first.
            ranks_checkpoints() {
                local d48="-e d48 -b 8 -t 1024 -x 2000 -v 0 -s 0 -z 1 --autotune 0 --overwrite 1" status step
                local waits="d48 saved, --async-checkpoint 0" background="d48 saved, --async-checkpoint 1" cut="d48 killed while it wrote"
                rm -rf "$out"/saved_{0,1}
                check "$waits" launch "$gpus" ./train_gpt2cu $d48 -n 20 --stop-after 20 --async-checkpoint 0 -o "$out/saved_0"
                checkpoint_cost saved_0 "$waits" "d48_checkpoint async=0"
                rm -rf "$out/saved_0"

                writes_another() { [ -n "$(whole saved_1)" ] && compgen -G "$out/saved_1/ckpt/*.tmp/optimizer*" >/dev/null; }
                launch "$gpus" ./train_gpt2cu $d48 -n 120 -nk 2 --async-checkpoint 1 -o "$out/saved_1" >"$(log_of "$background")" 2>&1 &
                running=$! named=0 late=0
                await 150 writes_another
                status=$?
                kill_one "$(log_of "$background")"
                judge "$background" $status
                checkpoint_cost saved_1 "$background" "d48_checkpoint async=1"
                step=$(step_of saved_1)
                say "RESULT d48_cut complete=$(whole saved_1 | wc -l) newest=$step unfinished=$(find "$out/saved_1/ckpt" -name '*.tmp' | wc -l) named=$named later_than_60_s=$late"
                check "$cut: unfinished" [ "$(find "$out/saved_1/ckpt" -name '*.tmp' | wc -l)" = 1 ]
                check "$cut: named by the others, all ended" [ "$named $late" = "1 0" ]
                check "$cut: resumed" launch "$gpus" ./train_gpt2cu -y 1 -o "$out/saved_1" --stop-after $((step + 3))
                if [ "$step" -gt 0 ] && grep -q "^step *$((step + 1))/" "$(log_of "$cut: resumed")" && ! grep -q 'damaged\|not used' "$(log_of "$cut: resumed")"
                then ok "$cut: from the newest complete checkpoint"; else bad "$cut: from the newest complete checkpoint"; fi
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
