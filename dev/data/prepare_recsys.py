#!/usr/bin/env python3
"""Prepare MovieLens ratings for dev/recsys/train_ncf: leave-one-out, sorted by time.

    python3 dev/data/prepare_recsys.py u.data --out ratings.bin          # MovieLens 100K: tabs
    python3 dev/data/prepare_recsys.py ratings.dat --out ratings.bin     # MovieLens 1M: "::"
    python3 dev/data/prepare_recsys.py ratings.csv --out ratings.bin     # MovieLens 20M: commas and a header

Every rating is one positive, whatever its value. Each user's newest one is held out; of equal timestamps the later line of
the file. A repeated pair of user and item counts once, by its last line. Ids are renumbered from 0 in ascending order.

The file: a header of 256 int32 (magic 20261123, version 1, users, items, training pairs), then the training pairs (user,
item) as int32, ascending by time, then the held-out item of each user as int32.
"""
import argparse
import os
import sys
from array import array

from documents import USAGE, Parser, UserError, temporary_of

MAGIC, VERSION, HEADER = 20261123, 1, 256


def read_ratings(path):
    """(user, item, time) of every line."""
    ratings = []
    with open(path, encoding="utf-8-sig") as f:
        for number, line in enumerate(f, 1):
            line = line.strip()
            separator = "::" if "::" in line else "\t" if "\t" in line else ","
            fields = line.split(separator)
            if number == 1 and fields[0] == "userId":
                continue
            try:
                user, item, _, time = int(fields[0]), int(fields[1]), float(fields[2]), int(fields[3])
            except (ValueError, IndexError):
                raise UserError(f"{path}:{number}: is not user, item, rating and time") from None
            if len(fields) > 4:
                raise UserError(f"{path}:{number}: has {len(fields)} columns instead of 4")
            ratings.append((user, item, time))
    if not ratings:
        raise UserError(f"{path}: holds no ratings")
    return ratings


def renumber(values):
    return {value: i for i, value in enumerate(sorted(set(values)))}


def split(ratings):
    """Training pairs by time, and the held-out item of each user."""
    last = {(user, item): number for number, (user, item, _) in enumerate(ratings)}
    kept = [r for number, r in enumerate(ratings) if last[r[:2]] == number]
    kept.sort(key=lambda r: r[2])  # stable: of equal times the later line stays later
    users, items = renumber(r[0] for r in kept), renumber(r[1] for r in kept)
    pairs = [(users[user], items[item]) for user, item, _ in kept]
    newest = {user: number for number, (user, _) in enumerate(pairs)}
    held_out = array("i", [pairs[newest[user]][1] for user in range(len(users))])
    training = array("i", [x for number, pair in enumerate(pairs) if newest[pair[0]] != number for x in pair])
    if not training:
        raise UserError("no user has two ratings: there is nothing to train on")
    return training, held_out, len(items)


def main(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("ratings", metavar="FILE", help="u.data, ratings.dat or ratings.csv")
    parser.add_argument("--out", required=True, metavar="FILE.bin", help="the prepared file")
    options = parser.parse_args(arguments)
    if not os.path.isfile(options.ratings):
        raise UserError(f"{options.ratings}: no such file")
    training, held_out, items = split(read_ratings(options.ratings))
    header = array("i", [MAGIC, VERSION, len(held_out), items, len(training) // 2] + [0] * (HEADER - 5))
    folder, name = os.path.split(options.out)
    temporary = temporary_of(folder or ".", name)
    with open(temporary, "wb") as f:
        for part in (header, training, held_out):
            part.tofile(f)
    os.replace(temporary, options.out)
    print(f"{options.out}: {len(held_out)} users, {items} items, {len(training) // 2} training pairs")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE)
