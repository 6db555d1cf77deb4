#!/usr/bin/env python3
"""Write the tables of characters, taken from the `tokenizers` library: unicode_tables.py >llmc/text/unicode.h"""
import unicodedata

from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel

HEAD = """/* The properties of characters that split a text into words, for BERT's tokenizer and, at the end, for GPT-2's. Generated
 * by dev/data/unicode_tables.py; do not edit.
 *
 * Most tables are runs of equal characters, from U+0000 on: the length of each run. A look-up adds lengths up, so it is
 * fastest for the first characters, as in most texts. */
#ifndef LLMC_TEXT_UNICODE_H
#define LLMC_TEXT_UNICODE_H

#include <stddef.h>
#include <stdint.h>

// Whether c is in the second, fourth, ... of n runs.
static inline int unicode_is_in(const uint32_t* run, size_t n, uint32_t c) {
    size_t i = 0;
    while (i < n && c >= run[i]) c -= run[i++];
    return i < n && i % 2 == 1;
}
"""

LOWER = """
// Characters first, first + step, ... (`count` of them) become themselves + delta.
typedef struct {
    uint32_t first;
    uint16_t count, step;
    int32_t delta;
} UnicodeShift;

// The character in lower case. U+0130, the only one that becomes two, is unchanged; U+03A3 is U+03C3 everywhere.
static inline uint32_t unicode_lower(uint32_t c) {
    // clang-format off"""
LOWER_TAIL = """    // clang-format on
    for (size_t i = 0; i < sizeof(shift) / sizeof(shift[0]) && shift[i].first <= c; i++) {
        uint32_t away = c - shift[i].first, step = shift[i].step;
        if (away % step == 0 && away / step < shift[i].count) return (uint32_t)((int32_t)c + shift[i].delta);
    }
    return c;
}
"""

CLASSES = """
typedef enum { UNICODE_OTHER, UNICODE_LETTER, UNICODE_NUMBER, UNICODE_SPACE } UnicodeClass;

// The class by which a byte-level tokenizer splits a text into words.
static inline UnicodeClass unicode_class(uint32_t c) {
    // 4 * the length of a run of characters of one class + the class.
    // clang-format off"""
CLASSES_TAIL = """    // clang-format on
    size_t i = 0;
    while (i + 1 < sizeof(run) / sizeof(run[0]) && c >= run[i] / 4) c -= run[i++] / 4;
    return (UnicodeClass)(run[i] % 4);
}

#endif"""

STRIP = """
// What a character becomes if that is several, other than Hangul; to[2] may be 0.
typedef struct {
    uint32_t from, to[3];
} UnicodeSeveral;

// Write what is left of the character without its accents, in unchanged case, to `out`: canonical decomposition (NFD)
// without nonspacing marks. Returns how many characters that are.
static inline int unicode_strip(uint32_t out[3], uint32_t c) {
    // clang-format off"""
STRIP_TAIL = """    // clang-format on
    uint32_t hangul = c - 0xAC00;
    out[0] = c;
    if (unicode_is_ideograph(c)) {
        if (c - 0xF900 < sizeof(bmp) / sizeof(bmp[0]) - 1) out[0] = (uint32_t)bmp[c - 0xF900];
        if (c - 0x2F800 < sizeof(beyond) / sizeof(beyond[0]) - 1) out[0] = (uint32_t)beyond[c - 0x2F800];
        return 1;
    }
    if (unicode_is_mark(c)) return 0;
    if (hangul < 11172) {  // a syllable becomes its letters
        out[0] = 0x1100 + hangul / 588, out[1] = 0x1161 + hangul / 28 % 21, out[2] = 0x11A7 + hangul % 28;
        return hangul % 28 ? 3 : 2;
    }
    for (size_t i = 0; i < sizeof(several) / sizeof(several[0]) && several[i].from <= c; i++) {
        if (several[i].from != c) continue;
        for (int k = 0; k < 3; k++) out[k] = several[i].to[k];
        return out[2] ? 3 : 2;
    }
    size_t low = 0, high = sizeof(accented) / sizeof(accented[0]) - 1;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uint32_t)accented[middle] < c) low = middle + 1;
        else high = middle;
    }
    if ((uint32_t)accented[low] == c) out[0] = (uint32_t)plain[low];
    return 1;
}
"""


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


def print_table(name, kind, rows):
    print_items(name, kind, ["{" + ", ".join(str(x) for x in row) + "}" for row in rows])


def print_items(name, kind, items):
    print(f"    static const {kind} {name}[] = {{")
    line = "       "
    for item in items:
        item = f" {item},"
        if len(line) + len(item) > 119:
            print(line)
            line = "       "
        line += item
    print(line)
    print("    };")


def width(text):
    """The columns that an editor needs: two for a wide character."""
    return sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def print_text(name, codes):
    """The characters as a string of wchar_t, 32 bits on Linux.

    Those that an editor may change or turn around are escaped."""
    print(f"    static const wchar_t {name}[] =")
    line = ""
    for c in codes:
        one = chr(c)
        changes = unicodedata.normalize("NFC", one) != one or unicodedata.bidirectional(one) in ("R", "AL", "NSM")
        escaped = changes or one in '"\\?'
        if escaped:
            one = f"\\u{c:04X}" if c < 0x10000 else f"\\U{c:08X}"
        if width(line + one) > 108:
            print(f'        L"{line}"')
            line = ""
        line += one
    print(f'        L"{line}";')


def print_class(name, comment, found):
    print(f"\n// {comment}\nstatic inline int unicode_is_{name}(uint32_t c) {{")
    print("    // clang-format off")
    print_items("run", "uint32_t", runs(set(found)))
    print("    // clang-format on")
    print("    return unicode_is_in(run, sizeof(run) / sizeof(run[0]), c);\n}")


def class_of(character, split):
    """Its place in UnicodeClass: that of the one class whose characters make one word with it."""
    found = [i for i, one in enumerate("!a1\n") if len(split(one + character + one)) == 1]
    assert len(found) == 1, f"U+{ord(character):04X} is in {len(found)} classes"
    return found[0]


def write_classes():
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    found, last = [], None
    for c in range(0x110000):
        # Surrogates are not characters, and never asked for.
        kind = last if 0xD800 <= c <= 0xDFFF else class_of(chr(c), split)
        if kind != last:
            found.append(kind)
        found[-1] += 4
        last = kind
    print(CLASSES)
    print_items("run", "uint32_t", found)
    print(CLASSES_TAIL)


def characters():
    return [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]


OPTIONS = {"clean_text": True, "handle_chinese_chars": True}
strip = BertNormalizer(lowercase=False, strip_accents=True, **OPTIONS).normalize_str


def write_normalization():
    lower = BertNormalizer(lowercase=True, strip_accents=False, **OPTIONS).normalize_str
    cased = BertNormalizer(lowercase=False, strip_accents=False, **OPTIONS).normalize_str
    split = BertPreTokenizer().pre_tokenize_str
    removed, space, ideograph, punctuation, mark, lowered = [], [], [], [], [], {}
    for character in characters():
        c, kept, small = ord(character), cased(character), lower(character)
        if not kept:
            removed.append(c)
            continue
        if kept == " ":
            space.append(c)
            continue
        if kept == f" {character} ":
            ideograph.append(c)
            continue
        if len(split(f"a{character}b")) == 3:
            punctuation.append(c)
        if not strip(character):
            mark.append(c)
        if len(small) == 1 and small != character:
            lowered[c] = ord(small)
    print(HEAD, end="")
    print_class("removed", "Control characters and such: they vanish from a text.", removed)
    print_class("space", "White space.", space)
    print_class("ideograph", "CJK ideographs: each is a word.", ideograph)
    print_class("punctuation", "Punctuation, and all ASCII symbols: each is a word.", punctuation)
    print_class("mark", "Nonspacing marks: stripping removes them.", mark)
    print(LOWER)
    print_table("shift", "UnicodeShift", [(hex(c), n, step, delta) for c, n, step, delta in shifts(lowered)])
    print(LOWER_TAIL, end="")


def write_strip():
    left = {ord(c): [ord(x) for x in strip(c).strip()] for c in characters() if strip(c).strip() not in (c, "")}
    print(STRIP)
    for name, first in ("bmp", 0xF900), ("beyond", 0x2F800):
        compatibility = {c: to[0] for c, to in left.items() if first <= c < first + 0x300 and 0x3400 <= to[0]}
        print(f"    // CJK compatibility ideographs from U+{first:X} on.")
        block = range(first, max(compatibility) + 1)
        print_text(name, [compatibility.get(c, c) for c in block])
        left = {c: to for c, to in left.items() if c not in block}
    several = {c: to for c, to in left.items() if len(to) > 1 and not 0xAC00 <= c <= 0xD7A3}
    rows = [(hex(c), "{" + ", ".join(map(hex, to)) + "}") for c, to in several.items()]
    print_table("several", "UnicodeSeveral", rows)
    pairs = sorted((c, to[0]) for c, to in left.items() if len(to) == 1)
    print("    // What becomes one other character, and that character at the same place.")
    print_text("accented", [c for c, _ in pairs])
    print_text("plain", [to for _, to in pairs])
    print(STRIP_TAIL, end="")


if __name__ == "__main__":
    write_normalization()
    write_strip()
    write_classes()
