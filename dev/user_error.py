"""What the project's scripts share: their command line, every failure as one line, JSON, files that replace others."""
import argparse
import contextlib
import errno
import fcntl
import importlib
import json
import os
import re
import sys

FAILED, USAGE = 1, 2
# Errors of a name that was given, or of what lies there. All others happen while running, as on a full disk.
OF_A_NAME = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR,
             errno.EPERM, errno.EROFS}


class UserError(Exception):
    """Wrong usage or input: one line, exit status 2."""


class Unreachable(Exception):
    """Something that the work needs is not available now, but may be later: one line, exit status 1."""


class Parser(argparse.ArgumentParser):
    def __init__(self, description, **settings):
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **settings}
        super().__init__(description=description, **settings)

    def error(self, message):
        raise UserError(f"{message}; --help lists the options")


def need(name):
    """Import a module whose package a user may lack: then the process ends with a line that says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        print(f"error: the Python package {package!r} is missing; install it with: pip install {package}", file=sys.stderr)
        raise SystemExit(USAGE) from None


def masked(text):
    """Without the user and the password of an address, as HF_ENDPOINT may have them."""
    return re.sub(r"(https?://)[^/\s]*@", r"\1***@", text)


def run(main, *arguments):
    """The exit status of main(*arguments): what it returns, or that of a failure, which becomes one line."""
    if sys.__stdout__:
        sys.__stdout__.reconfigure(errors="backslashreplace")  # names and texts may hold what UTF-8 does not
    try:
        try:
            status = main(*arguments) or 0
        except SystemExit as e:  # after --help
            status = e.code or 0
        print(end="", flush=True)
        return status
    except UserError as e:
        message, status = e, USAGE
    except Unreachable as e:
        message, status = e, FAILED
    except OSError as e:
        name, status = e.filename, USAGE if e.errno in OF_A_NAME else FAILED
        try:
            print(end="", flush=True)
        except OSError:
            name = "standard output"
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter fails once more when it ends
        message = f"{name}: {e.strerror}" if name else e
    except KeyboardInterrupt:
        message, status = "interrupted", FAILED
    print("error: " + masked(" ".join(str(message).split())), file=sys.stderr, flush=True)
    return status


# ----------------------------------------------------------------------------------------------------------
# JSON


def parse_json(text):
    """Like json.loads; text that is nested too deeply is a ValueError, as everything else that is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            return parse_json(f.read())
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as JSON: {e}")


# ----------------------------------------------------------------------------------------------------------
# Files


def refuse_foreign(path, start):
    """An output file replaces only a file that begins like it: never an input or a file of a model."""
    try:
        with open(path, "rb") as f:
            found = f.read(len(start))
    except FileNotFoundError:
        return
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror}")
    if os.path.islink(path) or found not in (b"", start):
        raise UserError(f"{path}: exists and is not a file of this script; choose another name, or remove it")


def lock(path, refusal):
    """An open file that this process alone holds until it ends; children that outlive it do not."""
    f = open(path, "a+", encoding="utf-8")
    try:
        fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(refusal)
    return f


@contextlib.contextmanager
def writing(path, temporary=None):
    """An error that names no file, as that of a write does not, is one of this path."""
    try:
        yield
    except OSError as e:
        if e.filename not in (None, temporary):
            raise
        raise OSError(e.errno, f"cannot be written: {e.strerror or e}", path) from e


def sync_directory(path):
    """Make renames in a directory survive a loss of power."""
    fd = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path, mode="wb", temporary=None, **text):
    """A file to write, which replaces `path` when it is complete and on the disk; after a failure nothing is left of it.
    `temporary`: its name until then, where only one process writes."""
    temporary = temporary or f"{path}.tmp{os.getpid()}"
    try:
        with writing(path, temporary):
            with open(temporary, mode, **text) as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
            sync_directory(os.path.dirname(path))
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def write_atomically(path, text):
    """Of a str, or of bytes."""
    with replacing(path, "wb", f"{path}.tmp") as f:
        f.write(text.encode("utf-8") if isinstance(text, str) else text)
