"""The pages as the site renders them: no formula became emphasis, and the site's scripts can read every anchor."""

import re
from html.parser import HTMLParser
from pathlib import Path

import markdown
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("packages/*/*.md"),
    *ROOT.glob("examples/*/*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# the extensions that mkdocs always uses
EXTENSIONS = ["toc", "tables", "fenced_code"]


class Rendered(HTMLParser):
    """Collects a page's emphasised texts, its anchors, and its text outside code with `\\0` where emphasis begins or ends."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.emphasised, self.anchors, self.prose = [], [], ""
        self.feed(markdown.markdown(text, extensions=EXTENSIONS))

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.anchors += [value for key, value in attrs if key == "id"]
        if tag in ("em", "strong"):
            self.prose += "\0"
        if tag == "em":
            self.emphasised.append("")

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            pass
        if tag in ("em", "strong"):
            self.prose += "\0"

    def handle_data(self, data):
        self.prose += " " if "code" in self.open else data
        if "em" in self.open:
            self.emphasised[-1] += data


def broken_formulas(text):
    """Return broken formulas: a range or a number in emphasis, emphasis inside a word, or a `*` that a second one would turn into emphasis."""
    page = Rendered(text)
    return [found for found in page.emphasised if re.search(r"\.\.|\d", found)] + re.findall(r"\S*[\w)\]][\0*][\w(]\S*", page.prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_formula_of_a_page_became_emphasis(page):
    assert broken_formulas(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text", ["tokens i*d .. i*d + l - 1", "a product a*b, another c*d", "the rows *1 to 3*", "one product d*u", "2**n and 2**m"]
)
def test_a_formula_outside_code_is_found(text):
    assert broken_formulas(text) != []


@pytest.mark.parametrize("text", ["tokens `i*d .. i*d + l - 1`", "*all* of them", "- **Time.** By the clock", "n * l' tokens, S * n"])
def test_code_and_emphasised_words_pass(text):
    assert broken_formulas(text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_anchor_of_a_page_begins_with_a_digit(page):
    # the site's scripts use `#anchor` as a CSS selector; an invalid one is an error that disables the search
    assert [anchor for anchor in Rendered(page.read_text(encoding="utf-8")).anchors if anchor[0].isdigit()] == []
