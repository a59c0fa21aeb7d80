"""tools/release.py on a small tree of two packages with a git history of one commit."""

import datetime
import shutil

import pytest

from tools import release

DATE = datetime.date(2026, 11, 21)
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- A thing.\n\n## 0.1.0 - 2026-01-01\n\n- The start.\n"


@pytest.fixture
def tree(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in ("nsa-core", "nsa-train"):
        source = tmp_path / "packages" / name / "src" / name.replace("-", "_")
        source.mkdir(parents=True)
        (source / "__about__.py").write_text('"""The version."""\n\n__version__ = "0.1.0"\n')
        (tmp_path / "packages" / name / "CHANGELOG.md").write_text(CHANGELOG)
        (tmp_path / "packages" / name / "pyproject.toml").write_text('dependencies = ["attrs>=23", "nsa-core>=0.1,<0.2"]\n')
    for name in ("examples/plugin/pyproject.toml", "docs/how-to/write-a-backend.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text('dependencies = ["nsa-core>=0.1,<0.2"]\n')
    release.git(tmp_path, "init", "--quiet")
    for key, value in (("user.name", "a"), ("user.email", "a@b.c"), ("commit.gpgsign", "false"), ("tag.gpgsign", "false")):
        release.git(tmp_path, "config", key, value)
    release.git(tmp_path, "add", ".")
    release.git(tmp_path, "commit", "--quiet", "--message", "start")
    return tmp_path


def read(tree, name):
    return (tree / "packages" / name).read_text()


@pytest.mark.parametrize(
    ("bump", "version", "asked"),
    [
        ("patch", "0.1.1", ">=0.1,<0.2"),
        ("minor", "0.2.0", ">=0.2,<0.3"),
        ("major", "1.0.0", ">=1.0,<2"),
        ("0.4.2", "0.4.2", ">=0.4,<0.5"),
    ],
)
def test_a_bump_gives_a_version_and_the_range_of_dependents(bump, version, asked):
    bumped = release.Version(0, 1, 0).bumped(bump)
    assert (str(bumped), bumped.range()) == (version, asked)


def test_a_release_changes_version_changelog_and_dependents(tree):
    release.release(tree, "nsa-core", "minor", date=DATE, dry_run=False)
    assert '__version__ = "0.2.0"' in read(tree, "nsa-core/src/nsa_core/__about__.py")
    assert "## Unreleased\n\n## 0.2.0 - 2026-11-21\n\n- A thing.\n\n## 0.1.0" in read(tree, "nsa-core/CHANGELOG.md")
    assert read(tree, "nsa-train/pyproject.toml") == 'dependencies = ["attrs>=23", "nsa-core>=0.2,<0.3"]\n'
    assert '__version__ = "0.1.0"' in read(tree, "nsa-train/src/nsa_train/__about__.py")
    for name in ("examples/plugin/pyproject.toml", "docs/how-to/write-a-backend.md"):
        assert (tree / name).read_text() == 'dependencies = ["nsa-core>=0.2,<0.3"]\n'


def test_a_release_is_committed_and_tagged(tree):
    release.release(tree, "nsa-core", "minor", date=DATE, dry_run=False)
    assert release.git(tree, "status", "--porcelain") == ""
    assert release.git(tree, "log", "-1", "--format=%s") == "core: release 0.2.0"
    assert release.git(tree, "tag", "--points-at", "HEAD") == "nsa-core-v0.2.0"


def test_the_first_release_keeps_the_version_that_stands(tree):
    release.release(tree, "nsa-core", "0.1.0", date=DATE, dry_run=False)
    assert release.git(tree, "tag") == "nsa-core-v0.1.0"


def test_a_dry_run_prints_the_changes_and_writes_nothing(tree, capsys):
    assert release.main(["nsa-core", "minor", "--dry-run"], root=tree) == 0
    printed = capsys.readouterr().out
    assert '+__version__ = "0.2.0"' in printed
    assert "would commit this and tag it nsa-core-v0.2.0" in printed
    assert release.git(tree, "status", "--porcelain") == ""
    assert release.git(tree, "tag") == ""


def test_an_extra_in_a_requirement_is_kept():
    changed = release.with_range('"nsa-core[testing]>=0.1,<0.2"', "nsa-core", release.Version(0, 2, 0))
    assert changed == '"nsa-core[testing]>=0.2,<0.3"'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nsa-nothing", "minor"], "package 'nsa-nothing' is not in packages/; use one of nsa-core, nsa-train"),
        (["nsa-core", "big"], "version 'big' is not of the form X.Y.Z"),
        (["nsa-core", "0.0.9"], "version 0.0.9 is below the present 0.1.0"),
    ],
)
def test_a_wrong_argument_is_refused(tree, capsys, arguments, message):
    assert release.main(arguments, root=tree) == 1
    assert message in capsys.readouterr().err


def test_an_empty_unreleased_section_is_refused():
    with pytest.raises(release.ReleaseError, match="lists nothing under '## Unreleased'"):
        release.with_section("## Unreleased\n\n## 0.1.0\n\n- Old.\n", release.Version(0, 2, 0), DATE)


def test_a_version_that_has_a_tag_is_refused(tree):
    release.git(tree, "tag", "nsa-core-v0.2.0")
    with pytest.raises(release.ReleaseError, match=r"tag nsa-core-v0\.2\.0 exists"):
        release.release(tree, "nsa-core", "minor", date=DATE, dry_run=False)


def test_uncommitted_changes_are_refused(tree):
    (tree / "stray.txt").touch()
    with pytest.raises(release.ReleaseError, match="uncommitted changes"):
        release.release(tree, "nsa-core", "minor", date=DATE, dry_run=False)
