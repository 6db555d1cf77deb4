#!/usr/bin/env python3
"""List the functions of C and CUDA sources: lines, parameters, place and name.

    python3 dev/functions.py FILE...                             one function a line: lines, parameters, FILE:LINE, name
    python3 dev/functions.py --lines N [--except NAME]... FILE...   those of more than N lines
    python3 dev/functions.py --parameters N FILE...              those of more than N parameters

Lines are counted from the first line of the declaration, template<> included, to the closing brace. A declaration
without a body does not count. The sources are as clang-format leaves them: a function's brace closes at the start of a
line, or in the line where it opens. Exit status 0, also if some are listed.
"""
import argparse, re

TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n\\]|\\.)*', re.S | re.M)
HEAD = re.compile(r"(\w+)\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\s*\{")  # name, parameters


def blank(match):
    """Comments, strings and preprocessor lines as spaces, so that positions do not change."""
    return re.sub(r"[^\n]", " ", match[0])


def count_parameters(text):
    if text.strip() in ("", "void"):
        return 0
    depth, count = 0, 1
    for c in text:
        depth += (c in "(<[{") - (c in ")>]}")
        count += c == "," and depth == 0
    return count


def functions(path):
    """[(lines, parameters, line, name)]"""
    text, end, found = TOKEN.sub(blank, open(path).read()), 0, []
    while match := HEAD.search(text, end):
        before = text[end : match.start()]
        head = re.split("[;{}]", before)[-1].lstrip()  # the declaration up to its name
        first = match.start() - len(head)
        end = text.find("\n", match.end())
        if not text[match.end() : end].strip():
            end = text.find("\n}", match.end()) + 2
        lines, line = text.count("\n", first, end) + 1, text.count("\n", 0, first) + 1
        found.append((lines, count_parameters(match[2]), line, match[1]))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=-1, help="list functions of more lines")
    parser.add_argument("--parameters", type=int, default=-1, help="list functions of more parameters")
    parser.add_argument("--except", dest="exceptions", action="append", default=[], help="a name that is not listed")
    parser.add_argument("files", nargs="+")
    o = parser.parse_args()
    rows = [(lines, parameters, f"{path}:{line}", name)
            for path in o.files for lines, parameters, line, name in functions(path)]
    for lines, parameters, place, name in sorted(rows, reverse=True):
        if lines > o.lines and parameters > o.parameters and name not in o.exceptions:
            print(f"{lines:4} lines {parameters:2} parameters  {place} {name}()")


if __name__ == "__main__":
    main()
