"""A checkpoint is whole or refused: every damage is named before anything is loaded."""

import builtins
import json
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from nsa_train import checkpoint as checkpoints
from nsa_train.checkpoint import load_model, load_optimizer, open_checkpoint, save_checkpoint
from nsa_train.cli import run_command
from nsa_train.errors import CheckpointError, ConfigError
from nsa_train.model.decoder import Decoder, build_model, summed_loss
from nsa_train.optim import build_optimizer
from nsa_train.run_dir import RunDirectory

FILES = ["model.safetensors", "optimizer.safetensors", "config.toml", "manifest.json"]


def _train(model: Decoder, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = summed_loss(model(ids[:, :-1]), ids[:, 1:]) / 62
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def saved(tiny_run: RunDirectory, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_run.checkpoints / "step-5", tmp_path / "step-5"))


def test_weights_and_optimizer_come_back_bit_for_bit(tiny_config, tmp_path: Path) -> None:
    config = tiny_config()
    torch.manual_seed(0)
    model = build_model(config)
    optimizer = build_optimizer(model, config.train)
    _train(model, optimizer, range(3))
    save_checkpoint(tmp_path, step=3, config=config, model=model, optimizer=optimizer)
    straight = _train(model, optimizer, range(3, 8))

    opened = open_checkpoint(tmp_path)
    assert (opened.step, opened.config) == (3, config)
    again = load_model(opened).train()
    resumed = build_optimizer(again, config.train)
    load_optimizer(opened, again, resumed)
    assert _train(again, resumed, range(3, 8)) == straight
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_loading_draws_no_random_numbers_from_the_caller(saved: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(open_checkpoint(saved))
    assert torch.equal(torch.rand(3), expected)


def test_latest_points_at_the_last_save(tiny_run: RunDirectory) -> None:
    names = sorted(path.name for path in tiny_run.checkpoints.iterdir())
    assert names == ["latest", "step-3", "step-5"]
    assert open_checkpoint(tiny_run.checkpoints / "latest").step == 5
    assert open_checkpoint(tiny_run.checkpoints / "step-3").step == 3


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused(saved: Path, name: str) -> None:
    whole = (saved / name).read_bytes()
    for size in [*sorted(random.Random(name).sample(range(len(whole)), 10)), len(whole) - 1]:
        (saved / name).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=name):
            open_checkpoint(saved)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_refused(saved: Path, name: str) -> None:
    whole = (saved / name).read_bytes()
    places = random.Random(name).sample(range(8 * len(whole)), 20)
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        (saved / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name) as caught:
            open_checkpoint(saved)
        assert str(caught.value).count("\n") <= 2


@pytest.mark.parametrize("name", FILES[:3])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        open_checkpoint(saved)


def test_a_checkpoint_without_a_manifest_is_refused(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a manifest"):
        open_checkpoint(saved)


def test_a_damaged_file_names_expected_and_found(saved: Path) -> None:
    (saved / "config.toml").write_text("[train]\nsteps = 1\n")
    with pytest.raises(CheckpointError, match=r"config\.toml is damaged: size in bytes expected \d+, found 18"):
        open_checkpoint(saved)


def test_swapped_files_are_refused(saved: Path) -> None:
    model, optimizer = (saved / name for name in FILES[:2])
    model.rename(saved / "aside")
    optimizer.rename(model)
    (saved / "aside").rename(optimizer)
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(saved)


def test_a_manifest_of_another_version_or_content_is_refused(saved: Path) -> None:
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    for change in ({"schema_version": 2}, {"files": {}}):
        content = {name: value for name, value in {**manifest, **change}.items() if name != "sha256"}
        path.write_text(json.dumps({**content, "sha256": checkpoints._digest(content)}))
        with pytest.raises(CheckpointError, match=r"manifest\.json (has schema_version=2|lists \[\])"):
            open_checkpoint(saved)


def test_a_damaged_checkpoint_exits_1_without_a_traceback(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "model.safetensors").write_bytes(b"")
    assert run_command(["sample", str(saved), "--prompt", "x"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("nsa-train: ")
    assert "model.safetensors is damaged" in message
    assert "Traceback" not in message


def test_a_failed_save_leaves_the_one_before_and_no_debris(tiny_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    model = build_model(config)
    optimizer = build_optimizer(model, config.train)
    save_checkpoint(tmp_path, step=1, config=config, model=model, optimizer=optimizer)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for step in ("_manifest", "_flush"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, step, full_disk)
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(tmp_path, step=2, config=config, model=model, optimizer=optimizer)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
        assert open_checkpoint(tmp_path).step == 1


def test_no_pickle_is_written_or_read(tiny_run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load_model(open_checkpoint(tiny_run.root))
    folder = tiny_run.checkpoints / "step-5"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    for path in folder.iterdir():
        # a pickle of protocol 2 or later starts so, and a torch.save file is a zip
        assert not path.read_bytes().startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"))


def test_a_planted_pickle_is_never_run(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return builtins.exec, ("import builtins; builtins.bomb_went_off = True",)

    monkeypatch.delattr(builtins, "bomb_went_off", raising=False)
    for name in FILES:
        good = (saved / name).read_bytes()
        (saved / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError):
            open_checkpoint(saved)
        (saved / name).write_bytes(good)
    assert not hasattr(builtins, "bomb_went_off")


def test_weights_that_do_not_fit_the_config_are_named(tiny_config, saved: Path) -> None:
    opened = open_checkpoint(saved)
    other = checkpoints.Checkpoint(path=opened.path, step=5, config=tiny_config("model.n_layers=3"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not fit its config\.toml"):
        load_model(other)


def test_a_place_without_a_checkpoint_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
