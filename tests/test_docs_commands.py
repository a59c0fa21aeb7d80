"""The commands that pages and plans show are ones that `nsa-train` and `nsa-bench` accept."""

import re
import shlex
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from nsa_bench.cli import app as bench
from nsa_train.cli import app as train
from nsa_train.cli import with_steps

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PLANS = sorted(ROOT.glob("docs/evidence/**/*.toml"))
FENCED = re.compile(r"^( *)```\w*\n(?P<body>.*?)^\1```$", re.MULTILINE | re.DOTALL)
OF_A_PLAN = re.compile(r"^# +(nsa-.*)$", re.MULTILINE)


def commands_in(path: Path) -> list[str]:
    """Return the command lines of a page's fenced blocks, or of a plan's comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return OF_A_PLAN.findall(text)
    lines = [line.strip() for block in FENCED.finditer(text) for line in block["body"].replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"nsa-(train|bench) ", line)]


FOUND = {path.relative_to(ROOT).as_posix(): found for path in (*PAGES, *PLANS) if (found := commands_in(path))}


def is_shown_whole(words: list[str]) -> bool:
    """Return False for a line that leaves something out, as a reader sees."""
    return "..." not in words


@pytest.mark.parametrize("page", FOUND)
def test_the_commands_of_a_page_are_accepted(page: str) -> None:
    refused = []
    for line in FOUND[page]:
        name, *words = shlex.split(line.partition(" | ")[0], comments=True)
        app = {"nsa-train": train, "nsa-bench": bench}[name]
        try:
            if is_shown_whole(words):
                app.parse_args(with_steps(words) if app is train else words, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            refused.append(f"{line}: {error}")
    assert refused == []


def test_commands_are_found_in_pages_and_in_plans() -> None:
    assert len(FOUND) > 20
    assert "docs/evidence/conversion/needle.toml" in FOUND
    assert sum(map(len, FOUND.values())) > 80
