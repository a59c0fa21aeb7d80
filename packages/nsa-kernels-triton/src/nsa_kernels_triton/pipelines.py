"""Pipelines of the kernels for compute capability 9.0, by head dimensions, and the Triton versions that compile them. Imports no triton."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from attrs import frozen

from nsa_kernels_triton.numerics import WIDEST_EXACT
from nsa_kernels_triton.tile_table import Parts


@frozen
class PipelineConfig:
    """The pipeline of a kernel of `hopper`: a producer warpgroup loads tiles into a ring buffer; one to four consumer warpgroups compute."""

    block_rows: int
    """Rows of q in a tile: queries times the heads of their group."""
    block_keys: int
    num_stages: int
    """Stages of the ring buffer; a stage holds one tile."""
    loader_registers: int
    """Registers of a producer thread; consumer threads share the rest."""
    num_parts: int = 2
    """Consumer warpgroups. Each has a part of a tile's rows; in the kernel of dK and dV, a part of its keys. Of the kernels of the selected
    branch, only the backward kernel for wide heads has two."""
    num_programs: int = 2
    """Programs that share a multiprocessor. Only the selected kernels read it: one program of any other kernel fills a multiprocessor."""


# measured on an H200, at 32,768 tokens; kind -> columns of q's tiles -> pipeline
PIPELINES: dict[str, dict[int, PipelineConfig]] = {
    "compressed_forward": {
        64: PipelineConfig(192, 128, 4, 32, num_parts=3),
        128: PipelineConfig(192, 64, 3, 32, num_parts=3),
        192: PipelineConfig(128, 64, 3, 40),
    },
    "window_forward": {
        64: PipelineConfig(128, 128, 4, 40),
        128: PipelineConfig(192, 64, 3, 32, num_parts=3),
        192: PipelineConfig(128, 64, 3, 40),
    },
    "shared_forward": {
        64: PipelineConfig(192, 64, 4, 32, num_parts=3),
        128: PipelineConfig(192, 64, 3, 32, num_parts=3),
        192: PipelineConfig(128, 64, 3, 40),
    },
    "interval_dq": {
        64: PipelineConfig(192, 64, 3, 32, num_parts=3),
        128: PipelineConfig(192, 64, 3, 32, num_parts=3),
        192: PipelineConfig(128, 64, 3, 40),
    },
    "interval_dkdv": {64: PipelineConfig(64, 128, 8, 40), 128: PipelineConfig(64, 128, 4, 24), 192: PipelineConfig(32, 128, 6, 40)},
    "scores": {128: PipelineConfig(256, 64, 4, 32, num_parts=4), 192: PipelineConfig(256, 64, 3, 32, num_parts=4)},
    "selected_forward": {
        64: PipelineConfig(64, 64, 4, 40, num_programs=3),
        128: PipelineConfig(64, 64, 4, 56),
        192: PipelineConfig(64, 64, 2, 56),
    },
    "selected_backward": {
        64: PipelineConfig(64, 64, 3, 40),
        128: PipelineConfig(32, 64, 4, 40),
        192: PipelineConfig(64, 64, 3, 56, num_programs=1),
    },
}
# values in two parts as well as q
WIDE_PIPELINES: dict[str, PipelineConfig] = {
    "compressed_forward": PipelineConfig(128, 64, 2, 40),
    "window_forward": PipelineConfig(128, 64, 2, 40),
    "shared_forward": PipelineConfig(128, 64, 2, 40),
    "interval_dq": PipelineConfig(128, 64, 2, 40),
    "selected_forward": PipelineConfig(64, 64, 2, 56),
}
PIPELINE_CAPABILITY = (9, 0)
WIDEST_PIPELINE = 192
COPIED_BYTES = 16
"""Maximum bytes of one copy instruction of a producer warp; rows start at multiples of it."""


@cache
def pipeline(kind: str, head_dim_qk: int, head_dim_v: int) -> PipelineConfig | None:
    """Return the pipeline of a kernel of `kind`; None if there is none for the head dimensions."""
    # scores have no values
    head_dims = (head_dim_qk,) if kind == "scores" else (head_dim_qk, head_dim_v)
    # a row, at two bytes a column, must be a whole number of copies; narrow heads need float32 results, which these kernels do not write
    if any(2 * x % COPIED_BYTES or not WIDEST_EXACT < x <= WIDEST_PIPELINE for x in head_dims):
        return None
    parts = [pipeline_parts(x) for x in head_dims]
    # the epilogue reuses the shared memory of q's tiles
    if parts[-1].first > parts[0].first or parts[-1].second > parts[0].second:
        return None
    return WIDE_PIPELINES.get(kind) if len(parts) == 2 and parts[1].second else PIPELINES[kind].get(sum(parts[0]))


@cache
def pipeline_parts(head_dim: int) -> Parts:
    """Return the tile columns that hold a head of `head_dim` (at most `WIDEST_PIPELINE`) in one part or two: 64, 128, or 128 + 64."""
    return Parts(64 if head_dim <= 64 else 128, 64 if head_dim > 128 else 0)


GLUON_MODULE = "triton.experimental.gluon.language.nvidia.hopper"
GLUON_VERSIONS = ("3.6.", "3.7.")
"""Triton versions that have compiled and run the kernels of `hopper`. Gluon is an experimental part of Triton."""


@cache
def has_gluon() -> bool:
    """Return True if the installed triton compiles the kernels of `hopper`."""
    installed = _installed()
    # a build with another package name, such as a nightly build, counts as an unknown version
    return installed is not None and installed.startswith(GLUON_VERSIONS) and find_spec(GLUON_MODULE) is not None


def _installed() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def without_gluon() -> str:
    """Return why the kernels for compute capability 9.0 are off, and which versions of Triton have them."""
    known = [version.removesuffix(".") for version in GLUON_VERSIONS]
    return (
        f"the kernels for compute capability 9.0 are off: Triton {_installed()} is installed, and they need {' or '.join(known)}, because "
        f"Gluon differs between versions; the portable kernels run instead, up to a third slower. Install triton=={known[-1]}.* and "
        f"a torch that works with it to have them"
    )
