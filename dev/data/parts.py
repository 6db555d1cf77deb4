"""Preparing data in parts, for an array of jobs, and joining the parts.

The text is cut into blocks, and a block ends with its file. Which part encodes a block depends only on the file, the
block's number in it and the number of parts. With at least as many files as parts, a file is read by one part. With
fewer, several parts read the same file and each encodes its share of the blocks.

A part lies in OUT/parts/K-of-N/, like unfinished work (work.py), with one more file, `blocks`: a record per block, with
its file, its number, and the sizes of the other files after it. Joining copies the blocks in the order of the text.
"""
import argparse
import collections
import json
import os
import re
import struct

from documents import UserError, parse_json

FOLDER, STATE, BLOCKS = "parts", "state.json", "blocks"
RECORDS = 4096  # that are read at a time


class Part(collections.namedtuple("Part", "number count")):
    """Part `number`, from 1, of `count`."""

    def __str__(self):
        return f"{self.number}/{self.count}"

    def folder(self, out):
        return os.path.join(out, FOLDER, f"{self.number}-of-{self.count}")

    def reads(self, file, files):
        """Whether the part reads this file. Of a file that it shares it encodes some of the blocks."""
        at = self.number - 1
        return file % self.count == at if files >= self.count else at % files == file

    def encodes(self, file, block, files):
        return owner(file, block, files, self.count) == self.number


def owner(file, block, files, count):
    """The number of the part that encodes this block."""
    if files >= count:
        return file % count + 1
    sharing = len(range(file, count, files))  # parts that read this file
    return file + files * (block % sharing) + 1


def part(text):
    """The argument of --part."""
    m = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not m or not 1 <= int(m[1]) <= int(m[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, such as 3/64")
    return Part(int(m[1]), int(m[2]))


def add_options(parser):
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--part", type=part, metavar="K/N", help="do the K-th of N parts, in OUT/parts, for --join")
    group.add_argument("--join", action="store_true", help="make the files from all parts: the same command with --join")


def check_options(options):
    if (options.part or options.join) and options.train_vocab is not None:
        flag = "--join" if options.join else "--part"
        raise UserError(f"--train-vocab and {flag}: make the vocabulary first, from a sample, and give it with --vocab")


# ----------------------------------------------------------------------------------------------------------
# Finding and checking all parts


class Done:
    """A part that is to be joined."""

    def __init__(self, folder, settings, streams):
        self.folder = folder
        try:
            with open(os.path.join(folder, STATE), encoding="utf-8") as f:
                state = parse_json(f.read())
            self.part = part(state["settings"].pop("--part"))
            self.settings, self.complete = state["settings"], state["complete"]
            self.sizes = {name: int(state["sizes"][name]) for name in [*streams, BLOCKS]}
            position = state["position"] or {}
            self.source = {name: position.get(name) for name in ("files", "revision")} if position else None
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{folder}: holds no {STATE}; this part has not begun, or is not one")
        except (ValueError, KeyError, TypeError, AttributeError, argparse.ArgumentTypeError):
            raise UserError(f"{folder}: its {STATE} is damaged; make this part again with --restart")
        for flag in sorted(set(self.settings) | set(settings)):
            if self.settings.get(flag) != settings.get(flag):
                raise UserError(f"part {self.part}: is of another preparation, with another {flag}; see {folder}")
        if not self.complete:
            raise UserError(f"part {self.part}: is not finished; give its command again")
        for name, size in self.sizes.items():
            path = os.path.join(folder, name)
            if not os.path.isfile(path) or os.path.getsize(path) < size:
                raise UserError(f"part {self.part}: {path} is shorter than its {STATE} says; make this part again")

    def read(self, name, begin, end):
        with open(os.path.join(self.folder, name), "rb") as f:
            f.seek(begin)
            data = f.read(end - begin)
        if len(data) < end - begin:
            raise UserError(f"part {self.part}: became shorter while it was read")
        return data

    def blocks(self, streams):
        """((file, number in it), {stream: (begin, end)}) of each block."""
        form = struct.Struct(f"<{2 + len(streams)}Q")
        before = [0] * len(streams)
        for at in range(0, self.sizes[BLOCKS], RECORDS * form.size):
            data = self.read(BLOCKS, at, min(self.sizes[BLOCKS], at + RECORDS * form.size))
            for file, number, *sizes in form.iter_unpack(data):
                yield (file, number), dict(zip(streams, zip(before, sizes)))
                before = sizes
        if before != [self.sizes[name] for name in streams]:
            raise UserError(f"part {self.part}: {self.folder}/{BLOCKS} does not say where all of its tokens are; make it again")


def find_parts(out, settings, streams):
    """{number: part} of all parts in OUT/parts, which must be all."""
    folder = os.path.join(out, FOLDER)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if not names:
        raise UserError(f"{folder}: holds no parts to join; make them with --part 1/N to --part N/N")
    found = [Done(os.path.join(folder, name), settings, streams) for name in names]
    count = collections.Counter(p.part.count for p in found).most_common(1)[0][0]
    parts = {}
    source = next((p.source for p in found if p.source), None)
    for p in found:
        if p.part.count != count:
            raise UserError(f"part {p.part}: the others are of {count} parts; see {p.folder}")
        if p.part.number in parts:
            raise UserError(f"part {p.part}: is there twice, in {parts[p.part.number].folder} and {p.folder}")
        if p.source not in (None, source):
            raise UserError(f"part {p.part}: has read other files than the others, or another revision of them; see {p.folder}")
        parts[p.part.number] = p
    missing = [k for k in range(1, count + 1) if k not in parts]
    if missing:
        named = ", ".join(map(str, missing[:8])) + " ..." * (len(missing) > 8)
        raise UserError(f"part {named} of {count}: not in {folder}; make all parts first")
    return parts, source["files"] if source else 0


def blocks_in_order(parts, files, streams):
    """(part, {stream: (begin, end)}) of all blocks in the order of the text."""
    left = {k: p.blocks(streams) for k, p in parts.items()}
    following = {k: next(blocks, None) for k, blocks in left.items()}
    for file in range(files):
        block = 0
        while True:
            k = owner(file, block, files, len(parts))
            if following[k] is None or following[k][0] != (file, block):
                break
            yield parts[k], following[k][1]
            following[k] = next(left[k], None)
            block += 1
    for k, rest in following.items():
        if rest is not None:
            raise UserError(f"part {parts[k].part}: its block {rest[0][1] + 1} of file {rest[0][0] + 1} has none before it")


# ----------------------------------------------------------------------------------------------------------
# Joining


def join(work, settings, streams, width, relocate):
    """Put all blocks together in the work, as a run would have left it. Stops where there are --limit-tokens, as a run
    does. relocate(stream, data, begin, tokens): the numbers of a block whose tokens began at `begin` in its part and
    begin at `tokens` in the whole."""
    parts, files = find_parts(work.options.out, json.loads(json.dumps(settings)), streams)
    limit, tokens = work.options.limit_tokens, 0
    for part, ranges in blocks_in_order(parts, files, streams):
        for name in streams:
            data = part.read(name, *ranges[name])
            if name != streams[0]:
                data = relocate(name, data, ranges[streams[0]][0] // width, tokens)
            work.files[name].write(data)
        tokens = work.files[streams[0]].tell() // width
        if limit is not None and tokens >= limit:
            break
    work.done.update(complete=True, tokens=tokens)
