"""`NSAModel` and `NSAForCausalLM`: the decoder of nsa-core with the interface of Transformers. Weights have the names of the decoder's weights."""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from nsa_core.decoder import EMBEDDING_STD, Block, Decoder
from nsa_core.errors import InputError
from nsa_transformers.arguments import (
    IGNORED,
    labels_that_follow_tokens,
    require_batch,
    require_cache_position,
    require_cache_used,
    require_chunks,
    require_kept,
    require_known_ids,
    require_labels,
    require_left_padding,
    require_mask_of,
    require_new_tokens,
    require_no_attentions,
    require_own_cache,
    require_own_drafts,
    require_positions_of_packing,
    require_tensors,
    require_working_cache,
    share_of_labels,
    warn_of_ignored,
)
from nsa_transformers.cache import NSAModelCache, described_layers
from nsa_transformers.configuration import NSAModelConfig, attentions
from nsa_transformers.decoding import decode_ahead, may_decode_ahead
from nsa_transformers.layout import (
    move,
    packing_of,
    padding_in_graph,
    padding_of,
    require_marks,
    require_mask_of_past,
    require_no_holes,
    require_positions,
)
from nsa_transformers.weights import Stored

STEP = ("forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Names of the methods that run a step of generation."""


class NSABlock(GradientCheckpointingLayer, Block):
    """A layer of the decoder; after `gradient_checkpointing_enable` it is recomputed in the backward pass."""


class NSAPreTrainedModel(Stored, PreTrainedModel):
    """Base class of NSA models: loading, saving and generation settings."""

    config_class = NSAModelConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[Any] = ["NSABlock"]
    _skip_keys_device_placement: ClassVar[Any] = ["cache", "past_key_values"]
    _input_embed_layer = "embedding"
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[Any] = {"hidden_states": NSABlock}

    def post_init(self) -> None:
        """Finish the construction; modules keep their initial weights."""
        for module in self.modules():
            module._is_hf_initialized = True
        super().post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a resized embedding or output layer like a new one."""
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)


class NSAModel(Decoder, NSAPreTrainedModel):
    """The decoder without its output layer: maps token ids to hidden states."""

    config: NSAModelConfig
    embedding: Any
    post_init: Any
    loss_function: Any

    block = NSABlock
    _keys_to_ignore_on_load_unexpected: ClassVar[Any] = [r"^lm_head\."]

    def __init__(self, config: NSAModelConfig) -> None:
        """Build the layers that `config` describes, with new random weights."""
        super().__init__(config.sizes(), attentions(config), config)
        self._add_head(config)
        self._described = described_layers(config)
        self.post_init()

    def _add_head(self, config: NSAModelConfig) -> None:
        """Build the output layer in a model that has one; here do nothing."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NSAModelCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        has_labels: bool = False,
        output_hidden_states: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return `last_hidden_state` `(B, S, hidden_size)` of `input_ids` `(B, S)`, and `past_key_values` with a cache.

        `attention_mask` `(B, past + S)` is 1 at valid tokens, which must be next to one another. If `position_ids` start again at 0 in a row,
        the row packs several sequences. These do not see one another, and cannot be combined with a cache.

        A pass with a cache records no gradient. `use_cache=True` without `past_key_values` makes a new cache; in training it is ignored, with a
        warning. `use_cache=None` makes a cache if no gradient is recorded, there are no labels and rows are not packed. This cache keeps the
        embedded tokens, and fills its stores only when a step follows, so that the states equal those of a pass without a cache.

        With `output_hidden_states`, `hidden_states` are the embeddings, the output of each layer except the last, and the normed output of
        the last layer. States of valid tokens do not depend on the padding. States at padding are finite, but have no meaning.

        Raises:
            InputError: for an input without a batch dimension, ids beyond the vocabulary (on a CPU), a mask with holes or one that does not
                match the cached tokens, positions that do not count up in steps of 1 from 0 or from the cached tokens, or a cache of another
                model.
            CacheOverflowError: for more tokens than the cache has room for. A static cache on a GPU drops single tokens without an error;
                `past_key_values.check()` then raises it.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("input_ids and inputs_embeds came together or not at all (one of them holds the tokens); pass input_ids")
        require_batch(input_ids, inputs_embeds, self.config.hidden_size)
        require_tensors(attention_mask=attention_mask, position_ids=position_ids, cache_position=kwargs.get("cache_position"))
        require_cache_used(past_key_values, use_cache)
        if not torch.compiler.is_compiling():
            warn_of_ignored(kwargs)
        if input_ids is not None:
            self._check_ids(input_ids)
        require_positions_of_packing(kwargs, position_ids)
        require_no_attentions(kwargs.get("output_attentions") or self.config.output_attentions)
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if 0 in x.shape[:2]:
            raise InputError(f"the batch has shape {tuple(x.shape[:2])} (a pass needs sequences, and a token of each); pass a prompt")
        cache = past_key_values
        if cache is not None:
            self._check_cache(cache)
        else:
            is_learning = torch.is_grad_enabled() and (self.training or has_labels)
            cache = NSAModelCache(self.config) if use_cache and not is_learning else None
            if use_cache and cache is None:
                warnings.warn(
                    "use_cache=True is ignored in training (a pass with a cache records no gradient); leave it out",
                    stacklevel=2,
                )
        self._check_columns(kwargs.get("cache_position"), cache, x)
        if cache is not None:
            return self._step(x, attention_mask, position_ids, cache, output_hidden_states)
        outputs, is_packed = self._whole(x, attention_mask, position_ids, output_hidden_states)
        if use_cache is None and self.config.use_cache and not (has_labels or is_packed or torch.is_grad_enabled()):
            # an evaluation never reads the cache: its stores are filled when a step follows
            outputs.past_key_values = NSAModelCache(self.config)
            outputs.past_key_values.defer(x, attention_mask)
        return outputs

    def _is_learning(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _check_ids(self, ids: Tensor) -> None:
        """Raise InputError for ids beyond the vocabulary. Ids on a GPU are not read here; `generate` reads them."""
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            require_known_ids(ids, self.config.vocab_size)

    def _check_columns(self, columns: Tensor | None, cache: NSAModelCache | None, x: Tensor) -> None:
        """Raise InputError if `columns` (cache_position) are not those of `x`. On a GPU they are not read, because that would wait for the device."""
        if columns is not None and not torch.compiler.is_compiling() and x.device.type == "cpu":
            require_cache_position(columns, 0 if cache is None else int(cache.get_seq_length()), x.shape[1])

    def _check_cache(self, cache: Any) -> None:
        require_own_cache(cache, self._described)
        if self._is_learning():
            raise InputError(
                "past_key_values came in training (a pass with a cache records no gradient); leave it out, or call model.eval()"
            )

    def _whole(
        self, x: Tensor, mask: Tensor | None, positions: Tensor | None, recorded: Any = None
    ) -> tuple[BaseModelOutputWithPast, bool]:
        """Return the outputs for whole sequences, and True if they are packed.

        Padding is moved after the valid tokens of its row, so that causal attention hides it from them.
        """
        batch_size, num_tokens = x.shape[:2]
        padding = padding_of(mask, batch_size, num_tokens, 0)
        if padding is None:
            packing = packing_of(positions, batch_size, num_tokens)
            if packing is None:
                return self._recorded(recorded, x), False
            outputs = self._recorded(recorded, x.flatten(0, 1).unsqueeze(0), *packing)
            return _each(outputs, lambda states: states.view(batch_size, num_tokens, -1)), True
        if positions is not None:
            require_positions(positions, padding, batch_size, num_tokens, None)
        outputs = self._recorded(recorded, move(x, padding.order))
        return _each(outputs, lambda states: move(states, padding.back)), False

    @torch.no_grad()
    def _step(
        self, x: Tensor, mask: Tensor | None, positions: Tensor | None, cache: NSAModelCache, recorded: Any = None
    ) -> BaseModelOutputWithPast:
        """Return the outputs for tokens that follow those in `cache`.

        The mask and the positions of a single token are not read on a GPU, because the host would wait for them.
        """
        if cache.deferred is not None:
            deferred, cache.deferred = cache.deferred, None
            self._step(deferred.x, deferred.mask, None, cache)
        batch_size, num_tokens = x.shape[:2]
        cache.start([block.attention for block in self.blocks], x)
        is_single = num_tokens == 1 and x.device.type != "cpu"
        padding = None
        if torch.compiler.is_compiling():
            padding = None if mask is None or is_single else padding_in_graph(mask, num_tokens)
        elif mask is not None and not is_single:
            padding = padding_of(mask, batch_size, num_tokens, int(cache.get_seq_length()))
        stores = [layer.store for layer in cache.layers]
        if mask is not None and not is_single and not torch.compiler.is_compiling():
            require_mask_of_past(mask, num_tokens, stores[0].lengths)
        if positions is not None and not is_single and not torch.compiler.is_compiling():
            require_positions(positions, padding, batch_size, num_tokens, stores[0].lengths)
        # a replay records no hidden states, and would not run what a subclass adds to `hidden`
        may_replay = padding is None and not (recorded or self.config.output_hidden_states) and type(self).hidden is Decoder.hidden
        if cache.graphs is not None and may_replay:
            last = cache.graphs.run(self, stores, x, None, lambda rows, _: self.hidden(rows, caches=stores))
            outputs = BaseModelOutputWithPast(last_hidden_state=last)
        elif padding is None:
            outputs = self._recorded(recorded, x, caches=stores)
        else:
            outputs = self._recorded(recorded, move(x, padding.order), caches=stores, query_count=padding.counts)
            outputs = _each(outputs, lambda states: move(states, padding.back))
        cache.advance(num_tokens)
        outputs.past_key_values = cache
        return outputs

    def _recorded(self, recorded: Any, x: Tensor, *inputs: Any, **options: Any) -> BaseModelOutputWithPast:
        """Return the result of `hidden` with hidden states if `recorded` is True; None: if the configuration asks for them."""
        asked = {} if recorded is None else {"output_hidden_states": recorded}
        outputs: BaseModelOutputWithPast = self._captured(x, *inputs, **options, **asked, return_dict=True)
        return outputs

    @capture_outputs
    def _captured(self, x: Tensor, *inputs: Any, output_hidden_states: Any = None, **options: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.hidden(x, *inputs, **options))


class NSAForCausalLM(NSAModel, GenerationMixin):
    """The decoder with its output layer: maps token ids to logits, loss and text."""

    _tied_weights_keys: ClassVar[Any] = {"lm_head.weight": "embedding.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar[Any] = None
    generation_config: Any

    def _add_head(self, config: NSAModelConfig) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=EMBEDDING_STD)

    @property
    def output_weight(self) -> Tensor:
        """Return the weight `(vocab_size, hidden)` of the output layer."""
        return self.lm_head.weight

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NSAModelCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return `logits` `(B, S, vocab_size)` of the last `logits_to_keep` tokens (0: all) and, with `labels` `(B, S)`, the `loss`.

        `labels` are token ids, not shifted: the loss shifts them by one. Tokens with label -100 and tokens right after padding do not count.
        `NSAModel.forward` describes the other arguments.
        """
        require_positions_of_packing(kwargs, position_ids)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        require_tensors(labels=labels)
        require_kept(logits_to_keep, tokens)
        if labels is not None and isinstance(tokens, Tensor) and not torch.compiler.is_compiling():
            require_labels(labels, tokens, self.config.vocab_size, logits_to_keep, kwargs.get("ignore_index", IGNORED))
        outputs = super().forward(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            has_labels=labels is not None,
            output_hidden_states=output_hidden_states,
            **{**kwargs, "return_dict": True},
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            if attention_mask is not None:
                ignored = kwargs.get("ignore_index", IGNORED)
                asked, labels = labels, labels_that_follow_tokens(labels, attention_mask, ignored)
                if (shifted := kwargs.get("shift_labels")) is not None:
                    # the label of a token stands at the column before it
                    is_token = attention_mask[:, -shifted.shape[1] :] != 0
                    kwargs["shift_labels"] = shifted.masked_fill(~is_token, ignored)
                if (num_items := kwargs.get("num_items_in_batch")) is not None:
                    # `Trainer` counts the tokens that follow padding too
                    kwargs["num_items_in_batch"] = num_items * share_of_labels(labels, asked, ignored)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the prompts with their continuations; see `GenerationMixin.generate`.

        If `past_key_values` holds tokens, the prompts `(B, S)` begin with them. They may also leave them out, with an `attention_mask`
        `(B, held + S)` of all tokens; the result then begins with the prompts.

        Raises:
            InputError: for a prompt that is empty, without a batch dimension or padded on the right, ids beyond the vocabulary, embedded
                prompts in chunks, a `cache_implementation` that cannot hold the stores of NSA, or assisted decoding with a cache that holds
                tokens.
            CacheOverflowError: if the prompt, its continuation and the drafts do not fit into the given cache.
        """
        given = kwargs.get("generation_config", args[0] if args else None) or self.generation_config
        require_working_cache(kwargs.get("cache_implementation") or given.cache_implementation)
        require_own_drafts(kwargs.get("assistant_early_exit", given.assistant_early_exit))
        ids, mask, embedded = (
            kwargs.get("input_ids") if inputs is None else inputs,
            kwargs.get("attention_mask"),
            kwargs.get("inputs_embeds"),
        )
        require_batch(ids, embedded, self.config.hidden_size)
        require_chunks(kwargs.get("prefill_chunk_size", given.prefill_chunk_size), embedded)
        cache = kwargs.get("past_key_values")
        held = int(cache.get_seq_length()) if isinstance(cache, NSAModelCache) else 0
        tokens = ids if embedded is None else embedded
        if mask is not None and tokens is not None:
            require_mask_of(mask, tokens, held if embedded is None else 0)
            require_marks(mask)
        if ids is not None:
            require_known_ids(ids, self.config.vocab_size)
            is_empty = ids.numel() == 0 or (mask is not None and bool((mask == 0).all(1).any()))
            if is_empty and embedded is None:
                if not len(ids):
                    raise InputError(f"input_ids has shape {tuple(ids.shape)} (the batch has no prompt); pass at least one row")
                raise InputError("a prompt is empty (the model needs a first token); begin it with the tokenizer's eos_token")
            if given.is_assistant and mask is None:
                # the target drops a mask of ones, and an accepted token may be the pad token
                kwargs["attention_mask"] = torch.ones_like(ids)
        assistant = kwargs.get("assistant_model")
        if isinstance(cache, NSAModelCache) and assistant is not None:
            # before any token is drawn
            cache.require_rollback(assistant.generation_config.num_assistant_tokens or 0)
        if held and tokens is not None and (mask is None or mask.shape[1] == tokens.shape[1]):
            require_new_tokens(held, tokens)
        return super().generate(inputs, *args, **kwargs)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Return what `GenerationMixin._sample` returns; if possible, do not wait for the GPU at each token."""
        # a step that another class defines, such as an adapter, may need more than the last token
        is_own = all(getattr(getattr(self, name), "__func__", None) is getattr(NSAForCausalLM, name) for name in STEP)
        if is_own and not synced_gpus and may_decode_ahead(model_kwargs, generation_config, input_ids.device):
            return decode_ahead(self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, **model_kwargs)
        return super()._sample(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs
        )

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool = True) -> Any:
        """Return the outputs for the prompts `input_ids`. A prompt that leaves out the cached tokens must fit the cache with its continuation."""
        cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
        if cache is not None:
            # Transformers drops a mask of ones, and keeps its length
            num_columns = getattr(generation_config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
            cache.require_room(num_columns - input_ids.shape[1] + generation_config.max_length - 1)
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Return True if `generate` compiles its steps, which it does only if there is a `compile_config`.

        Without compilation, the layers of a step over a static cache on a GPU run as one CUDA graph (`NSAModelCache.graphs`), which is faster.
        """
        is_asked_for = generation_config.compile_config is not None
        return is_asked_for and bool(super()._valid_auto_compile_criteria(model_kwargs, generation_config))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError: continuous batching keeps one K and V per layer in pages, but NSA has stores for each branch."""
        require_working_cache("paged")

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        """Put a cache that fits the generation into `model_kwargs`."""
        require_left_padding(model_kwargs.get("attention_mask"))
        given, kind = model_kwargs.get("past_key_values"), generation_config.cache_implementation
        if given is not None:
            require_own_cache(given, self._described)
            if kind is not None:
                raise InputError(
                    f"cache_implementation={kind!r} came with past_key_values (which is a cache already); leave one of them out"
                )
            if generation_mode == GenerationMode.ASSISTED_GENERATION and given.get_seq_length():
                raise InputError(
                    "past_key_values holds tokens and drafts were asked for (Transformers counts their positions from an empty cache); "
                    "leave out past_key_values, or prompt_lookup_num_tokens and assistant_model"
                )
            drafts = generation_config.prompt_lookup_num_tokens or 0
            # drafts are appended before it is known which are accepted
            given.require_room(max_cache_length + drafts)
            given.require_rollback(drafts)
            given._is_user_defined = True
            return
        if generation_config.use_cache is False:
            return
        require_working_cache(kind)
        if kind == "static":
            most = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
            model_kwargs["past_key_values"] = NSAModelCache(self.config, most, static=True)
            return
        # any number of drafts may be removed
        has_drafts = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        model_kwargs["past_key_values"] = NSAModelCache(self.config, keep_raw=bool(has_drafts))

    @staticmethod
    def create_masks_for_generate(inputs_embeds: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """Return the mask `(B, S)` of the S new tokens for a step with a static cache; None if all tokens are valid."""
        if attention_mask is None or (inputs_embeds.shape[1] == 1 and attention_mask.device.type != "cpu"):
            return None
        is_valid = attention_mask != 0
        require_no_holes(is_valid)
        recent = attention_mask[:, -inputs_embeds.shape[1] :]
        return None if bool((recent != 0).all()) else recent


def _each(outputs: BaseModelOutputWithPast, change: Callable[[Tensor], Tensor]) -> BaseModelOutputWithPast:
    """Apply `change` to the last state and to each recorded hidden state of `outputs`, and return `outputs`."""
    outputs.last_hidden_state = change(outputs.last_hidden_state)
    if outputs.hidden_states is not None:
        outputs.hidden_states = tuple(None if states is None else change(states) for states in outputs.hidden_states)
    return outputs
