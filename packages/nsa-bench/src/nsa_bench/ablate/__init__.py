"""`nsa-bench ablate`: train a grid of recipes, settings and seeds, at the same time or in turn."""

from importlib.resources import files
from pathlib import Path


def shipped_plans(command: str) -> dict[str, Path]:
    """Return name -> path of the plans of `command`, "ablate" or "needle", that come with the package."""
    return {path.stem: path for path in sorted(Path(str(files(f"nsa_bench.{command}"))).glob("*.toml"))}
