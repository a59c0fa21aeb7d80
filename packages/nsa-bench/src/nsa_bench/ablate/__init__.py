"""`nsa-bench ablate`: train a grid of recipes, settings and seeds, at the same time or in turn."""

from importlib.resources import files
from pathlib import Path


def shipped_plans() -> dict[str, Path]:
    """Return name -> path of the plans that come with the package."""
    return {path.stem: path for path in sorted(Path(str(files(__name__))).glob("*.toml"))}
