"""`--synthetic-on-fail`: use random ids if the data are not available. All records of such a run say so."""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import attrs

from nsa_train.data.dataset import open_dataset
from nsa_train.errors import DataError
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.data_table import DataTable
from nsa_train.settings.recipe import to_toml

SUFFIX = "-synthetic"
KEPT = ("tokenizer", "workers", "prefetch", "shuffle_seed", "timeout_s", "progress_every")
"""Keys of table `data` that such a run keeps: the range of ids, speed and order."""


class Start(NamedTuple):
    """The arguments with which a run starts."""

    config: RunConfig
    recipe: str
    overrides: list[str]
    out: Path
    note: str = ""
    """The message about the switch; empty if nothing was switched"""


def or_synthetic(start: Start, *, resuming: bool = False) -> Start:
    """Return `start` unchanged if its data opens; else with synthetic data, a recipe that says so, and its directory renamed.

    Raises:
        DataError: if a resumed run (`resuming`) lost its data, unless it began with synthetic data.
    """
    try:
        open_dataset(start.config)
    except DataError as error:
        # "." and ".." are not names
        named = start.out if start.out.name.strip(".") else start.out.resolve()
        out = named.with_name(named.name.removesuffix(SUFFIX) + SUFFIX)
        is_run, is_synthetic_run = (RunDirectory(folder).config.is_file() for folder in (start.out, out))
        if resuming and (is_run or not is_synthetic_run) and out.resolve() != start.out.resolve():
            raise DataError(
                f"{error}\n--synthetic-on-fail with --resume would change the data of {str(start.out)!r} (a run that goes on keeps its own); "
                "bring them back, or start a new run in another --out"
            ) from None
        # every record of such a run has data_source = "synthetic" and data_synthetic = 1
        data = DataTable(source="synthetic", **{name: getattr(start.config.data, name) for name in KEPT})
        config = attrs.evolve(start.config, data=data)
        note = f"SYNTHETIC IDS instead of data.source={start.config.data.source!r}: {error}"
        return Start(config, str(_written(config)), [], out, note)
    return start


def _written(config: RunConfig) -> Path:
    """Return a recipe of `config`, for the processes that are started with it; it is deleted when this one ends."""
    folder = Path(tempfile.mkdtemp(prefix="nsa-train-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "synthetic.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    return path
