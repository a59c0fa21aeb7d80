"""Check the built site in headless Chromium: `python tools/check_pages.py [SITE]`, after `hatch run docs:build`.

Every page at every size of SIZES: nothing is wider than the screen or cut off, no formula became emphasis, the console has no
error, and every opened menu is on the screen. Exit codes: 0 no findings, 1 findings (one line each), 2 no Chromium or no site.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "site"
LOOK = Path(__file__).with_name("check_pages.js")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# a small laptop's window, and a phone
SIZES = ((1200, 800), (400, 800))
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
ANSWER_S = 60.0


class BrowserError(Exception):
    """Chromium cannot be started or does not answer; the message says what to do."""


class Finding(NamedTuple):
    """A fault of one page at one size."""

    page: str
    size: tuple[int, int]
    rule: str
    element: str

    def __str__(self) -> str:
        return f"{self.page} at {self.size[0]} x {self.size[1]}: {self.rule}: {self.element}"


class Browser:
    """A headless Chromium with one tab, driven over its debugging pipe: JSON messages, each ended by a zero byte."""

    def __init__(self, program: str, profile: Path) -> None:
        self.errors = profile / "stderr.txt"
        # Chromium reads commands from descriptor 3 and answers on 4, which only a shell can set without a hook in the child
        command = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >&2', "sh", program, *FLAGS, f"--user-data-dir={profile / 'profile'}"]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.events: list[dict[str, Any]] = []
        self.sent = 0
        self.session: str | None = None
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def open_tab(self) -> None:
        """Open the tab for the following commands."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _listen(self) -> None:
        """Put every message of the browser into `messages`, and None when it has ended."""
        assert self.process.stdout is not None
        rest = b""
        while chunk := os.read(self.process.stdout.fileno(), 65536):
            *whole, rest = (rest + chunk).split(b"\0")
            for message in whole:
                self.messages.put(json.loads(message))
        self.messages.put(None)

    def _receive(self) -> dict[str, Any]:
        try:
            message = self.messages.get(timeout=ANSWER_S)
        except queue.Empty:
            raise BrowserError(f"Chromium has not answered for {ANSWER_S:.0f} s; end other work on this machine, or try again") from None
        if message is None:
            said = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise BrowserError(f"Chromium ended with exit code {self.process.wait()}; it said: {' / '.join(said[-3:]) or 'nothing'}")
        return message

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of one command; events that come before it are kept in `events`."""
        assert self.process.stdin is not None
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\0")
            self.process.stdin.flush()
        while (answer := self._receive()).get("id") != self.sent:
            self.events.append(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message')}")
        return dict(answer["result"])

    def open(self, url: str, size: tuple[int, int]) -> None:
        """Load `url` in a window of `size` and wait until it is complete."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
        problem = self.call("Page.navigate", url=url).get("errorText")
        if problem:
            raise BrowserError(f"{url} cannot be opened ({problem})")
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, after awaiting promises."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"the check itself failed in the page: {described(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def close(self) -> None:
        """End the browser."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.listener.join()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def described(details: dict[str, Any]) -> str:
    """Return the text of an exception that the protocol reports."""
    return str(details.get("exception", {}).get("description") or details.get("text"))


def console_errors(events: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the errors among a page's events: exceptions, console.error, and files that could not be loaded."""
    for event in events:
        params = event.get("params", {})
        match event["method"]:
            case "Runtime.exceptionThrown":
                yield described(params["exceptionDetails"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                yield " ".join(str(value.get("value", value.get("description"))) for value in params["args"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                yield f"{params['entry']['text']} {params['entry'].get('url', '')}".rstrip()


def check(browser: Browser, page: str, url: str, size: tuple[int, int]) -> Iterator[Finding]:
    """Yield the faults of the page at `url`, named `page`, in a window of `size`."""
    browser.open(url, size)
    for rule, element in browser.evaluate(LOOK.read_text(encoding="utf-8")):
        yield Finding(page, size, rule, element)
    for error in console_errors(browser.events):
        yield Finding(page, size, "error on the console", error)


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and keeps no log."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Do nothing."""


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve `site` on this machine's loopback address, as links that end in a folder need it; yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def pages_of(site: Path) -> list[str]:
    """Return the pages of a built site as paths below it, sorted."""
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))


def check_site(program: str, site: Path, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Finding]:
    """Return the faults of the pages of `site`, by page and size.

    Raises: BrowserError if `program` is not Chromium, or ends early.
    """
    # an ending browser may still write into its profile
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, served(site) as address:
        browser = Browser(program, Path(folder))
        try:
            browser.open_tab()
            return [finding for page in pages_of(site) for size in sizes for finding in check(browser, page, f"{address}/{page}", size)]
        finally:
            browser.close()


def main(arguments: list[str]) -> int:
    """Print every finding on a line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", nargs="?", type=Path, default=SITE, help="the built pages; site/ of this checkout unless given")
    parser.add_argument("--chromium", help="the browser's program; the first of its usual names on PATH unless given")
    options = parser.parse_args(arguments)
    program = options.chromium or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print(f"check_pages.py: no Chromium on PATH (looked for {', '.join(NAMES)}); install one, for example: apt install chromium")
        return 2
    pages = pages_of(options.site)
    if not pages:
        print(f"check_pages.py: {options.site} holds no pages; build them first: python3 tools/hatch.py run docs:build")
        return 2
    began = time.monotonic()
    try:
        findings = check_site(program, options.site)
    except (BrowserError, OSError) as error:
        print(f"check_pages.py: {error}")
        return 2
    print(*findings, sep="\n", end="\n" if findings else "")
    sizes = " and ".join(str(width) for width, _ in SIZES)
    print(f"{len(pages)} pages at {sizes} pixels in {time.monotonic() - began:.0f} s: {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
