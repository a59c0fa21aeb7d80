"""The arithmetic of the adapters, over a provider in plain torch, and their routing. No FlashAttention library runs here."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from nsa_core import (
    BackendRegistry,
    BackendUnavailableError,
    BlockGeometry,
    BranchRequest,
    Capability,
    Operation,
    Reason,
    compressed_attention,
    default_registry,
    explain_routing,
    sliding_window_attention,
)
from nsa_core.backends.base import BranchOutput, Keys, Queries
from nsa_core.testing.conformance import check_backend
from nsa_core.testing.inputs import Inputs, Shape, make_inputs
from nsa_kernels_cuda.flash_attention import providers
from nsa_kernels_cuda.flash_attention.backend import FlashAttentionBackend, flash_attention_backends
from nsa_kernels_cuda.flash_attention.op import chunks_of
from nsa_kernels_cuda.flash_attention.providers import Gradients, ResultGradients

OPERATIONS = (Operation.CMP, Operation.WIN)
REQUEST = BranchRequest(
    operation="win", device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
    num_queries=4096, num_keys=4096, num_heads=32, num_kv_heads=8, head_dim_qk=128, head_dim_v=128, needs_grad=True,
)  # fmt: skip
SIZES = BlockGeometry(8, 4, 8, num_selected_blocks=4, window_size=5)


@frozen(kw_only=True)
class PlainTorch:
    """A provider by a mask of all scores, which checks that it is given what a library would take."""

    name: str = "plain"
    is_installed: bool = True
    capability: Capability = Capability(layouts=providers.FLASH_2.layouts)

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        return self.capability.reasons_against(request)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> BranchOutput:
        assert q.shape[0] > 0 and q.shape[1] == k.shape[1] == v.shape[1] > 0
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        exact = torch.promote_types(q.dtype, torch.float32)
        keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).to(exact) for x in (k, v))
        weights, lse = self._weights(q.to(exact), keys, scale, window)
        # a library's lse lies (B, H, S)
        return BranchOutput(torch.einsum("bhst,bthd->bshd", weights, values).to(q.dtype), lse.transpose(1, 2))

    def backward(
        self, grads: ResultGradients, q: Tensor, k: Tensor, v: Tensor, result: BranchOutput, *, scale: float, window: int | None
    ) -> Gradients:
        found = self.forward(q, k, v, scale=scale, window=window)
        torch.testing.assert_close(found.out, result.out, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(found.lse, result.lse.to(found.lse.dtype), atol=1e-2, rtol=1e-2)
        group, dtype, exact = q.shape[2] // k.shape[2], q.dtype, torch.promote_types(q.dtype, torch.float32)
        q, k, v, dout = (x.to(exact) for x in (q, k, v, grads.out))
        keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
        weights, lse = self._weights(q, keys, scale, window)
        # the gradient of the scores: weights * (dO . v - dO . o + dlse)
        out = torch.einsum("bhst,bthd->bshd", weights, values)
        delta = (dout * out).sum(-1) - (0 if grads.lse is None else grads.lse.to(lse.dtype))
        dscores = weights * (torch.einsum("bshd,bthd->bhst", dout, values) - delta.transpose(1, 2).unsqueeze(-1)) * scale
        dk, dv = torch.einsum("bhst,bshd->bthd", dscores, q), torch.einsum("bhst,bshd->bthd", weights, dout)
        dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
        return Gradients(*(x.to(dtype) for x in (torch.einsum("bhst,bthd->bshd", dscores, keys), dk, dv)))

    def _weights(self, q: Tensor, keys: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the weights (B, H, S, T) and the lse (B, H, S)."""
        scores = torch.einsum("bshd,bthd->bhst", q, keys) * scale
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        scores = scores.masked_fill((distance < 0) | (distance >= (window or q.shape[1])), float("-inf"))
        return scores.softmax(-1), scores.logsumexp(-1)


OUT_ONLY = PlainTorch(name="out_only", capability=evolve(PlainTorch().capability, lse_gradient=False))


def backend_of(operation: Operation, provider: Any = None) -> FlashAttentionBackend:
    return FlashAttentionBackend(operation=operation, provider=provider or PlainTorch(), name="flash_attn")


@pytest.mark.filterwarnings("ignore:.*against policy.*")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_conforms_to_the_oracle(operation):
    report = check_backend(backend_of(operation))
    print(report)
    assert len(report.passed) >= 20
    assert not [each for each in report.declined if "gradient of lse" in each]


@pytest.mark.filterwarnings("ignore:.*against policy.*")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_conforms_without_a_gradient_of_lse(operation):
    # without a gradient of lse, everything else is compared
    report = check_backend(backend_of(operation, OUT_ONLY))
    assert len(report.passed) >= 20
    assert len([each for each in report.declined if "gradient of lse" in each]) == len(report.passed)


@pytest.mark.filterwarnings("ignore:.*against policy.*")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_empty_batch_needs_no_provider(operation):
    q, k, v = (torch.zeros(0, 17, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    result = backend_of(operation)(Queries(q, 17), Keys(k, v, 17), geometry=SIZES, scale=1.0)
    assert (result.out.shape, result.lse.shape) == ((0, 17, 4, 8), (0, 17, 4))
    assert [x.shape for x in torch.autograd.grad(result.out.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("num_queries", [0, 1, 7, 8, 9, 11, 12, 13, 40])
def test_chunks_hold_each_query_that_sees_a_block_once(num_queries):
    rows = torch.arange(num_queries)
    held = [(chunks, chunks.of(rows)) for chunks in chunks_of(num_queries, SIZES)]
    assert sorted(torch.cat([x.flatten() for _, x in held]).tolist() if held else []) == list(range(7, num_queries))
    for chunks, view in held:
        visible = (view - 7) // 4 + 1
        assert torch.equal(visible, torch.arange(1, chunks.num_blocks + 1).expand_as(visible))
        assert view.data_ptr() >= rows.data_ptr()


def test_queries_and_keys_are_not_copied():
    [_, chunks] = chunks_of(40, SIZES)
    q, k = torch.empty(40, 4, 8), torch.empty(9, 2, 8)
    assert chunks.of(q).untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    assert chunks.expand(k).stride(0) == 0


def limited(name: str, **limits: Any) -> PlainTorch:
    return PlainTorch(name=name, capability=evolve(PlainTorch().capability, **limits))


def inputs_of() -> Inputs:
    return make_inputs(Shape(geometry=SIZES, num_queries=23, num_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_v=8)).with_grad()


def call(operation: Operation, registry: BackendRegistry, inputs: Inputs) -> BranchOutput:
    options = {"geometry": SIZES, "backend": "flash_attn", "registry": registry}
    if operation is Operation.CMP:
        return compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **options)
    return sliding_window_attention(inputs.q, inputs.k_win, inputs.v_win, **options)


@pytest.mark.filterwarnings("ignore:.*against policy.*")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_gradient_of_lse_that_a_provider_does_not_take_is_refused(operation):
    registry = BackendRegistry((backend_of(operation, OUT_ONLY),))
    inputs = inputs_of()
    found = call(operation, registry, inputs)
    found.out.sum().backward(retain_graph=True)
    assert inputs.q.grad is not None
    with pytest.raises(BackendUnavailableError, match=r"flash_attn\[out_only\] was given a gradient of lse"):
        found.lse[torch.isfinite(found.lse)].sum().backward()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_auto_does_not_take_it_before_a_length_is_measured(operation, tmp_path, monkeypatch):
    # no table is shipped for 8.0, and none is the user's own
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    request = evolve(REQUEST, operation=operation, compute_capability=(8, 0))
    decision = explain_routing(request, registry=BackendRegistry(tuple(default_registry().backends)))
    [found] = [candidate for candidate in decision.candidates if candidate.name == "flash_attn[torch]"]
    assert [str(reason) for reason in found.reasons] == [
        "policy: no length is measured from which it is faster than the kernels of this project; name it to take it"
    ]
    assert not decision.chosen.startswith("flash_attn")


def test_the_first_installed_provider_that_serves_is_taken_and_each_can_be_pinned():
    absent, first, second = PlainTorch(name="a", is_installed=False), limited("b", max_head_dim=8), PlainTorch(name="c")
    found = flash_attention_backends((absent, first, second))
    names = ["flash_attn", "flash_attn[a]", "flash_attn[b]", "flash_attn[c]"]
    assert [(each.operation, each.name) for each in found] == [(operation, name) for operation in OPERATIONS for name in names]
    for size, provider in ((8, "b"), (16, "c")):
        assert found[0].notes_on(evolve(REQUEST, operation="cmp", head_dim_qk=size, head_dim_v=size)) == (f"by flash_attn[{provider}]",)


@pytest.mark.filterwarnings("ignore:.*against policy.*")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_takes_the_provider_that_routing_notes(operation, is_compiled, monkeypatch):
    used = []
    forward = PlainTorch.forward
    monkeypatch.setattr(PlainTorch, "forward", lambda self, *x, **keywords: used.append(self.name) or forward(self, *x, **keywords))
    small, large = limited("small", max_head_dim=4), PlainTorch(name="large")
    registry = BackendRegistry(flash_attention_backends((small, large)))
    run = torch.compile(call, fullgraph=True, backend="eager") if is_compiled else call
    inputs, found = inputs_of(), None
    for _ in range(2):
        found = run(operation, registry, inputs)
    found.out.sum().backward()
    assert set(used) == {"large"}
    assert inputs.q.grad is not None


@frozen(kw_only=True)
class TwiceAsMuch(PlainTorch):
    """Another library of the same name."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> BranchOutput:
        found = PlainTorch().forward(q, k, v, scale=scale, window=window)
        return found._replace(out=2 * found.out)


@pytest.mark.filterwarnings("ignore:.*against policy.*")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_two_providers_of_one_name_keep_their_own_ops(operation):
    registries = [BackendRegistry((backend_of(operation, each(name="same")),)) for each in (PlainTorch, TwiceAsMuch)]
    first, second = (call(operation, registry, inputs_of()).out for registry in registries)
    assert torch.equal(2 * first, second)


def test_where_no_provider_serves_the_reasons_of_each_are_given():
    [found, *_] = flash_attention_backends((limited("a", max_head_dim=64), limited("b", gradient=False)), files=tuple)
    assert [str(reason) for reason in found.reasons_against(evolve(REQUEST, operation="cmp"))] == [
        "incapable: flash_attn[a]: head dimension 128 (at most 64)",
        "incapable: flash_attn[b]: gradients are needed (forward only)",
        "policy: no length is measured from which it is faster than the kernels of this project; name it to take it",
    ]


@pytest.mark.parametrize(("takes", "expected"), [((True, True), True), ((True, False), False), ((False, True), False)])
def test_flash_attn_takes_a_gradient_of_lse_where_all_of_its_providers_do(takes, expected):
    first, second = (limited(name, lse_gradient=is_taken) for name, is_taken in zip("ab", takes, strict=True))
    assert flash_attention_backends((first, second))[0].capability.lse_gradient is expected


@pytest.mark.parametrize(
    ("provider", "change", "reason"),
    [
        (providers.TorchFlash(), {"head_dim_qk": 192}, "head dimensions 192 and 128 (needs D_k = D_v)"),
        (providers.TorchFlash(), {"head_dim_qk": 100, "head_dim_v": 100}, "head dimension 100 (needs a multiple of 8)"),
        (providers.TorchFlash(), {"compute_capability": (7, 5)}, "compute capability 7.5 (needs 8.0 or newer)"),
        (providers.TorchFlash(), {"layout": "packed"}, "layout packed (takes dense)"),
        (providers.FlashAttention2(), {}, "flash-attn is not installed; pip install flash-attn"),
        (providers.FlashAttention4(), {}, "flash-attn-4 is not installed; pip install flash-attn-4"),
        (providers.FlashAttention4(), {"compute_capability": (8, 0)}, "compute capability 8.0 (the adapter is for 9.0)"),
        (providers.FlashAttention4(), {"head_dim_qk": 192}, "head dimensions 192 and 128 (needs D_k = D_v)"),
    ],
)
def test_a_limit_is_a_reason(provider, change, reason):
    assert f"incapable: {reason}" in [str(each) for each in provider.reasons_against(evolve(REQUEST, **change))]


def test_torch_has_the_functions_that_its_provider_calls():
    forward, backward = torch.ops.aten._flash_attention_forward.default, torch.ops.aten._flash_attention_backward.default
    names = [argument.name for argument in forward._schema.arguments]
    assert names[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask"
    ]  # fmt: skip
    assert {"scale", "window_size_left", "window_size_right"} <= set(names)
    names = [argument.name for argument in backward._schema.arguments]
    assert names[:14] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "rng_state", "unused",
    ]  # fmt: skip
    assert {"scale", "window_size_left", "window_size_right"} <= set(names)


def released_2(plain: PlainTorch) -> dict[str, Any]:
    """Return the functions of `flash_attn.flash_attn_interface` 2.8 in plain torch: the parameters and layouts that were released."""

    def window_of(causal, left, right):
        assert causal
        assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
        return None if left < 0 else left + 1

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
    ):
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        window = window_of(causal, window_size_left, window_size_right)
        found = plain.forward(q, k, v, scale=softmax_scale, window=window)
        return found.out, found.lse.transpose(1, 2).contiguous(), torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, deterministic) == (0.0, 0.0, None, False)
        assert softmax_lse.is_contiguous()
        assert all(x.is_contiguous() for x in (dq, dk, dv))
        result = BranchOutput(out, softmax_lse.transpose(1, 2))
        window = window_of(causal, window_size_left, window_size_right)
        found = plain.backward(ResultGradients(dout, None), q, k, v, result, scale=softmax_scale, window=window)
        for given, gradient in zip((dq, dk, dv), found, strict=True):
            given.copy_(gradient)

    return {"_flash_attn_forward": _flash_attn_forward, "_flash_attn_backward": _flash_attn_backward}


def released_4(plain: PlainTorch) -> dict[str, Any]:
    """Return the functions of `flash_attn.cute.interface` 4.0.0b36 in plain torch, with the parameters that the adapter gives."""

    def window_of(causal, left, right):
        assert causal
        assert (left is None) == (right is None)
        return None if left is None else left + 1

    def _flash_attn_fwd(q, k, v, *, softmax_scale, causal, window_size_left, window_size_right, return_lse):
        assert return_lse
        found = plain.forward(q, k, v, scale=softmax_scale, window=window_of(causal, window_size_left, window_size_right))
        return found.out, found.lse.transpose(1, 2), None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, *, softmax_scale, causal, window_size_left, window_size_right, deterministic, dlse
    ):  # fmt: skip
        assert not deterministic
        result = BranchOutput(out, lse.transpose(1, 2))
        given = ResultGradients(dout, None if dlse is None else dlse.transpose(1, 2))
        window = window_of(causal, window_size_left, window_size_right)
        return tuple(plain.backward(given, q, k, v, result, scale=softmax_scale, window=window))

    return {"_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd}


LIBRARIES = {
    "fa2": (providers.FlashAttention2(), "flash_attn.flash_attn_interface", released_2),
    "fa4": (providers.FlashAttention4(), "flash_attn.cute.interface", released_4),
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("provider", "module", "functions"), LIBRARIES.values(), ids=LIBRARIES)
def test_a_library_is_called_by_its_released_signature(monkeypatch, provider, module, functions, window):
    plain, generator = PlainTorch(), torch.Generator().manual_seed(0)
    names = module.split(".")
    for depth in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:depth]), SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**functions(plain)))
    q, k, v, dout = (torch.randn(2, 9, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
    expected = plain.forward(q, k, v, scale=0.5, window=window)
    found = provider.forward(q, k, v, scale=0.5, window=window)
    torch.testing.assert_close(found, expected)
    grads = ResultGradients(dout, found.lse.cos() if provider.capability.lse_gradient else None)
    gradients = provider.backward(grads, q, k, v, found, scale=0.5, window=window)
    torch.testing.assert_close(gradients, plain.backward(grads, q, k, v, expected, scale=0.5, window=window))
