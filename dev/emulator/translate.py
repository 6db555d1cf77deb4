#!/usr/bin/env python3
"""CUDA sources as C++ for the emulator: a copy of the tree in which g++ compiles kernels as functions.

    python3 dev/emulator/translate.py FOLDER        from the repository's root

What g++ does not know is rewritten; line numbers stay what they are:
    kernel<<<grid, block, shared, stream>>>(a, b)   emulated_launch(EmulatedGrid(grid, block, shared, stream), kernel, a, b)
    __shared__ float x[32];                         static float x[32];  blocks run one after the other
    extern __shared__ float x[];                    float* x = (float*)emulated_shared();
    a device function with a PTX instruction        its declaration; dev/emulator/ptx.h defines it
"""
import os
import re
import sys

FOLDERS = ["llmc", "apps", "dev/ops", "dev/recsys", "dev/test"]
FILES = "dev/ops.cu dev/ptx.cuh dev/ladder/gpt2_in_one_file.cu test_gpt2.cu test_bert.cu train_gpt2.cu train_bert.cu".split()
HEAD = re.compile(r"^(?:template|static inline|(?:static )?__(?:device|global)__)\b", re.M)  # of a function
BODY = re.compile(r"\)\s*\{")


def closing(text, at, opening, ending):
    """The index of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == ending)
        if depth == 0:
            return i
    sys.exit(f"translate.py: no end: {text[at:at + 60]}")


def kernel_begin(text, end):
    """The index where the name of a kernel, with template arguments, begins that ends before `end`."""
    i = end
    while text[i - 1].isspace():
        i -= 1
    if text[i - 1] == ">":
        depth = 0
        while True:
            i -= 1
            depth += (text[i] == ">") - (text[i] == "<")
            if depth == 0:
                break
    while text[i - 1].isalnum() or text[i - 1] in "_:":
        i -= 1
    return i


def launches(text):
    while "<<<" in text:
        middle = text.index("<<<")
        begin, end = kernel_begin(text, middle), text.index(">>>", middle)
        arguments = text.index("(", end)
        last = closing(text, arguments, "(", ")")
        given = text[arguments + 1 : last + 1]
        call = f"emulated_launch(EmulatedGrid({text[middle + 3:end]}), {text[begin:middle]}"
        text = f"{text[:begin]}{call}{', ' if given != ')' else ''}{given}{text[last + 1:]}"
    return text


def shared_memory(text):
    dynamic = r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];"
    text = re.sub(dynamic, r"\1* \2 = (\1*)emulated_shared();", text)
    text = re.sub(r"__shared__ (alignas\(\d+\) )", r"\1static ", text)
    return text.replace("__shared__", "static")


def instructions(text):
    """Functions with PTX instructions become declarations; an empty asm, which only hides an integer, stays."""
    begin = 0
    for found in re.finditer(r'\basm(?: volatile)?\(\s*"([^"]|" : "\+f")', text):
        if found.start() < begin:
            continue
        # The function that holds it is the last one that begins at the start of a line.
        *_, head = HEAD.finditer(text, 0, found.start())
        body = BODY.search(text, head.start()).end() - 1
        begin = closing(text, body, "{", "}") + 1
        inner = text[body:begin]
        yield body, begin, ";" + "\n" * inner.count("\n")


def translate(text):
    pieces, at = [], 0
    for begin, end, new in instructions(text):
        pieces += [text[at:begin], new]
        at = end
    text = shared_memory("".join(pieces) + text[at:])
    text = text.replace("cudaLaunchCooperativeKernel((const void*)kernel", "emulated_launch_cooperative(kernel")
    text = text.replace("cudaLaunchKernelEx(", "emulated_launch_ex(")
    text = re.sub(r"\bwait_for_grid\([^)]*\);", "emulated_grid_sync();", text)
    text = text.replace("#include <cuda_pipeline_primitives.h>", "")
    return launches(text)


def main():
    target = sys.argv[1]
    names = list(FILES)
    for folder in FOLDERS:
        for path, _, files in os.walk(folder):
            names += [os.path.join(path, name) for name in files if name.endswith((".h", ".cuh", ".cu"))]
    for name in names:
        with open(name, encoding="utf-8") as f:
            try:
                text = translate(f.read())
            except (ValueError, AttributeError):
                sys.exit(f"translate.py: {name}: not understood")
        if name.endswith(".cu"):
            text += '#include "dev/emulator/ptx.h"\n'
        path = os.path.join(target, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.exists(path) or open(path, encoding="utf-8").read() != text:
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)


if __name__ == "__main__":
    main()
