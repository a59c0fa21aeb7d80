"""Side streams of a captured step: what runs there is read after the join only, and everything is joined. No GPU is needed."""

import attrs
import pytest
import torch

from nsa_core import BlockGeometry, NSAConfig
from nsa_core.kv_cache import streams

CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=BlockGeometry(4, 2, 4, 3, 1, 1, 5), gate_hidden_size=8)


class LateStreams:
    """Side streams as late as they may be: the results of a fork are NaN until its stream is joined, or forks again."""

    def __init__(self):
        self.results = {}

    def fork(self, device, number, body):
        self.write(number)
        found = body()
        mine = self.results.setdefault(number, [])
        mine += [(x, x.clone()) for x in (found.values() if isinstance(found, dict) else [found])]
        for x, _ in mine:
            x.fill_(torch.nan)
        return found

    def join(self, device, count):
        for number in range(count):
            self.write(number)
            del self.results[number]

    def write(self, number):
        for x, values in self.results.get(number, []):
            x.copy_(values)


@pytest.mark.parametrize("kv", ["separate", "shared"])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_results_of_side_streams_are_read_after_the_join_only(random_layer, random_input, monkeypatch, kv, gate, num_tokens):
    layer = random_layer(attrs.evolve(CONFIG, kv=kv, gate=gate))
    caches = [layer.new_cache(2, 40, static=True, max_rollback=4) for _ in range(2)]
    x, count = random_input(2, num_tokens, 8), torch.tensor([num_tokens, 1], dtype=torch.int32)
    expected = [layer(x, cache=caches[0], query_count=each) for each in (None, count)]
    late = LateStreams()
    monkeypatch.setattr(streams, "fork", late.fork)
    monkeypatch.setattr(streams, "join", late.join)

    found = [layer(x, cache=caches[1], query_count=each) for each in (None, count)]

    assert not late.results
    assert all(map(torch.equal, found, expected))
    for name, store in caches[0].keys.items():
        assert torch.equal(caches[1].keys[name], store), name
