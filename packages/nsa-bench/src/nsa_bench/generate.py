"""`nsa-bench generate`: tokens per second of text generation with NSA, and with dense models of the same sizes.

`nsa` is `generate` of nsa-transformers with a static cache, whose step is a CUDA graph on a GPU. `transformers` is `generate` of Transformers' own
dense model (SDPA) with a static cache, which it compiles on a GPU. `nsa graph` and `dense graph` are a step of the decoder without a sampling loop,
one CUDA graph of all layers on a GPU: NSA over the caches of a prompt, and the dense twin over full caches of fixed length by the fastest dense
kernel. Weights are random, and tokens are the likeliest ones.
"""

import gc
import time
from collections.abc import Callable, Collection
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from nsa_bench.baselines import dense_decode_kernels
from nsa_bench.cases import HeadShape, dtype_of, find_device, geometry_text, given, parse_geometry, parse_lengths, parse_shapes
from nsa_bench.errors import OptionError
from nsa_bench.measurement import back_to_back_ms, describe_failure, free_cached_memory, replay_of
from nsa_bench.options import GenerateOptions
from nsa_bench.reporting import collect
from nsa_bench.results import Output, number
from nsa_core.config import BlockGeometry
from nsa_core.decoder import Decoder
from nsa_core.dense_attention import DenseAttention
from nsa_core.testing.tolerances import largest, max_error

GPU_PROMPT, CPU_PROMPT = "8k,16k,64k", "128"
GPU_BATCH, CPU_BATCH = "1,16", "1"
WAYS = ("nsa", "nsa graph", "dense graph", "transformers")
OUR_WAYS = {"nsa", "nsa graph"}
"""The ways whose failure is an error of the command."""
SETTLING = 4
"""Tokens of a generation, after the first, that are not timed: steps are captured then."""
GENERATIONS = 3
LOOPS, LOOP_STEPS = 3, 20
"""Number of loops. The time of a step by graph is the median of the loops' times, each divided by its number of steps."""
ROOM = 2 + LOOPS * LOOP_STEPS + 1
"""All steps of a measurement by graph: those before and during the capture, the warm-up, and the loops."""


@frozen(kw_only=True)
class GenerateCase:
    """A model's sizes, and prompts of one length."""

    shape: HeadShape
    hidden_size: int
    num_layers: int
    vocab_size: int
    prompt: int
    batch: int
    new_tokens: int
    kv: str
    """One K and V for all branches ("shared"), or K and V of each branch ("separate")."""
    compressor: str
    """phi."""
    geometry: BlockGeometry
    dtype: torch.dtype

    @property
    def context(self) -> int:
        """Return the tokens of a sequence when it ends."""
        return self.prompt + self.num_generated

    @property
    def num_generated(self) -> int:
        """Return the number of new tokens of a sequence: the first one, those before steps are captured, and those that are timed."""
        return 1 + SETTLING + self.new_tokens

    def model_config(self, attention: str) -> Any:
        """Return the `NSAModelConfig` of the model with `attention`, "nsa" or "dense".

        Raises:
            ConfigError: if the sizes do not fit one another.
        """
        from nsa_transformers import NSAModelConfig

        return NSAModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.shape.num_heads,
            num_key_value_heads=self.shape.num_kv_heads,
            head_dim_qk=self.shape.head_dim_qk,
            head_dim_v=self.shape.head_dim_v,
            max_position_embeddings=self.context,
            attention=attention,
            nsa={"kv": self.kv, "compressor": self.compressor, **attrs.asdict(self.geometry)},
        )

    def __str__(self) -> str:
        return f"{self.num_layers} layers of {self.shape}, prompt {self.prompt}, batch {self.batch}"


@frozen(kw_only=True)
class GenerateResult:
    """The figures of one case. If a way of generation has no figure, it has a reason."""

    case: GenerateCase
    step_ms: dict[str, float] = attrs.field(factory=dict)
    """Way -> time of a new token of every sequence."""
    prompt_ms: dict[str, float] = attrs.field(factory=dict)
    """Way -> time until the first new token, of the ways with a sampling loop."""
    reasons: dict[str, str] = attrs.field(factory=dict)
    kernel: str = ""
    """The dense kernel of `dense graph`."""

    def tokens_per_second(self, way: str) -> float | None:
        """Return new tokens of all sequences per second."""
        step = self.step_ms.get(way)
        return None if step is None else 1e3 * self.case.batch / step


def make_generate_cases(options: GenerateOptions) -> tuple[GenerateCase, ...]:
    """Return the cases that `options` describe.

    Raises:
        OptionError: if options are invalid.
    """
    device = find_device(options.device)
    is_gpu = device.type == "cuda"
    prompts = parse_lengths(given(options.prompt, GPU_PROMPT if is_gpu else CPU_PROMPT), "--prompt")
    batches = parse_lengths(given(options.batch, GPU_BATCH if is_gpu else CPU_BATCH), "--batch")
    if options.new < 1:
        raise OptionError(f"--new={options.new} generates nothing; use 64")
    cases = tuple(
        GenerateCase(
            shape=shape, hidden_size=options.hidden, num_layers=options.layers, vocab_size=options.vocab, prompt=prompt, batch=batch,
            new_tokens=options.new, kv=options.kv, compressor=options.compressor, geometry=parse_geometry(options.geometry),
            dtype=dtype_of(options.dtype, device.type),
        )
        for shape, prompt, batch in product(parse_shapes(options.shapes), prompts, batches)
    )  # fmt: skip
    for case in cases:
        case.model_config("nsa")
    return cases


def run_generate(options: GenerateOptions, output: Output) -> list[GenerateResult]:
    """Measure the cases of `options`, print the table, write the files after every case, and return the results."""

    def lines(one: GenerateResult) -> str:
        rates = ", ".join(f"{way} {number(one.tokens_per_second(way))}" for way in WAYS)
        return "\n".join([f"{one.case}: {rates} tokens/s", *(f"{way}: {reason}" for way, reason in one.reasons.items())])

    device = find_device(options.device)
    found = (measure_generate(case, device) for case in make_generate_cases(options))
    results = collect(found, attrs.asdict(options), output, lines, to_rows)
    output.show(generate_table(results))
    return results


@torch.no_grad()
def measure_generate(case: GenerateCase, device: torch.device) -> GenerateResult:
    """Return the figures of all ways, one after another."""
    result = GenerateResult(case=case)
    ways: dict[str, Callable[[GenerateCase, torch.device], dict[str, Any]]] = {
        "nsa": _nsa, "nsa graph": _nsa_by_graph, "dense graph": _dense_by_graph, "transformers": _by_transformers,
    }  # fmt: skip
    for way, measure in ways.items():
        # sizes of earlier cases would be compiled as symbols, and a compiled model is a cycle of references
        torch.compiler.reset()
        gc.collect()
        free_cached_memory(device)
        try:
            found = measure(case, device)
        except Exception as error:  # noqa: BLE001 - one way's failure is a result, not the end of the others
            result = attrs.evolve(result, reasons=result.reasons | {way: describe_failure(error)})
            continue
        result = attrs.evolve(
            result,
            step_ms=result.step_ms | {way: found["step_ms"]},
            prompt_ms=result.prompt_ms | ({way: found["prompt_ms"]} if "prompt_ms" in found else {}),
            kernel=found.get("kernel", result.kernel),
        )
    return result


def _nsa(case: GenerateCase, device: torch.device) -> dict[str, Any]:
    from nsa_transformers import NSAForCausalLM

    torch.manual_seed(0)
    model = NSAForCausalLM(case.model_config("nsa")).to(device, case.dtype).eval()
    return times_of_generate(model, case, device)


def _by_transformers(case: GenerateCase, device: torch.device) -> dict[str, Any]:
    from nsa_transformers import NSAForCausalLM
    from nsa_transformers.conversion import dense_form

    torch.manual_seed(0)
    twin = NSAForCausalLM(case.model_config("dense"))
    model = dense_form(twin.config, twin.state_dict()).new_model("sdpa").to(device, case.dtype).eval()
    return times_of_generate(model, case, device)


class Stamps:
    """A logits processor that changes nothing, and records the time at which the logits of the tokens with numbers `noted` are ready.

    It waits for the GPU at these tokens only, because otherwise the loop on the host may run ahead of the GPU.
    """

    def __init__(self, noted: Collection[int], device: torch.device) -> None:
        self.noted, self.device = noted, device
        self.count = 0
        self.times: list[float] = []
        """Seconds."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the time."""
        if self.count in self.noted:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.times.append(time.perf_counter())
        self.count += 1
        return scores


def times_of_generate(model: Any, case: GenerateCase, device: torch.device) -> dict[str, float]:
    """Return medians over GENERATIONS, in ms: the time until the first token, and the mean time of a token after SETTLING more tokens."""
    prompt = torch.randint(0, case.vocab_size, (case.batch, case.prompt), device=device)

    def generated() -> tuple[float, list[float]]:
        stamps, began = Stamps((0, SETTLING, case.num_generated - 1), device), time.perf_counter()
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=case.num_generated, do_sample=False,
            cache_implementation="static", logits_processor=[stamps],
        )  # fmt: skip
        assert ids.shape == (case.batch, case.context), "the models have no id that ends a text"
        return began, stamps.times

    # kernels are compiled
    generated()
    runs = [generated() for _ in range(GENERATIONS)]
    return {
        "prompt_ms": 1e3 * median(first - began for began, (first, *_) in runs),
        "step_ms": 1e3 * median(last - settled for _, (_, settled, last) in runs) / case.new_tokens,
    }


def _nsa_by_graph(case: GenerateCase, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    with device:
        step = NSAStep(case.model_config("nsa"), case).to(device, case.dtype).eval()
        step.fill()
    call = replay_of(step, device) if device.type == "cuda" else step
    times = {"step_ms": back_to_back_ms(call, device, warm_ups=1, loops=LOOPS, count=LOOP_STEPS)}
    for cache in step.caches:
        cache.check()
    return times


class Step(nn.Module):
    """A step of a decoder: the next token of every sequence."""

    def __init__(self, decoder: Decoder, batch: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.register_buffer("ids", torch.zeros(batch, 1, dtype=torch.long), persistent=False)

    def logits(self) -> Tensor:
        """Return the logits `(B, 1, vocab_size)` of the current ids."""
        raise NotImplementedError

    def forward(self) -> Tensor:
        """Return the next ids `(B, 1)`, which the next call reads."""
        return self.get_buffer("ids").copy_(self.logits()[:, -1].argmax(-1, keepdim=True))


class NSAStep(Step):
    """A step of an NSA decoder over static caches, to which it appends its token."""

    def __init__(self, config: Any, case: GenerateCase) -> None:
        """Build the decoder of `config`, an `NSAModelConfig`."""
        super().__init__(Decoder(config.sizes(), [layer.build for layer in config.decoder_layers()]), case.batch)
        self.case = case
        self.caches: list[Any] = []

    def fill(self) -> None:
        """Read a random prompt into new caches, which have room for the steps of a measurement."""
        case = self.case
        self.caches = self.decoder.new_caches(case.batch, case.prompt + ROOM, static=True, count_reads=False)
        self.decoder.hidden(self.decoder.embedding(torch.randint(0, case.vocab_size, (case.batch, case.prompt))), caches=self.caches)

    def logits(self) -> Tensor:
        """Append the current ids to the caches and return their logits."""
        found: Tensor = self.decoder(self.get_buffer("ids"), caches=self.caches)
        return found


def _dense_by_graph(case: GenerateCase, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    with device:
        step = DenseStep(case.model_config("dense"), case).to(device, case.dtype).eval()
    times: dict[str, float] = {}
    faults: list[str] = []
    expected: Tensor | None = None
    for kernel in step.kernels():
        try:
            step.use(kernel)
            logits = step.logits()
            expected = logits if expected is None else expected
            # rounding differs between kernels in every layer; with heads mixed up, the difference is far larger
            if max_error(logits, expected) > 2**-5 * largest(expected):
                raise RuntimeError("other logits than the first kernel")
            call = replay_of(step, device) if device.type == "cuda" else step
            times[kernel] = back_to_back_ms(call, device, warm_ups=1, loops=LOOPS, count=LOOP_STEPS)
        except Exception as error:  # noqa: BLE001 - an absent kernel may raise anything; another one serves
            faults.append(f"{kernel}: {describe_failure(error)}")
    if not times:
        raise RuntimeError("; ".join(faults) or "there is no dense kernel")
    kernel = min(times, key=lambda name: times[name])
    return {"kernel": kernel, "step_ms": times[kernel]}


class DenseStep(Step):
    """A step of a dense decoder over full caches of random numbers, again and again at the same position."""

    def __init__(self, config: Any, case: GenerateCase) -> None:
        """Build the decoder of `config`, an `NSAModelConfig` of dense layers."""
        layers = [partial(FullCacheAttention, layer.config, case) for layer in config.decoder_layers()]
        super().__init__(Decoder(config.sizes(), layers), case.batch)

    def kernels(self) -> list[str]:
        """Return the names of the dense kernels that may serve."""
        attention = self._attentions()[0]
        keys = attention.get_buffer("keys")
        return list(attention.kernels_of(keys.new_zeros(len(keys), attention.heads, attention.dim_qk)))

    def _attentions(self) -> list["FullCacheAttention"]:
        return [block.attention for block in self.decoder.blocks]  # type: ignore[misc]

    def use(self, kernel: str) -> None:
        """Let every layer attend by `kernel`, and begin again with the same ids."""
        self.get_buffer("ids").zero_()
        for attention in self._attentions():
            attention.kernel = kernel

    def logits(self) -> Tensor:
        """Return the logits of the current ids."""
        found: Tensor = self.decoder(self.get_buffer("ids"))
        return found


class FullCacheAttention(DenseAttention):
    """Dense attention of one new token of each sequence over a cache that it completes."""

    kernel = "torch math"

    def __init__(self, config: Any, case: GenerateCase) -> None:
        super().__init__(config)
        # some kernels need values as wide as keys; the columns beyond are zeros
        width = max(self.dim_qk, self.dim_v)
        for name, columns in (("keys", self.dim_qk), ("values", width)):
            self.register_buffer(name, torch.randn(case.batch, case.context, self.kv_heads, columns, dtype=case.dtype), persistent=False)
        self.get_buffer("values")[..., self.dim_v :] = 0
        self.register_buffer("position", torch.tensor([case.context - 1]), persistent=False)

    def kernels_of(self, q: Tensor) -> dict[str, Callable[[], Any]]:
        """Return dense attention of q `(B, H, D_k)` over the cache, by the names of the kernels."""
        return dense_decode_kernels(q, self.get_buffer("keys"), self.get_buffer("values"))

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Return `(B, 1, hidden)` for x of the same shape; the keys and values of x become the last ones of the cache."""
        keys, values, position = self.get_buffer("keys"), self.get_buffer("values"), self.get_buffer("position")
        q, k = self._projected(x)
        keys[:, -1:] = self.rope(k, position)
        values[:, -1:, :, : self.dim_v] = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim_v))
        attended = self.kernels_of(self.rope(q, position)[:, 0])[self.kernel]()
        # SDPA gives (B, G, H/G, D); flash-attn (B, H/G, G, D), some versions with the lse
        attended = attended[0] if isinstance(attended, tuple) else attended
        heads = attended if self.kernel.startswith("torch ") else attended.transpose(1, 2)
        out: Tensor = self.o_proj(heads[..., : self.dim_v].flatten(1).unsqueeze(1))
        return out


def to_rows(results: list[GenerateResult], common: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the files: a row per case and way."""
    return {"rows": [_row(one, way, common) for one in results for way in WAYS]}


def _row(one: GenerateResult, way: str, common: dict[str, Any]) -> dict[str, Any]:
    case, shape = one.case, one.case.shape
    return {
        "way": way, "prompt": case.prompt, "new_tokens": case.new_tokens, "batch": case.batch, "num_layers": case.num_layers,
        "hidden_size": case.hidden_size, "vocab_size": case.vocab_size, "shape": shape.name, "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads, "head_dim_qk": shape.head_dim_qk, "head_dim_v": shape.head_dim_v,
        "kv": case.kv, "compressor": case.compressor, "geometry": geometry_text(case.geometry),
        "dtype": str(case.dtype).removeprefix("torch."),
        "tokens_per_s": one.tokens_per_second(way), "ms_step": one.step_ms.get(way), "ms_prompt": one.prompt_ms.get(way),
        "kernel": one.kernel if way == "dense graph" else "", "reason": one.reasons.get(way, ""), **common,
    }  # fmt: skip


def generate_table(results: list[GenerateResult]) -> Table:
    """Return a line per case: new tokens per second by each way."""
    table = Table("case", *WAYS, title="generate, tokens/s")
    for one in results:
        table.add_row(Text(str(one.case)), *(number(one.tokens_per_second(way)) for way in WAYS))
    return table
