"""Jobs: how a cell, a trunk or a measurement becomes one, and a job the task that a gang gets."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model import cost
from orchestrator import estimates, identity, record
from orchestrator.cells import Cell
from orchestrator.study import Study
from orchestrator.training.task import Task
from orchestrator.trunks import Trunk


@dataclass(frozen=True)
class Job:
    """What Ray schedules. after: ids of jobs that must have finished. memory_bytes: of one worker.

    cell_id: of a trunk, the cell that leaves at its end. A "measure" job runs in its cell's folder. steps: completed at
    the end; tokens: trained by this job alone. flops: training FLOPs, or forward FLOPs of a measurement where known.
    seconds: from the cells of the same model that this study has trained; None where there are none.
    """

    id: str
    kind: Literal["train", "trunk", "measure"]
    cell_id: str
    after: tuple[str, ...]
    workers: int
    steps: int
    tokens: int
    flops: float
    memory_bytes: float
    seconds: float | None

    def as_json(self) -> dict[str, Any]:
        """An entry of "jobs" in the document of `gridlaw plan --json`."""
        return {
            "id": self.id,
            "kind": self.kind,
            "cell": self.cell_id,
            "after": list(self.after),
            "workers": self.workers,
            "tokens": self.tokens,
            "flops": self.flops,
            "memory_bytes": self.memory_bytes,
            "seconds": self.seconds,
        }


def of_training(
    study: Study,
    kind: Literal["train", "trunk"],
    job_id: str,
    cell: Cell,
    steps: int,
    before: Trunk | None,
    paces: Mapping[str, float],
) -> Job:
    """The job that trains a cell, or what leads up to it, from where the trunk `before` ends up to `steps`."""
    pace = paces.get(estimates.model_key(cell.document))
    tokens = (steps - (before.steps if before else 0)) * cell.tokens_per_step
    return Job(
        id=job_id,
        kind=kind,
        cell_id=cell.id,
        after=(before.id,) if before else (),
        workers=study.machine.workers,
        steps=steps,
        tokens=tokens,
        flops=cost.training_flops(cell.model, tokens),
        memory_bytes=estimates.worker_memory(study, cell),
        seconds=None if pace is None else tokens * pace,
    )


def of_measurements(study: Study, folder: Path, cell: Cell) -> list[Job]:
    """The job, if one is needed, that runs the measures which a finished cell's record lacks."""
    wanted = {measurement_id(measure) for measure in study.measures}
    absent = wanted - record.measurements(folder / "jobs" / cell.id / "record.jsonl")
    if not absent:
        return []
    job_id = f"{cell.id}-{identity.digest({'measurements': sorted(absent)})[:6]}"
    return [Job(job_id, "measure", cell.id, (), 1, cell.steps, 0, 0.0, 4.0 * cell.params, None)]


def measurement_id(measure: Any) -> str:
    """Identity of a measurement: what is measured and how, whatever checkpoint it is taken on."""
    return identity.digest({"measure": measure.name, **json.loads(json.dumps(measure.identity()))})


def measured_at(study: Study, cells: Iterable[Cell], steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(evaluate_at, checkpoint_at) of a job of `steps` steps that all of `cells` share."""
    evaluate, keep = set(), set()
    for cell in cells:
        evaluate_at, checkpoint_at = study.evaluations.steps(cell.steps, cell.tokens_per_step)
        evaluate |= {step for step in evaluate_at if step <= steps}
        keep |= {step for step in checkpoint_at if step <= steps}
    return tuple(sorted(evaluate)), tuple(sorted(keep))


def task(study: Study, folder: Path, job: Job, cell: Cell, sharing: Iterable[Cell]) -> Task:
    """The order a gang gets for a job. folder: STUDY_ROOT/NAME. sharing: the cells whose measuring it does."""
    machine = study.machine
    evaluate_at, checkpoint_at = measured_at(study, sharing, job.steps)
    return Task(
        kind=job.kind,
        job_id=job.id,
        cell_id=cell.id,
        folder=folder / "jobs" / (job.id if job.kind == "trunk" else cell.id),
        model=cell.model,
        data=study.data[cell.data],
        data_identity=cell.document["data"],
        recipe=study.recipe,
        seed=cell.seed,
        steps=job.steps,
        schedule_steps=cell.steps,
        measures=tuple((measurement_id(measure), measure) for measure in study.measures),
        evaluate_at=evaluate_at,
        checkpoint_at=checkpoint_at,
        workers=job.workers,
        zero_stage=machine.zero_stage,
        micro_batch=machine.micro_batch,
        threads=machine.threads,
        log_every=machine.log_every,
        trunk=folder / "jobs" / job.after[0] if job.after else None,
    )
