"""The manifest of a checkpoint: size and SHA-256 of every file, and of itself.

It is compared byte for byte with the one spelling that its content has, so that no damage to it goes unseen.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa_train.checkpoint.layout import FILES, MANIFEST
from nsa_train.errors import CheckpointError

SCHEMA_VERSION = 3
"""Of the files together; 1 had weights and moments alone, 2 no count of the steps that the gradients were watched."""
OTHERS = "take another step-* of this run (`nsa-train ckpt verify` names the whole ones)"


def write_manifest(folder: Path, step: int) -> None:
    """Describe the files in `folder`, a checkpoint after `step` that is otherwise complete."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in FILES},
    }
    (folder / MANIFEST).write_text(_spelled(content), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder`, itself verified: schema_version, step, created, files.

    Raises:
        CheckpointError: when it is missing, damaged, or of another schema version.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
        expected = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest ({error!r:.120}); {OTHERS}") from None
    if _spelled(manifest) != text:
        raise CheckpointError(f"{path} is damaged: SHA-256 expected {expected!s:.64}, found {_digest(manifest)}; {OTHERS}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has schema_version={manifest.get('schema_version')} (this version reads {SCHEMA_VERSION}); "
            "use the version of nsa-train that wrote it"
        )
    _check_content(path, manifest)
    return dict(manifest)


def verify_files(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder` once every file was read and found as it describes.

    Raises:
        CheckpointError: naming the first file that is not, with what was expected and found.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        _verify(folder / name, expected)
    return manifest


def _check_content(path: Path, manifest: Mapping[str, Any]) -> None:
    listed = manifest.get("files")
    if not isinstance(listed, dict) or set(listed) != set(FILES):
        raise CheckpointError(f"{path} lists {sorted(listed or ())!r:.200} (expected {sorted(FILES)}); {OTHERS}")
    if not all(isinstance(entry, dict) and set(entry) == {"size", "sha256"} for entry in listed.values()):
        raise CheckpointError(f"{path} lacks the size or SHA-256 of a file (each has both); {OTHERS}")
    expected, step = path.parent.name, manifest.get("step")
    if type(step) is not int or not isinstance(manifest.get("created"), str):
        raise CheckpointError(f"{path} lacks its step or its date (an integer and a text); {OTHERS}")
    if expected.startswith("step-") and expected != f"step-{step}":
        raise CheckpointError(f"{path} is damaged: expected the manifest of {expected}, found that of step-{step}; {OTHERS}")


def _verify(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: expected a file of {expected['size']} bytes ({MANIFEST} lists it), found none; {OTHERS}")
    try:
        size = path.stat().st_size
        found = {"size": size, "sha256": _sha256(path) if size == expected["size"] else "(not read)"}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {OTHERS}") from None
    for key, label in (("size", "size in bytes"), ("sha256", "SHA-256")):
        if found[key] != expected[key]:
            raise CheckpointError(f"{path} is damaged: {label} expected {expected[key]}, found {found[key]}; {OTHERS}")


def _spelled(content: Mapping[str, Any]) -> str:
    # no newline at the end: whatever is cut off, the rest is no JSON
    return json.dumps({**content, "sha256": _digest(content)}, indent=2)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
