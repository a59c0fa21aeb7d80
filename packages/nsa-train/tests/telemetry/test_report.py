"""The report is one file that needs no other."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from nsa_train.cli import run_command
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.report import steadiness, write_report


@pytest.fixture
def run(tiny_run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of a finished run."""
    return RunDirectory(Path(shutil.copytree(tiny_run.root, tmp_path / "run", symlinks=True)))


def test_the_report_is_self_contained(tiny_run: RunDirectory) -> None:
    page = tiny_run.report.read_text()
    assert "data:image/png;base64," in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "http://" not in page
    assert "https://" not in page


def test_the_report_has_every_part(tiny_run: RunDirectory) -> None:
    page = tiny_run.report.read_text()
    for heading in ("Curves", "Throughput and memory", "Health", "Gates and selection", "Samples", "Settings", "Environment", "Routing"):
        assert heading in page
    assert "gate_entropy_mean" in page
    assert "healthy" in page
    assert "none: no peak is defined for device cpu" in page
    assert "blocks that a query reads" in page
    assert "compression_stride" in page
    assert "after training" in page


def test_the_page_says_up_to_where_it_was_drawn(run: RunDirectory) -> None:
    iso = json.loads(run.heartbeat.read_text().splitlines()[-1])["iso"]
    assert f"Drawn from the records up to step 5, {iso};" in run.report.read_text()


def test_the_page_of_a_run_that_goes_on_says_so(run: RunDirectory) -> None:
    """A resumed run removes metrics.json, and its newest event is no end."""
    run.metrics.unlink()
    event = json.loads(run.heartbeat.read_text().splitlines()[-1])
    for msg, words in {"step_end": "The run goes on, or was killed", "halt": "The run did not reach its last step"}.items():
        with run.heartbeat.open("a") as file:
            file.write(json.dumps({**event, "msg": msg, "iso": "<now>"}) + "\n")
        write_report(run)
        page = run.report.read_text()
        assert f"{words}: " in page
        assert "Drawn from the records up to step 5, &lt;now&gt;;" in page


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "holes"])
def test_records_that_are_no_regular_files_are_named_and_left_out(
    run: RunDirectory, put_irregular, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    left_out = [run.environment, run.metrics, run.config, run.validation, run.selection, run.fallbacks, run.samples / "after.txt"]
    for path in left_out:
        put_irregular(kind, path)
    for path in (run.report, run.curves):
        put_irregular(kind, path)
    assert run_command(["report", str(run.root)]) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(left_out)
    for path in left_out:
        [line] = [line for line in told if f"{path} " in line]
        assert put_irregular.kinds[kind] in line
        assert line.endswith("; it is left out")
    assert run.report.read_text().startswith("<!doctype html>")
    assert run.curves.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory", "holes"])
@pytest.mark.parametrize("name", ["training.csv", "heartbeat_rank0.jsonl"])
def test_what_the_curves_come_from_is_a_regular_file(
    run: RunDirectory, put_irregular, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    put_irregular(kind, run.root / name)
    assert run_command(["report", str(run.root)]) == 2
    [*_, line] = capsys.readouterr().err.splitlines()
    assert f"{run.root / name} cannot be read ({put_irregular.kinds[kind]}, and only a regular file of at most 4 GiB is read)" in line


def test_a_line_without_an_end_ends_what_is_read_of_a_table(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with run.training.open("r+b") as file:
        file.truncate(2**31)
    assert run_command(["report", str(run.root)]) == 0
    assert capsys.readouterr().err == f"nsa-train: {run.training}: line 7 cannot be read, and is left out\n"


def test_samples_are_escaped(run: RunDirectory) -> None:
    (run.samples / "after.txt").write_text("<script>alert(1)</script>")
    write_report(run)
    assert "<script>" not in run.report.read_text()
    assert "&lt;script&gt;" in run.report.read_text()


def test_control_characters_of_samples_are_shown_as_none(run: RunDirectory) -> None:
    (run.samples / "after.txt").write_text("one\ttwo\nthree \x00\x1b[31m\x85 end\r\n", encoding="utf-8", newline="")
    write_report(run)
    page = run.report.read_text(encoding="utf-8")
    assert "one\ttwo\nthree \ufffd\ufffd[31m\ufffd end\n" in page
    assert not re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)


def test_curves_are_a_png(tiny_run: RunDirectory) -> None:
    assert tiny_run.curves.read_bytes().startswith(b"\x89PNG")


def test_damaged_records_are_left_out_and_named(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.metrics.write_text(run.metrics.read_text()[:200])
    run.environment.write_text("")
    run.config.write_text("[model\n")
    run.training.write_text(run.training.read_text() + "\0\0\n")
    with run.heartbeat.open("a") as file:
        file.write('{"msg": "progress", "loss": 1.0}\n')
    (run.samples / "after.txt").write_bytes(b"what can be read\xff")
    assert run_command(["report", str(run.root)]) == 0
    names = [re.findall(r"run/([\w/.]+)", line)[0] for line in capsys.readouterr().err.splitlines()]
    assert names == ["training.csv", "heartbeat_rank0.jsonl", "env.json", "metrics.json", "config.toml", "samples/after.txt"]
    page = run.report.read_text()
    assert "metrics.json cannot be read: these are the run's other records" in page
    assert "what can be read" in page
    assert "gate_entropy_mean" in page


@pytest.mark.parametrize(
    "content", ["{}", '{"attention": "nsa", "steps": "x"}', '{"attention": 3, "packages": [], "routing": 1, "val_loss": "x"}']
)
def test_json_of_another_shape_is_shown_as_far_as_it_goes(content: str, run: RunDirectory) -> None:
    run.metrics.write_text(content)
    run.environment.write_text(content)
    run.config.write_text("model = 3")
    assert run_command(["report", str(run.root)]) == 0


@pytest.mark.parametrize("seed", range(12))
def test_no_damage_of_records_ends_in_a_traceback(seed: int, run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    files = [
        run.training,
        run.validation,
        run.selection,
        run.heartbeat,
        run.environment,
        run.metrics,
        run.config,
        run.samples / "after.txt",
    ]
    for path in draw.sample(files, 3):
        content = bytearray(path.read_bytes())
        at = draw.randrange(len(content))
        content[at : at + draw.choice((1, 20))] = draw.randbytes(draw.choice((0, 1, 20)))
        path.write_bytes(content[: draw.choice((at, len(content)))])
    assert run_command(["report", str(run.root)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_the_last_fifth_is_compared_with_all_steps() -> None:
    assert steadiness({"toks_per_s": [100.0] * 80 + [50.0] * 20}) == 0.5
    assert steadiness({"toks_per_s": [100.0] * 90 + [50.0] * 10}) == 0.75
    assert steadiness({"toks_per_s": [float("nan"), 0.0, 80.0]}) == 1
    assert steadiness({"toks_per_s": [0.0]}) is None
