"""Table `data` of a recipe: the corpus, and the order in which it is read. Imports no torch."""

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field, frozen

from nsa_train.settings.rules import (
    LEAST_SECONDS,
    MOST_SECONDS,
    MOST_SEED,
    MOST_STEPS,
    Table,
    flag,
    integer,
    number,
    one_of,
    optional_text,
    short,
)

IDS = ("needle", "synthetic")
"""Sources that draw ids and read nothing."""
FILE_SOURCES = ("text", "jsonl", "parquet")
"""Sources that read local files, and nothing else."""
LEAST_SPAN = 4
"""Ids of the shortest span that a row repeats."""


@frozen(kw_only=True)
class DataTable(Table):
    """The corpus, and the order in which it is read."""

    table = "data"
    source: str = one_of("stdlib", "text", "jsonl", "parquet", "fineweb_edu", "mix", "needle", "synthetic")
    """"stdlib": the sources of Python's standard library. "text", "jsonl", "parquet": local files. "fineweb_edu": streamed by
    Hugging Face `datasets`. "mix": several sets of local files. "needle": seeded recall of pairs hidden in noise, plain ids.
    "synthetic": seeded random ids, only for throughput."""
    path: Any = None
    """File or glob, or a list of them. With "fineweb_edu": local Parquet or JSONL shards instead of the hub's."""
    mix: Any = field(factory=dict)
    """With "mix": file or glob -> weight; .jsonl and .parquet by their suffix, anything else is text."""
    subset: str | None = optional_text(example="'sample-10BT'")
    """With "fineweb_edu": the configuration on the hub; "sample-10BT" if none is named."""
    tokenizer: str = one_of("byte", "gpt2", default="byte")
    tokenizer_path: str | None = optional_text(example="'tokenizer.json'")
    """With "gpt2": a local tokenizer.json, or vocab.bpe and encoder.json in one folder; without one, tiktoken's cache or download."""
    packing: bool = flag(default=True)
    """false: each row holds one document or a piece of one, in batches of rows of similar length; only for a corpus in memory."""
    on_bad_record: str = one_of("fail", "skip", default="fail")
    """"fail" names file and line of a record that cannot be read; "skip" counts the record once, however often it is read."""
    workers: int = integer(at_least=0, at_most=256, example=2, default=1)
    """Threads that read, tokenize and pack; 0: the trainer's own thread. Batches are the same with any number."""
    prefetch: int = integer(at_least=1, at_most=1024, example=4, default=4)
    """Batches that each worker prepares ahead of the trainer."""
    shuffle_seed: int = integer(at_least=0, at_most=MOST_SEED, example=0, default=0)
    timeout_s: float = number(at_least=LEAST_SECONDS, at_most=MOST_SECONDS, example=120, default=300)
    """Longest wait for a batch; then the run ends and names the shard that was being read."""
    in_memory_mib: float = number(at_least=1e-6, at_most=2**24, example=64, default=64, or_zero=True)
    """Local files of at most this size are read whole, and their rows are shuffled; for larger files, blocks of documents are shuffled.
    A single text is one document, and is read whole whatever its size."""
    needle_pairs: int = integer(at_least=1, at_most=2**20, example=8, default=8)
    """With "needle": key-value pairs in the haystack of each row."""
    needle_queries: int = integer(at_least=1, at_most=2**20, example=8, default=8)
    """With "needle": pairs that a row asks for at its end; the others are distractors."""
    needle_symbols: int = integer(at_least=2, at_most=2**16, example=64, default=64)
    """With "needle": ids of each of three alphabets, which spell keys, values and noise."""
    needle_tokens: int = integer(at_least=1, at_most=16, example=2, default=1)
    """With "needle": ids of a key, and of a value."""
    needle_copy: bool = flag(default=False)
    """With "needle": true trains on rows that repeat a span of random ids, not on pairs; models learn to copy before they learn recall."""
    progress_every: int = integer(at_least=0, at_most=MOST_STEPS, example=1000, default=0)
    """Print a line after this number of documents; 0: none."""

    @property
    def paths(self) -> tuple[str, ...]:
        """File names and globs of `path`."""
        return () if not self.path else (self.path,) if isinstance(self.path, str) else tuple(self.path)

    @property
    def missing_path(self) -> str:
        """The message for a recipe that does not name its files yet: it can be checked, but not run. Empty if the files are named."""
        return self._no_file() if self.source in FILE_SOURCES and self.path is None else ""

    def broken_pairs(self) -> list[str]:
        """Return the conflicts of source with path, mix and subset, and tokenizer with its file."""
        return [*self._broken_path(), *self._broken_mix(), *self._ignored(), *self._broken_needle()]

    def broken_rows(self, seq_len: int) -> list[str]:
        """Return the problems of rows of `seq_len` tokens."""
        pair = 2 * self.needle_tokens
        least = 2 * LEAST_SPAN if self.needle_copy else (self.needle_pairs + 2 * self.needle_queries) * pair
        if self.source != "needle" or seq_len >= least:
            return []
        if self.needle_copy:
            return [f"train.seq_len={seq_len} is too short for data.needle_copy (a span of {LEAST_SPAN} ids twice); use {least} or more"]
        return [
            f"train.seq_len={seq_len} is too short for data.needle_pairs={self.needle_pairs} and data.needle_queries={self.needle_queries} "
            f"(a pair takes {pair} tokens, the queries twice as many as they have); use {least} or more"
        ]

    def _broken_needle(self) -> list[str]:
        names = ("needle_pairs", "needle_queries", "needle_symbols", "needle_tokens", "needle_copy")
        if self.source != "needle":
            # compared with defaults, because a written recipe names all keys
            given = [name for name in names if getattr(self, name) != attrs.fields_dict(DataTable)[name].default]
            return [
                f"data.{name}={getattr(self, name)} would be ignored (data.source={self.source!r} hides no pairs); use --set data.source=needle"
                for name in given
            ]
        found = []
        pairs, symbols, tokens = self.needle_pairs, self.needle_symbols, self.needle_tokens
        if self.needle_queries > pairs:
            found.append(
                f"data.needle_queries={self.needle_queries} is more than data.needle_pairs={pairs} (each asks for one); use {pairs}"
            )
        if symbols**tokens < pairs:
            least = next(size for size in range(symbols, pairs + 1) if size**tokens >= pairs)
            found.append(
                f"data.needle_pairs={pairs} have no different keys (needle_symbols={symbols} to the power of needle_tokens={tokens} are "
                f"too few); use --set data.needle_symbols={least}"
            )
        if self.tokenizer == "byte" and 3 * symbols > 256:
            found.append(
                f"data.needle_symbols={symbols} needs {3 * symbols} ids (data.tokenizer='byte' has 256); use 85 or less, "
                "or --set data.tokenizer=gpt2"
            )
        return found

    def _broken_path(self) -> list[str]:
        if self.source in (*FILE_SOURCES, "fineweb_edu"):
            is_named = isinstance(self.path, str | list | tuple) and all(isinstance(name, str) and name for name in self.path)
            return [] if self.path is None or (self.path and is_named) else [self._no_file()]
        # --set data.path= removes a recipe's path
        if self.path is None or self.path == "":
            return []
        advice = "--set data.mix='{\"web/*.jsonl\" = 3}'" if self.source == "mix" else "--set data.path= or --set data.source=text"
        return [f"data.path={short(self.path)} would be ignored (data.source={self.source!r} reads no path); use {advice}"]

    def _no_file(self) -> str:
        return (
            f"data.path={short(self.path)} does not name a file (data.source={self.source!r} reads local files); "
            "use --set data.path=FILE, or a quoted glob such as 'texts/*.txt'"
        )

    def _broken_mix(self) -> list[str]:
        weights = self.mix if isinstance(self.mix, Mapping) else {}
        is_sound = weights == self.mix and all(
            isinstance(name, str) and name and isinstance(weight, int) and not isinstance(weight, bool) and 1 <= weight <= 1000
            for name, weight in weights.items()
        )
        if not is_sound or (self.source == "mix" and not weights):
            return [
                f"data.mix={short(self.mix)} is not a table of file or glob -> weight from 1 to 1000 (data.source='mix' reads them); "
                'use --set data.mix=\'{"web/*.jsonl" = 3, "books/*.txt" = 1}\''
            ]
        if weights and self.source != "mix":
            return [f"data.mix={short(self.mix)} would be ignored (data.source={self.source!r} reads none); use --set data.source=mix"]
        return []

    def _ignored(self) -> list[str]:
        found = []
        if self.subset is not None and (self.source != "fineweb_edu" or self.path is not None):
            found.append(
                f"data.subset={short(self.subset)} would be ignored (a configuration on the hub, which is not read here); "
                "use --set data.source=fineweb_edu without data.path, or leave data.subset away"
            )
        if self.tokenizer_path is not None and self.tokenizer == "byte":
            found.append(
                f"data.tokenizer_path={short(self.tokenizer_path)} would be ignored (data.tokenizer={self.tokenizer!r} reads no file); "
                "use --set data.tokenizer=gpt2"
            )
        if not self.packing and self.source in ("fineweb_edu", "mix", *IDS):
            found.append(
                f"data.packing=false does not work with data.source={self.source!r} (lengths are known of one corpus in memory alone); "
                "use --set data.packing=true"
            )
        return found
