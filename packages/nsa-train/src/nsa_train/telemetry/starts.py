"""The starts of a run: where and when it began and was resumed, in words."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

COMPARED = ("python", "torch", "triton", "cuda", "device", "gpu", "threads")
"""Keys of env.json that the page reports where they differ from the start before; versions of packages are compared as well."""
COMMIT_LETTERS = 12
MOST_NAMED = 8
"""Most resumes whose steps the head of the page names."""


class Start(NamedTuple):
    """One start of a run."""

    boot: Mapping[str, Any]
    """Its `boot` event."""
    reached: int
    """The step that the start before had reached."""

    @property
    def resumed_at(self) -> int | None:
        """The step from whose checkpoint it goes on; -1 from the beginning, None for a new run."""
        return self.boot.get("resumed_at")


def told(starts: Sequence[Start], environment: Mapping[str, Any]) -> list[str]:
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
    """Return when a run was resumed, such as "after steps 40, 80 and 97"; nothing where it was not."""
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
    elif at > 0:
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
    """Return a sentence on the differences of the environment from the start before; empty where there is none."""
    if not before or not now:
        return ""
    then, found = _figures(before), _figures(now)
    changes = [
        f"{name} {found.get(name, 'none')} (before: {then.get(name, 'none')})" for name in found | then if found.get(name) != then.get(name)
    ]
    return f"Changed: {', '.join(changes)}." if changes else ""


def _figures(environment: Mapping[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages")
    figures = {name: environment[name] for name in COMPARED if environment.get(name) is not None}
    return figures | {name: found for name, found in (packages if isinstance(packages, dict) else {}).items() if name not in figures}
