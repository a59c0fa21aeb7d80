"""A plan's trials: every arm at every point of the grid with every seed, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest

from nsa_bench.ablate import shipped_plans
from nsa_bench.ablate.plan import MACHINE_KEYS, load_plan
from nsa_bench.errors import OptionError
from nsa_train.settings.config import structure
from nsa_train.settings.recipe import load_config


def test_every_arm_is_trained_at_every_point_with_every_seed(plan_file: Path) -> None:
    plan = load_plan(str(plan_file))
    assert (plan.name, plan.baseline) == ("plan", "dense")
    found = [(trial.seed, trial.config.model.attention, trial.config.train.lr) for trial in plan.trials]
    assert found == [(seed, arm, rate) for seed in (3, 4) for rate in (1e-3, 1e-2) for arm in ("dense", "nsa")]
    assert {(trial.config.train.steps, trial.config.train.eval_every) for trial in plan.trials} == {(2, 1)}
    assert all(trial.config.train.seed == trial.seed for trial in plan.trials)
    assert [str(variant) for variant in plan.variants] == ["dense, lr=0.001", "dense, lr=0.01", "nsa, lr=0.001", "nsa, lr=0.01"]
    names = [trial.name for trial in plan.trials]
    assert names[0] == "dense_lr=0.001_seed=3"
    assert len(set(names)) == len(names)


def test_an_option_takes_the_place_of_a_key_of_every_trial(plan_file: Path) -> None:
    plan = load_plan(str(plan_file), ["train.steps=7"])
    assert {trial.config.train.steps for trial in plan.trials} == {7}
    assert {trial.config.train.lr for trial in plan.trials} == {1e-3, 1e-2}


def test_settings_leave_the_recipe_of_the_next_trial_alone(plan_file: Path) -> None:
    plan_file.write_text(plan_file.read_text().replace("[arms.nsa]", '[arms.nsa]\nnsa.backends = {cmp = "sdpa"}\n[arms.last]'))
    backends = {trial.variant.arm: trial.config.nsa.backends for trial in load_plan(str(plan_file)).trials}
    assert backends == {"dense": {}, "nsa": {"cmp": "sdpa"}, "last": {}}


def test_backends_of_set_arm_and_option_are_joined(plan_file: Path) -> None:
    text = plan_file.read_text().replace("[arms.nsa]", '[arms.nsa]\nnsa.backends.slc = "a"\n[arms.last]\n"nsa.backends.win" = "b"')
    plan_file.write_text(text + '\n[set.nsa.backends]\nwin = "c"\n')
    backends = {trial.variant.arm: trial.config.nsa.backends for trial in load_plan(str(plan_file), ["nsa.backends.cmp=d"]).trials}
    common = {"win": "c", "cmp": "d"}
    assert backends == {"dense": common, "nsa": common | {"slc": "a"}, "last": common | {"win": "b"}}
    for override in ("nsa.backends.slc=d", "nsa.backends={slc='d'}"):
        with pytest.raises(OptionError, match=r"--set nsa\.backends\.slc='d' is not read \(section arms\.nsa "):
            load_plan(str(plan_file), [override])


def test_another_table_of_an_arm_replaces_that_of_set(plan_file: Path) -> None:
    text = plan_file.read_text().replace("[arms.nsa]", '[arms.nsa]\nnsa.rope_scaling = {kind = "linear", factor = 2.0}\n[arms.last]')
    plan_file.write_text(text + '\n[set.nsa.rope_scaling]\nkind = "llama3"\nfactor = 8.0\nlow_freq_factor = 2.0\n')
    found = {trial.variant.arm: trial.config.nsa.rope_scaling for trial in load_plan(str(plan_file)).trials}
    assert found["nsa"] == {"kind": "linear", "factor": 2.0}
    assert found["last"] == {"kind": "llama3", "factor": 8.0, "low_freq_factor": 2.0}


@pytest.mark.parametrize(
    ("was", "becomes"),
    [("[arms.nsa]", '[arms.nsa]\ntrain.init_from = "a-{seed}"'), ("train.lr = [1e-3, 1e-2]", 'train.init_from = ["a-{seed}"]')],
)
def test_seed_in_braces_becomes_the_trials_seed(plan_file: Path, was: str, becomes: str) -> None:
    plan_file.write_text(plan_file.read_text().replace(was, becomes))
    plan = load_plan(str(plan_file), ["nsa.backends={cmp='b-{seed}'}"])
    found = [
        (trial.seed, trial.config.train.init_from, trial.config.nsa.backends["cmp"]) for trial in plan.trials if trial.variant.arm == "nsa"
    ]
    assert set(found) == {(seed, f"a-{seed}", f"b-{seed}") for seed in (3, 4)}
    # a variant is one line of the table for all seeds
    assert len(plan.variants) == len(plan.trials) / 2


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ('recipe = "tiny.toml"', "recipe = 3", 'plan.toml: recipe=3 names no recipe; use recipe = "demo"'),
        ('recipe = "tiny.toml"', 'recipe = "tinny.toml"', "RECIPE='tinny.toml' is neither a shipped recipe nor a file"),
        ('baseline = "dense"', 'baseline = "dens"', "plan.toml: baseline='dens' is none of the arms (dense, nsa); name one of them"),
        ("[3, 4]", "[3, 3]", "plan.toml: seeds=[3, 3] names a seed twice; name each once"),
        ("[3, 4]", "3", "plan.toml: seeds=3 is not a list of integers; use seeds = [0, 1, 2]"),
        ("[grid]", "[gird]", "plan.toml: gird is unknown; use one of recipe, baseline, seeds, set, arms, grid"),
        ("train.lr = [1e-3, 1e-2]", "train.lr = 1e-3", "plan.toml: grid.train.lr=0.001 is not a list of values; use [0.001]"),
        ("[arms.dense]", "[harms.dense]", "plan.toml: harms is unknown"),
        ("train.steps = 2", "train.stepz = 2", "plan.toml: dense, lr=0.001: train.stepz is unknown (every key is read or refused)"),
        ("train.steps = 2", "steps = 2", "plan.toml: dense, lr=0.001: steps is not of the form table.key; use train.steps"),
        ("[1e-3, 1e-2]", "[1e-3, -1]", "plan.toml: dense, lr=-1: train.lr=-1 is not a number from 1e-12 to 100"),
        ("[1e-3, 1e-2]", "[" + "1e-3, " * 5001 + "]", "plan.toml: 20,004 trials are more than 10,000; cut the grid"),
        ("[1e-3, 1e-2]", "[1e-3, 0.001]", "plan.toml: grid.train.lr=[0.001, 0.001] has equal values (they would be one line"),
        ("[1e-3, 1e-2]", "[1, 1.0]", "plan.toml: grid.train.lr=[1, 1.0] has equal values"),
        ("[arms.nsa]", '[arms.""]', "plan.toml: arms.'' names no arm (the rule: a letter or digit, for the table and for names of di"),
        ("[arms.nsa]", '[arms."/ ."]', "plan.toml: arms.'/ .' names no arm (the rule: a letter or digit, "),
        ("[arms.nsa]", '[arms."a b"]\n[arms.a_b]', "plan.toml: 2 runs have the directory 'a_b_lr=0.001_seed=3' (each has its own"),
        ("[arms.nsa]", f"[arms.{'n' * 230}]", "of 246 bytes (the rule: at most 240); use shorter names"),
        ("train.steps = 2", "train.seed = 2", "plan.toml: set.train.seed=2 is not read (each trial has one of the plan's seeds)"),
        (
            "train.lr = [1e-3, 1e-2]",
            "train.seed = [1, 2]",
            "plan.toml: grid.train.seed=[1, 2] is not read (each trial has one of the plan's",
        ),
        ("[arms.nsa]", "[arms.nsa]\ntrain.seed = 5", "plan.toml: arms.nsa.train.seed=5 is not read"),
        (
            "[arms.nsa]",
            "[arms.nsa]\ntrain.lr = 1e-4",
            "plan.toml: arms.nsa.train.lr=0.0001 is not read (grid.train.lr sets it in every trial); drop one of the two",
        ),
        ("train.steps = 2", "train.lr = 2e-4", "plan.toml: set.train.lr=0.0002 is not read (grid.train.lr sets it in every trial)"),
        ("[1e-3, 1e-2]", "[]", "plan.toml: grid.train.lr=[] is not a list of values; name one value or more, or drop the key"),
        ('baseline = "dense"', 'baseline = ["dense"]', "plan.toml: baseline=['dense'] is none of the arms (dense, nsa); name one of them"),
        ("[set]", "[set", "plan.toml cannot be read as TOML"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(plan_file: Path, was: str, becomes: str, message: str) -> None:
    assert was in plan_file.read_text()
    plan_file.write_text(plan_file.read_text().replace(was, becomes))
    with pytest.raises(OptionError) as caught:
        load_plan(str(plan_file))
    assert message in str(caught.value)


def test_a_grid_is_counted_before_its_points_are_made(plan_file: Path) -> None:
    keys = "\n".join(f"train.key{number} = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for number in range(12))
    plan_file.write_text(f"{plan_file.read_text()}\n{keys}\n")
    with pytest.raises(OptionError, match="8,000,000,000,000 trials are more than 10,000; cut the grid"):
        load_plan(str(plan_file))


def test_the_seed_of_trials_is_none_of_the_options(plan_file: Path) -> None:
    with pytest.raises(
        OptionError, match=r"--set train.seed=7 is not read \(each trial has one of the plan's seeds\); change seeds in plan.toml"
    ):
        load_plan(str(plan_file), ["train.seed=7"])


def test_an_unknown_plan_is_refused_with_those_that_are_shipped() -> None:
    with pytest.raises(OptionError, match="PLAN='recal' is neither a shipped plan nor a file; use one of recall, or a TOML file's path"):
        load_plan("recal")


@pytest.mark.parametrize("name", shipped_plans("ablate"))
def test_a_shipped_plan_can_be_run(name: str) -> None:
    plan = load_plan(name)
    assert plan.baseline in {trial.variant.arm for trial in plan.trials}
    assert load_config("demo") not in [trial.config for trial in plan.trials]


def test_settings_are_the_keys_that_differ_from_their_defaults(plan_file: Path) -> None:
    trial = load_plan(
        str(plan_file), ["train.device=cpu", "train.grad_clip=inf", "train.seq_len=64", "nsa.branches=['slc', 'win']"]
    ).trials[0]
    settings = trial.settings
    given = {"train.seq_len": 64, "nsa.branches": ["slc", "win"], "model.attention": "dense", "train.seed": 3, "train.grad_clip": "inf"}
    assert {name: settings[name] for name in given} == given
    # defaults, and what depends on the machine
    assert not {"model.layers", "nsa.backends", "nsa.kv", "data.mix", "train.device", "train.weight_decay"} & set(settings)
    tables: dict[str, dict[str, Any]] = {}
    for name, value in {**settings, "train.device": "cpu", "train.grad_clip": math.inf}.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    assert structure(tables) == trial.config


@pytest.mark.parametrize(
    "override", ["data.path='b.txt'", "data.prefetch=9", "data.progress_every=9", "data.timeout_s=9", "data.workers=9", "train.device=cpu"]
)
def test_what_differs_between_machines_is_no_setting(plan_file: Path, override: str) -> None:
    assert override.partition("=")[0] in MACHINE_KEYS
    text = ["data.source=text", "data.path='a.txt'", "data.needle_pairs=8", "data.needle_queries=8"]
    one, other = (load_plan(str(plan_file), words).trials[0] for words in (text, [*text, override]))
    assert one.config != other.config
    assert one.settings == other.settings
