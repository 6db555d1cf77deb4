#!/usr/bin/env bash
# Record a fixed set of CPU runs, so that two versions of the sources can be compared bit for bit. Before a change that
# should leave results as they are:
#
#     bash dev/record_runs.sh data DATA                        once: training data that does not follow the sources
#     bash dev/record_runs.sh record PROGRAMS DATA BEFORE      PROGRAMS: the folder of train_gpt2 and train_bert
#     bash dev/record_runs.sh record PROGRAMS DATA AFTER [BEFORE]   resumes BEFORE's checkpoints too
#     bash dev/record_runs.sh compare BEFORE AFTER
#
# For each run, NAME.txt holds what is compared: losses, norms and learning rates of log.jsonl, the SHA-256 of every
# .safetensors file of the last checkpoint, and what was printed to stdout where that is the result. trainer.json is compared
# key by key, without retired flags. Needs mpirun and python3. `compare` exits with 1 where anything differs.
set -eu
usage() { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }

make_data() {
    mkdir -p "$1/tasks"
    make -s build/test_corpus/builtin/train.bin
    cp -r build/test_corpus/builtin "$1"
    cp "$1"/builtin/bert/{vocab.txt,tokenizer_config.json} "$1/tasks"
    python3 - "$1/tasks" <<'END'
import json, random, sys

draw = random.Random(1)
for name, count in (("train", 600), ("val", 150)):
    with open(f"{sys.argv[1]}/{name}.tsv", "w") as f:
        for _ in range(count):
            label = draw.randrange(3)
            letters = "abcdefghijklmnopqrstuvwx"[8 * label:8 * label + 8]
            f.write("low middle top".split()[label] + "\t" + "".join(draw.choices(letters, k=draw.randrange(5, 25))) + "\n")
for name, count in (("train", 300), ("val", 60)):
    paragraphs = []
    for i in range(count):
        words = ["".join(draw.choices("abcdefgh", k=draw.randrange(2, 6))) for _ in range(draw.randrange(4, 24))]
        at = draw.randrange(len(words))
        words[at] = draw.choice("ABCD") + words[at] + draw.choice("1234")
        answer = {"text": words[at], "answer_start": len(" ".join(words[:at] + [""]))}
        paragraphs.append({"context": " ".join(words), "qas": [{"id": f"{name}{i}", "question": "which?", "answers": [answer]}]})
    json.dump({"version": "1.1", "data": [{"title": "words", "paragraphs": paragraphs}]}, open(f"{sys.argv[1]}/{name}.json", "w"))
END
}

# Write what is compared of the run in OUT/NAME, and of its stdout where it is named.
keep() { # NAME [stdout]
    local last
    {
        [ ! -f "$1/log.jsonl" ] || grep -E '"(loss|val_loss|val_accuracy|val_f1)"' "$1/log.jsonl" |
            sed -E 's/, "(ms|tok_s|mfu|seq_s|joules|mhz)": [^,}]*//g'
        last=$(ls -d "$1"/ckpt/0* 2>/dev/null | tail -n 1) || true
        [ -z "$last" ] || (cd "$last" && sha256sum -- *.safetensors)
        [ -z "$last" ] || cp "$last/trainer.json" "$1.trainer.json"
        [ $# -eq 1 ] || sed -E 's/[0-9.]+ (tokens\/s|seconds|ms)//g' "$1.stdout"
    } >"$1.txt"
}
run() { # NAME PROGRAM FLAG...
    local name=$1 program=$2
    shift 2
    "$programs/$program" "$@" >"$name.stdout" 2>"$name.stderr" || { echo "$name failed: $(tail -n 1 "$name.stderr")"; exit 1; }
}
ranks() { # COUNT NAME PROGRAM FLAG...
    local count=$1 name=$2 program=$3
    shift 3
    mpirun --oversubscribe --bind-to none -np "$count" "$programs/$program" "$@" >"$name.stdout" 2>"$name.stderr" ||
        { echo "$name failed: $(tail -n 1 "$name.stderr")"; exit 1; }
}

record() { # PROGRAMS DATA OUT [BEFORE]
    programs=$(realpath "$1")
    local data tasks=finetune_bert text=use_gpt2 words=use_bert before=${4:+$(realpath "$4")} small n z
    data=$(realpath "$2")
    # The trainers of earlier versions did more.
    [ -x "$programs/finetune_bert" ] || tasks=train_bert
    [ -x "$programs/use_gpt2" ] || text=train_gpt2 words=train_bert
    export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 LC_ALL=C
    mkdir -p "$3" && cd "$3" && ln -sfn "$data" data
    local gpt2=(train_gpt2 -e L=3,C=64,NH=4,T=64 -x 20 -v 10 -m 4 -s 0 -n 0)
    local bert=(train_bert -e L=3,C=64,NH=4,T=64 -x 20 -v 10 -m 4 -s 0 -n 0)

    run gpt2_adamw "${gpt2[@]}" -b 4 --dropout 0.1 -c 0.1 -o gpt2_adamw
    run gpt2_lamb "${gpt2[@]}" --optimizer lamb -b 2 -d 512 -r 2 -l 1e-2 -k wsd -o gpt2_lamb
    run gpt2_documents "${gpt2[@]}" -b 4 --doc-mask 1 --dropout 0.1 -r 1 -o gpt2_documents
    run gpt2_untied train_gpt2 -e L=2,C=48,NH=3,T=64,V=300,tied=0 -b 3 -x 20 -v 0 -s 0 -n 5 -sl 4 -sg 4 --shuffle 0 -o gpt2_untied
    run gpt2_fp8 "${gpt2[@]}" -b 2 -d 512 --fp8 1 --fp8-steps 18 --dropout 0.1 -r 2 -o gpt2_fp8
    run gpt2_text $text -e gpt2_adamw --generate 60 --samples 3 --prompt 'the ' --temperature 0.9 --top-k 40
    run bert_adamw "${bert[@]}" -b 4 --dropout 0.1 -r 2 -o bert_adamw
    run bert_lamb "${bert[@]}" --optimizer lamb -b 2 -d 512 --pack 2 --whole-word-masking 1 -o bert_lamb
    run bert_phase2 train_bert --phase2 bert_lamb --optimizer lamb -b 2 -t 48 -x 10 -v 0 -s 0 -n 0 -o bert_phase2
    run bert_fp8 "${bert[@]}" -b 4 --fp8 1 --fp8-exclude-forward self.value -o bert_fp8
    run bert_fill $words -e bert_adamw --fill 'th[MASK] qu[MASK]ck'
    small=(-e L=1,C=32,NH=2,T=128 -n 0 -l 3e-3 -u 10 -x 30 -v 15)
    run classify "$tasks" --task classify "${small[@]}" --labels 3 -i "$data/tasks/train.tsv" -b 16 -o classify
    run classify_said "$tasks" --task classify -e classify -j "$data/tasks/val.tsv" --evaluate 1 --predictions classify.tsv
    run answer "$tasks" --task answer "${small[@]}" --stride 16 -i "$data/tasks/train.json" -b 8 -o answer
    run answer_said "$tasks" --task answer -e answer -j "$data/tasks/val.json" --stride 16 --evaluate 1 --predictions answer.json
    for n in 1 2 4; do
        for z in 0 1; do
            ranks $n "gpt2_ranks$n$z" "${gpt2[@]}" -b 2 -d 512 --dropout 0.1 -z $z --bucket 0 -o "gpt2_ranks$n$z"
            ranks $n "bert_ranks$n$z" "${bert[@]}" -b 2 -d 512 --dropout 0.1 -z $z -o "bert_ranks$n$z"
            keep "gpt2_ranks$n$z" && keep "bert_ranks$n$z"
        done
    done
    # Stopped runs, which are resumed here and, later, by another version.
    run gpt2_stopped "${gpt2[@]}" -b 4 --dropout 0.1 --stop-after 11 -o gpt2_stopped
    run bert_stopped "${bert[@]}" -b 4 --dropout 0.1 --stop-after 11 -o bert_stopped
    run classify_stopped "$tasks" --task classify "${small[@]}" --labels 3 -i "$data/tasks/train.tsv" -b 16 --stop-after 11 -o classify_stopped
    for n in gpt2 bert classify; do
        rm -rf "${n}_resumed" && cp -r "${before:-.}/${n}_stopped" "${n}_resumed"
    done
    run gpt2_resumed train_gpt2 -y 1 -o gpt2_resumed
    run bert_resumed train_bert -y 1 -o bert_resumed
    run classify_resumed "$tasks" -y 1 -o classify_resumed
    for n in gpt2_{adamw,lamb,documents,untied,fp8,resumed} bert_{adamw,lamb,phase2,fp8,resumed} classify answer classify_resumed; do
        keep "$n"
    done
    for n in gpt2_text bert_fill classify_said answer_said; do keep "$n" stdout; done
    sha256sum classify.tsv answer.json >predictions.txt
    ls ./*.txt | wc -l
}

compare() { # BEFORE AFTER
    local differs=0 file
    for file in "$1"/*.txt; do
        cmp -s "$file" "$2/${file##*/}" || { differs=1; echo "${file##*/} differs"; diff "$file" "$2/${file##*/}" | head -n 4; }
    done
    python3 - "$1" "$2" "$(dirname "$0")/../llmc/base/flags_retired.h" <<'END' || differs=1
import glob, json, os, re, sys

def flat(value, at=""):
    if isinstance(value, dict):
        return {k: v for name in value for k, v in flat(value[name], f"{at}.{name}").items()}
    return {at: value}

rows = open(sys.argv[3]).read().partition("FLAGS_RETIRED[] = {")[2].partition("};")[0]
retired = {f".settings.{name}" for name in re.findall(r'^ *{[^,]*, "--([^"]*)"', rows, re.M)}
retired.add(".best.waited")  # state of --patience
CHANGED = {(".settings.loss-scale", "auto", -1), (".settings.adamw-lr", None, 0), (".settings.graph", "0", 0)}  # values of earlier versions, and what they are read as
differs = 0
for path in sorted(glob.glob(sys.argv[1] + "/*.trainer.json")):
    a, b = (flat(json.load(open(os.path.join(d, os.path.basename(path))))) for d in sys.argv[1:3])
    # A resumed run's settings name where it was started; matmul_plans are the machine's.
    found = [k for k in sorted((a.keys() | b.keys()) - retired) if a.get(k) != b.get(k) and (k, a.get(k), b.get(k)) not in CHANGED]
    differs |= bool(found)
    for k in found:
        print(os.path.basename(path), k, a.get(k, "absent"), "->", b.get(k, "absent"))
sys.exit(differs)
END
    [ $differs -eq 0 ] && echo "$(ls "$1"/*.txt | wc -l) records are the same"
}

case ${1:-} in
    data) [ $# -eq 2 ] || usage; make_data "$2" ;;
    record) [ $# -ge 4 ] && [ $# -le 5 ] || usage; shift; record "$@" ;;
    compare) [ $# -eq 3 ] || usage; compare "$2" "$3" ;;
    *) usage ;;
esac
