#!/usr/bin/env bash
# Run the set-ups of published profiles with our trainers on one GPU: build, run each with --profile, and write pages
# that compare our profiles with the published ones (scripts/profile_reference.py): dev/results/profile_*.md. They are BERT
# with two layers, GPT-2 124M, DLRM and NCF (NeuMF) at their published sizes.
#
#     bash scripts/profile_reference.sh [--out FOLDER] [--pages FOLDER]
#
#   --out      folder for the runs (default out/profile_reference): profile/ and log.jsonl of each are kept
#   --pages    folder for the pages (default dev/results)
#
# Needs nvcc and a GPU of 80 GB. PYTHON (default python3), which must have numpy, writes BERT's sentences.
# GPU_CHECK_COMMIT names the sources if git cannot tell (default: the first line of .commit). Exit status 0 only
# if every run succeeded and the pages were written.
set -u
cd "$(dirname "$0")/.."
out=out/profile_reference pages=dev/results
usage="usage: profile_reference.sh [--out FOLDER] [--pages FOLDER]"
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=${2:?$usage}; shift 2 ;;
        --pages) pages=${2:?$usage}; shift 2 ;;
        --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3} failed=0
commit=${GPU_CHECK_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || head -n 1 .commit 2>/dev/null)}
mkdir -p "$out" "$pages" || exit 1

give_up() { echo "error: $1" >&2; exit 1; }
# Enough steps to choose matmul algorithms and for clocks to settle, then profiled ones, then some to compare with.
common=(-v 0 -n 0 -x 20 --profile 5 --overwrite 1)
profile() { # name, command...
    local name=$1
    shift
    set -- "$@" "${common[@]}" -o "$out/$name"
    echo "$*"
    rm -rf "${out:?}/$name"
    if ! "$@" >"$out/$name.log" 2>&1 || [ ! -f "$out/$name/profile/kernels.csv" ]; then
        failed=1
        echo "FAIL $name: no profile; the end of $out/$name.log:"
        tail -n 5 "$out/$name.log"
        rm -rf "${out:?}/$name"
    fi
    # The trained model is not needed.
    find "$out" -mindepth 2 -maxdepth 2 -path "$out/$name/*" ! -name profile ! -name log.jsonl -exec rm -rf {} +
}

"$python" -c 'import numpy' 2>/dev/null || give_up "$python has no numpy; set PYTHON=... to an interpreter that has it"
if ! make -s train_gpt2cu train_bertcu data/builtin/train.bin build/bf16/train_{dlrm,ncf}cu >"$out/build.log" 2>&1; then
    tail -n 20 "$out/build.log" >&2
    give_up "make failed; the whole log is $out/build.log"
fi
"$python" dev/reference/make_sentences.py "$out/sentences.bin" --shortest 128 || exit 1
profile bert_two_layers ./train_bertcu -e L=2,C=1024,NH=16,T=512,V=30522 -b 4 -t 128 -i "$out/sentences.bin" \
    --optimizer lamb --dropout 0.1 --short-sequences 0 -s 0
profile gpt2_124m ./train_gpt2cu -e d12 -b 64 -t 1024 -s 0
profile dlrm build/bf16/train_dlrmcu -e published --tables 26 --rows 101250 --samples 4000000 --held-out 32768 \
    -b 32768 -l 0.1
# Four ratings of each of MovieLens 20M's users, of any of its items.
awk 'BEGIN { for (u = 1; u <= 138493; u++) for (k = 0; k < 4; k++)
    print u "\t" (u * 7919 + k * 6133 + k * k * u) % 26744 + 1 "\t3\t" k }' >"$out/ratings.data" || exit 1
"$python" dev/data/prepare_recsys.py "$out/ratings.data" --out "$out/ratings.bin" || exit 1
profile ncf build/bf16/train_ncfcu -e published -i "$out/ratings.bin" -b 1048576 --negatives 40 --eval-negatives 1 \
    -l 0.0045 --beta1 0.25 --beta2 0.5 --eps 1e-8
python3 scripts/profile_reference.py "$out" --pages "$pages" --commit "${commit:-not recorded}" || failed=1
exit $failed
