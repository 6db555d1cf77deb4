"""A stand-in for wandb, and what that for mlflow needs: calls of scripts/track.py go as lines of JSON to the file that
TRACK_RECORD names. The call TRACK_FAILS raises an error; after TRACK_DIES calls the process is killed."""
import json
import os

made = []


class Recorder:
    def __getattr__(self, name):
        return lambda *arguments, **values: self.put(name, arguments, values)

    def put(self, name, arguments, values):
        if os.environ.get("TRACK_FAILS") == name:
            raise RuntimeError("no API key configured\nlog in first")
        with open(os.environ["TRACK_RECORD"], "a", encoding="utf-8") as f:
            f.write(json.dumps([name, arguments, values]) + "\n")
        made.append(name)
        if len(made) == int(os.environ.get("TRACK_DIES", 0)):
            os.kill(os.getpid(), 9)


def init(**values):
    Recorder().put("init", (), values)
    return Recorder()
