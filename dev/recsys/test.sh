#!/usr/bin/env bash
# Test the recommenders: ops against references and finite differences, both models' training steps, both trainers.
#
#     bash dev/recsys/test.sh BUILD_FOLDER [without-ops]     make test tests the ops with all others
set -u
build=$1 passed=0 failed=0 skipped=0
ops=(interaction linear_bce embedding_rows matmul_relu matmul_parts)
[ "${2:-}" != without-ops ] || ops=()
run() { # command...
    local out status totals
    out=$("$@" 2>&1)
    status=$?
    totals=$(grep -E '^[0-9]+ passed, [0-9]+ failed' <<<"$out" | tail -n 1)
    grep -vE '^[0-9]+ passed' <<<"$out"
    [ -n "$totals" ] && [ "$status" -eq 0 ] || { echo "FAIL $*: status $status"; failed=$((failed + 1)); }
    passed=$((passed + $(sed -nE 's/^([0-9]+) passed.*/\1/p' <<<"${totals:-0 passed}")))
    skipped=$((skipped + $(grep -c '^skip' <<<"$out")))
}
for op in ${ops[@]+"${ops[@]}"}; do
    run "$build/ops" test $op
    if [ -x "$build/ops_double" ]; then
        run "$build/ops_double" test $op
        run "$build/ops_double" grad $op
    fi
done
for test in dlrm ncf dlrm_double ncf_double; do
    [ ! -x "$build/test_$test" ] || run "$build/test_$test"
done
[ ! -x "$build/train_dlrm" ] || run bash dev/recsys/trainer.sh "$build/train_dlrm" "$build/train_ncf"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
