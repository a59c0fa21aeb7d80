"""Capabilities of backends, and requests: plain data."""

import pytest
import torch

from nsa_core import BlockGeometry, BranchBackend, BranchRequest, Capability, Layout, Operation, Reason, ReasonKind
from nsa_core.reference.sdpa import SDPABackend

GPU_ONLY = Capability(
    device_types=("cuda",),
    min_compute_capability=(8, 0),
    dtypes=(torch.bfloat16, torch.float16),
    layouts=(Layout.DENSE,),
    gradient=False,
    max_head_dim=128,
)

DOUBLE = {"dtype": torch.float64, "kv_dtype": torch.float64}


def request(**fields):
    return BranchRequest(operation=Operation.WIN, **fields)


def messages(capability, **fields):
    return [reason.message for reason in capability.reasons_against(request(**fields))]


def test_every_reason_is_given_at_once():
    assert messages(GPU_ONLY, layout="paged", needs_grad=True, head_dim_qk=192) == [
        "device cpu (needs cuda)",
        "compute capability none (needs 8.0 or newer)",
        "q of torch.float32 (takes torch.bfloat16, torch.float16)",
        "k, v of torch.float32 (takes torch.bfloat16, torch.float16)",
        "layout paged (takes dense)",
        "gradients are needed (forward only)",
        "head dimension 192 (at most 128)",
    ]


def test_a_capability_without_limits_objects_to_nothing():
    for layout in Layout:
        assert not messages(Capability(), layout=layout, needs_grad=True, deterministic=True, head_dim_qk=4096, device_type="mps")


def test_what_a_capability_says_is_incapable():
    reasons = GPU_ONLY.reasons_against(request())
    assert {reason.kind for reason in reasons} == {ReasonKind.INCAPABLE}


def test_a_gradient_of_lse_that_may_come_is_policy_since_the_backward_pass_alone_knows():
    found = Capability(lse_gradient=False).reasons_against(request(needs_grad=True, needs_lse_grad=True))
    assert [str(reason) for reason in found] == ["policy: lse may get a gradient (it differentiates out alone)"]
    # Eq. 5 does not return lse; a forward-only backend has another reason
    assert not Capability(lse_gradient=False).reasons_against(request(needs_grad=True))
    assert messages(Capability(gradient=False, lse_gradient=False), needs_grad=True, needs_lse_grad=True) == [
        "gradients are needed (forward only)"
    ]


@pytest.mark.parametrize(
    ("capability", "fits", "objection"),
    [
        (Capability(device_types=("cuda", "xpu")), {"device_type": "xpu"}, "device cpu (needs cuda or xpu)"),
        (Capability(dtypes=(torch.float64,)), DOUBLE, "q of torch.float32 (takes torch.float64)"),
        (Capability(dtypes=(torch.float64,)), DOUBLE, "k, v of torch.float32 (takes torch.float64)"),
        (Capability(layouts=(Layout.PACKED, Layout.PAGED)), {"layout": "packed"}, "layout dense (takes packed, paged)"),
        (Capability(max_head_dim=63), {"head_dim_qk": 63, "head_dim_v": 63}, "head dimension 64 (at most 63)"),
    ],
)
def test_a_limit_is_named_with_what_would_do(capability, fits, objection):
    assert objection in messages(capability)
    assert not messages(capability, **fits)


@pytest.mark.parametrize(
    ("have", "said"), [(None, "none"), ((7, 5), "7.5"), ((8, 8), "8.8"), ((8, 9), None), ((9, 0), None), ((10, 0), None)]
)
def test_compute_capability_is_compared_as_a_pair_of_numbers(have, said):
    found = messages(Capability(min_compute_capability=(8, 9)), device_type="cuda", compute_capability=have)
    assert found == ([] if said is None else [f"compute capability {said} (needs 8.9 or newer)"])


@pytest.mark.parametrize(("head_dim_qk", "head_dim_v"), [(192, 128), (128, 192)])
def test_the_larger_head_dimension_counts(head_dim_qk, head_dim_v):
    assert messages(Capability(max_head_dim=128), head_dim_qk=head_dim_qk, head_dim_v=head_dim_v) == ["head dimension 192 (at most 128)"]


@pytest.mark.parametrize(("needs_grad", "deterministic", "refused"), [(True, True, True), (True, False, False), (False, True, False)])
def test_determinism_is_about_gradients(needs_grad, deterministic, refused):
    found = messages(Capability(deterministic_gradient=False), needs_grad=needs_grad, deterministic=deterministic)
    assert bool(found) == refused


def test_a_forward_only_backend_serves_without_gradients():
    assert not messages(Capability(gradient=False))
    assert messages(Capability(gradient=False), needs_grad=True) == ["gradients are needed (forward only)"]


def test_requests_of_equal_numbers_are_equal_and_hash_alike():
    first = BranchRequest(operation="win", layout="packed", geometry=BlockGeometry(window_size=7))
    second = BranchRequest(operation=Operation.WIN, layout=Layout.PACKED, geometry=BlockGeometry(window_size=7))
    assert first == second
    assert hash(first) == hash(second)
    assert first != BranchRequest(operation=Operation.WIN, layout=Layout.PACKED)


@pytest.mark.parametrize("field", [{"operation": "window"}, {"operation": "win", "layout": "jagged"}])
def test_a_request_refuses_an_unknown_operation_or_layout(field):
    with pytest.raises(ValueError, match=r"is not a valid (Operation|Layout)"):
        BranchRequest(**field)


def test_a_reason_reads_as_its_kind_and_message():
    assert str(Reason.incapable("no GPU")) == "incapable: no GPU"
    assert str(Reason.policy("slow here")) == "policy: slow here"


def test_the_reference_meets_the_protocol():
    assert isinstance(SDPABackend(operation=Operation.WIN), BranchBackend)


def test_what_lacks_a_member_does_not_meet_the_protocol():
    class Nameless:
        operation = Operation.WIN
        capability = Capability()

        def reasons_against(self, request): ...

        def preference(self, request): ...

        def __call__(self, *operands, geometry, scale): ...

    assert not isinstance(Nameless(), BranchBackend)
