#!/usr/bin/env bash
# The ladder of an op: build its rungs, test each with the op's own tests, time them.
#
#     bash dev/ladder/run.sh                list the ladders
#     bash dev/ladder/run.sh OP [RUNG]      all rungs of dev/ladder/OP, or one
#     bash dev/ladder/run.sh --source       one source with all rungs for GPUs, to see whether they compile
#
# rungs.txt of a ladder has the op, its header, and "gpu" where it needs one; then the rungs from the slowest on,
# each with its idea. A rung is a function RUNG_OP with the op's signature; "shipped" is the op itself. Without a
# GPU the rungs of OP_cpu run, if there are any. Exit status: 0; 1 if a rung fails; 2 if there is no such ladder, or
# no GPU for it.
# Variables: CC, CFLAGS, NVCC, NVFLAGS; LADDER_TIME=0, no timing.
set -u
cd "$(dirname "$0")/../.." || exit 2
if [ "${1:-}" = --source ]; then
    gpu=$(grep -l '^op .* gpu$' dev/ladder/*/rungs.txt)
    for list in $gpu; do echo "#include \"$(awk '$1 == "op" {print $3}' "$list")\""; done
    printf '#include "llmc/%s.cuh"\n' device/ptx/mma hopper/{mbarrier,tma,wgmma}
    for list in $gpu; do
        for name in $(awk '$1 !~ /^(#|op|shipped)/ {print $1}' "$list"); do
            name=${list%/*}/$name.cuh
            printf 'namespace %s {\n#include "%s"\n}\n' "$(tr -c 'a-z\n' _ <<<"$name")" "$name"
        done
    done
    exit 0
fi
build=build/ladder/${1:-}
if [ -z "${1:-}" ]; then
    echo "make ladder OP=NAME climbs one:"
    for list in dev/ladder/*/rungs.txt; do
        name=${list#dev/ladder/}
        printf '  %-18s %s\n' "${name%/rungs.txt}" "$(awk '$1 !~ /^(#|op)/ {printf "%s%s", separator, $1; separator = ", "}' "$list")"
    done
    exit 0
fi
folder=dev/ladder/$1
[ -f "$folder/rungs.txt" ] || { echo "no ladder is called $1; make ladder lists them"; exit 2; }
read -r _ op header device < <(grep '^op ' "$folder/rungs.txt")
if [ "$device" = gpu ] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    [ -d "${folder}_cpu" ] || { echo "skip $1: its rungs need an NVIDIA GPU"; exit 2; }
    echo "no NVIDIA GPU is here: the rungs of ${1}_cpu instead"
    exec bash dev/ladder/run.sh "${1}_cpu" "${@:2}"
fi
mkdir -p $build
cases=$folder/cases.h  # a ladder's rungs on the CPU may have the cases of those on the GPU
[ -f "$cases" ] || cases=${folder%_cpu}/cases.h

make_rung() { # RUNG
    local name=$1 suffix=h source=$build/$1.c
    [ "$device" != gpu ] || suffix=cuh source=$build/$1.cu
    {
        echo "#include \"$header\""
        echo '#include "dev/ladder/ladder.h"'
        if [ "$name" != shipped ]; then
            echo "#include \"$folder/$name.$suffix\""
            echo "#define $op ${name}_$op"
        fi
        echo "#include \"$cases\""
        echo 'int main(int argc, char** argv) { return ladder_main(argc, argv); }'
    } >"$source"
    # shellcheck disable=SC2086
    if [ "$device" = gpu ]; then
        ${NVCC:-nvcc} ${NVFLAGS:--std=c++17 -O1 -arch=native -D_GNU_SOURCE -DPRECISION_BF16 -Xcompiler -fopenmp} -I. \
            -diag-suppress 177 "$source" -o "$build/$name" -lcublasLt -lgomp
        return
    fi
    # shellcheck disable=SC2086
    "${CC:-gcc}" -x c -std=c11 -D_GNU_SOURCE -I. ${CFLAGS:--O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno} \
        -Wall -Wextra -Wno-unused -Wno-missing-field-initializers "$source" -o "$build/$name" -lm
}

chosen=$(awk -v only="${2:-}" '$1 !~ /^(#|op)/ && (only == "" || $1 == only)' "$folder/rungs.txt")
[ -n "$chosen" ] || { echo "$1 has no rung called $2"; exit 2; }
for name in $(awk '{print $1}' <<<"$chosen"); do
    rm -f "$build/$name"
    make_rung "$name" &
done
wait
# A GPU's tests mostly wait for the references on the CPU: all rungs' at once.
if [ "$device" = gpu ]; then
    for name in $(awk '{print $1}' <<<"$chosen"); do "$build/$name" test >"$build/$name.tests" 2>&1 & done
    wait
fi
failed=0 peak=
: >"$build/times.tsv"
while read -r name idea; do
    [ -x "$build/$name" ] || { echo "FAIL $name does not compile"; failed=1; continue; }
    [ "$device" = gpu ] || "$build/$name" test >"$build/$name.tests" 2>&1
    totals=$(tail -n 1 "$build/$name.tests")
    case $totals in
        *' 0 failed') ;;
        *) failed=1 && echo "FAIL $name: $(grep -m1 '^FAIL' "$build/$name.tests" || echo "$totals")" ;;
    esac
    if [ "${LADDER_TIME:-1}" = 0 ]; then
        case $totals in *' 0 failed') echo "ok   $name: $totals" ;; esac
        continue
    fi
    # Others may slow a CPU and its memory down at any time, so its peak is the largest of those beside the rungs.
    if [ -z "$peak" ] || [ "$device" != gpu ]; then peak="${peak:-} $("$build/$name" peak | sed 's/^peak //')"; fi
    seconds=
    read -r _ seconds _ flops _ bytes _ step < <("$build/$name" time)
    [ -n "$seconds" ] || { echo "FAIL $name: its timing ended without a time"; failed=1; continue; }
    printf '%s\t' "$name" "${totals%,*}" "$seconds" "$flops" "$bytes" "$step" >>"$build/times.tsv"
    echo "$idea" >>"$build/times.tsv"
done <<<"$chosen"
[ -z "$peak" ] || awk -F '\t' -v peaks="$peak" -v step="$(sed -n 's/^# a step: //p' "$folder/rungs.txt")" -v of="$(sed -n 's/^# peak: //p' "$folder/rungs.txt")" '
    BEGIN {
        count = split(peaks, each, " ")
        for (i = 1; i <= count; i++) if (each[i] + 0 > peak) peak = each[i] + 0
        printf "%-12s %-14s %10s %9s %8s %12s %12s  %s\n", "rung", "tests", "ms", "rate", "of peak", "a step, ms", "gain, ms", "idea"
    }
    {
        work = $4 == 0 ? $5 : $4
        printf "%-12s %-14s %10.3f %9.1f %6.1f %% %12.2f %12s  %s%s\n", $1, $2, 1e3 * $3, work / $3 / 1e9, 100 * work / $3 / peak,
               1e3 * $3 * $6, before ? sprintf("%.2f", 1e3 * (before - $3) * $6) : "", $7, (before && 1.05 * $3 > before) ? " (not 5 % faster)" : ""
        before = $3
    }
    END {printf "peak: %.1f, %s; a step: %s; gain: over the rung above\n", peak / 1e9, of, step}' "$build/times.tsv"
exit $failed
