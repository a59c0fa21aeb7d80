"""Seeded sampling through cached decode, for either attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_train.data.tokenizer import Tokenizer
from nsa_train.model.decoder import Decoder

BROKEN = -1
"""Replaces an id that could not be drawn."""


class Continuation(NamedTuple):
    """The continuation of one prompt."""

    ids: Tensor
    """int64 `(N,)`, on the CPU, without the separator that ended the text."""
    is_cut: bool = False
    """True if it ends because the logits were not finite."""


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Tensor],
    *,
    tokenizer: Tokenizer,
    num_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[Continuation]:
    """Return the continuation of each of `prompts` `(P_i,)`, each of at least one token.

    One prefill of the padded prompts is followed by one cached step per token. A continuation ends before the separator, if the
    logits are not finite, or after `num_tokens` (>= 1). `temperature` 0 takes the most likely token. Equal seeds give equal text.
    """
    was_training, device = model.training, model.embedding.weight.device
    model.eval()
    counts = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.nn.utils.rnn.pad_sequence([prompt.long() for prompt in prompts], batch_first=True, padding_value=tokenizer.pad)
    caches = model.new_caches(len(prompts), ids.shape[1] + num_tokens)
    logits = model(ids.to(device), caches=caches, query_count=counts.to(device, torch.int32))
    logits = logits[torch.arange(len(prompts)), counts - 1]
    generator = torch.Generator().manual_seed(seed)
    drawn = [draw(logits, tokenizer, temperature, generator)]
    # continue to the last token even if all have ended: with shards, every rank takes part in every forward pass
    while len(drawn) < num_tokens:
        logits = model(drawn[-1].clamp(min=0)[:, None].to(device), caches=caches)[:, -1]
        drawn.append(draw(logits, tokenizer, temperature, generator))
    model.train(was_training)
    return [_ended(row, tokenizer.separator) for row in torch.stack(drawn, dim=1)]


def draw(logits: Tensor, tokenizer: Tokenizer, temperature: float, generator: torch.Generator, top_p: float = 1.0) -> Tensor:
    """Return one id per row of `logits` `(B, V)`, on the CPU; padding is never drawn; -1 if they are not finite."""
    logits = logits.float().cpu()
    is_broken = ~logits.isfinite().all(-1)
    logits[is_broken] = 0
    logits[:, tokenizer.pad] = -torch.inf
    if temperature == 0:
        ids = logits.argmax(-1)
    else:
        # the largest becomes 0, so that no quotient overflows
        shares = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
        ids = torch.multinomial(_likeliest(shares, top_p), 1, generator=generator)[:, 0]
    return ids.masked_fill(is_broken, BROKEN)


def _likeliest(shares: Tensor, top_p: float) -> Tensor:
    """Return the probabilities `shares` `(B, V)` with 0 for all except the likeliest ids whose probabilities add up to `top_p`."""
    if top_p >= 1:
        return shares
    ordered, order = shares.sort(-1, descending=True)
    is_behind = ordered.cumsum(-1) - ordered >= top_p
    return shares.masked_fill(torch.zeros_like(is_behind).scatter(-1, order, is_behind), 0)


def _ended(ids: Tensor, separator: int) -> Continuation:
    stops = ((ids == separator) | (ids == BROKEN)).nonzero()
    if not len(stops):
        return Continuation(ids)
    return Continuation(ids[: int(stops[0])], is_cut=bool(ids[stops[0]] == BROKEN))
