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
export OMP_NUM_THREADS=1 LC_ALL=C EXERCISE_SPEED=0 CFLAGS="-O1 -march=native -fopenmp -ffp-contract=off -fno-math-errno"
verdict() { # NAME WHY
    if [ -z "$2" ]; then passed=$((passed + 1)); echo "ok   $1"; else failed=$((failed + 1)); echo "FAIL $1: ${2//$'\n'/ | }"; fi
}
# The last run of an exercise must end with STATUS and say PATTERN (extended).
answer() { # NAME STATUS PATTERN
    local why=
    [ "$status" = "$2" ] || why="status $status where $2 is promised: $said"
    [ -n "$why" ] || grep -qE -- "$3" <<<"$said" || why="it says: $said"
    verdict "$1" "$why"
}
# exercise_OP with the body that stands on stdin.
try() { # OP
    awk 'NR == FNR {body = body $0 "\n"; next} /your code/ {printf "%s", body; next} {print}' - "dev/exercises/$1.h" >"$work/answer.h"
    said=$(bash dev/exercises/run.sh "$1" "$work/answer.h" 2>&1)
    status=$?
}

ops=$(grep -v '^#' dev/exercises/exercises.txt | cut -d ' ' -f 1)
# Both runs of an exercise, a line each: "OP, WITH: STATUS first line".
both() {
    local with
    for with in skeleton shipped; do
        said=$(EXERCISE_WITH=${with#skeleton} bash dev/exercises/run.sh "$1" "dev/exercises/$1.h")
        echo "$1, $with: $? ${said%%$'\n'*}"
    done
}
export -f both
while IFS= read -r line; do
    wanted='skeleton: 1 not passed: [0-9]+ passed, [1-9][0-9]* failed. The first case that fails:'
    [[ $line == *', skeleton: '* ]] || wanted='shipped: 0 passed: [1-9][0-9]* cases'
    verdict "${line%%:*}" "$(grep -qE "^[a-z_]+, $wanted\$" <<<"$line" || echo "it says: $line")"
done < <(printf '%s\n' $ops | xargs -P 2 -I{} bash -c 'both {}')

# The list, and how an exercise begins, continues and ends.
said=$(make -s exercise 2>&1) status=$?
verdict 'the list has a line for each' "$([ "$(grep -cE '^  [a-z_]+ +[^ ]' <<<"$said")" = "$(wc -w <<<"$ops")" ] || echo "$said")"
said=$(make -s exercise OP=gelu_forward 2>&1) status=$?
answer 'the first time, the skeleton is copied' 2 'exercises/gelu_forward.h is made'
answer '... and checked: an empty body' 2 'y\[0\] is nan, expected -0.00363'
sed -i 's|// your code|for (size_t i = 0; i < n; i++) y[i] = (real)(kind == GELU_ERF ? 0.5 * x[i] * (1 + erf(x[i] / sqrt(2.0))) : 0.5 * x[i] * (1 + tanh(sqrt(2 / 3.14159265358979) * (x[i] + 0.044715 * x[i] * x[i] * x[i]))));|' exercises/gelu_forward.h
said=$(EXERCISE_SPEED=1 make -s exercise OP=gelu_forward 2>&1) status=$?
answer 'a right one' 0 '^passed: 8 cases$'
answer '... its speed' 0 '^speed, .* the shipped one [0-9]+ us: [0-9]+ % of its speed$'
said=$(make -s exercise) status=$?
answer 'the list shows it' 0 '^  gelu_forward +passed'

# Answers: op, status, pattern and body.
slope='double v = x[i], k = 0.79788456080286536, t = tanh(k * (v + 0.044715 * v * v * v));
    double d = kind == GELU_ERF ? 0.5 * (1 + erf(v / sqrt(2.0))) + v * exp(-v * v / 2) / sqrt(6.28318530717958648)
                                : 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * k * (1 + 3 * 0.044715 * v * v);'
right="for (size_t i = 0; i < n; i++) { $slope dx[i] = (real)((mode == ADD ? dx[i] : 0) + dy[i] * d); }"
while IFS='|' read -r op status_wanted pattern body; do
    try "$op" <<<"$body"
    answer "$op: ${body:0:60}" "$status_wanted" "$pattern"
done <<END
gelu_backward|0|^passed: 16 cases$|${right//$'\n'/ }
gelu_backward|1|Only cases with ADD fail|for (size_t i = 0; i < n; i++) { ${slope//$'\n'/ } dx[i] = (real)(dy[i] * d); }
gelu_backward|1|it wrote outside of 1 buffer|${right//$'\n'/ } dx[n] = 0;
gelu_forward|1|^  (n 33, )+$|printf("n %zu, ", n);
gelu_forward|1|it crashed in the case gelu/forward TANH n=1|y[(size_t)1 << 40] = 0;
gelu_forward|1|it ended before all cases were done|exit(0);
gelu_forward|1|answer.h:[0-9]+:[0-9]+: error: .z. undeclared|y[0] = z;
END
EXERCISE_LIMIT=1 try gelu_forward <<<'for (volatile int i = 1; i;) {}'
answer 'an endless loop' 1 'after 1 s it was still at work on the case gelu/forward TANH n=1. An endless loop'

printf '%d passed, %d failed, 0 skipped\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
