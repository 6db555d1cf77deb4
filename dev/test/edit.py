#!/usr/bin/env python3
"""Change a copy of a model, a checkpoint or other files, for a test: one command at a time.

    dev/test/edit.py FOLDER COMMAND WORD...

set TENSOR INDEX VALUE   one element of a tensor, all where INDEX is all; "m." and "v." begin those of the optimizer
copy TENSOR NEW FACTOR   a new tensor, FACTOR times TENSOR         scale TENSOR FACTOR
prefix TEXT              before every tensor's name
save_model TENSOR NEW    TENSOR under the name NEW, as save_model() of safetensors.torch stores two tied tensors
shard                    model.safetensors in two files with an index
key FILE KEY JSON        a key of a JSON file                      seal [CHECKPOINT] make the manifest fit the files
sub FILE OLD NEW         replace a pattern, once                   put FILE TEXT     write a file; escapes are bytes
cut FILE N               keep N bytes; without the last -N         append FILE TEXT
int FILE PLACE VALUE     an int32                                  flip FILE PLACE   a bit of a byte
move FILE NEW            copy-file FILE NEW                        gone FILE         a directory too
fifo FILE                make it a FIFO                            in FOLDER COMMAND...   in a folder below
link TARGET FILE         make it a symbolic link
"""

import array
import json
import os
import re
import shutil
import struct
import sys
import zlib

from verdicts import read, write


def load(path):
    """A .safetensors file's tensors: {name: (dtype, shape, bytes)}."""
    data = read(path, "rb")
    n = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:n])
    header.pop("__metadata__", None)
    part = lambda entry: data[n + entry["data_offsets"][0] : n + entry["data_offsets"][1]]
    return {name: (entry["dtype"], entry["shape"], part(entry)) for name, entry in header.items()}


def save(path, tensors, **aliases):
    header, begin = {"__metadata__": {"format": "pt", **aliases}}, 0
    for k, (dtype, shape, raw) in tensors.items():
        header[k] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(raw)]}
        begin += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write(path, struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def octets(text):
    """Text with escapes as bytes."""
    return text.encode().decode("unicode_escape").encode("latin-1") if text.isascii() else text.encode()


def seal(folder):
    files = []
    for name in sorted(set(os.listdir(folder)) - {"manifest.json"}):
        data = read(os.path.join(folder, name), "rb")
        files.append('\n  {"name": "%s", "bytes": %d, "crc32": "%08x"}' % (name, len(data), zlib.crc32(data)))
    text = '{"files": [' + ",".join(files) + "],\n"
    write(os.path.join(folder, "manifest.json"), text + '"crc32": "%08x"}\n' % zlib.crc32(text.encode()))


def shard(folder, tensors):
    names, path = list(tensors), os.path.join(folder, "model.safetensors")
    parts = {"model-00001-of-00002.safetensors": names[1::2], "model-00002-of-00002.safetensors": names[::2]}
    for name, part in parts.items():
        save(os.path.join(folder, name), {k: tensors[k] for k in part})
    index = {"metadata": {}, "weight_map": {k: name for name, part in parts.items() for k in part}}
    write(path + ".index.json", json.dumps(index))
    os.remove(path)


def edit_tensors(folder, command, first="", *words):
    path = os.path.join(folder, ("optimizer" if first[:2] in ("m.", "v.") else "model") + ".safetensors")
    tensors, aliases = load(path), {}
    if command == "shard":
        shard(folder, tensors)
        return
    if command == "prefix":
        tensors = {first + name: tensor for name, tensor in tensors.items()}
    elif command == "save_model":
        tensors[words[0]], aliases = tensors.pop(first), {first: words[0]}
    else:
        dtype, shape, raw = tensors[first]
        values = array.array("f", raw)
        if command == "set":
            for i in range(len(values)) if words[0] == "all" else [int(words[0])]:
                values[i] = float(words[1])
        else:  # copy and scale
            values = array.array("f", [float(words[-1]) * x for x in values])
        tensors[words[0] if command == "copy" else first] = (dtype, shape, values.tobytes())
    save(path, tensors, **aliases)


def fifo(path):
    write(path, b"")
    os.remove(path)
    os.mkfifo(path)


# What becomes of a file's bytes.
CHANGES = {
    "key": lambda old, key, value: json.dumps({**json.loads(old), key: json.loads(value)}).encode(),
    "sub": lambda old, pattern, new: re.sub(pattern.encode(), octets(new), old, count=1, flags=re.S),
    "cut": lambda old, n: old[: int(n)],
    "put": lambda old, text: octets(text),
    "append": lambda old, text: old + octets(text),
    "int": lambda old, place, value: old[: int(place)] + struct.pack("<I", int(value)) + old[int(place) + 4 :],
    "flip": lambda old, place: bytes(x ^ (i == int(place) % len(old)) for i, x in enumerate(old)),
}
PLACES = {
    "seal": lambda folder, at=".": seal(os.path.join(folder, at)),
    "in": lambda folder, at, *words: edit(os.path.join(folder, at), *words),
    "link": lambda folder, target, at: os.symlink(target, os.path.join(folder, at)),
    "move": lambda folder, at, new: os.replace(os.path.join(folder, at), os.path.join(folder, new)),
    "copy-file": lambda folder, at, new: write(os.path.join(folder, new), read(os.path.join(folder, at), "rb")),
    "fifo": lambda folder, at: fifo(os.path.join(folder, at)),
    "gone": lambda folder, at: (shutil.rmtree if os.path.isdir(f"{folder}/{at}") else os.remove)(f"{folder}/{at}"),
}


def edit(folder, command, *words):
    if command in PLACES:
        PLACES[command](folder, *words)
    elif command in CHANGES:
        path = os.path.join(folder, words[0])
        old = read(path, "rb") if os.path.isfile(path) else b""
        new = CHANGES[command](old, *words[1:])
        if new == old and command == "sub":
            sys.exit(f"error: edit sub {words}: nothing was changed")
        write(path, new)
    else:
        edit_tensors(folder, command, *words)


if __name__ == "__main__":
    edit(*sys.argv[1:])
