"""`model.layers`: layers that differ, from the recipe to the records."""

import json
import tomllib

import pytest
import torch
from attrs import evolve

from nsa_core import NativeSparseAttention
from nsa_core.dense_attention import DenseAttention
from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.checkpoint.commands import export
from nsa_train.checkpoint.resuming import check_resumable
from nsa_train.cli import run_command
from nsa_train.data.tokenizer import build_tokenizer
from nsa_train.errors import ConfigError
from nsa_train.host.routing import chosen_of, routing_decisions
from nsa_train.model.choosing import watched
from nsa_train.model.decoder import build_model, count_parameters, undrawn_weights
from nsa_train.model.generate import generate
from nsa_train.preflight.judge import run_preflight
from nsa_train.preflight.memory import estimate_memory
from nsa_train.settings.config import structure, unstructure
from nsa_train.settings.recipe import load_config, to_toml
from nsa_train.telemetry import health
from nsa_train.telemetry.flops import model_flops
from nsa_train.telemetry.layers import RunTelemetry, of_layers

MIXED = ("model.n_layers=4", 'model.layers=["dense", "nsa", {branches=["win"], window_size=4}, {num_selected_blocks=6}]')


@pytest.fixture(scope="module")
def mixed(tiny_config):
    return tiny_config(*MIXED)


def model_of(config):
    torch.manual_seed(0)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # layers that start at zero must not hide a path
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def test_each_layer_is_what_its_entry_says(mixed) -> None:
    attentions = [block.attention for block in build_model(mixed).blocks]
    assert [type(one) for one in attentions] == [DenseAttention, *[NativeSparseAttention] * 3]
    plain, window, wide = (one.config for one in attentions[1:])
    assert plain == mixed.nsa_config()
    assert window == evolve(plain, branches=("win",), geometry=evolve(plain.geometry, window_size=4))
    assert wide == evolve(plain, geometry=evolve(plain.geometry, num_selected_blocks=6))


def test_a_shorter_pattern_is_repeated(tiny_config) -> None:
    model = build_model(tiny_config("model.n_layers=6", 'model.layers=["dense", {attention="nsa"}, "nsa"]'))
    kinds = [isinstance(block.attention, DenseAttention) for block in model.blocks]
    assert kinds == [True, False, False] * 2
    assert len(model.sparse_layers) == 4


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ('"dense"', ["model.layers='dense' is not a list of layers", 'use ["dense", "nsa"]']),
        ('["dense", "nas"]', ["model.layers[1]='nas' is neither 'nsa', 'dense' nor a table", "use 'nsa'"]),
        ("[3]", ["model.layers[0]=3 is neither", "use 'nsa'"]),
        ('["nsa", {windowsize=4}]', ["model.layers[1].windowsize is unknown", "did you mean window_size?"]),
        ('["nsa", {zzz=4}]', ["model.layers[1].zzz is unknown", "leave it out"]),
        ('["nsa", {compressor="mean"}]', ["model.layers[1].compressor is one of all layers", "use nsa.compressor"]),
        ('["nsa", {attention="dens"}]', ["model.layers[1].attention='dens' is neither", "use 'dense'"]),
        ('["nsa", {attention="dense", window_size=4}]', ["model.layers[1] is dense and would ignore window_size", "use 'dense'"]),
        ('["nsa", "dense", "nsa"]', ["model.layers has 3 layers, and model.n_layers=2", "use --set model.n_layers=3"]),
        ('["dense"]', ["model.layers has no nsa layer", "--set model.attention=dense"]),
        ('["nsa", {window_size=0}]', ["model.layers[1].window_size=0", "integer >= 1"]),
        ('["nsa", {window_size=9999999999}]', ["model.layers[1].window_size=9999999999 is not a number up to"]),
        ('["nsa", {selection_block_size=5}]', ["model.layers[1].selection_block_size=5", "compression_stride=2"]),
        ('["nsa", {branches=["cmb"]}]', ["model.layers[1].branches=('cmb',)", 'use ["cmp", "slc", "win"]']),
    ],
)
def test_bad_layers_are_refused_in_one_line_with_the_cure(tiny_recipe, layers: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(str(tiny_recipe), [f"model.layers={layers}"])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_rule_of_table_nsa_that_a_layer_breaks_is_named_with_the_layer(tiny_recipe) -> None:
    with pytest.raises(ConfigError, match=r"model.layers\[0\]: nsa.gate='softmax'"):
        load_config(str(tiny_recipe), ["nsa.gate=softmax", 'model.layers=[{branches=["win"]}, "nsa"]'])


def test_layers_beside_a_dense_model_are_refused(tiny_recipe) -> None:
    with pytest.raises(ConfigError, match=r"would be ignored .*use --set model.layers=\[\]"):
        load_config(str(tiny_recipe), ["model.attention=dense", 'model.layers=["nsa"]'])


def test_the_resolved_recipe_reads_back_equal(mixed, tmp_path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(mixed))
    layers = tomllib.loads(path.read_text())["model"]["layers"]
    assert layers == ["dense", "nsa", {"branches": ["win"], "window_size": 4}, {"num_selected_blocks": 6}]
    assert load_config(str(path)) == mixed
    assert structure(json.loads(json.dumps(unstructure(mixed)))) == mixed


def test_parameters_are_counted_layer_by_layer(mixed, tiny_config) -> None:
    counts = count_parameters(mixed)
    model = build_model(mixed)
    assert counts.nsa == sum(parameter.numel() for parameter in model.parameters())
    assert counts.dense == count_parameters(tiny_config("model.n_layers=4", "model.attention=dense")).dense
    assert {name: weight.shape for name, weight in undrawn_weights(mixed).items()} == {
        name: weight.shape for name, weight in model.state_dict().items()
    }
    repeated = tiny_config("model.n_layers=6", 'model.layers=["dense", "nsa", {branches=["win"]}]')
    assert count_parameters(repeated).nsa == sum(parameter.numel() for parameter in build_model(repeated).parameters())
    assert undrawn_weights(repeated).keys() == build_model(repeated).state_dict().keys()


def test_flops_are_those_of_each_layer(mixed, tiny_config) -> None:
    """The attention of a layer costs what it costs in a model that has no other."""

    def attention_of(*overrides: str) -> int:
        flops = model_flops(tiny_config("model.n_layers=1", *overrides))
        return flops.of_sequence(96) - 96 * flops.per_token

    alone = [["model.attention=dense"], [], ["nsa.branches=['win']", "nsa.window_size=4"], ["nsa.num_selected_blocks=6"]]
    flops = model_flops(mixed)
    assert flops.of_sequence(96) - 96 * flops.per_token == sum(attention_of(*overrides) for overrides in alone)
    repeated = tiny_config("model.n_layers=4", 'model.layers=["dense", "nsa"]')
    found = model_flops(repeated)
    assert found.of_sequence(96) - 96 * found.per_token == 2 * (attention_of("model.attention=dense") + attention_of())


def test_memory_lies_between_that_of_the_twins(tiny_config) -> None:
    half = tiny_config('model.layers=["dense", "nsa"]')
    nsa, dense = tiny_config(), tiny_config("model.attention=dense")
    found, more, less = (estimate_memory(config, 1000, 1).activations_gib for config in (half, nsa, dense))
    assert found == pytest.approx((more + less) / 2)


def test_a_mixed_model_is_causal_and_packs(mixed) -> None:
    model = model_of(mixed).double()
    ids = torch.randint(0, 256, (1, 40))
    changed = ids.clone()
    changed[:, 23:] = torch.randint(0, 256, (1, 17))
    with torch.no_grad():
        assert torch.equal(model(ids)[:, :23], model(changed)[:, :23])
        packed = model(ids, cu_seqlens=torch.tensor([0, 23, 40], dtype=torch.int32), max_seqlen=23)
        alone = torch.cat([model(ids[:, :23]), model(ids[:, 23:])], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)


def test_decode_equals_prefill(mixed) -> None:
    model = model_of(mixed).double()
    ids = torch.randint(0, 256, (2, 29))
    caches = model.new_caches(2, 29)
    with torch.no_grad():
        steps = [model(ids[:, :13], caches=caches), *(model(ids[:, t : t + 1], caches=caches) for t in range(13, 29))]
        torch.testing.assert_close(torch.cat(steps, 1), model(ids), rtol=1e-9, atol=1e-9)


def test_samples_are_what_prefill_would_draw(mixed) -> None:
    model, tokenizer = model_of(mixed).double(), build_tokenizer(mixed.data)
    prompt = tokenizer.encode(b"12 bottles stood on ")
    [drawn] = generate(model, [prompt], tokenizer=tokenizer, num_tokens=6, temperature=0)
    ids = prompt.long()
    with torch.no_grad():
        for _ in range(len(drawn.ids)):
            logits = model(ids[None])[0, -1]
            logits[tokenizer.pad] = -torch.inf
            ids = torch.cat([ids, logits.argmax()[None]])
    assert len(drawn.ids) > 0
    assert torch.equal(ids[len(prompt) :], drawn.ids)


def test_a_mixed_model_trains_and_is_recorded(train, capsys) -> None:
    code, run = train(*MIXED)
    assert code == 0
    losses = run.losses()
    assert losses[-1] < losses[0]
    metrics, beats = json.loads(run.metrics.read_text()), run.beats()
    assert "model: nsa attention, 1 of 4 layers dense;" in capsys.readouterr().out
    assert metrics["attention"] == "nsa"
    assert metrics["parameters"] == metrics["parameters_nsa"] > metrics["parameters_dense"]
    [last] = [beat for beat in beats if beat["msg"] == "progress"][-1:]
    assert last["routes"] == {"cmp": "sdpa", "select": "sdpa", "slc": "sdpa", "win": "sdpa"}
    assert last["fallbacks_total"] == 0
    assert set(last["gate_branch_shares"]) == {"cmp", "slc", "win"}
    assert last["k_max"] == 6
    environment = json.loads(run.environment.read_text())
    assert environment["routes"] == last["routes"]
    assert load_model(open_checkpoint(run.root)).sparse_layers[1].config.branches == ("win",)


def test_a_resume_with_other_layers_is_refused(train, tiny_config) -> None:
    code, run = train(*MIXED)
    assert code == 0
    checkpoint = open_checkpoint(run.root)
    check_resumable(checkpoint, tiny_config(*MIXED, "train.steps=9"))
    with pytest.raises(ConfigError) as caught:
        check_resumable(checkpoint, tiny_config("model.n_layers=4", 'model.layers=["dense", "nsa", "nsa", "nsa"]'))
    message = str(caught.value)
    assert "model.layers=" in message
    assert 'use --set model.layers=["dense", "nsa", {branches = ["win"], window_size = 4}, {num_selected_blocks = 6}]' in message


def test_a_mixed_run_goes_on_bit_equal(train, tiny_recipe) -> None:
    code, run = train(*MIXED)
    assert code == 0
    before = load_model(open_checkpoint(run.root)).state_dict()
    words = [word for override in MIXED for word in ("--set", override)]
    assert run_command(["run", str(tiny_recipe), "--out", str(run.root), "--resume", "3", *words]) == 0
    after = load_model(open_checkpoint(run.root)).state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_an_export_names_the_layers(train, tmp_path) -> None:
    code, run = train(*MIXED)
    assert code == 0
    folder = export(run.root, tmp_path / "hf", "hf")
    assert json.loads((folder / "config.json").read_text())["layers"][2] == {"branches": ["win"], "window_size": 4}


def test_preflight_routes_every_kind_of_layer(mixed, tmp_path) -> None:
    decisions = routing_decisions(mixed, torch.device("cpu"))
    names = ("cmp", "select", "slc", "win")
    assert [(len(decisions[name]), chosen_of(decisions[name])) for name in names] == [(2, "sdpa"), (2, "sdpa"), (2, "sdpa"), (3, "sdpa")]
    findings = run_preflight(mixed, tmp_path / "out")
    assert not findings.failed
    assert [line for line in findings.passed if line.startswith("route")] == [f"route: {name} -> sdpa" for name in names]
    assert any("1 of 4 layers dense" in line for line in findings.passed)


def test_preflight_judges_a_named_backend_for_every_kind_of_layer(tiny_config, tmp_path) -> None:
    """Window-only layers run no selection: a name for it is used where another layer has it, and not where none has."""
    used = tiny_config("nsa.backends.slc=sdpa", 'model.layers=[{branches=["win"]}, "nsa"]')
    unused = tiny_config("nsa.backends.slc=sdpa", 'model.layers=[{branches=["win"]}, "dense"]')
    assert not [line for line in run_preflight(used, tmp_path / "out").warned if "not used" in line]
    [warned] = [line for line in run_preflight(unused, tmp_path / "out").warned if "not used" in line]
    assert "model.layers run no slc" in warned


def test_gates_of_a_lone_branch_are_no_collapse(mixed) -> None:
    model = model_of(mixed)
    with watched(model.sparse_layers, RunTelemetry) as collected:
        model(torch.randint(0, 256, (1, 40)))
    layers = of_layers(collected)
    assert layers[1]["gate_entropy_mean"] == 0
    summary = health.combine(layers)
    assert summary["gate_entropy_mean"] == pytest.approx((layers[0]["gate_entropy_mean"] + layers[2]["gate_entropy_mean"]) / 2)
    assert summary["contribution_win"] == pytest.approx(sum(layer["contribution_win"] for layer in layers) / 3)
    assert summary["rows"] == layers[0]["rows"] + layers[2]["rows"]
