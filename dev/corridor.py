#!/usr/bin/env python3
"""Measure what one plain training step runs: functions, their lines, and the files that hold them.

    python3 dev/corridor.py [--list] PROGRAM.cu [FILES LINES DENSITY ROOMS TYPES]

Builds the CPU program with gcc's --coverage, trains 3 and then 4 steps, and takes the functions that ran more often in
the second run. Prints one line: the functions and their lines, the files that hold them and all of their lines, the
percentage of these lines that ran (density), the functions in rooms (a plain step needs none of them), the types that
the functions name, and the files and lines that the program includes in all. --list prints the functions by file first,
in the order to read them, and the types. With five numbers, the exit status is 1 if a step needs more files or lines, a
lower density, more functions in rooms, or more types.
"""
import gzip, json, os, re, subprocess, sys, tempfile

CORE = ["run", "data", "model", "ops", "optim", "dist", "device", "base"]  # to read in this order; bert/ for train_bert.cu
FLAGS = "-b 2 -t 32 -v 0 -n 0 -s 0".split() + ["-e", "L=2,C=32,NH=2,T=32", "-o", ""]


def compile_command(source):
    return ["gcc", "-x", "c", "-std=c11", "-D_GNU_SOURCE", "-I.", "-Ibuild", "-fopenmp", "-w", source]


def count_calls(program, folder, steps):
    """{(file, function): (calls, first line, last line)} of a run of `steps` steps."""
    for name in os.listdir(folder):
        if name.endswith((".gcda", ".gcov.json.gz")):
            os.remove(os.path.join(folder, name))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([program, *FLAGS, "-x", str(steps)], check=True, stdout=subprocess.DEVNULL, env=environment)
    notes = [name for name in os.listdir(folder) if name.endswith(".gcda")]
    subprocess.run(["gcov", "--json-format", *notes], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    calls = {}
    for name in os.listdir(folder):
        if name.endswith(".gcov.json.gz"):
            for file in json.load(gzip.open(os.path.join(folder, name)))["files"]:
                for f in file["functions"]:
                    if "_omp_fn" not in f["name"] and not file["file"].startswith("/"):
                        calls[file["file"], f["name"]] = f["execution_count"], f["start_line"], f["end_line"]
    return calls


def room_of(path):
    return path.split("/")[1] if path.startswith("llmc/") else ""


def count_lines(path):
    with open(path, encoding="utf-8") as f:
        return sum(1 for _ in f)


def types_named(included, run):
    """The project's structs, enums and function types that the lines of `run` name, but numbers and vectors of them."""
    sources = {path: open(path, encoding="utf-8").read() for path in included}
    forms = r"^(?:}|struct|enum|typedef .*[ *])\(?\*? ?([A-Z]\w*)(?:;|\)\(| {)"
    defined = re.findall(forms, "\n".join(sources.values()), re.M)
    lines = [line for path in run for n, line in enumerate(sources[path].split("\n"), 1) if n in run[path]]
    code = re.sub(r'//.*|"(\\.|[^"\\\n])*"', "", "\n".join(lines))
    return sorted(set(defined) & set(re.findall(r"\w+", code)))


def main():
    words = [word for word in sys.argv[1:] if word != "--list"]
    if not words or words[0].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    source, limits = words[0], [int(word) for word in words[1:]]
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "train")
        subprocess.run([*compile_command(source), "-O0", "--coverage", "-o", program, "-lm", "-pthread"], check=True)
        three = count_calls(program, folder, 3)
        four = count_calls(program, folder, 4)
    functions, run = {}, {}
    core = CORE + ["bert"] if source == "train_bert.cu" else CORE
    for (path, name), (calls, first, last) in sorted(four.items()):
        if calls > three.get((path, name), (0,))[0]:
            functions.setdefault(path, []).append(name)
            run.setdefault(path, set()).update(range(first, last + 1))
    if "--list" in sys.argv:
        for path in sorted(functions, key=lambda path: (core.index(room_of(path)) if room_of(path) in core else -1, path)):
            print(f"{path}, {count_lines(path)} lines, {len(run[path])} run: {' '.join(functions[path])}")
    read = sum(count_lines(path) for path in run)
    ran = sum(len(lines) for lines in run.values())
    rooms = [name for path in functions if path.startswith("llmc/") and room_of(path) not in core
             for name in functions[path]]
    rule = subprocess.run([*compile_command(source), "-MM"], check=True, capture_output=True, text=True).stdout
    included = set(re.findall(r"\S+\.(?:h|cuh|cu)\b", rule))
    types = types_named(included, run)
    if "--list" in sys.argv:
        print(f"types: {' '.join(types)}")
    print(f"{source}: {sum(map(len, functions.values()))} functions of {ran} lines, in {len(run)} files of {read} lines, "
          f"density {100 * ran / read:.0f} %; {len(rooms)} functions in rooms; {len(types)} types; "
          f"{len(included)} files of {sum(map(count_lines, included))} lines included")
    if limits and (len(run) > limits[0] or read > limits[1] or 100 * ran / read < limits[2] or len(rooms) > limits[3]
                   or len(types) > limits[4]):
        print(f"more than allowed ({limits[0]} files, {limits[1]} lines, density {limits[2]} %, {limits[3]} in rooms:"
              f" {' '.join(rooms)}, {limits[4]} types)")
        return 1
    return 0


sys.exit(main())
