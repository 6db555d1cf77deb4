"""What equal.py and refuse.py share: the form of tables, runs that are made once, files that rows name, counted cases.

A table is read line by line. "#" begins a comment, "let NAME = TEXT" names text that later lines write as $NAME,
"group NAME" begins the rows that are run alone on request, and lines behind "only gpt2" or "only bert" are for that
trainer, up to "only both" or the next group.

A run is flags, as on a command line, without -o. Words in brackets before them say what runs: "use" or "tune" the
program that uses models or that fine-tunes, "late" the build whose collectives are late, "N ranks" several processes,
"postponed" that the emulator's device works only when the host waits for it, "again" a run of its own though the flags
are those of another. " : " is between the flags of two ranks that have not the same. Runs with ";" between them take
place in one folder, one after the other, in OUT = out; "edit COMMAND" (dev/test/edit.py) before a run changes a file of
that folder.
"""

import array
import json
import os
import re
import shlex
import shutil
import struct
import sys
import tempfile
from typing import NamedTuple

from edit import edit
from edit import load as tensors  # noqa: F401
from verdicts import CORPUS, ROOT, read, run, skip, verdict, write

PROGRAMS = {"use": ("train_", "use_"), "tune": ("train_", "finetune_")}
LIMIT = 120  # seconds of a run; 600 with sanitizers


def case(kind, name, why=""):
    """Count a case of KIND ok, FAIL or skip."""
    (skip if kind == "skip" else verdict)(name, why)


def read_table(name, trainer):
    """The rows of a table for TRAINER: (group, line as it is, text with what `let` named put in)."""
    names, group, only = {}, "", "both"
    with open(os.path.join(ROOT, "dev", "test", name), encoding="utf-8") as f:
        for line in f:
            text = "" if line.lstrip().startswith("#") else line.rstrip()
            text = re.sub(r"\$([a-z_0-9]+)", lambda m: names.get(m[1], m[0]), text)
            word, _, rest = text.partition(" ")
            if word == "group":
                group, only = rest, "both"
            elif word == "only":
                only = rest
            elif only not in ("both", trainer):
                continue
            elif word == "let":
                key, _, value = rest.partition("=")
                names[key.strip()] = value.strip()
            elif text:
                yield group, line.strip(), text


def output_of(*command):
    return run(*command).stdout if shutil.which(command[0]) else ""


class Result(NamedTuple):
    status: int
    stdout: str
    stderr: str

    def wrong(self, status=0):
        """Why the run did not end as it should, or nothing."""
        found = re.search(r".*(Sanitizer|runtime error).*", self.stderr)
        if found:
            return f"sanitizer: {found[0]}"
        if self.status != status:
            last = " ".join(self.stderr.split("\n")[-4:])
            return f"exit status {self.status} where {status} is promised; stderr: {last}"
        return ""


class Runs:
    """Runs of one trainer and of the programs next to it, in a folder that goes away."""

    def __init__(self, program):
        self.program = os.path.realpath(program)
        self.trainer = "bert" if "bert" in os.path.basename(program) else "gpt2"
        if not os.access(self.program, os.X_OK) or not os.path.exists(CORPUS + "/train.bin"):
            sys.exit(f"error: {program} or build/test_corpus is missing; make test builds them")
        self.is_sanitized = b"__asan_init" in read(self.program, "rb")
        self.work = tempfile.mkdtemp(prefix="runs.")
        self.files, self.folders = os.path.join(self.work, "files"), {}
        shutil.copytree(CORPUS, os.path.join(self.files, "data", "builtin"))
        self.environment = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1", "LC_ALL": "C"}
        if self.is_sanitized:
            options = f"suppressions={ROOT}/dev/test/mpi.supp:fast_unwind_on_malloc=0:print_suppressions=0"
            self.environment["LSAN_OPTIONS"] = options
        self.most_ranks = 1 << 30
        if self.program.endswith("cu"):  # a rank has a GPU of its own
            self.most_ranks = output_of("nvidia-smi", "-L").count("GPU ")
        has_mpi = shutil.which("mpirun") and "libmpi" in output_of("ldd", self.program)
        self.no_ranks = "" if has_mpi else "mpirun was not found, or this build has no MPI"

    def remove(self):
        shutil.rmtree(self.work, ignore_errors=True)

    def command(self, run):
        """A run's words for the shell, and what keeps it from running here, or nothing."""
        where, flags = re.match(r"((?:\[.*?\] *)*)(.*)", run.strip()).groups()
        words, program, missing = re.findall(r"[a-z0-9]+", where), self.program, ""
        folder, name = os.path.split(program)
        for word in words:
            if word in PROGRAMS:
                program = os.path.join(folder, name.replace(*PROGRAMS[word]))
            elif word == "late":
                built = [f"{folder}/build/late/{name}", f"{folder}/late/{name}"]
                program = next(filter(os.path.exists, built), "")
                missing = "" if program else "the late build is missing"
        start = []
        if "ranks" in words:
            ranks = words[words.index("ranks") - 1]
            start = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", ranks]
            missing = missing or self.no_ranks
            missing = missing or ("" if int(ranks) <= self.most_ranks else f"mpirun: fewer than {ranks} GPUs")
        if "postponed" in words:
            start = ["env", "LLMC_TEST_LATE=1"]
        first, _, second = flags.partition(" : ")
        if second:
            start[-1] = "1"
            first += f" : -np 1 {shlex.quote(program)} {second}"
        return start + [program] + shlex.split(first), missing

    def start(self, words, folder):
        limit = 5 * LIMIT if self.is_sanitized else LIMIT
        # It ends mpirun, which ends its ranks.
        command = ["timeout", "--foreground", "-k", "10", limit, *words]
        done = run(*command, limit=2 * limit, cwd=folder, env=self.environment)
        if done.returncode == 124:
            return Result(124, "", f"it did not end in {limit} s")
        error = done.stderr
        if words[0] == "mpirun":  # which has more to say about a rank that fails
            told = re.findall(r"^(?:error|warning): .*\n|.*(?:Sanitizer|runtime error).*\n", error, re.M)
            error = "".join(dict.fromkeys(told) if done.returncode == 2 else told)  # each rank refuses its input
        return Result(done.returncode, done.stdout, error)

    def folder(self):
        """A new folder that shows the files that rows name."""
        folder = os.path.join(self.work, f"run{len(os.listdir(self.work))}")
        os.mkdir(folder)
        for name in os.listdir(self.files):
            os.symlink(os.path.join(self.files, name), os.path.join(folder, name))
        return folder

    def after(self, text):
        """The folder after the runs of TEXT, made once, the last Result, and why it is not there, or nothing."""
        if text in self.folders:
            return self.folders[text]
        *before, run = re.split(r" *; *", text)
        count = next((n for n in range(len(before), 0, -1) if not before[n - 1].startswith("edit ")), 0)
        folder, result, why = "", Result(0, "", ""), ""
        if count:
            earlier, _, why = self.after(" ; ".join(before[:count]))
            folder = os.path.join(self.work, f"run{len(os.listdir(self.work))}")
            shutil.copytree(earlier, folder, symlinks=True)
        folder = folder or self.folder()
        for command in before[count:] if not why else ():
            edit(folder, *shlex.split(command)[1:])
        words, missing = self.command(run)
        if not why:
            result = Result(0, "", "") if missing else self.start(words + ["-o", "out"], folder)
            why = missing or result.wrong()
            write(folder + "/stdout", result.stdout)
        self.folders[text] = folder, result, why
        return self.folders[text]

    def make(self, name, text):
        """The result of runs as a model that rows may name."""
        folder, _, why = self.after(text)
        if not why:
            shutil.copytree(folder + "/out", os.path.join(self.files, name))
        return why

    def repeat(self, text):
        """What to type to repeat runs by hand."""
        typed = lambda run: run if run.startswith("edit ") else shlex.join(self.command(run)[0] + ["-o", "out"])
        return "; ".join(typed(run) for run in re.split(" *; *", text))


def flags_of(runs, mark):
    """The flags that a program lists: (short name, long name, default, allowed values); MARK: "[use] " or the like."""
    text = runs.start(runs.command(mark + "--help")[0], runs.files).stdout
    for row in re.findall(r"^  (?:-|   ).* --.*(?:\n {40}.*)*", text, re.M):
        short, long = re.match(r"  (-\S+)? +(--[a-z0-9-]+)", row).groups()
        found = re.search(r"\[([^\[\]]+)\]$", re.sub(r"\s+", " ", row).strip())
        allowed = found[1] if found and re.search(r"\.\.|>=|\|", found[1]) else ""
        if long != "--help":
            yield short or "", long, re.match(r"\S*", row[32:])[0], allowed


# Of runs that are compared with torch.
LIKE_TORCH = "-x 20 -l 1e-3 -k constant -c 0 --beta2 0.999 --eps 1e-8 --shuffle 0 -v 0 -n 0"


def far_from_torch(log, model, loss_of):
    """Why the losses in a log are not those of 20 steps of a model of torch, whose losses are loss_of(step), or nothing."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    found = [float(text) for text in re.findall(r'"loss": ([0-9.e+-]+)', read(log))]
    for step, ours in enumerate(found):
        loss = loss_of(step)
        if not abs(loss.item() - ours) <= 1e-5:  # sums in another order
            return f"step {step + 1}: {ours}, by torch {loss.item()}"
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return "" if len(found) == 20 else f"{len(found)} losses"


# ---------------------------------------------------------------------------------------------------------
# Files


def numbers(tensor):
    return array.array("f", tensor[2]) if tensor[0] == "F32" else tensor[2]


def header(form, *numbers):
    return struct.pack(form, *numbers).ljust(1024, b"\0")


def put_shard(path, tokens, mask=None):
    """A file of tokens; MASK: for each whether it counts as a target."""
    data = header("<5i", 20240520, 1, len(tokens), 0, mask is not None) + struct.pack(f"<{len(tokens)}H", *tokens)
    bits = bytearray(-(-len(mask or ()) // 8))
    for i, counts in enumerate(mask or ()):
        bits[i // 8] |= bool(counts) << i % 8
    write(path, data + bits)


def put_examples(at):
    """What classifiers and answers train on, below texts."""
    os.mkdir(at("texts"))
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(at("data/builtin/bert/" + name), at("texts"))
    rows = {
        "train": [f"{'low middle top'.split()[i % 3]}\ttext \"{i * i}\", {i}\n" for i in range(40)],
        "long": [f"{i % 2}\tthe dog saw {i * i} cats {'and ' * (i % 9)}\n" for i in range(10, 60)],
        "rated": [f"{i / 8}\t{i}{i * i}\n" for i in range(10, 50)],
    }
    for name, lines in rows.items():
        write(at(f"texts/{name}.tsv"), "".join(lines))
    pairs = [line.strip().split("\t") for line in rows["train"]]  # the same as CSV, with line ends in texts, and as JSON lines
    fields = [(label, text.replace('"', '""').replace(" ", "\n", i % 2)) for i, (label, text) in enumerate(pairs)]
    write(at("texts/train.csv"), "label,id,text\r\n" + "".join(f'{a},{i},"{b}"\r\n' for i, (a, b) in enumerate(fields)))
    objects = [{"text": b.replace(" ", "\t", 1), "tokens": [], "label": a} for a, b in pairs]
    write(at("texts/train.jsonl"), "".join(json.dumps(row) + "\n" for row in objects))
    context = " ".join(f"word{i}" for i in range(12))
    ask = '{"id": "%d", "question": "which?", "answers": [{"text": "word%d", "answer_start": %d}]}'
    asked = ", ".join(ask % (i, i, context.index(f"word{i}")) for i in range(10))
    write(at("texts/train.json"), '{"data": [{"paragraphs": [{"context": "%s", "qas": [%s]}]}]}' % (context, asked))
    write(at("texts/lines"), "abc\n\nabcdefghijklmnopqrstuvw")


def put_files(runs):
    """What rows train on besides the built-in corpus."""
    at = lambda name: os.path.join(runs.files, name)
    first = list(memoryview(read(at("data/builtin/train.bin"), "rb"))[1024 : 1024 + 2 * 97].cast("H"))
    put_shard(at("six.bin"), first)  # the first sequences of the corpus
    put_shard(at("equal.bin"), [ord(c) for c in "abcadeafghbijklm"] * 64 + [97])  # all sequences are the same
    put_shard(at("documents.bin"), [256 if i % 8 == 4 else 65 + i % 13 for i in range(97)])  # 256 begins a document
    put_shard(at("all.bin"), first[:65])
    put_shard(at("ones.bin"), first[:65], [1] * 72)
    put_shard(at("some.bin"), first[:65], [i < 21 for i in range(65)])  # two of four sequences have no target
    put_shard(at("rest.bin"), first[:65], [i >= 21 for i in range(65)])
    put_shard(at("grows.bin"), [256 if i < 768 and i % 4 == 0 else i % 97 for i in range(1537)])
    # Four documents of 10 to 18 tokens in three sentences: micro-batches differ in their numbers of masked tokens.
    head = [20261121, 1, 60, 12, 4, 261, 256, 257, 258, 259, 260]
    ends = [0, 3, 6, 10, 15, 20, 24, 30, 36, 42, 48, 54, 60, 0, 3, 6, 9, 12, 0, 0, 0, 0] + 4 * [2**32 - 1] + [0]
    tokens = struct.pack("<60H", *(i * i % 251 for i in range(60)))
    write(at("lengths.bin"), header("<11I", *head) + tokens + struct.pack(f"<{len(ends)}I", *ends))
    # "a", then " b", " cd", " e" or " f"; BERT's examples have one ending.
    example = (65535, 20, 0, 0, 1, 1, 97, 2, 32, 98)
    if runs.trainer == "gpt2":
        example = (65535, 40, 0, 1, 4, 1, 97, 2, 32, 98, 3, 32, 99, 100, 2, 32, 101, 2, 32, 102)
    write(at("set.bin"), header("<4I", 20240522, 1, 1, 40) + struct.pack(f"<{len(example)}H", *example))
    # llm.c's files: one layer, 4 channels; four tokens
    weights = bytes(4 * (264 * 4 + 16 * 4 + 12 * 4 * 4 + 15 * 4))
    write(at("llmc/model.bin"), header("<8i", 20240326, 3, 16, 257, 1, 2, 4, 264) + weights)
    words = b"\1a\2\0\xff\x0d<|endoftext|>\3 is"
    write(at("llmc/gpt2_tokenizer.bin"), header("<4I", 20240328, 2, 4, 2) + words)
    os.mkdir(at("data/shards"))
    put_shard(at("data/shards/good.bin"), [0] * 100)
    for name in ("good", "bad"):
        shutil.copy(at("data/builtin/bert/train.bin"), at(f"data/shards/{name}_sentences.bin"))
    put_examples(at)
