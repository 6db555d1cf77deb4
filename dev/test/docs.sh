#!/usr/bin/env bash
# Run the commands of README.md and docs/*.md, so that they stay true.
#
#     bash dev/test/docs.sh BUILD_FOLDER [PAGE...]
#
# A block that begins with "```sh test" runs, in a folder of its page that looks like the repository's root. Words after
# "test" name programs that it needs. A block "```text" that follows it shows what it prints: each line must be printed, in
# this order, where numbers may differ; a line "..." stands for any others. A command in any other "```sh" block is only
# read: the flags that it passes to a trainer must exist, and so must the scripts that it names. The first block of a page
# in docs/ must be one that runs.
set -u
[ -x "${1:-}/ops" ] || { echo "usage: bash $0 BUILD_FOLDER [PAGE...] (from the repository's root, after make test)" >&2; exit 2; }
shift
passed=0 failed=0 skipped=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
ok() { passed=$((passed + 1)); printf 'ok   %s\n' "$1"; }
fail() { failed=$((failed + 1)); printf 'FAIL %s: %s\n' "$1" "$2"; }
skip() { skipped=$((skipped + 1)); printf 'skip %s: %s\n' "$1" "$2"; }
# One thread, unless a command asks for more: on a busy machine, two wait for each other.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 LC_ALL=C
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

# Blocks of PAGE as files in $work/blocks: NNN.sh, NNN.kind (line, "test" or "read", needed programs), NNN.text.
cut_blocks() { # PAGE
    rm -rf "$work/blocks" && mkdir "$work/blocks"
    awk -v folder="$work/blocks" '
        /^```/ && file { close(file); file = ""; next }
        file { print >file; next }
        /^```sh/ {
            n++
            name = sprintf("%s/%03d", folder, n)
            needs = $0
            sub(/^```sh *(test)? */, "", needs)
            print NR, (/^```sh test/ ? "test" : "read"), needs >(name ".kind")
            after_test = /^```sh test/
            printf "" >(file = name ".sh")
            next
        }
        /^```text/ && after_test { printf "" >(file = name ".text"); after_test = 0; next }
        /^```/ { file = "/dev/null"; after_test = 0; next }
        /./ { after_test = 0 }' "$1"
}

# Lines as they are compared: any number is #, any run of blanks one blank.
without_numbers() { sed -E 's/[0-9][0-9.,]*(e[-+]?[0-9]+)?/#/g; s/-#/#/g; s/[[:space:]]+/ /g; s/ $//' "$1"; }

# The first line of the shown output that was not printed in its place, or nothing.
missing_line() { # SHOWN PRINTED
    awk 'NR == FNR { shown[++n] = $0; next }
        { while (k < n && shown[k + 1] == "...") k++; if (k < n && $0 == shown[k + 1]) k++ }
        END { while (k < n && shown[k + 1] == "...") k++; if (k < n) print shown[k + 1] }' <(without_numbers "$1") <(without_numbers "$2")
}

# What a command that does not run here refers to and is not there, or nothing.
broken_reference() { # FILE
    sed -e ':join' -e '/\\$/{N;s/\\\n/ /;b join' -e '}' -e 's/ # .*//' "$1" | while read -r line; do
        for word in $line; do
            word=${word#[\'\"(]} word=${word%%[\'\"),;:]*}
            case $word in
                dev/* | scripts/* | docs/*) [ -e "$word" ] || echo "$word: there is no such file" ;;
            esac
        done
        program=$(grep -oE '\./(train_gpt2|train_bert|use_gpt2|use_bert|finetune_bert)(cu)?( |$)' <<<"$line" | head -n 1 | tr -d ' ')
        [ -n "$program" ] || continue
        for flag in $(grep -oE '(^| )-{1,2}[a-z][-a-z0-9]*' <<<"${line#*"$program"}"); do
            "${program%cu}" --help | grep -qE -- "(^ *| )$flag( |\$)" || echo "$flag: $program has no such flag"
        done
    done | head -n 1
}

run_page() { # PAGE
    local page=$1 box block at kind needs program lacking name why
    box=$work/$(basename "$page" .md)
    mkdir -p "$box/data"
    for entry in Makefile build dev docs llmc scripts apps ./*.cu train_gpt2 train_bert use_gpt2 use_bert finetune_bert data/builtin; do
        ln -s "$PWD/$entry" "$box/$entry"
    done
    cut_blocks "$page"
    local first
    first=$(cut -d ' ' -f 2 "$work/blocks/001.kind" 2>/dev/null)
    case $page in
        docs/*) if [ "$first" = test ]; then ok "$page begins with a command that runs"
            else fail "$page" "its first block is not \"\`\`\`sh test\""; fi ;;
    esac
    for block in "$work"/blocks/*.sh; do
        [ -e "$block" ] || continue
        read -r at kind needs <"${block%.sh}.kind"
        name=$page:$at
        if [ "$kind" = read ]; then
            why=$(broken_reference "$block")
            if [ -z "$why" ]; then ok "$name (read)"; else fail "$name" "$why"; fi
            continue
        fi
        lacking=
        for program in $needs; do command -v "$program" >/dev/null || lacking=$program; done
        if [ -n "$lacking" ]; then skip "$name" "$lacking was not found"; continue; fi
        if ! (cd "$box" && timeout -k 5 120 bash -e -o pipefail "$block" </dev/null >"$work/printed" 2>&1); then
            fail "$name" "it failed: $(tail -n 2 "$work/printed" | tr '\n' ' ')"
        elif [ -e "${block%.sh}.text" ] && why=$(missing_line "${block%.sh}.text" "$work/printed") && [ -n "$why" ]; then
            fail "$name" "its output has no such line, or not in this place: $why"
        else ok "$name"; fi
    done
}

[ $# -gt 0 ] || set -- README.md docs/*.md
for page in "$@"; do run_page "$page"; done
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ]
