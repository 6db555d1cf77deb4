#!/usr/bin/env python3
"""Compare the machine code of two builds.

    make cubins CUBINS=before; (edit); make cubins CUBINS=after
    python3 dev/compare_sass.py before after [--reasons FILE]

BEFORE and AFTER are folders of PROGRAM.ARCH.PRECISION.cubin, or single cubins or executables. The functions of all
programs of one architecture and precision are put together, so that code may move between programs.

A function is keyed by a hash of its instructions with their encodings, registers, stack and static shared memory,
without its name: renaming it or moving its source changes nothing. Functions with equal keys are identical. The rest
are paired by kernel name, then by template arguments, then by the instructions they have in common (marked ~), and
listed with registers, static shared memory, stack (where spills go) and number of instructions, before -> after.

Needs cuobjdump and nvdisasm on the PATH, from the CUDA toolkit or from the Python packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm.

FILE explains differences that are intended, one kernel a line: "name: reason". A kernel that it names is still listed,
with its reason. Exit status 0: every function has an identical twin or a reason; 1: one has neither; 2: wrong usage.
"""
import collections, concurrent.futures, glob, hashlib, os, re, shutil, subprocess, sys

Function = collections.namedtuple("Function", "name key registers shared stack instructions opcodes")
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
    opcodes = collections.Counter(re.sub(r"^@!?U?P\w+\s+", "", line).split(" ")[0] for line in lines)
    return Function(name, key, registers, shared, stack + local, len(lines), opcodes)


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
    """{mangled name: (base name, template arguments)}"""
    names, tool = sorted(names), shutil.which("cu++filt") or shutil.which("c++filt")
    if tool and names:
        plain = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    else:
        plain = names
    result = {}
    for name, text in zip(names, plain):
        text = re.sub(r"^(void|int|float|double|bool) ", "", text)
        match = re.match(r"([\w:$~]+)(<.*>)?\(", text)  # greedy: parameters hold no template arguments of their own
        if match and match[2]:
            depth, end = 0, 0  # the arguments end where their bracket closes
            for end, c in enumerate(match[2]):
                depth += (c == "<") - (c == ">")
                if depth == 0:
                    break
            result[name] = (match[1], match[2][: end + 1])
        else:
            result[name] = (match[1] if match else text, "")
    return result


def likeness(a, b):
    common = sum((a.opcodes & b.opcodes).values())
    return common / max(1, max(a.instructions, b.instructions))


def same_arguments(a, b):
    split = lambda s: [x.strip() for x in s.strip("<>").split(",")]
    x, y = split(a), split(b)
    return sum(p == q for p, q in zip(x, y)) - abs(len(x) - len(y))


def pair(before, after, plain):
    """[(Function or None, Function or None, mark)] for two lists of functions without identical twins."""
    pairs, before, after = [], list(before), list(after)
    rounds = [
        ("", lambda a, b: plain[a.name] == plain[b.name], lambda a, b: likeness(a, b)),
        ("", lambda a, b: plain[a.name][0] == plain[b.name][0],
         lambda a, b: (same_arguments(plain[a.name][1], plain[b.name][1]), likeness(a, b))),
        ("~", lambda a, b: likeness(a, b) >= 0.7, lambda a, b: likeness(a, b)),
    ]
    for mark, may, score in rounds:
        candidates = sorted(((score(a, b), i, j) for i, a in enumerate(before) for j, b in enumerate(after) if may(a, b)),
                            reverse=True)
        used_before, used_after = set(), set()
        for _, i, j in candidates:
            if i not in used_before and j not in used_after:
                used_before.add(i), used_after.add(j)
                pairs.append((before[i], after[j], mark))
        before = [f for i, f in enumerate(before) if i not in used_before]
        after = [f for j, f in enumerate(after) if j not in used_after]
    return pairs + [(f, None, "gone") for f in before] + [(None, f, "new") for f in after]


def title(function, plain):
    return "".join(plain[function.name])


def compare(group, before, after, reasons):
    """Print one architecture and precision; the number of functions without an identical twin and without a reason."""
    keys_before, keys_after = {f.key for f in before.values()}, {f.key for f in after.values()}
    rest_before = [f for f in before.values() if f.key not in keys_after]
    rest_after = [f for f in after.values() if f.key not in keys_before]
    print(f"{' '.join(group).strip():14} {len(before)} functions before, {len(after)} after; {len(after) - len(rest_after)} "
          f"identical; without a twin: {len(rest_before)} before, {len(rest_after)} after")
    plain, unexplained = demangle({f.name for f in rest_before + rest_after}), 0
    for old, new, mark in sorted(pair(rest_before, rest_after, plain), key=lambda p: title(p[0] or p[1], plain)):
        name = title(old or new, plain)
        if old and new and title(new, plain) != name:
            name += f" {mark}-> {title(new, plain)}"
        numbers = ", ".join(
            f"{what} {getattr(old, field) if old else '-'} -> {getattr(new, field) if new else '-'}"
            for what, field in [("registers", "registers"), ("shared", "shared"), ("stack", "stack"),
                                ("instructions", "instructions")])
        reason = next((reasons[plain[f.name][0]] for f in (old, new) if f and plain[f.name][0] in reasons), None)
        unexplained += reason is None
        print(f"    {name}{f' ({mark})' if mark in ('gone', 'new') else ''}\n        {numbers}")
        if reason:
            print(f"        reason: {reason}")
    return unexplained


def main(arguments):
    reasons = {}
    if "--reasons" in arguments:
        at = arguments.index("--reasons")
        if at + 1 >= len(arguments) or not os.path.isfile(arguments[at + 1]):
            stop("--reasons needs a file")
        for line in open(arguments[at + 1]):
            if line.strip() and not line.startswith("#"):
                name, _, reason = line.partition(":")
                if not reason.strip():
                    stop(f"{arguments[at + 1]}: '{line.strip()}' is not 'name: reason'")
                reasons[name.strip()] = reason.strip()
        del arguments[at : at + 2]
    if len(arguments) != 2:
        stop("usage: compare_sass.py BEFORE AFTER [--reasons FILE]")
    for tool in ("cuobjdump", "nvdisasm"):  # cuobjdump runs nvdisasm
        if not shutil.which(tool):
            stop(f"{tool} was not found; install the CUDA toolkit or the Python package nvidia-cuda-{tool}")
    before, after = read_build(arguments[0]), read_build(arguments[1])
    unexplained = 0
    for group in sorted(set(before) | set(after)):
        if group not in before or group not in after:
            print(f"{' '.join(group).strip():14} is missing {'before' if group not in before else 'after'}")
            unexplained += 1
        else:
            unexplained += compare(group, before[group], after[group], reasons)
    print("all functions have an identical twin or a reason" if unexplained == 0 else
          f"{unexplained} without an identical twin or a reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
