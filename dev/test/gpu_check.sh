#!/bin/bash
# scripts/gpu_check.py where there is no GPU: its table, and its judges on the files of trainers that only pretend to
# train.
#
#     bash dev/test/gpu_check.sh
#
# Ends with `N passed, N failed`; exit status 1 if one failed.
set -u
passed=0 failed=0
verdict() { # NAME STATUS
    if [ "$2" -eq 0 ]; then passed=$((passed + 1)); echo "ok   $1"; else failed=$((failed + 1)); echo "FAIL $1"; fi
}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/scripts" "$work/bin" "$work"/build/{bf16,fp32,fp16}
cp scripts/gpu_check.py "$work/scripts"
# DIFFER: the OUT of runs whose weights are others.
cat >"$work/bin/trainer" <<'END'
#!/bin/bash
[ "$1" != test ] || { echo "FAIL gelu"; echo "7 passed, 1 failed"; exit 1; }
out=${*: -1}
mkdir -p "$out/ckpt/00000020"
for i in {1..20}; do
    echo "{\"step\": $i, \"loss\": ${LOSS:-$i.5}, \"ms\": $i.25, \"tok_s\": 600000, \"mfu\": 0.5}"
done >"$out/log.jsonl"
[[ $out == ${DIFFER:-} ]] && text=other || text=same
echo "$text" | tee "$out/ckpt/00000020/model.safetensors" >"$out/ckpt/00000020/optimizer_0.safetensors"
END
printf '#!/bin/sh\nfor i in $(seq ${COUNT:-1}); do echo "GPU $i: a pretended one"; done\n' >"$work/bin/nvidia-smi"
chmod +x "$work/bin"/*
for program in train_gpt2 train_gpt2cu build/{bf16,fp32,fp16}/{opscu,train_gpt2cu}; do
    cp "$work/bin/trainer" "$work/$program"
done
checked() { # FLAG...: its status; the report is in $work/report
    PATH=$work/bin:$PATH "${PYTHON:-python3}" "$work/scripts/gpu_check.py" --out "$work/out" "$@" >"$work/report" 2>&1
}
has() { grep -qF -- "$1" "$work/report"; }

for part in build ops e2e train bert tasks graph san tools profile bench bert_bench fp8 flags ranks older; do
    COUNT=4 checked --list --part $part &&
        ! grep -E '(^|[^{"$])@[a-z]|RANKS|SAME|REPEATED|OLDER' "$work/report" | grep -v '\${@\|"\$@"' &&
        cut -d '|' -f 3- "$work/report" | sed 's# | [a-z_A-Z0-9 ^.*()|=:?/-]*$##' | bash -n
    verdict "$part: its commands are complete" $?
done
! checked --part ops && has 'ops_bf16: 7 passed, 1 failed' && has 'FAIL gelu' && has '21 passed, 3 failed'
verdict 'a failing program fails the check' $?
checked --part e2e --only '^(run |e2e|flash|epilogue)' && has '0 failed' &&
    has 'RESULT e2e_cpu_against_gpu_fp32 steps=20 max_loss_difference=0 tol=1e-4'
verdict 'equal runs pass' $?
! DIFFER='*bf16_again' checked --part e2e --only '^(run e2e|e2e)' && has 'FAIL e2e_bf16 repeats bit for bit' &&
    has 'ok   e2e_bf16 resumed equals straight'
verdict 'other weights fail, and only where they are' $?
! LOSS=NaN checked --part e2e --only '^(run e2e_(cpu|fp32)|e2e_cpu)' && has 'FAIL e2e_cpu_against_gpu_fp32'
verdict 'NaN is not near' $?
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
