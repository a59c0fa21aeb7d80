"""Report what is installed of this project, as JSON on stdout: `python tools/check_installed.py`.

Run in an environment made from built wheels. Imports every package, loads every entry point, and reports their locations.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path

PREFIX = "nsa-"


def installed_names() -> list[str]:
    """Return the distributions of this project that this Python sees, sorted."""
    return sorted({found.name for found in metadata.distributions() if found.name.startswith(PREFIX)})


def describe(name: str) -> dict[str, object]:
    """Import distribution `name` and return its version, its location and its entry points."""
    found = metadata.distribution(name)
    module = importlib.import_module(name.replace("-", "_"))
    for entry_point in found.entry_points:
        entry_point.load()
    return {
        "version": found.version,
        "location": str(Path(str(module.__file__)).parent),
        "entry_points": [f"{entry_point.group}: {entry_point.name}" for entry_point in found.entry_points],
    }


def main() -> int:
    """Print the report; exit 1 if nothing of the project is installed."""
    report = {name: describe(name) for name in installed_names()}
    print(json.dumps(report, indent=1))
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
