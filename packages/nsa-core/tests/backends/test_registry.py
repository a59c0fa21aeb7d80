"""The choice among backends: by preference, by name, with reasons, remembered."""

import copy
import pickle
import warnings

import pytest
import torch
from attrs import define, evolve

from nsa_core import (
    BackendRegistry,
    BackendUnavailableError,
    BlockGeometry,
    BranchOutput,
    BranchRequest,
    Capability,
    DuplicateBackendError,
    InputError,
    NativeSparseAttention,
    NSAConfig,
    NSAError,
    Operation,
    Reason,
    dispatch,
    explain_routing,
    nsa_attention,
    sliding_window_attention,
)
from nsa_core.attention import attend
from nsa_core.backends import registry as registry_module
from nsa_core.backends.base import Keys, Queries
from nsa_core.reference.sdpa import sdpa_backends
from nsa_core.telemetry import AttentionObserver

GEOMETRY = BlockGeometry(4, 2, 8, 3, 1, 1, 5)
REQUEST = BranchRequest(operation=Operation.WIN)
CUDA_ONLY = Capability(device_types=("cuda",))


@define(kw_only=True, eq=False)
class CountingBackend:
    """A backend that counts its queries and calls; it returns ones."""

    name: str = "counting"
    operation: Operation = Operation.WIN
    capability: Capability = Capability()
    level: int = 1
    policy: tuple[str, ...] = ()
    num_asked: int = 0
    num_calls: int = 0
    last_request: BranchRequest | None = None

    def reasons_against(self, request):
        self.num_asked += 1
        self.last_request = request
        return (*self.capability.reasons_against(request), *(Reason.policy(message) for message in self.policy))

    def preference(self, request):
        return self.level

    def __call__(self, queries, keys, *others, geometry, scale):
        self.num_calls += 1
        q, v = queries.q, keys.v
        out = q.new_ones(*q.shape[:3], v.shape[3])
        return out if self.operation is Operation.NSA else BranchOutput(out, q.new_zeros(q.shape[:3]))


class HopperKernel(CountingBackend):
    """A backend as the kernel packages have them: CUDA from 8.0 on, and on 8.9 only if it is named."""

    def reasons_against(self, request):
        found = Capability(device_types=("cuda",), min_compute_capability=(8, 0)).reasons_against(request)
        if request.compute_capability == (8, 9):
            found += (Reason.policy("slower than the reference on SM 8.9"),)
        return found


def registry_of(*fields):
    return BackendRegistry(tuple(CountingBackend(**each) for each in fields))


def chosen(registry, request=REQUEST, backend="auto"):
    return registry.resolve(request, backend).name


def operands(seed=0, S=11, H=4, G=2, D_k=6, D_v=4):
    torch.manual_seed(seed)
    C = (S - GEOMETRY.compression_block_size) // GEOMETRY.compression_stride + 1
    pairs = [torch.randn(1, T, G, D) for T in (C, S, S) for D in (D_k, D_v)]
    return torch.randn(1, S, H, D_k), *pairs, torch.rand(1, S, H, 3)


def test_auto_takes_the_highest_preference():
    registry = registry_of({"name": "low", "level": -1}, {"name": "high", "level": 7}, {"name": "middle", "level": 3})
    assert chosen(registry) == "high"


def test_auto_passes_over_a_backend_with_any_reason_against_it():
    registry = registry_of(
        {"name": "incapable", "level": 9, "capability": CUDA_ONLY}, {"name": "unwise", "level": 8, "policy": ("slow",)}, {"name": "plain"}
    )
    assert chosen(registry) == "plain"


@pytest.mark.parametrize("order", [("b", "a", "c"), ("c", "b", "a")])
def test_equal_preferences_go_by_name_whatever_the_order_of_registration(order):
    assert chosen(registry_of(*({"name": name} for name in order))) == "a"


def test_auto_asks_only_backends_of_the_operation():
    registry = registry_of({"name": "other", "operation": Operation.CMP, "level": 9}, {"name": "window", "level": 0})
    assert chosen(registry) == "window"


@pytest.mark.parametrize("name", ["auto", "second"])
def test_a_call_asks_no_backend_after_the_one_that_serves(name):
    """Some compile a kernel to find their reasons; an explanation asks all."""
    backends = [
        CountingBackend(name="first", level=3, policy=("slow",)),
        *(CountingBackend(name=each, level=2) for each in ("second", "third")),
    ]
    registry = BackendRegistry(tuple(backends))
    assert registry.resolve(REQUEST, name).name == "second"
    assert [backend.num_asked for backend in backends] == [int(name == "auto"), 1, 0]
    registry.explain(REQUEST, name)
    assert [backend.num_asked for backend in backends] == [int(name == "auto") + 1, 2, 1]


def test_a_preference_may_depend_on_the_request():
    class Short(CountingBackend):
        def preference(self, request):
            return 1 if request.num_queries <= 64 else -1

    registry = BackendRegistry((Short(name="short"), *sdpa_backends()))
    assert chosen(registry, BranchRequest(operation="win", num_queries=64)) == "short"
    assert chosen(registry, BranchRequest(operation="win", num_queries=65)) == "sdpa"


def test_auto_without_an_eligible_backend_names_every_reason_of_each():
    registry = registry_of(
        {"name": "gpu", "capability": Capability(device_types=("cuda",), max_head_dim=32)}, {"name": "slow", "policy": ("s",)}
    )
    with pytest.raises(BackendUnavailableError) as caught:
        registry.resolve(REQUEST)
    for said in ("device cpu (needs cuda)", "head dimension 64 (at most 32)", "slow (preference 1): policy: s"):
        assert said in str(caught.value)
    assert str(caught.value).startswith(
        "no backend serves this request (backend='auto' takes an eligible one); "
        "name one that only policy refuses, or fix the reasons against them:\n"
    )
    with pytest.warns(UserWarning, match="against policy"):
        assert chosen(registry, backend="slow") == "slow"


def test_a_name_never_falls_back():
    registry = registry_of(
        {"name": "gpu", "capability": Capability(device_types=("cuda",), max_head_dim=32), "policy": ("rarely",)}, {"name": "any"}
    )
    with pytest.raises(BackendUnavailableError, match="a named backend never falls back") as caught:
        registry.resolve(REQUEST, "gpu")
    for said in ("device cpu (needs cuda)", "head dimension 64 (at most 32)", "policy: rarely", "any (preference 1): eligible"):
        assert said in str(caught.value)


def test_a_name_wins_over_preference():
    registry = registry_of({"name": "low", "level": -9}, {"name": "high", "level": 9})
    assert chosen(registry, backend="low") == "low"


def test_an_unknown_name_lists_the_known_ones():
    registry = registry_of({"name": "one"}, {"name": "two"}, {"name": "three", "operation": Operation.CMP})
    with pytest.raises(BackendUnavailableError, match="no backend 'tow' for operation 'win' is installed; use 'auto' or 'one' or 'two'$"):
        registry.resolve(REQUEST, "tow")


def test_the_error_is_one_that_callers_can_catch():
    assert issubclass(BackendUnavailableError, NSAError)
    assert issubclass(BackendUnavailableError, RuntimeError)


def test_policy_is_overridden_by_name_with_exactly_one_warning():
    registry = registry_of({"name": "slow", "policy": ("slower below 4096 tokens",)}, {"name": "other"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for num_queries in (1, 2, 2, 3):
            request = BranchRequest(operation=Operation.WIN, num_queries=num_queries)
            assert chosen(registry, request, "slow") == "slow"
    assert len(caught) == 1
    assert str(caught[0].message).startswith("backend 'slow' for 'win' runs against policy because it was named: ")
    assert "slower below 4096 tokens" in str(caught[0].message)


def test_each_overridden_backend_warns_for_itself():
    registry = registry_of({"name": "slow", "policy": ("s",)}, {"name": "late", "policy": ("l",)})
    for name in ("slow", "late"):
        with pytest.warns(UserWarning, match=f"{name!r} for .* runs against policy because it was named"):
            registry.resolve(REQUEST, name)


def test_an_operation_runs_the_backend_that_was_named():
    q, _, _, _, _, k, v, _ = operands()
    backend = CountingBackend(level=-1)
    registry = BackendRegistry((*sdpa_backends(), backend))
    sliding_window_attention(q, k, v, geometry=GEOMETRY, registry=registry)
    assert backend.num_calls == 0
    sliding_window_attention(q, k, v, geometry=GEOMETRY, registry=registry, backend="counting")
    sliding_window_attention(q, k, v, geometry=GEOMETRY, registry=registry, backend={"win": "counting"})
    assert backend.num_calls == 2


def test_a_request_is_routed_once():
    registry = registry_of({"name": "first"}, {"name": "second", "level": 0})
    for _ in range(3):
        registry.resolve(REQUEST)
    assert [backend.num_asked for backend in registry.backends] == [1, 0]
    registry.resolve(BranchRequest(operation=Operation.WIN, num_queries=2))
    assert [backend.num_asked for backend in registry.backends] == [2, 0]


def test_routes_are_remembered_apart_for_each_name():
    registry = registry_of({"name": "a"}, {"name": "b", "level": 5})
    assert [chosen(registry, backend=name) for name in ("auto", "a", "b", "auto")] == ["b", "a", "b", "b"]


def test_calls_of_one_shape_are_routed_once():
    *tensors, gates = operands()
    window = CountingBackend()
    fused = CountingBackend(name="fused", operation=Operation.NSA, capability=CUDA_ONLY)
    registry = BackendRegistry((*sdpa_backends(), window, fused))
    for _ in range(3):
        nsa_attention(*tensors, gates, geometry=GEOMETRY, registry=registry)
    assert (window.num_calls, window.num_asked, fused.num_asked) == (3, 1, 1)


def test_a_backend_registered_later_is_taken_into_account():
    registry = registry_of({"name": "early"})
    assert chosen(registry) == "early"
    registry.register(CountingBackend(name="late", level=2))
    assert chosen(registry) == "late"


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "sdpa"), ((8, 0), "hopper"), ((8, 9), "sdpa"), ((9, 0), "hopper"), (None, "sdpa")]
)
def test_routing_answers_for_a_gpu_that_is_not_here(capability, expected):
    registry = BackendRegistry((*sdpa_backends(), HopperKernel(name="hopper", level=10)))
    request = BranchRequest(
        operation=Operation.WIN, device_type="cuda", compute_capability=capability, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
    )
    assert registry.explain(request).chosen == expected
    assert chosen(registry, request) == expected


def test_policy_on_sm_8_9_gives_way_to_a_name():
    registry = BackendRegistry((*sdpa_backends(), HopperKernel(name="hopper", level=10)))
    request = BranchRequest(operation=Operation.WIN, device_type="cuda", compute_capability=(8, 9))
    assert registry.explain(request, "hopper").chosen == "hopper"
    with pytest.warns(UserWarning, match="slower than the reference on SM 8.9"):
        assert chosen(registry, request, "hopper") == "hopper"


def test_two_backends_of_one_name_and_operation_are_refused_naming_both():
    registry = BackendRegistry((HopperKernel(name="same"),))
    with pytest.raises(DuplicateBackendError, match=r"'same' for operation .*'win'.* twice, by .*HopperKernel and .*CountingBackend"):
        registry.register(CountingBackend(name="same"))
    assert len(registry.backends) == 1


def test_one_name_may_serve_several_operations():
    registry = registry_of({"name": "same"}, {"name": "same", "operation": Operation.SLC})
    assert registry.has(Operation.WIN, "same")
    assert registry.has(Operation.SLC, "same")
    assert not registry.has(Operation.CMP, "same")


def test_no_backend_may_be_called_auto():
    with pytest.raises(DuplicateBackendError, match="'auto', which names routing itself"):
        registry_of({"name": "auto"})


def fused_registry(**fields):
    fused = CountingBackend(name="fused", operation=Operation.NSA, **fields)
    return BackendRegistry((*sdpa_backends(), fused)), fused


@pytest.mark.parametrize(
    "backend", ["auto", {}, {"nsa": "auto", "win": "auto"}, "fused", {"nsa": "fused"}, {"nsa": "fused", "win": "sdpa"}]
)
def test_the_fused_operation_runs_where_it_is_eligible(backend):
    registry, fused = fused_registry(level=-5)
    out = nsa_attention(*operands(), geometry=GEOMETRY, registry=registry, backend=backend)
    assert fused.num_calls == 1
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("backend", ["sdpa", {"win": "sdpa"}, {"select": "sdpa", "nsa": "auto"}])
def test_naming_an_operation_keeps_the_branches_apart(backend):
    registry, fused = fused_registry()
    nsa_attention(*operands(), geometry=GEOMETRY, registry=registry, backend=backend)
    assert (fused.num_calls, fused.num_asked) == (0, 0)


class RouteObserver(AttentionObserver):
    def __init__(self, needs_branches):
        self.routes = []
        self.needs_branches = needs_branches

    def record_route(self, operation, backend):
        self.routes.append((operation, backend))


def test_observers_that_want_the_branches_keep_them_apart_and_all_are_told_the_routes():
    registry, fused = fused_registry()
    routes = {True: [(operation, "sdpa") for operation in ("cmp", "select", "slc", "win")], False: [("nsa", "fused")]}
    for needs_branches, expected in routes.items():
        observer = RouteObserver(needs_branches)
        nsa_attention(*operands(), geometry=GEOMETRY, registry=registry, observers=(observer,))
        assert fused.num_calls == (not needs_branches)
        assert observer.routes == expected


def test_observers_of_a_registry_are_told_every_choice_with_the_request_by_name():
    registry, _ = fused_registry(capability=CUDA_ONLY)
    told = []
    registry.observers.append(lambda backend, facts, name: told.append((backend, facts.operation, facts.num_heads, facts.layout, name)))
    nsa_attention(*operands(), geometry=GEOMETRY, registry=registry)
    served = [("auto", operation, 4, "dense", "sdpa") for operation in ("cmp", "select", "slc", "win")]
    assert told == [("auto", "nsa", 4, "dense", None), *served]


def test_calls_that_repeat_make_no_request_anew_and_each_gets_its_own(monkeypatch):
    registry, told, made = registry_of({"name": "window"}), [], []
    registry.observers.append(lambda backend, facts, name: told.append(facts))
    facts_of = dispatch.facts_of
    monkeypatch.setattr(dispatch, "facts_of", lambda *operands, **keywords: made.append(operands) or facts_of(*operands, **keywords))
    q, k, v = torch.randn(1, 11, 4, 6), torch.randn(1, 11, 2, 6), torch.randn(1, 11, 2, 4)
    start, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    calls = [
        ((q, k, v), {}),
        ((q[:, :9], k[:, :9], v[:, :9]), {}),
        ((q[:, :, :2], k, v), {}),
        ((q[..., :5], k[..., :5], v), {}),
        ((q, k[:, :, :1], v[:, :, :1]), {}),
        ((q, k, v[..., :3]), {}),
        ((q.double(), k.double(), v.double()), {}),
        ((q.clone().requires_grad_(), k, v), {}),
        ((q, k, v), {"cu_seqlens": torch.tensor([0, 11], dtype=torch.int32)}),
        ((q, k, v), {"cu_seqlens": torch.tensor([0, 4, 11], dtype=torch.int32)}),
        ((q[:, :2], k, v), {"query_start": start}),
        ((q[:, :2], k, v), {"query_start": start, "page_table": table}),
        ((q, k, v), {"geometry": BlockGeometry(4, 2, 8, 3, 1, 1, 6)}),
    ]

    for _ in range(2):
        for tensors, keywords in calls:
            sliding_window_attention(*tensors, **{"geometry": GEOMETRY, "registry": registry, **keywords})
    torch.use_deterministic_algorithms(True)
    try:
        sliding_window_attention(q, k, v, geometry=GEOMETRY, registry=registry)
    finally:
        torch.use_deterministic_algorithms(False)
    registry.register(CountingBackend(name="better", level=2))
    sliding_window_attention(q, k, v, geometry=GEOMETRY, registry=registry)

    first, again = told[: len(calls)], told[len(calls) : 2 * len(calls)]
    assert first == again
    assert len(set(first)) == len(calls)
    assert (told[-2].deterministic, told[-1]) == (True, first[0])
    assert len(made) == len(calls) + 2
    assert registry.named(Operation.WIN, "better").num_calls == 1


def test_a_registry_keeps_no_more_calls_than_it_may(monkeypatch):
    monkeypatch.setattr(registry_module, "MAX_ROUTES", 8)
    registry, facts = (
        registry_of({"name": "window"}),
        {"operation": "win", "geometry": GEOMETRY.as_tuple(), "device_type": "cpu", "device_index": 0},
    )
    for number in range(50):
        assert registry.route((number,), "auto", False, lambda: facts) == 0
        assert len(registry._routes) <= 8


def test_auto_passes_over_a_backend_without_a_gradient_of_lse_only_where_lse_reaches_the_caller():
    out_alone = CountingBackend(operation=Operation.WIN, level=9, capability=Capability(lse_gradient=False))
    registry = BackendRegistry((out_alone, *sdpa_backends()))
    q, _, _, _, _, k, v, gates = (x.requires_grad_() for x in operands())
    result = sliding_window_attention(q, k, v, geometry=GEOMETRY, registry=registry)
    assert out_alone.num_calls == 0
    result.lse.sum().backward()
    nsa_attention(q, None, None, None, None, k, v, gates, geometry=GEOMETRY, registry=registry)
    with torch.no_grad():
        sliding_window_attention(q, k, v, geometry=GEOMETRY, registry=registry)
    assert out_alone.num_calls == 2
    with pytest.warns(UserWarning, match="against policy because it was named: lse may get a gradient"):
        sliding_window_attention(q, k, v, geometry=GEOMETRY, registry=registry, backend="counting")
    assert out_alone.num_calls == 3


def test_an_absent_branch_keeps_the_branches_apart():
    registry, fused = fused_registry()
    q, k_cmp, v_cmp, k_slc, v_slc, _, _, gates = operands()
    nsa_attention(q, k_cmp, v_cmp, k_slc, v_slc, None, None, gates, geometry=GEOMETRY, registry=registry)
    assert fused.num_calls == 0


class KeepingBackend(CountingBackend):
    """A fused backend that keeps its operands."""

    def __call__(self, *operands, **options):
        self.operands = operands
        return super().__call__(*operands, **options)


def test_without_compressed_values_the_fused_operation_gets_the_keys_and_a_gate_of_0():
    fused = KeepingBackend(name="fused", operation=Operation.NSA)
    registry = BackendRegistry((*sdpa_backends(), fused))
    q, k_cmp, _, *pairs, gates = operands(D_v=6)
    gates[..., 0] = torch.nan
    nsa_attention(q, k_cmp, None, *pairs, gates, geometry=GEOMETRY, registry=registry)
    queries, cmp, slc, win, passed = fused.operands
    assert queries.q is q
    assert cmp.k is cmp.v is k_cmp
    assert all(x is y for x, y in zip((slc.k, slc.v, win.k, win.v), pairs, strict=True))
    assert not passed[..., 0].any()
    assert torch.equal(passed[..., 1:], gates[..., 1:])


def test_a_layers_step_without_compressed_values_is_fused_with_its_own_gates_and_may_start_early():
    fused = KeepingBackend(name="fused", operation=Operation.NSA)
    config = NSAConfig(
        hidden_size=12, num_heads=4, num_kv_heads=2, head_dim_qk=6, head_dim_v=6, geometry=GEOMETRY, compressor="mean", kv="shared",
        branches=("slc", "win"),
    )  # fmt: skip
    assert config.can_be_fused()
    assert not evolve(config, head_dim_v=4).can_be_fused()
    layer = NativeSparseAttention(config, registry=BackendRegistry((*sdpa_backends(), fused)))
    cache, made = layer.new_cache(1, 32), []
    layer._gates = lambda *arguments: made.append(NativeSparseAttention._gates(layer, *arguments)) or made[-1]
    layer(torch.randn(1, 20, 12), cache=cache)
    queries, _, _, _, gates = fused.operands
    assert queries.follows_append
    # nothing is launched between APPEND and the step
    assert gates is made[-1]
    assert not gates[..., 0].any()

    # gates of a caller are padded, which may be the last operation on the stream
    cmp, slc, win = fused.operands[1:4]
    attend(queries, cmp._replace(only_chooses=False), slc, win, gates, geometry=GEOMETRY, absent=("cmp",), registry=layer.registry)
    assert not fused.operands[0].follows_append
    assert fused.operands[4] is not gates


def test_without_compressed_values_the_branches_run_apart_for_values_of_another_width():
    registry, fused = fused_registry()
    q, k_cmp, _, *rest = operands(D_v=4)
    nsa_attention(q, k_cmp, None, *rest, geometry=GEOMETRY, registry=registry)
    assert fused.num_calls == 0


def test_without_compressed_values_the_fused_operation_computes_gradients_of_the_others_alone():
    fused = KeepingBackend(name="fused", operation=Operation.NSA)
    tensors = [x.requires_grad_() for x in operands(D_v=6)]
    tensors[2] = None
    nsa_attention(*tensors, geometry=GEOMETRY, registry=BackendRegistry((*sdpa_backends(), fused)))
    queries, cmp, slc, win, gates = fused.operands
    assert [x.requires_grad for x in (queries.q, *slc[:2], *win[:2], gates)] == [True] * 6
    assert (cmp.only_chooses, cmp.k.requires_grad, cmp.v is cmp.k) == (True, False, True)
    assert not any(x.only_chooses for x in (slc, win))
    gates.sum().backward()
    assert not tensors[-1].grad[..., 0].any()
    assert (tensors[-1].grad[..., 1:] == 1).all()


def test_keys_that_only_choose_are_refused_where_their_branch_is_not_absent():
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = operands()
    keys = [Keys(k_cmp, v_cmp, k_cmp.shape[1]), Keys(k_slc, v_slc, q.shape[1]), Keys(k_win, v_win, q.shape[1])]
    for index, name in enumerate(("cmp", "slc", "win")):
        given = [x._replace(only_chooses=index == number) for number, x in enumerate(keys)]
        with pytest.raises(InputError, match=f"k_{name}.only_chooses is True"):
            attend(Queries(q, q.shape[1]), *given, gates, geometry=GEOMETRY)


@pytest.mark.parametrize(
    ("width", "left_out", "why"),
    [
        (4, {"v_cmp"}, "the call leaves out cmp, and D_k is not D_v"),
        (6, {"k_slc", "v_slc"}, "the call leaves out slc"),
        (6, {"k_win", "v_win"}, "the call leaves out win"),
        (6, {"v_cmp", "k_win", "v_win"}, "the call leaves out cmp, win"),
    ],
)
def test_a_warning_says_why_a_named_fused_backend_is_not_used(width, left_out, why):
    registry, fused = fused_registry()
    names = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gates")
    given = {name: None if name in left_out else x for name, x in zip(names, operands(D_v=width), strict=True)}
    with pytest.warns(UserWarning, match=f"backend 'fused' for 'nsa' is not used: {why}, so the branches run one by one"):
        nsa_attention(**given, geometry=GEOMETRY, registry=registry, backend={"nsa": "fused"})
    assert fused.num_calls == 0


@pytest.mark.parametrize("fields", [{"capability": CUDA_ONLY}, {"policy": ("slow",)}])
def test_auto_runs_the_branches_where_the_fused_operation_is_not_eligible(fields):
    registry, fused = fused_registry(**fields)
    tensors = operands()
    out = nsa_attention(*tensors, geometry=GEOMETRY, registry=registry)
    assert fused.num_calls == 0
    assert torch.equal(out, nsa_attention(*tensors, geometry=GEOMETRY, backend="sdpa"))


@pytest.mark.parametrize("backend", ["fused", {"nsa": "fused"}])
def test_a_fused_operation_that_was_named_never_falls_back(backend):
    registry, _ = fused_registry(capability=CUDA_ONLY)
    with pytest.raises(BackendUnavailableError, match=r"device cpu \(needs cuda\)"):
        nsa_attention(*operands(), geometry=GEOMETRY, registry=registry, backend=backend)


def test_remembering_that_auto_finds_no_fused_operation_hides_no_error():
    registry, fused = fused_registry(capability=CUDA_ONLY)
    nsa_attention(*operands(), geometry=GEOMETRY, registry=registry)
    with pytest.raises(BackendUnavailableError, match="no backend serves this request"):
        registry.resolve(fused.last_request)


def test_a_pickled_registry_chooses_anew():
    registry = registry_of({"name": "plain", "level": 0}, {"name": "fast", "level": 5})
    assert chosen(registry) == "fast"
    # as on a machine where another backend is preferred
    registry.backends[1].level = -1
    assert chosen(registry) == "fast"
    for copied in (copy.deepcopy(registry), pickle.loads(pickle.dumps(registry))):
        assert chosen(copied) == "plain"


@define(kw_only=True, eq=False)
class WrongResult(CountingBackend):
    """A backend that returns `result`, whatever its operation returns."""

    result: object = None

    def __call__(self, *operands, **keywords):
        return self.result


@pytest.mark.parametrize("result", [None, (torch.zeros(1, 20, 4, 8), torch.zeros(1, 20, 4))], ids=["None", "tuple"])
@pytest.mark.parametrize(
    ("operation", "wanted"),
    [("cmp", "BranchOutput"), ("select", "Tensor"), ("slc", "BranchOutput"), ("win", "BranchOutput"), ("nsa", "FusedOutput or Tensor")],
)
def test_a_backend_that_returns_another_type_is_named(operation, wanted, result):
    registry = BackendRegistry((*sdpa_backends(), WrongResult(name="mine", operation=Operation(operation), result=result)))
    q, k, v, k_cmp, v_cmp = (torch.zeros(1, rows, heads, 8) for rows, heads in ((20, 4), (20, 2), (20, 2), (9, 2), (9, 2)))
    shown = "None" if result is None else "a tuple"
    with pytest.raises(InputError, match=f"^backend 'mine' for '{operation}' returned {shown} .the rule: {wanted}.; return that$"):
        nsa_attention(q, k_cmp, v_cmp, k, v, k, v, torch.ones(1, 20, 4, 3), geometry=GEOMETRY, registry=registry)


@pytest.mark.parametrize("result", [None, (torch.zeros(1, 1, 2, 8),)], ids=["None", "too few"])
def test_a_rotate_backend_that_returns_other_than_the_heads_is_named(result):
    mine = WrongResult(name="mine", operation=Operation.ROTATE, result=result)
    layer = NativeSparseAttention(NSAConfig(16, 4, 2, 8, 8, geometry=GEOMETRY), registry=BackendRegistry((*sdpa_backends(), mine)))
    with pytest.raises(InputError, match=r"^backend 'mine' for 'rotate' returned .* .the rule: a tuple of 3 tensors, one for each of"):
        layer(torch.zeros(1, 1, 16), cache=layer.new_cache(1, 8))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (CountingBackend, r"CountingBackend.* is a class .a backend is an object.; use CountingBackend\(\)"),
        (5, "5 is no BranchBackend .name, operation, capability, reasons_against, preference, __call__. and lacks name, operation, cap"),
        (CountingBackend(name=7), "has the name 7 .the rule: a string"),
        (CountingBackend(operation="attention"), "implements operation 'attention' .the rule: one of cmp, "),
    ],
)
def test_only_backends_are_registered(backend, message):
    registry = BackendRegistry()
    with pytest.raises(InputError, match=message):
        registry.register(backend)
    with pytest.raises(InputError, match=message):
        BackendRegistry((backend,))
    assert registry.backends == []


class Wrapper:
    """A backend with the attributes of another one, which it gets by `__getattr__`, and a note."""

    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        return (lambda request: ("wrapped",)) if name == "notes_on" else getattr(self.backend, name)

    def __call__(self, *operands, **keywords):
        return self.backend(*operands, **keywords)


def test_a_wrapper_that_cannot_be_called_is_no_backend():
    class Forwarding:
        def __getattr__(self, name):
            return getattr(CountingBackend(), name)

    with pytest.raises(InputError, match="and lacks __call__; add it$"):
        BackendRegistry((Forwarding(),))


def test_a_wrapper_of_a_backend_is_a_backend():
    backend = CountingBackend()
    registry = BackendRegistry((Wrapper(backend),))
    assert explain_routing(REQUEST, registry=registry).candidates[0].notes == ("wrapped",)
    q, k = torch.zeros(1, 9, 2, 8), torch.zeros(1, 9, 1, 8)
    sliding_window_attention(q, k, k, geometry=GEOMETRY, registry=registry)
    assert backend.num_calls == 1


def test_a_decision_reads_as_choice_and_reasons():
    registry = registry_of(
        {"name": "plain", "level": 0},
        {"name": "gpu", "level": 20, "capability": CUDA_ONLY, "policy": ("rarely",)},
        {"name": "slow", "policy": ("s",)},
    )
    assert str(explain_routing(REQUEST, registry=registry)).splitlines() == [
        "win: plain (asked for: auto)",
        "  gpu (preference 20): incapable: device cpu (needs cuda); policy: rarely",
        "  slow (preference 1): policy: s",
        "  plain (preference 0): eligible",
    ]


def test_explaining_an_incapable_name_raises_nothing():
    registry = registry_of({"name": "gpu", "capability": CUDA_ONLY})
    decision = explain_routing(REQUEST, "gpu", registry)
    assert decision.chosen is None
    assert str(decision).startswith("win: none (asked for: gpu)")


def test_explaining_warns_and_remembers_nothing():
    registry = registry_of({"name": "slow", "policy": ("s",)})
    decision = explain_routing(REQUEST, "slow", registry)
    assert (decision.chosen, decision.candidates[0].is_capable, decision.candidates[0].is_eligible) == ("slow", True, False)
    with pytest.warns(UserWarning, match="runs against policy"):
        registry.resolve(REQUEST, "slow")


def test_the_default_registry_explains_the_reference():
    decision = explain_routing(REQUEST, "sdpa")
    assert decision.chosen == "sdpa"
    assert decision.request is REQUEST


def test_a_backend_may_say_how_it_serves_a_request():
    class Slow(CountingBackend):
        def notes_on(self, request):
            return (f"slow for {request.operation}",)

    [noted, silent] = BackendRegistry((Slow(name="slow", level=2), CountingBackend())).explain(REQUEST).candidates
    assert noted.notes == ("slow for win",)
    assert noted.is_eligible
    assert silent.notes == ()
    assert "note: slow for win" in str(BackendRegistry((Slow(),)).explain(REQUEST))
