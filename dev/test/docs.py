#!/usr/bin/env python3
"""Run the commands of README.md and docs/*.md, so that they stay true.

    dev/test/docs.py [PAGE...]          from the repository's root, after make test

A block that begins with "```sh test" runs, in a folder of its page that looks like the repository's root. Words after
"test" name programs that it needs. A block "```text" that follows it shows what it prints: each line must be printed,
in this order, where numbers may differ; a line "..." stands for any others. A command in any other "```sh" block is
only read: the flags that it passes to a trainer must exist, and so must the scripts that it names. The first block of a
page in docs/ must be one that runs.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

from verdicts import ROOT, finish, read, run, skip, verdict

LINKED = "Makefile build dev docs llmc scripts apps train_gpt2 train_bert use_gpt2 use_bert finetune_bert data/builtin"
PROGRAMS = re.compile(r"(\./(?:train_gpt2|train_bert|use_gpt2|use_bert|finetune_bert))(?:cu)?(?: (.*)|$)")


def blocks(text):
    """Blocks of commands: (line, words behind "sh", commands, the output that is shown, or nothing)."""
    found = list(re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.M))
    for block, after in zip(found, found[1:] + found[:1]):
        if block[1].startswith("sh"):
            is_shown = after[1].startswith("text") and not text[block.end() : after.start()].strip()
            yield text.count("\n", 0, block.start()) + 1, block[1].split()[1:], block[2], after[2] if is_shown else ""


def plain(text):
    """Lines as they are compared: any number is #, any run of blanks one blank."""
    return [" ".join(re.sub(r"-?\d[\d.,]*(e[-+]?\d+)?", "#", line).split()) for line in text.split("\n")]


def broken_reference(commands):
    """What commands that do not run here refer to and is not there, or nothing."""
    for line in re.sub(r" # .*", "", commands.replace("\\\n", " ")).split("\n"):
        for word in line.split():
            path = re.split(r"""['"),;:]""", word.lstrip("'\"("))[0]
            if re.match("(dev|scripts|docs)/", path) and not glob.glob(path):
                return f"{path}: there is no such file"
        found = PROGRAMS.search(line)
        for flag in re.findall(r"(?:^| )(--?[a-z][-a-z0-9]*)", found[2] or "") if found else ():
            if not re.search(rf"(^ *| ){flag}( |$)", run(found[1], "--help").stdout, re.M):
                return f"{flag}: {found[1]} has no such flag"
    return ""


def check_run(name, commands, shown, box):
    """Run commands in the folder `box`."""
    begin = ["timeout", "-k", "5", "120", "bash", "-e", "-o", "pipefail", "-c", commands]
    done = subprocess.run(begin, cwd=box, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed = done.stdout.decode(errors="replace")
    lines = iter(plain(printed))
    missing = next((line for line in plain(shown) if line not in ("...", "") and line not in lines), "")
    why = f"its output has no such line, or not in this place: {missing}" if missing else ""
    verdict(name, f"it failed: {printed[-200:]}" if done.returncode else why)


def check_page(page, box):
    os.makedirs(box + "/data")
    for entry in LINKED.split() + glob.glob("*.cu"):
        os.symlink(os.path.join(ROOT, entry), os.path.join(box, entry))
    for i, (line, words, commands, shown) in enumerate(blocks(read(page))):
        name, runs = f"{page}:{line}", words[:1] == ["test"]
        if i == 0 and page.startswith("docs/"):
            verdict(f"{page} begins with a command that runs", "" if runs else "its first block is not ```sh test")
        lacking = [program for program in words[1:] if not shutil.which(program)]
        if not runs:
            verdict(f"{name} (read)", broken_reference(commands))
        elif lacking:
            skip(name, f"{lacking[0]} was not found")
        else:
            check_run(name, commands, shown, box)


os.environ["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
with tempfile.TemporaryDirectory() as folder:
    for page in sys.argv[1:] or ["README.md", *sorted(glob.glob("docs/*.md"))]:
        check_page(page, os.path.join(folder, os.path.basename(page)))
finish()
