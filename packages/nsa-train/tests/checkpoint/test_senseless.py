"""A checkpoint that is signed and makes no sense is damaged: each wrong field is named, and nothing is allocated for it."""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from nsa_train.checkpoint import load_model, open_checkpoint, resume_point
from nsa_train.checkpoint.layout import CONFIG, MODEL, OPTIMIZER, RNG, STATE
from nsa_train.checkpoint.manifest import MOST, write_manifest
from nsa_train.checkpoint.resuming import require_run
from nsa_train.checkpoint.store import latest_valid
from nsa_train.cli import run_command
from nsa_train.errors import CheckpointError

WRONG: dict[type, tuple[Any, ...]] = {
    int: (None, "5", 1.5, True, [], {}, -5, 2**70),
    float: ("x", True, [], {}, float("nan"), -1e300),
    str: (None, 5, [], {}),
    list: (None, 5, "x", {}, [None], [[]]),
    dict: (None, 5, "x", [1]),
    type(None): (True, "x", [1], {"a": 1}),
}
"""Type of a field -> what it can never hold."""
OWN = {("routes",), ("data", "fingerprint"), ("data", "fingerprint", "walk")}
"""Tables to which a run may add, and fields with a separate test."""


def _paths(content: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every table and field; one for the lanes, which are alike."""
    yield path
    if isinstance(content, dict) and path not in OWN:
        for key, inner in content.items():
            if path[-1:] != ("lanes",) or key == "3":
                yield from _paths(inner, (*path, key))


def _at(content: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def _spelled(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path)).replace("lanes.3", "lanes[3]")


@pytest.fixture
def root(root: Path) -> Path:
    """A directory of two checkpoints from which a run would go on: its optimizer has two groups of parameters."""
    for step in (1, 2):
        path = root / f"step-{step}" / STATE
        path.write_text(json.dumps({**json.loads(path.read_text()), "schedule": {"lr": [0.1, 0.1]}}))
        write_manifest(path.parent, step)
    return root


@pytest.fixture
def state(root: Path) -> dict[str, Any]:
    """The content of step-2/state.json."""
    return json.loads((root / "step-2" / STATE).read_text())


@pytest.fixture
def refusal(root: Path) -> Callable[..., str]:
    """A function that signs step-2 with another content of a file, and returns the one line that refuses it."""

    def sign(content: Any, name: str = STATE) -> str:
        path = root / "step-2" / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        write_manifest(root / "step-2", 2)
        point = latest_valid(root, judge=require_run)
        assert point is not None
        assert point.step == 1, content
        [line] = point.refused
        assert line.startswith(f"{path} "), line
        assert line.endswith("take another step-* of this run (`nsa-train ckpt verify` names the complete ones)"), line
        assert len(line) < 2000
        assert "\n" not in line
        return line

    return sign


def test_every_field_of_the_state_is_refused_where_it_is_wrong(state: dict[str, Any], refusal: Callable[..., str]) -> None:
    for path in _paths(state):
        for wrong in WRONG[type(_at(state, path))]:
            changed = copy.deepcopy(state)
            if path:
                _at(changed, path[:-1])[path[-1]] = wrong
            line = refusal(changed if path else wrong)
            assert _spelled(path) in line, (path, wrong, line)


def test_every_field_of_the_state_is_missed_and_a_strange_one_is_refused(state: dict[str, Any], refusal: Callable[..., str]) -> None:
    for path in _paths(state):
        if path and path not in OWN:
            changed = copy.deepcopy(state)
            del _at(changed, path[:-1])[path[-1]]
            line = refusal(changed)
            assert f"{_spelled(path)} is missing" in line or "data.lanes has the keys" in line, line
        if isinstance(_at(state, path), dict) and path not in {*OWN, ("counters",), ("data", "lanes")}:
            changed = copy.deepcopy(state)
            _at(changed, path)["strange"] = 1
            assert "'strange'] is unknown" in refusal(changed).replace("'strange' is", "['strange'] is")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("data", "lanes", "3", "row"), -5, "data.lanes[3].row=-5 is not an integer from 0 to"),
        (("data", "lanes", "3", "row"), 8, "data.lanes[3].row=8 is not data.batches=7"),
        (("data", "lanes", "3", "hash"), "zz", "data.lanes[3].hash='zz' is not a SHA-256"),
        (("data", "lanes", "3", "hash"), "cd" * 32, "data.consumed_hash="),
        (("data", "lanes", "9"), {}, "data.lanes has the keys ["),
        (("data", "fingerprint", "walk"), [], "data.fingerprint.walk=[] is not one of 'rows', 'blocks'"),
        (("data", "fingerprint", "batch_size"), 3, "data.fingerprint.batch_size=3 is not the 8 of config.toml"),
        (("data",), {}, "data={} is not a position in the data of a run"),
        (("schedule", "lr"), [0.1], "schedule.lr has 1 rates for 2 groups"),
        (("scaler",), {"scale": -1.0}, "scaler.scale=-1.0 is not a number from"),
        (("counters", "guard", "losses"), [float("inf")], "counters.guard.losses=[inf] is not a list of"),
        (("counters", "own"), [[[[[[[[[]]]]]]]]], "counters={'guard': "),
    ],
    ids=lambda part: part[-1] if isinstance(part, tuple) else "",
)
def test_what_contradicts_itself_is_named(
    state: dict[str, Any], refusal: Callable[..., str], path: tuple[str, ...], value: Any, words: str
) -> None:
    _at(state, path[:-1])[path[-1]] = value
    assert words in refusal(state)


def test_many_errors_are_counted_in_one_line(state: dict[str, Any], refusal: Callable[..., str]) -> None:
    for lane in state["data"]["lanes"].values():
        lane["epoch"] = -1
    assert refusal(state).count("is not an integer") == 5
    assert "; and 3 more; take another" in refusal(state)


def test_a_state_of_ones_own_may_be_without_data_and_with_other_counters(root: Path, state: dict[str, Any]) -> None:
    (root / "step-2" / STATE).write_text(json.dumps({**state, "data": {}, "counters": {"mine": [1, {"a": None}]}}))
    write_manifest(root / "step-2", 2)
    assert resume_point(root).step == 2
    assert open_checkpoint(root).state["counters"] == {"mine": [1, {"a": None}]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dim = 32", "dim = 65536"),
        ("n_layers = 1", "n_layers = 4096"),
        ("n_heads = 2", "n_heads = 4096"),
        ("vocab_size = 0", "vocab_size = 16777216"),
        ('attention = "nsa"', 'attention = "dense"'),
    ],
    ids=["dim", "layers", "heads", "vocabulary", "dense"],
)
def test_nothing_is_allocated_for_a_config_that_does_not_fit_the_weights(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was allocated")

    path = root / "step-2" / CONFIG
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    write_manifest(root / "step-2", 2)
    monkeypatch.setattr(sys.modules[load_model.__module__], "build_model", refuse)
    monkeypatch.setattr(safetensors.torch, "load_file", refuse)
    for command in (["sample", str(root), "--prompt", "a"], ["ckpt", "export", str(root), str(root.parent / "out")]):
        assert run_command(command) == 1
        told = capsys.readouterr().err
        assert f"{root / 'step-2' / MODEL} does not fit its config.toml: " in told
        assert " expected " in told
        assert told.count("\n") == 1
    monkeypatch.undo()
    assert latest_valid(root, judge=require_run).step == 1


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


def _set(name: str, index: int, value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[name].view(-1).__setitem__(index, value)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (MODEL, _without("norm.weight"), "norm.weight expected float32 [32], found none"),
        (MODEL, _with("norm.weight", torch.zeros(32, dtype=torch.float16)), "norm.weight expected float32 [32], found float16 [32]"),
        (MODEL, _with("a\n\x1b[31m", torch.zeros(1)), r"'a\n\x1b[31m' expected none, found float32 [1]"),
        (OPTIMIZER, _without("norm.weight/exp_avg"), "norm.weight/exp_avg expected float32 [32], found none"),
        (OPTIMIZER, _with("norm.weight/exp_avg", torch.zeros(32, dtype=torch.int64)), "expected float32 [32], found int64 [32]"),
        (OPTIMIZER, _with("norm.weight/step", torch.tensor(torch.nan)), "norm.weight/step=nan is not a count of steps"),
        (OPTIMIZER, _with("nowhere", torch.zeros(1)), "nowhere expected none, found float32 [1]"),
        (OPTIMIZER, dict.clear, "it holds nothing, and steps were taken"),
        (RNG, dict.clear, "it has those of 0 ranks, and world_size=1"),
        (RNG, _without("rank0/python.gauss"), "python.gauss is missing"),
        (RNG, _with("rank0/torch_cpu", torch.zeros(3, dtype=torch.uint8)), "torch_cpu is no state of a generator: torch.uint8 [3]"),
        (RNG, lambda tensors: tensors["rank0/torch_cpu"].fill_(7), "Invalid mt19937 state"),
        (RNG, _set("rank0/numpy.words", 624, 10**6), "numpy.words holds numbers that no generator has"),
        (RNG, _set("rank0/python.words", 3, -1), "python.words holds numbers that no generator has"),
        (RNG, _with("rank1/torch_cpu", torch.zeros(3, dtype=torch.uint8)), "it has those of 2 ranks, and world_size=1"),
    ],
    ids=range(15),
)
def test_tensors_that_a_run_cannot_go_on_with_are_refused_before_it_starts(
    root: Path, name: str, change: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    path = root / "step-2" / name
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    write_manifest(root / "step-2", 2)
    point = resume_point(root, judge=require_run)
    assert point.step == 1
    [line] = point.refused
    assert f"{path} " in line
    assert words in line
    assert "\n" not in line


def test_weights_are_compared_by_the_header_before_they_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(open_checkpoint(root))
    assert torch.equal(loaded.embedding.weight, safetensors.torch.load_file(root / "step-2" / MODEL)["embedding.weight"])
    (root / "step-2" / MODEL).write_bytes((10).to_bytes(8, "little") + b'{"a":[]}  ')
    write_manifest(root / "step-2", 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        load_model(open_checkpoint(root / "step-2"))


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, build_parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST, STATE, 100)
    with pytest.raises(CheckpointError, match=r"state\.json is not written: it takes [\d,]+ bytes \(at most 100 are read again\)"):
        build_parts().snapshot().write_to(tmp_path)
