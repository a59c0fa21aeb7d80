"""`nsa-train convert`: a dense checkpoint becomes a folder that everything loads, and that a run begins with."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.checkpoint.models import open_model
from nsa_train.cli import run_command
from nsa_train.preflight.findings import Preflight
from nsa_train.preflight.judge import check_init_from
from nsa_train.settings.recipe import load_config

transformers = pytest.importorskip("transformers", reason="transformers is not installed (an extra, nsa-train[hf])")
pytest.importorskip("nsa_transformers", reason="nsa-transformers is not installed (an extra, nsa-train[hf])")

PAGE = Path(__file__).resolve().parents[4] / "docs/how-to/convert-a-dense-model.md"
SEPARATOR = 256
SMALL = ["--nsa", "window_size=64", "--nsa", "gate_hidden_size=8"]


@pytest.fixture
def dense(tmp_path: Path) -> Callable[..., Path]:
    """A function from overrides of LlamaConfig to the folder of a model with the ids of bytes, in bfloat16 and in shards."""

    def build(**overrides: Any) -> Path:
        torch.manual_seed(0)
        sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        ids = {"bos_token_id": None, "eos_token_id": SEPARATOR, "pad_token_id": 257}
        config = transformers.LlamaConfig(**{**sizes, **ids, "num_key_value_heads": 2, "rope_theta": 500.0, **overrides})
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense", max_shard_size="40kB")
        return tmp_path / "dense"

    return build


def bytes_as_pairs(folder: Path) -> None:
    """Write a tokenizer.json of bytes, as byte-pair encoders spell them, with <|endoftext|> behind them."""
    from nsa_transformers.tokenizer import byte_tokenizer

    byte_tokenizer().save_pretrained(folder)


def test_a_run_begins_with_a_converted_model(dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, run = dense(), tmp_path / "converted", tmp_path / "run"
    bytes_as_pairs(source)
    assert run_command(["convert", str(source), "--out", str(out), *SMALL]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"train it: nsa-train run {out}/recipe.toml --set train.init_from={out} --set data.path=FILE"
    assert "nsa-train: verified layer 2 of 2" in said.err
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    text = tmp_path / "text.txt"
    text.write_text("some text to learn from\n" * 400)
    sets = [
        f"train.init_from={out}",
        f"data.path={text}",
        "train.steps=2",
        "train.warmup_steps=1",
        "train.seq_len=32",
        "train.batch_size=2",
    ]
    # so small a rate leaves the weights as they are
    sets += ["train.lr=1e-12", "train.weight_decay=0", "train.precision=fp32", "train.samples=false"]
    assert run_command(["run", str(out / "recipe.toml"), "--out", str(run), *[word for line in sets for word in ("--set", line)]]) == 0
    trained, folder = load_model(open_checkpoint(run)).state_dict(), open_model(out).decoder.state_dict()
    assert all(torch.allclose(weight, folder[name], atol=1e-8) for name, weight in trained.items())
    assert trained["embedding.weight"].dtype == torch.float32


def test_the_recipe_is_that_of_the_model(dense: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "converted"
    pattern = ["dense", {"branches": ["slc", "win"], "num_selected_blocks": 4}]
    words = ["--kv", "separate", "--layers", json.dumps(pattern), "--nsa", "compressor=conv"]
    assert run_command(["convert", str(dense(tie_word_embeddings=True)), "--out", str(out), *words]) == 0
    config = load_config(str(out / "recipe.toml"))
    assert config.model.tie_embeddings
    assert (config.nsa.kv, config.nsa.compressor, config.nsa.rope_theta) == ("separate", "conv", 500.0)
    assert [layer.attention for layer in config.pattern()] == ["dense", "nsa"]
    assert config.pattern()[1].config.geometry.num_selected_blocks == 4
    # no tokenizer to name
    assert config.data.tokenizer == "byte"


def test_an_import_and_a_look_take_the_folder_as_well(dense: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "converted"
    source = dense()
    bytes_as_pairs(source)
    assert run_command(["convert", str(source), "--out", str(out), *SMALL]) == 0
    opened = open_model(out)
    assert opened.tokenizer.decode(opened.tokenizer.encode(b"text")) == "text"
    assert run_command(["ckpt", "import", str(out), str(tmp_path / "run")]) == 0
    assert load_model(open_checkpoint(tmp_path / "run")).state_dict().keys() == opened.decoder.state_dict().keys()


@pytest.mark.parametrize("form", ["toml", "json"])
def test_a_pattern_is_toml_or_json(dense: Callable[..., Path], tmp_path: Path, form: str) -> None:
    pattern = '[{branches = ["win"]}, "nsa"]' if form == "toml" else '[{"branches": ["win"]}, "nsa"]'
    assert run_command(["convert", str(dense()), "--out", str(tmp_path / "out"), "--layers", pattern]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["layers"] == [{"branches": ["win"]}, "nsa"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nsa", "compression_block_size=30"], "compression_stride=16 does not divide compression_block_size=30"),
        (["--nsa", "window_size"], "--nsa 'window_size' is not of the form key=value; use --nsa window_size=512"),
        (["--layers", '["nsa", "dense", "nsa"]'], "--layers has 3 entries, the model 2 layers (the pattern is repeated, whole)"),
        (
            ["--layers", '[{attention = "dense", window_size = 3}, "nsa"]'],
            "nsa-train: layers[0] is dense and would ignore window_size; use 'dense'",
        ),
        (
            ["--layers", '["dense", {attention = "dense", branches = ["cmp"], window_size = 3}]'],
            "nsa-train: layers[1] is dense and would ignore branches, window_size; use 'dense'",
        ),
        (["--layers", '[{attention = "dense", heads = 3}]'], "nsa-train: layers[0]={'attention': 'dense', 'heads': 3} is no layer"),
        (["--layers", f"[{'[' * 9}"], "--layers="),
        (["--kv", "both"], "--kv='both' is unknown"),
        (["--nsa", 'backends={slc="nope"}'], "--nsa backends={'slc': 'nope'} is not kept (each machine chooses its backends)"),
    ],
)
def test_a_bad_option_ends_with_2_and_writes_nothing(
    dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    source = dense()
    before = sorted(tmp_path.iterdir())
    assert run_command(["convert", str(source), "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_of_a_key_that_is_given_twice_the_last_one_counts_and_is_named(
    dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--nsa", "window_size=64", "--nsa", "compressor=mean", "--nsa", " window_size = 32"]
    assert run_command(["convert", str(dense()), "--out", str(tmp_path / "out"), *words]) == 0
    assert "nsa-train: --nsa window_size is given 2 times; the last one counts: window_size = 32\n" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/config.json").read_text())["nsa"]["window_size"] == 32


@pytest.mark.parametrize(("window", "num_losses"), [(1, 0), (2, 1)])
def test_sequences_of_one_token_have_no_loss(
    dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], window: int, num_losses: int
) -> None:
    assert run_command(["convert", str(dense()), "--out", str(tmp_path / "out"), "--nsa", f"window_size={window}"]) == 0
    assert capsys.readouterr().out.count(f"loss at S = {window}, random ids: ") == num_losses


def test_a_folder_that_exists_is_not_overwritten(dense: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    source = dense()
    assert run_command(["convert", str(source), "--out", str(source)]) == 2
    assert "exists already (a conversion never overwrites); use another name" in capsys.readouterr().err


def test_a_disk_without_room_is_found_before_anything_is_written(
    dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], set_free_disk: Callable[[int], None]
) -> None:
    set_free_disk(1000)
    assert run_command(["convert", str(dense()), "--out", str(tmp_path / "out")]) == 2
    assert re.search(r"needs 0\.0 GB, and 0\.0 GB are free there; name a folder on another disk", capsys.readouterr().err)


def test_damaged_files_end_with_1_and_nothing_is_left(
    dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = dense()
    shard = min(source.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-3])
    before = sorted(tmp_path.iterdir())
    assert run_command(["convert", str(source), "--out", str(tmp_path / "out")]) == 1
    assert f"{shard} is no whole safetensors file" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_what_fails_while_it_is_verified_leaves_nothing(dense: Callable[..., Path], tmp_path: Path) -> None:
    source = dense()
    for shard in source.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(shard)
        tensors = {name: tensor.fill_(float("inf")) if "down_proj" in name else tensor for name, tensor in tensors.items()}
        safetensors.torch.save_file(tensors, shard, metadata={"format": "pt"})
    before = sorted(tmp_path.iterdir())
    assert run_command(["convert", str(source), "--out", str(tmp_path / "new/folders/out")]) == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_ends_a_conversion_and_leaves_nothing(dense: Callable[..., Path], tmp_path: Path, number: int, code: int) -> None:
    source = dense(num_hidden_layers=60, intermediate_size=2048)
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, "-m", "nsa_train", "convert", str(source), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "verified layer" in line:
            break
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.endswith("before the end; nothing was written; start again\n")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dim=32", "are not those of this recipe: "),
        ("nsa.kv=separate", 'its weights are those of nsa.kv="shared"'),
        ("model.layers=['dense', 'nsa']", " is not of this model; "),
    ],
)
def test_a_folder_that_does_not_fit_a_recipe_is_refused(dense: Callable[..., Path], tmp_path: Path, override: str, message: str) -> None:
    out = tmp_path / "converted"
    assert run_command(["convert", str(dense()), "--out", str(out), *SMALL]) == 0
    findings = Preflight()
    check_init_from(findings, load_config(str(out / "recipe.toml"), [f"train.init_from={out}", override]), resuming=False)
    assert message in findings.failed[0]


def test_what_the_weights_learned_with_is_compared(dense: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "converted"
    assert run_command(["convert", str(dense(eos_token_id=3)), "--out", str(out), *SMALL]) == 0
    findings = Preflight()
    check_init_from(findings, load_config(str(out / "recipe.toml"), [f"train.init_from={out}", "nsa.rope_theta=1e4"]), resuming=False)
    assert findings.passed == [f"train.init_from: the weights of {out}"]
    assert findings.warned == [
        "train.init_from: those weights learned with nsa.rope_theta=500.0, and this run has 10000.0",
        "train.init_from: those weights end texts with id 3, and this run with 256",
    ]


def test_the_page_runs(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # the page keeps layer 4 of 8 dense
    dense(max_position_embeddings=64, num_hidden_layers=8).rename("llama")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    mistral = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=16)
    transformers.MistralForCausalLM(mistral).save_pretrained("mistral")
    # test_dense_export.py runs the section that is cut off
    own = PAGE.read_text().partition("## From a dense run of your own")[0]
    commands = re.findall(r"^nsa-train (convert .*)$", own, re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        assert run_command(shlex.split(command)) == 0
    # the line that the page gives is the one that is printed
    assert "nsa-train run sparse/recipe.toml --set train.init_from=sparse --set data.path=FILE\n" in capsys.readouterr().out
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "True"


def test_the_source_of_a_converted_model_is_its_twin_once_it_is_converted_too(
    dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, sparse, twin, text = dense(max_position_embeddings=256), tmp_path / "sparse", tmp_path / "twin", tmp_path / "text.txt"
    bytes_as_pairs(source)
    text.write_text("some text to look at\n" * 5)
    assert run_command(["convert", str(source), "--out", str(sparse), *SMALL]) == 0
    explore = ["explore", str(sparse), "--text", str(text), "-o", str(tmp_path / "page.html"), "--json", str(tmp_path / "page.json")]
    for words in ([*explore, "--twin", str(source)], ["eval", str(source), "--text", str(text)]):
        capsys.readouterr()
        assert run_command(words) == 2
        said = capsys.readouterr().err
        advice = f"convert it with nsa-train convert {source} --out NEW, and with --layers '[\"dense\"]' to keep it dense"
        assert f"cannot be loaded (its model_type 'llama' is that of a dense model); {advice}\n" in said
    assert run_command(["convert", str(source), "--out", str(twin), "--layers", '["dense"]']) == 0
    assert run_command([*explore, "--twin", str(twin)]) == 0
    mass = json.loads((tmp_path / "page.json").read_text())["layers"][0]["dense_mass"]
    assert sum(mass[-1][0]) == pytest.approx(1, abs=1e-3)
