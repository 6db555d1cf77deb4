#!/usr/bin/env python3
"""Do apps/use/bpe.h and llmc/text/wordpiece.h encode as the `tokenizers` library does?

Every character, after one of each class; then 10 MB (MEGABYTES) of mixed text: prose, sources, words of any script, odd
white space, runs, special tokens, and bytes that are no UTF-8, which the library is given as Python's
decode(errors="replace") has them. WordPiece with all that tokenizer_config.json and the normalizer of tokenizer.json
may say of case, accents and ideographs.

    check_tokenizers.py TEST_TOKENIZERS [GPT2_BPE_FOLDER [MEGABYTES]]

TEST_TOKENIZERS is the built dev/test/tokenizers.c. GPT-2's vocabulary is tested if the folder is there; without an
argument it is gpt2-bpe in LLMC_TEST_DATA (docs/testing.md), which may also hold prose. Run it at the top of the
project. Prints a line a case and `N passed, N failed, N skipped`.
"""

import array
import glob
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata

import tokenizers
from tokenizers import AddedToken, BertWordPieceTokenizer, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

DATA = os.environ.get("LLMC_TEST_DATA", "")
END_OF_TEXT = "<|endoftext|>"
counts = {"ok": 0, "FAIL": 0, "skip": 0}


def report(kind, text):
    counts[kind] += 1
    print(f"{kind:4} {text}", flush=True)


# ----------------------------------------------------------------------------------------------------------
# Mixed text

# Ranges of characters: words of one to eight of a range, with one of the tails.
WORDS = [(0x61, 0x7A), (32, 126), (9, 126), (0x391, 0x3C9), (0x5D0, 0x5EA), (0x620, 0x64A), (0x904, 0x939),
         (0x4E00, 0x9FFF), (0x3041, 0x30FF), (0xAC00, 0xD7A3), (0x20000, 0x2A6DF), (0x1F300, 0x1FAFF),
         (0x1F1E6, 0x1F1FF), (0x300, 0x36F), (0x5B0, 0x5C7), (0x93A, 0x94D), (0x20D0, 0x20F0), (0x2000, 0x200F),
         (0x80, 0xFF), (0, 0xD7FF), (0xE000, 0x10FFFF)]  # fmt: skip
TAILS = ["", "", " ", "  ", "\n", "\u3000", "\u200d", "\ufeff", "、", "１２", "1", "!", "-", "\u0301", "中", "😀", "xyz",
         "xyzx", "yz!", "the", " the", "<|", "|>", END_OF_TEXT, END_OF_TEXT[:-1],
         *"'s 't 're 've 'm 'll 'd 'S 'l 'r ''".split()]  # fmt: skip


def piece(rng):
    """A word, a run of its last character, or white space."""
    first, last = rng.choice(WORDS)
    word = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
    return word + word[-1] * rng.choice([0] * 40 + [3, 10, 100, 1000]) + rng.choice(TAILS)


def damaged(rng, text):
    """UTF-8 with bytes changed, taken out and put in, and pieces of nothing but bytes."""
    data = bytearray(text.encode())
    wrong = [b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\xff"]
    for _ in range(len(data) // 40):
        at = rng.randrange(len(data))
        some = bytes(rng.randrange(256) for _ in range(rng.randint(1, 12)))
        cut = rng.choice([1, rng.randint(1, 3), 0, 0])
        data[at : at + cut] = rng.choice([some[:1], b""]) if cut else rng.choice([rng.choice(wrong), some])
    return bytes(data)


def mixed_text(size):
    """Documents of about `size` bytes in all: prose, sources, and pieces, of which half are no UTF-8."""
    rng = random.Random(20240520)
    paths = [DATA + "/tinyshakespeare/input.txt", DATA + "/wikitext-2/*.txt", "build/test_corpus/text/*"]
    found = []
    for path in sorted(sum(map(glob.glob, paths), [])):
        with open(path, "rb") as f:
            found.append(f.read(1 << 17))
    while sum(map(len, found)) < size:
        text = "".join(piece(rng) for _ in range(8000))
        found += [text.encode(), damaged(rng, text)]
    rng.shuffle(found)
    return found


# ----------------------------------------------------------------------------------------------------------
# Comparison


def ask(program, mode, folder, documents, work):
    """What the program says of each document."""
    paths = [os.path.join(work, f"{i}.txt") for i in range(len(documents))]
    for path, data in zip(paths, documents):
        with open(path, "wb") as f:
            f.write(data)
    done = subprocess.run([program, mode, folder, *paths], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"FAIL {program} {mode} {folder}: {done.stderr.decode(errors='replace')}")
    values, at = array.array("i", done.stdout), 0
    for _ in documents:
        yield list(values[at + 1 : at + 1 + values[at]])
        at += 1 + values[at]


def compare(name, got, want):
    got, count = list(got), sum(map(len, want))
    for number, (g, w) in enumerate(zip(got, want)):
        if g != w:
            at = next((i for i, (a, b) in enumerate(zip(g, w)) if a != b), min(len(g), len(w)))
            places = f"{g[at : at + 5]}, not {w[at : at + 5]}; {len(g)} and {len(w)} in all"
            return report("FAIL", f"{name}: document {number}: differ at {at}: {places}")
    return report("ok", f"{name}: {count} in {len(got)} documents")


def check_words(program, folder, work):
    """Where words end, for every character after a letter, a number, another character, white space and itself. Where
    the library has another Unicode version, dev/data/unicode_tables.py makes the tables again."""
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    parts = [characters[i : i + 4096] for i in range(0, len(characters), 4096)]
    texts = ["".join(f"a{c}1{c}!{c}\n{c}{c}" for c in part) for part in parts]
    got = ask(program, "words", folder, [text.encode() for text in texts], work)
    # The library spells a word with a character for each byte.
    want = [[len(word) for word, _ in split(text)] for text in texts]
    compare(f"words around every character, 4096 a document, tokenizers {tokenizers.__version__}", got, want)


def check_tokens(name, program, folder, tokenizer, documents, work):
    for mode in ("text", "token"):
        tokenizer.encode_special_tokens = mode == "text"
        texts = [data.decode(errors="replace") for data in documents]
        want = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        got = ask(program, mode, folder, documents, work)
        compare(f"{name}, special tokens as {mode}", got, want)


def save_own_tokenizer(folder, mixed):
    """A vocabulary made here, with added tokens, some of which begin together; then the same with GPT-2's pre-tokenizer
    in other words. Yields the name of each while it lies in the folder."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    sizes = {"vocab_size": 6000, "initial_alphabet": ByteLevel.alphabet()}
    trainer = BpeTrainer(special_tokens=[END_OF_TEXT], show_progress=False, **sizes)
    tokenizer.train_from_iterator((data.decode(errors="replace")[:20000] for data in mixed[:12]), trainer)
    tokenizer.add_special_tokens(["<|", "xyz"])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in ("   ", "xyzx", "中", "the", "'s")])
    tail = r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    bare = ByteLevel(add_prefix_space=False, use_regex=False)
    for name, split in [
        ("own vocabulary", None),
        ("Split, isolated", Split(Regex("'s|'t|'re|'ve|'m|'ll|'d" + tail), "isolated")),
        ("Split, removed, inverted", Split(Regex("'(?:[sdmt]|ll|ve|re)" + tail), "removed", invert=True)),
    ]:
        if split:
            tokenizer.pre_tokenizer = Sequence([split, bare])
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        yield name


# Marks in any order, composed and not; Greek and Turkish cases; what looks alike; ideographs of either kind.
ODD = """İstanbul ΑΣΣ Ὀδυσσεύς ᾼ ǅ ﬁne K Å Ａｂ ① Việt Łódź 東京tower 中\u0301国 abc中def 㐀 カタカナ 한국어 각 \U0002a6df e\u00ad\u0301
    a\u0323\u0301 a\u0301\u0323 \u0301a é.è!ê naïve-café's কো 豈 [MASK]É É[SEP]中 [mask]""".split()


def save_vocabulary(folder, prose):
    """A WordPiece vocabulary that tells characters apart, inside a word and alone, and has words. Returns them all: above
    U+20000, where ideographs are alike, some of them, those of compatibility, and tags."""
    numbers = [*range(1, 0x20000), *range(0x2F800, 0x2FA20), *range(0xE0000, 0xE0200), *range(0x20000, 0x110000, 64)]
    characters = [chr(c) for c in numbers if not 0xD800 <= c <= 0xDFFF]
    tokens = {unicodedata.normalize("NFD", c) for c in characters if unicodedata.decomposition(c)} | {*characters}
    tokens = sorted(c for c in tokens if len(c) == 1 and c > " " and not c.isspace())
    words = [w for w in sorted({*prose.split()}) if len(w) > 1 and w.isalpha()]
    with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8", newline="\n") as f:
        f.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokens, *("##" + t for t in tokens)]) + "\n")
        f.write("\n".join([*words, *sorted({"##" + w[k:] for w in words for k in range(1, len(w) - 1)})]))
    return characters


def check_wordpiece(program, mixed, work):
    """Rules of tokenizer_config.json next to vocab.txt, and those of the library's own tokenizer.json."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as whole:
        prose = [data.decode(errors="replace") for data in mixed if data[:1] == b"#"]
        characters = save_vocabulary(folder, "\n".join(prose))
        odd = [unicodedata.normalize(form, " ".join(ODD)) for form in ("NFC", "NFD")]
        texts = odd + [data.decode(errors="replace") for data in mixed]
        parts = [characters[i : i + 4096] for i in range(0, len(characters), 4096)]
        every = texts + ["".join(f"a{c}b {c} " for c in part) for part in parts]
        for lower, accents, chinese in itertools.product((True, False), (None, True, False), (True, False)):
            rules = {"lowercase": lower, "strip_accents": accents, "handle_chinese_chars": chinese}
            library = BertWordPieceTokenizer(os.path.join(folder, "vocab.txt"), **rules)
            library.save(os.path.join(whole, "tokenizer.json"))
            with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
                json.dump({"do_lower_case": lower, "strip_accents": accents, "tokenize_chinese_chars": chinese}, f)
            some = every if chinese and accents is not None else texts
            want = [one.ids for one in library.encode_batch(some, add_special_tokens=False)]
            for where, name in ((folder, "vocab.txt"), (whole, "tokenizer.json")):
                got = ask(program, "wordpiece", where, [text.encode() for text in some], work)
                compare(f"{name}, {rules}", got, want)


def main(program, gpt2=DATA + "/gpt2-bpe", megabytes="10"):
    program = os.path.abspath(program)
    mixed = mixed_text(float(megabytes) * 1e6)
    builtin = "build/test_corpus/builtin"
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as own:
        check_wordpiece(program, mixed[:12], work)
        for name in save_own_tokenizer(own, mixed):
            tokenizer = Tokenizer.from_file(os.path.join(own, "tokenizer.json"))
            check_tokens(name, program, own, tokenizer, mixed[:12], work)
        check_words(program, own, work)
        if os.path.isfile(builtin + "/tokenizer.json"):
            tokenizer = Tokenizer.from_file(builtin + "/tokenizer.json")
            check_tokens("bytes as tokens", program, builtin, tokenizer, mixed[:12], work)
        else:
            report("skip", "bytes as tokens: no build/test_corpus")
        if os.path.isfile(os.path.join(gpt2, "encoder.json")):
            files = [os.path.join(gpt2, name) for name in ("encoder.json", "vocab.bpe")]
            tokenizer = Tokenizer(BPE.from_file(*files))
            tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
            tokenizer.add_special_tokens([END_OF_TEXT])
            check_tokens("GPT-2's vocabulary", program, gpt2, tokenizer, mixed, work)
        else:
            report("skip", "GPT-2's vocabulary: set LLMC_TEST_DATA to a folder with gpt2-bpe (docs/testing.md)")
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
