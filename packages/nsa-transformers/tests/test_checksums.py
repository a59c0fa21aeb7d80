"""Checksums of weights: a changed bit is found before the model is used, and files without one load as ever."""

import re

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import PushToHubMixin

from nsa_core.errors import InputError
from nsa_transformers.checksums import KEY, UNSEALED, require_undamaged, seal, seal_copy


def flip(file, place, bit=0):
    """Flip a bit of the byte at `place`; negative ones count from the end."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


@pytest.fixture
def sealed(tmp_path):
    """A sealed file of three tensors, one without elements, and the bytes of its data."""
    file = tmp_path / "model.safetensors"
    # a name that looks like a checksum that is still to come
    tensors = {
        "a": torch.arange(12.0).view(3, 4),
        f'"data_sha256":"{"0" * 64}"': torch.ones(5, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
    }
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt", "step": "7", **UNSEALED})
    seal(file)
    return file, 12 * 4 + 5 * 2


def test_sealing_changes_neither_tensors_nor_other_metadata(sealed):
    file, num_bytes = sealed
    require_undamaged([file])
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata().keys() == {"format", "step", "data_sha256"}
        assert opened.metadata()["step"] == "7"
    tensors = safetensors.torch.load_file(file)
    assert torch.equal(tensors["a"], torch.arange(12.0).view(3, 4))
    assert sum(tensor.nbytes for tensor in tensors.values()) == num_bytes


def test_every_changed_bit_of_the_data_is_found(sealed):
    file, num_bytes = sealed
    for place in range(-num_bytes, 0):
        for bit in range(8):
            flip(file, place, bit)
            with pytest.raises(
                InputError, match=re.escape(f"{file} is damaged (its data do not have the SHA-256 in its header); copy it again")
            ):
                require_undamaged([file])
            flip(file, place, bit)
    require_undamaged([file])


def test_a_changed_checksum_is_found(sealed):
    file, _ = sealed
    flip(file, file.read_bytes().index(b'"data_sha256":"') + 20)
    with pytest.raises(InputError, match="is damaged"):
        require_undamaged([file])


def digest_of(file):
    with safetensors.safe_open(file, "pt") as opened:
        return (opened.metadata() or {}).get(KEY)


def test_a_model_with_a_changed_bit_in_one_shard_does_not_load(tiny_model, prompt, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len({digest_of(shard) for shard in shards} - {None}) == len(shards)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(prompt).logits, model(prompt).logits)
    flip(shards[-2], -1, 6)
    with pytest.raises(InputError, match=f"{shards[-2].name} is damaged"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_changed_bit_of_a_header_is_found_or_changes_no_weight(tiny_model, tmp_path):
    model = tiny_model(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    places = torch.randint(8 + int.from_bytes(file.read_bytes()[:8], "little"), (40,), generator=torch.Generator().manual_seed(0))
    for count, place in enumerate(places.tolist()):
        flip(file, place, count % 8)
        try:
            found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        except InputError:
            found = model.state_dict()
        assert all(torch.equal(found[name], weight) for name, weight in model.state_dict().items())
        flip(file, place, count % 8)


def test_a_file_without_a_checksum_loads(tiny_model, prompt, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file), file, metadata={"format": "pt"})
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(prompt).logits, model(prompt).logits)


def test_a_sealed_copy_has_the_tensors_metadata_and_mode_of_the_file(tmp_path):
    file = tmp_path / "model.safetensors"
    tensors = {"x" * length: torch.rand(length, dtype=torch.float64) for length in range(1, 9)}
    for metadata in ({"format": "pt", "by": 'an "author"'}, None):
        safetensors.torch.save_file(tensors, file, metadata=metadata)
        file.chmod(0o640)
        seal_copy(file)
        require_undamaged([file])
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata() == {**(metadata or {}), KEY: digest_of(file)}
        found = safetensors.torch.load_file(file)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert file.stat().st_mode & 0o777 == 0o640
        # data that are not aligned would be copied by those who map the file
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    assert [*tmp_path.iterdir()] == [file]


def test_weights_that_are_saved_again_in_the_same_folder_are_the_ones_that_load(tiny_model, tmp_path):
    model = tiny_model()
    for factor, options in enumerate(({}, {"max_shard_size": "20KB"}, {"max_shard_size": "40KB"}, {}), start=2):
        model.norm.weight.data.mul_(factor)
        model.save_pretrained(tmp_path, **options)
        assert None not in {digest_of(file) for file in tmp_path.glob("*.safetensors")}
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).norm.weight, model.norm.weight)


def test_a_save_touches_no_weights_of_others(tiny_model, tmp_path):
    model = tiny_model()
    for name in ("model.bf16.safetensors", "adapter_model.safetensors", "my-model.safetensors"):
        safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / name)
    model.save_pretrained(tmp_path, variant="fp32")
    model.save_pretrained(tmp_path, variant="fp32", max_shard_size="20KB")
    # the single file of the save before is gone, which would be loaded instead of the shards
    assert not (tmp_path / "model.fp32.safetensors").exists()
    with_one = {file.name for file in tmp_path.glob("*.safetensors") if digest_of(file)}
    assert len(with_one) > 1
    assert all(name.startswith("model.fp32-") for name in with_one)
    assert len([*tmp_path.glob("*.safetensors")]) == len(with_one) + 3


def test_an_upload_finds_checksums(tiny_model, tmp_path, monkeypatch):
    model, uploaded = tiny_model(), []

    def upload(self, folder, repo_id, files_timestamps, **options):
        uploaded.append((digest_of(tmp_path / "model.safetensors"), repo_id, options))

    monkeypatch.setattr(PushToHubMixin, "_upload_modified_files", upload)
    PreTrainedModel.save_pretrained(model, tmp_path)
    assert digest_of(tmp_path / "model.safetensors") is None
    model._upload_modified_files(tmp_path, "me/model", {}, token="t")
    [(digest, *rest)] = uploaded
    assert digest
    assert rest == ["me/model", {"token": "t"}]
