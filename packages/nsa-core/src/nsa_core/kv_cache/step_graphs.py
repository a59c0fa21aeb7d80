"""CUDA graphs of the steps of one static cache, captured and replayed by the layer's ordinary call.

The first step of a form runs eagerly, which compiles and loads its kernels. The second is captured, which runs nothing, and replayed. A graph
reads weights and stores by address, and keeps the kernels of its capture. If one of these changes, all graphs are dropped.
"""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from nsa_core.kv_cache.streams import NUM_SIDE_STREAMS, is_captured, side_stream

MOST_FORMS = 4
"""Forms of steps that a cache keeps, captured or seen once; the one that was not used for longest goes first."""
MOST_ROWS = 16
"""Rows of a sequence up to which a step is captured: longer ones take longer than their launches, and their graphs much memory."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
KNOWN = ("nsa_core", "torch")
"""Packages whose modules a graph may hold: what their forward does follows from tensors and from what `_Wiring` compares. An adapter's module may
have a switch or a factor of its own, which a replay would not notice."""

Forward = Callable[[Tensor, Tensor | None], Tensor]
"""A step: the output `(B, m, hidden_size)` of x of the same shape, and of the query_count int32 (B,), if there is one."""


class Capture(Protocol):
    """One captured step."""

    def capture(self, body: Callable[[], Tensor], x: Tensor) -> Tensor:
        """Return the tensor into which `replay` writes what `body` returns; nothing runs yet. `x` is the step's input."""
        ...

    def replay(self) -> None:
        """Run the step on the current stream."""
        ...


class CudaCapture:
    """A CUDA graph in a memory pool of its own. Capturing waits for the GPU; a replay does not."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, body: Callable[[], Tensor], x: Tensor) -> Tensor:
        """Capture `body` on a side stream of the current one, which all graphs of steps on that stream share with its workspaces of cuBLAS."""
        with torch.cuda.device(x.device):
            current = torch.cuda.current_stream()
            stream = side_stream(current, NUM_SIDE_STREAMS)
            _load_products(x, stream)
            try:
                # another thread may go on with what a capture forbids
                with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                    return body()
            finally:
                # where a capture fails, torch raises before it leaves the stream
                torch.cuda.set_stream(current)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


def _load_products(x: Tensor, stream: torch.cuda.Stream) -> None:
    """Multiply on the stream of a capture and its side streams, so that their workspaces of cuBLAS lie outside the graph's pool."""
    rows = x.flatten(0, 1)
    for each in (stream, *(side_stream(stream, number) for number in range(NUM_SIDE_STREAMS))):
        each.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(each):
            rows @ rows.t()
        torch.cuda.current_stream().wait_stream(each)


class _Entry(NamedTuple):
    """A value that must not change: `owner[name]`, at the same address if it is a tensor."""

    owner: dict[str, Any]
    name: str
    value: Any
    address: int

    @classmethod
    def of(cls, owner: dict[str, Any], name: str) -> "_Entry":
        value = owner.get(name)
        return cls(owner, name, value, value.data_ptr() if isinstance(value, Tensor) else 0)

    def holds(self, owner: dict[str, Any] | None = None) -> bool:
        found = (self.owner if owner is None else owner).get(self.name)
        return found is self.value and (not self.address or found.data_ptr() == self.address)


class _Wiring:
    """The tensors of a layer and a cache that graphs read by address, and the settings that decide their kernels.

    It keeps the weights: a graph may not outlive them.
    """

    def __init__(self, layer: nn.Module, cache: Any) -> None:
        self.layer = weakref.ref(layer)
        self.hooks: list[dict[Any, Any]] = []
        self.entries = [_Entry.of(layer.__dict__, name) for name in ("config", "registry", "telemetry")]
        self.is_plain = layer.__dict__.get("telemetry") is None
        for module in layer.modules():
            self.hooks += [module.__dict__[name] for name in HOOKS]
            self.entries += [_Entry.of(module.__dict__, name) for name in ("training", "forward")]
            for owner in (module._parameters, module._buffers, module._modules):
                self.entries += [_Entry.of(owner, name) for name in owner]
            weights = [x for owner in (module._parameters, module._buffers) for x in owner.values() if x is not None]
            # a shard, or a weight that comes when its module is called, has no address that a graph may keep
            are_whole = all(type(x) in (Tensor, nn.Parameter) and not x.is_meta for x in weights)
            is_known = module is layer or type(module).__module__.partition(".")[0] in KNOWN
            self.is_plain = self.is_plain and is_known and are_whole and not module.training and "forward" not in module.__dict__
        # by name: the cache keeps its graphs, and they keep no reference to it
        names = [name for name, value in vars(cache).items() if isinstance(value, Tensor)]
        self.of_cache = [_Entry.of(vars(cache), name)._replace(owner={}) for name in (*names, "bounds", "stores", "pages", "read_counter")]
        for part in (cache.bounds, cache.stores, *([] if cache.pages is None else [cache.pages])):
            for name, value in vars(part).items():
                owner = value if isinstance(value, dict) else vars(part)
                for each in value if isinstance(value, dict) else (name,):
                    if isinstance(owner[each], Tensor):
                        self.entries.append(_Entry.of(owner, each))

    def holds(self, layer: nn.Module, cache: Any) -> bool:
        """Return True if all of it is as it was, and `layer` is the same."""
        state = vars(cache)
        return self.layer() is layer and all(entry.holds(state) for entry in self.of_cache) and all(entry.holds() for entry in self.entries)

    def may_capture(self) -> bool:
        """Return True for a layer of known modules with whole weights, without hooks, telemetry or training."""
        return self.is_plain and not any(self.hooks) and not modules._has_any_global_hook()


class _Graph(NamedTuple):
    """A captured step, and the tensors that its replay reads and writes."""

    capture: Capture
    x: Tensor
    query_count: Tensor | None
    out: Tensor


class StepGraphs:
    """The graphs of one cache, by form of step. They hold no reference to the cache, and go with it."""

    def __init__(self, make_capture: Callable[[], Capture] = CudaCapture, *, may_fail: bool = False) -> None:
        """Start without a graph.

        `make_capture` makes the object that captures and replays a step. `may_fail`: after a capture that fails, all steps run eagerly.
        """
        self.make_capture, self.may_fail = make_capture, may_fail
        self.has_failed = False
        self.forms: OrderedDict[tuple[Any, ...], _Graph | None] = OrderedDict()
        """None for a form that ran eagerly once."""
        self._wiring: _Wiring | None = None

    def __reduce__(self) -> tuple[Callable[..., "StepGraphs"], tuple[()]]:
        """Return what copies and unpickles as a value without graphs: they read the tensors of this cache, and hold the layer's weights."""
        return partial(StepGraphs, self.make_capture, may_fail=self.may_fail), ()

    def run(self, layer: nn.Module, cache: Any, x: Tensor, query_count: Tensor | None, forward: Forward) -> Tensor:
        """Return `forward(x, query_count)`, the step of `layer` over the static `cache`, by a graph where one may replace it.

        x is made contiguous in every step that a graph may replace, because a product with a bias rounds differently for rows that are not.
        """
        if self.has_failed or not _may_replace(x, query_count):
            return forward(x, query_count)
        if self._wiring is None or not self._wiring.holds(layer, cache):
            self.forms.clear()
            self._wiring = _Wiring(layer, cache)
        if not self._wiring.may_capture():
            self.forms.clear()
            return forward(x, query_count)
        # graphs of one stream share workspaces of cuBLAS, so a step on another stream has a graph of its own
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        key = x.shape, x.dtype, stream, query_count is None, torch.are_deterministic_algorithms_enabled()
        if key not in self.forms:
            out = forward(x.contiguous(), query_count)
            self.forms[key] = None
            if len(self.forms) > MOST_FORMS:
                self.forms.popitem(last=False)
            return out
        cache.check_count(x.shape[1], query_count)
        graph = self.forms.pop(key) or self._captured(cache, x, query_count, forward)
        if graph is None:
            return forward(x, query_count)
        self.forms[key] = graph
        graph.x.copy_(x)
        if graph.query_count is not None and query_count is not None:
            graph.query_count.copy_(query_count, non_blocking=True)
        graph.capture.replay()
        # the next replay writes into the graph's own
        return graph.out.clone()

    def _captured(self, cache: Any, x: Tensor, query_count: Tensor | None, forward: Forward) -> _Graph | None:
        """Return the captured step; None if it could not be captured and `may_fail`."""
        # a tensor made in inference mode takes no copy outside of it
        with torch.inference_mode(False):
            static_x = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            static_count = None if query_count is None else torch.zeros(query_count.shape, dtype=torch.int32, device=x.device)
        capture = self.make_capture()
        try:
            out = capture.capture(lambda: forward(static_x, static_count), static_x)
        except Exception as error:
            if not self.may_fail:
                raise
            self.has_failed = True
            self.forms.clear()
            warnings.warn(
                f"a step of the static cache could not be captured as a CUDA graph ({error}), so all of its steps run eagerly; "
                "new_cache(..., step_graphs=False) does so from the start",
                stacklevel=2,
            )
            return None
        if cache.read_counter is not None:
            # it would keep memory of the graph
            cache.read_counter.forget()
        return _Graph(capture, static_x, static_count, out)


def _may_replace(x: Tensor, query_count: Tensor | None) -> bool:
    """Return True for a step of few rows of plain tensors, outside gradients, autocast, a traced graph and a user's capture."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not 0 < x.shape[1] <= MOST_ROWS or not x.shape[0]:
        return False
    is_plain = type(x) in (Tensor, nn.Parameter) and (query_count is None or type(query_count) is Tensor)
    return is_plain and not torch.is_autocast_enabled(x.device.type) and not is_captured(x.device)
