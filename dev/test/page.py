#!/usr/bin/env python3
"""Test the profiler's page (llmc/profile/page.html): it shows the tables that it holds.

    page.py TRAINER          from the repository's root, for example ./train_gpt2

Opens the page of a profiled run, whose folder has a name that tries to break out of the page, in headless Chromium.
Any output on the console is a failure. Skips the browser without Chromium; CHROMIUM names one outside the PATH.
"""
import html
import json
import os
import re
import shutil
import sys
import tempfile

from verdicts import failure, finish, read, run, skip, verdict, write

# Runs before the page's own scripts. A browser without a window promises no frames, so they are timers here.
LISTEN = """<script>
const found = [];
window.requestAnimationFrame = (draw) => setTimeout(draw, 0);
addEventListener("error", (event) => found.push(event.message));
addEventListener("unhandledrejection", (event) => found.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => found.push("fetches " + event.blockedURI));
</script>"""

# Runs after them.
CHECK = r"""<script>
setTimeout(() => {
    const all = (selector, root = document) => [...root.querySelectorAll(selector)];
    const same = (name, got, want) => got === want || found.push(`${name}: ${got}, not ${want}`.slice(0, 300));
    const [facts, ...tables] = data, sections = all("#tables > section");
    tables.forEach(({ id, columns, rows }, i) => {
        const shown = columns.map((_, c) => c).filter((c) => rows.some((row) => row[c] !== null));
        const lines = all("tr[data-row]", sections[i]);
        same(`${id}: rows`, lines.length, rows.length);
        lines.forEach((tr, r) => shown.forEach((c, place) => {
            const td = tr.cells[place], value = rows[r][c];
            if (typeof value === "string" || td.children.length) same(`${id}: cell`, td.textContent, value);
        }));
    });
    const { columns, rows } = tables.find((table) => table.id === "ops"), ops = document.getElementById("table-ops");
    const ms = rows.map((row) => row[columns.findIndex(([name]) => name === "ms")]);
    for (const want of [Math.max(...ms), Math.min(...ms)]) {  // numbers begin with the largest
        all("th[data-column=ms] button", ops)[0].click();
        same("sorted by ms", ms[all("tr[data-row]", ops)[0].dataset.row], want);
    }
    same("foreign elements", all("img, iframe, object, embed, link[href^=http], script[src]").length, 0);
    same("scripts", all("script").length, 5);
    same("requests", performance.getEntriesByType("resource").length, 0);
    const result = document.createElement("pre");
    result.id = "checks";
    result.textContent = JSON.stringify(found);
    document.body.replaceChildren(result);
}, 200);
</script>"""

EVIL = "</script><script>document.title = 1</script><!--<script><img src=x onerror=alert(1)>&amp;\"'`\u2028\u202e"


def open_page(browser, page, folder):
    """Count the checks of a page in the browser as one case."""
    head, body = page.index("<head>") + len("<head>"), page.rindex("</body>")
    write(folder + "/page.html", page[:head] + LISTEN + page[head:body] + CHECK + page[body:])
    flags = "--headless --no-sandbox --disable-gpu --window-size=1280,900 --dump-dom --enable-logging=stderr"
    done = run(browser, *flags.split(), f"--user-data-dir={folder}/browser", "--virtual-time-budget=60000",
               f"file://{folder}/page.html")
    result = re.search(r'<pre id="checks">(.*?)</pre>', done.stdout, re.S)
    why = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    why += json.loads(html.unescape(result[1])) if result else [f"no end of the checks; status {done.returncode}"]
    verdict("the page in the browser", "\n".join(why[:10]))


names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
browser = next(filter(None, (shutil.which(name) for name in names if name)), None)
with tempfile.TemporaryDirectory() as W:
    flags = "-e L=2,C=128,NH=4,T=64 -b 8 -v 0 -s 0 -n 0 -x 8 --profile 1 -o".split()
    verdict("a profiled run", failure(run(sys.argv[1], *flags, f"{W}/{EVIL}")))
    if browser:
        open_page(browser, read(f"{W}/{EVIL}/profile/profile.html"), W)
    else:
        skip("page", "no Chromium found (CHROMIUM=PATH names one)")
finish()
