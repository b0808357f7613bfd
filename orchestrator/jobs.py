"""Jobs: how a cell, a trunk, a trial or a measurement becomes one, and a job the task that a gang gets."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from model import cost
from orchestrator import estimates, identity, record
from orchestrator.cells import Cell
from orchestrator.estimates import Times
from orchestrator.recipe import Recipe
from orchestrator.study import Study
from orchestrator.training.task import Task
from orchestrator.trunks import Trunk
from orchestrator.tuning.groups import TrialJob


@dataclass(frozen=True)
class Job:
    """What Ray schedules. after: ids of jobs that must have finished. memory_bytes: of one worker.

    cell_id: of a trunk, the cell that leaves at its end; of a tuning trial, one that gets the rate found. A "measure"
    job runs in its cell's folder. steps: completed at the end; tokens: trained by this job alone. flops: training, or
    forward FLOPs of a measurement where known. seconds: as `estimates.Times` has it, seconds_source says from where;
    None where nothing is known. evaluate_at, checkpoint_at: steps completed, those it starts from included.
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
    seconds_source: estimates.Source | None = None
    evaluate_at: tuple[int, ...] = ()
    checkpoint_at: tuple[int, ...] = ()

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
            "seconds_source": self.seconds_source,
        }


@dataclass(frozen=True)
class Known:
    """What the ledger says of a job. busy_s: seconds of training and measuring, of all attempts.

    tokens: planned, of this job alone. begun: whether it has trained a step.
    """

    state: str
    busy_s: float
    tokens: int
    begun: bool


def of_training(
    study: Study,
    kind: Literal["train", "trunk"],
    job_id: str,
    cell: Cell,
    steps: int,
    before: Trunk | None,
    sharing: Iterable[Cell],
    times: Times,
    tuned: tuple[str, ...] = (),
) -> Job:
    """The job that trains a cell, or what leads up to it, from where the trunk `before` ends up to `steps`.

    sharing: the cells whose evaluations and checkpoints it makes. tuned: ids of the trials that a job without a trunk
    before it waits for.
    """
    evaluate_at, checkpoint_at = _measured_at(study, sharing, steps)
    measures = [identity.of_measure(measure) for measure in study.measures]
    job = _training(study, kind, job_id, cell, steps, before, evaluate_at, checkpoint_at, measures, times)
    return job if before else replace(job, after=tuned)


def of_trial(study: Study, cell: Cell, trial: TrialJob, measure: str, times: Times) -> Job:
    """A tuning trial up to a rung. cell: one that gets the rate found. measure: identity of what it is compared by."""
    last = (trial.steps,)
    job = _training(study, "tune", trial.id, cell, trial.steps, None, last, last, [measure], times)
    return replace(job, after=trial.after)


def _training(
    study: Study,
    kind: Literal["train", "trunk", "tune"],
    job_id: str,
    cell: Cell,
    steps: int,
    before: Trunk | None,
    evaluate_at: tuple[int, ...],
    checkpoint_at: tuple[int, ...],
    measures: list[str],
    times: Times,
) -> Job:
    start = before.steps if before else 0
    tokens = (steps - start) * cell.tokens_per_step
    evaluations = sum(step > start for step in {*evaluate_at, *checkpoint_at})
    checkpoints = sum(step > start for step in {*checkpoint_at, steps})
    seconds, source = times.of_training(study, cell, tokens, evaluations, checkpoints, measures)
    return Job(
        id=job_id,
        kind=kind,
        cell_id=cell.id,
        after=(before.id,) if before else (),
        workers=study.machine.workers_of(cell.size),
        steps=steps,
        tokens=tokens,
        flops=cost.training_flops(cell.model, tokens, study.machine.recompute),
        memory_bytes=estimates.worker_memory(study, cell, times.device),
        seconds=seconds,
        seconds_source=source,
        evaluate_at=evaluate_at,
        checkpoint_at=checkpoint_at,
    )


def of_measurements(study: Study, folder: Path, cell: Cell, times: Times) -> list[Job]:
    """The job that takes what a finished cell's record lacks of the study's measures; none where it has them all."""
    wanted = {identity.of_measure(measure) for measure in study.measures}
    absent = wanted - record.measurements(folder / "jobs" / cell.id / "record.jsonl")
    if not absent:
        return []
    job_id = f"{cell.id}-{identity.digest({'measurements': sorted(absent)})[:6]}"
    _, checkpoint_at = study.evaluations.steps(cell.steps, cell.tokens_per_step)
    seconds, source = times.of_measuring(study, cell, absent, len(checkpoint_at))
    return [Job(job_id, "measure", cell.id, (), 1, cell.steps, 0, 0.0, 4.0 * cell.params, seconds, source)]


def is_gone(job_folder: Path) -> bool:
    """Whether nothing is left of a job but perhaps its folder."""
    return not (job_folder / "record.jsonl").exists() and not any((job_folder / "checkpoints").glob("*"))


def _measured_at(study: Study, cells: Iterable[Cell], steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(evaluate_at, checkpoint_at) of a job of `steps` steps that all of `cells` share."""
    evaluate, keep = set(), set()
    for cell in cells:
        evaluate_at, checkpoint_at = study.evaluations.steps(cell.steps, cell.tokens_per_step)
        evaluate |= {step for step in evaluate_at if step <= steps}
        keep |= {step for step in checkpoint_at if step <= steps}
    return tuple(sorted(evaluate)), tuple(sorted(keep))


def task(study: Study, folder: Path, job: Job, cell: Cell, recipe: Recipe, before: Trunk | None) -> Task:
    """The order a gang gets for a job of a cell. folder: STUDY_ROOT/NAME. recipe: at the cell's learning rate.

    before: the trunk it starts from. Of a tuning trial, what `tuning.stage.Stage.task` makes the trial's order of.
    """
    machine = study.machine
    return Task(
        kind=job.kind,
        job_id=job.id,
        cell_id=cell.id,
        folder=folder / "jobs" / (job.id if job.kind == "trunk" else cell.id),
        model=cell.model,
        data=study.data[cell.data],
        data_identity=cell.document["data"],
        recipe=recipe,
        seed=cell.seed,
        steps=job.steps,
        schedule_steps=cell.steps,
        measures=tuple((identity.of_measure(measure), measure) for measure in study.measures),
        evaluate_at=job.evaluate_at,
        checkpoint_at=job.checkpoint_at,
        workers=job.workers,
        zero_stage=machine.zero_stage,
        micro_batch=machine.micro_batch,
        threads=machine.threads,
        recompute=machine.recompute,
        log_every=machine.log_every,
        keep_state=job.kind == "trunk" or machine.keep_optimizer == "all",
        trunk=folder / "jobs" / before.id if before else None,
    )
