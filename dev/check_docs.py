#!/usr/bin/env python3
"""Check what the documentation refers to: `python3 dev/check_docs.py [FILE...]`, by default every tracked .md file
and docs/index.html.

In every file, relative links (Markdown's, and src, srcset and href of HTML) must lead to a file or folder that git knows,
and #anchors to a heading. In README.md and docs/, where names must be those of today, also: a `path/like/this` that begins
with a folder of the repository must exist, and a `function()` must occur in the sources. Prints one line per error and
ends with status 1 if there is any. Pages in docs/live and docs/examples have a limit of bytes. Fenced blocks are not read:
dev/test/docs.py runs them.
"""
import os
import re
import subprocess
import sys

LINK = re.compile(r'\]\(<?([^()\s>]+)>?(?:\s+"[^"]*")?\)|\b(?:src|srcset|href)="([^"]+)"')
CODE = re.compile(r"`([^`]+)`")
MOST_BYTES = {"docs/live/": 600_000, "docs/examples/": 1_500_000}
SOURCES = (".c", ".h", ".cu", ".cuh", ".py", ".sh")


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def prose(path):
    """The file's lines, each fenced or indented block replaced by empty lines."""
    lines, fence = [], None
    if path.endswith(".html"):
        return read(path).split("\n")
    for line in read(path).split("\n"):
        mark = re.match(r" {0,3}(```+|~~~+)", line)
        if mark and fence is None:
            fence, line = mark.group(1), ""
        elif mark and line.strip().startswith(fence):
            fence, line = None, ""
        lines.append("" if fence or line.startswith("    ") else line)
    return lines


def anchors(path):
    """GitHub's anchors of a file's headings: lower case, punctuation removed, blanks as hyphens, repeated ones numbered."""
    found, seen = set(), {}
    for line in prose(path):
        heading = re.match(r" {0,3}#{1,6} +(.*?) *#*$", line)
        if heading:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
            seen[slug] = seen.get(slug, 0) + 1
        found.update(re.findall(r'<a (?:id|name)="([^"]+)"', line))
    return found


def main():
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    known = set(tracked)
    for path in tracked:
        while path := os.path.dirname(path):
            known.add(path)
    folders = {path for path in known if "/" not in path and os.path.isdir(path)}
    files = sys.argv[1:] or [path for path in tracked if path.endswith(".md") or path == "docs/index.html"]
    code = "".join(read(path) for path in tracked if path.endswith(SOURCES) and os.path.isfile(path))
    functions = set(re.findall(r"\b(\w+)\(", code))
    errors = 0

    def error(path, number, what):
        nonlocal errors
        errors += 1
        print(f"{path}:{number}: {what}")

    for path in tracked:
        most = MOST_BYTES.get(path[: path.rfind("/") + 1])
        if most and os.path.isfile(path) and os.path.getsize(path) >= most:
            error(path, 1, f"{os.path.getsize(path)} bytes; the limit is {most}")
    for path in files:
        is_current = path == "README.md" or path.startswith("docs/")
        for number, line in enumerate(prose(path), 1):
            for markdown, html in LINK.findall(CODE.sub("", line)):
                link = markdown or html
                if re.match(r"[a-z]+:", link):
                    continue
                target, _, anchor = link.partition("#")
                target = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else path
                if target not in known:
                    error(path, number, f"{link}: there is no such file")
                elif anchor and anchor not in anchors(target):
                    error(path, number, f"{link}: {target} has no such heading")
            for word in CODE.findall(line) if is_current else ():
                first = word.split("/")[0]
                if "/" in word and first in folders and re.fullmatch(r"[\w./-]+", word) and word.rstrip("/") not in known:
                    error(path, number, f"`{word}`: there is no such file")
                for name in re.findall(r"^(\w+)\(\)$", word):
                    if name not in functions:
                        error(path, number, f"`{word}`: no source has this function")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
