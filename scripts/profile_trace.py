#!/usr/bin/env python3
"""Write the profiled step as a trace for https://ui.perfetto.dev and chrome://tracing.

    python3 scripts/profile_trace.py PROFILE [PROFILE...] >trace.json

A PROFILE is a folder with kernels.csv (OUT/profile), or the OUT that holds it; several, such as those of all ranks,
become one process each. Lanes: directions, layers, and each stream.
"""

import itertools
import json
import os
import sys

sys.dont_write_bytecode = True  # no __pycache__ in scripts/
from profile_diff import Parser, find_folder, read_rows, run

DIRECTIONS, LAYERS = 1000, 1001  # lanes beside the streams


def bars(process, lane, rows, name_of):
    """One for consecutive rows of the same name. Rows of several streams overlap, but bars do not."""
    end = 0
    for name, group in itertools.groupby(rows, name_of):
        group = list(group)
        start, end = max(end, group[0]["start_us"]), max([end] + [row["start_us"] + row["us"] for row in group])
        if name and end > start: yield event(process, lane, name[-1], start, end - start)


def event(process, lane, name, start, us, **more):
    return {"ph": "X", "pid": process, "tid": lane, "ts": round(start, 3), "dur": round(us, 3), "name": name, **more}


def events(process, folder):
    rows = read_rows(os.path.join(folder, "kernels.csv"))
    lanes = {DIRECTIONS: "direction", LAYERS: "layer"}
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": folder}}
    for row in rows:
        lane = int(row["stream"] or 0)
        lanes[lane] = f"stream {lane}" if row["stream"] else "ops"
        details = {key: row[key] for key in ("op", "shapes", "layer", "gflop", "mbyte")}
        yield event(process, lane, row["kernel"] or row["op"], row["start_us"], row["us"], args=details)
    computing = [row for row in rows if row["direction"] != "communication"]  # which overlaps with the others
    yield from bars(process, DIRECTIONS, computing, lambda row: (row["direction"],))
    yield from bars(process, LAYERS, computing,
                    lambda row: row["layer"] and (row["direction"], f"layer {row['layer']}"))
    for lane, name in lanes.items():
        yield {"ph": "M", "pid": process, "tid": lane, "name": "thread_name", "args": {"name": name}}


def main():
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("profiles", metavar="PROFILE", nargs="+", help="a profile, or the folder of a run that has one")
    folders = [find_folder(folder) for folder in parser.parse_args().profiles]
    print(json.dumps({"traceEvents": [e for i, folder in enumerate(folders) for e in events(i, folder)]}))


if __name__ == "__main__":
    sys.exit(run(main))
