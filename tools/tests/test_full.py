"""tools/full.py: failures of stages, and the report."""

import argparse
import json
import sys

import pytest

from tools import full, other_python

JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><failure message="no"/></testcase>
<testcase name="d"><error message="no"/></testcase>
<testcase name="e"><skipped message="{reason}"/></testcase>
</testsuite></testsuites>"""
HARDWARE = "needs 1 CUDA device(s) of compute capability &gt;= 8.0; found none"


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.setattr(full, "LOGS", tmp_path)
    return tmp_path


def stage(code, **options):
    return full.Stage("a stage", (sys.executable, "-c", code), **{"limit_minutes": 1, "is_pytest": False} | options)


def test_tests_are_counted_by_their_outcome(tmp_path):
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT.format(reason=HARDWARE))
    counts = full.read_counts(path)
    assert (counts.passed, counts.failed, len(counts.skip_reasons)) == (2, 2, 1)
    assert full.problems_of(counts) == ["2 failed"]


def test_a_skip_that_no_missing_hardware_explains_is_a_problem():
    assert full.problems_of(full.Counts(1, 0, ["needs 2 CUDA device(s) of compute capability >= 9.0; found none"])) == []
    assert full.problems_of(full.Counts(1, 0, ["the peer is not installed"])) == ["skipped without need: the peer is not installed"]


def test_no_test_at_all_is_a_problem(tmp_path):
    assert full.problems_of(full.read_counts(tmp_path / "missing.xml")) == ["no test passed"]


def test_a_stage_passes_by_its_exit_code_and_keeps_its_output(logs):
    assert full.run_stage(stage("print('out')"), 1).is_passed
    assert (logs / "a-stage.log").read_text() == "out\n"
    failed = full.run_stage(stage("raise SystemExit(3)"), 1)
    assert (failed.is_passed, failed.problem) == (False, "exit code 3")


def test_tests_are_judged_by_what_pytest_recorded(logs):
    write = f"import sys; open(sys.argv[1].split('=')[1], 'w').write({JUNIT.format(reason='no reason')!r})"
    result = full.run_stage(stage(write, is_pytest=True), 1)
    assert (result.passed, result.failed, result.skipped) == (2, 2, 1)
    assert result.problem == "2 failed; skipped without need: no reason"
    # a file of an earlier run does not count
    assert full.run_stage(stage("", is_pytest=True), 1).problem == "no test passed"


def test_the_time_limit_ends_a_stage_and_what_it_started(logs):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    result = full.run_stage(stage(code, limit_minutes=0.02), 1)
    assert (result.is_passed, result.problem) == (False, "stopped after 0 minutes")
    assert result.minutes < 0.5
    assert full.run_stage(stage(""), 0.0).problem == "no time was left of 90 minutes"


def test_one_failed_stage_fails_the_tier_and_the_report_says_which(logs, monkeypatch, capsys):
    fine, bad = stage("")._replace(name="fine"), stage("raise SystemExit(1)")._replace(name="bad")
    monkeypatch.setattr(full, "stages", lambda: [bad, fine])
    monkeypatch.setattr(full, "versions", lambda: {"python": "3.x"})
    monkeypatch.setattr(full, "REPORT_FOLDER", logs / "report")
    assert full.main([]) == 1
    found = json.loads((full.REPORT_FOLDER / "full.json").read_text())
    assert [(found_stage["name"], found_stage["is_passed"]) for found_stage in found["stages"]] == [("bad", False), ("fine", True)]
    assert found["is_passed"] is False
    assert len(found["commit"]) == 40
    page = (full.REPORT_FOLDER / "full.md").read_text()
    assert "**failed**" in page
    assert "| bad | failed: exit code 1 |" in page
    assert "FAIL bad" in capsys.readouterr().out


def test_some_stages_alone_write_no_report(logs, monkeypatch):
    monkeypatch.setattr(full, "stages", lambda: [stage("")])
    monkeypatch.setattr(full, "REPORT_FOLDER", logs / "report")
    assert full.main(["--only", "a stage"]) == 0
    assert not full.REPORT_FOLDER.exists()
    with pytest.raises(SystemExit):
        full.main(["--only", "another"])


def test_every_stage_of_the_tier_has_a_name_of_its_own_and_fits_the_limit():
    every = full.stages()
    assert len({found.name for found in every}) == len(every)
    assert all(found.limit_minutes <= full.LIMIT_MINUTES for found in every)
    assert all((full.ROOT / word).exists() for found in every for word in found.command if word.startswith("packages/"))


def test_another_python_is_found_by_what_it_answers(monkeypatch, tmp_path):
    fake = tmp_path / "versions" / "3.14.2" / "bin" / "python3.14"
    fake.parent.mkdir(parents=True)
    fake.write_text("#!/bin/sh\necho 3.14\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert full.installed_pythons() == {"3.14": str(fake)}
    fake.write_text("#!/bin/sh\necho 3.13\n")
    assert full.installed_pythons() == {}


def test_a_python_between_two_others_runs_fewer_tests():
    running = sys.version_info.minor
    older, next_, newest = (f"3.{running + step}" for step in (-1, 1, 2))

    def shorter(*versions):
        return [found.name for found in full.other_pythons(dict.fromkeys(versions, "python")) if "--between" in found.command]

    assert shorter(next_, newest) == [f"Python {next_}"]
    assert shorter(older, newest) == shorter(newest) == []


def test_another_python_gets_the_tests_of_its_stage(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(other_python.subprocess, "run", lambda command, **_: commands.append(command) or argparse.Namespace(returncode=0))
    other_python.main(["python3.12", str(tmp_path), "--junitxml=x"])
    other_python.main(["python3.12", str(tmp_path), "--between", "--junitxml=x"])
    every, fewer = (command for command in commands if "pytest" in command)
    assert every[-1] == fewer[-1] == "--junitxml=x"
    assert set(other_python.TESTS) <= set(every)
    assert set(other_python.TESTS_BETWEEN) <= set(fewer)
    assert "packages/nsa-core" not in fewer
    assert "--between" not in fewer


def test_a_folder_that_is_no_environment_is_not_cleared(tmp_path, capsys):
    (tmp_path / "thesis.tex").touch()
    assert other_python.main(["python3.12", str(tmp_path)]) == 2
    assert "would be cleared, and is no virtual environment" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()
    assert other_python.main(["--help"]) == 2
    assert "PYTHON FOLDER" in capsys.readouterr().err


def test_the_report_names_no_path_of_the_machine() -> None:
    outside = ("/elsewhere/python3.12", str(full.ROOT / "tools/other_python.py"), sys.executable, "-q")
    assert full.readable(outside) == "python3.12 tools/other_python.py python -q"
    assert full.readable(full.hatch("run", "docs:pages")) == "hatch run docs:pages"


@pytest.mark.parametrize("path", sorted({*other_python.TESTS, *other_python.TESTS_BETWEEN, *full.TRANSFORMERS, *full.UNPATCHED_SAMPLE}))
def test_the_tests_that_a_stage_names_are_there(path):
    assert (full.ROOT / path).exists()
