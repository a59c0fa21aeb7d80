"""The cases that are measured (head shapes, lengths, geometry, dtype, selection, device), and their form on the command line."""

from enum import StrEnum
from pathlib import Path

import torch
from attrs import field, frozen

from nsa_bench.errors import OptionError
from nsa_core import BlockGeometry, ConfigError
from nsa_core.blocks import causal_pairs, compressed_pairs, num_compressed_blocks, selected_pairs, window_pairs

OURS = ("nsa", "cmp", "select", "slc", "win")
"""The operations that are measured: all of Eq. 5, then its parts."""
DENSE = "dense"
KIBI = 1024
MOST_TOKENS = 2**31 - 1
"""Largest int32; positions and lengths are int32."""
LENGTHS = "2k,4k,8k,16k,32k,64k,128k"
"""Default lengths on a GPU, in tokens."""
CPU_LENGTHS = "256"
"""Default lengths on a CPU, where only the reference backend runs."""


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class Selection(StrEnum):
    """How neighbouring queries' choices of blocks are related."""

    RANDOM = "random"
    """Queries are independent of one another."""
    TRAINED_LIKE = "trained-like"
    """A query keeps about 80 % of the free blocks that the query before it chose."""


@frozen
class Recorded:
    """The choices of a trained model, from a file of `nsa-bench choices`, mapped to the case; see `recorded`."""

    path: str

    @property
    def value(self) -> str:
        """Return the name in tables and files."""
        return f"recorded:{Path(self.path).name}"

    def __str__(self) -> str:
        return self.value


@frozen
class HeadShape:
    """Query heads H, KV heads G, and the head dimensions."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int

    @property
    def heads_per_group(self) -> int:
        """Return H/G."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_dims(self) -> int:
        """Return D_k + D_v."""
        return self.head_dim_qk + self.head_dim_v

    def __str__(self) -> str:
        numbers = f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim_qk}/{self.head_dim_v}"
        return numbers if self.name == numbers else f"{self.name} ({numbers})"


SHAPES = {
    "P": HeadShape("P", 64, 4, 192, 128),
    "L": HeadShape("L", 32, 8, 128, 128),
    "M": HeadShape("M", 64, 4, 128, 128),
    "S": HeadShape("S", 16, 8, 64, 64),
}
"""P: the paper's; L: Llama-like; M: groups of 16 with equal dimensions; S: small groups."""


def head_shape(num_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_v: int) -> HeadShape:
    """Return a shape whose name is its numbers, as in `--shapes 32/8/128/128`."""
    name = f"{num_heads}/{num_kv_heads}/{head_dim_qk}/{head_dim_v}"
    return HeadShape(name, num_heads, num_kv_heads, head_dim_qk, head_dim_v)


@frozen(kw_only=True)
class Case:
    """One set of inputs: a sequence of `seq_len` tokens, or packed sequences of `lengths` tokens, which sum to `seq_len`."""

    shape: HeadShape
    seq_len: int
    geometry: BlockGeometry = field(factory=BlockGeometry)
    dtype: torch.dtype = torch.bfloat16
    selection: Selection | Recorded = Selection.RANDOM
    lengths: tuple[int, ...] | None = None

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Return the length of every sequence."""
        return (self.seq_len,) if self.lengths is None else self.lengths

    @property
    def num_blocks(self) -> int:
        """Return the number of compressed blocks of all sequences."""
        return sum(num_compressed_blocks(length, self.geometry) for length in self.sequence_lengths)

    def __str__(self) -> str:
        packed = "" if self.lengths is None else f" in {len(self.lengths)} sequences"
        return f"{self.shape}, {self.seq_len} tokens{packed}, {self.selection}"


def visible_pairs(operation: str, case: Case) -> int:
    """Return the number of pairs of query and key of `operation` over all query heads and sequences of `case`.

    "select" scores the compressed branch's pairs; "nsa" counts those of the three branches, "dense" all of the past.
    """
    counts = {
        "cmp": (compressed_pairs,),
        "select": (compressed_pairs,),
        "slc": (selected_pairs,),
        "win": (window_pairs,),
        "nsa": (compressed_pairs, selected_pairs, window_pairs),
        "dense": (lambda length, _: causal_pairs(length),),
    }[operation]
    pairs = sum(count(length, case.geometry) for length in case.sequence_lengths for count in counts)
    return case.shape.num_heads * pairs


def find_device(kind: str | None) -> torch.device:
    """Return the device of `--device`: by default the GPU if there is one.

    Raises:
        OptionError: if the option names a GPU and there is none.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device=cuda on a machine without a GPU (times are taken here, none is simulated); use --device cpu")
    return torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))


def dtype_of(name: str | None, device_type: str) -> torch.dtype:
    """Return the dtype of `--dtype`: by default bf16 on cuda, fp32 on cpu."""
    return DTYPES[name or ("bf16" if device_type == "cuda" else "fp32")]


def given(text: str | None, default: str) -> str:
    """Return the option's `text`, or `default` if the option was not given (None). An empty text counts as given."""
    return default if text is None else text


def lengths_of(text: str | None, device: torch.device) -> tuple[int, ...]:
    """Return the token counts of `--lengths`; by default those for the type of `device`.

    Raises:
        OptionError: as `parse_lengths`.
    """
    return parse_lengths(given(text, LENGTHS if device.type == "cuda" else CPU_LENGTHS))


def parse_names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in a text such as "nsa,slc", in the order of `known` and once each.

    Raises:
        OptionError: for an unknown name.
    """
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise OptionError(f"{option} has {unknown[0]!r} (the rule: some of {', '.join(known)}); use {known[0]}")
    return tuple(name for name in known if name in names)


def parse_selections(text: str) -> tuple[Selection | Recorded, ...]:
    """Return the selections of "random,recorded:FILE", recorded ones last, once each.

    Raises:
        OptionError: for an unknown name, or two recordings whose files have one name.
    """
    names, recorded = [], []
    for name in text.split(","):
        kind, _, path = name.partition(":")
        if kind == "recorded" and path:
            recorded.append(Recorded(path))
        elif name in tuple(Selection):
            names.append(name)
        else:
            raise OptionError(f"--selection has {name!r} (the rule: some of {', '.join(Selection)}, recorded:FILE); use {Selection.RANDOM}")
    different = tuple(dict.fromkeys(recorded))
    if len({one.value for one in different}) < len(different):
        raise OptionError(f"--selection has two recordings with one file name, {text!r} (results name the file alone); rename one")
    return (*(selection for selection in Selection if selection in names), *different)


def parse_lengths(text: str, option: str = "--lengths") -> tuple[int, ...]:
    """Return the numbers of "2k,8192,1m", of tokens or what `option` counts: k is 1024, m is 1024 * 1024.

    Raises:
        OptionError: with every problem, if an entry is not a positive number with one of these endings.
    """
    units = {"k": KIBI, "m": KIBI * KIBI}
    lengths, problems = [], []
    for part in text.split(","):
        number, unit = (part[:-1], units[part[-1]]) if part[-1:] in units else (part, 1)
        if not number.isdecimal() or int(number) < 1:
            problems.append(f"{option} has {part!r} (the rule: a whole number >= 1, k for 1024); use 2k,8k,64k")
        elif int(number) * unit > MOST_TOKENS:
            problems.append(f"{option} has {part!r} (the rule: at most {MOST_TOKENS}, which int32 holds); use 2k,8k,64k")
        else:
            lengths.append(int(number) * unit)
    if problems:
        raise OptionError.of(problems)
    return tuple(lengths)


def parse_shapes(text: str, option: str = "--shapes") -> tuple[HeadShape, ...]:
    """Return the shapes of "P,L,32/8/128/128": a letter of SHAPES, or H/G/D_k/D_v. `option` is named in messages.

    Raises:
        OptionError: with every problem, for an unknown name or numbers that make no shape.
    """
    shapes, problems = [], []
    for part in text.split(","):
        numbers = [int(number) for number in part.split("/") if number.isdecimal()]
        if part in SHAPES:
            shapes.append(SHAPES[part])
        elif len(numbers) == part.count("/") + 1 == 4 and min(numbers) >= 1 and numbers[0] % numbers[1] == 0:
            shapes.append(head_shape(*numbers))
        else:
            problems.append(
                f"{option} has {part!r} (the rule: {', '.join(SHAPES)}, or H/G/D_k/D_v with G a divisor of H); use P or 32/8/128/128"
            )
    if problems:
        raise OptionError.of(problems)
    return tuple(shapes)


def parse_geometry(text: str) -> BlockGeometry:
    """Return the geometry l/d/l'/n/w of "32/16/64/16/512"; 1 initial and 2 local blocks are forced.

    Raises:
        OptionError: if the text is not five whole numbers that make a geometry.
    """
    numbers = [int(number) for number in text.split("/") if number.isdecimal()]
    if len(numbers) != 5 or text.count("/") != 4:
        raise OptionError(f"--geometry={text!r} is not l/d/l'/n/w (five whole numbers); use 32/16/64/16/512")
    size, stride, selection, count, window = numbers
    try:
        return BlockGeometry(size, stride, selection, count, window_size=window)
    except ConfigError as error:
        raise OptionError(f"--geometry={text}: {error}") from error


def geometry_text(geometry: BlockGeometry) -> str:
    """Return l/d/l'/n/w, as `parse_geometry` reads it."""
    sizes = ("compression_block_size", "compression_stride", "selection_block_size", "num_selected_blocks", "window_size")
    return "/".join(str(getattr(geometry, size)) for size in sizes)
