#!/bin/bash
# Every flag of a program has the effect that its row in a table describes, and giving its default has none.
#
#     bash dev/test/flags.sh PROGRAM [FLAG...]   from the repository's root; FLAG: only these, by long name
#
# Flags and defaults come from --help: a flag without a row fails, and so does a row without a flag. Each row takes three
# runs: without the flag, with its default, with another value. The first two must be equal in all output but times. The
# row's observable must differ in the third as the row says. Ends with `N passed, N failed, N skipped`; exit status 1 if
# one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
shift
only=("$@")

case ${PROGRAM##*/} in finetune_bert*) trainer=tune ;; *_bert*) trainer=bert ;; *) trainer=gpt2 ;; esac
case ${PROGRAM##*/} in use_*) uses=1 ;; *) uses= ;; esac
maker=${PROGRAM%/*}/$(sed 's/^use_/train_/' <<<"${PROGRAM##*/}")  # of the models
# Of finetune_bert the flags that the other trainers lack, and those of a step.
[ $trainer != tune ] || [ ${#only[@]} -gt 0 ] || only=(--task --labels --stride --predictions --optimizer --init --schedule
    --lr --warmup --final-lr --poly-power --weight-decay --beta1 --beta2 --eps --clip --adamw-lr
    --cautious-decay --muon-warmup --dropout --loss-scale --seed --shuffle --overfit --on-nan --val-every
    --checkpoint-every --keep --keep-every --stop-after --fp8 --fp8-steps --output)
case ${PROGRAM##*/} in *cu) is_gpu=1 ;; *) is_gpu= ;; esac

# From --help: the long names in order, and for each the short name and the default.
declare -a names
declare -A long default
"$PROGRAM" --help >"$work/help" || { echo "$PROGRAM --help fails" >&2; exit 1; }
while IFS=$'\t' read -r short name value; do
    names+=("$name") long[$name]=$name default[$name]=$value
    long[$short]=$name
done < <(awk '
    function cell(from, to) { s = substr($0, from, to - from); gsub(/^ +| +$/, "", s); return s }
    function word(at, words) { split(substr($0, at), words, " "); return substr($0, at, 1) == " " ? "" : words[1] }
    /^  flag / { n = index($0, "long name"); d = index($0, "default"); next }
    d && substr($0, n, 2) == "--" && cell(n, d) != "--help" {
        printf "%s\t%s\t%s\n", cell(1, n) == "" ? "none" : cell(1, n), cell(n, d), word(d)
    }' "$work/help")
[ ${#names[@]} -gt 30 ] || fail 'the flags in --help' "only ${#names[@]} were found"

# ---------------------------------------------------------------------------------------------------------
# Observables, in a run's directory

each() { sed -nE '/^\{"step"/s/.*"'"$1"'": ([^,}]+).*/\1/p' out/log.jsonl; }  # the values of NAME in log.jsonl
nth() { each "$1" | sed -n "$2p"; }  # the value of NAME that is number N
steps_of() { sed -nE 's/^\{"step": ([0-9]+), "'"$1"'".*/\1/p' out/log.jsonl; }  # the steps whose lines begin with NAME
checkpoints() { ls out/ckpt | sed 's/^0*//'; }
weights() { cksum <out/model.safetensors; }
says() { cat stdout stderr | grep -aoE -- "$1"; }  # the parts of the output that match PATTERN
config() { grep -oE "\"$1\": [^,}]+" out/config.json; }
count() { "$@" | sort -u | wc -l; }  # different lines
sequences() { # in each step
    sed -nE 's/.*"ms": ([^,]+).*"seq_s": ([^,}]+).*/\1 \2/p' out/log.jsonl | awk '{ printf "%.0f\n", $1 * $2 / 1000 }'
}
memory() { says "$1 [0-9.]+ MiB" | grep -oE "[0-9.]+"; }  # MiB of the plan
text() { tr -d '\n' <stdout; }
saved_late() { # the number of checkpoints that were reported after the line of a later step
    awk -F '[ ,:]+' '/"loss"/ { last = $2 } /"checkpoint_ms"/ && $2 < last { n++ } END { print n + 0 }' out/log.jsonl
}
skipped() { sed -nE '/"skipped": true/s/^\{"step": ([0-9]+).*/\1/p' out/log.jsonl; }  # steps
results() { cat status; each loss; each grad_norm; weights; }
norm() { # of the weights, which are fp32 in CPU builds
    local header
    header=$(od -An -tu8 -N 8 out/model.safetensors)
    od -An -v -tf4 -j $((8 + header)) out/model.safetensors | awk '{ for (i = 1; i <= NF; i++) s += $i * $i } END { print sqrt(s) }'
}
kinds() { od -An -v -tu1 -w1 stdout | sort -u | wc -l; }  # different bytes of the text
last() { each "$1" | tail -n 1; }

# All output but times. A profile consists of times.
strip_times() {
    sed -E -e 's/ \| [0-9.]+ ms \|.*//; s/ \| 100 % mfu is .*//; s/; [0-9.]+ MiB are available//' \
        -e '/^checkpoint of step /d; s/[0-9.]+ s: [0-9.]+ tokens.s//; s/ GB at [0-9.e+-]+ GB.s$/ GB/' \
        -e '/"checkpoint_ms"/d; s/, "(ms|tok_s|mfu|seq_s|joules|mhz)": [^,}]+//g' "$@"
}
everything() {
    cat status
    ! grep -q '"matmul_plans": "[^"]' out/ckpt/*/trainer.json 2>/dev/null || return  # those that were timed may differ
    [ -d out/profile ] || strip_times stdout
    strip_times stderr
    [ ! -f out/log.jsonl ] || strip_times out/log.jsonl
    find . -path '*/profile/*' -print -o -type f ! -name stdout ! -name stderr ! -name log.jsonl ! -name command -exec cksum {} + | sort
}

observed() { (cd "$1" && eval "$2" 2>/dev/null | tr '\n' ' ' | sed 's/ $//'); }  # RUN OBSERVABLE

# ---------------------------------------------------------------------------------------------------------
# Runs: each in its own directory, shared by all rows that need it

declare -A run_of
declare -a runs=()
model=L=1,C=16,NH=2,T=16
base="-e $model -x 4 -v 0 -m 2 -n 0"
if [ -n "$uses" ]; then base='-e in/started/out -m 2'
elif [ $trainer = tune ]; then base="$base --task classify -i in/texts.tsv -j in/texts.tsv"; else base="$base -s 0"
fi
[ -z "$is_gpu" ] || base="$base --autotune 0"

# The run of a row with the flag at "--flag=value" or, with "--flag", absent; $dir is its directory. Of the row's other
# flags, @from=DIR: start with a copy of that directory; @ranks: on two ranks; @end=SECONDS: end it
# after that time. The value @none removes a flag of the base.
need() { # FLAG[=VALUE] OTHERS
    local -A flag=()
    local -a words=() commands=()
    local chosen=$1 name word start= limit=60 prepare=
    read -ra words <<<"$base $2"
    set -- "${words[@]}"
    while [ $# -gt 0 ]; do
        word=$1
        shift
        case $word in
            @from=*) prepare+="cp -r in/${word#*=}/. .; " ;;
            @end=*) limit=${word#*=} ;;
            @ranks) start='mpirun --oversubscribe --bind-to none -np 2' ;;
            *) flag[${long[$word]:-$word}]=$1 && shift ;;
        esac
    done
    unset "flag[${chosen%%=*}]"
    [[ $chosen != *=* ]] || flag[${chosen%%=*}]=${chosen#*=}
    for name in $(printf '%s\n' "${!flag[@]}" | sort); do
        [ "${flag[$name]}" = @none ] || commands+=("$name=${flag[$name]}")
    done
    local key="timeout --foreground $limit $start ${PROGRAM@Q} ${commands[*]@Q}"
    dir=${run_of["$prepare$key"]:-}
    if [ -z "$dir" ]; then
        dir=$work/runs/$((${#runs[@]} + 1))
        run_of["$prepare$key"]=$dir
        mkdir "$dir"
        echo "ln -s '$work/data' '$work/in' .; $prepare
            $key </dev/null >stdout 2>stderr
            echo \$? >status" >"$dir/command"
        runs+=("$dir")
    fi
}

# ---------------------------------------------------------------------------------------------------------
# Rows

# For AFTER: $is if N times $is is less than $was.
less() { awk -v is="$is" -v was="$was" -v n="$1" 'BEGIN { print is != "" && n * is < was ? is : "less" }'; }

declare -A has_row
flags=() without=() with=() changed=() values=() observables=() before=() after=() keeps=() orders=()
# With the default, OBSERVABLE matches the pattern BEFORE; with VALUE it differs and matches AFTER, in which $was and $is
# are its two values. AFTER "=": it does not differ. KEEPS: another observable, which VALUE does not change. ORDER, as in
# "< OBSERVABLE": with VALUE that number is less than with the default.
row() { # FLAG OTHERS VALUE OBSERVABLE BEFORE AFTER [KEEPS [ORDER]]
    has_row[$1]=1
    [ -n "${default[$1]+set}" ] || { fail "$1" 'has a row, but --help does not list it'; return; }
    [ ${#only[@]} -eq 0 ] || [[ " ${only[*]} " == *" $1 "* ]] || return
    flags+=("$1") values+=("$3") observables+=("$4") before+=("$5") after+=("$6") keeps+=("${7:-:}") orders+=("${8:-}")
    need "$1" "$2" && without+=("$dir")
    need "$1=${default[$1]}" "$2" && with+=("$dir")
    need "$1=$3" "$2" && changed+=("$dir")
}
# For a flag that acts in GPU builds alone: other builds accept it without effect.
row_gpu() { if [ -n "$is_gpu" ]; then row "$@"; else row "$1" "$2" "$3" results '*' '='; fi; }
# For a flag that needs two ranks.
row_ranks() {
    has_row[$1]=1
    [ -z "$has_ranks" ] || row "$1" "@ranks -x 1 $2" "${@:3}"
}

has_ranks=
mkdir runs in
prepare_ranks
[ -z "$is_gpu" ] || [ "$(nvidia-smi -L | wc -l)" -gt 1 ] || why=${why:-'this machine has one GPU'}
[ -n "$why" ] && skip 'flags of several ranks' "$why" || has_ranks=1
[ -n "$is_gpu" ] || skip 'effects of flags that act on GPUs alone' 'this is a trainer for the CPU'

# ---------------------------------------------------------------------------------------------------------
# Inputs of rows: a run that stopped after two steps, a profile, data

bytes() { # N: the whole numbers on a line of stdin, in N bytes each
    printf '%b' "$(awk -v n="$1" '{
        for (i = 1; i <= NF; i++) for (b = 0; b < n; b++) { printf "\\0%03o", $i % 256; $i = int($i / 256) }
    }')"
}
zeros() { head -c "$1" /dev/zero; }
small_gpt2() { # 640 tokens to predict; 256 ends a text
    echo 20240520 1 641 | bytes 4
    zeros 1012
    awk 'BEGIN { for (i = 0; i < 641; i++) printf "%d ", i % 7 ? i * i % 251 : 256 }' | bytes 2
}
small_bert() { # four documents of 10 to 18 tokens in three sentences; tokens from 128 on continue a word
    local all=4294967295
    echo 20261121 1 60 12 4 261 256 257 258 259 260 | bytes 4
    zeros 980
    awk 'BEGIN { for (i = 0; i < 60; i++) printf "%d ", i * i % 251 }' | bytes 2
    echo 0 3 6 10 15 20 24 30 36 42 48 54 60 0 3 6 9 12 0 0 0 0 $all $all $all $all 0 | bytes 4
}
prepared() { # NAME FLAG...
    "$maker" ${is_gpu:+--autotune 0} "${@:2}" </dev/null >"$work/stdout" 2>"$work/stderr" || fail "$1" "$(tail -n 1 "$work/stderr")"
}
mkdir -p in/started in/small in/embed
if [ $trainer != tune ]; then
printf 'a\n\nbcd\n' >in/embed/lines
prepared 'a run to resume' -e $model -x 4 -v 0 -s 0 -n 2 --stop-after 2 -o in/started/out
small_$trainer >in/small/train.bin
fi
if [ $trainer = gpt2 ]; then
    prepared 'a model with tokens for chat' -e L=1,C=16,NH=2,T=32,V=261 -b 1 -x 1 -v 0 -s 0 -n 0 -o in/chat
    added=
    for i in 257user 258assistant 259end; do
        added+=,$(sed 's/.*"added_tokens":\[\({[^}]*}\)\].*/\1/' in/chat/tokenizer.json | sed "s/256/${i:0:3}/; s/endoftext/${i:3}/")
    done
    sed -i "s/\(\"added_tokens\":\[{[^}]*}\)/\1$added/" in/chat/tokenizer.json
fi
printf -- '# a comment\n--lr 1\n--lr=2e-3 # the last line wins\n\n-k constant\n' >in/recipe.flags
echo static >in/prompt
echo 'a[MASK]b' >in/prompt_mask
cp data/builtin/bert/vocab.txt in
for i in 1 2 3 4 5 6 7 8 9 10; do printf '%d\ttext%d\n' $((i % 2)) $i; done >in/texts.tsv
[ $trainer != tune ] || prepared 'a classifier' --task classify -e $model -i in/texts.tsv -x 1 -v 0 -n 0 -o in/classifier
context=$(printf 'word %.0s' {1..120})
echo "{\"data\": [{\"paragraphs\": [{\"context\": \"$context\", \"qas\": [{\"id\": \"1\", \"question\": \"what?\",
    \"answers\": [{\"text\": \"word\", \"answer_start\": 5}]}]}]}]}" >in/answers.json
{ # one example of four endings; BERT takes those of one
    echo 20240522 1 1 40 | bytes 4
    zeros 1008
    case $trainer in bert) echo 65535 20 0 0 1 1 97 2 32 98 ;; *) echo 65535 40 0 1 4 1 97 2 32 98 3 32 99 100 2 32 101 2 32 102 ;; esac | bytes 2
} >in/set.bin
greedy() { "$PROGRAM" -e in/started/out --generate 60 --prompt i --top-k 1 2>/dev/null </dev/null | tr -d '\n'; }

# ---------------------------------------------------------------------------------------------------------
# The table. Rates are those of steps 0 to 3 of 4, by the formulas in llmc/base/schedule.h

D() { echo "${default[$1]:-0}"; }  # of a number
tokens=$((16 * $(D --batch)))
linear() { # FINAL_LR: the rates of 4 steps that fall to it
    awk -v p="$(D --lr)" -v q="$1" 'BEGIN {
        for (i = 0; i < 4; i++) printf "%s%.9g", i ? " " : "", p * (q + (1 - q) * (1 - i / 4))
    }'
}
shard_tokens() { od -An -td4 -j 8 -N 4 "$1" | tr -d ' '; }
case $trainer in
    gpt2) builtin=data/builtin V=257 schedule=linear layers=n_layer ;;
    bert | tune) builtin=data/builtin/bert V=261 schedule=cosine layers=num_hidden_layers ;;
esac
small="-e $model,V=$V -i in/small/train.bin -b 1"
profile='-x 8 --profile 1'

if [ -n "$uses" ]; then
. "$root/dev/test/flags_use.sh"
else  # the rows of the trainers
unfit='> last loss' norm_falls= norm_rises=
[ $trainer != tune ] || unfit=  # two classes of ten texts are too few for dropout to hurt
[ -n "$is_gpu" ] || norm_falls='< norm' norm_rises='> norm'

# flag, others, value, observable, with the default, with the value, keeps, order
row --train-data '' $builtin/val.bin "says '[0-9]+ training tokens'" \
    "$(shard_tokens $builtin/train.bin) *" "$(shard_tokens $builtin/val.bin) *"
row --val-data '-v 2' $builtin/train.bin 'each val_loss' '*' '*' 'each loss'
row --output '' other 'ls -d out other' out other 'says "loss [0-9.]+"'
row --resume '@from=started' 1 'cat status; steps_of loss' '2 1 2' '0 1 2 3 4'
row --override '@from=started -y 1 -l 1e-2 -k constant' 1 'cat status; each lr' '2 0.0003*' '0 0.0003 * 0.01 0.01'
row --overwrite '@from=started' 1 'cat status; steps_of loss' '2 1 2' '0 1 2 3 4'
row --batch '' 3 "says '[0-9]+ a step'" "$tokens a step" '48 a step'
row --seq-len '' 8 "says '[0-9]+ a step'" "$tokens a step" "$((tokens / 2)) a step" : '< memory activations'
row --total-batch '' $((2 * tokens)) "says '[0-9]+ a step'" "$tokens a step" "$((2 * tokens)) a step"
row --steps "$small" 3 'steps_of loss | tail -n 1' '[1-9]*' 3
row --epochs "$small -x @none" 2 'steps_of loss | tail -n 1' '[1-9]*' '$((2 * was))'
row --stop-after '-k linear -q 0' 2 'each lr; checkpoints' '0.0003 0.000225 0.00015 7.5e-05 4' '0.0003 0.000225 2'
row --optimizer '' lamb 'nth loss 2; weights' '*' '*' 'nth loss 1; each lr'
row --optimizer '' muon 'nth loss 2; weights' '*' '*' 'nth loss 1; each lr'
row --optimizer '--optimizer muon' normuon 'nth loss 2; weights' '*' '*' 'nth loss 1; each lr'
row --init '' zero-out 'nth loss 1; weights' '*' '*' 'each lr'
row --recipe '' in/recipe.flags 'each lr' '*' '0.002 0.002 0.002 0.002' 'nth loss 1'
row --muon-warmup '--optimizer muon -l 1e-2' 4 'nth loss 3; weights' '*' '*' 'nth loss 1'
row --cautious-decay '-l 1e-2 -c 0.5' 1 'weights; nth loss 3' '*' '*' 'nth loss 1' "$norm_rises"
row --cautious-decay '--optimizer muon -l 1e-2 -c 0.5' 1 'weights; nth loss 3' '*' '*' 'nth loss 1' "$norm_rises"
row --adamw-lr '-l 1e-2 -a 1' 1e-3 'weights; nth loss 2' '*' '*' 'nth loss 1; each lr' '> last loss'
if [ $trainer != tune ]; then
    row --ema '-v 2' 0.5 'each ema_val_loss; ls out | grep ema' '' '*' 'each loss; each val_loss'
    row --ema-start '-v 2 --ema 1 -l 1e-2' 3 'each ema_val_loss' '*' '*' 'each loss; each val_loss' '< last ema_val_loss'
    row --keep-best '-v 1 -l 0 -nk 1' 1 checkpoints 4 '1 4' 'each loss; weights'
fi
row --schedule '-q 0.5' $schedule 'each lr' '*' '*' 'nth lr 1'
row --schedule '-q 0.5' constant 'each lr' '*' '0.0003 0.0003 0.0003 0.0003' 'nth loss 1'
row --schedule '-q 0 --poly-power 2' poly 'each lr' '*' '0.0003 0.00016875 7.5e-05 1.875e-05'
row --schedule '-q 0 -x 10' wsd 'each lr' '*' '0.0003 * 0.0003 0.0003 8.78679*e-05'
row --lr '-k constant -a 1' 6e-4 'each lr' '0.0003 *' '0.0006 0.0006 0.0006 0.0006' 'nth loss 1' '< last loss'
row --warmup '-k constant -a 1' 2 'each lr' '0.0003 *' '0.00015 0.0003 0.0003 0.0003' 'nth loss 1' '> last loss'
row --final-lr '-k linear -a 1' 0.5 'each lr' "$(linear "$(D --final-lr)")" "$(linear 0.5)" 'nth loss 1' "$([ "$(D --final-lr)" = 0 ] && echo "<" || echo ">") last loss"
row --poly-power '-k poly -q 0' 2 'each lr' '0.0003 0.000225 0.00015 7.5e-05' '0.0003 0.00016875 7.5e-05 1.875e-05'
row --weight-decay '-l 1e-2' 0.5 'weights; each loss' '*' '*' 'nth loss 1; nth grad_norm 1' "$norm_falls"
row --beta1 '-l 1e-2' 0.5 'nth loss 3; nth loss 4' '*' '*' 'nth loss 1; nth grad_norm 1'
row --beta2 '-l 1e-2' 0.5 'nth loss 3; nth loss 4' '*' '*' 'nth loss 1; nth grad_norm 1'
row --eps '-l 1e-2 -a 1' 0.1 'nth loss 2; nth loss 3' '*' '*' 'nth loss 1; nth grad_norm 1' '> last loss'
row --clip '-l 1e-2 -a 1' 1e-6 'nth loss 2; nth loss 3' '*' '*' 'nth loss 1; nth grad_norm 1' '> last loss'
row --loss-outlier '-x 160 -l 0' 0.001 'skipped | head -n 1' '' '@(129|1[3-6][0-9])'
row --norm-outlier '-x 160 -l 0' 0.001 'skipped | head -n 1' '' '@(129|1[3-6][0-9])'
row --loss-scale '' 1024 'each loss_scale' '' '1024 1024 1024 1024'
row --loss-scale '' 0 'each loss_scale' '' =
row --dropout '-v 4 -a 1 -l 1e-2 -x 20' 0.5 'each loss' '*' '*' 'nth val_loss 1' "$unfit"
case $PROGRAM in
    */fp16/* | */fp32/*) row --fp8 '' 1 'cat status' 0 2 ;;
    *) row --fp8 '' 1 'each loss; memory parameters' '*' '*' 'each lr' ;;
esac
case $PROGRAM in
    */fp16/* | */fp32/*) row --fp8-steps '' 1 results '*' '=' ;;
    *) row --fp8-steps '--fp8 1' 2 'nth loss 4' '*' '*' 'nth loss 2' ;;
esac
case $PROGRAM in
    */fp16/* | */fp32/*) row --fp8-exclude-forward '' . results '*' '=' ;;
    *) row --fp8-exclude-forward '--fp8 1' . 'nth loss 1' '*' '*' ;;
esac
# On the GPU, cuBLASLt's epilogue applies GELU to its input before that is rounded, and the recomputation after.
equal="each loss$([ -n "$is_gpu" ] || echo '; each grad_norm')"
row --recompute '-e L=3,C=32,NH=2,T=32 -x 1 -b 32' 1 'memory activations' '*' '$(less 1)' "$equal"
row --recompute '-e L=3,C=32,NH=2,T=32 -x 1 -b 32' 2 'memory activations' '*' '$(less 1)' "$equal"
row --overfit '-l 0' 1 'count each loss' 4 1 'nth loss 1'
row --shuffle '-l 0' 0 'each loss' '*' '*' 'each lr'
row --seed '-l 0' 7 'each loss; weights' '*' '*' 'each lr'
row --on-nan '-l 1e38' skip 'cat status; checkpoints' '3' '0 4'
row --val-every '' 2 'steps_of val_loss' '0 4' '0 2 4' 'each loss'
row --val-batches '-v 4' 1 'each val_loss' '*' '*' 'each loss'
row --checkpoint-every '' 2 checkpoints 4 '2 4' 'each loss; weights'
row --keep '-n 1' 1 checkpoints '3 4' 4 weights
row --keep-every '-n 1 --keep 1 -x 5' 2 checkpoints 5 '2 4 5' weights
[ $trainer != tune ] || row --evaluate '' 1 'ls -d out; says "^val loss [0-9.]+"' out 'val loss*'
row --profile '' 1 'cat status; ls out/profile' 0 2 'ls -d data'
row --profile '-x 8' 1 'ls -d out/profile' '' out/profile 'each loss; weights'
row --profile-warmup "$profile" 2 "says '[0-9]+ warm-up'" \
    "$(D --profile-warmup) warm-up" '2 warm-up' 'each loss'
if [ -n "$is_gpu" ]; then row --profile-energy "$profile -v 0" 1 "says '^Energy by op'" '' 'Energy by op'
else row --profile-energy "$profile -v 0" 1 'cat status; says "^error: --profile-energy 1 measures a GPU"' 0 '2 error*'; fi
row --mode "$profile" forward 'says "^mode .*"; checkpoints' '* train 8' '* forward'
row --threads '' 2 "says '[0-9]+ CPU threads'" '1 CPU threads' '2 CPU threads' 'each loss; weights'
row --model '-x 1 -b 1 -t 8' L=2,C=8,NH=1 "config $layers" '* 4' '* 2'
row_gpu --master-weights '-e L=2,C=64,NH=2,T=16' 0 'memory optimizer' '*' '$(less 1)'
row_gpu --autotune '-e L=1,C=768,NH=12,T=256,V=300 -b 32 -x 1' 0 "grep -c '\"matmul_plans\": \"\"' out/ckpt/*/trainer.json" 0 1
if [ -n "$is_gpu" ]; then row --graph '-x 6' 1 "says '^graphs: [0-9]+ launched'" '' 'graphs: 4 launched' 'each loss; weights'
else row --graph '' 1 'cat status; says "^error: --graph 1: this is the CPU build"' 0 '2 error*'; fi
case $PROGRAM in
    *fp32*) row_gpu --tf32 '-e L=1,C=128,NH=2,T=64 -b 16' 1 'each loss' '*' '*' ;;
    *) row --tf32 '' 1 results '*' '=' ;;  # other precisions have no products of fp32 operands
esac

row_ranks --timeout '' 100 results '*' '='  # it acts where a rank is lost: ranks.sh
row_ranks --zero "-e L=2,C=64,NH=2,T=16" 1 'memory optimizer' '*' '$(less 1)' 'nth loss 1'
row_ranks --bucket '' 1000 'says "gradients summed [a-z ]+"' \
    'gradients summed bucket by bucket*' 'gradients summed at once*' 'nth loss 1'

if [ $trainer = gpt2 ]; then
    row --doc-mask "$small -b 8" 1 'each loss; each grad_norm' '*' '*' 'each lr'
    row --sample-every '' 2 "says 'sample after step [0-9]+'" \
        'sample after step 4' 'sample after step 2 sample after step 4'
    row --sample-tokens '-s 4' 3 'wc -c <out/sample.txt' '[1-9][0-9][0-9]*' '$(less 2)' 'each loss'
elif [ $trainer = bert ]; then
    lines="-e L=1,C=16,NH=2,T=64,V=261 -i in/small/train.bin -b 1"  # each of its four documents is a sequence
    row --loss-mean "$lines -d 128 --mask-fraction 0.5" micro 'each loss; each grad_norm' '*' '*' 'each lr'
    row --nsp '' 0 'count each nsp_loss' 4 0
    row --mask-fraction '' 0.5 'each loss' '*' '*' 'each lr'
    row --whole-word-masking "$small -b 8" 1 'each loss' '*' '*' 'each lr'
    row --short-sequences '' 0.9 'each loss' '*' '*' sequences
    row --pack "$lines" 3 sequences '1 1 1 1' '@(1 3|3 1) @(1 3|3 1)' 'each lr'
    row --phase2 '-e @none -x 2 -b 1 -t 16' in/started/out "says '\| steps 1 to 2|in/started/out/ckpt/0*2 '" \
        '| steps 1 to 2' 'in/started/out/ckpt/00000002 *'
    row --sample-every '' 2 "says 'sample after step [0-9]+'" \
        'sample after step 4' 'sample after step 2 sample after step 4'
fi
if [ $trainer != tune ]; then
    row --hellaswag '--choices in/set.bin' 2 'steps_of set_acc' '' '2 4' 'each loss'
    row --choices '-h 4' in/set.bin 'cat status; says "set acc"' 2 '0 set acc'
fi
if [ $trainer = tune ]; then
    class='--task classify -i in/texts.tsv -j in/texts.tsv'
    row --task '-i in/texts.tsv' answer 'cat status; config problem_type' '0 "problem_type": "single_label_classification"' 2
    row --labels "$class" 3 "grep -o 'LABEL_[0-9]' out/config.json | sort -u" \
        'LABEL_0 LABEL_1' 'LABEL_0 LABEL_1 LABEL_2'
    row --stride '--task answer -i in/answers.json -j @none -e L=1,C=16,NH=2,T=256 -x @none -b 1' 16 \
        'steps_of loss | tail -n 1' '[1-9]*' '$(less 1)'
    row --predictions "$class -e in/classifier --evaluate 1" said.tsv 'wc -l <said.tsv' '' '[1-9]*' 'says "val loss .*"'
fi
fi

# ---------------------------------------------------------------------------------------------------------
# Run all, then judge the rows

export TIMEFORMAT=%U
printf '%s\n' "${runs[@]}" | xargs -P "$(($(nproc) + 1))" -I{} bash -c 'cd {} && . ./command'

changes() { # RUN OTHER: the first line in which their output differs
    diff <(cd "$1" && everything) <(cd "$2" && everything) | grep -a -m1 '^[<>]' | cut -c 1-200
}
# An empty --fill, --embed, --chat or --explain, as from an unset shell variable, is refused: it does not ask for training.
is_refused() { [[ "${flags[$1]}" = --@(fill|embed|chat|explain?(-file)) ]] && [ "$(cat "${with[$1]}/status")" = 2 ]; }
judge() { # INDEX: why the row does not hold, or nothing
    local observable=${observables[$1]} was is kept_was kept_is pattern
    local given="its default, ${default[${flags[$1]}]:-empty}, given"
    grep -ls 'Sanitizer\|runtime error' "${without[$1]}/stderr" "${with[$1]}/stderr" "${changed[$1]}/stderr" && return
    pattern=$(changes "${without[$1]}" "${with[$1]}")
    [ -z "$pattern" ] || is_refused "$1" || { echo "$given, changes the run: $pattern"; return; }
    was=$(observed "${without[$1]}" "$observable") is=$(observed "${changed[$1]}" "$observable")
    # shellcheck disable=SC2053
    [[ $was == ${before[$1]} ]] || { echo "without it '$observable' is '$was', not '${before[$1]}'"; return; }
    # A failed run has less output, which could pass for the effect.
    if [[ $observable != *status* && $(cat "${without[$1]}/status") = 0 && $(cat "${changed[$1]}/status") != 0 ]]; then
        echo "${values[$1]} ends with status $(cat "${changed[$1]}/status"): $(tail -n 1 "${changed[$1]}/stderr")"
        return
    fi
    case ${after[$1]} in
        =) [ "$is" = "$was" ] || echo "${values[$1]} changes '$observable' from '$was' to '$is'"; return ;;
        *'$'*) pattern=$(eval "echo \"${after[$1]}\"") ;;
        *) pattern=${after[$1]} ;;
    esac
    [ "$is" != "$was" ] || { echo "${values[$1]} changes nothing: '$observable' stays '$was'"; return; }
    # shellcheck disable=SC2053
    [[ $is == $pattern ]] || { echo "with ${values[$1]} '$observable' is '$is', not '$pattern'"; return; }
    kept_was=$(observed "${without[$1]}" "${keeps[$1]}") kept_is=$(observed "${changed[$1]}" "${keeps[$1]}")
    [ "$kept_was" = "$kept_is" ] || { echo "${values[$1]} changes '${keeps[$1]}' from '$kept_was' to '$kept_is'"; return; }
    [ -n "${orders[$1]}" ] || return
    was=$(observed "${without[$1]}" "${orders[$1]:2}") is=$(observed "${changed[$1]}" "${orders[$1]:2}")
    awk -v was="$was" -v is="$is" "BEGIN { exit !(was != \"\" && is != \"\" && is + 0 ${orders[$1]:0:1} was + 0) }" ||
        echo "${values[$1]}: '${orders[$1]:2}' is $is, not ${orders[$1]:0:1} $was"
}
for i in "${!flags[@]}"; do verdict "${flags[i]} ${values[i]}" "$(judge "$i")"; done
[ $trainer != tune ] || names=("${only[@]}")
for name in "${names[@]}"; do [ -n "${has_row[$name]:-}" ] || fail "$name" 'has no row in the table'; done
finish
