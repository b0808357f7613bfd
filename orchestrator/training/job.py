"""The training job: the only training loop. Whatever stops it, run again it goes on to the losses it would have had."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any, Literal

import torch

from model.kernels import chosen
from model.lm import LanguageModel, build
from orchestrator import record
from orchestrator.errors import InputError
from orchestrator.identity import differences, of_data
from orchestrator.measure import Measure, Measurement
from orchestrator.record import RecordWriter
from orchestrator.training import checkpoint, shares
from orchestrator.training.checkpoint import Checkpoint
from orchestrator.training.engine import Engine, from_first_rank
from orchestrator.training.task import SAVE_EVERY_S, Outcome, Task


def run(
    task: Task,
    rank: int,
    should_stop: Callable[[], bool],
    progress: Callable[[int], None] | None = None,
    device: torch.device | str = "cpu",
) -> Outcome:
    """Runs one job on this rank of a process group of `task.workers`, already started.

    should_stop: asked after every step; where any rank says so, the job checkpoints and ends "stopped".
    progress: told the tokens trained so far at the start, after every step and every measure; it must be cheap.
    Raises InputError for settings that do not go together, NoWholeCheckpoint, TimeoutError where another process holds
    the folder, and whatever the model, data and measures raise.
    """
    torch.set_num_threads(task.threads)
    torch.set_flush_denormal(True)
    tell = progress or (lambda tokens: None)
    _check_data(task)
    with ExitStack() as held:
        from_first_rank(lambda: held.enter_context(record.exclusive(task.folder)), task.workers)
        if task.kind == "measure":
            if rank == 0:
                return _measure_stored(task, should_stop, tell, device)
            return Outcome("finished", None, tokens=0, busy_s=0.0, train_s=0.0, measure_s=0.0)
        training = _Training(task, rank, device)
        held.callback(training.close)
        return training.run(should_stop, tell)


class _Training:
    """One attempt at a job: what it starts from, the loop, and what the loop leaves on disk."""

    def __init__(self, task: Task, rank: int, device: torch.device | str) -> None:
        self.task, self.rank = task, rank
        self.root = task.folder / "checkpoints"
        self.tokens_per_step = task.recipe.batch_size * task.data.context
        self.measure_at = {*task.evaluate_at, *task.checkpoint_at}
        self.keep = {*task.checkpoint_at, task.steps}
        self.train_s = self.measure_s = 0.0

        from_first_rank(self._branch_off, task.workers)
        found, skipped = from_first_rank(lambda: checkpoint.latest_committed(self.root, task.steps), task.workers)
        self.model = build(task.model, task.seed, device)
        if found:
            _check_fits(found, task)
            checkpoint.load_weights(found, self.model)
        self.engine = Engine(
            self.model,
            task.recipe,
            rank=rank,
            workers=task.workers,
            zero_stage=task.zero_stage,
            micro_batch=task.micro_batch,
            recompute=task.recompute,
            device=device,
        )
        if found and found.resumable:
            self.engine.load_optimizer_state(_optimizer_state(found, task, self.engine, rank))
        self.start = found.step if found else 0
        self.record = RecordWriter(task.folder / "record.jsonl", self.tokens_per_step) if rank == 0 else None
        if self.record:
            self._say_where_from(self.record, skipped)

    def run(self, should_stop: Callable[[], bool], progress: Callable[[int], None]) -> Outcome:
        task, engine, recipe = self.task, self.engine, self.task.recipe
        step, saved, saved_at = self.start, self.start, time.monotonic()
        logged, logged_s = step, 0.0
        progress(step * self.tokens_per_step)
        while step < task.steps:
            began = time.perf_counter()
            factor = recipe.rate(step, task.schedule_steps or task.steps)
            own_loss = engine.step(task.data.batch(task.seed, step, engine.rows), factor)
            due = time.monotonic() - saved_at >= SAVE_EVERY_S
            loss, sound, stop, due = engine.agree(own_loss, should_stop(), due and self.rank == 0)
            self.train_s += time.perf_counter() - began
            step += 1
            progress(step * self.tokens_per_step)

            if self.record and (step % task.log_every == 0 or step == task.steps or not sound):
                tokens_per_second = (step - logged) * self.tokens_per_step / (self.train_s - logged_s)
                logged, logged_s = step, self.train_s
                metrics = {
                    "train/loss": loss,
                    "train/learning_rate": factor * recipe.learning_rate,
                    "train/tokens_per_second": tokens_per_second,
                }
                self.record.measured(step, "train", metrics)
            if not sound:
                cause = f"{engine.fault or 'non-finite loss'} at step {step} (learning rate {recipe.learning_rate:g})"
                return self._end("diverged", step, cause)
            if step in self.measure_at:
                self._measure(step, progress)
            if step in self.keep or stop or due:
                self._commit(step)
                saved, saved_at = step, time.monotonic()
            if stop and step < task.steps:
                return self._end("stopped", step, None)
        assert saved == step
        return self._end("finished", step, None)

    def close(self) -> None:
        self.engine.close()
        if self.record:
            self.record.close()

    def _branch_off(self) -> None:
        """Takes over what the trunk left, unless this job has checkpoints of its own."""
        if self.task.trunk and not self.root.exists():
            record.adopt(self.task.folder / "record.jsonl", self.task.trunk / "record.jsonl")
            checkpoint.adopt(self.root, self.task.trunk / "checkpoints", self.keep)

    def _say_where_from(self, lines: RecordWriter, skipped: list[str]) -> None:
        dtype = torch.bfloat16 if self.task.recipe.precision == "bfloat16" else torch.float32
        device = next(self.model.parameters()).device.type
        kernels = {word: name for word, (name, _) in chosen(self.task.model, device, dtype).items()}
        note = [self.task.note] if self.task.note else []
        if self.task.trunk and lines.last_event is None:
            said = [f"branched off trunk {self.task.trunk.name} at step {self.start}", *note]
            lines.event(self.start, "started", "; ".join(said), kernels)
        elif self.start == 0:
            again = ["no checkpoint was committed before; from step 0 again"] if lines.last_event else []
            lines.event(0, "started", "; ".join([*again, *note]) or None, kernels)
        elif not (self.start == self.task.steps and lines.last_event == "finished"):
            said = [f"resumed at step {self.start}", *skipped, *note]
            lines.event(self.start, "resumed", "; ".join(said), kernels)

    def _measure(self, step: int, progress: Callable[[int], None]) -> None:
        """Runs the measures that the record lacks at this step, on rank 0 while the others wait for the next one."""
        if self.record is None:
            return
        began = time.perf_counter()
        for identity, measure in self.task.measures:
            if not self.record.holds(measure.name, step, identity):
                result = _evaluate(measure, self.model, self.task)
                self.record.measured(step, measure.name, result.metrics, identity, result.rows)
                progress(step * self.tokens_per_step)
        self.measure_s += time.perf_counter() - began

    def _commit(self, step: int) -> None:
        if self.record:
            self.record.sync()
        checkpoint.commit(
            self.root,
            step,
            self.model,
            self.engine.optimizer_state(),
            rank=self.rank,
            workers=self.task.workers,
            zero_stage=self.task.zero_stage,
            keep=self.keep,
        )

    def _end(self, state: Literal["finished", "diverged", "stopped"], step: int, cause: str | None) -> Outcome:
        if self.record:
            if not (state == "finished" and self.record.last_event == "finished"):
                self.record.event(step, state, cause)
            self.record.sync()
            if state == "finished":
                checkpoint.drop_optimizer_states(self.root, 1 if self.task.keep_state else 0)
            record.to_parquet(self.task.folder / "record.jsonl", self.task.folder / "record.parquet")
        busy_s = self.train_s + self.measure_s
        return Outcome(state, cause, step * self.tokens_per_step, busy_s, self.train_s, self.measure_s)


def _check_data(task: Task) -> None:
    changed = differences(task.data_identity, of_data(task.data))
    if changed:
        raise InputError(
            f"data: no longer what the cell was planned with ({'; '.join(changed)}); restore it, or run the study "
            f"again to train new cells on what is there now"
        )


def _check_fits(found: Checkpoint, task: Task) -> None:
    """Stage 0 and those above it step with optimizers of other kinds, whose states are not made of one another."""
    if found.zero_stage != task.zero_stage:
        raise InputError(
            f"machine.zero_stage: {task.zero_stage}, but {found.folder} was saved at stage {found.zero_stage}; "
            f"set it back to {found.zero_stage} to go on"
        )


def _optimizer_state(found: Checkpoint, task: Task, engine: Engine, rank: int) -> dict[str, Any]:
    """The state this rank goes on with, cut anew where other workers saved it."""
    if found.zero_stage == 0 or found.workers == task.workers:
        return checkpoint.load_optimizer_state(found, rank)
    saved = [checkpoint.load_optimizer_state(found, other) for other in range(found.workers)]
    return shares.reshare(saved, engine.group_sizes, rank, task.workers)


def _evaluate(measure: Measure, model: LanguageModel, task: Task) -> Measurement:
    model.eval()
    with torch.no_grad():
        result = measure(model, task.data)
    model.train()
    return result


def _measure_stored(
    task: Task, should_stop: Callable[[], bool], progress: Callable[[int], None], device: torch.device | str
) -> Outcome:
    """Runs missing measures on every whole checkpoint of the job, on rank 0 alone; nothing is trained.

    A measure is written once it has all its checkpoints: one that the record knows at all is complete.
    """
    began = time.perf_counter()
    tokens_per_step = task.recipe.batch_size * task.data.context
    stored = checkpoint.committed(task.folder / "checkpoints")
    if not stored:
        raise InputError(f"{task.folder}: no whole checkpoint to measure; train the cell first")
    tokens = stored[-1].step * tokens_per_step
    model = build(task.model, task.seed, device)
    state: Literal["finished", "stopped"] = "finished"
    with closing(RecordWriter(task.folder / "record.jsonl", tokens_per_step)) as lines:
        for identity, measure in task.measures:
            results = []
            for found in stored:
                if lines.holds(measure.name, found.step, identity):
                    continue
                if should_stop():
                    state = "stopped"
                    break
                checkpoint.load_weights(found, model)
                results.append((found.step, _evaluate(measure, model, task)))
                progress(tokens)
            if state == "stopped":
                break
            for step, result in results:
                lines.measured(step, measure.name, result.metrics, identity, result.rows)
        lines.sync()
        record.to_parquet(task.folder / "record.jsonl", task.folder / "record.parquet")
    busy_s = time.perf_counter() - began
    return Outcome(state, None, tokens, busy_s, 0.0, busy_s)
