#!/usr/bin/env bash
# Fine-tuning: classes of texts, and answers in contexts, from files to scores.
#
# What is refused is in refuse.txt, what must be the same in equal.txt.
#
#     bash dev/test/tasks.sh PROGRAM          finetune_bert, from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
python=${PYTHON:-python3}

# Examples are next to the built-in vocabulary, whose tokens are bytes.
d=$work/tasks
mkdir "$d"
cp data/builtin/bert/vocab.txt data/builtin/bert/tokenizer_config.json "$d"
RUN=(-n 0 -l 3e-3 -u 10)
SMALL=(-e L=1,C=32,NH=2,T=64 "${RUN[@]}")
field() { sed -nE "s/.*\"$1\": ([0-9.e+-]+).*/\\1/p" "$2" | tail -n 1; }  # NAME LOG
at_least() { awk -v x="$1" -v least="$2" 'BEGIN { exit !(x != "" && x >= least) }'; }

# ---------------------------------------------------------------------------------------------------------
# Classes: letters of the first, second or last third of the alphabet

texts() { # COUNT SEED: label and text
    awk -v count="$1" -v seed="$2" 'BEGIN {
        srand(seed)
        split("low middle top", name, " ")
        for (i = 0; i < count; i++) {
            class = int(3 * rand())
            text = ""
            for (n = 5 + int(20 * rand()); n > 0; n--) text = text substr("abcdefghijklmnopqrstuvwx", 8 * class + 1 + int(8 * rand()), 1)
            print name[class + 1] "\t" text
        }
    }'
}
texts 600 1 >"$d/train.tsv"
texts 150 2 >"$d/val.tsv"
CLASSIFY=(--task classify "${SMALL[@]}")  # and the files, --labels and -b
TRAIN=("${CLASSIFY[@]}" --labels 3 -i "$d/train.tsv")
run "${TRAIN[@]}" -b 16 --epochs 4 -v 50 -o "$box/classes"
why=$(ended_with 0)
[ -n "$why" ] || [ ! -s "$work/stderr" ] || why="stderr is not empty: $(head -n 1 "$work/stderr")"
[ "$(grep -c '"loss"' "$box/classes/log.jsonl")" -eq 150 ] || why=${why:-'four epochs of 600 examples are not 150 steps of 16'}
accuracy=$(field val_accuracy "$box/classes/log.jsonl") f1=$(field val_f1 "$box/classes/log.jsonl")
at_least "$accuracy" 0.95 && at_least "$f1" 0.95 || why=${why:-"accuracy '$accuracy', F1 '$f1', not 0.95"}
verdict 'three classes are learnt' "$why"
why=
grep -q '"BertForSequenceClassification"' "$box/classes/config.json" || why='another architecture'
grep -q '"id2label": {"0": "low", "1": "middle", "2": "top"}, "label2id": {"low": 0, "middle": 1, "top": 2}' "$box/classes/config.json" ||
    why=${why:-'no names of classes'}
[ -s "$box/classes/vocab.txt" ] || why=${why:-'no vocabulary'}
verdict 'the saved model names its classes' "$why"

# The names are the model's now; 0 labels are as many as it has.
run --task classify -e "$box/classes" -j "$d/val.tsv" --evaluate 1 -b 7 --predictions "$work/said.tsv"
why=$(ended_with 0)
grep -Eq "^val loss [0-9.]+ \| accuracy ${accuracy}[.0-9]*, F1 ${f1}[.0-9]* \(150 examples\)$" "$work/stdout" ||
    why=${why:-"'$(cat "$work/stdout")', not accuracy $accuracy and F1 $f1"}
verdict '--evaluate 1 of the saved model, in other batches' "$why"
why=
[ "$(head -n 1 "$work/said.tsv")" = $'prediction\tname\tprobability' ] || why='no header'
right=$(paste <(cut -f 1 "$d/val.tsv") <(tail -n +2 "$work/said.tsv" | cut -f 2) | awk '$1 == $2 { n++ } END { printf "%.6f", n / NR }')
awk -v a="$right" -v b="$accuracy" 'BEGIN { exit !(a - b < 1e-5 && b - a < 1e-5) }' || why=${why:-"$right of them are right, not $accuracy"}
verdict '--predictions' "$why"
run --task classify --labels 3 -e "$box/classes" -i "$d/train.tsv" -j "$d/val.tsv" --evaluate 1
verdict '--labels as the model has' "$(ended_with 0)"

# The first 3 micro-batches of 7; without -m there are more than the 20 of other validations.
SAID=(--task classify -e "$box/classes" --evaluate 1 -b 7)
run "${SAID[@]}" -j "$d/val.tsv" -m 3 --predictions "$work/few.tsv"
why=$(ended_with 0)
cmp -s "$work/few.tsv" <(head -n 22 "$work/said.tsv") || why=${why:-'other predictions, or not 21 of them'}
right=$(paste <(cut -f 1 "$d/val.tsv") <(tail -n +2 "$work/few.tsv" | cut -f 2) | head -n 21 | awk '$1 == $2 { n++ } END { printf "%.6f", n / NR }')
grep -q " accuracy $right, .*(21 of 150 examples; -m 0 takes all)$" "$work/stdout" || why=${why:-"'$(cat "$work/stdout")', but $right of 21 are right"}
verdict 'classify: -m' "$why"

# The same texts without their classes.
unlabelled() { # NAME FILE
    local why
    run "${SAID[@]}" -j "$2" --predictions "$work/unlabelled.tsv"
    why=$(ended_with 0)
    [ "$(cat "$work/stdout")" = 'nothing to compare with: the class is predicted of 150 texts' ] || why=${why:-"said '$(cat "$work/stdout")'"}
    cmp -s "$work/unlabelled.tsv" "$work/said.tsv" || why=${why:-'other predictions'}
    verdict "no labels: $1" "$why"
}
cut -f 2 "$d/val.tsv" >"$d/texts.tsv"
{ echo $'index\tsentence'; awk '{ print NR "\t" $1 }' "$d/texts.tsv"; } >"$d/index.tsv"
unlabelled 'lines of text' "$d/texts.tsv"
unlabelled 'a header' "$d/index.tsv"

# A prediction for every line, also for an empty one.
sed '1s/$/\n/;70s/$/\n\r/' "$d/texts.tsv" >"$d/gaps.tsv"
run "${SAID[@]}" -j "$d/gaps.tsv" --predictions "$work/gaps.tsv"
why=$(ended_with 0)
cmp -s <(sed '3d;73d' "$work/gaps.tsv") "$work/said.tsv" || why=${why:-'not those of the lines'}
[ "$(sed -n '3p;73p' "$work/gaps.tsv" | uniq | wc -l)" -eq 1 ] || why=${why:-'empty texts are not alike'}
verdict 'no labels: empty lines' "$why"
# What is accumulated over micro-batches is the mean over the step's examples, however it is cut.
run "${TRAIN[@]}" -x 3 -b 8 -d $((16 * 64)) -v 0 -o "$box/micro"
run "${TRAIN[@]}" -x 3 -b 16 -v 0 -o "$box/whole"
why=
for step in 1 2 3; do
    a=$(sed -nE "s/^\{\"step\": $step, \"loss\": ([0-9.]+).*/\1/p" "$box/micro/log.jsonl")
    b=$(sed -nE "s/^\{\"step\": $step, \"loss\": ([0-9.]+).*/\1/p" "$box/whole/log.jsonl")
    awk -v a="$a" -v b="$b" 'BEGIN { exit !(a != "" && (a - b) ^ 2 < 1e-9) }' || why="step $step: losses '$a' and '$b'"
done
verdict 'classify: two micro-batches' "$why"

# Pairs of texts; dev/test/examples.c has the forms of files.
FORM=("${CLASSIFY[@]}" --labels 3 -b 16 -v 0)
awk -F '\t' '{ print $1 "\t" $2 "\tzzz" }' "$d/train.tsv" >"$d/pairs.tsv"
accepted 'form: pairs' "${FORM[@]}" -i "$d/pairs.tsv" -x 2 -o ''
awk -F '\t' '{ print $1 "\t" $2 $2 $2 $2 $2 "\t" $2 $2 $2 $2 }' "$d/train.tsv" >"$d/long.tsv"
accepted 'form: pairs that are too long' "${FORM[@]}" -i "$d/long.tsv" -x 2 -o ''

# ---------------------------------------------------------------------------------------------------------
# Numbers: how many of a pair's letters are a, less how many are b, in STS-B's columns

rated() { # COUNT SEED
    awk -v count="$1" -v seed="$2" 'BEGIN {
        srand(seed)
        print "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
        for (i = 0; i < count; i++) {
            score = 0
            text[1] = text[2] = ""
            for (k = 1; k < 3; k++)
                for (n = 3 + int(6 * rand()); n > 0; n--) {
                    letter = substr("abcdef", 1 + int(6 * rand()), 1)
                    text[k] = text[k] letter
                    score += (letter == "a") - (letter == "b")
                }
            print i "\tmain\tmade\t2012\t" i "\tnone\tnone\t" text[1] "\t" text[2] "\t" score / 2
        }
    }' | sed 's/$/\r/'
}
rated 600 1 >"$d/rated.tsv"
rated 100 2 >"$d/rated-val.tsv"
RATE=(--task classify --labels 1 "${SMALL[@]}" -i "$d/rated.tsv" -b 16)
run "${RATE[@]}" -j "$d/rated-val.tsv" --epochs 5 -v 1000 -o "$box/rated"
why=$(ended_with 0)
pearson=$(field val_pearson "$box/rated/log.jsonl")
at_least "$pearson" 0.9 && at_least "$(field val_spearman "$box/rated/log.jsonl")" 0.9 || why=${why:-"Pearson '$pearson', Spearman '$(field val_spearman "$box/rated/log.jsonl")', not 0.9"}
grep -q '"problem_type": "regression", "id2label": {"0": "LABEL_0"}' "$box/rated/config.json" || why=${why:-'no "regression" in config.json'}
grep -Eq 'training tokens, about (3|2)[0-9][0-9] a step' "$work/stdout" || why=${why:-"tokens of a step: $(grep -o '[a-z]* [0-9]* a step' "$work/stdout")"}
verdict 'numbers are learnt' "$why"
RATED=(--task classify -e "$box/rated" --evaluate 1 -b 7 --predictions "$work/rated")
run "${RATED[@]}" -j "$d/rated-val.tsv"
why=$(ended_with 0)
grep -Eq "^val loss [0-9.]+ \| Pearson ${pearson}[.0-9]*, Spearman [0-9.]+ \(100 examples\)$" "$work/stdout" || why=${why:-"'$(cat "$work/stdout")'"}
loss=$(paste <(tail -n +2 "$d/rated-val.tsv" | cut -f 10) <(tail -n +2 "$work/rated") | awk '{ s += ($1 - $2) ^ 2 } END { printf "%.4f", s / NR }')
awk -v a="$loss" -v b="$(sed -nE 's/^val loss ([0-9.]+).*/\1/p' "$work/stdout")" 'BEGIN { exit !((a - b) ^ 2 < 1e-7) }' ||
    why=${why:-"the predictions' mean squared error is $loss: '$(cat "$work/stdout")'"}
verdict 'numbers: --evaluate 1, --predictions' "$why"
cp "$work/rated" "$work/rated-said"
cut -f -9 "$d/rated-val.tsv" >"$d/rated-test.tsv"
run "${RATED[@]}" -j "$d/rated-test.tsv"
why=$(ended_with 0)
[ "$(cat "$work/stdout")" = 'nothing to compare with: the number is predicted of 100 texts' ] || why=${why:-"said '$(cat "$work/stdout")'"}
cmp -s "$work/rated" "$work/rated-said" || why=${why:-'other predictions'}
verdict 'numbers: a file without scores' "$why"
# num_labels by hand, without the names that transformers writes.
cp -r "$box/rated" "$d/by-hand"
sed -i 's/"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}/"num_labels": 1/' "$d/by-hand/config.json"
run --task classify -e "$d/by-hand" -i "$d/rated.tsv" -b 16 -x 1 -v 0 -n 0 -o "$box/by-hand"
why=$(ended_with 0)
grep -q '"num_labels": 1' "$d/by-hand/config.json" || why=${why:-'this test says nothing'}
grep -q '"problem_type": "regression"' "$box/by-hand/config.json" || why=${why:-'is not a regression'}
verdict 'numbers: num_labels 1' "$why"

# ---------------------------------------------------------------------------------------------------------
# Answers: the word that begins with a capital letter and ends with a digit

if "$python" -c '' 2>/dev/null; then
    "$python" - "$d" <<'END'
import json, random, sys

def made(count, seed):
    draw, paragraphs = random.Random(seed), []
    for i in range(count):
        words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randrange(2, 6))) for _ in range(draw.randrange(4, 24))]
        at = draw.randrange(len(words))
        words[at] = draw.choice("ABCD") + words[at] + draw.choice("1234")
        qa = {"id": f"{seed}-{i}", "question": "which?", "answers": [{"text": words[at], "answer_start": len(" ".join(words[:at] + [""]))}]}
        paragraphs.append({"context": " ".join(words), "qas": [qa]})
    return {"version": "1.1", "data": [{"title": "words", "paragraphs": paragraphs}]}

for name, count, seed in (("train", 600, 1), ("val", 60, 2)):
    json.dump(made(count, seed), open(f"{sys.argv[1]}/{name}.json", "w"))
END
    ANSWER=(--task answer -e L=1,C=32,NH=2,T=128 -i "$d/train.json" --stride 16 -b 16 "${RUN[@]}")
    run "${ANSWER[@]}" --epochs 4 -v 1000 -o "$box/answers"
    why=$(ended_with 0)
    exact=$(field val_exact_match "$box/answers/log.jsonl") f1=$(field val_f1 "$box/answers/log.jsonl")
    at_least "$exact" 80 && at_least "$f1" 80 || why=${why:-"exact match '$exact', F1 '$f1', not 80"}
    grep -q '"BertForQuestionAnswering"' "$box/answers/config.json" || why=${why:-'another architecture'}
    verdict 'answers are learnt' "$why"
    run --task answer -e "$box/answers" -j "$d/val.json" --evaluate 1 --stride 16 -b 5 --predictions "$work/said.json"
    why=$(ended_with 0)
    right=$("$python" - "$d/val.json" "$work/said.json" <<'END'
import json, sys

said = json.load(open(sys.argv[2]))
gold = {qa["id"]: qa["answers"][0]["text"] for p in json.load(open(sys.argv[1]))["data"][0]["paragraphs"] for qa in p["qas"]}
assert said.keys() == gold.keys()
print(f"{100 * sum(said[i].lower() == gold[i].lower() for i in gold) / len(gold):.4f}")
END
    )
    grep -Eq "exact match $right, F1 [0-9.]+ \(60 questions\)$" "$work/stdout" || why=${why:-"'$(cat "$work/stdout")', but $right are right"}
    verdict 'answer: --evaluate 1, --predictions' "$why"

    # The first 4 micro-batches of 5 windows, of which the last question may have more.
    SAYS=(--task answer -e "$box/answers" --evaluate 1 --stride 16 -b 5)
    run "${SAYS[@]}" -j "$d/val.json" -m 4 --predictions "$work/few.json"
    why=$(ended_with 0)
    few=$("$python" - "$d/val.json" "$work/said.json" "$work/few.json" <<'END'
import json, sys

all, few = (json.load(open(path)) for path in sys.argv[2:])
assert list(few.items()) == list(all.items())[: len(few)] and 10 < len(few) <= 20
gold = {qa["id"]: qa["answers"][0]["text"] for p in json.load(open(sys.argv[1]))["data"][0]["paragraphs"] for qa in p["qas"]}
print(f"{100 * sum(few[i].lower() == gold[i].lower() for i in few) / len(few):.4f}, F1 [0-9.]+ \\({len(few)} of 60 questions; -m 0 takes all\\)")
END
    )
    [ -n "$few" ] && grep -Eq "exact match $few$" "$work/stdout" || why=${why:-"'$(cat "$work/stdout")', not $few"}
    verdict 'answer: -m' "$why"

    # Where 128 shared tokens do not fit, fewer are shared, unless the user asks for them.
    run --task answer -e L=1,C=32,NH=2,T=128 -i "$d/train.json" "${RUN[@]}" -b 16 -x 1 -v 0 -o ''
    why=$(ended_with 0)
    grep -q '^--stride 30 instead of 128, which does not fit -t 128$' "$work/stdout" || why=${why:-"said '$(head -n 1 "$work/stdout")'"}
    verdict 'answer: --stride is lowered' "$why"
    # The same questions without their answers.
    "$python" - "$d/val.json" "$d/asked.json" <<'END'
import json, sys

data = json.load(open(sys.argv[1]))
for p in data["data"][0]["paragraphs"]:
    for qa in p["qas"]:
        del qa["answers"]
json.dump(data, open(sys.argv[2], "w"))
END
    run "${SAYS[@]}" -j "$d/asked.json" --predictions "$work/asked.json"
    why=$(ended_with 0)
    [ -n "$why" ] || [ ! -s "$work/stderr" ] || why="stderr is not empty: $(head -n 1 "$work/stderr")"
    [ "$(cat "$work/stdout")" = 'nothing to compare with: the answer is predicted of 60 questions' ] || why=${why:-"said '$(cat "$work/stdout")'"}
    cmp -s "$work/asked.json" "$work/said.json" || why=${why:-'other predictions'}
    verdict 'answer: no answers' "$why"
    # A model's directory whose tokenizer is only in tokenizer.json; there is none next to the examples.
    mkdir "$d/apart"
    cp "$d/train.tsv" "$d/val.tsv" "$d/apart"
    cp -r "$box/classes" "$d/whole"
    rm "$d/whole/vocab.txt" "$d/whole/tokenizer_config.json"
    "$python" - "$box/classes/vocab.txt" "$d/whole/tokenizer.json" <<'END'
import json, sys

vocabulary = {token: i for i, token in enumerate(open(sys.argv[1], encoding="utf-8", newline="\n").read().split("\n")[:-1])}
added = [{"id": vocabulary[t], "content": t, "special": True} for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")]
model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocabulary}
normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": False}
json.dump({"added_tokens": added, "normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model}, open(sys.argv[2], "w"))
END
    run --task classify -e "$d/whole" -j "$d/apart/val.tsv" --evaluate 1 -b 7 --predictions "$work/whole.tsv"
    why=$(ended_with 0)
    cmp -s "$work/whole.tsv" "$work/said.tsv" || why=${why:-'other predictions'}
    verdict 'tokenizer.json alone' "$why"
    run --task classify -e "$d/whole" -i "$d/apart/train.tsv" "${RUN[@]}" -b 16 -x 1 -v 0 -o "$box/whole-tuned"
    why=$(ended_with 0)
    cmp -s "$box/whole-tuned/tokenizer.json" "$d/whole/tokenizer.json" || why=${why:-'is not beside the model'}
    verdict 'tokenizer.json is saved with the model' "$why"
else skip answers "$python does not run"; fi

# ---------------------------------------------------------------------------------------------------------
# What needs a run before it

on_full_disk '--evaluate 1' --task classify -e "$box/classes" --evaluate 1 -j "$d/val.tsv"
cp "$d/val.tsv" "$box/input.tsv" && ln -s input.tsv "$box/link.tsv"
refused '--predictions through a link to the validation data' 2 '--predictions .*link.tsv: is an input' \
    --task classify -e "$box/classes" --evaluate 1 -j "$box/input.tsv" --predictions "$box/link.tsv"
printf 'prediction\tname\tprobability\n' >"$box/old"
refused '--predictions is left alone' 2 'none.tsv: cannot be read' --task classify -e "$box/classes" --evaluate 1 \
    -j "$d/none.tsv" --predictions "$box/old"
printf '1\ta\n2\tb\n' >"$d/numbered.tsv"
run "${CLASSIFY[@]}" --labels 2 -b 2 -x 1 -v 0 -i "$d/numbered.tsv" -o "$box/numbered"
printf '0\ta\n' >"$d/bad.tsv"
refused 'a number where names are numbers' 2 'bad.tsv: line 1: the label "0" is neither' \
    -e "$box/numbered" --task classify --evaluate 1 -j "$d/bad.tsv"
printf '0\ta\n1\tb\n' >"$d/two.tsv"
run "${CLASSIFY[@]}" --labels 65536 -b 2 -x 1 -v 0 -i "$d/two.tsv" -o "$box/most"
accepted 'the most labels, read again' --task classify -e "$box/most" --evaluate 1 -j "$d/two.tsv"
cp "$d/train.tsv" "$d/changed.tsv"
run "${FORM[@]}" -i "$d/changed.tsv" -x 3 --stop-after 2 -o "$box/other"
echo $'low\tb' >>"$d/changed.tsv"
refused 'other examples on the way' 2 'changed.tsv: is not the data that .* was trained on' \
    "${FORM[@]}" -i "$d/changed.tsv" -x 3 -y 1 -o "$box/other"
finish
