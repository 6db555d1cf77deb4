#!/usr/bin/env python3
"""Test the profiler's page (llmc/profile/page.html) in a browser.

    page.py [PAGE.html...]

Opens the given finished pages in headless Chromium, and three made from the template: a step with two streams, one with
names that try to break out of the page and nothing that has flops, one with 4,000 kernels. Sorts every column of every
table, filters, and steps through the timeline and the roofline; any output on the console is a failure. Skips without
Chromium; CHROMIUM names one outside the PATH.
"""
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

LLMC = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../llmc")
TEMPLATE = [os.path.join(LLMC, "profile", name) for name in ("head.html", "page.html")]
MARKER = "/*DATA*/null"

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
const same = (name, got, want) => check(name, JSON.stringify(got) === JSON.stringify(want), `${JSON.stringify(got)}, not ${JSON.stringify(want)}`);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const none = (x) => x === null || x === undefined;
const later = () => new Promise((done) => setTimeout(done, 20));
const key = (element, name) => element.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
const [facts, ...wanted] = data, rowsIn = (section) => all("tr[data-row]", section).map((tr) => Number(tr.dataset.row));
const at = (table, row, name) => row[table.columns.findIndex(([column]) => column === name)];
const number = (name) => Number((facts.rows.find((row) => row[0] === "number" && row[1] === name) || [])[2]);

function expectedOrder(rows, order, c, isUp) {
    const collator = new Intl.Collator("en", { numeric: true });
    const before = (a, b) => {
        if (none(a) || none(b)) return none(a) - none(b);
        return (isUp ? 1 : -1) * (typeof a === "number" ? a - b : collator.compare(a, b));
    };
    return order.map((row, place) => [row, place]).sort((i, j) => before(rows[i[0]][c], rows[j[0]][c]) || i[1] - j[1]).map(([row]) => row);
}
function checkTable(table, section) {
    const columns = table.columns.map(([name, type], c) => ({ name, type, c })).filter(({ c }) => table.rows.some((row) => !none(row[c])));
    same(`${table.id}: columns`, all("th", section).map((th) => th.dataset.column), columns.map(({ name }) => name));
    let order = table.rows.map((_, i) => i);
    same(`${table.id}: rows in order`, rowsIn(section), order);
    columns.forEach(({ name, type, c }, place) => {
        for (const isUp of type === "number" ? [false, true] : [true, false]) {
            all("th button", section)[place].click();
            order = expectedOrder(table.rows, order, c, isUp);
            same(`${table.id}: sorted by ${name}, ${isUp ? "up" : "down"}`, rowsIn(section), order);
            const sorts = all("th", section).map((one) => one.getAttribute("aria-sort"));
            check(`${table.id}: aria-sort`, sorts.every((sort, i) => sort === (i !== place ? "none" : isUp ? "ascending" : "descending")), sorts);
        }
    });
    const wrong = all("tr[data-row]", section).flatMap((tr) => columns.map(({ c }, place) => [table.rows[tr.dataset.row][c], tr.cells[place]]))
        .find(([value, td]) => td.children.length || (typeof value === "string" && td.textContent !== value));
    check(`${table.id}: cells`, !wrong, wrong && wrong[0]);
}
function checkFilters(kernels, section) {
    const [direction, layer, words] = ["direction", "layer", "op"].map((name) => section.querySelector(`[data-filter=${name}]`));
    const set = (control, value) => { control.value = value; control.dispatchEvent(new Event("input")); };
    const count = () => Number(section.querySelector("output").value.replace(/,/g, "").split(" ")[0]);
    for (const [name, control] of [["direction", direction], ["layer", layer]]) {
        for (const option of [...control.options].slice(1, 20)) {
            set(control, option.value);
            const left = kernels.rows.filter((row) => String(at(kernels, row, name)) === option.value).length;
            same(`filter ${name} ${option.value}`, [count(), rowsIn(section).length], [left, left]);
        }
        set(control, "");
    }
    set(words, "MatMul");
    const left = kernels.rows.filter((row) => ["op", "shapes", "kernel"].some((name) => /matmul/i.test(at(kernels, row, name) ?? ""))).length;
    same("filter by text", count(), left);
    section.querySelector(".tools button").click();
    same("filters off", count(), kernels.rows.length);
}
async function checkTimeline(kernels, section) {
    const canvas = document.querySelector("#timeline canvas"), picked = () => all("tr.picked", section).length;
    const drawn = async () => { await later(); return canvas.toDataURL(); };
    const start = await drawn(), blank = document.createElement("canvas");
    [blank.width, blank.height] = [canvas.width, canvas.height];
    check("timeline: drawn", canvas.width > 1000 && start !== blank.toDataURL());
    key(canvas, "+");
    check("timeline: zooms", start !== (await drawn()));
    key(canvas, "0");
    check("timeline: shows all again", start === (await drawn()));
    key(canvas, ".");
    same("timeline: details", all("#timeline dt").length, all("th", section).length);
    same("timeline: marks its row", picked(), 1);
    for (const name of [",", ".", "Enter", "ArrowLeft", "ArrowRight", "-", "Escape", "0"]) key(canvas, name);
    check("timeline: as before", start === (await drawn()) && picked() === 0);
    for (const name of ["+", "-", "+", "ArrowLeft", "ArrowRight", "Enter", "."]) {
        const was = await drawn() + picked();
        key(canvas, name);
        check(`timeline: key ${name}`, was !== (await drawn()) + picked());
    }
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: 600, clientY: canvas.getBoundingClientRect().top + 70 }));
    check("timeline: pointer", /under the pointer|picked|longest/.test(document.querySelector("#timeline .details").textContent));
}
function checkRoofline(ops) {
    const points = all("#roofline .point");
    same("roofline: points", points.length, ops.rows.filter((row) => ["gflop", "mbyte", "tflop_s"].every((name) => at(ops, row, name) > 0)).length);
    for (const point of points.slice(0, 50)) {
        point.focus();
        const words = document.querySelector("#roofline .hover").textContent, label = point.getAttribute("aria-label");
        check("roofline: whole values in a label", words && words.trim().split(" ").every((word) => label.split(/,? /).includes(word)), words);
    }
}
// The parts are in per cent of the step, as in the table, and say that it is all of it.
function checkStrip(kinds) {
    const strip = document.getElementById("strip"), span = number("span_ms"), overlap = number("overlap_ms");
    const parts = all(".legend li", strip).map((item) => parseFloat(item.textContent.match(/([0-9.]+) %$/)[1]));
    const head = strip.querySelector("h2 .soft").textContent.match(/([0-9.]+) (s|ms|µs)$/);
    check("strip: the step's time", Math.abs(head[1] * { s: 1e3, ms: 1, "µs": 1e-3 }[head[2]] / span - 1) < 0.005, head[0]);
    check("strip: as in the table", kinds.rows.filter((row) => at(kinds, row, "ms") > 0).every((row, i) => Math.abs(parts[i] - at(kinds, row, "percent")) < 0.06), parts);
    const sum = parts.reduce((a, b) => a + b, 0);
    check("strip: the parts are the step", Math.abs(sum - 100 * (span + overlap) / span) < 0.06 * parts.length, sum);
    same("strip: overlap is mentioned", Boolean(strip.querySelector(".note")), overlap >= 0.0005 * span);
}
async function checkPage() {
    const find = (id) => wanted.find((table) => table.id === id), section = document.getElementById("table-kernels");
    same("title", document.querySelector("h1").textContent, facts.rows[0][2]);
    same("facts", all("#facts dd").map((dd) => dd.textContent), facts.rows.slice(1).filter((row) => row[0] === "fact").map((row) => row[2]));
    same("tables", all("#tables > section h2").map((h2) => h2.textContent), wanted.map((table) => table.title));
    checkStrip(find("kinds"));
    await checkTimeline(find("kernels"), section);
    wanted.forEach((table, i) => checkTable(table, all("#tables > section")[i]));
    checkFilters(find("kernels"), section);
    checkRoofline(find("ops"));
    same("foreign elements", all("img, iframe, object, embed, link[href^=http], script[src]").length, 0);
    same("scripts", all("script").length, 5);
    same("requests", performance.getEntriesByType("resource").length, 0);
    check("no wider than the window", document.documentElement.scrollWidth <= innerWidth, document.documentElement.scrollWidth);
}
checkPage().catch((error) => found.push(error.stack)).finally(() => {
    const result = document.createElement("pre");
    result.id = "checks";
    result.textContent = JSON.stringify({ checks, found });
    document.body.replaceChildren(result);
});
})();
</script>"""


def table(name, columns, rows):
    pairs = [column.split(":") for column in columns.split()]
    types = {"n": "number", "t": "text"}
    return {"id": name, "title": name, "note": "", "columns": [[c, types[t]] for c, t in pairs], "rows": rows}


def a_step(layers, evil=""):
    """A step of `layers` layers: forward, backward, a sum of gradients on another stream, an update. `evil`: part of names,
    of a step in which nothing has flops."""
    rows, clock = [], 0.0
    work = {"matmul_forward": (40.0, 300.0, 3.0), "attention_forward": (25.0, 30.0, 2.0), "layernorm_forward": (9.0, 0.1, 0.6)}
    for direction in ("forward", "backward"):
        for layer in range(layers) if direction == "forward" else reversed(range(layers)):
            for op, (us, gflop, mbyte) in work.items():
                name = evil + op.replace("forward", direction)
                rows.append([direction, layer, name, f"N=64 tokens={us}1234567 sequences={us}7654321 NH=16", name + "_kernel", 7, clock, us, None if evil else gflop, mbyte])
                clock += us + 1.5
            if direction == "backward":
                rows.append(["communication", layer, "sum_gradients", "n=4096", "ring", 13, clock - 60, 50.0, None, 16.0])
    rows.append(["optimizer", None, None if evil else "adamw_update", "n=4096", "adamw_update_kernel", 7, clock, 12.0, None if evil else 0.1, 0.9])
    kernels = [[i] + row + [10 * (i % 11), None] for i, row in enumerate(rows)]
    names = dict.fromkeys((row[0], row[2]) for row in rows)
    ops = []
    for direction, op in names:
        of = [row for row in rows if row[2] == op]
        sums = [sum(row[i] or 0 for row in of) for i in (7, 8, 9)]
        ops.append([direction, op, of[0][3], sums[0] / 1e3, sums[1] or None, sums[2], sums[1] / sums[0] * 1e3 if sums[1] else None])
    facts = [["command", evil + "./train --profile 3"], ["GPU", evil + "one"], ["ranks", "2"]]
    numbers = {"span_ms": 2.4, "overlap_ms": 0 if evil else 0.1, "gap_host_ms": 0, "gap_stream_ms": 0.15, "gap_kernels_ms": 0.05 if not evil else -0.05,
               "peak_flops": 7.9e14, "peak_bytes": 4.2e12}
    return [
        table("summary", "kind:t name:t value:t", [["fact", *fact] for fact in facts] + [["number", name, str(value)] for name, value in numbers.items()]),
        table("kinds", "kind:t ms:n percent:n", [["matmul", 1.5, 62.5], ["memory-bound", 0.8, 33.3], ["host copy", 0, 0]]),
        table("layers", "layer:n ms:n", [[None, 0.1], [0, 1.0], [1, 1.0]]),
        table("ops", "direction:t op:t shapes:t ms:n gflop:n mbyte:n tflop_s:n", ops),
        table("kernels", "index:n direction:t layer:n op:t shapes:t kernel:t stream:n start_us:n us:n gflop:n mbyte:n "
              "roofline_percent:n grid:t", kernels),
        table("gaps", "start_us:n us:n cause:t", [] if evil else [[41.5, 1.5, "the host"]]),
    ]


def cases():
    yield "step", a_step(3)
    yield "large", a_step(571)
    yield "hostile", a_step(2, "</script><script>document.title = 1</script><!--<script><img src=x onerror=alert(1)>&amp;\"'`\u2028\u202e" + "a::very_long<name>" * 9)


def run(browser, name, page):
    """The page's failed checks, and how many passed."""
    head, body = page.index("<head>") + len("<head>"), page.rindex("</body>")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "page.html")
        with open(path, "w", encoding="utf-8") as f:
            f.write(page[:head] + LISTEN + page[head:body] + CHECK + page[body:])
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--enable-logging=stderr",
               "--user-data-dir=" + folder, "--virtual-time-budget=60000", "--dump-dom", "file://" + path]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
        except subprocess.TimeoutExpired:
            return [f"{name}: the browser did not end in 300 s"], 0
    result = re.search(r'<pre id="checks">(.*?)</pre>', done.stdout.decode("utf-8", "replace"), re.S)
    failed = [f"{name}: console: {line}" for line in done.stderr.decode("utf-8", "replace").splitlines() if "CONSOLE" in line]
    if not result:
        return failed + [f"{name}: the checks did not end (browser's status {done.returncode})"], 0
    result = json.loads(html.unescape(result.group(1)))
    failed += [f"{name}: {message}" for message in result["found"]]
    failed += [f"{name}: {what}: {detail}" for what, good, detail in result["checks"] if not good]
    return failed, sum(good for _, good, _ in result["checks"])


def main(paths):
    browsers = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    browser = next(filter(None, (shutil.which(name) for name in browsers if name)), None)
    if not browser:
        print("skip page: no Chromium found (CHROMIUM=PATH names one)\n0 passed, 0 failed, 1 skipped")
        return 0
    template = "".join(open(path, encoding="utf-8").read() for path in TEMPLATE)
    pages = [(path, open(path, encoding="utf-8").read()) for path in paths]
    pages += [(name, template.replace(MARKER, json.dumps(data).replace("<", "\\u003c"))) for name, data in cases()]
    passed, failed = 0, 0
    for name, page in pages:
        wrong, good = run(browser, name, page)
        for line in wrong[:10]:
            print("FAIL page", line)
        if not wrong:
            print(f"ok   page {name}: {good} checks")
        passed, failed = passed + good, failed + len(wrong)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
