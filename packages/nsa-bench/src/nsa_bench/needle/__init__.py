"""`nsa-bench needle`: train a model on rows that grow longer, then let it decode answers about pairs hidden at every depth."""

from importlib.resources import files
from pathlib import Path


def shipped_plans() -> dict[str, Path]:
    """Return name -> path of the plans that come with the package."""
    return {path.stem: path for path in sorted(Path(str(files(__name__))).glob("*.toml"))}
