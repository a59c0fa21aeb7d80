"""`nsa-bench generate`: NSA and two dense models of the same sizes generate; the dense step over a full cache is the dense decoder's own."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_bench import errors, generate
from nsa_bench.baselines import dense_decode_kernels
from nsa_bench.cli import run_command
from nsa_bench.generate import (
    DenseStep,
    FullCacheAttention,
    GenerateCase,
    NSAStep,
    make_generate_cases,
    measure_generate,
    times_of_generate,
)
from nsa_bench.options import GenerateOptions
from nsa_core.decoder import Decoder
from nsa_train.model.decoder import sizes_of
from nsa_train.settings.recipe import load_config

CPU = torch.device("cpu")
SIZES = {"shapes": "4/2/16/16", "hidden": 32, "layers": 2, "vocab": 40, "geometry": "8/4/16/4/24", "new": 3}
WORDS = ["--device", "cpu", *(word for name, value in SIZES.items() for word in (f"--{name}", str(value)))]


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
        assert float(row["tokens_per_s"]) > 0
        assert (row["ms_prompt"] == "") == (way in ("nsa graph", "dense graph"))
        assert row["kernel"] == ("torch math" if way == "dense graph" else "")
    assert "generate, tokens/s" in capsys.readouterr().out


def test_the_model_is_by_default_that_of_the_recipe_125m() -> None:
    config = make_generate_cases(GenerateOptions(device="cpu"))[0].model_config("nsa")
    recipe = load_config("125m")
    assert {layer.config for layer in config.decoder_layers()} == {recipe.nsa_config()}
    assert (config.num_hidden_layers, config.sizes()) == (recipe.model.n_layers, sizes_of(recipe))


@torch.no_grad()
def test_the_step_over_a_full_cache_is_the_dense_decoders() -> None:
    case = case_of()
    config = case.model_config("dense")
    step = DenseStep(config, case).eval()
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
    torch.testing.assert_close(step.logits(), expected)
    ids = step()
    assert ids.tolist() == expected[:, -1].argmax(-1, keepdim=True).tolist()
    # the next call reads them
    assert step.get_buffer("ids") is ids


@torch.no_grad()
def test_a_step_of_nsa_follows_its_prompt() -> None:
    case = case_of()
    step = NSAStep(case.model_config("nsa"), case).eval()
    torch.manual_seed(5)
    step.fill()
    torch.manual_seed(5)
    prompt = torch.randint(0, 40, (2, case.prompt))
    ids = torch.cat([prompt, torch.zeros(2, 1, dtype=torch.long)], 1)
    for _ in range(3):
        expected = step.decoder(ids)[:, -1].argmax(-1, keepdim=True)
        assert step().tolist() == expected.tolist()
        ids = torch.cat([ids, expected], 1)
    assert [cache.lengths.tolist() for cache in step.caches] == [[case.prompt + 3] * 2] * 2


def test_values_narrower_than_keys_are_served() -> None:
    case = case_of(shapes="4/2/16/8")
    step = DenseStep(case.model_config("dense"), case)
    assert step.kernels() == ["torch math"]
    assert step().shape == (2, 1)


@torch.no_grad()
def test_heads_of_every_kernel_are_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn has the heads of a group as its rows, and may return its lse too."""

    def kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
        [math] = dense_decode_kernels(q, k, v).values()
        return {"torch math": math, "flash_attn": lambda: (math().transpose(1, 2), None)}

    monkeypatch.setattr(generate, "dense_decode_kernels", kernels)
    case = case_of(shapes="8/2/16/16")
    step = DenseStep(case.model_config("dense"), case)
    found = []
    for kernel in step.kernels():
        step.use(kernel)
        found.append(step.logits())
    torch.testing.assert_close(*found)
    # a kernel of other logits has no time
    monkeypatch.setattr(
        generate,
        "dense_decode_kernels",
        lambda q, k, v: kernels(q, k, v) | {"torch wrong": lambda: kernels(q, k, v)["torch math"]().flip(1)},
    )
    timed: list[str] = []

    def note(call: DenseStep, *_: Any, **options: Any) -> float:
        # the step moves on to other ids
        call()
        attention: Any = call.decoder.blocks[0].attention
        timed.append(attention.kernel)
        return 9.0 - len(timed)

    monkeypatch.setattr(generate, "back_to_back_ms", note)
    assert generate._dense_by_graph(case, CPU) == {"kernel": "flash_attn", "step_ms": 7.0}
    assert timed == ["torch math", "flash_attn"]


def test_a_token_takes_the_median_interval_behind_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(generate.time, "perf_counter", lambda: clock[0])
    case = case_of(new=5)

    class Model:
        def generate(self, prompt: torch.Tensor, *, logits_processor: list[Any], **options: Any) -> torch.Tensor:
            # the prompt, a captured step of 7 s, steps of 5 ms
            for number, seconds in enumerate([0.1, 7.0, *[0.005] * (options["max_new_tokens"] - 2)]):
                clock[0] += seconds
                logits_processor[0](prompt, torch.full((2, 40), float(number)))
            return torch.zeros(2, case.context)

    found = times_of_generate(Model(), case, CPU)
    assert found == {"prompt_ms": pytest.approx(100), "step_ms": pytest.approx(5)}


def test_a_way_that_fails_has_a_reason_and_no_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no [memory]")

    monkeypatch.setattr(generate, "_by_transformers", fail)
    result = measure_generate(case_of(), CPU)
    assert result.reasons == {"transformers": "RuntimeError: no [memory]"}
    assert set(result.step_ms) == {"nsa", "nsa graph", "dense graph"}
    assert result.tokens_per_second("transformers") is None
    # our own failure is the command's
    monkeypatch.setattr(generate, "_nsa_by_graph", fail)
    assert run_command(["generate", *WORDS, "--prompt", "20"]) == 1
    assert "nsa graph: RuntimeError: no [memory]" in capsys.readouterr().err
    monkeypatch.setattr(generate, "_nsa", fail)
    assert run_command(["generate", *WORDS, "--prompt", "20"]) == 1
    said = capsys.readouterr()
    assert "nsa: RuntimeError: no [memory]" in said.err
    assert "generate, tokens/s" in said.out


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
    assert "in a checkout: pip install ./packages/nsa-transformers" in " ".join(capsys.readouterr().err.split())


@pytest.mark.hardware(capability=(8, 0))
# of Inductor and of CUDA graphs, where Transformers' model is compiled
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_all_ways_generate_on_a_gpu_for_several_prompts() -> None:
    for prompt in ("200", "300"):
        result = measure_generate(case_of(device="cuda", shapes="4/2/64/64", prompt=prompt), torch.device("cuda"))
        assert result.reasons == {}
        assert set(result.step_ms) == set(generate.WAYS)
        assert result.kernel
