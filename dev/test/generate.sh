#!/bin/bash
# Texts by use_gpt2 --generate and samples while training: equal to tokens that are generated one by one, without cached ones before
# them, also beyond the model's positions; kinds of prompts; refusals.
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
mv data away  # --generate needs no data
before=$(listing "$box")

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
long='static inline int min_int(int a, int b) { return a < b ? a : b; }'

# ---------------------------------------------------------------------------------------------------------
# Texts

text() { run "$@"; cat "$work/stdout"; ended_with 0; }  # FLAG...: the text to stdout
equal() { verdict "$1" "$([ "$2" = "$3" ] || echo "'$2' where '$3' was expected")"; }
different() { verdict "$1" "$([ "$2" != "$3" ] || echo "both are '$2'")"; }
G=(-e "$box/tied" --generate 50)

greedy=$(text "${G[@]}" --temperature 0 --prompt 'int ')
equal 'temperature 0: the seed changes nothing' "$(text "${G[@]}" --temperature 0 --prompt 'int ' --seed 7)" "$greedy"
equal '--top-k 1 is greedy' "$(text "${G[@]}" --top-k 1 --prompt 'int ')" "$greedy"
equal 'a tiny --top-p is greedy' "$(text "${G[@]}" --top-p 1e-9 --prompt 'int ')" "$greedy"
equal '--top-p 1 is all tokens' "$(text "${G[@]}" --top-p 1)" "$(text "${G[@]}")"
different 'two seeds' "$(text "${G[@]}" --seed 1)" "$(text "${G[@]}" --seed 2)"
different 'two temperatures' "$(text "${G[@]}" --temperature 0.5)" "$(text "${G[@]}" --temperature 2)"
different '--top-p 0.5 and all tokens' "$(text "${G[@]}" --top-p 0.5)" "$(text "${G[@]}")"
# A small model soon forgets its prompt: some of ten prompts lead to the same text, but not all.
texts=$(for prompt in a e r s t '(' ' ' '#' '/' ';'; do text "${G[@]}" --prompt "$prompt" | tail -c +2 | md5sum; done | sort -u | wc -l)
verdict 'the text depends on the prompt' "$([ "$texts" -gt 1 ] || echo 'all of ten texts are the same')"
equal 'two threads' "$(OMP_NUM_THREADS=2 text "${G[@]}" --prompt 'int ')" "$(text "${G[@]}" --prompt 'int ')"
equal 'the model of -y 1' "$(text -y 1 -o "$box/tied" --generate 50 --temperature 0 --prompt 'int ')" "$greedy"

run "${G[@]}" --prompt 'void f(' --temperature 0
why=$(ended_with 0)
[ "$(head -c 7 "$work/stdout")" = 'void f(' ] || why=${why:-'the text does not start with the prompt'}
grep -Eq '^50 tokens in [0-9.]+ s: [0-9.]+ tokens/s after the first$' "$work/stderr" || why=${why:-"no speed: $(cat "$work/stderr")"}
[ "$(wc -l <"$work/stderr")" -eq 1 ] || why=${why:-'more than one line on stderr'}
verdict 'the text starts with the prompt; the speed on stderr' "$why"
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
printf 'a\377\0b' >"$work/prompt"
accepted 'a prompt that is not UTF-8' "${G[@]}" --prompt "@$work/prompt"
printf '@a' >"$work/prompt"
run "${G[@]}" --prompt "@$work/prompt"
verdict 'a prompt that begins with @' "$(ended_with 0)$([ "$(head -c 2 "$work/stdout")" = @a ] || echo 'the text does not start with it')"

run "${G[@]}" --samples 3 --prompt 'int'
why=$(ended_with 0)
csplit -s -f "$work/part" "$work/stdout" '/^---$/' '/^---$/' || why=${why:-'not three texts'}
[ "$(cat "$work/part00")" = "$(text "${G[@]}" --prompt 'int')" ] || why=${why:-'the first differs from that of --samples 1'}
for part in 01 02; do sed -i 1d "$work/part$part"; done
cmp -s "$work/part00" "$work/part01" && why=${why:-'the first two are the same'}
cmp -s "$work/part01" "$work/part02" && why=${why:-'the last two are the same'}
verdict '--samples 3' "$why"

run "${G[@]}" --prompt "$long"
why=$(ended_with 0)
grep -Eq '^warning: the prompt has [0-9]+ tokens; the model sees the last 23 of them' "$work/stderr" || why=${why:-'no warning'}
[ "$(head -c 23 "$work/stdout")" = "$(tail -c 23 <<<"$long$greedy" >/dev/null; printf %s "${long: -23}")" ] || why=${why:-'the text does not start with its end'}
verdict 'a prompt that is too long' "$why"

run -e L=1,C=16,NH=2,T=16,V=300 --generate 20
why=$(ended_with 0)
grep -Eqx '([0-9]+ ){20}' "$work/stdout" || why=${why:-"not 20 numbers: $(cat "$work/stdout")"}
grep -q '^warning: .*random weights' "$work/stderr" || why=${why:-'no warning about the weights'}
verdict 'without a tokenizer, without weights' "$why"

verdict 'nothing is written' "$([ "$before" = "$(listing "$box")" ] || echo 'files were created or changed')"

# ---------------------------------------------------------------------------------------------------------
# While training

mv away data
RUN=(-e L=2,C=32,NH=2,T=$T -b 4 -x 8 -v 0 -n 0)
accepted 'a run without samples' "${RUN[@]}" -s 0 -o "$box/run0"
accepted 'samples of a run' "${RUN[@]}" -s 4 -g 60 -o "$box/run1"
verdict 'samples of a run: two' "$([ "$(grep -ac '^sample after step [48]:' "$work/stdout")" -eq 2 ] || echo 'there are others')"
verdict 'samples change no weights' "$(cmp "$box/run0/model.safetensors" "$box/run1/model.safetensors" 2>&1)"
run -y 1 -o "$box/run1" --generate 60
verdict 'samples of a run: as --generate of its checkpoint' "$(ended_with 0)$(cmp "$work/stdout" <(cat "$box/run1/sample.txt"; echo) 2>&1)"

finish
