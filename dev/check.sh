#!/usr/bin/env bash
# Check the sources without running them, within a minute: every header compiles alone, includes go down only, files and
# functions stay within their budgets, forbidden words are absent, the formatting is clang-format's, links in the
# documentation are valid, and folders stay within dev/budgets.txt. Ends with "N passed, N failed".
#
#     bash dev/check.sh            every header with gcc as C11; those changed since the commit before HEAD also in
#                                  double, with g++ as C++17 and, if present, with nvcc
#     bash dev/check.sh --all      every header in each way, and the core with nvcc: continuous integration
#     bash dev/check.sh --sizes    the sizes of now, in the form of dev/budgets.txt
set -u
cd "$(dirname "$0")/.."
# Lines of each folder with a cap, and of the whole repository: those of its text files (pictures have none).
sizes() {
    git grep -Ic '' | awk '{split($0, row, ":"); $1 = row[2]; $2 = row[1]}
        {n = split($2, part, "/"); all += $1
         if (n > 1 && part[1] ~ /^(llmc|apps|scripts|docs)$/) size[part[1] "/"] += $1
         if (n > 2 && part[1] ~ /^(llmc|dev)$/) size[part[1] "/" part[2] "/"] += $1
         if (part[1] == "dev") size["dev/"] += $1}
        END {for (folder in size) print size[folder], folder; print all, "."}' | sort -k 2
}
if [ "${1:-}" = --sizes ]; then sizes; exit; fi
changed() { (git diff --name-only HEAD~1; git ls-files -o --exclude-standard) | sort; }
passed=0 failed=0
ok() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAIL $*"; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
headers=$(find llmc apps -name '*.h' -o -name '*.cuh' | sort)
programs=$(ls ./*.cu apps/*.cu | sed 's,^\./,,')
plain=$(grep '\.h$' <<<"$headers" | grep -v '/cpu\.h$')  # a .cuh or cpu.h is part of the header that includes it

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
    [ -n "$list" ] || return 0
    bad=$(printf '%s\n' $list | xargs -P "$(nproc)" -I{} bash -c 'alone "$@"' _ "$@" {})
    if [ -n "$bad" ]; then echo "$bad"; failed=$((failed + 1)); else passed=$((passed + $(wc -w <<<"$list"))); fi
}
make -s build/profile_page.inc build/explain_page.inc || exit 1  # headers include them
flags="-D_GNU_SOURCE -I. -Ibuild -fopenmp -Wall -Wextra -Wno-missing-field-initializers -Werror"
each .c "$plain" gcc -std=c11 -Wc++-compat $flags -fsyntax-only
chosen=$plain
[ "${1:-}" = --all ] || ! git rev-parse -q --verify HEAD~1 >/dev/null || chosen=$(comm -12 <(echo "$plain") <(changed))
each .c "$chosen" gcc -std=c11 -DREAL_DOUBLE $flags -fsyntax-only
if command -v g++ >/dev/null; then each .cc "$chosen" g++ -std=c++17 $flags -fsyntax-only; else echo "skip g++: not found"; fi
# Together they define no name twice.
sed 's/.*/#include "&"/' <<<"$plain" >"$work/together.h"
for way in "gcc -x c -std=c11 -DREAL_DOUBLE" "g++ -x c++ -std=c++17"; do
    command -v ${way%% *} >/dev/null || continue
    if $way $flags -fsyntax-only -include "$work/together.h" /dev/null; then ok; else fail "all headers together: $way"; fi
done
# --- the trainers without each room in turn, and without all of them
no_rooms=$(printf -- '-DNO_%s ' FP8 MUON LAMB CHECKPOINT PROFILE TEXT CHOICES AVERAGE GRAPH IMPORT HOPPER)
for trainer in train_gpt2.cu train_bert.cu; do
    for left_out in $no_rooms "$no_rooms"; do
        if gcc -x c -std=c11 $flags $left_out -fsyntax-only $trainer; then ok; else fail "$trainer does not compile with $left_out"; fi
    done
done
# Of a room that is left out a program reads its header room.h alone. The lines that
# GPT-2's trainer reads, with all rooms and with none, only go down.
reads() { gcc -x c -std=c11 $flags "$@" -MM train_gpt2.cu | tr ' ' '\n' | grep -E '\.(h|cuh|cu)$' | sort -u; }
of_rooms=$(reads $no_rooms | grep -vE '^(train_gpt2.cu|llmc/(gpt2|run|optim|dist|model|ops|data|device|base)/.*)$')
if grep -vE '/room(_[a-z]+)?\.h$' <<<"$of_rooms"; then fail "these are read with $no_rooms"; else ok; fi
most_read() { # lines, flag...
    local most=$1 count
    shift
    count=$(reads "$@" | xargs cat | wc -l)
    echo "train_gpt2.cu $* reads $count lines, at most $most"
    if [ "$count" -le "$most" ]; then ok; else fail "train_gpt2.cu $*: $count lines"; fi
}
most_read 21812
most_read 12982 $no_rooms
if command -v nvcc >/dev/null; then
    core_only="nvcc -Xcicc -O0 -Xptxas -O0 -std=c++17 -arch=sm_90a -D_GNU_SOURCE -DPRECISION_BF16 $no_rooms -I. -Ibuild -cuda -o /dev/null"
    if [ "${1:-}" != --all ] || $core_only train_gpt2.cu; then ok; else fail "nvcc: train_gpt2.cu with $no_rooms"; fi
    # Of the headers, those with CUDA code; the others are plain C++ to nvcc as to g++.
    cuda=$(grep -lE '__CUDACC__|\.cuh"' $chosen /dev/null)
    each .cu "$cuda" nvcc -Xcicc -O0 -Xptxas -O0 -std=c++17 -arch=sm_90 -D_GNU_SOURCE -DPRECISION_BF16 -I. -Ibuild -Xcompiler -fopenmp,-Wall -cuda -o /dev/null
else
    echo "skip nvcc: not found"
fi

# --- includes go down only. The core: a folder may include itself and those after it.
core="run optim dist model ops data device base"
# Rooms: each may include the core and the rooms listed here. apps/ may include all of llmc/, and each of its
# folders itself and apps/explain/.
rooms_of() {
    case $1 in
        checkpoint) echo "import" ;;
        bert) echo "text choices" ;;
        muon) echo "hopper" ;;
    esac
}
# Files outside a room, trainers and rooms included but not programs in apps/, that include a header of it. These numbers
# only go down.
most_files_naming="average:1 bert:1 checkpoint:1 choices:2 fp8:2 gpt2:1 graph:1 hopper:2 import:2 lamb:1 muon:1 profile:1 text:3"
folder_of() { local path=${1#llmc/}; echo "${path%%/*}"; }
op() { local path=${1#llmc/ops/}; echo "${path%%/*}"; }  # its folder or its file below ops/
is_core() { [[ " $core " == *" $1 "* ]]; }
may_include() { # header, included header
    local from to
    from=$(folder_of "$1") to=$(folder_of "$2")
    if [[ $1 == apps/* ]]; then [[ $2 == llmc/* || $2 == apps/explain/* || ${2%/*} == "${1%/*}" ]]
    elif [[ $2 != llmc/* ]]; then false
    elif ! is_core "$from"; then [[ " $from $core $(rooms_of "$from") " == *" $to "* ]]
    # Of a room, the core includes what it is with and without (-DNO_ROOM), and the parts of two ops.
    elif ! is_core "$to"; then [[ $2 == */room.h || $2 == */room_layernorm.h || $2 == llmc/hopper/attention.cuh ]]
    # An op's header may include its own parts (attention/attention.h: attention/flash_forward.cuh) and ops/common, no
    # other op, and no data.
    elif [ "$from" = ops ]; then [[ $to == base || $to == device || $(op "$2") == "$(op "$1")" || $(op "$2") == common ]]
    else [[ " $from${core#*"$from"} " == *" $to "* ]]; fi
}
for header in $headers; do
    while read -r included; do
        [[ $included != *_page.inc ]] || continue  # generated
        if may_include "$header" "$included"; then ok; else fail "$header may not include $included"; fi
    done < <(sed -nE 's/^#include "([^"]+)".*/\1/p' "$header")
    # But in names of include guards, and a model's own configuration.
    if [[ $header != */config.h ]] && gcc -fpreprocessed -dD -E -P "$header" 2>/dev/null | sed -E 's/"[^"]*"//g; s/LLMC_BERT_\w+//' | grep -qiE 'gpt2|bert'; then
        fail "$header names a model"
    else ok; fi
done
for room in $most_files_naming; do
    name=${room%:*} most=${room#*:}
    naming=$(grep -lE "^#include \"llmc/$name/" $headers $programs | grep -vE "^(llmc/$name|apps)/")
    if [ "$(grep -c . <<<"$naming")" -le "$most" ]; then ok
    else fail "more than $most files outside of llmc/$name/ include from it:"; echo "$naming"; fi
done

# --- budgets. They are not raised: what outgrows one is split, or moved to where it belongs.
lines() { wc -l <"$1"; }
most_lines() { # file, lines
    if [ "$(lines "$1")" -le "$2" ]; then ok; else fail "$1 has $(lines "$1") lines, more than $2"; fi
}
# Tables that dev/data/unicode_tables.py writes: as long as Unicode makes them.
generated_headers="llmc/text/unicode.h"
generated_functions="unicode_class unicode_strip unicode_lower"
# Device kernels that may be longer. layernorm_backward_kernel, 152 lines: with its end as a function of its own, two
# kernels on sm_100 take 2 and 3 registers more (dev/LOG.md).
long_kernels="layernorm_backward_kernel"
# Functions with more than 8 parameters. This number only goes down.
most_wide_functions=6
# dev/ has kernels of its own, in dev/ladder and dev/recsys.
dev_headers=$(find dev -name '*.h' -o -name '*.cuh' | sort)
for header in $headers $dev_headers; do
    [[ " $generated_headers " == *" $header "* ]] || most_lines "$header" 450
done
# These numbers only go down.
most_lines train_gpt2.cu 568
most_lines train_bert.cu 600
most_lines apps/finetune_bert.cu 387
most_lines apps/use_gpt2.cu 173
most_lines apps/use_bert.cu 120
most_lines dev/recsys/train_dlrm.cu 500
most_lines dev/recsys/train_ncf.cu 500
if command -v python3 >/dev/null; then
    code="$headers $dev_headers $programs $(find dev -name '*.cu' -o -name '*.c')"
    long=$(python3 dev/functions.py --lines 120 $(printf -- '--except %s ' $generated_functions $long_kernels) $code)
    if [ -z "$long" ]; then ok; else fail "functions of more than 120 lines:"; echo "$long"; fi
    # The emulator's stand-ins have the parameters of what they replace.
    wide=$(python3 dev/functions.py --parameters 8 $(printf '%s\n' $code | grep -v '^dev/emulator/'))
    count=$(grep -c . <<<"$wide")
    if [ "$count" -le $most_wide_functions ]; then ok
    else fail "$count functions have more than 8 parameters, more than $most_wide_functions:"; echo "$wide"; fi
    block() { # file, function, lines
        local n
        n=$(python3 dev/functions.py "$1" | awk -v name="$2()" '$NF == name {print $1}')
        if [ -n "$n" ] && [ "$n" -le "$3" ]; then ok; else fail "$1: $2 has ${n:-no} lines, the budget is $3"; fi
    }
    for trainer in train_gpt2.cu train_bert.cu; do
        block $trainer forward_block 25
        block $trainer backward_block 40
    done
else
    echo "skip lengths of functions: python3 was not found"
fi

# --- words that must not appear
sources="$headers $programs $(find dev $(ls -d scripts 2>/dev/null) -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.c' -o -name '*.py' -o -name '*.sh' | grep -v dev/check.sh)"
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
# CUDA 12.4 must be enough: newer functions stand between #if CUDART_VERSION >= and #else or #endif.
late=$(awk 'FNR == 1 || /^#(else|elif|endif)/ {newer = 0} /^#if CUDART_VERSION >= / {newer = 1}
    /cudaGetDriverEntryPointByVersion/ && !newer {print FILENAME ":" FNR ":" $0}' $headers $programs)
if [ -z "$late" ]; then ok; else fail "needs CUDA 12.5:"; echo "$late"; fi

# --- formatting
if command -v clang-format >/dev/null; then
    files="$headers $dev_headers $programs $(find dev -name '*.cu' -o -name '*.c')"
    bad=$(printf '%s\n' $files | xargs -P "$(nproc)" -n 30 clang-format --dry-run --Werror 2>&1 |
        sed -nE 's/^([^ :]+):[0-9]+:.*/\1/p' | sort -u)
    passed=$((passed + $(wc -w <<<"$files") - $(wc -w <<<"$bad")))
    for file in $bad; do fail "$file: not formatted; clang-format -i $file"; done
else
    echo "skip clang-format: not found"
fi

# --- the planted faults of `make mutants` still fit the sources
if ! command -v python3 >/dev/null; then echo "skip mutants: python3 was not found"
elif faults=$(python3 dev/mutants.py --check 2>&1); then ok; else fail "$faults"; fi
# --- links and names in the documentation
if ! command -v python3 >/dev/null; then echo "skip links of the documentation: python3 was not found"
elif ! git rev-parse --git-dir >/dev/null 2>&1; then echo "skip links of the documentation: this is not a clone"
elif broken=$(python3 dev/check_docs.py 2>&1); then ok; else fail "links or names in the documentation:"; echo "$broken"; fi
# --- the page of `make live` was made from the sources of now
if ! command -v python3 >/dev/null; then echo "skip the live page: python3 was not found"
elif stale=$(python3 dev/live/build.py --check 2>&1); then ok; else fail "$stale"; fi
# --- a plain training step: files and lines that hold its functions, their density, functions in rooms, types. Only better.
corridor() {
    local measured
    if measured=$(python3 dev/corridor.py "$@"); then ok; else fail "a plain step needs more:"; fi
    echo "$measured"
}
if ! command -v python3 >/dev/null || ! command -v gcov >/dev/null; then echo "skip corridor: python3 or gcov was not found"
else
    make -s data/builtin/train.bin data/builtin/bert/train.bin >/dev/null || exit 1
    corridor train_gpt2.cu 32 6817 29 0 70
    corridor train_bert.cu 37 8061 30 0 87
fi
# --- sizes: every folder within its cap of dev/budgets.txt, which only goes down
if git rev-parse --git-dir >/dev/null 2>&1; then
    while read -r count folder; do
        cap=$(awk -v folder="$folder" '$2 == folder {print $1}' dev/budgets.txt)
        printf '%-18s %7d lines, at most %s\n' "$folder" "$count" "${cap:-none}"
        if [ -n "$cap" ] && [ "$count" -le "$cap" ]; then ok; else fail "$folder has $count lines, dev/budgets.txt allows ${cap:-none}"; fi
    done < <(sizes)
else
    echo "skip sizes: this is not a clone"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
