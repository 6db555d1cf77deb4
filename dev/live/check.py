#!/usr/bin/env python3
"""Test the page in which GPT-2 trains (docs/live/index.html): clicked through in headless Chromium, and in Firefox.

    dev/live/check.py TRAIN_GPT2          from the repository's root, for example ./train_gpt2, with use_gpt2 beside

The page's losses are those of dev/ladder/gpt2_in_one_file.c, its look inside is that of `use_gpt2 --explain`, and the
model that it saves says in use_gpt2 what it says in the page. Any output on the console and any request is a failure.
Skips a browser that is not installed; CHROMIUM and FIREFOX name one outside the PATH. SCREENSHOTS: a folder for
pictures of the page, to be looked at.
"""
import base64
import concurrent.futures
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "test"))
from verdicts import ROOT, equal, failure, finish, holds, read, run, skip, verdict  # noqa: E402

PAGE, SHOTS = f"file://{ROOT}/docs/live/index.html", os.environ.get("SCREENSHOTS")
TEXT = "Anna takes the ball. Who has the ball?"
NUMBER = "Number(document.querySelector('#facts div:nth-child(2) dd')?.textContent ?? 9)"
IS_DONE = "document.querySelector('#facts dd')?.textContent.match(/^(\\d+) of \\1$/)?.length === 2"
work = tempfile.TemporaryDirectory()
W = work.name


class Chromium:
    """The DevTools protocol over two pipes: JSON with a zero behind each message."""

    def __init__(self, program):
        (child_in, self.out), (self.into, child_out) = os.pipe(), os.pipe()
        self.number, self.events, self.rest = 0, [], b""

        def pipes():
            # Moved out of the way first: one may be 3 or 4 already.
            copies = os.dup2(child_in, 60), os.dup2(child_out, 61)
            os.dup2(copies[0], 3), os.dup2(copies[1], 4)

        flags = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={W}/chromium"
        self.process = subprocess.Popen([program, *flags.split()], preexec_fn=pipes, close_fds=False,
                                        stderr=subprocess.DEVNULL)  # fmt: skip
        os.close(child_in), os.close(child_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{name}.enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=W)

    def call(self, method, **arguments):
        self.number += 1
        message = {"id": self.number, "method": method, "params": arguments}
        if hasattr(self, "session") and not method.startswith("Browser."):
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.into, 1 << 20) or sys.exit("FAIL: the browser has ended")
            text, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self.number:
                return answer["result"]
            self.events.append(answer)

    def open(self, url):
        self.call("Page.navigate", url=url)

    def evaluate(self, script):
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return done["result"].get("value", done.get("exceptionDetails"))

    def complaints(self):
        """What is on the console, and what is fetched besides the page itself."""
        self.evaluate("0")
        by_kind = {}
        for event in self.events:
            by_kind.setdefault(event["method"], []).append(event["params"])
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        urls = [e["request"]["url"] for e in by_kind.get("Network.requestWillBeSent", [])]
        return [json.dumps(e)[:300] for kind in kinds for e in by_kind.get(kind, [])] + [
            url for url in urls if url != PAGE and not url.startswith(("blob:", "about:", "data:"))]  # fmt: skip

    def picture(self, name, width, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(1)
        whole = self.evaluate("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": min(whole, 6000), "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        with open(f"{SHOTS}/{name}_{width}_{scheme}.png", "wb") as f:
            f.write(base64.b64decode(shot))

    def close(self):
        self.process.terminate()
        self.process.wait()


class Firefox:
    """The Marionette protocol: the length of a message, a colon, and JSON."""

    def __init__(self, program):
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        os.makedirs(f"{W}/firefox")
        with open(f"{W}/firefox/user.js", "w") as f:
            f.write(f'user_pref("marionette.port", {port});\n')
        self.process = subprocess.Popen([program, "--headless", "--marionette", "--profile", f"{W}/firefox"],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        for _ in range(600):
            time.sleep(0.1)
            if socket.socket().connect_ex(("localhost", port)) == 0:
                break
        self.socket, self.number = socket.create_connection(("localhost", port)), 0
        self.receive()
        self.call("WebDriver:NewSession")

    def receive(self):
        length = b""
        while not length.endswith(b":"):
            length += self.socket.recv(1)
        text = b""
        while len(text) < int(length[:-1]):
            text += self.socket.recv(1 << 16)
        return json.loads(text)

    def call(self, method, **arguments):
        self.number += 1
        text = json.dumps([0, self.number, method, arguments]).encode()
        self.socket.sendall(b"%d:%s" % (len(text), text))
        return self.receive()[3]

    def open(self, url):
        self.call("WebDriver:Navigate", url=url)

    def evaluate(self, script):
        # As an element of the page: a script of the driver does not see the page's constants.
        return self.call("WebDriver:ExecuteScript", script=f"return {script}", args=[], sandbox=None)["value"]

    def close(self):
        self.call("Marionette:Quit", flags=["eForceQuit"])
        self.process.wait()


def wait(browser, script, seconds=240):
    """Whether it becomes true."""
    until = time.time() + seconds
    while time.time() < until:
        if browser.evaluate(script) is True:
            return True
        time.sleep(0.2)
    return False


def train(browser, name):
    """Open the page, click, and wait for the end of 300 steps."""
    browser.open(PAGE)
    holds(f"{name}: the stories are written", wait(browser, "document.querySelector('#train')?.disabled === false"),
          browser.evaluate("document.querySelector('#error')?.textContent"))  # fmt: skip
    browser.evaluate("document.querySelector('#train').click()")
    done = wait(browser, IS_DONE)
    loss = browser.evaluate(NUMBER)
    holds(f"{name}: 300 steps from a click, to a loss below 0.7", done and loss < 0.7, f"a loss of {loss}")


def native():
    """The same training without a browser and without fast math: its losses, and steps a second."""
    program, source = W + "/one_file", ROOT + "/dev/ladder/gpt2_in_one_file.c"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    verdict("the native program", failure(run(*compiler, "-O2", "-ffp-contract=off", source, "-lm", "-o", program)))
    start = time.time()
    done = run(program, "300")
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)], 300 / (time.time() - start)


def check_numbers(browser, theirs, rate):
    """Losses and speed beside those of the native program, which ran at the same time."""
    ours = browser.evaluate("losses")
    most = max((abs(a - b) for a, b in zip(ours[:50], theirs[:50])), default=9)
    holds("losses of 50 steps", len(ours) == len(theirs) == 300 and most <= 1e-6, f"they differ by {most}")
    page = browser.evaluate("latest.done / latest.seconds")
    holds(f"steps a second: {page:.1f}, of the native program {rate:.1f}", page >= 0.65 * rate)


def check_controls(browser):
    """Another seed and size; a pause holds, a step is one."""
    first = browser.evaluate("losses[0]")
    browser.evaluate("document.querySelector('#seed').value = 5, document.querySelector('#C').value = 32,"
                     "document.querySelector('#train').click()")  # fmt: skip
    started = wait(browser, "latest?.done > 5 && latest.done < 300")
    holds("another seed and size", started and browser.evaluate("losses[0]") != first, browser.evaluate("latest?.done"))
    browser.evaluate("document.querySelector('#pause').click()")
    time.sleep(1)
    paused = browser.evaluate("latest.done")
    time.sleep(1)
    browser.evaluate("document.querySelector('#slowly').click()")
    holds("a pause, and one step", wait(browser, f"latest.done === {paused + 1}", 10), browser.evaluate("latest.done"))
    holds("the step's functions are marked", wait(browser, "document.querySelector('#source .now') !== null", 10))
    browser.evaluate("document.querySelector('#pause').click()")
    holds("it goes on to its end", wait(browser, IS_DONE), browser.evaluate("latest.done"))


def look(browser, name):
    """The data of the look inside a typed text, and what the page says of it."""
    browser.evaluate(f"document.querySelector('#text').value = '{TEXT}'")
    browser.evaluate("document.querySelector('#look').click()")
    inside = "document.querySelector('iframe').contentDocument"
    shown = wait(browser, f"{inside}?.querySelectorAll('#text .token').length > 9", 20)
    maps = browser.evaluate(f"{inside}?.querySelectorAll('canvas').length")
    holds(f"{name}: views of a typed text", shown and maps > 20, maps)
    browser.evaluate(f"{inside}.querySelector('nav a').click()")
    return (browser.evaluate(f"JSON.parse({inside}.querySelector('#data').textContent)"),
            browser.evaluate("document.querySelector('#continued').textContent"))  # fmt: skip


def check_look(browser):
    """The look inside is that of use_gpt2, which reads the model that the page saves."""
    data, shown = look(browser, "Chromium")
    browser.evaluate("document.querySelector('#save').click()")
    path = W + "/gpt2_live.zip"
    for _ in range(100):
        if os.path.exists(path):
            break
        time.sleep(0.1)
    with zipfile.ZipFile(path) as z:
        holds("the .zip file", z.testzip() is None)
        z.extractall(W)
    use = sys.argv[1].replace("train_", "use_"), "-e", W + "/gpt2_live"
    prompt = "<|endoftext|>" + TEXT
    done = run(*use, "--generate", 64 - data["T"], "--temperature", "0", "--prompt", prompt)
    said = done.stdout.strip().removeprefix("<|endoftext|>").split("<|endoftext|>")[0].strip()
    holds("the same greedy text in use_gpt2", said and shown.endswith(": " + said), f"{said!r}, {shown!r}", done)
    done = run(*use, "-o", W, "--explain", prompt)
    theirs = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>',
                                  read(W + "/explain/explain.html"), re.S)[1])  # fmt: skip
    verdict("use_gpt2 --explain", failure(done))
    for name in "tokens targets predicted vocabulary L NH C V T parameter_count top lens_id".split():
        equal(f"inside: {name}", data[name], theirs[name])
    norms = lambda page: {p["name"]: p["grad_norm"] for p in page["parameters"]}
    near = lambda a, b: abs(a - b) <= 1e-4 * abs(b)
    ours, others = norms(data), norms(theirs)
    is_near = near(data["loss"], theirs["loss"]) and all(near(norm, others[name]) for name, norm in ours.items())
    holds("inside: loss and gradients", is_near and ours.keys() == others.keys(), f"{ours}, not {others}")
    equal("inside: attention", near_bytes(data["attention"]["layers"], theirs["attention"]["layers"]), True)


def near_bytes(ours, theirs):
    """Whether maps of 8 bits differ by rounding only."""
    pairs = [pair for a, b in zip(ours, theirs) for pair in zip(base64.b64decode(a), base64.b64decode(b), strict=True)]
    return len(ours) == len(theirs) and all(abs(a - b) <= 1 for a, b in pairs)


def found(variable, *names):
    return next(filter(None, (shutil.which(name) for name in (os.environ.get(variable, ""), *names) if name)), None)


chromium = found("CHROMIUM", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
firefox = found("FIREFOX", "firefox", "firefox-esr")
verdict("the page is that of the sources", failure(run(sys.executable, ROOT + "/dev/live/build.py", "--check")))
if chromium:
    browser = Chromium(chromium)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = pool.submit(native)
        train(browser, "Chromium")
        check_numbers(browser, *started.result())
    check_look(browser)
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")) if SHOTS else ():
        browser.picture("live", width, scheme)
    check_controls(browser)
    verdict("no console output, no request", "\n".join(browser.complaints()[:5]))
    browser.close()
else:
    skip("Chromium", "no Chromium found (CHROMIUM=PATH names one)")
if firefox:
    browser = Firefox(firefox)
    train(browser, "Firefox")
    look(browser, "Firefox")
    browser.close()
else:
    skip("Firefox", "no Firefox found (FIREFOX=PATH names one)")
finish()
