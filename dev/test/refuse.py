#!/usr/bin/env python3
"""What a program refuses: dev/test/refuse.txt, and cases that follow from the flags that --help prints.

    dev/test/refuse.py TRAINER [GROUP [CASE]]      from the repository's root, for example ./train_gpt2 flags

A row is "FLAGS | STATUS PATTERN [| SOURCE: EDIT; EDIT]" (the form of FLAGS: dev/test/runs.py). The program must end
with STATUS and with one line on stderr, "error: ...", that matches PATTERN, and create or change no file. STATUS 0: it
must run without a warning, and each PATTERN, with " && " between them, hold: its output matches; "@FILE PATTERN": that
file does; "again" or "other": its losses are those, or not those, of the last row with STATUS 0 and without "again". A
PATTERN "^warning: ..." allows for warnings, and "unchanged" for no new file. With a third field the row's `changed` is
a copy of SOURCE with these edits (dev/test/edit.py). The PATTERN "same" stands for that of the row before. "make NAME =
RUNS" makes a model, or a run to resume, that rows may name; "make NAME = SOURCE: EDIT; EDIT" a changed copy.

Of each flag of each program, the group `generated` has these: no value, given twice, no number or choice, below
its least value, above its most, hexadecimal, empty. Ends with `N passed, N failed, N skipped`; exit status 1 if one
failed.
"""

import concurrent.futures
import os
import re
import shlex
import shutil
import sys

sys.dont_write_bytecode = True
from edit import edit  # noqa: E402
from runs import Runs, case, flags_of, put_files, read_table  # noqa: E402
from verdicts import finish  # noqa: E402


def listing(folder, status):
    """All that is in a folder, and when it was changed. A run that has begun (STATUS 3) may leave its output, new*."""
    found = {}
    for at, folders, names in os.walk(folder):
        for name in folders + names:
            path = os.path.join(at, name)
            if status == 3 and os.path.relpath(path, folder).startswith("new"):
                continue
            state = os.lstat(path)
            found[path] = (state.st_mode, state.st_size, state.st_mtime_ns) if name in names else state.st_mode
    return found


def wrong_run(runs, result, patterns):
    """Why a run that is accepted is not what PATTERNS say, or nothing."""
    losses = re.findall(r"loss [0-9.a-z-]+", result.stdout)
    before, patterns = getattr(runs, "losses", []), patterns.split(" && ")
    if "warning: " in result.stderr and not any(p.startswith("^warning") for p in patterns):
        return f"it says {result.stderr.strip()}"
    if "again" not in patterns:
        runs.losses = losses
    for pattern in patterns:
        text, at = result.stdout + result.stderr, re.match(r"@(\S+) (.*)", pattern)
        if at:
            with open(os.path.join(runs.files, at[1]), encoding="latin-1") as f:
                text, pattern = f.read(), at[2]
        if pattern in ("again", "other"):
            if not losses or (losses == before) != (pattern == "again"):
                return f"losses {losses} after {before}, which must be {pattern}"
        elif pattern != "unchanged" and not re.search(pattern, text, re.M):
            return f"'{text[-300:]}' does not match '{pattern}'"
    return ""


def wrong_line(runs, result, status, pattern):
    """Why a refusal is not STATUS and one line that matches PATTERN, or nothing."""
    why = result.wrong(status)
    found = result.stderr.rstrip("\n").split("\n")
    if why or status == 0:
        return why or wrong_run(runs, result, pattern)
    if len(found) != 1 or not found[0].startswith("error: "):
        return f"stderr is not one line that begins with 'error:': {found[-3:]}"
    return "" if re.search(pattern, found[0]) else f"'{found[0]}' does not match '{pattern}'"


def refusal(runs, name, run, status, pattern, again):
    """Count the case of one run in the folder of files."""
    words, missing = runs.command(run)
    if missing:
        case("skip", name, missing)
        return
    words += [] if re.search(r"(^| )(-o|--output)", run) else ["-o", "new"]
    before = listing(runs.files, status)
    result = runs.start(words, runs.files)
    why = wrong_line(runs, result, status, pattern)
    if (status != 0 or "unchanged" in pattern) and before != listing(runs.files, status):
        why = why or "files were created or changed"
    shutil.rmtree(os.path.join(runs.files, "new"), ignore_errors=True)
    case("FAIL" if why else "ok", name, f"{why}\n     {shlex.join(words)}\n     {again}" if why else "")


# ---------------------------------------------------------------------------------------------------------
# Cases that follow from a flag's row


def cases_of(short, long, allowed):
    """Pairs of arguments and what the error says besides the flag's name. ALLOWED: its values; a text has none."""
    name = re.escape(f"{short} {long}".strip())
    yield [long], "needs a value"
    value = re.split(r"\.\.|\|", allowed.replace(">= ", ""))[0] or "x"
    yield [long, value, f"{long}={value}"], "given twice"
    if short:
        yield [short, value, long, value], "given twice"
    if not allowed:
        return
    words = re.escape(allowed)
    yield [f"{long}="], f"{name}: "
    yield [long, "x"], f"{name}: 'x' .*{words}"
    if "|" in allowed:
        return
    least, _, most = allowed.replace(">= ", "").partition("..")
    below = f"{float(least) * 0.5 if 'e' in least else float(least) - 1:.9g}"
    yield [long, below], f"{name}: '{below}' .*{words}"
    yield [long, "nan"], f"{name}: 'nan' "
    yield [long, "0x1"], f"{name}: '0x1' "
    above = "1e999" if not most else "99999999999999999999" if "e" not in most and "." not in most else "1e39"
    yield [long, above], f"{name}: '{above}' .*{words}"
    if most and "." not in most and "e" not in most:
        above = str(int(most) + 1)
        yield [long, above], f"{name}: '{above}' .*{words}"


def generated(runs, which, only, again):
    """The cases of one program's flags."""
    mark = f"[{which}] " if which else ""
    rows = list(flags_of(runs, mark))
    if len(rows) < 30:
        case("FAIL", f"the flags of {which or 'the trainer'} in --help", f"{len(rows)} were found")
    for short, long, _, allowed in rows:
        for arguments, pattern in cases_of(short, long, allowed):
            run = mark + shlex.join(arguments)
            if only in ("", run):
                refusal(runs, run, run, 2, pattern, again + shlex.quote(run))


# ---------------------------------------------------------------------------------------------------------
# Rows


def put_changed(runs, name, field):
    """A copy of files with edits: FIELD is "SOURCE: EDIT; EDIT"."""
    source, _, commands = field.partition(":")
    shutil.copytree(os.path.join(runs.files, source), os.path.join(runs.files, name), symlinks=True)
    for command in commands.split("; "):
        edit(os.path.join(runs.files, name), *shlex.split(command))


def run_rows(runs, rows, only, again):
    last = ""
    for line, text in rows:
        if text.startswith("make "):
            name, made = (part.strip() for part in text[5:].split("=", 1))
            why = put_changed(runs, name, made) if re.match(r"\w+:", made) else runs.make(name, made)
            if why:
                case("skip" if "mpirun" in why else "FAIL", f"the model {name}", why)
            continue
        run, expected, *edits = (part.strip() for part in text.split(" | "))
        status, _, pattern = expected.partition(" ")
        pattern = last = last if pattern == "same" else pattern
        if only not in ("", line):
            continue
        shutil.rmtree(os.path.join(runs.files, "changed"), ignore_errors=True)
        for field in edits:
            put_changed(runs, "changed", field)
        refusal(runs, line, run, int(status), pattern, again + shlex.quote(line))


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    group_only, only = (sys.argv[2:] + ["", ""])[:2]
    trainer = "bert" if "bert" in os.path.basename(sys.argv[1]) else "gpt2"
    groups = {}
    for group, line, text in read_table("refuse.txt", trainer):
        groups.setdefault(group, []).append((line, text))

    def run_group(group):
        runs, again = Runs(sys.argv[1]), f"{sys.argv[0]} {sys.argv[1]} {group} "
        try:
            put_files(runs)
            if group in groups:
                run_rows(runs, groups[group], only, again)
            else:
                generated(runs, group.partition(" ")[2], only, again)
        finally:
            runs.remove()

    names = ["generated", "generated use"] + ["generated tune"] * (trainer == "bert") + list(groups)
    chosen = [name for name in names if group_only in ("", name)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # each group has files of its own
        list(pool.map(run_group, chosen))
    finish()


if __name__ == "__main__":
    main()
