"""Check the arguments of `forward` and `generate`, and refuse those that an NSA model does not support; errors name the argument."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nsa_core.checks import is_size
from nsa_core.errors import InputError, type_of
from nsa_transformers.cache import NSAModelCache
from nsa_transformers.layout import INTEGERS
from nsa_transformers.weights import WORKING_CACHES

CALLERS = (
    *("output_attentions", "return_dict", "cache_position", "num_items_in_batch", "ignore_index", "shift_labels"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "is_first_iteration", "tokenizer"),
)
"""Keywords outside the signature of `forward` that `generate`, Trainer and its collators pass."""
IGNORED = -100
"""Label of a token that the loss leaves out."""


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


def require_tensors(**given: Any) -> None:
    """Raise InputError if one of the arguments `given` (name -> value) is neither a tensor nor None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise InputError(f"{name} is {type_of(value)} (the rule: a tensor, on the model's device); use torch.tensor({name})")


def require_kept(logits_to_keep: Any, tokens: Any) -> None:
    """Raise InputError unless `logits_to_keep` is a number of tokens or a tensor of columns of `tokens` `(B, S)`, read only on a CPU."""
    if not isinstance(logits_to_keep, Tensor):
        if not is_size(logits_to_keep, 0):
            raise InputError(f"logits_to_keep={logits_to_keep!r} is no number of last tokens (the rule: an integer >= 0, 0 for all); use 1")
        return
    if logits_to_keep.dim() != 1 or logits_to_keep.dtype not in INTEGERS:
        raise InputError(
            f"logits_to_keep is {logits_to_keep.dtype} of shape {tuple(logits_to_keep.shape)} (the rule: a number of last tokens, or the columns "
            "to keep in an int64 tensor of one dimension); use torch.tensor([0, 5])"
        )
    if logits_to_keep.device.type == "cpu" and isinstance(tokens, Tensor) and tokens.dim() > 1 and not torch.compiler.is_compiling():
        num_tokens = tokens.shape[1]
        is_outside = (logits_to_keep < -num_tokens) | (logits_to_keep >= num_tokens)
        if bool(is_outside.any()):
            raise InputError(
                f"logits_to_keep holds column {int(logits_to_keep[is_outside][0])} (the rule: -{num_tokens} .. {num_tokens - 1} for "
                f"{num_tokens} tokens); leave it out"
            )


def require_batch(ids: Any, embedded: Any, hidden_size: int) -> None:
    """Raise InputError unless `ids` is None or integers `(B, S)`, and `embedded` is None or embedded tokens `(B, S, hidden_size)`."""
    for name, x, layout in (("input_ids", ids, ("B", "S")), ("inputs_embeds", embedded, ("B", "S", "hidden_size"))):
        if x is not None and not isinstance(x, Tensor):
            raise InputError(f"{name} is {type_of(x)} (the layout is ({', '.join(layout)})); use torch.tensor({name})")
        if x is not None and x.dim() != len(layout):
            raise InputError(
                f"{name} has shape {tuple(x.shape)} (the layout is ({', '.join(layout)}), a row for each sequence); use {name}.unsqueeze(0) for one"
            )
    if ids is not None and ids.dtype not in INTEGERS:
        raise InputError(f"input_ids is {ids.dtype} (ids are int32 or int64); use input_ids.long()")
    if embedded is not None and not embedded.is_floating_point():
        raise InputError(f"inputs_embeds is {embedded.dtype} (embedded tokens are floating point); pass ids as input_ids")
    if embedded is not None and embedded.shape[2] != hidden_size:
        raise InputError(
            f"inputs_embeds has width {embedded.shape[2]} (the model's hidden_size is {hidden_size}); use model.get_input_embeddings()(ids)"
        )


def require_labels(labels: Tensor, tokens: Tensor, vocab_size: int, logits_to_keep: int | Tensor, ignored: int) -> None:
    """Raise InputError unless `labels` are int64 of the shape `(B, S)` of `tokens`, all logits are kept, and (on a CPU) the ids are known."""
    if labels.shape != tokens.shape[:2] or labels.dtype != torch.int64:
        raise InputError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)} (a token's label is its own id, int64 {tuple(tokens.shape[:2])}: the loss "
            "shifts them); use input_ids.clone(), with -100 where a token does not count"
        )
    if not isinstance(logits_to_keep, int) or logits_to_keep:
        raise InputError(
            f"logits_to_keep={logits_to_keep} came with labels (the loss needs the logits of all tokens); leave one of them out"
        )
    is_wrong = (labels != ignored) & ((labels < 0) | (labels >= vocab_size))
    if labels.device.type == "cpu" and bool(is_wrong.any()):
        raise InputError(
            f"labels hold {int(labels[is_wrong][0])} (the vocabulary has ids 0 .. {vocab_size - 1}, and {ignored} marks what does not count); "
            "use the tokenizer of this model"
        )


def labels_that_follow_tokens(labels: Tensor, mask: Tensor, ignored: int) -> Tensor:
    """Return `labels` `(B, S)` with `ignored` for tokens right after padding in `mask` `(B, past + S)`.

    Padding must not predict such a token, because padding attends to the whole row.
    """
    follows_padding = mask[:, -labels.shape[1] : -1] == 0
    return torch.cat([labels[:, :1], labels[:, 1:].masked_fill(follows_padding, ignored)], 1)


def share_of_labels(labels: Tensor, asked: Tensor, ignored: int) -> Tensor:
    """Return the share of the labels `asked` `(B, S)` that `labels` still has, a scalar tensor; 1 if none is left.

    The first column does not count, because the loss shifts labels by one.
    """
    left, all_of_them = ((x[:, 1:] != ignored).sum() for x in (labels, asked))
    return torch.where(left > 0, left / all_of_them, 1.0)


def require_cache_position(positions: Tensor | None, past: int, num_tokens: int) -> None:
    """Raise InputError unless `positions` `(S,)`, if given, are the columns `past` .. past + S - 1."""
    if positions is None:
        return
    expected = torch.arange(past, past + num_tokens, device=positions.device)
    if positions.shape != expected.shape or bool((positions != expected).any()):
        raise InputError(
            f"cache_position is {positions.tolist()[:4]} ... (after {past} tokens, the next are at {past} .. {past + num_tokens - 1}); leave it out"
        )


def warn_of_ignored(keywords: Mapping[str, Any]) -> None:
    """Warn of `keywords` of `forward` that the model does not read, except those that Transformers itself passes."""
    if ignored := sorted(name for name, value in keywords.items() if value is not None and name not in CALLERS):
        warnings.warn(f"forward ignores {', '.join(ignored)} (no argument of this model); leave it out", stacklevel=3)


def require_mask_of(mask: Any, tokens: Tensor, held: int) -> None:
    """Raise InputError unless `mask` has the shape `(B, S)` of the prompts `tokens`, or `(B, held + S)` if they follow `held` cached tokens."""
    batch_size, num_tokens = tokens.shape[:2]
    if not isinstance(mask, Tensor) or tuple(mask.shape) not in ((batch_size, num_tokens), (batch_size, held + num_tokens)):
        found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        after_cache = f", or {(batch_size, held + num_tokens)} if the prompts follow the {held} cached tokens" if held else ""
        raise InputError(
            f"attention_mask has {found} (the layout is (B, S) = {(batch_size, num_tokens)}, 1 where a token of the prompts is valid{after_cache}); "
            "use the mask of the tokenizer"
        )


def require_cache_used(cache: Any, use_cache: bool | None) -> None:
    """Raise InputError if `use_cache=False` comes with a `cache`, whose tokens would be ignored."""
    if cache is not None and use_cache is False:
        raise InputError("use_cache=False came with past_key_values (the tokens that it holds would be left out); leave one of them out")


def require_left_padding(mask: Tensor | None) -> None:
    """Raise InputError if a prompt ends with padding, because new tokens must follow a valid token; waits for the mask's device."""
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


def require_chunks(chunk_size: Any, embedded: Any) -> None:
    """Raise InputError if `chunk_size` is no integer above 0, or if `embedded` tokens would be processed in chunks."""
    if chunk_size is None:
        return
    if not is_size(chunk_size, 1):
        raise InputError(
            f"prefill_chunk_size={chunk_size!r} (the rule: an integer of at least 1); use 1024, or None for the whole prompt at once"
        )
    if embedded is not None:
        raise InputError(
            f"prefill_chunk_size={chunk_size} came with inputs_embeds (Transformers cuts only input_ids into chunks); leave one of them out"
        )


def require_new_tokens(held: int, tokens: Tensor) -> None:
    """Raise InputError if the `held` cached tokens are the whole prompts `tokens` `(B, S)`, so that no token is left for the first step."""
    if held >= tokens.shape[1]:
        raise InputError(
            f"past_key_values holds {held} tokens, the prompt has {tokens.shape[1]} (without an attention_mask of all tokens it is the whole text, "
            f"and its tokens behind those held are new); use past_key_values.crop({tokens.shape[1] - 1 - held}) or a longer prompt, or pass that mask"
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
            f"past_key_values is {type_of(cache)} (it holds one K and V per layer, NSA has stores per branch); "
            "leave it out, or use NSAModelCache(model.config); with PEFT, use LoRA in place of prefix tuning"
        )
    if cache.described != described:
        raise InputError(
            "past_key_values was built for layers of another model (all that defines a layer must be equal); use NSAModelCache(model.config)"
        )
