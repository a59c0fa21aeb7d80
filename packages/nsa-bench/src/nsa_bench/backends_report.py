"""`nsa-bench backends`: which backend serves each operation of a described call, and what stands against the others.

Routing reads plain numbers only, so the call may be placed on a machine that is not here.

The JSON file (`routing.json`):
    environment: this machine, see `nsa_bench.environment.describe_environment`.
    device: `type` ("cpu" | "cuda"), `compute_capability` ("8.9" or null), `is_simulated` (true where it is not this machine's).
    request: what all operations share: geometry (by name), dtype, kv_dtype ("bfloat16"), batch, num_sequences, num_queries,
        num_keys, num_heads, num_kv_heads, head_dim_qk, head_dim_v, layout, deterministic. `append` alone differs: its rows
        have num_kv_heads heads, and of a call on whole sequences it is the prefill of a cache (layout "cached").
    operations: a list in the order of `Operation`; each has `operation`, `needs_grad`, `chosen` (a name, or null where
        "auto" finds none) and `candidates`, most preferred first: `name`, `preference`, `is_eligible` ("auto" may take it),
        `is_capable` (it runs when it is named), `reasons`, each `kind` ("incapable" | "policy") and `message`, and `notes`
        (sentences on how it serves the call, such as why its kernels for this GPU are off).
    plugins: `loaded` (`name`, `origin`, `backends`: a list of `operation` and `name`) and `broken` (`name`, `origin`, `error`).

The CSV file has one row per operation and backend.
"""

from typing import Any

import attrs
import torch
from attrs import frozen

from nsa_bench.environment import describe_environment, dotted
from nsa_bench.errors import BenchError, OptionError
from nsa_core import BranchRequest, DuplicateBackendError, Layout, Operation, RoutingDecision, load_plugins
from nsa_core.plugins.manager import Plugins

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@frozen(kw_only=True)
class Device:
    """The device that requests are placed on, here or not."""

    type: str
    compute_capability: tuple[int, int] | None
    is_simulated: bool


@frozen(kw_only=True)
class CallShape:
    """The call that is routed: one sequence, forward and backward unless told otherwise.

    Raises:
        OptionError: when a number is below 1 or kv_heads does not divide heads; with every problem.
    """

    dtype: str | None = None
    """A key of DTYPES; None is bf16 on cuda, fp32 on cpu."""
    seq_len: int = 8192
    heads: int = 64
    kv_heads: int = 4
    head_dim_qk: int = 192
    head_dim_v: int = 128
    layout: Layout = attrs.field(default=Layout.DENSE, converter=Layout)
    """CACHED, PAGED and RAGGED are a decode step: one query over seq_len tokens."""
    backward: bool | None = None
    """None: as the layout is used, True for DENSE and PACKED."""
    is_aligned: bool = True
    """False: a tensor starts off a multiple of 16 bytes."""

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
        """Return True where the keys are a cache."""
        return self.layout not in (Layout.DENSE, Layout.PACKED)


@frozen(kw_only=True)
class RoutingReport:
    """What `nsa-bench backends` shows."""

    environment: dict[str, Any]
    device: Device
    decisions: tuple[RoutingDecision, ...]
    """One per operation, in the order of `Operation`."""
    plugins: Plugins


def find_device(kind: str | None, capability: str | None, here: tuple[int, int] | None) -> Device:
    """Return the device of `--device` and `--compute-capability`; what is not given is this machine's, `here`.

    Raises:
        OptionError: when they contradict each other, or name a GPU that is not here without its compute capability.
    """
    asked = None if capability is None else parse_capability(capability)
    if kind is None:
        kind = "cpu" if asked is None and here is None else "cuda"
    if kind == "cpu":
        if asked is not None:
            raise OptionError(f"--compute-capability={capability} came with --device=cpu (only CUDA devices have one); drop one of the two")
        return Device(type="cpu", compute_capability=None, is_simulated=False)
    if asked is None and here is None:
        raise OptionError(
            "--device=cuda came without --compute-capability on a machine without a GPU (backends decide by it); "
            "use --compute-capability 9.0 for an H100 or H200, 8.9 for an RTX 4090, 8.0 for an A100"
        )
    return Device(type="cuda", compute_capability=asked or here, is_simulated=asked is not None and asked != here)


def local_capability() -> tuple[int, int] | None:
    """Return the compute capability of this machine's first GPU; None where there is none."""
    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None


def parse_capability(text: str) -> tuple[int, int]:
    """Return (8, 9) for "8.9".

    Raises:
        OptionError: for anything but two whole numbers and a point.
    """
    major, point, minor = text.partition(".")
    if not (point and major.isdecimal() and minor.isdecimal()):
        raise OptionError(f"--compute-capability={text!r} is not MAJOR.MINOR (as NVIDIA writes it); use 8.9")
    return int(major), int(minor)


def make_report(device: Device, shape: CallShape) -> RoutingReport:
    """Return the routing of every operation of the call `shape` on `device`, with the plug-ins of this environment.

    Raises:
        BenchError: when two plug-ins offer one backend.
    """
    plugins = load_plugins()
    try:
        registry = plugins.registry()
    except DuplicateBackendError as error:
        raise BenchError(str(error)) from error
    decisions = tuple(registry.explain(make_request(operation, device, shape)) for operation in Operation)
    return RoutingReport(environment=describe_environment(), device=device, decisions=decisions, plugins=plugins)


def make_request(operation: Operation, device: Device, shape: CallShape) -> BranchRequest:
    """Return what the public operations would ask for in the call `shape`; selection and the cache's operations carry no gradient.

    APPEND, which only a cache asks for, writes the rows of the call into one: in the layouts of whole sequences, as its prefill.
    """
    dtype = DTYPES[shape.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    backward = not shape.is_decode if shape.backward is None else shape.backward
    is_append, is_choice = operation is Operation.APPEND, operation in (Operation.SELECT, Operation.CHOOSE)
    return BranchRequest(
        operation=operation,
        device_type=device.type,
        compute_capability=device.compute_capability,
        dtype=dtype,
        kv_dtype=dtype,
        num_queries=1 if shape.is_decode else shape.seq_len,
        num_keys=shape.seq_len,
        num_heads=shape.kv_heads if is_append else shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim_qk=shape.head_dim_qk,
        head_dim_v=shape.head_dim_qk if is_choice else shape.head_dim_v,
        layout=Layout.CACHED if is_append and not shape.is_decode else shape.layout,
        needs_grad=backward and not is_append and not is_choice,
        is_aligned=shape.is_aligned,
    )


def to_json(report: RoutingReport) -> dict[str, Any]:
    """Return the report in the schema of this module's docstring."""
    request = report.decisions[0].request
    capability = report.device.compute_capability
    return {
        "environment": report.environment,
        "device": {
            "type": report.device.type,
            "compute_capability": None if capability is None else dotted(capability),
            "is_simulated": report.device.is_simulated,
        },
        "request": {
            "geometry": attrs.asdict(request.geometry),
            "dtype": str(request.dtype).removeprefix("torch."),
            "kv_dtype": str(request.kv_dtype).removeprefix("torch."),
            **{name: getattr(request, name) for name in _SHARED},
            "layout": request.layout.value,
        },
        "operations": [_decision_to_json(decision) for decision in report.decisions],
        "plugins": {
            "loaded": [
                {
                    "name": plugin.name,
                    "origin": plugin.origin,
                    "backends": [{"operation": str(b.operation), "name": b.name} for b in plugin.backends],
                }
                for plugin in report.plugins.loaded
            ],
            "broken": [attrs.asdict(plugin) for plugin in report.plugins.broken],
        },
    }


_SHARED = (
    "batch", "num_sequences", "num_queries", "num_keys", "num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v", "deterministic",
)  # fmt: skip


def _decision_to_json(decision: RoutingDecision) -> dict[str, Any]:
    return {
        "operation": decision.request.operation.value,
        "needs_grad": decision.request.needs_grad,
        "chosen": decision.chosen,
        "candidates": [
            {
                "name": candidate.name,
                "preference": candidate.preference,
                "is_eligible": candidate.is_eligible,
                "is_capable": candidate.is_capable,
                "reasons": [{"kind": reason.kind.value, "message": reason.message} for reason in candidate.reasons],
                "notes": list(candidate.notes),
            }
            for candidate in decision.candidates
        ],
    }


def to_rows(report: RoutingReport) -> list[dict[str, Any]]:
    """Return the CSV's rows: every candidate of every operation, with the machine; one empty candidate where there is none."""
    content = to_json(report)
    environment, request = content["environment"], content["request"]
    common = {
        **{f"device_{name}": value for name, value in content["device"].items()},
        **{name: request[name] for name in ("dtype", "layout", "num_queries", "num_keys")},
        **{name: environment[name] for name in ("time", "cpu", "gpu", "torch", "triton", "commit")},
    }
    nothing: dict[str, Any] = {"name": None, "preference": None, "is_eligible": False, "is_capable": False, "reasons": [], "notes": []}
    return [
        {
            "operation": operation["operation"],
            "backend": candidate["name"],
            "is_chosen": candidate["name"] is not None and candidate["name"] == operation["chosen"],
            "preference": candidate["preference"],
            "is_eligible": candidate["is_eligible"],
            "is_capable": candidate["is_capable"],
            "reasons": "; ".join(f"{reason['kind']}: {reason['message']}" for reason in candidate["reasons"]),
            "notes": "; ".join(candidate["notes"]),
            "needs_grad": operation["needs_grad"],
            **common,
        }
        for operation in content["operations"]
        for candidate in operation["candidates"] or [nothing]
    ]
