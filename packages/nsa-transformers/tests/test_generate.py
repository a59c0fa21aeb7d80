"""`generate` against recomputation from scratch, token for token in float32."""

import copy
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, DynamicCache, GenerationConfig

from nsa_core.errors import CacheOverflowError, InputError
from nsa_transformers import NSAForCausalLM, NSAModelCache
from nsa_transformers.tokenizer import byte_tokenizer

COUNT = 24
GREEDY = {"do_sample": False, "max_new_tokens": COUNT}
PAD = 49
kinds = pytest.mark.parametrize("kind", ["nsa", "shared", "mixed", "dense"])


@pytest.fixture
def model(tiny_model, kind):
    return tiny_model(kind)


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("static", [False, True])
def test_a_prefill_adds_few_operations_to_those_of_the_layers_and_logits_of_one_token(tiny_config, prompt, static):
    added = []
    for num_layers in (1, 3):
        model = NSAForCausalLM(tiny_config(num_hidden_layers=num_layers)).eval()
        # tables of RoPE are made once
        model.generate(prompt, do_sample=False, max_new_tokens=1)
        rows = []
        model.lm_head.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(inputs[0].shape[1]))
        with torch.no_grad():
            caches = model.new_caches(2, 20, static=static, count_reads=False)
            with Operations() as of_layers:
                model.hidden(model.embedding(prompt), caches=caches)
            cache = NSAModelCache(model.config, 20, static=static)
            cache.start([block.attention for block in model.blocks], model.embedding(prompt))
        with Operations() as of_generate:
            model.generate(prompt, past_key_values=cache, do_sample=False, max_new_tokens=1)
        added.append(of_generate.count - of_layers.count)
        assert rows == [1]
    assert added[0] == added[1] < 100


@kinds
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_greedy_tokens_are_those_from_scratch(model, prompt, from_scratch, implementation):
    found = model.generate(prompt, cache_implementation=implementation, **GREEDY)
    assert torch.equal(found, from_scratch(model, prompt, COUNT))


def test_a_compiled_step_of_a_static_cache_gives_the_tokens_from_scratch(tiny_model, prompt, from_scratch):
    model = tiny_model("mixed")
    steps = []

    def counted(graph, inputs):
        steps.append(graph)
        return graph.forward

    options = CompileConfig(backend=counted, fullgraph=True, mode=None, dynamic=False)
    options._compile_all_devices = True
    found = model.generate(prompt, cache_implementation="static", compile_config=options, **GREEDY)
    assert torch.equal(found, from_scratch(model, prompt, COUNT))
    # one graph serves every step
    assert len(steps) == 1


@pytest.mark.slow
def test_compiled_chunks_of_a_padded_batch_give_the_tokens_from_scratch(tiny_model, prompt, from_scratch):
    model = tiny_model()
    mask = torch.arange(20) >= torch.tensor([[0], [9]])
    ids = torch.where(mask, prompt, PAD)
    options = CompileConfig(backend="eager", fullgraph=True, mode=None)
    options._compile_all_devices = True
    found = model.generate(
        ids,
        attention_mask=mask.long(),
        pad_token_id=PAD,
        cache_implementation="static",
        compile_config=options,
        prefill_chunk_size=10,
        **GREEDY,
    )
    assert torch.equal(found[0], from_scratch(model, prompt[:1], COUNT)[0])
    assert torch.equal(found[1, 9:], from_scratch(model, prompt[1:, 9:], COUNT)[0])


@kinds
def test_chunked_prefill_changes_no_token(model, prompt, from_scratch):
    found = model.generate(prompt, prefill_chunk_size=7, **GREEDY)
    assert torch.equal(found, from_scratch(model, prompt, COUNT))


@pytest.mark.parametrize("kind", ["nsa", "mixed"])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_beams_are_those_without_a_cache(model, prompt, implementation):
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}
    found = model.generate(prompt, cache_implementation=implementation, **options)
    assert found.shape[0] == 4
    assert torch.equal(found, model.generate(prompt, use_cache=False, **options))


@pytest.mark.parametrize("kind", ["nsa", "mixed"])
def test_samples_are_those_without_a_cache(model, prompt):
    def drawn(**options):
        torch.manual_seed(5)
        return model.generate(prompt, do_sample=True, num_return_sequences=3, top_p=0.9, temperature=1.5, max_new_tokens=COUNT, **options)

    found = drawn()
    assert torch.equal(found, drawn(use_cache=False))
    assert len({tuple(row.tolist()) for row in found}) > 2


@kinds
def test_prompt_lookup_changes_no_token(model, prompt, from_scratch):
    # repeated, so that there is something to look up; the drafts that are wrong are taken back
    ids = prompt[:1].repeat(1, 3)
    found = model.generate(ids, prompt_lookup_num_tokens=6, **GREEDY)
    assert torch.equal(found, from_scratch(model, ids, COUNT))


@kinds
@pytest.mark.parametrize("is_same", [pytest.param(True, marks=pytest.mark.slow), False])
def test_assisted_generation_changes_no_token(model, kind, tiny_model, prompt, from_scratch, is_same):
    assistant = model if is_same else tiny_model(kind, seed=1)
    assistant.generation_config.num_assistant_tokens = 8
    found = model.generate(prompt[:1], assistant_model=assistant, **GREEDY)
    assert torch.equal(found, from_scratch(model, prompt[:1], COUNT))


def test_an_accepted_token_that_is_the_pad_token_is_no_padding(tiny_model, prompt, from_scratch):
    model, ids = tiny_model(), prompt[:1]
    expected = from_scratch(model, ids, COUNT)
    pad = next(token for token in expected[0, 20:-4].tolist() if token not in ids)
    assistant = tiny_model(seed=1)
    assistant.generation_config.num_assistant_tokens = 2

    assert torch.equal(model.generate(ids, assistant_model=assistant, pad_token_id=pad, **GREEDY), expected)


@pytest.mark.parametrize("kind", ["nsa", "shared"])
def test_drafts_are_taken_back_however_many_they_are(model, prompt):
    ids = prompt[:1].repeat(1, 5)
    shallow, deep = NSAModelCache(model.config), NSAModelCache(model.config, keep_raw=True)
    with torch.no_grad():
        for cache in (shallow, deep):
            model(ids, past_key_values=cache)
        deep.crop(-70)
        found = model(ids[:, 30:], past_key_values=deep).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, 30:], rtol=1e-4, atol=1e-4)
    with pytest.raises(CacheOverflowError, match="cannot go back by 70"):
        shallow.crop(-70)


WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 6},
    "no cache": {"use_cache": False},
}
PADDED_IN_CI = {*(("nsa", way) for way in WAYS), ("shared", "dynamic"), ("shared", "static"), ("mixed", "dynamic"), ("dense", "dynamic")}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, marks=() if (kind, way) in PADDED_IN_CI else pytest.mark.slow, id=f"{kind}-{way}")
        for kind in ("nsa", "shared", "mixed", "dense")
        for way, options in WAYS.items()
    ],
)
def test_left_padding_of_mixed_lengths_changes_no_token(model, prompt, from_scratch, options):
    lengths = [20, 3, 11]
    rows = torch.cat([prompt, prompt[:1].flip(1)])
    mask = torch.arange(20) >= 20 - torch.tensor(lengths)[:, None]
    ids = torch.where(mask, rows, PAD)
    found = model.generate(ids, attention_mask=mask.long(), pad_token_id=PAD, **GREEDY, **options)
    for row, length in enumerate(lengths):
        assert torch.equal(found[row, 20 - length :], from_scratch(model, ids[row : row + 1, 20 - length :], COUNT)[0])


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_hidden_states_of_generated_tokens_are_those_from_scratch(tiny_model, prompt, implementation):
    model, mask = tiny_model(), torch.arange(20) >= torch.tensor([[0], [9]])
    options = {"attention_mask": mask.long(), "cache_implementation": implementation, "output_hidden_states": True}
    found = model.generate(prompt, return_dict_in_generate=True, do_sample=False, max_new_tokens=4, **options)
    whole = torch.cat([mask, torch.ones(2, 4, dtype=torch.bool)], 1)
    with torch.no_grad():
        expected = model(found.sequences, attention_mask=whole.long(), output_hidden_states=True, use_cache=False).hidden_states
    for layer, states in enumerate(expected):
        steps = torch.cat([step[layer] for step in found.hidden_states], 1)
        torch.testing.assert_close(steps[whole[:, :-1]], states[:, :-1][whole[:, :-1]], rtol=1e-4, atol=1e-4)


@kinds
def test_a_prompts_cache_is_copied_and_used_again(model, prompt, from_scratch):
    with torch.no_grad():
        kept = model(prompt, use_cache=True).past_key_values
    for seed in (1, 2):
        question = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(seed))
        whole = torch.cat([prompt, question], 1)
        found = model.generate(whole, past_key_values=copy.deepcopy(kept), **GREEDY)
        assert torch.equal(found, from_scratch(model, whole, COUNT))
    assert kept.get_seq_length() == 20


@kinds
def test_a_static_cache_is_reset_and_used_again(model, prompt, from_scratch):
    cache = NSAModelCache(model.config, 20 + COUNT, static=True)
    for ids in (prompt, prompt.flip(1)):
        cache.reset()
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), from_scratch(model, ids, COUNT))
        cache.check()


@kinds
@pytest.mark.parametrize("is_static", [False, True])
def test_a_cache_that_was_filled_in_inference_mode_is_used_outside_of_it(model, prompt, from_scratch, is_static):
    cache = NSAModelCache(model.config, 64 if is_static else None, static=is_static)
    with torch.inference_mode():
        model(prompt[:, :9], past_key_values=cache)
    cache.crop(-2)
    assert torch.equal(model.generate(prompt, past_key_values=cache, **GREEDY), from_scratch(model, prompt, COUNT))
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("is_static", [False, True])
def test_a_crop_that_one_layer_refuses_changes_none(tiny_model, prompt, is_static):
    model = tiny_model("mixed")
    cache = NSAModelCache(model.config, 40 if is_static else None, static=is_static, max_rollback=4)
    model(prompt, past_key_values=cache)
    with pytest.raises(CacheOverflowError, match="cannot go back by 10 from 20 tokens"):
        cache.crop(-10)
    step = prompt[:, :1]
    expected = model(torch.cat([prompt, step], 1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(model(step, past_key_values=cache).logits, expected, atol=1e-4, rtol=1e-4)


@kinds
def test_a_cache_is_cropped_selected_and_repeated(model, prompt):
    def following(cache):
        return model(prompt[:1, :3].expand(cache.batch_size, 3), past_key_values=cache).logits

    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
        cache.crop(-8)
        short = model(prompt[:, :12], use_cache=True).past_key_values
        assert cache.get_seq_length() == 12
        torch.testing.assert_close(following(copy.deepcopy(cache)), following(copy.deepcopy(short)))
        expected = following(copy.deepcopy(short))
        cache.batch_select_indices(torch.tensor([False, True]))
        cache.batch_repeat_interleave(3)
        torch.testing.assert_close(following(cache), expected[1:].expand(3, -1, -1))


def test_a_stopped_sequence_ends_with_its_stop_token(tiny_model, prompt, from_scratch):
    model = tiny_model()
    whole = from_scratch(model, prompt, COUNT)
    stop = int(whole[0, 25])
    found = model.generate(prompt[:1], eos_token_id=stop, pad_token_id=PAD, **GREEDY)
    assert int(found[0, -1]) == stop
    assert torch.equal(found, whole[:1, : found.shape[1]])


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
def test_a_stop_string_ends_the_text_without_a_warning(tiny_model, prompt, options):
    model, tokenizer = tiny_model(vocab_size=258), byte_tokenizer(64)
    plain = model.generate(prompt[:1], **options, **GREEDY)[0].tolist()
    place = next(place for place, byte in enumerate(plain[21:], 21) if 32 < byte < 127 and byte not in plain[20:place])
    found = model.generate(prompt[:1], stop_strings=[chr(plain[place])], tokenizer=tokenizer, **options, **GREEDY)
    assert found[0].tolist() == plain[: place + 1]


@pytest.mark.parametrize("name", ["quantized", "offloaded", "offloaded_static", "hybrid", "sliding_window", "paged"])
def test_a_cache_that_cannot_hold_nsa_is_refused_by_name(tiny_model, prompt, name):
    with pytest.raises((InputError, ValueError), match=name):
        tiny_model().generate(prompt, cache_implementation=name, **GREEDY)


def test_another_cache_is_refused(tiny_model, prompt):
    model = tiny_model()
    with pytest.raises(InputError, match="past_key_values is a DynamicCache"):
        model.generate(prompt, past_key_values=DynamicCache(), **GREEDY)
    with pytest.raises(InputError, match="past_key_values is a DynamicCache"):
        model(prompt, past_key_values=DynamicCache())


@pytest.mark.parametrize(("one", "other"), [("dense", "nsa"), ("nsa", "dense"), ("nsa", "mixed"), ("nsa", "shared")])
def test_a_cache_of_a_model_with_other_layers_is_refused(tiny_model, prompt, one, other):
    model, whole = tiny_model(other), torch.cat([prompt, prompt], 1)
    with torch.no_grad():
        filled = tiny_model(one)(prompt, use_cache=True).past_key_values
    others = [filled, NSAModelCache(tiny_model(one).config), NSAModelCache(tiny_model(other, num_hidden_layers=4).config)]
    for cache in others:
        for call in (
            lambda cache: model.generate(whole, past_key_values=cache, **GREEDY),
            lambda cache: model(prompt, past_key_values=cache),
        ):
            with pytest.raises(InputError, match=r"past_key_values was built for layers of another model .*NSAModelCache\(model.config\)"):
                call(cache)


@pytest.mark.parametrize("kind", ["nsa", "mixed"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("num_pads", [0, 5])
def test_new_ids_alone_follow_a_cache_if_the_mask_covers_it(model, prompt, from_scratch, static, num_pads):
    mask = (torch.arange(20) >= torch.tensor([[0], [num_pads]])).long()
    ids = torch.where(mask == 1, prompt, PAD)
    count = 6
    # more and fewer new ids than the cache holds
    for held in (5 + num_pads // 2, 19):
        cache = NSAModelCache(model.config, 20 + count - 1, static=static)
        with torch.no_grad():
            model(ids[:, :held], attention_mask=mask[:, :held], past_key_values=cache)
        found = model.generate(
            ids[:, held:], attention_mask=mask, past_key_values=cache, pad_token_id=PAD, do_sample=False, max_new_tokens=count
        )
        assert torch.equal(found[:, : 20 - held], prompt[:, held:])
        for row, pads in enumerate((0, num_pads)):
            assert torch.equal(found[row, 20 - held :], from_scratch(model, prompt[row : row + 1, pads:], count)[0, 20 - pads :])


@pytest.mark.parametrize("static", [False, True])
def test_new_ids_alone_that_do_not_fit_the_cache_with_their_continuation_are_refused_before_any_token(tiny_model, prompt, static):
    model = tiny_model()
    for num_pads in (0, 3):
        mask = (torch.arange(20) >= torch.tensor([[0], [num_pads]])).long()
        cache = NSAModelCache(model.config, 20 + COUNT - 2, static=static)
        with torch.no_grad():
            model(prompt[:, :14], attention_mask=mask[:, :14], past_key_values=cache)
        with pytest.raises(CacheOverflowError, match=rf"{20 + COUNT - 1} tokens do not fit past_key_values"):
            model.generate(prompt[:, 14:], attention_mask=mask, past_key_values=cache, **GREEDY)
        assert cache.get_seq_length() == 14


def test_new_ids_alone_without_a_mask_of_all_tokens_are_refused(tiny_model, prompt):
    model = tiny_model()
    cache = NSAModelCache(model.config)
    with torch.no_grad():
        model(prompt[:, :14], past_key_values=cache)
    for mask in ({}, {"attention_mask": torch.ones(2, 6, dtype=torch.int64)}):
        with pytest.raises(InputError, match=r"holds 14 tokens, the prompt has 6 .*, or pass that mask"):
            model.generate(prompt[:, 14:], past_key_values=cache, **mask, **GREEDY)
    with pytest.raises(InputError, match=r"shape \(2, 21\) .*\(2, 6\), .* or \(2, 20\) if the prompts follow the 14 cached tokens"):
        model.generate(prompt[:, 14:], past_key_values=cache, attention_mask=torch.ones(2, 21, dtype=torch.int64), **GREEDY)


@pytest.mark.parametrize("is_deferred", [True, False])
def test_a_cache_that_holds_the_whole_prompt_is_refused(tiny_model, prompt, is_deferred):
    model = tiny_model()
    with torch.no_grad():
        cache = model(prompt, use_cache=None if is_deferred else True).past_key_values
    for length in (20, 11):
        with pytest.raises(
            InputError, match=rf"past_key_values holds 20 tokens, the prompt has {length} .*; use past_key_values.crop\({length - 21}\)"
        ):
            model.generate(prompt[:, :length], past_key_values=cache, **GREEDY)
        with pytest.raises(InputError, match=f"past_key_values holds 20 tokens, the prompt has {length}"):
            model.generate(inputs_embeds=model.embedding(prompt[:, :length]), past_key_values=cache, **GREEDY)
    cache.crop(-1)
    assert torch.equal(model.generate(prompt, past_key_values=cache, **GREEDY), model.generate(prompt, **GREEDY))


def test_drafts_of_the_models_own_early_layers_are_refused(tiny_model, prompt):
    with pytest.raises(InputError, match="assistant_early_exit=1 .*use assistant_model or prompt_lookup_num_tokens"):
        tiny_model().generate(prompt[:1], assistant_early_exit=1, **GREEDY)


def test_a_prompt_that_does_not_fit_the_cache_is_refused_before_any_token(tiny_model, prompt):
    model = tiny_model()
    cache = NSAModelCache(model.config, 16, static=True)
    with pytest.raises(CacheOverflowError, match=r"43 tokens do not fit .* max_cache_len=16\); use max_cache_len=43"):
        model.generate(prompt, past_key_values=cache, **GREEDY)
    with pytest.raises(CacheOverflowError, match="20 tokens do not fit"), torch.no_grad():
        model(prompt, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_cache_of_other_sequences_is_refused(tiny_model, prompt):
    model = tiny_model()
    with torch.no_grad():
        cache = model(prompt[:1], use_cache=True).past_key_values
        with pytest.raises(InputError, match=r"holds 1 sequences, the batch has 2; use past_key_values.batch_repeat_interleave\(2\)"):
            model(prompt, past_key_values=cache)
    with pytest.raises(InputError, match=r"crop\(3\) is not negative"):
        cache.crop(3)


def test_an_empty_prompt_is_refused(tiny_model):
    model = tiny_model()
    with pytest.raises(InputError, match="a prompt is empty"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), **GREEDY)
    with pytest.raises(InputError, match="a prompt is empty"):
        model.generate(torch.zeros(2, 3, dtype=torch.int64), attention_mask=torch.tensor([[0, 0, 0], [0, 1, 1]]), **GREEDY)
    with pytest.raises(InputError, match=r"input_ids has shape \(0, 5\) \(the batch has no prompt\); pass at least one row"):
        model.generate(torch.zeros(0, 5, dtype=torch.int64), **GREEDY)


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_a_row_without_a_batch_is_refused(model, prompt):
    for call in (lambda: model.generate(prompt[0], **GREEDY), lambda: model(prompt[0])):
        with pytest.raises(
            InputError, match=r"input_ids has shape \(20,\) \(the layout is \(B, S\), .*use input_ids.unsqueeze\(0\) for one"
        ):
            call()
    with pytest.raises(InputError, match=r"inputs_embeds has shape \(5, 32\) \(the layout is \(B, S, hidden_size\)"):
        model(inputs_embeds=torch.zeros(5, 32))


@kinds
def test_right_padding_is_refused_and_left_padding_of_the_same_prompts_gives_the_tokens_from_scratch(model, prompt, from_scratch):
    right = torch.arange(20) < torch.tensor([[20], [11]])
    ids = torch.where(right, prompt, PAD)
    message = r"attention_mask ends with padding in row 1 .*padding_side='left'"
    with pytest.raises(InputError, match=message):
        model.generate(ids, attention_mask=right.long(), pad_token_id=PAD, **GREEDY)
    # Transformers finds the mask by the pads
    with pytest.raises(InputError, match=message):
        model.generate(ids, pad_token_id=PAD, **GREEDY)
    moved = torch.cat([torch.full((9,), PAD), prompt[1, :11]])
    found = model.generate(torch.stack([prompt[0], moved]), pad_token_id=PAD, **GREEDY)
    assert torch.equal(found[0], from_scratch(model, prompt[:1], COUNT)[0])
    assert torch.equal(found[1, 9:], from_scratch(model, prompt[1:, :11], COUNT)[0])


@pytest.mark.parametrize("kind", ["nsa", "mixed"])
@pytest.mark.parametrize("static", [False, True])
def test_a_given_cache_without_room_for_drafts_is_refused_before_any_token(model, prompt, from_scratch, static):
    ids = prompt[:1].repeat(1, 3)
    short, fitting = (NSAModelCache(model.config, length, static=static) for length in (60 + COUNT, 60 + COUNT + 6))
    with pytest.raises(CacheOverflowError, match=rf"tokens do not fit past_key_values .*max_cache_len={59 + COUNT + 6} or more"):
        model.generate(ids, past_key_values=short, prompt_lookup_num_tokens=6, **GREEDY)
    assert short.get_seq_length() == 0
    found = model.generate(ids, past_key_values=fitting, prompt_lookup_num_tokens=6, **GREEDY)
    assert torch.equal(found, from_scratch(model, ids, COUNT))


def test_drafts_that_a_given_cache_cannot_take_back_are_refused_before_any_token(tiny_model, prompt):
    model = tiny_model()
    with pytest.raises(CacheOverflowError, match=r"65 draft tokens cannot be taken back .*use max_rollback=65 or more, or keep_raw=True"):
        model.generate(prompt[:1], past_key_values=NSAModelCache(model.config), prompt_lookup_num_tokens=65, **GREEDY)
    model.generate(prompt[:1], past_key_values=NSAModelCache(model.config, keep_raw=True), prompt_lookup_num_tokens=65, **GREEDY)


@pytest.mark.parametrize("static", [False, True])
def test_drafts_after_a_cache_that_holds_tokens_are_refused(tiny_model, prompt, static):
    model = tiny_model()
    cache = NSAModelCache(model.config, 100, static=static)
    model(prompt[:1], past_key_values=cache)
    longer = torch.cat([prompt[:1], prompt[:1, :6]], 1)
    for drafts in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": tiny_model()}):
        with pytest.raises(InputError, match=r"holds tokens and drafts were asked for .*leave out past_key_values, or prompt_lookup"):
            model.generate(longer, past_key_values=cache, **drafts, **GREEDY)
    assert cache.get_seq_length() == prompt.shape[1]


def test_beams_over_a_filled_static_cache_are_refused(tiny_model, prompt):
    model = tiny_model()
    cache = NSAModelCache(model.config, 100, static=True)
    model(prompt[:1, :8], past_key_values=cache)
    with pytest.raises(InputError, match="holds 1 sequences, the batch has 2; a static cache keeps its batch: build one for 2"):
        model.generate(prompt[:1], past_key_values=cache, num_beams=2, **GREEDY)


def test_drafts_that_a_cache_cannot_take_back_are_refused_before_any_token(tiny_model, prompt):
    model, assistant = tiny_model(), tiny_model("dense", seed=1)
    assistant.generation_config.num_assistant_tokens = 10
    cache = NSAModelCache(model.config, 60, max_rollback=2)
    with pytest.raises(CacheOverflowError, match="10 draft tokens cannot be taken back from past_key_values"):
        model.generate(prompt[:1], past_key_values=cache, assistant_model=assistant, **GREEDY)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_with_tokens_is_initialized(tiny_model, prompt, static):
    model = tiny_model()
    cache = NSAModelCache(model.config, 60, static=static)
    assert not cache.is_initialized
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    assert cache.is_initialized


@pytest.mark.parametrize("size", [-3, 0, "5", 2.5])
def test_a_cache_for_no_number_of_tokens_is_refused(tiny_model, size):
    rule = rf"max_cache_len={size!r} is no number of tokens \(the rule: an integer >= 1, or None\); use 4096"
    with pytest.raises(InputError, match=rule):
        NSAModelCache(tiny_model().config, size)


def test_ids_beyond_the_vocabulary_are_refused(tiny_model, prompt):
    model = tiny_model()
    prompt[1, 4] = 50
    for call in (lambda: model.generate(prompt, **GREEDY), lambda: model(prompt)):
        with pytest.raises(InputError, match=r"input_ids holds 50 \(the vocabulary has ids 0 .. 49\)"):
            call()


@pytest.mark.parametrize("shape", [(2, 19), (1, 20), (20,), (2, 1, 20, 20)])
def test_a_mask_that_is_not_of_the_prompts_is_refused(tiny_model, prompt, shape):
    model = tiny_model()
    for inputs in ({"inputs": prompt}, {"inputs_embeds": model.embedding(prompt)}):
        with pytest.raises(InputError, match=rf"attention_mask has shape {re.escape(str(shape))} \(the layout is \(B, S\) = \(2, 20\)"):
            model.generate(**inputs, attention_mask=torch.ones(shape, dtype=torch.int64), **GREEDY)
    with pytest.raises(InputError, match="attention_mask has type dict"):
        model.generate(prompt, attention_mask={"full_attention": torch.ones(2, 20)}, **GREEDY)


@pytest.mark.parametrize("has_ids", [False, True])
def test_embedded_prompts_in_chunks_are_refused(tiny_model, prompt, has_ids):
    model = tiny_model()
    inputs = {"inputs": prompt} if has_ids else {}
    for options in ({"prefill_chunk_size": 3}, {"generation_config": GenerationConfig(prefill_chunk_size=3)}):
        with pytest.raises(InputError, match=r"prefill_chunk_size=3 came with inputs_embeds .*leave one of them out"):
            model.generate(**inputs, inputs_embeds=model.embedding(prompt), **options)


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_chunks_of_less_than_one_token_are_refused(tiny_model, prompt, size):
    with pytest.raises(InputError, match=rf"prefill_chunk_size={size} \(the rule: an integer of at least 1\)"):
        tiny_model().generate(prompt, prefill_chunk_size=size, **GREEDY)


def test_prompts_that_are_no_tensor_are_refused(tiny_model, prompt):
    with pytest.raises(InputError, match="input_ids is a list"):
        tiny_model().generate(prompt.tolist(), **GREEDY)
