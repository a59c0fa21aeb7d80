"""Saving and loading: names, tied heads, remote code, and everything that is refused."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from nsa_core.decoder import EMBEDDING_STD, Decoder
from nsa_core.errors import ConfigError, InputError
from nsa_transformers import NSAForCausalLM, NSAModel, NSAModelConfig
from nsa_transformers.configuration import nsa_table

FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__, float(model(torch.arange(12)[None], use_cache=False).logits.detach().double().sum()))
"""


@pytest.fixture
def saved(tiny_model, tmp_path):
    model = tiny_model("mixed")
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


@pytest.fixture
def sharded(saved):
    """The saved model, and a folder with shards of it."""
    model, folder = saved
    model.save_pretrained(folder.parent / "shards", max_shard_size="20KB")
    return model, folder.parent / "shards"


@pytest.mark.parametrize("kind", ["nsa", "shared", "mixed", "dense"])
def test_a_saved_model_loads_bit_equal(tiny_model, prompt, tmp_path, kind):
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    for found in (AutoModelForCausalLM.from_pretrained(tmp_path), NSAForCausalLM.from_pretrained(tmp_path)):
        assert type(found) is NSAForCausalLM
        assert torch.equal(found(prompt).logits, model(prompt).logits)
    bare = AutoModel.from_pretrained(tmp_path)
    assert type(bare) is NSAModel
    assert torch.equal(model.lm_head(bare(prompt).last_hidden_state), model(prompt).logits)


def test_names_of_weights_are_the_decoders(saved):
    model, folder = saved
    config = model.config
    layers = config.decoder_layers()
    plain = Decoder(config.sizes(), [layer.build for layer in layers])
    assert safetensors.torch.load_file(folder / "model.safetensors").keys() == plain.state_dict().keys()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_shares_its_weight_after_loading(tiny_model, prompt, tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in safetensors.torch.load_file(tmp_path / "model.safetensors")) != tied
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (found.lm_head.weight is found.embedding.weight) == tied
    assert found.get_input_embeddings() is found.embedding
    assert found.get_output_embeddings() is found.lm_head
    assert torch.equal(found(prompt).logits, model(prompt).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is NSAModel


def test_embeddings_are_resized_together(tiny_model, prompt):
    model = tiny_model()
    model.resize_token_embeddings(64)
    assert model(prompt).logits.shape[-1] == 64
    assert model.lm_head.weight is model.embedding.weight


@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_drawn_like_the_first_ones(tiny_config, tied, mean_resizing):
    torch.manual_seed(0)
    model = NSAForCausalLM(tiny_config(tie_word_embeddings=tied))
    before = model.embedding.weight.clone(), model.lm_head.weight.clone()
    model.resize_token_embeddings(1000, mean_resizing=mean_resizing)
    for module, old in zip((model.embedding, model.lm_head), before, strict=True):
        assert torch.equal(module.weight[:50], old)
        # drawn like the first rows, or close to their mean
        assert module.weight[50:].std() < 1.1 * EMBEDDING_STD
        if not mean_resizing:
            assert module.weight[50:].std() > 0.9 * EMBEDDING_STD
    assert (model.lm_head.weight is model.embedding.weight) == tied


def test_a_seed_draws_the_decoders_numbers_and_loading_draws_none(tiny_config, saved):
    config = tiny_config()
    torch.manual_seed(0)
    drawn = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    plain = Decoder(config.sizes(), [layer.build for layer in config.decoder_layers()]).state_dict()
    assert all(torch.equal(weight, drawn.state_dict()[name]) for name, weight in plain.items())
    model, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in model.state_dict().items())


def test_shards_dtypes_and_device_maps_load(sharded, prompt):
    model, shards = sharded
    assert len(list(shards.glob("*.safetensors"))) > 1
    for device_map in ("cpu", "auto", {"": "cpu"}):
        found = AutoModelForCausalLM.from_pretrained(shards, device_map=device_map)
        assert torch.equal(found(prompt).logits, model(prompt).logits)
        assert torch.equal(
            found.generate(prompt, max_new_tokens=4, do_sample=False), model.generate(prompt, max_new_tokens=4, do_sample=False)
        )
    half = AutoModelForCausalLM.from_pretrained(shards, dtype=torch.bfloat16)
    assert half(prompt).logits.dtype == torch.bfloat16
    assert half.generate(prompt, max_new_tokens=3).shape == (2, 23)


# generate of 5.16 warns where the embedding lies on disk
MOST = {"embedding": "cpu", "blocks": "disk", "norm": "disk", "lm_head": "cpu"}
PARTS = {"embedding": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "norm": "cpu", "lm_head": "cpu"}


@pytest.mark.parametrize(("kind", "parts"), [("nsa", MOST), ("shared", PARTS), ("mixed", PARTS), ("dense", MOST)])
def test_layers_that_lie_on_disk_compute_the_same(tiny_model, prompt, tmp_path, kind, parts):
    pytest.importorskip("accelerate", reason="accelerate is not installed (an extra, nsa-transformers[train])")
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=parts, offload_folder=tmp_path / "offloaded")
    assert any(weight.is_meta for weight in found.parameters())
    assert torch.equal(found(prompt).logits, model(prompt).logits)
    for options in ({"num_beams": 2}, {"cache_implementation": "static"}):
        tokens, expected = (one.generate(prompt, max_new_tokens=5, do_sample=False, **options) for one in (found, model))
        assert torch.equal(tokens, expected)


def test_the_config_holds_every_size_and_the_three_line_module(saved):
    model, folder = saved
    values = json.loads((folder / "config.json").read_text())
    assert values["model_type"] == "nsa_core"
    assert values["architectures"] == ["NSAForCausalLM"]
    assert values["nsa_schema"] == 1
    assert values["layers"] == ["dense", {"window_size": 6}]
    assert values["auto_map"]["AutoModelForCausalLM"] == "modeling_nsa_core.NSAForCausalLM"
    assert (folder / "modeling_nsa_core.py").read_text().count("\n") == 3
    again = AutoConfig.from_pretrained(folder)
    assert type(again) is NSAModelConfig
    assert again.decoder_layers() == model.config.decoder_layers()


def test_a_process_that_imports_nothing_of_ours_loads_it_by_remote_code(saved, tmp_path):
    model, folder = saved
    expected = float(model(torch.arange(12)[None], use_cache=False).logits.detach().double().sum())
    done = subprocess.run([sys.executable, "-c", FRESH, str(folder)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    module, found = done.stdout.split()
    assert module == "nsa_transformers.modeling"
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_a_model_that_came_by_remote_code_saves_the_same_module(saved, tmp_path):
    _, folder = saved
    NSAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).save_pretrained(tmp_path / "again")
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "modeling_nsa_core.py"}
    assert (tmp_path / "again/modeling_nsa_core.py").read_text() == (folder / "modeling_nsa_core.py").read_text()


def _rewritten(folder, change):
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "missing: norm.weight"),
        (lambda tensors: tensors.update({"blocks.9.mlp.up.weight": torch.zeros(2)}), "not of this model: blocks.9.mlp.up.weight"),
        (
            lambda tensors: tensors.update({"norm.weight": torch.zeros(32, dtype=torch.int8)}),
            r"holds norm.weight I8 \(weights are floating",
        ),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}), r"of another shape: norm.weight \[3\] in place of \[32\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(saved, change, message):
    _, folder = saved
    _rewritten(folder, change)
    with pytest.raises(InputError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_pickled_weights_are_refused_unread(saved):
    _, folder = saved
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(InputError, match=r"pytorch_model.bin is a pickle, which runs code"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(InputError, match="use_safetensors=False asks for pickled weights"):
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=False)


def test_damaged_files_and_shards_are_named(sharded):
    _, shards = sharded
    part = sorted(shards.glob("*.safetensors"))[1]
    whole = part.read_bytes()
    for content in (whole[:-10], whole[:4], b"", b"\xff" * 100):
        part.write_bytes(content)
        with pytest.raises(InputError, match=f"{part.name} is no whole safetensors file"):
            AutoModelForCausalLM.from_pretrained(shards)
    part.unlink()
    with pytest.raises(InputError, match=part.name):
        AutoModelForCausalLM.from_pretrained(shards)
    index = shards / "model.safetensors.index.json"
    text = index.read_text()
    for name in ("../model/model.safetensors", "pytorch_model.bin"):
        index.write_text(text.replace(part.name, name))
        with pytest.raises(InputError, match=rf"names files elsewhere \(\['{name}'\]; the rule: safetensors files in the same folder"):
            AutoModelForCausalLM.from_pretrained(shards)
    index.write_text("{")
    with pytest.raises(InputError, match="is no index of weights"):
        AutoModelForCausalLM.from_pretrained(shards)


@pytest.mark.parametrize("damage", ["pipe", "directory", "long name", "deep", "metadata"])
def test_an_index_that_names_no_regular_file_or_cannot_be_read_is_refused(sharded, damage):
    _, shards = sharded
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    part = shards / content["weight_map"]["norm.weight"]
    expected = rf"{part.name} is no whole safetensors file \(it is no regular file\)"
    if damage in ("pipe", "directory"):
        part.unlink()
        os.mkfifo(part) if damage == "pipe" else part.mkdir()
    elif damage == "long name":
        content["weight_map"]["norm.weight"] = f"{'a' * 300}.safetensors"
        index.write_text(json.dumps(content))
        expected = "is no whole safetensors file"
    elif damage == "deep":
        index.write_text("[" * 100_000)
        expected = "is no index of weights"
    else:
        index.write_text(json.dumps({**content, "metadata": "x"}))
        expected = "has metadata='x' .* use {}"
    with pytest.raises(InputError, match=expected):
        NSAForCausalLM.from_pretrained(shards)


@pytest.mark.parametrize("is_named", [False, True])
def test_an_index_that_does_not_name_the_shard_of_a_tensor_is_refused(sharded, is_named):
    _, shards = sharded
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = content["weight_map"]
    holder, other = files.pop("norm.weight"), files["embedding.weight"]
    # all shards are read
    assert holder in files.values() and holder != other
    said = f"names {other} for norm.weight" if is_named else "does not name norm.weight"
    index.write_text(json.dumps({**content, "weight_map": {**files, **({"norm.weight": other} if is_named else {})}}))
    with pytest.raises(InputError, match=rf"index.json {said}, which {holder} holds \(an index names the file of each tensor\)"):
        NSAForCausalLM.from_pretrained(shards)


def test_an_index_may_name_a_tensor_that_no_shard_holds(sharded, prompt):
    model, shards = sharded
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    # a tied output layer, as some converters leave it
    content["weight_map"]["lm_head.weight"] = content["weight_map"]["embedding.weight"]
    index.write_text(json.dumps(content))
    assert torch.equal(NSAForCausalLM.from_pretrained(shards)(prompt).logits, model(prompt).logits)


def test_an_older_index_next_to_a_single_file_is_not_read(saved, prompt):
    model, folder = saved
    (folder / "model.safetensors.index.json").write_text("{")
    assert torch.equal(NSAForCausalLM.from_pretrained(folder)(prompt).logits, model(prompt).logits)


def test_an_index_without_metadata_is_refused_and_an_empty_table_is_enough(sharded, prompt):
    model, shards = sharded
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["metadata"]
    index.write_text(json.dumps(content))
    with pytest.raises(InputError, match="has no metadata .*add an empty table"):
        AutoModelForCausalLM.from_pretrained(shards)
    index.write_text(json.dumps({**content, "metadata": {}}))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(shards)(prompt).logits, model(prompt).logits)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nsa_schema": 2}, r"nsa_schema=2 \(this version of nsa-transformers reads up to 1\)"),
        ({"nsa_schema": 0}, r"nsa_schema=0 \(the first version is 1\)"),
        ({"nsa_schema": -3}, r"nsa_schema=-3 \(the first version is 1\)"),
        ({"attention": "linear"}, "attention='linear' is unknown"),
        ({"layers": ["nsa", "nsa", "nsa"]}, "num_hidden_layers=2 does not hold the 3 entries"),
        ({"layers": ["dense", {"heads": 2}]}, r"layers\[1\]=.* is no layer"),
        ({"layers": ["nsa", {"attention": "dense", "branches": ["cmp"]}]}, r"layers\[1\] is dense and would ignore branches; use 'dense'"),
        ({"layers": ["dense", {"window_size": 0}]}, r"^layers\[1\]: window_size=0 is too small \(the rule: an integer >= 1\)"),
        ({"nsa": {"window": 5}}, "unknown key nsa.window .* did you mean 'window_size'"),
        ({"nsa": {"compression_stride": 3}}, "^compression_stride=3 does not divide"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"vocab_size": -1}, "vocab_size=-1 is too small"),
        ({"vocab_size": 0}, "vocab_size=0 is too small"),
        ({"intermediate_size": -64}, "intermediate_size=-64 is too small"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0 is too small"),
        ({"vocab_size": 10**12}, r"vocab_size=1000000000000 is too large \(the rule: an integer <= 2147483647\)"),
        ({"intermediate_size": 10**12}, r"intermediate_size=1000000000000 is too large \(the rule: an integer <= 1048576\)"),
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers=1000000000000 is too large \(the rule: an integer <= 65536\)"),
        ({"hidden_size": 10**12}, r"hidden_size=1000000000000 is too large \(the rule: an integer <= 1048576\)"),
        ({"nsa": {"compression_block_size": 10**12}}, r"compression_block_size=1000000000000 is too large"),
        ({"head_dim_qk": 0}, "head_dim_qk=0 is too small"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf is negative or no number"),
        ({"dtype": 7}, r"dtype=7 is no dtype of weights .*use 'float32'"),
        ({"dtype": "nn"}, r"dtype='nn' is no dtype of weights .*use 'float32'"),
        ({"dtype": None, "torch_dtype": "int8"}, r"dtype='int8' is no dtype of weights .*use 'float32'"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05 is negative"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is negative or no number"),
    ],
)
def test_a_config_that_cannot_be_is_refused(saved, values, message):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(ConfigError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 2**31 - 1}, r"of another shape: embedding.weight \[50, 32\] in place of \[2147483647, 32\]"),
        (
            {"intermediate_size": 2**20},
            r"of another shape: blocks.0.mlp.down.weight \[32, 128\] in place of \[32, 1048576\], .* and 3 more",
        ),
        ({"num_hidden_layers": 1024}, r"missing: blocks.10, blocks.100, blocks.1000 and 1019 more"),
        ({"head_dim_qk": 2**20}, r"of another shape: .* in place of \[1048576"),
    ],
)
def test_sizes_beyond_the_weights_are_refused_before_they_are_allocated(saved, values, message, monkeypatch):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    for cls in (NSAForCausalLM, NSAModel):
        with pytest.raises(InputError, match=message):
            cls.from_pretrained(folder)


def test_another_architecture_is_refused(saved):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(InputError, match=r"architectures=\['LlamaForCausalLM'\] \(this package has NSAForCausalLM, NSAModel\)"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(("kind", "message"), [("llama", "has model_type='llama'"), (None, "has model_type=None"), (3, "has model_type=3")])
def test_another_model_type_is_refused(saved, kind, message):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    # as other models name their tensors
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({f"model.{name}": x for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=message + r" \(the rule: 'nsa_core'\)"):
        NSAForCausalLM.from_pretrained(folder)


def test_another_model_type_is_refused_where_the_configuration_is_given(saved):
    model, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nsa"}))
    with pytest.raises(InputError, match=r"has model_type='nsa' \(the rule: 'nsa_core'\)"):
        NSAForCausalLM.from_pretrained(folder, config=model.config)
    (folder / "config.json").unlink()
    found = NSAForCausalLM.from_pretrained(folder, config=model.config)
    assert all(torch.equal(x, y) for x, y in zip(found.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("named", [3, "NSAForCausalLM", [3]])
def test_architectures_that_are_no_list_of_names_are_refused(saved, named):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": named}))
    with pytest.raises(InputError, match=r"has architectures=.* \(the rule: a list of names\)"):
        NSAForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_tensor_with_a_prefix_never_replaces_the_models_own(saved, is_alone):
    _, folder = saved
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    changed = tensors.pop("norm.weight") if is_alone else tensors["norm.weight"]
    safetensors.torch.save_file({**tensors, "model.norm.weight": changed + 1}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"holds model.norm.weight \(names of this model have no 'model.' in front\)"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_class_of_your_own_loads_what_it_saved(saved, tmp_path):
    class OwnConfig(NSAModelConfig):
        model_type = "own_nsa"

    class Own(NSAForCausalLM):
        config_class = OwnConfig

    model, folder = saved
    own = Own(OwnConfig(**{name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "architectures")}))
    own.load_state_dict(model.state_dict())
    own.save_pretrained(tmp_path / "own")
    found = Own.from_pretrained(tmp_path / "own")
    assert all(torch.equal(x, y) for x, y in zip(found.parameters(), model.parameters(), strict=True))
    with pytest.raises(InputError, match=r"has model_type='nsa_core' \(the rule: 'own_nsa'\)"):
        Own.from_pretrained(folder)


@pytest.mark.parametrize("text", ["[]", "{", "3"])
def test_a_config_that_is_no_object_is_refused(saved, text):
    _, folder = saved
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config.json cannot be read"):
        NSAForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"pad_token_id": [1]}', r"has pad_token_id=\[1\] \(the rule: "),
        ("[]", "cannot be read .*no object"),
        ("{", "cannot be read .*Expecting"),
    ],
)
def test_settings_of_generation_that_cannot_be_are_refused_by_name(saved, text, fault):
    path = saved[1] / "generation_config.json"
    path.write_text(text)
    for kind in (NSAForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ConfigError, match=f"/generation_config.json {fault}.*; use the "):
            kind.from_pretrained(saved[1])
    assert NSAModel.from_pretrained(saved[1])


def test_a_tensor_in_two_shards_is_refused(sharded):
    _, shards = sharded
    first, second = sorted(shards.glob("*.safetensors"))[:2]
    twice = safetensors.torch.load_file(second) | {name: tensor + 1 for name, tensor in safetensors.torch.load_file(first).items()}
    safetensors.torch.save_file(twice, second, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"{second.name} and {first.name} both hold .* \\(a tensor has one file\\)"):
        AutoModelForCausalLM.from_pretrained(shards)


def test_an_output_layer_that_is_tied_and_differs_is_refused(saved, prompt):
    model, folder = saved
    _rewritten(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["embedding.weight"].clone()}))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.embedding.weight
    assert torch.equal(loaded(prompt).logits, model(prompt).logits)
    _rewritten(folder, lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(InputError, match=r"lm_head.weight differs from embedding.weight .*set tie_word_embeddings to false in config.json"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_remote_code_is_not_run_where_the_package_is_imported(saved, tmp_path):
    _, folder = saved
    (folder / "modeling_nsa_core.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    AutoModelForCausalLM.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()


def test_the_table_nsa_describes_its_layers_again(tiny_config):
    config = tiny_config(
        "shared", nsa={**tiny_config().nsa, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "backends": {"cmp": "sdpa"}}
    )
    [layer, _] = config.decoder_layers()
    assert layer.config.rope_scaling.kind == "llama3"
    table = nsa_table(layer.config)
    assert "backends" not in table
    assert nsa_table(tiny_config(nsa=table).decoder_layers()[0].config) == table
    json.dumps(table)


def test_nothing_is_left_where_a_copy_is_missing(tmp_path):
    with pytest.raises(InputError, match="has no model.safetensors"):
        NSAForCausalLM.from_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(tmp_path)
