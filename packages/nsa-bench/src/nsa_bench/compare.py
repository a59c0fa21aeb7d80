"""`nsa-bench compare`: our whole operation beside other implementations, on inputs that all of them take.

One K and V for every branch, compressed by the mean over blocks of l = d = l' tokens, which is what the peers share. Our
time includes the compression, as theirs does.
"""

from collections.abc import Iterator

import torch
from attrs import evolve, frozen
from torch import Tensor

from nsa_bench.cases import Case, HeadShape
from nsa_bench.inputs import make_tensors
from nsa_bench.measurements import Direction, Measurement
from nsa_bench.measuring import Place, Subject, Wanted, check_all, describe_failure, measure
from nsa_bench.peers import PEERS, Peer
from nsa_bench.timing import free_cached_memory, held_bytes
from nsa_core import BlockGeometry, nsa_attention
from nsa_core.compression import block_windows
from nsa_core.testing.sampled import Expected, attend_sample, choices, expectation
from nsa_core.testing.sampled_rows import Sample, sample_rows

OPERANDS = ("q", "k", "v", "gates")


@frozen(kw_only=True)
class Comparison:
    """One case and what to time of it."""

    case: Case
    directions: tuple[Direction, ...] = tuple(Direction)


def comparisons(
    shapes: tuple[HeadShape, ...], lengths: tuple[int, ...], geometry: BlockGeometry, dtype: torch.dtype, directions: tuple[Direction, ...]
) -> tuple[Comparison, ...]:
    """Return the comparisons, shape by shape."""
    cases = [Case(shape=shape, seq_len=length, geometry=geometry, dtype=dtype) for shape in shapes for length in lengths]
    return tuple(Comparison(case=case, directions=directions) for case in cases)


def run_comparisons(wanted: tuple[Comparison, ...], place: Place, peers: tuple[Peer, ...] = PEERS) -> Iterator[Measurement]:
    """Yield our measurements of every case, then those of every peer, or why it has none."""
    for one in wanted:
        try:
            free_cached_memory(place.device)
            yield from _compare(one, place, peers)
        except RuntimeError as error:
            # no memory for inputs or reference, or a GPU that an earlier kernel broke
            reason = f"inputs or reference: {describe_failure(error)}"
            yield Measurement(case=one.case, operation="nsa", direction=one.directions[0], implementation="none", reason=reason)


def _compare(wanted: Comparison, place: Place, peers: tuple[Peer, ...]) -> Iterator[Measurement]:
    case, held_before = wanted.case, held_bytes(place.device)
    inputs = make_tensors(case, place.device)
    operands = {"q": inputs.q, "k": inputs.k_slc, "v": inputs.v_slc, "gates": inputs.gates}
    del inputs

    def ours(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        k_cmp, v_cmp = (block_windows(x, case.geometry).tokens.mean(2) for x in (k, v))
        return nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, geometry=case.geometry, backend=place.backend, registry=place.registry)

    subject = Subject(operation="nsa", case=case, run=ours, operands=operands)
    yield from _measured(subject, wanted, place, held_before, has_window=True)
    for peer in peers:
        yield from _measure_peer(peer, operands, wanted, place, held_before)


def _measure_peer(peer: Peer, operands: dict[str, Tensor], wanted: Comparison, place: Place, held_before: int) -> Iterator[Measurement]:
    case, reasons = wanted.case, peer.reasons_against(wanted.case, place.device)
    try:
        built = None if reasons else peer.build(case, place.device)
    except Exception as error:  # noqa: BLE001 - a peer's failure is a result, not the end of the others
        built, reasons = None, [describe_failure(error)]
    if built is None:
        for direction in wanted.directions:
            one = Measurement(case=case, operation="nsa", direction=direction, implementation=peer.name, is_ours=False)
            yield evolve(one, reason="; ".join(reasons))
        return
    subject = Subject(operation="nsa", case=case, run=built.run, operands=operands, name=peer.name, is_judged=False)
    for one in _measured(subject, wanted, place, held_before, has_window=built.has_window):
        yield evolve(one, note="; ".join(text for text in (built.note, one.note) if text))


def _measured(subject: Subject, wanted: Comparison, place: Place, held_before: int, *, has_window: bool) -> Iterator[Measurement]:
    expected = expect_shared(subject.operands, subject.case, has_window=has_window)
    checked = check_all(subject, expected, wanted.directions, place.registry)
    del expected
    yield from measure(subject, checked, Wanted(held_before=held_before), place.device)


def expect_shared(operands: dict[str, Tensor], case: Case, *, has_window: bool) -> Expected:
    """Return what attention over one shared K and V should give; without the window where a peer has none."""
    sample = sample_rows(case.sequence_lengths, case.geometry, operands["q"].device)
    # scores are taken of the compressed keys as everybody holds them, rounded to the inputs' dtype
    compressed = {"q": operands["q"], "k_cmp": _means(operands["k"][0].detach(), case).unsqueeze(0)}
    chosen, kept = choices(compressed, sample)

    def attend(leaves: dict[str, Tensor]) -> Tensor:
        return _attend_shared(leaves, sample, chosen, case, has_window=has_window)

    return expectation(attend, attend, operands, sample, kept, "rows")


def _attend_shared(leaves: dict[str, Tensor], sample: Sample, chosen: Tensor, case: Case, *, has_window: bool) -> Tensor:
    q, k, v, gates = (leaves[name] for name in OPERANDS)
    is_open = torch.tensor([1, 1, int(has_window)], device=gates.device)
    parts = {"q": q, "k_cmp": _means(k, case), "v_cmp": _means(v, case), "k_slc": k, "v_slc": v, "k_win": k, "v_win": v}
    return attend_sample("nsa", {**parts, "gates": gates * is_open}, sample, chosen)


def _means(x: Tensor, case: Case) -> Tensor:
    """Return the block means `(C, G, D)` of x `(S, G, D)`."""
    return block_windows(x.unsqueeze(0), case.geometry).tokens.mean(2)[0]
