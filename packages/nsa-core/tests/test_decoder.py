"""The decoder: its parameters' names, options that change nothing by default, and a pass in parts."""

from functools import partial

import pytest
import torch
from torch import Tensor

from nsa_core import BlockGeometry, NativeSparseAttention, NSAConfig
from nsa_core.decoder import ATTENTIONS, Decoder, DecoderSizes, mlp_width

CONFIG = NSAConfig(
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim_qk=8,
    head_dim_v=8,
    geometry=BlockGeometry(4, 2, 8, 3, 1, 1, 12),
    gate_hidden_size=8,
)
SIZES = DecoderSizes(vocab_size=50, hidden_size=32, intermediate_size=mlp_width(32))


def _decoder(sizes: DecoderSizes = SIZES, kinds: tuple[str, ...] = ("nsa", "dense"), config: NSAConfig = CONFIG) -> Decoder:
    torch.manual_seed(0)
    return Decoder(sizes, [partial(ATTENTIONS[kind], config) for kind in kinds])


def test_names_of_a_tied_decoder_hold_no_output_layer() -> None:
    names = {name.split(".")[0] for name in _decoder().state_dict()}
    assert names == {"embedding", "blocks", "norm"}
    assert _decoder().output_weight is not None


def test_an_untied_decoder_has_a_weight_of_its_own_and_equal_other_weights() -> None:
    tied, untied = _decoder(), _decoder(SIZES._replace(tie_embeddings=False))
    ours = untied.state_dict()
    assert set(ours) - set(tied.state_dict()) == {"lm_head.weight"}
    assert all(torch.equal(ours[name], value) for name, value in tied.state_dict().items())
    ids = torch.randint(0, 50, (1, 7))
    assert not torch.equal(tied(ids), untied(ids))


def test_the_width_and_the_epsilon_are_those_of_the_sizes() -> None:
    decoder = _decoder(SIZES._replace(intermediate_size=48, norm_eps=0.5))
    assert decoder.blocks[0].mlp.up.out_features == 48
    assert {module.eps for module in decoder.modules() if type(module) is torch.nn.RMSNorm} == {0.5}


@pytest.mark.parametrize("static", [False, True])
def test_a_pass_in_parts_equals_the_whole(static: bool) -> None:
    decoder, ids = _decoder().eval(), torch.randint(0, 50, (2, 40))
    caches = decoder.new_caches(2, 40, static=static)
    with torch.no_grad():
        parts = [decoder(part, caches=caches) for part in ids.split([17, 1, 9, 13], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), decoder(ids), rtol=1e-4, atol=1e-5)


def test_recomputation_is_passed_in_and_used_in_training_alone() -> None:
    decoder, calls = _decoder(), []

    def again(layer: object, *inputs: Tensor) -> Tensor:
        calls.append(layer)
        return layer(*inputs)

    for block in decoder.blocks:
        block.recompute = again
    ids = torch.randint(0, 50, (1, 9))
    decoder.eval()(ids)
    assert not calls
    decoder.train()(ids)
    assert len(calls) == 2


def test_biases_of_q_k_and_v_are_parameters_of_every_branch() -> None:
    config = NSAConfig(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_v=8, geometry=CONFIG.geometry, qkv_bias=True)
    layer = NativeSparseAttention(config)
    names = {name for name, _ in layer.named_parameters() if "_proj" in name and name.endswith("bias")}
    assert names == {"q_proj.bias"} | {f"{part}.{branch}.bias" for part in ("k_proj", "v_proj") for branch in ("cmp", "slc", "win")}
    torch.nn.init.normal_(layer.q_proj.bias)
    x = torch.randn(1, 20, 32)
    cache = layer.new_cache(1, 20)
    with torch.no_grad():
        parts = torch.cat([layer(part, cache=cache) for part in x.split([13, 7], 1)], 1)
        torch.testing.assert_close(parts, layer(x), rtol=1e-4, atol=1e-5)
