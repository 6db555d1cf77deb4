"""Shared by the scripts that prepare data for any model: reading documents, the command line, files that replace
others.

Options that the readers use: `text_key`; `read_plain` and `read_document`, functions of (stream, options) that yield
(piece of text, whether it begins a document) for a file of plain text and for one marked document; `drop_titles`.
"""
import argparse
import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import os
import re
import signal
import sys
import tarfile
import zlib

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))
import user_error  # noqa: E402
from user_error import Parser, Unreachable, UserError, parse_json, read_json, sync_directory  # noqa: E402, F401
from user_error import lock, need, refuse_foreign, replacing, write_atomically, writing  # noqa: E402, F401: for scripts


# ----------------------------------------------------------------------------------------------------------
# Documents: every reader yields (piece of text, whether it begins a document)


def read_wiki(stream, options):
    lines, opened = [], 0
    for number, line in enumerate(stream, 1):
        if line.lstrip().startswith("<doc "):
            if opened:
                raise UserError(f"the <doc> of line {opened} is not closed before line {number}")
            lines, opened = [], number
            title = re.search(r'title="(.*)"', line)
        elif line.strip() == "</doc>":
            if not opened:
                raise UserError(f"line {number}: </doc> without <doc>")
            if options.drop_titles and title and lines and lines[0].strip() == title.group(1):
                del lines[0]
            text = "".join(lines).strip("\n")
            if text:
                yield from options.read_document(io.StringIO(text), options)
            opened = 0
        elif opened:
            lines.append(line)
        elif line.strip():
            raise UserError(f"line {number}: text outside <doc> ... </doc>")
    if opened:
        raise UserError(f"the <doc> of line {opened} is not closed; the file is truncated")


READ_ERRORS = [OSError, EOFError, lzma.LZMAError, tarfile.TarError, zlib.error]  # and those of packages in use
ROWS = 1024  # of a Parquet file that are read at a time
FORMATS = {  # by the first bytes
    b"PAR1": "a Parquet file, which only prepare_gpt2.py and prepare_bert.py read, by a name that ends with .parquet",
    b"ARROW1": "an Arrow file; convert it to .jsonl",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard; decompress it first",
    b"\x1f\x8b": "compressed with gzip; decompress it first",
    b"\xfd7zXZ\0": "compressed with xz; decompress it first",
    b"BZh91AY": "compressed with bzip2; decompress it first",
    b"PK\3\4": "a zip file; decompress it first",
}


def check_format(start, prefix=""):
    """Whether a file is text is seen when it is read. What else it is most often, its first bytes tell."""
    for mark, name in FORMATS.items():
        if start.startswith(mark):
            raise UserError(f"{prefix}is {name}")


def read_text(text, options):
    """One document that is in memory."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair
    if text:
        yield from options.read_document(io.StringIO(text.replace("\r\n", "\n")), options)


def read_json_document(text, where, options):
    try:
        text = text[options.text_key]
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{where} is not an object with the key {options.text_key!r}; see --text-key")
    if not isinstance(text, str):
        raise UserError(f"{where}: {options.text_key!r} is not a string")
    yield from read_text(text, options)


def read_jsonl(stream, options):
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            document = parse_json(line)
        except ValueError as e:
            raise UserError(f"line {number} is not JSON: {e}")
        yield from read_json_document(document, f"line {number}", options)


def read_json_array(stream, options):
    text = stream.read()
    try:
        documents = parse_json(text)
    except ValueError as e:
        raise UserError(f"is not JSON: {e}")
    for number, document in enumerate(documents, 1):
        yield from read_json_document(document, f"document {number}", options)


def read_parquet(raw, options):
    READ_ERRORS.append(need("pyarrow").ArrowException)
    file = need("pyarrow.parquet").ParquetFile(raw)
    columns = file.schema_arrow.names
    if options.text_key not in columns:
        raise UserError(f"has no column {options.text_key!r}, but {', '.join(columns)}; see --text-key")
    rows = (row for batch in file.iter_batches(ROWS, columns=[options.text_key]) for row in batch.to_pylist())
    for number, row in enumerate(rows, 1):
        if row[options.text_key] is not None:  # as --dataset reads it
            yield from read_json_document(row, f"row {number}", options)


class Forward(io.RawIOBase):
    """A member of an archive that is read in one pass; tarfile's own object promises seeking and fails."""

    def __init__(self, member):
        super().__init__()
        self.member = member

    def readable(self):
        return True

    def readinto(self, buffer):
        data = self.member.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def read_stream(binary, name, options, is_member):
    binary = io.BufferedReader(binary)
    start = binary.peek(256)[:256]
    check_format(start)
    start = start[len(codecs.BOM_UTF8) * start.startswith(codecs.BOM_UTF8) :].lstrip()
    text = io.TextIOWrapper(binary, encoding="utf-8-sig")  # a byte order mark is not text, and CR LF ends a line
    name = re.sub(rf"\.({'|'.join(COMPRESSED)})$", "", os.path.basename(name))
    # WikiExtractor --json names its files wiki_00; with a name of its own, as code.json in an archive, a file is what it seems.
    is_json, is_wiki_json = name.endswith(".json") and not is_member, "." not in name and start.startswith(b'{"')
    if re.search(r"\.(jsonl|ndjson)$", name) or is_wiki_json or (is_json and start[:1] == b"{"):
        yield from read_jsonl(text, options)
    elif is_json and start[:1] == b"[":
        yield from read_json_array(text, options)
    elif start.startswith(b"<doc "):
        yield from read_wiki(text, options)
    else:
        yield from options.read_plain(text, options)


def open_zst(raw):
    zstandard = need("zstandard")
    READ_ERRORS.append(zstandard.ZstdError)
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))


COMPRESSED = {"gz": gzip.open, "xz": lzma.open, "bz2": bz2.open, "zst": open_zst}


def decompress(raw, path):
    opener = COMPRESSED.get(path.rpartition(".")[2])
    return opener(raw) if opener else raw


def read_json_values(path):
    """(where it is, value) of each line of a file or, in a .json file, of each element of its array."""
    where = path
    try:
        with open(path, "rb") as raw, decompress(raw, path) as f:
            start = f.peek(64)[:64]
            check_format(start, f"{path}: ")
            is_array = re.search(r"\.json(\.\w+)?$", path) and start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
            for number, value in enumerate(parse_json(f.read().decode("utf-8-sig")) if is_array else f, 1):
                where = f"{path}: {'element' if is_array else 'line'} {number}"
                if is_array or value.strip():
                    yield where, value if is_array else parse_json(value.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise UserError(f"{where} is not UTF-8 text ({e.reason})")
    except tuple(READ_ERRORS) as e:
        raise UserError(f"{where}: cannot be read: {e}")
    except ValueError as e:
        raise UserError(f"{where} is not JSON: {e}")


def read_documents(path, raw, options):
    """The documents in a file, opened as `raw`, whose position tells how much of it has been read."""
    name = path
    try:
        if path.endswith(".parquet"):
            yield from read_parquet(raw, options)
            return
        if re.search(r"\.(tar(\.(gz|xz|bz2|zst))?|tgz|txz|tbz2?)$", path):
            whole = decompress(raw, path) if path.endswith(".zst") else raw
            with tarfile.open(fileobj=whole, mode="r|*") as archive:
                for member in archive:
                    if member.isfile():
                        name = f"{path}: {member.name}"
                        yield from read_stream(Forward(archive.extractfile(member)), member.name, options, True)
            return
        with decompress(raw, path) as f:
            yield from read_stream(f, path, options, False)
    except UserError as e:
        raise UserError(f"{name}: {e}")
    except UnicodeDecodeError as e:
        raise UserError(f"{name}: is not UTF-8 text ({e.reason}, byte 0x{e.object[e.start]:02x}); convert it first")
    except tuple(READ_ERRORS) as e:
        raise UserError(f"{name}: cannot be read: {e}")


# ----------------------------------------------------------------------------------------------------------
# Command line


def positive(text):
    if not re.fullmatch(r"\+?\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def vocabulary_size(text):
    """A number of tokens that the trainers take."""
    if positive(text) > 1 << 24:
        raise argparse.ArgumentTypeError(f"{text} is more than {1 << 24}")
    return int(text)


def fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def seconds(text):
    if not re.fullmatch(r"\d{1,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of seconds")
    return int(text)


def parse_options(description, add_options, arguments):
    """The options that every preparation of text has, and those of add_options(parser)."""
    parser = Parser(description)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--local", nargs="+", metavar="FILE", help="text to encode")
    source.add_argument("--dataset", metavar="NAME[:CONFIG[:SPLIT[:COLUMN]]]", help="text from the net, see above")
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--vocab", metavar="PATH", help="an existing vocabulary, see above")
    vocabulary.add_argument("--train-vocab", type=vocabulary_size, metavar="N", help="make one of N tokens")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the shards")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of .jsonl lines (default: text)")
    parser.add_argument("--revision", metavar="REV", help="of the --dataset (default: the newest, kept when resuming)")
    parser.add_argument("--limit-tokens", type=positive, metavar="N", help="stop there")
    parser.add_argument("--shard-tokens", type=positive, default=100_000_000, metavar="N", help="default: 100 million")
    cores = min(os.cpu_count() or 1, 256)
    parser.add_argument("--processes", type=positive, default=cores, metavar="N", help="default: all cores")
    parser.add_argument("--save-every", type=seconds, default=30, metavar="S", help="seconds between saves (30)")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.revision is not None and options.dataset is None:
        raise UserError("--revision belongs to --dataset, which is not given")
    if options.vocab is not None:
        folder = options.vocab if os.path.isdir(options.vocab) else os.path.dirname(options.vocab)
        if os.path.realpath(folder) == os.path.realpath(options.out):
            raise UserError(f"--vocab {options.vocab}: would be overwritten; choose another --out")
    for path in options.local or []:
        if not os.path.isfile(path):
            what = "is a directory; give the files in it" if os.path.isdir(path) else "no such file"
            raise UserError(f"{path}: {what}")
    return options


def run(parse, prepare, arguments):
    """The exit status of prepare(parse(arguments)), with every failure as one line."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes here are the parallelism
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def main():
        options = parse(arguments)
        need("tokenizers")
        try:
            with writing(options.out):
                prepare(options)
        except KeyboardInterrupt as e:
            raise Unreachable(str(e) or "interrupted; nothing was written")

    return user_error.run(main)


def end(status):
    """End the process. An ordinary end waits for threads of libraries: that of a pool of processes waits forever for
    the rest of what a worker was writing when it was killed."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)
