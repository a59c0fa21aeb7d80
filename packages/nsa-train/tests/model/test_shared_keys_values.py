"""`nsa.kv = "shared"`: one K and V for all branches is trained, counted, saved and resumed, and never converted."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.checkpoint.commands import export
from nsa_train.cli import run_command
from nsa_train.model.decoder import build_model, count_parameters, undrawn_weights
from nsa_train.preflight.memory import estimate_memory
from nsa_train.settings.recipe import load_config
from nsa_train.telemetry.flops import model_flops

SHARED = "nsa.kv=shared"


def test_it_has_the_twins_keys_and_values_beside_gate_and_phi(tiny_config) -> None:
    shared, dense = undrawn_weights(tiny_config(SHARED)), undrawn_weights(tiny_config("model.attention=dense"))
    more = {name.split("attention.")[1].split(".")[0] for name in shared.keys() - dense.keys()}
    assert more == {"gate", "compress_k", "compress_v"}
    assert {name: weight.shape for name, weight in shared.items() if name in dense} == {
        name: weight.shape for name, weight in dense.items()
    }


def test_parameters_are_those_of_one_set_of_keys_and_values(tiny_config) -> None:
    config = tiny_config(SHARED)
    counts, separate = count_parameters(config), count_parameters(tiny_config())
    assert counts.nsa == sum(parameter.numel() for parameter in build_model(config).parameters())
    # two layers, two sets of K and V fewer, 32 by 16 each
    assert separate.nsa - counts.nsa == 2 * 2 * 2 * 32 * 16
    assert counts.dense == separate.dense
    alone = count_parameters(tiny_config(SHARED, "nsa.branches=['slc','win']", "nsa.compressor=mean"))
    gates = sum(weight.numel() for name, weight in build_model(config).named_parameters() if ".attention.gate." in name)
    assert alone.nsa - alone.dense == gates


def test_flops_of_the_projections_are_those_of_one_set(tiny_config) -> None:
    one, three = model_flops(tiny_config(SHARED)), model_flops(tiny_config())
    # 6 FLOPs a weight and token
    assert three.per_token - one.per_token == 6 * 2 * 2 * 2 * 32 * 16
    assert one.attentions == three.attentions


def test_one_set_of_keys_and_values_counts_in_the_estimate_of_memory(tiny_config) -> None:
    def activations(*overrides: str) -> float:
        return estimate_memory(tiny_config(*overrides), 1000, 1).activations_gib

    assert activations(SHARED) < activations()
    assert activations(SHARED, "nsa.qk_norm=true") - activations(SHARED) < activations("nsa.qk_norm=true") - activations()
    assert activations(SHARED, "model.attention=dense") == activations("model.attention=dense")


def test_the_dense_twin_is_the_same_model(tiny_config) -> None:
    plain, shared = (undrawn_weights(tiny_config("model.attention=dense", *overrides)) for overrides in ((), (SHARED,)))
    assert {name: weight.shape for name, weight in plain.items()} == {name: weight.shape for name, weight in shared.items()}


def test_decode_equals_prefill(tiny_config) -> None:
    torch.manual_seed(0)
    model = build_model(tiny_config(SHARED))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model, ids = model.double().eval(), torch.randint(0, 256, (2, 21))
    caches = model.new_caches(2, 21)
    with torch.no_grad():
        steps = [model(ids[:, :10], caches=caches), *(model(ids[:, t : t + 1], caches=caches) for t in range(10, 21))]
        torch.testing.assert_close(torch.cat(steps, 1), model(ids), rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Path) -> Path:
    out = tmp_path_factory.mktemp("runs") / "shared"
    assert run_command(["run", str(tiny_recipe), "--out", str(out), "--set", SHARED]) == 0
    return out


def test_a_run_trains_every_weight_and_exports_them(shared_run: Path, tiny_config, tmp_path: Path) -> None:
    assert json.loads((shared_run / "metrics.json").read_text())["skipped_steps"] == 0
    trained = load_model(open_checkpoint(shared_run)).state_dict()
    assert {name: weight.shape for name, weight in trained.items()} == {
        name: weight.shape for name, weight in undrawn_weights(tiny_config(SHARED)).items()
    }
    export(shared_run, tmp_path / "hf", "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["nsa"]["kv"] == "shared"
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == trained.keys()


def test_a_run_is_resumed_and_begins_another(shared_run: Path, tiny_recipe: Path, tmp_path: Path) -> None:
    words = ["run", str(tiny_recipe), "--out", str(tmp_path / "next"), "--set", SHARED, "--set", f"train.init_from={shared_run}"]
    assert run_command([*words, "--set", "train.steps=3"]) == 0
    assert run_command([*words, "--set", "train.steps=4", "--resume"]) == 0
    assert open_checkpoint(tmp_path / "next").step == 4


REASON = "(one K and V for all branches are other weights than a K and V for each); use --set nsa.kv="


def test_a_run_is_not_resumed_with_the_other_sharing(
    shared_run: Path, tiny_run, tiny_recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, saved, now in ((shared_run, "shared", "separate"), (tiny_run.root, "separate", "shared")):
        assert (
            run_command(["run", str(tiny_recipe), "--out", str(run), "--resume", "--set", "train.steps=9", "--set", f"nsa.kv={now}"]) == 2
        )
        assert f'nsa.kv="{now}" is not what step-5 was saved with {REASON}"{saved}"' in capsys.readouterr().err


def test_a_run_does_not_begin_with_weights_of_the_other_sharing(
    shared_run: Path, tiny_run, tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, saved, now in ((shared_run, "shared", "separate"), (tiny_run.root, "separate", "shared")):
        words = ["--set", f"train.init_from={run}", "--set", f"nsa.kv={now}"]
        assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "next"), *words]) == 2
        assert f'its weights are those of nsa.kv="{saved}" {REASON}"{saved}"' in capsys.readouterr().err
        assert not (tmp_path / "next").exists()


def test_a_value_that_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="nsa.kv='one' is unknown .* use 'separate'"):
        load_config("demo", ["nsa.kv=one"])
