"""Other implementations: when they are called, and with which arguments."""

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from nsa_bench.cases import Case, head_shape, parse_geometry
from nsa_bench.compare import PEERS, FlashLinearAttention, NativeSparseAttentionPytorch
from nsa_bench.peers import import_problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHARED = parse_geometry("64/64/64/16/512")


def case_of(heads=(64, 4, 128, 128), geometry=SHARED, seq_len=4096):
    return Case(shape=head_shape(*heads), seq_len=seq_len, geometry=geometry)


@pytest.fixture
def fla(monkeypatch):
    """Return a package with the layout of flash-linear-attention, whose function records its arguments."""
    calls = []
    module = ModuleType("fla.ops.nsa.parallel")

    def parallel_nsa(q, k, v, **options):
        calls.append(options)
        return q * 0 + v.repeat_interleave(q.shape[2] // v.shape[2], 2)

    module.parallel_nsa, module.calls, module.flash_attn_func = parallel_nsa, calls, object()
    for name in ("fla", "fla.ops", "fla.ops.nsa"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_what_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.nsa", None)
    assert import_problem("json") is None
    assert import_problem("fla.ops.nsa").startswith("fla.ops.nsa cannot be imported (ModuleNotFoundError")
    # absent or not, neither peer takes this
    for peer in PEERS:
        assert peer.reasons_against(case_of((6, 2, 16, 8), parse_geometry("8/8/8/6/16"), 10**6), CPU)


def test_flash_linear_attention_says_every_reason_at_once(fla):
    peer = FlashLinearAttention()
    assert peer.reasons_against(case_of(), CUDA) == []
    assert peer.reasons_against(case_of((32, 8, 128, 128), parse_geometry("8/8/8/6/16")), CPU) == [
        "runs on a GPU only",
        "H/G = 4 (takes powers of 2 of at least 16)",
        "n = 6 (takes powers of 2)",
    ]
    assert peer.reasons_against(case_of((96, 4, 128, 128)), CUDA) == ["H/G = 24 (takes powers of 2 of at least 16)"]
    assert peer.reasons_against(case_of(geometry=parse_geometry("32/16/64/16/512")), CUDA) == ["l/d/l' = 32/16/64 (takes l = d = l')"]


def test_flash_linear_attention_is_called_with_the_cases_numbers(fla):
    q, k, v = (torch.randn(1, 5, heads, 128) for heads in (64, 4, 4))
    gates = torch.rand(1, 5, 64, 3)
    built = FlashLinearAttention().build(case_of(), CPU)
    assert (built.has_window, built.note) == (True, "")
    assert tuple(built.run(q, k, v, gates).shape) == (1, 5, 64, 128)
    [options] = fla.calls
    assert torch.equal(options["g_swa"], gates[..., 2])
    assert (options["block_counts"], options["block_size"], options["window_size"]) == (16, 64, 512)


@pytest.mark.parametrize(
    ("heads", "has_flash", "reason"), [((64, 4, 128, 128), False, "not installed"), ((64, 4, 192, 128), True, "D_k = D_v")]
)
def test_flash_linear_attention_without_a_window_says_so(fla, heads, has_flash, reason):
    fla.flash_attn_func = object() if has_flash else None
    built = FlashLinearAttention().build(case_of(heads), CPU)
    assert not built.has_window
    assert reason in built.note
    built.run(torch.randn(1, 5, 64, heads[2]), torch.randn(1, 5, 4, heads[2]), torch.randn(1, 5, 4, heads[2]), torch.rand(1, 5, 64, 3))
    assert (fla.calls[0]["g_swa"], fla.calls[0]["window_size"]) == (None, 0)


def test_the_gathering_peer_takes_equal_dimensions_and_short_sequences(monkeypatch):
    monkeypatch.setitem(sys.modules, "native_sparse_attention_pytorch", ModuleType("native_sparse_attention_pytorch"))
    peer = NativeSparseAttentionPytorch()
    assert peer.reasons_against(case_of(seq_len=1024), CPU) == []
    assert peer.reasons_against(case_of((64, 4, 192, 128), seq_len=65536), CPU) == [
        "takes D_k = D_v only",
        "gathers 170 GiB of keys and values (measured up to 16 GiB)",
    ]
    assert peer.reasons_against(case_of(geometry=parse_geometry("32/16/64/16/512"), seq_len=64), CPU) == [
        "l/d/l' = 32/16/64 (takes l = d = l')"
    ]


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
# its use of torch and the missing GPU do not matter here
@pytest.mark.filterwarnings("ignore")
def test_the_installed_flash_linear_attention_takes_the_arguments_that_it_is_called_with():
    parameters = inspect.signature(import_module("fla.ops.nsa.parallel").parallel_nsa).parameters
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert {"g_cmp", "g_slc", "g_swa", "block_counts", "block_size", "window_size"} <= set(parameters)


@pytest.mark.skipif(
    import_problem("native_sparse_attention_pytorch") is not None, reason="native-sparse-attention-pytorch is not installed"
)
def test_the_installed_peer_computes_the_branches_that_it_defines_as_we_do():
    from nsa_core.reference import naive

    geometry = parse_geometry("8/8/8/6/32")
    case = Case(shape=head_shape(4, 2, 16, 16), seq_len=45, geometry=geometry, dtype=torch.float64)
    q, k, v = (torch.randn(1, 45, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    run = NativeSparseAttentionPytorch().build(case, CPU).run
    # few enough tokens that every block is chosen; the compressed branch has its own key
    for place in (1, 2):
        gates = torch.nn.functional.one_hot(torch.tensor(place), 3).double().expand(1, 45, 4, 3)
        k_cmp = k[:, :5]
        expected = naive.nsa_attention(q, k_cmp, k_cmp, k, v, k, v, gates, geometry=geometry)
        torch.testing.assert_close(run(q, k, v, gates), expected, rtol=1e-9, atol=1e-9)
