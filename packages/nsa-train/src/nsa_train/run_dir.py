"""The names of what a run leaves in its directory."""

from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from nsa_train.files import written_whole


@frozen
class RunDirectory:
    """Paths below one run's directory."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved recipe."""
        return self.root / "config.toml"

    @property
    def environment(self) -> Path:
        """Machine, versions, commit, routing."""
        return self.root / "env.json"

    @property
    def training(self) -> Path:
        """One row per optimizer step."""
        return self.root / "training.csv"

    @property
    def validation(self) -> Path:
        """One row per evaluation, the first at step 0."""
        return self.root / "val.csv"

    @property
    def selection(self) -> Path:
        """One row per logged step; absent for the dense twin."""
        return self.root / "k_stats.csv"

    @property
    def fallbacks(self) -> Path:
        """One row per logged step, counted from the start of the run; absent for the dense twin."""
        return self.root / "fallback_counters.csv"

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

    @property
    def tensorboard(self) -> Path:
        """Event files that TensorBoard shows."""
        return self.root / "tb"

    @property
    def metrics(self) -> Path:
        """The results, in a few figures."""
        return self.root / "metrics.json"

    @property
    def curves(self) -> Path:
        """The curves, drawn."""
        return self.root / "curves.png"

    @property
    def samples(self) -> Path:
        """Holds before.txt and after.txt."""
        return self.root / "samples"

    @property
    def report(self) -> Path:
        """The self-contained page."""
        return self.root / "report.html"

    @property
    def checkpoints(self) -> Path:
        """Holds step-N directories and the link `latest`."""
        return self.root / "checkpoints"

    @property
    def halt(self) -> Path:
        """Its presence asks all ranks to save and stop at the same step."""
        return self.root / ".HALT"

    @property
    def anomaly_type(self) -> Path:
        """One word per kind of anomaly that was found, a line each."""
        return self.root / ".anomaly_type"

    def holds_run(self) -> bool:
        """Return whether a run recorded itself here; one that was killed early leaves less."""
        return self.config.exists() or bool(self.heartbeats)

    def why_not_resumable(self) -> str:
        """Return the message that refuses to resume here; empty where there is a run."""
        if self.holds_run():
            return ""
        is_there = self.root.exists()
        found = "holds no run to resume (neither config.toml nor a heartbeat)" if is_there else "does not exist: no run to resume"
        return f"--out={str(self.root)!r} {found}; name the run's directory, or use --resume auto, which starts one"

    def stackdump(self, rank: int) -> Path:
        """Return where `rank` writes the stacks of its threads when it gets SIGUSR1."""
        return self.root / f"stackdump_rank{rank}.txt"

    def write_anomalies(self, kinds: Iterable[str]) -> None:
        """Write `kinds` to `.anomaly_type` whole or not at all."""
        with written_whole(self.anomaly_type) as aside:
            aside.write_text("".join(f"{kind}\n" for kind in kinds), encoding="utf-8")
