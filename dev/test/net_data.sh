#!/usr/bin/env bash
# Data from the net, on stand-ins for it: data sets in directories and on a server of this machine that speaks as much of the
# hub's language as reading takes (dev/test/net_server.py), files on the same server. And long preparations that are killed.
#
#     bash dev/test/net_data.sh
#
# PYTHON names the interpreter (default python3), which needs `tokenizers` and, for what concerns data sets, `datasets`.
set -u
python=${PYTHON:-python3}
passed=0 failed=0 skipped=0 server=
work=$(mktemp -d)
cleanup() { [ -z "$server" ] || kill "$server"; rm -rf "$work"; }
trap cleanup EXIT
trap 'exit 1' INT TERM HUP PIPE
ok() { echo "ok   $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
verdict() { if [ -z "$2" ]; then ok "$1"; else fail "$1" "$2"; fi; }
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ "$failed" -eq 0 ]; exit; }

# Nothing here may reach, or be kept from, the real net.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY
export HF_HOME=$work/hf HF_HUB_DISABLE_TELEMETRY=1 no_proxy=127.0.0.1

gpt2() { "$python" dev/data/prepare_gpt2.py --vocab build/test_corpus/builtin --shard-tokens 400000 "$@" >"$work/stdout" 2>"$work/stderr"; }
bert() { "$python" dev/data/prepare_bert.py --shard-tokens 400000 "$@" >"$work/stdout" 2>"$work/stderr"; }
said() { tail -n 1 "$work/stderr"; }

# Why two directories do not hold the same files, or nothing.
differ() { diff -r "$1" "$2" 2>&1 | head -n 1; }
same() { # NAME DIRECTORY WANTED
    verdict "$1" "$(differ "$2" "$3")"
}

# Run and expect one line of error that matches, and no files.
refused() { # NAME STATUS PATTERN COMMAND...
    local name=$1 wanted=$2 pattern=$3 status
    shift 3
    rm -rf "$work/refused"
    "$@" --out "$work/refused"
    status=$?
    if [ "$status" -ne "$wanted" ]; then fail "$name" "exit status $status, not $wanted: $(said)"
    elif [ "$(wc -l <"$work/stderr")" -ne 1 ] || ! grep -Eq "^error: .*$pattern" "$work/stderr"; then
        fail "$name" "not one line that matches '$pattern': $(head -c 400 "$work/stderr")"
    elif [ -n "$(ls -A "$work/refused" 2>/dev/null)" ]; then fail "$name" "left $(ls -A "$work/refused" | tr '\n' ' ')"
    else ok "$name"; fi
}

# SIGKILL a preparation as soon as it has saved anew. The exit status is 0 where it was killed, not where it was faster.
killed() { # DIRECTORY COMMAND...
    local state=$1/${state_in:-preparation}/state.json before children= pid is_killed=1 i
    shift
    before=$(cat "$state" 2>/dev/null)
    "$@" --save-every 0 >"$work/stdout" 2>"$work/stderr" &
    pid=$!
    while kill -0 $pid 2>/dev/null; do
        if [ -f "$state" ] && [ "$(cat "$state" 2>/dev/null)" != "$before" ]; then
            children=$(pgrep -P $pid)
            kill -KILL $pid && is_killed=0
            break
        fi
        sleep 0.01
    done
    wait $pid 2>/dev/null
    for ((i = 0; i < 100; i++)); do  # workers end with their parent
        kill -0 $children 2>/dev/null || break
        sleep 0.1
    done
    [ $i -lt 100 ] || { orphans=$(ps -o pid=,stat=,args= -p "$(tr '\n' ',' <<<"$children" | sed 's/,$//')" | head -n 1); }
    return $is_killed
}

# Kill a preparation three times, finish it, compare it with what an undisturbed one has made.
survives() { # NAME DIRECTORY WANTED COMMAND...
    local name=$1 directory=$2 wanted=$3 kills=0 i why=
    shift 3
    orphans=
    for i in 1 2 3; do
        killed "$directory" "$@" && kills=$((kills + 1))
    done
    if ! "$@" >"$work/stdout" 2>"$work/stderr"; then why="does not continue: $(said)"
    elif ! grep -q 'continuing from there' "$work/stdout"; then why="started again"
    elif [ $kills -lt 2 ]; then why="only $kills kills came in time"
    elif [ -n "$orphans" ]; then why="a worker outlived it: $orphans"
    else why=$(differ "$directory" "$wanted"); fi
    verdict "$name: $kills kills" "$why"
}

if ! "$python" -c 'import tokenizers' 2>/dev/null; then
    skip net_data "$python has no tokenizers library (pip install tokenizers)"
    finish
fi

# ----------------------------------------------------------------------------------------------------------
# Text for all that follows: documents of very different lengths, also empty ones, also of several bytes a character.

mkdir -p "$work/srv/files" "$work/jsonl"
"$python" - "$work" <<'END'
import json, random, sys
random.seed(7)
words = open("build/test_corpus/text/000.md", encoding="utf-8").read().split()
documents = [" ".join(random.choices(words, k=random.choice([1, 20, 300, 900])) + ["é漢🙂"] * random.randrange(3)) for _ in range(1300)]
documents[17] = documents[640] = ""
documents[18] = "A line.\n\n\nAnother one. And a third!\n" * 40
for i in range(3):
    with open(f"{sys.argv[1]}/jsonl/part{i}.jsonl", "w", encoding="utf-8") as f:
        for d in documents[i::3]:
            f.write(json.dumps({"body": d, "n": i}) + "\n")
words = sorted({c for d in documents for c in d.lower() if not c.isspace()})
with open(f"{sys.argv[1]}/vocab.txt", "w", encoding="utf-8") as f:
    f.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + words + ["##" + w for w in words]) + "\n")
END
mine=("$work"/jsonl/*.jsonl)
gpt2 --local "${mine[@]}" --text-key body --out "$work/gpt2" || fail "prepare_gpt2" "$(said)"
bert --local "${mine[@]}" --text-key body --vocab "$work/vocab.txt" --out "$work/bert" || fail "prepare_bert" "$(said)"

# Long preparations that are killed.
survives "files, GPT-2" "$work/killed" "$work/gpt2" "$python" dev/data/prepare_gpt2.py --vocab build/test_corpus/builtin --shard-tokens 400000 \
    --local "${mine[@]}" --text-key body --out "$work/killed" --processes 2
survives "files, BERT" "$work/killed_bert" "$work/bert" "$python" dev/data/prepare_bert.py --vocab "$work/vocab.txt" --shard-tokens 400000 \
    --local "${mine[@]}" --text-key body --out "$work/killed_bert" --processes 2
# One that goes on only as it began, and not twice at a time.
long=(--local "${mine[@]}" --text-key body --out "$work/stopped" --processes 1)
killed "$work/stopped" "$python" dev/data/prepare_gpt2.py --vocab build/test_corpus/builtin --shard-tokens 400000 "${long[@]}"
why=
gpt2 "${long[@]}" --limit-tokens 5000 && why="taken up with --limit-tokens"
[ "$(wc -l <"$work/stderr")" -eq 1 ] && grep -q 'another --limit-tokens' "$work/stderr" || why="${why:-not one line that names the flag: $(said)}"
verdict "other settings are refused" "$why"
"$python" -c 'import fcntl, sys, time
f = open(sys.argv[1], "r+")
fcntl.lockf(f, fcntl.LOCK_EX)
open(sys.argv[2], "w").close()
time.sleep(300)' "$work/stopped/preparation/preparation.lock" "$work/held" &
holder=$!
until [ -f "$work/held" ] || ! kill -0 $holder 2>/dev/null; do sleep 0.05; done
gpt2 "${long[@]}"
if [ $? -eq 2 ] && grep -q 'another preparation is writing' "$work/stderr"; then ok "two at a time are refused"
else fail "two at a time" "$(said)"; fi
kill $holder
wait $holder 2>/dev/null
cp "$work/stopped/preparation/state.json" "$work/state"
echo '{"settings": {' >"$work/stopped/preparation/state.json"
gpt2 "${long[@]}"
if [ $? -eq 2 ] && grep -q 'damaged; --restart' "$work/stderr"; then ok "a damaged state is named"; else fail "a damaged state" "$(said)"; fi
gpt2 "${long[@]}" --restart
same "--restart starts again" "$work/stopped" "$work/gpt2"

# SIGTERM saves what there is.
"$python" dev/data/prepare_gpt2.py --vocab build/test_corpus/builtin --shard-tokens 400000 "${long[@]}" --save-every 0 >"$work/stdout" 2>"$work/stderr" &
pid=$!
until [ -f "$work/stopped/preparation/state.json" ] || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
kill -TERM $pid
wait $pid
status=$? why=
[ $status -eq 1 ] && [ "$(wc -l <"$work/stderr")" -eq 1 ] || why="exit status $status: $(said)"
grep -q '^error: interrupted; .* the same command continues' "$work/stderr" || why="${why:-$(said)}"
gpt2 "${long[@]}" && grep -q 'continuing from there' "$work/stdout" || why="${why:-does not continue: $(said)}"
verdict "SIGTERM saves" "${why:-$(differ "$work/stopped" "$work/gpt2")}"

# A worker that is killed, by the system for want of memory perhaps, ends the preparation with a line.
"$python" dev/data/prepare_gpt2.py --vocab build/test_corpus/builtin --shard-tokens 400000 "${long[@]}" --processes 2 --save-every 0 >"$work/stdout" 2>"$work/stderr" &
pid=$!
until [ -f "$work/stopped/preparation/state.json" ] || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
pkill -KILL -n -P $pid
wait $pid
status=$? why=
[ $status -eq 1 ] && [ "$(grep -c '^error: a worker process was killed' "$work/stderr")" -eq 1 ] || why="exit status $status: $(said)"
gpt2 "${long[@]}" || why="${why:-does not continue: $(said)}"
verdict "a worker that is killed" "${why:-$(differ "$work/stopped" "$work/gpt2")}"

# The first tokens only: as many as were asked for, the same as of all; whole documents for BERT.
tokens() { cat "$@" | wc -c; }
head_of() { for f in "$@"; do tail -c +1025 "$f"; done; }
gpt2 --local "${mine[@]}" --text-key body --val-fraction 0 --out "$work/all"
gpt2 --local "${mine[@]}" --text-key body --val-fraction 0 --limit-tokens 900001 --out "$work/limited" --processes 2
cmp -s <(head_of "$work"/all/train_*.bin | head -c 1800002) <(head_of "$work"/limited/train_*.bin)
verdict "--limit-tokens, GPT-2" "$([ $? -eq 0 ] || echo "not the first 900001 tokens")"
if bert --local "${mine[@]}" --text-key body --vocab "$work/vocab.txt" --limit-tokens 90001 --val-fraction 0 --out "$work/limited_bert" --processes 2 &&
    bert --local "${mine[@]}" --text-key body --vocab "$work/vocab.txt" --limit-tokens 90001 --val-fraction 0 --out "$work/limited_again" --processes 1; then
    same "--limit-tokens, BERT" "$work/limited_bert" "$work/limited_again"
    count=$(sed -nE 's/.* documents, ([0-9]+) tokens; validation.*/\1/p' "$work/stdout")
    verdict "--limit-tokens, BERT: whole documents" "$([ "$count" -ge 90001 ] && [ "$count" -lt 110000 ] || echo "$count tokens for 90001")"
else fail "--limit-tokens, BERT" "$(said)"; fi

# ----------------------------------------------------------------------------------------------------------
# Parts: joined they are what one run makes, and what cannot be joined is named

"$python" - "$work" "${mine[@]}" >"$work/parts.log" 2>&1 <<'END_OF_PARTS'
import contextlib, filecmp, io, json, os, random, shutil, sys
sys.path.insert(0, "dev/data")
import documents, net, prepare_bert, prepare_gpt2

net.BATCH_CHARACTERS = 15000  # several blocks a file
work, mine = sys.argv[1], [sys.argv[1] + f"/short/{i}.jsonl" for i in range(3)]
os.makedirs(work + "/short")
for short, path in zip(mine, sys.argv[2:]):
    with open(path, encoding="utf-8") as a, open(short, "w", encoding="utf-8") as b:
        b.writelines(a.readlines()[:90])
KINDS = {
    "gpt2": (prepare_gpt2.parse, prepare_gpt2.main, ["--vocab", "build/test_corpus/builtin"]),
    "bert": (prepare_bert.parse, prepare_bert.prepare, ["--vocab", work + "/vocab.txt"]),
}

def verdict(name, why):
    print(f"FAIL {name}: {why}" if why else f"ok   {name}", flush=True)

def prepare(kind, out, *arguments, source=("--local", *mine)):
    """What is wrong, or nothing."""
    parse, main, vocabulary = KINDS[kind]
    common = [*source, *vocabulary, "--text-key", "body", "--processes", "1", "--shard-tokens", "60000", "--out", out]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = documents.run(parse, main, common + list(arguments))
    lines = said.getvalue().splitlines()
    return "" if status == 0 else lines[-1] if status == 2 and len(lines) == 1 else f"status {status}: {said.getvalue()}"

def differ(a, b):
    names = sorted(os.listdir(a))
    if names != sorted(os.listdir(b)):
        return f"{sorted(os.listdir(b))}, not {names}"
    other = [name for name in names if not filecmp.cmp(f"{a}/{name}", f"{b}/{name}", shallow=False)]
    return f"{other} are other files" if other else ""

def make(kind, out, count, *arguments, **source):
    numbers = list(range(1, count + 1))
    random.Random(count).shuffle(numbers)
    return next(filter(None, (prepare(kind, out, "--part", f"{k}/{count}", *arguments, **source) for k in numbers)), "")

one_file = work + "/one.jsonl"
with open(one_file, "w", encoding="utf-8") as f:
    f.writelines(open(path, encoding="utf-8").read() for path in mine)
def equal(kind, count, name, arguments, source):
    one, out = f"{work}/{kind}_one", f"{work}/{kind}_parts"
    why = prepare(kind, one, *arguments, source=source) or make(kind, out, count, *arguments, source=source)
    why = why or prepare(kind, out, *arguments, "--join", source=source) or differ(one, out)
    verdict(f"{kind}: {count} parts{name}", why)
    shutil.rmtree(one), shutil.rmtree(out, ignore_errors=True)

for kind in KINDS:
    for count, name, arguments, files in [
        (3, "", (), mine), (5, ", one file", (), [one_file]),
        (4, ", limited", ("--limit-tokens", "150001", "--val-fraction", "0.05"), mine),
    ]:
        equal(kind, count, name, arguments, ("--local", *files))
def refused(name, wanted, damage, *arguments, kind="gpt2"):
    """Damage three good parts, and expect --join to name what is wrong and to write nothing."""
    out = work + "/damaged"
    shutil.copytree(work + "/three", out)
    damage(out + "/parts")
    got = prepare(kind, out, "--join", *arguments)
    left = sorted(os.listdir(out))
    verdict(name, "" if wanted in got and left == ["parts"] else f"{got or 'accepted'}; {left}")
    shutil.rmtree(out)

def edit(path, change):
    with open(path) as f:
        state = json.load(f)
    change(state)
    with open(path, "w") as f:
        json.dump(state, f)

why = make("gpt2", work + "/three", 3)
verdict("three parts", why)
make("gpt2", work + "/limited_three", 3, "--limit-tokens", "9000")
refused("a part is missing", "part 2 of 3: not in", lambda p: shutil.rmtree(p + "/2-of-3"))
refused("a part is there twice", "part 3/3: is there twice", lambda p: shutil.copytree(p + "/3-of-3", p + "/copy"))
refused("a part of another preparation", "part 2/3: is of another preparation, with another --limit-tokens",
        lambda p: (shutil.rmtree(p + "/2-of-3"), shutil.copytree(work + "/limited_three/parts/2-of-3", p + "/2-of-3")))
refused("a part is not finished", "part 2/3: is not finished", lambda p: edit(p + "/2-of-3/state.json", lambda s: s.update(complete=False)))
refused("a part was cut", "part 1/3: ", lambda p: os.truncate(p + "/1-of-3/tokens", 10))
refused("no state", "holds no state.json", lambda p: os.remove(p + "/3-of-3/state.json"))
refused("no parts", "holds no parts to join", lambda p: [shutil.rmtree(f"{p}/{k}-of-3") for k in (1, 2, 3)])
for text in "0/3", "4/3", "a/b":
    got = prepare("bert", work + "/none", f"--part={text}")
    verdict(f"--part {text}", "" if "from 1 to N" in got and not os.path.exists(work + "/none") else got or "accepted")
verdict("--part with --join", "" if "not allowed with" in prepare("gpt2", work + "/none", "--part", "1/2", "--join") else "accepted")
print("end", flush=True)
END_OF_PARTS
while IFS= read -r line; do
    case $line in
        ok\ *) ok "parts: ${line#ok   }" ;;
        FAIL\ *) fail "parts: $(cut -d: -f1 <<<"${line#FAIL }")" "$(cut -d: -f2- <<<"$line")" ;;
    esac
done <"$work/parts.log"
[ "$(tail -n 1 "$work/parts.log")" = end ] || fail parts "$(tail -n 2 "$work/parts.log")"
# ----------------------------------------------------------------------------------------------------------
# Files by their address

"$python" dev/test/net_server.py "$work/srv" "$work/port" 2>"$work/server.log" &
server=$!
for ((i = 0; i < 300; i++)); do [ -f "$work/port" ] && break; sleep 0.1; done
address=http://127.0.0.1:$(cat "$work/port")
gzip -c "${mine[0]}" >"$work/srv/files/part0.jsonl.gz"
sum=$(sha256sum <"$work/srv/files/part0.jsonl.gz" | cut -d' ' -f1)
gpt2 --local "${mine[0]}" --text-key body --out "$work/part"
gpt2 --url "$address/part0.jsonl.gz" --sha256 "$sum" --text-key body --out "$work/url" || fail "a file by its address" "$(said)"
same "a file by its address" "$work/url" "$work/part"
refused "another sha256" 2 "has the sha256 $sum, not 0000" gpt2 --url "$address/part0.jsonl.gz" --sha256 "${sum//?/0}" --text-key body
refused "no such file there" 2 '404' gpt2 --url "$address/none.txt"
refused "no server there" 1 'cannot be fetched' gpt2 --url http://127.0.0.1:1/x.txt
refused "a password in the address" 1 'http://\*\*\*@127.0.0.1:1/x.txt: cannot' gpt2 --url http://tiger:ftp@127.0.0.1:1/x.txt
refused "--sha256 without --url" 2 'belongs to --url' gpt2 --local README.md --sha256 "$sum"
refused "--url and --local" 2 'not allowed with' gpt2 --local README.md --url "$address/x"
echo 1000 >"$work/srv/cut"
refused "a connection that ends early" 1 'ended after 1000 of [0-9]+ bytes' gpt2 --url "$address/part0.jsonl.gz" --text-key body
rm "$work/srv/cut"

# What was fetched and is refused does not stay: the same command fetches it anew.
: >"$work/srv/files/moved.txt"
refused "an empty file" 2 'no text in the input' gpt2 --url "$address/moved.txt"
seq 3000 >"$work/srv/files/moved.txt"
gpt2 --url "$address/moved.txt" --out "$work/refused"
verdict "the same address once it has text" "$([ $? -eq 0 ] || said)"

# ----------------------------------------------------------------------------------------------------------
# Data sets

mkdir -p "$work/without"
echo 'raise ImportError' >"$work/without/datasets.py"
without() { PYTHONPATH=$work/without gpt2 "$@"; }
refused "the library is missing" 2 'pip install datasets' without --dataset fineweb
refused "too many parts" 2 'is not NAME' gpt2 --dataset a:b:c:d:e
refused "--revision without --dataset" 2 'belongs to --dataset' gpt2 --local README.md --revision main
if ! "$python" -c 'import datasets' 2>/dev/null; then
    skip datasets "$python has no datasets library (pip install datasets)"
    finish
fi

# A directory of jsonl files, and one of parquet files with several row groups, which are cut elsewhere.
hub=$work/srv/hub
mkdir -p "$hub/roneneldan/TinyStories/data" "$hub/wikimedia/wikipedia/20231101.en"
"$python" - "$work" <<'END'
import json, sys
import pyarrow, pyarrow.parquet
documents = [json.loads(line)["body"] for i in range(3) for line in open(f"{sys.argv[1]}/jsonl/part{i}.jsonl", encoding="utf-8")]
for place, key in (("roneneldan/TinyStories/data", "text"), ("wikimedia/wikipedia/20231101.en", "text")):
    for i in range(5):
        part = documents[i * 260 : (i + 1) * 260]
        table = pyarrow.table({"id": list(range(len(part))), key: part})
        pyarrow.parquet.write_table(table, f"{sys.argv[1]}/srv/hub/{place}/train-{i:05d}-of-00005.parquet", row_group_size=70)
with open(f"{sys.argv[1]}/srv/hub/wikimedia/wikipedia/README.md", "w", encoding="utf-8") as f:
    f.write("""---
dataset_info:
- config_name: 20231101.en
  features: [{name: id, dtype: int64}, {name: text, dtype: string}]
  splits: [{name: train, num_bytes: 1, num_examples: 1300}]
  download_size: 1
  dataset_size: 1
configs:
- config_name: 20231101.en
  data_files: [{split: train, path: 20231101.en/train-*}]
---
""")
END
parquet=$hub/roneneldan/TinyStories
gpt2 --dataset "$work/jsonl:::body" --out "$work/data_jsonl" --processes 3 || fail "jsonl" "$(said)"
same "a directory of jsonl files" "$work/data_jsonl" "$work/gpt2"
survives "a directory of parquet files" "$work/data_parquet" "$work/gpt2" "$python" dev/data/prepare_gpt2.py --vocab build/test_corpus/builtin --shard-tokens 400000 \
    --dataset "$parquet" --out "$work/data_parquet" --processes 2

refused "no such column" 2 "no column 'story'; there are id, text" gpt2 --dataset "$parquet:::story"
refused "no such split" 2 "cannot be opened" gpt2 --dataset "$parquet::test"
refused "a column of numbers" 2 "'id' of document 1 is not a string" gpt2 --dataset "$parquet:::id"

# By name, from a hub. A data set that changes between two parts of a preparation is read as it was.
export HF_ENDPOINT=$address
gpt2 --dataset tinystories --out "$work/stories" || fail "a data set of the hub" "$(said)"
same "a data set of the hub" "$work/stories" "$work/gpt2"
long=(--dataset wikipedia --vocab "$work/vocab.txt" --out "$work/hub_bert" --processes 2)
killed "$work/hub_bert" "$python" dev/data/prepare_bert.py --shard-tokens 400000 "${long[@]}"
echo fedcba9876543210fedcba9876543210fedcba98 >"$work/srv/commit"
: >"$work/srv/requests"
bert "${long[@]}" || fail "a data set that changes" "$(said)"
same "a data set of the hub, BERT, killed" "$work/hub_bert" "$work/bert"
verdict "it is read as it was" "$(grep resolve "$work/srv/requests" | grep -v '/resolve/0123456789abcdef' | head -n 1; grep -q '/resolve/0123' "$work/srv/requests" || echo 'not read')"
refused "no such data set" 2 'cannot be opened: .*Not Found' gpt2 --dataset nobody/nothing
finish
