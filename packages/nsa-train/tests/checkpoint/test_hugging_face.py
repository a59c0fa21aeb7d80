"""`ckpt export --format hf` and `ckpt import`: the same logits in Transformers, and a run that goes on."""

import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from torch import Tensor

from nsa_core.errors import InputError
from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.checkpoint.hugging_face import hugging_face_tokenizer
from nsa_train.checkpoint.models import open_model
from nsa_train.checkpoint.tensors import read_tensors
from nsa_train.cli import run_command
from nsa_train.data.tokenizer import build_tokenizer
from nsa_train.errors import ConfigError
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_transformers.weights import quiet

transformers = pytest.importorskip("transformers", reason="transformers is not installed (an extra, nsa-train[hf])")
pytest.importorskip("nsa_transformers", reason="nsa-transformers is not installed (an extra, nsa-train[hf])")

TEXT = "3 bottles stood — 🙂\n"
KINDS = {
    "nsa": [],
    "dense": ["model.attention=dense"],
    "mixed": ['model.layers=["dense", {branches = ["slc", "win"]}]'],
    "all keys": [
        *("nsa.kv=shared", "nsa.qk_norm=true", "nsa.qkv_bias=true", "nsa.gate=softmax", "nsa.compressor=conv"),
        *("model.tie_embeddings=false", "model.norm_eps=1e-5", "model.intermediate_size=80", "model.vocab_size=320"),
        *("model.max_position=512", "nsa.rope_scaling={rope_type = 'llama3', factor = 8.0}", "nsa.backends={cmp = 'sdpa'}"),
    ],
}


def _ids(vocab_size: int = 258) -> Tensor:
    return torch.randint(0, vocab_size, (2, 50), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_logits_of_its_checkpoint_bit_for_bit(exported: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    folder = exported(*KINDS[kind])
    expected = load_model(open_checkpoint(tmp_path / "checkpoints"))
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(found(_ids()).logits, expected(_ids()))
    assert read_tensors(folder / "model.safetensors").keys() == expected.state_dict().keys()


def test_an_export_holds_config_weights_tokenizer_and_module(exported: Callable[..., Path]) -> None:
    folder = exported(*KINDS["all keys"])
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "modeling_nsa_core.py", "tokenizer.json", "tokenizer_config.json"),
    }
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"], config["dtype"]) == ("nsa_core", ["NSAForCausalLM"], "float32")
    assert (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]) == (320, 32, 2, 80)
    assert (config["max_position_embeddings"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (512, 1e-5, False)
    assert (config["trained_steps"], config["nsa"]["compressor"], config["nsa"]["window_size"]) == (7, "conv", 8)
    assert "backends" not in config["nsa"]
    assert (config["eos_token_id"], config["pad_token_id"]) == (256, 257)


def test_generate_of_an_export_gives_the_text_of_sample(
    exported: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported()
    capsys.readouterr()
    words = ["sample", str(tmp_path / "checkpoints"), "--prompt", "12 b", "--tokens", "20", "--temperature", "0"]
    assert run_command(words) == 0
    expected = capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = model.generate(**tokenizer("12 b", return_tensors="pt"), max_new_tokens=20, do_sample=False, suppress_tokens=[257])
    assert tokenizer.decode(ids[0], skip_special_tokens=True) + "\n" == expected


def test_the_byte_tokenizer_gives_the_ids_of_training(tiny_config: Callable[..., RunConfig]) -> None:
    data = tiny_config().data
    assert hugging_face_tokenizer(data, max_length=64)(TEXT)["input_ids"] == build_tokenizer(data).encode(TEXT.encode()).tolist()


def test_byte_pair_tokenizers_give_the_ids_of_training(tiny_config: Callable[..., RunConfig], gpt2_files: Path, tmp_path: Path) -> None:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed (an extra, nsa-train[bpe])")
    data = tiny_config("data.tokenizer=gpt2", f"data.tokenizer_path={gpt2_files}").data
    tokenizer, own = hugging_face_tokenizer(data, max_length=64), build_tokenizer(data)
    assert tokenizer(TEXT)["input_ids"] == own.encode(TEXT.encode()).tolist()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (own.separator, own.pad)
    tokenizer.save_pretrained(tmp_path / "json")
    again = tiny_config("data.tokenizer=gpt2", f"data.tokenizer_path={tmp_path / 'json/tokenizer.json'}").data
    # its pad is an id of the file by now, and stays the only one
    read = build_tokenizer(again)
    assert read.encode(TEXT.encode()).tolist() == tokenizer(TEXT)["input_ids"]
    assert (read.separator, read.pad, read.vocab_size) == (own.separator, own.pad, own.vocab_size)
    assert hugging_face_tokenizer(again, max_length=64).get_vocab() == tokenizer.get_vocab()


def test_random_ids_get_a_tokenizer_of_numbers(exported: Callable[..., Path]) -> None:
    folder = exported("data.source=synthetic", "data.tokenizer=gpt2", "data.path=")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("17 4")["input_ids"] == [17, 4]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (50256, 50257)


@pytest.fixture
def runs(tmp_path: Path, tiny_recipe: Path) -> Iterator[Callable[..., int]]:
    """A function that imports a folder into a run."""

    def run(source: Path, *words: str, out: str = "run") -> int:
        return run_command(["ckpt", "import", str(source), str(tmp_path / out), "--recipe", str(tiny_recipe), *words])

    return run


@pytest.mark.parametrize("kind", ["nsa", "all keys"])
def test_an_imported_run_goes_on_from_the_weights(
    exported: Callable[..., Path], runs: Callable[..., int], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_train.telemetry.recorder.SAMPLE_TOKENS", 4)
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)
    folder = exported(*KINDS[kind])
    assert runs(folder, "--set", "train.steps=3") == 0
    start = load_model(open_checkpoint(tmp_path / "run")).state_dict()
    assert all(torch.equal(start[name], value) for name, value in read_tensors(folder / "model.safetensors").items())
    assert run_command(["resume", str(tmp_path / "run")]) == 0
    end = open_checkpoint(tmp_path / "run")
    assert end.step == 3
    moved = load_model(end).state_dict()
    assert not torch.equal(moved["embedding.weight"], start["embedding.weight"])
    run = RunDirectory(tmp_path / "run")
    assert len(run.training.read_text().splitlines()) == 4
    # the imported model is evaluated too, so that the losses before and after can be compared
    assert [line.partition(",")[0] for line in run.validation.read_text().splitlines()] == ["step", "0", "3"]
    assert (run.samples / "before.txt").is_file()
    # and it is exported again
    assert run_command(["ckpt", "export", str(tmp_path / "run"), str(tmp_path / "again"), "--format", "hf"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(model(_ids()).logits, load_model(end)(_ids()))


def test_a_model_made_in_transformers_becomes_a_run(runs: Callable[..., int], tmp_path: Path) -> None:
    from nsa_transformers import NSAForCausalLM, NSAModelConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    nsa = {"compression_block_size": 4, "compression_stride": 2, "selection_block_size": 4, "num_selected_blocks": 4, "window_size": 8}
    model = NSAForCausalLM(NSAModelConfig(vocab_size=258, nsa=nsa, **sizes)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "made", max_shard_size="30KB")
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 1
    assert runs(tmp_path / "made") == 0
    found = load_model(open_checkpoint(tmp_path / "run")).state_dict()
    assert all(torch.equal(value, model.state_dict()[name].float()) for name, value in found.items())


def _config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def _flipped(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: _weights(folder, lambda tensors: tensors.pop("norm.weight")), "norm.weight is missing"),
    "extra": (lambda folder: _weights(folder, lambda tensors: tensors.update(more=torch.zeros(1))), "more is not of this model"),
    "shape": (
        lambda folder: _weights(folder, lambda tensors: tensors.update({"norm.weight": torch.zeros(3)})),
        "norm.weight expected [32], found [3]",
    ),
    "integers": (
        lambda folder: _weights(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(32, dtype=torch.int64)})),
        "model.safetensors holds norm.weight I64 (weights are floating point)",
    ),
    "not a number": (
        lambda folder: _weights(folder, lambda tensors: tensors["norm.weight"][3:4].fill_(torch.nan)),
        "hold NaN or Inf, in norm.weight (training cannot go on from them)",
    ),
    "infinite": (
        lambda folder: _weights(folder, lambda tensors: tensors["embedding.weight"][:1].fill_(torch.inf)),
        "in embedding.weight",
    ),
    "pickle": (_pickled, "pytorch_model.bin is a pickle, which runs code when it is read"),
    "truncated": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08"), "is no whole safetensors file"),
    "changed bit": (_flipped, "model.safetensors is damaged (its data do not have the SHA-256 in its header); copy it again"),
    "architecture": (lambda folder: _config(folder, model_type="llama"), "has model_type='llama'"),
    "class": (lambda folder: _config(folder, architectures=["LlamaForCausalLM"]), "architectures=['LlamaForCausalLM']"),
    "no names": (lambda folder: _config(folder, architectures=True), "has architectures=True (the rule: a list of names)"),
    "schema": (lambda folder: _config(folder, nsa_schema=9), "has nsa_schema=9 (this version of nsa-transformers reads up to 1)"),
    "tokenizer": (lambda folder: _config(folder, eos_token_id=50256), "the ids would mean other text"),
    "sizes": (lambda folder: _config(folder, hidden_size="x"), "describes no model"),
    "epsilon": (lambda folder: _config(folder, rms_norm_eps=0), "describes no model"),
    "theta": (lambda folder: _config(folder, rope_theta=1e6), "has rope_theta"),
    "not json": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    "vocabulary": (lambda folder: _config(folder, vocab_size=100), "model.vocab_size=100 is below the 258 ids"),
    "gone": (shutil.rmtree, "is no folder (nothing is downloaded)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_no_model_is_refused_and_nothing_written(
    exported: Callable[..., Path], runs: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder = exported()
    spoil, message = DAMAGES[damage]
    spoil(folder)
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert runs(folder) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_a_changed_bit_of_an_export_is_found_by_everything_that_reads_it(
    exported: Callable[..., Path], tmp_path: Path, tiny_recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported()
    _flipped(folder)
    with pytest.raises(InputError, match=r"model.safetensors is damaged"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged"):
        open_model(folder)
    capsys.readouterr()
    words = ["run", str(tiny_recipe), "--out", str(tmp_path / "run"), "--set", f"train.init_from={folder}"]
    assert run_command(words) == 2
    assert "model.safetensors is damaged (its data do not have the SHA-256 in its header)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_import_takes_no_key_of_the_model_and_overwrites_nothing(
    exported: Callable[..., Path], runs: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported()
    assert runs(folder, "--set", "model.dim=64") == 2
    assert "--set model.dim=64 is a key of the model" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    assert runs(folder, out="mine") == 2
    assert "an import never overwrites" in capsys.readouterr().err
    assert list((tmp_path / "mine").iterdir()) == []


WITHOUT = """
import sys
import tomllib
sys.modules["nsa_transformers"] = None
from nsa_train.cli import run_command
print([run_command(words.split()) for words in sys.argv[1:]])
"""


def test_without_the_extra_the_commands_say_what_to_install(saved: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    commands = [f"ckpt export {saved()} {tmp_path / 'a'} --format hf", f"ckpt import {tmp_path} {tmp_path / 'b'}"]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *commands], capture_output=True, text=True, check=True)
    assert done.stdout == "[2, 2]\n"
    assert done.stderr.count("in a checkout: pip install ./packages/nsa-transformers") == 2
    assert not (tmp_path / "a").exists()


TUTORIAL = Path(__file__).resolve().parents[4] / "docs/tutorials/hugging-face.md"


def test_the_tutorial_runs_on_an_export(exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("accelerate", "datasets", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed (an extra, nsa-transformers[train])")
    folder = exported("train.seq_len=512", "data.source=synthetic", "data.path=")
    monkeypatch.chdir(folder.parent)
    (folder.parent / "mine.jsonl").write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(16)))
    blocks = re.findall(r"^```python\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    assert len(blocks[0].splitlines()) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(
            compile(block.replace('"report_to": []', '"report_to": [], "use_cpu": True, "disable_tqdm": True'), str(TUTORIAL), "exec"),
            names,
        )
    assert (folder.parent / "tuned/last/tokenizer.json").is_file() and (folder.parent / "tuned/last/model.safetensors").is_file()
    assert (folder.parent / "adapter/last/adapter_model.safetensors").is_file()
    imports = re.findall(r"^nsa-train (ckpt import tuned/last .*)$", TUTORIAL.read_text(), re.MULTILINE)
    assert [run_command(shlex.split(line)) for line in imports] == [0]
    config = tomllib.loads((folder.parent / "runs/tuned/config.toml").read_text())
    assert (config["data"]["source"], config["data"]["path"]) == ("jsonl", "mine.jsonl")


@pytest.mark.parametrize("kind", ["nsa", "dense", "all keys"])
def test_a_checkpoint_and_its_export_open_as_one_model(saved: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    folder = saved(*KINDS[kind])
    assert run_command(["ckpt", "export", str(folder), str(tmp_path / "exported"), "--format", "hf"]) == 0
    run, export = open_model(folder), open_model(tmp_path / "exported")
    assert (run.step, export.step, run.max_position) == (7, None, export.max_position)
    ids = run.tokenizer.encode(TEXT.encode())
    assert torch.equal(export.tokenizer.encode(TEXT.encode()), ids)
    assert run.tokenizer.decode(ids) == export.tokenizer.decode(ids) == TEXT
    assert (run.tokenizer.separator, run.tokenizer.pad) == (export.tokenizer.separator, export.tokenizer.pad)
    with torch.no_grad():
        logits = [one.decoder.logits(one.decoder.hidden(one.decoder.embedding(ids[None]))) for one in (run, export)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_folder_that_holds_no_model_of_ours_is_refused(tmp_path: Path, with_weights: bool) -> None:
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}, "rope_parameters": {"rope_theta": 1e4}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(
        ConfigError, match="cannot be loaded .its model_type 'own' is not 'nsa_core'.; name a run, or a folder that an export wrote$"
    ):
        open_model(tmp_path, with_weights=with_weights)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda text: text.replace('"num_hidden_layers": 2', '"num_hidden_layers": "2"'), "expected int, got str"),
        ("tokenizer.json", lambda text: '{"version": "1.0"}', "has no tokenizer that can be read"),
        ("tokenizer.json", lambda text: "not JSON", "has no tokenizer that can be read"),
    ],
)
def test_a_damaged_text_file_of_a_folder_is_an_error_of_one_line(
    saved: Callable[..., Path], tmp_path: Path, name: str, change: Callable[[str], str], message: str
) -> None:
    folder = tmp_path / "exported"
    assert run_command(["ckpt", "export", str(saved()), str(folder), "--format", "hf"]) == 0
    (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(ConfigError, match=f"cannot be loaded .*{message}") as raised:
        open_model(folder)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("content", ["[]", "5", "null", "{", "[" * 100_000])
def test_settings_of_generation_that_are_no_table_are_refused_by_name(exported: Callable[..., Path], content: str) -> None:
    path = exported() / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"cannot be loaded .{re.escape(str(path))} cannot be read .*; use the files of one checkpoint"):
        open_model(path.parent)


def test_settings_of_generation_with_a_list_of_pads_are_refused_by_name(exported: Callable[..., Path]) -> None:
    path = exported() / "generation_config.json"
    path.write_text('{"pad_token_id": [1]}')
    with pytest.raises(ConfigError, match=rf"cannot be loaded .{re.escape(str(path))} has pad_token_id=\[1\] \(the rule: an integer"):
        open_model(path.parent)


def test_a_folder_is_opened_without_a_bar_or_a_warning(exported: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, said = exported(), list[object]()
    _config(folder, bos_token_id=4321)
    handler = logging.StreamHandler()
    handler.emit = said.append  # type: ignore[method-assign]
    transformers.utils.logging.add_handler(handler)
    capsys.readouterr()
    try:
        open_model(folder)
    finally:
        transformers.utils.logging.remove_handler(handler)
    assert (said, capsys.readouterr().err) == ([], "")


@pytest.mark.parametrize(("decides", "hub_has_none"), [(None, False), (None, True), (False, False), (True, True)])
def test_quiet_leaves_every_switch_as_it_was(monkeypatch: pytest.MonkeyPatch, hub_has_none: bool, decides: bool | None) -> None:
    # an environment variable that decides makes huggingface_hub warn; warnings are errors here
    bars = import_module("huggingface_hub.utils.tqdm")
    monkeypatch.setattr(bars, "HF_HUB_DISABLE_PROGRESS_BARS", decides)
    monkeypatch.setattr(bars, "progress_bar_states", {"_global": not hub_has_none})
    logs = transformers.utils.logging
    before = logs.get_verbosity(), logs.is_progress_bar_enabled(), are_progress_bars_disabled()
    with suppress(KeyError), quiet():
        assert (logs.get_verbosity(), logs.is_progress_bar_enabled()) == (logs.ERROR, False)
        raise KeyError
    assert (logs.get_verbosity(), logs.is_progress_bar_enabled(), are_progress_bars_disabled()) == before


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_quantized_weights_whose_reader_is_not_installed_are_refused_in_one_line(exported: Callable[..., Path]) -> None:
    folder = exported()
    _config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(ConfigError, match="cannot be loaded .*requires bitsandbytes.*; name a run, or a folder that an export wrote$"):
        open_model(folder)


@pytest.mark.parametrize("damage", ["changed bit", "class", "not json", "missing"])
def test_a_folder_that_is_refused_ends_eval_and_explore_with_2(
    exported: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder, text = exported(), tmp_path / "text.txt"
    text.write_text("9 on wall 3")
    DAMAGES[damage][0](folder)
    for words in (["explore", str(folder), "-o", str(tmp_path / "x.html")], ["eval", str(folder), "--out", str(tmp_path / "out")]):
        capsys.readouterr()
        assert run_command([*words, "--text", str(text)]) == 2
        assert f"nsa-train: {str(folder)!r} cannot be loaded (" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists() and not (tmp_path / "out").exists()


def test_an_id_of_the_end_that_the_model_lacks_is_refused_and_a_pad_is_left_out(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    assert run_command(["ckpt", "export", str(saved()), str(folder), "--format", "hf"]) == 0
    config = json.loads((folder / "config.json").read_text())
    for end in (10**12, -1):
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
        with pytest.raises(ConfigError, match=rf"has eos_token_id={end} \(the model has ids 0 .. \d+\); use the id of its tokenizer"):
            open_model(folder)
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": -1}))
    assert open_model(folder).tokenizer.pad == config["eos_token_id"]


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused(
    saved: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = tmp_path / "exported", tmp_path / "text.txt"
    assert run_command(["ckpt", "export", str(saved()), str(folder), "--format", "hf"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["wall"])
    tokenizer.save_pretrained(folder)
    text.write_text("9 on wall 3")
    for words in (["explore", str(folder), "-o", str(tmp_path / "x.html")], ["eval", str(folder), "--tasks", "loss-by-position"]):
        assert run_command([*words, "--text", str(text)]) == 2
        assert "gives the id 258 (the model has ids 0 .. 257); use the tokenizer of this model" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()
