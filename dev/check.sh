#!/usr/bin/env bash
# What can be said of the sources in seconds: every header compiles alone (gcc as C11, g++ as C++17, nvcc where present),
# includes go down only, sizes stay within their budgets, forbidden words are absent, the formatting is clang-format's.
set -u
cd "$(dirname "$0")/.."
passed=0 failed=0
ok() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAIL $*"; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
headers=$(find llmc -name '*.h' -o -name '*.cuh' | sort)
plain=$(grep '\.h$' <<<"$headers")  # a .cuh is part of the header that includes it

# --- every header alone
alone() { # compiler command..., header last
    local header=${*: -1} stub
    stub=$(mktemp --suffix="$SUFFIX" -p "$work")
    echo "#include \"$header\"" >"$stub"
    "${@:1:$#-1}" "$stub" >"$stub.log" 2>&1 || { echo "FAIL $header does not compile alone with $1:"; head -n 5 "$stub.log"; }
}
export -f alone
export work
each() { # suffix, headers, command...
    local bad list=$2
    SUFFIX=$1
    export SUFFIX
    shift 2
    bad=$(printf '%s\n' $list | xargs -P "$(nproc)" -I{} bash -c 'alone "$@"' _ "$@" {})
    if [ -n "$bad" ]; then echo "$bad"; failed=$((failed + 1)); else passed=$((passed + $(wc -w <<<"$list"))); fi
}
make -s build/profile_page.inc || exit 1  # which a header includes
flags="-D_GNU_SOURCE -I. -Ibuild -fopenmp -Wall -Wextra -Wno-missing-field-initializers -Werror"
each .c "$plain" gcc -std=c11 -Wc++-compat $flags -fsyntax-only
each .c "$plain" gcc -std=c11 -DREAL_DOUBLE $flags -fsyntax-only
if command -v g++ >/dev/null; then each .cc "$plain" g++ -std=c++17 $flags -fsyntax-only; else echo "skip g++: not found"; fi
if command -v nvcc >/dev/null; then
    each .cu "$plain" nvcc -Xcicc -O0 -Xptxas -O0 -std=c++17 -arch=sm_90 -D_GNU_SOURCE -DPRECISION_BF16 -I. -Ibuild -Xcompiler -fopenmp,-Wall -cuda -o /dev/null
else
    echo "skip nvcc: not found"
fi

# --- the fuzzer, which make san alone builds
for source in dev/test/fuzz*.c; do
    if gcc -std=c11 $flags -fsyntax-only "$source"; then ok; else fail "$source does not compile"; fi
done

# --- includes go down only: run > ops > device > base, and run > data > base
allowed() {
    case $1 in
        run) echo "run ops device data base" ;;
        ops) echo "device base" ;;
        device) echo "device base" ;;
        data) echo "data base" ;;
        base) echo "base" ;;
    esac
}
for header in $headers; do
    folder=$(basename "$(dirname "$header")")
    while read -r included; do
        case $included in ../*) target=${included#../}; target=${target%%/*} ;; *) target=$folder ;; esac
        # An op's header may include its own parts (attention.h: attention_flash.cuh), no other op.
        own=$(basename "$header"); own=${own%%[_.]*}
        if [[ " $(allowed "$folder") " == *" $target "* ]] || [[ $target == ops && $included == "$own"* ]]; then ok
        else fail "$header includes $included: $folder may not include $target"; fi
    done < <(sed -nE 's/^#include "([^"]+)".*/\1/p' "$header")
    if gcc -fpreprocessed -dD -E -P "$header" 2>/dev/null | sed 's/"[^"]*"//g' | grep -qiE 'gpt2|bert'; then fail "$header names a model"; else ok; fi
done

# --- budgets
lines() { wc -l <"$1"; }
for header in $headers; do
    case $header in *.cuh) most=800 ;; *) most=550 ;; esac
    if [ "$(lines "$header")" -le $most ]; then ok; else fail "$header has $(lines "$header") lines, more than $most"; fi
done
budget() { # file, function, lines
    local n
    n=$(awk -v name="$2" '$0 ~ "^[a-z].* " name "\\(" && /\{$/ {n = NR} n && /^}/ {print NR - n + 1; exit}' "$1")
    if [ -n "$n" ] && [ "$n" -le "$3" ]; then ok; else fail "$1: $2 has ${n:-no} lines, the budget is $3"; fi
}
for trainer in train_gpt2.cu train_bert.cu; do
    case $trainer in train_gpt2.cu) most=930 ;; *) most=1060 ;; esac  # BERT has four heads
    if [ "$(lines $trainer)" -le $most ]; then ok; else fail "$trainer has $(lines $trainer) lines, more than $most"; fi
    budget $trainer main 150
    budget $trainer forward_block 25
    budget $trainer backward_block 40
done

# --- words that must not appear
sources="$headers $(ls ./*.cu) $(find dev $(ls -d scripts 2>/dev/null) -name '*.h' -o -name '*.cu' -o -name '*.c' -o -name '*.py' -o -name '*.sh' | grep -v dev/check.sh)"
banned() { # what it is, pattern
    local hits
    hits=$(grep -nE "$2" $sources | head -n 3)
    if [ -z "$hits" ]; then ok; else fail "$1:"; echo "$hits"; fi
}
banned "assert instead of a message" '(^|[^_a-z])assert\('
banned "unchecked number parsing" '\b(atoi|atof|atol)\('
banned "fast math" 'Ofast|[^o]-ffast-math'
banned "numbered kernels" 'kernel_?[0-9]+\b'
banned "work left undone" '\b(TODO|FIXME|XXX)\b'
banned "restrict or bool in a header" '\b__restrict|\brestrict\b|\bbool [a-z]+[,)]'

# --- formatting
if command -v clang-format >/dev/null; then
    for file in $headers $(ls ./*.cu) $(find dev -name '*.h' -o -name '*.cu' -o -name '*.c'); do
        if clang-format --dry-run --Werror "$file" >/dev/null 2>&1; then ok; else fail "$file: not formatted; clang-format -i $file"; fi
    done
else
    echo "skip clang-format: not found"
fi

# --- the planted faults of `make mutants` fit the sources
if ! command -v python3 >/dev/null; then echo "skip mutants: python3 was not found"
elif faults=$(python3 dev/mutants.py --check 2>&1); then ok; else fail "$faults"; fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
