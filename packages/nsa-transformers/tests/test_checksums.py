"""Checksums of weights: a changed bit is found before the model is used, and files without one load as ever."""

import re

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from nsa_core.errors import InputError
from nsa_transformers.checksums import UNSEALED, require_undamaged, seal


def flip(file, place, bit=0):
    """Flip a bit of the byte at `place`; negative ones count from the end."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def sealed_again(file):
    safetensors.torch.save_file(safetensors.torch.load_file(file), file, metadata={"format": "pt", **UNSEALED})
    seal(file)


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


def test_a_model_with_a_changed_bit_in_one_shard_does_not_load(tiny_model, prompt, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    for shard in shards:
        sealed_again(shard)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(prompt).logits, model(prompt).logits)
    flip(shards[-2], -1, 6)
    with pytest.raises(InputError, match=f"{shards[-2].name} is damaged"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_changed_bit_of_a_header_is_found_or_changes_no_weight(tiny_model, tmp_path):
    model = tiny_model(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    sealed_again(file)
    places = torch.randint(8 + int.from_bytes(file.read_bytes()[:8], "little"), (40,), generator=torch.Generator().manual_seed(0))
    for count, place in enumerate(places.tolist()):
        flip(file, place, count % 8)
        try:
            found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        except InputError:
            found = model.state_dict()
        assert all(torch.equal(found[name], weight) for name, weight in model.state_dict().items())
        flip(file, place, count % 8)


def test_what_transformers_saves_has_no_checksum_and_loads(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    sealed_again(tmp_path / "model.safetensors")
    # other weights saved to the same path have no stale checksum
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.norm.weight.data.mul_(2)
    loaded.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).norm.weight, 2 * model.norm.weight)
