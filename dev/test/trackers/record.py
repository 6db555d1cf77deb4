"""What the stand-ins share: one line of JSON a call, written at once, so that a kill cannot tear it."""
import json
import os
import time


def put(call, **values):
    time.sleep(float(os.environ.get("TRACK_SLOW", 0)))
    fd = os.open(os.environ["TRACK_RECORD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(fd, (json.dumps({"call": call, **values}) + "\n").encode())
    os.close(fd)


def calls(call):
    if not os.path.exists(os.environ["TRACK_RECORD"]):
        return []
    with open(os.environ["TRACK_RECORD"], encoding="utf-8") as f:
        return [value for value in map(json.loads, f) if value["call"] == call]
