"""`ckpt export --format llama`: a dense model that Transformers loads by its own class, and that `convert` makes sparse."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.checkpoint.models import open_model
from nsa_train.checkpoint.tensors import read_tensors
from nsa_train.cli import run_command
from nsa_train.data.tokenizer import build_tokenizer
from nsa_train.model.decoder import vocab_size_of
from nsa_train.settings.recipe import load_config

transformers = pytest.importorskip("transformers", reason="transformers is not installed (an extra, nsa-train[hf])")
pytest.importorskip("nsa_transformers", reason="nsa-transformers is not installed (an extra, nsa-train[hf])")

PAGE = Path(__file__).resolve().parents[4] / "docs/how-to/convert-a-dense-model.md"
CLOSE = 1e-5
TEXT = "3 bottles stood — 🙂\n"
DENSE = ["model.attention=dense", "model.max_position=128"]
FAMILIES = {"Llama": [], "Qwen2": ["nsa.qkv_bias=true"], "Qwen3": ["nsa.qk_norm=true"]}
ROPES = {
    "default": [],
    "theta": ["nsa.rope_theta=500.0"],
    "linear": ["nsa.rope_scaling={kind = 'linear', factor = 4.0}"],
    "llama3": ["nsa.rope_scaling={kind = 'llama3', factor = 8.0, original_max_position = 64}"],
    "yarn": ["nsa.rope_scaling={kind = 'yarn', factor = 4.0, original_max_position = 32, beta_fast = 16.0, beta_slow = 2.0}"],
    "yarn with a factor": [
        "nsa.rope_scaling={kind = 'yarn', factor = 4.0, original_max_position = 32, attention_factor = 1.5}",
    ],
}


@pytest.fixture
def exported(exported: Callable[..., Path]) -> Callable[..., Path]:
    """A function from overrides to the folder of an export of a dense model."""
    return lambda *overrides: exported(*DENSE, *overrides, kind="llama")


def _difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference, as a share of the largest of `expected`."""
    return float((expected - found).abs().max() / expected.abs().max())


@torch.no_grad()
def _difference_of(folder: Path, checkpoint: Path) -> float:
    expected = load_model(open_checkpoint(checkpoint))
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(0, 258, (2, 100), generator=torch.Generator().manual_seed(1))
    return _difference(expected(ids), found(ids).logits)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_of_transformers_has_the_logits_of_the_checkpoint(
    exported: Callable[..., Path], tmp_path: Path, family: str, is_tied: bool
) -> None:
    # the heads together are narrower than the states
    sizes = ["model.dim=64", "model.norm_eps=1e-5", f"model.tie_embeddings={str(is_tied).lower()}"]
    folder = exported(*FAMILIES[family], *ROPES["llama3"], *sizes)
    assert _difference_of(folder, tmp_path / "checkpoints") <= CLOSE
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [f"{family}ForCausalLM"]
    assert config["model_type"] == family.lower()
    assert config["tie_word_embeddings"] == is_tied
    assert ("lm_head.weight" in read_tensors(folder / "model.safetensors")) != is_tied


@pytest.mark.parametrize("kind", ROPES)
def test_every_kind_of_rope_gives_the_same_logits(exported: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    folder = exported(*ROPES[kind])
    assert _difference_of(folder, tmp_path / "checkpoints") <= CLOSE
    # the kind matters at these positions
    content = json.loads((folder / "config.json").read_text())
    if kind != "default":
        (folder / "config.json").write_text(json.dumps({**content, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}))
        assert _difference_of(folder, tmp_path / "checkpoints") > 100 * CLOSE


@pytest.mark.parametrize("eps", [[], ["model.norm_eps=1e-3"], ["model.norm_eps=1e-6"], ["model.norm_eps=1e-6", "nsa.qk_norm_eps=1e-2"]])
def test_two_epsilons_give_the_logits_of_the_checkpoint(exported: Callable[..., Path], tmp_path: Path, eps: list[str]) -> None:
    folder = exported(*FAMILIES["Qwen3"], *eps)
    assert _difference_of(folder, tmp_path / "checkpoints") <= CLOSE


def test_an_export_holds_config_weights_and_tokenizer(exported: Callable[..., Path]) -> None:
    folder = exported("model.intermediate_size=80", "model.vocab_size=320", "model.dim=64", "nsa.rope_theta=500.0")
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    config = json.loads((folder / "config.json").read_text())
    assert "auto_map" not in config
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    assert [config[name] for name in sizes] == [320, 64, 80, 2, 2, 1, 16]
    assert (config["max_position_embeddings"], config["rms_norm_eps"]) == (128, torch.finfo(torch.float32).eps)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"], config["dtype"]) == (256, 256, 257, "float32")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 256


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_the_tokenizer_gives_the_ids_of_training(
    exported: Callable[..., Path], gpt2_files: Path, tmp_path: Path, family: str, kind: str
) -> None:
    data = [] if kind == "byte" else ["data.tokenizer=gpt2", f"data.tokenizer_path={gpt2_files}"]
    if data:
        pytest.importorskip("tiktoken", reason="tiktoken is not installed (an extra, nsa-train[bpe])")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported(*FAMILIES[family], *data))
    own = build_tokenizer(open_checkpoint(tmp_path / "checkpoints").config.data)
    assert tokenizer(TEXT)["input_ids"] == own.encode(TEXT.encode()).tolist()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (own.separator, own.pad)


ALONE = """
import sys
for name in ("nsa_transformers", "nsa_train", "nsa_core"):
    sys.modules[name] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
ids = model.generate(**tokenizer("12 b", return_tensors="pt"), max_new_tokens=4, do_sample=False, min_new_tokens=4)
print(type(model).__name__, ids[0].tolist())
"""


def test_none_of_our_packages_is_needed(exported: Callable[..., Path], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, str(exported())], capture_output=True, text=True, check=True)
    name, ids = done.stdout.split(maxsplit=1)
    assert name == "LlamaForCausalLM"
    found = json.loads(ids)
    assert found[:4] == list(b"12 b")
    decoder = load_model(open_checkpoint(tmp_path / "checkpoints"))
    with torch.no_grad():
        logits = decoder(torch.tensor([found]))[0, 3:-1]
    # generate leaves out the end while texts are too short
    logits[:, 256] = -torch.inf
    assert logits.argmax(-1).tolist() == found[4:]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversion_takes_the_export(
    exported: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    folder, out = exported(*FAMILIES[family], *ROPES["yarn"], "model.tie_embeddings=false"), tmp_path / "sparse"
    words = ["--gates", "selected", "--nsa", "gate_hidden_size=8"]
    assert run_command(["convert", str(folder), "--out", str(out), *words]) == 0
    said = capsys.readouterr()
    assert "verified layer 2 of 2" in said.err
    found = re.search(r"logits at S = 256: the largest difference is (\S+) of the largest logit", said.out)
    assert found is not None
    assert float(found[1]) <= 1e-4
    ids = torch.randint(0, 258, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, sparse = load_model(open_checkpoint(tmp_path / "checkpoints"))(ids), open_model(out).decoder
        assert len(sparse.sparse_layers) == 2
        assert _difference(expected, sparse.logits(sparse.hidden(sparse.embedding(ids)))) <= 1e-4


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_the_recipe_of_a_converted_export_reads_its_ids(
    exported: Callable[..., Path], gpt2_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    data = [] if kind == "byte" else ["data.tokenizer=gpt2", f"data.tokenizer_path={gpt2_files}"]
    if data:
        pytest.importorskip("tiktoken", reason="tiktoken is not installed (an extra, nsa-train[bpe])")
    assert run_command(["convert", str(exported(*data)), "--out", str(tmp_path / "sparse"), "--nsa", "window_size=16"]) == 0
    assert "tokenizer: nsa-train reads none" not in capsys.readouterr().out
    config = load_config(str(tmp_path / "sparse/recipe.toml"))
    found, rows = config.data, len(read_tensors(tmp_path / "sparse/model.safetensors")["embedding.weight"])
    assert vocab_size_of(config) == build_tokenizer(found).vocab_size == rows
    assert (found.tokenizer, found.tokenizer_path) == (kind, None if kind == "byte" else str(tmp_path / "sparse/tokenizer.json"))
    read, own = build_tokenizer(found), build_tokenizer(open_checkpoint(tmp_path / "checkpoints").config.data)
    assert read.encode(TEXT.encode()).tolist() == own.encode(TEXT.encode()).tolist()
    assert (read.separator, read.pad, read.vocab_size) == (own.separator, own.pad, own.vocab_size)


REFUSED = {
    "sparse": (
        [],
        "layer 0 is sparse, with branches=['cmp', 'slc', 'win'] (--format llama takes layers of full attention); use --format hf, or",
    ),
    "mixed": (['model.layers=["dense", {branches = ["slc", "win"]}]'], "layer 1 is sparse, with branches=['slc', 'win']"),
    "window": (
        ['model.layers=["dense", {branches = ["win"]}]'],
        "layer 1 is a sliding window of 8 tokens behind a gate (--format llama takes layers of full attention); use --format hf, or train a dense",
    ),
    "head sizes": (
        ["model.attention=dense", "model.head_dim_v=8"],
        "head_dim_qk=16 and head_dim_v=8 differ (Llama, Qwen2 and Qwen3 have one head_dim for q, k and v); use --format hf, or train with "
        "model.head_dim_v=16",
    ),
    "biases and norms": (
        ["model.attention=dense", "nsa.qkv_bias=true", "nsa.qk_norm=true"],
        "nsa.qkv_bias=true with nsa.qk_norm=true is a model that Transformers lacks (Qwen2 has the biases, Qwen3 the norms); use --format hf",
    ),
    "width": (
        ["model.attention=dense", "model.dim=33"],
        "hidden_size=33 is no multiple of num_attention_heads=2 (the rule of LlamaForCausalLM); use --format hf",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_no_dense_one_is_refused_and_nothing_written(
    saved: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    overrides, message = REFUSED[case]
    checkpoint = saved(*overrides)
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert run_command(["ckpt", "export", str(checkpoint), str(tmp_path / "deep/out"), "--format", "llama"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_changed_bit_of_a_dense_export_is_found_by_convert(
    exported: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    capsys.readouterr()
    assert run_command(["convert", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert "model.safetensors is damaged (its data do not have the SHA-256 in its header)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_goes_from_a_dense_run_to_a_sparse_one(tmp_path: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().partition("## From a dense run of your own")[2].partition("\n## ")[0]
    commands = re.findall(r"^nsa-train (.*)$", section, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["run", "ckpt", "convert", "run"]
    sets = ["data.source=text", f"data.path={tiny_text}", "train.steps=2", "train.warmup_steps=1", "train.batch_size=2"]
    sets += ["train.save_every=2", "train.samples=false"]
    small = [word for line in sets for word in ("--set", line)]
    for command in commands:
        assert run_command([*shlex.split(command), *(small if command.startswith("run") else [])]) == 0
    dense, sparse = (load_model(open_checkpoint(tmp_path / out)) for out in ("runs/dense", "runs/sparse"))
    assert (len(dense.sparse_layers), len(sparse.sparse_layers)) == (0, 4)
    assert torch.allclose(dense.embedding.weight, sparse.embedding.weight, atol=1e-3)
