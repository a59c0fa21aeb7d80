"""Steps of other packages in `nsa-bench decode`, by modules that have their functions in plain torch: when they are asked, and with what."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from nsa_bench import decode, measurement, peers
from nsa_bench.decode import DecodeResult, DecodeStep, best_of, make_decode_cases, measure_peers
from nsa_bench.options import DecodeOptions
from nsa_bench.peers import DECODE_PEERS, FlashLinearAttentionStep, FlashNSAStep

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def step_of(context: int, shape: str = "4/2/16/8", geometry: str = "8/4/16/4/24", batch: str = "3") -> DecodeStep:
    options = DecodeOptions(device="cpu", shapes=shape, geometry=geometry, context=str(context), batch=batch, dtype="fp64")
    step = DecodeStep(make_decode_cases(options)[0], CPU, "auto")
    step.append()
    return step


def attend(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor, scale: float) -> Tensor:
    """Return attention of q (B, H, D) over k, v (B, T, G, D), of which is_seen (B, G, T) says what is seen."""
    group = q.shape[1] // k.shape[2]
    k, v, is_seen = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), is_seen.repeat_interleave(group, 1)
    weights = (torch.einsum("bhd,bthd->bht", q, k) * scale).masked_fill(~is_seen, float("-inf")).softmax(-1)
    return torch.einsum("bht,bthd->bhd", weights, v)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> ModuleType:
    """Make a module importable by its dotted name."""
    for depth in range(1, name.count(".") + 2):
        package = ModuleType(".".join(name.split(".")[:depth]))
        package.__path__ = []
        if package.__name__ not in sys.modules or depth > name.count("."):
            monkeypatch.setitem(sys.modules, package.__name__, package)
    module = sys.modules[name]
    for key, function in functions.items():
        setattr(module, key, function)
    return module


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Give the choice of blocks of the step, which the packages of the tests take."""
    found: dict[str, Tensor] = {}
    record = decode._Record.record_selection

    def noted(self: Any, block_indices: Tensor, positions: Tensor, geometry: Any) -> None:
        found["blocks"] = block_indices
        record(self, block_indices, positions, geometry)

    monkeypatch.setattr(decode._Record, "record_selection", noted)
    return found


def seen_of(blocks: Tensor, size: int, length: int) -> Tensor:
    """Return which of `length` tokens lie in `blocks` (B, G, n)."""
    return (torch.arange(length) // size == blocks.unsqueeze(-1)).any(-2)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Tensor]) -> None:
    """Install `fla.ops.nsa` with the three functions that a step calls."""

    def parallel_nsa_compression(*, q: Tensor, k: Tensor, v: Tensor, TK: int, block_size: int, scale: float) -> tuple[Tensor, Tensor]:
        assert k.shape[1] == v.shape[1] == -(-TK // block_size)
        assert k.is_contiguous()
        is_seen = (torch.arange(k.shape[1]) < TK // block_size).expand(q.shape[0], k.shape[2], -1)
        return attend(q[:, 0], k, v, is_seen, scale).unsqueeze(1), torch.zeros(q.shape[:3])

    def parallel_nsa_topk(*, q: Tensor, k: Tensor, TK: int, lse: Tensor, block_counts: int, block_size: int, scale: float) -> Tensor:
        assert lse.shape == q.shape[:3]
        assert chosen["blocks"].shape[-1] == block_counts
        return chosen["blocks"]

    def parallel_nsa_fwd(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: int, block_size: int, scale: float) -> Any:
        assert k.is_contiguous()
        return attend(q[:, 0], k, v, seen_of(block_indices[:, 0], block_size, k.shape[1]), scale).unsqueeze(1), None

    install(monkeypatch, "fla.ops.nsa.parallel", parallel_nsa_topk=parallel_nsa_topk, parallel_nsa_fwd=parallel_nsa_fwd)
    install(monkeypatch, "fla.ops.nsa.compression", parallel_nsa_compression=parallel_nsa_compression)


def dense(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> Tensor:
    assert not causal
    return attend(q[:, 0], k, v, torch.ones(1, k.shape[2], k.shape[1]).bool(), softmax_scale).unsqueeze(1)


@pytest.mark.parametrize("context", [200, 205])
@pytest.mark.parametrize("library", ["flash-attn-4", "flash-attn-2", None])
def test_flash_linear_attention_computes_the_step(
    library: str | None, context: int, fla: None, chosen: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (library, dense) if library else ("cannot be imported (x)", None)
    monkeypatch.setattr(peers, "find_flash_attn", lambda: found)
    step = step_of(context, "32/2/16/8", "16/16/16/4/24")
    step.check()
    built = FlashLinearAttentionStep().build(step)
    assert step.error_of(built.call(), built.window) < 1e-12
    reason = {None: "flash-attn cannot be imported (x)", "flash-attn-2": "flash-attn-2 takes D_k = D_v only"}.get(library)
    assert built.note == ("" if library == "flash-attn-4" else f"without its window branch: {reason}")
    assert (built.window is None) == bool(built.note)


@pytest.fixture
def flash_nsa(monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Tensor]) -> None:
    """Install `flash_nsa.inference` with `nsa_decode`."""

    def nsa_decode(
        q: Tensor, k: Tensor, v: Tensor, w: Tensor, context_lens: Tensor, block_tables: Tensor, cmp_slot_mapping: Tensor,
        cmp_block_tables: Tensor, fixed_y_maxlen: int, fixed_num_slc_blocks: int, kernel_size: int, stride: int, block_size: int, top_n: int,
        num_init_blocks: int, num_local_blocks: int, window_size: int,
    ) -> Tensor:  # fmt: skip
        assert k.shape[1] == 128
        length, scale = int(context_lens[0]), q.shape[-1] ** -0.5
        num_blocks = (length - kernel_size) // stride + 1 if length >= kernel_size else 0
        assert num_blocks <= fixed_y_maxlen
        assert length <= fixed_num_slc_blocks * block_size
        for b, slot in enumerate(cmp_slot_mapping.tolist()):
            if slot >= 0:
                # a mean that no table leads to
                assert slot // 128 not in (*block_tables.flatten().tolist(), *cmp_block_tables.flatten().tolist())
                k.view(-1, *k.shape[2:])[slot], v.view(-1, *v.shape[2:])[slot] = float("nan"), float("nan")
            assert (slot >= 0) == (length >= kernel_size and (length - kernel_size) % stride == 0), b
        gather = lambda x, table, count: x[table.long()].flatten(1, 2)[:, :count]  # noqa: E731
        of_tokens, of_blocks = (
            [gather(x, table, count) for x in (k, v)] for table, count in ((block_tables, length), (cmp_block_tables, num_blocks))
        )
        everything = torch.ones(1, k.shape[2], num_blocks).bool()
        cmp = attend(q, *of_blocks, everything, scale) if num_blocks else torch.zeros_like(q[..., : v.shape[-1]])
        slc = attend(q, *of_tokens, seen_of(chosen["blocks"][:, 0], block_size, length), scale)
        # the released kernel sees one token more than window_size
        in_window = (torch.arange(length) >= length - 1 - window_size).expand(1, k.shape[2], -1)
        win = attend(q, *of_tokens, in_window, scale)
        assert (top_n, num_init_blocks, num_local_blocks) == (chosen["blocks"].shape[-1], 1, 2)
        gates = w.sigmoid().unsqueeze(-2)
        return (torch.stack([cmp, slc, win], -1) * gates).sum(-1)

    install(monkeypatch, "flash_nsa.inference", nsa_decode=nsa_decode)


@pytest.mark.parametrize("context", [5, 8, 100, 127, 128, 129, 1000])
def test_flash_nsa_computes_the_step(context: int, flash_nsa: None, chosen: dict[str, Tensor]) -> None:
    step = step_of(context)
    step.check()
    built = FlashNSAStep().build(step)
    assert built.note == ""
    for _ in range(2):
        assert step.error_of(built.call(), built.window) < 1e-9


def test_every_reason_is_given_at_once(fla: None, flash_nsa: None) -> None:
    case = evolve(step_of(100).case, dtype=torch.bfloat16)
    assert FlashLinearAttentionStep().reasons_against(case, CPU) == [
        "l/d/l' = 8/4/16 (takes l = d = l')", "runs on a GPU only", "H/G = 2 (takes powers of 2 of at least 16)"
    ]  # fmt: skip
    assert FlashNSAStep().reasons_against(case, CUDA) == []
    [case] = make_decode_cases(DecodeOptions(device="cpu", shapes="36/2/100/24", geometry="24/12/252/4/24", context="20", batch="1"))
    assert FlashNSAStep().reasons_against(case, CPU) == [
        "runs on a GPU only",
        "float32 (takes bfloat16 and float16)",
        "d = 12 (takes powers of 2 that divide l)",
        "l' = 252 (takes powers of 2 up to 128)",
        "H/G = 18 (takes up to 16, and multiples of 16)",
        "D_k = 100 (takes sums of two powers of 2)",
        "D_v = 24 (takes powers of 2)",
    ]
    for shape in ("P", "L", "M"):
        [case] = make_decode_cases(DecodeOptions(device="cpu", shapes=shape, context="64", batch="1", dtype="bf16"))
        assert FlashNSAStep().reasons_against(case, CUDA) == []


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fla", "fla.ops.nsa", "flash_nsa", "flash_nsa.inference"):
        monkeypatch.setitem(sys.modules, name, None)
    found = measure_peers(step := step_of(100), DecodeResult(case=step.case))
    assert found.peers == {}
    assert [note.split(" (")[0] for note in found.peer_notes] == [
        "flash-linear-attention: fla.ops.nsa cannot be imported", "flash-nsa: flash_nsa.inference cannot be imported"
    ]  # fmt: skip
    table = decode.decode_table([found])
    assert "flash-nsa: flash_nsa.inference cannot be imported" in str(table.caption)


def test_a_peer_is_timed_and_a_failure_is_a_note(flash_nsa: None, chosen: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MAX_COUNT", 1)
    monkeypatch.setattr(FlashNSAStep, "reasons_against", lambda *_: [])
    step = step_of(100)
    result = step.check()
    found = measure_peers(step, result, DECODE_PEERS[1:])
    assert found.peers["flash-nsa"] == best_of(found.peers) > 0
    assert found.peer_errors["flash-nsa"] < 1e-9
    row = decode.to_row(found, {})
    assert row["ms_peer"] == best_of(found.peers)
    assert row["peer_errors"].startswith("flash-nsa=")
    wrong = evolve(result, limit=1e-20)
    assert measure_peers(step, wrong, DECODE_PEERS[1:]).peer_notes == ("flash-nsa: not the result of the reference",)

    def broken(*_: Any, **__: Any) -> Tensor:
        raise ValueError("no kernel for this GPU\nmore lines")

    sys.modules["flash_nsa.inference"].nsa_decode = broken
    found = measure_peers(step, result, DECODE_PEERS[1:])
    assert (found.peers, found.peer_notes) == ({}, ("flash-nsa: ValueError: no kernel for this GPU",))
