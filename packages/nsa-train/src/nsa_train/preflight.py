"""What is checked before a run, and alone by `nsa-train preflight`: every rule is judged, each failure names its mend."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, mutable

from nsa_train.config import RunConfig, listed
from nsa_train.data.sources import Corpus, Document, read_corpus
from nsa_train.errors import ConfigError, DataError

if TYPE_CHECKING:
    from nsa_core import RoutingDecision


@mutable
class Preflight:
    """The findings: one line per rule."""

    passed: list[str] = field(factory=list)
    failed: list[str] = field(factory=list)
    corpus: Corpus | None = None
    """What was read, so that a run need not read it again; None where that failed."""

    def require(self) -> Corpus:
        """Return the corpus of a run that may start.

        Raises:
            ConfigError: with every failed rule, where there is one.
        """
        if self.failed or self.corpus is None:
            raise ConfigError.of(self.failed)
        return self.corpus


def run_preflight(config: RunConfig, out_dir: Path) -> Preflight:
    """Return what stands for and against running `config` into `out_dir`. Writes nothing."""
    findings = Preflight()
    _check_out_dir(findings, out_dir)
    _check_data(findings, config)
    _check_routes(findings, config)
    return findings


def _check_out_dir(findings: Preflight, out_dir: Path) -> None:
    existing = next(path for path in (out_dir, *out_dir.absolute().parents) if path.exists())
    if out_dir.is_dir() and any(out_dir.iterdir()):
        findings.failed.append(
            f"--out={str(out_dir)!r} is not empty (a run never mixes with another); name a new directory, or leave --out away"
        )
    elif not existing.is_dir() or not os.access(existing, os.W_OK):
        findings.failed.append(f"--out={str(out_dir)!r} cannot be written ({existing} refuses it); name another directory")
    else:
        findings.passed.append(f"out: {out_dir} is free")


def _check_data(findings: Preflight, config: RunConfig) -> None:
    try:
        corpus = read_corpus(config.data)
    except DataError as error:
        findings.failed.append(str(error))
        return
    findings.corpus = corpus
    shared = {document.text for document in corpus.train} & {document.text for document in corpus.val}
    if shared:
        findings.failed.append(f"data: {len(shared)} documents stand in train and in validation; remove the copies")
    for name, documents in zip(Corpus._fields, corpus, strict=True):
        _check_split(findings, name, documents, config.train.seq_len)


def _check_split(findings: Preflight, name: str, documents: list[Document], seq_len: int) -> None:
    size = sum(len(document.text) + 1 for document in documents)
    if size < seq_len:
        findings.failed.append(
            f"train.seq_len={seq_len} is longer than the {name} split ({size} tokens; it must fill one row); "
            f"use {max(2, size)} or less, or more text"
        )
    else:
        findings.passed.append(f"data: {name} has {len(documents)} documents, {size:,} tokens")


def _check_routes(findings: Preflight, config: RunConfig) -> None:
    from nsa_train.routing import pick_device, routing_decisions

    for operation, decision in routing_decisions(config, pick_device()).items():
        if decision.chosen is None:
            findings.failed.append(_unserved(operation, config.nsa.backends.get(operation, "auto"), decision))
        else:
            findings.passed.append(f"route: {operation} -> {decision.chosen}")


def _unserved(operation: str, asked: str, decision: "RoutingDecision") -> str:
    reasons = {candidate.name: ", ".join(map(str, candidate.reasons)) for candidate in decision.candidates}
    if asked not in ("auto", *reasons):
        return f"nsa.backends.{operation}={asked!r} is not installed (there is {listed(reasons) or 'none'}); use 'auto'"
    against = reasons if asked == "auto" else {asked: reasons[asked]}
    text = "; ".join(f"{name}: {reason}" for name, reason in against.items())
    return f"nsa.backends.{operation}={asked!r} cannot serve this run ({text or 'none is installed'}); use {'sdpa' if asked == 'auto' else 'auto'!r}"
