"""What the preparation of data for any model needs: reading documents, working in several processes, the command line.

Options that the readers use: `text_key`; `read_plain` and `read_document`, functions of (stream, options) that yield
(piece of text, whether it begins a document) for a file of plain text and for one marked document; `drop_titles`.
"""
import argparse
import bz2
import gzip
import io
import json
import lzma
import multiprocessing
import os
import re
import signal
import sys
import tarfile
import threading
import time
import zlib

BATCH_CHARACTERS = 1 << 18  # of text for one task of a worker
FAILED, USAGE = 1, 2


class UserError(Exception):
    """Wrong usage or input: one line, exit status 2."""


# ----------------------------------------------------------------------------------------------------------
# Documents: every reader yields (piece of text, whether it begins a document)


def read_wiki(stream, options):
    lines, opened = [], 0
    for number, line in enumerate(stream, 1):
        if line.startswith("<doc "):
            if opened:
                raise UserError(f"the <doc> of line {opened} is not closed before line {number}")
            lines, opened = [], number
            title = re.search(r'title="(.*)"', line)
        elif line.rstrip() == "</doc>":
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


def read_jsonl(stream, options):
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[options.text_key]
        except ValueError as e:
            raise UserError(f"line {number} is not JSON: {e}")
        except (KeyError, IndexError, TypeError):
            raise UserError(f"line {number} is not an object with the key {options.text_key!r}; see --text-key")
        if not isinstance(text, str):
            raise UserError(f"line {number}: {options.text_key!r} is not a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            text = text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair
        if text:
            yield from options.read_document(io.StringIO(text), options)


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


def read_stream(binary, name, options):
    binary = io.BufferedReader(binary)
    start = binary.peek(256)[:256].lstrip()
    text = io.TextIOWrapper(binary, encoding="utf-8")
    if re.search(r"\.(jsonl|ndjson)(\.(gz|xz|bz2))?$", name):
        yield from read_jsonl(text, options)
    elif start.startswith(b"<doc "):
        yield from read_wiki(text, options)
    else:
        yield from options.read_plain(text, options)


def read_documents(path, options):
    name = path
    try:
        if re.search(r"\.(tar(\.(gz|xz|bz2))?|tgz|txz|tbz2?)$", path):
            with tarfile.open(path, "r|*") as archive:
                for member in archive:
                    if member.isfile():
                        name = f"{path}: {member.name}"
                        yield from read_stream(Forward(archive.extractfile(member)), member.name, options)
            return
        opener = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(os.path.splitext(path)[1], open)
        with opener(path, "rb") as f:
            yield from read_stream(f, path, options)
    except UserError as e:
        raise UserError(f"{name}: {e}")
    except UnicodeDecodeError as e:
        raise UserError(f"{name}: is not UTF-8 text ({e.reason}, byte 0x{e.object[e.start]:02x}); convert it first")
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError, zlib.error) as e:
        raise UserError(f"{name}: cannot be read: {e}")


# ----------------------------------------------------------------------------------------------------------
# Work in several processes


def batches(options):
    batch, size = [], 0
    for path in options.local:
        for text, begins in read_documents(path, options):
            batch.append((text, begins))
            size += len(text)
            if size >= BATCH_CHARACTERS or len(batch) >= 4096:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def start_process(start, arguments):
    # An interrupt is for the parent to handle, which ends its workers by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start(*arguments)


def encode_all(options, encode_batch, start, arguments):
    """The results of encode_batch in the order of the input; start(*arguments) is called once in every process."""
    if options.processes == 1:
        start(*arguments)
        yield from map(encode_batch, batches(options))
        return
    room = threading.Semaphore(4 * options.processes)  # the pool would read all input at once

    stopped = threading.Event()

    def limited():
        for batch in batches(options):
            room.acquire()
            if stopped.is_set():
                return
            yield batch

    with multiprocessing.Pool(options.processes, start_process, (start, arguments)) as pool:
        try:
            for result in pool.imap(encode_batch, limited()):
                room.release()
                yield result
        finally:  # the pool's end waits for its reader, which may wait here
            stopped.set()
            room.release()


class Progress:
    """One line on stderr, rewritten on a terminal, else printed twice a minute."""

    def __init__(self):
        self.begun = self.shown = time.monotonic()
        self.tty = sys.stderr.isatty()
        self.used = False

    def show(self, characters, tokens):
        now = time.monotonic()
        if now - self.shown < (0.5 if self.tty else 30):
            return
        self.shown, self.used = now, True
        rate = characters / 1e6 / (now - self.begun)
        line = f"{characters / 1e6:.1f} M characters, {tokens / 1e6:.2f} M tokens, {rate:.1f} M characters/s"
        sys.stderr.write(f"\r{line}\033[K" if self.tty else line + "\n")
        sys.stderr.flush()

    def end(self):
        if self.tty and self.used:
            sys.stderr.write("\r\033[K")


# ----------------------------------------------------------------------------------------------------------
# Command line


SHARD = r"(train|val)_\d{6}\.bin"


def claim(folder, magics):
    """Make the folder, unless it holds shards that begin with none of these numbers: those of another preparation."""
    os.makedirs(folder, exist_ok=True)
    for name in sorted(os.listdir(folder)):
        if not re.fullmatch(SHARD, name):
            continue
        with open(os.path.join(folder, name), "rb") as f:
            if int.from_bytes(f.read(4), "little") not in magics:
                raise UserError(f"{os.path.join(folder, name)}: is of another kind of model's data; choose another --out")


def temporary_of(folder, name):
    """Where a file is written before it is complete."""
    return os.path.join(folder, f"{name}.tmp{os.getpid()}")


def publish(folder, names):
    """Give complete files their names, and remove the shards of an earlier preparation that are none of them."""
    for name in names:
        os.replace(temporary_of(folder, name), os.path.join(folder, name))
    for name in os.listdir(folder):
        if re.fullmatch(SHARD, name) and name not in names:
            os.remove(os.path.join(folder, name))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; --help lists the options")


def positive(text):
    if not re.fullmatch(r"\+?\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def add_common_options(parser):
    """Input and output, which every preparation has."""
    parser.add_argument("--local", nargs="+", required=True, metavar="FILE", help="text to encode")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the shards")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of .jsonl lines (default: text)")
    parser.add_argument("--shard-tokens", type=positive, default=100_000_000, metavar="N", help="default: 100 million")
    cores = os.cpu_count() or 1
    parser.add_argument("--processes", type=positive, default=cores, metavar="N", help="default: all cores")


def check_inputs(options):
    for path in options.local:
        if not os.path.isfile(path):
            what = "is a directory; give the files in it" if os.path.isdir(path) else "no such file"
            raise UserError(f"{path}: {what}")
        if not os.access(path, os.R_OK):
            raise UserError(f"{path}: cannot be read; check its permissions")


def run(parse, prepare, arguments):
    """The exit status of prepare(parse(arguments)), with every failure as one line."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes here are the parallelism
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = parse(arguments)
        try:
            import tokenizers  # noqa: F401
        except ImportError:
            raise UserError("the Python package 'tokenizers' is missing; install it with: pip install tokenizers")
        prepare(options)
    except UserError as e:
        print("error: " + " ".join(str(e).split()), file=sys.stderr)
        return USAGE
    except OSError as e:
        what = f"{e.filename or options.out}: cannot be written: {e.strerror}"
        print(f"error: {what}; check space and permissions", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return FAILED
    return 0
