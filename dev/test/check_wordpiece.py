#!/usr/bin/env python3
"""Does llmc/text/wordpiece.h tokenize as the `tokenizers` library does?

Every character below U+20000 and those above that are not all alike, inside a word and alone, with a vocabulary that
tells them apart; odd lines (accents composed and decomposed, combining marks in any order, CJK, mixtures); then whole
files with a vocabulary of words. Each with all that tokenizer_config.json and the normalizer of tokenizer.json may say
of case, accents and ideographs.

    check_wordpiece.py TEST_DATA [VOCABULARY_FOLDER FILE...]

TEST_DATA is the built dev/test/data.c.
"""
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unicodedata

from tokenizers import BertWordPieceTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

# Bases, marks and whole pieces that odd lines are made of.
BASES = "aAeEiIoOuUcCnNsSzZyYøØıςΣαΩгИйæÆßſ中国가각ㄱ1-"
MARKS = [*map(chr, range(0x300, 0x305)), *"\u0306\u0307\u0308\u030a\u030c\u0323\u0327\u0328\u0345\u0483\u05b0\u064b"]
PIECES = """İstanbul ISTANBUL ΑΣΣ Ὀδυσσεύς ᾼ ᾳ Ǆungla ǅ ﬁne K Å Ω Ａｂ ① Việt Łódź Ђорђе 東京tower 中\u0301国 abc中def 㐀㐁
    日本語です カタカナ 한국어 각 ㄱㄴ 한中한 \U00020000\U0002a6df e\u200d\u0301 e\u00ad\u0301 \u0301 \u0301a
    a\u0301\u0301\u0323 é.è!ê naïve-café's [MASK]É É[SEP]中""".split()


def odd_lines():
    """The same lines on every machine, each several words; NFC and NFD of whatever has both."""
    words = list(PIECES)
    for k, base in enumerate(BASES):
        words += [base + mark for mark in MARKS[k % 3 :: 3]] + ["x" + base + MARKS[k % len(MARKS)] + "Y"]
    words += [unicodedata.normalize(form, w) for w in words for form in ("NFC", "NFD")]
    words = list(dict.fromkeys(words))
    return [" ".join(words[i : i + 3]) for i in range(0, len(words), 2)] + ["".join(words[i::97]) for i in range(97)]


def check(name, program, folder, lines, rules, whole=False):
    """Whether the program's tokens are the library's. `whole`: it reads the library's tokenizer.json, else vocab.txt
    and tokenizer_config.json."""
    lower, accents, chinese = rules
    vocabulary = os.path.join(folder, "vocab.txt")
    library = BertWordPieceTokenizer(vocabulary, lowercase=lower, strip_accents=accents, handle_chinese_chars=chinese)
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "lines")
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            f.write("\n".join(lines))
        if whole:
            library.save(os.path.join(work, "tokenizer.json"))
        else:
            shutil.copy(vocabulary, work)
            keys = {"do_lower_case": lower, "strip_accents": accents, "tokenize_chinese_chars": chinese}
            with open(os.path.join(work, "tokenizer_config.json"), "w", encoding="utf-8") as f:
                json.dump(keys, f)
        command = [program, "wordpiece", work, path]
        got = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode().split("\n")
    want = library.encode_batch(lines, add_special_tokens=False)
    different = [line for line, g, w in zip(lines, got, want) if [int(i) for i in g.split()] != w.ids]
    name += f", lower {lower}, strip_accents {accents}, chinese {chinese}" + ", tokenizer.json" * whole
    if different:
        print(f"FAIL {name}: {len(different)} of {len(lines)} lines differ, the first is {different[0]!r}")
    else:
        print(f"ok   {name}: {len(lines)} lines")
    return not different


def main(program, vocabulary=None, *files):
    good = True
    # Above U+20000 are ideographs, which are alike but for those of compatibility, tags, and nothing.
    numbers = [*range(1, 0x20000), *range(0x2F800, 0x2FA20), *range(0xE0000, 0xE0200), *range(0x20000, 0x110000, 64)]
    characters = [chr(c) for c in numbers if not 0xD800 <= c <= 0xDFFF and c != 10]
    with tempfile.TemporaryDirectory() as folder:
        tokens = {unicodedata.normalize("NFD", c) for c in characters if unicodedata.decomposition(c)}
        tokens |= set(characters)
        tokens = sorted(c for c in tokens if len(c) == 1 and c > " " and not c.isspace())
        with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8", newline="\n") as f:
            f.write("\n".join(SPECIAL + tokens + ["##" + t for t in tokens]) + "\n")
        parts = [characters[i : i + 16] for i in range(0, len(characters), 16)]
        lines = [" ".join(f"a{c}b {c}" for c in part) for part in parts]
        for lower, accents in itertools.product((True, False), repeat=2):
            good &= check("characters", program, folder, lines, (lower, accents, True))
        for *rules, whole in itertools.product((True, False), (None, True, False), (True, False), (False, True)):
            good &= check("odd lines", program, folder, odd_lines(), rules, whole)
    for file, lower, whole in itertools.product(files, (True, False), (False, True)):
        with open(file, encoding="utf-8", newline="\n") as f:
            lines = f.read().split("\n")
        good &= check(os.path.basename(file), program, vocabulary, lines, (lower, None, True), whole)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
