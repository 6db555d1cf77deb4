"""Shared by the scripts that prepare multiple-choice sets: the command line, the encoding, and llm.c's evaluation file.

The file: a header of 256 int32 (magic 20240522, version 1, number of examples, bytes of the longest), then each example
as uint16: 65535, its bytes, its number, the label, the number of endings, then context and endings, each as a length
and its tokens. Version 2, of this project alone, adds the characters of each ending, by which acc_norm divides losses.
Bytes or numbers above 65,535 keep their low 16 bits only. Readers that use the lengths, like this project's, need
neither; llm.c itself reads sets of four endings below these limits.
"""
import itertools
import os
import struct
import sys
from array import array

from documents import Parser, UserError, positive, read_json_values, refuse_foreign, replacing
from prepare_gpt2 import Vocabulary, make_tokenizer

MAGIC, VERSION, WITH_CHARACTERS, BEGIN = 20240522, 1, 2, 65535
BATCH = 256  # examples that are encoded together


def parse(description, add_options, arguments):
    parser = Parser(description)
    parser.add_argument("--local", required=True, metavar="FILE", help="the examples")
    parser.add_argument("--vocab", required=True, metavar="DIR", help="directory of the tokenizer")
    parser.add_argument("--out", required=True, metavar="FILE.bin", help="the set; logs take their name from its name")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N examples only")
    add_options(parser)
    options = parser.parse_args(arguments)
    if not os.path.isfile(options.local):
        raise UserError(f"{options.local}: no such file (--local)")
    if not os.path.isdir(options.vocab):
        raise UserError(f"{options.vocab}: no such directory (--vocab)")
    refuse_foreign(options.out, struct.pack("<i", MAGIC))
    return options


def read_jsonl(path):
    """(where, object) of each line."""
    for where, example in read_json_values(path):
        if not isinstance(example, dict):
            raise UserError(f"{where} is not an object")
        yield where, example


def text_of(example, key, where):
    value = example.get(key)
    if not isinstance(value, str):
        raise UserError(f"{where}: its {key!r} is not a string")
    return value


def words_of(number, label, texts, characters):
    """One example; texts are the tokens of the context and of each ending, characters numbers of characters or none."""
    words = array("H", [BEGIN, 0, number & 0xFFFF, label, len(texts) - 1])
    for tokens in texts:
        words.append(len(tokens))
        words.extend(tokens)
    words.extend(characters)
    words[1] = 2 * len(words) & 0xFFFF
    return words


def encode(tokenizer, vocabulary, batch, number, counts):
    """[(context, endings, label)] -> one example after the other; `number` is that of the first. counts: with characters."""
    texts = [text for context, endings, _ in batch for text in (context, *endings)]
    texts = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]  # halves of surrogate pairs
    encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    for i, (_, endings, label) in enumerate(batch, number):
        tokens = [next(encodings).ids for _ in range(1 + len(endings))]
        tokens[0] = tokens[0] or [vocabulary.end_of_text]  # something must come before an ending
        characters = [len(ending) - 1 for ending in endings] if counts else []  # without the space before an ending
        if len(endings) > 65535 or max(map(len, tokens)) > 65535 or not all(tokens) or not all(0 < c < 65536 for c in characters):
            raise UserError(f"example {i}: its texts, or their number, are too many or empty for the file's format")
        yield words_of(i, label, tokens, characters)


def batches(examples, limit):
    examples = itertools.islice(examples, limit)
    while batch := list(itertools.islice(examples, BATCH)):
        yield batch


def write_set(f, options, examples, counts):
    vocabulary = Vocabulary(options.vocab)
    if vocabulary.size > BEGIN:
        raise UserError(f"{options.vocab}: {vocabulary.size} tokens; the file's format holds numbers below {BEGIN}")
    tokenizer = make_tokenizer(vocabulary.text)
    count = longest = most = 0
    f.write(b"\0" * 1024)
    for batch in batches(examples, options.limit):
        for words in encode(tokenizer, vocabulary, batch, count, counts):
            count, longest, most = count + 1, max(longest, 2 * len(words)), max(most, words[4])
            if sys.byteorder == "big":
                words.byteswap()
            f.write(words.tobytes())
    if count == 0:
        raise UserError(f"{options.local}: no examples in it")
    f.seek(0)
    f.write(struct.pack("<4i", MAGIC, WITH_CHARACTERS if counts else VERSION, count, longest))
    return f"{count} examples of {'up to ' if most > 1 else ''}{most} ending{'s' if most > 1 else ''}"


def write(options, examples, counts=False):
    """Encode (context, endings, label) of an iterable and write the set, complete or not at all. counts: version 2."""
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    with replacing(options.out) as f:
        what = write_set(f, options, examples, counts)
    print(f"{options.out}: {what}")
