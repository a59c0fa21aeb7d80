"""Cases as the command line names them."""

import pytest
import torch

from nsa_bench.cases import SHAPES, Case, geometry_text, head_shape, parse_geometry, parse_lengths, parse_shapes, visible_pairs
from nsa_bench.errors import OptionError
from nsa_core import BlockGeometry


def test_lengths_are_tokens_or_multiples_of_1024():
    assert parse_lengths("2k,100,1m") == (2048, 100, 1024 * 1024)


@pytest.mark.parametrize("text", ["", "0", "k", "2.5k", "-2k", "2kk", "2g"])
def test_what_is_no_length_is_named(text):
    with pytest.raises(OptionError, match=r"--lengths has .* use 2k,8k,64k"):
        parse_lengths(text)


def test_a_length_that_int32_does_not_hold_is_named():
    assert parse_lengths("2147483647") == (2**31 - 1,)
    for text in ("2147483648", "2048m", "99999999999999999999"):
        with pytest.raises(OptionError, match=f"--lengths has '{text}' .*which int32 holds"):
            parse_lengths(text)


def test_every_bad_length_is_named_at_once():
    with pytest.raises(OptionError, match=r"'x'.*\n.*'y'"):
        parse_lengths("x,2k,y")


def test_a_shape_is_a_letter_or_four_numbers():
    assert parse_shapes("P,33/11/128/64") == (SHAPES["P"], head_shape(33, 11, 128, 64))
    assert [str(shape) for shape in parse_shapes("S,6/2/16/8")] == ["S (16/8/64/64)", "6/2/16/8"]


@pytest.mark.parametrize("text", ["Q", "", "64/4", "64/4/128", "64/5/128/128", "64/0/128/128", "a/b/c/d", "64/4/128/128/1"])
def test_what_is_no_shape_is_named(text):
    with pytest.raises(OptionError, match=r"--shapes has .* use P or 32/8/128/128"):
        parse_shapes(text)
    with pytest.raises(OptionError, match=r"--cases has .* use P or 32/8/128/128"):
        parse_shapes(text, "--cases")


def test_the_shapes_are_those_of_the_kernels_page():
    numbers = {name: (s.num_heads, s.num_kv_heads, s.head_dim_qk, s.head_dim_v) for name, s in SHAPES.items()}
    assert numbers == {"P": (64, 4, 192, 128), "L": (32, 8, 128, 128), "M": (64, 4, 128, 128), "S": (16, 8, 64, 64)}


def test_a_geometry_is_read_as_it_is_written():
    assert parse_geometry("32/16/64/16/512") == BlockGeometry()
    assert geometry_text(parse_geometry("8/4/16/6/32")) == "8/4/16/6/32"


@pytest.mark.parametrize(("text", "message"), [("32/16/64", "is not l/d/l'/n/w"), ("a/b/c/d/e", "is not"), ("32/15/64/16/512", "d | l")])
def test_what_is_no_geometry_is_refused(text, message):
    with pytest.raises(OptionError, match=message.replace("|", r"\|")):
        parse_geometry(text)


def test_a_packed_case_counts_blocks_sequence_by_sequence():
    geometry = parse_geometry("8/4/8/6/32")
    one = Case(shape=SHAPES["S"], seq_len=30, geometry=geometry, dtype=torch.float32)
    many = Case(shape=SHAPES["S"], seq_len=30, geometry=geometry, dtype=torch.float32, lengths=(7, 8, 0, 15))
    assert (one.sequence_lengths, one.num_blocks) == ((30,), 6)
    assert (many.sequence_lengths, many.num_blocks) == ((7, 8, 0, 15), 0 + 1 + 0 + 2)
    assert "30 tokens in 4 sequences" in str(many)


def test_pairs_of_packed_sequences_add_up():
    case = Case(shape=SHAPES["S"], seq_len=300, lengths=(100, 0, 200))
    for operation in ("nsa", "cmp", "select", "slc", "win", "dense"):
        alone = [visible_pairs(operation, Case(shape=SHAPES["S"], seq_len=length)) for length in (100, 200)]
        assert visible_pairs(operation, case) == sum(alone)


def test_pairs_of_the_whole_operation_are_those_of_its_branches():
    case = Case(shape=SHAPES["S"], seq_len=300)
    assert visible_pairs("nsa", case) == sum(visible_pairs(operation, case) for operation in ("cmp", "slc", "win"))
    # windows of 300 of 512 tokens, 16 heads
    assert visible_pairs("win", case) == 16 * 300 * 301 // 2


def test_an_unknown_operation_has_no_pairs():
    with pytest.raises(KeyError):
        visible_pairs("sum", Case(shape=SHAPES["S"], seq_len=300))
