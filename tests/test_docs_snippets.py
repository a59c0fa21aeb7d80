"""The pages are true: their Python runs, their links lead somewhere, the files and names that they speak of exist."""

import importlib
import re
from pathlib import Path

import attrs
import pytest
import torch

import nsa_core

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "packages/nsa-core/README.md", *sorted(DOCS.rglob("*.md"))]

# a block is left out only by a comment on the line above it that says why: <!-- not run: it needs a GPU -->
SNIPPET = re.compile(r"^(?P<skip><!-- not run: [^\n]+ -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
REPOSITORY_PATH = re.compile(r"`((?:packages|docs|tools|tests|examples)/[\w./-]+)`")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def snippets(page):
    """Return the blocks of `page` to run, each with blank lines before it so that a traceback names the page's line."""
    text = page.read_text(encoding="utf-8")
    found = [match for match in SNIPPET.finditer(text) if not match["skip"]]
    return ["\n" * text.count("\n", 0, match.start("code")) + match["code"] for match in found]


def code_of(page):
    """Return what stands in code on `page`: fenced blocks and inline code."""
    text = page.read_text(encoding="utf-8")
    return "\n".join([match[0] for match in FENCED.finditer(text)] + re.findall(r"`([^`\n]+)`", FENCED.sub("", text)))


@pytest.fixture
def one_thread():
    # the examples are small: several threads would only wait for one another, long on a busy machine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=name_of)
def test_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "snippet"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for snippet in snippets(page):
            exec(compile(snippet, str(page), "exec"), namespace)


def test_every_python_block_stands_where_it_is_found():
    # an indented or differently marked block would be silently left out
    for page in PAGES:
        marks = re.findall(r"^ *(?:```|~~~) *\{?\.?(?:python|py)\b.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(marks) == len(SNIPPET.findall(page.read_text(encoding="utf-8"))), name_of(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_to_files(page):
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = [link.partition("#")[0] for link in LINK.findall(prose) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).is_file()] == []
    if page.is_relative_to(DOCS):
        # the site holds docs/ alone
        assert [target for target in targets if target and not (page.parent / target).resolve().is_relative_to(DOCS)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_repository_paths_of_a_page_exist(page):
    named = REPOSITORY_PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_page_of_docs_is_linked_from_another():
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in link
    }
    assert [name_of(page) for page in PAGES if page.is_relative_to(DOCS) and page not in linked] == []


def test_reference_lists_every_public_name_of_nsa_core():
    words = re.findall(r"`([^`]+)`", (DOCS / "reference/nsa-core.md").read_text(encoding="utf-8"))
    listed = {word.removeprefix("nsa_core.").partition("(")[0] for word in words}
    assert set(nsa_core.__all__) - listed == set()
    assert [name for name in nsa_core.__all__ if not hasattr(nsa_core, name)] == []


@pytest.mark.parametrize("package", ["nsa-train", "nsa-bench"])
def test_pages_name_commands_that_exist(package):
    commands = set(importlib.import_module(f"{package.replace('-', '_')}.cli").app)
    named = {found for page in PAGES for found in re.findall(rf"^(?:.*\s)?{package} ([a-z][a-z-]*)", code_of(page), re.MULTILINE)}
    assert named - commands == set()


def test_reference_lists_every_command_and_key_of_nsa_train():
    page = (DOCS / "reference/nsa-train.md").read_text(encoding="utf-8")
    app = importlib.import_module("nsa_train.cli").app
    assert [command for command in app if not command.startswith("-") and f"`nsa-train {command} " not in page] == []
    tables = importlib.import_module("nsa_train.config").TABLES
    sections = dict(re.findall(r"^\| table `(\w+)` \|(.*?)(?=^\| table|^#)", page, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(tables)
    for name, table in tables.items():
        rows = re.findall(r"^\| (`.*?`) \|", sections[name], re.MULTILINE)
        assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == {item.name for item in attrs.fields(table)}, name
