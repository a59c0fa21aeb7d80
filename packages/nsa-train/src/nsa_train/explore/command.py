"""`nsa-train explore`: open the model and the text, check that they fit, and write the page and the JSON."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from attrs import frozen
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
Say = Callable[[str], None]


@frozen(kw_only=True)
class Asked:
    """The arguments of the command."""

    checkpoint: Path
    text: Path
    out: Path
    json: Path | None = None
    twin: Path | None = None
    tokens: int | None = None
    """Maximum number of tokens; None: all of the text."""


def explore_text(asked: Asked, *, say: Say) -> list[str]:
    """Write the page of a text, and its JSON if requested; return a line about each file.

    Nothing is written unless everything can be written. `say` gets a line about each checkpoint that was skipped.

    Raises:
        ConfigError: for an unsuitable text, model or twin.
        CheckpointError: if a model is damaged.
        TrainError: if a model's numbers are not finite.
    """
    content = read_text(asked.text)
    opened = open_model(asked.checkpoint, say=say)
    if not opened.decoder.sparse_layers:
        raise ConfigError(
            f"CHECKPOINT={str(asked.checkpoint)!r} has {len(opened.decoder.blocks)} dense layers and none of NSA (only those choose blocks); "
            "name an NSA model, and this one as --twin"
        )
    ids = _checked_ids(content, opened, asked)
    twin = None
    if asked.twin is not None:
        twin = open_model(asked.twin, say=say)
        alike = torch.equal(token_ids(content, twin.tokenizer, asked.text)[: len(ids)], ids)
        require_twin(twin, opened, num_tokens=len(ids), reads_alike=alike)
    _require_room(opened, asked, len(ids))
    layers = collect_layers(opened.decoder, ids, twin=None if twin is None else twin.decoder)
    found = Exploration(
        model=_name_of(asked.checkpoint, opened),
        step=opened.step,
        twin=None if asked.twin is None or twin is None else _name_of(asked.twin, twin),
        token_ids=ids.tolist(),
        pieces=pieces_of(ids.tolist(), opened.tokenizer),
        layers=layers,
    )
    return _written(found, asked)


def _written(found: Exploration, asked: Asked) -> list[str]:
    """Write the files, both or none, and return a line about each."""
    page = page_of(found)
    with ExitStack() as stack:
        if asked.json is not None:
            with stack.enter_context(written_whole(asked.json)).open("w", encoding="utf-8") as file:
                write_json(found, file)
        stack.enter_context(written_whole(asked.out)).write_text(page, encoding="utf-8")
    sizes = f"{len(found.token_ids):,} tokens, {len(found.layers)} layers"
    return [f"{path} ({sizes}, {path.stat().st_size / 2**20:.1f} MiB)" for path in (asked.out, asked.json) if path is not None]


def _name_of(path: Path, opened: OpenedModel) -> str:
    """Return the name of a run or folder; for a checkpoint, the name of its run."""
    is_step = opened.step is not None and opened.path.resolve() == path.resolve()
    return path.resolve().parents[1].name if is_step else path.resolve().name


def _checked_ids(content: bytes, opened: OpenedModel, asked: Asked) -> Tensor:
    """Return the ids of the tokens to look at."""
    most = opened.max_position
    if asked.tokens is not None and asked.tokens > most:
        raise ConfigError(f"--tokens={asked.tokens:,} is above the {most:,} tokens that the model is meant for; use --tokens {most}")
    ids = token_ids(content, opened.tokenizer, asked.text)
    if asked.tokens is None and len(ids) > most:
        raise ConfigError(
            f"--text={str(asked.text)!r} has {len(ids):,} tokens (the model is meant for {most:,} at most); use --tokens {most} for the first ones"
        )
    return ids[: asked.tokens]


def _require_room(opened: OpenedModel, asked: Asked, num_tokens: int) -> None:
    """Raise ConfigError if the page would hold more than a browser should."""

    def needed(count: int) -> int:
        return sum(
            packed_bytes(
                count,
                num_heads=layer.config.num_heads,
                num_kv_heads=layer.config.num_kv_heads,
                block_size=layer.config.geometry.selection_block_size,
                has_twin=asked.twin is not None,
            )
            for layer in opened.decoder.sparse_layers
        )

    if needed(num_tokens) > MOST_PACKED:
        fitting = num_tokens
        while needed(fitting) > MOST_PACKED:
            fitting = fitting * 3 // 4
        raise ConfigError(
            f"--text={str(asked.text)!r}: {num_tokens:,} tokens would make a page of {needed(num_tokens) / 2**20:,.0f} MiB "
            f"(at most {MOST_PACKED / 2**20:.0f}; it grows with their square); use --tokens {fitting}"
        )
