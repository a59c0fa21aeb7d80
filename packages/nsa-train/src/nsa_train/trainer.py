"""The training loop: fetch, forward, backward, guard, clip, update, record."""

import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsa_train.checkpoint import save_checkpoint
from nsa_train.config import RunConfig
from nsa_train.data.packing import Batch, PackedRows
from nsa_train.data.pipeline import BatchStream, validation_batches
from nsa_train.data.sources import Corpus
from nsa_train.data.tokenizer import TOKENIZERS
from nsa_train.guards import GradientWatch, check_finite
from nsa_train.model.decoder import build_model, summed_loss
from nsa_train.optim import build_optimizer, clip_gradients, gradient_norm, learning_rate, set_learning_rate
from nsa_train.routing import pick_device
from nsa_train.telemetry import health
from nsa_train.telemetry.progress import ProgressDisplay, StepFigures
from nsa_train.telemetry.recorder import Recorder
from nsa_train.telemetry.samples import prompts_of, write_samples

VALIDATION_BATCHES = 16
"""Most batches of one evaluation: the same rows at every evaluation of a run."""


class Fetched(NamedTuple):
    """The micro-batches of one optimizer step."""

    batches: list[Batch]
    seconds: float
    """Spent waiting for them."""

    @property
    def num_targets(self) -> int:
        """Labels of the step: what its loss is the mean over."""
        return sum(batch.num_targets for batch in self.batches)

    @property
    def num_tokens(self) -> int:
        """Tokens that went through the model."""
        return sum(batch.input_ids.numel() for batch in self.batches)


class Trainer:
    """One run: weights, optimizer, data position and records. `run` does it all."""

    def __init__(self, config: RunConfig, corpus: Corpus, out_dir: Path, display: ProgressDisplay) -> None:
        """Draw the weights and open the records in `out_dir`, which is created."""
        self.config, self.display = config, display
        train, data = config.train, config.data
        self.device = pick_device()
        torch.manual_seed(train.seed)
        self.model = build_model(config).to(self.device)
        self.forward = torch.compile(self.model) if train.compile else self.model
        self.optimizer = build_optimizer(self.model, train)
        self.watch = GradientWatch(self.model, last_step=train.steps)
        self.tokenizer = TOKENIZERS[data.tokenizer]()
        self.prompts = prompts_of(corpus.val, self.tokenizer)
        rows = PackedRows(corpus.train, self.tokenizer, train.seq_len, seed=data.shuffle_seed)
        held_out = PackedRows(corpus.val, self.tokenizer, train.seq_len)
        self.validation = validation_batches(held_out, batch_size=train.batch_size, most=VALIDATION_BATCHES)
        self.stream = BatchStream(rows, batch_size=train.batch_size, seed=data.shuffle_seed, prefetch=data.prefetch)
        self.recorder = Recorder(config, out_dir, self.device)
        self.recent_fetches: deque[float] = deque(maxlen=100)

    def run(self) -> dict[str, Any]:
        """Train to the last step and return the content of metrics.json.

        Raises:
            GuardError: when a number is not finite or a parameter gets no gradient; records up to then are kept.
        """
        deterministic_before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(self.config.train.deterministic or deterministic_before)
        try:
            return self._run()
        except BaseException as error:
            self.recorder.halted(error)
            raise
        finally:
            torch.use_deterministic_algorithms(deterministic_before)

    def _run(self) -> dict[str, Any]:
        write_samples(self.recorder.paths.samples / "before.txt", self.model, self.tokenizer, self.prompts)
        self._evaluate(0)
        with self.stream:
            for step in range(1, self.config.train.steps + 1):
                self._step(step)
                self._after_step(step)
        write_samples(self.recorder.paths.samples / "after.txt", self.model, self.tokenizer, self.prompts)
        return self.recorder.finished()

    def _step(self, step: int) -> None:
        train, started = self.config.train, time.perf_counter()
        is_logged = step % train.log_every == 0 or step in (1, train.steps)
        fetched = self._fetch()
        with health.watched(self.model.sparse_layers if is_logged else []) as collected:
            loss = self._backward(fetched, use_compiled=not is_logged)
        norm = gradient_norm(self.model)
        check_finite(step, loss=loss, grad_norm=float(norm), model=self.model)
        self.watch.observe(step, max(batch.longest for batch in fetched.batches))
        clip_gradients(self.model, norm, train.grad_clip)
        rate = learning_rate(step, train)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        figures = StepFigures(
            step=step,
            loss=loss,
            lr=rate,
            toks_per_s=fetched.num_tokens / (time.perf_counter() - started),
            grad_norm=float(norm),
            fetch_ms=1e3 * fetched.seconds,
        )
        self.recorder.stepped(figures, fetches=self.recent_fetches, telemetry=collected)
        self.display.show_step(figures, is_logged=is_logged)

    def _after_step(self, step: int) -> None:
        train, is_last = self.config.train, step == self.config.train.steps
        if step % train.eval_every == 0 or is_last:
            self._evaluate(step)
        if is_last or (train.save_every and step % train.save_every == 0):
            self._save(step)

    def _fetch(self) -> Fetched:
        started = time.perf_counter()
        found = [next(self.stream).to(self.device) for _ in range(self.config.train.accumulate)]
        seconds = time.perf_counter() - started
        self.recent_fetches.append(1e3 * seconds)
        return Fetched(found, seconds)

    def _backward(self, fetched: Fetched, *, use_compiled: bool) -> float:
        """Fill the gradients of the mean loss over all labels of the step and return that loss in nats per token."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        # telemetry writes to the layers' attributes: not a thing for a compiled graph
        forward = self.forward if use_compiled else self.model
        total = 0.0
        for batch in fetched.batches:
            loss = self._summed_loss(forward, batch) / fetched.num_targets
            torch.autograd.backward(loss)
            total += float(loss.detach())
        return total

    def _summed_loss(self, forward: Any, batch: Batch) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16"):
            logits = forward(batch.input_ids, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen)
        return summed_loss(logits, batch.labels)

    @torch.no_grad()
    def _evaluate(self, step: int) -> None:
        self.model.eval()
        summed = sum(float(self._summed_loss(self.model, batch.to(self.device))) for batch in self.validation)
        loss = summed / sum(batch.num_targets for batch in self.validation)
        self.recorder.validated(step, loss)
        self.display.note(f"step {step:04d} | val_loss {loss:.4f} nats per token, on held-out documents")

    def _save(self, step: int) -> None:
        path = save_checkpoint(self.recorder.paths.checkpoints, step=step, config=self.config, model=self.model, optimizer=self.optimizer)
        self.recorder.saved(step, path)
