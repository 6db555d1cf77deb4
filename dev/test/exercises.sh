#!/bin/bash
# The exercises: the shipped op passes each, the skeleton passes none, and every kind of mistake gets its answer.
#
#     bash dev/test/exercises.sh          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
passed=0 failed=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
# A folder that looks like the repository: answers and programs are made there.
for entry in apps dev llmc Makefile; do ln -s "$PWD/$entry" "$work/$entry"; done
cd "$work" || exit 1
export OMP_NUM_THREADS=1 LC_ALL=C EXERCISE_SPEED=0
export CFLAGS="-O1 -march=native -fopenmp -ffp-contract=off -fno-math-errno"
# What $status and $said are must be STATUS and match PATTERN (extended).
answer() { # NAME STATUS PATTERN
    if [ "$status" = "$2" ] && grep -qE -- "$3" <<<"$said"; then passed=$((passed + 1)); echo "ok   $1"
    else failed=$((failed + 1)); echo "FAIL $1: status $status, and it says: ${said//$'\n'/ | }"; fi
}
ops=$(grep -v '^#' dev/exercises/exercises.txt | cut -d ' ' -f 1)
# Both runs of an exercise: statuses and first lines go to OP.skeleton and OP.shipped.
both() {
    for with in skeleton shipped; do
        EXERCISE_WITH=$with bash dev/exercises/run.sh "$1" "dev/exercises/$1.h" >"$1.$with"
        echo "status $?" >>"$1.$with"
    done
}
export -f both
printf '%s\n' $ops | xargs -P 2 -I{} bash -c 'both {}'
for op in $ops; do
    said=$(cat "$op.skeleton") status=$(sed -n 's/^status //p' "$op.skeleton")
    answer "$op, skeleton" 1 '^not passed: [0-9]+ passed, [1-9][0-9]* failed. The first case that fails:$'
    said=$(cat "$op.shipped") status=$(sed -n 's/^status //p' "$op.shipped")
    answer "$op, shipped" 0 '^passed: [1-9][0-9]* cases$'
done

# How an exercise begins, continues and ends.
said=$(make -s exercise OP=gelu_forward 2>&1) status=$?
answer 'the first time, the skeleton is copied and checked' 2 'y\[0\] is nan, expected -0.00363'
# exercise_OP with the body that stands on stdin.
fill() { # OP
    awk 'NR == FNR {body = body $0 "\n"; next} /your code/ {printf "%s", body; next} {print}' - "dev/exercises/$1.h"
}
fill gelu_forward >exercises/gelu_forward.h <<'END'
    for (size_t i = 0; i < n; i++) {
        double v = x[i], k = 0.79788456080286536, cubic = k * (v + 0.044715 * v * v * v);
        y[i] = (real)(0.5 * v * (1 + (kind == GELU_ERF ? erf(v / sqrt(2.0)) : tanh(cubic))));
    }
END
said=$(EXERCISE_SPEED=1 make -s exercise OP=gelu_forward 2>&1) status=$?
answer 'a right one, and its speed' 0 '^speed, .* the shipped one [0-9]+ us: [0-9]+ % of its speed$'
said=$(make -s exercise) status=$?
answer 'the list shows it' 0 '^  gelu_forward +passed'

# Wrong bodies: op, pattern and body.
while IFS='|' read -r op pattern body; do
    fill "$op" >answer.h <<<"$body"
    said=$(EXERCISE_LIMIT=2 bash dev/exercises/run.sh "$op" answer.h 2>&1) status=$?
    answer "$op: ${body:0:60}" 1 "$pattern"
done <<'END'
gelu_backward|it wrote outside of 1 buffer|for (size_t i = 0; i <= n; i++) dx[i] = 0;
gelu_backward|it wrote outside of 1 buffer|dx[-1] = 0;
gelu_forward|uses gelu_forward, which is part of the op|gelu_forward(y, x, n, kind, ctx);
gelu_backward|uses [a-z_]+, which is part of the op|gelu_backward_span(dx, dy, x, n, kind, mode);
gelu_forward|it crashed in the case gelu/forward TANH n=1|y[(size_t)1 << 40] = 0;
gelu_forward|it ended before all cases were done|exit(0);
gelu_forward|answer.h:[0-9]+:[0-9]+: error: .z. undeclared|y[0] = z;
gelu_forward|it was still at work on the case gelu/forward TANH n=1. An endless loop|for (volatile int i = 1; i;) {}
END
printf '%d passed, %d failed, 0 skipped\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
