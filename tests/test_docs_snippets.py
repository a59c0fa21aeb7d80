"""The pages are right: their Python runs and prints the shown output, their links resolve, and the names in them exist."""

import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from cyclopts import CycloptsError

import nsa_core
from nsa_core import CacheOptions

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    ROOT / "examples/plugin-minimal/README.md",
    *sorted(DOCS.rglob("*.md")),
]

# a block is left out only by a comment on the line above it that says why: <!-- not run: it needs a GPU -->
SNIPPET = re.compile(r"^(?P<skip><!-- not run: [^\n]+ -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
# a snippet's output is in comments after its `print(...)`, or in a block of text after it and at most one paragraph
COMMENT = re.compile(r"^ *print\(.*\) +# (.*)$", re.MULTILINE)
OUTPUT = re.compile(r"\n+(?:(?!```|#)[^\n]+\n)*\n*```text\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
OF_A_PLAN = re.compile(r"^# +(nsa-(?:train|bench) .*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
REPOSITORY_PATH = re.compile(r"`((?:packages|docs|tools|tests|examples)/[\w./-]+)`")
NOT_RELEASED = re.compile(r"pip install[^`\n#]*[ '\"]nsa-[\w-]+")

# runs the snippets of every page named on stdin, each page from top to bottom, and returns the output of each snippet
PROGRAM = """
import contextlib, io, json, os, sys, tempfile, traceback, warnings
import torch

warnings.simplefilter("error")
# the examples are small: several threads would only wait for one another, long on a busy machine
torch.set_num_threads(1)
printed = {}
for page, codes in json.load(sys.stdin).items():
    namespace, printed[page] = {"__name__": "snippet"}, []
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for code in codes:
            output = io.StringIO()
            try:
                with contextlib.redirect_stdout(output):
                    exec(compile(code, page, "exec"), namespace)
            except Exception:
                output.write(traceback.format_exc())
            printed[page].append(output.getvalue())
json.dump(printed, sys.stdout)
"""


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def snippets(page):
    """Return the blocks of `page` to run, each with blank lines before it so that a traceback names the page's line."""
    text = page.read_text(encoding="utf-8")
    found = [match for match in SNIPPET.finditer(text) if not match["skip"]]
    return ["\n" * text.count("\n", 0, match.start("code")) + match["code"] for match in found]


def shown(text):
    """Return the shown output of each block of Python of the page `text`, also of blocks that are not run."""
    outputs = [OUTPUT.match(text, match.end()) for match in SNIPPET.finditer(text)]
    comments = ["".join(f"{line}\n" for line in COMMENT.findall(match["code"])) for match in SNIPPET.finditer(text)]
    return [comment + (output["text"] if output else "") for comment, output in zip(comments, outputs, strict=True)]


def shown_by_snippets(page):
    """Return the shown output of each block of `page` to run."""
    text = page.read_text(encoding="utf-8")
    return [output for output, match in zip(shown(text), SNIPPET.finditer(text), strict=True) if not match["skip"]]


def is_as_shown(expected, printed):
    """Return whether a page shows the printed output: `...` matches anything, and a line may be broken at a space."""
    return doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def code_of(page):
    """Return the code on `page`: fenced blocks and inline code."""
    text = page.read_text(encoding="utf-8")
    return "\n".join([match[0] for match in FENCED.finditer(text)] + re.findall(r"`([^`\n]+)`", FENCED.sub("", text)))


def fresh_python(*arguments, path=(), **options):
    """Run Python as a reader starts it, with `path` among its packages, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def printed():
    """Run the Python of all pages in one fresh process; return the output of each snippet, by page."""
    codes = {name_of(page): snippets(page) for page in PAGES}
    return json.loads(fresh_python("-c", PROGRAM, input=json.dumps(codes)))


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=name_of)
def test_python_of_a_page_runs_and_prints_what_the_page_shows(page, printed):
    pairs = zip(shown_by_snippets(page), printed[name_of(page)], strict=True)
    assert [(expected, found) for expected, found in pairs if not is_as_shown(expected, found)] == []


@pytest.mark.parametrize(
    ("page", "output"),
    [
        ("```python\nprint(1)     # 1\nprint(2)  # 2\n```\n", "1\n2\n"),
        ("```python\nprint(1)\n```\n\nIn words this prints\n\n```text\n1\n```\n", "1\n"),
        ("```python\nprint(1)\n```\n\nA paragraph.\n\nAnother.\n\n```text\n1\n```\n", ""),
        ("```python\nprint(1)\n```\n\n## A heading\n\n```text\n1\n```\n", ""),
        ("```python\nx = 1     # 1\n```\n\n```\n1\n```\n", ""),
    ],
)
def test_an_output_is_shown_by_a_comment_or_by_the_next_block_of_text(page, output):
    assert shown(page) == [output]


@pytest.mark.parametrize(
    ("expected", "printed", "holds"),
    [("loss 5.5... nats", "loss 5.52 nats", True), ("a\nb", "a b", True), ("4 declined", "12 declined", False), ("", "2", False)],
)
def test_an_output_is_compared_with_what_is_shown(expected, printed, holds):
    assert is_as_shown(expected, printed) == holds


def test_every_block_of_text_is_an_output_that_a_test_compares():
    # test_docs_runs.py compares the output of nsa-train
    commands = {DOCS / "tutorials/first-model.md", DOCS / "runbooks/single-gpu.md"}
    for page in set(PAGES) - commands:
        text = page.read_text(encoding="utf-8")
        compared = [match for match in SNIPPET.finditer(text) if OUTPUT.match(text, match.end())]
        assert len(re.findall(r"^ *```text$", text, re.MULTILINE)) == len(compared), name_of(page)


def test_a_backend_written_to_the_letter_installs_and_is_found(tmp_path):
    text = (DOCS / "how-to/write-a-backend.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    files = {match[1]: block for block in blocks if (match := re.match(r"# (\S+)\n", block))}
    assert set(files) == {"my_package/plugin.py", "pyproject.toml"}
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").touch()
    for name, block in {**files, "my_package/window.py": blocks[0]}.items():
        (tmp_path / name).write_text(block)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", "site"]
    fresh_python("-m", "pip", "install", *options, ".", cwd=tmp_path)
    last = list(SNIPPET.finditer(text))[-1]
    assert is_as_shown(shown(text)[-1], fresh_python("-c", last["code"], path=[tmp_path / "site"], cwd=tmp_path.parent))


def test_no_page_or_message_installs_what_is_not_released():
    # delete this test with the first release
    sources = [path for pattern in ("packages/*/src/**/*.py", "examples/**/*.py", "tools/*.py") for path in ROOT.glob(pattern)]
    for path in [*PAGES, *sources]:
        assert NOT_RELEASED.findall(path.read_text(encoding="utf-8")) == [], name_of(path)


@pytest.mark.parametrize("line", ["pip install nsa-core", "pip install 'nsa-train[bpe]'", "pip install -U torch nsa-bench"])
def test_a_command_that_installs_from_an_index_is_found(line):
    assert NOT_RELEASED.search(line)


@pytest.mark.parametrize(
    "line", ["pip install ./packages/nsa-core", "pip install './packages/nsa-train[bpe]'", "pip install dist/nsa_*.whl"]
)
def test_a_command_that_installs_from_a_checkout_passes(line):
    assert not NOT_RELEASED.search(line)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_a_page_with_the_first_command_has_its_size_and_time(name):
    install = (ROOT / "docs/how-to/install.md").read_text()
    size = re.search(r"Size: (\S+ GB) of downloads and (\S+ GB) on disk", install)
    time = re.search(r"Time: (.+? minutes) on two cores", install)
    text = " ".join((ROOT / name).read_text().split())
    assert [figure for figure in (*size.groups(), time[1], "https://download.pytorch.org/whl/cpu") if figure not in text] == []


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


@pytest.mark.parametrize(("heading", "kind"), [("BlockGeometry", nsa_core.BlockGeometry), ("NSAConfig", nsa_core.NSAConfig)])
def test_the_page_of_nsa_core_lists_every_field_of_a_configuration(heading, kind):
    values = {field.name: field.default for field in attrs.fields(kind)}
    made = {name: value.factory() if isinstance(value, attrs.Factory) else value for name, value in values.items()}
    assert fields_on_page(heading) == made


def test_the_page_of_nsa_core_lists_every_option_of_a_cache():
    assert fields_on_page("new_cache") == {name: CacheOptions._field_defaults[name] for name in CacheOptions._fields}


def fields_on_page(heading):
    """Return the default of every field in the table below `heading`; NOTHING for a required field."""
    text = (DOCS / "reference/nsa-core.md").read_text(encoding="utf-8")
    section = text.partition(f"### {heading}\n")[2].partition("\n#")[0]
    cells = re.findall(r"^\| `(\w+)` \|([^|]*)\|", section, re.MULTILINE)
    return {name: eval(cell.strip(" `"), vars(nsa_core)) if cell.strip() else attrs.NOTHING for name, cell in cells}


@pytest.mark.parametrize("package", ["nsa-train", "nsa-bench"])
def test_pages_name_commands_that_exist(package):
    commands = set(importlib.import_module(f"{package.replace('-', '_')}.cli").app)
    named = {found for page in PAGES for found in re.findall(rf"^(?:.*\s)?{package} ([a-z][a-z0-9-]*)", code_of(page), re.MULTILINE)}
    assert named - commands == set()


def commands_in(path):
    """Return the `nsa-train` and `nsa-bench` lines of a page's blocks, or of a plan's comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return OF_A_PLAN.findall(text)
    lines = [line.strip() for match in FENCED.finditer(text) for line in match[0].replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"nsa-(train|bench) ", line)]


COMMANDS = {path: found for path in (*PAGES, *sorted(DOCS.rglob("evidence/**/*.toml"))) if (found := commands_in(path))}


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_commands_of_a_page_or_plan_are_accepted(path):
    refused = []
    for line in COMMANDS[path]:
        package, *words = shlex.split(line.partition(" | ")[0], comments=True)
        cli = importlib.import_module(f"{package.replace('-', '_')}.cli")
        words = cli.with_steps(words) if package == "nsa-train" else words
        try:
            cli.app.parse_args(words, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            refused.append(f"{line}: {error}")
    assert refused == []


def test_commands_are_found_in_pages_and_plans():
    assert len(COMMANDS) > 20
    assert DOCS / "evidence/conversion/needle.toml" in COMMANDS
    assert sum(map(len, COMMANDS.values())) > 80


def test_reference_lists_every_command_and_key_of_nsa_train():
    page = (DOCS / "reference/nsa-train.md").read_text(encoding="utf-8")
    app = importlib.import_module("nsa_train.cli").app
    assert [command for command in app if not command.startswith("-") and f"`nsa-train {command} " not in page] == []
    tables = importlib.import_module("nsa_train.settings.config").TABLES
    sections = dict(re.findall(r"^\| table `(\w+)` \|(.*?)(?=^\| table|^#)", page, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(tables)
    for name, table in tables.items():
        rows = re.findall(r"^\| (`.*?`) \|", sections[name], re.MULTILINE)
        assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == {item.name for item in attrs.fields(table)}, name
