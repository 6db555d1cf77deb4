"""Preparation as a long job: several processes, a progress line with the time left, and work that survives a kill.

Encoded data is kept in OUT/preparation/, in files that only grow. state.json there records how much of them is valid
and the matching position in the input. The same command, run again, truncates the files to that size and continues. The
encoding depends on the input alone, so the result is the same to the last byte. The folder is removed at the end.

No file of the user is replaced or removed: a folder of work has the lock in it, and prepared.json lists the files in OUT
that are of an earlier run.
"""
import collections
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time

from documents import Unreachable, UserError, lock, need, parse_json, read_json, sync_directory, write_atomically

np = need("numpy")
FOLDER, STATE, LOCK = "preparation", "state.json", "preparation.lock"
MANIFEST, SHARD = "prepared.json", r"(train|val)_\d{6}\.bin"
COUNTS = "position", "complete", "tokens", "sizes"  # what is recorded of the work, besides its settings
COPY_BYTES = 1 << 22


# ----------------------------------------------------------------------------------------------------------
# Several processes


def begin_worker(start, arguments):
    """In a new process: interrupts are for its parent to handle, and it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    start(*arguments)


KILLED = "a worker process was killed, perhaps for want of memory; fewer --processes need less"


def result_of(future, workers):
    """The result of a worker. The pool waits forever for the rest of what a worker was writing when it was killed."""
    while all(worker.is_alive() for worker in workers):
        try:
            return future.result(timeout=1)
        except concurrent.futures.TimeoutError:
            pass
    for worker in workers:
        worker.kill()
    raise Unreachable(KILLED)


def encode_all(processes, batches, encode_batch, start, arguments):
    """(result of encode_batch, what came with the batch) in the order of `batches`, which are (batch, what comes with
    it); start(*arguments) is called once in every process."""
    if processes == 1:
        start(*arguments)
        for batch, mark in batches:
            yield encode_batch(batch), mark
        return
    failures, given = [], collections.deque()  # (future, mark) from the oldest
    context = multiprocessing.get_context("fork")
    others = multiprocessing.active_children()
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, begin_worker, (start, arguments))
    pool.submit(int)  # so that processes begin before the first batch: reading a data set starts threads
    workers = [process for process in multiprocessing.active_children() if process not in others]

    def give():
        try:
            for batch, mark in batches:
                given.append((pool.submit(encode_batch, batch), mark))
                yield 4 * processes
        except Unreachable as e:  # what was read before is encoded too
            failures.append(e)
        yield 0

    try:
        for most in give():
            while len(given) > most or (given and given[0][0].done()):
                future, mark = given.popleft()
                yield result_of(future, workers), mark
    except concurrent.futures.process.BrokenProcessPool:
        raise Unreachable(KILLED)
    finally:
        # Nothing is cancelled: that is an error in the pool's thread while it finds that a worker was killed.
        pool.shutdown(wait=False)
    if failures:
        raise failures[0]


# ----------------------------------------------------------------------------------------------------------
# Progress


class Progress:
    """The progress of a stage of the work, on stderr: a line that is rewritten on terminals, elsewhere one twice a
    minute."""

    def __init__(self, what):
        self.what, self.shown, self.first = what, time.monotonic(), None
        self.tty = sys.stderr.isatty()

    def show(self, fraction, text):
        """`fraction` of the stage is done; None if unknown. The time left is estimated from the progress since this
        process first called this."""
        now = time.monotonic()
        if self.first is None and fraction is not None:
            self.first, self.counted = fraction, now
        if now - self.shown < (0.5 if self.tty else 30):
            return
        self.shown, line = now, f"{self.what}: {text}"
        if fraction is not None:
            line += f", {100 * fraction:.1f} %"
            if fraction > self.first:
                left = int((now - self.counted) * (1 - fraction) / (fraction - self.first))
                line += f", {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        print(f"\r{line}\033[K" if self.tty else line, end="" if self.tty else "\n", file=sys.stderr, flush=True)

    def end(self):
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------
# The text that a vocabulary is made from

VOCABULARY_CHARACTERS = 1_000_000_000  # of a data set; of --local all


def vocabulary_texts(options, source):
    progress, characters = Progress("vocabulary"), 0
    with contextlib.closing(source.batches(None)) as batches:
        for batch, (_, done) in batches:
            for text, _ in batch:
                characters += len(text)
                yield text
            if options.dataset is not None:
                done = max(done or 0, characters / VOCABULARY_CHARACTERS)
            progress.show(done, f"{characters / 1e6:.1f} M characters")
            if options.dataset is not None and characters >= VOCABULARY_CHARACTERS:
                break
    progress.end()


@contextlib.contextmanager
def library_threads():
    """While a vocabulary is made the library may use threads; later the processes here are the parallelism."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


# ----------------------------------------------------------------------------------------------------------
# Work that can be resumed


def read_state(folder):
    """(settings, what is done) of a folder of work, or None."""
    path = os.path.join(folder, STATE)
    try:
        with open(path, encoding="utf-8") as f:
            state = parse_json(f.read())
        done = {name: state[name] for name in COUNTS}
        done["sizes"] = {name: int(size) for name, size in done["sizes"].items()}
        return dict(state["settings"]), done
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: is damaged; remove {folder} to start again")


class Work:
    """`streams` are the files that grow; the first one holds the tokens. `settings`, by flag, are what their bytes
    depend on: unfinished work of others is refused."""

    def __init__(self, options, settings, streams):
        self.options, self.settings = options, json.loads(json.dumps(settings))
        self.folder = os.path.join(options.out, FOLDER)
        found = os.listdir(self.folder) if os.path.isdir(self.folder) else [FOLDER] * os.path.lexists(self.folder)
        if os.path.islink(self.folder) or (found and LOCK not in found):
            raise UserError(f"{self.folder}: was not made by a preparation of this version; move it away, or choose another --out")
        os.makedirs(self.folder, exist_ok=True)
        refusal = f"{options.out}: another preparation is writing there; wait for it, or give another --out"
        self.lock = lock(self.path(LOCK), refusal)
        state, done = read_state(self.folder) or (None, None)
        if done and state != self.settings:
            flag = next(flag for flag in sorted({*state, *self.settings}) if state.get(flag) != self.settings.get(flag))
            raise UserError(
                f"{self.folder}: holds an unfinished preparation with another {flag}; its own command continues it, or "
                "remove the folder to give it up"
            )
        if not done:
            self._clear()
        self.is_kept = done is not None  # on the disk, so that the folder stays if this process fails
        self.done = done or {"position": None, "complete": False, "tokens": 0, "sizes": {name: 0 for name in streams}}
        self.files = {name: self._open(name, size) for name, size in self.done["sizes"].items()}

    def _clear(self):
        for name in os.listdir(self.folder):
            if name != LOCK:
                is_folder = os.path.isdir(self.path(name)) and not os.path.islink(self.path(name))
                (shutil.rmtree if is_folder else os.remove)(self.path(name))

    def _open(self, name, size):
        path = self.path(name)
        f = open(path, "r+b" if os.path.exists(path) else "w+b")
        if f.seek(0, os.SEEK_END) < size:
            raise UserError(f"{path}: is shorter than {STATE} says; remove {self.folder} to start again")
        f.truncate(size)
        f.seek(size)
        return f

    def path(self, name):
        return os.path.join(self.folder, name)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        is_stop = kind is not None and issubclass(kind, (KeyboardInterrupt, Unreachable))
        if kind is not None and issubclass(kind, UserError) and self.done["tokens"] == 0:
            self.forget()
        if is_stop and self.done["position"] is not None:
            with contextlib.suppress(OSError):
                self.save()
        for f in self.files.values():
            with contextlib.suppress(OSError):  # of a disk that is full
                f.close()
        if not self.is_kept:
            with contextlib.suppress(OSError):
                self._clear()
                os.remove(self.path(LOCK))  # last: without it the rest would not be known as ours
                os.rmdir(self.folder)
        self.lock.close()
        if is_stop and self.is_kept:
            text = str(error) or "interrupted"
            raise kind(f"{text}; {self.what_is_done()}, the same command continues from there") from None

    def what_is_done(self):
        return f"{self.done['tokens'] / 1e6:.2f} M tokens are done"

    def encode(self, source, width, encode_batch, start, arguments):
        """The rest of the source's text, as results of encode_batch, which begin with the number of characters. The
        caller appends each result to self.files before it asks for the next one. Ends at the end of the source, or once
        there are at least --limit-tokens, of `width` bytes each."""
        if self.done["position"] is not None:
            print(f"{self.folder}: {self.what_is_done()}; continuing from there", flush=True)
        if self.done["complete"]:
            return
        begun = saved = time.monotonic()
        progress, limit, characters = Progress("encoding"), self.options.limit_tokens, 0
        batches = source.batches(self.done["position"])
        results = encode_all(self.options.processes, batches, encode_batch, start, arguments)
        with contextlib.closing(batches), contextlib.closing(results):
            for (read, *result), (position, fraction) in results:
                yield result
                sizes = {name: f.tell() for name, f in self.files.items()}
                tokens = sizes[next(iter(sizes))] // width
                # At once: an interrupt, which saves, may come at any moment.
                self.done = {"position": position, "complete": False, "tokens": tokens, "sizes": sizes}
                characters, now = characters + read, time.monotonic()
                if limit is not None:
                    fraction = max(fraction or 0, min(1, tokens / limit))
                rate = f"{characters / 1e6 / max(now - begun, 1e-3):.1f} M characters/s"
                progress.show(fraction, f"{tokens / 1e6:.2f} M tokens, {rate}")
                if limit is not None and tokens >= limit:
                    break
                if now - saved >= self.options.save_every:
                    self.save()
                    saved = time.monotonic()
        progress.end()
        self.done = {**self.done, "complete": True}
        if time.monotonic() - begun >= self.options.save_every:
            self.save()

    def array(self, name, dtype):
        """What is in a stream."""
        self.files[name].flush()
        count = self.files[name].tell() // np.dtype(dtype).itemsize
        return np.memmap(self.path(name), dtype, "r", shape=count) if count else np.zeros(0, dtype)

    def save(self):
        """Make everything encoded so far survive a kill."""
        for f in self.files.values():
            f.flush()
            os.fsync(f.fileno())
        write_atomically(self.path(STATE), json.dumps({"settings": self.settings, **self.done}))
        self.is_kept = True

    def forget(self):
        """Remove the work: everything is in its place, or the fetched file is refused."""
        self.is_kept = False

def copy_numbers(f, numbers, begin, end):
    """Write numbers begin .. end - 1 of an array."""
    for at in range(begin, end, COPY_BYTES):
        f.write(numbers[at : min(at + COPY_BYTES, end)].tobytes())


class Output:
    """The directory of --out, not a model's. `names`: a pattern of the files that the script writes there, besides shards.
    Those that are there must be listed in prepared.json."""

    def __init__(self, folder, script, names):
        self.folder, self.script = folder, script
        path, model = self.path(MANIFEST), self.path("model")
        manifest = read_json(path) if os.path.isfile(path) else {}
        files = manifest.get("files") if isinstance(manifest, dict) and manifest.get("script") == script else None
        found = set(os.listdir(folder))
        if os.path.isdir(model) and not os.path.islink(model):
            found = found - {"model"} | {f"model/{name}" for name in os.listdir(model)}
        found = {name for name in found if re.fullmatch(rf"{SHARD}|{MANIFEST}|config\.json|{names}", name)}
        self.earlier = {name for name in found if isinstance(files, list) and name in files}
        for name in sorted(found - self.earlier):
            raise UserError(f"{self.path(name)}: is not in {MANIFEST}, so {script} has not written it; move it away, or choose another --out")

    def path(self, name):
        return os.path.join(self.folder, name)

    def _list(self, names):
        text = json.dumps({"script": self.script, "files": sorted({MANIFEST, *names})}, indent=1)
        write_atomically(self.path(MANIFEST), text + "\n")

    def publish(self, source, names):
        """Move complete files from another folder here, and remove the others of an earlier run."""
        self._list(self.earlier.union(names))  # a kill leaves no file that is not listed
        for name in names:
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            os.replace(os.path.join(source, name), self.path(name))
        for folder in {os.path.dirname(self.path(name)) for name in names}:
            sync_directory(folder)
        for name in sorted(self.earlier - {MANIFEST, *names}):
            os.remove(self.path(name))
            if os.path.dirname(name):
                with contextlib.suppress(OSError):  # other files are in it
                    os.rmdir(os.path.dirname(self.path(name)))
        self._list(names)
