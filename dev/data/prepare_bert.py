#!/usr/bin/env python3
"""Text into files of tokenized sentences for BERT.

    prepare_bert.py --local FILE... --vocab vocab.txt --out DIR
    prepare_bert.py --local FILE... --train-vocab 30522 --out DIR
    prepare_bert.py --dataset wikipedia --vocab vocab.txt --out DIR

Needs Python 3.8 or later and the package `tokenizers`, for --dataset also `datasets`. The vocabulary is a WordPiece
vocab.txt, or --train-vocab N makes one of N tokens from the text: from all of --local and --url, from the first billion
characters of --dataset. It is uncased unless --cased.

Input files, recognized by their names and first bytes, in the order given:
  plain text      one document a file, cut into sentences here; with --lines one sentence a line, and a blank line
                  between documents
  WikiExtractor   one document for each <doc ...> ... </doc>; a first line that repeats the title is skipped
  *.jsonl         one document a line, under the key "text" (--text-key); so are WikiExtractor's files of --json
  *.json          the same, or an array of such objects; in an archive plain text
Each may be compressed (.gz .xz .bz2), and a .tar archive, compressed or not, is read as the files in it, in
the order of the archive.

From the net come
  --dataset       a data set of the Hugging Face hub, streamed: wikipedia (English), tinystories, fineweb, fineweb-edu
                  (their samples of 10 billion tokens), or any NAME[:CONFIG[:SPLIT[:COLUMN]]], or a directory of parquet or
                  .jsonl files; omitted parts have their defaults (wikipedia:20231101.de is another configuration)
                  tinyshakespeare is a single file, and read with --lines
  --url           a file as above, whose SHA-256 must be --sha256 if that is given

If a long preparation is stopped or killed, the same command continues it and produces the same bytes. Until it is done,
its work is in preparation/ in the output directory; work and output together take twice the space of the tokens.
--limit-tokens stops after the document that reaches the limit.

A preparation can be divided among jobs, on one machine or on several with one file system: run the same command with
--part 1/64, --part 2/64, ... --part 64/64, in any order, then once with --join. The output equals that of a single run.
Each part has its own work in parts/ in the output directory and can be resumed. --join checks that all parts are there,
copies them, and removes them when the files are written.

A sentence ends at a line's end, and after . ! ? (and closing quotes or brackets after them) before white space and a
possible sentence start; not after an initial or a common abbreviation. [MASK] and the like in a text are ordinary text.

The last documents are for validation: --val-fraction of the tokens, but at least two documents.

Writes train_000000.bin ... and val_000000.bin ..., cut between documents, and vocab.txt and tokenizer_config.json for
the trainer and for `transformers`. What an earlier run wrote to the output directory, listed there in prepared.json, is
replaced when everything else is done; other files of these names are an error.
Format of a file, all little-endian:
  256 x int32      magic 20261121, version, tokens, sentences, documents, vocabulary size V,
                   ids of [PAD] [UNK] [CLS] [SEP] [MASK], low and high half of the vocabulary's hash (FNV-1a of
                   64 bits, of all tokens in the order of their ids with a newline after each), zeros
  tokens           uint16 (version 1) or, where V > 65536, uint32 (version 2); zeros up to a multiple of 4 bytes
  sentences + 1    uint32: where each sentence's tokens begin, then the number of tokens
  documents + 1    uint32: the first sentence of each document, then the number of sentences
  (V + 31) / 32    uint32: bit id % 32 of word id / 32 is set if the token continues a word ("##...")
"""
import argparse
import hashlib
import json
import os
import re
import struct
import sys
from array import array

from documents import (
    Parser,
    UserError,
    add_common_options,
    check_inputs,
    fraction,
    run,
    vocabulary_size,
)
from net import is_file, open_source
from parts import add_options, check_options, join
from work import Output, Progress, Work, library_threads, mapped_numbers, vocabulary_texts, write_atomically

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


def vocabulary_path(path):
    return os.path.join(path, "vocab.txt") if os.path.isdir(path) else path


def read_vocabulary(path):
    path = vocabulary_path(path)
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as f:
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


def train_vocabulary(options, source):
    from tokenizers import trainers

    def texts():
        for text in vocabulary_texts(options, source):
            yield from text.split("\n")

    def train(size, first):
        tokenizer = make_tokenizer(SPECIAL, options.cased)
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, min_frequency=2, special_tokens=first, show_progress=sys.stderr.isatty()
        )
        with library_threads():
            tokenizer.train_from_iterator(texts(), trainer)
        return set(tokenizer.get_vocab())

    # Of equally frequent pairs the library merges the one with the smaller ids, and it gives characters that continue
    # words random ids. So these characters are found first, in a vocabulary of their own, and get fixed ids: the result
    # is the same in every run.
    letters = train(0, SPECIAL)
    if len(letters) > options.train_vocab:
        raise UserError(
            f"--train-vocab {options.train_vocab}: the characters of this text alone take {len(letters)} tokens; give more"
        )
    tokens = train(options.train_vocab, SPECIAL + sorted(t for t in letters if t.startswith("##")))
    return SPECIAL + sorted(tokens - set(SPECIAL))


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
    """Everything that was encoded: the tokens in a file, their layout in memory."""

    def __init__(self, work, most):
        """The work's data up to the document that reaches `most` tokens."""
        self.file = work.files["tokens"]
        self.lengths = mapped_numbers(work.files["lengths"], "I")  # tokens of each sentence
        self.counts = mapped_numbers(work.files["counts"], "I")  # sentences of each document
        self.sizes = array("Q")  # tokens of each document
        sentence = tokens = 0
        for n in self.counts:
            if most is not None and tokens >= most:
                break
            self.sizes.append(sum(self.lengths[sentence : sentence + n]))
            sentence += n
            tokens += self.sizes[-1]
        self.counts, self.lengths = self.counts[: len(self.sizes)], self.lengths[:sentence]


def first_validation_document(sizes, fraction_of_tokens):
    if fraction_of_tokens == 0:
        return len(sizes)
    wanted, tokens, at = fraction_of_tokens * sum(sizes), 0, len(sizes)
    while at > 0 and (tokens < wanted or len(sizes) - at < 2):
        at -= 1
        tokens += sizes[at]
    if at == 0:
        raise UserError(f"--val-fraction {fraction_of_tokens}: {len(sizes)} documents cannot be divided; give more")
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


def hash_of(vocabulary):
    """FNV-1a, 64 bits: it tells the trainer whether a file was made with its vocab.txt."""
    value = 14695981039346656037
    for byte in "".join(token + "\n" for token in vocabulary).encode():
        value = (value ^ byte) * 1099511628211 % (1 << 64)
    return value


def about(vocabulary):
    """What every file records about it: the end of the header, and the words of bits."""
    continues = [0] * ((len(vocabulary) + 31) // 32)
    for i, token in enumerate(vocabulary):
        if token.startswith("##") and len(token) > 2:
            continues[i // 32] |= 1 << i % 32
    special = [vocabulary.index(t) for t in SPECIAL]
    return struct.pack("<6iQ", len(vocabulary), *special, hash_of(vocabulary)), continues


def write_file(path, spool, documents, sentences, tokens, words, width):
    """Ranges [begin, end) of documents, and of the sentences and tokens in them; `words`: about() the vocabulary."""
    n = [r[1] - r[0] for r in (tokens, sentences, documents)]
    end_of_header, continues = words
    with open(path, "wb") as f:
        header = struct.pack("<2i3I", MAGIC, 1 if width == 2 else 2, *n) + end_of_header
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


def write_files(options, work, spool, vocabulary, width):
    """Write all files in the work's folder; returns their names, and the documents and tokens for training."""
    cut = first_validation_document(spool.sizes, options.val_fraction)
    most = min(options.shard_tokens, FILE_TOKENS - 1)
    names, sentence, token, total = [], 0, 0, sum(spool.sizes)
    progress, words = Progress("files"), about(vocabulary)
    for prefix, first, end in (("train", 0, cut), ("val", cut, len(spool.sizes))):
        for i, (a, b) in enumerate(cut_files(spool.sizes, first, end, most)):
            names.append(f"{prefix}_{i:06d}.bin")
            sentences, tokens = sentence + sum(spool.counts[a:b]), token + sum(spool.sizes[a:b])
            path = work.path(names[-1])
            write_file(path, spool, (a, b), (sentence, sentences), (token, tokens), words, width)
            sentence, token = sentences, tokens
            progress.show(token / total, f"{len(names)} written")
    progress.end()
    return names, cut, sum(spool.sizes[:cut])


def get_vocabulary(options, source, work):
    """The given vocabulary, or one made from the text, which resumed work does not make again."""
    if options.vocab:
        return read_vocabulary(options.vocab)
    path = work.path("vocabulary")
    if not os.path.exists(path):
        write_atomically(path, "\n".join(train_vocabulary(options, source)) + "\n")
        work.save()
    return read_vocabulary(path)


def prepare(options):
    source = open_source(options)
    settings = {
        **source.settings(),
        "--vocab": options.vocab and hashlib.sha256("\n".join(read_vocabulary(options.vocab)).encode()).hexdigest(),
        "--train-vocab": options.train_vocab,
        "--cased": options.cased,
        "--lines": options.lines,
        "--text-key": options.text_key,
        "--limit-tokens": options.limit_tokens,
    }
    streams, target = ["tokens", "lengths", "counts"], os.path.join(options.out, "vocab.txt")
    with Work(options, settings, streams) as work:
        has_vocabulary = options.vocab and os.path.isfile(target) and os.path.samefile(target, vocabulary_path(options.vocab))
        spared = ["vocab.txt"] if has_vocabulary else []
        output = Output(options.out, "prepare_bert.py", r"vocab\.txt|tokenizer_config\.json", spared)
        if not options.join:
            source.open(work)
        vocabulary = get_vocabulary(options, source, work)
        width, code = (2, "H") if len(vocabulary) <= 65536 else (4, "I")
        if options.join:
            join(work, settings, streams, width, lambda _, data, *__: data)
        else:
            arguments = (vocabulary, options.cased, options.lines, code)
            for encoded in work.encode(source, width, encode_batch, start_worker, arguments):
                for name, data in zip(streams, encoded):
                    work.files[name].write(data)
        if options.part:
            work.finish_part()
            return
        spool = Spool(work, options.limit_tokens)
        tokens = sum(spool.sizes)
        if tokens == 0:
            raise UserError(f"{source.title}: no text in the input")
        names, train_documents, train_tokens = write_files(options, work, spool, vocabulary, width)
        config = {"do_lower_case": not options.cased, "tokenizer_class": "BertTokenizer"}
        texts = {"vocab.txt": "\n".join(vocabulary), "tokenizer_config.json": json.dumps(config, indent=2)}
        for name, text in texts.items():
            write_atomically(work.path(name), text + "\n")
        output.publish(work.folder, names + [name for name in texts if name not in spared])
        work.forget()
        if options.join:
            work.forget_parts()
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
    add_options(parser)
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--vocab", metavar="PATH", help="vocab.txt, or the directory that holds it")
    vocabulary.add_argument("--train-vocab", type=vocabulary_size, metavar="N", help="make a vocabulary of N tokens")
    parser.add_argument("--cased", action="store_true", help="keep upper case and accents")
    parser.add_argument("--lines", action="store_true", help="plain text: a line is a sentence, blank lines divide")
    parser.add_argument("--val-fraction", type=fraction, default=0.01, metavar="F", help="the last documents are")
    options = parser.parse_args(arguments)
    check_inputs(options)
    check_options(options)
    if is_file(options.dataset, "tinyshakespeare"):
        options.lines = True
    options.read_plain = read_blank_lines if options.lines else read_whole
    options.read_document = read_whole
    options.drop_titles = True
    return options


if __name__ == "__main__":
    sys.exit(run(parse, prepare, sys.argv[1:]))
