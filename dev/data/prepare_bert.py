#!/usr/bin/env python3
"""Text into files of tokenized sentences for BERT, without a network.

    prepare_bert.py --local FILE... --vocab vocab.txt --out DIR
    prepare_bert.py --local FILE... --train-vocab 30522 --out DIR

Needs Python 3.8 or later and the package `tokenizers`. The vocabulary is a vocab.txt of WordPiece, or one of so many
tokens is made from the text. It is uncased unless --cased.

Input files, told apart by their names and first bytes, in the order given:
  plain text      one document a file, cut into sentences here; with --lines one sentence a line, and a blank line
                  between documents
  WikiExtractor   one document for each <doc ...> ... </doc>; a first line that repeats the title is left out
  *.jsonl         one document a line, under the key "text" (--text-key)
Each may be compressed (.gz .xz .bz2), and a .tar archive, compressed or not, is read as the files in it, in
the order of the archive.

A sentence ends at a line's end, and after . ! ? (and quotes or brackets that close there) before white space and what
may begin a sentence; not after an initial or a common abbreviation. [MASK] and the like in a text are ordinary text.

The last documents are for validation: --val-fraction of the tokens, two documents at least.

Written are train_000000.bin ... and val_000000.bin ..., cut between documents, and vocab.txt and tokenizer_config.json
for the trainer and for `transformers`. Earlier ones in the output directory are replaced when all else is done.
Format of a file, all little-endian:
  256 x int32      magic 20261121, version, tokens, sentences, documents, vocabulary size V,
                   ids of [PAD] [UNK] [CLS] [SEP] [MASK], zeros
  tokens           uint16 (version 1) or, where V > 65536, uint32 (version 2); zeros up to a multiple of 4 bytes
  sentences + 1    uint32: where each sentence's tokens begin, then the number of tokens
  documents + 1    uint32: the first sentence of each document, then the number of sentences
  (V + 31) / 32    uint32: bit id % 32 of word id / 32 says that a token continues a word ("##...")
"""
import argparse
import json
import os
import re
import struct
import sys
from array import array

from documents import (
    Parser,
    Progress,
    UserError,
    add_common_options,
    batches,
    check_inputs,
    claim,
    encode_all,
    fraction,
    positive,
    publish,
    run,
    temporary_of,
)

MAGIC = 20261121
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
COPY_BYTES = 1 << 22
FILE_TOKENS = 1 << 32  # a file has less: its offsets are 32 bits wide

# ----------------------------------------------------------------------------------------------------------
# Sentences

ABBREVIATIONS = set(
    "mr mrs ms dr prof rev gen col capt lt sgt st mt sr jr vs etc inc ltd co corp dept no vol fig ed eds pp cf al ca "
    "approx jan feb mar apr jun jul aug sept sep oct nov dec e.g i.e u.s u.k a.m p.m".split()
)
SENTENCE_END = re.compile(r"[.!?]+[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[^\W_a-z])")


def split_line(line):
    begin = 0
    for end in SENTENCE_END.finditer(line):
        if line[end.start()] == "." and line[end.start() : end.end()].rstrip() == ".":
            word = line[begin : end.start()].rsplit(None, 1)[-1:]
            word = word[0].lstrip("\"'“‘([") if word else ""
            if (len(word) == 1 and word.isalpha()) or word.lower() in ABBREVIATIONS:
                continue
        yield line[begin : end.end()].rstrip()
        begin = end.end()
    yield line[begin:]


def sentences_of(text, is_lines):
    for line in text.split("\n"):
        line = line.strip()
        if line:
            yield from [line] if is_lines else split_line(line)


# ----------------------------------------------------------------------------------------------------------
# Documents


def read_whole(stream, options):
    text = stream.read()
    if text.strip():
        yield text, True


def read_blank_lines(stream, options):
    lines = []
    for line in stream:
        if line.strip():
            lines.append(line)
        elif lines:
            yield "".join(lines), True
            lines = []
    if lines:
        yield "".join(lines), True


# ----------------------------------------------------------------------------------------------------------
# Vocabulary


def make_tokenizer(tokens, is_cased):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    model = models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]", max_input_chars_per_word=100)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def read_vocabulary(path):
    if os.path.isdir(path):
        path = os.path.join(path, "vocab.txt")
    try:
        with open(path, encoding="utf-8", newline="\n") as f:
            text = f.read()
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as a vocabulary: {e}")
    tokens = [line.rstrip("\r") for line in (text[:-1] if text.endswith("\n") else text).split("\n")]
    if len(set(tokens)) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if t in tokens[:i])
        raise UserError(f"{path}: the token {twice!r} is there twice")
    missing = [t for t in SPECIAL if t not in tokens]
    if missing:
        raise UserError(f"{path}: has no {missing[0]}; give a vocab.txt of BERT's kind")
    return tokens


def train_vocabulary(options):
    from tokenizers import trainers

    def texts():
        for batch in batches(options):
            for text, _ in batch:
                yield from text.split("\n")

    tokenizer = make_tokenizer(SPECIAL, options.cased)
    trainer = trainers.WordPieceTrainer(
        vocab_size=options.train_vocab, min_frequency=2, special_tokens=SPECIAL, show_progress=sys.stderr.isatty()
    )
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer.train_from_iterator(texts(), trainer)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.get)


# ----------------------------------------------------------------------------------------------------------
# Encoding in several processes

worker = {}  # of this process


def start_worker(tokens, is_cased, is_lines, code):
    worker.update(tokenizer=make_tokenizer(tokens, is_cased), is_lines=is_lines, code=code)


def encode_batch(batch):
    """[(document, True)] -> (characters, tokens as bytes, length of each sentence, sentences of each document)."""
    tokenizer = worker["tokenizer"]
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # the fast one leaves offsets out
    tokens, lengths, counts, characters = array(worker["code"]), array("I"), array("I"), 0
    for text, _ in batch:
        before = len(lengths)
        for encoding in encode(list(sentences_of(text, worker["is_lines"])), add_special_tokens=False):
            if encoding.ids:
                tokens.extend(encoding.ids)
                lengths.append(len(encoding.ids))
        if len(lengths) > before:
            counts.append(len(lengths) - before)
        characters += len(text)
    if sys.byteorder == "big":
        tokens.byteswap()
    return characters, tokens.tobytes(), lengths, counts


# ----------------------------------------------------------------------------------------------------------
# Files


class Spool:
    """All that was encoded: tokens in a file, what lies where in memory."""

    def __init__(self, file):
        self.file = file
        self.lengths = array("I")  # tokens of each sentence
        self.counts = array("I")  # sentences of each document
        self.sizes = array("Q")  # tokens of each document

    def add(self, tokens, lengths, counts):
        self.file.write(tokens)
        self.lengths.extend(lengths)
        self.counts.extend(counts)
        at = 0
        for n in counts:
            self.sizes.append(sum(lengths[at : at + n]))
            at += n


def first_validation_document(sizes, fraction_of_tokens):
    if fraction_of_tokens == 0:
        return len(sizes)
    wanted, tokens, at = fraction_of_tokens * sum(sizes), 0, len(sizes)
    while at > 0 and (tokens < wanted or len(sizes) - at < 2):
        at -= 1
        tokens += sizes[at]
    if at == 0:
        raise UserError(f"--val-fraction {fraction_of_tokens}: {len(sizes)} documents cannot be divided so; give more")
    return at


def cut_files(sizes, first, end, most):
    """Ranges of documents of about equal size and, where documents allow it, at most `most` tokens."""
    total = sum(sizes[first:end])
    count = (total + most - 1) // most
    begin, tokens, cuts = first, 0, []
    for d in range(first, end):
        if begin < d and (tokens + sizes[d] > most or tokens >= total / count):
            cuts.append((begin, d))
            begin, tokens = d, 0
        tokens += sizes[d]
        if sizes[d] >= FILE_TOKENS:
            raise UserError(f"document {d + 1} has {sizes[d]} tokens; cut it into smaller ones")
    return cuts + [(begin, end)] if begin < end else cuts


def write_words(f, numbers):
    words = array("I", numbers)
    if sys.byteorder == "big":
        words.byteswap()
    f.write(words.tobytes())


def running_sum(numbers):
    total = 0
    yield 0
    for n in numbers:
        total += n
        yield total


def write_file(path, spool, documents, sentences, tokens, vocabulary, width):
    """Ranges [begin, end) of documents, and of the sentences and tokens in them."""
    n = [r[1] - r[0] for r in (tokens, sentences, documents)]
    special = [vocabulary.index(t) for t in SPECIAL]
    continues = [0] * ((len(vocabulary) + 31) // 32)
    for i, token in enumerate(vocabulary):
        if token.startswith("##") and len(token) > 2:
            continues[i // 32] |= 1 << i % 32
    with open(path, "wb") as f:
        header = struct.pack("<2i3I6i", MAGIC, 1 if width == 2 else 2, *n, len(vocabulary), *special)
        f.write(header.ljust(1024, b"\0"))
        spool.file.seek(tokens[0] * width)
        left = n[0] * width
        while left:
            piece = spool.file.read(min(left, COPY_BYTES))
            f.write(piece)
            left -= len(piece)
        f.write(b"\0" * (-n[0] * width % 4))
        write_words(f, running_sum(spool.lengths[slice(*sentences)]))
        write_words(f, running_sum(spool.counts[slice(*documents)]))
        write_words(f, continues)
        f.flush()
        os.fsync(f.fileno())


def write_files(options, spool, vocabulary, width, temporaries):
    """Write all files under temporary names; returns the names, and the documents and tokens for training."""
    cut = first_validation_document(spool.sizes, options.val_fraction)
    most = min(options.shard_tokens, FILE_TOKENS - 1)
    names, sentence, token = [], 0, 0
    for prefix, first, end in (("train", 0, cut), ("val", cut, len(spool.sizes))):
        for i, (a, b) in enumerate(cut_files(spool.sizes, first, end, most)):
            name = f"{prefix}_{i:06d}.bin"
            temporaries.append(temporary_of(options.out, name))
            names.append(name)
            sentences, tokens = sentence + sum(spool.counts[a:b]), token + sum(spool.sizes[a:b])
            write_file(temporaries[-1], spool, (a, b), (sentence, sentences), (token, tokens), vocabulary, width)
            sentence, token = sentences, tokens
    return names, cut, sum(spool.sizes[:cut])


def prepare(options):
    vocabulary = read_vocabulary(options.vocab) if options.vocab else train_vocabulary(options)
    width, code = (2, "H") if len(vocabulary) <= 65536 else (4, "I")
    claim(options.out, (MAGIC,))
    temporaries = [temporary_of(options.out, "tokens")]
    progress, characters, tokens = Progress(), 0, 0
    try:
        with open(temporaries[0], "w+b") as f:
            spool = Spool(f)
            arguments = (vocabulary, options.cased, options.lines, code)
            for read, *encoded in encode_all(options, encode_batch, start_worker, arguments):
                spool.add(*encoded)
                characters += read
                tokens += len(encoded[0]) // width
                progress.show(characters, tokens)
            progress.end()
            if tokens == 0:
                raise UserError(f"{options.local[0]}: no text in the input")
            names, train_documents, train_tokens = write_files(options, spool, vocabulary, width, temporaries)
        config = {"do_lower_case": not options.cased, "tokenizer_class": "BertTokenizer"}
        texts = {"vocab.txt": "\n".join(vocabulary), "tokenizer_config.json": json.dumps(config, indent=2)}
        for name, text in texts.items():
            temporaries.append(temporary_of(options.out, name))
            with open(temporaries[-1], "w", encoding="utf-8", newline="\n") as f:
                f.write(text + "\n")
        publish(options.out, names + list(texts))
    finally:
        for path in temporaries:
            if os.path.exists(path):
                os.remove(path)
    print(
        f"{options.out}: {len(spool.sizes)} documents, {len(spool.lengths)} sentences; training: {train_documents} "
        f"documents, {train_tokens} tokens; validation: {len(spool.sizes) - train_documents} documents, "
        f"{tokens - train_tokens} tokens; {len(names)} files, vocabulary of {len(vocabulary)}"
    )


# ----------------------------------------------------------------------------------------------------------
# Command line


def parse(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_common_options(parser)
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--vocab", metavar="PATH", help="vocab.txt, or the directory that holds it")
    vocabulary.add_argument("--train-vocab", type=positive, metavar="N", help="make a vocabulary of N tokens")
    parser.add_argument("--cased", action="store_true", help="keep upper case and accents")
    parser.add_argument("--lines", action="store_true", help="plain text: a line is a sentence, blank lines divide")
    parser.add_argument("--val-fraction", type=fraction, default=0.01, metavar="F", help="the last documents are")
    options = parser.parse_args(arguments)
    check_inputs(options)
    options.read_plain = read_blank_lines if options.lines else read_whole
    options.read_document = read_whole
    options.drop_titles = True
    return options


if __name__ == "__main__":
    sys.exit(run(parse, prepare, sys.argv[1:]))
