"""phi: the blocks that it reads, and each kind against its formula."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from nsa_core import BlockGeometry, blocks
from nsa_core.compression import ConvCompressor, MeanCompressor, MLPCompressor, block_windows, build_compressor
from nsa_core.varlen import cu_blocks_from_cu_seqlens, pack

KINDS = ("mean", "conv", "mlp")
SMALL = BlockGeometry(4, 2, 6, 3, 1, 1, 5)


def tokens_like(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomized(kind, num_kv_heads, head_dim, geometry):
    compressor = build_compressor(kind, num_kv_heads, head_dim, geometry).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in compressor.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return compressor


@given(data=st.data(), length=st.integers(0, 30))
def test_blocks_are_l_tokens_every_d_and_end_where_they_say(geometries, data, length):
    geometry = data.draw(geometries())
    size, stride = geometry.compression_block_size, geometry.compression_stride
    x = tokens_like(2, length, 2, 3)

    windows = block_windows(x, geometry)

    count = blocks.num_compressed_blocks(length, geometry)
    assert windows.tokens.shape == (2, count, size, 2, 3)
    assert windows.last_positions.dtype == torch.int64
    assert windows.last_positions.tolist() == [i * stride + size - 1 for i in range(count)]
    for i in range(count):
        assert torch.equal(windows.tokens[:, i], x[:, i * stride : i * stride + size])


@given(data=st.data(), lengths=st.lists(st.integers(0, 14), min_size=1, max_size=5))
def test_packed_blocks_are_those_of_the_sequences_alone_one_after_another(geometries, data, lengths):
    geometry = data.draw(geometries())
    sequences = [tokens_like(length, 2, 3, seed=seed) for seed, length in enumerate(lengths)]
    packed, cu_seqlens = pack(sequences)

    windows = block_windows(packed, geometry, cu_seqlens)

    alone = [block_windows(sequence.unsqueeze(0), geometry) for sequence in sequences]
    total = int(cu_blocks_from_cu_seqlens(cu_seqlens, geometry)[-1])
    assert windows.tokens.shape[1] == windows.last_positions.shape[0] == sum(lengths) // geometry.compression_stride
    assert windows.tokens.shape[1] >= total
    assert torch.equal(windows.tokens[:, :total], torch.cat([window.tokens for window in alone], 1))
    assert torch.equal(windows.last_positions[:total], torch.cat([window.last_positions for window in alone]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_sequence_shorter_than_a_block_has_none(kind, length):
    windows = block_windows(tokens_like(2, length, 2, 3), SMALL)

    assert windows.tokens.shape == (2, 0, 4, 2, 3)
    assert windows.last_positions.shape == (0,)
    assert randomized(kind, 2, 3, SMALL)(windows.tokens).shape == (2, 0, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 3])
def test_where_there_is_no_block_everything_still_gets_a_gradient_of_zeros(kind, length):
    # None would make DDP wait for ever
    x, compressor = tokens_like(2, length, 2, 3).requires_grad_(), randomized(kind, 2, 3, SMALL)

    compressor(block_windows(x, SMALL).tokens).sum().backward()

    for gradient in (x.grad, *(parameter.grad for parameter in compressor.parameters())):
        assert gradient is not None
        assert not gradient.any()


def test_an_empty_packed_batch_has_no_blocks():
    windows = block_windows(tokens_like(1, 0, 2, 3), SMALL, torch.tensor([0, 0], dtype=torch.int32))

    assert windows.tokens.shape == (1, 0, 4, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_starts_equal_to_the_mean(kind):
    tokens = tokens_like(2, 3, 4, 2, 5)
    compressor = build_compressor(kind, 2, 5, SMALL).double()

    torch.testing.assert_close(compressor(tokens), tokens.mean(2), rtol=1e-6, atol=1e-7)


def test_the_mean_is_exact_and_has_no_parameters():
    tokens = torch.arange(8.0).view(1, 1, 4, 1, 2)
    compressor = MeanCompressor()

    assert compressor(tokens).tolist() == [[[[3.0, 4.0]]]]
    assert not list(compressor.parameters())


@given(data=st.data(), length=st.integers(0, 30))
def test_conv_is_torchs_depthwise_conv1d_of_width_l_and_stride_d(geometries, data, length):
    geometry = data.draw(geometries())
    size, stride = geometry.compression_block_size, geometry.compression_stride
    x = tokens_like(2, length, 3, 2)
    conv = randomized("conv", 3, 2, geometry)

    compressed = conv(block_windows(x, geometry).tokens)

    if length < size:
        assert compressed.shape == (2, 0, 3, 2)
        return
    channels = F.conv1d(x.flatten(2).transpose(1, 2), conv.weight, stride=stride, groups=6)
    torch.testing.assert_close(compressed, channels.transpose(1, 2).unflatten(2, (3, 2)), rtol=1e-12, atol=1e-12)


def test_mlp_is_the_papers_formula_plus_the_mean():
    mlp = randomized("mlp", 2, 3, SMALL)
    tokens = tokens_like(2, 3, 4, 2, 3)

    compressed = mlp(tokens)

    for b in range(2):
        for i in range(3):
            for g in range(2):
                block = tokens[b, i, :, g]
                # flattened token by token
                hidden = mlp.up.weight @ torch.cat(list(block + mlp.position)) + mlp.up.bias
                expected = mlp.down.weight @ (hidden / (1 + torch.exp(-hidden))) + mlp.down.bias + block.mean(0)
                torch.testing.assert_close(compressed[b, i, g], expected, rtol=1e-12, atol=1e-12)


def test_mlp_is_shared_over_kv_heads_and_conv_is_not():
    tokens = tokens_like(1, 3, 4, 1, 5).expand(1, 3, 4, 2, 5)

    shared, apart = randomized("mlp", 2, 5, SMALL)(tokens), randomized("conv", 2, 5, SMALL)(tokens)

    torch.testing.assert_close(shared[:, :, 0], shared[:, :, 1])
    assert not torch.allclose(apart[:, :, 0], apart[:, :, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_compressed_without_looking_at_the_others(kind):
    compressor, tokens = randomized(kind, 2, 5, SMALL), tokens_like(2, 3, 4, 2, 5)

    alone = torch.cat([compressor(tokens[:, i : i + 1]) for i in range(3)], 1)

    torch.testing.assert_close(compressor(tokens), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_every_parameter_gets_a_gradient_once_the_last_layer_left_zero(kind):
    compressor = randomized(kind, 2, 5, SMALL)
    x = tokens_like(2, 9, 2, 5).requires_grad_()

    compressor(block_windows(x, SMALL).tokens).square().sum().backward()

    for name, parameter in compressor.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_the_last_layers_gradient_is_there_from_the_start(kind):
    compressor = build_compressor(kind, 2, 5, SMALL).double()

    compressor(tokens_like(2, 3, 4, 2, 5)).square().sum().backward()

    last = [compressor.weight] if kind == "conv" else [compressor.down.weight, compressor.down.bias]
    assert all((parameter.grad != 0).any() for parameter in last)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_finite_differences(kind):
    compressor = randomized(kind, 1, 2, SMALL)
    x = tokens_like(1, 7, 1, 2).requires_grad_()

    def compress(x, *parameters):
        named = dict(zip(dict(compressor.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(compressor, named, (block_windows(x, SMALL).tokens,))

    assert torch.autograd.gradcheck(compress, (x, *compressor.parameters()))


def test_tokens_of_no_block_get_zero_gradient():
    x = tokens_like(1, 7, 1, 2).requires_grad_()

    MeanCompressor()(block_windows(x, SMALL).tokens).sum().backward()

    # blocks 0..3 and 2..5: the middle two are read twice, token 6 never
    assert x.grad[0, :, 0, 0].tolist() == [0.25, 0.25, 0.5, 0.5, 0.25, 0.25, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_tokens_stay_in_their_dtype(kind):
    tokens = tokens_like(1, 2, 4, 2, 5).bfloat16()

    assert build_compressor(kind, 2, 5, SMALL).bfloat16()(tokens).dtype == torch.bfloat16


def test_a_float32_filter_takes_the_bfloat16_tokens_of_autocast():
    tokens = tokens_like(1, 2, 4, 2, 5).bfloat16()

    assert build_compressor("conv", 2, 5, SMALL)(tokens).dtype == torch.bfloat16


@pytest.mark.parametrize(("kind", "cls"), [("mean", MeanCompressor), ("conv", ConvCompressor), ("mlp", MLPCompressor)])
def test_a_name_builds_its_kind(kind, cls):
    assert type(build_compressor(kind, 2, 5, SMALL)) is cls


def test_parameters_have_the_shapes_of_the_paper():
    shapes = {name: tuple(parameter.shape) for name, parameter in build_compressor("mlp", 2, 5, SMALL).named_parameters()}

    assert shapes == {"position": (4, 5), "up.weight": (5, 20), "up.bias": (5,), "down.weight": (5, 5), "down.bias": (5,)}
    assert build_compressor("conv", 2, 5, SMALL).weight.shape == (10, 1, 4)


def test_the_position_table_breaks_the_symmetry_from_the_start():
    assert (build_compressor("mlp", 2, 5, SMALL).position != 0).all()


def test_the_position_table_starts_with_a_standard_deviation_of_a_fiftieth():
    torch.manual_seed(0)
    position = build_compressor("mlp", 2, 128, BlockGeometry()).position.detach()

    # 4,096 numbers: the estimate errs by about 1 %
    assert 0.019 < float(position.std()) < 0.021
    assert abs(float(position.mean())) < 0.002
