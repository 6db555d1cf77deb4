#!/usr/bin/env bash
# scripts/plot.py: what it reads of logs, good and bad ones, and that pictures are written.
#
#     bash dev/test/plot.sh
#
# PYTHON names the interpreter (default python3), which needs `matplotlib`.
set -u
python=${PYTHON:-python3}
passed=0 failed=0 skipped=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ok() { echo "ok   $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
verdict() { if [ -z "$2" ]; then ok "$1"; else fail "$1" "$2"; fi; }
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ "$failed" -eq 0 ]; exit; }
plot() { MPLCONFIGDIR=$work/mpl "$python" scripts/plot.py "$@" >"$work/stdout" 2>"$work/stderr"; }

refused() { # NAME PATTERN ARGUMENTS...
    local name=$1 pattern=$2 status
    shift 2
    plot "$@"
    status=$?
    if [ $status -eq 2 ] && [ "$(wc -l <"$work/stderr")" -eq 1 ] && grep -Eq "^error: .*$pattern" "$work/stderr"; then ok "$name"
    else fail "$name" "status $status, $(head -c 300 "$work/stderr" | tr '\n' ' ')"; fi
}

# Logs: of both kinds of model; one that went back to step 3, with a torn line, a line that is not an object, nulls, and
# unknown members; one without steps; one without anything.
mkdir -p "$work"/{gpt2,bert,back,begun,empty}
"$python" - "$work" <<'END'
import json, sys
def step(s, loss, **more):
    return {"step": s, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "ms": 500.0, "tok_s": 2000.0, "mfu": 0.4, **more}
def write(name, lines, end=""):
    with open(f"{sys.argv[1]}/{name}/log.jsonl", "w") as f:
        f.write("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines) + end)
settings = {"model": "d12", "steps": 300}
evaluated = [{"step": 0, "val_loss": 9.0}, {"step": 300, "val_loss": 3.0}, {"step": 300, "hellaswag_acc": 0.3, "hellaswag_acc_norm": 0.31}]
evaluated += [{"step": 300, "lambada_acc": 0.2, "lambada_perplexity": 90.0}]
write("gpt2", [settings] + [step(s, 9.0 - s / 50) for s in range(1, 301)] + evaluated)
accuracy = {"val_mlm_loss": 3.0, "val_mlm_accuracy": 0.4, "val_nsp_loss": 0.5, "val_nsp_accuracy": 0.8, "val_f1": 0.7}
losses = dict(mlm_loss=3.0, nsp_loss=0.6, seq_s=64.0)
write("bert", [settings] + [step(s, 3.6, **losses) for s in range(1, 11)] + [{"step": 10, "val_loss": 3.5, **accuracy}])
write("back", [settings] + [step(s, 5.0) for s in range(1, 6)] + [{"step": 5, "val_loss": 5.0}, '{"step": 6, "lo', "[1]"] +
      [step(3, 4.0), step(4, None), step(5, float("nan")), {"step": 2, "checkpoint_ms": 7, "new": "text", "odd": [1]}], '{"step": 6, "loss"')
write("begun", [settings])
open(sys.argv[1] + "/empty/log.jsonl", "w")
END

cat >"$work/read.py" <<'END'
import sys
sys.path.insert(0, "scripts")
import plot
run = plot.Run(sys.argv[1])
print(run.series("loss"), run.series("val_loss"), sorted(run.members), run.tokens, [round(3600 * h, 3) for h in run.hours])
END
wanted="([1, 2, 3, 4, 5], [5.0, 5.0, 4.0, nan, nan]) ([], []) ['checkpoint_ms', 'grad_norm', 'loss', 'lr', 'mfu', 'ms', 'tok_s', 'val_loss']"
wanted+=" [0.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0] [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]"
got=$("$python" "$work/read.py" "$work/back" 2>&1)
verdict "a log that went back, torn, with null and NaN" "$([ "$got" = "$wanted" ] || echo "$got")"

refused "no log" 'holds no log.jsonl' "$work"
refused "no file" 'no such file' "$work/none"
refused "an empty log" 'holds no step yet' "$work/empty"
refused "a log without steps" 'holds no step yet' "$work/begun"
refused "not a log" 'is not a log' README.md
refused "another kind of picture" 'must end in .png, .svg, .pdf' "$work/gpt2" --output x.jpg
refused "unknown axis" "invalid choice: 'years'" "$work/gpt2" --x years

if ! "$python" -c 'import matplotlib' 2>/dev/null; then
    skip pictures "$python has no matplotlib (pip install matplotlib)"
else
    plot "$work/gpt2" "$work/bert" "$work/back" "$work/empty" --x tokens --output "$work/all.svg"
    why=$(grep -q 'all.svg: 12 panels of 3 runs' "$work/stdout" || cat "$work/stdout" "$work/stderr")
    [ "$(grep -c '^warning: .*empty/log.jsonl: holds no step yet' "$work/stderr")" -eq 1 ] || why="${why:-no warning of the empty log}"
    for title in 'Training loss' 'Validation loss' 'HellaSwag accuracy' 'LAMBADA accuracy' 'LAMBADA perplexity' 'Validation: f1' 'Masked tokens: loss' 'Next sentence: loss' 'Validation accuracy' \
        'Tokens per second' 'Gradient norm' 'Learning rate'; do
        grep -q "<!-- $title -->" "$work/all.svg" || why="${why:-no panel '$title'}"
    done
    for name in gpt2 bert back 'training tokens'; do grep -q "<!-- $name -->" "$work/all.svg" || why="${why:-no '$name'}"; done
    verdict "panels and legend of several runs" "$why"
    plot "$work/bert" --x hours && [ "$(head -c 4 "$work/bert/plot.png" | tail -c 3)" = PNG ] && grep -q '9 panels' "$work/stdout"
    verdict "OUT/plot.png" "$([ $? -eq 0 ] || cat "$work/stdout" "$work/stderr")"
    plot "$work/gpt2" --output "$work/one.pdf" && [ "$(head -c 4 "$work/one.pdf")" = %PDF ]
    verdict "a PDF" "$([ $? -eq 0 ] || cat "$work/stdout" "$work/stderr")"
    refused "where nothing can be written" 'cannot be written' "$work/gpt2" --output "$work/none/x.png"
fi

finish
