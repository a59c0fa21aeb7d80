"""Layers of sliding attention: they become windows of the same size, or are refused."""

import json
import tomllib

import pytest

from nsa_core.errors import ConfigError

CLOSE = 1e-4
WINDOW = 7
ONLY_WINDOW = {"branches": ["win"]}
SHORT = {"compression_block_size": 4, "compression_stride": 2, "selection_block_size": 8, "num_selected_blocks": 3}


@pytest.mark.parametrize("gates", ["open", "selected"])
@pytest.mark.parametrize("layers", [[ONLY_WINDOW], [{**ONLY_WINDOW, "window_size": WINDOW}]], ids=["the source's size", "a given size"])
def test_windows_are_those_of_mistral_at_any_length(dense, convert, difference, ids, layers, gates):
    source = dense("Mistral", sliding_window=WINDOW)
    found = convert(source.folder, layers=layers, gates=gates, nsa=SHORT)
    assert difference(source.model, found.model, ids(60)) < CLOSE
    assert found.model.config.layers[0]["window_size"] == WINDOW


def test_a_window_of_one_more_token_would_differ(dense, convert, difference, ids):
    source = dense("Mistral", sliding_window=WINDOW)
    found = convert(source.folder, layers=[ONLY_WINDOW], nsa=SHORT)
    content = json.loads((found.folder / "config.json").read_text())
    content["layers"][0]["window_size"] = WINDOW + 1
    (found.folder / "config.json").write_text(json.dumps(content))
    wider = type(found.model).from_pretrained(found.folder).eval()
    assert difference(source.model, wider, ids(60)) > 100 * CLOSE


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_full_and_sliding_layers_of_qwen_keep_their_kinds(dense, convert, difference, ids, family):
    source = dense(family, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    found = convert(source.folder, layers=["dense", ONLY_WINDOW], nsa=SHORT)
    assert difference(source.model, found.model, ids(60)) < CLOSE


def test_a_window_that_is_switched_off_is_none(dense, convert):
    source = dense("Qwen2", use_sliding_window=False, sliding_window=WINDOW)
    assert convert(source.folder).model.config.layers is None


@pytest.mark.parametrize("layers", [None, ["dense"], ["nsa"], [ONLY_WINDOW, "nsa"], [{"branches": ["slc", "win"]}]])
def test_a_sliding_layer_that_becomes_anything_else_is_refused(dense, convert, layers):
    source = dense("Mistral", sliding_window=WINDOW)
    with pytest.raises(ConfigError, match=r'^sliding_window=7: .* use --layers \'\[\{branches = \["win"\], window_size = 7\}\]\''):
        convert(source.folder, layers=layers, nsa=SHORT)


@pytest.mark.parametrize("kinds", ["ffss", "fsfs", "ssfs", "ssss"])
def test_the_suggested_pattern_converts_a_model_of_full_and_sliding_layers(dense, convert, difference, ids, kinds):
    names = {"f": "full_attention", "s": "sliding_attention"}
    source = dense(
        "Qwen3", num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, layer_types=[names[kind] for kind in kinds]
    )
    with pytest.raises(ConfigError, match="^sliding_window=7: ") as refused:
        convert(source.folder, nsa=SHORT)
    pattern = tomllib.loads("layers = " + str(refused.value).split("use --layers ")[1].strip("'"))["layers"]
    assert len(pattern) == {"ffss": 4, "fsfs": 2, "ssfs": 4, "ssss": 1}[kinds]
    found = convert(source.folder, nsa=SHORT, layers=pattern, gates="selected")
    # the blocks that a token chooses hold all tokens before it
    assert difference(source.model, found.model, ids(3 * 8)) < CLOSE


@pytest.mark.parametrize("place", ["entry", "table"])
def test_a_window_of_another_size_is_refused(dense, convert, place):
    source = dense("Mistral", sliding_window=WINDOW)
    layers = [{**ONLY_WINDOW, "window_size": 8}] if place == "entry" else [ONLY_WINDOW]
    with pytest.raises(ConfigError, match=r"^sliding_window=7: .* layer 0 has window_size=8; use window_size = 7"):
        convert(source.folder, layers=layers, nsa={**SHORT, **({} if place == "entry" else {"window_size": 8})})


def test_other_kinds_of_layers_are_refused_by_name(dense, convert):
    source = dense("Qwen3")
    path = source.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_types": ["full_attention", "chunked_attention"]}))
    with pytest.raises(ConfigError, match="'chunked_attention'"):
        convert(source.folder)
