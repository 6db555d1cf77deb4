#!/usr/bin/env bash
# Build what suites of dev/test/suites.txt need, run those that this machine can run, and add up what they report.
#
#     bash dev/test/run.sh quick|full|san      make test, make test-full and make san call it
#
# A suite prints "ok ...", "FAIL ..." or "skip ..." lines and ends with "N passed, N failed[, N skipped]". Only failures
# and the totals are shown; the whole output is in $B/test_logs. A suite that ends with a failing status or without its
# totals counts as one failure more. What is skipped for the same reason counts once. The slowest are named at the end.
# Variables, besides those that make passes (SUITES in the Makefile): TEST_LIMIT: seconds after which a suite is
# stopped, for runs that nobody watches. LLMC_TEST_DATA: a folder of vocabularies and texts that some suites need
# (docs/testing.md). ONLY: suites of any level whose names begin with one of these words, such as "resume". OP: with
# ONLY=ops, one op alone.
set -u
# Waiting threads release their core: the machine may be busy, and results do not depend on it.
export OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0
level=$1 DATA=${LLMC_TEST_DATA:-} ONLY=${ONLY:-} OP=${OP:-} CUDA_H=${CUDA_H:-}
OPS=$B/${OP:+one_op/}${OP:-ops}
# ThreadSanitizer needs addresses where it expects them.
UNSHUFFLED=$(setarch "$(uname -m)" -R true 2>/dev/null && echo "setarch $(uname -m) -R")
# Tests in Python run in build/venv, which is made where it can be, unless PYTHON names an interpreter.
if [ -z "${PYTHON:-}" ]; then
    bash dev/test/venv.sh build/venv
    PYTHON=python3
    [ ! -x build/venv/bin/python ] || PYTHON=$PWD/build/venv/bin/python
fi
export PYTHON
logs=$B/test_logs
mkdir -p "$logs"
rm -f "$logs"/*.totals "$logs"/*.skips

is_chosen() { # name, its level, whether it is for sanitizers
    local word
    if [ "$level" = san ]; then [ "$3" = yes ]; else [ "$2" != san ]; fi || return 1
    [ -n "$ONLY" ] || { [ "$level" = san ] || [ "$level" = "$2" ]; return; }
    for word in $ONLY; do [[ $1 != "$word"* ]] || return 0; done
    return 1
}

# What this machine lacks of a suite's needs, or nothing.
missing() { # NEED...
    local need
    for need in "$@"; do
        case $need in
            - | +*) ;;
            cuda) [ -n "$CUDA_H" ] || echo "CUDA's headers were not found: nvcc is not installed" ;;
            tsan) ${CC:-gcc} -fsanitize=thread -shared -x c /dev/null -o "$logs/tsan" 2>/dev/null ||
                echo "this compiler has no ThreadSanitizer" ;;
            data/*) [ -e "$DATA/${need#data/}" ] || echo "LLMC_TEST_DATA has no ${need#data/} (docs/testing.md)" ;;
            *) "$PYTHON" -c "from importlib.util import find_spec; exit(not find_spec('$need'))" ||
                echo "$PYTHON has no $need" ;;
        esac
    done | head -n 1
}

# What make must build: the programs of a command, what it needs besides, and for trainers what they train on.
targets() { # needs and command, as words
    local word
    for word in "$@"; do
        case $word in
            +builtin) echo data/builtin/train.bin data/builtin/bert/train.bin ;;
            +corpus) echo "$CORPUS" ;;
            +apps) echo "$T/use_gpt2 $T/use_bert $T/finetune_bert" ;;
            +*/*) echo "${word#+}" ;;
            +*) echo "$T/${word#+}" ;;
            "$E") ;;
            "$E"/* | "$T"/train_* | "$T"/use_* | "$T"/finetune_*) echo "$word $CORPUS" ;;
            "$B"/*) echo "$word" ;;
        esac
    done
}

# One suite: its failures and totals, the last in NAME.totals too; skips in NAME.skips: reason, a tabulator, what.
run_one() { # name, command...
    local name=$1 log=$logs/$1.log start=$SECONDS
    shift
    ${TEST_LIMIT:+timeout -k 10 "$TEST_LIMIT"} "$@" >"$log" 2>&1
    local status=$? totals p f
    totals=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
    p=$(sed -nE 's/^([0-9]+) passed.*/\1/p' <<<"$totals")
    f=$(sed -nE 's/.* ([0-9]+) failed.*/\1/p' <<<"$totals")
    p=${p:-0} f=${f:-0}
    if [ -z "$totals" ] || { [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; }; then
        echo "FAIL $name: ended with status $status; the end of its output:"
        tail -n 15 "$log"
        f=$((f + 1))
    fi
    grep '^FAIL' "$log"
    [ "$f" -eq 0 ] || echo "repeat: make test ONLY=$name${OP:+ OP=$OP}   log: $log"
    sed -nE "s/^skip (.*[^:]): (.*)/\2\t$name, \1/p" "$log" >"$logs/$name.skips"
    printf '%-17s %5d passed, %d failed  (%d s)\n' "$name" "$p" "$f" $((SECONDS - start))
    echo "$p $f $((SECONDS - start)) $name" >"$logs/$name.totals"
}

names=() to_build=()
while read -r name its_level for_san needs command; do
    [[ $name != '#'* && -n $name ]] && is_chosen "$name" "$its_level" "$for_san" || continue
    names+=("$name")
    eval "needs=(${needs//,/ }) words=($command)"
    lacks=$(missing "${needs[@]}")
    if [ -n "$lacks" ]; then printf '%s\t%s\n' "$lacks" "$name" >"$logs/$name.skips"
    else to_build+=($(targets "${needs[@]}" "${words[@]}")); fi
done <dev/test/suites.txt
[ ${#names[@]} -gt 0 ] || { echo "no suite's name begins with ONLY=$ONLY; dev/test/suites.txt has them" >&2; exit 2; }
to_build=$(printf '%s ' "${to_build[@]}" | xargs -n 1 | sort -u | xargs)
eval "make --no-print-directory -j$(nproc) $MAKE_VARIABLES ${to_build:-absent}" || exit 2

# Two suites run at a time: most wait for a file or for one thread, and none measures time. Each is a process group of
# its own (set -m): only so do its programs see signals as under a shell, and all end with this script.
set -m
trap 'for job in $(jobs -pr); do kill -- "-$job"; done; exit 130' INT TERM
while read -r name its_level for_san needs command; do
    [[ " ${names[*]} " == *" $name "* && ! -f $logs/$name.skips ]] || continue
    eval "words=($command)"
    while [ "$(jobs -pr | wc -l)" -ge 2 ]; do wait -n; done
    run_one "$name" "${words[@]}" </dev/null &
done <dev/test/suites.txt
wait

command -v nvidia-smi >/dev/null || printf 'this machine has no NVIDIA GPU\tscripts/gpu_check.py\n' >"$logs/gpu.skips"
cat "$logs"/*.skips | sort | awk -F '\t' '
    $1 != reason { if (reason) print line; reason = $1; line = "skip " $1 ": " $2; next }
    { line = line "; " $2 }
    END { if (reason) print line }' | tee "$logs/skipped"
slowest=$(cat "$logs"/*.totals | sort -k 3,3nr | head -n 5 | awk '{ printf("%s %d s, ", $4, $3) }')
echo "slowest: ${slowest%, }; with what was built: $SECONDS s"
read -r passed failed <<<"$(cat "$logs"/*.totals | awk '{ p += $1; f += $2 } END { print p + 0, f + 0 }')"
skipped=$(wc -l <"$logs/skipped")
if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"
else echo "$passed passed, $failed failed"; fi
[ "$failed" -eq 0 ]
