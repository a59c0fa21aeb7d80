"""The manifest of a checkpoint: size and SHA-256 of every file, and of itself.

A manifest is compared byte for byte with the only valid JSON text of its content, so that any damage is detected.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from nsa_train.checkpoint.layout import CONFIG, FILES, MANIFEST, STATE
from nsa_train.checkpoint.schema import SCHEMA_VERSION, manifest_problems
from nsa_train.errors import CheckpointError
from nsa_train.files import MOST_MANIFEST, MOST_RECIPE, MOST_STATE, IrregularFileError, open_regular, parse_json, read_regular
from nsa_train.settings.rules import short
from nsa_train.settings.structuring import listed_problems

MOST = {CONFIG: MOST_RECIPE, STATE: MOST_STATE}
"""Maximum size in bytes of the files that are read into memory; a run writes no larger file."""
OTHERS = "take another step-* of this run (`nsa-train ckpt verify` names the complete ones)"


def write_manifest(folder: Path, step: int) -> None:
    """Write the manifest of `folder`, a checkpoint after `step` whose other files are complete."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in FILES},
    }
    (folder / MANIFEST).write_text(_spelled(content), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Verify the manifest of `folder` and return it: schema_version, step, created, files.

    Raises:
        CheckpointError: if it is missing, damaged, or of another schema version.
    """
    path = folder / MANIFEST
    try:
        content = read_regular(path, MOST_MANIFEST)
        manifest = parse_json(content)
        expected = manifest.pop("sha256")
        is_as_spelled = _spelled(manifest).encode() == content
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        # the other messages need the type of their error
        said = str(error) if isinstance(error, IrregularFileError) else f"{error!r:.120}"
        raise CheckpointError(f"{path} is not a manifest ({said}); {OTHERS}") from None
    if not is_as_spelled:
        found = _digest(manifest)
        same = "its values are those written and its bytes are not, as after an editor"
        problem = same if found == expected else f"SHA-256 expected {short(expected)}, found {found!r}"
        raise CheckpointError(f"{path} is damaged: {problem}; {OTHERS}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has schema_version={short(manifest.get('schema_version'))} (this version reads {SCHEMA_VERSION}); "
            "use the version of nsa-train that wrote it"
        )
    if problems := manifest_problems(manifest):
        raise CheckpointError(f"{path} is damaged: {listed_problems(problems)}; {OTHERS}")
    name, step = folder.name, manifest["step"]
    if name.startswith("step-") and name != f"step-{step}":
        raise CheckpointError(f"{path} is damaged: expected the manifest of {name}, found that of step-{step}; {OTHERS}")
    return dict(manifest)


class Verified(NamedTuple):
    """A checkpoint after every byte of it was read."""

    manifest: dict[str, Any]
    contents: dict[str, bytes]
    """File name -> bytes of config.toml and state.json, so that later code uses the verified bytes."""


def verify_files(folder: Path) -> Verified:
    """Return the manifest and small files of `folder` after comparing every file with the manifest.

    Raises:
        CheckpointError: naming the first file that differs, with what was expected and found.
    """
    manifest = read_manifest(folder)
    contents = {name: _verified(folder / name, expected) for name, expected in manifest["files"].items()}
    return Verified(manifest, {name: contents[name] for name in MOST})


def _verified(path: Path, expected: Mapping[str, Any]) -> bytes:
    """Compare a file with `expected`, and return its content if its name is in MOST; else return b""."""
    try:
        with open_regular(path, MOST.get(path.name)) as file:
            size, content = os.fstat(file.fileno()).st_size, b""
            if size != expected["size"]:
                digest = "(not read)"
            elif path.name in MOST:
                content = file.read(size)
                digest = hashlib.sha256(content).hexdigest()
            else:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: expected a file of {expected['size']} bytes ({MANIFEST} lists it), found none; {OTHERS}"
        ) from None
    except (OSError, IrregularFileError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {OTHERS}") from None
    for found, key, label in ((size, "size", "size in bytes"), (digest, "sha256", "SHA-256")):
        if found != expected[key]:
            raise CheckpointError(f"{path} is damaged: {label} expected {expected[key]}, found {found}; {OTHERS}")
    return content


def _spelled(content: Mapping[str, Any]) -> str:
    # no newline at the end, so that a truncated file is never valid JSON
    return json.dumps({**content, "sha256": _digest(content)}, indent=2)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
