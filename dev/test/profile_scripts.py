#!/usr/bin/env python3
"""scripts/profile_diff.py and profile_trace.py on small made-up profiles.

    python3 dev/test/profile_scripts.py        from the repository's root
"""
import csv
import json
import os
import re
import shutil
import tempfile

from verdicts import equal, failure, finish, script, verdict

COLUMNS = "direction layer op shapes kernel stream start_us us median_us gflop mbyte".split()
work = tempfile.TemporaryDirectory()
os.chdir(work.name)


def profile(folder, plain_ms, span_ms, rows):
    """A profile with a line of `rows` for each kernel: direction, layer ("-": outside), op, shapes, kernel, stream,
    median of us, half of what the reported step took. With "+" a helper without work."""
    os.makedirs(folder + "/profile")
    clock = 0
    with open(folder + "/profile/kernels.csv", "w", newline="") as f:
        table = csv.writer(f)
        table.writerow(COLUMNS)
        for direction, layer, op, shapes, kernel, stream, us in map(str.split, rows.strip().splitlines()):
            work, shapes, us = ("", "") if us[0] == "+" else (1.5, 2.5), shapes.replace(",", " "), int(us)
            table.writerow([direction, layer.strip("-"), op, shapes, kernel, stream, clock, 2 * us, us, *work])
            clock += 2 * us
    numbers = {"span_ms": span_ms, "plain_ms": plain_ms, "before_ms": ""}
    with open(folder + "/profile/summary.csv", "w", newline="") as f:
        csv.writer(f).writerows([("kind", "name", "value"), *(("number", *number) for number in numbers.items())])


def lacks(text, *lines):
    """The first of the lines that a text does not have; several blanks or dashes count as one."""
    squeezed = lambda text: re.sub(r"([ -])\1+", r"\1", text)
    found = squeezed(text).split("\n")
    return next((f"no line {line!r} in: {text[:3000]}" for line in lines if squeezed(line) not in found), "")


# ---------------------------------------------------------------------------------------------------------

# B has a different kernel in layer 1, a second kernel in layer 0, one op removed and one added.
profile("a", 10, 9.5, """
forward 0 matmul_forward N=8,C=4 nvjet_one 7 1000
forward 1 matmul_forward N=8,C=4 nvjet_one 7 1000
backward - gelu_backward n=8 gelu_backward_kernel 7 500
optimizer - adamw_update n=9 adamw_update_kernel 7 250""")
profile("b", 11, 9, """
forward 0 matmul_forward N=8,C=4 fill_4B 7 +10
forward 0 matmul_forward N=8,C=4 nvjet_one 7 1500
forward 1 matmul_forward N=8,C=4 nvjet_two 7 1000
backward - dropout_backward n=8 dropout_backward_kernel 7 125
optimizer - adamw_update n=9 adamw_update_kernel 7 250""")
done = script("scripts/profile_diff.py", "a", "b", "--fail-above", "5")
equal("diff: 10 % slower is above 5 %", done.returncode, 1)
verdict("diff: times, ops, kernels", lacks(
    done.stdout, "- A: a/profile",
    "| step, not profiled | 10.000 | 11.000 | +1.000 | +10.0 % |",
    "| first kernel to last | 9.500 | 9.000 | -0.500 | -5.3 % |",
    "| kernels, copies, fills | 4 | 5 | +1 | |",
    "| forward | matmul_forward | 2 | 2 | 2 | 3 | 2.000 | 2.510 | +0.510 | +25.5 % | |",
    "| backward | gelu_backward | 1 | 0 | 1 | 0 | 0.500 | | -0.500 | | only in A |",
    "| backward | dropout_backward | 0 | 1 | 0 | 1 | | 0.125 | +0.125 | | only in B |",
    "| forward | matmul_forward | N=8 C=4 | - | fill_4B | 1 |",
    "| forward | matmul_forward | N=8 C=4 | nvjet_one | nvjet_two | 1 |"))
shutil.copytree("a/profile", "ranks/profile/rank_0"), shutil.copytree("b/profile", "ranks/profile/rank_1")
done = script("scripts/profile_diff.py", "a", "ranks")
same = "The same kernels wherever an op has the same shapes in both."
verdict("diff: rank 0 of several", failure(done) or lacks(done.stdout, "- B: ranks/profile/rank_0", same))

# A copy on another stream, and communication beside the second layer's kernel.
profile("traced", 1, 1, """
forward - batch_load B=1 copy_to_device_4B 13 1
forward 0 matmul_forward N=8,C=4 nvjet_one 7 10
communication 0 sum_gradients n=8 ncclDevKernel 20 5
forward 1 matmul_forward N=8,C=4 nvjet_one 7 10
backward 1 matmul_backward_input N=8,C=4 nvjet_two 7 10""")
done = script("scripts/profile_trace.py", "traced", "ranks/profile/rank_1")
events = json.loads(done.stdout or '{"traceEvents": []}')["traceEvents"]
bars = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 0]
equal("trace: bars of streams, directions and layers", bars, [
    (13, "copy_to_device_4B", 0, 2), (7, "nvjet_one", 2, 20), (20, "ncclDevKernel", 22, 10), (7, "nvjet_one", 32, 20),
    (7, "nvjet_two", 52, 20), (1000, "forward", 0, 52), (1000, "backward", 52, 20), (1001, "layer 0", 2, 20),
    (1001, "layer 1", 32, 20), (1001, "layer 1", 52, 20)])
finish()
