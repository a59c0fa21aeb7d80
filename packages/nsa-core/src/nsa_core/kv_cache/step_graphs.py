"""CUDA graphs of the steps of static caches. An ordinary call of a layer, or of a model of several layers, captures and replays them.

The first step of a form (shape, dtype, stream and so on) runs eagerly, so that its kernels are compiled and loaded. The second is captured,
which runs no kernel, and then replayed. A graph reads weights and stores by address, and keeps the kernels that were captured. If a weight,
a store or a setting changes, all graphs are dropped.
"""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from nsa_core.kv_cache.streams import NUM_SIDE_STREAMS, is_captured, side_stream

MOST_FORMS = 4
"""Maximum number of forms of steps that a cache keeps, captured or seen once; the least recently used form is dropped first."""
MOST_ROWS = 16
"""Maximum number of rows per sequence in a captured step. In longer steps kernels take longer than their launches, and graphs take much memory."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
SETTINGS = ("config", "registry", "telemetry")
"""Attributes of a module that decide what its forward does."""
PARTS = ("bounds", "stores", "pages")
"""Attributes of a cache that hold tensors."""
KNOWN = ("nsa_core", "torch")
"""Packages whose modules a graph may hold: their forward depends only on tensors and on what `_Wiring` compares. An adapter's module may have a
switch or a factor of its own; a replay would not notice that it changed."""

Forward = Callable[[Tensor, Tensor | None], Tensor]
"""A function that runs a step: takes x `(B, m, hidden_size)` and query_count int32 (B,) or None, and returns the output, of x's shape."""


class Capture(Protocol):
    """One captured step."""

    def capture(self, body: Callable[[], Tensor], x: Tensor) -> Tensor:
        """Capture `body`, without running its kernels, and return the tensor into which `replay` writes its result. `x` is the step's input."""
        ...

    def replay(self) -> None:
        """Run the step on the current stream."""
        ...


class CudaCapture:
    """A CUDA graph in a memory pool of its own. Capturing waits for the GPU; a replay does not."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, body: Callable[[], Tensor], x: Tensor) -> Tensor:
        """Capture `body` on a side stream. All graphs of one current stream use the same side stream, so they share its cuBLAS workspaces."""
        with torch.cuda.device(x.device):
            current = torch.cuda.current_stream()
            stream = side_stream(current, NUM_SIDE_STREAMS)
            _load_products(x, stream)
            try:
                # thread_local: other threads may still make the calls that a capture forbids
                with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                    return body()
            except BaseException:
                _free_generator(x, stream)
                raise
            finally:
                # if a capture fails, torch raises before it leaves the side stream
                torch.cuda.set_stream(current)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


def _free_generator(x: Tensor, stream: torch.cuda.Stream) -> None:
    """Capture an addition after a failed capture. torch leaves its random generator in the failed capture, where it refuses every draw."""
    # errors here are dropped, so that the caller gets the error of the failed capture
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        x + 1


def _load_products(x: Tensor, stream: torch.cuda.Stream) -> None:
    """Run a product on the stream of a capture and on its side streams, so that cuBLAS allocates their workspaces outside the graph's pool."""
    rows = x.flatten(0, 1)
    for each in (stream, *(side_stream(stream, number) for number in range(NUM_SIDE_STREAMS))):
        each.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(each):
            rows @ rows.t()
        torch.cuda.current_stream().wait_stream(each)


class _Entries:
    """Values that must not change: `owners[i][names[i]]` stays the same object, a tensor also at the same address.

    Every step compares them, so the comparison uses functions that run in C.
    """

    def __init__(self) -> None:
        self.owners: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []

    def add(self, owner: dict[str, Any], name: str) -> None:
        """Note the value of `owner[name]`, or None if there is no such entry."""
        value = owner.get(name)
        self.owners.append(owner)
        self.names.append(name)
        self.values.append(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self.addresses.append(value.data_ptr())

    def hold(self, owners: Iterable[dict[str, Any]] | None = None) -> bool:
        """Return True if no value has changed. `owners`, if given, replaces the owners that `add` noted."""
        found = map(dict.get, self.owners if owners is None else owners, self.names)
        return all(map(is_, found, self.values)) and list(map(Tensor.data_ptr, self.tensors)) == self.addresses


class _Wiring:
    """The tensors of a module and its caches that graphs read by address, and the settings that decide their kernels.

    It holds references to the weights, because a graph must not outlive them.
    """

    def __init__(self, module: nn.Module, caches: Sequence[Any], known: tuple[str, ...]) -> None:
        self.module = weakref.ref(module)
        self.hooks: list[dict[Any, Any]] = []
        self.entries = _Entries()
        plain = [self._note_module(part, part is module, known) for part in module.modules()]
        self.is_plain = all(plain)
        self.of_caches = [self._note_cache(cache) for cache in caches]

    def _note_module(self, part: nn.Module, is_own: bool, known: tuple[str, ...]) -> bool:
        """Note settings, hooks and weights of `part`; return True if a graph may hold it."""
        state = part.__dict__
        self.hooks += [state[name] for name in HOOKS]
        for name in (*(name for name in SETTINGS if name in state), "training", "forward"):
            self.entries.add(state, name)
        for owner in (part._parameters, part._buffers, part._modules):
            for name in owner:
                self.entries.add(owner, name)
        weights = [x for owner in (part._parameters, part._buffers) for x in owner.values() if x is not None]
        # a shard, and a weight that is loaded only when its module is called, have no fixed address that a graph could keep
        are_whole = all(type(x) in (Tensor, nn.Parameter) and not x.is_meta for x in weights)
        is_known = is_own or type(part).__module__.partition(".")[0] in known
        return is_known and are_whole and not part.training and "forward" not in state and state.get("telemetry") is None

    def _note_cache(self, cache: Any) -> _Entries:
        """Note the tensors of the parts of `cache`, and return its own attributes by name, without a reference to `cache`, which holds the graphs."""
        own, state = _Entries(), vars(cache)
        for name in (*(name for name, value in state.items() if isinstance(value, Tensor)), *PARTS, "read_counter"):
            own.add(state, name)
        own.owners.clear()
        for part in (state[name] for name in PARTS if state.get(name) is not None):
            for name, value in vars(part).items():
                owner = value if isinstance(value, dict) else vars(part)
                for each in value if isinstance(value, dict) else (name,):
                    if isinstance(owner[each], Tensor):
                        self.entries.add(owner, each)
        return own

    def holds(self, module: nn.Module, caches: Sequence[Any]) -> bool:
        """Return True if `module` is the same, and no noted value has changed."""
        if self.module() is not module or len(caches) != len(self.of_caches):
            return False
        return all(entries.hold(repeat(vars(cache))) for entries, cache in zip(self.of_caches, caches, strict=True)) and self.entries.hold()

    def may_capture(self) -> bool:
        """Return True if a graph may hold all parts of the module, and there are no hooks."""
        return self.is_plain and not any(self.hooks) and not modules._has_any_global_hook()


class _Graph(NamedTuple):
    """A captured step, and the tensors that its replay reads and writes."""

    capture: Capture
    x: Tensor
    query_count: Tensor | None
    out: Tensor


class StepGraphs:
    """The captured steps of one cache, or of the caches of a model's layers: one graph per form of step. It holds no reference to the caches."""

    def __init__(
        self, make_capture: Callable[[], Capture] = CudaCapture, *, may_fail: bool = False, known: tuple[str, ...] = KNOWN
    ) -> None:
        """Start without a graph.

        `make_capture` makes the object that captures and replays a step. `may_fail`: after a capture that fails, all steps run eagerly.
        `known`: packages whose modules a graph may hold.
        """
        self.make_capture, self.may_fail, self.known = make_capture, may_fail, known
        self.has_failed = False
        self.forms: OrderedDict[tuple[Any, ...], _Graph | None] = OrderedDict()
        """Form of step -> its graph; None if the form ran eagerly once."""
        self._wiring: _Wiring | None = None

    def __reduce__(self) -> tuple[Callable[..., "StepGraphs"], tuple[()]]:
        """Let copies and unpickled objects start without graphs, because graphs read the tensors of this cache and hold the layer's weights."""
        return partial(StepGraphs, self.make_capture, may_fail=self.may_fail, known=self.known), ()

    def run(self, module: nn.Module, caches: Sequence[Any], x: Tensor, query_count: Tensor | None, forward: Forward) -> Tensor:
        """Return `forward(x, query_count)`, the step of `module` over the static `caches`; if possible, replay a graph instead of the call.

        x is made contiguous in every step that a graph may replace, because a product with a bias rounds differently for rows that are not
        contiguous.
        """
        if self.has_failed or not _may_replace(x, query_count):
            return forward(x, query_count)
        if self._wiring is None or not self._wiring.holds(module, caches):
            self.forms.clear()
            self._wiring = _Wiring(module, caches, self.known)
        if not self._wiring.may_capture():
            self.forms.clear()
            return forward(x, query_count)
        # graphs of one stream share cuBLAS workspaces, so a step on another stream needs its own graph
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        key = x.shape, x.dtype, stream, query_count is None, torch.are_deterministic_algorithms_enabled()
        if key not in self.forms:
            out = forward(x.contiguous(), query_count)
            self.forms[key] = None
            if len(self.forms) > MOST_FORMS:
                self.forms.popitem(last=False)
            return out
        if query_count is not None:
            for cache in caches:
                cache.check_count(x.shape[1], query_count)
        graph = self.forms.pop(key) or self._captured(caches, x, query_count, forward)
        if graph is None:
            return forward(x, query_count)
        self.forms[key] = graph
        graph.x.copy_(x)
        if graph.query_count is not None and query_count is not None:
            graph.query_count.copy_(query_count, non_blocking=True)
        graph.capture.replay()
        # the next replay overwrites graph.out
        return graph.out.clone()

    def _captured(self, caches: Sequence[Any], x: Tensor, query_count: Tensor | None, forward: Forward) -> _Graph | None:
        """Return the captured step; None if the capture failed and `may_fail` is True."""
        # a tensor made in inference mode cannot be written outside of it
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
                f"a step over static caches could not be captured as a CUDA graph ({error}), and is not tried again; "
                "step_graphs=False of the cache leaves the attempt out",
                stacklevel=2,
            )
            return None
        for cache in caches:
            if getattr(cache, "read_counter", None) is not None:
                # the counter holds tensors in the graph's memory
                cache.read_counter.forget()
        return _Graph(capture, static_x, static_count, out)


def _may_replace(x: Tensor, query_count: Tensor | None) -> bool:
    """Return True for a step of 1 to MOST_ROWS rows of plain tensors, without gradients, autocast, tracing or a capture by the user."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not 0 < x.shape[1] <= MOST_ROWS or not x.shape[0]:
        return False
    is_plain = type(x) in (Tensor, nn.Parameter) and (query_count is None or type(query_count) is Tensor)
    return is_plain and not torch.is_autocast_enabled(x.device.type) and not is_captured(x.device)
