"""Found through PYTHONPATH: appends to RENAMES_RECORD a line for each file that is renamed below RENAMES_BELOW, one that
begins with FAULT for each that was not flushed before, or whose directory was not flushed after."""
import atexit
import os

rename, fsync = os.replace, os.fsync
flushed, pending = {}, {}


def put(text):
    with open(os.environ["RENAMES_RECORD"], "a", encoding="utf-8") as f:
        f.write(text + "\n")


def recorded_fsync(fd):
    fsync(fd)
    stat = os.fstat(fd)
    flushed[stat.st_ino] = stat.st_size, stat.st_mtime_ns
    pending.pop(stat.st_ino, None)


def recorded_rename(source, target, **where):
    source, target = os.path.abspath(source), os.path.abspath(target)
    if target.startswith(os.environ["RENAMES_BELOW"]):
        stat, folder = os.stat(source), os.path.dirname(target)
        is_flushed = flushed.get(stat.st_ino) == (stat.st_size, stat.st_mtime_ns)
        put(f"{'renamed' if is_flushed else 'FAULT: not flushed before it was renamed'} {target}")
        pending[os.stat(folder).st_ino] = folder
    rename(source, target, **where)


os.fsync, os.replace, os.rename = recorded_fsync, recorded_rename, recorded_rename
atexit.register(lambda: [put(f"FAULT: not flushed after a file was renamed into it: {folder}") for folder in pending.values()])
