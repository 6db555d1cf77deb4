#!/usr/bin/env python3
"""Test the profiler's page (llmc/profile/page.html): its numbers are those of the CSV files, and it shows them.

    page.py TRAINER          from the repository's root, for example ./train_gpt2
    page.py PAGE.html...     finished pages

Opens the page of a profiled run in headless Chromium, and two made from it: one of thousands of rows, one with names
that try to break out of the page and nothing that has flops. What the page shows must be what its tables hold, sorted
and filtered too; any output on the console is a failure. Skips the browser without Chromium; CHROMIUM names one outside
the PATH.
"""
import csv
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

from verdicts import failure, finish, read, skip, verdict
from verdicts import run as run_program

# Runs before the page's own scripts. A browser without a window promises no frames, so they are timers here.
LISTEN = """<script>
const found = [], checks = [];
window.requestAnimationFrame = (draw) => setTimeout(draw, 0);
addEventListener("error", (event) => found.push(event.message));
addEventListener("unhandledrejection", (event) => found.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => found.push("fetches " + event.blockedURI));
</script>"""

# Runs after them. Expected values are computed from the data again, without the page's functions.
CHECK = r"""<script>
(() => {
const check = (name, isGood, detail = "") => checks.push([name, Boolean(isGood), String(detail).slice(0, 200)]);
const same = (name, got, want) => {
    [got, want] = [JSON.stringify(got), JSON.stringify(want)];
    check(name, got === want, `${got}, not ${want}`);
};
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const none = (x) => x === null || x === undefined;
const later = () => new Promise((done) => setTimeout(done, 20));
const key = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const [facts, ...wanted] = data;
const rowsIn = (section) => all("tr[data-row]", section).map((tr) => Number(tr.dataset.row));
const at = (table, row, name) => row[table.columns.findIndex(([column]) => column === name)];
const number = (name) => Number((facts.rows.find((row) => row[0] === "number" && row[1] === name) || [])[2]);

function expectedOrder(rows, order, c, isUp) {
    const collator = new Intl.Collator("en", { numeric: true });
    const before = (a, b) => {
        if (none(a) || none(b)) return none(a) - none(b);
        return (isUp ? 1 : -1) * (typeof a === "number" ? a - b : collator.compare(a, b));
    };
    return [...order].sort((i, j) => before(rows[i][c], rows[j][c]));  // a stable sort
}
function checkTable(table, section) {
    const columns = table.columns.map(([name, type], c) => ({ name, type, c }))
        .filter(({ c }) => table.rows.some((row) => !none(row[c])));
    same(`${table.id}: columns`, all("th", section).map((th) => th.dataset.column), columns.map(({ name }) => name));
    let order = table.rows.map((_, i) => i);
    same(`${table.id}: rows in order`, rowsIn(section), order);
    columns.forEach(({ name, type, c }, place) => {
        for (const isUp of type === "number" ? [false, true] : [true, false]) {
            all("th button", section)[place].click();
            order = expectedOrder(table.rows, order, c, isUp);
            same(`${table.id}: sorted by ${name}, ${isUp ? "up" : "down"}`, rowsIn(section), order);
        }
    });
    const wrong = all("tr[data-row]", section)
        .flatMap((tr) => columns.map(({ c }, place) => [table.rows[tr.dataset.row][c], tr.cells[place]]))
        .find(([value, td]) => td.children.length || (typeof value === "string" && td.textContent !== value));
    check(`${table.id}: cells`, !wrong, wrong && wrong[0]);
}
function checkFilters(kernels, section) {
    const count = () => Number(section.querySelector("output").value.replace(/,/g, "").split(" ")[0]);
    const left = (holds) => kernels.rows.filter(holds).length;
    const matches = {
        direction: ["backward", (row) => at(kernels, row, "direction") === "backward"],
        layer: ["1", (row) => at(kernels, row, "layer") === 1],
        op: ["MatMul", (row) => /matmul/i.test(at(kernels, row, "op") ?? "")],
    };
    for (const [name, [value, holds]] of Object.entries(matches)) {
        const control = section.querySelector(`[data-filter=${name}]`);
        control.value = value;
        control.dispatchEvent(new Event("input"));
        same(`filter by ${name}`, [count(), rowsIn(section).length], [left(holds), left(holds)]);
        section.querySelector(".tools button").click();
        same("filters off", count(), kernels.rows.length);
    }
}
async function checkTimeline(kernels, section) {
    const canvas = document.querySelector("#timeline canvas"), picked = () => all("tr.picked", section).length;
    const drawn = async () => { await later(); return canvas.toDataURL() + picked(); };
    const start = await drawn();
    for (const name of ["+", "-", "+", "ArrowLeft", "ArrowRight", "Enter", "."]) {
        const was = await drawn();
        key(canvas, name);
        check(`timeline: key ${name}`, was !== (await drawn()));
    }
    same("timeline: the row that is marked", [picked(), all("#timeline dt").length], [1, all("th", section).length]);
    for (const name of ["Escape", "0"]) key(canvas, name);
    check("timeline: shows all again", start === (await drawn()));
}
// The parts are in per cent of the step, as in the table, and say that it is all of it.
function checkStrip(kinds) {
    const strip = document.getElementById("strip"), span = number("span_ms"), overlap = number("overlap_ms");
    const parts = all(".legend li", strip).map((item) => parseFloat(item.textContent.match(/([0-9.]+) %$/)[1]));
    const rows = kinds.rows.filter((row) => at(kinds, row, "ms") > 0);
    const isSame = rows.every((row, i) => Math.abs(parts[i] - at(kinds, row, "percent")) < 0.06);
    check("strip: as in the table", isSame, parts);
    const sum = parts.reduce((a, b) => a + b, 0);
    check("strip: the parts are the step", Math.abs(sum - 100 * (span + overlap) / span) < 0.06 * parts.length, sum);
}
async function checkPage() {
    const find = (id) => wanted.find((table) => table.id === id), section = document.getElementById("table-kernels");
    const texts = facts.rows.filter((row) => row[0] === "fact").map((row) => row[2]);
    same("facts", [document.querySelector("h1"), ...all("#facts dd")].map((one) => one.textContent), texts);
    same("tables", all("#tables > section h2").map((h2) => h2.textContent), wanted.map((table) => table.title));
    checkStrip(find("kinds"));
    await checkTimeline(find("kernels"), section);
    wanted.forEach((table, i) => checkTable(table, all("#tables > section")[i]));
    checkFilters(find("kernels"), section);
    const points = find("ops").rows.filter((row) => at(find("ops"), row, "gflop") > 0);
    same("roofline: points", all("#roofline .point").length, points.length);
    same("foreign elements", all("img, iframe, object, embed, link[href^=http], script[src]").length, 0);
    same("scripts", all("script").length, 5);
    same("requests", performance.getEntriesByType("resource").length, 0);
    const width = document.documentElement.scrollWidth;
    check("no wider than the window", width <= innerWidth, width);
}
checkPage().catch((error) => found.push(error.stack)).finally(() => {
    const result = document.createElement("pre");
    result.id = "checks";
    result.textContent = JSON.stringify({ checks, found });
    document.body.replaceChildren(result);
});
})();
</script>"""


DATA = re.compile(r'(?<=<script id="data" type="application/json">).*?(?=</script>)', re.S)
EVIL = "</script><script>document.title = 1</script><!--<script><img src=x onerror=alert(1)>&amp;\"'`\u2028\u202e"
EVIL += "a::long<name>" * 9


def difference(page, folder):
    """Why the rows of the page's tables are not those of the CSV files, or nothing."""
    tables = json.loads(DATA.search(page)[0], parse_float=str, parse_int=str)
    for name, table in (("summary", tables[0]), ("kernels", next(t for t in tables if t["id"] == "kernels"))):
        columns = [column for column, _ in table["columns"]]
        with open(f"{folder}/{name}.csv", encoding="utf-8", newline="") as f:
            wanted = [[row[column] for column in columns] for row in csv.DictReader(f)]
        if [[cell or "" for cell in row] for row in table["rows"]] != wanted:
            return f"{name}.csv has other rows"
    return ""


def remade(page, change):
    """The page after change(table) of each of its tables."""
    tables = json.loads(DATA.search(page)[0])
    for table in tables:
        change(table)
    return DATA.sub(lambda _: json.dumps(tables).replace("<", "\\u003c"), page)


def enlarge(table):
    if table["id"] == "kernels":
        table["rows"] *= 4000 // len(table["rows"])


def spoil(table):
    """Longer names, and no flops; kernels on two streams."""
    columns = [column for column, _ in table["columns"]]
    for i, row in enumerate(table["rows"]):
        for c, column in enumerate(columns):
            if column in ("op", "kernel", "cause") or (column == "value" and row[0] == "fact"):
                row[c] = EVIL + str(row[c])
            if column in ("gflop", "tflop_s"):
                row[c] = None
            if column == "stream":
                row[c] = 7 + i % 2


def open_page(browser, name, page):
    head, body = page.index("<head>") + len("<head>"), page.rindex("</body>")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "page.html")
        with open(path, "w", encoding="utf-8") as f:
            f.write(page[:head] + LISTEN + page[head:body] + CHECK + page[body:])
        flags = "--headless --no-sandbox --disable-gpu --window-size=1280,900 --dump-dom --enable-logging=stderr"
        try:
            done = run_program(browser, *flags.split(), "--user-data-dir=" + folder, "--virtual-time-budget=60000",
                               "file://" + path)
        except subprocess.TimeoutExpired:
            return verdict(name, "the browser did not end in 300 s")
    result = re.search(r'<pre id="checks">(.*?)</pre>', done.stdout, re.S)
    why = [f"console: {line}" for line in done.stderr.splitlines() if "CONSOLE" in line]
    if not result:
        return verdict(name, "\n".join(why) + f"the checks did not end (browser's status {done.returncode})")
    result = json.loads(html.unescape(result[1]))
    why += result["found"] + [f"{what}: {detail}" for what, is_good, detail in result["checks"] if not is_good]
    verdict(f"{name}: {len(result['checks'])} checks", "\n".join(why[:10]))


def main(paths):
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    browser = next(filter(None, (shutil.which(name) for name in names if name)), None)
    pages = {path: read(path) for path in paths if path.endswith(".html")}
    if not pages:
        with tempfile.TemporaryDirectory() as out:
            flags = "-e L=2,C=128,NH=4,T=64 -b 8 -v 0 -s 0 -n 0 -x 8 --profile 1 -o".split()
            verdict("a profiled run", failure(run_program(*paths, *flags, out)))
            page = read(out + "/profile/profile.html")
            verdict("the page's numbers are those of the CSV files", difference(page, out + "/profile"))
        pages = {"a run's page": page, "a large page": remade(page, enlarge), "a hostile page": remade(page, spoil)}
    if not browser:
        skip("page", "no Chromium found (CHROMIUM=PATH names one)")
        pages = {}
    for name, page in pages.items():
        open_page(browser, name, page)
    finish()


if __name__ == "__main__":
    main(sys.argv[1:])
