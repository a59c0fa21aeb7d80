"""tools/check_pages.py: its findings in pages with planted faults, and its messages if it cannot look."""

import shutil
import sys

import pytest

from tools import check_pages

PROGRAM = next(filter(None, map(shutil.which, check_pages.NAMES)), None)
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on PATH: nothing was looked at (apt install chromium)")

PAGE = """<!doctype html><html><head><meta charset="utf-8"><link rel="icon" href="data:,">
<style>body {{ margin: 0 }} .menu {{ display: none; position: absolute }} .menu.show {{ display: block }}</style></head>
<body><div>{body}</div><script>
document.querySelectorAll("[data-bs-toggle]").forEach((b) => b.onclick = () => b.nextElementSibling.classList.toggle("show"))
</script></body></html>"""
MENU = '<a data-bs-toggle="dropdown">Menu</a><div class="menu" style="{style}">{entries}</div>'
ENTRIES = "<p>entry</p>" * 60
WIDE = '<div style="width: 1500px">wide</div>'

FAULTS = {
    "wide": (WIDE, ["page wider than the screen", "wider than the screen"]),
    "left": ('<p style="position: absolute; left: -50px">left</p>', ["wider than the screen"]),
    "cut": (f'<div style="overflow: hidden">{WIDE}</div>', ["cut off", "wider than the screen"]),
    "range": ("<p>tokens i<em>d .. i</em>d + l - 1</p>", ["a formula became emphasis"]),
    "digit": ("<p>a <em>2 b</em> c</p>", ["a formula became emphasis"]),
    "word": ("<p>a<strong>b, c</strong>d</p>", ["a formula became emphasis"]),
    "sideways": (MENU.format(style="width: 20rem; left: 90vw", entries="entry"), ["a menu off the screen"]),
    "downwards": (MENU.format(style="", entries=ENTRIES), ["a menu off the screen"]),
    "closed": (MENU.format(style="display: none !important", entries=""), ["a menu that does not open"]),
    "sticky": (f'<div style="position: sticky; top: 0">{ENTRIES}</div>', ["taller than the screen and fixed to it"]),
    "thrown": ("<script>nothing.at.all</script>", ["error on the console"]),
    "said": ("<script>console.error('a fault')</script>", ["error on the console"]),
    "missing": ('<script src="nowhere.js"></script>', ["error on the console"]),
}
SOUND = {
    "plain": "<p>one, <em>two</em>, <strong>3 .. 4</strong></p>",
    "scrolls": f'<div style="overflow-x: auto">{WIDE}</div>',
    "menu": MENU.format(style="max-height: 50vh; overflow-y: auto", entries=ENTRIES),
}
# a table may scroll on a phone, but not on a wide screen
TABLE = f'<table style="display: block; overflow-x: auto"><tr><td>{WIDE}</td></tr></table>'

# answers as Chromium does over the pipe: every command with a result, the check's own with two findings
FAKE = """#!{python}
import json, os
rest = b""
def say(**message): os.write(4, json.dumps(message).encode() + b"\\0")
while chunk := os.read(3, 65536):
    *whole, rest = (rest + chunk).split(b"\\0")
    for message in map(json.loads, whole):
        result = dict(targetId="t", sessionId="s")
        if message["method"] == "Page.navigate":
            say(method="Page.loadEventFired")
        if message["method"] == "Runtime.evaluate":
            result = dict(result=dict(value=[["wider than the screen", "<table>"]]))
            say(method="Runtime.exceptionThrown", params=dict(exceptionDetails=dict(text="Uncaught")))
        say(id=message["id"], result=result)
"""


@pytest.fixture
def site(tmp_path):
    """Return a folder with a page at the top and one below."""
    for name in ("index.html", "adr/0001/index.html"):
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True)
        path.write_text(PAGE.format(body="<p>words</p>"))
    return tmp_path / "site"


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a program instead of Chromium."""

    def write(source):
        path = tmp_path / "browser"
        path.write_text(source)
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture(scope="module")
def rules_found(tmp_path_factory):
    """Check every planted fault and every sound page with Chromium, once; return the broken rules by page and width."""
    folder = tmp_path_factory.mktemp("site")
    for name, body in {**{name: body for name, (body, _) in FAULTS.items()}, **SOUND, "table": TABLE}.items():
        (folder / f"{name}.html").write_text(PAGE.format(body=body))
    found = {}
    for finding in check_pages.check_site(PROGRAM, folder):
        found.setdefault((finding.page.removesuffix(".html"), finding.size[0]), []).append(finding.rule)
    return found


@needs_chromium
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("width", [1200, 400])
def test_a_planted_fault_is_found_at_every_size(rules_found, name, width):
    assert sorted(rules_found.get((name, width), [])) == FAULTS[name][1]


@needs_chromium
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_page_passes(rules_found, name):
    assert [rules_found.get((name, width)) for width in (1200, 400)] == [None, None]


@needs_chromium
def test_a_table_may_scroll_on_a_phone_only(rules_found):
    assert rules_found.get(("table", 1200)) == ["a table that scrolls on a wide screen"]
    assert rules_found.get(("table", 400)) is None


def test_a_finding_names_page_size_rule_and_element(site, program, capsys):
    assert check_pages.main([str(site), "--chromium", program(FAKE.format(python=sys.executable))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "adr/0001/index.html at 1200 x 800: wider than the screen: <table>"
    assert lines[1] == "adr/0001/index.html at 1200 x 800: error on the console: Uncaught"
    assert lines[-1].startswith("2 pages at 1200 and 400 pixels in ")
    assert lines[-1].endswith(": 8 findings")


def test_without_chromium_it_says_so_and_exits_with_2(site, monkeypatch, capsys):
    monkeypatch.setattr(check_pages, "NAMES", ("no-such-browser",))
    assert check_pages.main([str(site)]) == 2
    assert "no Chromium on PATH (looked for no-such-browser); install one" in capsys.readouterr().out


def test_without_pages_it_names_the_command_that_builds_them(tmp_path, capsys):
    assert check_pages.main([str(tmp_path), "--chromium", "/bin/true"]) == 2
    assert "holds no pages; build them first: python3 tools/hatch.py run docs:build" in capsys.readouterr().out


def test_a_browser_that_ends_is_reported_with_its_last_words(site, program, capsys):
    assert check_pages.main([str(site), "--chromium", program("#!/bin/sh\necho no display >&2\nexit 7\n")]) == 2
    assert "Chromium ended with exit code 7; it said: no display" in capsys.readouterr().out


def test_a_browser_that_hangs_is_given_up(site, program, monkeypatch, capsys):
    monkeypatch.setattr(check_pages, "ANSWER_S", 0.2)
    assert check_pages.main([str(site), "--chromium", program("#!/bin/sh\nexec sleep 60\n")]) == 2
    assert "Chromium has not answered for 0 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("event", "errors"),
    [
        ({"method": "Log.entryAdded", "params": {"entry": {"level": "error", "text": "404", "url": "/a.js"}}}, ["404 /a.js"]),
        ({"method": "Log.entryAdded", "params": {"entry": {"level": "warning", "text": "slow"}}}, []),
        ({"method": "Runtime.consoleAPICalled", "params": {"type": "error", "args": [{"value": "a"}, {"description": "b"}]}}, ["a b"]),
        ({"method": "Runtime.consoleAPICalled", "params": {"type": "log", "args": [{"value": "a"}]}}, []),
        ({"method": "Page.loadEventFired", "params": {}}, []),
    ],
)
def test_only_errors_of_the_console_count(event, errors):
    assert list(check_pages.console_errors([event])) == errors
