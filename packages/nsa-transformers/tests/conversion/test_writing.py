"""The folder of a converted model: dtypes, shards, tokenizer, and the order in which files come."""

import json

import pytest
import safetensors.torch
import torch

from nsa_core.errors import ConfigError, InputError
from nsa_transformers import NSAForCausalLM
from nsa_transformers.conversion import ConversionOptions, plan_conversion, write_converted, writing
from nsa_transformers.conversion.tensor_files import stored_tensors
from nsa_transformers.weights import weight_files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_the_source_is_kept(dense, convert, dtype):
    source = dense(dtype=dtype)
    found = convert(source.folder, gates="selected")
    tensors = safetensors.torch.load_file(found.folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert torch.equal(tensors["blocks.1.attention.k_proj.weight"], source.model.model.layers[1].self_attn.k_proj.weight)
    assert NSAForCausalLM.from_pretrained(found.folder, dtype="auto").dtype == dtype
    assert json.loads((found.folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_shards_hold_at_most_as_many_bytes_as_asked(dense, convert):
    found = convert(dense().folder, shard_bytes=20_000)
    shards = sorted(found.folder.glob("*.safetensors"))
    index = json.loads((found.folder / "model.safetensors.index.json").read_text())
    sizes = [[tensor.nbytes for tensor in safetensors.torch.load_file(shard).values()] for shard in shards]
    assert len(shards) > 3
    assert all(sum(size) <= 20_000 or len(size) == 1 for size in sizes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes)) == found.found.conversion.nbytes
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}


def test_a_changed_bit_of_a_converted_shard_is_found(dense, convert):
    shards = sorted(convert(dense().folder, shard_bytes=20_000).folder.glob("*.safetensors"))
    for shard in shards:
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(InputError, match=f"{shard.name} is damaged"):
            NSAForCausalLM.from_pretrained(shard.parent)
        shard.write_bytes(whole)
    NSAForCausalLM.from_pretrained(shards[0].parent)


def test_the_same_options_write_the_same_bytes(dense, tmp_path):
    folder = dense().folder
    for name in ("one", "other"):
        write_converted(plan_conversion(folder, ConversionOptions()), tmp_path / name)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "other/model.safetensors").read_bytes()


def test_files_of_the_tokenizer_are_copied_and_code_is_not(dense, convert):
    folder = dense().folder
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text('{"of": "the source"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    (folder / "modeling_llama.py").write_text("raise SystemExit")
    found = convert(folder).folder
    assert (found / "chat_template.jinja").read_text() == (folder / "chat_template.jinja").read_text()
    assert json.loads((found / "generation_config.json").read_text())["temperature"] == 0.5
    assert [path.name for path in found.glob("*.py")] == ["modeling_nsa_core.py"]


@pytest.mark.parametrize("kind", ["offloaded", "hybrid", 3])
def test_a_cache_implementation_that_generate_refuses_is_left_out_and_said(dense, tmp_path, kind):
    folder, lines = dense().folder, []
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "do_sample": True, "cache_implementation": kind}))
    write_converted(plan_conversion(folder, ConversionOptions()), tmp_path / "out", lines.append)
    assert any(f"generation_config.json is written without cache_implementation={kind!r}, which cannot hold NSA" in line for line in lines)
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"temperature": 0.5, "do_sample": True}
    NSAForCausalLM.from_pretrained(tmp_path / "out").generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)


def test_settings_of_generation_that_cannot_be_read_are_refused_before_anything_is_written(dense, tmp_path):
    folder = dense().folder
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config.json cannot be read"):
        write_converted(plan_conversion(folder, ConversionOptions()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_code_that_the_source_names_is_not_run(dense, convert, tmp_path):
    folder = dense().folder
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoConfig": "evil.Config"}}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    found = convert(folder)
    assert not (tmp_path / "ran").exists()
    assert "evil" not in (found.folder / "config.json").read_text()


def test_what_is_interrupted_before_its_end_does_not_load(dense, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_converted(plan_conversion(dense().folder, ConversionOptions()), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(InputError, match=r"has no config\.json \(it is written last: the folder is not whole\); write it again"):
        NSAForCausalLM.from_pretrained(tmp_path / "out")


def test_progress_is_said(dense, tmp_path):
    lines = []
    write_converted(plan_conversion(dense().folder, ConversionOptions()), tmp_path / "out", lines.append)
    assert lines[-3].startswith("written 100 % of ")
    assert lines[-2:] == ["verified layer 1 of 2", "verified layer 2 of 2"]


def test_rows_and_pieces_of_a_file_are_its_tensors(dense):
    folder = dense().folder
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, stored in stored_tensors(weight_files(folder)).items():
        assert b"".join(stored.pieces()) == tensors[name].view(torch.uint8).numpy().tobytes()
        assert torch.equal(stored.rows(5, 1000), tensors[name][5:])
