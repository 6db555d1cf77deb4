"""Sources of text for a preparation: files, or a data set of the Hugging Face hub.

A source has settings(), by flag, that identify its text, and batches(position): ([(piece of text, whether it begins a
document)], (the position after it, the fraction of the text done there or None)), from an earlier position or, with
None, from the beginning. Positions must survive JSON. `title` is the source's name in errors.

Tests: data sets streamed from directories of parquet and jsonl files and from a stand-in for the hub on the same
machine. The real hub was not used.
"""
import json
import os
import socket

from documents import Unreachable, UserError, need, read_documents, read_text

BATCH_CHARACTERS = 1 << 18  # of text for one task of a worker
BATCH_PIECES = 4096
ROWS = 64  # of a data set that are read at a time
TIMEOUT = 60  # seconds without an answer

# Data sets with a short name: repository, configuration, split, column.
DATASETS = {
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT", "train", "text"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", "text"),
    "tinystories": ("roneneldan/TinyStories", "", "train", "text"),
    "wikipedia": ("wikimedia/wikipedia", "20231101.en", "train", "text"),
}


# Libraries below `datasets`, which have their own errors for a network that does not answer.
NETWORK_LIBRARIES = {"aiohttp", "httpcore", "httpx", "requests", "urllib3"}


def is_of_network(e):
    """Whether the network did not answer. Libraries change (httpx2 replaced httpx), but the cause of their errors does
    not."""
    if type(e).__module__.split(".")[0] in NETWORK_LIBRARIES:
        return True
    while e and not isinstance(e, (ConnectionError, TimeoutError, socket.gaierror)):
        e = e.__cause__ or e.__context__
    return e is not None


def one_line(e, most=300):
    text = " ".join(str(e).split()) or type(e).__name__
    return text if len(text) <= most else text[:most] + " ..."


class Batch:
    """Collects pieces of text until a batch is large enough for a worker."""

    def __init__(self):
        self.pieces, self.characters = [], 0

    def add(self, piece):
        self.pieces.append(piece)
        self.characters += len(piece[0])

    def is_full(self):
        return self.characters >= BATCH_CHARACTERS or len(self.pieces) >= BATCH_PIECES


# ----------------------------------------------------------------------------------------------------------
# Files


class Files:
    """A position is the number of pieces before it: reading them again takes little time beside encoding."""

    def __init__(self, options):
        self.options, self.paths, self.title = options, options.local, options.local[0]

    def settings(self):
        stats = [(os.path.abspath(path), os.stat(path)) for path in self.paths]
        return {"--local": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]}

    def batches(self, position):
        known, count, before, batch = position or 0, 0, 0, Batch()
        total = max(1, sum(map(os.path.getsize, self.paths)))
        for path in self.paths:
            try:
                raw = open(path, "rb")
            except OSError as e:
                raise UserError(f"{path}: cannot be read: {e.strerror}")
            size = os.path.getsize(path)
            with raw:
                for piece in read_documents(path, raw, self.options):
                    count += 1
                    if count <= known:
                        continue
                    batch.add(piece)
                    if batch.is_full():
                        done = before + (size if raw.closed else raw.tell())
                        yield batch.pieces, (count, min(1, done / total))
                        batch = Batch()
            before += size
        if batch.pieces:
            yield batch.pieces, (count, 1)


# ----------------------------------------------------------------------------------------------------------
# Data sets of the hub


class Dataset:
    """Streamed, in its own order. A position holds the library's own state, and the commit that is read."""

    def __init__(self, options):
        self.options, self.spec, self.title = options, options.dataset, f"--dataset {options.dataset}"
        parts = self.spec.split(":")
        if len(parts) > 4 or not parts[0]:
            raise UserError(f"{self.title}: is not NAME[:CONFIG[:SPLIT[:COLUMN]]]")
        usual = DATASETS.get(parts[0].lower(), (parts[0], "", "train", "text"))
        given = parts[1:] + [""] * (4 - len(parts))
        self.name, self.config, self.split, self.column = usual[:1] + tuple(g or u for g, u in zip(given, usual[1:]))

    def settings(self):
        return {"--dataset": [self.name, self.config, self.split, self.column], "--revision": self.options.revision}

    def _revision(self, position):
        """The commit to read: a data set must not change between two runs of a preparation."""
        if position is not None:
            return position["revision"]
        if os.path.isdir(self.name):
            return None
        import huggingface_hub

        return huggingface_hub.HfApi().dataset_info(self.name, revision=self.options.revision, timeout=TIMEOUT).sha

    def _load(self, position):
        os.environ.setdefault("USE_TORCH", "0")  # which would only be imported
        datasets = need("datasets")
        datasets.utils.logging.set_verbosity_error()
        datasets.utils.logging.disable_progress_bar()
        try:
            revision = self._revision(position)
            stream = datasets.load_dataset(
                self.name, self.config or None, split=self.split, streaming=True, revision=revision
            )
            columns = stream.column_names or list(next(iter(stream)))
        except StopIteration:
            raise UserError(f"{self.title}: its split {self.split!r} is empty")
        except Exception as e:
            kind = Unreachable if is_of_network(e) else UserError
            raise kind(f"{self.title}: cannot be opened: {one_line(e)}")
        if self.column not in columns:
            raise UserError(f"{self.title}: has no column {self.column!r}; there are {', '.join(columns)}")
        return stream.select_columns([self.column]), revision

    def batches(self, position):
        stream, revision = self._load(position)
        total = getattr((stream.info.splits or {}).get(self.split), "num_examples", None)
        if position is not None:
            stream.load_state_dict(position["stream"])
        documents, rows, batch = position["documents"] if position else 0, iter(stream.iter(ROWS)), Batch()
        while True:
            try:
                texts = next(rows, {self.column: None})[self.column]
            except Exception as e:  # a lost connection or a damaged file
                raise Unreachable(f"{self.title}: reading ended after {documents} documents: {one_line(e)}")
            for text in texts or []:
                documents += 1
                if text is not None and not isinstance(text, str):
                    raise UserError(f"{self.title}: {self.column!r} of document {documents} is not a string")
                for piece in read_text(text or "", self.options):
                    batch.add(piece)
            if batch.is_full() or (texts is None and batch.pieces):
                state = json.loads(json.dumps(stream.state_dict()))
                mark = {"documents": documents, "stream": state, "revision": revision}
                yield batch.pieces, (mark, min(1, documents / total) if total else None)
                batch = Batch()
            if texts is None:
                return


def open_source(options):
    """The source that the options name."""
    if options.local is not None:
        return Files(options)
    return Dataset(options)
