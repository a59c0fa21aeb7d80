"""The options of the commands, as given on the command line, in groups. Imports no torch."""

from pathlib import Path
from typing import Annotated, Literal

from attrs import frozen
from cyclopts import Parameter

from nsa_bench.errors import OptionError

Device = Annotated[Literal["cpu", "cuda"] | None, Parameter(help="cuda by default if there is a GPU.")]
DType = Annotated[Literal["bf16", "fp16", "fp32", "fp64"] | None, Parameter(help="bf16 on cuda, fp32 on cpu by default.")]
Lengths = Annotated[str | None, Parameter(help="Tokens, k for 1024: 2k,8k. On cuda 2k to 128k, on cpu 256 by default.")]
Backend = Annotated[str, Parameter(help="auto, or a backend's name, which never falls back.")]
Backward = Annotated[bool, Parameter(help="Time forward + backward as well.")]
Commit = Annotated[str | None, Parameter(help="Commit to record in the results if the code is not in a git checkout.")]
KeysValues = Annotated[Literal["separate", "shared"], Parameter(help="K and V of each branch, or one for all.")]
Compressor = Annotated[Literal["mlp", "conv", "mean"], Parameter(help="How a block of keys or values becomes one.")]
Settings = Annotated[list[str] | None, Parameter(name="--set", negative="", help="table.key=value, as for nsa-train. Repeatable.")]


@Parameter(name="*")
@frozen(kw_only=True)
class ResultFiles:
    """The files that every command writes."""

    json_file: Annotated[Path | None, Parameter(name="--json", help="Write the result to this file as JSON.")] = None
    csv_file: Annotated[Path | None, Parameter(name="--csv", help="Write the result to this file as CSV.")] = None


@frozen(kw_only=True)
class MeasuredOn:
    """The options of most commands that measure."""

    device: Device = None
    dtype: DType = None


@Parameter(name="*")
@frozen(kw_only=True)
class AttentionOptions(MeasuredOn):
    """The options of `attention`; None if one was not given."""

    lengths: Lengths = None
    shapes: Annotated[str | None, Parameter(help="P, L, M, S or H/G/D_k/D_v, separated by commas; P,L,M,S by default.")] = None
    operations: Annotated[str | None, Parameter(help="Some of nsa, cmp, select, slc, win; all by default, nsa for a sweep.")] = None
    selection: Annotated[str | None, Parameter(help="random, trained-like, recorded:FILE, separated by commas; random by default.")] = None
    geometry: Annotated[str | None, Parameter(help="l/d/l'/n/w; 32/16/64/16/512 by default.")] = None
    backend: Backend = "auto"
    baseline: Annotated[str | None, Parameter(help="Dense attention: all, none, or of flash, cudnn, flex, flash-attn.")] = None
    backward: Backward = True
    graph: Annotated[bool, Parameter(negative="", help="Time CUDA graphs, without the time of launches from Python.")] = False
    sweep: Annotated[bool, Parameter(negative="", help="Compare neighbouring shapes by CUDA graph: D, H/G, S one off a tile, packed.")] = (
        False
    )
    preset: Annotated[Literal["targets"] | None, Parameter(help="targets: the cases with goals for one H200.")] = None


@Parameter(name="*")
@frozen(kw_only=True)
class CompareOptions(MeasuredOn):
    """The options of `compare`."""

    lengths: Lengths = None
    shapes: Annotated[str, Parameter(help="P, L, M, S or H/G/D_k/D_v, separated by commas.")] = "P,L,M,S"
    geometry: Annotated[str, Parameter(help="l/d/l'/n/w; the peers share l = d = l' only.")] = "64/64/64/16/512"
    backend: Backend = "auto"
    backward: Backward = True


@Parameter(name="*")
@frozen(kw_only=True)
class DecodeOptions(MeasuredOn):
    """The options of `decode`; None if one was not given."""

    context: Annotated[str | None, Parameter(help="Tokens that a cache holds, k for 1024. On cuda 4k to 128k, on cpu 256 by default.")] = (
        None
    )
    batch: Annotated[str | None, Parameter(help="Sequences, separated by commas. On cuda 1,4,16,64, on cpu 2 by default.")] = None
    shapes: Annotated[str, Parameter(help="P, L, M, S or H/G/D_k/D_v, separated by commas.")] = "P,L,M"
    geometry: Annotated[str, Parameter(help="l/d/l'/n/w.")] = "32/16/64/16/512"
    kv_dtype: Annotated[
        Literal["fp8"] | None, Parameter(help="Dtype of the selected and the sliding branch's stores; that of the rows by default.")
    ] = None
    backend: Backend = "auto"
    parts: Annotated[str, Parameter(help="Parts to time: some of total, append, attend, cmp, sel, win, separated by commas; or all.")] = (
        "total,append,attend"
    )
    baseline: Annotated[bool, Parameter(help="Time dense attention over the same tokens as well.")] = True
    peers: Annotated[bool, Parameter(help="Time the steps of other packages that are installed as well.")] = True


@Parameter(name="*")
@frozen(kw_only=True)
class LayerOptions(MeasuredOn):
    """The options of `layer`; None if one was not given."""

    context: Annotated[str | None, Parameter(help="Tokens that a cache holds, k for 1024. On cuda 64k, on cpu 256 by default.")] = None
    batch: Annotated[str | None, Parameter(help="Sequences, separated by commas. On cuda 1,16, on cpu 2 by default.")] = None
    shapes: Annotated[str, Parameter(help="P, L, M, S or H/G/D_k/D_v, separated by commas.")] = "P,L"
    hidden: Annotated[int, Parameter(help="The layer's hidden size.")] = 4096
    branches: Annotated[str, Parameter(help="Branches that the layer has: some of cmp, slc, win, separated by commas.")] = "cmp,slc,win"
    kv: KeysValues = "separate"
    compressor: Compressor = "mlp"
    geometry: Annotated[str, Parameter(help="l/d/l'/n/w.")] = "32/16/64/16/512"


@Parameter(name="*")
@frozen(kw_only=True)
class GenerateOptions(MeasuredOn):
    """The options of `generate`; None if one was not given. The model is by default that of the recipe `125m`."""

    prompt: Annotated[str | None, Parameter(help="Tokens of a prompt, k for 1024. On cuda 8k,16k,64k, on cpu 128 by default.")] = None
    batch: Annotated[str | None, Parameter(help="Sequences, separated by commas. On cuda 1,16, on cpu 1 by default.")] = None
    new: Annotated[int, Parameter(help="New tokens that are timed; five more come before them.")] = 64
    shapes: Annotated[str, Parameter(help="P, L, M, S or H/G/D_k/D_v, separated by commas.")] = "12/2/64/64"
    hidden: Annotated[int, Parameter(help="The model's hidden size.")] = 768
    layers: Annotated[int, Parameter(help="The model's layers.")] = 12
    vocab: Annotated[int, Parameter(help="The model's vocabulary.")] = 50304
    kv: KeysValues = "shared"
    compressor: Compressor = "mean"
    geometry: Annotated[str, Parameter(help="l/d/l'/n/w.")] = "32/16/64/16/512"


@Parameter(name="*")
@frozen(kw_only=True)
class PrefillOptions(MeasuredOn):
    """The options of `prefill`; None if one was not given."""

    context: Annotated[str | None, Parameter(help="Tokens of the prompt, k for 1024. On cuda 64k, on cpu 512 by default.")] = None
    tile: Annotated[str | None, Parameter(help="Tokens per tile. On cuda 4096, on cpu 64 by default.")] = None
    shapes: Annotated[str, Parameter(help="P, L, M, S or H/G/D_k/D_v, separated by commas.")] = "M"
    geometry: Annotated[str, Parameter(help="l/d/l'/n/w.")] = "32/16/64/16/512"
    backend: Backend = "auto"


@Parameter(name="*")
@frozen(kw_only=True)
class SelectOptions(MeasuredOn):
    """The options of `select`; None if one was not given."""

    lengths: Lengths = None
    shapes: Annotated[str, Parameter(help="P, L, M, S or H/G/D_k/D_v, separated by commas.")] = "P,L,M,S"
    sequences: Annotated[int, Parameter(help="Sequences of the packed cases, of growing lengths.")] = 8
    geometry: Annotated[str, Parameter(help="l/d/l'/n/w.")] = "32/16/64/16/512"
    backend: Annotated[str, Parameter(help="auto: every installed backend, each by itself; or one by name.")] = "auto"


@Parameter(name="*")
@frozen(kw_only=True)
class ThresholdOptions(MeasuredOn):
    """The options of `thresholds`; None if one was not given."""

    lengths: Annotated[str | None, Parameter(help="Tokens, k for 1024. On cuda 256 to 16k, on cpu 128,256 by default.")] = None
    shapes: Annotated[str, Parameter(help="P, L, M, S or H/G/D_k/D_v, separated by commas.")] = "P,L,M,S"
    operations: Annotated[str, Parameter(help="Some of nsa, cmp, select, slc, win.")] = "nsa,cmp,select,slc,win"
    backends: Annotated[str | None, Parameter(help="Some of the installed backends, separated by commas; all by default.")] = None
    geometry: Annotated[str, Parameter(help="l/d/l'/n/w.")] = "32/16/64/16/512"
    backward: Backward = True
    seconds: Annotated[float | None, Parameter(help="Begin no measurement after this many seconds; the results so far are kept.")] = None
    write: Annotated[
        tuple[Path, ...] | None,
        Parameter(
            consume_multiple=True,
            negative="",
            help="Write the minimum lengths to this file, or without a name to the table that routing reads.",
        ),
    ] = None


@Parameter(name="*")
@frozen(kw_only=True)
class SweepOptions:
    """The options of `fa2-sweep`; None if one was not given."""

    device: Device = None
    lengths: Lengths = None
    head_dims: Annotated[str, Parameter(help="D of queries, keys and values, separated by commas.")] = "64,96,128,192,256"
    dtypes: Annotated[str | None, Parameter(help="Some of bf16, fp16, fp32, fp64. bf16,fp16 on cuda, fp32 on cpu by default.")] = None
    baseline: Annotated[str, Parameter(help="Dense attention: all, or of flash, cudnn, flex, flash-attn.")] = "flash,cudnn,flash-attn"
    backward: Backward = True


@Parameter(name="*")
@frozen(kw_only=True)
class CallShape:
    """The call that `backends` routes: one sequence, forward and backward by default.

    Raises:
        OptionError: if a number is below 1 or kv_heads does not divide heads; with every problem.
    """

    dtype: DType = None
    seq_len: Annotated[int, Parameter(help="Tokens of the sequence.")] = 8192
    heads: Annotated[int, Parameter(help="Query heads.")] = 64
    kv_heads: Annotated[int, Parameter(help="KV heads.")] = 4
    head_dim_qk: Annotated[int, Parameter(help="D_k: of queries and keys.")] = 192
    head_dim_v: Annotated[int, Parameter(help="D_v: of values.")] = 128
    layout: Annotated[
        Literal["dense", "packed", "cached", "paged", "ragged"], Parameter(help="cached, paged and ragged are a decode step of one query.")
    ] = "dense"
    backward: Annotated[bool | None, Parameter(help="Whether gradients are needed; by default only for dense and packed.")] = None
    is_aligned: Annotated[bool, Parameter(name="--aligned", help="Every tensor starts at a multiple of 16 bytes.")] = True

    def __attrs_post_init__(self) -> None:
        numbers = ("seq_len", "heads", "kv_heads", "head_dim_qk", "head_dim_v")
        problems = [
            f"--{name.replace('_', '-')}={getattr(self, name)} is too small (the rule: an integer >= 1); use 1 or more"
            for name in numbers
            if getattr(self, name) < 1
        ]
        if not problems and self.heads % self.kv_heads:
            problems.append(
                f"--kv-heads={self.kv_heads} does not divide --heads={self.heads} (each serves H/G query heads); use a divisor of {self.heads}"
            )
        if problems:
            raise OptionError.of(problems)

    @property
    def is_decode(self) -> bool:
        """Return True if the keys are a cache: the call is then one query over seq_len tokens."""
        return self.layout not in ("dense", "packed")
