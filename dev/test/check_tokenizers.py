#!/usr/bin/env python3
"""Do apps/use/bpe.h and llmc/text/wordpiece.h encode as the `tokenizers` library does?

Every character, after one of each class; then mixed text: prose, sources, words of any script, odd white space, runs,
special tokens, and bytes that are no UTF-8, which the library is given as Python's decode(errors="replace") has them.
BPE from every form of its files; WordPiece with what tokenizer_config.json and the normalizer of tokenizer.json may say
of case, accents and ideographs. Then what is refused of a tokenizer.json, and the texts of token ids.

    check_tokenizers.py TEST_TOKENIZERS [GPT2_BPE_FOLDER]

TEST_TOKENIZERS is the built dev/test/tokenizers.c. GPT-2's vocabulary is tested if the folder is there.
Run it at the top of the project.
"""

import array
import glob
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata

from tokenizers import AddedToken, BertWordPieceTokenizer, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from verdicts import changed, equal, finish, not_refused, read, run, skip, verdict, write

DATA = os.environ.get("LLMC_TEST_DATA", "")
END_OF_TEXT = "<|endoftext|>"

# ----------------------------------------------------------------------------------------------------------
# Mixed text

# Ranges of characters: words of one to eight of a range, with one of the tails.
WORDS = [(0x61, 0x7A), (32, 126), (9, 126), (0x391, 0x3C9), (0x5D0, 0x5EA), (0x620, 0x64A), (0x904, 0x939),
         (0x4E00, 0x9FFF), (0x3041, 0x30FF), (0xAC00, 0xD7A3), (0x20000, 0x2A6DF), (0x1F300, 0x1FAFF),
         (0x1F1E6, 0x1F1FF), (0x300, 0x36F), (0x5B0, 0x5C7), (0x93A, 0x94D), (0x20D0, 0x20F0), (0x2000, 0x200F),
         (0x80, 0xFF), (0, 0xD7FF), (0xE000, 0x10FFFF)]  # fmt: skip
TAILS = ["", "", " ", "  ", "\n", "\u3000", "\u200d", "\ufeff", "、", "１２", "1", "!", "-", "\u0301", "中",
         "😀", "xyz", "xyzx", "yz!", "the", " the", "<|", "|>", END_OF_TEXT, END_OF_TEXT[:-1],
         *"'s 't 're 've 'm 'll 'd 'S 'l 'r 'v ''".split()]  # fmt: skip


def piece(rng):
    """A word, a run of its last character, or white space."""
    first, last = rng.choice(WORDS)
    word = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
    return word + word[-1] * rng.choice([0] * 40 + [3, 10, 100, 1000]) + rng.choice(TAILS)


def damaged(rng, text):
    """Bytes that are no UTF-8 in a text, and nothing but such bytes."""
    data = bytearray(text.encode())
    wrong = [b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xf0\x9f\x98"]
    for _ in range(len(data) // 40):
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.choice([*wrong, bytes(rng.randrange(256) for _ in range(9)), b""])
    return bytes(data)


def mixed_text(size):
    """Documents of about `size` bytes in all: prose, sources, and pieces, of which half are no UTF-8."""
    rng = random.Random(20240520)
    found = [read(path, "rb")[: 1 << 13] for path in sorted(glob.glob("build/test_corpus/text/*"))[:12]]
    while sum(map(len, found)) < size:
        text = "".join(piece(rng) for _ in range(2000))
        found += [text.encode(), damaged(rng, text)]
    rng.shuffle(found)
    return found


# ----------------------------------------------------------------------------------------------------------
# Comparison


def ask(program, mode, folder, documents):
    """What the program says of each document."""
    with tempfile.TemporaryDirectory() as work:
        paths = [f"{work}/{i}.txt" for i in range(len(documents))]
        for path, data in zip(paths, documents):
            write(path, data)
        done = subprocess.run([program, mode, folder, *paths], capture_output=True, timeout=300)
    if done.returncode != 0:
        sys.exit(f"FAIL {program} {mode} {folder}: {done.stderr.decode(errors='replace')}")
    values, at = array.array("i", done.stdout), 0
    for _ in documents:
        yield list(values[at + 1 : at + 1 + values[at]])
        at += 1 + values[at]


def compare(name, got, want):
    why = ""
    for number, (g, w) in enumerate(zip(got, want)):
        if g != w and not why:
            at = next((i for i, (a, b) in enumerate(zip(g, w)) if a != b), min(len(g), len(w)))
            why = f"document {number} differs at {at}: {g[at : at + 5]}, not {w[at : at + 5]}; {len(g)}, not {len(w)}"
    verdict(f"{name}: {sum(map(len, want))} in {len(want)} documents", why)


def texts_of(documents):
    return [data.decode(errors="replace") for data in documents]


# ----------------------------------------------------------------------------------------------------------
# Byte-level BPE


def check_words(program, folder):
    """Where words end, for every character after a letter, a number, another character, white space and itself. Where
    the library has another Unicode version, dev/data/unicode_tables.py makes the tables again."""
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    characters = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Co", "Cs")]
    texts = ["".join(f"a{c}1{c}!{c}\n{c}{c}" for c in characters[i::64]) for i in range(64)]
    # The library spells a word with a character for each byte.
    want = [[len(word) for word, _ in split(text)] for text in texts]
    compare("words around every character", ask(program, "words", folder, [text.encode() for text in texts]), want)


def check_tokens(name, program, folder, tokenizer, documents):
    for mode in ("text", "token"):
        tokenizer.encode_special_tokens = mode == "text"
        want = [one.ids for one in tokenizer.encode_batch(texts_of(documents), add_special_tokens=False)]
        compare(f"{name}, special tokens as {mode}", ask(program, mode, folder, documents), want)


def plain(vocabulary, merges):
    """GPT-2's tokenizer as its two files say it."""
    tokenizer = Tokenizer(BPE.from_file(vocabulary, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def own_tokenizers(folder, mixed):
    """A vocabulary made here: in tokenizer.json, with added tokens, some of which begin together, then with GPT-2's
    pre-tokenizer in other words; then in GPT-2's files. Yields each while it lies in the folder."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    sizes = {"vocab_size": 3000, "initial_alphabet": ByteLevel.alphabet()}
    trainer = BpeTrainer(special_tokens=[END_OF_TEXT], show_progress=False, **sizes)
    tokenizer.train_from_iterator(texts_of(mixed), trainer)
    tokenizer.model.save(folder)
    tokenizer.add_special_tokens(["<|", "xyz"])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in ("   ", "xyzx", "中", "the", "'s")])
    path = folder + "/tokenizer.json"
    tokenizer.save(path)
    yield "own vocabulary", tokenizer
    tree = json.loads(read(path))
    tree["model"]["merges"] = [" ".join(pair) for pair in tree["model"]["merges"]]
    write(path, json.dumps(tree))
    yield "merges as strings", tokenizer
    os.remove(path)
    tokenizer = plain(folder + "/vocab.json", folder + "/merges.txt")
    write(folder + "/merges.txt", read(folder + "/merges.txt").replace("\n", "\r\n"))
    yield "vocab.json and merges.txt with the line ends of Windows", tokenizer


def check_bpe(program, mixed, gpt2):
    # One word of a million characters would take an hour if the time grew with the square of its length.
    documents = [*mixed[:8], b"a" * 1000000, b" " * 1000000, b"\xf0\x9f", b"", b"xyz<|endoftext|>"]
    with tempfile.TemporaryDirectory() as own:
        for name, tokenizer in own_tokenizers(own, mixed[:8]):
            check_tokens(name, program, own, tokenizer, documents)
            documents = mixed[:8]
        check_words(program, own)
    if os.path.isfile(gpt2 + "/encoder.json"):
        tokenizer = plain(gpt2 + "/encoder.json", gpt2 + "/vocab.bpe")
        check_tokens("GPT-2's vocabulary", program, gpt2, tokenizer, mixed)
    else:
        skip("GPT-2's vocabulary", "LLMC_TEST_DATA has no gpt2-bpe (docs/testing.md)")


# ----------------------------------------------------------------------------------------------------------
# WordPiece

# Marks in any order, composed and not; Greek and Turkish cases; what looks alike; ideographs of either kind; the
# longest word, and one that is longer.
ODD = f"""İstanbul ΑΣΣ Ὀδυσσεύς ᾼ ǅ ﬁne K Å Ａｂ ① Việt Łódź 東京tower 中\u0301国 abc中def 㐀 カタカナ 한국어 각
    \U0002a6df e\u00ad\u0301 a\u0323\u0301 a\u0301\u0323 \u0301a é.è!ê naïve-café's কো 豈 [MASK]É
    É[SEP]中 [mask] {"a" * 100} {"a" * 101}""".split()

RULES = [(True, None, True), (True, False, True), (False, True, True), (False, None, False)]


def save_vocabulary(folder, prose):
    """A vocabulary that tells characters apart, inside a word and alone, and has words; returns all characters: above
    U+20000, where ideographs are alike, some of them, those of compatibility, and tags."""
    numbers = [*range(1, 0x20000), *range(0x2F800, 0x2FA20), *range(0xE0000, 0xE0200), *range(0x20000, 0x110000, 64)]
    characters = [chr(c) for c in numbers if not 0xD800 <= c <= 0xDFFF]
    tokens = {unicodedata.normalize("NFD", c) for c in characters if unicodedata.decomposition(c)} | {*characters}
    tokens = sorted(c for c in tokens if len(c) == 1 and c > " " and not c.isspace())
    words = [w for w in sorted({*prose.split()}) if len(w) > 1 and w.isalpha()]
    parts = sorted({"##" + w[k:] for w in words for k in range(1, len(w) - 1)})
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokens, *("##" + t for t in tokens), *words, *parts]
    write(folder + "/vocab.txt", "\n".join(lines))
    return characters


def check_wordpiece(program, mixed):
    """Rules of tokenizer_config.json next to vocab.txt, and those of the library's own tokenizer.json."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as whole:
        prose = "\n".join(text for text in texts_of(mixed) if text[:1] == "#")
        characters = save_vocabulary(folder, prose)
        odd = [unicodedata.normalize(form, " ".join(ODD)).encode() for form in ("NFC", "NFD")]
        every = ["".join(f"a{c}b {c} " for c in characters[i::32]).encode() for i in range(32)]
        for lower, accents, chinese in RULES:
            rules = {"lowercase": lower, "strip_accents": accents, "handle_chinese_chars": chinese}
            library = BertWordPieceTokenizer(folder + "/vocab.txt", **rules)
            config = {"do_lower_case": lower, "strip_accents": accents, "tokenize_chinese_chars": chinese}
            library.save(whole + "/tokenizer.json")
            write(folder + "/tokenizer_config.json", json.dumps(config))
            documents = odd + mixed + (every if chinese and accents is not None else [])
            want = [one.ids for one in library.encode_batch(texts_of(documents), add_special_tokens=False)]
            for where, name in ((folder, "vocab.txt"), (whole, "tokenizer.json"))[: 1 + (accents is None)]:
                compare(f"{name}, {rules}", ask(program, "wordpiece", where, documents), want)


# ----------------------------------------------------------------------------------------------------------
# What is refused, and texts of ids

GPT2 = {
    "added_tokens": [{"id": 7, "content": "q", "special": True, "lstrip": False}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]},
    "model": {"type": "BPE", "dropout": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
              "ignore_merges": False, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}  # fmt: skip
BERT = {
    "added_tokens": [{"id": i, "content": token} for i, token in enumerate("[PAD] [UNK] [CLS] [SEP] [MASK]".split())],
    "normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": None, "clean_text": True,
                   "handle_chinese_chars": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
              "max_input_chars_per_word": 100,
              "vocab": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "the": 5, "##s": 6}},
}  # fmt: skip
REFUSED = [  # where in tokenizer.json, what is there then (...: nothing), what is said
    ("text", GPT2, [
        ("pre_tokenizer.type", "Sequence", 'key "pre_tokenizer": "Sequence" differs'),
        ("model.type", "Unigram", 'key "type"'),
        ("model.merges", ["a b", "ab  c"], "merge 2 is not two symbols"),
        ("model.merges", ["b a"], 'merge 1: "ba" is not in the vocabulary'),
        ("added_tokens.0.lstrip", True, 'token "q": "lstrip" is not supported'),
    ]),
    ("ids", {**GPT2, "pre_tokenizer": None}, [
        ("decoder.decoders.0.type", "Strip", "not a byte-level tokenizer"),
        ("model.vocab.a", 2, "its id 2 is also another token's"),
    ]),
    ("wordpiece", BERT, [
        ("normalizer.type", "Sequence", 'normalizer\'s "type" is "Sequence"; only "BertNormalizer"'),
        ("normalizer.clean_text", False, '"clean_text"'),
        ("model.vocab.the", 7, 'token "the": its id 7 is not below'),
        ("added_tokens.4.content", "<x>", "added token <x> with the id 4 is not supported"),
        ("added_tokens", [], r"has no added token for one of \[PAD]"),
    ]),
]  # fmt: skip


def check_refused(program):
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/tokenizer.json"
        for mode, good, changes in REFUSED:
            for place, value, wanted in changes:
                write(path, json.dumps(changed(good, place, value)))
                done = run(program, mode, folder, *[path][: mode != "ids"])
                verdict(f"refused: {mode}: {place} = {value}", not_refused(done, f"tokenizer.json: .*{wanted}"))


def check_ids(program):
    """Characters of the byte alphabet and others, ids that are not in use, special tokens, whose text is as it is."""
    vocab = {"a": 0, "\u0120the": 5, "\u010a": 2, "\u00e2\u0136\u00a2": 3, "\u0143": 6, "\u0120 b": 7, "中": 8}
    added = [{"id": 9, "content": END_OF_TEXT}, {"id": 11, "content": "\u0120 x"}]
    with tempfile.TemporaryDirectory() as folder:
        tree = {**GPT2, "added_tokens": added, "model": {"vocab": vocab}}
        write(folder + "/tokenizer.json", json.dumps(tree))
        end, *found = run(program, "ids", folder).stdout.split("\n")
    wanted = {0: b"a", 2: b"\n", 3: b"\xe2\x94\xa2", 5: b" the", 6: b"\xad", 7: "\u0120 b".encode(), 8: "中".encode(),
              9: END_OF_TEXT.encode(), 11: "\u0120 x".encode()}  # fmt: skip
    equal("texts of ids", (end, found), ("9", [wanted[i].hex() if i in wanted else "-" for i in range(-1, 13)]))


def main(program, gpt2=DATA + "/gpt2-bpe"):
    program, mixed = os.path.abspath(program), mixed_text(400000)
    check_bpe(program, mixed, gpt2)
    check_wordpiece(program, mixed[:8])
    check_refused(program)
    check_ids(program)
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
