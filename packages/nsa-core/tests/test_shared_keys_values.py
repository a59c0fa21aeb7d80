"""`kv="shared"`: covering branches are dense attention of the same keys and values, whose checkpoint loads without a new K or V weight."""

import attrs
import pytest
import torch
from torch import nn

from nsa_core import BlockGeometry, LayerTelemetry, NativeSparseAttention, NSAConfig
from nsa_core.config import BRANCHES
from nsa_core.module import HeadNorm
from nsa_core.rope import RotaryEmbedding

SMALL = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=SMALL, gate_hidden_size=8, kv="shared")
COVERED = 12
"""n l'."""
WINDOW = 5


class Dense(nn.Module):
    """Full causal attention with the parameter names of a usual decoder, written out."""

    def __init__(self, qk_norm):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 24, bias=False), nn.Linear(8, 12, bias=False)
        self.v_proj, self.o_proj = nn.Linear(8, 10, bias=False), nn.Linear(20, 8, bias=False)
        if qk_norm:
            self.q_norm, self.k_norm = HeadNorm(6), HeadNorm(6)
        self.qk_norm, self.rope = qk_norm, RotaryEmbedding(6)

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        q, k = self.q_proj(x).unflatten(-1, (4, 6)), self.k_proj(x).unflatten(-1, (2, 6))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, positions), self.rope(k, positions).repeat_interleave(2, 2)
        v = self.v_proj(x).unflatten(-1, (2, 5)).repeat_interleave(2, 2)
        scores = torch.einsum("bshd,bthd->bhst", q, k) * 6**-0.5
        scores = scores.masked_fill(positions > positions.unsqueeze(1), float("-inf"))
        return self.o_proj(torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v).flatten(-2))


def open_only(layer, branch):
    """Make the gate of `branch` 1 and the others 0, exactly."""
    with torch.no_grad():
        layer.gate.down.weight.zero_()
        layer.gate.down.bias.copy_(torch.where(torch.arange(12) % 3 == BRANCHES.index(branch), 1e4, -1e4))


def of_weighted_sum(module, x):
    """The output, and the gradients of x and of every parameter that has one, for a loss that weighs every element by itself."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)).sum().backward()
    return out.detach(), {"x": x.grad, **{name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}}


def dense_twin(layer):
    dense = Dense(layer.config.qk_norm).double()
    found = dense.load_state_dict(layer.state_dict(), strict=False)
    assert not found.missing_keys
    return dense


KINDS = [
    {},
    {"compressor": "conv", "qk_norm": True},
    {"compressor": "mean", "compressed_rope": "tokens", "gate": "softmax"},
    {"branches": ("slc", "win"), "compressor": "mean"},
    {"branches": ("slc", "win"), "qk_norm": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())) or "mlp")
@pytest.mark.parametrize(
    ("branch", "length"),
    [("slc", length) for length in (1, 3, 4, 5, 11, COVERED)] + [("win", length) for length in (1, 2, WINDOW - 1, WINDOW)],
)
def test_a_covering_branch_alone_is_dense_attention_with_its_gradients(random_layer, random_input, kind, branch, length):
    layer, x = random_layer(attrs.evolve(CONFIG, **kind)), random_input(2, length, 8)
    open_only(layer, branch)

    out, found = of_weighted_sum(layer, x)
    expected, gradients = of_weighted_sum(dense_twin(layer), x)

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    # neither the gate nor phi affects the output
    assert not any(gradient.any() for name, gradient in found.items() if name not in gradients)


@pytest.mark.parametrize(("branch", "length"), [("slc", COVERED + 1), ("win", WINDOW + 1)])
def test_one_token_more_than_is_covered_is_not_dense(random_layer, random_input, branch, length):
    layer, x = random_layer(CONFIG), random_input(2, length, 8)
    open_only(layer, branch)

    out, dense = layer(x), dense_twin(layer)(x)

    torch.testing.assert_close(out[:, :-1], dense[:, :-1], rtol=0, atol=1e-10)
    assert not torch.allclose(out[:, -1], dense[:, -1])


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("branches", "compressor"), [(BRANCHES, "mlp"), (BRANCHES, "conv"), (BRANCHES, "mean"), (("slc", "win"), "mean")])
def test_a_dense_checkpoint_leaves_nothing_but_gate_and_phi_to_be_trained(branches, compressor, qk_norm):
    dense = Dense(qk_norm)
    layer = NativeSparseAttention(attrs.evolve(CONFIG, branches=branches, compressor=compressor, qk_norm=qk_norm))

    found = layer.load_state_dict(dense.state_dict(), strict=False)

    assert not found.unexpected_keys
    phi = () if compressor == "mean" else ("compress_k", "compress_v")
    assert {name.split(".")[0] for name in found.missing_keys} == {"gate", *phi}
    assert torch.equal(layer.k_proj.weight, dense.k_proj.weight)
    assert torch.equal(layer.v_proj.weight, dense.v_proj.weight)


def test_without_the_compressed_branch_the_mean_of_trained_keys_chooses(random_layer, random_input):
    layer, x = random_layer(attrs.evolve(CONFIG, branches=("slc", "win"), compressor="mean")), random_input(1, 40, 8)
    before = choice_of(layer, x)
    assert all(weight.requires_grad for weight in layer.parameters())

    _, found = of_weighted_sum(layer, x)
    with torch.no_grad():
        layer.k_proj.weight += found["k_proj.weight"]

    assert found["k_proj.weight"].any()
    assert not torch.equal(choice_of(layer, x), before)


class Choices(LayerTelemetry):
    """Keeps the choice of the last pass."""

    def record_selection(self, block_indices, positions, geometry):
        self.block_indices = block_indices


def choice_of(layer, x):
    layer.telemetry = Choices()
    layer(x)
    found, layer.telemetry = layer.telemetry.block_indices, None
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())) or "mlp")
@pytest.mark.parametrize("row", [0, 2, 3, 7, 16, 28])
def test_future_tokens_never_change_past_outputs_or_choices(random_layer, random_input, kind, row):
    layer, x = random_layer(attrs.evolve(CONFIG, **kind)), random_input(2, 31, 8)
    other = x.clone()
    other[:, row + 1 :] = 3 * random_input(2, 30 - row, 8, seed=7) + 1
    here = slice(0, row + 1)

    assert torch.equal(layer(other)[:, here], layer(x)[:, here])
    assert torch.equal(choice_of(layer, other)[:, here], choice_of(layer, x)[:, here])
    leaf = x.clone().requires_grad_()
    layer(leaf)[:, here].sum().backward()
    assert not leaf.grad[:, row + 1 :].any()


@pytest.mark.parametrize("branches", [BRANCHES, pytest.param(("slc", "win"), marks=pytest.mark.slow)], ids="-".join)
def test_a_compiled_layer_gives_the_same_outputs_and_gradients(random_layer, random_input, branches):
    layer, x = random_layer(attrs.evolve(CONFIG, branches=branches)), random_input(2, 21, 8)
    expected, gradients = of_weighted_sum(layer, x)

    x.requires_grad_()
    layer.zero_grad()
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)).sum().backward()

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    for name, weight in (("x", x), *layer.named_parameters()):
        if name in gradients:
            torch.testing.assert_close(weight.grad, gradients[name], rtol=0, atol=1e-10)
