"""`nsa-bench generate`: NSA and two dense models of the same sizes generate; the dense step over a full cache is the dense decoder's own."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_bench import errors, generate
from nsa_bench.cli import run_command
from nsa_bench.generate import DenseStep, FullCacheAttention, GenerateCase, kernels_of, make_generate_cases, measure_generate
from nsa_bench.options import GenerateOptions
from nsa_core.decoder import Decoder

CPU = torch.device("cpu")
SIZES = {"shapes": "4/2/16/16", "hidden": 32, "layers": 2, "vocab": 40, "geometry": "8/4/16/4/24", "new": 3}
WORDS = ["--device", "cpu", *(word for name, value in SIZES.items() for word in (f"--{name}", str(value)))]


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate once, and compile nothing."""
    monkeypatch.setattr(generate, "RUNS", 1)


def case_of(**options: Any) -> GenerateCase:
    return make_generate_cases(GenerateOptions(**{**SIZES, "device": "cpu", "prompt": "20", "batch": "2", **options}))[0]


def test_all_ways_generate_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.csv"
    assert run_command(["generate", *WORDS, "--prompt", "20", "--batch", "2", "--csv", str(file)]) == 0
    with file.open() as opened:
        rows = {row["way"]: row for row in csv.DictReader(opened)}
    assert list(rows) == list(generate.WAYS)
    for way, row in rows.items():
        assert row["reason"] == ""
        assert float(row["tokens_per_s"]) == pytest.approx(2e3 / float(row["ms_step"]))
        assert (row["ms_prompt"] == "") == (way == "graph")
        assert row["kernel"] == ("torch math" if way == "graph" else "")
    assert "generate, tokens/s" in capsys.readouterr().out


@torch.no_grad()
def test_the_step_over_a_full_cache_is_the_dense_decoders() -> None:
    case = case_of()
    config = case.model_config("dense")
    step = DenseStep(config, case, "torch math").eval()
    twin = Decoder(config.sizes(), [layer.build for layer in config.decoder_layers()]).eval()
    twin.load_state_dict(step.decoder.state_dict())
    caches = twin.new_caches(2, case.context)
    twin(torch.randint(0, 40, (2, case.context - 1)), caches=caches)
    for block, cache in zip(step.decoder.blocks, caches, strict=True):
        attention: Any = block.attention
        assert isinstance(attention, FullCacheAttention)
        for store, held in ((attention.keys, cache.keys), (attention.values, cache.values)):
            store.normal_()
            store[:, : case.context - 1] = held[:, : case.context - 1]
    step.get_buffer("ids").copy_(torch.tensor([[7], [11]]))
    expected = twin(torch.tensor([[7], [11]]), caches=caches)
    torch.testing.assert_close(step.decoder(step.get_buffer("ids")), expected)
    ids = step()
    assert ids.tolist() == expected[:, -1].argmax(-1, keepdim=True).tolist()
    # the next call reads them
    assert step.get_buffer("ids") is ids


def test_values_narrower_than_keys_are_served() -> None:
    case = case_of(shapes="4/2/16/8")
    assert list(kernels_of(case, CPU)) == ["torch math"]
    assert DenseStep(case.model_config("dense"), case, "torch math")().shape == (2, 1)


def test_a_way_that_fails_has_a_reason_and_no_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no [memory]")

    monkeypatch.setattr(generate, "_by_transformers", fail)
    result = measure_generate(case_of(), CPU)
    assert result.reasons == {"transformers": "RuntimeError: no [memory]"}
    assert set(result.step_ms) == {"nsa", "graph"}
    assert result.tokens_per_second("transformers") is None
    # our own failure is the command's
    monkeypatch.setattr(generate, "_nsa", fail)
    assert run_command(["generate", *WORDS, "--prompt", "20"]) == 1
    assert "no [memory]" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--new", "0"], "--new=0 generates nothing"),
        (["--prompt", "0"], "--prompt has '0'"),
        (["--shapes", "5/2/16/16"], "5/2/16/16"),
        (["--layers", "0"], "num_hidden_layers=0"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["generate", "--device", "cpu", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_nsa_transformers_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert run_command(["generate"]) == 2
    assert "install nsa-bench[transformers]" in " ".join(capsys.readouterr().err.split())


@pytest.mark.hardware(capability=(8, 0))
def test_all_ways_generate_on_a_gpu() -> None:
    result = measure_generate(case_of(device="cuda", shapes="4/2/64/64", prompt="200"), torch.device("cuda"))
    assert result.reasons == {}
    assert set(result.step_ms) == set(generate.WAYS)
    assert result.kernel
