#!/usr/bin/env bash
# Run every test that this machine can run and add up what they report.
#
#     bash dev/test/run.sh BUILD_FOLDER TRAIN_GPT2 TRAIN_BERT USE_GPT2 USE_BERT FINETUNE_BERT
#
# The tests of a trainer find the program that uses its models beside it.
# A test prints "ok ...", "FAIL ..." or "skip ..." lines and ends with "N passed, N failed[, N skipped]". Only failures,
# skips and the totals are shown; the whole output is in BUILD_FOLDER/test_logs. A test that ends with a failing status
# or without its totals counts as one failure more. The slowest are named at the end. TEST_LIMIT: seconds after which a
# test is stopped, for runs that nobody watches. LLMC_TEST_DATA: a folder of vocabularies and texts that some tests need
# (docs/testing.md). ONLY: tests whose names begin with one of these words, such as "resume" or "ranks refuse".
set -u
# Waiting threads release their core: the machine may be busy, and results do not depend on it.
export OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0
build=$1 gpt2=$2 bert=$3 use_gpt2=$4 use_bert=$5 tune=$6
data=${LLMC_TEST_DATA:-}
# Tests in Python run in build/venv, which is made where it can be, unless PYTHON names an interpreter.
if [ -z "${PYTHON:-}" ]; then
    bash dev/test/venv.sh build/venv
    [ ! -x build/venv/bin/python ] || export PYTHON=$PWD/build/venv/bin/python
fi
logs=$build/test_logs
mkdir -p "$logs"
rm -f "$logs"/*.totals
skipped=0
ONLY=${ONLY:-}
is_chosen() { # name
    local word
    [ -n "$ONLY" ] || return 0
    for word in $ONLY; do [[ $1 != "$word"* ]] || return 0; done
    return 1
}

# One test: its failures, skips and totals, the last in NAME.totals too.
run_one() { # name, command...
    local name=$1 log=$logs/$1.log start=$SECONDS
    shift
    ${TEST_LIMIT:+timeout -k 10 "$TEST_LIMIT"} "$@" >"$log" 2>&1
    local status=$? totals p f s
    totals=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
    p=$(echo "$totals" | sed -nE 's/^([0-9]+) passed.*/\1/p')
    f=$(echo "$totals" | sed -nE 's/.* ([0-9]+) failed.*/\1/p')
    s=$(echo "$totals" | sed -nE 's/.* ([0-9]+) skipped.*/\1/p')
    p=${p:-0} f=${f:-0} s=${s:-0}
    if [ -z "$totals" ] || { [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; }; then
        echo "FAIL $name: ended with status $status; the end of its output:"
        tail -n 15 "$log"
        f=$((f + 1))
    fi
    grep -E '^(FAIL|skip)' "$log"
    printf '%-12s %5d passed, %d failed, %d skipped  (%d s)\n' "$name" "$p" "$f" "$s" $((SECONDS - start))
    echo "$p $f $s $((SECONDS - start)) $name" >"$logs/$name.totals"
}

# Two tests run at a time: most wait for a file or for one thread, and none measures time. Each is a process group of
# its own (set -m): only so do its programs see signals as under a shell, and all end with this script.
set -m
trap 'for job in $(jobs -pr); do kill -- "-$job"; done; exit 130' INT TERM
run() {
    is_chosen "$1" || return 0
    while [ "$(jobs -pr | wc -l)" -ge 2 ]; do wait -n; done
    run_one "$@" </dev/null &
}

skip() { # name, reason
    is_chosen "$1" || return 0
    echo "skip $1: $2"
    skipped=$((skipped + 1))
}

run text bash dev/test/text.sh "$build/test_text"
run base "$build/test_base"
run data "$build/test_data"
run world "$build/test_world"
run bpe "$build/test_bpe"
if "${PYTHON:-python3}" -c 'import tokenizers' 2>/dev/null; then
    run check_bpe "${PYTHON:-python3}" dev/test/check_bpe.py "$build/test_bpe" "$data/gpt2-bpe" 1
else skip check_bpe "${PYTHON:-python3} has no tokenizers library (pip install tokenizers)"; fi
if "${PYTHON:-python3}" -c 'import numpy, tokenizers' 2>/dev/null; then
    run chat "${PYTHON:-python3}" dev/test/chat.py "$gpt2"
else skip chat "${PYTHON:-python3} has no numpy and tokenizers (pip install them)"; fi
run prefetch "$build/test_prefetch"
if [ -x "$build/test_prefetch_tsan" ]; then
    # ThreadSanitizer needs addresses where it expects them.
    setarch "$(uname -m)" -R true 2>/dev/null && fixed="setarch $(uname -m) -R"
    run prefetch_tsan ${fixed:-} "$build/test_prefetch_tsan"
elif [ "${build##*/}" != san ]; then skip prefetch_tsan "this compiler has no ThreadSanitizer"; fi
run run "$build/test_run"
run llmc_files "$build/test_llmc_files"
run choices "$build/test_choices"
run examples "$build/test_examples"
run squad "$build/test_squad"
squad=("$data/bert-base-uncased" "$data/squad-xquad/xquad.en.json")
[ -f "${squad[1]}" ] || squad=()
if "${PYTHON:-python3}" -c 'import tokenizers' 2>/dev/null; then
    run check_squad "${PYTHON:-python3}" dev/test/check_squad.py "$build/test_squad" "${squad[@]}"
else skip check_squad "${PYTHON:-python3} has no tokenizers library (pip install tokenizers)"; fi
run profile "$build/test_profile"
[ "${build##*/}" != san ] || run fuzz "$build/test_fuzz" --inputs 100000 --seconds 240
run ops "$build/ops" test
if [ -x "$build/ops_double" ]; then
    run ops_double "$build/ops_double" test
    run grad "$build/ops_double" grad
    run gpt2_double "$build/test_gpt2_double"
    run bert_double "$build/test_bert_double"
fi
emulated=$(echo "$build"/emulated/*/ops_80)
if [ -x "$emulated" ]; then run emulated bash dev/emulator/test.sh "${emulated%/*}"
else skip emulated "CUDA's headers were not found: nvcc is not installed"; fi
for name in gpt2 bert; do
    program=${emulated%/*}/train_$name
    [ ! -x "$program" ] || run graph_$name "${PYTHON:-python3}" dev/test/equal.py "$program" graph
done
run gpt2 "$build/test_gpt2"
run bert "$build/test_bert"
for name in dlrm ncf dlrm_double ncf_double; do
    [ ! -x "$build/test_$name" ] || run $name "$build/test_$name"
done
[ ! -x "$build/train_dlrm" ] || run recsys bash dev/recsys/trainer.sh "$build/train_dlrm" "$build/train_ncf"
run cli bash dev/test/cli.sh "$gpt2"
[ "${build##*/}" = san ] || run one_file bash dev/test/one_file.sh "$gpt2"
[ "${build##*/}" = san ] || run rooms bash dev/test/rooms.sh "$gpt2"
[ "${build##*/}" = san ] || run exercises env EXERCISE_LIMIT=300 bash dev/test/exercises.sh
[ "${build##*/}" = san ] || run ladder bash dev/test/ladder.sh
run threads bash dev/test/threads.sh "$gpt2"
# Tables: what must be the same, what is refused. Of BERT only where it differs from GPT-2, or where its step is its own.
tables=${PYTHON:-python3}
for group in resume ranks late losses; do run ${group}_equal "$tables" dev/test/equal.py "$gpt2" $group; done
for group in resume ranks late losses; do run ${group}_equal_bert "$tables" dev/test/equal.py "$bert" $group; done
run refuse "$tables" dev/test/refuse.py "$gpt2"
run refuse_bert "$tables" dev/test/refuse.py "$bert"
[ "${build##*/}" = san ] || run entropy bash dev/test/entropy.sh "$gpt2"
run flags bash dev/test/flags.sh "$gpt2"
run flags_use_gpt2 bash dev/test/flags.sh "$use_gpt2"
run generate bash dev/test/generate.sh "$gpt2"
run llmc_files_sh bash dev/test/llmc_files.sh "$gpt2" "$build/test_llmc_files"
run gguf bash dev/test/gguf.sh "$gpt2" "$bert"
run hub bash dev/test/hub.sh "$gpt2" "$bert"
run choices_sh bash dev/test/choices.sh "$gpt2"
if [ ! -d "$data/gpt2-bpe" ]; then skip check_generate "set LLMC_TEST_DATA to a folder with gpt2-bpe (docs/testing.md)"
elif "${PYTHON:-python3}" -c 'import torch, transformers, tokenizers' 2>/dev/null; then
    run check_generate "${PYTHON:-python3}" dev/reference/check_generate.py "$use_gpt2" "$data/gpt2-bpe"
else skip check_generate "${PYTHON:-python3} has no torch, transformers and tokenizers (pip install them)"; fi
run cli_bert bash dev/test/cli_bert.sh "$bert"
[ "${build##*/}" = san ] || run explain python3 dev/test/explain.py "$gpt2" "$bert"
if "${PYTHON:-python3}" -c 'import numpy, tokenizers' 2>/dev/null; then
    run check_embed "${PYTHON:-python3}" dev/test/check_embed.py "$bert" "$use_bert"
else skip check_embed "${PYTHON:-python3} has no numpy and tokenizers (pip install them)"; fi
[ "${build##*/}" = san ] || run exam bash dev/test/exam.sh "$bert"
run model_dir bash dev/test/model_dir.sh "$gpt2" "$bert"
run flags_bert bash dev/test/flags.sh "$bert"
run flags_use_bert bash dev/test/flags.sh "$use_bert"
run flags_tune bash dev/test/flags.sh "$tune"
run tasks bash dev/test/tasks.sh "$tune"
run tokenizer_files bash dev/test/tokenizer_files.sh "$gpt2" "$bert"
# Without tinyshakespeare's 200 steps, which the sanitizers make an hour of.
texts=()
[ "${build##*/}" != san ] || texts=(none none)
run prepare env TEST_DATA="$build/test_data" bash dev/test/prepare.sh "$gpt2" "${texts[@]}"
if [ "${build##*/}" != san ]; then
    run net_data bash dev/test/net_data.sh
    run plot bash dev/test/plot.sh
fi
[ "${build##*/}" = san ] || run track python3 dev/test/track.py
if [ "${build##*/}" = san ]; then :
elif "${PYTHON:-python3}" -c 'import numpy, tokenizers' 2>/dev/null; then
    run scripts "${PYTHON:-python3}" dev/test/scripts.py "$gpt2" "$bert"
else skip scripts "${PYTHON:-python3} has no numpy and tokenizers (pip install them)"; fi
[ "${build##*/}" = san ] || run gpu_check bash dev/test/gpu_check.sh
[ "${build##*/}" = san ] || run sweep bash dev/test/sweep.sh "$gpt2"
[ "${build##*/}" = san ] || run notebook "${PYTHON:-python3}" dev/test/notebook.py
run profile_scripts bash dev/test/profile_scripts.sh
[ "${build##*/}" = san ] || run page python3 dev/test/page.py
run resume bash dev/test/resume.sh "$gpt2"
run fp8 bash dev/test/fp8.sh "$gpt2"
run fp8_bert bash dev/test/fp8.sh "$bert"
run profile_gpt2 bash dev/test/profile.sh "$gpt2"
run profile_bert bash dev/test/profile.sh "$bert"
run order "$build/test_order"
run comm bash dev/test/comm.sh "$build/test_comm"
run ranks bash dev/test/ranks.sh "$gpt2"
run slurm bash dev/test/slurm.sh "$gpt2"
[ "${build##*/}" = san ] || run docs bash dev/test/docs.sh "$build"
command -v nvidia-smi >/dev/null || skip gpu "this machine has no NVIDIA GPU"

wait
ls "$logs"/*.totals >/dev/null 2>&1 || { echo "no test's name begins with ONLY=$ONLY" >&2; exit 2; }
echo "slowest: $(cat "$logs"/*.totals | sort -k 4,4nr | head -n 5 | awk '{ printf("%s%s %d s", (NR > 1 ? ", " : ""), $5, $4) }')"
read -r passed failed more <<<"$(cat "$logs"/*.totals | awk '{ p += $1; f += $2; s += $3 } END { print p, f, s }')"
skipped=$((skipped + more))
if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"
else echo "$passed passed, $failed failed"; fi
[ "$failed" -eq 0 ]
