"""The configuration: refusals, their messages, and that the suggested values work."""

import ast
import copy
import json
import pickle
import re
import tomllib
from collections.abc import MutableMapping

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_core import BlockGeometry, ConfigError, NSAConfig, NSAError, RopeScaling
from nsa_core.errors import type_of

SIZES = {"hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim_qk": 6, "head_dim_v": 5}
GEOMETRY_FIELDS = [field.name for field in attrs.fields(BlockGeometry)]
CONFIG_INTEGERS = [*SIZES, "gate_hidden_size"]


def config(**changes):
    return NSAConfig(**{**SIZES, **changes})


def refusal(build, **values):
    with pytest.raises(ConfigError) as caught:
        build(**values)
    return str(caught.value)


def test_the_defaults_are_the_papers():
    geometry = BlockGeometry()

    assert geometry.as_tuple() == (32, 16, 64, 16, 1, 2, 512)
    assert attrs.asdict(geometry) == {
        "compression_block_size": 32,
        "compression_stride": 16,
        "selection_block_size": 64,
        "num_selected_blocks": 16,
        "num_initial_blocks": 1,
        "num_local_blocks": 2,
        "window_size": 512,
    }


def test_a_configs_optional_values_have_the_contracts_defaults():
    made = config()

    assert made.geometry == BlockGeometry()
    assert (made.compressor, made.gate, made.gate_temperature, made.compressed_rope) == ("mlp", "sigmoid", 1.0, "block_end")
    assert (made.rope_theta, made.rope_scaling, made.branches, made.backends) == (10000.0, None, ("cmp", "slc", "win"), {})
    assert (made.kv, made.qk_norm) == ("separate", False)


def test_as_tuple_lists_the_constructors_arguments_in_order():
    numbers = (8, 4, 12, 7, 2, 3, 9)

    assert BlockGeometry(*numbers).as_tuple() == numbers


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"compression_stride": 12},
            "compression_stride=12 does not divide compression_block_size=32 (Eq. 9 needs d | l); use 8",
        ),
        (
            {"compression_stride": 3},
            "compression_stride=3 does not divide compression_block_size=32 (Eq. 9 needs d | l); use 2",
        ),
        (
            {"selection_block_size": 50},
            "selection_block_size=50 is not a multiple of compression_stride=16 (Eq. 9 needs d | l'); use 48 or 64",
        ),
        (
            {"selection_block_size": 50, "compression_block_size": 64},
            "selection_block_size=50 is not a multiple of compression_stride=16 (Eq. 9 needs d | l'); use 64",
        ),
        (
            {"selection_block_size": 5},
            "selection_block_size=5 is not a multiple of compression_stride=16 (Eq. 9 needs d | l'); use 32",
        ),
        (
            {"selection_block_size": 16},
            "selection_block_size=16 is smaller than compression_block_size=32 (Eq. 9 needs l <= l'); use 32",
        ),
        (
            {"num_selected_blocks": 2},
            "num_selected_blocks=2 cannot hold num_initial_blocks=1 + num_local_blocks=2 (forced blocks count among the n); use 3 or more",
        ),
        ({"compression_block_size": 0}, "compression_block_size=0 is too small (the rule: an integer >= 1); use 16"),
        ({"compression_stride": 0}, "compression_stride=0 is too small (the rule: an integer >= 1); use 1"),
        ({"selection_block_size": -64}, "selection_block_size=-64 is too small (the rule: an integer >= 1); use 32"),
        ({"num_selected_blocks": 0}, "num_selected_blocks=0 is too small (the rule: an integer >= 1); use 3"),
        ({"num_initial_blocks": -1}, "num_initial_blocks=-1 is too small (the rule: an integer >= 0); use 0"),
        ({"num_local_blocks": 0}, "num_local_blocks=0 is too small (the rule: an integer >= 1); use 1"),
        ({"window_size": 0}, "window_size=0 is too small (the rule: an integer >= 1); use 1"),
        (
            {"compression_block_size": 10**12},
            "compression_block_size=1000000000000 is too large (the rule: an integer <= 1048576); use 1048576 or less",
        ),
        (
            {"window_size": 2**63},
            f"window_size={2**63} is too large (the rule: an integer <= {2**62}); use {2**62} or less",
        ),
        ({"window_size": 512.0}, "window_size=512.0 is a float (the rule: an integer >= 1); use 1"),
    ],
)
def test_a_broken_rule_of_the_geometry_is_named_with_field_value_rule_and_a_value_that_would_do(values, message):
    assert refusal(BlockGeometry, **values) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_heads": 6, "num_kv_heads": 4},
            "num_kv_heads=4 does not divide num_heads=6 (each KV head serves H/G query heads); use 3 or 6",
        ),
        (
            {"num_heads": 4, "num_kv_heads": 8},
            "num_kv_heads=8 does not divide num_heads=4 (each KV head serves H/G query heads); use 4",
        ),
        ({"head_dim_qk": 7}, "head_dim_qk=7 is odd (rotate-half RoPE needs pairs); use 8"),
        ({"head_dim_qk": 1}, "head_dim_qk=1 is too small (the rule: an integer >= 2); use 2"),
        ({"head_dim_v": 0}, "head_dim_v=0 is too small (the rule: an integer >= 1); use 1"),
        ({"num_heads": 0}, "num_heads=0 is too small (the rule: an integer >= 1); use 2"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 is too small (the rule: an integer >= 1); use 1"),
        ({"hidden_size": 0}, "hidden_size=0 is too small (the rule: an integer >= 1); use 1"),
        (
            {"num_heads": 10**12, "num_kv_heads": 3},
            "num_heads=1000000000000 is too large (the rule: an integer <= 1048576); use 1048576 or less",
        ),
        ({"gate_hidden_size": 0}, "gate_hidden_size=0 is too small (the rule: an integer >= 1); use 1"),
        ({"compressor": "max"}, "compressor='max' is unknown (the rule: one of 'mlp', 'conv', 'mean'); use 'mlp'"),
        ({"gate": "tanh"}, "gate='tanh' is unknown (the rule: one of 'sigmoid', 'softmax'); use 'sigmoid'"),
        (
            {"compressed_rope": "none"},
            "compressed_rope='none' is unknown (the rule: one of 'block_end', 'tokens'); use 'block_end'",
        ),
        (
            {"compressed_rope": "tokens", "compressor": "conv"},
            "compressed_rope='tokens' with compressor='conv' would make compressed keys depend on absolute position "
            "(it stays relative for 'mean' only); use compressed_rope='block_end' or compressor='mean'",
        ),
        (
            {"compressed_rope": "tokens"},
            "compressed_rope='tokens' with compressor='mlp' would make compressed keys depend on absolute position "
            "(it stays relative for 'mean' only); use compressed_rope='block_end' or compressor='mean'",
        ),
        ({"kv": "one"}, "kv='one' is unknown (the rule: one of 'separate', 'shared'); use 'separate'"),
        ({"qk_norm": "yes"}, "qk_norm='yes' is a str (the rule: True or False); use False"),
        ({"gate_temperature": 0}, "gate_temperature=0 is not a finite number above 0 (the rule); use 1.0"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0 is not a finite number above 0 (the rule); use 10000.0"),
        (
            {"rope_theta": 1.0, "rope_scaling": RopeScaling(kind="yarn")},
            "rope_theta=1.0 with YaRN scaling (its ramp divides by ln theta, the rule: above 1); use 10000.0",
        ),
        ({"geometry": 5}, "geometry=5 is not a BlockGeometry; use BlockGeometry()"),
        (
            {"rope_scaling": 2.0},
            "rope_scaling=2.0 is not a RopeScaling; use None or RopeScaling(kind='linear', factor=2.0)",
        ),
        (
            {"rope_scaling": {"factor": 2.0}},
            "rope_scaling={'factor': 2.0} does not describe a scaling (RopeScaling.__init__() missing 1 required "
            "keyword-only argument: 'kind'); use {'kind': 'linear', 'factor': 2.0}",
        ),
        (
            {"gate": "softmax", "branches": ("win",)},
            "gate='softmax' with branches=('win',) would be 1 for any weights (it shares 1 among the branches); "
            "use gate='sigmoid' or two branches",
        ),
        ({"geometry": None}, "geometry=None is not a BlockGeometry; use BlockGeometry()"),
        ({"backends": "sdpa"}, "backends='sdpa' is no table of operation -> backend name; use {'cmp': 'sdpa'}"),
        (
            {"backends": {"compress": "sdpa"}},
            "backends names the operation 'compress' (the rule: one of cmp, select, slc, win, nsa, append, choose, rotate); use 'cmp'",
        ),
        ({"backends": {"cmp": None}}, "backends['cmp']=None is not a backend's name; use 'auto' or 'sdpa'"),
        ({"backends": {"cmp": ""}}, "backends['cmp']='' is not a backend's name; use 'auto' or 'sdpa'"),
    ],
)
def test_a_broken_rule_of_the_config_is_named_with_field_value_rule_and_a_value_that_would_do(values, message):
    assert refusal(config, **values) == message


@pytest.mark.parametrize("branches", [(), [], ("cmp", "cmp"), ("cmp", "all"), "cmp", {"cmp"}, None, 5, (["cmp"],), {"cmp": 1}])
def test_branches_must_be_a_choice_of_the_three_each_once(branches):
    message = refusal(config, branches=branches)

    assert message.startswith("branches=")
    assert message.endswith("is not a non-empty choice of 'cmp', 'slc', 'win', each once; use [\"cmp\", \"slc\", \"win\"]")


def test_the_advice_about_branches_can_be_typed_in_python_toml_and_json():
    advice = refusal(config, branches=()).partition("; use ")[2]

    for spelled in (ast.literal_eval(advice), tomllib.loads(f"branches = {advice}")["branches"], json.loads(advice)):
        assert config(branches=spelled).branches == ("cmp", "slc", "win")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "ntk"}, "kind='ntk' is unknown (the rule: one of 'linear', 'yarn', 'llama3'); use 'linear'"),
        ({"kind": "yarn", "factor": 0.5}, "factor=0.5 would shrink positions (the rule: factor >= 1); use 1.0"),
        ({"kind": "yarn", "factor": 0}, "factor=0 is not a finite number above 0 (the rule); use 1.0"),
        (
            {"kind": "yarn", "beta_fast": 1.0, "beta_slow": 1.0},
            "beta_slow=1.0 is not below beta_fast=1.0 (YaRN's ramp); use 1.0 and 32.0",
        ),
        (
            {"kind": "yarn", "original_max_position": 0},
            "original_max_position=0 is too small (the rule: an integer >= 1); use 1",
        ),
        (
            {"kind": "linear", "attention_factor": 1.5},
            "attention_factor=1.5 with kind='linear' would be ignored (it divides positions and nothing else); "
            "use attention_factor=None or kind='yarn'",
        ),
        ({"kind": "yarn", "attention_factor": "x"}, "attention_factor='x' is not a finite number above 0 (the rule); use 1.0"),
        ({"kind": "yarn", "attention_factor": 0.0}, "attention_factor=0.0 is not a finite number above 0 (the rule); use 1.0"),
    ],
)
def test_a_broken_rule_of_the_rope_scaling_is_named_with_field_value_rule_and_a_value_that_would_do(values, message):
    assert refusal(RopeScaling, **values) == message


@pytest.mark.parametrize("value", [True, False, 2.0, "2", None, [2]])
@pytest.mark.parametrize("field", GEOMETRY_FIELDS)
def test_an_integer_of_the_geometry_is_never_a_bool_float_or_string(field, value):
    message = refusal(BlockGeometry, **{field: value})

    assert message.startswith(f"{field}={value!r} is {type_of(value)} (the rule: an integer >= ")


@pytest.mark.parametrize("value", [True, False, 2.0, "2", None, [2]])
@pytest.mark.parametrize("field", CONFIG_INTEGERS)
def test_an_integer_of_the_config_is_never_a_bool_float_or_string(field, value):
    message = refusal(config, **{field: value})

    assert message.startswith(f"{field}={value!r} is {type_of(value)} (the rule: an integer >= ")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1.0", None])
@pytest.mark.parametrize(("field", "use"), [("gate_temperature", 1.0), ("rope_theta", 10000.0)])
def test_a_number_is_finite_and_above_zero(field, use, value):
    assert refusal(config, **{field: value}) == f"{field}={value!r} is not a finite number above 0 (the rule); use {use}"


def advice(message):
    """The field that a message refuses, and the values that it suggests."""
    match = re.fullmatch(r"(\w+)=.*; use (.*?)(?: or more)?", message)
    return match[1], [int(value) for value in match[2].split(" or ")]


def complaint(build, values):
    """The message that refuses `values`, or None."""
    try:
        build(**values)
    except ConfigError as error:
        return str(error)
    return None


def follow_advice(build, values, data):
    """Replace each refused field by a value that the message offers until `values` build; return the fields in order."""
    replaced = []
    while message := complaint(build, values):
        field, offered = advice(message)
        assert message.startswith(f"{field}={values[field]!r} ")
        values = {**values, field: data.draw(st.sampled_from(offered), label=message)}
        replaced.append(field)
        assert len(replaced) <= 2 * len(values), "the advice goes in circles"
    return replaced


@given(data=st.data())
def test_following_the_advice_ends_in_a_geometry_that_builds(data):
    values = data.draw(st.fixed_dictionaries({field: st.integers(-2, 12) for field in GEOMETRY_FIELDS}))

    replaced = follow_advice(BlockGeometry, values, data)

    too_small = sum(values[field] < 1 for field in GEOMETRY_FIELDS)
    # beyond values that are too small, at most the stride, l' against d, l' against l and n need a change
    assert len(replaced) <= too_small + 4


@given(data=st.data())
def test_following_the_advice_ends_in_a_config_that_builds(data):
    values = data.draw(st.fixed_dictionaries({field: st.integers(-2, 12) for field in CONFIG_INTEGERS}))

    follow_advice(NSAConfig, values, data)


@given(data=st.data(), field=st.sampled_from(GEOMETRY_FIELDS), value=st.integers(-3, 0))
def test_a_value_that_is_too_small_is_mended_by_the_first_advice(geometries, data, field, value):
    values = attrs.asdict(data.draw(geometries()))
    if field == "num_local_blocks":
        # if its least value does not fit the other fields, no value does
        values["num_selected_blocks"] = max(values["num_selected_blocks"], values["num_initial_blocks"] + 1)
    if field == "compression_stride":
        # 1 divides everything
        values["compression_stride"] = 1
    minimum = 0 if field == "num_initial_blocks" else 1
    broken = {**values, field: min(value, minimum - 1)}

    named, offered = advice(refusal(BlockGeometry, **broken))

    assert named == field
    for use in offered:
        BlockGeometry(**{**broken, field: use})


def test_a_valid_geometry_may_touch_every_rule():
    BlockGeometry(4, 4, 4, 1, 0, 1, 1)
    BlockGeometry(1, 1, 1, 3, 2, 1, 1)


@pytest.mark.parametrize("made", [BlockGeometry(), config(), RopeScaling(kind="linear")])
def test_a_configuration_cannot_be_changed(made):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(made, attrs.fields(type(made))[0].name, 1)


def test_a_config_error_is_an_nsa_error_and_a_value_error():
    assert issubclass(ConfigError, NSAError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("branches", [["win", "cmp"], ("win", "cmp"), ["cmp", "win"]])
def test_branches_stand_in_the_papers_order(branches):
    assert config(branches=branches).branches == ("cmp", "win")


def test_equal_configs_are_equal_and_hash_alike_whatever_the_order_of_their_backends():
    first, second = config(backends={"cmp": "a", "win": "b"}), config(backends={"win": "b", "cmp": "a"})

    assert first == second
    assert hash(first) == hash(second)
    assert first != config(backends={"cmp": "a", "win": "c"})


def test_a_configs_backends_are_its_own_copy():
    given_backends = {"cmp": "a"}
    made = config(backends=given_backends)
    given_backends["cmp"] = "b"

    assert made.backends == {"cmp": "a"}


def test_a_configs_backends_cannot_be_changed():
    made = config(backends={"cmp": "a", "win": "b"})

    assert not isinstance(made.backends, MutableMapping)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.backends._pairs = ()
    assert repr(made.backends) == "{'cmp': 'a', 'win': 'b'}"
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made


def test_rope_scaling_takes_hugging_faces_names():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}

    assert config(rope_scaling=scaling).rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_max_position=2048)
    assert config(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_compressed_rope_of_tokens_goes_with_the_mean():
    assert config(compressed_rope="tokens", compressor="mean").compressed_rope == "tokens"


def test_two_keys_of_one_scaling_field_agree():
    both = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position": 2048}

    assert config(rope_scaling=both).rope_scaling.kind == "yarn"
    with pytest.raises(ConfigError, match="gives kind as 'yarn' and as 'linear' .the keys mean the same.; drop one"):
        config(rope_scaling=both | {"rope_type": "linear"})
