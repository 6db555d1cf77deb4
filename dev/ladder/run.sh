#!/usr/bin/env bash
# The ladder of an op: build its rungs, test each with the op's own tests, time them.
#
#     bash dev/ladder/run.sh                list the ladders
#     bash dev/ladder/run.sh OP [RUNG]      all rungs of dev/ladder/OP, or one
#
# A rung is a function with the op's signature; "shipped" is the op itself. Exit status: 0; 1 if a rung fails; 2 if there
# is no such ladder. Variables: CC, CFLAGS; LADDER_TIME=0, no timing.
set -u
cd "$(dirname "$0")/../.." || exit 2
build=build/ladder
if [ -z "${1:-}" ]; then
    echo "make ladder OP=NAME climbs one:"
    for list in dev/ladder/*/rungs.txt; do
        name=${list#dev/ladder/}
        printf '  %-14s %s\n' "${name%/rungs.txt}" "$(awk '$1 !~ /^(#|op)/ {printf "%s%s", separator, $1; separator = ", "}' "$list")"
    done
    exit 0
fi
folder=dev/ladder/$1
[ -f "$folder/rungs.txt" ] || { echo "no ladder is called $1; make ladder lists them"; exit 2; }
read -r _ op header < <(grep '^op ' "$folder/rungs.txt")
mkdir -p $build

make_rung() { # RUNG
    local name=$1 rung=rung_$op
    {
        echo "#include \"$header\""
        echo '#include "dev/ladder/ladder.h"'
        if [ "$name" != shipped ]; then
            echo "#include \"$folder/$name.h\""
            echo "#define $op $rung"
        fi
        echo "#include \"$folder/cases.h\""
        echo 'int main(int argc, char** argv) { return ladder_main(argc, argv); }'
    } >"$build/$name.c"
    # shellcheck disable=SC2086
    "${CC:-gcc}" -x c -std=c11 -D_GNU_SOURCE -I. ${CFLAGS:--O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno} \
        -Wall -Wextra -Wno-unused -Wno-missing-field-initializers "$build/$name.c" -o "$build/$name" -lm
}

failed=0 first=1
while read -r name idea; do
    [ -z "${2:-}" ] || [ "$name" = "$2" ] || continue
    make_rung "$name" || { echo "FAIL $name does not compile"; failed=1; continue; }
    if [ $first = 1 ] && [ "${LADDER_TIME:-1}" != 0 ]; then
        read -r _ peak _ threads < <("$build/$name" peak)
        printf 'the peak of %d threads, measured: %.1f GFLOP/s\n' "$threads" "$(awk "BEGIN {print $peak / 1e9}")"
        printf '%-10s %-14s %10s %9s %8s %15s %12s  %s\n' rung tests ms GFLOP/s 'of peak' 'a step, s' 'gain, s' idea
        before=0 first=0
    fi
    tests=$("$build/$name" test 2>&1)
    totals=$(tail -n 1 <<<"$tests")
    case $totals in
        *' 0 failed') ;;
        *) failed=1 && echo "FAIL $name: $(grep -m1 '^FAIL' <<<"$tests" || echo "$totals")" ;;
    esac
    if [ "${LADDER_TIME:-1}" = 0 ]; then
        case $totals in *' 0 failed') echo "ok   $name: $totals" ;; esac
        continue
    fi
    read -r _ seconds _ flops _ _ _ step < <("$build/$name" time)
    awk -v name="$name" -v idea="$idea" -v tests="${totals%,*}" -v s="$seconds" -v flops="$flops" -v peak="$peak" -v step="$step" -v before="$before" 'BEGIN {
        printf "%-10s %-14s %10.2f %9.1f %6.1f %% %15.2f %12s  %s\n", name, tests, 1e3 * s, flops / s / 1e9,
               100 * flops / s / peak, s * step, before ? sprintf("%.2f", (before - s) * step) : "", idea }'
    before=$seconds
done < <(grep -v '^#\|^op ' "$folder/rungs.txt")
[ $first = 1 ] || echo "a step: $(sed -n 's/^# a step: //p' "$folder/rungs.txt"); gain: over the rung above"
exit $failed
