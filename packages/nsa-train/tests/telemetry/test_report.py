"""The report is one file that needs no other."""

import base64
import html
import json
import random
import re
import shutil
from pathlib import Path

import pytest

from nsa_train.cli import run_command
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry import figures
from nsa_train.telemetry.figures import Start
from nsa_train.telemetry.health import judge
from nsa_train.telemetry.records import read_events
from nsa_train.telemetry.report import described_starts, moment, resumes_in_words, write_report


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
    at = moment(json.loads(run.heartbeat.read_text().splitlines()[-1]))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", at)
    assert f"Drawn from the records up to step 5, {at};" in run.report.read_text()


def test_the_page_of_a_run_that_goes_on_says_so(run: RunDirectory) -> None:
    """A resumed run removes metrics.json, and its newest event is no end."""
    run.metrics.unlink()
    event = json.loads(run.heartbeat.read_text().splitlines()[-1])
    ended = "The run did not reach its last step, but ended after step 5"
    for msg, words in {"step_end": "The run goes on, or was killed", "halt": ended}.items():
        with run.heartbeat.open("a") as file:
            file.write(json.dumps({**event, "msg": msg, "iso": "<now>"}) + "\n")
        write_report(run)
        page = run.report.read_text()
        assert f"{words}: " in page
        assert "Drawn from the records up to step 5, &lt;now&gt;;" in page


def test_outputs_of_any_size_are_short(run: RunDirectory) -> None:
    events = [json.loads(line) for line in run.heartbeat.read_text().splitlines()]
    for event in events:
        if "contribution_cmp" in event:
            event.update(contribution_cmp=1.99425e26, contribution_slc=3.21e-7)
    run.heartbeat.write_text("".join(json.dumps(event) + "\n" for event in events))
    write_report(run)
    shown = re.findall(r'<td title="mean \|output\|">(.*?)</td>', run.report.read_text())
    assert shown[:2] == ["1.994e+26", "3.21e-07"]
    assert len(shown[2]) <= 9


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


def test_curves_are_drawn_again_only_for_other_records_or_by_another_version(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = []
    changes = (
        lambda: None,
        lambda: put_loss(run, 9.0),
        lambda: None,
        lambda: run.curves.write_bytes(run.curves.read_bytes()[:-9]),
        lambda: monkeypatch.setattr(figures, "__version__", "9.9"),
    )
    for change in changes:
        change()
        write_report(run)
        pictures.append((run.curves.stat().st_ino, run.curves.read_bytes()))
        assert base64.b64encode(pictures[-1][1]).decode() in run.report.read_text()
    assert all(picture.startswith(b"\x89PNG") for _file, picture in pictures)
    assert pictures[1] == pictures[2]
    # the picture that was cut off is drawn again, with the same bytes
    assert pictures[3][1] == pictures[2][1]
    assert len({content for _file, content in pictures}) == 3


def put_loss(run: RunDirectory, loss: float) -> None:
    *rows, last = run.training.read_text().splitlines()
    columns = dict(zip(rows[0].split(","), last.split(","), strict=True)) | {"loss": str(loss)}
    run.training.write_text("\n".join([*rows, ",".join(columns.values()), ""]))


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


def test_the_page_of_a_run_that_its_guards_stopped_says_why(run: RunDirectory) -> None:
    run.metrics.unlink()
    event = json.loads(run.heartbeat.read_text().splitlines()[-1])
    with run.heartbeat.open("a") as file:
        file.write(json.dumps({**event, "msg": "halt", "code": 4, "reason": "step 5: loss=nan is <not> finite"}) + "\n")
    write_report(run)
    assert "but ended after step 5 with exit code 4: these are its records so far" in run.report.read_text()
    assert "step 5: loss=nan is &lt;not&gt; finite" in run.report.read_text()


def _text(page: str) -> str:
    """Return the visible text of the page, without samples."""
    without = re.sub(r"(?s)<style>.*?</style>|<pre>.*?</pre>|<img[^>]*>", "", page)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", without)))


@pytest.fixture(scope="module")
def resumed_run(tiny_run: RunDirectory, tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that was resumed twice: after its fifth step, and after it had reached the seventh from the sixth."""
    out = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(tiny_run.root, out, symlinks=True)
    words = ["run", str(tiny_recipe), "--out", str(out), "--set", "train.save_every=6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nsa_train.telemetry.recorder.SAMPLE_TOKENS", 8)
        assert run_command([*words, "--resume", "--set", "train.steps=7"]) == 0
        assert run_command([*words, "--resume", "6", "--set", "train.steps=8"]) == 0
    return RunDirectory(out)


def test_the_page_says_in_words_where_and_when_the_run_was_resumed(resumed_run: RunDirectory) -> None:
    boots = [event for event in map(json.loads, resumed_run.heartbeat.read_text().splitlines()) if event["msg"] == "boot"]
    text = _text(resumed_run.report.read_text())
    name, _, dirty = (json.loads(resumed_run.environment.read_text())["commit"] or "").partition("-")
    commit = f", commit {name[:12]}{' with changes' if dirty else ''}" if name else ""
    there = f"on {boots[0]['host']}, 1 process{commit}."
    assert "It was resumed after steps 5 and 6." in text
    assert f"Started: {moment(boots[0])}, {there} " in text
    assert f"Resumed after step 5 from checkpoints/step-5: {moment(boots[1])}, {there} " in text
    assert f"Resumed after step 6 from checkpoints/step-6: {moment(boots[2])}, {there} " in text
    assert "The start before had reached step 7; its steps after 6 do not count." in text


@pytest.mark.parametrize("name", ["tiny_run", "resumed_run"])
def test_nothing_on_the_page_is_spelt_as_python_spells_it(name: str, request: pytest.FixtureRequest) -> None:
    text = _text(request.getfixturevalue(name).report.read_text())
    assert re.findall(r"[{\[]\s*'|': |\b(?:None|True|False)\b", text) == []


@pytest.mark.parametrize(
    ("at", "begun"), [(None, "Started:"), (-1, "Started again at step 0"), (0, "Resumed after step 0 from checkpoints/")]
)
def test_a_start_says_what_it_began_with(at: int | None, begun: str) -> None:
    [line] = described_starts([Start({"resumed_at": at}, 0)], {})
    assert line.startswith(begun)


def test_the_head_of_the_page_names_a_few_resumes_and_counts_many() -> None:
    assert resumes_in_words([]) == ""
    assert resumes_in_words([1000]) == "after step 1,000"
    assert resumes_in_words([1, 2, 3]) == "after steps 1, 2 and 3"
    assert resumes_in_words(range(10, 30)) == "20 times, the last one after step 29"


def test_routes_are_a_table(resumed_run: RunDirectory) -> None:
    text = _text(resumed_run.report.read_text())
    table = text.partition("Routing operation backend reasons for and against each ")[2]
    assert re.findall(r"(\w+) sdpa sdpa \(preference 0\): eligible", table)[:4] == ["cmp", "select", "slc", "win"]


def test_a_start_on_another_machine_names_what_changed(resumed_run: RunDirectory, tmp_path: Path) -> None:
    run = RunDirectory(Path(shutil.copytree(resumed_run.root, tmp_path / "run", symlinks=True)))
    environment = json.loads(run.environment.read_text())
    environment["resumed"][1] = {**environment["resumed"][1], "gpu": "NVIDIA H200", "torch": "2.99", "commit": "0123456789abcdef"}
    run.environment.write_text(json.dumps(environment))
    write_report(run)
    found = environment["resumed"][0]["torch"]
    assert f"Changed: torch 2.99 (before: {found}), gpu NVIDIA H200 (before: none)." in _text(run.report.read_text())
    assert "commit 0123456789ab. " in _text(run.report.read_text())


def test_every_health_rule_of_the_page_is_explained(tiny_run: RunDirectory) -> None:
    page = tiny_run.report.read_text()
    section = page.partition("<h2>Health")[2].partition("</section>")[0]
    rows = re.findall(r"<code>(\w+)</code><span class=\"note\">([^<]*)</span>", section)
    *_, last = (event for event in read_events(tiny_run.heartbeat) if event["msg"] == "progress")
    assert [name for name, _ in rows] == [check.name for check in judge({**last, "toks_per_s_of_median": 1.0})]
    assert [name for name, note in rows if len(note) < 40] == []
    assert "Share of (token, head) pairs whose gates have collapsed" in dict(rows)["gate_collapse_frac"]
    assert "Selection blocks that a query reads, on average" in dict(rows)["k_mean"]


@pytest.mark.parametrize(("factor", "verdict"), [(5.0, "healthy"), (0.95, "healthy"), (0.85, "look here")])
def test_a_run_that_became_faster_is_healthy_and_a_slower_one_is_not(run: RunDirectory, factor: float, verdict: str) -> None:
    header, first, *_ = run.training.read_text().splitlines()
    at = header.split(",").index("toks_per_s")
    fields = first.split(",")
    rows = [[*fields[:at], str(1000 * (factor if step > 90 else 1)), *fields[at + 1 :]] for step in range(1, 101)]
    lines = [",".join([str(step), *row[1:]]) for step, row in enumerate(rows, 1)]
    run.training.write_text("\n".join([header, *lines]) + "\n")
    write_report(run)
    share = f"{100 * factor:.0f} % of the run's median at least 90 % {verdict}"
    assert share in _text(run.report.read_text())
