"""Write the folder of a converted model. config.json is written last, so that an incomplete folder does not load."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nsa_transformers.checksums import require_undamaged
from nsa_transformers.configuration import generation_config
from nsa_transformers.conversion.planning import Conversion
from nsa_transformers.conversion.tensor_files import write_shards
from nsa_transformers.conversion.verifying import Difference, compare
from nsa_transformers.weights import GENERATION, WORKING_CACHES, generation_settings

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a tokenizer, which are copied unchanged; code in the same folder is not copied."""
SHARES = 10
"""Number of progress lines while tensors are written."""


class Converted(NamedTuple):
    """The outcome of a conversion."""

    conversion: Conversion
    difference: Difference


def write_converted(conversion: Conversion, folder: Path, say: Callable[[str], None] = lambda line: None) -> Converted:
    """Write the converted model to the new folder `folder`, and compare it with its source; `say` gets lines of progress.

    Raises:
        InputError: if a file of the source is damaged, or the comparison fails. The folder then has no config.json.
    """
    source = conversion.source.folder
    require_undamaged({tensor.file for tensor in conversion.source.tensors.values()})
    folder.mkdir(parents=True)
    write_shards(folder, conversion.planned, shard_bytes=conversion.options.shard_bytes, say=_progress(conversion.nbytes, say))
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    _write_generation_settings(conversion, folder, say)
    difference = compare(conversion, folder, say)
    conversion.config.save_pretrained(folder)
    return Converted(conversion, difference)


def _write_generation_settings(conversion: Conversion, folder: Path, say: Callable[[str], None]) -> None:
    """Write generation_config.json: the source's, without a `cache_implementation` that `generate` would refuse."""
    path = conversion.source.folder / GENERATION
    settings = generation_settings(conversion.source.folder)
    kind = settings.pop("cache_implementation", None)
    if not path.is_file():
        generation_config(conversion.config).save_pretrained(folder)
    elif kind in WORKING_CACHES:
        shutil.copyfile(path, folder / GENERATION)
    else:
        (folder / GENERATION).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        say(f"{GENERATION} is written without cache_implementation={kind!r:.80}, which cannot hold NSA")


def _progress(total: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function that takes the number of bytes just written, and calls `say` after each tenth of `total`."""
    written, said = 0, 0

    def note(num_bytes: int) -> None:
        nonlocal written, said
        written += num_bytes
        if written * SHARES // total > said:
            said = written * SHARES // total
            say(f"written {100 * written / total:.0f} % of {total / 1e6:,.1f} MB")

    return note
