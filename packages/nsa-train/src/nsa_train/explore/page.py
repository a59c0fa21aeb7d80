"""The explorer's files: one HTML page that needs no other file and no network, and the same records as JSON.

The page holds each array as compressed bytes in base64, with one script element for each layer and name; its script unpacks a layer when it
shows it. Scores, mass and gates take one byte each in the page; the JSON has their numbers.
"""

import base64
import html
import json
import zlib
from importlib.resources import files
from string import Template
from typing import TextIO

import numpy as np

from nsa_train.explore.records import Exploration, Floats, LayerRecord, layer_arrays, layer_facts, model_facts

DECIMALS = 5
"""Decimals of the numbers in JSON."""
LEVELS = 255
SCRIPTS = ("arrays.js", "drawing.js", "panel.js", "page.js")
"""The scripts of the page, in the order of their dependencies."""


def packed_arrays(layer: LayerRecord) -> dict[str, bytes]:
    """Return name -> bytes of the arrays that a page holds for a layer, in the order token, KV head, block.

    `chosen` has a bit for each block, lowest first, in whole bytes for each KV head. `scores` and `mass` have only the candidates of each
    token, blocks 0 .. own. A value is divided by the largest one of its token and KV head; its byte is 255 times the square root of that
    quotient. The largest values are in `scores-largest` and `mass-largest`, as little-endian float32. `gates` are 255 times a gate.
    """
    found = {}
    if layer.gates is not None:
        found["gates"] = _levels(layer.gates).tobytes()
    if layer.block_indices is not None:
        found["chosen"] = np.packbits(layer.chosen(), axis=-1, bitorder="little").tobytes()
    for name, values in (("scores", layer.scores), ("mass", layer.dense_mass)):
        if values is not None:
            largest = values.max(-1)
            found[f"{name}-largest"] = largest.astype("<f4").tobytes()
            levels = _levels(np.sqrt(values / np.maximum(largest, np.finfo(np.float32).tiny)[..., None]))
            is_candidate = np.arange(levels.shape[2]) <= layer.own_blocks()[:, None]
            found[name] = levels[np.broadcast_to(is_candidate[:, None], levels.shape)].tobytes()
    return found


def packed_bytes(num_tokens: int, *, num_heads: int, num_kv_heads: int, block_size: int, has_twin: bool) -> int:
    """Return the number of bytes of a choosing layer's packed arrays before compression."""
    num_blocks = -(-num_tokens // block_size)
    rows = num_tokens * num_kv_heads
    # half of all pairs of a token and a block are candidates
    return 3 * num_tokens * num_heads + rows * -(-num_blocks // 8) + (1 + has_twin) * rows * (4 + (num_blocks + 1) // 2)


def page_of(found: Exploration) -> str:
    """Return the page as HTML; every text from outside is escaped."""
    folder = files("nsa_train.explore")
    template, style, *scripts = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS))
    facts = json.dumps(model_facts(found) | {"layers": [layer_facts(layer) for layer in found.layers]})
    # safe in a script element: no end tag, no comment, and no separator that old JavaScript reads as a new line
    facts = facts.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    arrays = [
        f'<script type="text/plain" id="layer{layer.index}-{name}">{base64.b64encode(zlib.compress(content)).decode()}</script>'
        for layer in found.layers
        for name, content in packed_arrays(layer).items()
    ]
    step = "" if found.step is None else f", step {found.step:,}"
    return Template(template).substitute(
        title=html.escape(f"{found.model}{step}"), style=style, script="\n".join(scripts), facts=facts, arrays="\n".join(arrays)
    )


def write_json(found: Exploration, file: TextIO) -> None:
    """Write the records as one JSON object, layer after layer, so that only one layer's numbers are in memory as lists."""
    file.write(json.dumps(model_facts(found))[:-1] + ', "layers": [')
    for number, layer in enumerate(found.layers):
        file.write(("" if number == 0 else ",") + "\n" + json.dumps(layer_facts(layer))[:-1])
        file.writelines(f', "{name}": {json.dumps(values, separators=(",", ":"))}' for name, values in layer_arrays(layer, DECIMALS))
        file.write("}")
    file.write("]}\n")


def _levels(shares: Floats) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Return 255 times each share, rounded; a share that rounding took above 1 is 1."""
    return np.rint(np.clip(shares, 0, 1) * LEVELS).astype(np.uint8)
