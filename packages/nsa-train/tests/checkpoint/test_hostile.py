"""An untrusted checkpoint runs none of its code, for any file content and even with a valid manifest."""

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nsa_train.checkpoint import load_model, open_checkpoint, restore
from nsa_train.checkpoint.commands import listing
from nsa_train.checkpoint.layout import FILES, MANIFEST
from nsa_train.checkpoint.manifest import write_manifest
from nsa_train.checkpoint.store import latest_valid
from nsa_train.errors import CheckpointError

_unpickled: list[str] = []
_watched = {"now": False}


def _watch(event: str, _: object) -> None:
    if _watched["now"] and event == "pickle.find_class":
        _unpickled.append(event)


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def _no_pickle_is_read(tmp_path: Path) -> Iterator[None]:
    _unpickled.clear()
    _watched["now"] = True
    yield
    _watched["now"] = False
    assert not _unpickled
    assert not (tmp_path / "bomb").exists()


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path / "bomb"),)


def _bombs(folder: Path) -> dict[str, bytes]:
    torch.save({"weights": Bomb(folder)}, folder / "archive")
    return {"pickle": pickle.dumps(Bomb(folder)), "text": pickle.dumps(Bomb(folder), protocol=0), "zip": (folder / "archive").read_bytes()}


def _use(root: Path, parts: tuple[object, torch.nn.Module, torch.optim.Optimizer]) -> None:
    """Everything that a command does with a checkpoint."""
    _, model, optimizer = parts
    listing(root)
    latest_valid(root)
    opened = open_checkpoint(root / "step-2")
    load_model(opened)
    restore(opened, model=model, optimizer=optimizer)


@pytest.mark.parametrize("kind", ["pickle", "text", "zip"])
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("is_signed", [False, True])
def test_a_pickle_in_the_place_of_any_file_is_refused_unread(
    root: Path, tmp_path: Path, build_parts, name: str, kind: str, is_signed: bool
) -> None:
    (root / "step-2" / name).write_bytes(_bombs(tmp_path)[kind])
    if is_signed and name != MANIFEST:
        write_manifest(root / "step-2", 2)
    with pytest.raises(CheckpointError) as caught:
        _use(root, build_parts(3))
    assert str(caught.value).count("\n") <= 2


@pytest.mark.parametrize("name", [".metadata", "data.pkl", "pytorch_model.bin", "__0_0.distcp", "__init__.py", "latest"])
def test_a_pickle_beside_the_files_is_never_opened(root: Path, tmp_path: Path, build_parts, name: str) -> None:
    for folder in (root, root / "step-2"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(_bombs(tmp_path)["pickle"])
    _use(root, build_parts(3))


def test_the_bomb_would_have_gone_off(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path)))
    assert (tmp_path / "bomb").exists()
    assert _unpickled
    (tmp_path / "bomb").rmdir()
    _unpickled.clear()


def test_no_pickle_is_written(good_root: Path) -> None:
    for path in (good_root / "step-2").iterdir():
        # a pickle of protocol 2 or later starts so, and a torch.save file is a zip
        assert not path.read_bytes().startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"))
