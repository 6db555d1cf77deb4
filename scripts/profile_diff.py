#!/usr/bin/env python3
"""Compare two profiles that the trainers wrote with --profile: where a step became slower or faster, and which kernels changed.

    python3 scripts/profile_diff.py A B [--markdown] [--rank R] [--fail-above PERCENT]

A and B are folders with kernels.csv and summary.json (OUT/profile), or the OUT that holds such a folder. Times by op
are medians over the profiled steps; "+" means that B takes longer. Exit status: 0; 1 if --fail-above is given and B's
step is slower than A's by more than that; 2 for wrong usage or files that cannot be read.
"""

import collections
import csv
import math
import os
import re
import sys
import textwrap

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from user_error import Parser, UserError, read_json, replacing, run  # noqa: E402

TEXT_COLUMNS = ("direction", "layer", "op", "shapes", "kernel")
NUMBER_COLUMNS = ("us", "gflop", "mbyte")
DIRECTIONS = ("forward", "backward", "optimizer", "communication")


def die(message):
    raise UserError(message)


# ---------------------------------------------------------------------------------------------------------
# Profiles

Profile = collections.namedtuple("Profile", "folder rows title facts step")


def find_folder(folder, rank):
    """The folder with kernels.csv in or below `folder`; of a run with several ranks, that of rank `rank`."""
    for inner in ("", "profile"):
        for of_rank in ("", f"rank_{rank}"):
            if not of_rank and rank: continue
            place = os.path.join(folder, inner, of_rank).rstrip("/") or "/"
            if os.path.isfile(os.path.join(place, "kernels.csv")): return place
    if not os.path.isdir(folder): die(f"{folder}: there is no such folder")
    of_rank = f" of rank {rank}" if rank else ""
    die(f"{folder}: has no kernels.csv{of_rank}, nor has its folder profile; --profile 5 -o {folder} makes a trainer "
        "write one")


def read_number(text, what):
    if text == "": return None
    try: value = float(text)
    except ValueError: value = math.nan
    if not math.isfinite(value): die(f"{what} is '{text}', which is not a number")
    return value


def read_rows(path):
    """The rows of a kernels.csv, each a dict: text, and numbers or None in NUMBER_COLUMNS and in ms, the median."""
    rows = []
    try:
        with open(path, newline="", encoding="utf-8") as f:
            reader = csv.DictReader(f, strict=True)
            missing = [c for c in TEXT_COLUMNS + NUMBER_COLUMNS if c not in (reader.fieldnames or [])]
            if missing: die(f"{path}: its first line names no column '{missing[0]}', as that of a profile does")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values(): die(f"{where}: has not as many cells as the first line")
                for column in NUMBER_COLUMNS: row[column] = read_number(row[column], f"{where}: {column}")
                if row["us"] is None: die(f"{where}: us is empty")
                median = read_number(row.get("median_us", ""), f"{where}: median_us")
                row["ms"] = (row["us"] if median is None else median) / 1e3
                rows.append(row)
    except OSError as error: die(f"{path}: {error.strerror}")
    except (csv.Error, UnicodeDecodeError) as error: die(f"{path}: is not a table of comma-separated values ({error})")
    if not rows: die(f"{path}: lists no kernels")
    return rows


def read_profile(folder, rank=0):
    folder = find_folder(folder, rank)
    path = os.path.join(folder, "summary.json")
    summary = read_json(path)
    step = summary.get("step") if isinstance(summary, dict) else None
    if not isinstance(step, dict): die(f"{path}: has no object 'step'")
    step = {key: value for key, value in step.items() if isinstance(value, (int, float)) and math.isfinite(value)}
    if "beside_ms" in step: step["overlap_ms"] = step.pop("beside_ms")  # its name in older profiles
    if step.get("span_ms", 0) <= 0: die(f"{path}: 'step' has no span_ms above 0")
    facts = [(str(f[0]), str(f[1])) for f in summary.get("facts") or [] if isinstance(f, list) and len(f) == 2]
    return Profile(folder, read_rows(os.path.join(folder, "kernels.csv")), str(summary.get("title", "")), facts, step)


def is_move(row):
    """Whether a row is a copy or a fill, not a kernel."""
    return re.match(r"(copy|fill)_", row["kernel"]) is not None


# ---------------------------------------------------------------------------------------------------------
# Pages

def number(value, digits=3, sign=False):
    return "" if value is None else f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


class Page:
    """Lines of text or of readable Markdown."""

    def __init__(self, markdown):
        self.markdown, self.lines = markdown, []

    def __str__(self):
        return "\n".join(self.lines) + "\n"

    def text(self, *lines):
        self.lines += lines

    def heading(self, text, level=2):
        if self.lines and self.lines[-1]: self.lines.append("")
        self.lines += ["#" * level + " " + text, ""] if self.markdown else [text]

    def paragraph(self, text):
        if self.lines and self.lines[-1]: self.lines.append("")
        self.lines += textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)

    def table(self, columns, rows):
        """A ">" at the end of a column's name aligns it to the right and is not printed."""
        right = [column.endswith(">") for column in columns]
        cells = [[column.rstrip(">") for column in columns]] + [[str(cell) for cell in row] for row in rows]
        if self.markdown:
            cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]
            if self.lines and self.lines[-1]: self.lines.append("")
        widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]
        padded = [[cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right)] for row in cells]
        if self.markdown:
            padded.insert(1, ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right)])
            self.lines += ["| " + " | ".join(row) + " |" for row in padded]
        else: self.lines += ["  ".join(row).rstrip() for row in padded]


def write_page(path, page):
    with replacing(path, "w", encoding="utf-8") as f: f.write(str(page))
    print(f"wrote {path}")


# ---------------------------------------------------------------------------------------------------------
# What differs

TOTALS = {"plain_ms": "step, not profiled", "profiled_ms": "step, profiled", "span_ms": "first kernel to last",
          "kernels_ms": "in kernels", "overlap_ms": "of them overlapping", "gap_host_ms": "gaps: waiting for the host",
          "gap_stream_ms": "gaps: waiting for a stream", "gap_kernels_ms": "gaps: between kernels"}


def put_facts(page, a, b):
    facts = [dict(profile.facts) for profile in (a, b)]
    names = [name for name in dict.fromkeys([*facts[0], *facts[1]]) if facts[0].get(name) != facts[1].get(name)]
    if not names: return
    page.heading("Differences in the set-up")
    page.table(["", "A", "B"], [[name, facts[0].get(name, "-"), facts[1].get(name, "-")] for name in names])


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


def put_layers(page, a, b):
    x, y = (collections.Counter((row["direction"], row["layer"]) for row in profile.rows) for profile in (a, b))

    def place(key):
        direction, layer = key
        known = DIRECTIONS.index(direction) if direction in DIRECTIONS else len(DIRECTIONS)
        return known, direction, int(layer) if layer.isdigit() else -1, layer

    differ = [key for key in sorted(set(x) | set(y), key=place) if x[key] != y[key]]
    page.heading("Kernels by layer, where their number differs")
    if not differ: return page.text("The same number in every layer.")
    page.table(["direction", "layer", "A>", "B>", "difference>"],
               [[key[0], key[1] or "-", x[key], y[key], f"{y[key] - x[key]:+d}"] for key in differ])


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


def rank(text):
    if not re.fullmatch("[0-9]{1,6}", text): raise ValueError
    return int(text)


def main():
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("a", metavar="A", help="a profile, or the folder of a run that has one")
    parser.add_argument("b", metavar="B", help="what to compare with it")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    parser.add_argument("--rank", type=rank, default=0, help="whose profile, where several ranks have one (default 0)")
    parser.add_argument("--fail-above", type=percent, metavar="PERCENT",
                        help="exit 1 where B's step is slower than A's by more than that, 0 or above")
    args = parser.parse_args()
    a, b = read_profile(args.a, args.rank), read_profile(args.b, args.rank)
    page = Page(args.markdown)
    page.heading("Two profiles", 1)
    for name, profile in (("A", a), ("B", b)):
        what = f": {profile.title}" if profile.title else ""
        page.text(f"{'- ' if args.markdown else ''}{name}: {profile.folder}{what}")
    for put in (put_facts, put_totals, put_ops, put_layers, put_names): put(page, a, b)
    print(page, end="")
    if args.fail_above is not None: return judge(a, b, args.fail_above)


if __name__ == "__main__":
    sys.exit(run(main))
