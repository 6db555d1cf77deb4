#!/usr/bin/env python3
"""Compare the machine code of two builds.

    make cubins CUBINS=before; (edit); make cubins CUBINS=after
    python3 dev/compare_sass.py before after

BEFORE and AFTER are folders of PROGRAM.ARCH.PRECISION.cubin. The functions of all programs of one architecture and
precision are put together, so that code may move between programs.

A function is keyed by its instructions with their encodings, registers, stack and static shared memory, without its
name: renaming it or moving its source changes nothing. Functions with equal keys are identical. The rest are paired by
name and template arguments, and listed with registers, static shared memory, stack (where spills go) and number of
instructions, before -> after.

Needs cuobjdump and nvdisasm on the PATH, from the CUDA toolkit or from the Python packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm. Exit status 0: every function has an identical twin; 1: one has none; 2: wrong usage.
"""
import collections, concurrent.futures, glob, os, re, subprocess, sys

FUNCTION = re.compile(r"^\s*Function\s*: (\S+)\n", re.M)
# An instruction, and the halves of its encoding.
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*/\*\s*(0x\w+)\s*\*/(?:\s*/\*\s*(0x\w+)\s*\*/)?")
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
MANGLED = re.compile(r"\b_Z\w+|\$__\w+")


def stop(message):
    print(f"compare_sass: {message}", file=sys.stderr)
    sys.exit(2)


def functions_of(path):
    """[(name, numbers that are shown, code)] of a cubin."""
    try:
        run = subprocess.run(["cuobjdump", "-sass", "-res-usage", path], capture_output=True, text=True)
    except FileNotFoundError:
        stop("cuobjdump was not found")
    if run.returncode != 0:
        stop(f"cuobjdump cannot read {path}: {run.stderr.strip() or run.stdout.strip()}")
    usage = {name: tuple(map(int, numbers)) for name, *numbers in USAGE.findall(run.stdout)}
    _, *parts = FUNCTION.split(run.stdout)
    found = []
    for name, text in zip(parts[::2], parts[1::2]):
        code = INSTRUCTION.findall(MANGLED.sub("NAME", text))
        while code and re.search(r"\bNOP\b", code[-1][0]):
            code.pop()  # padding
        registers, stack, shared, local = usage[name]
        found.append((name, (registers, shared, stack + local, len(code)), tuple(code)))
    return found


def read_build(folder):
    """{(architecture, precision): {key: (name, numbers)}}, the union over the programs."""
    files = sorted(glob.glob(os.path.join(folder, "*.cubin")))
    if not files:
        stop(f"{folder} is not a folder of cubins")
    build = collections.defaultdict(dict)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for file, found in zip(files, pool.map(functions_of, files)):
            group = tuple(os.path.basename(file).split(".")[1:3])
            build[group].update({hash((numbers, code)): (name, numbers) for name, numbers, code in found})
    return build


def plain(names):
    """{mangled name: kernel and template arguments}"""
    names = sorted(names)
    texts = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    return {name: re.sub(r"^(void|int|float|double|bool) |\([^()]*(\([^()]*\)[^()]*)*\)$", "", text)
            for name, text in zip(names, texts)}


def compare(group, before, after):
    """Print one architecture and precision; the number of functions without an identical twin."""
    olds, news = ([value for key, value in one.items() if key not in other]
                  for one, other in ((before, after), (after, before)))
    print(f"{' '.join(group):14} {len(before)} functions before, {len(after)} after; {len(after) - len(news)} "
          f"identical; without a twin: {len(olds)} before, {len(news)} after")
    called = plain({name for name, _ in olds + news})
    olds, news = ({called[name]: numbers for name, numbers in rest} for rest in (olds, news))
    for name in sorted(olds | news):
        old, new = olds.get(name, "----"), news.get(name, "----")
        print(f"    {name}{' (gone)' if name not in news else '' if name in olds else ' (new)'}\n        " + ", ".join(
            f"{what} {a} -> {b}" for what, a, b in zip(("registers", "shared", "stack", "instructions"), old, new)))
    return len(olds | news)


def main(arguments):
    if len(arguments) != 2:
        stop("usage: compare_sass.py BEFORE AFTER")
    before, after = map(read_build, arguments)
    different = sum(compare(group, before[group], after[group]) for group in sorted({*before, *after}))
    print(f"{different} without an identical twin" if different else "all functions have an identical twin")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
