#!/usr/bin/env python3
"""Does llmc/text/bpe.h encode as the `tokenizers` library does?

Every character, after one of each class; then 10 MB (MEGABYTES) of mixed text: prose, sources, CJK, emoji, marks, odd
white space, any characters, long runs, special tokens, and bytes that are no UTF-8, which the library is given as
Python's decode(errors="replace") has them.

    check_bpe.py TEST_BPE [GPT2_BPE_FOLDER [MEGABYTES]]

TEST_BPE is the built dev/test/bpe.c. GPT-2's vocabulary is tested if the folder is there; without an argument it is
gpt2-bpe in LLMC_TEST_DATA (docs/testing.md), which may also hold prose. Run it at the top of the project. Prints a line
a case and `N passed, N failed, N skipped`.
"""

import array
import glob
import os
import random
import subprocess
import sys
import tempfile

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

DATA = os.environ.get("LLMC_TEST_DATA", "")
END_OF_TEXT = "<|endoftext|>"
SPACES = [c for c in range(0x3001) if chr(c).isspace() and not 0x1C <= c <= 0x1F]
counts = {"ok": 0, "FAIL": 0, "skip": 0}


def report(kind, text):
    counts[kind] += 1
    print(f"{kind:4} {text}", flush=True)


# ----------------------------------------------------------------------------------------------------------
# Mixed text


def pieces(rng, size, make):
    """`size` characters of what make(rng) returns, joined."""
    found, length = [], 0
    while length < size:
        found.append(make(rng))
        length += len(found[-1])
    return "".join(found)


def characters(*ranges, tails=("",)):
    """A function for words of one to six characters of one of the ranges, and a tail."""

    def make(rng):
        first, last = rng.choice(ranges)
        return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 6))) + rng.choice(tails)

    return make


def any_character(rng):
    c = rng.randrange(0x110000 - 0x800)
    return chr(c if c < 0xD800 else c + 0x800)


cjk = characters((0x4E00, 0x9FFF), (0x3041, 0x30FF), (0xAC00, 0xD7A3), (0x3400, 0x4DBF), (0x20000, 0x2A6DF),
                 tails=["", "", "、", "。", "，", " ", "\u3000", "「", "１２", "ａ"])  # fmt: skip
emoji = characters((0x1F300, 0x1FAFF), (0x2600, 0x27BF), (0x1F1E6, 0x1F1FF), (0x1F3FB, 0x1F3FF),
                   tails=["", "", " ", "\u200d", "\ufe0f", "!", "a", "\u20e3"])  # fmt: skip
letters = characters((0x61, 0x7A), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x620, 0x64A), (0x904, 0x939))
marks = characters((0x300, 0x36F), (0x5B0, 0x5C7), (0x64B, 0x65F), (0x93A, 0x94D), (0xE47, 0xE4E), (0x20D0, 0x20F0),
                   tails=["", " ", "\u200d", "'s"])  # fmt: skip
ascii_only = characters((9, 10), (32, 126), (33, 64), (97, 122),
                        tails=["", *"'s 't 're 've 'm 'll 'd 'S 'l 'r '' ’s".split(), " '"])  # fmt: skip


def spaced(rng):
    space = "".join(chr(rng.choice(SPACES)) for _ in range(rng.choice([1, 1, 1, 2, 3, 8])))
    after = ["", "a", "1", "!", "'s", "中", "\u0301", "the", " the", "\u200b", "\ufeff", "\u180e", "x" * 9]
    return space + rng.choice(after)


def run_of(rng):
    one = rng.choice([*"a \n!1é中\u3000=-0😀\u0301", "ab", " a", "'s", "the"])
    return one * rng.choice([1, 2, 3, 10, 100, 1000, rng.randint(1, 100000)]) + rng.choice(["", "x", " ", "\n"])


def with_special(rng):
    pieces = ["<|", "|>", "endoftext", " ", "  ", "   ", "\n", "the", "'s", "中", "xyz", "xyzx", "yz!"]
    return rng.choice([END_OF_TEXT, END_OF_TEXT, END_OF_TEXT[:-1], *pieces])


def sources(patterns):
    """What files hold, one after another for as long as it takes."""
    paths = sorted(p for pattern in patterns for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
    text = "".join(open(p, encoding="utf-8", errors="replace", newline="").read(1 << 20) for p in paths)

    def make(rng):
        at = rng.randrange(max(1, len(text) - 20000))
        return text[at : at + 20000]

    return make


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
    """[(kind, bytes)], of about `size` bytes in all."""
    rng = random.Random(20240520)
    prose = sources([DATA + "/tinyshakespeare/input.txt", DATA + "/wikitext-2/*.txt", "build/test_corpus/text/*.md"])
    kinds = {"CJK": cjk, "emoji": emoji, "marks": lambda rng: letters(rng) + marks(rng), "white space": spaced}
    kinds |= {"ASCII": ascii_only, "any characters": any_character, "special tokens": with_special}
    mixed = lambda rng: pieces(rng, 1 + rng.randrange(200), rng.choice(list(kinds.values())))
    alone = {"prose": prose, "sources": sources(["build/test_corpus/text/*.c"]), **kinds, "long runs": run_of}
    document = int(size) // 70  # characters of 2 bytes or so
    found = []
    while sum(len(data) for _, data in found) < size:
        found += [(name, pieces(rng, document, make).encode()) for name, make in alone.items()]
        everything = pieces(rng, document, mixed)
        found += [("everything", everything.encode()), ("no UTF-8", damaged(rng, everything))]
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


def compare(name, kinds, got, want):
    got, count = list(got), sum(map(len, want))
    for kind, g, w in zip(kinds, got, want):
        if g != w:
            at = next((i for i, (a, b) in enumerate(zip(g, w)) if a != b), min(len(g), len(w)))
            places = f"{g[at : at + 5]}, not {w[at : at + 5]}; {len(g)} and {len(w)} in all"
            return report("FAIL", f"{name}: {kind}: differ at {at}: {places}")
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
    name = f"words around every character, tokenizers {tokenizers.__version__}"
    compare(name, [f"U+{ord(part[0]):04X}.." for part in parts], got, want)


def check_tokens(name, program, folder, tokenizer, mixed, work):
    kinds, documents = zip(*mixed)
    for mode in ("text", "token"):
        tokenizer.encode_special_tokens = mode == "text"
        texts = [data.decode(errors="replace") for data in documents]
        want = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        got = ask(program, mode, folder, documents, work)
        compare(f"{name}, special tokens as {mode}", kinds, got, want)


def save_own_tokenizer(folder, mixed):
    """A vocabulary made here, with added tokens, some of which begin together; then the same with GPT-2's pre-tokenizer
    in other words. Yields the name of each while it lies in the folder."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    sizes = {"vocab_size": 6000, "initial_alphabet": ByteLevel.alphabet()}
    trainer = BpeTrainer(special_tokens=[END_OF_TEXT], show_progress=False, **sizes)
    tokenizer.train_from_iterator((data.decode(errors="replace")[:20000] for _, data in mixed[:12]), trainer)
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


def main(program, gpt2=DATA + "/gpt2-bpe", megabytes="10"):
    program = os.path.abspath(program)
    mixed = mixed_text(float(megabytes) * 1e6)
    builtin = "build/test_corpus/builtin"
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as own:
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
