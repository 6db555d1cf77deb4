#!/usr/bin/env python3
"""The text that tests train on, and shards of it with bytes as tokens: the same bytes on every machine.

    text.py FOLDER

FOLDER/text gets documents 000.md, 001.md, ... A document has a topic, so its sentences belong together: a title, then
paragraphs of one sentence a line. Each sixth is a program, 005.c. Words have frequencies that follow Zipf's law. All
choices are integer arithmetic on random numbers from a fixed seed.

FOLDER/builtin gets token shards: token id = byte, and 256 before each document. Of the resulting row of tokens every
tenth block of 2,048 is validation. With them are the files that make GPT-2's byte-level tokenizer of it, with no
merges. FOLDER/builtin/bert gets the same text as sentences: token id = byte, then [PAD] [UNK] [CLS] [SEP] [MASK]. A
line with its line break is a sentence, but for lines of white space, which are left out. A line that begins in a
validation block is validation: that divides a document into some of training and of validation by turns.

dev/test/text.sh holds the checksums.
"""
import json
import struct
import sys
from bisect import bisect_right

from runs import put_shard
from verdicts import write as put

BYTES, TOPICS, END_OF_TEXT, BLOCK, VALIDATION_EVERY = 1500000, 16, 256, 2048, 10
state = 20261123


def below(n):
    """SplitMix64."""
    global state
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return ((z ^ z >> 31) >> 32) % n


class Pool:
    """Words, the weight of each of which is inverse to its rank. The first, which are frequent, are short."""

    ONSETS = "b d f g h k l m n p r s t v w z br dr fl gr kl pr sh st th tr ch qu j sk sl".split() + [""]
    VOWELS = "a e i o u ai ea oo ou y".split()
    CODAS = ["", "", "", *"n r l s t m nd rk x st ck".split()]

    def __init__(self, count, ending=""):
        self.words, self.until = [], []
        for i in range(count):
            word, syllables = "", 1 + (i > 8) + below(2)
            for s in range(syllables):
                word += self.ONSETS[below(len(self.ONSETS))] + self.VOWELS[below(len(self.VOWELS))]
                if s == syllables - 1 or below(3) == 0:
                    word += self.CODAS[below(len(self.CODAS))]
            self.add(word + ending)

    def add(self, word):
        self.until.append(1000000 // (len(self.words) + 1) + (self.until[-1] if self.words else 0))
        self.words.append(word)

    def draw(self):
        return self.words[bisect_right(self.until, below(self.until[-1]))]


NOUNS = Pool(300)
TOPIC_NOUNS = [Pool(40) for _ in range(TOPICS)]
POOLS = {"v": Pool(120, "s"), "a": Pool(120), "d": Pool(40, "ly")}
NAMES = Pool(60)
for one in "zoë rené jürg søren iñigo łukasz 漢 Ωmega".split():
    NAMES.add(one)
NAMES.words = [word[0].upper() + word[1:] if word[0].isascii() else word for word in NAMES.words]

# A grammar, from which alternatives are drawn; one that is listed twice is twice as frequent. $n noun, $v verb, $a
# adjective, $d adverb, $p name, $9 digit; capitals are other rules.
GRAMMAR = {
    "S": ["$C.", "$C.", "$C.", "$C, and $C.", "$C, but $C.", "$C because $C.", "$C; $C.", "$C?", "in 1$9$9$9, $C.",
          '"$C!" said $p.', "$C: $C ($9$9.$9 %)."],
    "C": ["$N $v $O", "$p $v $O", "$p $d $v $O", "$N $d $v $O"],
    "O": ["$N", "$N $R $N", "$N $R $N", "$9$9 $ns"],
    "N": ["the $n", "the $n", "the $a $n", "a $a $n", "every $n", "his $n", "no $n"],
    "R": ["in", "on", "with", "under", "of", "near"],
    "T": ["# $p and the $n\n"],
    "F": ["\nint $v_$n(int $n, float* $n) {\n$L$L$L    return $n;\n}\n",
          "\nint $v_$n(int $n, float* $n) {\n$L$L$L$L$L    return $n;\n}\n"],
    "L": ["    // $S\n", "    $n += $9$9 * $n[i];\n", "    if ($n > 0x$9$9) {\n\t$v(&$n);\n    }\n",
          "    for (int i = 0; i < $n; i++) $n[i] = $9.$9$9f;\n"],
}  # fmt: skip


def expand(subject, text):
    """The text with what is drawn; SUBJECT: the topic's nouns and two names."""
    first, *parts = text.split("$")
    out = [first]
    for part in parts:
        what = part[0]
        if what == "n":
            out.append((subject[0] if below(10) < 7 else NOUNS).draw())
        elif what in POOLS:
            out.append(POOLS[what].draw())
        elif what == "p":
            out.append(subject[1][below(2)])
        elif what == "9":
            out.append(str(below(10)))
        else:
            out.append(expand(subject, GRAMMAR[what][below(len(GRAMMAR[what]))]))
        out.append(part[1:])
    return "".join(out)


def document(number):
    subject, length = [TOPIC_NOUNS[below(TOPICS)], []], 3000 + below(14000)
    subject[1] = [NAMES.draw(), NAMES.draw()]
    is_program = number % 6 == 5
    text = b"" if is_program else expand(subject, "$T").encode()
    while len(text) < length:
        if is_program:
            text += expand(subject, "$F").encode()
            continue
        text += b"\n"
        for _ in range(3 + below(5)):
            line = expand(subject, "$S\n")
            at = line[0] == '"'
            text += (line[:at] + (line[at].upper() if line[at].isascii() else line[at]) + line[at + 1 :]).encode()
    return text


# ----------------------------------------------------------------------------------------------------------
# Files


def put_sentences(path, tokens, begin, first):
    """Tokens; where sentences begin among them; the first sentences of documents."""
    header = (20261121, 1, len(tokens), len(begin), len(first), 261, 256, 257, 258, 259, 260)
    data = struct.pack("<11i", *header).ljust(1024, b"\0") + struct.pack(f"<{len(tokens)}H", *tokens)
    numbers = [*begin, len(tokens), *first, len(begin), *[0] * 9]  # no token continues a word
    put(path, data + b"\0" * (-len(data) % 4) + struct.pack(f"<{len(numbers)}I", *numbers))


def is_validation(position):
    return position // BLOCK % VALIDATION_EVERY == VALIDATION_EVERY - 1


def sentences_of(documents):
    """What put_sentences() takes, of training and of validation."""
    sides, position = [([], [], []), ([], [], [])], 0
    for text in documents:
        position, open_side = position + 1, None  # after its end-of-text; whose last document may go on
        for line in text.split(b"\n"):
            line += b"\n"
            if line.strip():
                tokens, begin, first = side = sides[is_validation(position)]
                if side is not open_side:
                    first.append(len(begin))
                open_side = side
                begin.append(len(tokens))
                tokens += line
            position += len(line)
        position -= 1  # the text ends with a line break
    return sides


def put_tokenizers(folder):
    names, shifted = [], 256  # GPT-2 shows printable Latin-1 as itself and the 68 other bytes as U+0100 and up
    for byte in range(256):
        is_printable = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        names.append(chr(byte if is_printable else shifted))
        shifted += not is_printable
    end = "<|endoftext|>"
    vocabulary = {name: i for i, name in enumerate([*names, end])}
    added = {"id": 256, "content": end, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}  # fmt: skip
    part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
             "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": []}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [added], "normalizer": None,
             "pre_tokenizer": part, "post_processor": {**part, "trim_offsets": False}, "decoder": part, "model": model}
    config = {"add_prefix_space": False, "bos_token": end, "clean_up_tokenization_spaces": False, "eos_token": end,
              "model_max_length": int(1e30), "tokenizer_class": "GPT2Tokenizer", "unk_token": end}  # fmt: skip
    for name, tree in (("vocab.json", vocabulary), ("tokenizer.json", whole)):
        put(f"{folder}/{name}", json.dumps(tree, ensure_ascii=False, separators=(",", ":")) + "\n")
    put(folder + "/merges.txt", "#version: 0.2\n")
    put(folder + "/tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    put(folder + "/bert/tokenizer_config.json", '{\n  "do_lower_case": false\n}\n')
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    put(folder + "/bert/vocab.txt", "".join(name + "\n" for name in [*names, *special]))


def main(folder):
    documents, row, sides = [], [], ([], [])
    while len(row) < BYTES + len(documents):
        documents.append(document(len(documents)))
        row += [END_OF_TEXT, *documents[-1]]
        name = f"{len(documents) - 1:03d}.{'c' if len(documents) % 6 == 0 else 'md'}"
        put(f"{folder}/text/{name}", documents[-1])
    for i in range(0, len(row), BLOCK):
        sides[is_validation(i)].extend(row[i : i + BLOCK])
    put_tokenizers(folder + "/builtin")
    for name, tokens, sentences in zip(("train", "val"), sides, sentences_of(documents)):
        put_shard(f"{folder}/builtin/{name}.bin", tokens)
        put_sentences(f"{folder}/builtin/bert/{name}.bin", *sentences)


if __name__ == "__main__":
    main(*sys.argv[1:])
