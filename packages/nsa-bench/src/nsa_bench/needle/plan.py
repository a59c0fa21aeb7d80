"""The stages and the grid that PLAN.toml describes. A plan that cannot be read is refused without torch.

recipe = "demo"                      # a shipped recipe, or a TOML file in the folder of the plan

[set]                                # keys of every stage
data.source = "needle"

[arms.nsa]                           # keys of one arm; an arm without keys is the recipe itself
[arms.dense]
model.attention = "dense"

[[stages]]                           # each begins with the weights of the stage before
train.seq_len = 1024
train.steps = 1000
[[stages]]
train.seq_len = 8192
train.steps = 200

[grid]                               # the evaluation; the model is that of the last stage
lengths = [1024, 8192, 16384]        # tokens, question and answer included
depths = 10                          # positions from the initial blocks to the window of the question
samples = 20                         # haystacks of a length, each with a pair at every depth
distractors = 16                     # further pairs in a haystack, which no question asks for; or a list with a number for each length
seed = 1                             # of the haystacks, and of shuffled choices
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attrs import evolve, fields_dict, frozen

from nsa_bench.ablate import shipped_plans
from nsa_bench.ablate.plan import Trial, Variant, broken_names, flat_keys, nameless, overlapping
from nsa_bench.ablate.run import TrialFolder
from nsa_bench.errors import OptionError
from nsa_core.config import BlockGeometry
from nsa_core.serialization import toml_value
from nsa_train.errors import ConfigError
from nsa_train.settings.config import RunConfig, listed
from nsa_train.settings.recipe import apply_override, load_config, read_toml
from nsa_train.settings.rules import MOST_SEED

if TYPE_CHECKING:
    from nsa_train.data.retrieval import Retrieval

KEYS = ("recipe", "set", "arms", "stages", "grid")


class Cell(NamedTuple):
    """The answers at one length and depth."""

    mode: str
    length: int
    """Tokens, question and answer included."""
    depth: int
    """Index of the depth; 0 is the first."""
    position: int
    """Position at which the needle begins."""
    samples: int
    right: int
    """Number of answers that are right in every token."""
    found: int | None
    """Answers for which, before their first token, some KV head of some layer chose the needle's block; None for a dense model."""


@frozen(kw_only=True)
class Grid:
    """The cells of the evaluation: lengths x depths."""

    lengths: tuple[int, ...]
    depths: int
    samples: int
    distractors: tuple[int, ...]
    """For each of `lengths`."""
    seed: int = 1
    chunk: int = 4096
    """Tokens of each haystack that one pass of the prefill reads."""
    batch_tokens: int = 2**20
    """Maximum tokens of the haystacks that are read at the same time; at least one haystack is read."""


@frozen(kw_only=True)
class Arm:
    """One model: its stages as trials, in order."""

    name: str
    stages: tuple[Trial, ...]

    @property
    def config(self) -> RunConfig:
        """The recipe of the last stage, whose model is evaluated."""
        return self.stages[-1].config


@frozen(kw_only=True)
class NeedlePlan:
    """The arms, and the grid on which all are evaluated."""

    name: str
    arms: tuple[Arm, ...]
    grid: Grid

    @property
    def task(self) -> "Retrieval":
        """The task of the last stage, which is that of all arms; haystacks differ in length and pairs."""
        from nsa_train.data.retrieval import Retrieval

        config = self.arms[0].config
        return Retrieval.of(config.data, config.train.seq_len)

    def haystack(self, length: int) -> "Retrieval":
        """Return the task whose haystack, with a question and its answer, takes `length` tokens."""
        pairs = self.grid.depths + self.distractors(length)
        task = evolve(self.task, pairs=pairs, queries=self.grid.depths, copies=False)
        return evolve(task, length=length - task.pair_ids + task.tail)

    def distractors(self, length: int) -> int:
        """Return the number of pairs in a haystack of `length` tokens that no question asks for."""
        return self.grid.distractors[self.grid.lengths.index(length)]

    def needle_slots(self, length: int) -> list[int]:
        """Return the slots of the needles, first to last: spread evenly from the initial blocks to the window of the question.

        A slot holds one pair. The bounds come from the widest layer of any arm, so that all arms get the same positions.
        """
        slots = self._free_slots(length)
        steps = max(self.grid.depths - 1, 1)
        return [slots[(len(slots) - 1) * index // steps] for index in range(self.grid.depths)]

    def _free_slots(self, length: int) -> range:
        """Return the slots that no row of the question reads through an initial block, a local block or the window."""
        size, question = self.task.pair_ids, length - self.task.pair_ids
        geometries = [layer.config.geometry for arm in self.arms for layer in arm.config.pattern()]
        first = max(geometry.num_initial_blocks * geometry.selection_block_size for geometry in geometries)
        return range(-(-first // size), min(_first_in_reach(question, geometry) for geometry in geometries) // size)

    def _other_tasks(self) -> Iterator[str]:
        """Yield each key of a last stage that differs between arms and would make their haystacks differ."""
        first, *others = self.arms
        for arm in others:
            for name in ("needle_symbols", "needle_tokens"):
                asked, trained = (getattr(one.config.data, name) for one in (first, arm))
                if asked != trained:
                    yield (
                        f"data.{name}={trained} of the arm {arm.name!r} is {asked} in the arm {first.name!r} (all arms are asked in the same "
                        "haystacks); use one value for the last stage of all arms"
                    )

    def problems(self) -> list[str]:
        """Return the reasons why the arms cannot be trained below one directory, or evaluated on the grid."""
        found = list(broken_names([stage.name for arm in self.arms for stage in arm.stages]))
        for length in self.grid.lengths:
            free, task = len(self._free_slots(length)), self.haystack(length)
            if free < self.grid.depths:
                found.append(
                    f"grid.lengths has {length}, with room for {free} of {self.grid.depths} depths (needles lie between the initial blocks and "
                    "what the question reads by its window or its local blocks); use longer ones, or fewer depths"
                )
            elif task.slots < task.pairs:
                found.append(
                    f"grid.lengths has {length}, whose {task.slots} slots do not hold {task.pairs} pairs (a needle at each depth, and the "
                    "distractors); use fewer distractors"
                )
        found += list(self._other_tasks())
        task, most = self.task, max(self.grid.distractors)
        if task.symbols**task.tokens < self.grid.depths + most:
            found.append(f"grid.distractors={most} leaves keys that are not unique (data.needle_symbols, needle_tokens); use fewer")
        for stage in (stage for arm in self.arms for stage in arm.stages):
            config = stage.config
            if self.grid.seed in (config.data.shuffle_seed, config.train.seed):
                found.append(f"grid.seed={self.grid.seed} is a seed of training (an evaluation has its own); use {_free_seed(config)}")
                break
        return found


def _first_in_reach(question: int, geometry: BlockGeometry) -> int:
    """Return the first token that rows from `question` on read through the window or local blocks, whatever blocks they choose."""
    own = question // geometry.selection_block_size
    return max(0, min(question - geometry.window_size + 1, (own - geometry.num_local_blocks + 1) * geometry.selection_block_size))


def _free_seed(config: RunConfig) -> int:
    return next(seed for seed in range(1, 4) if seed not in (config.data.shuffle_seed, config.train.seed))


def load_plan(plan: str, root: Path | None = None, overrides: Sequence[str] = ()) -> tuple[NeedlePlan, Path]:
    """Return the plan of a shipped name or a TOML file, and the directory of its runs, by default needles/PLAN.

    `overrides` (`table.key=value`) replace keys of every stage; those of table `grid` are the grid's.

    Raises:
        OptionError: with a line for each fault of the plan.
    """
    path = shipped_plans("needle").get(plan, Path(plan))
    if not path.is_file():
        raise OptionError(
            f"PLAN={plan!r} is neither a shipped plan nor a file; use one of {listed(shipped_plans('needle'))}, or a TOML file's path"
        )
    out = root or Path("needles") / path.stem
    try:
        content = read_toml(path)
    except ConfigError as error:
        # the error names the path
        raise OptionError(str(error)) from None
    try:
        for override in overrides:
            if override.partition(".")[0].strip() == "grid":
                apply_override(content, override)
        problems = [*_problems(content)]
        if problems:
            raise OptionError.of([f"{path.name}: {problem}" for problem in problems])
        nearby = path.parent / content["recipe"]
        recipe = str(nearby) if nearby.is_file() else content["recipe"]
        own = [override for override in overrides if override.partition(".")[0].strip() != "grid"]
        if replaced := [*_replaced(content["arms"], own)]:
            raise OptionError.of([f"{path.name}: {problem}" for problem in replaced])
        arms = tuple(_arm(name, content, recipe, own, out) for name in content["arms"])
    except ConfigError as error:
        raise OptionError.of([f"{path.name}: {line}" for line in str(error).splitlines()]) from None
    found = NeedlePlan(name=path.stem, arms=arms, grid=_grid_of(content["grid"]))
    if problems := found.problems():
        raise OptionError.of([f"{path.name}: {problem}" for problem in problems])
    return found, out


def _replaced(arms: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Yield a line for each key of an arm that one of `overrides` would replace."""
    for key in (override.partition("=")[0].strip() for override in overrides):
        for arm in (arm for arm, tables in arms.items() if overlapping([key], flat_keys(tables))):
            yield f"--set {key} would replace that key of section arms.{arm}, which defines the arm; leave it out"


def _grid_of(table: Mapping[str, Any]) -> Grid:
    lengths, distractors = tuple(table["lengths"]), table.get("distractors", 0)
    each = tuple(distractors) if isinstance(distractors, list) else (distractors,) * len(lengths)
    return Grid(**{**table, "lengths": lengths, "distractors": each})


def _arm(name: str, content: Mapping[str, Any], recipe: str, overrides: Sequence[str], out: Path) -> Arm:
    """Return the stages of an arm, with runs below `out`. Each stage starts from the previous stage's run, the first as its settings say."""
    stages: list[Trial] = []
    for number, stage in enumerate(content["stages"], 1):
        tables = (content.get("set", {}), content["arms"][name], stage)
        settings = [f"{key}={toml_value(value)}" for part in tables for key, value in flat_keys(part).items()]
        start = [f"train.init_from={toml_value(str(TrialFolder(out, stages[-1]).run.root.absolute()))}"] if stages else []
        config = load_config(recipe, [*settings, *overrides, *start])
        if config.data.source != "needle":
            raise OptionError(f"data.source={config.data.source!r} hides no pairs; use data.source = 'needle' in section [set]")
        stages.append(Trial(Variant(name, (("needle.stage", number),)), config.train.seed, config))
    return Arm(name=name, stages=tuple(stages))


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name} is unknown; use one of {listed(KEYS)}" for name in content if name not in KEYS)
    if not isinstance(content.get("recipe"), str):
        yield f'recipe={content.get("recipe")!r} names no recipe; use recipe = "demo"'
    arms, stages = content.get("arms"), content.get("stages")
    if not (isinstance(arms, dict) and arms and all(map(_is_tables, arms.values()))):
        yield 'arms are missing; use [arms.NAME] with the keys of an arm, for instance [arms.dense] with model.attention = "dense"'
    else:
        yield from nameless(arms)
    if not (isinstance(stages, list) and stages and all(map(_is_tables, stages))):
        yield "stages are missing; use [[stages]] with train.seq_len and train.steps"
    else:
        for number, stage in enumerate(stages[1:], 2):
            if "init_from" in (train := stage.get("train", {})):
                yield (
                    f"stages[{number}].train.init_from={train['init_from']!r} is not read (a stage begins with the weights of the one before); "
                    "set it in the first stage"
                )
    if not _is_tables(content.get("set", {})):
        yield f"set={content['set']!r} is not a table of keys; use a section [set] with train.lr = 1e-3, for instance"
    yield from _broken_grid(content.get("grid"))


def _is_tables(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(keys, dict) for keys in value.values())


def _broken_grid(grid: Any) -> Iterator[str]:
    if not isinstance(grid, dict):
        yield "grid is missing; use a section [grid] with lengths, depths and samples"
        return
    known = fields_dict(Grid)
    yield from (f"grid.{name} is unknown; use one of {listed(known)}" for name in grid if name not in known)
    for name in ("lengths", "depths", "samples"):
        if name not in grid:
            yield f"grid.{name} is missing; use grid.{name} = {'[1024, 2048]' if name == 'lengths' else 10}"
    for name, value in grid.items():
        least = 0 if name in ("distractors", "seed") else 1
        is_list = name == "lengths" or (name == "distractors" and isinstance(value, list))
        numbers = value if is_list and isinstance(value, list) and value else [None if is_list else value]
        if name in known and not all(isinstance(number, int) and not isinstance(number, bool) and number >= least for number in numbers):
            kind = "list of whole numbers" if is_list else "whole number"
            yield f"grid.{name}={value!r} is no {kind} of at least {least}; use {'[1024, 2048]' if is_list else max(least, 10)}"
        elif name == "distractors" and is_list and isinstance(lengths := grid.get("lengths"), list) and len(value) != len(lengths):
            yield f"grid.distractors has {len(value)} numbers for {len(lengths)} lengths; use one for each, or one for all"
        elif name == "lengths" and len(set(value)) < len(value):
            yield f"grid.lengths={value!r} names a length twice (each is evaluated once); name each once"
        elif name in known and max(numbers) > MOST_SEED:
            yield f"grid.{name}={value!r} is too large (the rule: at most {MOST_SEED:,}); use {'[1024, 2048]' if is_list else 10}"
