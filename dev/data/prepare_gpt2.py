#!/usr/bin/env python3
"""Text into token shards for GPT-2.

    prepare_gpt2.py --local FILE... --vocab DIR --out DIR
    prepare_gpt2.py --dataset fineweb-edu --limit-tokens 1000000000 --vocab DIR --out DIR
    prepare_gpt2.py --local input.txt --split-blank-lines --val-tokens 32768 --vocab DIR --out DIR
    prepare_gpt2.py --local FILE... --train-vocab 16384 --out DIR

Needs Python 3.8 or later and the packages `tokenizers` and `numpy`, for --dataset also `datasets`. --vocab is a
directory that holds vocab.json (or encoder.json) with merges.txt (or vocab.bpe), or tokenizer.json. --train-vocab N
makes a tokenizer of N tokens from the text: a byte-level BPE that splits words like GPT-2's, from all of --local, from
the first billion characters of --dataset. The 256 bytes come first, <|endoftext|> last; the same text gives the same
tokenizer.

Input files, recognized by their names and first bytes, in the order given:
  plain text      one document per file
  WikiExtractor   one document for each <doc ...> ... </doc>
  *.jsonl         one document per line, under the key "text" (--text-key)
  *.json          the same, or an array of such objects; in an archive plain text
  *.parquet       one document per row, in the column "text" (--text-key); needs the package `pyarrow`
Each may be compressed (.gz .xz .bz2, and .zst with the package `zstandard`), and a .tar archive, compressed or not, is
read as the files in it, in the order of the archive.

--dataset is a data set of the Hugging Face hub, streamed: fineweb, fineweb-edu (their samples of 10 billion tokens),
tinystories, wikipedia (English), or any NAME[:CONFIG[:SPLIT[:COLUMN]]], or a directory of parquet or .jsonl files;
omitted parts have their defaults (fineweb:sample-100BT is another configuration).

If a long preparation is stopped or killed, the same command continues it and produces the same bytes. Until it is done,
its work is in preparation/ in the output directory; work and shards together take twice the space of the tokens.

<|endoftext|> is written before each document. If that string occurs in a text it is encoded as ordinary text. A
tokenizer without it has another token at its place: the eos_token of its tokenizer_config.json or special_tokens_map.json.

Validation is one of:
  --val-tokens N      the FIRST N tokens, as llm.c does with tinyshakespeare; the rest is for training
  --val-fraction F    the LAST documents, about F of all tokens: it begins with the first document that starts
                      in that last part; if no document starts there, the last document is cut
With neither, --val-fraction 0.01.

Writes train_000000.bin ... and val_000000.bin ..., of equal size and at most --shard-tokens tokens, and copies of the
tokenizer's files, with which the trainer decodes its samples. What an earlier run wrote to the output directory, listed
there in prepared.json, is replaced when everything else is done; other files of these names are an error.
"""
import hashlib
import json
import os
import re
import struct
import sys
from array import array

from documents import UserError, end, fraction, need, parse_options, positive, read_json, run
from net import open_source
from work import Output, Progress, Work, copy_numbers, library_threads, vocabulary_texts, write_atomically

np = need("numpy")
END_OF_TEXT = "<|endoftext|>"
MAGICS = 20240520, 20240801  # of shards of uint16 and of uint32
LEAST_VOCABULARY = 257  # of --train-vocab
PIECE_CHARACTERS = 1 << 18  # plain text is encoded in pieces of about this length
SETTINGS = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
TOKENIZER_FILES = ["vocab.json", "merges.txt", "encoder.json", "vocab.bpe", *SETTINGS]


# ----------------------------------------------------------------------------------------------------------
# Tokenizer


def first_existing(directory, names):
    for name in names:
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            return path
    return None


def read_bytes(path):
    with open(path, "rb") as f:
        return f.read()


class Vocabulary:
    """What the workers need to build the tokenizer (text), and what the shards need to know about it."""

    def __init__(self, directory):
        vocab = first_existing(directory, ["vocab.json", "encoder.json"])
        merges = first_existing(directory, ["merges.txt", "vocab.bpe"])
        whole = first_existing(directory, ["tokenizer.json"])
        files = {name: os.path.join(directory, name) for name in SETTINGS}
        if vocab and merges:
            files.update({"vocab.json": vocab, "merges.txt": merges})
        self.copies = {name: read_bytes(path) for name, path in files.items() if os.path.isfile(path)}
        tree = self._tokenizer_json(whole) if whole else None
        if vocab and merges:
            ids = self._from_vocab(vocab, merges)
        elif whole:
            ids = self._from_tokenizer_json(whole, tree)
        else:
            raise UserError(
                f"{directory}: holds neither vocab.json (or encoder.json) with merges.txt (or vocab.bpe), "
                "nor tokenizer.json"
            )
        self.separator = END_OF_TEXT if END_OF_TEXT in ids else self._eos_token(directory, ids)
        for token, i in ids.items():
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < 1 << 31:
                raise UserError(f"{vocab or whole}: token {token!r} has the id {i!r}; ids are whole numbers from 0")
        self.end_of_text = ids[self.separator]
        self.size = max(ids.values()) + 1
        try:
            make_tokenizer(self.text)
        except Exception as e:  # the library raises plain Exception
            raise UserError(f"{vocab or whole}: the tokenizer is invalid: {e}")

    def _eos_token(self, directory, ids):
        for path in (os.path.join(directory, name) for name in SETTINGS[1:]):
            settings = read_json(path) if os.path.isfile(path) else None
            eos = settings.get("eos_token") if isinstance(settings, dict) else None
            eos = eos.get("content") if isinstance(eos, dict) else eos
            if isinstance(eos, str) and eos in ids:
                return eos
        raise UserError(f"{directory}: has no {END_OF_TEXT}, and no eos_token in {SETTINGS[1]}, to separate documents")

    def _tokenizer_json(self, path):
        tree = read_json(path)
        try:
            kind, dropout = (tree.get("pre_tokenizer") or {}).get("type"), (tree.get("model") or {}).get("dropout")
        except AttributeError:
            raise UserError(f"{path}: is not a tokenizer with a vocabulary and added tokens")
        if '"ByteLevel"' not in json.dumps([tree.get("pre_tokenizer"), tree.get("normalizer")]):
            raise UserError(f"{path}: its pre-tokenizer is {kind}; only byte-level tokenizers, as GPT-2's, can be used")
        if dropout:
            raise UserError(f"{path}: its dropout of {dropout} gives a text other tokens in every run; set it to null")
        return tree

    def _from_vocab(self, vocab, merges):
        ids = read_json(vocab)
        if not isinstance(ids, dict):
            raise UserError(f"{vocab}: is not an object of tokens and ids")
        try:
            with open(merges, encoding="utf-8-sig") as f:
                lines = f.read().split("\n")
        except (OSError, ValueError) as e:
            raise UserError(f"{merges}: cannot be read: {e}")
        pairs = []
        for number, line in enumerate(lines, 1):
            if not line or (number == 1 and line.startswith("#version")):
                continue
            pair = line.rstrip("\r").split(" ")
            if len(pair) != 2:
                raise UserError(f"{merges}: line {number} is not two symbols: {line!r}")
            pairs.append(pair)
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        self.cuttable = True
        self.text = json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": byte_level,
                "decoder": byte_level,
                "model": {"type": "BPE", "vocab": ids, "merges": [" ".join(p) for p in pairs]},
            }
        )
        return ids

    def _from_tokenizer_json(self, path, tree):
        # Without special tokens none is found inside a text, and nothing is added to a text.
        try:
            added = tree.get("added_tokens") or []
            ids = dict(tree["model"]["vocab"])
            ids.update((t["content"], t["id"]) for t in added)
            tree["added_tokens"] = [t for t in added if not t.get("special")]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(f"{path}: is not a tokenizer with a vocabulary and added tokens")
        tree["post_processor"] = tree["truncation"] = tree["padding"] = None
        pre = tree.get("pre_tokenizer") or {}
        self.cuttable = (
            pre.get("type") == "ByteLevel"
            and not pre.get("add_prefix_space")
            and pre.get("use_regex", True)
            and not tree.get("normalizer")
            and not tree["added_tokens"]
        )
        self.text = json.dumps(tree)
        return ids


def make_tokenizer(text):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)


def train_tokenizer(options, source):
    """{name: text} of the files of a new tokenizer. The library orders characters by code point, and pairs by
    frequency, then by their symbols' ids, so the result is the same in every run."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=options.train_vocab - 1,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    with library_threads():
        tokenizer.train_from_iterator(vocabulary_texts(options, source), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    tree = json.loads(tokenizer.to_str())
    ids, merges = tree["model"]["vocab"], [m if isinstance(m, str) else " ".join(m) for m in tree["model"]["merges"]]
    tree["model"]["merges"] = merges
    if len(ids) + 1 < options.train_vocab:
        print(f"--train-vocab {options.train_vocab}: no further pair occurs twice; the tokenizer has {len(ids) + 1} tokens")
    config = {
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": 1000000000000000019884624838656,  # the library's way to say that there is no limit
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": END_OF_TEXT,
    }
    return {
        "merges.txt": "#version: 0.2\n" + "".join(f"{m}\n" for m in merges),
        "tokenizer.json": json.dumps(tree, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "vocab.json": json.dumps({**ids, END_OF_TEXT: len(ids)}, ensure_ascii=False) + "\n",
    }


def get_vocabulary(options, source, work):
    """The given tokenizer, or one made from the text, which resumed work does not make again."""
    if options.vocab:
        return options.vocabulary
    if not os.path.exists(work.path("vocab.json")):
        for name, text in train_tokenizer(options, source).items():  # vocab.json last: it marks the others as complete
            write_atomically(work.path(name), text)
        work.save()
    return Vocabulary(work.folder)


# ----------------------------------------------------------------------------------------------------------
# Plain text: (piece of text, whether it begins a document)


def cut_pieces(stream):
    """Plain text in pieces that together encode as the whole does.

    A cut lies between a character that is not a space and a space. GPT-2's pattern looks ahead only from white
    space, so the word before a cut and the white space after it are encoded as they would be without it.
    """
    rest, first = "", True
    while True:
        chunk = stream.read(PIECE_CHARACTERS)
        if not chunk:
            break
        old = len(rest)
        rest += chunk
        for at in range(len(rest) - 1, max(old, 1) - 1, -1):
            if rest[at] in " \n\t" and not rest[at - 1].isspace():
                yield rest[:at], first
                rest, first = rest[at:], False
                break
    if rest:
        yield rest, first


def read_plain(stream, options):
    if options.split_blank_lines:
        sections = stream.read().split("\n\n")
        for i, section in enumerate(sections):
            yield section + ("\n\n" if i + 1 < len(sections) else ""), True
    elif options.cuttable:
        yield from cut_pieces(stream)
    else:
        text = stream.read()
        if text:
            yield text, True


# ----------------------------------------------------------------------------------------------------------
# Encoding in several processes

worker = {}  # of this process: the tokenizer and what goes with it


def start_worker(text, end_of_text, code):
    worker["tokenizer"] = make_tokenizer(text)
    worker["end_of_text"] = end_of_text
    worker["code"] = code


def encode_batch(batch):
    """[(text, begins a document)] -> (characters, tokens as bytes, starts of documents among them)."""
    tokenizer = worker["tokenizer"]
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # the fast one leaves offsets out
    tokens, starts = array(worker["code"]), []
    texts = [text for text, _ in batch]
    for (_, begins), encoding in zip(batch, encode(texts, add_special_tokens=False)):
        if begins:
            starts.append(len(tokens))
            tokens.append(worker["end_of_text"])
        tokens.extend(encoding.ids)
    return sum(map(len, texts)), tokens.tobytes(), starts


# ----------------------------------------------------------------------------------------------------------
# Shards


def split_of(options, total, starts):
    """(validation, training) as ranges of tokens."""
    if options.val_tokens is not None:
        if options.val_tokens >= total:
            raise UserError(f"--val-tokens {options.val_tokens}: of {total} tokens in all, none is left to train on")
        return (0, options.val_tokens), (options.val_tokens, total)
    if options.val_fraction == 0:
        return (0, 0), (0, total)
    cut = total - int(options.val_fraction * total)
    next_document = np.searchsorted(starts, cut)
    if next_document < len(starts):
        cut = int(starts[next_document])
    if not 0 < cut < total:
        raise UserError(f"--val-fraction {options.val_fraction}: {total} tokens cannot be divided; give more text")
    return (cut, total), (0, cut)


def write_shards(work, prefix, tokens, begin, end):
    """Tokens begin .. end - 1 in shards of equal size; returns their names."""
    n, most = end - begin, work.options.shard_tokens
    count, names, progress = (n + most - 1) // most, [], Progress(prefix)
    magic, version = (MAGICS[0], 1) if tokens.itemsize == 2 else (MAGICS[1], 7)
    for i in range(count):
        first, last = begin + n * i // count, begin + n * (i + 1) // count
        names.append(f"{prefix}_{i:06d}.bin")
        with open(work.path(names[-1]), "wb") as f:
            size = last - first
            f.write(struct.pack("<4I", magic, version, size & 0xFFFFFFFF, size >> 32).ljust(1024, b"\0"))
            copy_numbers(f, tokens, first, last)
            f.flush()
            os.fsync(f.fileno())
        progress.show((last - begin) / n, f"{i + 1} shards")
    progress.end()
    return names


def encode_text(options, source, work, vocabulary, width):
    arguments = (vocabulary.text, vocabulary.end_of_text, "H" if width == 2 else "I")
    for encoded, begins in work.encode(source, width, encode_batch, start_worker, arguments):
        total = work.files["tokens"].tell() // width
        work.files["tokens"].write(encoded)
        work.files["starts"].write(array("Q", [total + s for s in begins]).tobytes())


def prepare(options):
    source = open_source(options)
    settings = {
        **source.settings(),
        "--vocab": options.vocab and hashlib.sha256(options.vocabulary.text.encode()).hexdigest(),
        "--train-vocab": options.train_vocab,
        "--text-key": options.text_key,
        "--split-blank-lines": options.split_blank_lines,
        "--limit-tokens": options.limit_tokens,
    }
    with Work(options, settings, ["tokens", "starts"]) as work:
        output = Output(options.out, "prepare_gpt2.py", "|".join(map(re.escape, TOKENIZER_FILES)))
        vocabulary = get_vocabulary(options, source, work)
        width = 2 if vocabulary.size <= 65536 else 4
        encode_text(options, source, work, vocabulary, width)
        tokens, starts = work.array("tokens", f"<u{width}"), work.array("starts", "<u8")
        total = len(tokens)
        if options.limit_tokens is not None and total > options.limit_tokens:
            total = options.limit_tokens
            starts = starts[: np.searchsorted(starts, total)]
        if total == 0:
            raise UserError(f"{source.title}: no text in the input")
        val, train = split_of(options, total, starts)
        names = write_shards(work, "val", tokens, *val) + write_shards(work, "train", tokens, *train)
        for name, data in vocabulary.copies.items():
            write_atomically(work.path(name), data)
        output.publish(work.folder, names + list(vocabulary.copies))
        work.forget()
    print(
        f"{options.out}: {len(starts)} documents, {train[1] - train[0]} training tokens, "
        f"{val[1] - val[0]} validation tokens, {len(names)} shards, vocabulary of {vocabulary.size}"
    )


# ----------------------------------------------------------------------------------------------------------
# Command line


def add_options(parser):
    validation = parser.add_mutually_exclusive_group()
    validation.add_argument("--val-tokens", type=positive, metavar="N", help="the first N tokens are validation")
    validation.add_argument("--val-fraction", type=fraction, metavar="F", help="the last documents are (default: 0.01)")
    parser.add_argument(
        "--split-blank-lines",
        action="store_true",
        help="a section that ends with a blank line is a document, as llm.c prepares tinyshakespeare",
    )


def parse(arguments):
    options = parse_options(__doc__, add_options, arguments)
    options.read_plain = options.read_document = read_plain
    options.drop_titles = False
    if options.val_fraction is None:
        options.val_fraction = 0.01
    options.cuttable = True
    if options.train_vocab is not None and options.train_vocab < LEAST_VOCABULARY:
        raise UserError(f"--train-vocab {options.train_vocab}: the bytes and {END_OF_TEXT} alone take {LEAST_VOCABULARY}")
    if options.vocab is not None and not os.path.isdir(options.vocab):
        raise UserError(f"{options.vocab}: no such directory (--vocab)")
    return options


def main(options):
    if options.vocab is not None:
        options.vocabulary = Vocabulary(options.vocab)
        options.cuttable = options.vocabulary.cuttable
    prepare(options)


if __name__ == "__main__":
    end(run(parse, main, sys.argv[1:]))
