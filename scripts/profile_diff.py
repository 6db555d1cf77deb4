#!/usr/bin/env python3
"""Compare two profiles that the trainers wrote with --profile: where a step became slower or faster, and which kernels changed.

    python3 scripts/profile_diff.py A B [--fail-above PERCENT]

A and B are folders with kernels.csv and summary.csv (OUT/profile, or that of a rank in it), or the OUT that holds such a
folder. Prints tables in Markdown. Times by op are medians over the profiled steps; "+" means that B takes longer. Exit
status: 0; 1 if --fail-above is given and B's step is slower than A's by more than that; 2 for wrong usage or files that
cannot be read.
"""

import collections
import csv
import math
import os
import re
import sys
import textwrap

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from user_error import Parser, UserError, replacing, run  # noqa: E402

TEXT_COLUMNS = ("direction", "layer", "op", "shapes", "kernel", "stream")
NUMBER_COLUMNS = ("start_us", "us", "gflop", "mbyte")


def die(message):
    raise UserError(message)


# ---------------------------------------------------------------------------------------------------------
# Profiles

Profile = collections.namedtuple("Profile", "folder rows facts step")


def find_folder(folder):
    """The folder with kernels.csv: `folder`, or the first one below it; of a run with several ranks, that of rank 0."""
    for inner in ("", "profile", "rank_0", "profile/rank_0"):
        place = os.path.join(folder, inner).rstrip("/") or "/"
        if os.path.isfile(os.path.join(place, "kernels.csv")): return place
    if not os.path.isdir(folder): die(f"{folder}: there is no such folder")
    die(f"{folder}: has no kernels.csv, nor has its folder profile; --profile 5 -o {folder} makes a trainer write one")


def read_number(text, what):
    if text == "": return None
    try: value = float(text)
    except ValueError: value = math.nan
    if not math.isfinite(value): die(f"{what} is '{text}', which is not a number")
    return value


def read_table(path, columns):
    """The rows of a CSV file, each a dict, with the line that it ends on in "line"."""
    rows = []
    try:
        with open(path, newline="", encoding="utf-8") as f:
            reader = csv.DictReader(f, strict=True)
            missing = [c for c in columns if c not in (reader.fieldnames or [])]
            if missing: die(f"{path}: its first line names no column '{missing[0]}', as that of a profile does")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values(): die(f"{where}: has not as many cells as the first line")
                rows.append({**row, "line": where})
    except OSError as error: die(f"{path}: {error.strerror}")
    except (csv.Error, UnicodeDecodeError) as error: die(f"{path}: is not a table of comma-separated values ({error})")
    if not rows: die(f"{path}: has no rows")
    return rows


def read_rows(path):
    """The rows of a kernels.csv: text, and numbers or None in NUMBER_COLUMNS and in ms, the median."""
    rows = read_table(path, TEXT_COLUMNS + NUMBER_COLUMNS)
    for row in rows:
        for column in NUMBER_COLUMNS: row[column] = read_number(row[column], f"{row['line']}: {column}")
        for column in ("start_us", "us"):
            if row[column] is None: die(f"{row['line']}: {column} is empty")
        median = read_number(row.get("median_us", ""), f"{row['line']}: median_us")
        row["ms"] = (row["us"] if median is None else median) / 1e3
    return rows


def read_profile(folder):
    """`facts`: the command and what the trainer says of the run. `step`: the known numbers of the reported step."""
    folder = find_folder(folder)
    path = os.path.join(folder, "summary.csv")
    facts, step = {}, {}
    for row in read_table(path, ("kind", "name", "value")):
        if row["kind"] == "fact": facts[row["name"]] = row["value"]
        elif row["value"]: step[row["name"]] = read_number(row["value"], f"{row['line']}: {row['name']}")
    if step.get("span_ms", 0) <= 0: die(f"{path}: has no span_ms above 0")
    return Profile(folder, read_rows(os.path.join(folder, "kernels.csv")), facts, step)


def is_move(row):
    """Whether a row is a copy or a fill, not a kernel."""
    return re.match(r"(copy|fill)_", row["kernel"]) is not None


# ---------------------------------------------------------------------------------------------------------
# Pages

def number(value, digits=3, sign=False):
    return "" if value is None else f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


class Page:
    """Lines of readable Markdown."""

    def __init__(self):
        self.lines = []

    def __str__(self):
        return "\n".join(self.lines) + "\n"

    def text(self, *lines):
        if self.lines: self.lines.append("")
        self.lines += lines

    def heading(self, text, level=2):
        self.text("#" * level + " " + text)

    def paragraph(self, text):
        self.text(*textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))

    def table(self, columns, rows):
        """A ">" at the end of a column's name aligns it to the right and is not printed."""
        right = [column.endswith(">") for column in columns]
        cells = [[column.rstrip(">") for column in columns]]
        cells += [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
        widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]
        padded = [[cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right)] for row in cells]
        padded.insert(1, ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right)])
        self.text(*("| " + " | ".join(row) + " |" for row in padded))


def write_page(path, page):
    with replacing(path, "w", encoding="utf-8") as f: f.write(str(page))
    print(f"wrote {path}")


# ---------------------------------------------------------------------------------------------------------
# What differs

TOTALS = {"plain_ms": "step, not profiled", "profiled_ms": "step, profiled", "span_ms": "first kernel to last",
          "kernels_ms": "in kernels", "overlap_ms": "of them overlapping", "gap_host_ms": "gaps: waiting for the host",
          "gap_stream_ms": "gaps: waiting for a stream", "gap_kernels_ms": "gaps: between kernels"}


def put_facts(page, a, b):
    names = [name for name in dict.fromkeys([*a.facts, *b.facts]) if a.facts.get(name) != b.facts.get(name)]
    if not names: return
    page.heading("Differences in the set-up")
    page.table(["", "A", "B"], [[name, a.facts.get(name, "-"), b.facts.get(name, "-")] for name in names])


def put_totals(page, a, b):
    rows = []
    for key, name in TOTALS.items():
        x, y = a.step.get(key), b.step.get(key)
        if x is None and y is None: continue
        difference = None if x is None or y is None else y - x
        share = f"{100 * difference / x:+.1f} %" if difference is not None and x > 0 else ""
        rows.append([name, number(x), number(y), number(difference, sign=True), share])
    rows.append(["kernels, copies, fills", len(a.rows), len(b.rows), f"{len(b.rows) - len(a.rows):+d}", ""])
    page.heading("The step, ms")
    page.table(["", "A>", "B>", "difference>", "of A>"], rows)


def by_op(rows):
    ops = collections.defaultdict(list)
    for row in rows: ops[row["direction"], row["op"]].append(row)
    return ops


def calls(rows):
    """Number of calls of an op: in each call one row carries the op's work, if it is known."""
    return sum(row["gflop"] is not None or row["mbyte"] is not None for row in rows) or len(rows)


def put_ops(page, a, b):
    ops, rows = [by_op(profile.rows) for profile in (a, b)], []
    for key in sorted(set(ops[0]) | set(ops[1])):
        x, y = (found.get(key, []) for found in ops)
        ms = [sum(row["ms"] for row in found) for found in (x, y)]
        note = "" if x and y else "only in A" if x else "only in B"
        share = f"{100 * (ms[1] - ms[0]) / ms[0]:+.1f} %" if x and y and ms[0] > 0 else ""
        cells = [key[0], key[1] or "(no op)", calls(x), calls(y), len(x), len(y), number(ms[0]) if x else "",
                 number(ms[1]) if y else "", number(ms[1] - ms[0], sign=True), share, note]
        rows.append((-abs(ms[1] - ms[0]), cells))
    page.heading("By op")
    page.table(["direction", "op", "calls A>", "calls B>", "kernels A>", "kernels B>", "ms A>", "ms B>", "difference>",
                "of A>", ""], [cells for _, cells in sorted(rows, key=lambda row: row[0])])


def put_names(page, a, b):
    """Kernels replaced by others: same op, layer and shapes."""
    names = [collections.defaultdict(collections.Counter) for _ in range(2)]
    for profile, found in zip((a, b), names):
        for row in profile.rows:
            found[row["direction"], row["layer"], row["op"], row["shapes"]][row["kernel"]] += 1
    changes = collections.Counter()
    for key in names[0].keys() & names[1].keys():
        gone, come = names[0][key] - names[1][key], names[1][key] - names[0][key]
        if gone or come:
            changes[key[0], key[2], key[3], tuple(sorted(gone.elements())), tuple(sorted(come.elements()))] += 1
    page.heading("Kernels that changed")
    if not changes: return page.text("The same kernels wherever an op has the same shapes in both.")
    rows = [[direction, op, shapes, " + ".join(gone) or "-", " + ".join(come) or "-", n]
            for (direction, op, shapes, gone, come), n in sorted(changes.items(), key=lambda c: (-c[1], c[0]))]
    page.table(["direction", "op", "shapes", "only in A", "only in B", "layers>"], rows)


def judge(a, b, limit):
    """Print and return whether B's step is slower than A's by more than `limit` per cent. Compares steps without
    profiling if both have them."""
    key = "plain_ms" if a.step.get("plain_ms", 0) > 0 and b.step.get("plain_ms", 0) > 0 else "span_ms"
    slower = 100 * (b.step[key] / a.step[key] - 1)
    print(f"\n{TOTALS[key]}: {a.step[key]:.3f} ms in A, {b.step[key]:.3f} ms in B, {slower:+.2f} %: "
          f"{'above' if slower > limit else 'not above'} {limit:g} %")
    return slower > limit


def percent(text):
    value = float(text)
    if not 0 <= value < math.inf: raise ValueError
    return value


def main():
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("a", metavar="A", help="a profile, or the folder of a run that has one")
    parser.add_argument("b", metavar="B", help="what to compare with it")
    parser.add_argument("--fail-above", type=percent, metavar="PERCENT",
                        help="exit 1 where B's step is slower than A's by more than that, 0 or above")
    args = parser.parse_args()
    a, b = read_profile(args.a), read_profile(args.b)
    page = Page()
    page.heading("Two profiles", 1)
    page.text(f"- A: {a.folder}", f"- B: {b.folder}")
    for put in (put_facts, put_totals, put_ops, put_names): put(page, a, b)
    print(page, end="")
    if args.fail_above is not None: return judge(a, b, args.fail_above)


if __name__ == "__main__":
    sys.exit(run(main))
