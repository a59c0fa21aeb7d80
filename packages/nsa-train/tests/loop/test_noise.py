"""On tokens drawn at random nothing can be learnt: a run that gets below their entropy reads its labels.

Rows hold many documents of random length, so that edges of documents and blocks occur everywhere; the loss is also measured
where a leak would show, on fresh noise.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.data.packing import Batch
from nsa_train.loop.trainer import Trainer
from nsa_train.model.decoder import Decoder
from nsa_train.run_dir import RunDirectory

attentions = pytest.mark.parametrize("attention", ["nsa", "dense"])
SYMBOLS = 128
END = 1 / 24
"""The chance that a document ends after any of its tokens, so that no length is likelier for what came before."""
SEPARATOR = 256
LENGTH = ("train.steps=80", "train.batch_size=16", "train.eval_every=1000", "train.save_every=0", "data.source=jsonl")


def _documents(seed: int, num_tokens: int) -> Iterator[bytes]:
    draw = random.Random(seed)
    while num_tokens > 0:
        size = 1
        while draw.random() > END:
            size += 1
        num_tokens -= size
        yield bytes(draw.randrange(SYMBOLS) for _ in range(size))


@pytest.fixture
def noise(tmp_path: Path) -> str:
    """A setting that reads more random documents than a run consumes: none is seen twice."""
    path = tmp_path / "noise.jsonl"
    path.write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in _documents(0, 80_000)))
    return f"data.path={path}"


def _excess(run: RunDirectory, *, leak: bool = False) -> dict[str, Tensor]:
    """Return, on fresh noise, what each target costs beyond ln(SYMBOLS), by where a leak would hide.

    Ends of documents are not targets here and have no probability: a leak can only show which symbol is where.
    """
    stream, lengths = [], []
    for text in _documents(1, 12_000):
        stream += [*text, SEPARATOR]
        lengths.append(len(text) + 1)
    model: Decoder = load_model(open_checkpoint(run.root))
    ids = torch.tensor([stream])
    targets = ids[0].roll(-1)
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        logits = model(_leaking(ids) if leak else ids, cu_seqlens=bounds, max_seqlen=max(lengths))[0, :, :SYMBOLS]
    excess = logits.logsumexp(-1) - logits.gather(1, targets.clamp(max=SYMBOLS - 1)[:, None])[:, 0] - math.log(SYMBOLS)
    places = torch.cat([torch.arange(length) for length in lengths])
    sizes = torch.cat([torch.full((length,), length) for length in lengths])
    counts = places < sizes - 2
    where = {
        "everywhere": counts,
        "last quarter": counts & (places >= 3 * sizes // 4),
        "before a document's last": places == sizes - 3,
        # the tiny recipe's strides, blocks and window
        **{f"before an edge of {edge}": counts & (places % edge == edge - 1) for edge in (2, 4, 8)},
    }
    return {name: excess[chosen] for name, chosen in where.items()}


def _leaking(ids: Tensor) -> Tensor:
    """Return `ids` with every second token replaced by the next one."""
    leaked = ids.clone()
    leaked[:, :-1:2] = ids[:, 1::2]
    return leaked


@attentions
def test_noise_is_never_predicted(train: Callable[..., Any], noise: str, attention: str) -> None:
    code, run = train(noise, f"model.attention={attention}", *LENGTH)
    assert code == 0
    found = _excess(run)
    for name, excess in found.items():
        # by chance, 20 nats in all are reached once in e^20 runs
        assert float(excess.sum()) > -20, name
    # a run that did not learn the number of symbols would prove nothing
    assert float(found["everywhere"].mean()) < 0.1


@attentions
def test_a_planted_leak_is_heard(train: Callable[..., Any], noise: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the same run with every second input replaced by the next token must fall far below the entropy."""
    original = Trainer._summed_loss

    def leaking(self: Trainer, forward: Any, batch: Batch) -> Tensor:
        return original(self, forward, evolve(batch, input_ids=_leaking(batch.input_ids)))

    monkeypatch.setattr(Trainer, "_summed_loss", leaking)
    code, run = train(noise, f"model.attention={attention}", *LENGTH)
    assert code == 0
    found = _excess(run, leak=True)
    for name in ("everywhere", "last quarter", "before an edge of 4"):
        assert float(found[name].sum()) < -10 * 20, name
