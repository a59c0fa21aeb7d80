"""Every key of every table, spoiled in every way: named at once with a suggestion, exit code 2, no GPU touched."""

import re
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from nsa_train.cli import run_command
from nsa_train.settings.config import TABLES

WRONG = ("word", "true", "1.5", "-1", "nan", "[1]", "{a = 1}", "''")
"""As TOML: a text, a flag, a fraction, a number below zero, no number, a list, a table, nothing."""
ALLOWED = {
    # what of WRONG is right
    "''": {"train.selection_teacher"},
    "word": {"data.path", "data.subset", "data.tokenizer_path", "data.name", "train.init_from"},
    "true": {
        "train.compile",
        "train.deterministic",
        "train.async_save",
        "train.skip_loss_spikes",
        "train.samples",
        "data.packing",
        "nsa.qk_norm",
        "nsa.qkv_bias",
        "model.tie_embeddings",
    },
    "1.5": {
        "train.lr",
        "train.weight_decay",
        "train.grad_clip",
        "train.selection_loss",
        "nsa.gate_temperature",
        "nsa.rope_theta",
        "data.timeout_s",
        "data.in_memory_mib",
    },
}
SECONDS = 1.0


def _keys() -> list[str]:
    return [f"{table}.{key.name}" for table, kind in TABLES.items() for key in attrs.fields(kind)]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for a GPU, or of one, is an error."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a GPU was touched")

    for name in ("_lazy_init", "is_available", "device_count", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, refuse)


def _complaint(recipe: Path, out: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    # of this process alone: other tests run at the same time
    started = time.process_time()
    code = run_command(["run", str(recipe), "--out", str(out), *(word for override in overrides for word in ("--set", override))])
    seconds = time.process_time() - started
    message = capsys.readouterr().err
    assert code == 2, f"{overrides}: {code}, {message}"
    assert seconds < SECONDS
    assert "Traceback" not in message
    assert not out.exists()
    return message


@pytest.mark.parametrize("key", _keys())
def test_a_value_of_the_wrong_kind_is_named_with_one_that_works(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    name = key.partition(".")[2]
    for wrong in WRONG:
        if key in ALLOWED.get(wrong, set()):
            continue
        message = _complaint(tiny_recipe, tmp_path / "out", capsys, f"{key}={wrong}")
        assert name in message, message
        assert key.partition(".")[0] in message, message
        assert "use " in message, message


def _is_number(key: str, *kinds: type) -> bool:
    table, _, name = key.partition(".")
    return attrs.fields_dict(TABLES[table])[name].type in (kinds or (int, float))


@pytest.mark.parametrize("key", [key for key in _keys() if _is_number(key)])
def test_a_number_without_measure_is_refused_with_the_limit(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    for wrong in ("9" * 20, "9" * 400, "1e300", "inf"):
        if (key, wrong) == ("train.grad_clip", "inf"):
            continue
        message = _complaint(tiny_recipe, tmp_path / "out", capsys, f"{key}={wrong}")
        assert re.search(rf"^nsa-train: {key}=\S+ is not .*( to | at most )\d", message), message
        assert "use " in message, message
    assert key in _complaint(tiny_recipe, tmp_path / "out", capsys, f"{key}={'9' * 5000}")


@pytest.mark.parametrize("key", [key for key in _keys() if _is_number(key, float)])
def test_a_fraction_too_small_to_mean_anything_is_refused_with_the_limit(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    for wrong in ("1e-300", "5e-324", "1e-30", "-5e-324"):
        message = _complaint(tiny_recipe, tmp_path / "out", capsys, f"{key}={wrong}")
        assert re.search(rf"^nsa-train: {key}=\S+ is not .*from [0-9]\S* to \d", message), message
        assert "use " in message, message


SMALL = [
    # as small as a person may want them, and exact zeros of either sign
    *("train.lr=1e-12", "train.lr=1e-8", "train.weight_decay=1e-12", "train.weight_decay=0", "train.weight_decay=-0.0"),
    *("train.grad_clip=1e-9", "nsa.gate_temperature=1e-6", "nsa.gate_temperature=0.01", "nsa.rope_theta=1", "nsa.rope_theta=1.0"),
    *("data.timeout_s=0.001", "data.in_memory_mib=0", "data.in_memory_mib=-0.0", "data.in_memory_mib=1e-6"),
    "nsa.rope_scaling={kind='yarn', factor=2.0, beta_slow=1e-6, attention_factor=1e-6}",
]


@pytest.mark.parametrize("override", SMALL)
def test_a_small_number_with_a_meaning_is_taken(tiny_recipe: Path, capsys: pytest.CaptureFixture[str], override: str) -> None:
    assert run_command(["run", str(tiny_recipe), "--set", override, "--print-config"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("key", _keys())
def test_a_typo_is_unknown_and_gets_the_nearest_key(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    typo = f"{key[:-1]}{key[-2]}x"
    message = _complaint(tiny_recipe, tmp_path / "out", capsys, f"{typo}=1")
    assert f"{typo} is unknown" in message
    table = key.partition(".")[0]
    assert f"did you mean {table}." in message or "use one of" in message


PAIRS = [
    # what cannot go together, and the words that say so
    (("train.warmup_steps=9", "train.steps=9"), ["train.warmup_steps=9", "train.steps=9", "use 0"]),
    (("model.n_heads=4", "model.n_kv_heads=3"), ["model.n_kv_heads=3", "model.n_heads=4", "use 2"]),
    (("model.head_dim_qk=15",), ["model.head_dim_qk=15", "use 16"]),
    (("train.nproc_per_node=2",), ["train.nproc_per_node=2", "train.strategy='single'", "train.strategy=ddp"]),
    (("train.strategy=ddp", "train.nproc_per_node=3"), ["train.batch_size=2", "train.nproc_per_node=3", "use --set train.batch_size=3"]),
    (("model.attention=dense", "train.profile=branches"), ["train.profile='branches'", "model.attention='dense'", "train.profile=none"]),
    (("model.vocab_size=257",), ["model.vocab_size=257", "258 ids", "data.tokenizer='byte'", "use 320"]),
    (
        (
            "data.path=",
            "data.source=needle",
            "data.tokenizer=gpt2",
            "data.needle_symbols=20000",
            "data.needle_pairs=1",
            "data.needle_queries=1",
        ),
        ["data.needle_symbols=20000 needs 60000 ids", "50258 rows", "use 16752 or less, or --set model.vocab_size=60032"],
    ),
    (("data.source=stdlib",), ["data.path", "data.source='stdlib'", "use"]),
    (("data.source=synthetic",), ["data.path", "data.source='synthetic'", "use"]),
    (("data.tokenizer_path=x.json",), ["data.tokenizer_path='x.json'", "data.tokenizer='byte'", "data.tokenizer=gpt2"]),
    (("nsa.selection_block_size=5",), ["nsa.selection_block_size=5", "compression_stride=2", "use"]),
    (("nsa.compression_block_size=5",), ["nsa.compression_stride=2", "compression_block_size=5", "use 1"]),
    (("nsa.num_selected_blocks=2",), ["nsa.num_selected_blocks=2", "num_initial_blocks", "use"]),
    (("nsa.branches=['cmp', 'cmp']",), ["nsa.branches", "use"]),
    (("nsa.branches=[]",), ["nsa.branches", "use"]),
    (("trian.steps=3",), ["trian is unknown", "did you mean train?"]),
    (("train.dim=3",), ["train.dim is unknown", "did you mean model.dim?"]),
]


@pytest.mark.parametrize(("overrides", "parts"), PAIRS, ids=[" ".join(overrides) for overrides, _ in PAIRS])
def test_an_impossible_pair_is_named_from_both_sides(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], parts: list[str]
) -> None:
    message = _complaint(tiny_recipe, tmp_path / "out", capsys, *overrides)
    assert all(part in message for part in parts), message
