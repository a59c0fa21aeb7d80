"""A compiled model is the eager one: one graph per block, for any packing, with any recomputation."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from nsa_train.model.decoder import build_model

PACKINGS = ([0, 32, 64], [0, 10, 20, 64], [0, 5, 6, 40, 64], [0, 1, 2, 3, 4, 64], [0, 64])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch 2.13 imports its own deprecated parts
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # and looks at what it warns of
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize(
    "sets",
    [["model.attention=nsa"], ["nsa.compressor=mean", "nsa.kv=shared"], ["model.attention=dense"]],
    ids=["nsa", "one K and V", "dense"],
)
def test_blocks_compile_whole_and_give_equal_gradients(tiny_config, sets: list[str], recompute: str) -> None:
    config = tiny_config(*sets, f"train.activation_checkpointing={recompute}", "train.loss_chunk=16")
    eager, compiled = build_model(config), build_model(config)
    compiled.load_state_dict(eager.state_dict())
    compiled.compile_parts(backend="aot_eager", fullgraph=True)
    for bounds in PACKINGS:
        ids = torch.randint(0, 256, (1, 64))
        for model in (eager, compiled):
            model(ids, labels=ids.roll(-1), cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=64).backward()
    for (name, ours), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert not counters["graph_break"]
    # layers share a graph; another number of documents makes one more, and then any number does
    assert counters["stats"]["unique_graphs"] <= 4
