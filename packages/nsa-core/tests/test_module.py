"""The layer: its parts, that each learns, and that batching, packing and checkpointing change nothing."""

import copy
import pickle

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa_core import (
    BackendRegistry,
    BackendUnavailableError,
    BlockGeometry,
    InputError,
    LayerTelemetry,
    NativeSparseAttention,
    NSAConfig,
    checks,
    compressed_attention,
    nsa_attention,
)
from nsa_core.compression import block_windows
from nsa_core.config import BRANCHES
from nsa_core.dense_attention import DenseAttention
from nsa_core.errors import type_of
from nsa_core.gating import gates_from_logits
from nsa_core.module import HeadNorm
from nsa_core.varlen import pack, unpack

SMALL = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=SMALL, gate_hidden_size=8)
SUBSETS = [("cmp",), ("slc",), ("win",), ("cmp", "slc"), ("cmp", "win"), ("slc", "win"), BRANCHES]
KINDS = [
    {"compressor": "mlp"},
    {"compressor": "mlp", "gate": "softmax"},
    {"compressor": "conv"},
    {"compressor": "mean", "compressed_rope": "tokens", "gate": "softmax"},
    {"compressor": "mlp", "qk_norm": True},
    {"compressor": "mean", "compressed_rope": "tokens", "qk_norm": True},
    {"kv": "shared"},
    {"kv": "shared", "compressor": "conv", "qk_norm": True},
    {"kv": "shared", "compressor": "mean", "compressed_rope": "tokens", "gate": "softmax"},
]
SHARINGS = ["separate", "shared"]


def kind_name(kind):
    return "-".join(str(value) if value is not True else key for key, value in kind.items())


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def gradients(layer, x, **options):
    """The output, and gradients of every parameter that learns and of x, for a loss that weighs every element by itself."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    (out * weights).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.requires_grad}
    return out.detach(), {**found, "x": x.grad}


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_the_layer_is_eq_5_on_its_own_projections(random_layer, random_input, kind):
    layer, x = random_layer(attrs.evolve(CONFIG, **kind)), random_input(2, 13, 8)
    positions = torch.arange(13)

    def heads(weight, count):
        return (x @ weight.T).unflatten(-1, (count, -1))

    def normed(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    q = heads(layer.q_proj.weight, 4)

    def own(module, name):
        return module if layer.config.kv == "shared" else module[name]

    k = {name: heads(own(layer.k_proj, name).weight, 2) for name in BRANCHES}
    if kind.get("qk_norm"):
        q, k = normed(q, layer.q_norm), {name: normed(keys, own(layer.k_norm, name)) for name, keys in k.items()}
    q = layer.rope(q, positions)
    v = {name: heads(own(layer.v_proj, name).weight, 2) for name in BRANCHES}
    if kind.get("compressed_rope") == "tokens":
        k_cmp = layer.compress_k(block_windows(layer.rope(k["cmp"], positions), SMALL).tokens)
    else:
        # rotated at each block's last token: 3, 5, 7, ...
        k_cmp = layer.rope(layer.compress_k(block_windows(k["cmp"], SMALL).tokens), torch.arange(3, 13, 2))
    v_cmp = layer.compress_v(block_windows(v["cmp"], SMALL).tokens)
    gates = gates_from_logits(layer.gate(x), (positions >= 3).expand(2, 13), kind=layer.config.gate)
    rotated = [layer.rope(k[name], positions) for name in ("slc", "win")]
    out = nsa_attention(q, k_cmp, v_cmp, rotated[0], v["slc"], rotated[1], v["win"], gates, geometry=SMALL)

    assert_close(layer(x), out.flatten(-2) @ layer.o_proj.weight.T)


@pytest.mark.parametrize(
    ("branches", "kind"),
    [
        pytest.param(branches, kind, id="-".join([*branches, kind_name(kind)]))
        for branches in SUBSETS
        for kind in KINDS
        if len(branches) > 1 or kind.get("gate") != "softmax"
    ],
)
def test_every_parameter_that_learns_gets_a_gradient_after_one_optimizer_step(random_input, kind, branches):
    torch.manual_seed(0)
    layer = NativeSparseAttention(attrs.evolve(CONFIG, branches=branches, **kind)).double()
    learning = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.1)
    x = random_input(2, 21, 8)

    _, first = gradients(layer, x)
    optimizer.step()
    _, second = gradients(layer, x)

    # a zero-initialised last layer keeps the gradient of the layers before it at 0 until it has moved
    waiting = ("gate.up", "compress_k.up", "compress_v.up", "compress_k.position", "compress_v.position")
    for name, gradient in first.items():
        assert gradient.isfinite().all(), name
        assert gradient.any() != name.startswith(waiting), name
    for name, gradient in second.items():
        assert gradient.any(), name


@pytest.mark.parametrize("kv", SHARINGS)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("branches", SUBSETS, ids="-".join)
@pytest.mark.parametrize("compressor", ["mlp", "conv", "mean"])
def test_absent_branches_have_no_parameters(branches, compressor, qk_norm, kv):
    layer = NativeSparseAttention(attrs.evolve(CONFIG, branches=branches, compressor=compressor, qk_norm=qk_norm, kv=kv))

    phi = {
        "mlp": ["position", "up.weight", "up.bias", "down.weight", "down.bias"],
        "conv": ["weight"],
        "mean": [],
    }[compressor]
    chooses = "cmp" in branches or "slc" in branches
    keys = [branch for branch in BRANCHES if branch in branches or (branch == "cmp" and chooses)]
    expected = {"q_proj.weight", "o_proj.weight", "gate.up.weight", "gate.up.bias", "gate.down.weight", "gate.down.bias"}
    keys, values = ([""], [""]) if kv == "shared" else ([f".{branch}" for branch in keys], [f".{branch}" for branch in branches])
    expected |= {f"k_proj{branch}.weight" for branch in keys} | {f"v_proj{branch}.weight" for branch in values}
    expected |= {f"compress_k.{name}" for name in phi if chooses} | {f"compress_v.{name}" for name in phi if "cmp" in branches}
    expected |= {"q_norm.weight", *(f"k_norm{branch}.weight" for branch in keys)} if qk_norm else set()
    assert set(dict(layer.named_parameters())) == expected


def test_one_weight_of_the_norms_serves_all_heads():
    layer = NativeSparseAttention(attrs.evolve(CONFIG, qk_norm=True))
    shapes = {name: tuple(weight.shape) for name, weight in layer.named_parameters() if "norm" in name}
    assert shapes == {"q_norm.weight": (6,), **{f"k_norm.{branch}.weight": (6,) for branch in BRANCHES}}


def test_with_norms_the_scale_of_queries_and_keys_does_not_matter(random_layer, random_input):
    layer, x = random_layer(attrs.evolve(CONFIG, compressor="mean", qk_norm=True)), random_input(2, 13, 8)
    before = layer(x)
    with torch.no_grad():
        for projection in (layer.q_proj, *layer.k_proj.values()):
            projection.weight.mul_(1e4)
        scaled = layer(x)
    # except for eps, which is 1e-6 of a mean square near 1
    torch.testing.assert_close(scaled, before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", [NativeSparseAttention, DenseAttention])
def test_all_norms_of_heads_have_the_epsilon_of_the_config(attention):
    layer = attention(attrs.evolve(CONFIG, qk_norm=True, qk_norm_eps=1e-3))
    epsilons = [norm.eps for norm in layer.modules() if isinstance(norm, HeadNorm)]
    assert set(epsilons) == {1e-3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_16_bits_compute_in_float32_and_round_once(dtype):
    norm = HeadNorm(64)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    # a square of 300 is beyond float16
    x = (300 * torch.randn(8, 16, 4, 64)).to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    found = norm(x)
    assert found.dtype == dtype
    assert (found != exact.to(dtype)).double().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_overflowed_row_without_a_gradient_gives_a_norm_none(dtype):
    norm = HeadNorm(6).to(dtype)
    x = torch.randn(5, 6, dtype=dtype)
    x[3, :2], x[4] = torch.tensor([float("inf"), float("-inf")]), torch.finfo(dtype).max
    x.requires_grad_()
    found = torch.autograd.grad(norm(x)[:3].square().sum(), (x, norm.weight))
    usual = x.detach()[:3].requires_grad_()
    expected = torch.autograd.grad(norm(usual).square().sum(), (usual, norm.weight))
    assert torch.equal(found[0][:3], expected[0])
    assert not found[0][3:].any()
    torch.testing.assert_close(found[1], expected[1])


def test_under_autocast_norms_leave_the_operations_their_dtype(random_input):
    layer = NativeSparseAttention(attrs.evolve(CONFIG, qk_norm=True))
    x = random_input(1, 13, 8).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.q_norm.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("kv", SHARINGS)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("branches", SUBSETS, ids="-".join)
def test_what_only_chooses_blocks_is_frozen_and_nothing_else_is(branches, qk_norm, kv):
    layer = NativeSparseAttention(attrs.evolve(CONFIG, branches=branches, qk_norm=qk_norm, kv=kv))

    frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
    if "slc" in branches and "cmp" not in branches:
        assert frozen == {name for name, _ in layer.named_parameters() if name.startswith(("k_proj.cmp", "k_norm.cmp", "compress_k"))}
    else:
        assert not frozen


def test_projections_have_the_configs_sizes_and_no_bias():
    shapes = {name: tuple(value.shape) for name, value in NativeSparseAttention(CONFIG).state_dict().items() if "proj" in name}

    # H D_k = 24, G D_k = 12, G D_v = 10, H D_v = 20
    assert shapes == {
        "q_proj.weight": (24, 8),
        "o_proj.weight": (8, 20),
        **{f"k_proj.{branch}.weight": (12, 8) for branch in BRANCHES},
        **{f"v_proj.{branch}.weight": (10, 8) for branch in BRANCHES},
    }


@given(data=st.data(), lengths=st.lists(st.integers(0, 17), min_size=1, max_size=4))
def test_packed_sequences_equal_each_alone_in_outputs_and_all_gradients(geometries, random_layer, random_input, data, lengths):
    kind = data.draw(st.sampled_from(KINDS))
    layer = random_layer(attrs.evolve(CONFIG, geometry=data.draw(geometries()), **kind))
    sequences = [random_input(length, 8, seed=seed) for seed, length in enumerate(lengths)]
    packed, cu_seqlens = pack(sequences)

    def loss(out, seed):
        return (out * random_input(*out.shape, seed=seed + 50)).sum()

    layer.zero_grad()
    alone = [layer(sequence.unsqueeze(0))[0] for sequence in sequences]
    sum(loss(out, seed) for seed, out in enumerate(alone)).backward()
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    together = unpack(layer(packed, cu_seqlens=cu_seqlens, max_seqlen=data.draw(st.sampled_from([None, 17, 40]))), lengths)
    sum(loss(out, seed) for seed, out in enumerate(together)).backward()

    for out, reference in zip(together, alone, strict=True):
        assert_close(out, reference)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kv", SHARINGS)
def test_a_permuted_batch_gives_permuted_outputs_and_gradients(random_layer, random_input, kv):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(4, 13, 8)
    order = torch.tensor([2, 0, 3, 1])

    out, inverse = layer(x[order]), torch.argsort(order)

    assert_close(out[inverse], layer(x))
    for b in range(4):
        assert_close(out[b], layer(x[order[b]].unsqueeze(0))[0])


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
@pytest.mark.parametrize("packed", [False, True])
def test_activation_checkpointing_gives_bit_equal_gradients(random_layer, random_input, kind, packed):
    layer, x = random_layer(attrs.evolve(CONFIG, **kind), dtype=torch.float32), random_input(1, 29, 8, dtype=torch.float32)
    options = {"cu_seqlens": int32([0, 12, 29])} if packed else {}

    plain_out, plain = gradients(layer, x, **options)

    def recomputed(x, **options):
        return checkpoint(layer, x, use_reentrant=False, **options)

    recomputed.zero_grad, recomputed.named_parameters = layer.zero_grad, layer.named_parameters
    again_out, again = gradients(recomputed, x, **options)

    assert torch.equal(again_out, plain_out)
    assert set(again) == set(plain)
    for name, gradient in plain.items():
        assert torch.equal(again[name], gradient), name


@pytest.mark.parametrize("kv", SHARINGS)
@pytest.mark.parametrize("absent", BRANCHES)
def test_a_branch_whose_gate_is_zero_equals_that_branch_absent(random_layer, random_input, absent, kv):
    full = random_layer(attrs.evolve(CONFIG, kv=kv))
    with torch.no_grad():
        rows = torch.arange(12) % 3 == BRANCHES.index(absent)
        full.gate.down.weight[rows], full.gate.down.bias[rows] = 0, -1e4
    without = NativeSparseAttention(attrs.evolve(CONFIG, kv=kv, branches=tuple(branch for branch in BRANCHES if branch != absent))).double()
    missing = without.load_state_dict(full.state_dict(), strict=False)
    x = random_input(2, 17, 8)

    assert not missing.missing_keys
    assert torch.equal(without(x), full(x))


@pytest.mark.parametrize("kv", SHARINGS)
@pytest.mark.parametrize("absent", BRANCHES)
def test_the_gate_of_an_absent_branch_gets_no_gradient(random_layer, random_input, absent, kv):
    layer = random_layer(attrs.evolve(CONFIG, kv=kv, branches=tuple(branch for branch in BRANCHES if branch != absent)))

    _, found = gradients(layer, random_input(1, 17, 8))

    rows = torch.arange(12) % 3 == BRANCHES.index(absent)
    assert not found["gate.down.weight"][rows].any()
    assert found["gate.down.weight"][~rows].any()


@pytest.mark.parametrize("kv", SHARINGS)
def test_rows_beyond_query_count_give_0_and_change_nothing_before_them(random_layer, random_input, kv):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(3, 13, 8)
    counts = [13, 6, 0]
    x[1, 6:], x[2] = 1e3, 1e3

    out = layer(x, query_count=int32(counts))

    for b, count in enumerate(counts):
        assert_close(out[b, :count], layer(x[b : b + 1, :count])[0])
        assert not out[b, count:].any()


@pytest.mark.parametrize("kv", SHARINGS)
def test_rows_beyond_query_count_get_zero_gradient(random_layer, random_input, kv):
    layer = random_layer(attrs.evolve(CONFIG, kv=kv))

    _, found = gradients(layer, random_input(2, 13, 8), query_count=int32([13, 6]))

    assert not found["x"][1, 6:].any()
    assert (found["x"][1, :6] != 0).any(-1).all()


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_an_empty_batch_or_sequence_gives_an_empty_output_and_zero_gradients(random_layer, random_input, kind, shape):
    layer = random_layer(attrs.evolve(CONFIG, **kind))

    out, found = gradients(layer, random_input(*shape, 8))

    assert out.shape == (*shape, 8)
    assert not any(gradient.any() for gradient in found.values())


def test_an_empty_packed_batch_gives_an_empty_output(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(1, 0, 8)

    for bounds in ([0], [0, 0, 0]):
        assert layer(x, cu_seqlens=int32(bounds)).shape == (1, 0, 8)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_a_sequence_too_short_for_a_block_learns_all_but_the_compressed_values(random_layer, random_input, length, gate):
    layer = random_layer(attrs.evolve(CONFIG, gate=gate))

    out, found = gradients(layer, random_input(2, length, 8))

    assert out.isfinite().all()
    assert not found["v_proj.cmp.weight"].any()
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert found["v_proj.slc.weight"].any()
    assert found["v_proj.win.weight"].any()


@pytest.mark.parametrize("kv", SHARINGS)
def test_a_state_dict_makes_an_equal_layer(random_layer, random_input, kv):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(2, 13, 8)
    twin = NativeSparseAttention(attrs.evolve(CONFIG, kv=kv)).double()
    assert not torch.equal(twin(x), layer(x))

    twin.load_state_dict(layer.state_dict())

    assert torch.equal(twin(x), layer(x))


def test_a_deep_copy_is_equal_and_independent(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 13, 8)
    expected = layer(x)

    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), expected)
    torch.nn.init.zeros_(twin.o_proj.weight)

    assert torch.equal(layer(x), expected)


def test_the_repr_names_the_parts():
    text = repr(NativeSparseAttention(CONFIG))

    assert text.startswith("NativeSparseAttention(")
    for part in (
        "q_proj",
        "o_proj",
        "(cmp): Linear(in_features=8, out_features=12, bias=False)",
        "GateMLP",
        "RotaryEmbedding",
        "MLPCompressor",
    ):
        assert part in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_a_low_precision_layer_stays_near_its_float64_twin(random_layer, random_input, kind, dtype):
    wide = random_layer(attrs.evolve(CONFIG, **kind))
    narrow = copy.deepcopy(wide).to(dtype)
    # every block chosen: rounding must not change the choice
    for layer in (wide, narrow):
        layer.config = attrs.evolve(layer.config, geometry=BlockGeometry(4, 2, 4, 8, 1, 1, 5))
    x = random_input(2, 21, 8)

    out, found = gradients(narrow, x.to(dtype))
    expected, reference = gradients(wide, x)

    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() <= 2**-4 * expected.abs().max()
    for name, gradient in found.items():
        assert gradient.dtype == dtype
        assert (gradient.double() - reference[name]).abs().max() <= 2**-3 * reference[name].abs().max() + 1e-6, name


@pytest.mark.parametrize("kv", SHARINGS)
def test_autocast_runs_forward_and_backward_with_float32_weights(random_layer, random_input, kv):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv), dtype=torch.float32), random_input(2, 21, 8, dtype=torch.float32)
    layer.config = attrs.evolve(layer.config, geometry=BlockGeometry(4, 2, 4, 8, 1, 1, 5))

    with torch.autocast("cpu", torch.bfloat16):
        out, found = gradients(layer, x)
    expected, reference = gradients(layer, x)

    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().max() <= 2**-4 * expected.abs().max()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert (gradient - reference[name]).abs().max() <= 2**-3 * reference[name].abs().max() + 1e-6, name


@pytest.mark.parametrize(("weights", "inputs"), [("float64", "float32"), ("float32", "float64"), ("float32", "int64")])
def test_what_autocast_does_not_cast_is_refused(weights, inputs):
    layer = NativeSparseAttention(CONFIG).to(getattr(torch, weights))
    x = torch.zeros(1, 5, CONFIG.hidden_size, dtype=getattr(torch, inputs))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputError, match=f"x is torch.{inputs}, the layer's weights are torch.{weights}"),
    ):
        layer(x)


def test_projections_without_a_tensor_of_weights_are_called_as_they_are(random_layer, random_input):
    class Quantized(torch.nn.Module):
        """As torch's own quantized layers: `weight` is a method."""

        def __init__(self, layer):
            super().__init__()
            self.inner = layer

        def weight(self):
            return self.inner.weight

        def forward(self, x):
            return self.inner(x)

    layer, x = random_layer(CONFIG), random_input(1, 9, CONFIG.hidden_size)
    expected = layer(x)
    layer.q_proj, layer.o_proj = Quantized(layer.q_proj), Quantized(layer.o_proj)
    assert torch.equal(layer(x), expected)
    with pytest.raises(InputError, match="q_proj keeps no weights of 16 bits or more .*; give new_cache dtype and device"):
        layer.new_cache(1, 9)
    cache = layer.new_cache(1, 9, dtype=x.dtype, device=torch.device("cpu"))
    torch.testing.assert_close(layer(x, cache=cache), expected)


def test_projections_with_weights_of_8_bits_are_called_as_they_are(random_layer, random_input):
    class Scaled(torch.nn.Module):
        """As FP8 layers of other packages: the weight is stored in 8 bits, and the layer computes in the dtype of its input."""

        def __init__(self, layer):
            super().__init__()
            self.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight.to(x.dtype))

    layer, x = random_layer(CONFIG), random_input(1, 9, CONFIG.hidden_size)
    layer.q_proj, layer.o_proj = Scaled(layer.q_proj), Scaled(layer.o_proj)
    expected = layer(x)
    assert expected.dtype == x.dtype
    with pytest.raises(InputError, match="q_proj keeps no weights of 16 bits or more"):
        layer.new_cache(1, 9)
    cache = layer.new_cache(1, 9, dtype=x.dtype, device=torch.device("cpu"))
    torch.testing.assert_close(layer(x, cache=cache), expected)


def test_autocast_changes_the_inputs_dtype_and_no_accumulators(random_input):
    def results(cast, **options):
        shapes = [(1, 40, 4, 16), *[(1, 19, 2, 16)] * 2, *[(1, 40, 2, 16)] * 4]
        inputs = [random_input(*shape, seed=seed, dtype=torch.float32).requires_grad_() for seed, shape in enumerate(shapes)]
        with torch.autocast("cpu", torch.bfloat16, **options):
            q, k_cmp, v_cmp, *others = (cast(x) for x in inputs)
            out = nsa_attention(q, k_cmp, v_cmp, *others, torch.full((1, 40, 4, 3), 0.5), geometry=SMALL)
            _, lse = compressed_attention(q, k_cmp, v_cmp, geometry=SMALL)
            out.float().sum().backward()
        return out, lse, *(x.grad for x in inputs)

    by_autocast = results(lambda x: x)
    by_hand = results(lambda x: x.bfloat16(), enabled=False)

    for automatic, manual in zip(by_autocast, by_hand, strict=True):
        assert automatic.dtype == manual.dtype
        assert torch.equal(automatic, manual)


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_no_pass_reads_a_value_on_the_host(kind):
    # a tensor on the meta device has none: reading one raises
    with torch.device("meta"):
        layer, x, counts = NativeSparseAttention(attrs.evolve(CONFIG, **kind)), torch.zeros(2, 13, 8), torch.zeros(2, dtype=torch.int32)
    layer.telemetry = LayerTelemetry()

    layer(x).sum().backward()
    layer(x, query_count=counts).sum().backward()
    layer(x[:1], cu_seqlens=torch.zeros(3, dtype=torch.int32, device="meta")).sum().backward()
    cache = layer.new_cache(2, 40)
    for count in (7, 1):
        layer(x[:, :count], cache=cache)
    layer(x, cache=cache, query_count=counts)
    cache.reorder(torch.zeros(3, dtype=torch.int64, device="meta"))
    layer(x[:1].expand(3, -1, -1), cache=cache)

    assert cache.lengths.shape == (3,)


class NoCopyFromTheHost(TorchDispatchMode):
    """Refuses tensors from Python lists: on a GPU their copy would make the step wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "lift_fresh" not in str(func), "a tensor was made of a Python list"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_no_pass_makes_a_tensor_of_a_python_list(random_layer, random_input, kind):
    layer, x = random_layer(attrs.evolve(CONFIG, **kind)), random_input(2, 13, 8)
    cache, bounds, counts = layer.new_cache(2, 40), int32([0, 4, 13]), int32([3, 1])
    layer.telemetry = LayerTelemetry()

    with NoCopyFromTheHost():
        layer(x).sum().backward()
        layer(x[:1], cu_seqlens=bounds).sum().backward()
        layer(x[:, :7], cache=cache)
        layer(x[:, :1], cache=cache)
        layer(x[:, :3], cache=cache, query_count=counts)


def test_a_named_backend_reaches_the_operation(random_layer, random_input):
    layer, x = random_layer(attrs.evolve(CONFIG, backends={"cmp": "sdpa", "win": "sdpa"})), random_input(1, 9, 8)

    assert torch.equal(layer(x), random_layer(CONFIG)(x))


def test_a_layers_own_registry_replaces_the_installed_backends(random_input):
    layer = NativeSparseAttention(CONFIG, registry=BackendRegistry()).double()

    with pytest.raises(BackendUnavailableError, match="no backend serves this request"):
        layer(random_input(1, 9, 8))


def test_a_max_seqlen_beside_a_cache_is_not_used_and_says_so(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(1, 9, 8)
    expected = layer(x, cache=layer.new_cache(1, 9))

    with pytest.warns(UserWarning, match=r"max_seqlen=5 is not used with a cache \(it knows its lengths\); leave it out"):
        out = layer(x, cache=layer.new_cache(1, 9), max_seqlen=5)

    assert torch.equal(out, expected)


def test_a_layer_with_named_backends_compiles_copies_and_pickles(random_layer, random_input):
    layer, x = random_layer(attrs.evolve(CONFIG, backends={"win": "sdpa", "cmp": "auto"})), random_input(1, 9, 8)
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.compile(layer, fullgraph=True, backend="eager")

    for other in copies:
        assert_close(other(x), layer(x))
    assert copies[0].config == copies[1].config == layer.config


def test_the_gate_temperature_reaches_the_gate(random_layer, random_input):
    cold, x = random_layer(attrs.evolve(CONFIG, gate="softmax", gate_temperature=0.25)), random_input(1, 9, 8)
    warm = random_layer(attrs.evolve(CONFIG, gate="softmax"))
    with torch.no_grad():
        warm.gate.down.weight *= 4
        warm.gate.down.bias *= 4

    assert_close(cold(x), warm(x))


@pytest.mark.parametrize("x", [torch.zeros(5, 8), torch.zeros(1, 5, 7), torch.zeros(1, 1, 5, 8)])
def test_an_input_of_the_wrong_shape_is_refused(x):
    with pytest.raises(InputError) as caught:
        NativeSparseAttention(CONFIG)(x)

    fix = "reshape it" if x.dim() == 3 else "give it 3 dimensions"
    assert str(caught.value) == f"x has shape {tuple(x.shape)} (the layout is (B, S, hidden_size=8)); {fix}"


@pytest.mark.parametrize("x", [[[[0.0] * 8]], None])
def test_an_input_that_is_no_tensor_is_refused(x):
    with pytest.raises(InputError, match=rf"x is {type_of(x)} \(the rule: a tensor\)"):
        NativeSparseAttention(CONFIG)(x)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (int32([]), "cu_seqlens is empty (it holds N + 1 offsets); use [0, S] for one sequence"),
        (int32([[0, 9]]), "cu_seqlens has shape (1, 2) (the layout is (N + 1,)); give it 1 dimensions"),
        (int32(9), "cu_seqlens has shape () (the layout is (N + 1,)); give it 1 dimensions"),
        (torch.tensor([0, 9]), "cu_seqlens is torch.int64 (kernels read int32); use cu_seqlens.to(torch.int32)"),
        (int32([0, 8]), "cu_seqlens runs from 0 to 8 (the rule: from 0 to the total S=9); use [0, ..., 9]"),
        (int32([0, 5, 3, 9]), "cu_seqlens decreases from 5 to 3 at entry 2 (offsets never decrease); sort them"),
    ],
)
def test_bounds_that_do_not_fit_are_refused_before_any_work(bounds, message):
    with pytest.raises(InputError) as caught:
        NativeSparseAttention(CONFIG)(torch.zeros(1, 9, 8), cu_seqlens=bounds)

    assert str(caught.value) == message


def test_packed_sequences_with_a_cache_or_a_query_count_are_refused():
    layer, x = NativeSparseAttention(CONFIG), torch.zeros(1, 9, 8)

    for options in ({"cache": layer.new_cache(1, 9)}, {"query_count": int32([9])}):
        with pytest.raises(
            InputError, match=r"^cu_seqlens came with a cache or query_count \(a packed batch holds whole sequences\); drop one$"
        ):
            layer(x, cu_seqlens=int32([0, 9]), **options)


def test_an_input_or_cache_of_another_dtype_is_refused():
    layer = NativeSparseAttention(NSAConfig(8, 2, 1, 4, 4))

    with pytest.raises(InputError, match=r"x is torch.float64, the layer's weights are torch.float32 .* cast one"):
        layer(torch.zeros(1, 3, 8, dtype=torch.float64))
    with pytest.raises(InputError, match=r"the cache holds torch.bfloat16, the layer computes in torch.float32"):
        layer(torch.zeros(1, 3, 8), cache=layer.new_cache(1, 3, dtype=torch.bfloat16))
    with pytest.raises(InputError, match=r"x is on meta, the layer on cpu"):
        layer(torch.zeros(1, 3, 8, device="meta"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query_count": torch.tensor([5], dtype=torch.int32)}, r"query_count has shape \(1,\)"),
        ({"query_count": torch.tensor([5, 5])}, "query_count is torch.int64"),
        ({"query_count": [1, 2]}, r"query_count is a list \(the rule: a tensor\); use torch.as_tensor\(query_count\)"),
        ({"query_count": torch.tensor([5, 10], dtype=torch.int32)}, r"query_count=\[5, 10\] leaves 0 .. 9 "),
        ({"cache": 5}, r"cache is an int \(the rule: an NSACache\); build it with this layer's new_cache"),
        ({"query_count": torch.tensor([[5], [5]], dtype=torch.int32)}, "query_count has shape"),
        ({"max_seqlen": 4}, "max_seqlen=4 is below the longest sequence, 9"),
        ({"max_seqlen": -1}, "max_seqlen=-1 is no bound on rows"),
        ({"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}, "cu_seqlens came with batch size 2"),
    ],
)
def test_placement_that_does_not_fit_x_is_refused(random_layer, random_input, options, message):
    with pytest.raises(InputError, match=message):
        random_layer(CONFIG)(random_input(2, 9, 8), **options)


def test_the_bounds_of_a_packed_call_are_checked_once(random_layer, random_input, monkeypatch):
    checked, check = [], checks.check_cu_seqlens
    monkeypatch.setattr(checks, "check_cu_seqlens", lambda *arguments: (checked.append(arguments), check(*arguments)))

    random_layer(CONFIG)(random_input(1, 9, 8), cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))

    assert len(checked) == 1


@pytest.mark.parametrize("kind", [NativeSparseAttention, DenseAttention])
def test_a_cache_lies_where_the_tokens_are_if_the_weights_are_elsewhere(kind):
    with torch.device("meta"):
        layer = kind(CONFIG)
    assert layer.new_cache(2, 8).lengths.is_meta
    cache = layer.new_cache(2, 8, device=torch.device("cpu"))
    assert cache.lengths.device.type == "cpu"
    assert cache.nbytes > 0
