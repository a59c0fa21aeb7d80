"""Write report.html: one page that needs no other file, rendered from a run's directory."""

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from nsa_core.config import COLLAPSE_ENTROPY, COLLAPSE_SHARE
from nsa_train.errors import ConfigError
from nsa_train.files import MOST_PICTURE, MOST_SAMPLE, IrregularFileError, as_text, read_regular, refusal, written_whole
from nsa_train.host.environment import missing_report
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.recipe import read_toml
from nsa_train.telemetry.figures import BRANCH_NAMES, History, Start, figure_of, read_history
from nsa_train.telemetry.health import judge, steadiness
from nsa_train.telemetry.records import read_json

CARDS = (
    ("val_loss", "held-out loss, nats per token", "{:.3f}"),
    ("first_val_loss", "held-out loss before training", "{:.3f}"),
    ("last_loss", "last training loss", "{:.3f}"),
    ("toks_per_s_median", "tokens per second, median", "{:,.0f}"),
    ("mfu", "of the chip's dense bf16 peak (MFU)", "{:.1%}"),
    ("seconds", "seconds, all in all", "{:,.0f}"),
    ("peak_memory_mib", "MiB of memory at the peak", "{:,.0f}"),
)
"""Key of metrics.json, its caption, its format."""

SPEED_ROWS = (
    ("toks_per_s_median", "tokens per second, median", "{:,.0f}"),
    ("step_ms_median", "ms per optimizer step, median", "{:,.1f}"),
    ("fetch_ms_p95", "ms of a step waiting for data, 95th percentile", "{:,.2f}"),
    ("mfu", "MFU: model FLOPs of the attention that ran, of the chip's dense bf16 peak", "{:.1%}"),
    ("model_flops_per_token", "model FLOPs per token, forward and backward", "{:.3g}"),
    ("peak_dense_bf16_tflops", "dense bf16 peak of the chip, TFLOP/s", "{:,.0f}"),
    ("peak_memory_mib", "peak memory, MiB", "{:,.0f}"),
    ("peak_memory_gib", "peak memory, GiB", "{:,.2f}"),
    ("clipped_steps", "steps whose gradient was clipped, its norm being above train.grad_clip", "{:,}"),
    ("skipped_steps", "steps skipped by a guard", "{:,}"),
    ("fallbacks_total", "calls that another backend served than the one chosen at the start", "{:,}"),
)
"""The same for the table of throughput and memory."""
SELECTION_ROWS = (
    ("k_mean", "selection blocks that a query reads", "{:.2f}"),
    ("k_max", "the most that one reads", "{:,}"),
    ("pct_at_max", "% of queries that read the most", "{:.1f}"),
    ("free_block_share_mean", "share of its blocks that a query chose by score, neither initial nor local", "{:.3f}"),
    ("overlap_with_previous_query", "share of its blocks that the query before read too", "{:.3f}"),
    ("reads_act_total", "reads of the step: keys that a KV head reads for a query, over all of them", "{:,}"),
)
"""The same for the last progress event."""
ELSEWHERE = ("routing", "routes", "packages", "resumed")
"""Keys of env.json that have their own tables or sentences on the page."""
COMPARED = ("python", "torch", "triton", "cuda", "device", "gpu", "threads")
"""Keys of env.json that the page reports if they differ from the previous start; versions of packages are compared as well."""
COMMIT_LETTERS = 12
PNG_END = b"IEND\xaeB`\x82"
"""The type and checksum of the last chunk of a PNG."""
MOST_NAMED = 8
"""Maximum number of resumes whose steps the head of the page names."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters, other than tab and newline, that browsers do not show."""
MEANINGS = {
    "gate_entropy_mean": "How evenly a token's gates weigh the branches: 0 where one branch has all, ln 3 = 1.099 where three have the same.",
    "gate_max_gate": "Share of the branch that a token's gates favour most: 1 where it has all, 1/3 where three branches have the same.",
    "gate_collapse_frac": f"Share of (token, head) pairs whose gates have collapsed, so that one branch decides nearly alone: "
    f"entropy below {COLLAPSE_ENTROPY:g} nats and largest share above {COLLAPSE_SHARE:g}.",
    "k_mean": "Selection blocks that a query reads, on average. The formula fixes it: n, or all own + 1 that exist up to the query's own block.",
    "reads_act_total": "Reads, counted: the keys that a KV head reads for a query in all branches, over all queries, KV heads and layers; "
    "reads_pred is what the formula gives.",
    "fallbacks_total": "Calls that another backend served than the one chosen at the start.",
    "toks_per_s": "Throughput: median of the last tenth of the steps. A run that became faster is healthy.",
}
"""Name of a health rule -> explanation of its figure for readers of the page."""


def write_report(paths: RunDirectory) -> None:
    """Draw curves.png, if it does not show the records yet, and write report.html of a run; damaged records are left out.

    Raises:
        ConfigError: if the directory holds no records of a run, or the packages of the extra `report` are missing.
    """
    if missing := missing_report():
        raise ConfigError(missing)
    import jinja2

    history = read_history(paths)
    curves = _drawn_before(paths.curves, history.mark) or _drawn(paths.curves, history)
    environment, metrics = read_json(paths.environment), _read_metrics(paths.metrics)
    template = (files("nsa_train.telemetry") / "report.html.j2").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    last = history.progress[-1] if history.progress else {}
    content = page.render(
        # "." has no name
        title=paths.root.absolute().name,
        metrics=metrics,
        has_metrics=paths.metrics.exists(),
        halt=history.newest if history.newest.get("msg") == "halt" else {},
        drawn_to=(int(history.training["step"][-1]), moment(history.newest)),
        starts=described_starts(history.starts, environment),
        resumed=resumes_in_words(history.resumed),
        cards=_figures(CARDS, metrics),
        curves=base64.b64encode(curves).decode(),
        checks=judge({**last, "toks_per_s_of_median": steadiness(history.training.get("toks_per_s", []))}),
        meanings=MEANINGS,
        speed=_figures(SPEED_ROWS, metrics),
        mfu_reason=metrics.get("mfu_reason"),
        is_synthetic=environment.get("data_synthetic", False),
        gates=_gate_rows(last),
        branch_names=BRANCH_NAMES,
        selection=_figures(SELECTION_ROWS, last),
        routes=last.get("routes") or {},
        last_step=last.get("step"),
        settings={name: _words(table) for name, table in _read_settings(paths.config).items()},
        samples={
            path.stem: _read_text(path)
            for path in sorted(paths.samples.glob("*.txt"), reverse=True)
            if path.exists() and not refusal(path, MOST_SAMPLE)
        },
        environment=_words({key: value for key, value in environment.items() if key not in ELSEWHERE}),
        packages=_words(_table(environment, "packages")),
        routing=_routing_rows(environment),
    )
    with written_whole(paths.report) as aside:
        aside.write_text(content, encoding="utf-8")


def _drawn_before(path: Path, mark: str) -> bytes | None:
    """Return the picture at `path` if it is whole and has this mark."""
    try:
        picture = read_regular(path, MOST_PICTURE)
    except (IrregularFileError, OSError):
        return None
    return picture if mark.encode() in picture and picture.endswith(PNG_END) else None


def _drawn(path: Path, history: History) -> bytes:
    """Draw the picture to `path`, with the mark of `history`, and return it."""
    # it takes longer to load than the rest of the page to write
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with written_whole(path) as aside:
        canvas: Any = FigureCanvasAgg(figure_of(history))
        # savefig would draw twice, first only for the extents
        canvas.print_png(aside, metadata={"Description": history.mark})
    return path.read_bytes()


def _gate_rows(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Return per branch its gate's share, mean and spread, and its contribution."""
    names = {"mean": "gate_mean", "std": "gate_std", "contribution": "contribution"}
    return [
        {"branch": branch, "share": share, **{key: event.get(f"{name}_{branch}") for key, name in names.items()}}
        for branch, share in (event.get("gate_branch_shares") or {}).items()
    ]


def _figures(rows: tuple[tuple[str, str, str], ...], found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return key, caption and formatted value of each of `rows` that `found` has."""
    return [(key, caption, form.format(found[key])) for key, caption, form in rows if isinstance(found.get(key), int | float)]


def _routing_rows(environment: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return operation, backend, and the reasons for and against each backend, as the routes were chosen at the start."""
    routes, decisions = _table(environment, "routes"), _table(environment, "routing")
    # the first line of a decision repeats operation and backend
    reasons = {operation: str(decision).partition("\n")[2] for operation, decision in decisions.items()}
    return [(operation, str(routes.get(operation, "none")), reasons.get(operation, "")) for operation in {**decisions, **routes}]


def _words(table: dict[str, Any]) -> dict[str, str]:
    """Return the values of `table` as a reader would write them, without those that are None."""
    return {name: _word(value) for name, value in table.items() if value is not None}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ", ".join(f"{name} = {_word(inner)}" for name, inner in value.items())
    return ", ".join(map(_word, value)) if isinstance(value, list) else str(value)


def _read_metrics(path: Path) -> dict[str, Any]:
    """Return metrics.json, or nothing if it lacks the fields in the head of the page."""
    metrics = read_json(path)
    counts = ("parameters_nsa", "parameters_dense", "steps", "tokens")
    is_whole = metrics.get("attention") in ("nsa", "dense") and all(isinstance(metrics.get(name), int) for name in counts)
    return metrics if is_whole else {}


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return {name: table for name, table in read_toml(path).items() if isinstance(table, dict)}
    except ConfigError:
        return {}


def _read_text(path: Path) -> str:
    """Return a text with U+FFFD instead of control characters, which no page may hold."""
    return CONTROL.sub("\ufffd", as_text(read_regular(path, MOST_SAMPLE), errors="replace"))


def _table(environment: dict[str, Any], name: str) -> dict[str, Any]:
    found = environment.get(name)
    return found if isinstance(found, dict) else {}


def described_starts(starts: Sequence[Start], environment: Mapping[str, Any]) -> list[str]:
    """Return a paragraph per start, in order; `environment`: the content of env.json."""
    later = environment.get("resumed")
    entries = [entry for entry in later if isinstance(entry, dict)] if isinstance(later, list) else []
    paragraphs, before = [], dict[str, Any]()
    for number, start in enumerate(starts):
        now = dict(environment) if number == 0 and start.resumed_at is None else _taken(entries, start.resumed_at)
        paragraphs.append(" ".join(filter(None, (_begun(start, now), _dropped(start), _changed(before, now)))))
        before = now or before
    return paragraphs


def resumes_in_words(steps: Sequence[int]) -> str:
    """Return when a run was resumed, such as "after steps 40, 80 and 97"; empty if it was not."""
    names = [f"{step:,}" for step in steps]
    if len(names) > MOST_NAMED:
        return f"{len(names)} times, the last one after step {names[-1]}"
    if len(names) > 1:
        return f"after steps {', '.join(names[:-1])} and {names[-1]}"
    return "".join(f"after step {name}" for name in names)


def moment(event: Mapping[str, Any]) -> str:
    """Return when an event was written, such as `2026-11-23 20:17:46 UTC`."""
    iso = event.get("iso", "an unknown time")
    try:
        return f"{datetime.fromisoformat(iso).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (TypeError, ValueError, OverflowError):
        return str(iso)


def _taken(entries: list[dict[str, Any]], step: int | None) -> dict[str, Any]:
    """Return the first of `entries` that was resumed at `step`, and remove it and those before it: a start that died early has no boot."""
    index = next((index for index, entry in enumerate(entries) if entry.get("step") == step), None)
    if index is None:
        return {}
    found = entries[index]
    del entries[: index + 1]
    return found


def _begun(start: Start, environment: Mapping[str, Any]) -> str:
    at, ranks = start.resumed_at, start.boot.get("world_size")
    where = [moment(start.boot), f"on {start.boot.get('host') or 'an unknown host'}"]
    if ranks is not None:
        where.append("1 process" if ranks == 1 else f"{ranks} processes")
    if isinstance(commit := environment.get("commit"), str):
        name, _, dirty = commit.partition("-")
        where.append(f"commit {name[:COMMIT_LETTERS]}{' with changes' if dirty else ''}")
    if at is None:
        begun = "Started"
    elif at >= 0:
        begun = f"Resumed after step {at:,} from checkpoints/step-{at}"
    else:
        begun = "Started again at step 0, for there was no checkpoint yet"
    return f"{begun}: {', '.join(where)}."


def _dropped(start: Start) -> str:
    at = max(start.resumed_at or 0, 0)
    if start.resumed_at is None or start.reached <= at:
        return ""
    return f"The start before had reached step {start.reached:,}; its steps after {at:,} do not count."


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a sentence on the differences of the environment from the start before; empty if there is none."""
    if not before or not now:
        return ""
    then, found = _compared(before), _compared(now)
    changes = [
        f"{name} {found.get(name, 'none')} (before: {then.get(name, 'none')})" for name in found | then if found.get(name) != then.get(name)
    ]
    return f"Changed: {', '.join(changes)}." if changes else ""


def _compared(environment: Mapping[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages")
    figures = {name: environment[name] for name in COMPARED if environment.get(name) is not None}
    return figures | {name: found for name, found in (packages if isinstance(packages, dict) else {}).items() if name not in figures}
