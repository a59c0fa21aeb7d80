"""The reports as tables for a terminal. Foreign text goes in as `Text`, so that brackets in it are no markup."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from nsa_bench.backends_report import RoutingReport, to_json
from nsa_core import Operation, RoutingDecision
from nsa_core.plugins.manager import Plugins


def routing_tables(report: RoutingReport) -> Iterator[RenderableType]:
    """Yield device, versions and request, then what serves each operation, then the plug-ins."""
    yield _facts(report)
    yield _operations(report.decisions)
    yield _plugins(report.plugins)


def environment_table(environment: dict[str, Any]) -> Table:
    """Return names and values, one package a line."""
    table = Table(show_header=False, box=None)
    for name, value in flatten(environment):
        table.add_row(name, Text("none" if value is None else str(value)))
    return table


def flatten(environment: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and plain values; those of a table inside are named `packages.torch`."""
    for name, value in environment.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", item) for inner, item in value.items())
        else:
            yield name, value


def _facts(report: RoutingReport) -> Table:
    content = to_json(report)
    device, request, environment = content["device"], content["request"], content["environment"]
    capability = f", compute capability {device['compute_capability']}" if device["compute_capability"] else ""
    place = " (simulated: not this machine's)" if device["is_simulated"] else f" ({environment['gpu' if capability else 'cpu']})"
    table = Table(show_header=False, box=None)
    table.add_row("device", Text(f"{device['type']}{capability}{place}"))
    versions = {"nsa-core": environment["packages"]["nsa-core"]}
    versions |= {name: environment[name] for name in ("python", "torch", "triton", "cuda", "commit")}
    table.add_row("versions", Text(", ".join(f"{name} {version or 'none'}" for name, version in versions.items())))
    table.add_row(
        "request",
        Text(
            f"{request['layout']}, {request['num_queries']} queries over {request['num_keys']} tokens, {request['dtype']}, "
            f"H={request['num_heads']} G={request['num_kv_heads']} D_k={request['head_dim_qk']} D_v={request['head_dim_v']}, "
            f"{'forward and backward' if report.decisions[0].request.needs_grad else 'forward only'}"
        ),
    )
    return table


def _operations(decisions: tuple[RoutingDecision, ...]) -> Table:
    table = Table("operation", "choice", "backend", "preference", "standing", title="routing by auto", show_lines=True)
    for decision in decisions:
        operation = decision.request.operation
        choice = Text(decision.chosen or "none", style="bold" if decision.chosen else "")
        if not decision.candidates:
            fused = operation is Operation.NSA
            table.add_row(operation.value, choice, "", "", "none installed" + (": the branches run one by one" if fused else ""))
        for place, candidate in enumerate(decision.candidates):
            verdict = "\n".join(str(reason) for reason in candidate.reasons) or "eligible"
            verdict = "\n".join((verdict, *(f"note: {note}" for note in candidate.notes)))
            first = (Text(operation.value), choice) if place == 0 else (Text(), Text())
            table.add_row(*first, Text(candidate.name), str(candidate.preference), Text(verdict))
    return table


def _plugins(plugins: Plugins) -> Table:
    table = Table("plug-in", "from", "backends", title="plug-ins", show_lines=True)
    for plugin in plugins.loaded:
        names = ", ".join(f"{backend.operation}: {backend.name}" for backend in plugin.backends) or "none"
        table.add_row(Text(plugin.name), Text(plugin.origin), Text(names))
    for broken in plugins.broken:
        table.add_row(Text(broken.name), Text(broken.origin), Text(f"broken: {broken.error}", style="red"))
    return table
