"""The page and the JSON hold the records: unpacked again, they are the arrays; no text from outside becomes markup."""

import base64
import io
import json
import re
import zlib
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from nsa_core.config import BlockGeometry
from nsa_train.explore.page import packed_bytes, page_of, write_json
from nsa_train.explore.records import GATE_BINS, Exploration, LayerRecord

SMALL = BlockGeometry(
    compression_block_size=4, compression_stride=2, selection_block_size=8, num_selected_blocks=5, num_local_blocks=2, window_size=8
)
ARRAYS = ("gates", "chosen", "scores-largest", "scores", "mass-largest", "mass")
HOSTILE = ["</script><script>alert(1)</script>", "<!--", "'\"&amp;", "\u2028", "\x00\x1b", "]]>", "東", ""]


@pytest.fixture(scope="module")
def found(made_up: Callable[..., Exploration]) -> Exploration:
    return made_up(83, 3, (4, 2), SMALL)


def facts_of(page: str) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', page, re.DOTALL)
    return dict(json.loads(text))


def array_of(page: str, layer: int, name: str) -> np.ndarray:
    [text] = re.findall(rf'<script type="text/plain" id="layer{layer}-{name}">([^<]*)</script>', page)
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


def candidates_of(flat: np.ndarray, layer: LayerRecord) -> np.ndarray:
    """Return `(S, G, N)` of what the page holds of candidates, 0 elsewhere."""
    assert layer.scores is not None
    whole, first = np.zeros(layer.scores.shape), 0
    for token, own in enumerate(layer.own_blocks()):
        for group in range(whole.shape[1]):
            whole[token, group, : own + 1] = flat[first : first + own + 1]
            first += own + 1
    assert first == len(flat)
    return whole


def as_json(found: Exploration) -> dict[str, Any]:
    file = io.StringIO()
    write_json(found, file)
    return dict(json.loads(file.getvalue()))


def test_the_page_holds_the_choice(found: Exploration) -> None:
    page = page_of(found)
    for layer in found.layers:
        bits = np.unpackbits(array_of(page, layer.index, "chosen").reshape(83, 2, -1), axis=-1, bitorder="little")
        assert layer.block_indices is not None
        for token in range(83):
            for group in range(2):
                chosen = [block for block in layer.block_indices[token, group] if block >= 0]
                assert np.flatnonzero(bits[token, group]).tolist() == chosen


def test_the_page_holds_scores_mass_and_gates_to_a_255th(found: Exploration) -> None:
    page = page_of(found)
    for layer in found.layers:
        for name, values in (("scores", layer.scores), ("mass", layer.dense_mass)):
            assert values is not None
            largest = array_of(page, layer.index, f"{name}-largest").view("<f4").reshape(83, 2, 1)
            np.testing.assert_array_equal(largest, values.max(-1, keepdims=True))
            roots = candidates_of(array_of(page, layer.index, name), layer) / 255
            np.testing.assert_allclose(roots, np.sqrt(values / largest), atol=0.5 / 255 + 1e-6)
        assert layer.gates is not None
        gates = array_of(page, layer.index, "gates").reshape(layer.gates.shape) / 255
        np.testing.assert_allclose(gates, layer.gates, atol=0.5 / 255 + 1e-6)


def test_the_json_holds_the_same(found: Exploration) -> None:
    whole = as_json(found)
    assert whole["format"] == "nsa-explore"
    assert (whole["model"], whole["step"], whole["twin"], whole["num_tokens"]) == ("made-up", 1000, "twin", 83)
    assert whole["token_texts"] == found.pieces
    for layer, said in zip(found.layers, whole["layers"], strict=True):
        assert said["block_indices"] == np.asarray(layer.block_indices).tolist()
        np.testing.assert_allclose(said["gates"], layer.gates, atol=1e-5)
        for name, values in (("scores", layer.scores), ("dense_mass", layer.dense_mass)):
            assert values is not None
            for token, own in enumerate(layer.own_blocks()):
                np.testing.assert_allclose(said[name][token], values[token, :, : own + 1], atol=1e-5)
        assert said["geometry"]["selection_block_size"] == 8
    assert facts_of(page_of(found))["layers"] == [
        {name: value for name, value in layer.items() if name not in ("block_indices", "gates", "scores", "dense_mass")}
        for layer in whole["layers"]
    ]


def test_histograms_count_what_the_arrays_hold(found: Exploration) -> None:
    layer = found.layers[0]
    distances: dict[int, int] = {}
    for token, own in enumerate(layer.own_blocks()):
        for block in np.asarray(layer.block_indices)[token].flatten():
            if own + 1 > 5 and 1 <= block <= own - 2:
                distances[int(own - block)] = distances.get(int(own - block), 0) + 1
    said = layer.distance_histogram()
    assert [(one.first, one.last) for one in said] == [(2**power, 2 ** (power + 1) - 1) for power in range(len(said))]
    assert [one.blocks for one in said] == [sum(distances.get(d, 0) for d in range(one.first, one.last + 1)) for one in said]
    gates = np.asarray(layer.gates)[3:, :, 1]
    assert layer.gate_histogram()["slc"] == np.histogram(gates, np.linspace(0, 1, GATE_BINS + 1))[0].tolist()


def test_a_text_whose_tokens_choose_all_they_may_has_no_distances(made_up: Callable[..., Exploration]) -> None:
    assert made_up(40, 1, (4, 2), SMALL).layers[0].distance_histogram() == []


def test_a_token_that_sees_no_compressed_block_has_scores_of_0(found: Exploration) -> None:
    first = found.layers[0]
    assert first.scores is not None
    nothing = attrs.evolve(first, scores=np.where(np.arange(83)[:, None, None] < 3, 0, first.scores).astype(np.float32))
    page = page_of(attrs.evolve(found, layers=[nothing]))
    assert not candidates_of(array_of(page, 0, "scores"), nothing)[:3].any()


def test_no_text_becomes_markup(found: Exploration) -> None:
    page = page_of(attrs.evolve(found, pieces=HOSTILE * 10 + HOSTILE[:3], model="<img src=x onerror=alert(1)>", twin="</script>"))
    plain = page_of(found)
    for mark in ("<script", "</script", "<!--", "<img"):
        assert page.count(mark) == plain.count(mark)
    assert facts_of(page)["token_texts"][:8] == HOSTILE
    assert "<title>&lt;img src=x onerror=alert(1)&gt;, step 1,000" in page


def test_the_page_names_no_other_file(found: Exploration) -> None:
    page = page_of(found)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert not re.findall(r"https?://|\burl\(|@import|\bfetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page


def test_dense_layers_and_layers_without_a_choice_have_a_place(found: Exploration) -> None:
    layers = [
        LayerRecord(index=0),
        attrs.evolve(found.layers[1], branches=("win",), block_indices=None, scores=None, dense_mass=None),
        found.layers[2],
    ]
    mixed = attrs.evolve(found, layers=layers)
    whole = as_json(mixed)
    assert [layer["attention"] for layer in whole["layers"]] == ["dense", "nsa", "nsa"]
    assert [layer.get("num_blocks") for layer in whole["layers"]] == [None, 0, 11]
    assert [layer["block_indices"] is None for layer in whole["layers"]] == [True, True, False]
    assert re.findall(r'id="(layer\d-[\w-]+)"', page_of(mixed)) == [
        "layer1-gates",
        *(f"layer2-{name}" for name in ARRAYS),
    ]


@pytest.mark.parametrize("num_tokens", [1, 8, 83])
def test_the_size_of_a_page_is_known_beforehand(num_tokens: int, made_up: Callable[..., Exploration]) -> None:
    page = page_of(made_up(num_tokens, 1, (4, 2), SMALL))
    real = sum(len(array_of(page, 0, name)) for name in ARRAYS)
    assert packed_bytes(num_tokens, num_heads=4, num_kv_heads=2, block_size=8, has_twin=True) == pytest.approx(real, rel=0.1, abs=16)
