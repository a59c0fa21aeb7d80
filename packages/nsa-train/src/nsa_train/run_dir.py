"""The names of what a run leaves in its directory."""

from pathlib import Path

from attrs import frozen


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
    def heartbeat(self) -> Path:
        """One JSON object per event of rank 0."""
        return self.root / "heartbeat_rank0.jsonl"

    @property
    def metrics(self) -> Path:
        """What came out, in a few figures."""
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
