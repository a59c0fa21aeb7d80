"""Release one package: `python tools/release.py nsa-core minor [--dry-run]`.

Sets the version, moves the version range of dependents, dates the changelog's Unreleased section, commits, and tags
`nsa-core-v0.2.0`. Nothing is pushed. `--dry-run` prints the changes as a diff and writes nothing.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "## Unreleased\n"
DEPENDENTS = ("packages/*/pyproject.toml", "examples/*/pyproject.toml", "docs/how-to/write-a-backend.md")
"""Files that state version ranges of our packages, as patterns."""


class ReleaseError(Exception):
    """The release cannot be made; the message says why and what to do."""


class Version(NamedTuple):
    """A release number, major.minor.patch."""

    major: int
    minor: int
    patch: int

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read `text`, three numbers with dots between them."""
        match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)
        if match is None:
            raise ReleaseError(f"version {text!r} is not of the form X.Y.Z; use major, minor, patch or for example 0.2.0")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    def bumped(self, bump: str) -> Version:
        """Return the version after `bump`: major, minor, patch, or the version itself written out."""
        after = {
            "major": Version(self.major + 1, 0, 0),
            "minor": Version(self.major, self.minor + 1, 0),
            "patch": Version(self.major, self.minor, self.patch + 1),
        }
        version = after.get(bump) or Version.parse(bump)
        if version < self:
            raise ReleaseError(f"version {version} is below the present {self}; use a later one")
        return version

    def range(self) -> str:
        """Return the version range for dependents: this minor version, below the next that may break them."""
        ceiling = f"0.{self.minor + 1}" if self.major == 0 else f"{self.major + 1}"
        return f">={self.major}.{self.minor},<{ceiling}"


def about_file(root: Path, package: str) -> Path:
    """Return the file that holds the version of `package`."""
    path = root / "packages" / package / "src" / package.replace("-", "_") / "__about__.py"
    if not path.is_file():
        known = ", ".join(sorted(folder.name for folder in (root / "packages").iterdir()))
        raise ReleaseError(f"package {package!r} is not in packages/; use one of {known}")
    return path


def read_version(about: str) -> Version:
    """Return the version that the text of an `__about__.py` states."""
    match = re.search(r'__version__ = "([^"]+)"', about)
    if match is None:
        raise ReleaseError('__about__.py has no line __version__ = "X.Y.Z"; add it')
    return Version.parse(match.group(1))


def with_version(about: str, version: Version) -> str:
    """Return the text of an `__about__.py` with `version` in it."""
    return re.sub(r'__version__ = "[^"]+"', f'__version__ = "{version}"', about)


def with_range(pyproject: str, package: str, version: Version) -> str:
    """Return the text of one of DEPENDENTS, with the range of `version` for every requirement on `package`."""
    return re.sub(rf'"({re.escape(package)}(?:\[[\w,-]+\])?)>=[\d.]+,<[\d.]+"', rf'"\g<1>{version.range()}"', pyproject)


def with_section(changelog: str, version: Version, date: datetime.date) -> str:
    """Return the changelog with the Unreleased section renamed to `version` and its date, and an empty Unreleased above it.

    Raises: ReleaseError if there is no Unreleased section or nothing in it.
    """
    before, heading, after = changelog.partition(UNRELEASED)
    if not heading or not re.search(r"^- ", after.partition("\n## ")[0], flags=re.MULTILINE):
        raise ReleaseError("CHANGELOG.md lists nothing under '## Unreleased'; write what changed there first")
    return f"{before}{UNRELEASED}\n## {version} - {date.isoformat()}\n{after}"


def plan(root: Path, package: str, bump: str, date: datetime.date) -> tuple[Version, dict[Path, str]]:
    """Return the new version of `package` and the new text of every file that its release changes."""
    about = about_file(root, package)
    version = read_version(about.read_text(encoding="utf-8")).bumped(bump)
    changelog = root / "packages" / package / "CHANGELOG.md"
    texts = {
        about: with_version(about.read_text(encoding="utf-8"), version),
        changelog: with_section(changelog.read_text(encoding="utf-8"), version, date),
    }
    for dependent in sorted(path for pattern in DEPENDENTS for path in root.glob(pattern)):
        texts[dependent] = with_range(dependent.read_text(encoding="utf-8"), package, version)
    return version, {path: text for path, text in texts.items() if text != path.read_text(encoding="utf-8")}


def diff(root: Path, texts: dict[Path, str]) -> str:
    """Return what `plan` would change, as a unified diff."""
    lines: list[str] = []
    for path, text in texts.items():
        name = str(path.relative_to(root))
        lines += difflib.unified_diff(path.read_text(encoding="utf-8").splitlines(True), text.splitlines(True), name, name)
    return "".join(lines)


def git(root: Path, *arguments: str) -> str:
    """Run git in `root` and return its output."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def release(root: Path, package: str, bump: str, *, date: datetime.date, dry_run: bool) -> str:
    """Make the release, or with `dry_run` only plan it, and return what was done as text."""
    version, texts = plan(root, package, bump, date)
    tag = f"{package}-v{version}"
    if git(root, "tag", "--list", tag):
        raise ReleaseError(f"tag {tag} exists, so {package} {version} is out; use a later version")
    if dry_run:
        return f"{diff(root, texts)}would commit this and tag it {tag}"
    if git(root, "status", "--porcelain"):
        raise ReleaseError("the working tree has uncommitted changes, which a release must not sweep in; commit them first")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    git(root, "commit", "--quiet", "--all", "--message", f"{package.removeprefix('nsa-')}: release {version}")
    git(root, "tag", "--annotate", "--message", f"{package} {version}", tag)
    return f"tagged {tag}; push it with: git push --follow-tags"


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Read the command line, release, and return the exit code."""
    parser = argparse.ArgumentParser(description="Release one package of this tree.")
    parser.add_argument("package", help="for example nsa-core")
    parser.add_argument("bump", help="major, minor, patch, or the version itself as X.Y.Z")
    parser.add_argument("--dry-run", action="store_true", help="print the changes, write nothing")
    options = parser.parse_args(arguments)
    try:
        today = datetime.datetime.now(datetime.UTC).date()
        print(release(root, options.package, options.bump, date=today, dry_run=options.dry_run))
    except ReleaseError as error:
        print(f"release.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
