"""The attention layer `NativeSparseAttention`: projections, RoPE, compression and gates around `nsa_attention`, with or without a cache."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nsa_core import checks
from nsa_core.attention import append_rows, attend_branches, rotate_heads
from nsa_core.backends.base import Keys, NewBlocks, NewRows, Queries
from nsa_core.backends.registry import BackendRegistry
from nsa_core.compression import block_windows, build_compressor
from nsa_core.config import BRANCHES, NSAConfig
from nsa_core.dispatch import Call, make_call, registry_of
from nsa_core.errors import InputError, type_of
from nsa_core.gating import GateMLP, gates_from_logits
from nsa_core.kv_cache import DEFAULT_MAX_ROLLBACK, RINGS, CacheOptions, NSACache, Step, streams
from nsa_core.operands import keys_of, queries_of
from nsa_core.reference.rows import positions_of
from nsa_core.rope import RotaryEmbedding, rotate, unrotated
from nsa_core.selection_loss import SelectionLoss
from nsa_core.telemetry import AttentionObserver, LayerTelemetry
from nsa_core.varlen import positions_from_cu_seqlens

Rotate = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""A function that applies RoPE to tensors `(B, S, heads, D_k)`."""


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """Return `(B, S, heads, head_dim)` of `(B, S, heads * head_dim)`: all heads, or this rank's share of them."""
    return projected.view(*projected.shape[:-1], projected.shape[-1] // head_dim, head_dim)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head of x (..., D). It computes in at least float32 and returns x's dtype."""

    def __init__(self, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__(head_dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight."""
        wide = torch.promote_types(x.dtype, torch.float32)
        # where x or 2 * x (the derivative of the square) overflows, a gradient of 0 would become 0 * inf = NaN without the clamp;
        # finite numbers above the limit give 0 with and without it, because their squares overflow
        limit = min(torch.finfo(x.dtype).max, torch.finfo(wide).max / 4)
        clamped = x.clamp(-limit, limit).to(wide)
        return nn.functional.rms_norm(clamped, self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)


def _of(module: nn.Module, branch: str) -> nn.Module:
    """Return the module of `branch`: `module` itself if all branches share it."""
    return module[branch] if isinstance(module, nn.ModuleDict) else module


def _positions(total: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Return int64 `(total,)`: each row's position in its own sequence."""
    return torch.arange(total, device=device) if cu_seqlens is None else positions_from_cu_seqlens(cu_seqlens, total)


class NativeSparseAttention(nn.Module):
    """Native Sparse Attention as a drop-in layer: x (B, S, hidden_size) -> (B, S, hidden_size) (arXiv 2502.11089).

    All branches share one query projection, and each has its own K and V projection (section 3.3.3). If `branches` has "slc" but not
    "cmp", the layer still computes compressed keys to choose blocks. No gradient reaches their projection and phi, so both are frozen.

    With `kv="shared"` one `k_proj` and one `v_proj` serve all branches, under the names and shapes of dense attention. The selected and
    the sliding branch read the same rotated keys and the same values; the compressed branch reads phi of the keys and of the values.
    Then "slc" without "cmp" chooses blocks by phi of the trained keys, and only the parameters of phi are frozen.
    """

    def __init__(self, config: NSAConfig, *, registry: BackendRegistry | None = None) -> None:
        """Build the layer that `config` describes. `registry` has the backends to choose from; None: the backends of the installed packages.

        Raises:
            InputError: if `config` is no NSAConfig, or `registry` no BackendRegistry.
        """
        checks.check_config(config)
        super().__init__()
        self.config = config
        self.registry = None if registry is None else registry_of(registry)
        self.telemetry: LayerTelemetry | None = None
        """Attach a `LayerTelemetry` to record every forward pass; None records nothing."""
        self.selection_loss: SelectionLoss | None = None
        """Attach a `SelectionLoss` to compute the auxiliary loss of the block choice in each training pass; None computes none."""
        hidden, kv_heads = config.hidden_size, config.num_kv_heads
        self.q_proj = nn.Linear(hidden, config.num_heads * config.head_dim_qk, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim_v, hidden, bias=False)
        self._build_keys_values(config)
        self.gate = GateMLP(hidden, config.num_heads, config.gate_hidden_size)
        self.rope = RotaryEmbedding(config.head_dim_qk, config.rope_theta, config.rope_scaling)
        if self._has_compressed_keys:
            self.compress_k = build_compressor(config.compressor, kv_heads, config.head_dim_qk, config.geometry)
        if "cmp" in config.branches:
            self.compress_v = build_compressor(config.compressor, kv_heads, config.head_dim_v, config.geometry)
        self.freeze_choice()

    def _build_keys_values(self, config: NSAConfig) -> None:
        """Make `k_proj`, `v_proj` and `k_norm`: plain modules if all branches share them, else one per branch."""

        def by_branch(make: Callable[[], nn.Module], branches: Iterable[str]) -> nn.Module:
            return make() if config.kv == "shared" else nn.ModuleDict({name: make() for name in branches})

        hidden, kv_heads, dim_qk, dim_v = config.hidden_size, config.num_kv_heads, config.head_dim_qk, config.head_dim_v
        with_keys = [branch for branch in BRANCHES if branch in config.branches or (branch == "cmp" and self._only_chooses)]
        self.k_proj = by_branch(lambda: nn.Linear(hidden, kv_heads * dim_qk, bias=config.qkv_bias), with_keys)
        self.v_proj = by_branch(lambda: nn.Linear(hidden, kv_heads * dim_v, bias=config.qkv_bias), config.branches)
        if config.qk_norm:
            self.q_norm = HeadNorm(dim_qk, config.qk_norm_eps)
            self.k_norm = by_branch(lambda: HeadNorm(dim_qk, config.qk_norm_eps), with_keys)

    @property
    def _only_chooses(self) -> bool:
        """Return True if compressed keys exist only to choose blocks."""
        return "slc" in self.config.branches and "cmp" not in self.config.branches

    @property
    def _has_compressed_keys(self) -> bool:
        return "cmp" in self.config.branches or "slc" in self.config.branches

    def freeze_choice(self) -> None:
        """Freeze the parameters that only the choice of blocks reads, because the choice has no gradient: those of a layer with slc, without cmp."""
        if not self._only_chooses:
            return
        self.compress_k.requires_grad_(False)
        if self.config.kv == "shared":
            return
        _of(self.k_proj, "cmp").requires_grad_(False)
        if self.config.qk_norm:
            _of(self.k_norm, "cmp").requires_grad_(False)

    def new_cache(
        self,
        batch_size: int,
        max_seqlen: int | None = None,
        *,
        static: bool = False,
        page_size: int | None = None,
        num_pages: int | None = None,
        kv_dtype: torch.dtype | None = None,
        max_rollback: int = DEFAULT_MAX_ROLLBACK,
        keep_raw: bool = False,
        count_reads: bool = True,
        step_graphs: bool | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> NSACache:
        """Return an empty cache for `batch_size` sequences of at most `max_seqlen` tokens (None: no bound).

        `CacheOptions` describes the keywords from `static` to `step_graphs`. `dtype` None: the dtype of the weights, or the autocast dtype under
        autocast, unless the weights are float64. `device` None: the device of the weights.

        Raises:
            InputError: for sizes, options or a dtype that a cache does not support.
        """
        weight: Any = self.q_proj.weight
        if not checks.is_plain(weight):
            if dtype is None or device is None:
                raise InputError(
                    "q_proj keeps no weights of 16 bits or more (a cache takes its dtype and device from them); give new_cache dtype and device"
                )
            weight = torch.empty(0, dtype=dtype, device=device)
        # autocast leaves float64 as it is
        if (
            dtype is None
            and weight.dtype != torch.float64
            and weight.device.type != "meta"
            and torch.is_autocast_enabled(weight.device.type)
        ):
            dtype = torch.get_autocast_dtype(weight.device.type)
        options = CacheOptions(
            static=static,
            page_size=page_size,
            num_pages=num_pages,
            kv_dtype=kv_dtype,
            max_rollback=max_rollback,
            keep_raw=keep_raw,
            count_reads=count_reads,
            step_graphs=step_graphs,
        )
        return NSACache(
            self.config,
            batch_size,
            max_seqlen,
            options,
            num_kv_heads=self._num_kv_heads(),
            dtype=weight.dtype if dtype is None else dtype,
            device=weight.device if device is None else device,
        )

    def _num_kv_heads(self) -> int:
        """Return the number of KV heads on this rank: all of them, or this rank's share with tensor parallelism."""
        projection: Any = next(module for module in self.k_proj.modules() if isinstance(module, nn.Linear))
        # the rows of the weight would be a wrong count: FSDP shards them too
        return self.config.num_kv_heads // int(getattr(projection, "num_shares", 1))

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: NSACache | None = None,
        query_count: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of x `(B, S, hidden_size)` over itself and, with a cache, over the cached tokens.

        Args:
            x: `(B, S, hidden_size)`; packed: `(1, total, hidden_size)`.
            cu_seqlens: int32 (N + 1,), cumulative lengths of packed sequences; not with a cache or query_count.
            max_seqlen: upper bound on the tokens of a sequence, a Python int; a pass with a cache ignores it and warns.
            cache: holds the previous tokens; x is appended to it. A pass with a cache records no gradient.
            query_count: int32 (B,), the number of valid first rows of x per sequence (None: all S); the other rows give 0 and are
                not cached.

        Raises:
            InputError: for a wrong shape or an unsupported combination of arguments.
            CacheOverflowError: if the cache is too small.
        """
        self._check(x, cu_seqlens, max_seqlen, cache, query_count)
        if cache is not None:
            if max_seqlen is not None and not torch.compiler.is_compiling():
                warnings.warn(f"max_seqlen={max_seqlen} is not used with a cache (it knows its lengths); leave it out", stacklevel=2)
            if cache.graphs is None:
                return self._forward_cached(x, cache, query_count)
            return cache.graphs.run(self, (cache,), x, query_count, lambda rows, count: self._forward_cached(rows, cache, count))
        if query_count is not None:
            checks.check_count(query_count, x.shape[0], x.shape[1])
            query_count = query_count.to(x.device, non_blocking=True)
        return self._forward_whole(x, cu_seqlens, max_seqlen, query_count)

    @property
    def num_heads(self) -> int:
        """Return H."""
        return self.config.num_heads

    def queries_keys(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the rotated queries `(B, S, H, D_k)` and the selected branch's keys `(B, S, G, D_k)` of x `(B, S, hidden_size)`.

        Dense causal attention of these queries over these keys is the dense counterpart of the selected branch.

        Raises:
            InputError: for a layer without the selected branch.
        """
        if "slc" not in self.config.branches:
            raise InputError(f"branches={self.config.branches} have no selected keys (branch 'slc'); use a layer that has them")
        tables = self.rope.tables(_positions(x.shape[1], cu_seqlens, x.device))
        return rotate(self._queries(x), tables), rotate(self._keys(x, "slc"), tables)

    def _check(
        self, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, cache: NSACache | None, query_count: Tensor | None
    ) -> None:
        weight = self.q_proj.weight
        checks.check_hidden(x, self.config.hidden_size, weight)
        if cache is not None and not isinstance(cache, NSACache):
            raise InputError(f"cache is {type_of(cache)} (the rule: an NSACache); build it with this layer's new_cache")
        if cache is not None:
            checks.check_cache_dtype(x, cache.dtype, weight)
        if cu_seqlens is not None and (cache is not None or query_count is not None):
            raise InputError("cu_seqlens came with a cache or query_count (a packed batch holds whole sequences); drop one")
        if cache is not None and cache.batch_size != x.shape[0]:
            raise InputError(
                f"the cache holds {cache.batch_size} sequences, x has {x.shape[0]}; build it with new_cache({x.shape[0]}, ...)"
            )
        if cache is not None:
            checks.check_device("x", x, "the cache", cache.lengths)
            if cache.config is not self.config and cache.config != self.config:
                raise InputError("the cache was built for another config (its stores would not fit); use this layer's new_cache")

    def _forward_whole(self, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, query_count: Tensor | None) -> Tensor:
        placed = queries_of(x, cu_seqlens, max_seqlen, None, query_count)
        tables = self.rope.tables(_positions(x.shape[1], cu_seqlens, x.device))
        projected = self._queries(x), self._keys_by_name(x), self._values_by_name(x)
        q, rows = self._by_reader(*projected, lambda heads: tuple(rotate(each, tables) for each in heads))
        pairs = {"_cmp": self._compress_whole(*rows["raw"], cu_seqlens), "_slc": rows["slc"], "_win": rows["win"]}
        queries = placed._replace(q=q)
        raw, k_cmp, k_slc = rows["raw"][0], pairs["_cmp"][0], rows["slc"][0]
        auxiliary = self.selection_loss if self.training and torch.is_grad_enabled() else None
        if auxiliary is not None and raw is not None and k_cmp is not None and k_slc is not None:
            if self.config.kv == "shared" and not self._only_chooses:
                # the gradient of the loss stops at the tokens' keys, because the other branches read them
                k_cmp = self._compress_keys(raw.detach(), cu_seqlens)
            loss = auxiliary.take(
                queries.q,
                k_cmp,
                k_slc,
                geometry=self.config.geometry,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                query_count=query_count,
                share=self._num_kv_heads() / self.config.num_kv_heads,
            )
            if self.telemetry is not None:
                self.telemetry.record_selection_loss(loss)
        keys = keys_of(queries, pairs, self.config.geometry, max_seqlen)
        gates = self._gates(self.gate(x), queries)
        out = attend_branches(queries, keys, gates, self._absent, self._call(q, self.telemetry), are_gates_closed=True)
        y: Tensor = self.o_proj(out.flatten(-2))
        return y

    def _queries(self, x: Tensor) -> Tensor:
        """Return the queries `(B, S, H, D_k)` before RoPE."""
        q: Tensor = split_heads(self.q_proj(x), self.config.head_dim_qk)
        return self.q_norm(q) if self.config.qk_norm else q

    def _compress_whole(self, keys: Tensor | None, values: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the compressed keys and values of the tokens' keys and values; `compressed_rope` decides how the keys are rotated."""
        if keys is None:
            return None, None
        # the choice of blocks has no gradient, so autograd need not save anything for it
        k_cmp = self._compress_keys(keys.detach() if self._only_chooses else keys, cu_seqlens)
        v_cmp = None if values is None else self.compress_v(block_windows(values, self.config.geometry, cu_seqlens).tokens)
        return k_cmp, v_cmp

    def _compress_keys(self, keys: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Return the compressed keys `(B, C, G, D_k)` of the tokens' keys `(B, S, G, D_k)`; `compressed_rope` decides how they are rotated."""
        windows = block_windows(keys, self.config.geometry, cu_seqlens)
        return self._block_rotation(self.compress_k(windows.tokens), windows.last_positions)

    @property
    def _block_rotation(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function that rotates compressed keys at the positions of their last tokens; with "tokens" it changes nothing."""
        return self.rope if self.config.compressed_rope == "block_end" else unrotated

    @property
    def _readers(self) -> dict[str, str]:
        """Return a dict from each reader of keys and values to the projections that it reads: a branch's name, or "all" if they are shared.

        The readers "slc" and "win" are these branches; they read rotated keys. The reader "raw" is phi, which reads the tokens' keys and values.
        """
        readers = {"raw": "cmp"} if self._has_compressed_keys else {}
        readers |= {branch: branch for branch in ("slc", "win") if branch in self.config.branches}
        return dict.fromkeys(readers, "all") if self.config.kv == "shared" else readers

    @property
    def _readers_of_values(self) -> dict[str, str]:
        return {reader: name for reader, name in self._readers.items() if reader != "raw" or "cmp" in self.config.branches}

    def _keys_by_name(self, x: Tensor) -> dict[str, Tensor]:
        """Return the keys `(B, S, G, D_k)` that `_readers` names, before RoPE."""
        return {name: self._keys(x, name) for name in dict.fromkeys(self._readers.values())}

    def _values_by_name(self, x: Tensor) -> dict[str, Tensor]:
        """Return the values `(B, S, G, D_v)` that `_readers_of_values` names."""
        return {name: self._values(x, name) for name in dict.fromkeys(self._readers_of_values.values())}

    def _by_reader(
        self, q: Tensor, keys: dict[str, Tensor], values: dict[str, Tensor], rotate_all: Rotate
    ) -> tuple[Tensor, dict[str, tuple[Tensor | None, Tensor | None]]]:
        """Return the rotated q, and a dict from each reader (`_readers`) to its k and v, None for an absent branch.

        Readers that share k and v get the same tensors. `rotate_all` rotates q and the keys of every branch in one call.
        """
        on_tokens, with_values = self.config.compressed_rope == "tokens", self._readers_of_values
        names = [name for name in keys if name != "cmp" or on_tokens]
        q, *rotated = rotate_all((q, *(keys[name] for name in names)))
        rotated_keys = keys | dict(zip(names, rotated, strict=True))
        found: dict[str, tuple[Tensor | None, Tensor | None]] = dict.fromkeys(("raw", "slc", "win"), (None, None))
        for reader, name in self._readers.items():
            k = rotated_keys[name] if reader != "raw" or on_tokens else keys[name]
            found[reader] = k, values[name] if reader in with_values else None
        return q, found

    def _keys(self, x: Tensor, branch: str) -> Tensor:
        """Return a branch's keys `(B, S, G, D_k)` before RoPE."""
        keys = split_heads(_of(self.k_proj, branch)(x), self.config.head_dim_qk)
        return _of(self.k_norm, branch)(keys) if self.config.qk_norm else keys

    def _values(self, x: Tensor, branch: str) -> Tensor:
        return split_heads(_of(self.v_proj, branch)(x), self.config.head_dim_v)

    @torch.no_grad()
    def _forward_cached(self, x: Tensor, cache: NSACache, query_count: Tensor | None) -> Tensor:
        if not x.numel():
            cache.begin_step(x.shape[1], query_count)
            return torch.zeros_like(x)
        if torch.compiler.is_compiling() or cache.graphs is None or not streams.is_captured(x.device):
            return self._step(x, cache, query_count)
        with streams.joining_on_error(x.device):
            return self._step(x, cache, query_count)

    def _step(self, x: Tensor, cache: NSACache, query_count: Tensor | None) -> Tensor:
        """Return the output of a step.

        In a capture of a cache with `step_graphs`, independent work runs concurrently; see `kv_cache.streams`.
        """
        device = None if cache.graphs is None else x.device
        q = streams.fork(device, 0, lambda: self._queries(x))
        logits = streams.fork(device, 1, lambda: self.gate(x))
        values = streams.fork(device, 2, lambda: self._values_by_name(x))
        step = cache.begin_step(x.shape[1], query_count)
        unrotated_rows = Queries(q, x.shape[1], None, step.start, step.added)
        gates = streams.fork(device, 1, lambda: self._gates(logits, unrotated_rows))
        keys_by_name = self._keys_by_name(x)
        streams.join(device, 3)
        call = self._call(q, self.telemetry, cache.read_counter)
        queries, pairs = self._by_reader(q, keys_by_name, values, lambda heads: rotate_heads(heads, step.start, self.rope, call))
        rows = {name: cache.new_rows(name, k, v) for name, (k, v) in pairs.items() if k is not None and name in cache.keys}
        # the rings are written last if a retry of this step would need the tokens that they overwrite
        late = tuple(rows[name] for name in RINGS if name in rows and not step.in_place)
        keys = {
            "_cmp": self._append(cache, rows, step, call),
            "_slc": rows["slc"].store if "slc" in rows else None,
            "_win": cache.window(rows, step),
        }
        form, is_traced = (q.shape, q.dtype, step.in_place), torch.compiler.is_compiling()
        is_known = not is_traced and form in cache.known_forms
        # a compiler may move the operations that write q behind APPEND
        rotated = unrotated_rows._replace(q=queries, follows_append="slc" in rows and not is_traced)
        out = attend_branches(rotated, keys, gates, self._absent, call, is_known=is_known, are_gates_closed=True)
        if not (is_known or is_traced):
            cache.note_form(form)
        projected: Tensor = streams.fork(device, 0, lambda: self.o_proj(out.flatten(-2)))
        if late:
            append_rows(late, None, step.start, step.added, call)
        cache.end_step(step)
        streams.join(device, 1)
        return projected

    def _append(self, cache: NSACache, rows: dict[str, NewRows], step: Step, call: Call) -> Keys | None:
        """Write the step's rows and the blocks that they complete, and return the compressed keys and values. Rings are written only in place."""
        cmp, emitted = None, None
        if "raw" in rows:
            cmp = cache.stores.keys_of("cmp")
            emitted = NewBlocks(cmp, rows["raw"], self.compress_k, getattr(self, "compress_v", None), self._block_rotation)
        written = tuple(new for name, new in rows.items() if step.in_place or name not in RINGS)
        append_rows(written, emitted, step.start, step.added, call)
        return cmp

    def _gates(self, logits: Tensor, queries: Queries) -> Tensor:
        """Return the gates `(B, S, H, 3)` of logits of the same shape, and record them in the telemetry.

        `queries` gives the positions and the valid rows; the values of its q are not read.
        """
        config = self.config
        has_compressed = None
        # computed only if it is needed, because small operations dominate the time of a step
        if config.gate != "sigmoid" or self.telemetry is not None:
            has_compressed = positions_of(queries) >= config.geometry.compression_block_size - 1
            if "cmp" not in config.branches:
                has_compressed = torch.ones_like(has_compressed)
        gates = gates_from_logits(logits, has_compressed, kind=config.gate, temperature=config.gate_temperature, branches=config.branches)
        if self.telemetry is not None:
            assert has_compressed is not None
            num_rows = logits.shape[1]
            is_row = torch.arange(num_rows, device=logits.device) < (num_rows if queries.count is None else queries.count.unsqueeze(1))
            self.telemetry.record_gates(gates, has_compressed & is_row, config.branches)
        return gates

    @property
    def _absent(self) -> tuple[str, ...]:
        """Return the branches that are left out of the sum."""
        return tuple(name for name in BRANCHES if name not in self.config.branches)

    def _call(self, q: Tensor, *observers: AttentionObserver | None) -> Call:
        """Return the settings that all operations of a pass share."""
        present = tuple(observer for observer in observers if observer is not None)
        return make_call(q, self.config.geometry, None, self.config.backends, self.registry, present)
