#!/usr/bin/env bash
# Tests of ops with the kernels of sm_80, and with those of sm_90a where they are others, on the CPU.
#
#     bash dev/emulator/test.sh FOLDER [OP]        the folder of `make emulated`
#
# With QUICK=1 without large cases: a third of the time.
# Ends with `N passed, N failed`.
set -u
folder=$1 op=${2:-} how=test
[ "${QUICK:-0}" = 0 ] || how=quick
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
only_sm90a() {
    local name
    for name in attention muon linear; do
        [ -n "$op" ] && [ "$op" != "$name" ] || "$folder/ops_90a" $how "$name" || return
    done
}
"$folder/ops_80" $how $op >"$logs/sm_80" 2>&1 &
only_sm90a >"$logs/sm_90a" 2>&1
statuses=($?)
wait $!
statuses+=($?)
sed 's/^\(ok  \|FAIL\) /\1 sm_90a /; /^[0-9]* passed, [0-9]* failed/d' "$logs/sm_90a"
sed 's/^\(ok  \|FAIL\) /\1 sm_80 /; /^[0-9]* passed, [0-9]* failed/d' "$logs/sm_80"
# A program that ended early has printed no totals; its status counts as a failure.
passed=0 failed=0
while read -r p f; do passed=$((passed + p)) failed=$((failed + f)); done < <(
    sed -nE 's/^([0-9]+) passed, ([0-9]+) failed.*/\1 \2/p' "$logs"/*)
[ "$failed" -gt 0 ] || [ "${statuses[*]}" = "0 0" ] || failed=1
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
