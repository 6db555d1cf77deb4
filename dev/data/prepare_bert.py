#!/usr/bin/env python3
"""Text into files of tokenized sentences for BERT.

    prepare_bert.py --local FILE... --vocab vocab.txt --out DIR
    prepare_bert.py --local FILE... --train-vocab 30522 --out DIR
    prepare_bert.py --dataset wikipedia --vocab vocab.txt --out DIR

Needs Python 3.8 or later and the packages `tokenizers` and `numpy`, for --dataset also `datasets`. The vocabulary is a
WordPiece vocab.txt, or --train-vocab N makes one of N tokens from the text: from all of --local, from the first billion
characters of --dataset. It is uncased unless --cased.

Input files, recognized by their names and first bytes, in the order given:
  plain text      one document a file, cut into sentences here; with --lines one sentence a line, and a blank line
                  between documents
  WikiExtractor   one document for each <doc ...> ... </doc>; a first line that repeats the title is skipped
  *.jsonl         one document a line, under the key "text" (--text-key); so are WikiExtractor's files of --json
  *.json          the same, or an array of such objects; in an archive plain text
  *.parquet       one document a row, in the column "text" (--text-key); needs the package `pyarrow`
Each may be compressed (.gz .xz .bz2, and .zst with the package `zstandard`), and a .tar archive, compressed or not, is
read as the files in it, in the order of the archive.

--dataset is a data set of the Hugging Face hub, streamed: wikipedia (English), tinystories, fineweb, fineweb-edu (their
samples of 10 billion tokens), or any NAME[:CONFIG[:SPLIT[:COLUMN]]], or a directory of parquet or .jsonl files; omitted
parts have their defaults (wikipedia:20231101.de is another configuration).

If a long preparation is stopped or killed, the same command continues it and produces the same bytes. Until it is done,
its work is in preparation/ in the output directory; work and output together take twice the space of the tokens.
--limit-tokens stops after the document that reaches the limit.

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
import hashlib
import json
import os
import re
import struct
import sys
from array import array

from documents import UserError, end, fraction, need, parse_options, run
from net import open_source
from work import Output, Progress, Work, copy_numbers, library_threads, vocabulary_texts, write_atomically

np = need("numpy")
MAGIC = 20261121
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
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
    path = os.path.join(path, "vocab.txt") if os.path.isdir(path) else path
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
    return characters, tokens.tobytes(), lengths, counts


# ----------------------------------------------------------------------------------------------------------
# Files


class Encoded:
    """Everything that was encoded, up to the document that reaches `most` tokens."""

    def __init__(self, work, width, most):
        self.tokens = work.array("tokens", f"<u{width}")
        self.lengths = work.array("lengths", "<u4")  # tokens of each sentence
        self.counts = work.array("counts", "<u4")  # sentences of each document
        firsts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        self.sizes = np.add.reduceat(self.lengths, firsts, dtype=np.int64)  # tokens of each document
        if most is not None:
            n = int(np.searchsorted(np.cumsum(self.sizes), most)) + 1
            self.sizes, self.counts = self.sizes[:n], self.counts[:n]
            self.lengths = self.lengths[: int(self.counts.sum())]


def first_validation_document(sizes, fraction_of_tokens):
    if fraction_of_tokens == 0:
        return len(sizes)
    count = max(2, int(np.searchsorted(np.cumsum(sizes[::-1]), fraction_of_tokens * int(sizes.sum()))) + 1)
    if count >= len(sizes):
        raise UserError(f"--val-fraction {fraction_of_tokens}: {len(sizes)} documents cannot be divided; give more")
    return len(sizes) - count


def cut_files(sizes, first, end, most):
    """Ranges of documents of about equal size and, where documents allow it, at most `most` tokens."""
    total = int(sizes[first:end].sum())
    count = (total + most - 1) // most
    begin, tokens, cuts = first, 0, []
    for d, size in enumerate(sizes[first:end].tolist(), first):
        if begin < d and (tokens + size > most or tokens >= total / count):
            cuts.append((begin, d))
            begin, tokens = d, 0
        tokens += size
        if size >= FILE_TOKENS:
            raise UserError(f"document {d + 1} has {size} tokens; cut it into smaller ones")
    return cuts + [(begin, end)] if begin < end else cuts


def hash_of(vocabulary):
    """FNV-1a, 64 bits: it tells the trainer whether a file was made with its vocab.txt."""
    value = 14695981039346656037
    for byte in "".join(token + "\n" for token in vocabulary).encode():
        value = (value ^ byte) * 1099511628211 % (1 << 64)
    return value


def about(vocabulary):
    """What every file records about it: the end of the header, and the words of bits."""
    continues = [token.startswith("##") and len(token) > 2 for token in vocabulary]
    continues += [False] * (-len(continues) % 32)
    special = [vocabulary.index(t) for t in SPECIAL]
    end_of_header = struct.pack("<6iQ", len(vocabulary), *special, hash_of(vocabulary))
    return end_of_header, np.packbits(continues, bitorder="little")


def write_file(path, encoded, documents, sentences, tokens, words):
    """Ranges [begin, end) of documents, and of the sentences and tokens in them; `words`: about() the vocabulary."""
    n, width = [r[1] - r[0] for r in (tokens, sentences, documents)], encoded.tokens.itemsize
    end_of_header, continues = words
    with open(path, "wb") as f:
        header = struct.pack("<2i3I", MAGIC, 1 if width == 2 else 2, *n) + end_of_header
        f.write(header.ljust(1024, b"\0"))
        copy_numbers(f, encoded.tokens, *tokens)
        f.write(b"\0" * (-n[0] * width % 4))
        for lengths in (encoded.lengths[slice(*sentences)], encoded.counts[slice(*documents)]):
            f.write(b"\0" * 4 + np.cumsum(lengths, dtype="<u4").tobytes())
        f.write(continues.tobytes())
        f.flush()
        os.fsync(f.fileno())


def write_files(options, work, encoded, vocabulary):
    """Write all files in the work's folder; returns their names, and the documents and tokens for training."""
    cut = first_validation_document(encoded.sizes, options.val_fraction)
    most = min(options.shard_tokens, FILE_TOKENS - 1)
    names, sentence, token, total = [], 0, 0, int(encoded.sizes.sum())
    progress, words = Progress("files"), about(vocabulary)
    for prefix, first, end in (("train", 0, cut), ("val", cut, len(encoded.sizes))):
        for i, (a, b) in enumerate(cut_files(encoded.sizes, first, end, most)):
            names.append(f"{prefix}_{i:06d}.bin")
            sentences, tokens = sentence + int(encoded.counts[a:b].sum()), token + int(encoded.sizes[a:b].sum())
            write_file(work.path(names[-1]), encoded, (a, b), (sentence, sentences), (token, tokens), words)
            sentence, token = sentences, tokens
            progress.show(token / total, f"{len(names)} written")
    progress.end()
    return names, cut, int(encoded.sizes[:cut].sum())


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
    streams = ["tokens", "lengths", "counts"]
    with Work(options, settings, streams) as work:
        output = Output(options.out, "prepare_bert.py", r"vocab\.txt|tokenizer_config\.json")
        vocabulary = get_vocabulary(options, source, work)
        width, code = (2, "H") if len(vocabulary) <= 65536 else (4, "I")
        arguments = (vocabulary, options.cased, options.lines, code)
        for encoded in work.encode(source, width, encode_batch, start_worker, arguments):
            for name, data in zip(streams, encoded):
                work.files[name].write(data)
        if not len(work.array("counts", "<u4")):
            raise UserError(f"{source.title}: no text in the input")
        encoded = Encoded(work, width, options.limit_tokens)
        names, train_documents, train_tokens = write_files(options, work, encoded, vocabulary)
        config = {"do_lower_case": not options.cased, "tokenizer_class": "BertTokenizer"}
        texts = {"vocab.txt": "\n".join(vocabulary), "tokenizer_config.json": json.dumps(config, indent=2)}
        for name, text in texts.items():
            write_atomically(work.path(name), text + "\n")
        output.publish(work.folder, names + list(texts))
        work.forget()
    documents, tokens = len(encoded.sizes), encoded.sizes.sum()
    print(
        f"{options.out}: {documents} documents, {len(encoded.lengths)} sentences; training: {train_documents} "
        f"documents, {train_tokens} tokens; validation: {documents - train_documents} documents, "
        f"{tokens - train_tokens} tokens; {len(names)} files, vocabulary of {len(vocabulary)}"
    )


# ----------------------------------------------------------------------------------------------------------
# Command line


def add_options(parser):
    parser.add_argument("--cased", action="store_true", help="keep upper case and accents")
    parser.add_argument("--lines", action="store_true", help="plain text: a line is a sentence, blank lines divide")
    parser.add_argument("--val-fraction", type=fraction, default=0.01, metavar="F", help="the last documents are")


def parse(arguments):
    options = parse_options(__doc__, add_options, arguments)
    options.read_plain = read_blank_lines if options.lines else read_whole
    options.read_document = read_whole
    options.drop_titles = True
    return options


if __name__ == "__main__":
    end(run(parse, prepare, sys.argv[1:]))
