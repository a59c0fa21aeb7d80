"""Kinds of RoPE: those that both know give the same logits, others are refused by name."""

import json

import pytest

from nsa_core.errors import ConfigError

CLOSE = 1e-4
KNOWN = {
    "default": {},
    "theta": {"rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn of the model's own length": {"rope_type": "yarn", "factor": 2.0},
    "yarn with its ramp": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 32},
    "yarn with a factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "original_max_position_embeddings": 32},
    "yarn with mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 32},
}


def rewrite(folder, style, rope):
    """Give config.json the RoPE of `rope` as Transformers 5 spells it, or as 4 did."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.pop("rope_parameters", None)
    theta = rope.get("rope_theta", 10000.0)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if style == "new":
        content["rope_parameters"] = {"rope_type": "default", **scaling, "rope_theta": theta}
    else:
        content["rope_theta"] = theta
        content["rope_scaling"] = {
            ("type" if style == "oldest" else key) if key == "rope_type" else key: scaling[key] for key in scaling
        } or None
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("style", ["new", "old", "oldest"])
@pytest.mark.parametrize("kind", KNOWN)
def test_known_kinds_give_the_same_logits(dense, convert, difference, ids, kind, style):
    source = dense(num_hidden_layers=1)
    rewrite(source.folder, style, KNOWN[kind])
    model = type(source.model).from_pretrained(source.folder).eval()
    found = convert(source.folder, layers=["dense"])
    assert difference(model, found.model, ids(120)) < CLOSE
    # the kind matters at these positions
    assert kind == "default" or difference(source.model, model, ids(120)) > 10 * CLOSE


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional"])
def test_other_kinds_are_refused_by_name(dense, convert, kind):
    source = dense()
    rewrite(source.folder, "old", {"rope_type": kind, "factor": 2.0})
    with pytest.raises(ConfigError, match=rf"rope_type='{kind}' is not converted .* use a model of one of those"):
        convert(source.folder)


def test_other_kinds_are_refused_by_name_whichever_key_has_them(dense, convert):
    source = dense()
    content = json.loads((source.folder / "config.json").read_text())
    (source.folder / "config.json").write_text(json.dumps(content | {"rope_scaling": {"type": "dynamic", "factor": 3.0}}))
    with pytest.raises(ConfigError, match="rope_type='dynamic' is not converted"):
        convert(source.folder)


def test_a_base_that_is_no_number_is_refused(dense, convert):
    source = dense()
    rewrite(source.folder, "new", {"rope_theta": None})
    with pytest.raises(ConfigError, match="rope_parameters has rope_theta=None"):
        convert(source.folder)


def test_half_turned_heads_are_refused(dense, convert):
    source = dense()
    rewrite(source.folder, "new", {"partial_rotary_factor": 0.5})
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5 is not converted"):
        convert(source.folder)


def test_a_ramp_between_pairs_is_refused(dense, convert):
    source = dense()
    rewrite(source.folder, "new", {**KNOWN["yarn"], "truncate": False})
    with pytest.raises(ConfigError, match="truncate=False of rope_type='yarn'"):
        convert(source.folder)
