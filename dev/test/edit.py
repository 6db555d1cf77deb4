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


def load(path):
    """A .safetensors file's tensors: {name: (dtype, shape, bytes)}."""
    with open(path, "rb") as f:
        data = f.read()
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


def read(path):
    with open(path, "rb") as f:
        return f.read()


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data)


def octets(text):
    """Text with escapes as bytes."""
    return text.encode().decode("unicode_escape").encode("latin-1") if text.isascii() else text.encode()


def seal(folder):
    files = []
    for name in sorted(set(os.listdir(folder)) - {"manifest.json"}):
        data = read(os.path.join(folder, name))
        files.append('\n  {"name": "%s", "bytes": %d, "crc32": "%08x"}' % (name, len(data), zlib.crc32(data)))
    text = '{"files": [' + ",".join(files) + "],\n"
    write(os.path.join(folder, "manifest.json"), (text + '"crc32": "%08x"}\n' % zlib.crc32(text.encode())).encode())


def edit_tensors(folder, command, words):
    first = words[0] if words else ""
    path = os.path.join(folder, ("optimizer" if first[:2] in ("m.", "v.") else "model") + ".safetensors")
    tensors = load(path)
    if command == "shard":
        names = list(tensors)
        parts = {"model-00001-of-00002.safetensors": names[1::2], "model-00002-of-00002.safetensors": names[::2]}
        for name, part in parts.items():
            save(os.path.join(folder, name), {k: tensors[k] for k in part})
        index = {"metadata": {}, "weight_map": {k: name for name, part in parts.items() for k in part}}
        write(path + ".index.json", json.dumps(index).encode())
        os.remove(path)
        return
    if command == "prefix":
        save(path, {first + name: tensor for name, tensor in tensors.items()})
        return
    if command == "save_model":
        tensors[words[1]] = tensors.pop(first)
        save(path, tensors, **{first: words[1]})
        return
    dtype, shape, raw = tensors[first]
    values = array.array("f", raw)
    if command == "set" and words[1] == "all":
        values = array.array("f", [float(words[2])] * len(values))
    elif command == "set":
        values[int(words[1])] = float(words[2])
    elif command in ("copy", "scale"):
        values = array.array("f", [float(words[-1]) * x for x in values])
    tensors[words[1] if command == "copy" else first] = (dtype, shape, values.tobytes())
    save(path, tensors)


def edit(folder, command, *words):
    if command in ("set", "copy", "scale", "shard", "prefix", "save_model"):
        edit_tensors(folder, command, words)
        return
    if command == "seal":
        seal(os.path.join(folder, *words))
        return
    if command == "in":
        edit(os.path.join(folder, words[0]), *words[1:])
        return
    if command == "link":
        os.symlink(words[0], os.path.join(folder, words[1]))
        return
    path, rest = os.path.join(folder, words[0]), words[1:]
    old = read(path) if os.path.isfile(path) else b""
    if command == "key":
        write(path, json.dumps({**json.loads(old), rest[0]: json.loads(rest[1])}).encode())
    elif command == "sub":
        new = re.sub(rest[0].encode(), octets(rest[1]), old, count=1, flags=re.S)
        if new == old:
            sys.exit(f"error: edit sub {words}: nothing was changed")
        write(path, new)
    elif command == "cut":
        write(path, old[: int(rest[0])])
    elif command in ("put", "append"):
        write(path, (old if command == "append" else b"") + octets(rest[0]))
    elif command == "int":
        write(path, old[: int(rest[0])] + struct.pack("<I", int(rest[1])) + old[int(rest[0]) + 4 :])
    elif command == "flip":
        at = int(rest[0]) % len(old)
        write(path, old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :])
    elif command == "move":
        os.replace(path, os.path.join(folder, rest[0]))
    elif command == "copy-file":
        write(os.path.join(folder, rest[0]), old)
    elif command == "fifo":
        write(path, b"")
        os.remove(path)
        os.mkfifo(path)
    elif command == "gone":
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    else:
        sys.exit(f"error: edit has no command {command}")


if __name__ == "__main__":
    edit(*sys.argv[1:])
