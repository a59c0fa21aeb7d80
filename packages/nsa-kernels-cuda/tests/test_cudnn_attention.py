"""The adapter to cuDNN's attention in torch, over ops for CPUs that refuse what the ops for GPUs do not take. cuDNN does not run here."""

from typing import Any, NamedTuple

import pytest
import torch
from attrs import evolve
from torch import Tensor

from nsa_core import BlockGeometry, BranchRequest, Operation
from nsa_core.backends.base import BranchOutput
from nsa_core.testing.conformance import check_backend
from nsa_kernels_cuda.flash_attention import providers
from nsa_kernels_cuda.flash_attention.backend import FlashAttentionBackend
from nsa_kernels_cuda.flash_attention.op import attend_to_blocks, differentiate_blocks
from nsa_kernels_cuda.flash_attention.providers import Gradients, ResultGradients, TorchCudnn, TorchFlash

FORWARD, BACKWARD = "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"
ON_CPU = evolve(providers.CUDNN, device_types=None, min_compute_capability=None, dtypes=None)
REQUEST = BranchRequest(
    operation="cmp", device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
    num_queries=4096, num_keys=4096, num_heads=64, num_kv_heads=4, head_dim_qk=128, head_dim_v=128, needs_grad=True,
)  # fmt: skip
DIMENSIONS = "takes up to 128, and 192 with 128 on compute capability 9.0 and 10"


class Layout(NamedTuple):
    """What the plan of a backward pass was made for, and is not looked up by."""

    out: tuple[int, ...]
    dout: tuple[int, ...]
    lse: tuple[int, ...]


class PlainCudnn:
    """torch's two ops in plain torch, with the rules of cuDNN and the cache of plans that torch keeps."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._plans: dict[Any, Layout] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, has_lse: bool, dropout: float = 0.0, is_causal: bool = False,
        has_mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (bias, has_lse, dropout, is_causal, has_mask) == (None, True, 0.0, True, False)
        self._check(q, k, v)
        scores, values = self._scores(q, k, scale), self._of_heads(v, q)
        lse = scores.logsumexp(-1, keepdim=True)
        out = ((scores - lse).exp() @ values).to(q.dtype)
        self.calls.append("forward")
        # out is laid out as q
        in_rows = out.transpose(1, 2).contiguous().transpose(1, 2)
        none = torch.empty(0)
        return in_rows, lse, none, none, q.shape[2], k.shape[2], none, none, none

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, bias: Tensor | None,
        cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout: float, is_causal: bool, *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (dropout, is_causal, max_q, max_k) == (0.0, True, q.shape[2], k.shape[2])
        self._check(q, k, v, out, dout)
        assert lse.shape == (*q.shape[:3], 1)
        assert lse.is_contiguous()
        key = tuple((x.shape, x.stride()) for x in (q, k, v))
        layout = Layout(out.stride(), dout.stride(), lse.stride())
        assert self._plans.setdefault(key, layout) == layout, "a plan for another layout would be taken"
        weights, values, exact = (self._scores(q, k, scale) - lse).exp(), self._of_heads(v, q), lse.dtype
        delta = (dout.to(exact) * out.to(exact)).sum(-1, keepdim=True)
        dscores = weights * (dout.to(exact) @ values.mT - delta) * scale
        dq = dscores @ self._of_heads(k, q)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dscores.mT @ q.to(exact), weights.mT @ dout.to(exact)))
        self.calls.append("backward")
        return tuple(torch.empty_like(like).copy_(x) for like, x in ((q, dq), (k, dk), (v, dv)))

    def _check(self, *tensors: Tensor) -> None:
        """Check what cuDNN does not take: one row, columns apart, strides of 0 or off 16 bytes."""
        for x in tensors:
            assert x.shape[2] > 1
            assert x.stride(-1) == 1
            assert all(step and step * x.element_size() % 16 == 0 for step in x.stride()[:-1]), (x.shape, x.stride())

    def _of_heads(self, x: Tensor, q: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(torch.promote_types(q.dtype, torch.float32))

    def _scores(self, q: Tensor, k: Tensor, scale: float | None) -> Tensor:
        keys = self._of_heads(k, q)
        assert scale is not None
        return (q.to(keys.dtype) @ keys.mT * scale).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), float("-inf"))


@pytest.fixture
def cudnn(monkeypatch):
    """Give torch's ops on a CPU, called through torch's dispatcher by their schema; the machine seems to have cuDNN 9.20."""
    plain = PlainCudnn()
    library = torch.library.Library("aten", "IMPL")
    library.impl(FORWARD, plain.forward, "CPU")
    library.impl(BACKWARD, plain.backward, "CPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    yield plain
    library._destroy()


def backend_of(operation: Operation) -> FlashAttentionBackend:
    return FlashAttentionBackend(operation=operation, provider=TorchCudnn(capability=ON_CPU), name="flash_attn[cudnn]")


def reasons(**change: Any) -> list[str]:
    return [str(each) for each in TorchCudnn().reasons_against(evolve(REQUEST, **change))]


@pytest.mark.filterwarnings("ignore:.*against policy.*")
@pytest.mark.parametrize("operation", [Operation.CMP, Operation.WIN])
def test_it_conforms_to_the_oracle(operation, cudnn):
    report = check_backend(backend_of(operation))
    print(report)
    # the other cases have head dimensions off 16 bytes or, for `win`, more tokens than the window
    assert len(report.passed) >= 4
    assert set(cudnn.calls) == {"forward", "backward"}


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def compressed(provider: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, geometry: BlockGeometry) -> tuple[BranchOutput, Gradients]:
    found = attend_to_blocks(provider, q, k, v, geometry, 0.3)
    return found, Gradients(*differentiate_blocks(provider, ResultGradients(dout, None), q, k, v, found, geometry, 0.3))


@pytest.mark.parametrize("num_queries", [7, 8, 11, 12, 15, 16, 20])
def test_queries_that_see_one_block_alone_are_served(num_queries, cudnn):
    geometry = BlockGeometry(8, 4, 8, num_selected_blocks=4, window_size=5)
    num_blocks = max((num_queries - 8) // 4 + 1, 0)
    q, dout = random(2, num_queries, 4, 16), random(2, num_queries, 4, 8)
    k, v = random(2, num_blocks, 2, 16), random(2, num_blocks, 2, 8)
    found, gradients = compressed(TorchCudnn(), q, k, v, dout, geometry)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 2) for x in leaves[1:])
    visible = torch.arange(num_blocks) * 4 + 7 <= torch.arange(num_queries)[:, None]
    scores = (torch.einsum("bshd,bchd->bhsc", leaves[0], keys) * 0.3).masked_fill(~visible, float("-inf"))
    expected = torch.einsum("bhsc,bchd->bshd", scores.softmax(-1).nan_to_num(), values)
    torch.testing.assert_close(found.out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.lse.double(), scores.logsumexp(-1).transpose(1, 2), atol=1e-5, rtol=1e-5)
    if num_blocks:
        wanted = torch.autograd.grad(expected, leaves, dout.double())
        torch.testing.assert_close([x.double() for x in gradients], [x.nan_to_num() for x in wanted], atol=1e-5, rtol=1e-5)


def test_a_plan_is_found_by_the_layout_of_q_k_and_v_alone(cudnn):
    provider, q, k, v = TorchCudnn(), random(1, 9, 4, 16), random(1, 9, 2, 16), random(1, 9, 2, 8)
    found = provider.forward(q, k, v, scale=0.3, window=None)
    dout = random(1, 9, 4, 8)
    by_heads = dout.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = dout[:, :1].expand(-1, 9, -1, -1)
    of_out = [provider.backward(ResultGradients(x, None), q, k, v, found, scale=0.3, window=9) for x in (dout, by_heads, expanded)]
    torch.testing.assert_close(of_out[0], of_out[1])


def test_rows_off_16_bytes_are_copied(cudnn):
    q, k, v = random(1, 9, 4, 17)[..., :16], random(1, 9, 2, 16), random(1, 9, 2, 8)
    found, plain = (TorchCudnn().forward(x, k, v, scale=0.3, window=None) for x in (q, q.contiguous()))
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim_qk": 192, "head_dim_v": 192}, f"head dimensions 192 and 192 ({DIMENSIONS})"),
        ({"head_dim_qk": 192, "compute_capability": (8, 0)}, f"head dimensions 192 and 128 ({DIMENSIONS})"),
        ({"head_dim_qk": 100, "head_dim_v": 100}, "head dimension 100 (needs a multiple of 8)"),
        ({"head_dim_v": 100}, "head dimension 100 (needs a multiple of 8)"),
        ({"operation": "win", "num_keys": 513}, "513 tokens with w = 512 (its causal mask has no window; takes at most w tokens)"),
        ({"deterministic": True}, "deterministic gradients are asked for (its backward is not deterministic)"),
        ({"is_aligned": False}, "a tensor starts off a multiple of 16 bytes"),
        ({"compute_capability": (7, 5)}, "compute capability 7.5 (needs 8.0 or newer)"),
        ({"layout": "packed"}, "layout packed (takes dense)"),
        ({"dtype": torch.float32}, "q of torch.float32 (takes torch.bfloat16, torch.float16)"),
    ],
)  # fmt: skip
def test_a_limit_is_a_reason(change, reason, cudnn):
    assert reasons(**change) == [f"incapable: {reason}"]


@pytest.mark.parametrize(
    "change",
    [
        {}, {"head_dim_qk": 192}, {"head_dim_qk": 192, "compute_capability": (10, 3)}, {"head_dim_qk": 64}, {"num_heads": 4},
        {"operation": "win", "num_keys": 512, "num_queries": 512}, {"deterministic": True, "needs_grad": False},
    ],
)  # fmt: skip
def test_what_it_serves_has_no_reason(change, cudnn):
    assert reasons(**change) == []


def test_it_says_what_is_missing(cudnn, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert reasons() == ["incapable: cuDNN 9.10.2 (needs 9.15.1 or newer); upgrade the package nvidia-cudnn of torch's CUDA version"]

    def mismatch() -> int:
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled  against (9, 20, 0)\nbut found (9, 1, 0)")

    monkeypatch.setattr(torch.backends.cudnn, "version", mismatch)
    assert reasons() == ["incapable: cuDNN does not load: cuDNN version incompatibility: PyTorch was compiled  against (9, 20, 0)"]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert reasons() == ["incapable: torch is built without cuDNN; install a CUDA build of torch"]


def test_torchs_own_flash_attention_comes_first():
    order = [type(each) for each in providers.PROVIDERS]
    assert order.index(TorchFlash) < order.index(TorchCudnn)


def test_torch_has_the_ops_that_it_calls():
    forward, backward = (getattr(torch.ops.aten, name).default._schema.arguments for name in (FORWARD, BACKWARD))
    assert [argument.name for argument in forward] == [
        "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale"
    ]  # fmt: skip
    assert [argument.name for argument in backward] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias", "cum_seq_q", "cum_seq_k",
        "max_q", "max_k", "dropout_p", "is_causal", "scale",
    ]  # fmt: skip
