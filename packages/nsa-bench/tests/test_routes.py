"""The record of backends that ran."""

import pytest
import torch

from nsa_bench.errors import BenchError
from nsa_bench.routes import RouteRecorder
from nsa_core import nsa_attention
from nsa_core.testing.inputs import Shape, make_inputs


def test_the_recorder_names_who_ran_and_forgets():
    recorder = RouteRecorder.of_installed()
    shape = Shape()
    assert recorder.served == ""
    nsa_attention(*make_inputs(shape).tensors, geometry=shape.geometry, registry=recorder, backend="sdpa")
    assert recorder.served == "sdpa"
    recorder.forget()
    assert recorder.served == ""


def test_different_backends_are_named_by_operation(install):
    install("echo", ECHO)
    shape = Shape()
    recorder = RouteRecorder.of_installed()
    backend = {"win": "echo", "cmp": "sdpa", "select": "sdpa", "slc": "sdpa"}
    with torch.no_grad():
        nsa_attention(*make_inputs(shape).tensors, geometry=shape.geometry, registry=recorder, backend=backend)
    assert recorder.served == "cmp sdpa, select sdpa, slc sdpa, win echo"


def test_two_plug_ins_of_one_name_are_an_error(install):
    install("hopper_kernels")
    install("more_kernels")
    with pytest.raises(BenchError, match="more_kernels"):
        RouteRecorder.of_installed()


ECHO = """
from nsa_core import BranchOutput, Capability, Operation
from nsa_core.plugins import hookimpl

class Echo:
    name, operation = "echo", Operation.WIN
    capability = Capability()
    def reasons_against(self, request): return ()
    def preference(self, request): return -1
    def __call__(self, queries, keys, *, geometry, scale):
        q, v = queries.q, keys.v
        return BranchOutput(q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1]))

@hookimpl
def nsa_branch_backends():
    return [Echo()]
"""
