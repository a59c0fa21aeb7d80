"""`nsa.qk_norm`: both twins have the norms, and train, decode and are counted with them."""

import json

import pytest
import torch

from nsa_core.dense_attention import DenseAttention
from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.model.decoder import build_model, count_parameters, undrawn_weights
from nsa_train.preflight.memory import estimate_memory

attentions = pytest.mark.parametrize("attention", ["nsa", "dense"])


def model_of(config):
    torch.manual_seed(0)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.double().eval()


def test_dense_attention_normalises_heads_before_rope(tiny_config) -> None:
    layer = DenseAttention(tiny_config("nsa.qk_norm=true").nsa_config()).double()
    with torch.no_grad():
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight.copy_(torch.rand(16) + 0.5)
    x = torch.randn(2, 9, 32, dtype=torch.float64)

    def heads(projection, norm, count):
        raw = projection(x).unflatten(-1, (count, 16))
        return layer.rope(raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight, torch.arange(9))

    q, k = heads(layer.q_proj, layer.q_norm, 2), heads(layer.k_proj, layer.k_norm, 1)
    scores = torch.einsum("bshd,btd->bhst", q, k[:, :, 0]) / 4
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    expected = layer.o_proj(torch.einsum("bhst,btd->bshd", weights, layer.v_proj(x)).flatten(-2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-11, atol=1e-12)


@attentions
def test_each_twin_has_a_weight_for_queries_and_one_for_each_kind_of_keys(tiny_config, attention: str) -> None:
    plain, normed = (tiny_config(f"model.attention={attention}", f"nsa.qk_norm={flag}") for flag in ("false", "true"))
    more = undrawn_weights(normed).keys() - undrawn_weights(plain).keys()
    keys = [""] if attention == "dense" else [".cmp", ".slc", ".win"]
    assert more == {
        f"blocks.{layer}.attention.{name}.weight" for layer in range(2) for name in ("q_norm", *(f"k_norm{branch}" for branch in keys))
    }
    assert undrawn_weights(plain).keys() < undrawn_weights(normed).keys()
    counts = [getattr(count_parameters(config), attention) for config in (plain, normed)]
    assert counts[1] - counts[0] == 16 * len(more)
    assert counts[1] == sum(parameter.numel() for parameter in build_model(normed).parameters())


@attentions
def test_decode_equals_prefill(tiny_config, attention: str) -> None:
    model = model_of(tiny_config(f"model.attention={attention}", "nsa.qk_norm=true"))
    ids = torch.randint(0, 256, (2, 21))
    caches = model.new_caches(2, 21)
    with torch.no_grad():
        steps = [model(ids[:, :10], caches=caches), *(model(ids[:, t : t + 1], caches=caches) for t in range(10, 21))]
        torch.testing.assert_close(torch.cat(steps, 1), model(ids), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("overrides", [[], ["model.attention=dense"], ['model.layers=["dense", {branches=["slc", "win"]}]']], ids=str)
def test_a_run_with_norms_trains_them(train, overrides: list[str]) -> None:
    """The guard of gradients watches the norms as it does the projections."""
    code, run = train("nsa.qk_norm=true", "train.precision=bf16", *overrides)
    assert code == 0
    weights = load_model(open_checkpoint(run.root)).state_dict()
    norms = {name: weight for name, weight in weights.items() if "attention.q_norm" in name or "attention.k_norm" in name}
    # the keys that choose blocks alone are frozen
    frozen = {name for name in norms if overrides and "layers" in overrides[0] and name.startswith("blocks.1") and ".cmp." in name}
    assert {name for name, weight in norms.items() if torch.equal(weight, torch.ones(16))} == frozen
    assert json.loads(run.metrics.read_text())["skipped_steps"] == 0


@attentions
def test_the_inputs_of_norms_count_in_the_estimate(tiny_config, attention: str) -> None:
    plain, normed = (tiny_config(f"model.attention={attention}", f"nsa.qk_norm={flag}") for flag in ("false", "true"))
    assert estimate_memory(normed, 1000, 1).activations_gib > estimate_memory(plain, 1000, 1).activations_gib


def test_a_value_that_is_no_flag_is_refused(tiny_config) -> None:
    with pytest.raises(ValueError, match="nsa.qk_norm='yes' is not true or false; use"):
        tiny_config("nsa.qk_norm=yes")
