"""Configurations as dicts and TOML: nothing is lost, unknown keys are refused, and no error is a bare traceback."""

import contextlib
import json
import tomllib

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_core import (
    BlockGeometry,
    ConfigError,
    NSAConfig,
    RopeScaling,
    config_from_dict,
    config_from_toml,
    config_to_dict,
    config_to_toml,
)
from nsa_core.errors import type_of
from nsa_core.serialization import toml_tables

SIZES = {"hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim_qk": 6, "head_dim_v": 5}
FIELDS = [field.name for field in attrs.fields(NSAConfig)]
GEOMETRY_FIELDS = [field.name for field in attrs.fields(BlockGeometry)]
SCALING_FIELDS = [field.name for field in attrs.fields(RopeScaling)]


def refusal(values):
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values)
    return str(caught.value)


@given(data=st.data())
def test_a_config_comes_back_from_its_dict(configs, data):
    config = data.draw(configs())

    assert config_from_dict(config_to_dict(config)) == config


@given(data=st.data())
def test_a_config_comes_back_from_its_toml(configs, data):
    config = data.draw(configs())

    assert config_from_toml(config_to_toml(config)) == config


@given(data=st.data())
def test_the_dict_is_plain_enough_for_json_and_the_toml_says_the_same(configs, data):
    values = config_to_dict(data.draw(configs()))

    assert json.loads(json.dumps(values)) == values
    assert tomllib.loads(config_to_toml(config_from_dict(values))) == values


def test_the_toml_of_a_config_reads_as_written_here():
    config = NSAConfig(
        **SIZES,
        geometry=BlockGeometry(8, 4, 16, 4, 1, 2, 24),
        compressor="conv",
        gate="softmax",
        gate_hidden_size=12,
        gate_temperature=0.5,
        rope_scaling=RopeScaling(kind="linear", factor=2.0),
        branches=("slc", "win"),
        backends={"cmp": "sdpa"},
        kv="shared",
        qk_norm=True,
    )

    assert config_to_toml(config) == (
        "hidden_size = 8\n"
        "num_heads = 4\n"
        "num_kv_heads = 2\n"
        "head_dim_qk = 6\n"
        "head_dim_v = 5\n"
        'compressor = "conv"\n'
        'gate = "softmax"\n'
        "gate_hidden_size = 12\n"
        "gate_temperature = 0.5\n"
        "rope_theta = 10000.0\n"
        'compressed_rope = "block_end"\n'
        "branches = [\n"
        '    "slc",\n'
        '    "win",\n'
        "]\n"
        'kv = "shared"\n'
        "qk_norm = true\n"
        "qk_norm_eps = 1e-06\n"
        "qkv_bias = false\n"
        "\n"
        "[geometry]\n"
        "compression_block_size = 8\n"
        "compression_stride = 4\n"
        "selection_block_size = 16\n"
        "num_selected_blocks = 4\n"
        "num_initial_blocks = 1\n"
        "num_local_blocks = 2\n"
        "window_size = 24\n"
        "\n"
        "[rope_scaling]\n"
        'kind = "linear"\n'
        "factor = 2.0\n"
        "original_max_position = 4096\n"
        "beta_fast = 32.0\n"
        "beta_slow = 1.0\n"
        "low_freq_factor = 1.0\n"
        "high_freq_factor = 4.0\n"
        "\n"
        "[backends]\n"
        'cmp = "sdpa"\n'
    )


def test_what_is_none_is_left_out():
    assert "rope_scaling" not in config_to_dict(NSAConfig(**SIZES))


def test_keys_with_defaults_may_be_left_out():
    assert config_from_dict(SIZES) == NSAConfig(**SIZES)
    partial = config_from_dict({**SIZES, "geometry": {"window_size": 7}, "rope_scaling": {"kind": "yarn"}})
    assert partial == NSAConfig(**SIZES, geometry=BlockGeometry(window_size=7), rope_scaling=RopeScaling(kind="yarn"))


def test_a_rope_scaling_of_none_is_no_scaling():
    assert config_from_dict({**SIZES, "rope_scaling": None}).rope_scaling is None


def test_reading_changes_nothing_in_the_dict_that_was_read():
    values = {**SIZES, "geometry": {"window_size": 7}, "branches": ["win", "cmp"]}
    before = json.dumps(values)
    config_from_dict(values)

    assert json.dumps(values) == before


@pytest.mark.parametrize("name", ['say "hi"', "back\\slash", "line\nbreak", "tab\t", "bell\a", "\r", "\x7f", "é", "𝄞", "#"])
def test_a_backends_name_survives_toml_whatever_its_characters(name):
    config = NSAConfig(**SIZES, backends={"cmp": name})

    assert config_from_toml(config_to_toml(config)) == config


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hidden_sizes": 1}, "unknown key hidden_sizes (the keys of NSAConfig are fixed); did you mean 'hidden_size'?"),
        (
            {"geometry": {"compression_strid": 16}},
            "unknown key geometry.compression_strid (the keys of BlockGeometry are fixed); did you mean 'compression_stride'?",
        ),
        (
            {"rope_scaling": {"kind": "yarn", "fctor": 2.0}},
            "unknown key rope_scaling.fctor (the keys of RopeScaling are fixed); did you mean 'factor'?",
        ),
        (
            {"rope_scaling": {"xyz": 2.0}},
            f"unknown key rope_scaling.xyz (the keys of RopeScaling are fixed); use one of {', '.join(SCALING_FIELDS)}",
        ),
        ({"zzz": 1}, f"unknown key zzz (the keys of NSAConfig are fixed); use one of {', '.join(FIELDS)}"),
        ({5: 1}, f"unknown key 5 (the keys of NSAConfig are fixed); use one of {', '.join(FIELDS)}"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(extra, message):
    assert refusal({**SIZES, **extra}) == message


@pytest.mark.parametrize("key", list(SIZES))
def test_a_missing_key_is_named(key):
    values = {name: value for name, value in SIZES.items() if name != key}

    assert refusal(values) == f"missing key {key} (NSAConfig has no default for it); give it"


def test_a_missing_key_of_a_table_is_named_with_its_table():
    assert refusal({**SIZES, "rope_scaling": {}}) == "missing key rope_scaling.kind (RopeScaling has no default for it); give it"


@pytest.mark.parametrize("table", ["geometry", "rope_scaling"])
@pytest.mark.parametrize("value", [5, "x", [], [1], True])
def test_a_table_that_is_none_is_named(table, value):
    assert refusal({**SIZES, table: value}) == f"{table}={value!r} is no table (keys and values are expected); use {{...}}"


@pytest.mark.parametrize("values", [5, None, "hidden_size = 8", [("hidden_size", 8)]])
def test_a_config_that_is_no_table_is_refused(values):
    assert refusal(values) == f"the config={values!r} is no table (keys and values are expected); use {{...}}"


WRONG = {
    "hidden_size": ["8", 8.0, True, None, [8]],
    "num_heads": ["4", 4.0, True, None, {}],
    "num_kv_heads": ["2", 2.0, True, None],
    "head_dim_qk": ["6", 6.0, None],
    "head_dim_v": ["5", 5.0, None],
    "compressor": [5, None, True, ["mlp"], {}],
    "gate": [5, None, ["sigmoid"]],
    "gate_hidden_size": ["64", 64.0, None],
    "gate_temperature": ["1.0", None, True, [1.0], {}],
    "rope_theta": ["1.0", None, False],
    "compressed_rope": [5, None],
    "branches": ["cmp", 5, None, [5], [["cmp"]], {"cmp": 1}, True],
    "kv": [5, None, True, ["shared"]],
    "qk_norm": ["true", 1, None],
    "backends": ["sdpa", 5, None, ["cmp"], {"cmp": 5}, {"cmp": None}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_value_of_the_wrong_type_is_named_and_never_converted(field, value):
    message = refusal({**SIZES, field: value})

    assert message.startswith(field)
    assert "; use " in message


@pytest.mark.parametrize("value", ["16", 16.0, True, None, [16]])
@pytest.mark.parametrize("field", GEOMETRY_FIELDS)
def test_a_geometry_value_of_the_wrong_type_is_named_and_never_converted(field, value):
    assert refusal({**SIZES, "geometry": {field: value}}).startswith(f"{field}={value!r} is {type_of(value)}")


@pytest.mark.parametrize(
    ("field", "value"), [("kind", 5), ("kind", None), ("factor", "2"), ("original_max_position", 4096.0), ("attention_factor", "1")]
)
def test_a_scaling_value_of_the_wrong_type_is_named_and_never_converted(field, value):
    assert refusal({**SIZES, "rope_scaling": {"kind": "yarn", field: value}}).startswith(f"{field}={value!r}")


def test_a_broken_rule_keeps_the_configs_own_message():
    assert refusal({**SIZES, "geometry": {"selection_block_size": 50}}) == (
        "selection_block_size=50 is not a multiple of compression_stride=16 (Eq. 9 needs d | l'); use 48 or 64"
    )


@pytest.mark.parametrize("text", ["hidden_size =", "= 3", "[geometry", "hidden_size = 8\nhidden_size = 8"])
def test_a_text_that_is_no_toml_is_refused_in_our_words(text):
    with pytest.raises(ConfigError, match=r"^the text is no TOML \(.*\); write key = value lines$"):
        config_from_toml(text)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 30_000,
        "a = " + "{a = " * 20_000,
        ".".join("a" * 50_000) + " = 1",
        "[" + ".".join(["'a'"] * 20_000) + "]",
        "a = 0x" + "f" * 5_000,
    ],
    ids=["lists", "tables", "key", "header", "number"],
)
def test_a_text_that_keeps_a_parser_busy_is_refused_at_once(text):
    with pytest.raises(ConfigError, match=r"^the text is no TOML \((values nested|a key of|a number of) more than \d+ .* at line 1\)"):
        config_from_toml(text)


@given(st.text(st.sampled_from("\"'\\\n#[]{}=.,a1 "), max_size=16))
def test_what_toml_allows_and_nests_little_is_never_refused(text):
    try:
        expected = tomllib.loads(text)
    except ValueError:
        return
    assert toml_tables(text) == expected


def test_quoted_dots_and_brackets_do_not_count():
    text = 'a = """\n[[[[[[[[[ a.b.c.d.e.f.g.h.i \\""" """"\n"b.c.d.e.f.g.h.i.j" = \'[[[[[[[[[\'  # [[[[[[[[[ a.b.c.d.e.f.g.h.i\n'
    assert toml_tables(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    "text", ["9" * 4000, "-" + "9" * 4000, "0." + "9" * 4500, "9" * 4500 + ".5", "9" * 4500 + "e-9", "[0x" + "f" * 64 + "]"]
)
def test_integers_of_4000_digits_and_floats_are_read(text):
    assert toml_tables(f"x = {text}") == tomllib.loads(f"x = {text}")


@pytest.mark.parametrize("text", ["9" * 4001, "-" + "9" * 5000, "[1, +" + "9" * 60_000 + ", 2]", "{a = " + "9_" * 4000 + "9}"])
def test_integers_of_more_digits_are_refused_with_their_line(text):
    with pytest.raises(ValueError, match="^an integer of more than 4,000 digits at line 2$"):
        toml_tables(f"y = 1\nx = {text}\n")


def test_toml_goes_through_the_same_checks_as_a_dict():
    with pytest.raises(ConfigError, match="did you mean 'window_size'"):
        config_from_toml(config_to_toml(NSAConfig(**SIZES)).replace("window_size", "windows_size"))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_a_config_with_anything_in_one_place_is_built_or_refused_in_our_words(configs, data):
    values = config_to_dict(data.draw(configs()))
    table = data.draw(st.sampled_from([values, values["geometry"], *filter(None, [values.get("rope_scaling")])]))
    table[data.draw(st.sampled_from(sorted(table)))] = data.draw(ANYTHING)

    # anything but a ConfigError fails the test
    with contextlib.suppress(ConfigError):
        made = config_from_dict(values)
        assert config_from_dict(config_to_dict(made)) == made


def test_a_scaling_is_read_under_hugging_faces_names_too():
    values = config_to_dict(NSAConfig(64, 4, 2, 16, 16))
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    found = config_from_dict({**values, "rope_scaling": scaling})
    assert found.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_max_position=2048)
    with pytest.raises(ConfigError, match=r"unknown key rope_scaling\.factors .* did you mean 'factor'"):
        config_from_dict({**values, "rope_scaling": {"rope_type": "linear", "factors": 4.0}})
