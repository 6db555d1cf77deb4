#!/usr/bin/env python3
"""scripts/profile_diff.py and profile_trace.py on small made-up profiles.

    python3 dev/test/profile_scripts.py        from the repository's root
"""
import json
import os
import re
import tempfile

from verdicts import equal, finish, script, verdict, write

COLUMNS = "direction,layer,op,shapes,kernel,stream,us,start_us,median_us,gflop,mbyte\n"
work = tempfile.TemporaryDirectory()
os.chdir(work.name)


def profile(folder, plain_ms, rows):
    """A profile with a line of `rows` for each kernel: the columns up to us, half of which is the median."""
    clock, text = 0, COLUMNS
    for row in rows.split():
        us = int(row.split(",")[-1])
        text += f"{row},{clock},{us / 2},1.5,2.5\n"
        clock += us
    write(folder + "/profile/kernels.csv", text)
    write(folder + "/profile/summary.csv", f"kind,name,value\nnumber,span_ms,9\nnumber,plain_ms,{plain_ms}\n")


# B is slower, has another kernel in layer 1, one op removed and one added.
profile("a", 10, """
forward,0,matmul_forward,N=8,nvjet_one,7,2000
forward,1,matmul_forward,N=8,nvjet_one,7,2000
backward,1,gelu_backward,n=8,gelu_backward_kernel,7,1000""")
profile("b", 11, """
forward,0,matmul_forward,N=8,nvjet_one,7,3000
forward,1,matmul_forward,N=8,nvjet_two,7,2000
backward,,dropout_backward,n=8,dropout_backward_kernel,20,250""")
done = script("scripts/profile_diff.py", "a", "b", "--fail-above", "5")
equal("diff: 10 % slower is above 5 %", done.returncode, 1)
for line in ("| step, not profiled | 10.000 | 11.000 | +1.000 | +10.0 % |",
             "| forward | matmul_forward | 2 | 2 | 2 | 2 | 2.000 | 2.500 | +0.500 | +25.0 % | |",
             "| backward | gelu_backward | 1 | 0 | 1 | 0 | 0.500 | | -0.500 | | only in A |",
             "| forward | matmul_forward | N=8 | nvjet_one | nvjet_two | 1 |"):
    verdict(f"diff: {line}", "" if line in re.sub(" +", " ", done.stdout) else f"no such line in {done.stdout}")

done = script("scripts/profile_trace.py", "a", "b")
events = json.loads(done.stdout or '{"traceEvents": []}')["traceEvents"]
bars = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 1]
equal("trace: bars of streams, directions and layers", bars, [
    (7, "nvjet_one", 0, 3000), (7, "nvjet_two", 3000, 2000), (20, "dropout_backward_kernel", 5000, 250),
    (1000, "forward", 0, 5000), (1000, "backward", 5000, 250),
    (1001, "layer 0", 0, 3000), (1001, "layer 1", 3000, 2000)])
finish()
