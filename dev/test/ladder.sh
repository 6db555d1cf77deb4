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
    rungs=$(awk '$1 !~ /^(#|op)/ {print $1}' "$list")
    if grep -q '^op .* gpu$' "$list" && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
        skipped=$((skipped + 1))
        echo "skip the rungs of $name: this machine has no NVIDIA GPU"
        continue
    fi
    lines=$(printf '%s\n' $rungs | LADDER_TIME=0 xargs -P 2 -I{} bash dev/ladder/run.sh "$name" {})
    for rung in $rungs; do
        line=$(grep "^[a-zA-Z]* *$rung[: ]" <<<"$lines")
        verdict "$name, $rung" "$(grep -qE "^ok   $rung: [1-9][0-9]* passed, 0 failed$" <<<"$line" || echo "it says: $line")"
        [ "$rung" = shipped ] || verdict "$name, $rung: at most 120 lines" "$(awk 'END {if (NR > 120) print NR " lines"}' "${list%/*}/$rung".*h)"
    done
done
said=$(make -s ladder OP=nothing 2>&1)
verdict 'a ladder that is not there' "$(grep -q 'no ladder is called nothing' <<<"$said" || echo "$said")"
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ]
