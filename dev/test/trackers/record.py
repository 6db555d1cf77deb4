"""What the stand-ins for trackers share: one line of JSON a call, in the file that TRACK_RECORD names.

A kill can tear a line: so a line begins with a newline, which ends a torn one before it, and readers leave out what is
not whole: that call did not return to scripts/track.py.
"""
import json
import os
import time


def put(call, **values):
    time.sleep(float(os.environ.get("TRACK_SLOW", 0)))
    if os.environ.get("TRACK_FAILS") == call:
        raise RuntimeError("no API key configured\nlog in first")
    fd = os.open(os.environ["TRACK_RECORD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(fd, ("\n" + json.dumps({"call": call, **values}) + "\n").encode())
    os.close(fd)


def calls(call, path=None):
    values, path = [], path or os.environ["TRACK_RECORD"]
    for line in open(path, encoding="utf-8") if os.path.exists(path) else ():
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError:
            pass  # a newline alone, or a torn line
    return [value for value in values if value["call"] == call]
