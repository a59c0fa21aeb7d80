"""Fine-tuning: gradient checkpointing, Trainer, LoRA."""

import pytest
import safetensors
import torch

from nsa_core.errors import InputError
from nsa_transformers.checksums import KEY

KINDS = ["nsa", "mixed"]


def _loss_and_gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(tiny_model, prompt, kind, is_reentrant, monkeypatch):
    model = tiny_model(kind).train()
    loss, expected = _loss_and_gradients(model, prompt)
    # a reentrant checkpoint needs an input with a gradient
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    calls = []
    forward = type(model.blocks[0])._layer
    monkeypatch.setattr(type(model.blocks[0]), "_layer", lambda self, *inputs: (calls.append(self), forward(self, *inputs))[1])
    again, found = _loss_and_gradients(model, prompt)
    assert torch.equal(again, loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    # each layer ran forward and once more in the backward pass
    assert len(calls) == 4


def _rows(count=16):
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 40, (count, 1), generator=generator)
    ids = (starts + torch.arange(24)) % 45
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]


def _trainer(model, folder, **options):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (an extra, nsa-transformers[train])")
    assert accelerate
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=10, per_device_train_batch_size=4, learning_rate=5e-3, report_to=[], use_cpu=True, logging_steps=1,
        disable_tqdm=True, **options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=_rows())


@pytest.mark.parametrize("options", [{"save_steps": 5}, {"gradient_checkpointing": True, "save_strategy": "no"}])
def test_trainer_takes_ten_steps_and_what_it_saves_loads(tiny_model, tmp_path, options):
    from nsa_transformers import NSAForCausalLM

    model = tiny_model("mixed")
    trainer = _trainer(model, tmp_path, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]
    if "save_steps" in options:
        again = NSAForCausalLM.from_pretrained(tmp_path / "checkpoint-10")
        with safetensors.safe_open(tmp_path / "checkpoint-10/model.safetensors", "pt") as opened:
            assert KEY in opened.metadata()
        ids = _rows(1)[0]["input_ids"][None]
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_label_smoothing_shifts_the_labels(tiny_model, tmp_path, prompt):
    from transformers import Trainer, TrainingArguments

    model = tiny_model()
    trainer = Trainer(model, TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to=[]))
    found = trainer.compute_loss(model, {"input_ids": prompt, "labels": prompt.clone()})
    logs = model(prompt).logits[:, :-1].log_softmax(-1)
    expected = 0.9 * -logs.gather(-1, prompt[:, 1:, None]).mean() + 0.1 * -logs.mean()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kv", ["separate", "shared"])
def test_a_loaded_model_freezes_what_only_chooses(tiny_model, tiny_config, tmp_path, kv):
    model = tiny_model(nsa={**tiny_config().nsa, "branches": ["slc", "win"], "kv": kv, "compressor": "mlp"})
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert {name for name, weight in loaded.named_parameters() if not weight.requires_grad} == frozen


def test_shifted_labels_leave_out_what_follows_padding(tiny_model, prompt):
    model = tiny_model()
    ids = torch.cat([prompt.new_zeros(len(prompt), 5), prompt], 1)
    mask = torch.cat([prompt.new_zeros(len(prompt), 5), torch.ones_like(prompt)], 1)
    labels = ids.masked_fill(mask == 0, -100)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    # the first token is the label of a padding column
    shifted[:, 4] = ids[:, 5]
    alone = model(prompt, labels=prompt).loss
    torch.testing.assert_close(model(ids, mask, labels=labels, shift_labels=shifted).loss, alone)
    torch.testing.assert_close(model(ids, mask, labels=labels).loss, alone)


def test_labels_are_ignored_by_the_index_that_is_given(tiny_model, prompt):
    model = tiny_model()
    expected = model(prompt, labels=prompt.masked_fill(prompt < 5, -100)).loss
    found = model(prompt, labels=prompt.masked_fill(prompt < 5, -1), ignore_index=-1).loss
    torch.testing.assert_close(found, expected)
    with pytest.raises(InputError, match="labels hold -100 .* and -1 marks what does not count"):
        model(prompt, labels=prompt.index_fill(1, torch.tensor([3]), -100), ignore_index=-1)


def test_lora_trains_the_projections_alone_and_merges(tiny_model, tmp_path, prompt):
    peft = pytest.importorskip("peft", reason="peft is not installed (an extra, nsa-transformers[train])")
    base = tiny_model()
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    # with `kv="separate"` the projections of k and v have a name per branch
    targets = r".*attention\.(q_proj|o_proj|[kv]_proj\.(cmp|slc|win))"
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    assert all(parameter.requires_grad == ("lora" in name) for name, parameter in model.named_parameters())
    trainer = _trainer(model, tmp_path / "run", save_strategy="no")
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    model.eval()
    logits = model(prompt).logits
    model.save_pretrained(tmp_path / "adapter")
    with safetensors.safe_open(tmp_path / "adapter/adapter_model.safetensors", "pt") as opened:
        assert KEY not in (opened.metadata() or {})
    fresh = tiny_model()
    assert all(torch.equal(weight, before[name]) for name, weight in fresh.state_dict().items())
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    torch.testing.assert_close(loaded(prompt).logits, logits)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(prompt).logits, logits, rtol=1e-4, atol=1e-4)
    assert merged.generate(prompt, max_new_tokens=4, do_sample=False).shape == (2, 24)


def test_prefix_tuning_is_refused_with_another_method(tiny_model, prompt):
    peft = pytest.importorskip("peft", reason="peft is not installed (an extra, nsa-transformers[train])")
    model = peft.get_peft_model(tiny_model(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(InputError, match=r"past_key_values is a DynamicCache .*; with PEFT, use LoRA in place of prefix tuning$"):
        model(prompt)


SEPARATE = ["q_proj", "o_proj", *(f"{name}.{branch}" for name in ("k_proj", "v_proj") for branch in ("cmp", "slc", "win"))]
SHARED = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(("kind", "targets"), [("nsa", SEPARATE), ("shared", SHARED), ("dense", SHARED)])
def test_the_names_of_the_tutorial_adapt_every_projection(tiny_model, prompt, kind, targets):
    peft = pytest.importorskip("peft", reason="peft is not installed (an extra, nsa-transformers[train])")
    base = tiny_model(kind)
    expected = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear) and "_proj" in name}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    adapted = {name.removeprefix("base_model.model.") for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == expected
    model.train()(prompt, labels=prompt).loss.backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "lora_B" in name)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Input and output embeddings are no longer tied")
@pytest.mark.parametrize("options", [{"trainable_token_indices": [1, 3]}, {"modules_to_save": ["lm_head"]}])
def test_trained_tokens_and_a_saved_output_layer_of_a_tied_model_merge(tiny_model, tmp_path, prompt, options):
    peft = pytest.importorskip("peft", reason="peft is not installed (an extra, nsa-transformers[train])")
    from nsa_transformers import NSAForCausalLM

    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **options))
    unchanged = model(prompt).logits
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and "lora" not in name:
                weight.add_(torch.randn_like(weight))
    logits = model(prompt).logits
    assert not torch.allclose(logits, unchanged, atol=0.1)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(prompt).logits, logits, rtol=1e-4, atol=1e-3)
    merged.save_pretrained(tmp_path)
    assert torch.equal(NSAForCausalLM.from_pretrained(tmp_path).eval()(prompt).logits, merged(prompt).logits)
