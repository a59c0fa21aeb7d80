"""Arguments of `forward` and `generate` that a model of NSA cannot take, refused by name."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nsa_core.errors import InputError
from nsa_transformers.cache import NSAModelCache

WORKING_CACHES = (None, "dynamic", "static")
"""The values of `cache_implementation` that `generate` takes."""


def require_positions_of_packing(keywords: Mapping[str, Any], positions: Tensor | None) -> None:
    """Raise InputError if `keywords` describe packed sequences for FlashAttention without `position_ids`."""
    if positions is None and keywords.get("cu_seq_lens_q") is not None:
        raise InputError(
            "cu_seq_lens_q came without position_ids (packed sequences are found where positions start again at 0, or they would see one another); "
            "pass position_ids"
        )


def require_no_attentions(asked: bool | None) -> None:
    """Raise InputError if `output_attentions` is requested."""
    if asked:
        raise InputError(
            "output_attentions=True has nothing to give (no layer of NSA has a matrix of attention, its branches see blocks and a window); "
            "leave it out, or look with nsa-train explore"
        )


def require_batch(ids: Tensor | None, embedded: Tensor | None) -> None:
    """Raise InputError unless `ids` are None or `(B, S)`, and `embedded` tokens None or `(B, S, hidden_size)`."""
    for name, x, layout in (("input_ids", ids, ("B", "S")), ("inputs_embeds", embedded, ("B", "S", "hidden_size"))):
        if x is not None and x.dim() != len(layout):
            raise InputError(
                f"{name} has shape {tuple(x.shape)} (the layout is ({', '.join(layout)}), a row for each sequence); use {name}.unsqueeze(0) for one"
            )


def require_left_padding(mask: Tensor | None) -> None:
    """Raise InputError if the last token of a prompt is padding, so that no token can follow it; waits for the mask's device."""
    if mask is not None and mask.dim() == 2 and mask.shape[1] and bool((is_padding := mask[:, -1] == 0).any()):
        raise InputError(
            f"attention_mask ends with padding in row {int(is_padding.int().argmax())} (new tokens follow the last column); "
            "pad prompts on the left, with padding_side='left'"
        )


def require_working_cache(kind: str | None) -> None:
    """Raise InputError for a `cache_implementation` that cannot hold the stores of NSA."""
    if kind not in WORKING_CACHES:
        raise InputError(
            f"cache_implementation={kind!r} cannot hold NSA (its branches have their own stores, which are neither offloaded, quantized nor "
            "paged by transformers); use 'dynamic' or 'static'"
        )


def require_own_drafts(early_exit: int | None) -> None:
    """Raise InputError if `early_exit` asks for drafts from the model's own first layers."""
    if early_exit is not None:
        raise InputError(
            f"assistant_early_exit={early_exit} is not supported (this model has no output layer behind its layer {early_exit}); "
            "use assistant_model or prompt_lookup_num_tokens"
        )


def require_new_tokens(cache: Any, ids: Tensor) -> None:
    """Raise InputError if `cache` holds the whole prompts `ids` `(B, S)`, so that no token is left for the first step."""
    if isinstance(cache, NSAModelCache) and (held := int(cache.get_seq_length())) >= ids.shape[1]:
        raise InputError(
            f"past_key_values holds {held} tokens, the prompt has {ids.shape[1]} (it is the whole text, and its tokens behind those held are new); "
            f"use past_key_values.crop({ids.shape[1] - 1 - held}) or a longer prompt"
        )


def require_known_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise InputError if `ids` name tokens beyond the vocabulary; waits for their device."""
    if ids.numel() and bool(((ids < 0) | (ids >= vocab_size)).any()):
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise InputError(f"input_ids holds {wrong} (the vocabulary has ids 0 .. {vocab_size - 1}); use the tokenizer of this model")


def require_own_cache(cache: Any, described: str) -> None:
    """Raise InputError unless `cache` is an `NSAModelCache` for the layers that `described_layers` describes."""
    if not isinstance(cache, NSAModelCache):
        raise InputError(
            f"past_key_values is a {type(cache).__name__} (it holds one K and V per layer, NSA has stores per branch); "
            "leave it out, or use NSAModelCache(model.config)"
        )
    if cache.described != described:
        raise InputError(
            "past_key_values was built for layers of another model (all that defines a layer must be equal); use NSAModelCache(model.config)"
        )
