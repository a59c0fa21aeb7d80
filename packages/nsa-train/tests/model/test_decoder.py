"""The decoder: packed equals separate, recomputing changes nothing, the loss starts at ln V and ignores what has no label."""

import math
import time
import weakref

import attrs
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_core import NativeSparseAttention
from nsa_core.dense_attention import DenseAttention
from nsa_train.data.packing import IGNORED
from nsa_train.errors import ConfigError
from nsa_train.model.decoder import Decoder, build_model, count_parameters
from nsa_train.model.loss import loss_and_gradient, summed_loss, summed_loss_in_chunks
from nsa_train.settings.recipe import load_config

DIM = 32
"""Of the tiny recipe: the rows of the transposed embedding."""
attentions = pytest.mark.parametrize("attention", ["nsa", "dense"])


def _model(tiny_config, attention: str, *overrides: str) -> Decoder:
    torch.manual_seed(0)
    model = build_model(tiny_config(f"model.attention={attention}", *overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            # layers that start at zero must not hide a path
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def _gradients(model: Decoder, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@attentions
def test_packed_documents_equal_documents_alone(tiny_config, attention: str) -> None:
    model = _model(tiny_config, attention).double()
    lengths = [1, 17, 3, 4, 9]
    documents = [torch.randint(0, 256, (1, length)) for length in lengths]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = model(torch.cat(documents, 1), cu_seqlens=bounds, max_seqlen=17)
    alone = torch.cat([model(document) for document in documents], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(packed)
    ours, theirs = (_gradients(model, (out * weights).sum()) for out in (packed, alone))
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-8, atol=1e-9, msg=name)


@attentions
def test_future_tokens_never_change_past_logits(tiny_config, attention: str) -> None:
    model = _model(tiny_config, attention)
    ids = torch.randint(0, 256, (2, 33))
    before = model(ids)
    for position in (1, 4, 8, 16, 32):
        changed = ids.clone()
        changed[:, position:] = torch.randint(0, 256, changed[:, position:].shape)
        assert torch.equal(model(changed)[:, :position], before[:, :position])


@attentions
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_activation_checkpointing_changes_no_gradient(tiny_config, attention: str, kind: str) -> None:
    plain = _model(tiny_config, attention)
    again = _model(tiny_config, attention, f"train.activation_checkpointing={kind}")
    ids = torch.randint(0, 256, (1, 48))
    bounds = torch.tensor([0, 20, 48], dtype=torch.int32)
    gradients = [_gradients(model, model(ids, cu_seqlens=bounds, max_seqlen=28).square().sum()) for model in (plain, again)]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@attentions
def test_recomputing_keeps_fewer_tensors(tiny_config, attention: str) -> None:
    """The switch must do something: what autograd saves shrinks, to a block's inputs, or to these and the expensive operations."""
    saved = {}
    for kind in ("none", "selective", "full"):
        model = _model(tiny_config, attention, f"train.activation_checkpointing={kind}")
        ids = torch.randint(0, 256, (1, 64))
        with CountedProducts() as counted:
            loss = model(ids).square().sum()
            forward = counted.number
            loss.backward()
        saved[kind] = _kept_elements(model, ids), counted.number - forward
    assert saved["full"][0] < saved["selective"][0] < saved["none"][0]
    # saved products are not computed again
    assert saved["none"][1] == saved["selective"][1] < saved["full"][1]


class CountedProducts(TorchDispatchMode):
    """Counts the matrix products that run while it is active."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return function(*args, **(kwargs or {}))


def _kept_elements(model: Decoder, ids: Tensor) -> int:
    """Return how much memory, in elements, a forward pass leaves behind for the backward pass."""
    seen: dict[int, int] = {}

    class Living(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    weakref.finalize(storage, seen.pop, storage._cdata, None)
                    seen[storage._cdata] = storage.nbytes()
            return out

    with Living():
        loss = model(ids).square().sum()
    kept = sum(seen.values())
    del loss
    return kept


@attentions
def test_the_first_loss_is_that_of_guessing(tiny_config, attention: str) -> None:
    torch.manual_seed(1)
    model = build_model(tiny_config(f"model.attention={attention}"))
    labels = torch.randint(0, 256, (4, 64))
    loss = summed_loss(model(torch.randint(0, 256, (4, 64))), labels) / labels.numel()
    assert float(loss.detach()) == pytest.approx(math.log(258), abs=0.1)


@pytest.mark.parametrize("chunk", [1, 5, 7, 64, 1000])
@attentions
def test_a_loss_in_chunks_equals_the_whole(tiny_config, attention: str, chunk: int) -> None:
    whole, chunked = (_model(tiny_config, attention, f"train.loss_chunk={size}").double() for size in (0, chunk))
    ids = torch.randint(0, 256, (1, 64))
    labels = torch.where(torch.rand(1, 64) < 0.2, IGNORED, ids.roll(-1))
    losses = [model(ids, labels=labels) for model in (whole, chunked)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    # the upstream gradient counts as well
    ours, theirs = (_gradients(model, 0.3 * loss) for model, loss in zip((chunked, whole), reversed(losses), strict=True))
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_chunks_is_as_good_under_autocast(tiny_config, dtype: torch.dtype) -> None:
    model = _model(tiny_config, "dense")
    ids = torch.randint(0, 256, (1, 64))
    exact = _gradients(model, model(ids, labels=ids.roll(-1)))
    errors = []
    for chunk in (0, 16):
        model.loss_chunk = chunk
        with torch.autocast("cpu", dtype):
            loss = model(ids, labels=ids.roll(-1))
        assert loss.dtype == torch.float32
        found = _gradients(model, loss)
        errors.append(max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact))
    assert errors[1] < 1.2 * errors[0]


def test_logits_never_exist_at_once_in_chunks(tiny_config) -> None:
    model = _model(tiny_config, "dense", "train.loss_chunk=8")
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[-1:] == (258,) and out.shape[0] != DIM:
                largest = max(largest, out.numel() // 258)
            return out

    ids = torch.randint(0, 256, (1, 64))
    with Largest():
        model(ids, labels=ids).backward()
    assert largest == 8


def test_the_embedding_may_have_more_rows_than_the_tokenizer_ids(tiny_config) -> None:
    assert build_model(tiny_config("model.vocab_size=320")).embedding.num_embeddings == 320
    assert build_model(tiny_config()).embedding.num_embeddings == 258
    with pytest.raises(ConfigError, match=r"model.vocab_size=100 is below the 258 ids of data.tokenizer='byte' .* use 320, or 0"):
        build_model(tiny_config("model.vocab_size=100"))


def test_the_loss_sums_over_labels_that_exist() -> None:
    logits, labels = torch.randn(1, 6, 10), torch.tensor([[1, IGNORED, 3, IGNORED, IGNORED, 9]])
    expected = -sum(logits[0, at].log_softmax(-1)[label] for at, label in ((0, 1), (2, 3), (5, 9)))
    torch.testing.assert_close(summed_loss(logits, labels), expected)
    assert float(summed_loss(logits, torch.full((1, 6), IGNORED))) == 0


@pytest.mark.parametrize("name", ["demo", "showcase"])
def test_parameters_are_counted_for_both_twins(name: str, tiny_text) -> None:
    config = load_config(name, [f"data.path={tiny_text}"] if name == "showcase" else [])
    counts = count_parameters(config)
    for attention, count in counts._asdict().items():
        twin = build_model(attrs.evolve(config, model=attrs.evolve(config.model, attention=attention)))
        assert count == sum(weight.numel() for weight in twin.parameters())
    assert counts.nsa > counts.dense
    if name == "showcase":
        assert all(1e6 < count < 3e6 for count in counts)


def test_a_deep_model_is_counted_as_fast_as_a_shallow_one(tiny_config) -> None:
    one, two, many = (count_parameters(tiny_config(f"model.n_layers={layers}")).nsa for layers in (1, 2, 4096))
    assert many == one + 4095 * (two - one)
    started = time.process_time()
    count_parameters(tiny_config("model.n_layers=4096"))
    assert time.process_time() - started < 0.5


def test_one_key_swaps_the_attention_and_nothing_else(tiny_config) -> None:
    nsa, dense = (_model(tiny_config, attention) for attention in ("nsa", "dense"))
    assert [type(block.attention) for block in nsa.blocks] == [NativeSparseAttention] * 2
    assert [type(block.attention) for block in dense.blocks] == [DenseAttention] * 2
    assert len(nsa.sparse_layers) == 2
    assert dense.sparse_layers == []
    shapes = [{name: weight.shape for name, weight in model.named_parameters() if ".attention." not in name} for model in (nsa, dense)]
    assert shapes[0] == shapes[1]


def test_the_output_shares_the_embedding(tiny_config) -> None:
    model = _model(tiny_config, "dense")
    assert not any("head" in name or "output" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        model.embedding.weight.zero_()
    assert not model(torch.zeros(1, 3, dtype=torch.int64)).any()


def test_an_evaluation_in_chunks_computes_no_gradient() -> None:
    asked = []

    def kernel(logits: Tensor, labels: Tensor, wide: torch.dtype, needs_grad: bool) -> tuple[Tensor, Tensor]:
        asked.append(needs_grad)
        return loss_and_gradient(logits, labels, wide, needs_grad)

    hidden, weight = torch.randn(1, 6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    labels = torch.arange(6).unsqueeze(0)
    with torch.no_grad():
        quiet = summed_loss_in_chunks(hidden, weight, labels, 4, kernel)
    assert asked == [False, False]
    loss = summed_loss_in_chunks(hidden, weight, labels, 4, kernel)
    assert asked == [False, False, True, True]
    assert torch.equal(loss, quiet) and not quiet.requires_grad
