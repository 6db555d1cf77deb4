#!/usr/bin/env python3
"""Count the lines of code that each pair of the trainers has in common, and find what was copied.

    python3 dev/common_lines.py [FILE...]      default: the trainers and apps/finetune_bert.cu

The model and the step are written out in each trainer on purpose: sections titled Configuration, Parameters,
Activations, Forward, Backward, Losses and Step do not count, nor do functions and arrays elsewhere that hold rows of a
table (TensorRow). A section begins with a banner, a line of `// -----` followed by `// Title`. Everything else counts,
apart from comments, #include and lines of fewer than four characters. Lines are compared without indentation, as
multisets.

Exit status: 0; 1 if a pair shares more than MOST_SHARED lines, or more than 5 consecutive ones; 2: wrong usage.
"""
import collections, itertools, os, re, sys

MODEL = ("Configuration", "Parameters", "Activations", "Forward", "Backward", "Losses", "Step")
MOST_SHARED, MOST_RUN, SHORTEST = 23, 5, 4  # the first only goes down
DEFAULT = ("train_gpt2.cu", "train_bert.cu", "apps/finetune_bert.cu")
TABLE = re.compile(r"^\s*(static )?const TensorRow \w+\[\] = \{$")


def without_comments(text):
    """The same lines, comments blanked; strings and characters are kept."""
    token = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/', re.S)
    return token.sub(lambda m: re.sub(r"[^\n]", "", m[0]) if m[0].startswith("/") else m[0], text)


def counted_lines(path):
    """[(line number, stripped line)] outside the model's sections and tables."""
    text = open(path).read()
    raw, code = text.split("\n"), without_comments(text).split("\n")
    result, counting, sections, first, table = [], False, [], 0, False
    for i, line in enumerate(code):
        if re.match(r"// -{20,}$", raw[i]) and i + 1 < len(raw):
            title = re.match(r"// (\w+)", raw[i + 1])
            sections.append(title[1] if title else "")
            counting = not title or title[1] not in MODEL
        if line and not line[0].isspace() and line[0] not in "})":
            first, table = len(result), False  # a function, an array or a declaration begins
        table = table or bool(TABLE.match(line))
        plain = line.strip()
        if counting and len(plain) >= SHORTEST and not plain.startswith("#include"):
            result.append((i + 1, plain))
        if table:
            del result[first:]
    if "Forward" not in sections:
        print(f"common_lines: {path} has no section titled Forward", file=sys.stderr)
        sys.exit(2)
    return result


def copied_runs(a, b):
    """[(length, line in a, line in b)] of maximal runs of equal consecutive lines."""
    runs, length = [], collections.defaultdict(int)
    where = collections.defaultdict(list)
    for j, (_, line) in enumerate(b):
        where[line].append(j)
    for i, (_, line) in enumerate(a):
        now = collections.defaultdict(int)
        for j in where[line]:
            now[j] = length[j - 1] + 1
            ends = i + 1 == len(a) or j + 1 == len(b) or a[i + 1][1] != b[j + 1][1]
            if ends and now[j] > MOST_RUN:
                runs.append((now[j], a[i - now[j] + 1][0], b[j - now[j] + 1][0]))
        length = now
    return sorted(runs, reverse=True)


def main(files):
    if any(f.startswith("-") for f in files) or len(files) == 1:
        print("usage: common_lines.py [FILE FILE...]", file=sys.stderr)
        return 2
    files = files or [f for f in DEFAULT if os.path.exists(f)]
    for f in files:
        if not os.path.isfile(f):
            print(f"common_lines: {f} was not found", file=sys.stderr)
            return 2
    lines, bad = {f: counted_lines(f) for f in files}, 0
    for a, b in itertools.combinations(files, 2):
        multisets = [collections.Counter(line for _, line in lines[f]) for f in (a, b)]
        shared = sum((multisets[0] & multisets[1]).values())
        bad += shared > MOST_SHARED
        print(f"{a} {b}: {shared} lines shared of {len(lines[a])} and {len(lines[b])}"
              + (f", more than {MOST_SHARED}" if shared > MOST_SHARED else ""))
        for length, i, j in copied_runs(lines[a], lines[b]):
            bad += 1
            print(f"    {length} consecutive lines: {a}:{i} {b}:{j}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
