"""Configuration of Native Sparse Attention: frozen values that are checked when they are built.

The symbols are those of arXiv 2502.11089; docs/glossary.md lists them with the names used here.
"""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, Literal, get_args

from attrs import Attribute, converters, field, frozen, validators

from nsa_core.errors import ConfigError, type_of

Compressor = Literal["mlp", "conv", "mean"]
GateKind = Literal["sigmoid", "softmax"]
COLLAPSE_ENTROPY = 0.1
COLLAPSE_SHARE = 0.95
"""A gate has collapsed if the entropy of its shares, in nats, is below COLLAPSE_ENTROPY and the largest share above COLLAPSE_SHARE."""
CompressedRope = Literal["block_end", "tokens"]
KeysValues = Literal["separate", "shared"]
RopeScalingKind = Literal["linear", "yarn", "llama3"]
BRANCHES = ("cmp", "slc", "win")
OPERATIONS = ("cmp", "select", "slc", "win", "nsa", "append", "choose", "rotate")


MOST_SIZE = 2**20
"""Maximum of a width, a number of heads, and a size of a block. A weight whose size is the product of three of them has fewer than 2**63 elements."""
MOST_COUNT = 2**62
"""Maximum of a number of blocks and of the window: operations pass them as 64-bit integers."""


def _integer_at_least(minimum: int, *same_as: str, most: float = MOST_SIZE) -> Any:
    """Return a validator of an integer. Its message suggests the sum of the fields `same_as`, but at least `minimum`."""

    def check(instance: object, attribute: "Attribute[int]", value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            what = f"is {type_of(value)}"
        elif value < minimum:
            what = "is too small"
        elif value > most:
            raise ConfigError(f"{attribute.name}={value} is too large (the rule: an integer <= {most}); use {most} or less")
        else:
            return
        others = [getattr(instance, name) for name in same_as]
        use = max(minimum, sum(other for other in others if isinstance(other, int)))
        raise ConfigError(f"{attribute.name}={value!r} {what} (the rule: an integer >= {minimum}); use {use}")

    return check


def _number_above_zero(instance: object, attribute: "Attribute[float]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{attribute.name}={value!r} is not a finite number above 0 (the rule); use {attribute.default or 1.0}")


def _flag(instance: object, attribute: "Attribute[bool]", value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name}={value!r} is {type_of(value)} (the rule: True or False); use {attribute.default}")


def _one_of(choices: tuple[str, ...]) -> Any:
    def check(instance: object, attribute: "Attribute[str]", value: object) -> None:
        if value not in choices:
            names = ", ".join(repr(name) for name in choices)
            raise ConfigError(f"{attribute.name}={value!r} is unknown (the rule: one of {names}); use {choices[0]!r}")

    return check


def nearest_multiples(value: int, step: int, at_least: int = 1) -> str:
    """Return the multiples of `step` around `value`, none below `at_least`, as text for error messages: `48 or 64`."""
    below = value // step * step
    return f"{below} or {below + step}" if below >= at_least else str(-(-max(value, at_least) // step) * step)


def nearest_divisors(value: int, number: int) -> str:
    """Return the divisors of `number` around `value` as text, for error messages: `4 or 8`."""
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    below = [candidate for candidate in divisors if candidate < value][-1:]
    above = [candidate for candidate in divisors if candidate > value][:1]
    return " or ".join(str(candidate) for candidate in below + above)


def _nearest_compression_stride(block_size: int, stride: int, selection_size: int) -> int:
    common = [c for c in range(1, block_size + 1) if block_size % c == 0 and selection_size % c == 0]
    return min(common, key=lambda c: (abs(c - stride), c))


@frozen
class BlockGeometry:
    """Sizes of blocks and window, in tokens, and the number of selected blocks (section 3.3, arXiv 2502.11089).

    Raises:
        ConfigError: unless d | l, d | l', l <= l', num_initial_blocks + num_local_blocks <= n, and all are >= 1
            (num_initial_blocks >= 0).
    """

    compression_block_size: int = field(default=32, validator=_integer_at_least(1, "compression_stride"))
    """l: tokens that one compressed key / value summarises."""
    compression_stride: int = field(default=16, validator=_integer_at_least(1))
    """d: tokens between the starts of neighbouring compressed blocks."""
    selection_block_size: int = field(default=64, validator=_integer_at_least(1, "compression_block_size"))
    """l': tokens of one selection block."""
    num_selected_blocks: int = field(default=16, validator=_integer_at_least(1, "num_initial_blocks", "num_local_blocks", most=MOST_COUNT))
    """n: blocks that a query attends to, the forced ones included."""
    num_initial_blocks: int = field(default=1, validator=_integer_at_least(0, most=MOST_COUNT))
    """Number of blocks at the start of the sequence that every query selects."""
    num_local_blocks: int = field(default=2, validator=_integer_at_least(1, most=MOST_COUNT))
    """Number of blocks up to and including the query's own block that the query always selects."""
    window_size: int = field(default=512, validator=_integer_at_least(1, most=MOST_COUNT))
    """w: tokens of the sliding window, the query's own included."""

    def __attrs_post_init__(self) -> None:
        self._check_stride()
        if self.compression_block_size > self.selection_block_size:
            rounded = -(-self.compression_block_size // self.compression_stride) * self.compression_stride
            raise ConfigError(
                f"selection_block_size={self.selection_block_size} is smaller than compression_block_size="
                f"{self.compression_block_size} (Eq. 9 needs l <= l'); use {rounded}"
            )
        forced = self.num_initial_blocks + self.num_local_blocks
        if forced > self.num_selected_blocks:
            raise ConfigError(
                f"num_selected_blocks={self.num_selected_blocks} cannot hold num_initial_blocks={self.num_initial_blocks} + "
                f"num_local_blocks={self.num_local_blocks} (forced blocks count among the n); use {forced} or more"
            )

    def as_tuple(self) -> tuple[int, int, int, int, int, int, int]:
        """Return the seven numbers in the constructor's order, for custom ops and compiled graphs."""
        return (
            self.compression_block_size,
            self.compression_stride,
            self.selection_block_size,
            self.num_selected_blocks,
            self.num_initial_blocks,
            self.num_local_blocks,
            self.window_size,
        )

    def _check_stride(self) -> None:
        stride = self.compression_stride
        if self.compression_block_size % stride:
            use = _nearest_compression_stride(self.compression_block_size, stride, self.selection_block_size)
            raise ConfigError(
                f"compression_stride={stride} does not divide compression_block_size={self.compression_block_size} "
                f"(Eq. 9 needs d | l); use {use}"
            )
        if self.selection_block_size % stride:
            raise ConfigError(
                f"selection_block_size={self.selection_block_size} is not a multiple of compression_stride={stride} "
                f"(Eq. 9 needs d | l'); use {nearest_multiples(self.selection_block_size, stride, self.compression_block_size)}"
            )


@frozen(kw_only=True)
class RopeScaling:
    """RoPE scaling, to extend a model beyond its training length.

    `linear` divides every position by `factor`. `yarn` (arXiv 2309.00071) divides the frequencies of dimensions that rotate fewer than
    `beta_slow` times over `original_max_position`. It keeps the frequencies of dimensions with more than `beta_fast` rotations, and blends
    between the two. It multiplies cos and sin by `attention_factor` (None: 0.1 ln(factor) + 1), as Hugging Face Transformers does.
    `llama3` changes frequencies in the same way between `low_freq_factor` and `high_freq_factor` rotations. `linear` and `llama3` take no
    attention_factor.
    """

    kind: RopeScalingKind = field(validator=_one_of(get_args(RopeScalingKind)))
    factor: float = field(default=1.0, validator=_number_above_zero)
    original_max_position: int = field(default=4096, validator=_integer_at_least(1, most=inf))
    beta_fast: float = field(default=32.0, validator=_number_above_zero)
    beta_slow: float = field(default=1.0, validator=_number_above_zero)
    attention_factor: float | None = field(default=None, validator=validators.optional(_number_above_zero))
    low_freq_factor: float = field(default=1.0, validator=_number_above_zero)
    high_freq_factor: float = field(default=4.0, validator=_number_above_zero)

    def __attrs_post_init__(self) -> None:
        if self.factor < 1:
            raise ConfigError(f"factor={self.factor} would shrink positions (the rule: factor >= 1); use 1.0")
        if self.beta_slow >= self.beta_fast:
            raise ConfigError(f"beta_slow={self.beta_slow} is not below beta_fast={self.beta_fast} (YaRN's ramp); use 1.0 and 32.0")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor={self.low_freq_factor} is not below high_freq_factor={self.high_freq_factor} (llama3's ramp); use 1.0 and 4.0"
            )
        if self.kind != "yarn" and self.attention_factor is not None:
            raise ConfigError(
                f"attention_factor={self.attention_factor} with kind={self.kind!r} would be ignored (it divides positions and nothing else); "
                f"use attention_factor=None or kind='yarn'"
            )


SCALING_ALIASES = {"rope_type": "kind", "type": "kind", "original_max_position_embeddings": "original_max_position"}
"""Hugging Face's key -> the field of `RopeScaling`; a mapping may use either name."""


def scaling_fields(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return `table` with Hugging Face's keys renamed to the fields of `RopeScaling`.

    Raises:
        ConfigError: if two keys set the same field to different values.
    """
    fields: dict[str, Any] = {}
    for key, item in table.items():
        name = SCALING_ALIASES.get(str(key), str(key))
        if name in fields and fields[name] != item:
            raise ConfigError(
                f"rope_scaling={dict(table)!r} gives {name} as {fields[name]!r} and as {item!r} (the keys mean the same); drop one"
            )
        fields[name] = item
    return fields


def _to_rope_scaling(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    try:
        return RopeScaling(**scaling_fields(value))
    except TypeError as error:
        raise ConfigError(
            f"rope_scaling={dict(value)!r} does not describe a scaling ({error}); use {{'kind': 'linear', 'factor': 2.0}}"
        ) from None


@frozen(eq=False, repr=False)
class BackendNames(Mapping[str, str]):
    """An immutable mapping from operation to backend name; it equals any mapping with the same items."""

    _pairs: tuple[tuple[str, str], ...]

    def __getitem__(self, operation: str) -> str:
        return dict(self._pairs)[operation]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._pairs))

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(frozenset(self._pairs))

    def __repr__(self) -> str:
        return repr(dict(self._pairs))


def _to_backend_names(value: object) -> object:
    return BackendNames(tuple(value.items())) if isinstance(value, Mapping) else value


def _check_backends(instance: object, attribute: object, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"backends={value!r} is no table of operation -> backend name; use {{'cmp': 'sdpa'}}")
    for operation, name in value.items():
        if operation not in OPERATIONS:
            raise ConfigError(f"backends names the operation {operation!r} (the rule: one of {', '.join(OPERATIONS)}); use 'cmp'")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"backends[{operation!r}]={name!r} is not a backend's name; use 'auto' or 'sdpa'")


def _check_branches(instance: object, attribute: object, value: Any) -> None:
    is_choice = isinstance(value, tuple) and all(branch in BRANCHES for branch in value)
    if not is_choice or not value or len(set(value)) != len(value):
        # a list in double quotes is Python, TOML and JSON
        raise ConfigError(
            f"branches={value!r} is not a non-empty choice of 'cmp', 'slc', 'win', each once; use [\"cmp\", \"slc\", \"win\"]"
        )


def _in_paper_order(value: Any) -> Any:
    if isinstance(value, list | tuple) and all(branch in BRANCHES for branch in value):
        return tuple(sorted(value, key=BRANCHES.index))
    return tuple(value) if isinstance(value, list) else value


@frozen
class NSAConfig:
    """The configuration of a `NativeSparseAttention` layer.

    Raises:
        ConfigError: if a value, or a pair of values, breaks a rule; the message names a valid value.
    """

    hidden_size: int = field(validator=_integer_at_least(1))
    """Columns of x and of the layer's output."""
    num_heads: int = field(validator=_integer_at_least(1, "num_kv_heads"))
    """H: query heads."""
    num_kv_heads: int = field(validator=_integer_at_least(1))
    """G: KV heads (= GQA groups); query head h reads KV head h // (H // G)."""
    head_dim_qk: int = field(validator=_integer_at_least(2))
    """D_k; even, because RoPE rotates halves."""
    head_dim_v: int = field(validator=_integer_at_least(1))
    """D_v; may differ from D_k."""
    geometry: BlockGeometry = field(factory=BlockGeometry)
    """Sizes of blocks and window."""
    compressor: Compressor = field(default="mlp", validator=_one_of(get_args(Compressor)))
    """The kind of phi (Eq. 7); K and V each have their own phi."""
    gate: GateKind = field(default="sigmoid", validator=_one_of(get_args(GateKind)))
    """`sigmoid`: each gate is in (0, 1), independent of the others. `softmax`: the gates of a head sum to 1; needs two branches or more."""
    gate_hidden_size: int = field(default=64, validator=_integer_at_least(1))
    """Width of the gate MLP's hidden layer."""
    gate_temperature: float = field(default=1.0, validator=_number_above_zero)
    """Divisor of the gate logits before the sigmoid or softmax."""
    rope_theta: float = field(default=10000.0, validator=_number_above_zero)
    """Base of RoPE's frequencies."""
    rope_scaling: RopeScaling | None = field(default=None, converter=converters.optional(_to_rope_scaling))
    """A `RopeScaling`, or a mapping of its fields (Hugging Face's keys work too); None: no scaling."""
    compressed_rope: CompressedRope = field(default="block_end", validator=_one_of(get_args(CompressedRope)))
    """`block_end`: phi reads unrotated keys, and the compressed key is rotated at the position of its block's last token. `tokens`: phi
    reads rotated keys; only for compressor="mean"."""
    branches: tuple[str, ...] = field(default=BRANCHES, converter=_in_paper_order, validator=_check_branches)
    """The branches that exist; fewer than three for ablations."""
    backends: Mapping[str, str] = field(factory=dict, converter=_to_backend_names, validator=_check_backends)
    """Operation -> backend name; an operation that is absent is routed by "auto"."""
    kv: KeysValues = field(default="separate", validator=_one_of(get_args(KeysValues)))
    """`separate`: every branch has its own K and V projection (section 3.3.3). `shared`: one K and V serves all branches, and the
    compressed branch reads phi of them."""
    qk_norm: bool = field(default=False, validator=_flag)
    """Apply RMSNorm to every head of q and k before RoPE, with one weight for q and one per K projection; phi reads normalised keys."""
    qk_norm_eps: float = field(default=1e-6, validator=_number_above_zero)
    """Epsilon of the RMSNorm of `qk_norm`."""
    qkv_bias: bool = field(default=False, validator=_flag)
    """Give the projections of q, k and v a bias, as in Qwen2; the output projection has none."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.geometry, BlockGeometry):
            raise ConfigError(f"geometry={self.geometry!r} is not a BlockGeometry; use BlockGeometry()")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ConfigError(
                f"rope_scaling={self.rope_scaling!r} is not a RopeScaling; use None or RopeScaling(kind='linear', factor=2.0)"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads} (each KV head serves H/G query "
                f"heads); use {nearest_divisors(self.num_kv_heads, self.num_heads)}"
            )
        if self.head_dim_qk % 2:
            raise ConfigError(f"head_dim_qk={self.head_dim_qk} is odd (rotate-half RoPE needs pairs); use {self.head_dim_qk + 1}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ConfigError(
                f"rope_theta={self.rope_theta} with YaRN scaling (its ramp divides by ln theta, the rule: above 1); use 10000.0"
            )
        if self.gate == "softmax" and len(self.branches) == 1:
            raise ConfigError(
                f"gate='softmax' with branches={self.branches!r} would be 1 for any weights (it shares 1 among the branches); "
                f"use gate='sigmoid' or two branches"
            )
        if self.compressed_rope == "tokens" and self.compressor != "mean":
            raise ConfigError(
                f"compressed_rope='tokens' with compressor={self.compressor!r} would make compressed keys depend on absolute "
                f"position (it stays relative for 'mean' only); use compressed_rope='block_end' or compressor='mean'"
            )

    def can_be_fused(self) -> bool:
        """Return True if a fused backend (operation `nsa`) may serve the layer.

        A fused backend may serve a layer with all three branches. If D_k = D_v it may also serve slc and win alone: the compressed keys are then
        passed as compressed values with gate 0.
        """
        return self.branches == BRANCHES or (self.branches == ("slc", "win") and self.head_dim_qk == self.head_dim_v)
