"""Write a corpus of long documents from this Python's own sources and docs: `python tools/corpus.py OUT_DIR`.

A project is the standard library or an installed distribution. Its *.py, *.rst, *.md and *.txt files that are UTF-8, in the order
of their paths, are joined and cut at file ends into pieces of about a MiB: one text file each, `OUT_DIR/train/NAME-000.txt` or
`OUT_DIR/held-out/NAME-000.txt`. A file whose content is in an earlier project is left out. The standard library comes first,
the others in the order of a hash of their names, so that a limit favours no letter of the alphabet. None gives more than a quarter
of the limit, and those below a quarter of a piece are left out. `OUT_DIR/corpus.json` records the content.

A twentieth is held out, as whole projects: `data.source = "text"` holds out the files with a low hash, and a piece gets
newlines at its end until its hash fits its side. Read both sides: `data.path = "OUT_DIR/*/*.txt"`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from nsa_train.data.sources.split import VALIDATION_PERCENT, rank_of

SUFFIXES = frozenset({".py", ".rst", ".md", ".txt"})
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
STDLIB = "python-standard-library"
MIB = 2**20
SIDES, RECORD = ("train", "held-out"), "corpus.json"
"""The folders of a corpus, and the file that describes them."""


class Project(NamedTuple):
    """Files that belong together."""

    name: str
    version: str
    paths: list[Path]


class Text(NamedTuple):
    """The text of a project."""

    name: str
    version: str
    pieces: list[bytes]
    num_files: int
    num_duplicates: int
    """Files left out, as an earlier one has their content."""

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(map(len, self.pieces))


def installed_projects() -> Iterator[Project]:
    """Yield the standard library, then the distributions in this Python's own site-packages in the order of a hash of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in root.rglob("*") if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)]
    yield Project(STDLIB, platform.python_version(), _texts(found))
    sites = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    by_name: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions(path=sites):
        by_name.setdefault(re.sub(r"[-_.]+", "-", distribution.name).lower(), distribution)
    for name in sorted(by_name, key=lambda name: hashlib.sha256(name.encode()).digest()):
        files = [Path(str(file.locate())) for file in by_name[name].files or () if not file.parts[0].endswith(".dist-info")]
        yield Project(name, by_name[name].version, _texts(files))


def _texts(paths: Iterable[Path]) -> list[Path]:
    return sorted({path for path in paths if path.suffix in SUFFIXES and path.is_file()})


def read_projects(projects: Iterable[Project], *, piece: int, most: int) -> Iterator[Text]:
    """Yield the text of each project, in pieces of about `piece` bytes and at most about `most` bytes of each."""
    seen: set[bytes] = set()
    for project in projects:
        pieces, open_piece, size, num_files, num_duplicates = list[bytes](), list[bytes](), 0, 0, 0
        for path in project.paths:
            if size >= most:
                break
            text = _read(path)
            if not text:
                continue
            digest = hashlib.sha256(text).digest()
            if digest in seen:
                num_duplicates += 1
                continue
            seen.add(digest)
            open_piece.append(text)
            size, num_files = size + len(text), num_files + 1
            if sum(map(len, open_piece)) >= piece:
                pieces.append(b"".join(open_piece))
                open_piece = []
        if open_piece and (not pieces or sum(map(len, open_piece)) >= piece // 4):
            pieces.append(b"".join(open_piece))
        if sum(map(len, pieces)) >= piece // 4:
            yield Text(project.name, project.version, pieces, num_files, num_duplicates)


def _read(path: Path) -> bytes:
    """Return the content of `path`, ended by a newline; nothing if it is empty or not UTF-8."""
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return b""
    stripped = text.strip()
    return stripped + b"\n" if stripped and b"\0" not in stripped else b""


class Sides(NamedTuple):
    """The projects that are trained on, and those held out."""

    train: list[Text]
    held_out: list[Text]


def divide(texts: list[Text], limit: int) -> Sides:
    """Return `texts` divided, at most about `limit` bytes in all: whole projects are held out, each a quarter of that side at most."""
    wanted = min(limit, sum(text.size for text in texts)) * VALIDATION_PERCENT // 100
    held_out, size = list[Text](), 0
    for text in texts:
        if size < wanted and text.name != STDLIB and text.size <= max(wanted // 4, min(each.size for each in texts)):
            held_out.append(text)
            size += text.size
    names = {text.name for text in held_out}
    train = list[Text]()
    for text in texts:
        if text.name not in names and size < limit:
            pieces = [piece for index, piece in enumerate(text.pieces) if size + sum(map(len, text.pieces[:index])) < limit]
            train.append(text._replace(pieces=pieces))
            size += train[-1].size
    return Sides(train, held_out)


def on_side(piece: bytes, *, is_held_out: bool) -> bytes:
    """Return `piece` with the fewest newlines at its end that put its hash on its side of the split."""
    limit = 2**32 * VALIDATION_PERCENT // 100
    while (rank_of(piece) < limit) is not is_held_out:
        piece += b"\n"
    return piece


def write(sides: Sides, out: Path) -> dict[str, object]:
    """Write the pieces and corpus.json below `out`; return what it records."""
    projects, whole = list[dict[str, object]](), hashlib.sha256()
    for folder, texts in zip(SIDES, sides, strict=True):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
        for text in texts:
            pieces = [on_side(piece, is_held_out=folder == "held-out") for piece in text.pieces]
            for index, piece in enumerate(pieces):
                (out / folder / f"{text.name}-{index:03d}.txt").write_bytes(piece)
                whole.update(piece)
            projects.append(
                {
                    "name": text.name,
                    "version": text.version,
                    "side": folder,
                    "bytes": sum(map(len, pieces)),
                    "pieces": len(pieces),
                    "files": text.num_files,
                    "duplicates": text.num_duplicates,
                }
            )
    record: dict[str, object] = {
        "python": platform.python_version(),
        "sha256": whole.hexdigest(),
        **{f"{name}_bytes": sum(len(piece) for text in texts for piece in text.pieces) for name, texts in sides._asdict().items()},
        "projects": projects,
    }
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def main(words: list[str] | None = None, projects: Iterable[Project] | None = None) -> int:
    """Write the corpus of `projects`, or of those installed if None; exit 1 if there are too few projects to hold one out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--limit-mib", type=float, default=200, help="size of all pieces")
    parser.add_argument("--piece-mib", type=float, default=1, help="size of a piece, at least; the last one of a project may be smaller")
    options = parser.parse_args(words)
    sides_there = [name for name in SIDES if (options.out / name).exists()]
    if sides_there and not (options.out / RECORD).is_file():
        parser.error(
            f"{options.out / sides_there[0]} would be deleted, and no {RECORD} beside it says that it is a corpus; name another folder"
        )
    limit, piece = int(options.limit_mib * MIB), int(options.piece_mib * MIB)
    texts = list(read_projects(projects or installed_projects(), piece=piece, most=limit // 4))
    sides = divide(texts, limit)
    if not (sides.train and sides.held_out):
        print(f"{len(texts)} projects of {piece // 4} bytes or more are too few (whole ones are held out); use a smaller --piece-mib")
        return 1
    record = write(sides, options.out)
    sizes = {name: round(sum(text.size for text in texts) / MIB, 1) for name, texts in sides._asdict().items()}
    print(f"{options.out}: {len(sides.train)} projects, {sizes['train']} MiB, to train on; {len(sides.held_out)} held out, ", end="")
    print(f"{sizes['held_out']} MiB; sha256 {record['sha256']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
