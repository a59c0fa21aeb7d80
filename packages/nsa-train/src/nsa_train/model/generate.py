"""Seeded sampling through cached decode, for either attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_train.data.tokenizer import Tokenizer
from nsa_train.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Tensor],
    *,
    tokenizer: Tokenizer,
    num_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[Tensor]:
    """Return the ids, int64 on the CPU, that follow each of `prompts` `(P_i,)`, each of at least one token.

    One prefill of the padded prompts, then one cached step per token. A continuation ends before the separator or after
    `num_tokens` (>= 1). `temperature` 0 takes the likeliest token. Equal seeds give equal text.
    """
    was_training, device = model.training, model.embedding.weight.device
    model.eval()
    counts = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.nn.utils.rnn.pad_sequence([prompt.long() for prompt in prompts], batch_first=True, padding_value=tokenizer.pad)
    caches = model.new_caches(len(prompts), ids.shape[1] + num_tokens)
    logits = model(ids.to(device), caches=caches, query_count=counts.to(device, torch.int32))
    logits = logits[torch.arange(len(prompts)), counts - 1]
    generator = torch.Generator().manual_seed(seed)
    drawn = [_draw(logits, tokenizer, temperature, generator)]
    while len(drawn) < num_tokens:
        logits = model(drawn[-1][:, None].to(device), caches=caches)[:, -1]
        drawn.append(_draw(logits, tokenizer, temperature, generator))
    model.train(was_training)
    return [_until(row, tokenizer.separator) for row in torch.stack(drawn, dim=1)]


def _draw(logits: Tensor, tokenizer: Tokenizer, temperature: float, generator: torch.Generator) -> Tensor:
    """Return one id per row of `logits` `(B, V)`, on the CPU; padding is never drawn."""
    logits = logits.float().cpu()
    logits[:, tokenizer.pad] = -torch.inf
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def _until(ids: Tensor, end: int) -> Tensor:
    stops = (ids == end).nonzero()
    return ids[: int(stops[0])] if len(stops) else ids
