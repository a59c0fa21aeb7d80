"""Greedy decoding and sampling over a static cache on a GPU, in which the host starts a step before it knows if the text has ended.

The loop of Transformers waits for the GPU after each token, and only then starts the next step. Here the host reads the results of a token while
the next step runs. If all sequences have ended, that step was not needed, and its row is removed from a cache that the caller passed.
"""

from typing import Any

import torch
from torch import Tensor

from nsa_transformers.cache import NSAModelCache


def may_decode_ahead(model_kwargs: dict[str, Any], generation_config: Any, device: torch.device) -> bool:
    """Return True for a static cache on a CUDA GPU from which `crop` can remove a row, if the caller asks for the tokens only."""
    cache = model_kwargs.get("past_key_values")
    if device.type != "cuda" or not isinstance(cache, NSAModelCache) or not cache.is_static:
        return False
    is_plain = not (generation_config.return_dict_in_generate or generation_config.is_assistant or generation_config.compile_config)
    return is_plain and bool(cache.options["keep_raw"] or cache.options["max_rollback"])


class _Results:
    """The results of one step in host memory, copied there while the next step runs."""

    def __init__(self, batch_size: int, device: torch.device, streamer: Any) -> None:
        self.streamer = streamer
        on_gpu = device.type == "cuda"
        self.has_ended = torch.zeros((), dtype=torch.bool, pin_memory=on_gpu)
        self.tokens = torch.zeros(batch_size, dtype=torch.int64, pin_memory=on_gpu)
        # with a CPU the copy is complete at once
        self.copied = torch.cuda.Event() if on_gpu else None

    def start_copy(self, unfinished: Tensor, tokens: Tensor) -> None:
        """Start to copy `tokens` int64 `(B,)`, and a flag that is True if no sequence is `unfinished` (bool `(B,)`)."""
        self.has_ended.copy_(~unfinished.any(), non_blocking=True)
        if self.streamer is not None:
            self.tokens.copy_(tokens, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def read(self) -> bool:
        """Wait for the copy, stream its tokens, and return True if all sequences have ended."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.streamer is not None:
            self.streamer.put(self.tokens.clone())
        return bool(self.has_ended)


def decode_ahead(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, streamer: Any, **model_kwargs: Any
) -> Tensor:
    """Return the prompts `input_ids` `(B, S)` with their continuations: what `GenerationMixin._sample` returns for these arguments."""
    cache, most = model_kwargs["past_key_values"], stopping_criteria.max_length
    has_end_token = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
    unfinished = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    results = _Results(len(input_ids), input_ids.device, streamer)
    logits = model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1]
    while True:
        scores = logits_processor(input_ids, logits.to(input_ids.device, torch.float32))
        tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1) if generation_config.do_sample else scores.argmax(-1)
        if has_end_token:
            tokens = torch.where(unfinished, tokens, generation_config._pad_token_tensor.to(tokens.device))
        input_ids = torch.cat([input_ids, tokens[:, None]], 1)
        unfinished = unfinished & ~stopping_criteria(input_ids, None)
        results.start_copy(unfinished, tokens)
        if most is not None and input_ids.shape[1] >= most:
            results.read()
            break
        logits = model(tokens[:, None], past_key_values=cache, return_dict=True).logits[:, -1]
        if results.read():
            if getattr(cache, "_is_user_defined", False):
                cache.crop(-1)
            break
    if streamer is not None:
        streamer.end()
    return input_ids
