"""Plans of `nsa-bench needle`: stages in order, needles out of reach, seeds apart."""

from pathlib import Path

import pytest

from nsa_bench.ablate import shipped_plans
from nsa_bench.errors import OptionError
from nsa_bench.needle.plan import NeedlePlan, load_plan

EVIDENCE = sorted((Path(__file__).parents[4] / "docs/evidence/needle-64k").glob("*.toml"))


def planned(plan_file: Path, *overrides: str) -> NeedlePlan:
    return load_plan(str(plan_file), plan_file.parent / "out", overrides)[0]


def test_each_stage_begins_with_the_weights_of_the_one_before(plan_file: Path) -> None:
    plan = planned(plan_file, "train.lr=2e-3")
    assert [arm.name for arm in plan.arms] == ["nsa", "dense"]
    for arm in plan.arms:
        first, second = arm.stages
        assert (first.config.train.seq_len, second.config.train.seq_len, second.config.train.lr) == (40, 56, 2e-3)
        assert first.config.train.init_from is None
        assert second.config.train.init_from == str(plan_file.parent / "out/runs" / first.name)
        assert second.config.model.attention == arm.name


def test_weights_from_outside_are_those_of_the_first_stage(plan_file: Path) -> None:
    for arm in planned(plan_file, "train.init_from='runs/short'").arms:
        first, second = (stage.config.train.init_from for stage in arm.stages)
        assert (first, second) == ("runs/short", str(plan_file.parent / "out/runs" / arm.stages[0].name))
    before, stage, after = plan_file.read_text().rpartition("[[stages]]\n")
    plan_file.write_text(f"{before}{stage}train.init_from = 'runs/short'\n{after}")
    with pytest.raises(OptionError, match=r"stages\[2\]\.train\.init_from='runs/short' is not read .* set it in the first stage"):
        planned(plan_file)


@pytest.mark.parametrize(("key", "value", "first"), [("needle_symbols", 16, 8), ("needle_tokens", 1, 2)])
def test_arms_that_learn_other_pairs_than_the_haystacks_hold_are_refused(plan_file: Path, key: str, value: int, first: int) -> None:
    plan_file.write_text(plan_file.read_text().replace("[arms.dense]\n", f"[arms.dense]\ndata.{key} = {value}\n"))
    with pytest.raises(OptionError, match=rf"data\.{key}={value} of the arm 'dense' is {first} in the arm 'nsa' .* use one value"):
        planned(plan_file)


@pytest.mark.parametrize("length", [64, 65, 79, 80, 200])
@pytest.mark.parametrize(
    "sets",
    [(), ("nsa.window_size=1",), ("nsa.window_size=29",), ("nsa.num_local_blocks=3", "nsa.num_initial_blocks=1", "nsa.window_size=4")],
)
def test_needles_reach_from_the_initial_blocks_to_what_no_row_of_the_question_reads(
    plan_file: Path, length: int, sets: tuple[str, ...]
) -> None:
    plan = planned(plan_file, f"grid.lengths=[{length}]", "grid.depths=2", *sets)
    geometry, size = plan.arms[0].config.nsa_config().geometry, plan.task.pair_ids
    block = geometry.selection_block_size

    def is_forced(token: int) -> bool:
        """Whether some row of the question reads `token` without having chosen it."""
        rows = range(length - size, length)
        near = any(row - geometry.window_size < token or token // block > row // block - geometry.num_local_blocks for row in rows)
        return near or token // block < geometry.num_initial_blocks

    slots = plan.needle_slots(length)
    assert len(slots) == plan.grid.depths
    assert not any(is_forced(token) for slot in slots for token in range(slot * size, (slot + 1) * size))
    for outside in (slots[0] - 1, slots[-1] + 1):
        assert any(is_forced(token) for token in range(outside * size, (outside + 1) * size))


def test_depths_are_spread_evenly(plan_file: Path) -> None:
    slots = planned(plan_file, "grid.lengths=[400]", "grid.depths=5").needle_slots(400)
    gaps = {after - before for before, after in zip(slots[:-1], slots[1:], strict=True)}
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grid.seed=0", "grid.seed=0 is a seed of training (an evaluation has its own); use 1"),
        ("data.shuffle_seed=5", "grid.seed=5 is a seed of training"),
        ("grid.lengths=[32]", "grid.lengths has 32, with room for 2 of 3 depths"),
        ("grid.distractors=20", "grid.lengths has 64, whose 15 slots do not hold 23 pairs"),
        ("grid.distractors=62", "leaves keys that are not unique"),
        ("grid.distractors=[2]", "grid.distractors has 1 numbers for 2 lengths; use one for each, or one for all"),
        ("grid.distractors=[2, 17]", "grid.lengths has 80, whose 19 slots do not hold 20 pairs"),
        ("grid.distractors=[2, -1]", "grid.distractors=[2, -1] is no list of whole numbers of at least 0"),
        ("grid.depth=3", "grid.depth is unknown; use one of lengths, depths"),
        ("grid.samples=0", "grid.samples=0 is no whole number of at least 1; use 10"),
        ("grid.lengths=64", "grid.lengths=64 is no list of whole numbers of at least 1; use [1024, 2048]"),
        ("grid.lengths=[]", "grid.lengths=[] is no list of whole numbers of at least 1; use [1024, 2048]"),
        ("grid.lengths=[64, 64]", "grid.lengths=[64, 64] names a length twice (each is evaluated once); name each once"),
        (f"grid.lengths=[{10**30}]", f"grid.lengths=[{10**30}] is too large (the rule: at most 9,223,372,036,854,775,807)"),
        (f"grid.seed={2**63}", f"grid.seed={2**63} is too large (the rule: at most 9,223,372,036,854,775,807); use 10"),
        ("data.source=synthetic", "data.source='synthetic' hides no pairs"),
        ("train.lrr=3", "train.lrr is unknown"),
    ],
)
def test_what_cannot_be_is_refused(plan_file: Path, override: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        planned(plan_file, override)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[stages]]", "[[stage]]", "stage is unknown; use one of recipe, set, arms, stages, grid"),
        ('recipe = "tiny.toml"', "", "recipe=None names no recipe"),
        ("[arms.", "[set.", "arms are missing"),
        ("[grid]", "[set.grid]", "grid is missing; use a section [grid]"),
        ("depths = 3", "", "grid.depths is missing; use grid.depths = 10"),
        ("train.steps = 1", "steps = 1", "stages are missing"),
        ("[arms.nsa]", '[arms.""]', "plan.toml: arms.'' names no arm (the rule: a letter or digit, for the table and for "),
        ("[arms.nsa]", '[arms."a b"]\n[arms.a_b]', "2 runs have the directory 'a_b_stage=1_seed=0' (each has its own"),
    ],
)
def test_a_plan_that_lacks_something_is_refused(plan_file: Path, old: str, new: str, message: str) -> None:
    plan_file.write_text(plan_file.read_text().replace(old, new))
    with pytest.raises(OptionError, match="plan.toml: ") as refused:
        planned(plan_file)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", [*shipped_plans("needle"), *map(str, EVIDENCE)])
def test_a_plan_of_ours_can_be_run(name: str) -> None:
    plan, _ = load_plan(name)
    assert {arm.name for arm in plan.arms} >= {"nsa", "dense"}
    assert all(later.config.train.seq_len >= arm.stages[0].config.train.seq_len for arm in plan.arms for later in arm.stages)


def test_an_override_never_replaces_what_defines_an_arm(plan_file: Path) -> None:
    with pytest.raises(OptionError, match=r"--set model.attention would replace that key of section arms.dense, which defines the arm"):
        load_plan(str(plan_file), None, ["model.attention=nsa"])
    load_plan(str(plan_file), None, ["train.lr=0.01"])


def test_an_unknown_plan_is_refused() -> None:
    with pytest.raises(OptionError, match="PLAN='tinny' is neither a shipped plan nor a file; use one of tiny"):
        load_plan("tinny")


def test_a_plan_that_is_no_toml_is_named_once(plan_file: Path) -> None:
    plan_file.write_text("[[")
    with pytest.raises(OptionError) as refused:
        planned(plan_file)
    assert str(refused.value).startswith(f"{plan_file} cannot be read as TOML (")
    assert str(refused.value).count(str(plan_file)) == 1
