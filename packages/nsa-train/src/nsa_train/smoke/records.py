"""The records of a run that the smoke rules read, and the verdict of a rule."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from nsa_train.errors import ConfigError
from nsa_train.files import MOST_JSON, parse_json, read_regular
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.recipe import read_toml
from nsa_train.telemetry.anomalies import RankWatch
from nsa_train.telemetry.damage import damaged_records
from nsa_train.telemetry.records import read_events, read_json, read_rows, standing_skips


@frozen(kw_only=True)
class Verdict:
    """One rule: `is_passed` is None where it does not apply, and `found` then says why."""

    rule: str
    is_passed: bool | None
    found: str


@frozen(kw_only=True)
class Records:
    """The records of a run."""

    paths: RunDirectory
    settings: dict[str, Any]
    steps: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    progress: list[dict[str, Any]]
    skips: list[dict[str, Any]]
    """Events of steps whose update was left out."""
    newest: RankWatch
    """The state of rank 0 after the events of its newest start."""
    metrics: dict[str, Any]
    damaged: tuple[str, ...] = ()
    """Records that cannot be read and are left out, a line per file."""


def read_records(folder: Path) -> Records:
    """Return the records of the run in `folder`.

    Raises:
        ConfigError: when they are not there.
    """
    paths = RunDirectory(folder)
    if not paths.training.is_file() or not paths.config.is_file():
        raise ConfigError(
            f"RUN_DIR={str(folder)!r} is no run (it lacks training.csv or config.toml); use the directory that nsa-train printed"
        )
    events = list(read_events(paths.heartbeat))
    return Records(
        paths=paths,
        settings=read_toml(paths.config),
        steps=list(read_rows(paths.training)),
        evaluations=list(read_rows(paths.validation)),
        progress=[event for event in events if event["msg"] == "progress"],
        skips=standing_skips(events),
        newest=_newest_start(events),
        metrics=read_json(paths.metrics),
        damaged=tuple(damaged_records(paths)),
    )


def _newest_start(events: list[dict[str, Any]]) -> RankWatch:
    found = RankWatch(0)
    for event in events:
        found = RankWatch(0) if event["msg"] == "boot" else found
        found.observe(event)
    return found


def read_metrics(path: Path) -> dict[str, Any]:
    """Return the content of a metrics.json, or the metrics inside a file of `nsa-bench smoke --json`.

    Raises:
        ConfigError: when it cannot be read as one.
    """
    try:
        content = parse_json(read_regular(path, MOST_JSON))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as metrics.json ({error}); use the metrics.json of a run") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} is not a table of figures; use the metrics.json of a run")
    # a result of this command carries them inside
    inner = content.get("metrics", content)
    return dict(inner) if isinstance(inner, Mapping) else dict(content)
