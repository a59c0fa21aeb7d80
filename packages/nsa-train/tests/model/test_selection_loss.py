"""`train.selection_loss`: a gradient for the choice of blocks that changes no value, is recomputed, recorded and resumed."""

import json
import shutil

import pytest
import torch

from nsa_train.cli import run_command
from nsa_train.data.packing import IGNORED
from nsa_train.model.decoder import build_model

WEIGHT = "train.selection_loss=0.5"


def backward(config, *, pass_number=0):
    """Return the loss of one batch, the gradients, and the number of labels."""
    torch.manual_seed(0)
    model = build_model(config).train()
    ids = torch.randint(0, 256, (1, 80))
    labels = ids.roll(-1)
    labels[:, :30] = IGNORED
    model.sample_queries(pass_number)
    loss = model(ids, labels=labels, cu_seqlens=torch.tensor([0, 30, 80], dtype=torch.int32), max_seqlen=50)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, model


@pytest.mark.parametrize("chunk", [0, 16])
def test_the_loss_keeps_its_value_and_keys_that_choose_get_more_gradient(tiny_config, chunk) -> None:
    overrides = (f"train.loss_chunk={chunk}",)
    plain, without, _ = backward(tiny_config(*overrides))
    loss, gradients, model = backward(tiny_config(WEIGHT, *overrides))

    assert torch.equal(loss, plain)
    # the last layer: what it changes there reaches no other parameter of the layer
    changed = {name for name, gradient in gradients.items() if name.startswith("blocks.1.") and not torch.equal(gradient, without[name])}
    assert {"blocks.1.attention.q_proj.weight", "blocks.1.attention.k_proj.cmp.weight"} <= changed
    assert all(".attention" in name and not name.endswith(("v_proj.slc.weight", "o_proj.weight")) for name in changed)

    # the gradient is the weight times the labels times that of the layers' losses: the trainer divides by the labels
    auxiliary = build_model(tiny_config(WEIGHT, *overrides)).train()
    auxiliary.load_state_dict(model.state_dict())
    auxiliary.sample_queries(0)
    torch.manual_seed(0)
    build_model(tiny_config())
    ids = torch.randint(0, 256, (1, 80))
    auxiliary(ids, cu_seqlens=torch.tensor([0, 30, 80], dtype=torch.int32), max_seqlen=50)
    (0.5 * 50 * sum(one.value for one in auxiliary.selection_losses)).backward()
    name = "blocks.1.attention.k_proj.cmp.weight"
    alone = dict(auxiliary.named_parameters())[name].grad
    assert torch.allclose(gradients[name] - without[name], alone, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_changes_no_gradient_of_it(tiny_config, kind) -> None:
    _, plain, _ = backward(tiny_config(WEIGHT))
    _, again, _ = backward(tiny_config(WEIGHT, f"train.activation_checkpointing={kind}"))
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name


def test_evaluation_and_dense_layers_have_none(tiny_config) -> None:
    model = build_model(tiny_config(WEIGHT, "model.layers=['nsa','dense']"))
    assert len(model.selection_losses) == 1
    model.eval()
    model(torch.randint(0, 256, (1, 60)), labels=torch.randint(0, 256, (1, 60)))
    assert model.selection_losses[0].value is None
    assert build_model(tiny_config()).selection_losses == []


def test_a_run_records_it_and_goes_on_exactly(tmp_path, tiny_recipe) -> None:
    def run(name, *words):
        return run_command(["run", str(tiny_recipe), "--out", str(tmp_path / name), "--set", WEIGHT, "--set", "train.save_every=2", *words])

    assert run("straight") == 0
    shutil.copytree(tmp_path / "straight", tmp_path / "other")
    assert run("other", "--resume", "2") == 0
    events = [json.loads(line) for line in (tmp_path / "straight" / "heartbeat_rank0.jsonl").read_text().splitlines()]
    logged = [event["selection_loss"] for event in events if "selection_loss" in event]
    assert logged and all(value > 0 for value in logged)
    straight, other = (tmp_path / name / "checkpoints" / "step-5" / "model.safetensors" for name in ("straight", "other"))
    assert straight.read_bytes() == other.read_bytes()
