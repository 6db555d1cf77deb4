#!/usr/bin/env python3
"""The checks that need a GPU: build on this machine, test every kernel against its reference and the trainers end to end,
compare training with PyTorch, run the sanitizers and the profiler, and benchmark.

    python3 scripts/gpu_check.py [--part PARTS] [--only PATTERN] [--out FOLDER] [--list]

    build    programs in three precisions              ops      kernels against their references
    e2e      train_gpt2cu end to end                   train    the same compared with transformers
    bert     train_bertcu end to end and compared      bench bert_bench    speed, compared with PyTorch
    tasks    finetune_bertcu, also compared with transformers
    graph    --graph: the same bits as without, and the time of small steps
    san      the ops under compute-sanitizer           tools    our NVTX ranges in ncu
    fp8      --fp8: the same bits again, resumed and on several GPUs; gradients; waits; memory; losses; speed and energy
    flags    the effect of every flag, including those of the GPU build only
    older    code for GPUs of compute capability 7.5, 8.6 and 8.9, from PTX, with the kernels chosen there
    profile  the reports of --profile, compared with ncu and a plain listing of kernels
    ranks    all GPUs together: speed, equal results, killed ranks, checkpoints

PARTS: "build bert fp8/speed", for example: a part's pieces stand behind a slash (default: all but flags, fp8, ranks and
older). --only runs the checks whose name matches, "racecheck gelu" for example. --list shows the commands and runs none. A
part takes at most ten minutes; ranks, fp8/curves and fp8/speed take more.

Writes FOLDER/gpu_check.txt (default out/gpu_check): "RESULT name key=value ..." for every result and, at the end, "N passed,
N failed". Full logs are in the same folder. Exit status 0 only if everything passed. Environment:
  GPU_CHECK_DATA        a glob of shards of GPT-2 tokens to train on (default: the test corpus)
  GPU_CHECK_BERT_DATA   a glob of files of prepare_bert.py for BERT to train on (default: the test corpus)
  GPU_CHECK_TORCH_BERT  another BERT training step in PyTorch for part bert_bench: a script and its flags. It also gets -B
                        batch -T length and prints a line "RESULT ... ms=..." as dev/reference/bert.py does
  GPU_CHECK_COMMIT      name of the sources if git cannot tell (default: the first line of .commit)
  PYTHON                an interpreter with PyTorch and transformers (default python3)
"""
import argparse
import array
import concurrent.futures
import csv
import filecmp
import itertools
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time

PARTS = "build ops e2e train bert tasks graph san tools profile bench bert_bench"
AT_ONCE = {"build": 3, "san": 8, "older": 8}  # commands beside each other; 2 in other parts
TOTALS = re.compile(r"^(\d+) passed, (\d+) failed", re.M)

# What all commands begin with. Losses are compared on the test corpus, because the built-in corpus changes.
SETUP = r"""
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHON=${PYTHON:-python3}
text=build/test_corpus/builtin/train.bin bert_text=build/test_corpus/builtin/bert/train.bin
data=${GPU_CHECK_DATA:-$text} bert_data=${GPU_CHECK_BERT_DATA:-$bert_text}
lamb="--optimizer lamb --dropout 0.1 --short-sequences 0" quiet="-v 0 -s 0 -n 0 --overwrite 1"
train() { "${@:2}" $quiet -o "$OUT/$1"; }                # run, command: a run into $OUT/run
forget() { for run; do rm -rf "$OUT/$run/ckpt" "$OUT/$run"/*.safetensors; done; } # weights; logs stay
resume() { "$1" -y 1 "${@: -2}"; }                       # program, flags, -o, folder: only the program and the folder count
launch() { if [ "$1" = 1 ]; then "${@:2}"; else mpirun -np "$1" --bind-to none --oversubscribe "${@:2}"; fi; }
sentences() { # run, shortest, longest
    mkdir -p "$OUT/$1" && $PYTHON dev/reference/make_sentences.py "$OUT/$1/train.bin" --shortest "$2" --longest "${3:-0}"
}
needs() { [ $(wc -w <<<"$GPUS") -ge "$1" ] || { echo "fewer than $1 GPUs"; exit 77; }; } # 77: the row is skipped
explain() { $PYTHON dev/reference/check_profile.py "$OUT/$1" "${@:2}"; }
"""

# Rows: part[/piece], "&" where it runs beside the rows around it, loops | name | command in bash | judge, a function below with
# its words (default: the command succeeds). @x is the value of loop x; RANKS: 2, 4, 8, where there are as many GPUs; FOUR: 4
# and 8 of them. A pipe in a command has no blank before it; indented lines continue a row. A row without a name only prepares
# or tidies. "PART: LINE" runs before each command of a part.
TABLE = r"""
build | build_cpu | make -s -j $(nproc) cpu $text
build & | build_bf16 | make -s -j 6 PRECISION=bf16 build/bf16/{opscu,test_gpt2cu,train_gpt2cu,test_bertcu}
    train_gpt2cu train_bertcu finetune_bertcu
build & | build_fp32 | make -s -j 6 PRECISION=fp32 build/fp32/{opscu,test_gpt2cu,train_gpt2cu,test_bertcu,train_bertcu}
    build/fp32/finetune_bertcu
build & | build_fp16 | make -s -j 6 PRECISION=fp16 build/fp16/{opscu,test_gpt2cu,train_gpt2cu}
build | no warnings, no register spills | ! grep -iE 'warning|spill|serialized' $OUT/build_*.log

ops p=bf16,fp32,fp16 | ops_@p | build/@p/opscu test | totals

# Two ways that differ only in rounding differ by about 1e-7 in fp32 losses. AdamW divides small gradients by their own size and
# turns that into 1e-6 within 20 steps. bf16 rounds each activation to 1 part in 512, so two ways drift apart like bf16 and
# fp32, by about 1e-3 (compare_autocast.py measures that).
e2e p=fp32,bf16,fp16 | gpt2_@p | build/@p/test_gpt2cu | totals
e2e: small="-i $text -e L=4,C=128,NH=4,V=257,T=256 -x 20 --dropout 0.1"
e2e SAME |  | ./train_gpt2 build/fp32/train_gpt2cu ./train_gpt2cu $small -b 4 | 10
# 124M's channels, so that the kernels are those of a real run. --autotune 0: the same algorithms in all runs.
e2e: wide="-i $text -e L=2,C=768,NH=12,V=257,T=1024 -b 4 -x 8 --dropout 0.1 --autotune 0"
e2e & | run bf16_explicit | train bf16_explicit ./train_gpt2cu $small -b 4 --attention materialized
e2e & p=fp32,bf16 | run @p_1x64 | train @p_1x64 build/@p/train_gpt2cu $small -d 16384 -b 64
e2e & p=fp32,bf16 | run @p_4x16 | train @p_4x16 build/@p/train_gpt2cu $small -d 16384 -b 16
e2e & p=fp32,bf16 r=0,1,2 | run @p_recompute_@r | train @p_recompute_@r build/@p/train_gpt2cu $wide -ge 0 -r @r
e2e & r=0,1,2 | run bf16_epilogue_recompute_@r | train bf16_epilogue_recompute_@r ./train_gpt2cu $wide -ge 2 -r @r
e2e | flash_against_explicit | | near bf16 bf16_explicit 5e-3
e2e | accumulation_1x64_against_4x16_fp32 | | near fp32_1x64 fp32_4x16 1e-5
e2e | accumulation_1x64_against_4x16_bf16 | | near bf16_1x64 bf16_4x16 5e-3
e2e p=bf16,fp32 r=1,2 | recompute @r bit for bit, @p | | same @p_recompute_0 @p_recompute_@r
# The epilogue applies GELU before its input is rounded, the recomputation after.
e2e r=1,2 | epilogue_recompute_@r | | near bf16_epilogue_recompute_0 bf16_epilogue_recompute_@r 5e-3
# Large enough for timed matmul algorithms: a resumed run uses those of its checkpoint and times none.
e2e: plans="./train_gpt2cu -i $text -e L=2,C=768,NH=12,V=257,T=1024 -b 8 -x 8"
e2e | plans_first_4 | rm -rf $OUT/plans $OUT/plans_straight; train plans $plans --stop-after 4
e2e | plans_straight | mkdir $OUT/plans_straight && mv $OUT/plans/matmul_plans.txt $OUT/plans_straight &&
    train plans_straight $plans
e2e | plans_resumed | ./train_gpt2cu -y 1 -o $OUT/plans
e2e | resumed with the checkpoint's matmul algorithms |
    cmp $OUT/plans{,_straight}/model.safetensors && [ ! -e $OUT/plans/matmul_plans.txt ]
# One long document among 300 of about 400 tokens, with dropout: one thread for each pair of a row and a position in the longest
# sequence would be too many.
e2e: documents="-i $OUT/documents.bin -e L=2,C=128,NH=16,V=257,T=8192 -t 8192 -b 16 --doc-mask 1 --dropout 0.1 -x 2"
e2e | documents.bin | | documents
e2e r=fp32,bf16,bf16_again | run documents_@r | p=@r; train documents_@r build/${p%_again}/train_gpt2cu $documents
e2e | documents at T=8192, bf16 against fp32 | | near documents_bf16 documents_fp32 5e-3
e2e | documents at T=8192 repeat | | near documents_bf16 documents_bf16_again 0
e2e | | rm $OUT/documents.bin; forget documents_{fp32,bf16,bf16_again} bf16{,_explicit} {fp32,bf16}_{1x64,4x16}
    plans{,_straight} {bf16,fp32,bf16_epilogue}_recompute_{0,1,2}

# fp16 loses small gradients without loss scaling. With it: within 1 % of bf16 after 200 steps of real text.
train: if [ "$GPU_CHECK_DATA" ]; then size="-e d12 -b 16 -t 1024"; else size="-e L=6,C=384,NH=6,T=256 -b 32"; fi
train: shard=$(compgen -G "$data"|head -n 1) compare="$PYTHON dev/reference/compare_autocast.py"
train p=bf16,fp16 | run text_@p | train text_@p build/@p/train_gpt2cu -i "$data" $size -x 200 -l 6e-4 -u 20
train | fp16_against_bf16 | | last_losses text_bf16 text_fp16
train | | forget text_{bf16,fp16}
# Both start from the same fp32 weights. With warm-up: without it the loss jumps at step 9, where PyTorch's fp32 differs from
# its own fp64 by 8e-4.
train | compare_fp32 | $compare build/fp32/train_gpt2cu --tokens $shard --seeds 1 --warmup 20 --exact 1e-4 | shows ^RESULT
# Ours in bf16 may be twice as far from fp32 as PyTorch's autocast is.
train | compare_autocast | $compare ./train_gpt2cu --tokens $shard --layers 12 --channels 768 --heads 12 -t 512 | shows ^RESULT

bert p=fp32,bf16 | bert_@p | build/@p/test_bertcu | totals
bert SAME | bert_ | ./train_bert build/fp32/train_bertcu ./train_bertcu
    -i $bert_text -e L=4,C=128,NH=4,T=64 -b 8 -x 10 --dropout 0.1 | 5
bert | | forget bert_bf16
# BERT-base without dropout, on the batches that our trainer draws. Warmed up for 20 steps only, it diverges for a while on the
# test corpus, in PyTorch too, and comes back by two ways that are 6 % apart.
bert: compare() { $PYTHON dev/reference/compare_autocast.py ./train_bertcu --bert --dump build/bf16/test_bertcu
    --tokens "$bert_data" --layers 12 --channels 768 --heads 12 -t 128 -b 32 "$@"; }
bert & | compare_autocast_bert | compare --steps 50 --seeds 3 --ratio 2 | shows ^RESULT
bert & | compare_final_bert | compare --steps 200 --warmup 100 --final 0.01 --losses $OUT/compare_final_bert.txt | shows ^RESULT

# The same examples and initial weights for both: fp32 against transformers, then CPU against GPU with dropout.
tasks: quiet="-v 0 -n 0 --overwrite 1" classify="tsv --labels 2" answer="json --stride 42"
tasks | tasks | bash dev/test/tasks.sh build/fp32/finetune_bertcu | totals
tasks t=classify,answer | transformers @t | $PYTHON dev/reference/check_task.py @t --program build/fp32/finetune_bertcu
    --work $OUT/task_@t | shows steps:
tasks SAME t=classify,answer | @t_ | ./finetune_bert build/fp32/finetune_bertcu ./finetune_bertcu -e $OUT/task_@t/start
    --task @t -i $OUT/task_@t/train.$@t -t 128 -b 8 -x 20 -l 1e-3 --dropout 0.1 | 7
tasks t=classify,answer | | forget @t_bf16 task_@t/out; rm -rf $OUT/task_@t/start

# Where Python has no numpy, the test corpus: fewer of its tokens are masked.
graph: two_layers="./train_bertcu -e L=2,C=1024,NH=16,T=512,V=30522 -b 4 -t 128 -i $OUT/full_128/train.bin $lamb"
graph: two_layers+=" -k poly -u 40 -x 400"
graph: d12_128_tokens="./train_gpt2cu -i $text -e d12 -b 1 -t 128 --dropout 0.1 -q 0.1 -u 20 -x 200"
graph: four_layers="./train_gpt2cu -i $text -e L=4,C=256,NH=4,V=257,T=256 -b 4 --dropout 0.1 -q 0.1 -x 400"
graph & m=gpt2,bert | graph_@m | bash dev/test/graph.sh ./train_@mcu | totals
graph | | sentences full_128 128 || cp $bert_text $OUT/full_128/train.bin
# Without and with graphs, in turn, with the matmul algorithms that the first one timed.
graph s=two_layers,d12_128_tokens,four_layers n=1,2 w=0,1 | @s, --graph @w, @n |
    [ @n@w != 10 ] || rm -rf $OUT/plans.txt; rm -rf $OUT/@s_@w; mkdir $OUT/@s_@w; cp $OUT/plans.txt $OUT/@s_@w/matmul_plans.txt;
    timeout 60 $@s $quiet --graph @w -o $OUT/@s_@w && cp -n $OUT/@s_@w/matmul_plans.txt $OUT/plans.txt | speed @s_@w
graph s=two_layers,d12_128_tokens,four_layers | @s: the same bits | | same @s_0 @s_1
graph | | forget {two_layers,d12_128_tokens,four_layers}_{0,1}; rm -rf $OUT/full_128

# memcheck checks all of matmul, because it only tests that accesses stay inside the operands; the other tools check only our
# kernels, because cuBLASLt's are not ours to check. The memory that those read is filled by the test or cleared by
# device_scratch() before cuBLASLt writes to it, so initcheck, which sees none of cuBLASLt's stores, counts it as initialised.
# racecheck fails by itself on cuBLASLt: it runs matmul_epilogue, our kernels without the products.
san: ours="--kernel-name kernel_substring=matmul_" initcheck="--kernel-name-exclude kernel_substring=_softmax_kernel"
san: check() { timeout 560 compute-sanitizer --tool $1 ${!1} "${@:3}" --error-exitcode 9 build/bf16/opscu test $2; }
# racecheck does not see all synchronization in cuBLASLt's kernels either, and ends with an error of its own if they are
# excluded. So of linear's races those count that are in our kernels.
san & | racecheck linear | check racecheck linear >$OUT/race.log; status=$?; cat $OUT/race.log; [ $status = 0 ] ||
    { [ $status = 9 ] && grep '^[0-9]* passed, 0 failed' $OUT/race.log && ! grep 'Race reported' $OUT/race.log|grep -v nvjet; }
san & t=memcheck,racecheck,initcheck,synccheck o=attention,attention_documents,layernorm,dropout,gather,gelu,classifier,
    embedding,adamw,lamb,loss_scale,global_norm,next_sentence,accuracy,cast_to_fp32,cast_bf16,matmul_epilogue,layernorm_fp8,
    quantize,linear_input,mean_bias,target_rounding,fp8_scales | @t @o | check @t @o
san & o=matmul,linear | memcheck @o | check memcheck @o
san & t=initcheck,synccheck | @t linear | check @t linear
san & t=initcheck,synccheck | @t matmul | initcheck=; check @t matmul $ours

flags m=gpt2,bert | flags_@m | bash dev/test/flags.sh ./train_@mcu | totals
flags | flags_tune | bash dev/test/flags.sh ./finetune_bertcu | totals
flags | flags_fp32 | bash dev/test/flags.sh build/fp32/train_gpt2cu --tf32 | totals

# ncu selects by our NVTX ranges: exactly the kernels of one layer's forward pass in one step.
tools: ncu() { command ncu --clock-control none --nvtx --nvtx-include "$2" --metrics gpu__time_duration.sum --csv --page raw
    --log-file $OUT/ncu_$1.csv ./train_gpt2cu -e L=4,C=256,NH=4,V=257,T=256 -b 4 -x 3 --autotune 0 -v 0 -s 0 -n 0 -o ""; }
tools | ncu_step | ncu step "step 2/"
tools r=forward,backward | ncu_@r | ncu @r "step 2/@r/layer 2"
tools | ncu: one layer is a part of the step, and its kernels are the layer's | | one_layer

bench: d12="-e d12 -b 64" d24="-e d24 -b 32" d36="-e d36 -b 16" d48="-e d48 -b 16"
bench | bench_ops | build/bf16/opscu bench | shows ^RESULT|GFLOP|GB/s
bench | bench_attention | $PYTHON dev/reference/bench_attention.py | shows ^RESULT
bench | attention at least as fast as FlashAttention-2 | | attention_compare
bench m=d12,d24,d36,d48 | run train_@m | train train_@m ./train_gpt2cu $@m -t 1024 -x 55 --profile 5
    | shows ^(By|matmul|attention)
bench m=d24,d36 | train_gpt2cu size=@m | | speed train_@m
bench | train_gpt2cu size=d12 | | speed train_d12 580000
bench | train_gpt2cu size=d48 | | speed train_d48 51000
bench m=d12,d24,d36,d48 | explained train_@m | explain train_@m/profile | shows ^RESULT
bench | | forget train_d{12,24,36,48}

bert_bench: b128=256 b512=64 other=$GPU_CHECK_TORCH_BERT
bert_bench: large() { train $1 timeout 150 ./train_bertcu -e bert-large -i $OUT/sentences_$1/train.bin "${@:2}" $lamb -x 35; }
bert_bench t=128,512 | sentences_full_@t | sentences sentences_full_@t @t
bert_bench t=128,512 | sentences_varied_@t | sentences sentences_varied_@t $((@t / 2 + 1)) @t
bert_bench t=128,512 | run full_@t | large full_@t -b $b@t -t @t
bert_bench t=128,512 | run varied_@t | large varied_@t -b $b@t -t @t --pack 2
bert_bench | train_bertcu size=large T=128 | | speed full_128 1850
bert_bench | train_bertcu size=large T=512 | | speed full_512 420
bert_bench t=128,512 | varied_over_full T=@t | | ratio varied_@t full_@t seq_s 1.25
bert_bench t=128,512 | torch_bert_@t | timeout 240 $PYTHON dev/reference/bert.py -b $b@t -t @t | shows ^RESULT
bert_bench t=128,512 | other_torch_bert_@t | [ "$other" ] || exit 77; timeout 240 $PYTHON $other -B $b@t -T @t | shows ^RESULT
bert_bench | | forget {full,varied}_{128,512}
# The published step whose kernels are counted: two layers of BERT-large.
bert_bench | run bert_kernels | train bert_kernels ./train_bertcu -e L=2,C=1024,NH=16,T=512,V=30522 -b 4 -t 128
    -i $OUT/sentences_full_128/train.bin $lamb -x 40 --profile 3 | bert_kernels
bert_bench | explained bert_kernels | explain bert_kernels/profile | shows ^RESULT
bert_bench | | forget bert_kernels; rm -rf $OUT/sentences_*

# PTX alone, which this GPU's driver compiles when a program starts, and LLMC_TEST_DEVICE for the kernels that the launchers
# choose on such a GPU. Heads of 128 are materialized on 7.5, which a line says: they need more shared memory than it has.
older: small="-i $text -e L=2,C=256,NH=4,V=257,T=256 -b 4 -x 20 --dropout 0.1"
older: on() { LLMC_TEST_DEVICE=${1%_*} build/ptx$1/${1#*_}/"${@:2}"; }
older: build() { make -s -j 4 B=build/ptx$1 ARCH= PTX=${1%_*} PRECISION=${1#*_} build/ptx$1/${1#*_}/{opscu,train_gpt2cu}; }
older & g=75_fp16,75_fp32,86_bf16,89_bf16 | build_@g | build @g
older & | run older_cpu | train older_cpu ./train_gpt2 $small
older | | true
older & g=75_fp16,75_fp32,86_bf16,89_bf16 | ops_@g | on @g opscu test | totals
older & g=75_fp16,75_fp32,86_bf16,89_bf16 | run older_@g | train older_@g on @g train_gpt2cu $small --profile 2
older & g=75_fp16,75_fp32,86_bf16,89_bf16 | run heads_@g | train heads_@g on @g train_gpt2cu ${small/NH=4/NH=2} --profile 2
older g=75_fp16,86_bf16,89_bf16 | older_@g_against_the_CPU | | near older_cpu older_@g 5e-3
older | older_75_fp32_against_the_CPU | | near older_cpu older_75_fp32 1e-4
older g=75_fp16,75_fp32,86_bf16,89_bf16 | shared_@g | | shared_memory @g
older | heads of 128 on 7.5 | grep 'heads of 128 channels is materialized' $OUT/run_heads_75_fp16.log &&
    ! grep 'is materialized' $OUT/run_heads_86_bf16.log

profile: mkdir -p $OUT/reports
profile: report() { cp $OUT/$1/profile.txt $OUT/reports/$2.txt && sed -n '1,/^Rows in order/p' $OUT/$1/profile.txt|cut -c 1-200; }
profile/reports: gpt2_124m="./train_gpt2cu -e d12 -b 64 -t 1024 -x 65"
profile/reports: bert_large_phase1="./train_bertcu -e bert-large -b 256 -t 128 -i $OUT/full_128/train.bin $lamb -x 65"
profile/reports | full_128 | sentences full_128 128
profile/reports s=gpt2_124m,bert_large_phase1 | run profile_@s | train profile_@s $@s --profile 5
profile/reports s=gpt2_124m,bert_large_phase1 | explained @s | explain profile_@s/profile --overhead 10 | shows ^RESULT
profile/reports s=gpt2_124m,bert_large_phase1 | report @s | report profile_@s/profile @s | shows .
profile/reports s=gpt2_124m,bert_large_phase1 | run plain_@s | train plain_@s $@s
profile/reports s=gpt2_124m,bert_large_phase1 | @s: with_profile_over_without | | ratio profile_@s plain_@s ms
profile/reports | | forget {profile,plain}_{gpt2_124m,bert_large_phase1}; rm -rf $OUT/full_128
profile/published | published set-ups | bash scripts/profile_reference.sh --out $OUT/published --pages $OUT/reports
profile/published | explained published | for run in $OUT/published/*/profile; do name=$(basename ${run%/profile});
    explain published/$name/profile --overhead 10 && cp $run/profile.txt $OUT/reports/$name.txt || exit; done | shows ^RESULT
# The same step in ncu, which sees only kernels, and in a listing by another tool; without --autotune the matmul algorithms are
# the same. Kernel times depend on the clock, so both runs begin on an idle GPU and are compared at the same steps.
profile/tools: same="./train_gpt2cu -e L=4,C=768,NH=12,V=50257,T=1024 -b 16 -t 1024 --autotune 0" cuda=/usr/local/cuda
profile/tools: tiny="./train_gpt2cu -e L=4,C=256,NH=4,V=257,T=256 -b 4 -x 12 --profile 2 --autotune 0"
profile/tools: ncu="ncu --clock-control none --metrics gpu__time_duration.sum"
profile/tools | run profile_same | sleep 5; train profile_same $same -x 15 --profile 5
profile/tools | ncu_step | $ncu --cache-control none --nvtx --nvtx-include "step 12/" --csv --page raw
    --log-file $OUT/ncu_step.csv $same -x 12 $quiet -o ""
profile/tools | kernel_list | gcc -shared -fPIC dev/reference/kernel_list.c -o $OUT/kernel_list.so -I$cuda/include
    -L$cuda/extras/CUPTI/lib64 -L$cuda/lib64 -lcupti
profile/tools | plain_listing | sleep 5; export KERNEL_LIST=$OUT/kernel_list.csv CUDA_INJECTION64_PATH=$OUT/kernel_list.so;
    $same -x 15 $quiet -o ""
profile/tools | explained profile_same and ncu | explain profile_same/profile --ncu $OUT/ncu_step.csv | shows ^RESULT
profile/tools | explained profile_same and a plain listing | explain profile_same/profile
    --listing $OUT/kernel_list.csv | shows ^RESULT
profile/tools | | forget profile_same
profile/tools | profile under ncu | train profile_ncu $ncu --launch-count 20 $tiny
profile/tools | profile under another tool | export KERNEL_LIST=/dev/null CUDA_INJECTION64_PATH=$OUT/kernel_list.so;
    train profile_other $tiny
profile/tools t=ncu,another_tool | profile under @t: a line says so |
    grep -E '^warning: (CUPTI: )?another tool profiles this process' $OUT/profile_under_@t.log
# Without CUPTI's library, if this shell may hide it.
profile/tools: hide='for f in $(find / -xdev -name "libcupti.so*" -type f 2>/dev/null); do mount --bind /dev/null $f;done; "$@"'
profile/tools | profile_none | unshare -m bash -c "$hide" _ $tiny $quiet -o $OUT/profile_none || exit 77
profile/tools | without CUPTI lines say so | [ -e $OUT/profile_none/profile ] || exit 77;
    grep '^warning: CUPTI .* is not found' $OUT/profile_none.log && grep '^times .*of ops, by CUDA events' $OUT/profile_none.log
profile/ranks | profile of all ranks | needs 2; train profile_ranks launch $(wc -w <<<"$GPUS") ./train_gpt2cu
    -e d12 -b 64 -t 1024 -z 1 --bucket 16 -x 20 --profile 5 | shows ^(overlap|slowest)
profile/ranks | each rank explained | needs 2; for rank in $OUT/profile_ranks/profile/rank_*; do
    explain ${rank#$OUT/} || exit; done | shows ^RESULT
profile/ranks | | forget profile_ranks

fp8: d12="./train_gpt2cu -e d12 -b 64 -t 1024 -i $data -l 6e-4 -u 100 -c 0.1"; set -f # the trainers expand their globs
fp8: d48="./train_gpt2cu -e d48 -b 16 -t 1024 -i $data -l 6e-4 -u 100 -c 0.1"
fp8: large="./train_bertcu -e bert-large -i $bert_data $lamb -l 1e-3 -u 100" large128="$large -b 256 -t 128"
fp8: large512="$large -b 64 -t 512"
fp8: run="./train_gpt2cu -i $data -e d12 -b 16 -t 1024 -d 65536 -v 0 -s 0 --overwrite 1 --autotune 0 --fp8 1 -u 20 -n 12 -x 24"
fp8/tests & m=gpt2,bert | fp8_@m | bash dev/test/fp8.sh ./train_@mcu | totals
# The same run twice, and stopped after step 12 and resumed. Scales are measured until step 16.
fp8/bits: plain= excluded="--fp8-exclude-forward attn.c_attn --fp8-steps 18"
fp8/bits w=plain,excluded | fp8, @w | $run -l 1e-4 $@w -o $OUT/fp8_straight_@w
fp8/bits w=plain,excluded | fp8, @w, again | $run -l 1e-4 $@w -o $OUT/fp8_again_@w
fp8/bits w=plain,excluded | fp8, @w, to step 12 | $run -l 1e-4 $@w --stop-after 12 -o $OUT/fp8_stopped_@w
fp8/bits w=plain,excluded | fp8, @w, from step 12 | ./train_gpt2cu -y 1 -o $OUT/fp8_stopped_@w
fp8/bits w=plain,excluded r=again,stopped | fp8, @w, @r: the same bits | | same fp8_@r_@w fp8_straight_@w
fp8/bits | | set +f; forget fp8_{straight,again,stopped}_{plain,excluded}
# dev/test/ranks.sh compares the scales of several ranks with those of one.
fp8/ranks n=RANKS r=straight,again | fp8, ranks=@n, @r | launch @n $run -z 1 -l 1e-4 -o $OUT/fp8_@r_@n
fp8/ranks n=RANKS | fp8, ranks=@n, to step 12 | launch @n $run -z 1 -l 1e-4 --stop-after 12 -o $OUT/fp8_stopped_@n
fp8/ranks n=RANKS | fp8, ranks=@n, from step 12 | launch @n ./train_gpt2cu -z 1 -y 1 -o $OUT/fp8_stopped_@n
fp8/ranks n=RANKS r=again,stopped | fp8, ranks=@n, @r: the same bits | | same fp8_@r_@n fp8_straight_@n
fp8/ranks n=RANKS | fp8, ranks=@n: weights_hash at each checkpoint |
    [ $(grep -c weights_hash $OUT/fp8_straight_@n/log.jsonl) = 2 ]
fp8/ranks | | set +f; forget fp8_{straight,again,stopped}_{2,4,8}
# Of d12, new and after 400 steps in fp8, on the same 65,536 tokens.
fp8/gradients: step="-i $data -b 16 -t 1024 -d 65536 -x 1 -l 0 --beta1 0 --clip 0"
fp8/gradients | fp8: 400 steps | train fp8_trained $d12 -x 400 --fp8 1
fp8/gradients: new=d12 trained=$OUT/fp8_trained
fp8/gradients s=new,trained | fp8: gradients of @s in fp32 | train fp8_fp32_@s build/fp32/train_gpt2cu -e $@s $step
fp8/gradients s=new,trained f=0,1 | fp8: gradients of @s with --fp8 @f | train fp8_@f_@s ./train_gpt2cu -e $@s $step --fp8 @f
fp8/gradients s=new,trained | fp8: gradients of @s | $PYTHON dev/reference/fp8_gradients.py $OUT/fp8_fp32_@s $OUT/fp8_1_@s
    $OUT/fp8_0_@s | shows ^RESULT
fp8/gradients | | set +f; forget fp8_{fp32,1,0}_{new,trained} fp8_trained
fp8/waits f=0,1 | fp8: profile with --fp8 @f | train fp8_waits_@f ./train_gpt2cu -i $data -e d12 -b 64 -t 1024 -x 26 --fp8 @f
    --profile 3 --profile-warmup 20
fp8/waits | fp8: no more waits and readbacks than in bf16 | explain fp8_waits_1/profile --waits-of $OUT/fp8_waits_0/profile
    | shows ^RESULT
fp8/waits | | set +f; forget fp8_waits_{0,1}
# The memory plan, and what was allocated after three steps.
fp8/memory s=d12,large128,large512,d48 f=0,1 | fp8: memory of @s with --fp8 @f | train fp8_memory $@s --fp8 @f -x 3
    --profile 1 --profile-warmup 1 | found fp8_memory/profile/profile.txt ^together.*
fp8/memory | | set +f; forget fp8_memory
# BERT of 4 layers for 12,000 steps: its accuracy at most 0.5 points lower. BERT-large for 300 steps: its loss at most 0.5 %
# higher.
fp8/curves: four="./train_bertcu -e L=4,C=512,NH=8,V=30522,T=512 -b 256 -t 128 -x 12000 -u 2000 -l 7e-4 -k linear -c 0.01"
fp8/curves: four+=" --dropout 0.1 -v 12000 -i $bert_data" large="$large128 -x 300 -v 300" quiet="${quiet#-v 0}"
fp8/curves s=four,large f=0,1 | fp8: curve of @s with --fp8 @f |
    train fp8_@s_@f $@s -j ${bert_data/train/val} -m 0 --fp8 @f
fp8/curves | fp8: accuracies of four | | curve four val_mlm_accuracy -0.005
fp8/curves | fp8: losses of large | | curve large val_loss 1.005
fp8/curves | | set +f; forget fp8_{four,large}_{0,1}
# Means of 30 s after 15 s, in turn, after 400 steps (d48: 150).
fp8/speed: settle_d48="--apart --settle 150"
fp8/speed s=d12,large128,large512,d48 | fp8 speed of @s | $PYTHON dev/reference/fp8_speed.py @s
    ${settle_@s:---settle 400} --seconds 30 --out $OUT -- $@s | shows ^RESULT

# Linear speed: all GPUs run at the same time, each on its own, with the same matmul algorithms as together. The all-reduce
# overlaps with the backward pass (--bucket 16) or runs once after it; which is faster depends on the model. One micro-batch a
# step is the most expensive case.
ranks: d12="./train_gpt2cu -e d12 -b 64 -t 1024" d48="./train_gpt2cu -e d48 -b 16 -t 1024" all=$(wc -w <<<"$GPUS")
ranks: large="./train_bertcu -e bert-large -b 256 -t 128 -i $OUT/full_128/train.bin $lamb"
ranks: y="-z 0" z="-z 1" a="-z 0 --bucket 16" b="-z 0 --bucket 1000000" c="-z 1 --bucket 16"
ranks: d="-z 1 --bucket 1000000"
ranks: together() { launch $1 "${@:3}" -d $(($1 * $2)) --autotune 0; } # ranks, tokens of one, command
ranks: step_d12="65536 $d12 -x 160" step_d48="16384 $d48 -x 56" step_large="32768 $large -x 140"
ranks/speed | full_128 | needs 2; sentences full_128 128
ranks/speed s=d12,d48,large | @s alone | needs 2; for gpu in $GPUS; do CUDA_VISIBLE_DEVICES=$gpu
    train alone_@s_$gpu together 1 $step_@s >$OUT/alone_@s_$gpu.log & pids+=($!); done; wait "${pids[@]}"
ranks/speed s=d12,d48,large n=RANKS w=a,b,c,d | @s on @n GPUs, @w | echo "ways: $@w";
    train @s_on_@n together @n $step_@s $@w | scaling @s @n
ranks/speed s=d12,d48,large n=FOUR | @s on @n GPUs: 97 % of linear | | linear @s @n
# Every step has the same sequences for any number of ranks. Sums of another order round differently in bf16, by about 1e-3 in a
# loss (part e2e measures the same for micro-batches). Two equal runs give the same bits. The learning rate is low: at 6e-4
# after 10 warm-up steps the run itself jumps, which turns differences of 1e-4 into 0.3.
ranks/curves: curve="./train_gpt2cu -i $data -e d12 -b 16 -t 1024 -d 65536 -x 20 -n 10 -l 1e-4 -u 20 -v 0 -s 0 --overwrite 1"
ranks/curves: curve+=" --autotune 0"; set -f
ranks/curves n=1,RANKS | curve of @n | needs 2; launch @n $curve -z 1 -o $OUT/curve_@n
ranks/curves n=RANKS | losses of @n ranks against one | | near curve_@n curve_1 5e-3
ranks/curves n=RANKS | @n ranks: weights_hash at each checkpoint | [ $(grep -c weights_hash $OUT/curve_@n/log.jsonl) = 2 ]
ranks/curves w=again,more | curve @w | needs 2; launch $all $curve -z 1 -o $OUT/curve_@w
ranks/curves | all ranks repeat bit for bit | | same curve_again curve_more
# The sum of two numbers does not depend on their order.
ranks/curves w=y,z | curve of 2, @w, overlapped | needs 2; launch 2 $curve $@w --bucket 16 -o $OUT/curve_overlapped_@w
ranks/curves w=y,z | curve of 2, @w, after it | needs 2; launch 2 $curve $@w --bucket 1000000 -o $OUT/curve_after_@w
ranks/curves w=y,z | 2 ranks, @w, sums overlapped or after: the same bits | | same curve_overlapped_@w curve_after_@w
ranks/curves | curve to step 10 | needs 2; launch $all $curve -z 1 -o $OUT/curve_stopped --stop-after 10
ranks/curves | curve from step 10 | needs 2; launch $all ./train_gpt2cu -y 1 -z 1 -o $OUT/curve_stopped
ranks/curves | all ranks resumed equal straight | | same curve_stopped curve_more
ranks/curves | | set +f; forget curve_{1,2,4,8,again,more,stopped} curve_{overlapped,after}_{y,z}
# Ranks that are killed and stopped, fewer and more ranks, fp8.
ranks/tests m=gpt2,bert | ranks_@m | needs 2; bash dev/test/ranks.sh ./train_@mcu | totals
# The cost of a 1558M checkpoint, written while the steps wait and in the background.
ranks/checkpoints w=0,1 | d48 saved, --async-checkpoint @w | needs 2; launch $all ./train_gpt2cu -e d48 -b 8 -t 1024
    -x 60 -v 0 -s 0 -z 1 -n 20 -nk 1 --autotune 0 --overwrite 1 --async-checkpoint @w -o $OUT/saved
    | found saved/log.jsonl .*checkpoint_ms.*
ranks/checkpoints | | rm -rf $OUT/saved
"""
# Rows of SAME: a run, its repetition and its resumption, on the CPU and on the GPU. $1 to $4: the prefix of the runs, the CPU
# build, the fp32 build and the bf16 build with flags; $5: steps before the interruption.
SAME = r"""
PART & | run $1cpu | train $1cpu $2
PART & r=,_again | run $1fp32@r | train $1fp32@r $3
PART & r=,_again | run $1bf16@r | train $1bf16@r $4
PART & | run $1bf16_resumed | train $1bf16_resumed $4 --stop-after $5
PART | run $1bf16_resumed, resumed | resume $4 -o $OUT/$1bf16_resumed
PART | $1cpu_against_gpu_fp32 | | near $1cpu $1fp32 1e-4
PART r=fp32,bf16 | $1@r repeats bit for bit | | same $1@r $1@r_again
PART | $1bf16 resumed equals straight | | same $1bf16 $1bf16_resumed
PART | | forget $1{cpu,fp32,fp32_again,bf16_again,bf16_resumed}
"""
passed = failed = 0


def say(text):
    print(text, flush=True)
    with open(OUT / "gpu_check.txt", "a", encoding="utf-8") as report:
        report.write(text + "\n")


def verdict(name, is_good):
    global passed, failed
    passed, failed = passed + bool(is_good), failed + (not is_good)
    say(("ok   " if is_good else "FAIL ") + name)
    return is_good


def log_of(name):
    return OUT / (re.sub(r"[^A-Za-z0-9_]", "_", name) + ".log")


def read(path):
    return path.read_text(errors="replace") if path.exists() else ""


def numbers(run, key):
    """A number of each training step of a run, from its log.jsonl."""
    lines = [json.loads(line) for line in read(OUT / run / "log.jsonl").splitlines()]
    return [line[key] for line in lines if "loss" in line and key in line]


def newest(run):
    """The run's newest complete checkpoint, or None."""
    return max((path for path in (OUT / run / "ckpt").glob("*") if path.name.isdigit()), default=None)


# Judges: name of the row, its log, words of the table. They say results, and return whether the row is good; the command's
# status comes first.


def shows(name, log, *pattern):
    for line in log.splitlines():
        if re.search(" ".join(pattern), line):
            say(line)
    return True


def near(name, log, a, b, tol, key="loss"):
    x, y = numbers(a, key), numbers(b, key)
    worst = max((abs(p - q) for p, q in zip(x, y)), default=99) if len(x) == len(y) else 99
    say(f"RESULT {name} steps={len(x)} max_{key}_difference={worst:.6g} tol={tol}")
    return bool(x) and len(x) == len(y) and all(abs(p - q) <= float(tol) for p, q in zip(x, y))


def same(name, log, a, b):
    """Weights, moments and master weights of the newest checkpoints, bit for bit. With -z 1 each rank has a file of state."""
    x, y = ({p.name: p for p in newest(run).rglob("*.safetensors")} if newest(run) else {} for run in (a, b))
    is_whole = any("model" in n for n in x) and any("optimizer" in n for n in x)
    return is_whole and x.keys() == y.keys() and all(filecmp.cmp(x[n], y[n], shallow=False) for n in x)


def last_losses(name, log, a, b):
    bf16, fp16 = (statistics.mean(numbers(run, "loss")[-20:] or [1e9]) for run in (a, b))
    say(f"RESULT {name} steps=200 bf16={bf16:.6f} fp16={fp16:.6f} relative={fp16 / bf16 - 1:.6g} tol=0.01")
    return bf16 < 1e9 and fp16 < 1e9 and abs(fp16 - bf16) <= 0.01 * bf16


def speed(name, log, run, gate="0"):
    """Medians of a run without its first five steps; `gate`: the tokens or sequences a second to reach."""
    found = {key: numbers(run, key)[5:] for key in ("ms", "tok_s", "seq_s", "mfu", "joules", "mhz")}
    median = {key: statistics.median_low(values) for key, values in found.items() if values}
    say(f"RESULT {name} " + " ".join(f"{key}={value:g}" for key, value in median.items()))
    return median.get("seq_s", median.get("tok_s", 0)) >= float(gate)


def ratio(name, log, a, b, key, gate="0"):
    """How many times as large a number is in run a as in run b, by medians."""
    x, y = (statistics.median_low(numbers(run, key)[5:] or [0]) for run in (a, b))
    say(f"RESULT {name} ratio={x / (y or 1e9):.6g} {key}={x:g}/{y:g}")
    return x >= float(gate) * y


def found(name, log, path, *pattern):
    """The first line of a file that matches."""
    match = re.search(" ".join(pattern), read(OUT / path), re.M)
    say(f"RESULT {name}: {match[0] if match else 'none'}")
    return bool(match)


def kernel_names(which):
    lines = [line for line in read(OUT / f"ncu_{which}.csv").splitlines() if line.startswith('"')]
    return [row["Kernel Name"] for row in csv.DictReader(lines) if row["ID"].isdigit()]


def one_layer(name, log):
    step, forward, backward = map(kernel_names, ("step", "forward", "backward"))
    def count(names, pattern): return sum(bool(re.search(pattern, kernel)) for kernel in names)
    others = "adamw|embedding|classifier"
    return (len(forward) >= 7 and len(backward) >= 10 and 4 * len(forward + backward) < len(step)
            and count(forward, "attention_forward") == 1 and count(forward, "layernorm_forward") == 2
            and count(backward, "layernorm_backward_kernel") == 2
            and count(forward, "backward|" + others) == count(backward, "forward|" + others) == 0)


def attention_compare(name, log):
    """For GPT-2 124M's shape, forward and backward, in TFLOP/s."""
    ours = re.findall(r"^attention_(?:forward|backward) +B=32 T=1024 NH=12 HS=64 CAUSAL p=0 +[\d.]+ us .*\) +([\d.]+) GFLOP",
                      read(log_of("bench_ops")), re.M)
    peer = re.search(r"^RESULT attention peer=fa2 B=32 H=12 T=1024 D=64 mask=causal .*forward_tflops=([\d.]+) "
                     r".*backward_tflops=([\d.]+)", read(log_of("bench_attention")), re.M)
    say(f"RESULT attention_compare B=32 H=12 T=1024 D=64 mask=causal ours_gflops={'/'.join(ours)} "
        f"fa2_tflops={'/'.join(peer.groups()) if peer else 'none'}")
    return peer and len(ours) == 2 and all(float(x) >= 1000 * float(y) for x, y in zip(ours, peer.groups()))


def bert_kernels(name, log):
    with open(OUT / "bert_kernels/profile/kernels.csv", newline="") as f:
        names = [row["kernel"] for row in csv.DictReader(f)]
    copies, fills = (sum(kernel.startswith(kind) for kernel in names) for kind in ("copy_", "fill_"))
    count, ms = len(names) - copies - fills, statistics.median_low(numbers("bert_kernels", "ms")[5:])
    say(f"RESULT bert_kernels L=2 C=1024 B=4 T=128 optimizer=lamb kernels={count} fills={fills} copies={copies} ms={ms:g}")
    return 0 < count <= 80 and ms <= 2


def shared_memory(name, log):
    """The most shared memory of a kernel; cuBLASLt's are those of the GPU that is here."""
    gpu, own = name.split("_", 1)[1], {}
    for run in ("older", "heads"):
        with open(OUT / f"{run}_{gpu}/profile/kernels.csv", newline="") as f:
            own.update({row["kernel"]: int(float(row["shared_bytes"])) for row in csv.DictReader(f) if row["shared_bytes"] and
                        not re.search("nvjet|cutlass|cublas|gemm|xmma|splitK", row["full_name"] or row["kernel"])})
    most = max(own, key=own.get)
    say(f"RESULT older gpu={gpu[:2]} kernels={len(own)} most_shared_bytes={own[most]} in={most}")
    return own[most] <= (65536 if gpu[:2] == "75" else 101376) and not any("hopper" in kernel for kernel in own)


def curve(name, log, run, key, limit):
    last = []
    for fp8 in (0, 1):
        lines = [line for line in read(OUT / f"fp8_{run}_{fp8}/log.jsonl").splitlines() if '"val_' in line]
        say(f"RESULT fp8_curve run=fp8_{run}_{fp8} {lines[-1] if lines else 'none'}")
        last.append(json.loads(lines[-1])[key])
    return last[1] - last[0] > float(limit) if float(limit) < 0 else last[1] / last[0] < float(limit)


BEST = {}  # of all ways


def scaling(name, log, run, ranks):
    """Against all GPUs at the same time, each on its own. Means of the last two thirds of the steps: at the power limit step
    times vary by 10 % within a second, and take some seconds to settle (dev/LOG.md)."""
    n = int(ranks)
    ms = [numbers(path, "ms") for path in [f"alone_{run}_{gpu}" for gpu in GPUS[:n]] + [f"{run}_on_{ranks}"]]
    *alone, together = (statistics.mean(steps[len(steps) // 3:] or [1e9]) for steps in ms)
    of_linear = statistics.harmonic_mean(alone) / together
    say(f"RESULT ranks run={run} ranks={n} {''.join(re.findall('^ways: .*', log, re.M))} ms={together:.1f} "
        f"of_linear={of_linear:.4f} of_slowest={max(alone) / together:.4f} alone_ms={','.join(f'{ms:.1f}' for ms in alone)}")
    BEST[run, n] = max(of_linear, BEST.get((run, n), 0))
    return True


def linear(name, log, run, ranks):
    return BEST.get((run, int(ranks)), 0) >= 0.97


def documents(name, log):
    random.seed(5)
    tokens = []
    while len(tokens) < 2 * 131072 + 1:
        many = 20000 if len(tokens) % 131072 < 800 else random.randint(1, 800)
        tokens += [256] + [random.choice(b"etaoin shrdlu") for _ in range(many)]
    header = array.array("i", [20240520, 1, 2 * 131072 + 1] + [0] * 253)
    (OUT / "documents.bin").write_bytes(header.tobytes() + array.array("H", tokens[:2 * 131072 + 1]).tobytes())
    return True


# ---------------------------------------------------------------------------------------------------------


def rows_of(text):
    """The rows of a table, loops unrolled, as [part, name, command, judge, whether it runs beside others], and each part's
    variables."""
    rows, variables = [], {}
    for line in re.sub(r"\n +", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines():
        setting = re.match(r"([a-z0-9/]+): (.*)", line)
        if setting:
            variables[setting[1]] = variables.get(setting[1], "") + setting[2] + "\n"
        elif line:
            head, *fields = [field.strip() for field in re.split(r" \|(?= |$)", line)]
            part, *words = head.replace(", ", ",").split()
            fields += [""] * (3 - len(fields))
            ranks = {"RANKS": RANKS, "FOUR": RANKS.lstrip("2,")}
            loops = [re.sub("RANKS|FOUR", lambda m: ranks[m[0]], word).split("=") for word in words if "=" in word]
            for values in itertools.product(*(choices.split(",") for _, choices in loops)):
                row = [part, *fields]
                for (letter, _), value in zip(loops, values):
                    row = [field.replace("@" + letter, value) for field in row]
                if "SAME" in words:
                    cpu, fp32, bf16, flags = row[2].split(None, 3)
                    same_rows = SAME.replace("PART", part)
                    for i, value in enumerate((row[1], f"{cpu} {flags}", f"{fp32} {flags}", f"{bf16} {flags}", row[3]), 1):
                        same_rows = same_rows.replace(f"${i}", value)
                    rows += rows_of(same_rows)[0]
                elif all(values) or words[1:2] == ["r=,_again"]:  # without values where there is one GPU
                    rows.append(row + ["&" in words])
    return rows, variables


def run(setup, name, command):
    with open(log_of(name), "w", encoding="utf-8") as log:
        return subprocess.run(["bash", "-c", setup + command], stdout=log, stderr=subprocess.STDOUT).returncode


def judge(name, command, words, status):
    global passed, failed
    log = read(log_of(name)) if command else ""
    if not name:
        return
    if status == 77:
        say(f"skip {name}: {log.strip()[-100:]}")
    elif words == ["totals"]:
        totals = TOTALS.findall(log) or [("0", "0")]
        passed, failed = passed + int(totals[-1][0]), failed + int(totals[-1][1])
        say(f"{name}: {totals[-1][0]} passed, {totals[-1][1]} failed")
        shows(name, log, "^FAIL")
        if totals[-1][0] == "0" or (status and totals[-1][1] == "0"):
            verdict(f"{name} ended early", False)
    elif status:
        verdict(f"{name} (the end of its log follows)", False)
        say("\n".join(log.splitlines()[-12:]))
    else:
        try:
            is_good = not words or globals()[words[0]](name, log, *words[1:])
        except (AttributeError, KeyError, ValueError, OSError) as error:
            is_good = say(f"{name}: {error}")
        verdict(name, is_good)


def judge_all(waiting):
    while waiting:
        name, command, words, job = waiting.pop(0)
        judge(name, command, words, job.result())


def tell(line):
    return subprocess.run(line, shell=True, capture_output=True, text=True).stdout.strip()


def main():
    global OUT, GPUS, RANKS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=PARTS)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="out/gpu_check", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    a = parser.parse_args()
    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    OUT = a.out.resolve()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    GPUS = visible.split(",") if visible else [str(i) for i, _ in enumerate(tell("nvidia-smi -L").splitlines())]
    RANKS = ",".join(str(n) for n in (2, 4, 8) if n <= len(GPUS))
    os.environ.update(OUT=str(OUT), GPUS=" ".join(GPUS))
    table, variables = rows_of(TABLE)
    chosen = {part: [row for row in table if f"{row[0]}/".startswith(part + "/") and re.search(a.only, row[1])]
              for part in a.part.split()}
    if not all(chosen.values()):
        parser.error(f"no check is chosen by --part '{a.part}' --only '{a.only}'")
    if a.list:
        for place, name, command, words, _ in sum(chosen.values(), []):
            print(f"{place} | {name} | {command} | {words}")
        return 0
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "gpu_check.txt").write_text("")
    commit = os.environ.get("GPU_CHECK_COMMIT") or tell("git rev-parse --short HEAD 2>/dev/null || head -n 1 .commit")
    say(f"gpu_check of commit {commit}, {' '.join(key for key in os.environ if key.startswith('GPU_CHECK_'))} on "
        + tell("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1; nvcc --version | tail -n 1"))
    for part, rows in chosen.items():
        say(f"== {part}")
        started, waiting = time.monotonic(), []
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE.get(part, 2)) as pool:
            for place, name, command, words, beside in rows:
                setup = SETUP + "".join(variables.get(key, "") for key in dict.fromkeys((place.split("/")[0], place)))
                if not beside:
                    judge_all(waiting)
                waiting.append((name, command, words.split(), pool.submit(run, setup, name, command)))
                if not beside:
                    judge_all(waiting)
            judge_all(waiting)
        say(f"part {part}: {time.monotonic() - started:.0f} s")
    say(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
