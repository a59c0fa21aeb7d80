"""`nsa-bench backends`: show the backend that serves each operation of a described call, and every reason against the others.

Routing reads only plain numbers, so the call may describe another machine.

The JSON file (`routing.json`):
    environment: this machine, see `nsa_core.environment.describe_environment`.
    device: `type` ("cpu" | "cuda"), `compute_capability` ("8.9" or null), `is_simulated` (true if this machine has no such device).
    request: the facts that all operations share: geometry (by name), dtype, kv_dtype ("bfloat16"), batch, num_sequences, num_queries,
        num_keys, num_heads, num_kv_heads, head_dim_qk, head_dim_v, layout, deterministic. Only the request of `append` differs: its rows
        have num_kv_heads heads, and a call on whole sequences counts as the prefill of a cache (layout "cached").
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
from rich.table import Table
from rich.text import Text

from nsa_bench.cases import dtype_of
from nsa_bench.errors import BenchError, OptionError
from nsa_bench.options import CallShape
from nsa_bench.results import Output, describe, facts_of
from nsa_core import BranchRequest, DuplicateBackendError, Layout, Operation, RoutingDecision, load_plugins
from nsa_core.environment import dotted


@frozen(kw_only=True)
class Device:
    """The device of the requests; it need not be present."""

    type: str
    compute_capability: tuple[int, int] | None
    is_simulated: bool


def find_device(kind: str | None, capability: str | None, here: tuple[int, int] | None) -> Device:
    """Return the device of `--device` and `--compute-capability`; missing values come from this machine, `here`.

    Raises:
        OptionError: if they contradict each other, or name a GPU that is not present without its compute capability.
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


def parse_capability(text: str) -> tuple[int, int]:
    """Return (8, 9) for "8.9".

    Raises:
        OptionError: if the text is not two whole numbers with a point between them.
    """
    major, point, minor = text.partition(".")
    if not (point and major.isdecimal() and minor.isdecimal()):
        raise OptionError(f"--compute-capability={text!r} is not MAJOR.MINOR (as NVIDIA writes it); use 8.9")
    return int(major), int(minor)


def run_backends(kind: str | None, capability: str | None, shape: CallShape, output: Output) -> None:
    """Print and write the routing of the call `shape` on the device of `--device` and `--compute-capability`."""
    output.check_files()
    here = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    report = make_report(find_device(kind, capability, here), shape, output.environment)
    output.show(*tables_of(report))
    output.write(report, to_rows(report))


def make_report(device: Device, shape: CallShape, environment: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the routing of every operation of the call `shape` on `device`, and the plug-ins, in the schema of this module's docstring.

    Raises:
        BenchError: if two plug-ins offer one backend.
    """
    plugins, capability = load_plugins(), device.compute_capability
    try:
        registry = plugins.registry()
    except DuplicateBackendError as error:
        raise BenchError(str(error)) from error
    decisions = [registry.explain(make_request(operation, device, shape)) for operation in Operation]
    request = decisions[0].request
    return {
        "environment": environment or describe(),
        "device": {**attrs.asdict(device), "compute_capability": None if capability is None else dotted(capability)},
        "request": {
            "geometry": attrs.asdict(request.geometry),
            **{name: str(getattr(request, name)).removeprefix("torch.") for name in ("dtype", "kv_dtype")},
            **{name: getattr(request, name) for name in _SHARED},
            "layout": request.layout.value,
        },
        "operations": [_decision_to_json(decision) for decision in decisions],
        "plugins": {
            "loaded": [
                {
                    "name": plugin.name,
                    "origin": plugin.origin,
                    "backends": [{"operation": str(b.operation), "name": b.name} for b in plugin.backends],
                }
                for plugin in plugins.loaded
            ],
            "broken": [attrs.asdict(plugin) for plugin in plugins.broken],
        },
    }


def make_request(operation: Operation, device: Device, shape: CallShape) -> BranchRequest:
    """Return the request of `operation` in the call `shape`; selection and the cache's operations have no gradient.

    Only a cache uses APPEND and ROTATE. Their requests treat the rows of the call as rows of a cache. Rows of whole sequences are the
    prefill of that cache.
    """
    dtype = dtype_of(shape.dtype, device.type)
    backward = not shape.is_decode if shape.backward is None else shape.backward
    is_append, is_choice = operation is Operation.APPEND, operation in (Operation.SELECT, Operation.CHOOSE)
    is_of_cache = operation in (Operation.APPEND, Operation.ROTATE)
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
        layout=Layout.CACHED if is_of_cache and not shape.is_decode else Layout(shape.layout),
        needs_grad=backward and not is_of_cache and not is_choice,
        is_aligned=shape.is_aligned,
    )


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


def to_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the CSV's rows: one for every candidate of every operation, with the machine. An operation without candidates has one empty row."""
    common = {
        **{f"device_{name}": value for name, value in report["device"].items()},
        **{name: report["request"][name] for name in ("dtype", "layout", "num_queries", "num_keys")},
        **facts_of(report["environment"]),
    }
    nothing: dict[str, Any] = {"name": None, "preference": None, "is_eligible": False, "is_capable": False, "reasons": [], "notes": []}
    return [
        {
            "operation": operation["operation"],
            "backend": candidate["name"],
            "is_chosen": candidate["name"] is not None and candidate["name"] == operation["chosen"],
            **{name: candidate[name] for name in ("preference", "is_eligible", "is_capable")},
            "reasons": "; ".join(_reasons(candidate)),
            "notes": "; ".join(candidate["notes"]),
            "needs_grad": operation["needs_grad"],
            **common,
        }
        for operation in report["operations"]
        for candidate in operation["candidates"] or [nothing]
    ]


def _reasons(candidate: dict[str, Any]) -> list[str]:
    return [f"{reason['kind']}: {reason['message']}" for reason in candidate["reasons"]]


def tables_of(report: dict[str, Any]) -> tuple[Table, Table, Table]:
    """Return three tables: device, versions and request; the backends of each operation; the plug-ins, broken ones with their errors."""
    return _facts(report), _operations(report["operations"]), _plugins(report["plugins"])


def _facts(report: dict[str, Any]) -> Table:
    # foreign text is wrapped in `Text`, so that brackets in it are not markup
    device, request, environment = report["device"], report["request"], report["environment"]
    capability = f", compute capability {device['compute_capability']}" if device["compute_capability"] else ""
    whose = " (simulated: not this machine's)" if device["is_simulated"] else f" ({environment['gpu' if capability else 'cpu']})"
    table = Table(show_header=False, box=None)
    table.add_row("device", Text(f"{device['type']}{capability}{whose}"))
    versions = {"nsa-core": environment["packages"]["nsa-core"]}
    versions |= {name: environment[name] for name in ("python", "torch", "triton", "cuda", "commit")}
    table.add_row("versions", Text(", ".join(f"{name} {version or 'none'}" for name, version in versions.items())))
    passes = "forward and backward" if report["operations"][0]["needs_grad"] else "forward only"
    heads = f"H={request['num_heads']} G={request['num_kv_heads']} D_k={request['head_dim_qk']} D_v={request['head_dim_v']}"
    call = f"{request['layout']}, {request['num_queries']} queries over {request['num_keys']} tokens"
    table.add_row("request", Text(f"{call}, {request['dtype']}, {heads}, {passes}"))
    return table


def _operations(operations: list[dict[str, Any]]) -> Table:
    table = Table("operation", "choice", "backend", "preference", "standing", title="routing by auto", show_lines=True)
    for found in operations:
        operation, candidates = found["operation"], found["candidates"]
        choice = Text(found["chosen"] or "none", style="bold" if found["chosen"] else "")
        if not candidates:
            table.add_row(operation, choice, "", "", "none installed" + (": the branches run one by one" if operation == "nsa" else ""))
        for rank, candidate in enumerate(candidates):
            standing = "\n".join([*(_reasons(candidate) or ["eligible"]), *(f"note: {note}" for note in candidate["notes"])])
            first = (Text(operation), choice) if rank == 0 else (Text(), Text())
            table.add_row(*first, Text(candidate["name"]), str(candidate["preference"]), Text(standing))
    return table


def _plugins(plugins: dict[str, Any]) -> Table:
    table = Table("plug-in", "from", "backends", title="plug-ins", show_lines=True)
    for plugin in plugins["loaded"]:
        names = ", ".join(f"{backend['operation']}: {backend['name']}" for backend in plugin["backends"]) or "none"
        table.add_row(Text(plugin["name"]), Text(plugin["origin"]), Text(names))
    for broken in plugins["broken"]:
        table.add_row(Text(broken["name"]), Text(broken["origin"]), Text(f"broken: {broken['error']}", style="red"))
    return table
