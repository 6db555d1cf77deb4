#!/usr/bin/env python3
"""List the functions of C and CUDA sources: lines, parameters, place and name.

    python3 dev/functions.py FILE...                             one function a line: lines, parameters, FILE:LINE, name
    python3 dev/functions.py --lines N [--except NAME]... FILE...   those of more than N lines
    python3 dev/functions.py --parameters N FILE...              those of more than N parameters

Lines are counted from the first line of the declaration, template<> included, to the closing brace. A declaration
without a body does not count. Exit status 0, also if some are listed.
"""
import argparse, re

TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n\\]|\\.)*', re.S | re.M)
NOT_NAMES = {"if", "for", "while", "switch", "return", "sizeof", "asm", "alignas", "decltype", "static_assert"}
ATTRIBUTES = {"__launch_bounds__", "__attribute__", "__cluster_dims__", "__align__", "extern"}


def blank(match):
    """Comments, strings and preprocessor lines as spaces, so that positions do not change."""
    return re.sub(r"[^\n]", " ", match[0])


def close(text, start, opening, closing):
    """The index after the bracket that closes the one at `start`. Comparison signs in parentheses do not count as angle brackets."""
    depth = parentheses = 0
    for i in range(start, len(text)):
        parentheses += opening == "<" and (text[i] == "(") - (text[i] == ")")
        if parentheses == 0:
            depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0 and parentheses == 0:
            return i + 1
    return len(text)


def count_parameters(text):
    if text.strip() in ("", "void"):
        return 0
    depth, count = 0, 1
    for c in text:
        depth += (c in "(<[{") - (c in ")>]}")
        count += c == "," and depth == 0
    return count


def signature(text):
    """(name, number of parameters) if `text`, all that stands before a brace, declares a function, else None."""
    text = text.lstrip()
    if text.startswith("template"):
        text = text[close(text, text.index("<"), "<", ">") :]
    if "=" in re.sub(r"\(.*\)", "", text, flags=re.S):
        return None  # an initializer
    at = 0
    while match := re.compile(r"(\w+)\s*\(").search(text, at):
        end = close(text, match.end() - 1, "(", ")")
        if match[1] not in ATTRIBUTES:
            rest = text[end:].strip()
            known = match[1] not in NOT_NAMES and (rest == "" or re.fullmatch(r"(const|noexcept|->.*|:.*)*", rest, re.S))
            return (match[1], count_parameters(text[match.end() : end - 1])) if known else None
        at = end
    return None


def functions(path):
    """[(lines, parameters, line, name)]"""
    text = TOKEN.sub(blank, open(path).read())
    result, start, i = [], 0, 0  # start: where the present declaration begins
    while i < len(text):
        c = text[i]
        if c == ";" or c == "}":
            start = i + 1
        elif c == "(":
            i = close(text, i, "(", ")") - 1
        elif c == "{":
            head = text[start:i]
            end = close(text, i, "{", "}")
            found = signature(head)
            if found:
                first = start + len(head) - len(head.lstrip())
                line = text.count("\n", 0, first) + 1
                result.append((text.count("\n", first, end) + 1, found[1], line, found[0]))
                i = end - 1
            elif re.search(r"\b(namespace|extern|struct|class)\b", head) and "(" not in head and "=" not in head:
                start = i + 1  # functions may stand inside
                i += 1
                continue
            else:
                i = end - 1
            start = i + 1
        i += 1
    return result


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
