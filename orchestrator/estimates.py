"""What a job will take: seconds and memory of a worker, and bytes on disk."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from model import cost
from orchestrator import throughput
from orchestrator.cells import Cell
from orchestrator.devices import Device
from orchestrator.study import Study
from orchestrator.throughput import Speed
from orchestrator.training.task import SAVE_EVERY_S

if TYPE_CHECKING:
    from orchestrator.jobs import Job, Known

Source = Literal["trained", "calibrated", "estimated"]
Seconds = tuple[float, Source] | tuple[None, None]


@dataclass(frozen=True)
class Times:
    """What is known of speed, the best first.

    trained: seconds a token of a gang, measures included, by `model_key`. calibrated: one worker's speed by
    `throughput.key`. device: whose FLOP/s, where they are said, are the last resort.
    """

    trained: Mapping[str, float] = field(default_factory=dict)
    calibrated: Mapping[str, Speed] = field(default_factory=dict)
    device: Device = field(default_factory=Device)

    def of_training(
        self, study: Study, cell: Cell, tokens: int, evaluations: int, checkpoints: int, measures: Collection[str]
    ) -> Seconds:
        """Seconds of a gang that trains `tokens` tokens of a cell, takes `measures` (identities) at each evaluation and
        keeps so many checkpoints.

        Trained ones leave out start and checkpoints, which are not busy seconds of the ledger; calibrated and estimated
        ones what workers of a gang wait for each other; estimated ones all but the steps.
        """
        workers = study.machine.workers_of(cell.size)
        pace = self.trained.get(model_key(cell.document))
        if pace is not None:
            return tokens * pace, "trained"
        speed = self.calibrated.get(throughput.key(study, cell))
        if speed is not None:
            measuring = throughput.measured_seconds(speed, measures)
            if measuring is not None:
                training = tokens / (speed.tokens_per_second * workers) + evaluations * measuring
                commits = max(checkpoints, training // SAVE_EVERY_S)
                return speed.start_seconds + training + commits * speed.commit_seconds, "calibrated"
        if self.device.flops:
            flops = cost.training_flops(cell.model, tokens, study.machine.recompute)
            return flops / (self.device.flops * workers), "estimated"
        return None, None

    def of_measuring(self, study: Study, cell: Cell, measurements: Collection[str], checkpoints: int) -> Seconds:
        """Seconds of measurements on stored checkpoints, where each was timed."""
        speed = self.calibrated.get(throughput.key(study, cell))
        seconds = throughput.measured_seconds(speed, measurements) if speed else None
        return (None, None) if seconds is None else (checkpoints * seconds, "calibrated")


def trained_paces(
    documents: Mapping[str, dict[str, Any]], earlier: Mapping[str, dict[str, Any]], known: Mapping[str, "Known"]
) -> dict[str, float]:
    """Seconds a token of each model that has been trained, by `model_key`, over its finished cells.

    documents: cell id → identity document. earlier: cells of earlier plans, as `plan.ledger_row` wrote them.
    """
    totals: dict[str, tuple[float, int]] = {}
    for cell_id, state in known.items():
        document = documents.get(cell_id) or earlier.get(cell_id, {}).get("document")
        if document and state.state == "finished":
            busy, tokens = totals.get(model_key(document), (0.0, 0))
            totals[model_key(document)] = (busy + state.busy_s, tokens + state.tokens)
    return {key: busy / tokens for key, (busy, tokens) in totals.items() if tokens}


def model_key(document: Mapping[str, Any]) -> str:
    """The model of a cell's identity document, as a key."""
    return json.dumps(document["model"], sort_keys=True)


def worker_memory(study: Study, cell: Cell, device: Device) -> float:
    """Bytes one worker needs to train a cell."""
    machine, workers = study.machine, study.machine.workers_of(cell.size)
    return cost.memory(
        cell.model,
        study.recipe.optimizer,
        machine.micro_batch or study.recipe.batch_size // workers,
        machine.zero_stage,
        workers,
        study.recipe.precision,
        machine.recompute,
        device.is_cpu,
    ).total


def disk_bytes(study: Study, cells: Mapping[str, Cell], jobs: Iterable["Job"], slots: int) -> float:
    """What jobs leave on disk, and what as many of the largest as run at once write meanwhile.

    Left are the weights of every checkpoint, the optimizer state that `machine.keep_optimizer` keeps, and about 200
    bytes a recorded number. What a branch takes over from its trunk is linked: on a file system without links it is
    copied and not counted here.
    """
    training = [job for job in jobs if job.kind != "measure"]
    left = running = 0.0
    for job in training:
        cell = cells[job.cell_id]
        start = job.steps - job.tokens // cell.tokens_per_step
        weights, state = 4.0 * cell.params, cost.optimizer_state_bytes(cell.model, study.recipe.optimizer)
        kept = job.kind == "trunk" or study.machine.keep_optimizer == "all"
        written = sum(step > start for step in {*job.checkpoint_at, job.steps})
        numbers = (job.steps - start) / study.machine.log_every * 3 + len(job.evaluate_at) * 20 * len(study.measures)
        left += written * weights + kept * state + 200 * numbers
        at_once = min(max(1, slots // job.workers), len(training))
        # The newest two with their state and a third that is being written, one of them between two to be kept.
        running = max(running, (2 * weights + 3 * state) * at_once)
    return left + running
