"""`train.init_from`: a new run begins with the weights of another, where their shapes fit."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from attrs import evolve

from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.checkpoint.initial import initial_weights, initialize
from nsa_train.cli import run_command
from nsa_train.errors import ConfigError
from nsa_train.model.decoder import build_model
from nsa_train.preflight.findings import Preflight
from nsa_train.preflight.judge import check_init_from, run_preflight
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.data_table import DataTable
from nsa_train.settings.recipe import load_config
from nsa_train.telemetry.records import read_rows


def first_and_last_loss(run: RunDirectory) -> tuple[float, float]:
    losses = [row["val_loss"] for row in read_rows(run.validation)]
    return losses[0], losses[-1]


def test_a_new_run_begins_where_the_weights_were_left(tiny_run: RunDirectory, tiny_recipe: Path, tmp_path: Path) -> None:
    out = RunDirectory(tmp_path / "next")
    # so small a rate leaves the weights as they are
    words = ["--set", f"train.init_from={tiny_run.root}", "--set", "train.lr=1e-12", "--set", "train.weight_decay=0"]
    assert run_command(["run", str(tiny_recipe), "--out", str(out.root), *words]) == 0
    assert first_and_last_loss(out)[0] == pytest.approx(first_and_last_loss(tiny_run)[1], rel=1e-6)
    before, after = (load_model(open_checkpoint(run.checkpoints)).state_dict() for run in (tiny_run, out))
    assert all(torch.allclose(before[name], after[name], atol=1e-8) for name in before)
    # steps, optimizer and records are its own
    assert [row["step"] for row in read_rows(out.training)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.seq_len=64", "train.batch_size=4"],
        ["nsa.num_selected_blocks=6", "nsa.window_size=16", "nsa.rope_scaling={kind = 'linear', factor = 2.0}"],
    ],
    ids=["rows", "geometry and RoPE"],
)
def test_rows_and_what_has_no_weights_may_change(tiny_run: RunDirectory, tiny_recipe: Path, tmp_path: Path, overrides: list[str]) -> None:
    sets = [f"train.init_from={tiny_run.checkpoints}/step-5", *overrides, "train.steps=2"]
    words = [word for override in sets for word in ("--set", override)]
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "next"), *words]) == 0
    first, _ = first_and_last_loss(RunDirectory(tmp_path / "next"))
    assert first < first_and_last_loss(tiny_run)[0] - 0.1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dim=48", "model.safetensors does not fit this recipe: embedding.weight expected "),
        ("nsa.gate_hidden_size=4", "model.safetensors does not fit this recipe: "),
        ("model.attention=dense", "/step-5/config.toml\n"),
        ("train.init_from=nowhere", "nsa-train: train.init_from='nowhere' holds no checkpoint "),
        ("train.init_from=3", "train.init_from=3 is not a non-empty string; use 'runs/short'"),
        ("train.init_from=", "train.init_from='' is not a non-empty string; use 'runs/short'"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    tiny_run: RunDirectory, tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    words = ["--set", f"train.init_from={tiny_run.root}", "--set", override]
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "next"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "next").exists()


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_a_start_verifies_the_weights_once(
    tiny_run: RunDirectory, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source, digest, hashed = tiny_run.root, hashlib.file_digest, list[int]()
    weights = tiny_run.checkpoints / "step-5/model.safetensors"
    if kind == "folder":
        pytest.importorskip("transformers", reason="transformers is not installed (an extra, nsa-train[hf])")
        source = tmp_path / "exported"
        assert run_command(["ckpt", "export", str(tiny_run.root), str(source), "--format", "hf"]) == 0
        weights = source / "model.safetensors"

    def counted(file: BinaryIO, name: str) -> object:
        hashed.append(os.fstat(file.fileno()).st_ino)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    words = ["--set", f"train.init_from={source}", "--set", "train.steps=1", "--set", "train.warmup_steps=0"]
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "next"), *words]) == 0
    assert hashed.count(weights.stat().st_ino) == 1


def test_weights_that_change_after_they_were_verified_are_verified_again(tiny_run: RunDirectory, tiny_recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-5"
    shutil.copytree((tiny_run.checkpoints / "step-5").resolve(), folder)
    config = load_config(str(tiny_recipe), [f"train.init_from={folder}"])
    verified, model = initial_weights(config), build_model(config)
    initialize(model, config, verified)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="model.safetensors is damaged: SHA-256 expected"):
        initialize(model, config, verified)


def test_a_resumed_run_has_its_own_weights(tiny_run: RunDirectory, tiny_recipe: Path, tmp_path: Path) -> None:
    words = ["run", str(tiny_recipe), "--out", str(tmp_path / "next"), "--set", f"train.init_from={tiny_run.root}"]
    assert run_command([*words, "--set", "train.steps=3"]) == 0
    saved = load_model(open_checkpoint(tmp_path / "next" / "checkpoints")).state_dict()
    # what it began with may be gone by then
    again = [word.replace(str(tiny_run.root), "nowhere") for word in words]
    assert run_command([*again, "--resume", "--set", "train.steps=4", "--set", "train.lr=1e-12", "--set", "train.weight_decay=0"]) == 0
    resumed = load_model(open_checkpoint(tmp_path / "next" / "checkpoints")).state_dict()
    assert all(torch.allclose(saved[name], resumed[name], atol=1e-8) for name in saved)


def test_preflight_names_the_weights_and_another_tokenizer(tiny_run: RunDirectory, tiny_recipe: Path) -> None:
    config = load_config(str(tiny_recipe), [f"train.init_from={tiny_run.root}"])
    findings = run_preflight(config, Path("nowhere"))
    [line] = [line for line in (*findings.passed, *findings.warned, *findings.failed) if "init_from" in line]
    assert line == f"train.init_from: the weights of {(tiny_run.checkpoints / 'step-5').resolve()} after 5 steps"
    # as many ids, with other meanings
    other = evolve(config, data=DataTable(source="synthetic", tokenizer="gpt2"), model=evolve(config.model, vocab_size=258))
    findings = Preflight()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nsa_train.model.decoder.num_ids_of", lambda data: 258)
        check_init_from(findings, other, resuming=False)
    assert findings.warned == ["train.init_from: those weights learned the ids of data.tokenizer='byte', and this run reads 'gpt2'"]


def test_other_branches_with_the_same_weights_are_named(tiny_recipe: Path, tmp_path: Path) -> None:
    shared = ["nsa.kv=shared", "nsa.compressor=mean", "train.steps=1", "train.warmup_steps=0", "train.samples=false"]
    words = [word for override in [*shared, 'nsa.branches=["win", "slc"]'] for word in ("--set", override)]
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "run"), *words]) == 0

    def notes(*overrides: str) -> list[str]:
        return initial_weights(load_config(str(tiny_recipe), [*shared, f"train.init_from={tmp_path / 'run'}", *overrides])).notes

    assert notes('nsa.branches=["slc", "win"]') == []
    assert notes() == ["those weights learned with the branches slc, win in layer 0 and 1 more, and this run has cmp, slc, win"]
    assert notes('nsa.branches=["slc", "win"]', 'model.layers=["nsa", {branches=["cmp", "win"]}]') == [
        "those weights learned with the branches slc, win in layer 1, and this run has cmp, win"
    ]
