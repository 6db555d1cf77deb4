#!/usr/bin/env python3
"""Prepare data for the recommenders of dev/recsys: ratings for train_ncf, clicks for train_dlrm.

    python3 dev/data/prepare_recsys.py u.data --out ratings.bin          # MovieLens 100K: tabs
    python3 dev/data/prepare_recsys.py ratings.dat --out ratings.bin     # MovieLens 1M: "::"
    python3 dev/data/prepare_recsys.py ratings.csv --out ratings.bin     # MovieLens 20M, others: commas, maybe a header
    python3 dev/data/prepare_recsys.py day_0 day_1 --format criteo --out clicks.bin --threshold 15 --held-out 200000

Ratings: leave-one-out, sorted by time. Every rating counts as a positive, whatever its value. Each user's newest one is
held out (of equal timestamps, the later line of the file). A repeated pair of user and item counts once, by its last
line. Ids may be any text without the separator; they are renumbered from 0 in ascending order, of their numbers if all
are whole numbers, else of their texts.
The file: a header of 256 int32 (magic 20261123, version 1, users, items, training pairs), then the training pairs (user,
item) as int32, ascending by time, then the held-out item of each user as int32.

Clicks: Criteo's tab-separated lines: label, 13 integers, 26 categories in hexadecimal. The last --held-out samples are
held out, the others are for training. A missing integer counts as 0, one below -2 as -2; x becomes ln(x + 3). A missing
category is a value like any other. Values with fewer than --threshold training samples, or none, get id 0. The others
get ids from 1, the most frequent first; of equally frequent ones the smaller text first. The files are read twice, a
line at a time; memory holds the values' counts and the categories of --held-out lines.
The file: a header of 256 int32 (magic 20261124, version 1, tables, numbers, training samples and held-out samples as
int64, rows of each table), then for each sample the label (int32), the numbers (float32) and the ids (int32).
"""
import math
import os
import re
import struct
import sys
from array import array
from collections import Counter, deque

from documents import Parser, UserError, check_format, refuse_foreign, replacing, user_error

RATINGS_MAGIC, CLICKS_MAGIC, VERSION, HEADER = 20261123, 20261124, 1, 256
INTEGERS, CATEGORIES = 13, 26


def read_ratings(path):
    """(user, item, time) of every line."""
    ratings = []
    with open(path, encoding="utf-8-sig", errors="replace") as f:  # a line of another encoding is refused by its number
        for number, line in enumerate(f, 1):
            line = line.strip()
            separator = "::" if "::" in line else "\t" if "\t" in line else ","
            fields = line.split(separator)
            try:
                user, item, _, time = *map(sys.intern, map(str.strip, fields[:2])), float(fields[2]), int(fields[3])
                if not user or not item or "\ufffd" in user + item:
                    raise ValueError
            except (ValueError, IndexError):
                if number == 1 and len(fields) == 4 and not re.search(r"\d", fields[2] + fields[3]):
                    continue  # a header
                raise UserError(f"{path}:{number}: is not user, item, rating and time") from None
            if len(fields) > 4:
                raise UserError(f"{path}:{number}: has {len(fields)} columns instead of 4")
            ratings.append((user, item, time))
    if not ratings:
        raise UserError(f"{path}: holds no ratings")
    return ratings


def renumber(values):
    values = set(values)
    key = int if all(re.fullmatch(r"-?[0-9]{1,18}", value) for value in values) else str
    order = {number: i for i, number in enumerate(sorted(set(map(key, values))))}
    return {value: order[key(value)] for value in values}


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


def write_ratings(out, path):
    training, held_out, items = split(read_ratings(path))
    header = array("i", [RATINGS_MAGIC, VERSION, len(held_out), items, len(training) // 2] + [0] * (HEADER - 5))
    for part in (header, training, held_out):
        part.tofile(out)
    return f"{len(held_out)} users, {items} items, {len(training) // 2} training pairs"


def read_clicks(paths):
    """Place, label, integers and categories of every line, as text."""
    for path in paths:
        with open(path, encoding="latin-1") as f:
            for number, line in enumerate(f, 1):
                fields = line.rstrip("\r\n").split("\t")
                if len(fields) != 1 + INTEGERS + CATEGORIES:
                    raise UserError(f"{path}:{number}: has {len(fields)} columns instead of {1 + INTEGERS + CATEGORIES}")
                if fields[0] not in ("0", "1"):
                    raise UserError(f"{path}:{number}: label '{fields[0]}' is not 0 or 1")
                yield f"{path}:{number}", int(fields[0]), fields[1:1 + INTEGERS], fields[1 + INTEGERS:]


def count_categories(paths, held_out):
    """Number of samples, and how often each category's values occur in the training samples."""
    counts, late, samples = [Counter() for _ in range(CATEGORIES)], deque(), 0
    for _, _, _, categories in read_clicks(paths):
        samples += 1
        late.append(categories)
        if len(late) > held_out:  # the oldest is a training sample
            for counter, value in zip(counts, late.popleft()):
                counter[value] += 1
    if not samples:
        raise UserError(f"{paths[0]}: holds no samples")
    if samples <= held_out:
        raise UserError(f"--held-out {held_out}: there are {samples} samples, and none would be left to train on")
    return samples, counts


def click_number(text, place):
    try:
        return math.log(max(int(text or 0), -2) + 3)
    except ValueError:
        raise UserError(f"{place}: '{text}' is not an integer") from None


def write_clicks(out, paths, threshold, held_out):
    samples, counts = count_categories(paths, held_out)
    ids = []
    for counter in counts:
        frequent = sorted((-n, value) for value, n in counter.items() if n >= threshold)
        ids.append({value: i for i, (_, value) in enumerate(frequent, 1)})
    counts.clear()
    rows = [len(table) + 1 for table in ids]
    header = struct.pack("<4i2q", CLICKS_MAGIC, VERSION, CATEGORIES, INTEGERS, samples - held_out, held_out)
    out.write((header + struct.pack(f"<{CATEGORIES}i", *rows)).ljust(4 * HEADER, b"\0"))
    record = struct.Struct(f"<i{INTEGERS}f{CATEGORIES}i")
    for place, label, integers, categories in read_clicks(paths):
        numbers = [click_number(text, place) for text in integers]
        out.write(record.pack(label, *numbers, *(table.get(value, 0) for table, value in zip(ids, categories))))
    return f"{samples - held_out} training samples, {held_out} held out, {sum(rows)} rows in {CATEGORIES} tables"


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="u.data, ratings.dat, ratings.csv or Criteo's files")
    parser.add_argument("--out", required=True, metavar="FILE.bin", help="the prepared file")
    parser.add_argument("--format", choices=("movielens", "criteo"), default="movielens")
    parser.add_argument("--threshold", type=int, default=1, help="criteo: training samples that a value needs for a row")
    parser.add_argument("--held-out", type=int, default=200000, help="criteo: samples at the end that are held out")
    options = parser.parse_args(arguments)
    if options.threshold < 1 or options.held_out < 0:
        raise UserError("--threshold is at least 1, --held-out at least 0")
    if options.format == "movielens" and len(options.files) > 1:
        raise UserError(f"{options.files[1]}: MovieLens has one file of ratings")
    for path in options.files:
        if not os.path.isfile(path):
            raise UserError(f"{path}: no such file")
        with open(path, "rb") as f:
            check_format(f.read(8), f"{path}: ")
    refuse_foreign(options.out, struct.pack("<i", CLICKS_MAGIC if options.format == "criteo" else RATINGS_MAGIC))
    with replacing(options.out) as f:
        if options.format == "criteo":
            summary = write_clicks(f, options.files, options.threshold, options.held_out)
        else:
            summary = write_ratings(f, options.files[0])
    print(f"{options.out}: {summary}")


if __name__ == "__main__":
    sys.exit(user_error.run(main, sys.argv[1:]))
