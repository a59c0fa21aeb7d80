"""The names of a run's files in its directory."""

import os
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from nsa_train.files import broken_link, nearest_existing, written_whole


class _Below:
    """A path below a run's directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", kind: type) -> Path:
        return run.root / self._name


@frozen
class RunDirectory:
    """Paths below one run's directory."""

    root: Path

    config = _Below("config.toml")
    """The resolved recipe."""
    environment = _Below("env.json")
    """Machine, versions, commit, routing."""
    training = _Below("training.csv")
    """One row per optimizer step."""
    validation = _Below("val.csv")
    """One row per evaluation, the first at step 0."""
    selection = _Below("k_stats.csv")
    """One row per logged step; absent for the dense twin."""
    fallbacks = _Below("fallback_counters.csv")
    """One row per logged step, counted from the start of the run; absent for the dense twin."""

    @property
    def heartbeat(self) -> Path:
        """One JSON object per event of rank 0."""
        return self.heartbeat_of(0)

    def heartbeat_of(self, rank: int) -> Path:
        """Return the file with one JSON object per event of `rank`."""
        return self.root / f"heartbeat_rank{rank}.jsonl"

    @property
    def heartbeats(self) -> list[Path]:
        """The files of all ranks that exist, in the order of their names."""
        return sorted(self.root.glob("heartbeat_rank*.jsonl"))

    tensorboard = _Below("tb")
    """Event files that TensorBoard shows."""
    metrics = _Below("metrics.json")
    """The results of the run, in a few figures."""
    curves = _Below("curves.png")
    """The curves, drawn."""
    samples = _Below("samples")
    """Holds before.txt and after.txt."""
    report = _Below("report.html")
    """The self-contained page."""
    checkpoints = _Below("checkpoints")
    """Holds step-N directories and the link `latest`."""
    halt = _Below(".HALT")
    """Its presence asks all ranks to save and stop at the same step."""
    anomaly_type = _Below(".anomaly_type")
    """One word per kind of anomaly that was found, a line each."""

    def holds_run(self) -> bool:
        """Return whether a run wrote its records here; a run that was killed early leaves fewer files."""
        return self.config.exists() or bool(self.heartbeats)

    def why_not_resumable(self) -> str:
        """Return the message that refuses to resume here; empty if there is a run."""
        if self.holds_run():
            return ""
        is_there = self.root.exists()
        found = "holds no run to resume (neither config.toml nor a heartbeat)" if is_there else "does not exist: no run to resume"
        return f"--out={str(self.root)!r} {found}; name the run's directory, or use --resume auto, which starts one"

    def why_not_new(self) -> str:
        """Return the message that refuses a new run here; empty if there is no run."""
        return self.not_empty() if self.holds_run() else ""

    def why_not_writable(self) -> str:
        """Return the message that refuses to write here, or so far up that this directory can be made; empty if that is possible."""
        existing = nearest_existing(self.root)
        if link := broken_link(self.root):
            reason, advice = f"cannot be written ({link} is a link to {str(link.readlink())!r}, which is not there)", "make that, or name"
        elif not existing.is_dir() or not os.access(existing, os.W_OK):
            reason, advice = f"cannot be written ({existing} refuses it)", "name"
        else:
            return ""
        return f"--out={str(self.root)!r} {reason}; {advice} another directory"

    def not_empty(self) -> str:
        """Return the message that refuses a new run in a directory that holds anything."""
        return (
            f"--out={str(self.root)!r} is not empty (a run never mixes with another); name a new directory, leave --out away, "
            "or go on with that run by --resume"
        )

    def stackdump(self, rank: int) -> Path:
        """Return the file to which `rank` writes the stacks of its threads on SIGUSR1."""
        return self.root / f"stackdump_rank{rank}.txt"

    def write_anomalies(self, kinds: Iterable[str]) -> None:
        """Write `kinds` to `.anomaly_type` atomically."""
        with written_whole(self.anomaly_type) as aside:
            aside.write_text("".join(f"{kind}\n" for kind in kinds), encoding="utf-8")
