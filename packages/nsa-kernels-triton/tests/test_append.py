"""A step written into a cache by kernels, against the reference: every store, whatever phi, rotation and layout."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nsa_core import BlockGeometry, NSAConfig, Operation, Reason
from nsa_core.backends.base import BranchRequest, Keys, NewBlocks, NewRows
from nsa_core.compression import build_compressor
from nsa_core.config import RopeScaling
from nsa_core.kv_cache import CacheOptions, NSACache
from nsa_core.reference.sdpa import SDPABackend
from nsa_core.rope import RotaryEmbedding, unrotated
from nsa_core.testing.conformance import check_backend
from nsa_core.testing.inputs import ONE_LOCAL, SMALL
from nsa_core.testing.tolerances import allowed_error, max_error
from nsa_kernels_triton.append import kernels
from nsa_kernels_triton.append.op import MOST_MLP_ROWS, phi_of
from nsa_kernels_triton.plugin import TritonBackend

pytestmark = [pytest.mark.usefixtures("nan_buffers"), pytest.mark.filterwarnings("ignore:.*against policy.*")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
NAMES = ("raw", "slc", "win")


class Case(NamedTuple):
    """A cache of three sequences, and the counts of its steps."""

    phi: Any = "mean"
    rope: str = "block_end"
    kv: Any = "separate"
    dtype: torch.dtype = torch.float32
    head_dim_qk: int = 16
    head_dim_v: int = 12
    num_kv_heads: int = 2
    geometry: BlockGeometry = SMALL
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    capacity: int = 64
    starts: tuple[int, ...] = (0, 5, 22)
    counts: tuple[tuple[int, ...], ...] = ((1, 1, 1), (3, 0, 2), (7, 7, 1), (1, 1, 1))


CASES = {
    "mean": Case(),
    "conv": Case(phi="conv"),
    "mlp": Case(phi="mlp"),
    "mlp bf16": Case(phi="mlp", dtype=torch.bfloat16, head_dim_qk=48, head_dim_v=24),
    "conv bf16": Case(phi="conv", dtype=torch.bfloat16),
    "mean fp16": Case(dtype=torch.float16),
    "mlp fp16 of many heads": Case(phi="mlp", dtype=torch.float16, num_kv_heads=7, counts=((1, 1, 1), (16, 3, 9))),
    "keys shared": Case(kv="shared", phi="conv"),
    "rotated tokens": Case(rope="tokens"),
    "yarn": Case(rope="yarn", phi="mlp"),
    "odd values": Case(head_dim_v=7, phi="mlp"),
    "16 rows": Case(counts=((16, 9, 16), (16, 16, 0)), phi="conv"),
    "16 rows of l = 4": Case(counts=((16, 9, 16), (1, 1, 1)), geometry=ONE_LOCAL, phi="mlp"),
    "a tile of conv": Case(counts=((37, 20, 41), (1, 3, 1)), phi="conv", starts=(0, 5, 20)),
    "a tile of mlp": Case(counts=((37, 20, 41), (1, 3, 1)), phi="mlp", starts=(0, 5, 20)),
    "a tile of fp8 in pages": Case(counts=((40, 2, 33),), options={"kv_dtype": FP8, "page_size": 16}, starts=(0, 5, 20)),
    "default geometry": Case(geometry=BlockGeometry(), starts=(31, 95, 40), counts=((1, 1, 8),), capacity=200, phi="mlp"),
    "pages": Case(options={"page_size": 16}, phi="mlp"),
    "fp8": Case(options={"kv_dtype": FP8}),
    "fp8 of bf16 in pages": Case(options={"kv_dtype": FP8, "page_size": 16}, dtype=torch.bfloat16, kv="shared"),
    "a ring that wraps": Case(starts=(20, 41, 39), options={"max_rollback": 8}),
    "the end of the store": Case(starts=(63, 60, 64), counts=((1, 4, 0), (0, 0, 0))),
}
IN_THE_SLOW_TIER = {"mlp bf16", "16 rows of l = 4", "a tile of mlp", "mlp fp16 of many heads"}
"""Cases of which each takes seconds in the interpreter."""


class Twin(NamedTuple):
    """Two caches of equal stores, and a function that returns a step's operands over one of them."""

    caches: tuple[NSACache, NSACache]
    compress: tuple[nn.Module, nn.Module]
    rotate: Any


def make(case: Case) -> Twin:
    config = NSAConfig(
        hidden_size=16, num_heads=2 * case.num_kv_heads, num_kv_heads=case.num_kv_heads, head_dim_qk=case.head_dim_qk,
        head_dim_v=case.head_dim_v, geometry=case.geometry, compressor=case.phi, kv=case.kv,
    )  # fmt: skip
    caches = tuple(
        NSACache(config, len(case.starts), case.capacity, CacheOptions(static=True, **case.options), dtype=case.dtype, device=DEVICE)
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    for cache in caches:
        if cache.pages is not None:
            for sequence in range(len(case.starts)):
                cache.reserve(sequence, case.capacity, length=0)
    for name in caches[0].keys:
        for stores in zip(*(cache.stores._all() for cache in caches), strict=True):
            if name in stores[0]:
                drawn = torch.randn(stores[0][name].shape, generator=generator).to(DEVICE, stores[0][name].dtype)
                for store in stores:
                    store[name].copy_(drawn)
    torch.manual_seed(0)
    compress = []
    for width in (case.head_dim_qk, case.head_dim_v):
        module = build_compressor(case.phi, case.num_kv_heads, width, case.geometry).to(DEVICE)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        compress.append(module.to(case.dtype))
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position=32) if case.rope == "yarn" else None
    rotate = unrotated if case.rope == "tokens" else RotaryEmbedding(case.head_dim_qk, scaling=scaling)
    assert len(caches) == 2
    return Twin((caches[0], caches[1]), (compress[0], compress[1]), rotate)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def rows_of(case: Case, counts: tuple[int, ...], names: list[str], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return new k and v for each store; rows that do not count are NaN."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in names:
        pair = [
            torch.randn(len(counts), max(counts), case.num_kv_heads, width, generator=generator).to(DEVICE, case.dtype)
            for width in (case.head_dim_qk, case.head_dim_v)
        ]
        for x in pair:
            for b, count in enumerate(counts):
                x[b, count:] = torch.nan
        found[name] = (pair[0], pair[1])
    return found


def write(cache: NSACache, twin: Twin, new: dict[str, tuple[Tensor, Tensor]], start: Tensor, count: Tensor, backend: Any) -> None:
    rows = {name: cache.new_rows(name, k, v) for name, (k, v) in new.items()}
    blocks = NewBlocks(cache.stores.keys_of("cmp"), rows["raw"], *twin.compress, twin.rotate)
    with torch.no_grad():
        backend(operation=Operation.APPEND)(tuple(rows.values()), blocks, start, count, geometry=cache.config.geometry)


def stores_of(cache: NSACache) -> dict[str, Tensor]:
    """Return every store, without the page that belongs to no sequence."""
    found = {}
    for kind, stores in zip(("k", "v", "k scale", "v scale"), cache.stores._all(), strict=True):
        for name, store in stores.items():
            is_paged = cache.pages is not None and name in ("slc", "cmp")
            found[f"{name} {kind}"] = (store[:-1] if is_paged else store).float()
    return found


def assert_same_stores(found: NSACache, expected: NSACache, dtype: torch.dtype) -> None:
    for (name, x), y in zip(stores_of(found).items(), stores_of(expected).values(), strict=True):
        if name.startswith("cmp"):
            limit = allowed_error(y.double(), dtype, (4 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps)
            assert max_error(x.double(), y.double()) <= limit, name
        else:
            assert torch.equal(x, y), name


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Return the list to which each launch adds its kernel and grid."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name in ("append_kernel", "down_kernel"):
        kernel = getattr(kernels, name)
        launch = kernel._launch

        def record(grid: tuple[int, ...], *arguments: Any, name: str = name, launch: Any = launch, **constants: Any) -> None:
            seen.append((name, grid))
            launch(grid, *arguments, **constants)

        monkeypatch.setattr(kernel, "_launch", record)
    return seen


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=pytest.mark.slow if name in IN_THE_SLOW_TIER else ()) for name, case in CASES.items()]
)
def test_steps_leave_the_stores_that_the_reference_leaves(case: Case, launched: list[tuple[str, tuple[int, ...]]]) -> None:
    twin = make(case)
    start = int32(*case.starts)
    names = [name for name in NAMES if name in twin.caches[0].keys]
    for number, counts in enumerate(case.counts):
        new, count = rows_of(case, counts, names, number), int32(*counts)
        launched.clear()
        if not max(counts):
            continue
        for cache, backend in zip(twin.caches, (TritonBackend, SDPABackend), strict=True):
            write(cache, twin, new, start, count, backend)
        # phi `mlp` of a tile is called, and what it returns is written
        expected = ["append_kernel", *(["append_kernel" if max(counts) > MOST_MLP_ROWS else "down_kernel"] if case.phi == "mlp" else [])]
        assert [name for name, _grid in launched] == expected
        assert_same_stores(twin.caches[0], twin.caches[1], case.dtype)
        start = start + count


def test_launches_do_not_depend_on_lengths(launched: list[tuple[str, tuple[int, ...]]]) -> None:
    """One CUDA graph serves all of them."""
    case = Case(phi="mlp")
    twin = make(case)
    for seed, starts in enumerate(((0, 5, 22), (31, 7, 40))):
        write(twin.caches[0], twin, rows_of(case, (1, 1, 1), list(NAMES), seed), int32(*starts), int32(1, 1, 1), TritonBackend)
    assert launched[:2] == launched[2:]


@pytest.mark.parametrize("phi", ["mean", "mlp"])
def test_a_ring_shorter_than_a_step_gives_its_tail_to_blocks_first(phi: str) -> None:
    case = Case(phi=phi, starts=(6, 13, 21), options={"max_rollback": 1})
    twin = make(case)
    new, count = rows_of(case, (9, 12, 3), list(NAMES), 0), int32(9, 12, 3)
    for cache, backend in zip(twin.caches, (TritonBackend, SDPABackend), strict=True):
        assert cache.keys["raw"].shape[1] < SMALL.compression_block_size + 11
        write(cache, twin, new, int32(*case.starts), count, backend)
    assert_same_stores(twin.caches[0], twin.caches[1], case.dtype)


def test_rows_beyond_a_store_are_dropped() -> None:
    case = Case(starts=(63, 62, 70))
    twin = make(case)
    before = {name: x.clone() for name, x in stores_of(twin.caches[0]).items()}
    names = ["slc"]
    (k, v) = rows_of(case, (4, 4, 4), names, 0)["slc"]
    TritonBackend(operation=Operation.APPEND)(
        (twin.caches[0].new_rows("slc", k, v),), None, int32(*case.starts), int32(4, 4, 4), geometry=SMALL
    )  # fmt: skip
    found = stores_of(twin.caches[0])
    assert torch.equal(found["slc k"][0, 63], k[0, 0].float())
    assert torch.equal(found["slc v"][1, 62:], v[1, :2].float())
    assert torch.equal(found["slc k"][2], before["slc k"][2])
    assert torch.equal(found["slc k"][:2, :62], before["slc k"][:2, :62])


def test_pages_that_a_sequence_does_not_have_take_no_row() -> None:
    case = Case(options={"page_size": 16})
    twin = make(case)
    cache = twin.caches[0]
    assert cache.pages is not None
    cache.pages.table[1, 1:] = -1
    cache.pages.table[2, 1:] = 1000
    before = stores_of(cache)["slc k"].clone()
    new, count = rows_of(case, (1, 1, 1), ["slc"], 0), int32(1, 1, 1)
    TritonBackend(operation=Operation.APPEND)((cache.new_rows("slc", *new["slc"]),), None, int32(3, 17, 40), count, geometry=SMALL)
    changed = (stores_of(cache)["slc k"] != before).any(-1).any(-1)
    assert int(changed.sum()) == 1


@pytest.mark.parametrize(("start", "num_new"), [(9, 3), (6, 4), (0, 11), (21, 8)])
def test_a_ring_in_pages_is_written_where_the_reference_writes_it(start: int, num_new: int) -> None:
    new = torch.randn(1, num_new, 2, 16, device=DEVICE)
    found = []
    for backend in (SDPABackend(operation=Operation.APPEND), TritonBackend(operation=Operation.APPEND)):
        store = torch.zeros(4, 4, 2, 16, device=DEVICE)
        # 8 rows in pages 1 and 0; the last page belongs to no sequence
        ring = Keys(store, store.clone(), 2**31 - 1, page_table=int32(1, 0).unsqueeze(0), ring=True)
        backend((NewRows(ring, new, 2 * new),), None, int32(start), int32(num_new), geometry=SMALL)
        found.append((ring.k[:-1], ring.v[:-1]))
    assert torch.equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])


class Doubled(nn.Module):
    """A phi that the kernels do not know."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * tokens.mean(2)


class Shard(Tensor):
    """Stands for a parameter that a module gathers before it is read."""


class Wrapped(nn.Module):
    """A layer instead of another, with its weights, as LoRA makes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.weight, self.bias, self.out_features = layer, layer.weight, layer.bias, layer.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * self.layer(x)


@pytest.mark.parametrize("what", ["phi", "rotation", "hook", "hook inside", "layer inside"])
def test_what_the_kernels_do_not_know_is_called_as_it_is(what: str) -> None:
    case = Case(phi="mlp" if what.endswith("inside") else "mean")
    twin = make(case)
    if what == "hook inside":
        twin.compress[0].up.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif what == "layer inside":
        twin.compress[1].down = Wrapped(twin.compress[1].down)
    elif what == "phi":
        twin = twin._replace(compress=(Doubled(), Doubled()))
    elif what == "rotation":
        twin = twin._replace(rotate=lambda x, positions: x * positions[..., None, None])
    else:
        twin.compress[0].register_forward_hook(lambda module, inputs, output: output + 1)
    new, count = rows_of(case, (7, 9, 3), list(NAMES), 0), int32(7, 9, 3)
    for cache, backend in zip(twin.caches, (TritonBackend, SDPABackend), strict=True):
        write(cache, twin, new, int32(*case.starts), count, backend)
    assert_same_stores(twin.caches[0], twin.caches[1], case.dtype)


def test_a_phi_is_known_by_its_own_parameters_without_a_walk_over_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    twin = make(Case(phi="mlp"))
    raw = twin.caches[0].new_rows("raw", *rows_of(Case(), (1, 1, 1), ["raw"], 0)["raw"])
    blocks = NewBlocks(twin.caches[0].stores.keys_of("cmp"), raw, *twin.compress, twin.rotate)
    monkeypatch.setattr(nn.Module, "named_modules", refuse)
    monkeypatch.setattr(nn.Module, "_named_members", refuse)
    assert phi_of(blocks) is not None

    down = blocks.compress_v.down
    for name, weight in (("dtype", down.weight.double()), ("strides", down.weight.t()), ("class", down.weight.as_subclass(Shard))):
        monkeypatch.setitem(down._parameters, "weight", weight)
        assert phi_of(blocks) is None, name


def test_stores_that_are_not_contiguous_are_written() -> None:
    case = Case()
    twin = make(case)
    new, count = rows_of(case, (2, 1, 3), ["slc"], 0)["slc"], int32(2, 1, 3)
    kept = twin.caches[1].new_rows("slc", *new)
    wide = torch.zeros(*kept.store.k.shape[:2], 2 * kept.store.k.shape[2], kept.store.k.shape[3], dtype=kept.store.k.dtype, device=DEVICE)
    part = kept._replace(store=kept.store._replace(k=wide[:, :, : kept.store.k.shape[2]]))
    start = int32(*case.starts)
    for backend, rows in ((TritonBackend, part), (SDPABackend, kept._replace(store=kept.store._replace(k=torch.zeros_like(kept.store.k))))):
        backend(operation=Operation.APPEND)((rows,), None, start, count, geometry=SMALL)
        written = rows.store.k
        assert written.any()
        if backend is SDPABackend:
            assert torch.equal(written, part.store.k)
    assert not wide[:, :, kept.store.k.shape[2] :].any()


def test_fp8_keeps_what_is_not_a_number() -> None:
    case = Case(options={"kv_dtype": FP8})
    twin = make(case)
    new, count = rows_of(case, (1, 1, 1), ["slc"], 0), int32(1, 1, 1)
    new["slc"][0][1, 0, 0, 3] = float("nan")
    for cache, backend in zip(twin.caches, (TritonBackend, SDPABackend), strict=True):
        backend(operation=Operation.APPEND)((cache.new_rows("slc", *new["slc"]),), None, int32(*case.starts), count, geometry=SMALL)
    # numbers times scales: the interpreter's own cast to FP8 knows no NaN
    kernels, reference = (cache.stores.keys_of("slc") for cache in twin.caches)
    lost = [(store.k.float() * store.k_scale[..., None]).isnan() for store in (kernels, reference)]
    assert torch.equal(*lost)
    assert int(lost[0].sum()) == case.head_dim_qk


def test_keys_alone_choose() -> None:
    """A cache without the compressed branch has no compressed values."""
    case = Case(phi="mlp")
    twin = make(case)
    (k, _v), count = rows_of(case, (9, 9, 3), ["raw"], 0)["raw"], int32(9, 9, 3)
    for cache, backend in zip(twin.caches, (TritonBackend, SDPABackend), strict=True):
        blocks = NewBlocks(cache.stores.keys_of("cmp"), cache.new_rows("raw", k, None), twin.compress[0], None, twin.rotate)
        with torch.no_grad():
            backend(operation=Operation.APPEND)((), blocks, int32(*case.starts), count, geometry=SMALL)
    assert_same_stores(twin.caches[0], twin.caches[1], case.dtype)


def test_a_batch_without_sequences_or_rows_writes_nothing() -> None:
    k = torch.empty(0, 1, 2, 16, device=DEVICE)
    TritonBackend(operation=Operation.APPEND)((NewRows(Keys(k, k, 1), k, k),), None, int32(), int32(), geometry=SMALL)


class Some(TritonBackend):
    """The kernels, for the kit's cases of two KV heads in single precision: the others take the interpreter long."""

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        is_dear = request.num_kv_heads != 2 or request.dtype != torch.float32
        return super().reasons_against(request) + (Reason.incapable("left to the slow tier"),) * is_dear


def test_it_conforms_to_a_loop_over_tokens() -> None:
    report = check_backend(Some(operation=Operation.APPEND), device=DEVICE)
    print(report)
    assert len(report.passed) >= 12


@pytest.mark.slow
def test_it_conforms_to_a_loop_over_tokens_in_every_case() -> None:
    report = check_backend(TritonBackend(operation=Operation.APPEND), device=DEVICE)
    print(report)
    assert len(report.passed) >= 100
    assert all("float64" in case for case in report.declined)


def test_a_gpu_without_fp8_writes_no_such_store() -> None:
    request = BranchRequest(operation=Operation.APPEND, kv_dtype=FP8, compute_capability=(8, 0), device_type="cuda")
    reasons = TritonBackend(operation=Operation.APPEND).reasons_against(request)
    assert any("has no conversion of FP8" in str(reason) for reason in reasons)


def test_a_tile_of_a_prompt_is_written_on_a_gpu() -> None:
    request = BranchRequest(
        operation=Operation.APPEND, num_queries=4096, dtype=torch.bfloat16, compute_capability=(9, 0), device_type="cuda"
    )
    assert TritonBackend(operation=Operation.APPEND).reasons_against(request) == ()
