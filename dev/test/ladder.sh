#!/bin/bash
# The ladder: each rung passes the tests of the op that it leads to; its length; a table of times.
#
#     bash dev/test/ladder.sh          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
passed=0 failed=0 skipped=0
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive LC_ALL=C
export CFLAGS="-O1 -march=native -fopenmp -ffp-contract=off -fno-math-errno"
verdict() { # NAME WHY
    if [ -z "$2" ]; then passed=$((passed + 1)); echo "ok   $1"
    else failed=$((failed + 1)); echo "FAIL $1: ${2//$'\n'/ | }"; fi
}
has_gpu() { nvidia-smi -L 2>/dev/null | grep -q GPU; }
said=$(make -s ladder)
for list in dev/ladder/*/rungs.txt; do
    name=${list#dev/ladder/} name=${name%/rungs.txt}
    verdict "$name is listed" "$(grep -qE "^  $name +[a-z]" <<<"$said" || echo "$said")"
    # The shipped op has its own suite.
    rungs=$(awk '$1 !~ /^(#|op|shipped)/ {print $1}' "$list")
    for rung in $rungs; do
        most=120
        case $name/$rung in matmul/mma | matmul/wgmma | matmul/clusters | attention/flash) most=250 ;; esac
        verdict "$name, $rung: at most $most lines" "$(wc -l "${list%/*}/$rung".*h | awk -v most=$most '$1 > most')"
    done
    if grep -q '^op .* gpu$' "$list" && ! has_gpu; then
        skipped=$((skipped + 1))
        echo "skip the rungs of $name: this machine has no NVIDIA GPU"
        continue
    fi
    lines=$(printf '%s\n' $rungs | LADDER_TIME=0 xargs -P 2 -I{} bash dev/ladder/run.sh "$name" {})
    for rung in $rungs; do
        line=$(grep "^[a-zA-Z]* *$rung[: ]" <<<"$lines")
        verdict "$name, $rung" "$(grep -qE "^ok   $rung: [1-9][0-9]* passed, 0 failed$" <<<"$line" || echo "$line")"
    done
done
said=$(make -s ladder OP=classifier_cpu CFLAGS="$CFLAGS" 2>&1)
[ "$(grep -cE '^(loops|lanes|shipped) +[1-9][0-9]* passed( +[0-9.]+){3} % ' <<<"$said")" = 3 ] &&
    grep -q '^peak: [0-9.]*, GB/s of reading what the op touches' <<<"$said"
verdict 'a table of times' "$([ $? = 0 ] || echo "$said")"
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ]
