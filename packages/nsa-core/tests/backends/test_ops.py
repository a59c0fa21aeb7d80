"""Custom ops declared from two plain functions: repeated declarations, second derivatives, no gradients."""

import pytest
import torch

from nsa_core import InputError, Keys, Operation, Queries, attention_op
from nsa_core.backends.ops import declare_op
from nsa_core.testing.inputs import SMALL


def operands(requires_grad=False):
    q, k, v = (torch.randn(1, 6, 2, 4, dtype=torch.float64, requires_grad=requires_grad) for _ in range(3))
    return Queries(q, 6), Keys(k, v, 6)


def declare(factor, name="nsa_core_tests::window"):
    def forward(queries, keys, *, geometry, scale, needs_grad):
        return factor * keys.v, queries.q.new_zeros(queries.q.shape[:3])

    def backward(grads, results, queries, keys, *, geometry, scale):
        dout = torch.zeros_like(results[0]) if grads[0] is None else grads[0]
        return torch.zeros_like(queries.q), torch.zeros_like(keys.k), factor * dout

    return attention_op(name, forward, backward, operation=Operation.WIN)


def test_a_second_declaration_replaces_the_first():
    queries, keys = operands(requires_grad=True)
    for factor in (2, 3):
        out = declare(factor)(queries, keys, geometry=SMALL, scale=1.0).out
        assert torch.equal(out, factor * keys.v)
        (gradient,) = torch.autograd.grad(out.sum(), keys.v)
        assert torch.equal(gradient, torch.full_like(gradient, factor))


def test_torch_gets_an_op_once_however_often_it_is_declared(monkeypatch):
    """torch 2.11 crashes when an op is deregistered and registered again."""
    defined, define, library = [], torch.library.Library.define, torch.library.Library
    monkeypatch.setattr(library, "define", lambda self, schema, **keywords: defined.append(schema) or define(self, schema, **keywords))
    monkeypatch.setattr(library, "_destroy", lambda self: pytest.fail("an op was taken back"))
    for factor in (2, 3):
        declare(factor, "nsa_core_tests::once")
    assert [schema.partition("(")[0] for schema in defined] == ["once", "once_backward"]


def test_an_op_has_one_schema():
    declare_op("nsa_core_tests::one_schema", "(Tensor x) -> Tensor", torch.clone, torch.clone)
    with pytest.raises(InputError, match="is declared twice, as .* rename one"):
        declare_op("nsa_core_tests::one_schema", "(Tensor x, int y) -> Tensor", torch.clone, torch.clone)


def test_fields_that_are_not_there_reach_the_functions_as_they_were():
    found = []

    def forward(queries, keys, *, geometry, scale, needs_grad):
        found.append((queries, keys, geometry, scale, needs_grad))
        return keys.v.clone(), queries.q.new_zeros(queries.q.shape[:3])

    queries, keys = operands()
    start, first = torch.tensor([3], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    queries, keys = queries._replace(start=start), keys._replace(first=first, ring=True)
    attention_op("nsa_core_tests::fields", forward, operation=Operation.WIN)(queries, keys, geometry=SMALL, scale=0.5)
    ((given, stores, *rest),) = found
    assert rest == [SMALL, 0.5, False]
    assert (given.max_count, given.cu_seqlens, given.count) == (6, None, None)
    assert (stores.max_count, stores.page_table, stores.k_scale, stores.ring) == (6, None, None, True)
    assert torch.equal(given.start, start)
    assert torch.equal(stores.first, first)


def test_results_without_a_backward_pass_require_no_gradient():
    op = attention_op(
        "nsa_core_tests::forward_only",
        lambda queries, keys, **_: (keys.v.clone(), queries.q.new_zeros(queries.q.shape[:3])),
        operation=Operation.WIN,
    )
    out, lse = op(*operands(requires_grad=True), geometry=SMALL, scale=1.0)
    assert not out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("power", [1, 2])
def test_a_second_derivative_is_refused_and_not_left_out(power):
    queries, keys = operands(requires_grad=True)
    weight = torch.ones((), requires_grad=True)
    values = keys.v * weight
    out = declare(2, f"nsa_core_tests::once_{power}")(queries, keys._replace(v=values), geometry=SMALL, scale=1.0).out
    (gradient,) = torch.autograd.grad(out.pow(power).sum(), values, create_graph=True)
    # with a penalty on the gradient: a cut graph would give the gradient of the rest
    loss = out.square().sum() + gradient.square().sum()
    with pytest.raises(RuntimeError, match="differentiated once more"):
        torch.autograd.grad(loss, weight)


@pytest.mark.parametrize("name", ["window", "::window", "window::"])
def test_a_name_without_a_namespace_is_refused(name):
    with pytest.raises(InputError, match=f"^name='{name}' has no namespace .* use 'my_package::window'$"):
        declare(2, name)


def test_an_operation_that_cannot_be_declared_is_refused():
    with pytest.raises(InputError, match="^operation='append' cannot be declared .*'cmp', 'select', 'slc', 'win', 'nsa'.*; use declare_op"):
        attention_op("nsa_core_tests::append", lambda: None, operation=Operation.APPEND)


WRONG_RESULTS = {
    "one too many": lambda out, lse: (out, lse, out),
    "out alone": lambda out, lse: out,
    "one too few": lambda out, lse: (out,),
    "none": lambda out, lse: None,
    "no tensor": lambda out, lse: (out, 0.0),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", WRONG_RESULTS)
def test_results_that_the_schema_does_not_have_are_refused(kind, requires_grad):
    """torch crashes when an op returns more tensors than its schema has."""
    queries, keys = operands(requires_grad)
    op = attention_op(
        "nsa_core_tests::wrong_results",
        lambda queries, keys, **_: WRONG_RESULTS[kind](keys.v.clone(), queries.q.new_zeros(queries.q.shape[:3])),
        lambda *_, **__: (),
        operation=Operation.WIN,
    )
    with pytest.raises(
        InputError, match=r"^forward of nsa_core_tests::wrong_results returned .*the rule: 2 tensors, and more only with saves"
    ):
        op(queries, keys, geometry=SMALL, scale=1.0)


def test_a_choice_is_one_tensor():
    queries, keys = operands()
    op = attention_op("nsa_core_tests::wrong_choice", lambda queries, keys, lse, **_: (lse, lse), operation=Operation.SELECT)
    with pytest.raises(
        InputError, match=r"^forward of nsa_core_tests::wrong_choice returned \['tuple'\] .the rule: 1 tensor, block_indices"
    ):
        op(queries, keys, torch.zeros(1, 6, 2, dtype=torch.float64), geometry=SMALL, scale=1.0)


@pytest.mark.parametrize("gradients", [(1, 1), (1, 1, 1, 1), (1, 1, None), None], ids=repr)
def test_gradients_that_the_schema_does_not_have_are_refused(gradients):
    queries, keys = operands(requires_grad=True)
    op = attention_op(
        "nsa_core_tests::wrong_gradients",
        lambda queries, keys, **_: (keys.v.clone(), queries.q.new_zeros(queries.q.shape[:3])),
        lambda grads, results, queries, keys, **_: gradients and tuple(x and torch.zeros_like(queries.q) for x in gradients),
        operation=Operation.WIN,
    )
    out = op(queries, keys, geometry=SMALL, scale=1.0).out
    with pytest.raises(InputError, match="^backward of nsa_core_tests::wrong_gradients returned .*the rule: 3 tensors"):
        out.sum().backward()
