#!/usr/bin/env python3
"""Runs that must leave the same: dev/test/equal.txt, row by row.

    dev/test/equal.py TRAINER [GROUP [ROW]]        from the repository's root, for example ./train_gpt2 resume

A row is a line "NAME: HOW" and below it, indented, runs (their form: dev/test/runs.py). Each is compared with the first
one, and is a case of its own. If the first line has {} in it, each run is compared with that line, in which {} is the
run. HOW:

    bits [WHAT...]           WHAT are the same bytes (default: all that is marked *, as far as the first run has it)
    near TOLERANCE WHAT...   numbers differ by at most TOLERANCE against max(1, |first run's|), for the reason beside it
    other WHAT...            WHAT differ: without that, rows of "bits" would prove nothing
    mean TOLERANCE COUNT... WHAT   the first run's mean of WHAT is that of the others, of which each counts COUNT
    varied WHAT              no value is there twice
    shows                    nothing is compared but patterns

Behind a run, each "-> PATTERN" is what its output, its log, its newest trainer.json or its names ("ckpt: " and those in
OUT/ckpt, "files: " and all below OUT, "lr: " and the rates of all steps) must contain, "-> ! PATTERN" what they must
not. A line on stderr fails that no pattern matches. $defaults stands for all flags that a run does not name, at their
defaults. The group flags fails for a flag of --help that no row of "other" or "shows" and no line "elsewhere" names.

WHAT: weights* (OUT's model), state* (all tensors of the newest checkpoint), log* (log.jsonl without times and scales),
a key of log.jsonl such as val_loss, scales* (of the loss), fp8* (scales and largest elements), average* (OUT/ema),
hashes (of the weights, when checkpoints are written), sequences (of BERT's steps, by their rate), said (the losses of
--evaluate), plan (of memory), stdout.

"make NAME = RUNS" makes a model that rows may name. The groups graph and flags_gpu are for a GPU's trainer, graph also
for one that the emulator runs. They run on request.

Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
"""

import os
import re
import shlex
import sys

sys.dont_write_bytecode = True
from runs import Runs, case, flags_of, numbers, put_files, read_table, tensors  # noqa: E402
from verdicts import finish  # noqa: E402

ALWAYS = ("resume", "ranks", "late", "losses", "flags")
TENSORS, TEXTS = ("weights", "state", "average"), ("log", "scales", "fp8")
TIMES = re.compile(r', "(ms|tok_s|mfu|seq_s|joules|mhz|loss_scale)": [^,}]+')


def newest(folder):
    """The newest checkpoint, "" if there is none."""
    at = os.path.join(folder, "out", "ckpt")
    names = sorted(n for n in os.listdir(at) if n.isdigit()) if os.path.isdir(at) else []
    return os.path.join(at, names[-1]) if names else ""


def lines(folder, name="out/log.jsonl"):
    if not os.path.isfile(os.path.join(folder, name)):
        return []
    with open(os.path.join(folder, name), encoding="utf-8") as f:
        return [line.rstrip() for line in f]


def text_of(folder, what):
    """A thing of a run that is lines of text."""
    if what == "log":
        kept = [line for line in lines(folder) if line.startswith('{"step"') and "checkpoint_ms" not in line]
        return [TIMES.sub("", line) for line in kept]
    if what == "fp8":
        return re.findall(r'"fp8": "[0-9a-f]+"', "".join(lines(folder, newest(folder) + "/trainer.json")))
    if what in ("said", "plan", "stdout"):
        pattern = {"said": "^val loss ([^ ]+)", "plan": "^memory plan: [^;]*", "stdout": ".*"}[what]
        return re.findall(pattern, "\n".join(lines(folder, "stdout")), re.M)
    if what == "sequences":
        return [f"{float(a) * float(b) / 1000:.0f}" for a, b in zip(text_of(folder, "ms"), text_of(folder, "seq_s"))]
    key = {"scales": "loss_scale", "hashes": "weights_hash"}.get(what, what)
    return re.findall(rf'"{key}": ([^,}}]+)', "\n".join(line for line in lines(folder) if line.startswith('{"step"')))


def tensors_of(folder, what):
    """A thing of a run that is tensors, by their names."""
    at = newest(folder) if what == "state" else os.path.join(folder, "out", *(["ema"] if what == "average" else []))
    files = sorted(n for n in os.listdir(at) if n.endswith(".safetensors")) if os.path.isdir(at) else []
    return {f"{n}: {k}": v for n in files for k, v in tensors(os.path.join(at, n)).items()}


def is_far(x, y, tolerance):
    return not abs(x - y) <= tolerance * max(1, abs(x))


def difference(first, second, what, tolerance):
    """Where WHAT of two folders differs, with both values, or nothing; a tolerance of None asks for the same bits."""
    if what not in TENSORS:
        a, b = text_of(first, what), text_of(second, what)
        if not a or len(a) != len(b):
            return f"{what}: {len(a)} lines against {len(b)}"
        for i, (x, y) in enumerate(zip(a, b)):
            if x != y and (tolerance is None or is_far(float(x), float(y), tolerance)):
                at = max(0, next((k for k in range(len(x)) if x[: k + 1] != y[: k + 1]), 0) - 20)
                return f"{what}, line {i + 1}, from character {at + 1}: {x[at : at + 80]} against {y[at : at + 80]}"
        return ""
    a, b = tensors_of(first, what), tensors_of(second, what)
    if not a or a.keys() != b.keys():
        return f"{what}: tensors {sorted(a.keys() ^ b.keys())[:3]} are in one of them"
    for name in a:
        if a[name] == b[name]:
            continue
        x, y = numbers(a[name]), numbers(b[name])
        if len(x) != len(y):
            return f"{what}, {name}: {len(x)} elements against {len(y)}"
        for i in range(len(x)):
            if x[i] != y[i] and (tolerance is None or is_far(x[i], y[i], tolerance)):
                return f"{what}, {name}[{i}]: {x[i]} against {y[i]}"
    return ""


def names_below(folder):
    below = [os.path.relpath(os.path.join(at, n), folder) for at, subs, names in os.walk(folder) for n in subs + names]
    return " ".join(sorted(below))


def untidy(folder):
    """What a run must not leave, or nothing."""
    out, at = os.path.join(folder, "out"), newest(folder)
    left = re.search(r"\S*safetensors\S*\.tmp", names_below(out))
    if left:
        return f"left behind: {left[0]}"
    if at and tensors(out + "/model.safetensors") != tensors(at + "/model.safetensors"):
        return "OUT does not show the newest model"
    vocabulary = lambda place: {n for n in os.listdir(place) if n.startswith(("vocab", "merges", "token"))}
    if os.path.isdir(out + "/ema") and vocabulary(out) != vocabulary(out + "/ema"):
        return "the average of the weights has another tokenizer than the model"
    return ""


def unlike(folder, result, patterns):
    """Which pattern a run does not show, or which line on stderr no pattern matches, or nothing."""
    out = os.path.join(folder, "out")
    kept = sorted(os.listdir(out + "/ckpt")) if os.path.isdir(out + "/ckpt") else []
    names = ["ckpt: " + " ".join(kept), "files: " + names_below(out), "lr: " + " ".join(text_of(folder, "lr"))]
    texts = lines(folder) + lines(folder, newest(folder) + "/trainer.json") + names
    shown = "\n".join([result.stdout, result.stderr] + texts)
    for pattern in patterns:
        wanted = not pattern.startswith("! ")
        if bool(re.search(pattern if wanted else pattern[2:], shown, re.M)) != wanted:
            return f"its output, log and names are not as '{pattern}'; {names[0]}"
    told = [line for line in result.stderr.split("\n") if line and not any(re.search(p, line) for p in patterns)]
    return f"stderr: {told[0]}" if told else ""


def mean_of(folder, what):
    values = [float(x) for x in text_of(folder, what)]
    return sum(values) / len(values) if values else float("nan")


def compared(how, folders):
    """Why the last of FOLDERS is not to the others what HOW says, or nothing."""
    kind, *words = how.split()
    if kind == "shows":
        return ""
    if kind == "varied":
        values = text_of(folders[-1], words[0])
        return "" if len(set(values)) == len(values) > 1 else f"{words[0]}: {values}"
    if kind == "mean":
        counts, means = [float(n) for n in words[1:-1]], [mean_of(folder, words[-1]) for folder in folders]
        due = sum(n * x for n, x in zip(counts, means[1:])) / sum(counts)
        return f"{means[0]} is not the mean, {due}" if is_far(means[0], due, float(words[0])) else ""
    tolerance = float(words[0]) if kind == "near" else None
    what = words[1 if kind == "near" else 0 :] or [w for w in TENSORS if tensors_of(folders[0], w)]
    what += [] if words else [w for w in TEXTS if text_of(folders[0], w)]
    found = [d for d in (difference(folders[0], folders[-1], w, tolerance) for w in what if len(folders) > 1) if d]
    if kind == "other":
        absent = [w for w in what if w not in TENSORS and not any(text_of(f, w) for f in folders)]
        if absent:
            return f"neither run has {absent}"
        return "" if len(found) == len(what) or len(folders) == 1 else f"of {what} some are the same"
    return found[0] if found else ""


def chains(how, texts):
    """The runs of each case of a row, as pairs of the line and the text."""
    first = texts[0][1]
    if "{}" in first:
        parts = [(line, *text.partition(" -> ")) for line, text in texts[1:]]
        first, patterns = first.partition(" -> ")[::2]
        patterns = f" -> {patterns}" if patterns else ""
        last = lambda run, more: first.replace("{}", run) + patterns + more
        return [[(line, run), (line, last(run, arrow + own))] for line, run, arrow, own in parts]
    if how.split()[0] in ("shows", "varied"):
        return [[text] for text in texts]
    return [texts] if how.startswith("mean") else [[texts[0], text] for text in texts[1:]]


def judge(runs, how, texts):
    """Whether the last of TEXTS, runs with patterns, is to the others what HOW says: a kind of case and the reason."""
    folders = []
    for text in texts:
        run, *patterns = text.split(" -> ")
        folder, result, why = runs.after(run)
        folders.append(folder)
        if "late build" in why or "mpirun" in why:
            return "skip", why
        if why:
            return "FAIL", why
    why = unlike(folder, result, patterns) or untidy(folder) or compared(how, folders)
    return ("FAIL", why) if why else ("ok", "")


def with_defaults(runs, text):
    """TEXT, a run, with what $defaults stands for. An empty --fill and the like is refused, and -o is added later."""
    if "$defaults" not in text:
        return text
    mark, named = re.match(r"(?:\[.*?\] )?", text)[0], set(text.split()) | {"--output"}
    flags = [row for row in flags_of(runs, mark) if not named & set(row[:2])]
    is_given = lambda long, default: default or long not in ("--fill", "--embed", "--chat", "--explain")
    return text.replace("$defaults", " ".join(f"{row[1]}={row[2]}" for row in flags if is_given(*row[1:3])))


def check_names(runs, named):
    """Count a case for each program: are all of its flags among the words NAMED?"""
    for mark in ["", "[use] "] + ["[tune] "] * (runs.trainer == "bert"):
        left = [row[1] for row in flags_of(runs, mark) if not named & set(row[:2])]
        case("FAIL" if left else "ok", f"all flags {mark}", f"no row shows {' '.join(left)}" if left else "")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    runs, chosen = Runs(sys.argv[1]), sys.argv[2:]
    rows, made, named = [], [], {"--output"}
    for group, line, text in read_table("equal.txt", runs.trainer):
        if text.startswith("make "):
            made.append((group, *(part.strip() for part in text[5:].split("=", 1))))
        elif text.startswith("elsewhere "):
            named.update(re.findall(r"--[a-z-]+", text))
        elif text[0] != " ":
            rows.append((group, *(part.strip() for part in text.rsplit(": ", 1)), []))
        else:
            rows[-1][3].append((line, text.strip()))
    named.update(w for *_, how, texts in rows if how[:5] in ("other", "shows") for _, t in texts for w in t.split())
    is_chosen = lambda row: row[0] == chosen[0] and chosen[1:] in ([], [row[1]]) if chosen else row[0] in ALWAYS
    rows = [row for row in rows if is_chosen(row)]
    if not rows:
        sys.exit(f"error: no row of equal.txt is in the group and has the name: {' '.join(chosen)}")
    try:
        put_files(runs)
        for group, name, text in made:
            why = runs.make(name, text) if group in [row[0] for row in rows] else ""
            if why:
                case("FAIL", f"the model {name}", why)
        if chosen == ["flags"]:
            check_names(runs, named)
        for group, name, how, texts in rows:
            for chain in chains(how, texts):
                kind, why = judge(runs, how, [with_defaults(runs, text) for _, text in chain])
                again = "".join(f"\n     {runs.repeat(text.partition(' -> ')[0])}" for _, text in chain)
                again += "\n     " + shlex.join([sys.argv[0], sys.argv[1], group, name])
                case(kind, f"{name}: {chain[-1][0]}", why + (again if kind == "FAIL" else ""))
    finally:
        runs.remove()
    finish()


if __name__ == "__main__":
    main()
