#!/usr/bin/env bash
# Tests of scripts/profile_diff.py, profile_trace.py and profile_reference.{py,sh}, on small made-up profiles.
#
#     bash dev/test/profile_scripts.sh          from the repository's root
#
# PYTHON names the interpreter (default python3); only its standard library is used. Needs no GPU and no trainer: stand-ins
# for the trainers write the profiles for profile_reference.sh.
set -u
PROGRAM=$(command -v "${PYTHON:-python3}") || { echo "skip profile_scripts: no python3"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }
. "$(dirname "$0")/shell.sh"
diff=$root/scripts/profile_diff.py trace=$root/scripts/profile_trace.py reference=$root/scripts/profile_reference.py
export PYTHONDONTWRITEBYTECODE=1

# ---------------------------------------------------------------------------------------------------------
# Made-up profiles

# Begin a profile: kernels.csv with its header, summary.csv. Its command is "a made step".
profile() { # FOLDER PLAIN_MS SPAN_MS [NAME,VALUE: a fact]...
    mkdir -p "$1"
    echo "index,direction,layer,op,shapes,kernel,stream,grid,block,registers,shared_bytes,start_us,us,min_us,median_us,max_us,gflop,mbyte,tflop_s,gb_s,tensor_cores,bound,roofline_percent,lost_us,full_name" >"$1/kernels.csv"
    {
        printf '%s\n' kind,name,value 'fact,command,a made step' 'fact,GPU,Made Up 9000'
        [ $# -lt 4 ] || printf 'fact,%s\n' "${@:4}"
        printf 'number,%s\n' "span_ms,$3" kernels_ms,9 overlap_ms,0 gap_host_ms,0.5 gap_stream_ms,0.25 gap_kernels_ms,0.25 \
            "plain_ms,$2" profiled_ms,11 before_ms,
    } >"$1/summary.csv"
    clock=0
    into=$1/kernels.csv
}
# A row with median US; the reported step took twice that. A helper has no work.
row() { # DIRECTION LAYER OP SHAPES KERNEL US [helper]
    local work=1.5,2.5
    [ "${7:-}" != helper ] || work=,
    printf '0,%s,%s,%s,%s,%s,7,"1x1x1",32x1x1,24,0,%d,%d,1,%s,9,%s,1,1,yes,memory,50,1,"void %s<int, 2>(float*, ""x"")"\n' \
        "$1" "$2" "$3" "$4" "$5" $clock $((2 * $6)) "$6" "$work" "$5" >>"$into"
    clock=$((clock + 2 * $6))
}

# BERT with two layers: a copy, 28 kernels and a fill; C defaults to 1024.
bert_profile() { # FOLDER [C]
    local C=${2:-1024} layer
    profile "$1" 1.5 1.4 dropout,0.1
    row forward "" batch_load "rows=512 sequences=4" copy_to_device_8848B 1
    row forward "" widen_forward "n=6144" widen_forward_kernel 1
    row forward "" embedding_forward "N=512 C=$C" embedding_forward_kernel 3
    row forward "" layernorm_forward "N=512 C=$C" layernorm_forward_kernel 3
    for layer in 0 1; do
        row forward $layer matmul_forward "N=512 IC=$C OC=$((3 * C))" nvjet_a 9
        row forward $layer attention_forward "N=512 sequences=4 NH=16 HS=64" attention_draw_by_query_kernel 3 helper
        row forward $layer attention_forward "N=512 sequences=4 NH=16 HS=64" attention_forward_hopper_kernel 6
        row forward $layer residual_layernorm_forward "N=512 C=$C" layernorm_forward_kernel 4
        row forward $layer matmul_gelu_forward "N=512 IC=$C OC=$((4 * C))" nvjet_b 10
        row forward $layer residual_layernorm_forward "N=512 C=$C" layernorm_forward_kernel 5
    done
    row forward "" gather_forward "M=76 C=$C" gather_forward_kernel 2
    row forward "" gather_forward "M=4 C=$C" gather_forward_kernel 2
    row backward "" classifier_backward "N=76 V=30522 Vp=30592" classifier_backward_kernel 8
    for layer in 1 0; do
        row backward $layer residual_layernorm_backward "N=512 C=$C" layernorm_backward_kernel 10
        row backward $layer matmul_gelu_backward_input "N=512 IC=$((4 * C)) OC=$C" nvjet_c 11
        row backward $layer residual_layernorm_backward "N=512 C=$C" layernorm_backward_kernel 12
    done
    row backward "" gather_backward "M=76 N=512 C=$C" fill_1048576B 1 helper
    row backward "" embedding_backward "N=512 C=$C" embedding_backward_kernel 12
    row optimizer "" lamb_update "n=59181056" lamb_moments_kernel 300
    row optimizer "" lamb_update "n=59181056" lamb_apply_kernel 200 helper
}

# A recommender's step: three kernels and a fill.
recommender_profile() { # FOLDER
    profile "$1" 2.5 2.4
    row forward "" interaction_forward "B=8 tables=2 E=4" interaction_forward_kernel 5
    row backward "" row_segments "N=16 rows=20" fill_12B 1 helper
    row backward "" row_segments "N=16 rows=20" DeviceRadixSortOnesweepKernel 14 helper
    row optimizer "" embedding_sgd "N=16 rows=20 E=4" embedding_sgd_kernel 300
}

# A block of GPT-2 without its attention output, both passes: 6 kernels and a fill in the first.
gpt2_block() { # N C LAYER
    row forward "$3" matmul_forward "N=$1 IC=$2 OC=$((3 * $2))" fill_4B 1 helper
    row forward "$3" matmul_forward "N=$1 IC=$2 OC=$((3 * $2))" nvjet_bias 20
    row forward "$3" attention_forward "N=$1 sequences=2 NH=12 HS=64" attention_forward_hopper_kernel 30
    row forward "$3" residual_layernorm_forward "N=$1 C=$2" layernorm_forward_kernel 4
    row forward "$3" matmul_gelu_forward "N=$1 IC=$2 OC=$((4 * $2))" nvjet_gelu 40
    row forward "$3" matmul_forward "N=$1 IC=$((4 * $2)) OC=$2" nvjet_bias 50
    row forward "$3" residual_layernorm_forward "N=$1 C=$2" layernorm_forward_kernel 6
    row backward "$3" matmul_backward_weight "N=$1 IC=$2 OC=$((3 * $2))" matmul_backward_bias_kernel 7 helper
    row backward "$3" attention_backward "N=$1 sequences=2 NH=12 HS=64" attention_backward_hopper_kernel 70
}
gpt2_profile() { # FOLDER LAYERS N C PLAIN_MS
    local layer
    profile "$1" "$5" 123.4
    row forward "" embedding_forward "N=$3 C=$4" embedding_forward_kernel 3
    for ((layer = 0; layer < $2; layer++)); do gpt2_block "$3" "$4" $layer; done
    row forward "" matmul_forward "N=$3 IC=$4 OC=50304" nvjet_head 60
    row backward "" classifier_backward "N=$3 V=50257 Vp=50304" classifier_backward_kernel 8
    row optimizer "" global_norm_forward "n=1000" global_norm_forward_kernel 9
    row optimizer "" adamw_update "n=1000" adamw_update_kernel 11
}

# ---------------------------------------------------------------------------------------------------------
# profile_diff.py

# A, and B with a different kernel in layer 1, a second kernel in layer 0, one op removed and one added.
profile a/profile 10 9.5
row forward 0 matmul_forward "N=8 C=4" nvjet_one 1000
row forward 1 matmul_forward "N=8 C=4" nvjet_one 1000
row backward "" gelu_backward "n=8" gelu_backward_kernel 500
row optimizer "" adamw_update "n=9" adamw_update_kernel 250
profile b/profile 11 9.0
row forward 0 matmul_forward "N=8 C=4" fill_4B 10 helper
row forward 0 matmul_forward "N=8 C=4" nvjet_one 1500
row forward 1 matmul_forward "N=8 C=4" nvjet_two 1000
row backward "" dropout_backward "n=8" dropout_backward_kernel 125
row optimizer "" adamw_update "n=9" adamw_update_kernel 250

# Print the first of the given lines that the last output lacks (several spaces count as one).
lacks() { # FILE LINE...
    local file=$1 line
    shift
    for line in "$@"; do
        tr -s ' -' <"$file" | grep -qxF -- "$(tr -s ' -' <<<"$line")" || { echo "no line '$line' in: $(head -c 3000 "$file")"; return; }
    done
}
# NAME LINE...: the last run ended well and said so
says() { verdict "$1" "$(ended_with 0)$(lacks "$work/stdout" "${@:2}")"; }

run "$diff" a b
cat >expected <<'TEXT'
# Two profiles

- A: a/profile
- B: b/profile

## The step, ms

|                            |      A |      B | difference |    of A |
| -------------------------- | -----: | -----: | ---------: | ------: |
| step, not profiled         | 10.000 | 11.000 |     +1.000 | +10.0 % |
| step, profiled             | 11.000 | 11.000 |     +0.000 |  +0.0 % |
| first kernel to last       |  9.500 |  9.000 |     -0.500 |  -5.3 % |
| in kernels                 |  9.000 |  9.000 |     +0.000 |  +0.0 % |
| of them overlapping        |  0.000 |  0.000 |     +0.000 |         |
| gaps: waiting for the host |  0.500 |  0.500 |     +0.000 |  +0.0 % |
| gaps: waiting for a stream |  0.250 |  0.250 |     +0.000 |  +0.0 % |
| gaps: between kernels      |  0.250 |  0.250 |     +0.000 |  +0.0 % |
| kernels, copies, fills     |      4 |      5 |         +1 |         |

## By op

| direction | op               | calls A | calls B | kernels A | kernels B |  ms A |  ms B | difference |    of A |           |
| --------- | ---------------- | ------: | ------: | --------: | --------: | ----: | ----: | ---------: | ------: | --------- |
| forward   | matmul_forward   |       2 |       2 |         2 |         3 | 2.000 | 2.510 |     +0.510 | +25.5 % |           |
| backward  | gelu_backward    |       1 |       0 |         1 |         0 | 0.500 |       |     -0.500 |         | only in A |
| backward  | dropout_backward |       0 |       1 |         0 |         1 |       | 0.125 |     +0.125 |         | only in B |
| optimizer | adamw_update     |       1 |       1 |         1 |         1 | 0.250 | 0.250 |     +0.000 |  +0.0 % |           |

## Kernels that changed

| direction | op             | shapes  | only in A | only in B | layers |
| --------- | -------------- | ------- | --------- | --------- | -----: |
| forward   | matmul_forward | N=8 C=4 | -         | fill_4B   |      1 |
| forward   | matmul_forward | N=8 C=4 | nvjet_one | nvjet_two |      1 |
TEXT
verdict 'diff: the whole page' "$(ended_with 0)$(command diff expected "$work/stdout" | head -n 5)"
cp "$work/stdout" page
run "$diff" a/profile b/profile
verdict 'diff: folders of profiles and of runs are the same' "$(command diff page "$work/stdout" | head -n 3)"
mkdir -p ranks/profile && cp -r a/profile ranks/profile/rank_0 && cp -r b/profile ranks/profile/rank_1
run "$diff" a ranks
says 'diff: rank 0 of several, which is the other profile' '- B: ranks/profile/rank_0' \
    'The same kernels wherever an op has the same shapes in both.' \
    '| forward | matmul_forward | 2 | 2 | 2 | 2 | 2.000 | 2.000 | +0.000 | +0.0 % | |'

limit() { # NAME STATUS LINE ARGUMENTS...
    run "$diff" "${@:4}"
    verdict "diff: $1" "$(ended_with "$2")$(lacks "$work/stdout" "$3")"
}
slower='step, not profiled: 10.000 ms in A, 11.000 ms in B, +10.00 %:'
limit '10 % slower is above 5 %' 1 "$slower above 5 %" a b --fail-above 5
limit '10 % slower is not above 10.5 %' 0 "$slower not above 10.5 %" a b --fail-above 10.5
cp -r b unplain && sed -i 's/plain_ms,11/plain_ms,/' unplain/profile/summary.csv
limit 'without plain times spans are compared' 0 \
    'first kernel to last: 9.500 ms in A, 9.000 ms in B, -5.26 %: not above 1 %' a unplain --fail-above 1

# NAME PATTERN ARGUMENTS...: refused with status 2 and one line
wrong() {
    run "${@:3}"
    verdict "$1" "$(ended_with_error 2 "$2")"
}
damaged() { # NAME PATTERN FILE SED...: a copy of b, one of its files changed
    rm -rf damaged && cp -r b damaged && sed -i "${@:4}" "damaged/profile/$3"
    wrong "diff: $1" "$2" "$diff" a damaged
}
wrong 'diff: no folder' '^error: nowhere: there is no such folder' "$diff" nowhere b
mkdir -p empty/profile
wrong 'diff: no profile' '^error: empty: has no kernels.csv.*--profile 5 -o empty' "$diff" a empty
wrong 'diff: --fail-above nan' '^error: argument --fail-above: .*nan' "$diff" a b --fail-above nan
damaged 'a column is missing' "damaged/profile/kernels.csv: .*no column 'gflop'" kernels.csv 1s/gflop/flop/
damaged 'no number' "kernels.csv, line 3: us is 'many', which is not a number" kernels.csv '3s/,3000,/,many,/'
damaged 'no time' 'kernels.csv, line 3: us is empty' kernels.csv '3s/,3000,/,,/'
damaged 'cells are missing' 'kernels.csv, line 4: has not as many cells' kernels.csv '4s/,memory,.*//'
damaged 'an open quote' 'kernels.csv: is not a table' kernels.csv '$s/"$//'
damaged 'no rows' 'kernels.csv: has no rows' kernels.csv '2,$d'
damaged 'a word as a time' "summary.csv, line 5: kernels_ms is 'many', which is not a number" summary.csv s/kernels_ms,9/kernels_ms,many/
damaged 'no time of the step' 'summary.csv: has no span_ms above 0' summary.csv /span_ms/d
rm -rf damaged && cp -r b damaged && rm damaged/profile/summary.csv
wrong 'diff: no summary' '^error: damaged/profile/summary.csv: No such file' "$diff" a damaged

# ---------------------------------------------------------------------------------------------------------
# profile_trace.py

# A copy on another stream, and communication beside the second layer's kernel.
profile traced/profile 1 1
row forward "" batch_load "B=1" copy_to_device_4B 1
row forward 0 matmul_forward "N=8 C=4" nvjet_one 10
row communication 0 sum_gradients "n=8" ncclDevKernel 5
row forward 1 matmul_forward "N=8 C=4" nvjet_one 10
row backward 1 matmul_backward_input "N=8 C=4" nvjet_two 10
sed -i 's/copy_to_device_4B,7/copy_to_device_4B,13/; s/ncclDevKernel,7/ncclDevKernel,20/' traced/profile/kernels.csv
run "$trace" traced ranks/profile/rank_1
why=$(ended_with 0)
"$PROGRAM" - "$work/stdout" >python.out 2>&1 <<'END' || why+=$(tail -n 1 python.out)
import json, sys
events = json.load(open(sys.argv[1]))["traceEvents"]
found = [[e["tid"], e["name"], e["ts"], e["dur"]] for e in events if e["ph"] == "X" and e["pid"] == 0]
assert found == [[13, "copy_to_device_4B", 0, 2], [7, "nvjet_one", 2, 20], [20, "ncclDevKernel", 22, 10],
                 [7, "nvjet_one", 32, 20], [7, "nvjet_two", 52, 20], [1000, "forward", 0, 52], [1000, "backward", 52, 20],
                 [1001, "layer 0", 2, 20], [1001, "layer 1", 32, 20], [1001, "layer 1", 52, 20]], found
names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
assert names == {7: "stream 7", 13: "stream 13", 20: "stream 20", 1000: "direction", 1001: "layer"}, names
assert events[2]["args"] == {"op": "matmul_forward", "shapes": "N=8 C=4", "layer": "0", "gflop": 1.5, "mbyte": 2.5}, events[2]
processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
assert processes == {0: "traced/profile", 1: "ranks/profile/rank_1"}, processes
END
verdict 'trace: rows by stream, directions and layers, a process for each profile' "$why"
wrong 'trace: no folder' '^error: nowhere: there is no such folder' "$trace" nowhere

# ---------------------------------------------------------------------------------------------------------
# profile_reference.py

made=$work/made pages=$work/pages
mkdir -p "$pages"
bert_profile "$made/bert_two_layers/profile"
gpt2_profile "$made/gpt2_124m/profile" 12 2048 768 20

for name in dlrm ncf; do recommender_profile "$made/$name/profile"; done

run "$reference" "$made" --pages "$pages" --commit 1234567
written=()
for page in bert_two_layers gpt2_124m recommenders; do written+=("wrote $pages/profile_$page.md"); done
says 'pages: all written' "${written[@]}"
shows() { # NAME PAGE, lines in standard input
    local lines
    mapfile -t lines
    verdict "pages: $1" "$(lacks "$pages/profile_$2.md" "${lines[@]}")"
}
shows 'BERT, its run and its directions' bert_two_layers <<'TEXT'
# BERT with two layers: 265 published kernels, 27 of ours
| GPU | all | Made Up 9000 |
| command | all | a made step |
| dropout | all | 0.1 |
| commit | all | 1234567 |
| forward | 87 | 17 | 1 | 0.086 |
| backward | 126 | 8 | 1 | 0.087 |
| optimizer | 52 | 2 | 0 | 0.500 |
| total | 265 | 27 | 2 | 0.673 |
TEXT
parts=$(tr -s ' ' <"$pages/profile_bert_two_layers.md" | cut -d '|' -f 2-6)
why=
while read -r part; do [[ $parts == *"$part"* ]] || why+="no line '$part' "; done <<'TEXT'
 forward | query, key, value | 6 | 1 |
 backward | MLP out, GELU | 5 | 1 |
TEXT
verdict "pages: BERT's parts, published and ours" "$why"
additions=$(grep 'residual, layer norm' <<<"$parts" | cut -d '|' -f 1,2,5 | tr -s ' \n|' ' ')
want=' forward residual, layer norm 1 4.0 forward residual, layer norm 2 5.0'
want+=' backward residual, layer norm 1 12.0 backward residual, layer norm 2 10.0 '
[ "$additions" = "$want" ] && why= || why=$additions
verdict 'pages: the residual additions of both passes are assigned correctly' "$why"
shows "the recommenders' directions" recommenders <<'TEXT'
| DLRM | forward | 117 | 1 | 0 | 0.005 |
| DLRM | total | 788 | 3 | 1 | 0.320 |
| NCF | total | 194 | 3 | 1 | 0.320 |
TEXT
shows "GPT-2's tasks" gpt2_124m <<'TEXT'
| forward | products | 49 | 37 | 266.69 | 1.38 | 66671 | 690.0 |
| forward | copies and fills | 13 | 12 | 0.02 | 0.01 | 5.1 | 6.0 |
| backward | bias gradients | 48 | 12 | 6.02 | 0.08 | 1505 | 42.0 |
| backward | loss | 1 | 1 | 8.98 | 0.01 | 2244 | 4.0 |
| together | | | 113 | 1005.91 | 2.83 | | |
TEXT
wrong 'pages: no runs' '^error: nowhere: there is no such folder' "$reference" nowhere
wrong 'pages: none of the runs' '^error: empty: has none of the runs bert_two_layers' "$reference" empty --pages "$pages"
mkdir -p other && bert_profile other/bert_two_layers/profile 768
wrong 'pages: another model' 'bert_two_layers/profile: is of 2 layers, 768 wide, where the set-up has 2, 1024 wide' "$reference" other --pages "$pages"
rm -rf other && mkdir -p other/pages && cp -r "$made/gpt2_124m" other
run "$reference" other --pages other/pages
says 'pages: what is left out is said' 'left out: other has no bert_two_layers' 'left out: other has no ncf' 'wrote other/pages/profile_gpt2_124m.md'

# ---------------------------------------------------------------------------------------------------------
# profile_reference.sh, with stand-ins for make, the trainers and numpy

tree=$work/tree
mkdir -p "$tree/dev" "$tree/bin" "$tree/build/bf16" "$tree/results"
cp -r "$root/scripts" "$tree" && cp -r "$root/dev/reference" "$root/dev/user_error.py" "$tree/dev"
printf '#!/bin/sh\nexit 0\n' >"$tree/bin/make"
cp "$tree/bin/make" "$tree/bin/numpy"
cat >"$tree/train_gpt2cu" <<TRAINER
#!/bin/bash
while [ \$# -gt 1 ]; do [ "\$1" != -o ] || out=\$2; shift; done
name=\$(basename "\$out")
[ "\$name" != "\${BROKEN:-}" ] || { echo "error: broken on purpose"; exit 1; }
mkdir -p "\$out/ckpt/00000030" && touch "\$out/model.safetensors" "\$out/log.jsonl" && cp -r "$made/\$name/profile" "\$out"
TRAINER
chmod +x "$tree"/bin/* "$tree/train_gpt2cu"
for trainer in train_dlrmcu train_ncfcu; do cp "$tree/train_gpt2cu" "$tree/build/bf16/$trainer"; done
cp "$tree/train_gpt2cu" "$tree/train_bertcu"
reference_sh() {
    PATH="$tree/bin:$PATH" PYTHON=$tree/bin/numpy GPU_CHECK_COMMIT=7654321 timeout 120 bash "$tree/scripts/profile_reference.sh" "$@" >"$work/stdout" 2>"$work/stderr"
    status=$?
}
reference_sh --pages results
says 'sh: the commands are shown, the pages written' 'wrote results/profile_bert_two_layers.md' 'wrote results/profile_gpt2_124m.md' \
    'wrote results/profile_recommenders.md' './train_bertcu -e L=2,C=1024,NH=16,T=512,V=30522 -b 4 -t 128 -i out/profile_reference/sentences.bin --optimizer lamb --dropout 0.1 --short-sequences 0 -s 0 -v 0 -n 0 -x 20 --profile 5 --overwrite 1 -o out/profile_reference/bert_two_layers' \
    'build/bf16/train_dlrmcu -e published --tables 26 --rows 101250 --samples 4000000 --held-out 32768 -b 32768 -l 0.1 -v 0 -n 0 -x 20 --profile 5 --overwrite 1 -o out/profile_reference/dlrm'
kept=$(cd "$tree/out/profile_reference/gpt2_124m" && echo *)
[ "$kept" = 'log.jsonl profile' ] && why= || why=$kept
why+=$(lacks "$tree/results/profile_gpt2_124m.md" '| commit | all | 7654321 |')
verdict 'sh: only profile and log are kept, the commit is named' "$why"
BROKEN=gpt2_124m reference_sh --out other_out --pages results
verdict 'sh: a failed run is reported, the others continue' "$(ended_with 1)$(lacks "$work/stdout" 'FAIL gpt2_124m: no profile; the end of other_out/gpt2_124m.log:' 'error: broken on purpose' \
    'left out: other_out has no gpt2_124m' 'wrote results/profile_bert_two_layers.md')"
printf '#!/bin/sh\necho no rule; exit 2\n' >"$tree/bin/make"
reference_sh
verdict 'sh: a build that fails' "$(ended_with 1)$(lacks "$work/stderr" 'no rule' 'error: make failed; the whole log is out/profile_reference/build.log')"
finish
