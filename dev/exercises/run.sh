#!/usr/bin/env bash
# The exercises: check a learner's function with the test cases of the op that it replaces.
#
#     bash dev/exercises/run.sh                list the exercises
#     bash dev/exercises/run.sh OP [FILE]      check exercise_OP in FILE, or in exercises/OP.h, which is made first
#
# Prints "passed" and the speed, or the first thing that is wrong: the element, its value and the expected one; a crash;
# an endless loop; a write outside of its outputs. Exit status: 0 passed, 1 not passed, 2 there is no such exercise.
# Variables: CC, CFLAGS; EXERCISE_LIMIT, seconds for all cases (60); EXERCISE_SPEED=0, no timing;
# EXERCISE_WITH=shipped, the op itself in place of the function.
set -u
cd "$(dirname "$0")/../.." || exit 2
here=dev/exercises build=build/exercises limit=${EXERCISE_LIMIT:-60}
table() { grep -v '^#' $here/exercises.txt; }

if [ -z "${1:-}" ]; then
    echo "make exercise OP=NAME begins an exercise, and checks it whenever you type it again. In the order in which to do them:"
    table | while read -r op _ what; do
        state='        '
        [ ! -f "exercises/$op.h" ] || state='begun   '
        [ ! -f "exercises/$op.h" ] || [ ! "exercises/.$op.passed" -nt "exercises/$op.h" ] || state='passed  '
        printf '  %-20s %s%s\n' "$op" "$state" "$what"
    done
    exit 0
fi

op=$1 file=${2:-exercises/$1.h}
header=$(table | awk -v op="$op" '$1 == op {print $2}')
[ -n "$header" ] || { echo "no exercise is called $op; make exercise lists them"; exit 2; }
mkdir -p $build
if [ ! -f "$file" ]; then
    [ -z "${2:-}" ] || { echo "$file: there is no such file"; exit 2; }
    mkdir -p exercises
    cp "$here/$op.h" "$file"
    echo "$file is made: it says what to compute. Write the body of exercise_$op(), then make exercise OP=$op again."
fi
[ -n "${2:-}" ] || rm -f "exercises/.$op.passed"

{
    echo "#include \"$header\""
    echo "#include \"$here/runner.h\""
    echo "#include \"$file\""
    echo "static __typeof__($op)* const exercise_shipped = $op;"
    echo "#define $op (exercise_is_shipped ? exercise_shipped : exercise_$op)"
    echo "#define EXERCISE_$op"
    echo "#include \"$here/cases.h\""
    echo "int main(int argc, char** argv) { return exercise_main(argc, argv); }"
} >"$build/$op.c"

program=$build/$op log=$build/$op.log
# shellcheck disable=SC2086
if ! "${CC:-gcc}" -x c -std=c11 -D_GNU_SOURCE -I. ${CFLAGS:--O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno} \
    -Wall -Wextra -Wno-unused -Wno-unused-parameter -Wno-missing-field-initializers -Werror=implicit-function-declaration \
    "$build/$op.c" -o "$program" -lm >"$log" 2>&1; then
    echo "not passed: it does not compile."
    grep -E 'error|warning' "$log" | head -n 8 | grep . || tail -n 3 "$log"
    exit 1
fi
grep -F "$file" "$log" | grep warning | head -n 8

OMP_WAIT_POLICY=passive timeout -k 5 $((limit + 10)) "$program" "${EXERCISE_WITH:-test}" "$limit" >"$log" 2>&1
status=$?
# A learner's output may lack a newline before the harness's.
sed -i -E 's/ -nan/ nan/g; s/(.)((FAIL|ok  ) [a-z_]+\/)/\1\n\2/' "$log"
printed() {
    local lines
    grep -vE '^(FAIL|ok  |CRASH|TIMEOUT|[0-9]+ passed, )' "$log" >"$log.printed" || return
    lines=$(wc -l <"$log.printed")
    echo "what it printed ($log):"
    if [ "$lines" -le 8 ]; then cat "$log.printed"; else head -n 4 "$log.printed" && echo "... $((lines - 8)) lines ..." && tail -n 4 "$log.printed"; fi |
        cut -c 1-200 | sed 's/^/  /'
}
where() { sed -nE "s/^$1 ?(\([^)]*\) )?(.*)/\2/p" "$log" | tail -n 1; }
first=$(grep -m1 '^FAIL' "$log")
outside=$(grep -m1 'wrote outside of' "$log")
if grep -q '^TIMEOUT' "$log" || [ $status = 124 ]; then
    echo "not passed: after $limit s it was still at work on the case $(where TIMEOUT). An endless loop?"
elif grep -q '^CRASH' "$log"; then
    echo "not passed: it crashed in the case $(where CRASH)"
    sed -nE 's/^CRASH \(([^)]*)\).*/  \1; an index may be too large or below 0/p' "$log"
elif [ $status -ge 126 ]; then
    echo "not passed: it crashed, with status $status"
elif ! grep -qE '^[0-9]+ passed, [0-9]+ failed$' "$log"; then
    echo "not passed: it ended before all cases were done, with status $status"
elif [ -n "$first" ]; then
    echo "not passed: $(grep -E '^[0-9]+ passed, ' "$log"). The first case that fails:"
    if [ -n "$outside" ]; then echo "$outside" | sed -E 's/^FAIL (.*)  (wrote outside of .*)/  \1\n  it \2: before or behind an array/'; fi
    [ "$first" = "$outside" ] || echo "$first" | sed -E 's/^FAIL (.*)  ([^ ].*)$/  \1\n  \2/'
    case $first in *'] is nan'* | *'] is -nan'*) echo "  NaN: not written, computed from what was there before, or by arithmetic like 0 / 0 or inf - inf" ;; esac
    if ! grep '^FAIL' "$log" | grep -qv 'ADD'; then echo "  Only cases with ADD fail: there the result is added to what the output holds."; fi
elif [ $status -ne 0 ]; then
    echo "not passed: it ended with status $status:"
    tail -n 2 "$log"
else
    echo "passed: $(sed -nE 's/^([0-9]+) passed.*/\1/p' "$log") cases"
    [ -n "${2:-}" ] || touch "exercises/.$op.passed"
    [ "${EXERCISE_SPEED:-1}" = 0 ] || [ "${EXERCISE_WITH:-}" = shipped ] ||
        timeout -k 5 $((limit + 10)) "$program" bench "$limit" | grep -E '^(speed|TIMEOUT)' | sed 's/^TIMEOUT.*/speed: too slow to be timed/'
    printed
    exit 0
fi
printed
exit 1
