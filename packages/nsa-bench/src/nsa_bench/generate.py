"""`nsa-bench generate`: tokens per second of text generation with NSA, and with two dense models of the same sizes.

`nsa` is `generate` of nsa-transformers with a static cache. `transformers` is `generate` of Transformers' own dense model (SDPA) with a static cache,
which it compiles on a GPU. `graph` is a step of the dense twin over a full cache of fixed length, by the fastest dense kernel there is: on a GPU
a CUDA graph of all layers, without a sampling loop. Weights are random, and tokens are the likeliest ones.
"""

import time
from collections.abc import Callable, Iterator
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
from nsa_bench.measurement import common_columns, describe_failure, free_cached_memory, replay_of, time_call
from nsa_bench.options import GenerateOptions
from nsa_bench.reporting import number
from nsa_bench.results import Output
from nsa_core.config import BlockGeometry
from nsa_core.decoder import Decoder
from nsa_core.dense_attention import DenseAttention

GPU_PROMPT, CPU_PROMPT = "8k,16k,64k", "128"
GPU_BATCH, CPU_BATCH = "1,16", "1"
WAYS = ("nsa", "graph", "transformers")
RUNS = 3
"""Generations of each length whose median time counts."""


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
    geometry: BlockGeometry
    dtype: torch.dtype

    @property
    def context(self) -> int:
        """Return the tokens of a sequence when it ends."""
        return self.prompt + self.new_tokens + 1

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
            nsa=attrs.asdict(self.geometry),
        )

    def __str__(self) -> str:
        return f"{self.num_layers} layers of {self.shape}, prompt {self.prompt}, batch {self.batch}"


@frozen(kw_only=True)
class GenerateResult:
    """The figures of one case. A way without a figure has a reason."""

    case: GenerateCase
    step_ms: dict[str, float] = attrs.field(factory=dict)
    """Way -> time of a new token of every sequence."""
    prompt_ms: dict[str, float] = attrs.field(factory=dict)
    """Way -> time until the first new token; `graph` reads no prompt."""
    reasons: dict[str, str] = attrs.field(factory=dict)
    kernel: str = ""
    """The dense kernel of `graph`."""

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
            new_tokens=options.new, geometry=parse_geometry(options.geometry), dtype=dtype_of(options.dtype, device.type),
        )
        for shape, prompt, batch in product(parse_shapes(options.shapes), prompts, batches)
    )  # fmt: skip
    for case in cases:
        case.model_config("nsa")
    return cases


def run_generate(options: GenerateOptions, output: Output) -> list[GenerateResult]:
    """Measure the cases of `options`, print the table, write the files after every case, and return the results."""
    cases, device = make_generate_cases(options), find_device(options.device)
    output.check_files()
    results: list[GenerateResult] = []
    common = common_columns(output.environment)
    for case in cases:
        results.append(measure_generate(case, device))
        output.say(f"{case}: " + ", ".join(f"{way} {number(results[-1].tokens_per_second(way))}" for way in WAYS) + " tokens/s")
        rows = [row for one in results for row in to_rows(one, common)]
        output.write({"environment": output.environment, "options": attrs.asdict(options), "rows": rows}, rows)
    output.show(generate_table(results))
    return results


@torch.no_grad()
def measure_generate(case: GenerateCase, device: torch.device) -> GenerateResult:
    """Return the figures of all ways, one after another."""
    result = GenerateResult(case=case)
    ways: dict[str, Callable[[GenerateCase, torch.device], dict[str, Any]]] = {
        "nsa": _nsa, "graph": _dense_by_graph, "transformers": _by_transformers
    }  # fmt: skip
    for way in WAYS:
        free_cached_memory(device)
        try:
            found = ways[way](case, device)
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


def times_of_generate(model: Any, case: GenerateCase, device: torch.device) -> dict[str, float]:
    """Return the time in ms of a prompt with its first new token, and of each further token, by `model.generate` with a static cache."""
    prompt = torch.randint(0, case.vocab_size, (case.batch, case.prompt), device=device)

    def generated(new_tokens: int) -> float:
        began = time.perf_counter()
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=new_tokens, max_new_tokens=new_tokens, do_sample=False,
            cache_implementation="static",
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        assert ids.shape == (case.batch, case.prompt + new_tokens), "min_new_tokens forbids an earlier end"
        return 1e3 * (time.perf_counter() - began)

    most = case.new_tokens + 1
    # kernels are compiled and steps captured
    generated(most)
    short, long = (median(generated(new_tokens) for _ in range(RUNS)) for new_tokens in (1, most))
    return {"prompt_ms": short, "step_ms": (long - short) / case.new_tokens}


def _dense_by_graph(case: GenerateCase, device: torch.device) -> dict[str, Any]:
    config = case.model_config("dense")
    times: dict[str, float] = {}
    for kernel in kernels_of(case, device):
        torch.manual_seed(0)
        step = DenseStep(config, case, kernel).to(device, case.dtype).eval()
        times[kernel] = time_call(replay_of(step, device) if device.type == "cuda" else step, device).median_ms
    kernel = min(times, key=lambda name: times[name])
    return {"kernel": kernel, "step_ms": times[kernel]}


def kernels_of(case: GenerateCase, device: torch.device) -> Iterator[str]:
    """Yield the dense kernels that serve a step of `case`, by name."""
    shape = case.shape
    q = torch.zeros(1, shape.num_heads, shape.head_dim_qk, device=device, dtype=case.dtype)
    k, v = (
        torch.zeros(1, 64, shape.num_kv_heads, width, device=device, dtype=case.dtype) for width in (shape.head_dim_qk, shape.head_dim_v)
    )
    for name, call in dense_decode_kernels(q, k, v).items():
        try:
            call()
        except Exception:  # noqa: BLE001, S112 - an absent kernel may raise anything; another one serves
            continue
        yield name


class DenseStep(nn.Module):
    """A step of a dense decoder over full caches of random numbers: the next token of every sequence, again and again at the same position."""

    def __init__(self, config: Any, case: GenerateCase, kernel: str) -> None:
        """Build the decoder of `config`, an `NSAModelConfig` of dense layers."""
        super().__init__()
        layers = config.decoder_layers()
        self.decoder = Decoder(config.sizes(), [partial(FullCacheAttention, layer.config, case, kernel) for layer in layers])
        self.register_buffer("ids", torch.zeros(case.batch, 1, dtype=torch.long), persistent=False)

    def forward(self) -> Tensor:
        """Return the next ids `(B, 1)`, which the next call reads."""
        logits: Tensor = self.decoder(self.ids)
        ids: Any = self.ids
        return ids.copy_(logits[:, -1].argmax(-1, keepdim=True))  # type: ignore[no-any-return]


class FullCacheAttention(DenseAttention):
    """Dense attention of one new token of each sequence over a cache that it completes."""

    def __init__(self, config: Any, case: GenerateCase, kernel: str) -> None:
        super().__init__(config)
        self.kernel = kernel
        for name, width in (("keys", self.dim_qk), ("values", self.dim_v)):
            self.register_buffer(name, torch.randn(case.batch, case.context, self.kv_heads, width, dtype=case.dtype), persistent=False)
        self.register_buffer("position", torch.tensor([case.context - 1]), persistent=False)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Return `(B, 1, hidden)` of x of the same shape, whose keys and values become the last of the cache."""
        keys, values, position = self.get_buffer("keys"), self.get_buffer("values"), self.get_buffer("position")
        q, k = self._projected(x)
        keys[:, -1:] = self.rope(k, position)
        values[:, -1:] = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim_v))
        attended = dense_decode_kernels(self.rope(q, position)[:, 0], keys, values)[self.kernel]()
        out: Tensor = self.o_proj(attended.reshape(len(x), 1, self.heads, -1)[..., : self.dim_v].flatten(-2))  # type: ignore[attr-defined]
        return out


def to_rows(one: GenerateResult, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per way."""
    case, shape = one.case, one.case.shape
    return [
        {
            "way": way, "prompt": case.prompt, "new_tokens": case.new_tokens, "batch": case.batch, "num_layers": case.num_layers,
            "hidden_size": case.hidden_size, "vocab_size": case.vocab_size, "shape": shape.name, "heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads, "head_dim_qk": shape.head_dim_qk, "head_dim_v": shape.head_dim_v,
            "geometry": geometry_text(case.geometry), "dtype": str(case.dtype).removeprefix("torch."),
            "tokens_per_s": one.tokens_per_second(way), "ms_step": one.step_ms.get(way), "ms_prompt": one.prompt_ms.get(way),
            "kernel": one.kernel if way == "graph" else "", "reason": one.reasons.get(way, ""), **common,
        }
        for way in WAYS
    ]  # fmt: skip


def generate_table(results: list[GenerateResult]) -> Table:
    """Return a line per case: new tokens per second by each way."""
    table = Table("case", *WAYS, title="generate, tokens/s")
    for one in results:
        shown = (number(rate) if (rate := one.tokens_per_second(way)) else Text(one.reasons.get(way, "-"), style="red") for way in WAYS)
        table.add_row(Text(str(one.case)), *shown)
    return table
