"""`nsa-train explore`: open the model and the text, check that they fit, and write the page and the JSON."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from nsa_train.checkpoint.models import OpenedModel, open_model, require_twin
from nsa_train.errors import ConfigError
from nsa_train.explore.collect import collect_layers
from nsa_train.explore.page import packed_bytes, page_of, write_json
from nsa_train.explore.records import Exploration
from nsa_train.explore.text import pieces_of, read_text, token_ids
from nsa_train.files import written_whole

MOST_PACKED = 192 * 2**20
"""Maximum bytes of a page's arrays before compression: a browser holds all of them."""


def explore_text(
    checkpoint: Path, *, text: Path, out: Path, json: Path | None, twin: Path | None, tokens: int | None, say: Callable[[str], None]
) -> list[str]:
    """Write the page of `text` to `out`, and its JSON to `json` if that is not None; return a line about each file.

    `tokens`: the maximum number of tokens; None: all of the text. Nothing is written unless everything can be written. `say` gets a line about
    each checkpoint that was skipped.

    Raises:
        ConfigError: for an unsuitable text, model or twin.
        CheckpointError: if a model is damaged.
        TrainError: if a model's numbers are not finite.
    """
    content = read_text(text)
    opened = open_model(checkpoint, say=say)
    if not opened.decoder.sparse_layers:
        raise ConfigError(
            f"CHECKPOINT={str(checkpoint)!r} has {len(opened.decoder.blocks)} dense layers and none of NSA (only those choose blocks); "
            "name an NSA model, and this one as --twin"
        )
    ids = _checked_ids(content, opened, text, tokens)
    dense = None if twin is None else open_model(twin, say=say)
    if dense is not None:
        alike = torch.equal(token_ids(content, dense.tokenizer, text)[: len(ids)], ids)
        require_twin(dense, opened, num_tokens=len(ids), reads_alike=alike)
    _require_room(opened, text, len(ids), has_twin=dense is not None)
    found = Exploration(
        model=_name_of(checkpoint, opened),
        step=opened.step,
        twin=None if twin is None or dense is None else _name_of(twin, dense),
        token_ids=ids.tolist(),
        pieces=pieces_of(ids.tolist(), opened.tokenizer),
        layers=collect_layers(opened.decoder, ids, twin=None if dense is None else dense.decoder),
    )
    page = page_of(found)
    with ExitStack() as stack:
        if json is not None:
            with stack.enter_context(written_whole(json)).open("w", encoding="utf-8") as file:
                write_json(found, file)
        stack.enter_context(written_whole(out)).write_text(page, encoding="utf-8")
    sizes = f"{len(ids):,} tokens, {len(found.layers)} layers"
    return [f"{path} ({sizes}, {path.stat().st_size / 2**20:.1f} MiB)" for path in (out, json) if path is not None]


def _name_of(path: Path, opened: OpenedModel) -> str:
    """Return the name of a run or folder; for a checkpoint, the name of its run."""
    is_step = opened.step is not None and opened.path.resolve() == path.resolve()
    return path.resolve().parents[1].name if is_step else path.resolve().name


def _checked_ids(content: bytes, opened: OpenedModel, text: Path, tokens: int | None) -> Tensor:
    """Return the ids of the tokens to look at."""
    most = opened.max_position
    if tokens is not None and tokens > most:
        raise ConfigError(f"--tokens={tokens:,} is above the {most:,} tokens that the model is meant for; use --tokens {most}")
    ids = token_ids(content, opened.tokenizer, text)
    if tokens is None and len(ids) > most:
        raise ConfigError(
            f"--text={str(text)!r} has {len(ids):,} tokens (the model is meant for {most:,} at most); use --tokens {most} for the first ones"
        )
    return ids[:tokens]


def _require_room(opened: OpenedModel, text: Path, num_tokens: int, *, has_twin: bool) -> None:
    """Raise ConfigError if the page would hold more than a browser should."""

    def needed(count: int) -> int:
        return sum(
            packed_bytes(
                count,
                num_heads=layer.config.num_heads,
                num_kv_heads=layer.config.num_kv_heads,
                block_size=layer.config.geometry.selection_block_size,
                has_twin=has_twin,
            )
            for layer in opened.decoder.sparse_layers
        )

    if needed(num_tokens) > MOST_PACKED:
        fitting = num_tokens
        while needed(fitting) > MOST_PACKED:
            fitting = fitting * 3 // 4
        raise ConfigError(
            f"--text={str(text)!r}: {num_tokens:,} tokens would make a page of {needed(num_tokens) / 2**20:,.0f} MiB "
            f"(at most {MOST_PACKED / 2**20:.0f}; it grows with their square); use --tokens {fitting}"
        )
