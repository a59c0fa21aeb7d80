"""Bad input: each kind has its own error, and nothing is written."""

import json
import logging
import re

import pytest
import safetensors.torch
import torch
from transformers.utils import logging as transformers_logging

from nsa_core.errors import ConfigError, InputError
from nsa_transformers import NSAForCausalLM
from nsa_transformers.checksums import UNSEALED, seal
from nsa_transformers.conversion import ConversionOptions, plan_conversion, verifying, write_converted


def edit_config(folder, name="config.json", **values):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def refusal(folder, kind=ConfigError, **options):
    with pytest.raises(kind) as found:
        plan_conversion(folder, ConversionOptions(**options))
    return str(found.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' (the architectures that are converted: LlamaForCausalLM, MistralForCausalLM, "),
        ({"model_type": None}, "model_type=None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures=['LlamaForSequenceClassification'] (the rule: "),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not converted"),
        ({"attention_bias": True}, "attention_bias=True gives o_proj a bias"),
        ({"mlp_bias": True}, "mlp_bias=True gives the MLP biases"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config"),
        ({"hidden_size": "wide"}, "describes no LlamaForCausalLM"),
        ({"num_attention_heads": 0}, "describes no LlamaForCausalLM"),
    ],
)
def test_configurations_that_are_not_converted_are_refused(dense, values, message):
    folder = dense().folder
    edit_config(folder, **values)
    assert message in refusal(folder)


def test_heads_that_do_not_divide_are_refused(dense):
    folder = dense().folder
    edit_config(folder, num_key_value_heads=3)
    edit_weights(folder, lambda tensors: [tensors.update({name: torch.zeros(48, 32)}) for name in tensors if re.search("[kv]_proj", name)])
    assert "num_kv_heads=3 does not divide num_heads=4 (each KV head serves H/G query heads); use 2 or 4" in refusal(folder)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_no_token_is_refused(dense, window):
    folder = dense("Mistral").folder
    edit_config(folder, "config.json", sliding_window=window)
    assert f"sliding_window={window} (the rule: an integer of at least 1, or null)" in refusal(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", [61, -1])
def test_ids_outside_the_vocabulary_are_refused(dense, file, key, value):
    folder = dense().folder
    edit_config(folder, file, **{key: value})
    assert f"/{file} has {key}={value} (the rule: an id of the vocabulary, 0 .. 60, or a list of them); use the id of its" in refusal(
        folder
    )


@pytest.mark.parametrize("value", [[1, 61], [-3], "2", 2.0, True, [[1]], {"id": 2}])
def test_settings_of_generation_whose_id_of_an_end_is_none_are_refused(dense, value):
    folder = dense().folder
    edit_config(folder, "generation_config.json", eos_token_id=value)
    assert f"/generation_config.json has eos_token_id={value!r} (the rule: an id of the vocabulary, 0 .. 60, " in refusal(folder)


@pytest.mark.parametrize("value", [[1], "1", True])
def test_settings_of_generation_whose_pad_is_no_integer_are_refused(dense, value):
    folder = dense().folder
    edit_config(folder, "generation_config.json", pad_token_id=value)
    assert f"/generation_config.json has pad_token_id={value!r} (the rule: an integer, or null); use the id of its" in refusal(folder)


def test_a_refused_id_gets_no_warning_of_transformers(dense):
    folder, said = dense().folder, []
    edit_config(folder, eos_token_id=4321)
    handler, level = logging.StreamHandler(), transformers_logging.get_verbosity()
    handler.emit = said.append
    transformers_logging.add_handler(handler)
    try:
        assert "/config.json has eos_token_id=4321" in refusal(folder)
    finally:
        transformers_logging.remove_handler(handler)
    assert said == []
    assert transformers_logging.get_verbosity() == level


def test_a_list_with_an_id_outside_the_vocabulary_is_refused(dense):
    folder = dense().folder
    edit_config(folder, eos_token_id=[1, 61])
    assert "/config.json has eos_token_id=[1, 61] (the rule: " in refusal(folder)


@pytest.mark.parametrize("value", [60, [0, 60], None])
def test_ids_of_the_vocabulary_are_converted(dense, convert, value):
    folder = dense().folder
    # some dense models have no pad, and -1 for its id
    edit_config(folder, eos_token_id=value, pad_token_id=-1)
    edit_config(folder, "generation_config.json", eos_token_id=value)
    assert convert(folder).model.generation_config.eos_token_id == value


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size"])
@pytest.mark.parametrize("value", [10**12, 1])
def test_sizes_that_are_not_those_of_the_tensors_are_refused_at_once(dense, key, value):
    folder = dense().folder
    edit_config(folder, **{key: value})
    # Transformers itself refuses some of them
    message = refusal(folder, (InputError, ConfigError))
    assert "are not those of its config.json: " in message or "describes no LlamaForCausalLM" in message


def test_heads_without_dimensions_are_not_taken_for_the_usual_ones(dense):
    folder = dense(head_dim=8).folder
    edit_config(folder, head_dim=0)
    assert "has head_dim=0 (the rule: an integer >= 1)" in refusal(folder)


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("Qwen2", "num_attention_heads", 0, "has num_attention_heads=0 (the rule: an integer >= 1); use the size that the weights have"),
        ("Qwen2", "head_dim", float("nan"), "has head_dim=nan (the rule: an integer >= 1); use the size that the weights have"),
        ("Qwen2", "head_dim", 8.0, "has head_dim=8.0 (the rule: an integer >= 1)"),
        ("Llama", "dtype", 1e308, "has dtype=1e+308 (the rule: the name of a dtype of torch); use 'bfloat16'"),
        ("Mistral", "torch_dtype", "nn", "has torch_dtype='nn' (the rule: the name of a dtype of torch); use 'bfloat16'"),
    ],
)
def test_numbers_that_are_no_sizes_are_refused(dense, family, key, value, message):
    folder = dense(family).folder
    edit_config(folder, **{key: value})
    assert message in refusal(folder)


def test_a_head_dim_that_is_left_open_is_the_usual_one(dense):
    folder = dense("Qwen2", head_dim=8).folder
    edit_config(folder, head_dim=None)
    write_converted(plan_conversion(folder, ConversionOptions()), folder.parent / "out")
    assert NSAForCausalLM.from_pretrained(folder.parent / "out").config.head_dim_qk == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nsa": {"compression_block_size": 30}}, "compression_stride=16 does not divide compression_block_size=30"),
        (
            {"nsa": {"windowsize": 30}},
            "unknown key nsa.windowsize (the rule: a size of blocks or a field of NSAConfig); did you mean 'window_size'?",
        ),
        ({"nsa": {"rope_theta": 5.0}}, "--nsa rope_theta=5.0 is decided by the source's config.json; leave it out"),
        ({"nsa": {"kv": "shared"}}, "--nsa kv=shared is a separate option; use --kv shared"),
        ({"kv": "both"}, "--kv='both' is unknown (the rule: one of 'shared', 'separate'); use 'shared'"),
        ({"gates": "shut"}, "--gates='shut' is unknown (the rule: one of 'open', 'selected'); use 'open'"),
        ({"layers": "nsa"}, "--layers='nsa' is no pattern"),
        ({"layers": []}, "--layers=[] is no pattern"),
        ({"layers": [{"branches": 5}]}, "branches"),
        ({"layers": [["nsa"]]}, "layers[0]"),
        ({"layers": [{"attention": []}]}, "layers[0]"),
        (
            {"layers": ["nsa", "dense", "nsa"]},
            "--layers has 3 entries, the model 2 layers (the pattern is repeated, whole); use 1 or 2 entries",
        ),
        ({"layers": ["sparse"]}, "layers[0]='sparse' is no layer"),
        ({"layers": [{"window": 3}]}, "layers[0]={'window': 3} is no layer"),
    ],
)
def test_options_that_do_not_fit_are_refused(dense, options, message):
    folder = dense().folder
    with pytest.raises(ConfigError) as found:
        plan_conversion(folder, ConversionOptions(**options))
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), "model.embed_tokens.weight is missing"),
        (lambda tensors: tensors.update({"score.weight": torch.zeros(2)}), "score.weight is not of this model"),
        (lambda tensors: tensors.update({"a\n\x1b[31m": torch.zeros(2)}), r"'a\n\x1b[31m' is not of this model"),
        (lambda tensors: tensors.update({"a\n\x1b[31m": torch.zeros(2, dtype=torch.int8)}), r"'a\n\x1b[31m' in "),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 32)}),
            "model.layers.1.mlp.up_proj.weight expected [48, 32], found [3, 32]",
        ),
        (lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)}), "o_proj.bias is not of this model"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "model.norm.weight in "),
    ],
    ids=["missing", "no embedding", "extra", "control characters", "control characters of integers", "misshaped", "a bias", "integers"],
)
def test_tensors_of_another_model_are_refused(dense, change, message):
    folder = dense().folder
    edit_weights(folder, change)
    assert message in refusal(folder, InputError)


def test_many_problems_are_counted(dense):
    folder = dense().folder
    edit_weights(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "norm" in name])
    assert "; and 2 more; use the files of one checkpoint" in refusal(folder, InputError)


def test_buffers_of_old_checkpoints_are_left_out(dense, convert):
    folder = dense().folder
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert convert(folder).found.difference.layers < 1e-4


def test_a_tied_output_layer_may_be_there_twice_if_it_is_equal(dense, convert):
    folder = dense(tie_word_embeddings=True).folder
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert convert(folder).found.difference.layers < 1e-4
    edit_weights(folder, lambda tensors: tensors["lm_head.weight"].mul_(2))
    assert "differs from the embedding (tie_word_embeddings=true would lose it)" in refusal(folder, InputError)


def test_pickles_are_refused_and_not_opened(dense, tmp_path):
    folder = dense().folder
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    assert "pytorch_model.bin is a pickle, which runs code when it is read" in refusal(folder, InputError)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["shortened", "gone", "no header"])
def test_damaged_shards_are_refused(dense, damage):
    folder = dense(shards="20kB").folder
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    if damage != "gone":
        shard.write_bytes(content[:-1] if damage == "shortened" else b"\xff" * 100)
    assert shard.name in refusal(folder, InputError)


def test_a_changed_bit_of_a_source_with_checksums_is_refused_before_anything_is_written(dense, tmp_path):
    folder = dense(shards="20kB").folder
    shard = sorted(folder.glob("*.safetensors"))[1]
    safetensors.torch.save_file(safetensors.torch.load_file(shard), shard, metadata={"format": "pt", **UNSEALED})
    seal(shard)
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=f"{shard.name} is damaged"):
        write_converted(plan_conversion(folder, ConversionOptions()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_index_that_names_files_elsewhere_is_refused(dense):
    folder = dense(shards="20kB").folder
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../model.safetensors")
    path.write_text(json.dumps(index))
    assert "names files elsewhere" in refusal(folder, InputError)


@pytest.mark.parametrize("name", ["\ud800.safetensors", "a\0.safetensors"])
def test_an_index_with_a_name_that_no_file_has_is_refused(dense, name):
    folder = dense(shards="20kB").folder
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"weight_map": dict.fromkeys(index["weight_map"], name)}))
    assert f"names files elsewhere ([{name!r}]" in refusal(folder, InputError)


def test_an_index_that_does_not_name_the_shard_of_a_tensor_is_refused(dense):
    folder = dense(shards="20kB").folder
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    holder = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    assert f"does not name model.norm.weight, which {holder} holds (an index names the file of each tensor)" in refusal(folder, InputError)


def test_a_tensor_in_two_shards_is_refused(dense):
    folder = dense(shards="20kB").folder
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    twice = safetensors.torch.load_file(first) | safetensors.torch.load_file(second)
    safetensors.torch.save_file(twice, second, metadata={"format": "pt"})
    assert "both hold" in refusal(folder, InputError)


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_folder_without_a_configuration_is_refused(dense, content):
    folder = dense().folder
    (folder / "config.json").unlink()
    if content:
        (folder / "config.json").write_text(content)
    assert "config.json cannot be read" in refusal(folder)


def test_a_source_that_is_no_folder_is_refused(tmp_path):
    assert "is no folder (nothing is downloaded)" in refusal(tmp_path / "meta-llama")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_found_in_a_row_that_no_comparison_reads(dense, convert, tmp_path, dtype, value):
    folder = dense(dtype=dtype, vocab_size=3000).folder
    edit_weights(folder, lambda tensors: tensors["model.embed_tokens.weight"][2777, 5:6].fill_(value))
    with pytest.raises(InputError, match=r"holds NaN or Inf in the tensor that becomes embedding\.weight"):
        convert(folder)
    assert not (tmp_path / "converted" / "config.json").exists()


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_logits_that_overflow_are_found(dense, convert, name):
    folder = dense().folder
    edit_weights(folder, lambda tensors: tensors[name].fill_(3e38))
    with pytest.raises(InputError, match="the logits are not finite"):
        convert(folder)


def test_a_layer_that_overflows_is_found(dense, convert, tmp_path):
    folder = dense().folder
    edit_weights(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].fill_(3e38))
    with pytest.raises(InputError, match="layer 1 gives NaN or Inf"):
        convert(folder)
    # nothing loads it
    assert not (tmp_path / "converted" / "config.json").exists()


def test_a_layer_that_computes_something_else_is_found(dense, tmp_path):
    plan = plan_conversion(dense().folder, ConversionOptions(gates="selected"))
    plan.config.nsa["rope_theta"] = 5e5
    with pytest.raises(InputError, match="layer 0 differs from Transformers' by"):
        write_converted(plan, tmp_path / "out")


def test_selected_gates_keep_the_logits_or_are_refused(dense, tmp_path, monkeypatch):
    plan = plan_conversion(dense().folder, ConversionOptions(gates="selected"))
    monkeypatch.setattr(verifying, "_compared_logits", lambda *_: (2e-4, 1.0, 1.0))
    with pytest.raises(InputError, match=r"logits differ from the source's by 2.0e-04 .*--gates open"):
        write_converted(plan, tmp_path / "out")


def test_a_number_of_rope_that_is_none_is_refused(dense):
    folder = dense().folder
    content = json.loads((folder / "config.json").read_text())
    edit_config(folder, rope_parameters={**content["rope_parameters"], "rope_theta": "x"})
    assert "rope_theta" in refusal(folder)
