"""The jobs of a plan, each with what it costs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from model import cost
from orchestrator import identity, record
from orchestrator.cells import Cell
from orchestrator.study import Study
from orchestrator.trunks import Trunk
from orchestrator.tuning.groups import TrialJob


@dataclass(frozen=True)
class Job:
    """What Ray schedules. after: ids of jobs that must have finished. memory_bytes: of one worker.

    cell_id: of a trunk, the cell that leaves at its end; of a tuning trial, one that gets the rate found. A "measure"
    job runs in its cell's folder. steps: completed at the end; tokens: trained by this job alone. flops: training, or
    forward FLOPs of a measurement where known. seconds: from the cells of the same model that this study has trained;
    None where there are none.
    """

    id: str
    kind: Literal["train", "trunk", "tune", "measure"]
    cell_id: str
    after: tuple[str, ...]
    workers: int
    steps: int
    tokens: int
    flops: float
    memory_bytes: float
    seconds: float | None


@dataclass(frozen=True)
class Known:
    """What the ledger says of a job. busy_s: seconds of training and measuring, of all attempts.

    tokens: planned, of this job alone. begun: whether it has trained a step.
    """

    state: str
    busy_s: float
    tokens: int
    begun: bool


def training_job(
    study: Study,
    kind: Literal["train", "trunk"],
    job_id: str,
    cell: Cell,
    steps: int,
    before: Trunk | None,
    paces: Mapping[str, float],
    tuned: tuple[str, ...] = (),
) -> Job:
    """A job that trains `cell`, or a trunk up to where it leaves, from the trunk `before` on to `steps`.

    paces: of `seconds_a_token`. tuned: ids of the trials that a job without a trunk before it waits for.
    """
    pace = paces.get(_model_key(cell.document))
    machine = study.machine
    workers = machine.workers_of(cell.size)
    micro_batch = machine.micro_batch or study.recipe.batch_size // workers
    tokens = (steps - (before.steps if before else 0)) * cell.tokens_per_step
    return Job(
        id=job_id,
        kind=kind,
        cell_id=cell.id,
        after=(before.id,) if before else tuned,
        workers=workers,
        steps=steps,
        tokens=tokens,
        flops=cost.training_flops(cell.model, tokens, machine.recompute),
        memory_bytes=cost.memory(
            cell.model,
            study.recipe.optimizer,
            micro_batch,
            machine.zero_stage,
            workers,
            study.recipe.precision,
            machine.recompute,
        ).total,
        seconds=None if pace is None else tokens * pace,
    )


def trial_job(study: Study, cell: Cell, trial: TrialJob, paces: Mapping[str, float]) -> Job:
    """A tuning trial up to a rung; cell: one that gets the rate found."""
    like = training_job(study, "train", trial.id, cell, trial.steps, None, paces, trial.after)
    share = trial.tokens / like.tokens
    seconds = None if like.seconds is None else like.seconds * share
    return replace(like, kind="tune", tokens=trial.tokens, flops=like.flops * share, seconds=seconds)


def _model_key(document: Mapping[str, Any]) -> str:
    return json.dumps(document["model"], sort_keys=True)


def seconds_a_token(
    documents: Mapping[str, dict[str, Any]], earlier: Mapping[str, dict[str, Any]], known: Mapping[str, Known]
) -> dict[str, float]:
    """Of each model that has been trained, by `_model_key`, over its finished cells, those of earlier plans too."""
    totals: dict[str, tuple[float, int]] = {}
    for cell_id, state in known.items():
        document = documents.get(cell_id) or earlier.get(cell_id, {}).get("document")
        if document and state.state == "finished":
            busy, tokens = totals.get(_model_key(document), (0.0, 0))
            totals[_model_key(document)] = (busy + state.busy_s, tokens + state.tokens)
    return {key: busy / tokens for key, (busy, tokens) in totals.items() if tokens}


def is_gone(job_folder: Path) -> bool:
    """Whether nothing is left of a job but perhaps its folder."""
    return not (job_folder / "record.jsonl").exists() and not any((job_folder / "checkpoints").glob("*"))


def measurement_jobs(study: Study, folder: Path, cell: Cell) -> list[Job]:
    """The job that takes what a finished cell's record lacks of the study's measures; none where it has them all."""
    wanted = {identity.of_measure(measure) for measure in study.measures}
    absent = wanted - record.measurements(folder / "jobs" / cell.id / "record.jsonl")
    if not absent:
        return []
    job_id = f"{cell.id}-{identity.digest({'measurements': sorted(absent)})[:6]}"
    return [Job(job_id, "measure", cell.id, (), 1, cell.steps, 0, 0.0, 4.0 * cell.params, None)]


def disk_bytes(study: Study, cell: Cell, job: Job) -> float:
    """Weights of every checkpoint kept, optimizer state of the newest, and about 200 bytes a recorded number.

    A branch keeps the trunk's checkpoints too: on one file system as links, which this counts as copies.
    """
    evaluate_at, checkpoint_at = study.evaluations.steps(cell.steps, cell.tokens_per_step)
    lines = job.steps / study.machine.log_every * 3 + len(evaluate_at) * 20 * len(study.measures)
    return 4.0 * cell.params * (len(checkpoint_at) + 3) + 200 * lines
