"""What the scripts of dev/ and dev/data/ share: exit statuses, errors that are the user's, JSON files."""
import json

FAILED, USAGE = 1, 2


class UserError(Exception):
    """Wrong usage or input: one line, exit status 2."""


def read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as JSON: {e}")


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
