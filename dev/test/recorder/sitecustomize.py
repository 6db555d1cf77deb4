"""Found through PYTHONPATH: appends to RENAMES_RECORD a line for each file that is renamed below RENAMES_BELOW, one that
begins with FAULT for each that was not flushed before, or whose directory was not flushed after."""
import atexit
import os

rename, fsync = os.replace, os.fsync
flushed, pending = {}, {}


def put(text):
    with open(os.environ["RENAMES_RECORD"], "a", encoding="utf-8") as f:
        f.write(text + "\n")


def of(stat):
    return (stat.st_dev, stat.st_ino), (stat.st_size, stat.st_mtime_ns)


def recorded_fsync(fd):
    fsync(fd)
    key, state = of(os.fstat(fd))
    flushed[key] = state
    pending.pop(key, None)


def recorded_rename(source, target, **where):
    source, target = os.path.abspath(source), os.path.abspath(target)
    if target.startswith(os.environ["RENAMES_BELOW"]):
        key, state = of(os.stat(source))
        put(f"{'renamed' if flushed.get(key) == state else 'FAULT: not flushed before it was renamed'} {target}")
        pending[of(os.stat(os.path.dirname(target)))[0]] = os.path.dirname(target)
    rename(source, target, **where)


os.fsync, os.replace, os.rename = recorded_fsync, recorded_rename, recorded_rename
atexit.register(lambda: [put(f"FAULT: not flushed after a file was renamed into it: {folder}") for folder in pending.values()])
