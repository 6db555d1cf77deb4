"""A stand-in for wandb: what it is sent goes to the file that TRACK_RECORD names, a line for each number."""
import os
from unittest.mock import MagicMock


def record(numbers):
    with open(os.environ["TRACK_RECORD"], "a", encoding="utf-8") as f:
        f.writelines(f"{step} {name} {value}\n" for step, name, value in numbers)


def init(config, **run):
    record((0, *item) for item in config.items() if not run["id"])
    log = lambda numbers: record((numbers["step"], *item) for item in numbers.items() if item[0] != "step")
    return MagicMock(id="a", log=log)
