#!/bin/bash
# Training with --fp8: gradients compared with those of the same step without it, and what the log and the profile
# report.
#
#     bash dev/test/fp8.sh PROGRAM          from the repository's root; with mpirun also on two ranks
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

model="-e L=2,C=64,NH=2,T=64 -b 4 -d 1024 -s 0 -n 0"
layers=$((4 * 2)) is_bert=
[[ $PROGRAM == *bert* ]] && is_bert=1 || layers=$((layers + 1)) # the output matrix

# A case of Python after a run: fp8(OUT) are the rows of log.jsonl by step, losses(OUT) the losses.
logged() { # NAME CODE
    why=$(ended_with 0)
    python3 - >python.out 2>&1 <<END || why+=$(tail -n 1 python.out)
import json, math
lines = lambda out: [json.loads(line) for line in open(out + "/log.jsonl")]
fp8 = lambda out: {line["step"]: line["fp8"] for line in lines(out) if "step" in line and "fp8" in line}
losses = lambda out: [line["loss"] for line in lines(out) if "loss" in line]
largest = {"E4M3": 448, "E5M2": 57344}
$2
END
    verdict "$1" "$why"
}

run $model -x 18 -v 18 -m 1 --profile 1 --profile-warmup 0 -o plain
logged 'without --fp8 the log has no tensors' 'assert not fp8("plain")'
run $model --fp8 1 -x 20 -v 10 -m 1 --profile 2 --profile-warmup 16 -o run
logged 'a line of all tensors at each validation after a step' "
assert sorted(fp8('run')) == [10, 20], fp8('run').keys()
rows = fp8('run')[20]
assert len(rows) == 3 * $layers and len({(r['tensor'], r['operand']) for r in rows}) == len(rows), len(rows)
for r in rows:
    assert r['format'] == ('E5M2' if r['operand'] == 'dy' else 'E4M3'), r
    # Scales are powers of two that leave room.
    assert math.frexp(r['scale'])[0] == 0.5 and 0.02 < r['amax'] * r['scale'] / largest[r['format']] <= 1, r
    # Little is clipped or flushed. Zeros count: a third of the rows of GPT-2's output matrix is padding, and BERT's
    # last layer has gradients in the masked rows alone.
    most = 0.4 if 'wte' in r['tensor'] else 1 if 'layer.1.' in r['tensor'] else 0.1
    assert 0 <= r['clipped'] < 1e-3 and 0 <= r['flushed'] < most, r
assert any(r['flushed'] > 0 for r in rows)"
python3 "$root/dev/reference/check_profile.py" run/profile --waits-of plain/profile >python.out 2>&1
why=$(grep -h 'FAIL.*\(waits\|readbacks\)' python.out)
grep -q 'host_waits=[1-9][0-9]*/[1-9]' python.out || why+=" nothing was counted: $(tail -n 1 python.out)"
verdict 'no more waits and readbacks in a step' "$why"

# A step that makes weights much larger: all that exceeds the range is counted, and the scale is still that of before.
run -y 1 --override 1 -x 22 -l 3 -v 1 -m 1 --clip 0 -o run
logged 'what is clipped is counted' "
before, after = ([r for r in fp8('run')[step] if r['operand'] == 'w'] for step in (21, 22))
clipped = [r for r in after if r['clipped'] > 0.3]
assert len(clipped) > $layers // 2 and all(r['clipped'] == 0 for r in before), after
assert all(r['amax'] * r['scale'] > largest[r['format']] for r in clipped)"

# With all layers excluded the forward pass is that without fp8, and only gradients differ.
attention=attn.c_attn same=2e-7 differs=2e-7
[ ! $is_bert ] || attention=self.value
# A GPU computes without fp8 in bf16, to which it rounds GELU's input.
[[ $PROGRAM != *cu && $PROGRAM != */emulated/* ]] || same=1e-4 differs=0
for with in . "$attention" ''; do
    run $model --fp8 1 -x 18 -v 18 -m 1 --fp8-exclude-forward "$with" -o "forward$with"
done
logged '--fp8-exclude-forward: the forward pass is that without fp8' "
plain, every, attention, none = map(losses, ('plain', 'forward.', 'forward$attention', 'forward'))
off = lambda of: abs(of[0] / plain[0] - 1)
assert off(every) < $same and off(none) > $differs, (plain[0], every[0], none[0])
assert every[-1] != plain[-1] and attention not in (every, none), (plain, every, attention, none)"

# Gradients of new weights, and of GPT-2's that were trained for a moment
if "${PYTHON:-python3}" -c 'import numpy' 2>/dev/null; then
    # With 64 channels norms are up to 9 % off, by the seed (CPU, 5 seeds); with 256 channels up to 4 %.
    wide=L=2,C=256,NH=4,T=64
    run -e $wide -b 16 -d 1024 -x 100 -l 1e-3 -n 0 -v 0 -s 0 -o trained
    starts="$wide trained"
    [ ! $is_bert ] || starts=$wide
    for start in $starts; do
        for fp8 in 0 1; do
            run -e "$start" -b 16 -d 8192 -x 1 -l 0 --beta1 0 --clip 0 -n 0 -v 0 -s 0 --fp8 $fp8 -o "gradients$fp8" \
                --overwrite 1
        done
        "${PYTHON:-python3}" "$root/dev/reference/fp8_gradients.py" gradients0 gradients1 >python.out 2>&1 &&
            grep -q "^RESULT .* weights=[1-9][0-9]* " python.out && why= || why=$(tail -n 1 python.out)
        verdict "gradients of $start" "$why"
    done
else skip 'gradients' "${PYTHON:-python3} has no numpy"; fi

prepare_ranks || { skip 'two ranks' "$why"; finish; exit; }
run $model --fp8 1 -x 1 -v 1 -m 1 -o one
timeout --foreground 180 mpirun --oversubscribe --bind-to none -np 2 "$PROGRAM" $model --fp8 1 -x 1 -v 1 -m 1 -o two \
    </dev/null >"$work/stdout" 2>"$work/stderr"
status=$?
logged 'two ranks: the numbers are over both' "
for r, want in zip(fp8('two')[1], fp8('one')[1]):
    assert abs(r['amax'] / want['amax'] - 1) < 0.02, (r, want)
    if r['operand'] == 'w': assert r == want, (r, want)"
finish
