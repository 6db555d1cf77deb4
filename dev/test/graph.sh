#!/usr/bin/env bash
# Training with --graph 1 against the same run with --graph 0: every line of the log but times, the weights and the
# optimizer's state, bit for bit.
#
#     bash dev/test/graph.sh PROGRAM          a GPU trainer, or one that the emulator runs (make build/emulated/bf16/train_bert)
#
# The runs have what may change from step to step: dropout, a schedule, steps of one to three micro-batches, attention
# over growing parts of a sequence or packed rows of any number, skipped outliers, and between the steps validations,
# checkpoints and samples. Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

trainer=gpt2
[[ $PROGRAM != *bert* ]] || trainer=bert

# What a run left, but for times.
left() { # OUT
    sed -E 's/, "(ms|tok_s|mfu|seq_s|joules|mhz)": [^,}]+//g; /"checkpoint_ms"/d; s/"(output|graph)": "?[^,]*,//g' "$1/log.jsonl"
    (cd "$1" && find . -name '*.safetensors' -exec cksum {} + | sort -k 3)
}
graphs() { grep '^graphs: ' "$work/stdout" | tail -n 1; }
# A run without and with graphs. More than MOST of 10 graphs may not be instantiated.
compare() { # NAME MOST FLAGS...
    local name=$1 most=$2 launched made why=
    shift 2
    run "$@" --graph 0 -o plain
    [ "$status" = 0 ] || why="without graphs: status $status, $(tail -n 1 "$work/stderr")"
    [ -z "$(graphs)" ] || why=${why:-"without graphs: $(graphs)"}
    LLMC_TEST_LATE=1 run "$@" --graph 1 -o graph
    [ "$status" = 0 ] || why=${why:-"with graphs: status $status, $(tail -n 1 "$work/stderr")"}
    read -r launched made < <(graphs | sed -E 's/graphs: ([0-9]+) launched, ([0-9]+) .*/\1 \2/')
    [ "${launched:-0}" -gt 0 ] || why=${why:-'no graph was launched'}
    left plain >plain.txt
    left graph >graph.txt
    # The first lines of each side.
    cmp -s plain.txt graph.txt ||
        why=${why:-"they differ: $(diff plain.txt graph.txt | awk '/^[<>]/ && n[$1]++ < 2' | cut -c 1-200 | tr '\n' ' ')"}
    [ "$((10 * ${made:-0}))" -le "$((most * ${launched:-0}))" ] || why=${why:-"$(graphs)"}
    verdict "$name${launched:+ ($launched graphs, $made instantiated)}" "$why"
}

small="-e L=2,C=64,NH=2,T=32 -b 2 -t 32 --dropout 0.1 -l 1e-3 -u 4 -q 0.1 --autotune 0 --overwrite 1"
between="-v 7 -m 2 -s 13 -n 11 --keep 0"
alone="$small -v 0 -s 0 -n 0"
if [ $trainer = gpt2 ]; then
    between="$between -g 3"
    # The window of outliers takes 128 steps.
    compare 'outliers are skipped' 2 ${alone/L=2/L=1} -x 150 -sl 0.3 -sg 0.3
    grep -q '"skipped": true' graph/log.jsonl && why= || why='none was skipped'
    verdict 'there were outliers' "$why"
    compare 'steps of three micro-batches, validations, checkpoints, samples' 3 $small $between -x 50 -d 192
    compare 'average of the weights' 3 $small $between -x 50 --ema 0.9 --ema-start 20
    compare 'Muon, recomputation' 3 $alone -x 12 --optimizer muon --muon-warmup 8 -r 2
    compare 'weights in bf16 alone, a dynamic loss scale' 3 $alone -x 12 -w 0 --loss-scale 65536
    # Heads of 4 channels, so scores in memory: after documents of four tokens come whole sequences, and scratch grows in a captured step.
    bytes() { printf '%b' "$(awk -v n="$1" '{
        for (i = 1; i <= NF; i++) for (b = 0; b < n; b++) { printf "\\0%03o", $i % 256; $i = int($i / 256) }
    }')"; }
    {
        echo 20240520 1 1537 | bytes 4
        head -c 1012 /dev/zero
        awk 'BEGIN { for (i = 0; i < 1537; i++) printf "%d ", (i < 768 && i % 4 == 0) ? 256 : i % 97 }' | bytes 2
    } >documents.bin
    compare 'scratch grows' 5 ${alone/L=2,C=64,NH=2,T=32 -b 2 -t 32/L=1,C=64,NH=16,T=128,V=257 -b 1} -x 12 -i documents.bin \
        --shuffle 0 --doc-mask 1
else
    # Rows and masked tokens differ from step to step.
    compare 'LAMB, packed rows, validations, checkpoints, samples' 3 $small $between -x 50 --optimizer lamb --pack 3
    compare 'steps of three micro-batches' 3 $alone -x 30 -d 192 --short-sequences 0.5
    # Fine-tuning, where it has been built: texts and questions of any length.
    tune=${PROGRAM/%train_bert*/finetune_bert${PROGRAM##*train_bert}}
    if [ -x "$tune" ]; then
        for i in {10..59}; do printf '%d\t%s\n' $((i % 2)) "the dog saw $((i * i)) cats $(printf 'and %.0s' $(seq $((i % 9))))"; done >texts.tsv
        {
            echo '{"data": ['
            for i in {10..59}; do
                printf '{"paragraphs": [{"context": "%s has %d cats", "qas": [{"id": "%d", "question": "who?", "answers": [{"text": "has", "answer_start": %d}]}]}]}%s\n' \
                    "$(printf 'tom %.0s' $(seq $((1 + i % 9))))" $i $i $((4 * (1 + i % 9) + 1)) "$([ $i = 59 ] || echo ,)"
            done
            echo ']}'
        } >questions.json
        cp data/builtin/bert/vocab.txt data/builtin/bert/tokenizer_config.json .
        compare 'a classifier, LAMB' 3 $alone -x 30 -d 128 --task classify -i texts.tsv -j texts.tsv --optimizer lamb
        compare 'answers, validations' 3 ${small//32/128} -x 30 -v 7 -n 11 --keep 0 -s 0 --task answer -i questions.json -j questions.json --stride 8
    else
        skip 'fine-tuning' "$tune has not been built"
    fi
fi
case $PROGRAM in
    *fp16* | *fp32*) ;;
    *)
        compare 'fp8' 3 $alone -x 24 --fp8 1
        compare 'fp8, then bf16' 6 $alone -x 30 --fp8 1 --fp8-steps 20
        ;;
esac

# A resumed run goes on with graphs.
run $alone -x 20 --graph 1 -o straight
run $alone -x 20 --graph 1 --stop-after 9 -o resumed
run -y 1 -o resumed
[ -n "$(graphs)" ] && why= || why="no graph after the resume: $(tail -n 1 "$work/stderr")"
cmp -s straight/model.safetensors resumed/model.safetensors || why=${why:-'other weights'}
verdict 'a resumed run' "$why"

# What cannot be captured is refused.
run $alone -x 16 --graph 1 --profile 2 -o refused
[ "$status" = 2 ] && grep -q '^error: --graph 1: --profile' "$work/stderr" && why= || why="status $status, $(tail -n 1 "$work/stderr")"
verdict '--graph 1 with --profile is refused' "$why"
finish
