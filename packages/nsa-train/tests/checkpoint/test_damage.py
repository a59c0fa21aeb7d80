"""Any damage is reported before anything is loaded, and a resume takes the previous checkpoint."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch

from nsa_train.checkpoint import load_model, open_checkpoint, resume_point
from nsa_train.checkpoint import manifest as manifests
from nsa_train.checkpoint.layout import FILES, MANIFEST
from nsa_train.checkpoint.store import latest_valid
from nsa_train.errors import CheckpointError, ConfigError

ALL = (*FILES, MANIFEST)
TRUNCATIONS, FLIPS = 100, 200


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("tensors were loaded")

    monkeypatch.setattr(safetensors.torch, "load_file", refuse)


def _is_refused(root: Path, *words: str) -> None:
    """step-2 is refused in at most three lines that hold `words`, and the resume is from step-1."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(root / "step-2")
    message = str(caught.value)
    assert message.count("\n") <= 2
    assert all(word in message for word in words), message
    found = latest_valid(root)
    assert found is not None
    assert (found.step, found.refused) == (1, (message,))


def _spread(count: int, seed: int, folder: Path) -> Iterator[tuple[str, int]]:
    """`count` positions, equally many in each file: (name, byte)."""
    generator = random.Random(seed)
    for number in range(count):
        name = ALL[number % len(ALL)]
        yield name, generator.randrange((folder / name).stat().st_size)


def test_a_file_truncated_anywhere_is_refused(root: Path) -> None:
    for name, size in [*_spread(TRUNCATIONS, 0, root / "step-2"), *((name, -1) for name in ALL)]:
        path = root / "step-2" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:size])
        _is_refused(root, str(path))
        path.write_bytes(whole)
    assert latest_valid(root).step == 2


def test_one_flipped_bit_anywhere_is_refused(root: Path) -> None:
    for number, (name, at) in enumerate(_spread(FLIPS, 1, root / "step-2")):
        path = root / "step-2" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << number % 8]) + whole[at + 1 :])
        _is_refused(root, str(path))
        path.write_bytes(whole)
    assert latest_valid(root).step == 2


@pytest.mark.parametrize("name", ALL)
def test_every_bit_that_json_would_forgive_is_refused(root: Path, name: str) -> None:
    path = root / "step-2" / name
    for change in (b" ", b"\n", b"\0"):
        whole = path.read_bytes()
        path.write_bytes(whole + change)
        _is_refused(root, str(path))
        path.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
def test_a_dropped_file_is_named_with_what_was_expected(root: Path, name: str) -> None:
    size = (root / "step-2" / name).stat().st_size
    (root / "step-2" / name).unlink()
    _is_refused(root, f"{root / 'step-2' / name} is missing", f"expected a file of {size} bytes", "found none")


def test_a_dropped_manifest_is_named(root: Path) -> None:
    (root / "step-2" / MANIFEST).unlink()
    _is_refused(root, f"{root / 'step-2' / MANIFEST} is not a manifest")


@pytest.mark.parametrize("name", ALL)
def test_a_renamed_file_is_refused(root: Path, name: str) -> None:
    (root / "step-2" / name).rename(root / "step-2" / f"{name}.bak")
    _is_refused(root, str(root / "step-2" / name))


@pytest.mark.parametrize(("one", "other"), [(a, b) for i, a in enumerate(ALL) for b in ALL[i + 1 :]])
def test_two_swapped_files_are_refused(root: Path, one: str, other: str) -> None:
    first, second = (root / "step-2" / name for name in (one, other))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    _is_refused(root)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", MANIFEST])
def test_a_file_of_another_step_is_refused(root: Path, name: str) -> None:
    if name == "rng.safetensors":
        # equal content is no damage: make it differ
        safetensors.torch.save_file({}, root / "step-2" / name)
    else:
        shutil.copy(root / "step-1" / name, root / "step-2" / name)
    _is_refused(root, str(root / "step-2"))


def test_a_directory_under_another_steps_name_is_refused(root: Path) -> None:
    shutil.rmtree(root / "step-2")
    shutil.copytree(root / "step-1", root / "step-2")
    _is_refused(root, "expected the manifest of step-2, found that of step-1")


def test_a_file_replaced_by_a_directory_or_a_dangling_link_is_refused(root: Path) -> None:
    path = root / "step-2/model.safetensors"
    path.unlink()
    path.mkdir()
    _is_refused(root, f"{path} cannot be read (it is a directory, and only a regular file is read)")
    path.rmdir()
    path.symlink_to("nowhere")
    _is_refused(root, "is missing")


def test_a_damaged_file_names_expected_and_found(root: Path) -> None:
    path = root / "step-2/config.toml"
    size = path.stat().st_size
    path.write_text("[train]\nsteps = 1\n")
    _is_refused(root, f"{path} is damaged: size in bytes expected {size}, found 18")
    path.write_bytes(b"#" * size)
    _is_refused(root, f"{path} is damaged: SHA-256 expected ", ", found ")


def test_a_manifest_that_an_editor_formatted_is_not_said_to_have_another_sum(root: Path) -> None:
    path = root / "step-2" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text())))
    _is_refused(root, "is damaged: its values are those written and its bytes are not, as after an editor")


def test_a_sum_that_is_no_sum_cannot_write_to_the_terminal(root: Path) -> None:
    path = root / "step-2" / MANIFEST
    path.write_text(json.dumps({"step": 2, "sha256": "a\nnsa-train: all is well\x1b[2J\ud800"}))
    _is_refused(root, f"{path} is damaged: SHA-256 expected 'a\\nnsa-train: all is well\\x1b[2J\\ud800', found '")


def _with_manifest(folder: Path, **changes: object) -> None:
    """Change the manifest of `folder` and sign it again, as a newer version or a person would."""
    content = {**manifests.read_manifest(folder), **changes}
    (folder / MANIFEST).write_text(manifests._spelled(content))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema_version": 2}, "has schema_version=2 (this version reads 3)"),
        ({"files": {}}, "files=[] is not config.toml, model.safetensors, "),
        ({"files": {"../../outside": {"size": 1, "sha256": ""}}}, "files=['../../outside'] is not"),
        ({"files": dict.fromkeys(FILES, 1)}, "files[model.safetensors]=1 is not a table"),
        ({"files": {name: {"size": "x", "sha256": "zz"} for name in FILES}}, "files[rng.safetensors].size='x' is not an integer from 0"),
        ({"step": "2"}, "step='2' is not an integer from 0"),
        ({"created": "\ud800"}, "created='\\ud800' is not a date"),
        ({"created": "2026-01-31\x1b12:00:00"}, "created='2026-01-31\\x1b12:00:00' is not a date"),
        ({"more": 1}, "'more' is unknown"),
        ({"created": [[[[]]]]}, "created=[[[...]]] is not a date"),
        ({"step": 3}, "expected the manifest of step-2, found that of step-3"),
    ],
)
def test_a_signed_manifest_of_other_content_is_refused(root: Path, changes: dict[str, object], words: str) -> None:
    _with_manifest(root / "step-2", **changes)
    _is_refused(root, str(root / "step-2" / MANIFEST), words)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.toml", "[model]\ndim = 1\n", "config.toml is not a recipe that this version reads (model.n_layers is missing"),
        ("config.toml", "no toml", "config.toml is not a recipe that this version reads (Expected '='"),
        ("config.toml", "a = " + "[" * 30_000, "config.toml is not a recipe that this version reads (values nested more than 8 deep"),
        ("config.toml", ".".join("a" * 30_000) + " = 1", "config.toml is not a recipe that this version reads (a key of more than 8 parts"),
        ("state.json", "no json", "state.json is not JSON (Expecting value"),
        ("state.json", "[" * 100_000, "state.json is not JSON (its values are nested too deep)"),
        ("state.json", "[]", "state.json is damaged: [] is not a table"),
        ("state.json", '{"data": 1}', "state.json is damaged: world_size is missing; schedule is missing; "),
    ],
)
def test_a_whole_file_of_strange_content_is_refused(root: Path, name: str, content: str, words: str) -> None:
    (root / "step-2" / name).write_text(content)
    manifests.write_manifest(root / "step-2", 2)
    _is_refused(root, words)


def test_the_manifest_is_json_with_schema_size_and_sha256(good_root: Path) -> None:
    manifest = json.loads((good_root / "step-2" / MANIFEST).read_text())
    assert manifest["schema_version"] == manifests.SCHEMA_VERSION
    assert manifest["step"] == 2
    assert set(manifest["files"]) == set(FILES)
    for name, entry in manifest["files"].items():
        assert entry["size"] == (good_root / "step-2" / name).stat().st_size
        assert len(entry["sha256"]) == 64


def test_when_every_checkpoint_is_damaged_the_resume_is_refused(root: Path) -> None:
    for step in (1, 2):
        (root / f"step-{step}/state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints in .* is complete") as caught:
        latest_valid(root)
    assert str(root / "step-2/state.json") in str(caught.value)
    assert str(caught.value).count("\n") <= 2


def test_without_any_checkpoint_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    assert latest_valid(tmp_path / "absent") is None
    assert resume_point(tmp_path) is None


def test_latest_is_tried_first_and_later_steps_last(root: Path) -> None:
    # a run that was resumed from step 1 and killed: step-2 belongs to the branch that was left
    (root / "latest").unlink()
    (root / "latest").symlink_to("step-1")
    assert latest_valid(root).step == 1
    (root / "step-1/state.json").write_text("{}")
    assert latest_valid(root).step == 2


@pytest.mark.parametrize("target", ["step-9", "../elsewhere", "step-1/../step-1/nothing"])
def test_a_latest_that_names_nothing_is_passed_over(root: Path, target: str) -> None:
    (root / "latest").unlink()
    (root / "latest").symlink_to(target)
    assert latest_valid(root).step == 2


def test_a_lost_latest_leaves_the_newest_step(root: Path) -> None:
    (root / "latest").unlink()
    assert latest_valid(root).step == 2


def test_a_named_step_is_taken_or_refused_but_never_replaced(root: Path) -> None:
    assert resume_point(root, step=1).step == 1
    (root / "step-1/state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        resume_point(root, step=1)
    with pytest.raises(ConfigError, match=r"has no step-7 \(there are: 1, 2\)"):
        resume_point(root, step=7)


def test_a_place_without_a_checkpoint_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)


def test_weights_that_are_no_safetensors_file_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (root / "step-2/model.safetensors").write_bytes(b"\xff" * 100)
    manifests.write_manifest(root / "step-2", 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        load_model(open_checkpoint(root))
