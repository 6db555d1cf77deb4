#!/usr/bin/env python3
"""Write the tables of characters in llmc/text/unicode.h, taken from the `tokenizers` library, and leave its functions
as they are: unicode_tables.py llmc/text/unicode.h"""
import re
import sys
import unicodedata

from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel

CHARACTERS = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
OPTIONS = {"clean_text": True, "handle_chinese_chars": True}
strip = BertNormalizer(lowercase=False, strip_accents=True, **OPTIONS).normalize_str
lower = BertNormalizer(lowercase=True, strip_accents=False, **OPTIONS).normalize_str
cased = BertNormalizer(lowercase=False, strip_accents=False, **OPTIONS).normalize_str
split = BertPreTokenizer().pre_tokenize_str
split_bytes = ByteLevel(add_prefix_space=False).pre_tokenize_str


# ---------------------------------------------------------------------------------------------------------
# What the tables hold


def runs(characters):
    """The lengths of runs of characters that are not, and are, among these."""
    found, last = [0], False
    for c in range(max(characters) + 1):
        if (c in characters) != last:
            found.append(0)
            last = not last
        found[-1] += 1
    return found


def shifts(pairs):
    """[(first, count, step, delta)] that cover the dict exactly."""
    left, found = dict(pairs), []
    for c in sorted(pairs):
        if c not in left:
            continue
        delta, best = left[c] - c, (1, 1)
        for step in (1, 2):
            n = 1
            while left.get(c + step * n, -1) - (c + step * n) == delta:
                n += 1
            best = max(best, (n, -step))
        n, step = best[0], abs(best[1])
        found.append((c, n, step, delta))
        for i in range(n):
            del left[c + step * i]
    return found


def class_of(c):
    """Its place in UnicodeClass: that of the one class whose characters make one word with it."""
    found = [i for i, one in enumerate("!a1\n") if len(split_bytes(one + chr(c) + one)) == 1]
    if len(found) != 1:
        sys.exit(f"error: U+{c:04X} is in {len(found)} classes")
    return found[0]


def class_runs():
    """4 * the length of a run of characters of one class + the class."""
    found, last = [], None
    for c in range(0x110000):
        # Surrogates are not characters, and never asked for.
        kind = last if 0xD800 <= c <= 0xDFFF else class_of(c)
        if kind != last:
            found.append(kind)
        found[-1] += 4
        last = kind
    return found


# ---------------------------------------------------------------------------------------------------------
# How they are written


def items(values):
    lines = ["       "]
    for value in values:
        if len(lines[-1]) + len(f" {value},") > 119:
            lines.append("       ")
        lines[-1] += f" {value},"
    return " {\n" + "\n".join(lines) + "\n    };\n"


def rows(tuples):
    return items("{" + ", ".join(map(str, row)) + "}" for row in tuples)


def width(text):
    """The columns that an editor needs: two for a wide character."""
    return sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def text(codes):
    """The characters as a string of wchar_t, 32 bits on Linux. Those that an editor may change or turn around are
    escaped."""
    lines = [""]
    for c in codes:
        one = chr(c)
        changes = unicodedata.normalize("NFC", one) != one or unicodedata.bidirectional(one) in ("R", "AL", "NSM")
        if changes or one in '"\\?':
            one = f"\\u{c:04X}" if c < 0x10000 else f"\\U{c:08X}"
        if width(lines[-1] + one) > 108:
            lines.append("")
        lines[-1] += one
    return "\n" + "\n".join(f'        L"{line}"' for line in lines) + ";\n"


# ---------------------------------------------------------------------------------------------------------
# The tables, in the order of the file


def tables_of_classes():
    """Of BERT's classes, and of lower case."""
    found = {name: set() for name in ("removed", "space", "ideograph", "punctuation", "mark")}
    lowered = {}
    for character in CHARACTERS:
        c, kept, small = ord(character), cased(character), lower(character)
        kind = {"": "removed", " ": "space", f" {character} ": "ideograph"}.get(kept)
        if kind:
            found[kind].add(c)
            continue
        if len(split(f"a{character}b")) == 3:
            found["punctuation"].add(c)
        if not strip(character):
            found["mark"].add(c)
        if len(small) == 1 and small != character:
            lowered[c] = ord(small)
    yield from (items(runs(characters)) for characters in found.values())
    yield rows((hex(c), n, step, delta) for c, n, step, delta in shifts(lowered))


def tables_of_accents():
    """Of CJK compatibility ideographs, of what becomes several characters, and of what becomes one other."""
    left = {ord(c): [ord(x) for x in strip(c).strip()] for c in CHARACTERS if strip(c).strip() not in (c, "")}
    for first in (0xF900, 0x2F800):
        compatibility = {c: to[0] for c, to in left.items() if first <= c < first + 0x300 and 0x3400 <= to[0]}
        block = range(first, max(compatibility) + 1)
        yield text(compatibility.get(c, c) for c in block)
        left = {c: to for c, to in left.items() if c not in block}
    several = {c: to for c, to in left.items() if len(to) > 1 and not 0xAC00 <= c <= 0xD7A3}
    yield rows((hex(c), "{" + ", ".join(map(hex, to)) + "}") for c, to in several.items())
    pairs = sorted((c, to[0]) for c, to in left.items() if len(to) == 1)
    yield text(c for c, _ in pairs)
    yield text(to for _, to in pairs)


def main(path):
    tables = [*tables_of_classes(), *tables_of_accents(), items(class_runs())]
    with open(path, encoding="utf-8") as f:
        parts = re.split(r"(?<=\[\] =)\s.*?;\n", f.read(), flags=re.S)
    if len(parts) != len(tables) + 1:
        sys.exit(f"error: {path}: has {len(parts) - 1} tables, not {len(tables)}")
    with open(path, "w", encoding="utf-8") as f:
        f.write(parts[0] + "".join(table + part for table, part in zip(tables, parts[1:])))


if __name__ == "__main__":
    main(sys.argv[1])
