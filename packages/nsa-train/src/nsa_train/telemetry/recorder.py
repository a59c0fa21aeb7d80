"""Write a run's directory while the trainer runs.

Every rank writes its own heartbeat; only rank 0 writes the rest. A resumed run continues in the same directory: rows of the
tables after the resumed step are deleted, and the heartbeat keeps all events.
"""

import contextlib
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from attrs import field, mutable
from torch import Tensor

from nsa_core import NativeSparseAttention, default_registry
from nsa_train.data.tokenizer import Tokenizer
from nsa_train.errors import ConfigError
from nsa_train.files import written_whole
from nsa_train.host.chips import chip_of
from nsa_train.host.environment import describe_environment
from nsa_train.host.machine import gpu_memory
from nsa_train.host.routing import chosen_of, routing_decisions
from nsa_train.model.choosing import watched
from nsa_train.model.decoder import Decoder, count_parameters
from nsa_train.model.generate import generate
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import to_toml
from nsa_train.telemetry import health
from nsa_train.telemetry.flops import model_flops
from nsa_train.telemetry.layers import (
    BranchTimes,
    FallbackCounts,
    MarkedBackend,
    RunTelemetry,
    attach,
    counting_registry,
    marked_range,
    routes_of,
)
from nsa_train.telemetry.metrics import data_marks, summarise, tokens_per_step
from nsa_train.telemetry.progress import StepFigures
from nsa_train.telemetry.records import (
    FALLBACK_COLUMNS,
    SELECTION_COLUMNS,
    TRAINING_COLUMNS,
    VALIDATION_COLUMNS,
    CsvTable,
    Heartbeat,
    perplexity,
    pid_namespace,
    read_json,
    read_rows,
    write_json,
)
from nsa_train.telemetry.report import write_report
from nsa_train.telemetry.tensorboard import Board

SAMPLE_TOKENS = 160
SYNTHETIC_TOKENS = 8
"""Number of tokens of a sample of random ids. It is small: nobody can read them, and a deep model needs many small launches for each token."""
SAMPLE_TEMPERATURE = 0.8
SAMPLE_SEED = 0
SYNTHETIC_NOTE = "--- synthetic data: random ids, for throughput alone ---"
CUT_NOTE = "--- ends here: the model's logits are not finite ---\n"


class Observed(NamedTuple):
    """The telemetry of the NSA layers in a watched step; empty for any other step."""

    telemetry: Sequence[RunTelemetry] = ()
    times: BranchTimes | None = None

    def end_pass(self) -> None:
        """Record the end of a micro-batch's forward and backward pass."""
        for telemetry in self.telemetry:
            telemetry.end_pass()


@mutable
class _Tables:
    """The files that only rank 0 writes."""

    training: CsvTable
    validation: CsvTable
    board: Board
    selection: CsvTable | None = None
    fallbacks: CsvTable | None = None
    lengths: Counter[int] = field(factory=Counter)
    clipped_steps: int = 0


class Recorder:
    """The records of one run; every method is one event."""

    def __init__(
        self,
        config: RunConfig,
        out_dir: Path,
        device: torch.device,
        *,
        rank: int = 0,
        world_size: int = 1,
        resumed_at: int | None = None,
    ) -> None:
        """Create `out_dir` with config.toml, env.json and the tables' headers, or continue in it after step `resumed_at`.

        -1 continues from the beginning: an earlier start ended before its first checkpoint.
        """
        self.config, self.device, self.paths = config, device, RunDirectory(out_dir)
        self.rank, self.world_size, self.resumed_at = rank, world_size, resumed_at
        out_dir.mkdir(parents=True, exist_ok=True)
        decisions = routing_decisions(config, device)
        self.fallbacks = FallbackCounts({name: chosen for name, found in decisions.items() if (chosen := chosen_of(found))})
        self._is_synthetic = config.data.source == "synthetic"
        self.heartbeat = Heartbeat(out_dir, rank, marks={"data_synthetic": int(self._is_synthetic)})
        self.step = max(resumed_at or 0, 0)
        self._layers: tuple[NativeSparseAttention, ...] = ()
        self._registry = counting_registry(default_registry().backends, self.fallbacks)
        self._flops, self._chip = model_flops(config), chip_of(device)
        texts = {name: "\n".join(map(str, found)) for name, found in decisions.items()}
        self._tables = self._open_tables(texts) if rank == 0 else None

    def attach(self, layers: Sequence[NativeSparseAttention]) -> None:
        """Count the routes of `layers`, and with train.profile="nvtx" name them for a profiler; call once."""
        self._layers = tuple(layers)
        if self.config.train.profile == "nvtx":
            marked = [MarkedBackend(backend, has_ranges=True) for backend in default_registry().backends]
            self._registry = counting_registry(marked, self.fallbacks)
        attach(self._layers, self._registry)

    @contextmanager
    def observing(self, *, is_logged: bool) -> Iterator[Observed]:
        """Observe the attached layers while the block runs, if the step is logged; pass the result to `stepped`."""
        if not is_logged:
            yield Observed()
            return
        times = BranchTimes() if self.config.train.profile == "branches" else None
        if times is not None:
            backends = (MarkedBackend(backend, times=times) for backend in default_registry().backends)
            attach(self._layers, counting_registry(backends, self.fallbacks))
        try:
            with watched(self._layers, RunTelemetry) as collected:
                yield Observed(collected, times)
        finally:
            attach(self._layers, self._registry)

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that is an NVTX range `name` with train.profile="nvtx" on a GPU, and nothing elsewhere."""
        return marked_range(name, self.device if self.config.train.profile == "nvtx" else None)

    def booted(self, **fields: Any) -> None:
        """Record the start of the process; `fields` are facts about data, seeds and so on."""
        counts = count_parameters(self.config)
        self.heartbeat.beat(
            "boot",
            self.step,
            host=platform.node(),
            pid_namespace=pid_namespace(),
            world_size=self.world_size,
            resumed_at=self.resumed_at,
            parameters=getattr(counts, self.config.model.attention),
            tokens_per_step=tokens_per_step(self.config),
            **fields,
        )

    def consumed_first(self, step: int, tokens: Sequence[int]) -> None:
        """Record the first tokens of the data, once the data of `step`, the first step of this process, were fetched."""
        self.heartbeat.beat("data", step, data_first_tokens=list(tokens))

    def began(self, what: str, step: int) -> None:
        """Record that work longer than a step begins: "val", "save", "sample"; `watch` then waits longer."""
        self.heartbeat.beat(f"{what}_begin", step)

    def stepped(
        self,
        figures: StepFigures,
        *,
        fetches: Sequence[float],
        layers: Sequence[Mapping[str, float]] = (),
        observed: Observed | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Record an optimizer step.

        `fetches`: recent waits for data in ms; `layers`: `layers.of_layers` of all ranks, and `observed`, of `observing`, for a
        logged step; `data`: figures of the training stream, such as bad records skipped, which go into every event as they are.
        """
        self.step = figures.step
        # the rows of all ranks have the same length, which may differ from train.seq_len if documents are not packed
        tokens = sum(figures.lengths) * self.world_size or tokens_per_step(self.config)
        step_s = tokens / figures.toks_per_s
        fields = {
            **{name: getattr(figures, name) for name in ("loss", "lr", "toks_per_s", "grad_norm")},
            "step_ms": 1e3 * step_s,
            "tokens": tokens,
            "mfu": self._mfu(figures, step_s),
            "is_clipped": figures.is_clipped,
            "dt_fetch_s": figures.fetch_ms / 1e3,
            "fetch_p50_ms": statistics.median(fetches),
            "fetch_p95_ms": sorted(fetches)[int(0.95 * (len(fetches) - 1))],
            **gpu_memory(self.device),
            **(data or {}),
        }
        summary: dict[str, float] = {}
        if observed is not None and layers:
            summary = health.combine(layers)
            own = {**health.heartbeat_fields(summary), "fallbacks_total": self.fallbacks.row()["total"]}
            if observed.times is not None:
                own["branch_forward_ms"] = observed.times.total_ms()
            self.heartbeat.beat("progress", figures.step, **fields, **own, routes=routes_of(observed.telemetry))
        self.heartbeat.beat("step_end", figures.step, **fields)
        if self._tables is not None:
            self._write_step(self._tables, figures, {name: fields[name] for name in ("step_ms", "tokens", "mfu")}, summary)

    def validated(self, step: int, loss: float) -> None:
        """Record an evaluation; `loss` in nats per token."""
        self.heartbeat.beat("val", step, val_loss=loss)
        if self._tables is not None:
            self._tables.validation.append({"step": step, "val_loss": loss, "ppl": perplexity(loss)})
            self._tables.board.scalars(step, "loss", {"validation": loss})

    def saved(self, step: int, path: Path) -> None:
        """Record a checkpoint."""
        self.heartbeat.beat("save", step, checkpoint=path.name)

    def skipped(self, step: int, reason: str, batch: str, *, cause: str) -> None:
        """Record a step whose update was skipped, its `batch`, and the `cause`, a word of `records.Cause`."""
        self.step = step
        self.heartbeat.beat("skip", step, cause=cause, reason=reason, batch=batch)

    def halted(self, reason: str, *, code: int, anomaly: str | None = None) -> None:
        """Record that the run ended before its last step; `anomaly`: one word for `.anomaly_type`.

        A full disk does not hide why the run ended: files that cannot be written are left out.
        """
        with contextlib.suppress(OSError):
            self.heartbeat.beat("halt", self.step, reason=reason, code=code)
            if self._tables is not None and anomaly is not None:
                self.paths.write_anomalies([anomaly])
        with contextlib.suppress(OSError):
            if self._tables is not None:
                self._tables.board.close()

    def finished(self, *, consumed_hash: str | None = None, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
        """Write metrics.json, curves.png and report.html; return the metrics (rank 0; the others return nothing).

        `consumed_hash`: hash of the data that all ranks consumed. If somebody deleted the records of the report, a message says
        so: the run has not failed.

        Raises:
            OSError: if a file cannot be written. No metrics.json is left, so that a resume writes all of them.
        """
        self.heartbeat.beat("finish", self.step)
        if self._tables is None:
            return {}
        self._tables.board.close()
        metrics = summarise(self.paths, self.config, self.device, world_size=self.world_size)
        metrics["data_consumed_hash"] = consumed_hash
        metrics["model_flops_per_token"] = self._flops.of_sequence(self.config.train.seq_len) / self.config.train.seq_len
        write_json(self.paths.metrics, metrics)
        try:
            write_report(self.paths)
        except ConfigError as error:
            say(f"report: not drawn: {error}")
        except OSError:
            # without metrics.json a resume records the end again
            self.paths.metrics.unlink(missing_ok=True)
            raise
        return metrics

    def _open_tables(self, routing: dict[str, str]) -> _Tables:
        paths, at = self.paths, self.resumed_at
        # earlier faults are in the heartbeats; these files describe this start
        paths.anomaly_type.unlink(missing_ok=True)
        paths.metrics.unlink(missing_ok=True)
        # whole or not at all: `nsa-train resume` reads it
        with written_whole(paths.config) as aside:
            aside.write_text(to_toml(self.config), encoding="utf-8")
        environment = describe_environment(
            self.device, routing, world_size=self.world_size, routes=self.fallbacks.preferred, **data_marks(self.config)
        )
        before = read_json(paths.environment) if at is not None else {}
        if before:
            # the machine of the first start stays first
            earlier = before.get("resumed")
            environment = {**before, "resumed": [*(earlier if isinstance(earlier, list) else []), {"step": at, **environment}]}
        write_json(paths.environment, environment)
        tables = _Tables(
            training=CsvTable(paths.training, TRAINING_COLUMNS, resumed_at=at),
            validation=CsvTable(paths.validation, VALIDATION_COLUMNS, resumed_at=at),
            board=Board(paths.tensorboard, resumed_at=at),
        )
        if self.config.model.attention == "nsa":
            tables.selection = CsvTable(paths.selection, SELECTION_COLUMNS, resumed_at=at)
            tables.fallbacks = CsvTable(paths.fallbacks, FALLBACK_COLUMNS, resumed_at=at)
            for row in read_rows(paths.fallbacks):
                self.fallbacks.restore(row)
        tables.clipped_steps = sum(row["is_clipped"] == 1 for row in read_rows(paths.training))
        return tables

    def _mfu(self, figures: StepFigures, step_s: float) -> float | None:
        """Return the share of the chip's peak that this rank's model FLOPs took; None without a known peak."""
        if self._chip is None:
            return None
        train = self.config.train
        lengths = figures.lengths or (train.seq_len,) * (train.batch_size * train.accumulate // self.world_size)
        return self._flops.of_step(lengths) / step_s / (1e12 * self._chip.dense_bf16_tflops)

    def _write_step(self, tables: _Tables, figures: StepFigures, speed: dict[str, Any], summary: dict[str, float]) -> None:
        step = figures.step
        row = {name: value for name, value in attrs.asdict(figures).items() if name in TRAINING_COLUMNS}
        tables.training.append(
            {
                **row,
                **speed,
                "ppl": perplexity(figures.loss),
                "is_clipped": int(figures.is_clipped),
                "data_synthetic": int(self._is_synthetic),
            }
        )
        # the bucket of a length is the next power of two, itself included
        tables.lengths.update(1 << max(length - 1, 0).bit_length() for length in figures.lengths)
        tables.board.scalars(step, "loss", {"training": figures.loss})
        tables.board.scalars(step, "train", {"lr": figures.lr, "grad_norm": figures.grad_norm, "toks_per_s": figures.toks_per_s, **speed})
        tables.board.scalars(step, "data", {"fetch_ms": figures.fetch_ms, "synthetic": int(self._is_synthetic)})
        if figures.is_clipped:
            tables.clipped_steps += 1
            tables.board.scalars(step, "clip", {"grad_norm_before": figures.grad_norm, "events_total": tables.clipped_steps})
        if summary:
            tables.board.scalars(step, "nsa", summary)
        if step % self.config.train.log_every == 0 or step == self.config.train.steps or summary:
            tables.board.lengths(step, tables.lengths)
            tables.lengths.clear()
        if summary and tables.selection is not None and "k_mean" in summary:
            tables.selection.append({"step": step, **{name: summary[name] for name in SELECTION_COLUMNS[1:]}})
        if summary and tables.fallbacks is not None:
            tables.fallbacks.append({"step": step, **self.fallbacks.row()})


def write_samples(
    path: Path | None, model: Decoder, tokenizer: Tokenizer, prompts: Sequence[Tensor], *, is_synthetic: bool = False
) -> None:
    """Write each prompt and its seeded continuation, drawn through cached decode, to `path`; None: only draw.

    `is_synthetic`: the prompts are random ids, which the file says.
    """
    num_tokens = SYNTHETIC_TOKENS if is_synthetic else SAMPLE_TOKENS
    drawn = generate(model, prompts, tokenizer=tokenizer, num_tokens=num_tokens, temperature=SAMPLE_TEMPERATURE, seed=SAMPLE_SEED)
    drawing = f"(temperature {SAMPLE_TEMPERATURE}, seed {SAMPLE_SEED})"
    texts = [
        f"--- prompt ---\n{tokenizer.decode(prompt)}\n"
        f"--- continuation {drawing} ---\n{tokenizer.decode(found.ids)}\n{CUT_NOTE if found.is_cut else ''}"
        for prompt, found in zip(prompts, drawn, strict=True)
    ]
    if path is None:
        return
    path.parent.mkdir(exist_ok=True)
    head = f"{SYNTHETIC_NOTE}\n\n" if is_synthetic else ""
    with written_whole(path) as aside:
        aside.write_text(head + "\n".join(texts), encoding="utf-8")
