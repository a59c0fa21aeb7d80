"""RoPE of a step by one launch, against complex numbers and against the reference."""

from typing import Any

import pytest
import torch

from nsa_core import NSAConfig, Operation
from nsa_core.module import NativeSparseAttention
from nsa_core.rope import RotaryEmbedding, rotate_step
from nsa_core.testing.conformance import check_backend
from nsa_core.testing.inputs import SMALL
from nsa_kernels_triton.plugin import TritonBackend
from nsa_kernels_triton.rotation import kernels

pytestmark = [pytest.mark.usefixtures("nan_buffers"), pytest.mark.filterwarnings("ignore:.*against policy.*")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the list to which each launch adds its grid."""
    seen: list[tuple[int, ...]] = []
    launch = kernels.rotate_kernel._launch

    def record(grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        seen.append(grid)
        launch(grid, *arguments, **constants)

    monkeypatch.setattr(kernels.rotate_kernel, "_launch", record)
    return seen


def test_it_conforms_to_products_of_complex_numbers() -> None:
    report = check_backend(TritonBackend(operation=Operation.ROTATE), device=DEVICE)
    assert len(report.passed) == 24
    assert all("float64" in case for case in report.declined)


def test_heads_that_are_not_contiguous_are_rotated(grids: list[tuple[int, ...]]) -> None:
    x = torch.randn(2, 3, 16, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE).transpose(2, 3)
    start, rope = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE), RotaryEmbedding(16)
    [found] = TritonBackend(operation=Operation.ROTATE)((x,), start, rope)
    torch.testing.assert_close(found, rotate_step((x,), start, rope)[0], rtol=1e-5, atol=1e-5)
    assert grids == [(6, 2)]


def test_a_rotation_of_another_class_is_called_as_it_is(grids: list[tuple[int, ...]]) -> None:
    class Still(RotaryEmbedding):
        def tables(self, positions: torch.Tensor) -> Any:
            return super().tables(torch.zeros_like(positions))

    x, start = torch.randn(1, 1, 2, 16, device=DEVICE), torch.tensor([5], dtype=torch.int32, device=DEVICE)
    [found] = TritonBackend(operation=Operation.ROTATE)((x,), start, Still(16))
    assert torch.equal(found, x)
    assert not grids


def test_a_batch_without_sequences_launches_nothing(grids: list[tuple[int, ...]]) -> None:
    x, start = torch.empty(0, 1, 2, 16, device=DEVICE), torch.empty(0, dtype=torch.int32, device=DEVICE)
    [found] = TritonBackend(operation=Operation.ROTATE)((x,), start, RotaryEmbedding(16))
    assert found.shape == x.shape
    assert not grids


@pytest.mark.parametrize(("kv", "rope", "tiles"), [("separate", "block_end", 3), ("separate", "tokens", 4), ("shared", "tokens", 2)])
def test_a_layers_step_is_rotated_by_one_launch(grids: list[tuple[int, ...]], kv: Any, rope: Any, tiles: int) -> None:
    config = NSAConfig(
        hidden_size=8, num_heads=4, num_kv_heads=2, head_dim_qk=16, head_dim_v=12, geometry=SMALL, kv=kv, compressor="mean",
        compressed_rope=rope, backends={"rotate": "triton"},
    )  # fmt: skip
    torch.manual_seed(0)
    layer = NativeSparseAttention(config).to(DEVICE)
    x = torch.randn(2, 3, 8, device=DEVICE)
    whole = layer(x)
    cache = layer.new_cache(2, 16, static=True)
    steps = [layer(x[:, t : t + 1], cache=cache) for t in range(3)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)
    assert grids == [(2, tiles)] * 3
