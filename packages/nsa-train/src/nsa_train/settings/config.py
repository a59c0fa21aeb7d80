"""The four tables of a run: `model`, `nsa`, `data`, `train`. Frozen, validated when built.

Every key that a recipe may hold is a field below, and every field is read somewhere; an unknown key is refused with the
nearest known one. `nsa_core.NSAConfig`, which `nsa_config` builds, checks the values of `nsa`.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import cattrs
from attrs import evolve, field, fields, frozen

from nsa_core.config import BlockGeometry, NSAConfig, RopeScaling, nearest_multiples, scaling_fields
from nsa_core.errors import ConfigError as CoreConfigError
from nsa_train.errors import ConfigError
from nsa_train.settings.data_table import DataTable
from nsa_train.settings.rules import (
    MOST_ACCUMULATED,
    MOST_ROWS,
    MOST_SEED,
    MOST_STEPS,
    Rule,
    Table,
    flag,
    integer,
    limited,
    number,
    one_of,
    optional_text,
    short,
    shown,
    undivided_rows,
)
from nsa_train.settings.structuring import uncasting_converter

ATTENTIONS = ("nsa", "dense")
LAYER_SIZES = tuple(item.name for item in fields(BlockGeometry))
LAYER_KEYS = ("branches", *LAYER_SIZES)
"""Keys of table `nsa` that a layer may override."""


def _tuple_of_list(value: Any) -> Any:
    return tuple(map(_tuple_of_list, value)) if isinstance(value, list) else value


def _layers(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    return tuple({key: _tuple_of_list(own) for key, own in layer.items()} if isinstance(layer, Mapping) else layer for layer in value)


_LAYERS = Rule(lambda value: isinstance(value, tuple), "a list of layers", '["dense", "nsa"]')


@frozen(kw_only=True)
class ModelTable(Table):
    """The decoder."""

    table = "model"
    dim: int = integer(at_least=1, at_most=65_536, example=128)
    """Width of the residual stream."""
    n_layers: int = integer(at_least=1, at_most=4096, example=4)
    n_heads: int = integer(at_least=1, at_most=4096, example=4)
    """H: query heads."""
    n_kv_heads: int = integer(at_least=1, at_most=4096, example=2)
    """G: KV heads; divides n_heads."""
    head_dim_qk: int = integer(at_least=2, at_most=4096, example=32)
    """D_k; even."""
    head_dim_v: int = integer(at_least=1, at_most=4096, example=32)
    """D_v."""
    attention: str = one_of(*ATTENTIONS, default="nsa")
    """"dense": the same decoder with full causal attention, the dense twin."""
    layers: tuple[Any, ...] = field(default=(), converter=_layers, metadata={"rule": _LAYERS})
    """A pattern of layers, repeated until there are n_layers. Each is "nsa", "dense", or a table of `attention` ("nsa" where it
    is left out), `branches` and block sizes that differ in this layer. Empty: all layers have `attention`."""
    vocab_size: int = integer(at_least=0, at_most=2**24, example=50304, default=0)
    """Rows of the embedding; 0: the number of the tokenizer's ids. A multiple of 64 suits a GPU: 50,304 for GPT-2's 50,257."""
    intermediate_size: int = integer(at_least=0, at_most=2**20, example=1024, default=0)
    """Width of the MLP; 0: 8/3 `dim`, rounded up to 64."""
    tie_embeddings: bool = flag(default=True)
    """The output layer shares the token embedding; else it has its own weight."""
    norm_eps: float | None = number(at_least=1e-12, at_most=1, example=1e-6, default=None)
    """Added to the mean square in RMSNorm; left out: 2^-23, the machine epsilon of float32 (float64: its own)."""
    max_position: int = integer(at_least=0, at_most=2**31 - 1, example=4096, default=0)
    """The longest sequence that the model is meant for; an export records it, and no row may be longer; 0: `train.seq_len`."""

    def broken_pairs(self) -> list[str]:
        """Return the problems of n_heads / n_kv_heads and head_dim_qk."""
        found: list[str] = []
        if self.n_heads % self.n_kv_heads:
            divisors = [count for count in range(1, self.n_heads + 1) if self.n_heads % count == 0]
            nearest = min(divisors, key=lambda count: abs(count - self.n_kv_heads))
            found.append(
                f"model.n_kv_heads={self.n_kv_heads} does not divide model.n_heads={self.n_heads} "
                f"(each KV head serves H/G query heads); use {nearest}"
            )
        if self.head_dim_qk % 2:
            found.append(f"model.head_dim_qk={self.head_dim_qk} is odd (RoPE rotates pairs); use {self.head_dim_qk + 1}")
        return found + self._broken_layers()

    def _broken_layers(self) -> list[str]:
        if not self.layers:
            return []
        found = [line for index, layer in enumerate(self.layers) for line in _broken_layer(f"model.layers[{index}]", layer)]
        if found:
            return found
        if self.attention == "dense":
            return ["model.layers would be ignored (model.attention='dense' makes all layers dense); use --set model.layers=[]"]
        if all(attention_of(layer) == "dense" for layer in self.layers):
            return ["model.layers has no nsa layer (that is the dense twin); use --set model.attention=dense --set model.layers=[]"]
        if self.n_layers % (count := len(self.layers)):
            return [
                f"model.layers has {count} layers, and model.n_layers={self.n_layers} (the pattern is repeated, whole); "
                f"use --set model.n_layers={nearest_multiples(self.n_layers, count).partition(' ')[0]}"
            ]
        return []


def _broken_layer(key: str, layer: Any) -> list[str]:
    """Return the problems of an entry of `model.layers`, its values apart."""
    if isinstance(layer, str) and layer in ATTENTIONS:
        return []
    if not isinstance(layer, Mapping):
        near = difflib.get_close_matches(str(layer).lower(), ATTENTIONS, n=1)
        return [f"{key}={short(layer)} is neither 'nsa', 'dense' nor a table; use {near[0] if near else 'nsa'!r}"]
    known, found = ("attention", *LAYER_KEYS), []
    for name in layer:
        if name in known:
            continue
        if name in {item.name for item in fields(NSATable)}:
            found.append(f"{key}.{name} is one of all layers (a layer has {listed(known)} of its own); use nsa.{name}")
        else:
            near = difflib.get_close_matches(name, known, n=1)
            found.append(
                f"{key}.{shown(name)} is unknown (a layer has {listed(known)}); " + (f"did you mean {near[0]}?" if near else "leave it out")
            )
    attention = attention_of(layer)
    if attention not in ATTENTIONS:
        near = difflib.get_close_matches(str(attention).lower(), ATTENTIONS, n=1)
        found.append(f"{key}.attention={short(attention)} is neither 'nsa' nor 'dense'; use {near[0] if near else 'nsa'!r}")
    elif attention == "dense" and not found and len(layer) > 1:
        found.append(f"{key} is dense and would ignore {listed(name for name in layer if name != 'attention')}; use 'dense'")
    return found


def attention_of(layer: Any) -> Any:
    """Return the attention of an entry of `model.layers`."""
    return layer.get("attention", "nsa") if isinstance(layer, Mapping) else layer


LEAST_SCALED, MOST_SCALED = 1e-6, 2**31 - 1
"""Bounds of any number in `nsa.rope_scaling`."""
SCALING_ADVICE = "use {kind = 'linear', factor = 2.0}"
_IN_TOML = {
    "use {'kind': 'linear', 'factor': 2.0}": SCALING_ADVICE,
    "use {'cmp': 'sdpa'}": "use {cmp = 'sdpa'}",
    "use attention_factor=None or kind='yarn'": "leave it away, or use kind='yarn'",
}
"""Advice of nsa-core, which is in Python -> the same in TOML."""
_DEFAULTS = {item.name: item.default for kind in (BlockGeometry, NSAConfig) for item in fields(kind)}


def _as_in_core(name: str, **bounds: float) -> Any:
    """Return the field of key `name` with nsa-core's default; `bounds`: those of `limited`."""
    return limited(_DEFAULTS[name], **bounds)


def _broken_scaling(table: Mapping[str, Any]) -> list[str]:
    """Return the problems of the keys of `nsa.rope_scaling`; a scaling by 1, nsa-core's default, would be none."""
    keys = [item.name for item in fields(RopeScaling)]
    names = list(scaling_fields(table))
    unknown = [
        f"nsa.rope_scaling.{shown(name)} is unknown (a scaling has {listed(keys)}); {SCALING_ADVICE}" for name in names if name not in keys
    ]
    missing = [f"nsa.rope_scaling={short(dict(table))} has no {name}; {SCALING_ADVICE}" for name in ("kind", "factor") if name not in names]
    return unknown or missing


@frozen(kw_only=True)
class NSATable(Table):
    """Native Sparse Attention; names, defaults and rules are those of `nsa_core.NSAConfig` and `BlockGeometry`."""

    table = "nsa"
    compression_block_size: int = _as_in_core("compression_block_size", at_most=2**24)
    """l."""
    compression_stride: int = _as_in_core("compression_stride", at_most=2**24)
    """d."""
    selection_block_size: int = _as_in_core("selection_block_size", at_most=2**24)
    """l'."""
    num_selected_blocks: int = _as_in_core("num_selected_blocks", at_most=2**16)
    """n, forced blocks included."""
    num_initial_blocks: int = _as_in_core("num_initial_blocks", at_most=2**16)
    num_local_blocks: int = _as_in_core("num_local_blocks", at_most=2**16)
    window_size: int = _as_in_core("window_size", at_most=2**31 - 1)
    """w, in tokens, the query's own included."""
    compressor: str = _DEFAULTS["compressor"]
    gate: str = _DEFAULTS["gate"]
    gate_hidden_size: int = _as_in_core("gate_hidden_size", at_most=65_536)
    gate_temperature: float = _as_in_core("gate_temperature", at_least=1e-6, at_most=10**6)
    rope_theta: float = _as_in_core("rope_theta", at_least=1, at_most=10**12)
    """The dense twin reads it too. Below 1 the pairs would rotate ever faster, beyond the resolution of float32."""
    rope_scaling: Any = None
    """None or a table such as {kind = "linear", factor = 2.0}; read by the dense twin too."""
    compressed_rope: str = _DEFAULTS["compressed_rope"]
    branches: tuple[str, ...] = field(default=_DEFAULTS["branches"], converter=_tuple_of_list)
    backends: Any = field(factory=dict)
    """Operation -> backend name; absent operations are routed by "auto"."""
    kv: str = _DEFAULTS["kv"]
    """"shared": one K and V for all branches, under the names of the dense twin, which always has one K and V."""
    qk_norm: bool = flag(default=_DEFAULTS["qk_norm"])
    """RMSNorm of every head of q and k before RoPE; the dense twin has it too."""
    qk_norm_eps: float = _as_in_core("qk_norm_eps", at_least=1e-12, at_most=1)
    """Added to the mean square of a head; the dense twin has it too."""
    qkv_bias: bool = flag(default=_DEFAULTS["qkv_bias"])
    """Biases of the projections of q, k and v; the dense twin has them too."""

    def broken_pairs(self) -> list[str]:
        """Return the problems of rope_scaling that nsa-core does not find."""
        if self.rope_scaling is None:
            return []
        if not isinstance(self.rope_scaling, Mapping):
            return [f"nsa.rope_scaling={short(self.rope_scaling)} is not a table; {SCALING_ADVICE}, or leave it away"]
        numbers = {name: value for name, value in self.rope_scaling.items() if isinstance(value, int | float)}
        large = [f"{name}={short(value)} is more than {MOST_SCALED:,}" for name, value in numbers.items() if value > MOST_SCALED]
        small = [f"{name}={value!r} is less than {LEAST_SCALED:g}" for name, value in numbers.items() if 0 < value < LEAST_SCALED]
        return [f"nsa.rope_scaling.{what} (no position is scaled by that much); {SCALING_ADVICE}" for what in (*large, *small)]


@frozen(kw_only=True)
class TrainTable(Table):
    """Length, speed and precision of training. A step is an optimizer step."""

    table = "train"
    steps: int = integer(at_least=1, at_most=MOST_STEPS, example=600)
    seq_len: int = integer(at_least=2, at_most=2**24, example=256)
    """T: tokens of one row; documents are cut across rows."""
    batch_size: int = integer(at_least=1, at_most=MOST_ROWS, example=8)
    """Rows of one micro-batch; a step consumes batch_size * accumulate * seq_len tokens."""
    accumulate: int = integer(at_least=1, at_most=MOST_ACCUMULATED, example=1, default=1)
    """Micro-batches per step."""
    lr: float = number(at_least=1e-12, at_most=100, example=3e-3)
    """Peak learning rate; the cosine ends at a tenth of it."""
    warmup_steps: int = integer(at_least=0, at_most=MOST_STEPS, example=20, default=0)
    weight_decay: float = number(at_least=1e-12, at_most=100, example=0.1, default=0.1, or_zero=True)
    """Weight decay, on parameters of two or more dimensions: never on norms, biases, embeddings."""
    grad_clip: float = number(at_least=1e-9, at_most=10**9, example=1.0, default=1.0, or_inf=True)
    """Largest global gradient norm; inf: no clipping."""
    log_every: int = integer(at_least=1, at_most=MOST_STEPS, example=10, default=10)
    eval_every: int = integer(at_least=1, at_most=MOST_STEPS, example=100, default=100)
    eval_batches: int = integer(at_least=1, at_most=100_000, example=16, default=16)
    """Maximum of validation batches in one evaluation, of batch_size rows each; synthetic ids have one."""
    save_every: int = integer(at_least=0, at_most=MOST_STEPS, example=500, default=0)
    """Steps between saves; 0: save only at the end, and when a signal or .HALT stops the run."""
    keep_last: int = integer(at_least=0, at_most=MOST_STEPS, example=3, default=0)
    """Number of newest checkpoints to keep; 0: all."""
    async_save: bool = flag(default=False)
    """Write checkpoints in the background; a save then waits only for the copy to host memory."""
    samples: bool = flag(default=True)
    """Write samples of the model's text before the first step and after the last."""
    selection_loss: float = number(at_least=1e-6, at_most=1000, example=0.1, default=0.0, or_zero=True)
    """Weight of an auxiliary loss, for each NSA layer, that teaches the choice of blocks what attention over all keys would read; 0: none.
    Without the branch cmp the keys of the choice are frozen, and only q learns."""
    selection_teacher: str | None = optional_text(example="'runs/dense'", is_removable=True)
    """Run, step-N directory or Hugging Face folder of a frozen model. selection_loss then teaches this model's attention over all keys instead
    of each layer's own. It needs as many layers and the same vocabulary. A resumed run reads it again, and may name another."""
    init_from: str | None = optional_text(example="'runs/short'")
    """Run, step-N directory or Hugging Face folder (`convert`, `ckpt export --format hf`) whose weights a new run begins with; rows,
    schedule, RoPE scaling and block sizes may be others where the shapes of the weights allow it. A run that is resumed has its own."""
    seed: int = integer(at_least=0, at_most=MOST_SEED, example=0, default=0)
    precision: str = one_of("fp32", "bf16", "fp16", default="fp32")
    """"bf16", "fp16": autocast; the weights stay float32. fp16 scales its loss."""
    activation_checkpointing: str = one_of("none", "full", "selective", default="none")
    """"full" recomputes each block in the backward pass; "selective" recomputes everything in it except products and attention."""
    loss_chunk: int = integer(at_least=0, at_most=2**31 - 1, example=4096, default=0)
    """Tokens whose logits exist at a time; 0: all of a micro-batch at once."""
    device: str = one_of("auto", "cpu", "cuda", default="auto")
    """"auto": a GPU if there is one. "cuda": only a GPU; preflight says what is missing."""
    compile: bool = flag(default=False)
    """Compile each block and the loss."""
    strategy: str = one_of("single", "ddp", "fsdp", default="single")
    """How several processes share the work; batch_size is the total of all processes."""
    nproc_per_node: int = integer(at_least=0, at_most=1024, example=2, default=0)
    """Processes per host with ddp and fsdp; 0: one per GPU, or one on a host without a GPU."""
    deterministic: bool = flag(default=False)
    """Refuse operations that may differ from run to run."""
    max_skips: int = integer(at_least=0, at_most=100, example=5, default=5)
    """How many of the last 100 steps may be skipped because of numbers that are not finite, or spikes; one more ends the run with exit code 4."""
    skip_loss_spikes: bool = flag(default=False)
    """Skip a step whose loss is 6 standard deviations above the mean of the 128 before it."""
    early_stop_patience: int = integer(at_least=0, at_most=MOST_STEPS, example=5, default=0)
    """Evaluations in a row without a better validation loss after which the run ends; 0: never."""
    profile: str = one_of("none", "nvtx", "branches", default="none")
    """"nvtx": ranges for a profiler; "branches": the time of each attention branch on logged steps."""

    def broken_pairs(self) -> list[str]:
        """Return the conflicts of warmup_steps with steps, a teacher with its loss, and processes with their strategy."""
        found = []
        if self.selection_teacher and not self.selection_loss:
            found.append(
                f"train.selection_teacher={short(self.selection_teacher)} teaches nothing with train.selection_loss=0 (its weight); "
                "use --set train.selection_loss=0.1"
            )
        if self.warmup_steps >= self.steps:
            found.append(
                f"train.warmup_steps={self.warmup_steps} leaves no step for the cosine of train.steps={self.steps} "
                f"(the rule: warmup_steps < steps); use {self.steps // 10}"
            )
        if self.strategy == "single" and self.nproc_per_node > 1:
            found.append(
                f"train.nproc_per_node={self.nproc_per_node} needs a strategy that shares the work (train.strategy='single' is one process); "
                "use --set train.strategy=ddp"
            )
        if self.nproc_per_node:
            found += undivided_rows(self.batch_size, [self.nproc_per_node], key="train.nproc_per_node")
        return found


class Layer(NamedTuple):
    """One layer of the decoder."""

    attention: str
    """"nsa" or "dense"."""
    config: NSAConfig
    """The layer's configuration, with its own branches and sizes; dense attention reads its heads and RoPE."""


@frozen(kw_only=True)
class RunConfig:
    """Everything on which a run depends, except code and machine."""

    model: ModelTable
    nsa: NSATable = field(factory=NSATable)
    data: DataTable
    train: TrainTable

    def __attrs_post_init__(self) -> None:
        if problems := self.data.broken_rows(self.train.seq_len):
            raise ConfigError.of(problems)
        if 0 < self.model.max_position < self.train.seq_len:
            raise ConfigError(
                f"train.seq_len={self.train.seq_len} is above model.max_position={self.model.max_position} (no row is longer than that); "
                f"use --set model.max_position={self.train.seq_len}"
            )
        for index, layer in enumerate(self.model.layers):
            self._table_of(index, layer)
        if self.train.profile == "branches" and self.model.attention == "dense":
            raise ConfigError(
                "train.profile='branches' would be ignored (model.attention='dense' has no branches); use --set train.profile=none"
            )

    def pattern(self, attention: str | None = None) -> tuple[Layer, ...]:
        """Return the layers that are repeated until there are `model.n_layers`; with `attention` ("nsa" or "dense"), the layers of that twin.

        Imports no torch.

        Raises:
            ConfigError: if core refuses a value of table `nsa`, or of a layer.
        """
        alike = self.nsa_config()
        attention = attention or self.model.attention
        if attention == "dense" or not self.model.layers:
            return (Layer(attention, alike),)
        return tuple(self._layer(index, layer) for index, layer in enumerate(self.model.layers))

    def nsa_config(self) -> NSAConfig:
        """Return the configuration of an attention layer without its own values. Imports no torch.

        Raises:
            ConfigError: if core refuses a value of table `nsa`.
        """
        return self._nsa_config(self.nsa)

    def _layer(self, index: int, layer: Any) -> Layer:
        try:
            return Layer(attention_of(layer), self._nsa_config(self._table_of(index, layer)))
        except ConfigError as error:
            raise _of_layer(index, layer, error) from None

    def _table_of(self, index: int, layer: Any) -> NSATable:
        """Return table `nsa` with the values that an entry of `model.layers` overrides."""
        try:
            return evolve(self.nsa, **{key: layer[key] for key in LAYER_KEYS if isinstance(layer, Mapping) and key in layer})
        except ConfigError as error:
            raise _of_layer(index, layer, error) from None

    def _nsa_config(self, table: NSATable) -> NSAConfig:
        scaling = table.rope_scaling
        if problems := [] if scaling is None else _broken_scaling(scaling):
            raise ConfigError.of(problems)
        values = attrs.asdict(table, recurse=False)
        sizes = {name: values.pop(name) for name in LAYER_SIZES}
        model = self.model
        try:
            return NSAConfig(
                hidden_size=model.dim,
                num_heads=model.n_heads,
                num_kv_heads=model.n_kv_heads,
                head_dim_qk=model.head_dim_qk,
                head_dim_v=model.head_dim_v,
                geometry=BlockGeometry(**sizes),
                **values,
            )
        except (CoreConfigError, TypeError) as error:
            raise ConfigError(_in_toml(_shortened(str(error), values | sizes))) from None


def _of_layer(index: int, layer: Any, error: ConfigError) -> ConfigError:
    """Return `error` about table `nsa` with the names of the keys that the layer overrides."""
    key, own = f"model.layers[{index}]", layer if isinstance(layer, Mapping) else {}
    lines = (line.removeprefix("nsa.") for line in str(error).splitlines())
    return ConfigError.of([f"{key}.{line}" if line.partition("=")[0] in own else f"{key}: nsa.{line}" for line in lines])


def _shortened(message: str, values: object) -> str:
    """Return the message of nsa-core with each long one of `values`, and of the keys and values inside, as `short` shows it."""
    inside = [*values, *values.values()] if isinstance(values, Mapping) else []
    for value in inside:
        message = _shortened(message.replace(repr(value), short(value)), value)
    return message


def _in_toml(message: str) -> str:
    """Return the message of nsa-core about a value, with the key that a recipe has and advice that it can take."""
    text, semicolon, advice = message.rpartition("; ")
    key = "nsa.rope_scaling" if message.partition("=")[0] in {item.name for item in fields(RopeScaling)} else "nsa"
    return f"{key}.{text}{semicolon}{_IN_TOML.get(advice, advice)}"


TABLES: dict[str, type] = {"model": ModelTable, "nsa": NSATable, "data": DataTable, "train": TrainTable}


def structure(tables: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that nested `tables` describe. Imports no torch: `nsa_config` checks table `nsa`.

    Raises:
        ConfigError: one line for every unknown key, missing key and value that breaks a rule.
    """
    problems = [
        f"{name}={short(value)} is not a table of keys; use a section [{name}]"
        for name, value in tables.items()
        if name in TABLES and not isinstance(value, Mapping)
    ]
    if problems:
        raise ConfigError.of(problems)
    try:
        return uncasting_converter(forbid_extra_keys=True).structure(tables, RunConfig)
    except (cattrs.ClassValidationError, ConfigError) as error:
        raise ConfigError.of(_problems(error)) from None


def unstructure(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return `config` as nested tables, without keys that have no value; `structure` reads it back equal."""
    tables: dict[str, dict[str, Any]] = uncasting_converter(forbid_extra_keys=True).unstructure(config)
    return {name: {key: value for key, value in table.items() if value is not None} for name, table in tables.items()}


def _problems(error: BaseException) -> list[str]:
    found: list[str] = []
    for entry in cattrs.transform_error(error, path="", format_exception=_describe):
        text, _, path = entry.rpartition(" @ ")
        key = path.removeprefix(".")
        prefix = f"{key}." if key else ""
        found.extend(line.replace("<key>", key).replace("<prefix>", prefix) for line in text.split("\n"))
    return found


def _describe(error: BaseException, _: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return "\n".join(_unknown_key(name, error.cl) for name in sorted(error.extra_fields))
    if isinstance(error, KeyError):
        return f"<key> is missing (it has no default); use {_example(str(error.args[0]))}"
    return str(error)


def _unknown_key(name: str, owner: type) -> str:
    known = [attribute.name for attribute in fields(owner)]
    here = [f"<prefix>{match}" for match in difflib.get_close_matches(name, known, n=1)]
    near = [key for key in keys_like(name) if key.endswith(f".{name}")] or here or keys_like(name)
    advice = f"did you mean {near[0]}?" if near else f"use one of {listed(known)}"
    return f"<prefix>{shown(name)} is unknown (every key is read or refused); {advice}"


def keys_like(name: str) -> list[str]:
    """Return the keys `table.key` whose key is `name`, else those whose key is most like it; empty if none is like it."""
    keys = [(table, item.name) for table, kind in TABLES.items() for item in fields(kind)]
    near = [name] if any(key == name for _, key in keys) else difflib.get_close_matches(name, [key for _, key in keys], n=1)
    return [f"{table}.{key}" for table, key in keys if key in near]


def refusal(problems: Sequence[str], key: str, value: object, own: object) -> tuple[str, str]:
    """Return the line of `problems` about `value` of `key`, and the same line with the recipe's `own` value as the advice.

    Without an own value, the advice is the key's default. Both lines are empty if `value` breaks no rule of this key alone.
    """
    table, _, name = key.partition(".")
    attribute = next((item for item in fields(TABLES[table]) if item.name == name), None) if table in TABLES else None
    if attribute is None:
        return "", ""
    if own is None and attribute.default is not attrs.NOTHING:
        own = attribute.default
    rule: Rule | None = attribute.metadata.get("rule")
    if rule is not None and not rule.holds(value):
        return rule.refusal(key, value), rule.refusal(key, value, instead=own)
    # nsa-core checks the table `nsa`, and reports the broken rule of a key
    is_core = table == "nsa"
    said = next((line for line in problems if is_core and line.startswith(f"{key}={short(value)} ") and "(the rule: " in line), "")
    return said, f"{said.rpartition('; use ')[0]}; use {own!r}" if said and isinstance(own, str | int | float) else said


def _example(name: str) -> str:
    if name in TABLES:
        return f"a section [{name}]"
    rules = [item.metadata["rule"] for kind in TABLES.values() for item in fields(kind) if item.name == name]
    return f"{name} = {rules[0].example}"


def listed(names: Iterable[str]) -> str:
    """Return `names` for a message: `a, b, c`."""
    return ", ".join(names)
