# What the shell tests of a trainer share. Sourced with PROGRAM set; needs bash, coreutils, grep and sed.

passed=0 failed=0 skipped=0
ok() { passed=$((passed + 1)); printf 'ok   %s\n' "$1"; }
fail() { failed=$((failed + 1)); printf 'FAIL %s: %s\n' "$1" "$2"; }
skip() { skipped=$((skipped + 1)); printf 'skip %s: %s\n' "$1" "$2"; }

# Count the case NAME: ok where WHY is empty.
verdict() { if [ -z "$2" ]; then ok "$1"; else fail "$1" "$2"; fi; }

finish() {
    printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
    [ "$failed" -eq 0 ]
}

[ -x "$PROGRAM" ] || { echo "usage: bash $0 PROGRAM (a trainer, from the repository's root)" >&2; exit 2; }
[ -f build/test_corpus/builtin/train.bin ] || { echo "build/test_corpus is missing; run make build/test_corpus/builtin/train.bin first" >&2; exit 2; }
case $PROGRAM in /*) ;; *) PROGRAM=$PWD/$PROGRAM ;; esac

# One thread, unless a case asks for more, and none that spins: the machine may have little to give.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 LC_ALL=C
is_sanitized() { grep -q __asan_init "$PROGRAM"; }
run_limit=120  # seconds
is_sanitized && run_limit=600

root=$PWD work=$(mktemp -d) || exit 1
cleanup() { cd / && rm -rf "$work"; }
trap cleanup EXIT
trap 'exit 1' INT TERM HUP PIPE

# Runs take place where the built-in corpus is a copy of the tests' own, which is the same whatever the sources say.
mkdir "$work/data" && cp -r build/test_corpus/builtin "$work/data" && cd "$work" || exit 1

# The command of PROGRAM, a trainer, with these flags. Those of a task are for the finetune_bert next to it, which writes
# no samples (-s); those that use a model are for its use_gpt2 or use_bert, which has none of the flags of training.
uses=' --(generate|samples|evaluate|explain|explain-tensors|chat|fill|embed|vectors) '
set_command() {
    local without=
    command=("$PROGRAM" "$@")
    if [[ " $* " == *" --task "* && ${PROGRAM##*/} == @(train|finetune)_bert* ]]; then
        without=' -s ' command=("${PROGRAM/%train_bert*/finetune_bert${PROGRAM##*train_bert}}")
    elif [[ " $* " =~ $uses && ${PROGRAM##*/} == train_@(gpt2|bert)* ]]; then
        without=' -v -s -n -l ' command=("${PROGRAM%/*}/use_${PROGRAM##*/train_}")
    fi
    [ -n "$without" ] || return 0
    while [ $# -gt 0 ]; do
        if [[ $without == *" $1 "* ]]; then shift; else command+=("$1"); fi
        shift
    done
}

# The program next to PROGRAM, a trainer, that uses a model.
use_program() { echo "${PROGRAM%/*}/use_${PROGRAM##*/train_}"; }

# A trainer's run: stdout and stderr go to files, the exit status to $status (124 where it did not end).
run() {
    set_command "$@"
    timeout --foreground $run_limit "${command[@]}" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
}

# From now on mpirun can start PROGRAM. Fails where it cannot, and $why says why.
prepare_ranks() {
    why=
    command -v mpirun >/dev/null || why='mpirun was not found'
    ldd "$PROGRAM" | grep -q libmpi || why=${why:-'this build knows no MPI'}
    [[ $PROGRAM != *cu || ${CUDA_VISIBLE_DEVICES-,} == *,* && $(nvidia-smi -L | wc -l) -gt 1 ]] || why=${why:-'one GPU'}
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
    ! is_sanitized || export LSAN_OPTIONS="suppressions=$root/dev/test/mpi.supp:fast_unwind_on_malloc=0:print_suppressions=0"
    [ -z "$why" ]
}

# Why the last run did not end as it should, or nothing.
ended_with() {
    if grep -q 'Sanitizer\|runtime error' "$work/stderr"; then
        echo "sanitizer: $(grep -m1 'Sanitizer\|runtime error' "$work/stderr")"
    elif [ "$status" -ne "$1" ]; then
        echo "exit status $status where $1 is promised; stderr: $(tail -n 3 "$work/stderr" | tr '\n' ' ')"
    fi
}

# The same, with one line on stderr, "error: ...", that matches PATTERN (extended).
ended_with_error() { # STATUS PATTERN
    local why
    why=$(ended_with "$1")
    [ -n "$why" ] || [ "$(wc -l <"$work/stderr")" -eq 1 ] || why="stderr is not one line: $(tail -n 3 "$work/stderr")"
    [ -n "$why" ] || grep '^error: ' "$work/stderr" | grep -Eq -- "$2" ||
        why="'$(cat "$work/stderr")' is no 'error: ' that matches '$2'"
    echo "$why"
}

# Everything below a directory: names, kinds, contents.
listing() { (cd "$1" && find . -type f -exec cksum {} + && find . ! -type f -exec ls -d {} +) | sort; }

# Integers of the given numbers of bytes, little-endian.
little_endian() { # BYTES VALUE
    local i text=
    for ((i = 0; i < $1; i++)); do text+=$(printf '\\x%02x' $(($2 >> (8 * i) & 255))); done
    printf '%b' "$text"
}

box=$work/box  # all that a refused run could touch; compared before and after
mkdir "$box"

# Run and expect a refusal that leaves the box as it was.
refused() { # NAME STATUS PATTERN FLAG...
    local before why
    before=$(listing "$box")
    run "${@:4}"
    why=$(ended_with_error "$2" "$3")
    [ -n "$why" ] || [ "$before" = "$(listing "$box")" ] || why='files were created or changed'
    rm -rf "$box/new"  # the output of runs that must not begin
    verdict "$1" "$why"
}

# Run and expect success.
accepted() { # NAME FLAG...
    run "${@:2}"
    verdict "$1" "$(ended_with 0)"
}
