"""CUDA graphs of the steps of static caches, captured and replayed by the ordinary call of a layer, or of a model of several.

The first step of a form runs eagerly, which compiles and loads its kernels. The second is captured, which runs nothing, and replayed. A graph
reads weights and stores by address, and keeps the kernels of its capture. If one of these changes, all graphs are dropped.
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
"""Forms of steps that a cache keeps, captured or seen once; the least recently used one is dropped first."""
MOST_ROWS = 16
"""Most rows of a sequence in a captured step. In longer steps kernels take longer than their launches, and graphs take much memory."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
SETTINGS = ("config", "registry", "telemetry")
"""Attributes of a module that decide what its forward does."""
PARTS = ("bounds", "stores", "pages")
"""Attributes of a cache that hold tensors."""
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
            except BaseException:
                _free_generator(x, stream)
                raise
            finally:
                # where a capture fails, torch raises before it leaves the stream
                torch.cuda.set_stream(current)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


def _free_generator(x: Tensor, stream: torch.cuda.Stream) -> None:
    """Capture an addition, after a capture that failed: torch leaves its random generator in that one, and then refuses every draw."""
    # the error that is raised is the first one
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        x + 1


def _load_products(x: Tensor, stream: torch.cuda.Stream) -> None:
    """Multiply on the stream of a capture and its side streams, so that their workspaces of cuBLAS lie outside the graph's pool."""
    rows = x.flatten(0, 1)
    for each in (stream, *(side_stream(stream, number) for number in range(NUM_SIDE_STREAMS))):
        each.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(each):
            rows @ rows.t()
        torch.cuda.current_stream().wait_stream(each)


class _Entries:
    """Values that must not change: `owners[i][names[i]]`, at the same address if it is a tensor. A step compares them in C."""

    def __init__(self) -> None:
        self.owners: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []

    def add(self, owner: dict[str, Any], name: str) -> None:
        """Note the value of `owner[name]`; None where there is none."""
        value = owner.get(name)
        self.owners.append(owner)
        self.names.append(name)
        self.values.append(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self.addresses.append(value.data_ptr())

    def hold(self, owners: Iterable[dict[str, Any]] | None = None) -> bool:
        """Return True if all are as they were; `owners`: in place of the noted ones."""
        found = map(dict.get, self.owners if owners is None else owners, self.names)
        return all(map(is_, found, self.values)) and list(map(Tensor.data_ptr, self.tensors)) == self.addresses


class _Wiring:
    """The tensors of a module and its caches that graphs read by address, and the settings that decide their kernels.

    It keeps the weights: a graph may not outlive them.
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
        # a shard, or a weight that comes when its module is called, has no address that a graph may keep
        are_whole = all(type(x) in (Tensor, nn.Parameter) and not x.is_meta for x in weights)
        is_known = is_own or type(part).__module__.partition(".")[0] in known
        return is_known and are_whole and not part.training and "forward" not in state and state.get("telemetry") is None

    def _note_cache(self, cache: Any) -> _Entries:
        """Note the tensors of the parts of `cache`; return its own attributes by name, since it keeps its graphs and they do not keep it."""
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
        """Return True if all of it is as it was, and `module` is the same."""
        if self.module() is not module or len(caches) != len(self.of_caches):
            return False
        return all(entries.hold(repeat(vars(cache))) for entries, cache in zip(self.of_caches, caches, strict=True)) and self.entries.hold()

    def may_capture(self) -> bool:
        """Return True for a module of known parts with whole weights, without hooks, telemetry or training."""
        return self.is_plain and not any(self.hooks) and not modules._has_any_global_hook()


class _Graph(NamedTuple):
    """A captured step, and the tensors that its replay reads and writes."""

    capture: Capture
    x: Tensor
    query_count: Tensor | None
    out: Tensor


class StepGraphs:
    """The graphs of one cache, or of those of a model's layers, by form of step. They hold no reference to the caches."""

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
        """None for a form that ran eagerly once."""
        self._wiring: _Wiring | None = None

    def __reduce__(self) -> tuple[Callable[..., "StepGraphs"], tuple[()]]:
        """Return what copies and unpickles as a value without graphs: they read the tensors of this cache, and hold the layer's weights."""
        return partial(StepGraphs, self.make_capture, may_fail=self.may_fail, known=self.known), ()

    def run(self, module: nn.Module, caches: Sequence[Any], x: Tensor, query_count: Tensor | None, forward: Forward) -> Tensor:
        """Return `forward(x, query_count)`, the step of `module` over the static `caches`, by a graph where one may replace it.

        x is made contiguous in every step that a graph may replace, because a product with a bias rounds differently for rows that are not.
        """
        if self.has_failed or not _may_replace(x, query_count):
            return forward(x, query_count)
        if self._wiring is None or not self._wiring.holds(module, caches):
            self.forms.clear()
            self._wiring = _Wiring(module, caches, self.known)
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
        # the next replay writes into the graph's own
        return graph.out.clone()

    def _captured(self, caches: Sequence[Any], x: Tensor, query_count: Tensor | None, forward: Forward) -> _Graph | None:
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
                f"a step over static caches could not be captured as a CUDA graph ({error}), and is not tried again; "
                "step_graphs=False of the cache leaves the attempt out",
                stacklevel=2,
            )
            return None
        for cache in caches:
            if getattr(cache, "read_counter", None) is not None:
                # it would keep memory of the graph
                cache.read_counter.forget()
        return _Graph(capture, static_x, static_count, out)


def _may_replace(x: Tensor, query_count: Tensor | None) -> bool:
    """Return True for a step of few rows of plain tensors, outside gradients, autocast, a traced graph and a user's capture."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not 0 < x.shape[1] <= MOST_ROWS or not x.shape[0]:
        return False
    is_plain = type(x) in (Tensor, nn.Parameter) and (query_count is None or type(query_count) is Tensor)
    return is_plain and not torch.is_autocast_enabled(x.device.type) and not is_captured(x.device)
