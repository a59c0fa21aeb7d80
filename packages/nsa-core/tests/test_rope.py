"""RoPE against Hugging Face Llama's formula written out, and its scalings against the published formulas."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_core import ConfigError, NSAConfig, RopeScaling
from nsa_core import rope as rope_module
from nsa_core.rope import RopeTables, RotaryEmbedding, rotate

SCALINGS = [
    None,
    RopeScaling(kind="linear", factor=4.0),
    RopeScaling(kind="yarn", factor=4.0, original_max_position=256),
    RopeScaling(kind="yarn", factor=8.0, original_max_position=64, attention_factor=0.7),
    RopeScaling(kind="llama3", factor=8.0, original_max_position=64),
]


def llama_rotated(x, position_ids, theta):
    """x (B, S, H, D) rotated as in transformers' modeling_llama: full-width tables, rotate_half."""
    dim = x.shape[-1]
    inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    freqs = position_ids[:, :, None].float() * inv_freq
    emb = torch.cat((freqs, freqs), dim=-1)
    cos, sin = emb.cos().unsqueeze(2), emb.sin().unsqueeze(2)
    rotate_half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1)
    return x * cos + rotate_half * sin


@pytest.mark.parametrize(("dim", "theta"), [(2, 10000.0), (6, 10000.0), (64, 500000.0)])
def test_rotation_is_hugging_face_llamas(random_input, dim, theta):
    x = random_input(2, 9, 3, dim, dtype=torch.float32)
    position_ids = torch.stack([torch.arange(9), torch.arange(100, 109)])

    rotated = RotaryEmbedding(dim, theta)(x, position_ids)

    # a frequency's last float32 bit, times position 108, times the largest |x|
    torch.testing.assert_close(rotated, llama_rotated(x, position_ids, theta), rtol=0, atol=108 * 2**-23 * 4)


def test_a_pair_is_an_element_of_each_half_turned_by_its_own_angle(random_input):
    x = random_input(1, 1, 1, 4)
    a, b, c, d = x.flatten().tolist()
    first, second = 3.0, 3.0 * 100.0**-0.5

    rotated = RotaryEmbedding(4, 100.0)(x, torch.tensor([3])).flatten().tolist()

    expected = [
        a * math.cos(first) - c * math.sin(first),
        b * math.cos(second) - d * math.sin(second),
        c * math.cos(first) + a * math.sin(first),
        d * math.cos(second) + b * math.sin(second),
    ]
    assert rotated == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
@given(query=st.integers(0, 500), key=st.integers(0, 500), shift=st.integers(0, 500))
def test_a_product_of_rotated_vectors_depends_on_the_distance_only(random_input, scaling, query, key, shift):
    rope = RotaryEmbedding(8, 1000.0, scaling)
    q, k = random_input(1, 1, 1, 8, seed=2), random_input(1, 1, 1, 8, seed=3)

    def product(at_query, at_key):
        return (rope(q, torch.tensor([at_query])) * rope(k, torch.tensor([at_key]))).sum().item()

    assert product(query + shift, key + shift) == pytest.approx(product(query, key), abs=1e-3)


def test_a_product_of_rotated_vectors_does_depend_on_the_distance(random_input):
    rope = RotaryEmbedding(8)
    q, k = random_input(1, 1, 1, 8, seed=2), random_input(1, 1, 1, 8, seed=3)

    near, far = ((rope(q, torch.tensor([at])) * k).sum().item() for at in (1, 3))

    assert abs(near - far) > 1e-2


def test_every_head_of_a_token_is_turned_alike(random_input):
    one_head = random_input(1, 5, 1, 6)
    rotated = RotaryEmbedding(6)(one_head.expand(1, 5, 3, 6), torch.arange(5))

    assert torch.equal(rotated, rotated[:, :, :1].expand(1, 5, 3, 6))


def test_position_0_is_left_as_it_is(random_input):
    x = random_input(1, 1, 2, 6)

    assert torch.equal(RotaryEmbedding(6)(x, torch.tensor([0])), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tables_are_float32_whatever_the_layers_dtype(dtype):
    tables = RotaryEmbedding(6).to(dtype).tables(torch.arange(5))

    assert tables.cos.dtype == tables.sin.dtype == torch.float32
    assert tables.cos.shape == tables.sin.shape == (5, 6)
    assert torch.equal(tables.cos[:, :3], tables.cos[:, 3:])
    assert torch.equal(tables.sin[:, :3], -tables.sin[:, 3:])


def test_frequencies_are_computed_once_and_real_ones_are_kept_from_graphs():
    rope = RotaryEmbedding(6, theta=123.0)
    with FakeTensorMode():
        assert rope.tables(torch.arange(5)).cos.shape == (5, 6)
    kept = rope.kept_frequencies(torch.device("cpu"))
    assert type(kept) is torch.Tensor
    assert RotaryEmbedding(6, theta=123.0).kept_frequencies(torch.device("cpu")) is kept
    assert RotaryEmbedding(6, theta=124.0).kept_frequencies(torch.device("cpu")) is not kept
    with FakeTensorMode():
        assert rope.tables(torch.arange(5)).cos.shape == (5, 6)
    expected = rope.tables(torch.arange(5))
    with torch.inference_mode():
        assert torch.equal(rope.tables(torch.arange(5)).cos, expected.cos)


def test_a_captured_graph_reads_the_frequencies_that_are_kept(monkeypatch):
    rope, device, kept = RotaryEmbedding(6, theta=321.0), torch.device("cuda", 0), torch.zeros(6)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(RotaryEmbedding, "_both_frequencies", lambda self, device: torch.ones(6))

    assert torch.equal(rope.kept_frequencies(device), torch.ones(6))
    assert torch.equal(rope.kept_frequencies(device), torch.ones(6))
    monkeypatch.setitem(rope_module._KEPT, (6, 321.0, None, device), kept)
    assert rope.kept_frequencies(device) is kept


def test_rotation_in_low_precision_is_the_float32_rotation_rounded_once(random_input):
    x = random_input(1, 5, 2, 6, dtype=torch.bfloat16)
    rope, positions = RotaryEmbedding(6), torch.arange(40, 45)

    assert torch.equal(rope(x, positions), rope(x.float(), positions).bfloat16())


def test_rotation_in_float64_is_not_rounded_to_float32(random_input):
    x = random_input(1, 1, 1, 2)
    quarter = RopeTables(torch.tensor([[0.0, 0.0]]), torch.tensor([[-1.0, 1.0]]))

    assert rotate(x, quarter).flatten().tolist() == [-x.flatten()[1].item(), x.flatten()[0].item()]


def test_positions_may_differ_by_sequence(random_input):
    x = random_input(2, 3, 2, 6)
    rope, positions = RotaryEmbedding(6), torch.tensor([[0, 1, 2], [7, 8, 9]])

    rotated = rope(x, positions)

    for b in (0, 1):
        assert torch.equal(rotated[b : b + 1], rope(x[b : b + 1], positions[b]))


def test_it_has_neither_parameters_nor_buffers():
    rope = RotaryEmbedding(6)

    assert not list(rope.parameters())
    assert not list(rope.buffers())
    assert not rope.state_dict()


def test_linear_scaling_divides_every_position():
    scaled, plain = RotaryEmbedding(8, scaling=RopeScaling(kind="linear", factor=4.0)), RotaryEmbedding(8)

    for part, expected in zip(scaled.tables(4 * torch.arange(50)), plain.tables(torch.arange(50)), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-6)


def test_yarn_by_hand():
    # D = 8, theta = 10^4: frequencies 1, 0.1, 0.01, 0.001. The pair that turns r times within 4096 tokens is
    # 8 ln(4096 / (2 pi r)) / (2 ln 10^4): 1.31 for r = 32, floored to 1; 2.81 for r = 1, raised to 3. So pairs 0 and 1
    # keep their frequency, pair 3 is divided by 4, pair 2 takes half of each: 0.5 * 0.01 + 0.5 * 0.0025.
    rope = RotaryEmbedding(8, 10000.0, RopeScaling(kind="yarn", factor=4.0, original_max_position=4096))
    factor = 0.1 * math.log(4) + 1

    tables = rope.tables(torch.tensor([1, 100]))

    frequencies = [1.0, 0.1, 0.00625, 0.00025]
    for row, position in enumerate((1, 100)):
        assert tables.cos[row, 4:].tolist() == pytest.approx([factor * math.cos(position * f) for f in frequencies], abs=1e-5)
        assert tables.sin[row, 4:].tolist() == pytest.approx([factor * math.sin(position * f) for f in frequencies], abs=1e-5)


def yarn_frequencies(dim, theta, scaling):
    """arXiv 2309.00071, section 3.2, with the bounds rounded outwards as its code does, in plain Python."""
    length = scaling.original_max_position

    def pair(rotations):
        # the pair p with length * theta^(-2p / D) = 2 pi rotations
        return dim / 2 * math.log(length / (2 * math.pi * rotations), theta)

    low, high = max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), dim - 1)
    frequencies = []
    for p in range(dim // 2):
        plain = theta ** (-2 * p / dim)
        if p <= low:
            ramp = 0.0
        elif p >= high:
            ramp = 1.0
        else:
            ramp = (p - low) / (high - low)
        frequencies.append((1 - ramp) * plain + ramp * plain / scaling.factor)
    return frequencies


@given(
    half=st.integers(1, 32),
    theta=st.floats(100, 1e6),
    factor=st.floats(1, 64),
    length=st.integers(300, 100000),
    beta_fast=st.floats(16, 1000),
    beta_slow=st.floats(0.5, 8),
    attention_factor=st.none() | st.floats(0.5, 2),
)
# the slowest pair still turns often: the ramp ends beyond the last pair, then beyond D - 1 as well
@example(half=8, theta=1000.0, factor=8.0, length=100000, beta_fast=1000.0, beta_slow=1.0, attention_factor=None)
@example(half=8, theta=100.0, factor=8.0, length=100000, beta_fast=1000.0, beta_slow=1.0, attention_factor=None)
def test_yarn_is_the_published_formula(half, theta, factor, length, beta_fast, beta_slow, attention_factor):
    scaling = RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=length,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
    )

    tables = RotaryEmbedding(2 * half, theta, scaling).tables(torch.tensor([1]))

    stretch = 0.1 * math.log(factor) + 1 if attention_factor is None else attention_factor
    frequencies = yarn_frequencies(2 * half, theta, scaling)
    assert tables.cos[0, half:].tolist() == pytest.approx([stretch * math.cos(f) for f in frequencies], abs=1e-5)
    assert tables.sin[0, half:].tolist() == pytest.approx([stretch * math.sin(f) for f in frequencies], abs=1e-5)


def test_yarn_of_factor_1_changes_nothing():
    yarn, plain = RotaryEmbedding(16, scaling=RopeScaling(kind="yarn")), RotaryEmbedding(16)

    for part, expected in zip(yarn.tables(torch.arange(20)), plain.tables(torch.arange(20)), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-6)


def test_yarn_with_both_bounds_at_one_pair_steps_there():
    # both bounds come out as pair 0: what follows is divided, pair 0 is kept
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position=6, beta_fast=2.0, beta_slow=1.0)
    tables = RotaryEmbedding(8, 10000.0, scaling).tables(torch.tensor([1]))

    angles = torch.atan2(tables.sin, tables.cos)[0, 4:].tolist()
    assert angles == pytest.approx([1.0, 0.1 / 4, 0.01 / 4, 0.001 / 4], rel=1e-4)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_only_yarn_stretches_the_tables(kind):
    scaling = RopeScaling(kind=kind, factor=4.0)
    length = RotaryEmbedding(4, scaling=scaling).tables(torch.tensor([3]))

    norm = (length.cos.square() + length.sin.square()).sqrt()
    expected = 1.0 if kind == "linear" else 0.1 * math.log(4) + 1
    torch.testing.assert_close(norm, torch.full_like(norm, expected))


def test_an_odd_head_dimension_is_refused_when_the_config_is_built():
    with pytest.raises(ConfigError, match="head_dim_qk=5 is odd"):
        NSAConfig(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim_qk=5, head_dim_v=4)


def test_llama3_scaling_is_hugging_faces():
    """Against transformers' `_compute_llama3_parameters` written out, wavelength by wavelength."""
    dim, theta, length, factor, low, high = 64, 500000.0, 512, 8.0, 1.0, 4.0
    expected = []
    for pair in range(dim // 2):
        frequency = theta ** (-2 * pair / dim)
        wavelength = 2 * math.pi / frequency
        smooth = (length / wavelength - low) / (high - low)
        if wavelength > length / low:
            expected.append(frequency / factor)
        elif wavelength < length / high:
            expected.append(frequency)
        else:
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    scaling = RopeScaling(kind="llama3", factor=factor, original_max_position=length)
    found = RotaryEmbedding(dim, theta, scaling).frequencies(torch.device("cpu"))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)
    assert len({float(x) for x in (found / RotaryEmbedding(dim, theta).frequencies(torch.device("cpu"))).round(decimals=3)}) > 2


def test_a_llama3_ramp_that_falls_is_refused():
    with pytest.raises(ConfigError, match="low_freq_factor=4.0 is not below high_freq_factor=4.0"):
        RopeScaling(kind="llama3", factor=8.0, low_freq_factor=4.0)
