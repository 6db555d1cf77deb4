#!/usr/bin/env bash
# The recommenders' trainers on several ranks. Two and four ranks equal one with the same batch: losses of 50 steps, all
# weights and moments, and scores. Twice on N ranks, resumed on N, and after SIGKILLs: the same bits. Then what is refused.
#
#     bash dev/recsys/ranks.sh TRAIN_DLRM TRAIN_NCF [KILLS]
#
# KILLS (default 3): SIGKILLs of a run on two ranks; with more than 3 both trainers are killed so often.
set -u
# The machine may be busy: one thread a rank, and none that spins.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 OMPI_ALLOW_RUN_AS_ROOT=1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
dlrm=$(realpath "$1") ncf=$(realpath "$2") kills=${3:-3} passed=0 failed=0 skipped=0 here=$PWD work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ok() { passed=$((passed + 1)); echo "ok   $1"; }
fail() { failed=$((failed + 1)); echo "FAIL $1"; }
check() { # what, command...
    local what=$1
    shift
    if "$@"; then ok "$what"; else fail "$what"; fi
}
is_sanitized() { grep -q __asan_init "$ncf"; }
has_mpi() { ldd "$ncf" | grep -q libmpi && command -v mpirun >/dev/null && ! is_sanitized; }
cd "$work" || exit 1
awk 'BEGIN { for (u = 1; u <= 60; u++) for (k = 0; k < 8; k++)
    print u "\t" (u * 7 + k * k * 3) % 50 + 1 "\t3\t" 1000 + (u * 31 + k * 17) % 400 }' >u.data
python3 "$here/dev/data/prepare_recsys.py" u.data --out r.bin >/dev/null || fail "preparation"

# Start N ranks over TCP: their exit statuses go to `status`, what they print to out.R and err.R.
port=$((20000 + RANDOM % 10000))
start() { # N, command...
    local n=$1 r
    shift
    port=$((port + 1)) pids=()
    rm -f out.* err.*
    for ((r = 0; r < n; r++)); do
        "$@" -pi tcp -ps localhost:$port -pn "$n" -pr $r >out.$r 2>err.$r </dev/null &
        pids+=($!)
    done
}
finish() {
    local pid
    status=()
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null; status+=($?); done
}
tcp() { start "$@"; finish; [[ ! "${status[*]}" =~ [^0\ ] ]] || cat err.* >&2; }
mpi() { # the same by mpirun, where there is one
    if has_mpi; then mpirun --oversubscribe --bind-to none -np "$1" "${@:2}" >out.0 2>err.0 || cat err.0 >&2; else tcp "$@"; fi
}
# 490 held-out samples and 60 users: in the last batch some ranks have fewer, or none.
run_dlrm=("$dlrm" -e bottom=16-8,top=16 --tables 6 --rows 30 --samples 8000 --held-out 490 -l 1)
run_ncf=("$ncf" -i r.bin -e F=4,E=8,H=8-4 --eval-negatives 15 --dropout 0.25)
# A run of $1 on N ranks: run MODEL LAUNCHER N DIRECTORY FLAG...
run() {
    local -n command=run_$1
    "$2" "$3" "${command[@]}" -b $((64 / $3)) -x 50 -v 10 -n 25 -o "$4" "${@:5}"
}
cat >compare.py <<'END'
"""The largest difference of two runs, against max(1, |reference|): losses, validations, weights and moments."""
import array, json, struct, sys
def tensors(path):
    data = open(path, "rb").read()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for name, t in sorted(json.loads(data[8:end]).items()):
        if name != "__metadata__":
            yield name, array.array("f", data[end + t["data_offsets"][0]:end + t["data_offsets"][1]])
def log(path):
    keys = ("step", "loss", "grad_norm", "val_loss", "auc", "hr_at_10", "ndcg_at_10")
    lines = [json.loads(line) for line in open(path)]
    yield "log", [d[k] for d in lines if "checkpoint_ms" not in d for k in keys if k in d]
def run(folder):
    yield from log(folder + "/log.jsonl")
    for name in ("model", "optimizer"): yield from tensors(folder + "/ckpt/00000050/" + name + ".safetensors")
a, b = (list(run(folder)) for folder in sys.argv[1:3])
assert [(n, len(v)) for n, v in a] == [(n, len(v)) for n, v in b] and len(a[0][1]) >= 100
print("%.1e" % max(abs(x - y) / max(1, abs(x)) for (_, v), (_, w) in zip(a, b) for x, y in zip(v, w)))
END
close() { local d; d=$(python3 compare.py "$1" "$2") && awk -v d="$d" 'BEGIN { exit !(d <= 1e-6) }'; } # two runs
results() { grep -oE '"step": [0-9]+, "(loss|val_loss|hr_at_10)": .*' "$1/log.jsonl" | sed -E 's/"(ms|tok_s|mfu)": [^,}]*//g'; }
same() { # two runs, number of steps
    local file
    for file in model optimizer; do cmp -s "$1/ckpt/$3/$file.safetensors" "$2/ckpt/$3/$file.safetensors" || return; done
    diff <(results "$1") <(results "$2") >/dev/null
}
score() { grep -hoE '(HR@10|AUC) .*' out.0 | tail -n 1; }

for model in dlrm ncf; do
    run $model tcp 1 $model-1
    for n in 2 4; do
        run $model mpi $n $model-$n
        check "train_$model: $n ranks equal one within 1e-6" close $model-1 $model-$n
        # Two numbers have the same sum whoever adds them. MPI adds four in another order than TCP.
        [ $n = 2 ] && launcher=tcp || launcher=mpi
        run $model $launcher $n $model-again
        check "train_$model: twice on $n ranks: the same bits" same $model-$n $model-again 00000050
        run $model $launcher $n $model-parts --stop-after 25
        [ $n = 4 ] || cp -r $model-parts $model-grows
        run $model $launcher $n $model-parts -y 1
        check "train_$model: resumed on $n ranks: the same bits" same $model-$n $model-parts 00000050
        rm -rf $model-again $model-parts
    done
    run $model tcp 4 $model-grows -y 1 --override 1
    check "train_$model: resumed on four ranks after 25 steps of two" close $model-1 $model-grows
    run $model tcp 1 $model-1 -y 1 --evaluate 1
    one=$(score)
    run $model tcp 4 $model-1 -y 1 --evaluate 1 --override 1
    check "train_$model: four ranks score a model as one does" test -n "$one" -a "$one" = "$(score)"
done

# Kill one rank of two as soon as the run shows a step that it had not reached before, again and again: the other rank names it.
# Then the resumed run equals one that nobody killed.
kill_ranks() { # MODEL, number of kills
    local -n command=run_$1
    local long=("${command[@]}" -b 32 -x 1500 -v 0 -n 50) straight=$1-straight killed=$1-killed
    local n victim step is_named=1 hit=0
    tcp 2 "${long[@]}" -o $straight
    for n in $(seq "$2"); do
        victim=$((n % 2))
        start 2 "${long[@]}" -o $killed -y 1
        for _ in {1..6000}; do
            step=$(sed -nE 's/^step +([0-9]+).*/\1/p' out.0 2>/dev/null | tail -n 1)
            [ "${step:-0}" -lt $((n * 1450 / $2)) ] || break
            sleep 0.005
        done
        kill -KILL "${pids[victim]}"
        finish 2>/dev/null  # bash reports the kill
        [ "${status[victim]}" = 137 ] && hit=$((hit + 1))
        [ "${status[1 - victim]}" = 4 ] && grep -q "rank $victim of 2 .* is gone" err.$((1 - victim)) || is_named=0
    done
    check "train_$1: $2 SIGKILLs hit a rank of two" test $hit = "$2"
    check "train_$1: the other rank names the killed one and ends with status 4" test $is_named = 1
    tcp 2 "${long[@]}" -o $killed -y 1
    check "train_$1: $2 SIGKILLs: the same weights and log" same $straight $killed 00001500
}
kill_ranks dlrm "$kills"
[ "$kills" -le 3 ] || kill_ranks ncf "$kills"

refused() { # what, ranks, message, command...
    start "$2" "${@:4}"
    finish
    check "$1" test -z "$(tr -d '2 ' <<<"${status[*]}")" -a "$(cat err.*)" = "error: $3"
}
refused "more ranks than tables of DLRM" 3 "3 ranks: the model has 2 tables, and each rank needs one" \
    "$dlrm" -e bottom=16-8,top=16 --tables 2 --rows 30 --samples 8000 -o ""
refused "more ranks than tables of NeuMF" 5 "5 ranks: the model has 4 tables, and each rank needs one" "${run_ncf[@]}" -o ""
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
