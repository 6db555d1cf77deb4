#!/usr/bin/env python3
"""Test the profiler's page (llmc/profile/page.html): it shows the tables that it holds.

    page.py TRAINER          from the repository's root, for example ./train_gpt2

Opens the page of a profiled run in headless Chromium, and one made from it: thousands of rows with names that try to
break out of the page, nothing that has flops. The page shows what its tables hold, sorted and filtered too; any output
on the console is a failure. Skips the browser without Chromium; CHROMIUM names one outside the PATH.
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

# Runs after them. Expected values are computed from the data again, without the page's functions.
CHECK = r"""<script>
{
const same = (name, got, want) => {
    [got, want] = [JSON.stringify(got), JSON.stringify(want)];
    if (got !== want) found.push(`${name}: ${got}, not ${want}`.slice(0, 300));
};
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const collate = new Intl.Collator("en", { numeric: true }).compare;
const order = (section) => all("tr[data-row]", section).map((tr) => Number(tr.dataset.row));
const [facts, ...wanted] = data;

function checkTable({ id, columns, rows }, section) {
    const shown = columns.map(([name, type], c) => ({ name, type, c }))
        .filter(({ c }) => rows.some((row) => row[c] !== null));
    same(`${id}: columns`, all("th", section).map((th) => th.dataset.column), shown.map(({ name }) => name));
    same(`${id}: rows in order`, order(section), rows.map((_, i) => i));
    all("tr[data-row]", section).forEach((tr) => shown.forEach(({ c }, place) => {
        const value = rows[tr.dataset.row][c], td = tr.cells[place];
        if (td.children.length || typeof value === "string") same(`${id}: cell`, td.innerHTML && td.textContent, value);
    }));
    shown.forEach(({ name, type, c }, place) => {  // numbers begin with the largest; what has none comes last
        all("th button", section)[place].click();
        const values = order(section).map((i) => rows[i][c]), known = values.filter((x) => x !== null);
        known.sort(type === "number" ? (a, b) => b - a : collate);
        same(`${id}: sorted by ${name}`, values.slice(0, known.length), known);
    });
}
function checkFilter(kernels, section) {
    const control = section.querySelector("[data-filter=direction]");
    const c = kernels.columns.findIndex(([name]) => name === "direction");
    control.value = "backward";
    control.dispatchEvent(new Event("input"));
    same("filter by direction", order(section).length, kernels.rows.filter((row) => row[c] === "backward").length);
    section.querySelector(".tools button").click();
    same("filter off", order(section).length, kernels.rows.length);
}
async function checkTimeline() {
    const canvas = document.querySelector("#timeline canvas");
    const drawn = async (key) => {
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        await new Promise((done) => setTimeout(done, 20));
        return canvas.toDataURL() + all("tr.picked").length;
    };
    const start = await drawn("0");
    for (let key of ["+", "-", "+", "ArrowLeft", "ArrowRight", "Enter"]) {
        const was = await drawn("none");
        same(`timeline: key ${key}`, was !== (await drawn(key)), true);
    }
    await drawn("Escape");
    same("timeline: shows all again", start === (await drawn("0")), true);
}
async function checkPage() {
    const kernels = wanted.find((table) => table.id === "kernels"), section = document.getElementById("table-kernels");
    const texts = facts.rows.filter((row) => row[0] === "fact").map((row) => row[2]);
    same("facts", [document.querySelector("h1"), ...all("#facts dd")].map((one) => one.textContent), texts);
    same("tables", all("#tables > section h2").map((h2) => h2.textContent), wanted.map((table) => table.title));
    await checkTimeline();
    wanted.forEach((table, i) => checkTable(table, all("#tables > section")[i]));
    checkFilter(kernels, section);
    same("foreign elements", all("img, iframe, object, embed, link[href^=http], script[src]").length, 0);
    same("scripts and requests", [all("script").length, performance.getEntriesByType("resource").length], [5, 0]);
    same("no wider than the window", document.documentElement.scrollWidth <= innerWidth, true);
}
checkPage().catch((error) => found.push(error.stack)).finally(() => {
    const result = document.createElement("pre");
    result.id = "checks";
    result.textContent = JSON.stringify(found);
    document.body.replaceChildren(result);
});
}
</script>"""

DATA = re.compile(r'(?<=<script id="data" type="application/json">).*?(?=</script>)', re.S)
EVIL = "</script><script>document.title = 1</script><!--<script><img src=x onerror=alert(1)>&amp;\"'`\u2028\u202e"
EVIL += "a::long<name>" * 9


def hostile(page):
    """The page with thousands of kernels on two streams, longer names, and no flops."""
    tables = json.loads(DATA.search(page)[0])
    for table in tables:
        if table["id"] == "kernels":
            table["rows"] = [[*row] for row in table["rows"] * (4000 // len(table["rows"]))]
        for i, row in enumerate(table["rows"]):
            for c, (column, _) in enumerate(table["columns"]):
                if column in ("op", "kernel", "cause") or (column == "value" and row[0] == "fact"):
                    row[c] = EVIL + str(row[c])
                row[c] = {"gflop": None, "tflop_s": None, "stream": 7 + i % 2}.get(column, row[c])
    return DATA.sub(lambda _: json.dumps(tables).replace("<", "\\u003c"), page)


def open_page(browser, name, page, folder):
    """Count the checks of a page in the browser as one case."""
    head, body = page.index("<head>") + len("<head>"), page.rindex("</body>")
    write(folder + "/page.html", page[:head] + LISTEN + page[head:body] + CHECK + page[body:])
    flags = "--headless --no-sandbox --disable-gpu --window-size=1280,900 --dump-dom --enable-logging=stderr"
    done = run(browser, *flags.split(), f"--user-data-dir={folder}/{name}", "--virtual-time-budget=60000",
               f"file://{folder}/page.html")
    result = re.search(r'<pre id="checks">(.*?)</pre>', done.stdout, re.S)
    why = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    why += json.loads(html.unescape(result[1])) if result else [f"no end of the checks; status {done.returncode}"]
    verdict(f"{name} page in the browser", "\n".join(why[:10]))


names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
browser = next(filter(None, (shutil.which(name) for name in names if name)), None)
with tempfile.TemporaryDirectory() as W:
    flags = "-e L=2,C=128,NH=4,T=64 -b 8 -v 0 -s 0 -n 0 -x 8 --profile 1 -o".split()
    verdict("a profiled run", failure(run(sys.argv[1], *flags, W + "/out")))
    page = read(W + "/out/profile/profile.html")
    if browser:
        open_page(browser, "a run's", page, W)
        open_page(browser, "a hostile", hostile(page), W)
    else:
        skip("page", "no Chromium found (CHROMIUM=PATH names one)")
finish()
