"""Every test of the cache runs without a graph, as decoding does."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield
