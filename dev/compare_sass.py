#!/usr/bin/env python3
"""Compare the machine code of two builds.

    make cubins CUBINS=before; (edit); make cubins CUBINS=after
    python3 dev/compare_sass.py before after

BEFORE and AFTER are folders of PROGRAM.ARCH.PRECISION.cubin, or single cubins or executables. The functions of all
programs of one architecture and precision are put together, so that code may move between programs.

A function is keyed by a hash of its instructions with their encodings, registers, stack and static shared memory,
without its name: renaming it or moving its source changes nothing. Functions with equal keys are identical. The rest
are paired by name and template arguments, and listed with registers, static shared memory, stack (where spills go) and
number of instructions, before -> after.

Needs cuobjdump and nvdisasm on the PATH, from the CUDA toolkit or from the Python packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm.

Exit status 0: every function has an identical twin; 1: one has none; 2: wrong usage.
"""
import collections, concurrent.futures, glob, hashlib, os, re, shutil, subprocess, sys

Function = collections.namedtuple("Function", "name key registers shared stack instructions")
LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*/\*\s*(0x[0-9a-f]+)\s*\*/")
MORE = re.compile(r"^\s+/\*\s*(0x[0-9a-f]+)\s*\*/")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
MANGLED = re.compile(r"\b_Z\w+|\$__\w+")


def stop(message):
    print(f"compare_sass: {message}", file=sys.stderr)
    sys.exit(2)


def close_function(name, lines, usage):
    while lines and re.search(r"\bNOP\b", lines[-1]):
        lines.pop()  # padding
    code = MANGLED.sub("NAME", "\n".join(lines))
    registers, stack, shared, local = usage.get(name, (0, 0, 0, 0))
    key = hashlib.sha256(f"{registers} {stack} {shared} {local}\n{code}".encode()).hexdigest()[:16]
    return Function(name, key, registers, shared, stack + local, len(lines))


def functions_of(path):
    """{architecture: [Function]} of a cubin or an executable."""
    run = subprocess.run(["cuobjdump", "-sass", "-res-usage", path], capture_output=True, text=True)
    if run.returncode != 0:
        stop(f"cuobjdump cannot read {path}: {run.stderr.strip() or run.stdout.strip()}")
    found, usage, arch, name, used, lines = collections.defaultdict(list), {}, None, None, None, []

    def close():
        if name:
            found[arch].append(close_function(name, lines, usage))

    for line in run.stdout.splitlines():
        if name and (match := LINE.match(line)):
            lines.append(match[1] + " " + match[2])
        elif name and (match := MORE.match(line)):
            lines[-1] += " " + match[1]  # second half of the encoding
        elif match := re.match(r"\s*Function\s*: (\S+)", line):
            close()
            name, lines = match[1], []
        elif match := re.match(r"\s*Function (\S+):$", line):
            used = match[1]
        elif used and (match := USAGE.search(line)):
            usage[used], used = tuple(int(n) for n in match.groups()), None
        elif match := re.match(r"\s*code for (\S+)", line):
            close()
            arch, name = match[1], None
        elif line.startswith("Fatbin"):
            close()
            name, usage = None, {}
    close()
    return dict(found)


def read_build(path):
    """{(architecture, precision): {(name, key): Function}}, the union over the programs."""
    files = sorted(glob.glob(os.path.join(path, "*.cubin"))) if os.path.isdir(path) else [path]
    if not files or not all(os.path.isfile(f) for f in files):
        stop(f"{path} is neither a folder of cubins nor a file")
    build = collections.defaultdict(dict)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for file, found in zip(files, pool.map(functions_of, files)):
            parts = os.path.basename(file).split(".")
            precision = parts[2].lower() if len(parts) == 4 and parts[3] == "cubin" else ""
            for arch, functions in found.items():
                build[arch, precision].update({(f.name, f.key): f for f in functions})
    if not build:
        stop(f"{path} holds no device code")
    return build


def demangle(names):
    """{mangled name: kernel and template arguments}"""
    names, tool = sorted(names), shutil.which("cu++filt") or shutil.which("c++filt")
    if not tool or not names:
        return dict(zip(names, names))
    plain = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    return {name: re.sub(r"^(void|int|float|double|bool) |\([^()]*(\([^()]*\)[^()]*)*\)$", "", text)
            for name, text in zip(names, plain)}


def compare(group, before, after):
    """Print one architecture and precision; the number of functions without an identical twin."""
    keys_before, keys_after = {f.key for f in before.values()}, {f.key for f in after.values()}
    rest_before = [f for f in before.values() if f.key not in keys_after]
    rest_after = [f for f in after.values() if f.key not in keys_before]
    print(f"{' '.join(group).strip():14} {len(before)} functions before, {len(after)} after; {len(after) - len(rest_after)} "
          f"identical; without a twin: {len(rest_before)} before, {len(rest_after)} after")
    plain = demangle({f.name for f in rest_before + rest_after})
    olds, news = ({plain[f.name]: f for f in rest} for rest in (rest_before, rest_after))
    names = sorted(olds.keys() | news.keys())
    for name in names:
        old, new = olds.get(name), news.get(name)
        numbers = ", ".join(f"{field} {getattr(old, field, '-')} -> {getattr(new, field, '-')}"
                            for field in ("registers", "shared", "stack", "instructions"))
        print(f"    {name}{'' if old and new else ' (gone)' if old else ' (new)'}\n        {numbers}")
    return len(names)


def main(arguments):
    if len(arguments) != 2:
        stop("usage: compare_sass.py BEFORE AFTER")
    for tool in ("cuobjdump", "nvdisasm"):  # cuobjdump runs nvdisasm
        if not shutil.which(tool):
            stop(f"{tool} was not found; install the CUDA toolkit or the Python package nvidia-cuda-{tool}")
    before, after = read_build(arguments[0]), read_build(arguments[1])
    different = 0
    for group in sorted(set(before) | set(after)):
        if group not in before or group not in after:
            print(f"{' '.join(group).strip():14} is missing {'before' if group not in before else 'after'}")
            different += 1
        else:
            different += compare(group, before[group], after[group])
    print(f"{different} without an identical twin" if different else "all functions have an identical twin")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
