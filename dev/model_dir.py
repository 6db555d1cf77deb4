"""Hugging Face directories for the scripts that convert or describe them: config.json, the tensors.

Needs Python 3.8 or later and numpy.
"""
import json
import math
import os
import re
import struct

from user_error import Parser, UserError, need, parse_json, read_json, replacing, run  # noqa: F401: scripts import them from here

np = need("numpy")
END_OF_TEXT = "<|endoftext|>"
WRAPPERS = ("_orig_mod.", "module.", "model.")  # prefixes of a wrapper's state, as in llmc/model/model_files.h
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

# ----------------------------------------------------------------------------------------------------------
# config.json


def config_number(config, path, key, fallback=None):
    value = config.get(key)
    if value is None:
        value = fallback
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 24:
        raise UserError(f'{path}: key "{key}": {value!r} is not a whole number from 1 to {(1 << 24) - 1}')
    return value


def config_expect(config, path, fixed, what):
    """Refuses a key of `fixed` whose value is none of those allowed, the first of which is that of an absent key."""
    for key, allowed in fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise UserError(f'{path}: key "{key}": {config[key]!r} cannot be expressed in {what}; only {allowed[0]!r}')


# ----------------------------------------------------------------------------------------------------------
# Tensors


def unwrapped(tensors):
    """{name: value} without the prefixes of wrappers that all names have."""
    for prefix in WRAPPERS * len(WRAPPERS):
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name[len(prefix) :]: value for name, value in tensors.items()}
    return tensors


def write_safetensors(f, tensors):
    """A file of {name: (dtype, shape, array that has its bytes)}."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    f.write(struct.pack("<Q", len(text)) + text)
    for _, _, values in tensors.values():
        f.write(values.tobytes())
    return f"{len(tensors)} tensors"


class SafeTensors:
    """One file: the entries of its header, and the bytes, which the tensors fill without overlap and without gaps."""

    def __init__(self, path):
        self.path = path
        try:
            self.bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as e:
            raise UserError(f"{path}: cannot be read: {e}")
        try:
            length = struct.unpack("<Q", self.bytes[:8].tobytes())[0]
            if length > len(self.bytes) - 8:
                raise ValueError("it is truncated")
            self.entries = parse_json(self.bytes[8 : 8 + length].tobytes().decode("utf-8"))
            for name, stored in (self.entries.pop("__metadata__", None) or {}).items():
                if stored in self.entries:  # by save_model(), which stores a tensor of several names once
                    self.entries.setdefault(name, self.entries[stored])
            self.entries = unwrapped(self.entries)
        except (struct.error, ValueError, AttributeError, TypeError) as e:
            raise UserError(f"{path}: is not a valid safetensors file: {e}")
        self.data, at = 8 + length, 0
        for begin, end in sorted({self.place(name)[2:] for name in self.entries}):
            if begin != at:
                raise UserError(f"{path}: its tensors overlap or leave gaps; it is damaged")
            at = end
        if at != len(self.bytes) - self.data:
            raise UserError(f"{path}: its size is not that of its tensors; it is damaged")

    def place(self, name):
        """Of a tensor: dtype, shape, and where its bytes begin and end."""
        try:
            dtype, shape, (begin, end) = (self.entries[name][key] for key in ("dtype", "shape", "data_offsets"))
            bits = 8 if dtype == "BOOL" else int(re.search(r"\d+", dtype)[0])
            if not all(type(n) is int and n >= 0 for n in [begin, end, *shape]):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError(f'{self.path}: tensor "{name}": its entry is damaged')
        if 8 * (end - begin) != bits * math.prod(shape) or end > len(self.bytes) - self.data:
            raise UserError(f'{self.path}: tensor "{name}": its data_offsets are damaged')
        return dtype, shape, begin, end

    def get(self, name, shape):
        kind, found, begin, end = self.place(name)
        dtype = DTYPES.get(kind)
        if not dtype:
            raise UserError(f'{self.path}: tensor "{name}": its dtype is {kind}; allowed: {", ".join(DTYPES)}')
        if found != list(shape):
            raise UserError(f'{self.path}: tensor "{name}": its shape is {found}, but config.json implies {list(shape)}')
        values = self.bytes[self.data + begin : self.data + end].view(dtype).reshape(found)
        if kind == "BF16":
            return (values.astype("<u4") << 16).view("<f4")
        return values.astype("<f4")


class Weights:
    """The tensors of a directory as float32, by their names with or without a prefix ("transformer."). They lie in
    model.safetensors, or in the files that model.safetensors.index.json names."""

    def __init__(self, directory, prefix):
        self.path, self.prefix = os.path.join(directory, "model.safetensors"), prefix
        files, index = [self.path], self.path + ".index.json"
        if not os.path.exists(self.path) and os.path.exists(index):
            try:
                names = sorted(set(read_json(index)["weight_map"].values()))
                files = [os.path.join(directory, os.path.basename(name)) for name in names]
            except (AttributeError, KeyError, TypeError):
                raise UserError(f"{index}: names no files under weight_map")
        self.files = {name: file for file in map(SafeTensors, files) for name in file.entries}

    def find(self, name):
        """The name that the tensor has in its file, or None."""
        for other in (name, name[len(self.prefix) :] if name.startswith(self.prefix) else name):
            if other in self.files:
                return other
        return None

    def get(self, name, shape):
        found = self.find(name)
        if not found:
            raise UserError(f'{self.path}: tensor "{name}" is missing; the file is of another model')
        return self.files[found].get(found, shape)


# ----------------------------------------------------------------------------------------------------------
# Files


def write_file(path, write, *arguments):
    """Complete or not at all."""
    with replacing(path) as f:
        what = write(f, *arguments)
    print(f"{path}: {what}")
