"""One pass: masks, packed positions, loss, gradients, hidden states."""

import warnings

import pytest
import torch

from nsa_core.errors import CacheOverflowError, ConfigError, InputError
from nsa_transformers import NSAModel, NSAModelCache

PAD = 49
kinds = pytest.mark.parametrize("kind", ["nsa", "shared", "mixed", "dense"])


@pytest.fixture
def model(tiny_model, kind):
    return tiny_model(kind)


@kinds
def test_packed_sequences_do_not_see_one_another(model, prompt):
    lengths = [7, 1, 12]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    together = model(prompt, position_ids=positions, use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in prompt.split(lengths, 1)]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together, model(prompt, use_cache=False).logits)


def test_packed_positions_of_each_row_count_and_gradients_follow(tiny_model, prompt):
    model = tiny_model().train()
    positions = torch.stack([torch.arange(20), torch.arange(20) % 10])
    loss = model(prompt, position_ids=positions).logits.square().mean()
    first, *parts = prompt[:1], prompt[1:, :10], prompt[1:, 10:]
    expected = torch.cat([model(first).logits, torch.cat([model(part).logits for part in parts], 1)]).square().mean()
    torch.testing.assert_close(loss, expected)
    grads = [torch.autograd.grad(x, model.embedding.weight)[0] for x in (loss, expected)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("positions", [[[3, 4, 5]], [[0, 2, 3]], [[1, 0, 1]], [[0, 1, 1]]])
def test_positions_that_are_no_sequences_are_refused(tiny_model, positions):
    with pytest.raises(InputError, match="position_ids are no sequences from 0 on"):
        tiny_model()(torch.zeros(1, 3, dtype=torch.int64), position_ids=torch.tensor(positions), use_cache=False)


def test_positions_that_a_cache_does_not_continue_are_refused(tiny_model, prompt):
    model = tiny_model()
    with torch.no_grad():
        cache = model(prompt, position_ids=torch.arange(20)[None], use_cache=True).past_key_values
        model(prompt[:, :1], past_key_values=cache, position_ids=torch.tensor([[20]]))
        with pytest.raises(InputError, match="position_ids are not those of the tokens"):
            model(prompt[:, :1], past_key_values=cache, position_ids=torch.tensor([[25]]))
        with pytest.raises(InputError, match="position_ids are not those of the tokens"):
            model(prompt, position_ids=torch.arange(20)[None] % 10, use_cache=True)


@kinds
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_valid_logit(model, prompt, side):
    padded = torch.full_like(prompt[:, :5], PAD)
    parts = [padded, prompt] if side == "left" else [prompt, padded]
    ids, mask = torch.cat(parts, 1), torch.cat([torch.full_like(part, part is prompt) for part in parts], 1)
    valid = slice(5, None) if side == "left" else slice(0, 20)
    expected = model(prompt, use_cache=False).logits
    torch.testing.assert_close(model(ids, attention_mask=mask, use_cache=False).logits[:, valid], expected)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, attention_mask=mask, use_cache=True).logits[:, valid], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row", [[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1]])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_mask_with_a_hole_is_refused(tiny_model, row, use_cache):
    ids, mask = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[1, 1, 1, 1], row])
    with pytest.raises(InputError, match="attention_mask has a hole in row 1"), torch.no_grad():
        tiny_model()(ids, attention_mask=mask, use_cache=use_cache)


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min, -1.0, 0.5])
def test_a_mask_that_is_added_to_scores_is_refused(tiny_model, prompt, masked):
    mask = torch.zeros(prompt.shape)
    mask[1, :5] = masked
    for call in (lambda: tiny_model()(prompt, attention_mask=mask), lambda: tiny_model().generate(prompt, attention_mask=mask)):
        with pytest.raises(InputError, match=r"attention_mask holds .* \(1 where a token is valid, else 0; "):
            call()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_a_mask_of_any_dtype_marks_valid_tokens(tiny_model, prompt, dtype):
    model, mask = tiny_model(), torch.ones_like(prompt)
    mask[1, :5] = 0
    found = model(prompt, attention_mask=mask.to(dtype)).logits[1, 5:]
    torch.testing.assert_close(found, model(prompt[1:, 5:]).logits[0], rtol=1e-4, atol=1e-4)


def test_attentions_are_refused_where_they_would_be_left_out(tiny_model, prompt):
    message = "output_attentions=True has nothing to give"
    for call in (
        lambda: tiny_model()(prompt, output_attentions=True),
        lambda: tiny_model(output_attentions=True)(prompt),
        lambda: tiny_model().generate(prompt, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_a_mask_of_another_shape_is_refused(tiny_model, prompt):
    with pytest.raises(InputError, match=r"attention_mask has shape \(2, 1, 20, 20\)"):
        tiny_model()(prompt, attention_mask=torch.ones(2, 1, 20, 20), use_cache=False)


@pytest.mark.parametrize("size", [(0, 5), (2, 0)])
def test_an_empty_batch_is_refused(tiny_model, size):
    with pytest.raises(InputError, match=rf"the batch has shape \({size[0]}, {size[1]}\) .*; pass a prompt"):
        tiny_model()(torch.zeros(size, dtype=torch.int64))


def test_the_loss_is_that_of_the_next_token(tiny_model, prompt):
    model, labels = tiny_model(), prompt.clone()
    labels[:, 5] = -100
    outputs = model(prompt, labels=labels)
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    torch.testing.assert_close(outputs.loss, torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100))
    outputs.loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_a_padded_row_is_that_of_the_row_alone(tiny_model, prompt, side):
    model = tiny_model()
    padded = torch.full_like(prompt[:1, :5], PAD)
    row = [padded, prompt[:1]] if side == "left" else [prompt[:1], padded]
    mask = torch.cat([torch.full_like(part, part is not padded) for part in row], 1)
    ids = torch.cat(row, 1)
    found = model(ids, attention_mask=mask, labels=torch.where(mask == 1, ids, -100)).loss
    torch.testing.assert_close(found, model(prompt[:1], labels=prompt[:1]).loss)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_a_trainers_batch_is_the_mean_over_its_tokens(tiny_model, prompt, side):
    """`Trainer` divides by the labels after the first column, which with padding on the left are more than those that count."""
    model, lengths = tiny_model(), torch.tensor([[20], [7]])
    columns = torch.arange(20)
    mask = (columns >= 20 - lengths if side == "left" else columns < lengths).long()
    ids = torch.stack([prompt[0], prompt[1].roll(13) if side == "left" else prompt[1]])
    labels = torch.where(mask == 1, ids, -100)
    found = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=(labels[:, 1:] != -100).sum()).loss
    alone = [model(prompt[:1], labels=prompt[:1]).loss, model(prompt[1:, :7], labels=prompt[1:, :7]).loss]
    torch.testing.assert_close(found, (19 * alone[0] + 6 * alone[1]) / 25)
    nothing = torch.full_like(labels, -100)
    assert model(ids, attention_mask=mask, labels=nothing, num_items_in_batch=torch.tensor(25)).loss == 0


def test_accumulated_batches_padded_on_the_left_have_the_exact_loss_if_the_first_token_of_a_row_has_no_label(tiny_model, prompt):
    """`Trainer` divides every batch of an optimizer step by the labels of all of them."""
    model, lengths = tiny_model(), [(20, 7), (13, 3)]
    batches, total = [], 0.0
    for one, other in lengths:
        mask = (torch.arange(20) >= 20 - torch.tensor([[one], [other]])).long()
        ids = torch.stack([prompt[0].roll(20 - one), prompt[1].roll(20 - other)])
        is_labelled = (mask == 1) & (mask.cumsum(1) > 1)
        batches.append((ids, mask, torch.where(is_labelled, ids, -100)))
        for row, length in ((0, one), (1, other)):
            total += (length - 1) * model(prompt[row : row + 1, :length], labels=prompt[row : row + 1, :length]).loss
    num_items = sum((labels[:, 1:] != -100).sum() for _, _, labels in batches)
    found = sum(model(ids, attention_mask=mask, labels=labels, num_items_in_batch=num_items).loss for ids, mask, labels in batches)
    assert num_items == sum(one + other - 2 for one, other in lengths)
    torch.testing.assert_close(found, total / num_items)


def test_the_last_logits_alone_and_embedded_tokens_are_taken(tiny_model, prompt):
    model = tiny_model()
    outputs = model(prompt, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(model(prompt, logits_to_keep=2, use_cache=False).logits, outputs.logits[:, -2:])
    columns = torch.tensor([0, -1, 5])
    torch.testing.assert_close(model(prompt, logits_to_keep=columns, use_cache=False).logits, outputs.logits[:, columns])
    torch.testing.assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
    embedded = model(inputs_embeds=model.get_input_embeddings()(prompt), use_cache=False)
    torch.testing.assert_close(embedded.logits, outputs.logits)


def test_a_cache_in_training_warns(tiny_model, prompt):
    with pytest.warns(UserWarning, match="use_cache=True is ignored in training"):
        assert tiny_model().train()(prompt, use_cache=True).past_key_values is None


@kinds
def test_hidden_states_are_the_embeddings_the_layers_outputs_and_last_the_normed_one(model, prompt):
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, out: outputs.append(out))
    found = model(prompt, output_hidden_states=True, use_cache=False).hidden_states
    expected = [model.embedding(prompt), *outputs[:-1], model.norm(outputs[-1])]
    assert len(found) == len(model.blocks) + 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@kinds
@pytest.mark.parametrize("use_cache", [True, False])
def test_hidden_states_of_a_padded_batch_are_those_of_each_prompt_alone(model, prompt, use_cache):
    lengths = [20, 3, 11]
    mask = torch.arange(20) >= 20 - torch.tensor(lengths)[:, None]
    ids = torch.where(mask, torch.cat([prompt, prompt[:1].flip(1)]), PAD)
    options = {"output_hidden_states": True, "use_cache": use_cache}
    with torch.no_grad():
        found = model(ids, attention_mask=mask.long(), **options)
        assert torch.equal(found.hidden_states[0], model.embedding(ids))
        for row, length in enumerate(lengths):
            alone = model(ids[row : row + 1, 20 - length :], **options).hidden_states
            for states, expected in zip(found.hidden_states, alone, strict=True):
                # a position of padding holds arbitrary finite numbers
                assert states.isfinite().all()
                torch.testing.assert_close(states[row, 20 - length :], expected[0], rtol=1e-4, atol=1e-4)


def test_hidden_states_of_packed_rows_stay_in_their_rows(tiny_model, prompt):
    model, positions = tiny_model(), torch.stack([torch.arange(20), torch.arange(20) % 10])
    found = model(prompt, position_ids=positions, output_hidden_states=True).hidden_states
    parts = [model(part, output_hidden_states=True).hidden_states for part in prompt[1:].split(10, 1)]
    for states, *alone in zip(found, *parts, strict=True):
        assert states.shape == (2, 20, 32)
        torch.testing.assert_close(states[1:], torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_hidden_states_of_a_step_leave_out_the_tokens_that_its_cache_still_had_to_take(tiny_model, prompt):
    model = tiny_model()
    with torch.no_grad():
        caches = [model(prompt).past_key_values, model(prompt, use_cache=True).past_key_values]
        found, expected = (model(prompt[:, :1], past_key_values=cache, output_hidden_states=True).hidden_states for cache in caches)
    for states, others in zip(found, expected, strict=True):
        torch.testing.assert_close(states, others, rtol=1e-4, atol=1e-4)


def test_a_configuration_that_asks_for_hidden_states_gets_them(tiny_model, prompt):
    model = tiny_model(output_hidden_states=True)
    assert len(model(prompt).hidden_states) == 3
    assert model(prompt, output_hidden_states=False).hidden_states is None
    loss, logits, *_cache, states = model(prompt, labels=prompt, return_dict=False)
    assert (loss.shape, logits.shape, len(states)) == ((), (2, 20, 50), 3)


def test_a_bare_call_gives_a_cache_without_gradients_alone(tiny_model, prompt):
    model = tiny_model()
    assert model(prompt).past_key_values is None
    with torch.no_grad():
        cache = model(prompt).past_key_values
        assert cache.get_seq_length() == 20
        # it grows without a bound
        for _ in range(3):
            model(torch.zeros(2, 400, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(InputError, match="past_key_values came in training"):
        model.train()(prompt, past_key_values=cache)


@kinds
def test_the_logits_of_a_bare_call_are_those_without_a_cache_bit_for_bit(model, prompt):
    with torch.no_grad():
        outputs = model(prompt)
        assert torch.equal(outputs.logits, model(prompt, use_cache=False).logits)
        # nothing was stored, and a step gets it all the same
        assert outputs.past_key_values.layers[0].store is None
        found = model(prompt[:, :3], past_key_values=outputs.past_key_values).logits
        torch.testing.assert_close(found, model(torch.cat([prompt, prompt[:, :3]], 1)).logits[:, 20:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_padded", [True, False])
def test_a_cache_that_is_still_to_be_filled_is_cropped_repeated_and_selected(tiny_model, prompt, is_padded):
    model, mask = tiny_model(), torch.ones_like(prompt)
    mask[1, :6] = 0
    options = {"attention_mask": mask} if is_padded else {}
    with torch.no_grad():
        outputs = [model(prompt, **options, **other).past_key_values for other in ({}, {"use_cache": True})]
        for cache in outputs:
            cache.crop(-7)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0]))
            assert (cache.get_seq_length(), cache.batch_size) == (13, 2)
        found, expected = (model(prompt[:, :2], past_key_values=cache).logits for cache in outputs)
        torch.testing.assert_close(found, expected)
        cache = model(prompt).past_key_values
        cache.reset()
        assert cache.get_seq_length() == 0


def test_the_model_without_a_head_gives_states(tiny_model, tiny_config, prompt):
    model, bare = tiny_model(), NSAModel(tiny_config())
    bare.load_state_dict({name: weight for name, weight in model.state_dict().items() if not name.startswith("lm_head")})
    states = bare(prompt, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.lm_head(states), model(prompt, use_cache=False).logits)


@pytest.mark.parametrize("kind", ["nsa", "dense", "mixed"])
def test_a_static_cache_keeps_its_batch(tiny_model, prompt, kind):
    model = tiny_model(kind)
    cache = NSAModelCache(model.config, 64, static=True)
    with torch.no_grad():
        model(prompt[:2, :9], past_key_values=cache)
    for change in (lambda: cache.batch_select_indices(torch.tensor([1])), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(InputError, match="a static cache keeps its"):
            change()
    with pytest.raises(InputError, match="a static cache keeps its batch: build one for 6"), torch.no_grad():
        model(prompt[:1, :1].expand(6, 1), past_key_values=cache)


def test_a_static_cache_that_is_full_says_so_at_single_tokens_too(tiny_model, prompt):
    model = tiny_model()
    cache = NSAModelCache(model.config, 12, static=True)
    with torch.no_grad():
        model(prompt[:1, :12], past_key_values=cache)
        with pytest.raises(CacheOverflowError, match="13 tokens do not fit"):
            model(prompt[:1, :1], past_key_values=cache)


def test_a_loss_in_evaluation_mode_keeps_its_gradients(tiny_model, prompt):
    model, ids = tiny_model(), prompt[:1, :20]
    with pytest.warns(UserWarning, match="use_cache=True is ignored in training"):
        model(ids, labels=ids, use_cache=True).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_packing_that_would_be_ignored_is_refused(tiny_model, prompt):
    model, ids, bounds = tiny_model(), prompt[:1, :20], torch.tensor([0, 8, 20], dtype=torch.int32)
    with pytest.raises(InputError, match="cu_seq_lens_q came without position_ids"):
        model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(InputError, match="attention_mask holds 2"):
        model(ids, attention_mask=torch.tensor([[1] * 8 + [2] * 12]))


def test_a_cache_that_is_still_to_be_filled_crops_as_a_filled_one(tiny_model, prompt):
    with torch.no_grad():
        cache = tiny_model()(prompt[:1, :9]).past_key_values
    with pytest.raises(CacheOverflowError, match=r"cannot go back by 10 tokens \(it has 9\)"):
        cache.crop(-10)


def test_a_padded_cache_that_comes_without_its_mask_says_what_is_missing(tiny_model, prompt):
    model, mask = tiny_model(), torch.ones_like(prompt)
    mask[1, :6] = 0
    with torch.no_grad():
        cache = model(prompt, attention_mask=mask, use_cache=True).past_key_values
    # older Transformers pass a mask of ones in place of none
    said = "pass the attention_mask of the whole text|begin it with the mask that the earlier tokens came with"
    with pytest.raises(InputError, match=said):
        model.generate(torch.cat([prompt, prompt], 1), past_key_values=cache, max_new_tokens=2)


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("num_new", [1, 3])
def test_a_mask_that_contradicts_the_tokens_of_a_cache_is_refused(tiny_model, prompt, is_deferred, num_new):
    model, mask = tiny_model(), torch.ones_like(prompt)
    mask[1, :6] = 0
    new = prompt[:, :num_new]
    with torch.no_grad():
        cache = model(prompt, attention_mask=mask, use_cache=None if is_deferred else True).past_key_values
        for wrong, found in ((torch.ones_like(mask), 20), (mask.flip(0), 20), (torch.cat([mask[:, 1:], mask[:, -1:]], 1), 15)):
            with pytest.raises(
                InputError, match=rf"attention_mask has (14|{found}) valid tokens before the new ones in row [01] \(past_key_values holds "
            ):
                model(new, attention_mask=torch.cat([wrong, torch.ones_like(new)], 1), past_key_values=cache)
        logits = model(new, attention_mask=torch.cat([mask, torch.ones_like(new)], 1), past_key_values=cache).logits
        expected = model(torch.cat([prompt[1:, 6:], new[1:]], 1), use_cache=False).logits[:, -num_new:]
    torch.testing.assert_close(logits[1:], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["rope_theta", "rope_parameters", "head_dim", "attention_bias", "num_selected_blocks", "qk_norm"])
def test_keys_of_other_models_are_not_ignored(tiny_config, name):
    with pytest.raises(ConfigError, match=f"config.json has {name} .*use "):
        tiny_config(**{name: 1e6})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda ids: {"input_ids": ids.float()}, r"input_ids is torch.float32 \(ids are int32 or int64\); use input_ids.long\(\)"),
        (lambda ids: {"input_ids": ids.tolist()}, r"input_ids is a list \(the layout is \(B, S\)\); use torch.tensor\(input_ids\)"),
        (lambda ids: {"inputs_embeds": torch.zeros(2, 5, 16)}, r"inputs_embeds has width 16 \(the model's hidden_size is 32\)"),
        (
            lambda ids: {"input_ids": ids, "position_ids": torch.arange(20.0)[None]},
            r"position_ids is torch.float32 .*use position_ids.long\(\)",
        ),
        (lambda ids: {"input_ids": ids, "labels": ids[:, :10]}, r"labels are torch.int64 of shape \(2, 10\) .*int64 \(2, 20\)"),
        (lambda ids: {"input_ids": ids, "labels": ids.int()}, r"labels are torch.int32 of shape \(2, 20\) .*int64 \(2, 20\)"),
        (lambda ids: {"input_ids": ids, "labels": ids + 50}, r"labels hold \d+ \(the vocabulary has ids 0 .. 49, and -100 marks"),
        (lambda ids: {"input_ids": ids, "labels": ids - 99}, r"labels hold -\d+ \(the vocabulary"),
        (lambda ids: {"input_ids": ids, "labels": ids, "logits_to_keep": 4}, r"logits_to_keep=4 came with labels"),
        (lambda ids: {"input_ids": ids.tolist(), "labels": ids}, r"input_ids is a list .*use torch.tensor\(input_ids\)"),
        (lambda ids: {"input_ids": ids, "labels": ids.tolist()}, r"labels is a list .*use torch.tensor\(labels\)"),
        (lambda ids: {"input_ids": ids, "labels": ids.numpy()}, r"labels is an ndarray .*use torch.tensor\(labels\)"),
        (
            lambda ids: {"input_ids": ids, "attention_mask": [[1] * 20] * 2},
            r"attention_mask is a list .*use torch.tensor\(attention_mask\)",
        ),
        (lambda ids: {"input_ids": ids, "position_ids": [[*range(20)]]}, r"position_ids is a list .*use torch.tensor\(position_ids\)"),
        (lambda ids: {"input_ids": ids, "cache_position": [*range(20)]}, r"cache_position is a list .*use torch.tensor\(cache_position\)"),
        (lambda ids: {"inputs_embeds": torch.ones(2, 5, 32, dtype=torch.int64)}, r"inputs_embeds is torch.int64 .*pass ids as input_ids"),
        (lambda ids: {"input_ids": ids, "logits_to_keep": -3}, r"logits_to_keep=-3 .*integer >= 0, 0 for all\); use 1"),
        (lambda ids: {"input_ids": ids, "logits_to_keep": 1.5}, r"logits_to_keep=1.5 .*integer >= 0, 0 for all\); use 1"),
        (lambda ids: {"input_ids": ids, "logits_to_keep": True}, r"logits_to_keep=True .*integer >= 0, 0 for all\); use 1"),
        (lambda ids: {"input_ids": ids, "logits_to_keep": torch.tensor([3, 20])}, r"logits_to_keep holds column 20 .*-20 .. 19 for 20"),
        (lambda ids: {"input_ids": ids, "logits_to_keep": torch.tensor(2)}, r"logits_to_keep is torch.int64 of shape \(\) "),
        (lambda ids: {"input_ids": ids, "logits_to_keep": ids[0] > 9}, r"logits_to_keep is torch.bool of shape \(20,\) "),
        (lambda ids: {"input_ids": ids, "cache_position": torch.arange(5, 25)}, r"cache_position is \[5, 6, 7, 8\] .*after 0 tokens"),
    ],
)
def test_arguments_that_fit_no_model_are_named(tiny_model, prompt, changed, message):
    with pytest.raises(InputError, match=message):
        tiny_model()(**changed(prompt))


def test_columns_behind_a_cache_are_those_that_follow(tiny_model, prompt):
    model = tiny_model()
    with torch.no_grad():
        cache = model(prompt[:, :12], cache_position=torch.arange(12)).past_key_values
        with pytest.raises(InputError, match=r"cache_position is \[0, 1, 2, 3\] ... \(after 12 tokens, the next are at 12 .. 19\)"):
            model(prompt[:, 12:], past_key_values=cache, cache_position=torch.arange(8))
        found = model(prompt[:, 12:], past_key_values=cache, cache_position=torch.arange(12, 20)).logits
        torch.testing.assert_close(found, model(prompt).logits[:, 12:], rtol=1e-4, atol=1e-4)


def test_a_cache_is_not_left_out(tiny_model, prompt):
    model = tiny_model()
    with torch.no_grad():
        cache = model(prompt[:, :12], use_cache=True).past_key_values
        for call in (
            lambda: model(prompt[:, 12:], past_key_values=cache, use_cache=False),
            lambda: model.generate(prompt, past_key_values=cache, use_cache=False, max_new_tokens=2, do_sample=False),
        ):
            with pytest.raises(InputError, match=r"use_cache=False came with past_key_values .*leave one of them out"):
                call()


def test_an_argument_that_nothing_reads_warns(tiny_model, prompt):
    model = tiny_model()
    with pytest.warns(UserWarning, match="forward ignores head_mask, num_logits_to_keep "):
        model(prompt, num_logits_to_keep=1, head_mask=torch.ones(2, 4), output_router_logits=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(prompt, labels=prompt, num_items_in_batch=3, output_attentions=False, return_dict=True)
        model.generate(prompt, max_new_tokens=3, do_sample=False)


def test_the_model_is_its_own_decoder_and_its_last_hidden_states_are_those_of_the_bare_model(tiny_model, prompt, tmp_path):
    model = tiny_model()
    assert model.get_decoder() is model and model.base_model is model
    model.save_pretrained(tmp_path)
    states = NSAModel.from_pretrained(tmp_path)(prompt).last_hidden_state
    assert torch.equal(model(prompt, output_hidden_states=True).hidden_states[-1], states)
