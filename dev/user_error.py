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
