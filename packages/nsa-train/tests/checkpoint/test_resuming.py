"""The restored state equals the captured one: weights, moments, schedule, scaler and every generator."""

import random
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from nsa_train.checkpoint import CheckpointWriter, load_model, open_checkpoint, restore, resume_point
from nsa_train.checkpoint.resuming import check_resumable
from nsa_train.checkpoint.rng import capture_rng, restore_rng, seed_fresh_rng, seed_rng
from nsa_train.checkpoint.tensors import model_tensors, optimizer_tensors
from nsa_train.errors import CheckpointError, ConfigError
from nsa_train.settings.config import structure, unstructure
from nsa_train.settings.recipe import apply_override


def _draws() -> list[float]:
    return [float(torch.rand(())), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]


def test_weights_and_moments_come_back_bit_for_bit(root: Path, build_parts) -> None:
    _, model, optimizer = build_parts(5)
    restore(open_checkpoint(root), model=model, optimizer=optimizer)
    saved = build_parts(2)
    for ours, theirs in ((model_tensors(model), model_tensors(saved.model)), _moments(model, optimizer, saved)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _moments(model, optimizer, saved):
    return optimizer_tensors(model, optimizer), optimizer_tensors(saved.model, saved.optimizer)


def test_a_fresh_optimizer_is_filled_and_a_used_one_is_emptied(root: Path, tmp_path: Path, build_parts) -> None:
    fresh = build_parts(5, is_trained=False)
    assert not optimizer_tensors(fresh.model, fresh.optimizer)
    with CheckpointWriter(tmp_path / "untrained") as writer:
        writer.save(0, fresh.snapshot())
    restore(open_checkpoint(root), model=fresh.model, optimizer=fresh.optimizer)
    assert len(optimizer_tensors(fresh.model, fresh.optimizer)) == 3 * len(list(fresh.model.parameters()))
    restore(open_checkpoint(tmp_path / "untrained"), model=fresh.model, optimizer=fresh.optimizer)
    assert not optimizer_tensors(fresh.model, fresh.optimizer)


def test_bfloat16_weights_come_back_bit_for_bit(tmp_path: Path, build_parts) -> None:
    parts, other = build_parts(1, is_trained=False), build_parts(2, is_trained=False)
    parts.model.bfloat16()
    other.model.bfloat16()
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, parts.snapshot())
    restore(open_checkpoint(tmp_path), model=other.model, optimizer=other.optimizer)
    assert other.model.embedding.weight.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(parts.model.parameters(), other.model.parameters(), strict=True))


def test_the_learning_rate_and_the_scaler_come_back(tmp_path: Path, build_parts) -> None:
    parts, other = build_parts(lr=0.25), build_parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=77)
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, parts.snapshot(scaler=scaler))
    again = torch.amp.GradScaler("cpu")
    restore(open_checkpoint(tmp_path), model=other.model, optimizer=other.optimizer, scaler=again)
    assert again.state_dict() == scaler.state_dict()
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.25]


def test_every_generator_goes_on_where_it_was(tmp_path: Path, build_parts) -> None:
    # an odd number of Gaussians leaves one cached, in Python and in numpy
    random.gauss(0, 1)
    numpy.random.randn()
    parts = build_parts()
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, parts.snapshot())
    expected = _draws() + _draws()
    restore(open_checkpoint(tmp_path), model=parts.model, optimizer=parts.optimizer)
    assert _draws() + _draws() == expected


def test_capturing_and_loading_draw_nothing(root: Path, build_parts) -> None:
    state = capture_rng()
    expected = _draws()
    restore_rng(state)
    build_parts().snapshot()
    load_model(open_checkpoint(root))
    assert _draws() == expected


def test_generators_without_numpy_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    state = capture_rng()
    assert sorted(state) == ["python.gauss", "python.words", "torch_cpu"]
    restore_rng(state)


def test_a_seed_starts_every_generator() -> None:
    drawn = []
    for seed in (3, 3, 2**40 + 3):
        seed_rng(seed)
        drawn.append(_draws())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_rank_that_the_checkpoint_does_not_know_is_seeded_apart_and_repeatably() -> None:
    known, seen = capture_rng(), {}
    for rank in (1, 2):
        for step in (3, 4):
            for _ in range(2):
                seed_fresh_rng(step=step, rank=rank, state_of_rank_0=known)
                seen.setdefault((rank, step), set()).add(tuple(_draws()))
    assert all(len(draws) == 1 for draws in seen.values())
    assert len(set.union(*seen.values())) == 4


def test_compiling_the_model_or_a_part_of_it_changes_no_name(build_parts) -> None:
    model = build_parts().model
    for block in model.blocks:
        block.attention = torch.compile(block.attention, backend="eager")
    assert list(model_tensors(torch.compile(model, backend="eager"))) == list(build_parts().model.state_dict())


def test_weights_of_another_model_are_refused_and_nothing_is_changed(root: Path, build_parts) -> None:
    _, model, optimizer = build_parts()
    model.norm = nn.LayerNorm(32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors does not fit its config\.toml: norm\.bias expected float32 \[32\], found none"
    ):
        restore(open_checkpoint(root), model=model, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_dtype_is_never_cast(root: Path, build_parts) -> None:
    _, model, optimizer = build_parts()
    with pytest.raises(CheckpointError, match=r"expected bfloat16 \[258, 32\], found float32 \[258, 32\]"):
        restore(open_checkpoint(root), model=model.bfloat16(), optimizer=optimizer)


def test_moments_of_another_model_are_refused(tmp_path: Path, build_parts) -> None:
    parts = build_parts()
    snapshot = parts.snapshot()
    snapshot.optimizer["nowhere/exp_avg"] = torch.zeros(2)
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, snapshot)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors does not fit this model: nowhere/exp_avg expected none"):
        restore(open_checkpoint(tmp_path), model=parts.model, optimizer=parts.optimizer)


def test_generators_that_cannot_be_set_are_refused(tmp_path: Path, build_parts) -> None:
    parts = build_parts()
    for rng in ({}, {"rank0/torch_cpu": torch.zeros(3, dtype=torch.uint8)}):
        snapshot = parts.snapshot()
        snapshot.rng.clear()
        snapshot.rng.update(rng)
        with CheckpointWriter(tmp_path) as writer:
            writer.save(1, snapshot)
        with pytest.raises(CheckpointError, match=r"rng\.safetensors does not hold the state of the generators"):
            restore(open_checkpoint(tmp_path), model=parts.model, optimizer=parts.optimizer)


def test_a_resume_point_says_everything_but_the_tensors(root: Path, build_parts) -> None:
    (root / "step-2/model.safetensors").write_bytes(b"")
    point = resume_point(root)
    assert (point.step, point.path, point.config) == (1, root / "step-1", build_parts().config)
    assert point.state["data"]["batches"] == 7
    [refusal] = point.refused
    assert "step-2/model.safetensors is damaged" in refusal


def _with(config, *overrides: str):
    tables = unstructure(config)
    for override in overrides:
        apply_override(tables, override)
    return structure(tables)


def test_a_run_may_go_on_longer_but_not_with_another_model(root: Path) -> None:
    point = resume_point(root)
    check_resumable(point, _with(point.config, "train.steps=9999", "train.lr=0.5", "nsa.backends={slc='sdpa'}"))
    with pytest.raises(ConfigError) as caught:
        check_resumable(point, _with(point.config, "model.n_layers=3", 'nsa.branches=["win"]'))
    assert str(caught.value).splitlines() == [
        "model.n_layers=3 is not what step-2 was saved with (its weights would not fit); use --set model.n_layers=1",
        'nsa.branches=["win"] is not what step-2 was saved with (its weights would not fit); use --set nsa.branches=["cmp", "slc", "win"]',
    ]


def test_a_run_does_not_go_on_with_a_geometry_that_its_weights_would_fit(root: Path) -> None:
    point = resume_point(root)
    with pytest.raises(ConfigError) as caught:
        check_resumable(point, _with(point.config, "nsa.window_size=64", "model.n_layers=3"))
    assert str(caught.value).splitlines() == [
        "model.n_layers=3 is not what step-2 was saved with (its weights would not fit); use --set model.n_layers=1",
        "nsa.window_size=64 is not what step-2 was saved with (a resume continues the same model); use --set nsa.window_size="
        f"{point.config.nsa.window_size}, or start a new run from these weights with --set train.init_from={point.path}",
    ]
    # the stride changes with the block sizes, none of them alone
    geometry = "nsa.compression_block_size=6", "nsa.compression_stride=6", "nsa.selection_block_size=12"
    with pytest.raises(ConfigError) as caught:
        check_resumable(point, _with(point.config, "nsa.compressor=mean", *geometry))
    assert "nsa.compression_stride=6 is not what step-2 was saved with (its weights would not fit)" in str(caught.value)


def test_a_run_does_not_go_on_with_other_rows_of_data(root: Path) -> None:
    point = resume_point(root)
    check_resumable(point, _with(point.config, "train.accumulate=4", "data.workers=3", "data.on_bad_record=skip", "data.prefetch=1"))
    with pytest.raises(ConfigError) as caught:
        check_resumable(point, _with(point.config, "train.batch_size=64", "data.shuffle_seed=9"))
    saved = point.config.train.batch_size
    assert sorted(str(caught.value).splitlines()) == [
        "data.shuffle_seed=9 is not what step-2 was saved with (its position is one in other rows); use --set data.shuffle_seed=0",
        f"train.batch_size=64 is not what step-2 was saved with (its position is one in other rows); use --set train.batch_size={saved}",
    ]
