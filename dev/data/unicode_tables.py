#!/usr/bin/env python3
"""Write what is asked of characters: the tokenizers' part as the `tokenizers` library answers it.

    unicode_tables.py >llmc/data/unicode.h                      what BERT's text normalization does to each
    unicode_tables.py classes >llmc/data/unicode_classes.h      letter, number or space, for GPT-2's pattern
    unicode_tables.py lower >llmc/data/unicode_lower.h          lower case as Python's, for the score of answers

Left out of the first: CJK compatibility ideographs, and the characters that become two which are not Hangul (vowel
signs of Indic scripts and of Balinese, mostly); they stay as they are. Hangul syllables follow a formula.
"""
import sys
import unicodedata

from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel

HEAD = """/* What splitting a text into words asks of characters. Made by dev/data/unicode_tables.py; do not edit.
 *
 * The folding takes a character to lower case and strips its accents. It leaves CJK compatibility ideographs and the
 * {left_out} characters that would become two (Hangul apart, which follows a formula) as they are. */
#ifndef LLMC_UNICODE_H
#define LLMC_UNICODE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {{
    uint32_t first, last;
}} UnicodeRange;

// Characters first, first + step, ... (`count` of them) become themselves + delta.
typedef struct {{
    uint32_t first;
    uint16_t count, step;
    int32_t delta;
}} UnicodeShift;

static inline int unicode_find(const UnicodeRange* range, size_t n, uint32_t c) {{
    size_t low = 0;
    while (low < n) {{
        size_t middle = low + (n - low) / 2;
        if (range[middle].last < c) low = middle + 1;
        else n = middle;
    }}
    return range[low].last >= c && range[low].first <= c;
}}
"""

CLASSES_HEAD = """/* Letters, numbers and white space among the characters, by which a byte-level tokenizer cuts a text into words. Made
 * by dev/data/unicode_tables.py; do not edit. */
#ifndef LLMC_UNICODE_CLASSES_H
#define LLMC_UNICODE_CLASSES_H

#include <stddef.h>
#include <stdint.h>

typedef enum { UNICODE_OTHER, UNICODE_LETTER, UNICODE_NUMBER, UNICODE_SPACE } UnicodeClass;

static inline UnicodeClass unicode_class(uint32_t c) {
    // A stretch of characters of one class reaches to the next one: 4 * its first character + the class.
    // clang-format off"""
CLASSES_TAIL = """    // clang-format on
    size_t low = 0, high = sizeof(stretch) / sizeof(stretch[0]);  // the stretch is in [low, high)
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (stretch[middle] / 4 <= c) low = middle;
        else high = middle;
    }
    return (UnicodeClass)(stretch[low] % 4);
}

#endif"""

LOWER_HEAD = """/* Characters in lower case, accents kept, as Python's str.lower() has them (Unicode {version}). Made by
 * dev/data/unicode_tables.py; do not edit.
 *
 * It leaves U+0130, the one that becomes two, as it is, and U+03A3 is U+03C3 wherever it stands. */
#ifndef LLMC_UNICODE_LOWER_H
#define LLMC_UNICODE_LOWER_H

#include "unicode.h"

static inline uint32_t unicode_lower(uint32_t c) {{
    // clang-format off"""


def ranges(characters):
    found = []
    for c in sorted(characters):
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
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


def print_class(name, comment, found):
    print(f"\n// {comment}\nstatic inline int unicode_is_{name}(uint32_t c) {{")
    print("    // clang-format off")
    found = ranges(found)
    print_table(name, "UnicodeRange", [(hex(a), hex(b)) for a, b in found])
    print("    // clang-format on")
    print(f"    return unicode_find({name}, sizeof({name}) / sizeof({name}[0]) - 1, c);\n}}")


def class_of(character, split):
    """Its place in UnicodeClass: that of the one class whose characters make one word with it."""
    found = [i for i, one in enumerate("!a1\n") if len(split(one + character + one)) == 1]
    assert len(found) == 1, f"U+{ord(character):04X} is in {len(found)} classes"
    return found[0]


def write_classes():
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    stretches, last = [], None
    for c in range(0x110000):
        # Surrogates are no characters, and never asked for.
        kind = last if 0xD800 <= c <= 0xDFFF else class_of(chr(c), split)
        if kind != last:
            stretches.append(hex(4 * c + kind))
        last = kind
    print(CLASSES_HEAD)
    print_items("stretch", "uint32_t", stretches)
    print(CLASSES_TAIL)


def write_normalization():
    options = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    lower = BertNormalizer(lowercase=True, **options).normalize_str
    cased = BertNormalizer(lowercase=False, **options).normalize_str
    split = BertPreTokenizer().pre_tokenize_str
    removed, space, ideograph, punctuation, mark, folded, left_out = [], [], [], [], [], {}, 0
    for c in range(0x110000):
        if 0xD800 <= c <= 0xDFFF:
            continue
        character = chr(c)
        kept = cased(character)
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
        small = lower(character)
        if not small:
            mark.append(c)
        elif len(small) == 1 and small != character:
            folded[c] = ord(small)
        elif len(small) > 1 and not 0xAC00 <= c <= 0xD7A3:
            left_out += 1
    print(HEAD.format(left_out=left_out), end="")
    print_class("removed", "Control characters and such: they vanish from a text.", removed)
    print_class("space", "White space.", space)
    print_class("ideograph", "CJK ideographs: each is a word.", ideograph)
    print_class("punctuation", "Punctuation, and all ASCII symbols: each is a word.", punctuation)
    print_class("mark", "Accents that stand apart; folding removes them.", mark)
    print("\n// The character in lower case without its accents; 0 where nothing is left of it.")
    print("static inline uint32_t unicode_fold(uint32_t c) {\n    // clang-format off")
    print_table("shift", "UnicodeShift", [(hex(c), n, step, delta) for c, n, step, delta in shifts(folded)])
    print("    // clang-format on")
    print("    if (unicode_is_mark(c)) return 0;")
    print_search()


def print_search():
    print("    for (size_t i = 0; i < sizeof(shift) / sizeof(shift[0]) && shift[i].first <= c; i++) {")
    print("        uint32_t away = c - shift[i].first, step = shift[i].step;")
    print("        int is_one = away % step == 0 && away / step < shift[i].count;")
    print("        if (is_one) return (uint32_t)((int32_t)c + shift[i].delta);")
    print("    }\n    return c;\n}\n\n#endif")


def write_lower():
    characters = (chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF)
    pairs = {ord(c): ord(c.lower()) for c in characters if len(c.lower()) == 1 and c.lower() != c}
    print(LOWER_HEAD.format(version=unicodedata.unidata_version))
    print_table("shift", "UnicodeShift", [(hex(c), n, step, delta) for c, n, step, delta in shifts(pairs)])
    print("    // clang-format on")
    print_search()


if __name__ == "__main__":
    if sys.argv[1:] == ["classes"]:
        write_classes()
    elif sys.argv[1:] == ["lower"]:
        write_lower()
    else:
        write_normalization()
