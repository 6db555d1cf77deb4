#!/bin/bash
# The ladder: each rung passes the tests of the op that it leads to; lists and lengths.
#
#     bash dev/test/ladder.sh          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
passed=0 failed=0 skipped=0
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive LC_ALL=C CFLAGS="-O1 -march=native -fopenmp -ffp-contract=off -fno-math-errno"
verdict() { # NAME WHY
    if [ -z "$2" ]; then passed=$((passed + 1)); echo "ok   $1"; else failed=$((failed + 1)); echo "FAIL $1: ${2//$'\n'/ | }"; fi
}
said=$(make -s ladder)
for list in dev/ladder/*/rungs.txt; do
    name=${list#dev/ladder/} name=${name%/rungs.txt}
    verdict "$name is listed" "$(grep -qE "^  $name +[a-z]" <<<"$said" || echo "$said")"
    # The shipped op has its own suite.
    rungs=$(awk '$1 !~ /^(#|op|shipped)/ {print $1}' "$list")
    for rung in $rungs; do
        case $name/$rung in matmul/mma | matmul/wgmma | matmul/clusters | attention/flash) most=250 ;; *) most=120 ;; esac
        verdict "$name, $rung: at most $most lines" "$(awk -v most=$most 'END {if (NR < 1 || NR > most) print NR " lines"}' "${list%/*}/$rung".*h 2>&1)"
    done
    if grep -q '^op .* gpu$' "$list" && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
        skipped=$((skipped + 1))
        echo "skip the rungs of $name: this machine has no NVIDIA GPU"
        continue
    fi
    lines=$(printf '%s\n' $rungs | LADDER_TIME=0 xargs -P 2 -I{} bash dev/ladder/run.sh "$name" {})
    for rung in $rungs; do
        line=$(grep "^[a-zA-Z]* *$rung[: ]" <<<"$lines")
        verdict "$name, $rung" "$(grep -qE "^ok   $rung: [1-9][0-9]* passed, 0 failed$" <<<"$line" || echo "it says: $line")"
    done
done
said=$(make -s ladder OP=nothing 2>&1)
verdict 'a ladder that is not there' "$(grep -q 'no ladder is called nothing' <<<"$said" || echo "$said")"
said=$(bash dev/ladder/run.sh classifier_cpu nothing 2>&1)
verdict 'a rung that is not there' "$([ "$said" = 'classifier_cpu has no rung called nothing' ] || echo "$said")"
# Every op's rungs for a GPU have some for the CPU beside them, which run where there is none.
for list in $(grep -l '^op .* gpu$' dev/ladder/*/rungs.txt); do
    verdict "${list%/*} on the CPU" "$([ -f "${list%/*}_cpu/rungs.txt" ] || echo missing)"
done
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    said=$(LADDER_TIME=0 bash dev/ladder/run.sh classifier loops 2>&1)
    verdict 'without a GPU, the rungs of the CPU' "$(grep -q '^no NVIDIA GPU is here: the rungs of classifier_cpu instead$' <<<"$said" && grep -q '^ok   loops: [1-9][0-9]* passed, 0 failed' <<<"$said" || echo "$said")"
fi
# A table of times, of the cheapest ladder: one line for each rung, and what the peak is.
said=$(make -s ladder OP=classifier_cpu CFLAGS="$CFLAGS" 2>&1)
verdict 'times' "$([ "$(grep -cE '^(loops|lanes|shipped) +[1-9][0-9]* passed +[0-9.]+ +[0-9.]+ +[0-9.]+ % ' <<<"$said")" = 3 ] && grep -q '^peak: [0-9.]*, GB/s of reading what the op touches' <<<"$said" || echo "$said")"
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ]
