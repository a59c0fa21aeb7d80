"""Properties of the shipped recipes: counted sizes, the production profile, a dense twin by one key."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from nsa_train.cli import run_command
from nsa_train.model.decoder import count_parameters
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config


def test_125m_has_the_size_of_its_name_vocabulary_included() -> None:
    """The earlier system called a model of 78M parameters 125M."""
    config = load_config("125m")
    for count in count_parameters(config):
        assert 110e6 <= count <= 130e6
    model, nsa = config.model, config.nsa
    assert (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.head_dim_qk, model.head_dim_v) == (768, 12, 12, 2, 64, 64)
    assert model.vocab_size == 50304
    sizes = (nsa.compression_block_size, nsa.compression_stride, nsa.selection_block_size, nsa.num_selected_blocks, nsa.window_size)
    assert sizes == (32, 16, 64, 16, 512)
    assert config.train.seq_len >= 2048


def test_350m_64k_has_the_size_and_length_of_its_name() -> None:
    config = load_config("350m-64k")
    for count in count_parameters(config):
        assert 320e6 <= count <= 380e6
    assert config.train.seq_len == 65536
    assert config.train.loss_chunk > 0


def test_a100_is_the_production_profile_of_125m() -> None:
    config, small = load_config("a100"), load_config("125m")
    train = config.train
    assert (train.precision, train.steps, train.save_every, train.eval_every) == ("bf16", 50_000, 5_000, 1_000)
    assert config.data.source == "fineweb_edu"
    assert (config.model, config.nsa) == (small.model, small.nsa)
    # kernels are found by routing: nothing pins the reference
    assert config.nsa.backends == {}


def test_showcase_is_small(tiny_text: Path) -> None:
    config = load_config("showcase", [f"data.path={tiny_text}"])
    model = config.model
    assert all(1e6 < count < 3e6 for count in count_parameters(config))
    assert 4 <= model.n_layers <= 8
    assert 128 <= model.dim <= 512
    assert 4 <= model.n_heads <= 8
    assert 1 <= model.n_kv_heads <= 4
    assert 256 <= config.train.seq_len <= 512


@pytest.mark.parametrize("name", ["demo", "showcase", "125m", "350m-64k", "a100"])
def test_recipes_for_long_rows_train_one_k_and_v_and_the_others_the_papers_layer(name: str, tiny_text: Path) -> None:
    """Decision 0036."""
    config = load_config(name, [f"data.path={tiny_text}"] if name == "showcase" else [])
    is_long = config.train.seq_len >= 2048
    assert (config.nsa.compressor, config.nsa.kv) == (("mean", "shared") if is_long else ("mlp", "separate"))


@pytest.mark.parametrize("name", ["demo", "125m", "350m-64k", "a100"])
def test_the_twins_differ_in_one_key(name: str) -> None:
    def tables(config: RunConfig) -> str:
        from nsa_train.settings.recipe import to_toml

        return to_toml(config)

    nsa, dense = load_config(name), load_config(name, ["model.attention=dense"])
    changed = [pair for pair in zip(tables(nsa).splitlines(), tables(dense).splitlines(), strict=True) if len(set(pair)) > 1]
    assert changed == [('attention = "nsa"', 'attention = "dense"')]
    assert count_parameters(nsa) == count_parameters(dense)


def _train_environment() -> dict[str, Any]:
    """Return the settings of the hatch environment `train`, those that it inherits from `default` included."""
    text = (Path(__file__).resolve().parents[4] / "hatch.toml").read_text(encoding="utf-8")
    environments: dict[str, Any] = tomllib.loads(text)["envs"]
    settings: dict[str, Any] = environments["default"] | environments["train"]
    return settings


@pytest.mark.parametrize("script", ["demo", "showcase", "a100"])
def test_a_script_of_the_train_environment_runs_its_recipe(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = _train_environment()["scripts"][script].replace("{args}", "--print-config").split()
    assert (program, words[:2]) == ("nsa-train", ["run", script])
    assert run_command(words) == 0
    assert "[train]" in capsys.readouterr().out


def test_the_script_preflight_judges_a100_unless_another_recipe_is_named() -> None:
    assert _train_environment()["scripts"]["preflight"] == "nsa-train preflight {args:a100}"


def test_the_train_environment_has_what_a100_reads_its_data_with() -> None:
    names = {requirement.partition(">")[0] for requirement in _train_environment()["dependencies"]}
    assert {"datasets", "tiktoken", "tokenizers"} <= names


def test_both_counts_are_printed(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["preflight", "125m", "--machine", "h200", "--out", str(tmp_path / "out")]) == 0
    assert "model: nsa attention; 112,409,520 parameters with nsa, 111,790,848 with dense" in capsys.readouterr().out
