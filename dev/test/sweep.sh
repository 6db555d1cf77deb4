#!/usr/bin/env bash
# scripts/sweep.py: a grid with a tiny model on the CPU, a kill in the middle, and its table. scripts/records.py's sums.
#
#     bash dev/test/sweep.sh PROGRAM          from the repository's root
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
python=${PYTHON:-python3} s=$work/sweep
TINY=("$PROGRAM" -e L=1,C=16,NH=2,T=16 -x 6 -v 6 -m 1 -s 0 -n 2)
sweep() { timeout 300 "$python" "$root/scripts/sweep.py" "$@" >"$work/stdout" 2>"$work/stderr"; status=$?; }

# Killed with all its processes once a run is done; the same command finishes it.
grid=("$s" --jobs 2 --vary lr=1e-3,1e-2 --vary optimizer=adamw,muon -- "${TINY[@]}")
setsid "$python" "$root/scripts/sweep.py" "${grid[@]}" >/dev/null 2>&1 &
for _ in $(seq 300); do compgen -G "$s/*/result.json" >/dev/null && break; sleep 0.1; done
kill -KILL -- -$! 2>/dev/null; wait $! 2>/dev/null
before=$(ls "$s"/*/result.json 2>/dev/null | head -n 1) when=$(stat -c %y "$before" 2>&1)
sweep "${grid[@]}"
why=$(ended_with 0)
rows=$(grep -cE '^\| 1e-[23] \| (adamw|muon) \| [0-9.]+ \| 6 \| [0-9.]+ \|$' "$s/table.md")
[ "$rows" -eq 4 ] || why=${why:-"table: $(cat "$s/table.md")"}
[ "$(stat -c %y "$before")" = "$when" ] || why=${why:-'a finished run was run again'}
tail -n +3 "$s/table.md" | cut -d '|' -f 4 | sort -c -g 2>/dev/null || why=${why:-'the best is not first'}
verdict 'a grid, killed and started again' "$why"

# A directory that no sweep has made: nothing in it changes.
mkdir -p "$box/s/lr=1e-3" && echo mine >"$box/s/lr=1e-3/output.txt"
before=$(listing "$box/s/lr=1e-3")
sweep "$box/s" --vary lr=1e-3 -- "${TINY[@]}"
why=$(ended_with_error 2 'lr=1e-3: was not made by a sweep')
[ "$before" = "$(listing "$box/s/lr=1e-3")" ] || why=${why:-'files were changed'}
verdict "a directory that is not the sweep's" "$why"

# When a sweep is killed, its trainer saves and stops.
printf '#!/bin/sh\necho $$ >"%s/pid"\nexec "%s" "$@"\n' "$work" "$PROGRAM" >"$work/trainer" && chmod +x "$work/trainer"
endless=("$work/endless" --vary lr=1e-3 -- "$work/trainer" "${TINY[@]:1:2}" -x 100000000 -v 0 -s 0 -n 0)
"$python" "$root/scripts/sweep.py" "${endless[@]}" >/dev/null 2>&1 &
until grep -qs '"loss"' "$work/endless/lr=1e-3/log.jsonl"; do sleep 0.1; done
kill -KILL $! && wait $! 2>/dev/null
for _ in $(seq 600); do kill -0 "$(cat "$work/pid")" 2>/dev/null || break; sleep 0.1; done
kill -KILL "$(cat "$work/pid")" 2>/dev/null && why='it goes on' || why=
[ -n "$(ls "$work/endless/lr=1e-3/ckpt")" ] || why=${why:-'it has not saved'}
verdict 'the trainer of a sweep that is killed' "$why"

# A loss of NaN is the last one, not that of step 0 before it.
sweep "$work/nan" --vary lr=1e30,1e-3 -- "${TINY[@]}" --on-nan skip
tail -n 1 "$work/nan/table.md" | grep -Eq '^\| 1e30 \| nan \| 6 \|' &&
    [ "$(wc -l <"$work/nan/table.md")" = 4 ] && why= || why=$(cat "$work/nan/table.md")
verdict 'a run whose loss is NaN comes last' "$why"

# A baseline takes 10 steps of 1,000 ms, which do not count, and 190 of 100; the record two of 500, and its loss is met.
cat >"$work/rec" <<'END'
#!/bin/sh
flags=$*
while [ "$1" != -o ]; do shift; done
case $flags in
    *gpt2-124m-normuon*) printf '{"ms": 500}\n{"ms": 500}\n{"val_loss": 3.9444}\n' ;;
    *"gpt2-124m "*"-x 200"*) for n in $(seq 200); do echo "{\"ms\": $((n > 10 ? 100 : 1000))}"; done ;;
esac >"$2/log.jsonl"
END
"$python" "$root/scripts/records.py" 3.9444 --seeds 1 2 --out "$work/r" -- sh "$work/rec" >"$work/stdout"
said="seconds=1.00 base_seconds=134.00 ratio=0.007 steps=2 seeds=2 loss=3.9444 worst=3.9444"
[ "$(tail -n 1 "$work/stdout")" = "RESULT to_loss target=3.9444 $said" ] && why= || why=$(cat "$work/stdout")
verdict 'the sums of a record' "$why"
finish
