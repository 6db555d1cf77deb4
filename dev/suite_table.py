#!/usr/bin/env python3
"""The cases of two runs of `make test`, suite by suite, as a Markdown table.

    python3 dev/suite_table.py BEFORE_LOGS [AFTER_LOGS]

Each argument is a folder of logs that dev/test/run.sh leaves, by default build/test_logs for the second. A case counts
as passed, failed or skipped, as its suite's last line says. Exit status: 1 if a suite has fewer cases than before.
"""

import os
import re
import sys

TOTALS = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?", re.M)


def suites(folder):
    """{suite: (passed, failed, skipped)}; a suite without totals counts as one failure, as in dev/test/run.sh."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".log"):
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as f:
                totals = TOTALS.findall(f.read())
            found[name[:-4]] = tuple(int(n or 0) for n in totals[-1]) if totals else (0, 1, 0)
    return found


def cell(counts):
    return "-" if counts is None else "{} / {} / {}".format(*counts)


def main(before, after="build/test_logs"):
    old, new = suites(before), suites(after)
    fewer = [name for name in old if sum(new.get(name, ())) < sum(old[name])]
    print("Cases passed / failed / skipped.\n")
    print("| suite | before | after | |\n|---|---|---|---|")
    for name in sorted(old.keys() | new.keys()):
        print(f"| {name} | {cell(old.get(name))} | {cell(new.get(name))} | {'fewer' if name in fewer else ''} |")
    sums = [[sum(counts[i] for counts in found.values()) for i in range(3)] for found in (old, new)]
    print(f"| all | {cell(sums[0])} | {cell(sums[1])} | |")
    return 1 if fewer else 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        sys.exit(2)
    sys.exit(main(*sys.argv[1:]))
