#!/bin/bash
# Texts by use_gpt2 --generate: equal to tokens that are generated one by one, without cached ones before them, also
# beyond the model's positions; prompts from files and pipes. What flags change is in equal.txt, the rest in refuse.txt.
#
#     bash dev/test/generate.sh PROGRAM          train_gpt2, with use_gpt2 next to it, from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

QUIET=(-v 0 -s 0 -n 0)
T=24
accepted 'a tied model'    -e L=2,C=32,NH=2,T=$T        -b 8 -x 40 -l 5e-3 "${QUIET[@]}" -o "$box/tied"
accepted 'an untied model' -e L=3,C=24,NH=3,T=$T,tied=0 -b 8 -x 40 -l 5e-3 "${QUIET[@]}" -o "$box/untied"

# ---------------------------------------------------------------------------------------------------------
# The KV cache: each token is that of a run of its own, whose prompt is what the model sees of the text before it

same() { # NAME PROMPT TOKENS WINDOW FLAG...: WINDOW: -t of the text; longer ones move by a quarter of it
    local name=$1 prompt=$2 tokens=$3 window=$4 why i begin=0
    shift 4
    printf %s "$prompt" >"$work/begin"
    run "$@" -t "$window" --prompt "$prompt" --generate "$tokens"
    why=$(ended_with 0)
    cp "$work/stdout" "$work/text"
    [ "$(wc -c <"$work/text")" -eq $((${#prompt} + tokens + 1)) ] || why=${why:-'a token is not a byte'}
    for ((i = ${#prompt}; i < ${#prompt} + tokens; i++)); do
        [ -z "$why" ] || break
        [ $((i - begin)) -le "$window" ] || begin=$((begin + window / 4))
        head -c $i "$work/text" | tail -c $((i - begin)) >"$work/begin"
        run "$@" --prompt "@$work/begin" --generate 1
        why=$(ended_with 0)
        cmp -s "$work/stdout" <(head -c $((i + 1)) "$work/text" | tail -c $((i + 1 - begin)); echo) || why=${why:-"another token $i"}
    done
    verdict "the cache: $name" "$why"
}
for model in tied untied; do
    for way in '0' '0.8 --top-k 5' '1 --top-p 0.9'; do
        # shellcheck disable=SC2086
        same "$model, temperature $way" 'static ' $((T - 7)) $T -e "$box/$model" --temperature $way
    done
    same "$model, the window moves" 'static ' 40 $((T - 4)) -e "$box/$model" --temperature 0
done
same 'sequences of 4 tokens' 'i' 20 4 -e "$box/tied" --temperature 0

# ---------------------------------------------------------------------------------------------------------
# Prompts from elsewhere, and several texts

G=(-e "$box/tied" --generate 50)
run "${G[@]}" --prompt 'void f(' --temperature 0
verdict 'a text' "$(ended_with 0)"
cp "$work/stdout" "$work/text"
printf 'void f(' >"$work/prompt"
prompted() { # NAME COMMAND...: the same text, with the prompt on standard input too
    local name=$1
    "${@:2}" --temperature 0 <"$work/prompt" >"$work/stdout" 2>"$work/stderr"
    cmp -s "$work/stdout" "$work/text" && why= || why="another text than with --prompt: $(head -n 1 "$work/stderr")"
    verdict "$name" "$why"
}
generate=("$(use_program)" "${G[@]}")
prompted '--prompt @FILE' "${generate[@]}" --prompt "@$work/prompt"
prompted '--prompt @FILE of a pipe, in two parts' "${generate[@]}" --prompt @<(printf 'void '; sleep 0.1; printf 'f(')
for stdin in - @-; do prompted "--prompt $stdin" "${generate[@]}" --prompt $stdin; done
if is_sanitized; then skip 'standard input of mpirun' 'with sanitizers'
elif prepare_ranks; then
    prompted 'standard input of mpirun reaches all ranks' \
        mpirun --oversubscribe --bind-to none -np 2 "${generate[@]}" --prompt -
else skip 'standard input of mpirun' "$why"; fi
mkfifo "$work/fifo"
timeout -k 5 1 "${generate[@]}" --prompt "@$work/fifo" >"$work/stdout" 2>"$work/stderr"
status=$?
verdict 'SIGTERM while it waits for a pipe' "$([ $status -eq 124 ] || echo "status $status")"

run "${G[@]}" --prompt int
cp "$work/stdout" "$work/one"
run "${G[@]}" --samples 3 --prompt 'int'
why=$(ended_with 0)
csplit -s -f "$work/part" "$work/stdout" '/^---$/' '/^---$/' || why=${why:-'not three texts'}
cmp -s "$work/part00" "$work/one" || why=${why:-'the first differs from that of --samples 1'}
for part in 01 02; do sed -i 1d "$work/part$part"; done
cmp -s "$work/part00" "$work/part01" && why=${why:-'the first two are the same'}
cmp -s "$work/part01" "$work/part02" && why=${why:-'the last two are the same'}
verdict '--samples 3' "$why"

# A sample of a run is what --generate makes of its checkpoint.
accepted 'a run' -e L=2,C=32,NH=2,T=$T -b 4 -x 8 -v 0 -n 0 -s 4 -g 60 -o "$box/run"
run -y 1 -o "$box/run" --generate 60
verdict 'samples of a run' "$(ended_with 0)$(cmp "$work/stdout" <(cat "$box/run/sample.txt"; echo) 2>&1)"
finish
