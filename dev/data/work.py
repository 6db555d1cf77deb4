"""Preparation as a long job: several processes, a progress line with the time left, and work that survives a kill.

Encoded data is kept in OUT/preparation/, in files that only grow. state.json there records how much of them is valid
and the matching position in the input. The same command, run again, truncates the files to that size and continues. The
encoding depends on the input alone, so the result is the same to the last byte. The folder is removed at the end.

No file of the user is replaced or removed: a folder of work has the lock in it, and prepared.json lists the files in OUT
that are of an earlier run.
"""
import collections
import contextlib
import fcntl
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import queue
import re
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from array import array

import parts
from documents import Unreachable, UserError, parse_json, read_json, sync_directory, write_atomically

FOLDER, STATE, LOCK = "preparation", "state.json", "preparation.lock"
MANIFEST, SHARD = "prepared.json", r"(train|val)_\d{6}\.bin"
COUNTS = "position", "complete", "tokens", "sizes"  # what is recorded of the work, besides its settings
SIGNALS = signal.SIGINT, signal.SIGTERM


# ----------------------------------------------------------------------------------------------------------
# Several processes


def receive(pipe, batches):
    """Takes each batch as soon as it arrives, so that the parent does not wait for a busy worker."""
    try:
        while True:
            batches.put(pipe.recv())
    except (EOFError, OSError):
        pass  # without its parent a worker has nothing to do
    except BaseException:  # such as a lack of memory
        traceback.print_exc()
    finally:
        os._exit(1)


def serve(pipe, parents_ends, encode_batch, start, arguments):
    """The main loop of a worker."""
    for end in parents_ends:
        end.close()  # inherited by the fork, but they must close with the parent
    # An interrupt is for the parent to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    start(*arguments)
    batches = queue.SimpleQueue()
    threading.Thread(target=receive, args=(pipe, batches), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        while True:
            pipe.send(encode_batch(batches.get()))


class Workers:
    """Processes that encode batches. Each has its own pipe, which closes with it, so a killed worker is noticed at any
    time, also in the middle of an answer. (The pools of the standard library then wait for the rest.)"""

    def __init__(self, count, encode_batch, start, arguments):
        self.pipes, self.processes = [], []
        self.given = collections.deque()  # (worker, mark) of the batches that were not taken, from the oldest
        self.waiting = [0] * count  # batches that a worker has not answered
        self.answers = [collections.deque() for _ in range(count)]  # that were not taken
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until all workers exist and can be stopped
            for _ in range(count):
                mine, theirs = multiprocessing.Pipe()
                self.pipes.append(mine)
                with theirs:
                    its_arguments = theirs, list(self.pipes), encode_batch, start, arguments
                    process = multiprocessing.Process(target=serve, args=its_arguments, daemon=True)
                    process.start()
                self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()  # it has no state to save
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def _lost(self, worker):
        process = self.processes[worker]
        process.join()
        if (process.exitcode or 0) > 0:  # None: not known, where the system collects processes itself
            return Unreachable("a worker process failed, with the error above")
        return Unreachable("a worker process was killed, perhaps for want of memory; fewer --processes need less")

    def give(self, batch, mark):
        worker = self.waiting.index(min(self.waiting))
        self.given.append((worker, mark))
        self.waiting[worker] += 1
        try:
            self.pipes[worker].send(batch)
        except OSError:
            raise self._lost(worker) from None

    def _receive(self, seconds):
        """Read all answers that arrive within these seconds (None: wait for at least one), from any worker, so that
        none waits for another."""
        for pipe in multiprocessing.connection.wait(self.pipes, seconds):
            worker = self.pipes.index(pipe)
            try:
                self.answers[worker].append(pipe.recv())
            except (EOFError, OSError):
                raise self._lost(worker) from None
            self.waiting[worker] -= 1

    def has_answered(self):
        """Whether take() need not wait."""
        self._receive(0)
        return len(self.answers[self.given[0][0]]) > 0

    def take(self):
        """The result of the oldest batch that was not taken yet, and its mark."""
        worker, mark = self.given.popleft()
        while not self.answers[worker]:
            self._receive(None)
        return self.answers[worker].popleft(), mark


def until_failure(batches, failures):
    """Yield what was read before a source failed: it is encoded too."""
    try:
        yield from batches
    except Unreachable as e:
        failures.append(e)


def encode_all(processes, batches, encode_batch, start, arguments):
    """(result of encode_batch, what came with the batch) in the order of `batches`, which are (batch, what comes with
    it); start(*arguments) is called once in every process."""
    if processes == 1:
        start(*arguments)
        for batch, mark in batches:
            yield encode_batch(batch), mark
        return
    failures = []
    # Forked before the first batch is asked for: reading a data set starts threads.
    with Workers(processes, encode_batch, start, arguments) as workers:
        for batch, mark in until_failure(batches, failures):
            workers.give(batch, mark)
            while workers.given and (len(workers.given) > 4 * processes or workers.has_answered()):
                yield workers.take()
        while workers.given:
            yield workers.take()
    if failures:
        raise failures[0]


# ----------------------------------------------------------------------------------------------------------
# Progress


def duration(seconds):
    seconds = int(seconds + 0.5)
    hours = f"{seconds // 3600}:" if seconds >= 3600 else ""
    return f"{hours}{seconds // 60 % 60:02d}:{seconds % 60:02d}"


class Progress:
    """The progress of a stage of the work, on stderr: a line that is rewritten on terminals, elsewhere one twice a
    minute."""

    def __init__(self, what):
        self.what, self.shown = what, time.monotonic()
        self.first = None
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
                left = (now - self.counted) * (1 - fraction) / (fraction - self.first)
                line += f", {duration(left)} left"
        print(f"\r{line}\033[K" if self.tty else line, end="" if self.tty else "\n", file=sys.stderr, flush=True)

    def end(self):
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------
# The text that a vocabulary is made from

VOCABULARY_CHARACTERS = 1_000_000_000  # of a data set; of --local and --url all
LONG_WORD = 1000  # characters


def cut_long_words(text):
    """The text in pieces without words, or white space, of twice that length: the library's time grows with its square."""
    begin = 0
    for end in range(LONG_WORD, len(text) + 1, LONG_WORD):
        block = text[end - LONG_WORD : end]
        if block.isspace() or block.split(None, 1)[0] == block:
            yield text[begin:end]
            begin = end
    yield text[begin:]


def vocabulary_texts(options, source):
    progress, characters = Progress("vocabulary"), 0
    with contextlib.closing(source.batches(None)) as batches:
        for batch, (_, done, _) in batches:
            for text, _ in batch:
                characters += len(text)
                yield from cut_long_words(text)
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


def mapped_numbers(file, code):
    """The numbers in a file, mapped: there may be billions."""
    file.flush()
    if file.seek(0, os.SEEK_END) == 0:
        return memoryview(array(code))
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast(code)


class Work:
    """`streams` are the files that grow; the first one holds the tokens. `settings`, by flag, are what their bytes
    depend on: unfinished work of others is refused. The work of a --part has a folder of its own, where it stays until
    --join."""

    def __init__(self, options, settings, streams):
        self.options, self.settings = options, json.loads(json.dumps(settings))
        self.folder = os.path.join(options.out, FOLDER)
        if options.part:
            self.settings["--part"] = str(options.part)
            self.folder = options.part.folder(options.out)
            streams = [*streams, parts.BLOCKS]
        links = [self.folder, os.path.join(options.out, parts.FOLDER)]
        found = os.listdir(self.folder) if os.path.isdir(self.folder) else [FOLDER] * os.path.lexists(self.folder)
        if any(map(os.path.islink, links)) or (found and LOCK not in found):
            raise UserError(f"{self.folder}: was not made by a preparation of this version; move it away, or choose another --out")
        os.makedirs(self.folder, exist_ok=True)
        self.lock = open(self.path(LOCK), "w")
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone, not of workers that outlive it
        except OSError:
            raise UserError(f"{options.out}: another preparation is writing there; wait for it, or give another --out")
        state = None if options.restart else self._read_state()
        if state is None:
            self._clear()
        elif options.join:
            raise UserError(f"{self.folder}: holds an unfinished preparation without parts; --restart discards it")
        self.is_kept = state is not None  # on the disk, so that the folder stays if this process fails
        self.done = state or {"position": None, "complete": False, "tokens": 0, "sizes": {name: 0 for name in streams}}
        self.files = {name: self._open(name, size) for name, size in self.done["sizes"].items()}

    def _read_state(self):
        path = self.path(STATE)
        try:
            with open(path, encoding="utf-8") as f:
                state = parse_json(f.read())
            settings, done = state["settings"], {name: state[name] for name in COUNTS}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: is damaged; --restart starts again")
        for flag in sorted(set(settings) | set(self.settings)):
            if settings.get(flag) != self.settings.get(flag):
                raise UserError(
                    f"{self.folder}: holds an unfinished preparation with another {flag}; its own command continues it, "
                    "or gives it up with --restart"
                )
        return done

    def _clear(self):
        for name in os.listdir(self.folder):
            if name != LOCK:
                is_folder = os.path.isdir(self.path(name)) and not os.path.islink(self.path(name))
                (shutil.rmtree if is_folder else os.remove)(self.path(name))

    def _open(self, name, size):
        path = self.path(name)
        f = open(path, "r+b" if os.path.exists(path) else "w+b")
        if f.seek(0, os.SEEK_END) < size:
            raise UserError(f"{path}: is shorter than {STATE} says; --restart starts again")
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
            if self.options.part:
                with contextlib.suppress(OSError):  # there are others
                    os.rmdir(os.path.dirname(self.folder))
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
            for (read, *result), (position, fraction, place) in results:
                yield result
                if self.options.part:
                    sizes = [f.tell() for name, f in self.files.items() if name != parts.BLOCKS]
                    self.files[parts.BLOCKS].write(struct.pack(f"<{2 + len(sizes)}Q", *place, *sizes))
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

    def save(self):
        """Make everything encoded so far survive a kill."""
        for f in self.files.values():
            f.flush()
            os.fsync(f.fileno())
        write_atomically(self.path(STATE), json.dumps({"settings": self.settings, **self.done}))
        self.is_kept = True

    def finish_part(self):
        """All of a part is done: it stays where it is."""
        self.save()
        print(f"{self.folder}: part {self.options.part}, {self.what_is_done()}; join all with --join")

    def forget_parts(self):
        shutil.rmtree(os.path.join(self.options.out, parts.FOLDER))

    def forget(self):
        """Remove the work: everything is in its place, or the fetched file is refused."""
        self.is_kept = False


class Output:
    """The directory of --out, not a model's. `names`: a pattern of the files that the script writes there, besides shards.
    Those that are there must be listed in prepared.json, except the `spared` ones, which are neither replaced nor removed."""

    def __init__(self, folder, script, names, spared=()):
        self.folder, self.script, self.spared = folder, script, set(spared)
        path, model = self.path(MANIFEST), self.path("model")
        manifest = read_json(path) if os.path.isfile(path) else {}
        files = manifest.get("files") if isinstance(manifest, dict) and manifest.get("script") == script else None
        found = set(os.listdir(folder))
        if os.path.isdir(model) and not os.path.islink(model):
            found = found - {"model"} | {f"model/{name}" for name in os.listdir(model)}
        found = {name for name in found if re.fullmatch(rf"{SHARD}|{MANIFEST}|config\.json|{names}", name)}
        self.earlier = {name for name in found if isinstance(files, list) and name in files}
        for name in sorted(found - self.earlier - self.spared):
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
        kept = self.spared.union(names, [MANIFEST])
        for name in sorted(self.earlier - kept):
            os.remove(self.path(name))
            if os.path.dirname(name):
                with contextlib.suppress(OSError):  # other files are in it
                    os.rmdir(os.path.dirname(self.path(name)))
        self._list(self.earlier & kept | set(names))
