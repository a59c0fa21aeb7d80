"""The training loop, the same on every rank: fetch, agree, forward, backward, guard, update, record."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from nsa_core.selection_loss import NUM_SAMPLES
from nsa_train.checkpoint.initial import InitialWeights, initialize
from nsa_train.checkpoint.resuming import restore
from nsa_train.checkpoint.rng import seed_rng
from nsa_train.checkpoint.snapshot import capture
from nsa_train.checkpoint.store import Checkpoint
from nsa_train.checkpoint.teacher import Teacher
from nsa_train.checkpoint.writer import CheckpointWriter
from nsa_train.data.dataset import open_dataset
from nsa_train.data.packing import Batch
from nsa_train.data.stream import merge_states, open_training_stream, open_validation
from nsa_train.errors import INTERRUPTED, DataError, GuardError, PeerError, TrainError, exit_code_of
from nsa_train.host.routing import DTYPES
from nsa_train.lifecycle.stopping import Stop, StopRequests
from nsa_train.loop.feed import Feed, Fetched
from nsa_train.loop.guards import (
    GradientWatch,
    Patience,
    Skip,
    StepGuard,
    StepNumbers,
    gradients_of,
    not_finite,
    require_finite_state,
    some,
)
from nsa_train.loop.optim import build_optimizer, clip_gradients, gradient_norm, learning_rate, leave_out
from nsa_train.model.decoder import build_model
from nsa_train.parallel.strategy import STRATEGIES
from nsa_train.parallel.world import World, contact_kept
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.telemetry.layers import of_layers
from nsa_train.telemetry.progress import ProgressDisplay, StepFigures
from nsa_train.telemetry.recorder import Observed, Recorder, write_samples
from nsa_train.telemetry.records import Cause

FAILED = -1
"""Value instead of a `Stop` by which a rank reports to the others that its data are not available."""


class _Agreement(NamedTuple):
    """A rank's row before a step: whether it continues, and its micro-batches."""

    said: int
    """A `Stop`, or FAILED."""
    targets: int
    tokens: int
    longest: int


class _Evaluated(NamedTuple):
    """A rank's row of an evaluation, summed over its batches."""

    loss: float
    targets: int


class Trainer:
    """One run on one rank: weights, optimizer, data position and records. `run` trains."""

    def __init__(
        self,
        config: RunConfig,
        out_dir: Path,
        display: ProgressDisplay,
        *,
        world: World,
        resume: Checkpoint | None = None,
        is_continued: bool = False,
        initial: InitialWeights | None = None,
    ) -> None:
        """Draw the weights, or read the weights of the checkpoint `resume`, and open the records in `out_dir`.

        `is_continued`: the directory holds records of an earlier start, even if it left no checkpoint.
        `initial`: the weights of `train.init_from`, which rank 0 has verified.
        """
        self.config, self.display, self.world = config, display, world
        self.device, train = world.device, config.train
        seed_rng(train.seed)
        self.model = build_model(config).to(self.device)
        self.teacher = Teacher(config, self.device) if train.selection_teacher else None
        for auxiliary in self.model.selection_losses:
            # so that a step has NUM_SAMPLES samples for any number of passes and ranks
            auxiliary.num_samples = -(-NUM_SAMPLES // (train.accumulate * world.world_size))
        self.start = resume.step if resume else 0
        # refuse before the records are truncated to the resumed step; do slow work before the directory is
        # touched, so that a run killed in it can be started again
        dataset = open_dataset(config)
        self.tokenizer, self.prompts = dataset.tokenizer, dataset.prompts()
        self.validation = open_validation(config, rank=world.rank, world_size=world.world_size, dataset=dataset)
        self.stream = open_training_stream(
            config, rank=world.rank, world_size=world.world_size, dataset=dataset, announce=display.note if world.is_main else None
        )
        if resume:
            self._load_position(resume)
        self.writer = CheckpointWriter(RunDirectory(out_dir).checkpoints, keep_last=train.keep_last, is_async=train.async_save)
        self.recorder = Recorder(
            config,
            out_dir,
            self.device,
            rank=world.rank,
            world_size=world.world_size,
            resumed_at=self.start if resume else -1 if is_continued else None,
        )
        self.recorder.attach(self.model.sparse_layers)
        if train.compile:
            self.model.compile_parts()
        # sharding replaces the parameters, so code that reads parameters comes after
        self.strategy = STRATEGIES[train.strategy](self.model, world)
        if config.train.init_from and not resume:
            initialize(self.model, config, initial)
        self.watch = GradientWatch(self.model, last_step=train.steps, world=world)
        self.optimizer = build_optimizer(self.model, train)
        self.scaler = torch.amp.GradScaler(self.device.type) if train.precision == "fp16" else None
        self.guard, self.patience = StepGuard(train), Patience(train.early_stop_patience)
        if resume:
            restore(resume, model=self.model, optimizer=self.optimizer, scaler=self.scaler)
            for name, owner in (("guard", self.guard), ("watch", self.watch), ("patience", self.patience)):
                owner.load_state_dict(resume.state["counters"][name])
            self.writer.go_on_from(self.start)
        self.feed = Feed(self.stream, train.accumulate)
        self.stops = StopRequests(self.recorder.paths, world, quitting=partial(_quit, display, self.recorder))
        self.has_compiled = False
        self.recent_fetches: deque[float] = deque(maxlen=100)
        self.saved_at = self.start if resume else None
        self.recorder.booted(restarts_left=world.restarts_left)

    def run(self) -> dict[str, Any]:
        """Train to the last step and return the content of metrics.json.

        Raises:
            GuardError: if too many steps had to be skipped, a parameter gets no gradient, or the weights or their moments
                are not finite; records up to then are kept.
            StoppedError: if .HALT was found, or SIGTERM or Ctrl-C came, or a launcher ended; after saving.
            PeerError: if another rank could not continue.
            LostContactError: if another rank is gone.
        """
        deterministic_before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(self.config.train.deterministic or deterministic_before)
        try:
            with self.stops, self.writer, contact_kept(self.world.rank):
                return self._run()
        except BaseException as error:
            anomaly = "guard" if isinstance(error, GuardError) else None
            self.recorder.halted(str(error) or type(error).__name__, code=exit_code_of(error), anomaly=anomaly)
            raise
        finally:
            torch.use_deterministic_algorithms(deterministic_before)

    def _run(self) -> dict[str, Any]:
        with self.stream:
            # an imported run has a checkpoint of step 0, but no evaluation
            if self.start == 0 and not self.patience.has_observed:
                self._write_samples("before.txt")
                self._evaluate(0)
            for step in range(self.start + 1, self.config.train.steps + 1):
                # also before the first step: the checkpoint may be from a run that stopped early
                if self.patience.is_over:
                    self.display.note(f"step {step - 1:04d} | stopped early: {self.patience}")
                    break
                self._step(step)
                self._after_step(step)
            self._write_samples("after.txt")
        self.writer.wait()
        return self.recorder.finished(consumed_hash=self._position()["consumed_hash"], say=self.display.note)

    def _step(self, step: int) -> None:
        train, started = self.config.train, time.perf_counter()
        is_logged = step % train.log_every == 0 or step in (1, train.steps)
        fetched, targets, tokens, longest = self._fetch(step)
        if step == self.start + 1:
            # recorded even if the step is skipped
            self.recorder.consumed_first(step, self.stream.first_tokens())
        with self._compiling(step, is_wanted=not is_logged), self.recorder.observing(is_logged=is_logged) as observed:
            found = self._backward(step, fetched, targets, observed)
        everyone = self.world.exchange(found)
        loss = sum(row.loss for row in everyone) / max(targets, 1)
        skip = self.guard.judge(loss, everyone)
        if skip is not None:
            self._skip(step, skip, fetched, everyone)
            return
        self.watch.observe(step, longest)
        self.guard.passed(loss)
        rate = learning_rate(step, train)
        self._update(found.grad_norm, rate)
        figures = StepFigures(
            step=step,
            loss=loss,
            lr=rate,
            toks_per_s=tokens / (time.perf_counter() - started),
            grad_norm=found.grad_norm,
            fetch_ms=1e3 * fetched.seconds,
            is_clipped=found.grad_norm > train.grad_clip,
            lengths=fetched.lengths,
        )
        layers = of_layers(observed.telemetry, self.world.gather) if observed.telemetry else []
        self.recorder.stepped(figures, fetches=self.recent_fetches, layers=layers, observed=observed, data=self.stream.figures())
        self.display.show_step(figures, is_logged=is_logged)

    def _after_step(self, step: int) -> None:
        train, is_last = self.config.train, step == self.config.train.steps
        if step % train.eval_every == 0 or is_last:
            self._evaluate(step)
        is_over = is_last or self.patience.is_over
        if is_over:
            self.watch.ended(step)
        if is_over or (train.save_every and step % train.save_every == 0):
            self._save(step)

    def _fetch(self, step: int) -> tuple[Fetched, int, int, int]:
        """Return this rank's micro-batches of `step`, and of all ranks: targets, tokens, the longest sequence.

        Here the ranks agree to continue. If one of them was asked to stop, all stop before `step`.
        """
        fetched, failure = None, None
        with self.recorder.phase("fetch"):
            try:
                fetched = self.feed.fetch(lambda: self.stops.heard() is not Stop.NO)
            except (TrainError, OSError) as error:
                failure = error
        said = FAILED if failure else int(self.stops.heard(look=self.world.is_main))
        mine = (fetched.num_targets, fetched.num_tokens, fetched.longest) if fetched else (0, 0, 0)
        everyone = self.world.exchange(_Agreement(said, *mine))
        failed = [rank for rank, row in enumerate(everyone) if row.said == FAILED]
        is_begun = step - 1 > self.start
        if failed and is_begun:
            self._keep(step - 1)
        if failure is not None:
            if not is_begun:
                raise failure
            # not a refusal any more: steps were taken, and they are saved
            raise TrainError(f"step {step}: {failure}; the steps before it are saved; continue with --resume") from failure
        if failed:
            raise PeerError(f"step {step}: the data of rank {failed[0]} are not available; its own message says why")
        stop = Stop(max(row.said for row in everyone))
        if stop is not Stop.NO:
            self._stop(step - 1, stop)
        assert fetched is not None
        self.feed.accept()
        self.recent_fetches.append(1e3 * fetched.seconds)
        return fetched, sum(row.targets for row in everyone), sum(row.tokens for row in everyone), max(row.longest for row in everyone)

    def _stop(self, step: int, stop: Stop) -> NoReturn:
        """Save after `step` and end the run."""
        self._keep(step)
        raise stop.error(step)

    def _keep(self, step: int) -> None:
        """Save after `step`, unless that is done, and wait until all ranks have; a collective."""
        if self.saved_at != step:
            self._save(step)
        self.writer.wait()
        self.world.barrier()

    def _backward(self, step: int, fetched: Fetched, targets: int, observed: Observed) -> StepNumbers:
        """Fill the gradients of the mean loss over the `targets` of all ranks and return this rank's numbers."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        factor = self.strategy.factor / max(targets, 1)
        losses = []
        for index, batch in enumerate(fetched.batches):
            self.model.sample_queries(step * self.config.train.accumulate + index)
            with self.strategy.accumulating(is_last=index == len(fetched.batches) - 1):
                with self.recorder.phase("forward"):
                    here = batch.to(self.device)
                    if self.teacher is not None:
                        with self._autocast():
                            self.teacher.set_targets(self.model, here.input_ids, here.cu_seqlens, here.max_seqlen)
                    loss = self._summed_loss(self.strategy.forward, here)
                with self.recorder.phase("backward"):
                    scaled = loss * factor
                    torch.autograd.backward(scaled if self.scaler is None else self.scaler.scale(scaled))
            observed.end_pass()
            losses.append(loss.detach().float())
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        # the only wait for the device in a step
        *values, norm = torch.stack([*losses, gradient_norm(self.model).float()]).tolist()
        bad = [index for index, value in enumerate(values) if not abs(value) < float("inf")]
        return StepNumbers(loss=sum(values), bad_batch=bad[0] if bad else -1, grad_norm=norm)

    def _summed_loss(self, forward: Any, batch: Batch) -> Tensor:
        with self._autocast():
            loss: Tensor = forward(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen)
        return loss

    def _update(self, grad_norm: float, rate: float) -> None:
        with self.recorder.phase("update"):
            clip_gradients(self.model, grad_norm, self.config.train.grad_clip)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            if self.scaler is not None:
                self.scaler.update()

    def _skip(self, step: int, skip: Skip, fetched: Fetched, everyone: list[StepNumbers]) -> None:
        """Leave the weights unchanged on every rank, and report the batches.

        Raises:
            GuardError: if it was the first gradient of the run, if too many steps were skipped, and if the weights
                or their moments are not finite.
        """
        reason, batch = self._described(skip, fetched, everyone)
        self.optimizer.zero_grad(set_to_none=True)
        cause = Cause.OVERFLOW if self._is_overflow(skip.cause) else skip.cause
        self.recorder.skipped(step, reason, batch, cause=cause.value)
        self.display.note(f"step {step:04d} | skipped, the weights stay as they were: {reason}; {batch}")
        if cause is Cause.OVERFLOW:
            return
        self._require_finite_state(step)
        if self.watch.num_observed == 0:
            raise GuardError(
                f"step {step}: {reason}; the first gradient of every parameter must be finite; look at the batch that the log names"
            )
        try:
            self.guard.skipped(step, reason)
        except GuardError:
            self._save(step)
            self.writer.wait()
            raise

    def _described(self, skip: Skip, fetched: Fetched, everyone: list[StepNumbers]) -> tuple[str, str]:
        """Return, on every rank alike, why a step is skipped, with the parameters and batches."""
        index = everyone[self.world.rank].bad_batch
        mine = range(len(fetched.batches)) if skip.cause is not Cause.LOSS else [index] if index >= 0 else []
        described = [f"rank {self.world.rank}, {fetched.describe(at)}" for at in mine]
        # a bad loss affects all parameters; after the first step, its batch is more informative
        is_named = skip.cause is Cause.GRADIENT or self.watch.num_observed == 0
        gathered = self.world.gather((described, not_finite(gradients_of(self.model)) if is_named else []))
        names = list(dict.fromkeys(name for _, part in gathered for name in part))
        return skip.reason + (f", in {some(names)}" if names else ""), "; ".join(text for part, _ in gathered for text in part)

    def _is_overflow(self, cause: Cause) -> bool:
        """Make the scaler ready for the next step; return True if float16 overflowed, which is normal while the scale adapts."""
        if self.scaler is None:
            return False
        scale = self.scaler.get_scale()
        ran_over = cause is Cause.GRADIENT and scale > 1
        leave_out(self.scaler, scale * self.scaler.get_backoff_factor() if ran_over else scale, is_finite=cause is Cause.SPIKE)
        return ran_over

    def _require_finite_state(self, step: int) -> None:
        require_finite_state(self.model, self.optimizer, self.world, step=step, saved_at=self.saved_at)

    @torch.no_grad()
    def _evaluate(self, step: int) -> None:
        """Compute the loss on the held-out rows, divided among the ranks; each runs equally many batches."""
        self.recorder.began("val", step)
        self.model.eval()
        batches = self.validation
        rounds = max(self.world.gather(len(batches)))
        summed, targets = 0.0, 0
        with self._eagerly(is_wanted=True):
            for index in range(rounds):
                # a rank without further batches repeats one: with shards, every rank takes part in every forward pass
                batch = batches[index % len(batches)]
                loss = float(self._summed_loss(self.model, batch.to(self.device)))
                if index < len(batches):
                    summed, targets = summed + loss, targets + batch.num_targets
        everyone = self.world.exchange(_Evaluated(summed, targets))
        mean = sum(row.loss for row in everyone) / sum(row.targets for row in everyone)
        self.patience.observe(mean)
        self.recorder.validated(step, mean)
        self.display.note(f"step {step:04d} | val_loss {mean:.4f} nats per token, on held-out documents")

    def _save(self, step: int) -> None:
        self._require_finite_state(step)
        self.recorder.began("save", step)
        snapshot = capture(
            model=self.model,
            optimizer=self.optimizer,
            config=self.config,
            data=self._position(),
            scaler=self.scaler,
            routes=self.recorder.fallbacks.preferred,
            counters={"guard": self.guard.state_dict(), "watch": self.watch.state_dict(), "patience": self.patience.state_dict()},
        )
        path = self.writer.save(step, snapshot)
        self.saved_at = step
        self.recorder.saved(step, path)

    def _position(self) -> dict[str, Any]:
        """Return the position of all ranks in the data. A collective."""
        return merge_states(self.world.gather(self.feed.position))

    def _load_position(self, checkpoint: Checkpoint) -> None:
        """Continue at the checkpoint's position in the data. If one rank refuses, all ranks end before they touch the records."""
        refusal: DataError | None = None
        try:
            self.stream.load_state_dict(checkpoint.state["data"])
        except DataError as error:
            refusal = error
        refused = self.world.gather(refusal is not None)
        # the first rank that refuses prints the message
        if refusal and self.world.rank == refused.index(True):
            raise refusal
        if any(refused):
            raise PeerError("another rank refused the data (not those of the checkpoint); see its message", exit_code=DataError.exit_code)

    def _write_samples(self, name: str) -> None:
        """Draw the same text on all ranks, as shards require, and write it on rank 0, unless train.samples is off."""
        if not self.config.train.samples:
            return
        self.recorder.began("sample", self.recorder.step)
        with self._eagerly(is_wanted=True), self._autocast():
            path = self.recorder.paths.samples / name
            write_samples(
                path if self.world.is_main else None,
                self.model,
                self.tokenizer,
                self.prompts,
                is_synthetic=self.config.data.source == "synthetic",
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        precision = self.config.train.precision
        return torch.autocast(self.device.type, DTYPES[precision], enabled=precision != "fp32")

    @contextmanager
    def _compiling(self, step: int, *, is_wanted: bool) -> Iterator[None]:
        """Run the block compiled if `is_wanted` and train.compile is on; a request to stop reports that it waits for the compiler."""
        is_first = is_wanted and self.config.train.compile and not self.has_compiled
        if is_first:
            self.stops.expect_delay(f"step {step} is being compiled, the first one that is, which may take minutes")
        with self._eagerly(is_wanted=not is_wanted):
            yield
        if is_first:
            self.has_compiled = True
            self.stops.expect_delay("")

    def _eagerly(self, *, is_wanted: bool) -> AbstractContextManager[Any]:
        """Return a context in which nothing is compiled: telemetry writes to attributes, caches grow, shapes are seen once."""
        return torch.compiler.set_stance("force_eager") if is_wanted and self.config.train.compile else nullcontext()


def _quit(display: ProgressDisplay, recorder: Recorder) -> None:
    """Restore the cursor and record the end in the heartbeat, from any thread."""
    display.console.show_cursor()
    recorder.heartbeat.beat("halt", recorder.step, reason="interrupted by a second Ctrl-C", code=INTERRUPTED)
