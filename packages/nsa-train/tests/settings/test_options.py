"""Command-line options that are not keys of a recipe: refused before anything is opened."""

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nsa_train.cli import run_command
from nsa_train.errors import ConfigError
from nsa_train.settings.options import AUTO, NEWEST, check_path, check_sampling, check_seconds, check_writable, default_folder, resume_step


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--tokens=100000000000", "--tokens=100000000000 is not an integer from 1 to 100,000; use 200"),
        ("--tokens=0", "--tokens=0 is not an integer from 1 to 100,000; use 200"),
        ("--temperature=1e-300", "--temperature=1e-300 is neither 0 nor a number from 0.001 to 1000; use 0.8"),
        ("--temperature=nan", "--temperature=nan is neither 0 nor"),
        ("--temperature=inf", "--temperature=inf is neither 0 nor"),
        ("--temperature=-1", "--temperature=-1.0 is neither 0 nor"),
        (f"--seed={2**63}", f"--seed={2**63} is not an integer from 0 to 9,223,372,036,854,775,807; use 0"),
        ("--seed=-1", "--seed=-1 is not an integer from 0 to"),
    ],
)
def test_sample_refuses_numbers_without_measure(capsys: pytest.CaptureFixture[str], option: str, message: str) -> None:
    started = time.perf_counter()
    assert run_command(["sample", "no/such/run", "--prompt", "x", option]) == 2
    assert time.perf_counter() - started < 1
    assert capsys.readouterr().err.startswith(f"nsa-train: {message}")


def test_all_that_is_wrong_with_a_sample_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_sampling("", tokens=0, temperature=-1, seed=-1)
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == ["--prompt", "--tokens", "--temperature", "--seed"]
    check_sampling("x", tokens=100_000, temperature=0, seed=2**63 - 1)
    check_sampling("x", tokens=1, temperature=1e-3, seed=0)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300, 86_401, 1e-300, 5e-324])
def test_a_time_that_cannot_be_waited_for_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"--interval=\S+ is not a number of seconds from 0.001 to 86,400; use 5"):
        check_seconds("--interval", seconds, example=5)
    for fitting in (0.001, 86_400):
        check_seconds("--interval", fitting, example=5)


def test_a_resume_names_a_step_or_auto() -> None:
    assert [resume_step(text) for text in ("", "auto", "0", "4000")] == [NEWEST, AUTO, 0, 4000]
    for text in ("abc", "-1", "1.5", "\u0663", "\u00b2", "newest", "9" * 19):
        with pytest.raises(ConfigError) as caught:
            resume_step(text)
        assert str(caught.value) == (
            f"--resume={text!r} is neither a step nor 'auto'; use --resume for the newest complete checkpoint, --resume 4000 for that of a "
            "step, or --resume auto to start where there is no run yet"
        )


@pytest.mark.parametrize("words", [["--resume", "abc"], ["--resume=abc"], ["--resume", "-7"], ["--resume", "1.5", "--dry-run"]])
def test_a_resume_of_something_else_is_refused(tiny_recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run_command(["run", str(tiny_recipe), "--out", "out", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"nsa-train: --resume={words[-1 if len(words) < 3 else 1].removeprefix('--resume=')!r} is neither a step nor 'auto'"
    )


@pytest.mark.parametrize("words", [["--resume", "{}"], ["{}", "--resume"], ["--resume", "demo"], ["--resume", "auto", "{}"]])
def test_a_recipe_may_stand_behind_resume(tiny_recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run_command(["run", *(word.format(tiny_recipe) for word in words)]) == 2
    assert capsys.readouterr().err.startswith("nsa-train: --resume does not say which run; use --out DIR")


LONG = "x" * 300


@pytest.mark.parametrize("path", [LONG, f"absent/{LONG}/y", "/".join(["y" * 200] * 21), "\u00e4" * 128])
def test_a_path_that_no_file_system_holds_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"--out='.{,100}' has (a name of )?[0-9,]+ bytes \(at most [0-9,]+\); use a shorter "):
        check_path("--out", path)
    check_path("--out", "x" * 255)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "{recipe}", "--out", "absent/{long}"],
        ["run", "{recipe}", "--out", "absent/{long}", "--resume", "auto"],
        ["run", "{recipe}", "--out", "{long}", "--synthetic-on-fail"],
        ["run", "{recipe}", "--out", "{long}", "--dry-run"],
        ["run", "{long}"],
        ["resume", "{long}"],
        ["preflight", "{recipe}", "--out", "{long}"],
        ["preflight", "{recipe}", "--set", "data.tokenizer=gpt2", "--set", "data.tokenizer_path={long}"],
        ["report", "{long}"],
        ["watch", "{long}"],
        ["ckpt", "ls", "{long}"],
        ["ckpt", "verify", "{long}"],
        ["ckpt", "export", "{long}", "out"],
        ["sample", "{long}", "--prompt", "x"],
        ["report", "a\0b"],
        ["run", "{recipe}", "--out", "a\0b"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_name_too_long_exits_2_and_makes_nothing(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command([word.format(recipe=tiny_recipe, long=LONG) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith(("nsa-train: ", "FAIL  ")) for line in lines)
    assert [*tmp_path.iterdir()] == []


def test_an_output_that_is_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "link", tmp_path / "link/below"):
        with pytest.raises(
            ConfigError, match=r"--out='.*link.*': '.*/link' is a link to 'nowhere', which is not there; make that, or name"
        ):
            check_writable("--out", path, "eval.json")


def test_an_evaluation_is_named_after_the_run_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 11, 29, 10, 0, 5, tzinfo=UTC)
    folders = [default_folder(Path(f"runs/{run}/checkpoints/step-3"), now) for run in "ab"]
    assert folders == [Path(f"evals/{run}-step-3-20261129-100005") for run in "ab"]
    folders[0].mkdir(parents=True)
    assert default_folder(Path("runs/a/checkpoints/step-3"), now) == Path("evals/a-step-3-20261129-100005-2")
    assert default_folder(Path("runs/a"), now) == Path("evals/a-20261129-100005")
