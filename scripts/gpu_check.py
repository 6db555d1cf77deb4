#!/usr/bin/env python3
"""The checks that need a GPU: build on this machine, test every kernel against its reference and the trainers end to
end, compare training with PyTorch, run the sanitizers and the profiler, and benchmark.

    python3 scripts/gpu_check.py [--part PARTS] [--only PATTERN] [--out FOLDER] [--list]

    build    programs in three precisions              ops      kernels against their references
    e2e      train_gpt2cu end to end                   train    the same compared with transformers
    bert     train_bertcu end to end and compared      tasks    finetune_bertcu end to end and compared
    bench bert_bench    speed, compared with PyTorch   graph    --graph: equal bits, and the time of small steps
    san      the ops under compute-sanitizer           text     use_gpt2cu --generate: equal texts, and speed
    tools    our NVTX ranges in ncu                    one_file GPT-2 in one CUDA file against train_gpt2cu
    flags    the effect of every flag                  ranks    all GPUs together: speed, equal results, killed ranks
    fp8      --fp8: its tests; the same bits again and resumed, also on several GPUs; losses; speed and energy
    older    code for GPUs of compute capability 7.5, 8.6 and 8.9, from PTX, with the kernels chosen there
    profile  profiles of published set-ups; --profile compared with ncu and a plain listing of kernels

PARTS: "build bert fp8/speed", for example: a part's pieces stand behind a slash (default: all but flags, fp8, ranks and
older). --only runs the checks whose name matches, "racecheck gelu" for example. --list shows the commands and runs
none. A part takes at most ten minutes; ranks, fp8/curves and fp8/speed take more.

Writes FOLDER/gpu_check.txt (default out/gpu_check): "RESULT name key=value ..." for every result and, at the end,
"N passed, N failed". Full logs lie beside it. Exit status 0 only if everything passed. Environment:
  GPU_CHECK_DATA        a glob of shards of GPT-2 tokens to train on (default: the test corpus)
  GPU_CHECK_BERT_DATA   a glob of files of prepare_bert.py for BERT to train on (default: the test corpus)
  GPU_CHECK_COMMIT      name of the sources if git cannot tell (default: the first line of .commit)
  PYTHON                an interpreter with PyTorch and transformers (default python3)
"""
import argparse
import collections
import concurrent.futures
import filecmp
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import time

PARTS = "build ops e2e train bert tasks graph text san tools one_file profile bench bert_bench"
AT_ONCE = {"build": 3, "ops": 3, "san": 8, "older": 8}  # commands beside each other; 2 in other parts

# Before each command. The trainers expand globs. Losses are compared on the test corpus: the built-in one changes.
SETUP = r"""
set -f; export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHON=${PYTHON:-python3}
text=build/test_corpus/builtin/train.bin bert_text=build/test_corpus/builtin/bert/train.bin
data=${GPU_CHECK_DATA:-$text} bert_data=${GPU_CHECK_BERT_DATA:-$bert_text} full=$OUT/full_128/train.bin
shard=$(compgen -G "$data"|head -n 1) # the first
lamb="--optimizer lamb --dropout 0.1 --short-sequences 0" quiet="-v 0 -s 0 -n 0 --overwrite 1"
forget() { for run; do find "$OUT/$run" -name '*.safetensors' -delete; done; }
keep() { "${@:2}" $quiet -o "$OUT/$1"; }  # run, command: a run into $OUT/run
train() { keep "$@" && forget "$1"; }     # its logs alone
trainers() { cpu=./$1 fp32=build/fp32/$1cu bf16=./$1cu half=$2; } # program, steps until it is stopped
curve() { launch $1 ./train_gpt2cu -i $data -e d12 -b 16 -d 65536 -l 1e-4 -u 20 ${quiet/-n 0/$more} "${@:2}"; }
launch() { if [ "$1" = 1 ]; then "${@:2}"; else mpirun -np "$1" --bind-to none --oversubscribe "${@:2}"; fi; }
sentences() { mkdir -p $OUT/$1; $PYTHON dev/reference/make_sentences.py $OUT/$1/train.bin --shortest "${@:2}"; }
needs() { [ $(wc -w <<<"$GPUS") -ge "$1" ] || { echo "fewer than $1 GPUs"; exit 77; }; } # 77: the row is skipped
explain() { $PYTHON dev/reference/check_profile.py "$OUT/$1" "${@:2}"; }
ncu() { command ncu --clock-control none --metrics gpu__time_duration.sum --nvtx --csv --page raw "$@"; }
bert_kernels="./train_bertcu -e L=2,C=1024,NH=16,T=512,V=30522 -b 4 -t 128 -i $full $lamb"
tiny="./train_gpt2cu -i $text -e L=4,C=256,NH=4,V=257,T=256 -b 4 -x 12"
"""

# Rows: part[/piece], "&" where it runs beside the rows around it, loops | name | command in bash | judge, a function
# below with its words (default: the command succeeds). @x is the value of loop x; xy=1:a,2:b is a loop over pairs. A
# pipe in a command has no blank before it; indented lines continue a row. A row without a name only prepares or tidies.
# "PART: LINE" runs before each command of a part. RANKS is 2, 4, 8, where there are as many GPUs.
LISTS = {"SAME": "e2e,bert,tasks/classify,tasks/answer", "REPEATED": "fp8/bits,fp8/excluded,ranks/curves",
         "OLDER": "75:fp16:5e-3,75:fp32:1e-4,86:bf16:5e-3,89:bf16:5e-3"}
TABLE = r"""
build: more_bf16="build/bf16/test_bertcu train_gpt2cu train_bertcu use_gpt2cu use_bertcu finetune_bertcu"
build: more_fp32="build/fp32/test_bertcu build/fp32/train_bertcu build/fp32/use_gpt2cu build/fp32/finetune_bertcu"
build | build_cpu | make -s -j $(nproc) cpu apps $text
build & p=bf16,fp32,fp16 | build_@p | make -s -j 6 PRECISION=@p build/@p/{opscu,test_gpt2cu,train_gpt2cu} $more_@p
build | no warnings, no register spills | set +f; ! grep -iE 'warning|spill|serialized' $OUT/build_*.log

ops: export OMP_WAIT_POLICY=passive # the references' threads wait for the GPU too
ops & p=bf16,fp32,fp16 | ops_@p | build/@p/opscu test | totals

e2e: trainers train_gpt2 10; model="-i $text -e L=4,C=128,NH=4,V=257,T=256 -b 4 -x 20 --dropout 0.1"
bert: trainers train_bert 5; model="-i $bert_text -e L=4,C=128,NH=4,T=64 -b 8 -x 10 --dropout 0.1"
tasks: trainers finetune_bert 7; quiet="-v 0 -n 0 --overwrite 1" shape="-t 128 -b 8 -x 20 -l 1e-3 --dropout 0.1"
tasks/classify: model="-e $OUT/task_classify/start --task classify -i $OUT/task_classify/train.tsv --labels 2 $shape"
tasks/answer: model="-e $OUT/task_answer/start --task answer -i $OUT/task_answer/train.json --stride 42 $shape"
e2e p=fp32,bf16,fp16 | gpt2_@p | build/@p/test_gpt2cu | totals
bert p=fp32,bf16 | bert_@p | build/@p/test_bertcu | totals
tasks | tasks | python3 dev/test/tasks.py build/fp32/finetune_bertcu | totals
tasks/@t t=classify,answer | transformers @t | $PYTHON dev/reference/check_task.py @t --work $OUT/task_@t
    --program build/fp32/finetune_bertcu | shows steps:
@p & p=SAME | run @p_cpu | train @p_cpu $cpu $model
@p & p=SAME b=fp32,bf16 r=straight,again | run @p_@b_@r | keep @p_@b_@r ${@b} $model
@p & p=SAME | run @p_resumed | keep @p_resumed $bf16 $model --stop-after $half && $bf16 -y 1 -o $OUT/@p_resumed
@p p=SAME | @p_cpu_against_gpu_fp32 | | near @p_cpu @p_fp32_straight 1e-4
@p p=SAME b=fp32,bf16 | @p_@b repeats bit for bit | | same @p_@b_straight @p_@b_again
@p p=SAME | @p_bf16 resumed equals straight | | same @p_bf16_straight @p_resumed
@p p=SAME | | forget @p_{fp32,bf16}_{straight,again} @p_resumed

# With 124M's channels. The epilogue applies GELU before its input is rounded, the recomputation after.
e2e: wide="-i $text -e L=2,C=768,NH=12,V=257,T=1024 -b 4 -x 8 --dropout 0.1"
e2e & r=0,1,2 | run bf16_recompute_@r | train bf16_recompute_@r $bf16 $wide -r @r
e2e r=1,2 | epilogue_recompute_@r | | near bf16_recompute_0 bf16_recompute_@r 5e-3
e2e | resumed with the checkpoint's matmul algorithms | $bf16 $wide -v 0 -s 0 -n 4 -o $OUT/plans &&
    cp -r $OUT/plans $OUT/half && rm -r $OUT/half/ckpt/00000008 && $bf16 -y 1 -o $OUT/half &&
    cmp $OUT/{plans,half}/model.safetensors && grep -q '"matmul_plans": "[^"]' $OUT/half/ckpt/00000008/trainer.json

# fp16 loses small gradients without loss scaling. With it: within 1 % of bf16 after 200 steps of real text.
train: if [ "$GPU_CHECK_DATA" ]; then size="-e d12 -b 16 -t 1024"; else size="-e L=6,C=384,NH=6,T=256 -b 32"; fi
train: compare() { $PYTHON dev/reference/compare_autocast.py "$@" --tokens $shard; }
train p=bf16,fp16 | run text_@p | train text_@p build/@p/train_gpt2cu -i "$data" $size -x 200 -l 6e-4 -u 20
train | fp16_against_bf16 | | last text_fp16 text_bf16 loss 20 0.99 1.01
# Both start from the same fp32 weights. Without warm-up the loss jumps at step 9, where PyTorch's fp32 differs from its
# own fp64 by 8e-4. Ours in bf16 may be twice as far from fp32 as PyTorch's autocast is.
train | compare_fp32 | compare build/fp32/train_gpt2cu --seeds 1 --warmup 20 --exact 1e-4 | shows ^RESULT
train | compare_autocast | compare ./train_gpt2cu --layers 12 --channels 768 --heads 12 -t 512 | shows ^RESULT

# BERT-base without dropout, on the batches that our trainer draws. Warmed up for 20 steps only, it diverges for a while
# on the test corpus, in PyTorch too, and comes back by two ways that are 6 % apart.
bert: compare() { $PYTHON dev/reference/compare_autocast.py ./train_bertcu --bert --dump build/bf16/test_bertcu
    --tokens "$bert_data" --layers 12 --channels 768 --heads 12 -t 128 -b 32 "$@"; }
bert & | compare_autocast_bert | compare --steps 50 --seeds 3 --ratio 2 | shows ^RESULT
bert & | compare_final_bert | compare --steps 200 --warmup 100 --final 0.01 --losses $OUT/final_bert.txt | shows ^RESULT

# Where Python has no numpy, the test corpus: fewer of its tokens are masked.
graph: two_layers="$bert_kernels --autotune 0 -u 40 -x 400"
graph: d12_128_tokens="./train_gpt2cu -i $text -e d12 -b 1 -t 128 --dropout 0.1 -q 0.1 -u 20 -x 200 --autotune 0"
graph & m=gpt2,bert | graph_@m | python3 dev/test/equal.py ./train_@mcu graph | totals
graph | | sentences full_128 128 || cp $bert_text $full
graph s=two_layers,d12_128_tokens n=1,2 w=0,1 | @s, --graph @w, @n | keep @s_@w timeout 60 $@s --graph @w | speed @s_@w
graph s=two_layers,d12_128_tokens | @s: the same bits | | same @s_0 @s_1
graph | | forget {two_layers,d12_128_tokens}_{0,1}

text: bf16="./use_gpt2cu --generate 512" fp32="build/fp32/use_gpt2cu --generate 512"
text p=bf16,fp32 n=1,64 | @p, @n with and without a graph | ${@p} -e d12 --samples @n >$OUT/text_1 &&
    ${@p} -e d12 --samples @n --graph 0 >$OUT/text_0 && cmp $OUT/text_{0,1}
text | alone and in a batch | $fp32 -e d12 >$OUT/text_1 && $fp32 -e d12 --samples 64 >$OUT/text_0 &&
    cmp -n $(stat -c %s $OUT/text_1) $OUT/text_{0,1}
text s=d12,d48 n=1,64 | text_@s_@n | $bf16 -e @s --samples @n 2>&1 >$OUT/text|
    sed -nE 's/.*: (.*) tokens.s after.*/RESULT text size=@s samples=@n tokens_s=\1/p' | shows ^RESULT

# memcheck checks all of matmul, because it only tests that accesses stay inside the operands; the other tools check our
# kernels alone, because cuBLASLt's are not ours to check. What those read is filled by the test, or cleared by
# device_scratch() before cuBLASLt writes to it: initcheck sees no store of cuBLASLt and counts it as initialised.
# racecheck fails by itself on cuBLASLt: matmul_epilogue, quantize and mean_bias run all our kernels with shared memory.
san: ours="--kernel-name kernel_substring=matmul_" initcheck="--kernel-name-exclude kernel_substring=_softmax_kernel"
san: check() { timeout 560 compute-sanitizer --tool $1 ${!1} "${@:3}" --error-exitcode 9 build/bf16/opscu test $2; }
san & t=memcheck,racecheck,initcheck,synccheck o=attention,attention_decode,linear_decode,layernorm,dropout,gather,gelu,
    classifier,embedding,adamw,lamb,loss_scale,global_norm,next_sentence,accuracy,cast_to_fp32,matmul_epilogue,
    layernorm_fp8,quantize,mean_bias,target_rounding,fp8_scales | @t @o | check @t @o
san & t=initcheck,synccheck | @t matmul | initcheck=; check @t matmul $ours
san & to=memcheck:matmul,memcheck:linear,initcheck:linear,synccheck:linear | @t @o | check @t @o

flags m=train_gpt2,train_bert g=flags,flags_gpu | @g_@m | python3 dev/test/equal.py ./@mcu @g | totals
flags | flags_fp32 | python3 dev/test/equal.py build/fp32/train_gpt2cu flags_fp32 | totals

# By our NVTX ranges ncu selects exactly the kernels that a profile has for one layer's pass.
tools: ours() { grep -o '[a-z0-9_]*_kernel'; }
tools | run profile_tiny | train profile_tiny $tiny --profile 2
tools r=forward,backward | ncu_@r | ncu --nvtx-include "step 2/@r/layer 2" --log-file $OUT/ncu_@r.csv $tiny $quiet -o ""
    && awk -F, '$2 == "@r" && $3 == 2 {print $6}' $OUT/profile_tiny/profile/kernels.csv|ours >$OUT/@r.txt &&
    grep attention_@r $OUT/@r.txt && grep '^"[0-9]' $OUT/ncu_@r.csv|ours|diff $OUT/@r.txt -

# GPT-2 in one CUDA file (dev/ladder), from the same weights on the same batches. It warms up for a tenth of the steps.
# A small run is chaotic at 5e-4: then half the micro-batch alone changes its losses by 1.5e-3.
one_file: small="-i $text -b 4 -x 20" rest="--shuffle 0 -q 0.05 -c 0.1 -l 5e-5 -u"
one_file: one() { mkdir -p $OUT/$2; build/$1/gpt2_in_one_filecu "${@:3}" 5e-5 >$OUT/$2/text && tail -n 2 $OUT/$2/text &&
    sed -nE 's/^step .* loss (.*)/{"loss":\1}/p;s,^(\S+) tokens/s.*,{"tok_s":\1},p' $OUT/$2/text >$OUT/$2/log.jsonl; }
one_file p=bf16,fp32 | build_one_file_@p | make -s -j 2 PRECISION=@p build/@p/{gpt2_in_one_filecu,train_gpt2cu}
one_file | run one_start | keep one_start ./train_gpt2cu $small -e L=4,C=256,NH=4,V=257,T=200 -l 2e-3
one_file p=bf16,fp32 | run trainer_@p | train trainer_@p build/@p/train_gpt2cu $small -e $OUT/one_start $rest 2
one_file p=bf16,fp32 | run one_file_@p | one @p one_file_@p 20 $OUT/one_start 4 $text
one_file | run one_d12 | keep one_d12 ./train_gpt2cu -i $data -e L=12,C=768,NH=12,V=50257,T=1024 -b 64 -x 1
one_file | run trainer_d12 | train trainer_d12 ./train_gpt2cu -i $data -e $OUT/one_d12 -b 64 -x 40 $rest 4
one_file | run one_file_d12 | one bf16 one_file_d12 40 $OUT/one_d12 64 $shard
one_file ret=bf16:bf16:6e-3,fp32:fp32:3e-5,d12:124M:2e-2 | losses of one file, @e | | near one_file_@r trainer_@r @t
one_file | speed of one file | | last one_file_d12 trainer_d12 tok_s 20 0.55

bench | bench_ops | build/bf16/opscu bench | shows ^RESULT|GFLOP|GB/s
bench | bench_attention | $PYTHON dev/reference/bench_attention.py | shows ^RESULT
# For GPT-2 124M's shape, forward and backward, in TFLOP/s.
bench | attention at least as fast as FlashAttention-2 | awk '
    /^attention_.* B=32 T=1024 NH=12 HS=64 CAUSAL p=0 .* GFLOP/ {sub(/ GFLOP.*/, ""); ours[++n] = $NF / 1000}
    /^RESULT attention peer=fa2 B=32 H=12 T=1024 D=64 mask=causal / {
    gsub(/[a-z]+_[a-z]+=/, ""); fa2[++m] = $(NF - 2); fa2[++m] = $NF}
    END {print "RESULT attention_compare ours=" ours[1] "/" ours[2], "fa2=" fa2[1] "/" fa2[2];
    exit !(n == 2 && m == 2 && ours[1] >= fa2[1] && ours[2] >= fa2[2])}' $OUT/bench_{ops,attention}.log | shows ^RESULT
bench mb=d12:64,d24:32,d36:16,d48:16 | run train_@m | train train_@m ./train_gpt2cu -e @m -b @b -t 1024 -x 55
    --profile 5 && explain train_@m/profile --overhead 10 | shows ^(RESULT|By|matmul|attention)
bench mg=d12:580000,d24:0,d36:0,d48:51000 | train_gpt2cu size=@m | | speed train_@m @g

bert_bench: large() { sentences $1 $2 --longest $3 && train $1 timeout 150 ./train_bertcu -e bert-large
    -i $OUT/$1/train.bin $lamb -b $((32768/$3)) -t $3 -x 35 --profile 5 "${@:4}" && explain $1/profile --overhead 10; }
bert_bench t=128,512 | run full_@t | large full_@t @t @t | shows ^RESULT
bert_bench t=128,512 | run varied_@t | large varied_@t $((@t / 2 + 1)) @t --pack 2 | shows ^RESULT
bert_bench tg=128:1850,512:420 | train_bertcu size=large T=@t | | speed full_@t @g
bert_bench t=128,512 | varied_over_full T=@t | | last varied_@t full_@t seq_s 30 1.25
bert_bench t=128,512 | torch_bert_@t | timeout 240 $PYTHON dev/reference/bert.py -b $((32768/@t)) -t @t | shows ^RESULT
# The published step whose kernels are counted, at most 80 in at most 2 ms: two layers of BERT-large.
bert_bench | run bert_kernels | train bert_kernels $bert_kernels -x 40 --profile 3 &&
    explain bert_kernels/profile --overhead 10 &&
    awk -F, 'NR > 1 {n[$6 ~ /^copy_/ ? "copies" : $6 ~ /^fill_/ ? "fills" : "kernels"]++}
    END {print "RESULT bert_kernels kernels=" n["kernels"], "fills=" n["fills"], "copies=" n["copies"];
    exit !(n["kernels"] > 0 && n["kernels"] <= 80)}' $OUT/bert_kernels/profile/kernels.csv | shows ^RESULT
bert_bench | bert_kernels in 2 ms | | speed bert_kernels 2000

# PTX alone, which this GPU's driver compiles when a program starts, and LLMC_TEST_DEVICE for the kernels that the
# launchers choose on such a GPU. Heads of 128 are materialized on 7.5, as a line says: it has too little shared memory.
older: small="-i $text -e L=2,C=256,NH=4,V=257,T=256 -b 4 -x 20 --dropout 0.1"
older: on() { LLMC_TEST_DEVICE=${1%_*} build/ptx${1/_//}/"${@:2}"; }
older & gpt=OLDER | build_@g_@p | make -s -j 4 B=build/ptx@g ARCH= PTX=@g PRECISION=@p build/ptx@g/@p/{ops,train_gpt2}cu
older | run older_cpu | train older_cpu ./train_gpt2 $small
older & gpt=OLDER | ops_@g_@p | on @g_@p opscu test | totals
older & gpt=OLDER h=4,2 | run older_@g_@p_@h | train older_@g_@p_@h on @g_@p train_gpt2cu ${small/H=4/H=@h} --profile 2
older gpt=OLDER | older_@g_@p_against_the_CPU | | near older_cpu older_@g_@p_4 @t
# The most shared memory of a kernel of ours; cuBLASLt's are those of the GPU that is here.
older gpt=OLDER | shared_@g_@p | awk -F, 'FNR > 1 && $11 != "" && !/nvjet|cutlass|cublas|gemm|xmma|splitK/ {
    n++; hopper += $6 ~ /hopper/; if ($11 + 0 >= most) {most = $11 + 0; kernel = $6}}
    END {print "RESULT older gpu=@g_@p", "most_shared_bytes=" most, "in=" kernel; exit !(n &&
    !hopper && most <= (@g == 75 ? 65536 : 101376))}' $OUT/older_@g_@p_{4,2}/profile/kernels.csv | shows ^RESULT
older | heads of 128 on 7.5 | grep 'heads of 128 channels is materialized' $OUT/run_older_75_fp16_2.log &&
    ! grep 'is materialized' $OUT/run_older_86_bf16_2.log

profile/published | published set-ups | set +f; bash scripts/profile_reference.sh --out $OUT/published --pages
    $OUT/reports && for r in $OUT/published/*/profile; do explain ${r#$OUT/} --overhead 10 || exit; done | shows ^RESULT
# The same step in ncu, which sees only kernels, and in a listing by another tool. Kernel times depend on the clock, so
# both runs begin on an idle GPU and are compared at the same steps.
profile/tools: same="./train_gpt2cu -e L=4,C=768,NH=12,V=50257,T=1024 -b 16 -t 1024 --autotune 0" cuda=/usr/local/cuda
profile/tools: listed() { KERNEL_LIST=${list:-/dev/null} CUDA_INJECTION64_PATH=$OUT/kernel_list.so "$@"; }
profile/tools | run profile_same | sleep 5; train profile_same $same -x 15 --profile 5
profile/tools | ncu_step | ncu --cache-control none --nvtx-include "step 12/"
    --log-file $OUT/ncu_step.csv $same -x 12 $quiet -o ""
profile/tools | plain_listing | gcc -shared -fPIC dev/reference/kernel_list.c -o $OUT/kernel_list.so -I$cuda/include
    -L$cuda/extras/CUPTI/lib64 -L$cuda/lib64 -lcupti && sleep 5 &&
    list=$OUT/kernel_list.csv listed $same -x 15 $quiet -o ""
profile/tools | explained profile_same, ncu and the listing | explain profile_same/profile --ncu $OUT/ncu_step.csv
    --listing $OUT/kernel_list.csv | shows ^RESULT
profile/tools t=ncu,listed | profile under another tool, @t: an error says so | ! train profile_@t @t $tiny --profile 2
    | shows error: --profile: .*another tool profiles this process
profile/tools: hide='find / -xdev -name "libcupti.so*" -type f -exec mount --bind /dev/null {} ";"; "$@"'
profile/tools | without CUPTI an error says so | unshare -m true || exit 77; ! unshare -m bash -c "$hide" _ $tiny
    --profile 2 $quiet -o "" | shows error: --profile: .*CUPTI.* is not found
profile/ranks | profile of all ranks | needs 2; set +f; train profile_ranks launch $(wc -w <<<"$GPUS") ./train_gpt2cu
    -e d12 -b 64 -t 1024 -z 1 --bucket 16 -x 20 --profile 5 && for rank in $OUT/profile_ranks/profile/rank_*;
    do explain ${rank#$OUT/} || exit; done | shows ^(RESULT|overlap|slowest)

fp8: large="./train_bertcu -e bert-large -i $bert_data $lamb -l 1e-3 -u 100" large128="$large -b 256 -t 128"
fp8/tests & m=gpt2,bert | fp8_@m | bash dev/test/fp8.sh ./train_@mcu | totals
fp8/curves: four="./train_bertcu -e L=4,C=512,NH=8,V=30522,T=512 -i $bert_data -b 256 -t 128 -x 12000 -u 2000 -l 7e-4
    -k linear -c 0.01 --dropout 0.1 -v 12000" large128+=" -x 300 -v 300" quiet="${quiet#-v 0} -j ${bert_data/train/val}"
fp8/curves s=four,large128 f=0,1 | fp8: curve of @s, --fp8 @f | train fp8_@s_@f $@s -m 0 --fp8 @f
fp8/curves | fp8: accuracies of four | | near fp8_four_0 fp8_four_1 0.005 val_mlm_accuracy
fp8/curves | fp8: losses of large128 | | last fp8_large128_1 fp8_large128_0 val_loss 1 0 1.005
fp8/speed: gpt2="./train_gpt2cu -t 1024 -i $data -l 6e-4 -u 100 -c 0.1" settle_d48="--apart --settle 150"
fp8/speed: d12="$gpt2 -e d12 -b 64" d48="$gpt2 -e d48 -b 16" large512="$large -b 64 -t 512"
fp8/speed s=d12,large128,large512,d48 | fp8 speed of @s | $PYTHON dev/reference/fp8_speed.py @s
    ${settle_@s:---settle 400} --seconds 30 --out $OUT -- $@s | shows ^RESULT

# Two equal runs give the same bits (with --autotune 0), and so does one that is stopped and resumed. Every step has the
# same sequences for any number of ranks; sums of another order round differently in bf16, by about 1e-3 in a loss. The
# learning rate is low: at 6e-4 after 10 warm-up steps the run itself jumps, and 1e-4 becomes 0.3.
fp8/bits: more="--fp8 1 -x 24 -n 12 --autotune 0" half=12
fp8/excluded: more="--fp8 1 -x 24 -n 12 --autotune 0 --fp8-exclude-forward attn.c_attn --fp8-steps 18" half=12
ranks/curves: more="-x 20 -n 10 --autotune 0" half=10
@p p=REPEATED n=RANKS,1 r=straight,again | @p of @n, @r | curve @n -z 1 -o $OUT/@p_@n_@r
@p p=REPEATED n=RANKS,1 | @p of @n, stopped and resumed | curve @n -z 1 --stop-after $half
    -o $OUT/@p_@n_resumed && launch @n ./train_gpt2cu -z 1 -y 1 -o $OUT/@p_@n_resumed
@p p=REPEATED n=RANKS,1 r=again,resumed | @p of @n, @r: the same bits | | same @p_@n_@r @p_@n_straight
@p p=REPEATED n=RANKS | @p of @n: a weights_hash a checkpoint |
    [ $(grep -c weights_hash $OUT/@p_@n_straight/log.jsonl) = 2 ]
@p p=REPEATED n=RANKS,1 | | forget @p_@n_{straight,again,resumed}
ranks/curves n=RANKS | losses of @n ranks against one | | near ranks/curves_@n_straight ranks/curves_1_straight 5e-3
# The sum of two numbers does not depend on their order.
ranks/curves z=0,1 b=16,1000000 | curve of 2, -z @z --bucket @b | needs 2; curve 2 -z @z --bucket @b -o $OUT/two_@z_@b
ranks/curves z=0,1 | 2 ranks, -z @z, sums overlapped or after: the same bits | needs 2 | same two_@z_16 two_@z_1000000
ranks/curves | | forget two_{0,1}_{16,1000000}
# Linear speed: all GPUs run at the same time, each on its own. The all-reduce overlaps with the backward pass (--bucket
# 16) or follows it; which is faster depends on the model. One micro-batch a step is the most expensive case.
ranks/speed: d12="65536 ./train_gpt2cu -e d12 -b 64 -t 1024 -x 160" d48="16384 ./train_gpt2cu -e d48 -b 16
    -t 1024 -x 56" large="32768 ./train_bertcu -e bert-large -b 256 -t 128 -i $full $lamb -x 140"
ranks/speed: together() { launch $1 "$3" -d $(($1 * $2)) "${@:4}"; } # ranks, tokens of one, command
ranks/speed s=d12,d48,large | @s alone | needs 2; sentences full_128 128; for gpu in $GPUS; do CUDA_VISIBLE_DEVICES=$gpu
    train alone_@s_$gpu together 1 $@s >$OUT/alone_@s_$gpu.log & pids+=($!); done; wait "${pids[@]}"
ranks/speed s=d12,d48,large n=RANKS z=0,1 b=16,1000000 | @s on @n GPUs, -z @z --bucket @b |
    train @s_on_@n_@z_@b together @n $@s -z @z --bucket @b | speed @s_on_@n_@z_@b
ranks/speed s=d12,d48,large n=RANKS | @s on @n GPUs: from four on 97 % of linear | | linear @s @n
ranks/tests m=gpt2,bert | ranks_@m | needs 4; bash dev/test/ranks.sh ./train_@mcu | totals
ranks/equal m=gpt2,bert | ranks_equal_@m | needs 4; python3 dev/test/equal.py ./train_@mcu ranks | totals
"""
Row = collections.namedtuple("Row", "part name command judge beside")
counts, variables = collections.Counter(), collections.defaultdict(str)  # variables: of each part and piece


def say(text):
    print(text, flush=True)
    with open(OUT / "gpu_check.txt", "a", encoding="utf-8") as report:
        report.write(text + "\n")


def numbers(run, key):
    """All numbers of that name in a run's log.jsonl."""
    lines = [json.loads(line) for line in (OUT / run / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


# Judges: name of the row, its log, words of the table. They say results, and return whether the row is good; first the
# command must have succeeded.
def shows(name, log, *pattern):
    lines = [line for line in log.splitlines() if re.search(" ".join(pattern), line)]
    for line in lines:
        say(line)
    return bool(lines)


def near(name, log, a, b, tol, key="loss"):
    found = [abs(x - y) for x, y in zip(numbers(a, key), numbers(b, key), strict=True)]
    say(f"RESULT {name} steps={len(found)} max_{key}_difference={max(found):.6g} tol={tol}")
    return all(difference <= float(tol) for difference in found)


def same(name, log, *runs):
    """All of the newest checkpoints' tensors, bit for bit. With -z 1 each rank has a file of state."""
    newest = [max(path for path in (OUT / run / "ckpt").glob("*") if path.name.isdigit()) for run in runs]
    x, y = ({path.name: path for path in checkpoint.rglob("*.safetensors")} for checkpoint in newest)
    is_whole = any("model" in n for n in x) and any("optimizer" in n for n in x)
    return is_whole and x.keys() == y.keys() and all(filecmp.cmp(x[n], y[n], shallow=False) for n in x)


def speed(name, log, run, gate="0"):
    """Medians of a run without its first five steps; `gate`: the tokens or sequences a second to reach."""
    found = {key: numbers(run, key)[5:] for key in ("ms", "tok_s", "seq_s", "mfu", "joules", "mhz")}
    median = {key: statistics.median_low(values) for key, values in found.items() if values}
    say(f"RESULT {name} " + " ".join(f"{key}={value:g}" for key, value in median.items()))
    return median.get("seq_s", median.get("tok_s", 0)) >= float(gate)


def last(name, log, a, b, key, count, least, most="inf"):
    """How many times as large the last numbers of run a are as those of run b, by medians."""
    x, y = (statistics.median(numbers(run, key)[-int(count):]) for run in (a, b))
    say(f"RESULT {name} ratio={x / y:.6g} {key}={x:g}/{y:g}")
    return float(least) <= x / y <= float(most)


def linear(name, log, run, ranks):
    """The fastest way together against GPUs at the same time, each on its own. Means of the last two thirds of the
    steps: at the power limit they vary by 10 % within a second, and take some seconds to settle (dev/LOG.md)."""
    def mean(run):
        steps = numbers(run, "ms")
        return statistics.mean(steps[len(steps) // 3:])
    alone = statistics.harmonic_mean([mean(f"alone_{run}_{gpu}") for gpu in GPUS[:int(ranks)]])
    best = min(mean(way) for way in OUT.glob(f"{run}_on_{ranks}_[01]_*"))
    say(f"RESULT ranks run={run} ranks={ranks} ms={best:.1f} alone_ms={alone:.1f} of_linear={alone / best:.4f}")
    return int(ranks) < 4 or alone / best >= 0.97


def rows_of(text):
    """The rows of a table, loops unrolled."""
    for name, values in LISTS.items():
        text = text.replace(name, values)
    for line in re.sub(r"\n +", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines():
        if setting := re.match(r"([a-z0-9_/]+): (.*)", line):
            variables[setting[1]] += setting[2] + "\n"
        elif line:
            head, *fields = [field.strip() for field in re.split(r" \|(?= |$)", line)]
            part, *words = head.replace(", ", ",").split()
            loops = [word.split("=") for word in words if word != "&"]
            for values in itertools.product(*(choices.strip(",").split(",") for _, choices in loops)):
                row = [part, *fields, "", ""][:4]
                for (letters, _), choice in zip(loops, values):
                    for letter, value in zip(letters, choice.split(":")):
                        row = [field.replace("@" + letter, value) for field in row]
                if all(values):  # there is none of RANKS where there is one GPU
                    yield Row(*row, "&" in words)


def run(row):
    """Its exit status and its log."""
    setup = [SETUP] + [variables[part] for part in dict.fromkeys((row.part.split("/")[0], row.part))]
    path = OUT / (re.sub(r"[^A-Za-z0-9_]", "_", row.name) + ".log")
    with open(path, "w", encoding="utf-8") as log:
        done = subprocess.run(["bash", "-c", "".join(setup) + row.command], stdout=log, stderr=subprocess.STDOUT)
    return done.returncode, path.read_text(errors="replace")


def judge(row, status, log):
    name, words, is_good = row.name, row.judge.split(), not status
    if not name:
        return
    if status == 77:
        return say(f"skip {name}: {log.strip()[-100:]}")
    if words == ["totals"]:
        passed, failed = map(int, (re.findall(r"^(\d+) passed, (\d+) failed", log, re.M) or [(0, 0)])[-1])
        counts.update(passed=passed, failed=failed)
        say(f"{name}: {passed} passed, {failed} failed")
        shows(name, log, "^FAIL")
        if passed and (failed or not status):
            return
        name, is_good = f"{name} ended early", False
    elif words and is_good:
        try:
            is_good = globals()[words[0]](name, log, *words[1:])
        except (ArithmeticError, LookupError, TypeError, ValueError, OSError) as error:
            is_good = say(f"{name}: {error}")
    counts["passed" if is_good else "failed"] += 1
    say(("ok   " if is_good else "FAIL ") + name)
    if status:
        say("\n".join(log.splitlines()[-12:]))


def main():
    global OUT, GPUS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=PARTS)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="out/gpu_check", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    a = parser.parse_args()
    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    OUT = a.out.resolve()
    listed = r"echo ${CUDA_VISIBLE_DEVICES:-$(nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p')}"
    GPUS = subprocess.getoutput(listed).replace(",", " ").split()
    LISTS["RANKS"] = ",".join(str(n) for n in (2, 4, 8) if n <= len(GPUS))
    os.environ.update(OUT=str(OUT), GPUS=" ".join(GPUS))
    table = list(rows_of(TABLE))
    chosen = {part: [row for row in table if f"{row.part}/".startswith(part + "/") and re.search(a.only, row.name)]
              for part in a.part.split()}
    if not all(chosen.values()):
        parser.error(f"no check is chosen by --part '{a.part}' --only '{a.only}'")
    if a.list:
        return print(*(" | ".join(row[:4]) for row in itertools.chain(*chosen.values())), sep="\n")
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "gpu_check.txt").write_text("")
    say(subprocess.getoutput(
        "echo gpu_check of commit ${GPU_CHECK_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || head -n 1 .commit)}; "
        "env | grep -o '^GPU_CHECK_[A-Z_]*'; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | "
        "head -n 1; nvcc --version | tail -n 1"))
    for part, rows in chosen.items():
        say(f"== {part}")
        started = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE.get(part, 2)) as pool:
            for _, group in itertools.groupby(rows, lambda row: row.beside or id(row)):
                for row, job in [(row, pool.submit(run, row)) for row in group]:
                    judge(row, *job.result())
        say(f"part {part}: {time.monotonic() - started:.0f} s")
    say(f"{counts['passed']} passed, {counts['failed']} failed")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
