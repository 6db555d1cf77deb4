#!/usr/bin/env python3
"""Does llmc/data/wordpiece.h tokenize as the `tokenizers` library does?

Every character below U+20000, inside a word and alone, with a vocabulary that tells all of them apart; then whole
files with a vocabulary of words.

    check_wordpiece.py TEST_DATA [VOCABULARY_FOLDER FILE...]

TEST_DATA is the built dev/test/data.c. Characters that llmc/data/unicode.h names as left out are not compared.
"""
import os
import subprocess
import sys
import tempfile

from tokenizers import BertWordPieceTokenizer
from tokenizers.normalizers import BertNormalizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def is_left_out(c):
    small = BertNormalizer(lowercase=True).normalize_str(chr(c))
    return 0xF900 <= c <= 0xFAFF or (len(small) > 1 and small.strip() != chr(c) and not 0xAC00 <= c <= 0xD7A3)


def differences(program, folder, lines, is_lower, whole=False):
    """The lines for which the program's tokens are others than the library's. `whole`: it reads the library's tokenizer.json."""
    library = BertWordPieceTokenizer(os.path.join(folder, "vocab.txt"), lowercase=is_lower)
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "lines")
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            f.write("\n".join(lines))
        command = [program, "wordpiece", folder, "uncased" if is_lower else "cased", path]
        if whole:
            library.save(os.path.join(work, "tokenizer.json"))
            command[2:4] = [work, "model"]
        got = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode().split("\n")
    want = library.encode_batch(lines, add_special_tokens=False)
    return [line for line, g, w in zip(lines, got, want) if [int(i) for i in g.split()] != w.ids]


def report(name, lines, different):
    if different:
        print(f"FAIL {name}: {len(different)} of {len(lines)} lines differ, the first is {different[0]!r}")
    else:
        print(f"ok   {name}: {len(lines)} lines")
    return not different


def main(program, vocabulary=None, *files):
    good = True
    characters = [c for c in range(1, 0x20000) if not 0xD800 <= c <= 0xDFFF and c != 10]
    with tempfile.TemporaryDirectory() as folder:
        tokens = {chr(c) for c in characters if c > 32 and not chr(c).isspace()}
        with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8", newline="\n") as f:
            f.write("\n".join(SPECIAL + sorted(tokens) + ["##" + t for t in sorted(tokens)]) + "\n")
        lines = [f"a{chr(c)}b {chr(c)}" for c in characters]
        good &= report("characters, cased", lines, differences(program, folder, lines, False))
        lines = [f"a{chr(c)}b {chr(c)}" for c in characters if not is_left_out(c)]
        good &= report("characters, uncased", lines, differences(program, folder, lines, True))
    for file in files:
        with open(file, encoding="utf-8", newline="\n") as f:
            lines = f.read().split("\n")
        for is_lower in (True, False):
            name = f"{os.path.basename(file)}, {'uncased' if is_lower else 'cased'}"
            good &= report(name, lines, differences(program, vocabulary, lines, is_lower))
            good &= report(f"{name}, tokenizer.json", lines, differences(program, vocabulary, lines, is_lower, True))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
