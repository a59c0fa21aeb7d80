"""Every kernel compiles for absent GPUs, within a table of registers, spills and static shared memory."""

import re
from io import StringIO

import pytest

from nsa_kernels_cuda import jit

DECODE = ("decode_bfloat16_128", "decode_bfloat16_256", "decode_float16_128", "decode_float16_256")
MOST_REGISTERS = {
    "choose.cu": {"choose_float32": 48, "choose_bfloat16": 48, "choose_float16": 48},
    "decode.cu": dict.fromkeys(DECODE, 255),
    "decode_placed.cu": dict.fromkeys((f"{name}_placed" for name in DECODE), 255),
}
"""Registers of a thread. `choose`: with 48 of them, and up to 4 KB of scores for each warp, 40 warps are on a multiprocessor of an A100.
`decode`: a multiprocessor has a CTA of 256 threads, for which there are 255."""
ARCHITECTURES = {"choose.cu": ("sm_80", "sm_89", "sm_90a"), "decode.cu": ("sm_90a",), "decode_placed.cu": ("sm_90a",)}
FUNCTION = re.compile(
    r"entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@pytest.mark.parametrize(("source", "architecture"), [(source, each) for source, several in ARCHITECTURES.items() for each in several])
def test_kernels_compile_within_the_table(nvrtc, source, architecture):
    report = StringIO()
    jit.run_nvrtc(jit.CSRC / source, architecture, report)
    found = {match["name"]: match for match in FUNCTION.finditer(report.getvalue())}
    assert found.keys() == MOST_REGISTERS[source].keys()
    for name, match in found.items():
        assert match["architecture"] == architecture
        assert int(match["registers"]) <= MOST_REGISTERS[source][name], name
        assert (match["stores"], match["loads"]) == ("0", "0"), name
        assert "smem" not in match["rest"], name


def test_every_source_is_in_the_table():
    assert {path.name for path in jit.CSRC.glob("*.cu")} == MOST_REGISTERS.keys()
