"""What would run, and what it costs: the graph of jobs, known before anything starts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from model import cost
from orchestrator import identity, record
from orchestrator.cells import Cell, expand
from orchestrator.errors import InputError
from orchestrator.study import Study
from orchestrator.training.task import Task


@dataclass(frozen=True)
class Job:
    """What Ray schedules. after: ids of jobs that must have finished. memory_bytes: of one worker.

    flops: training FLOPs, or forward FLOPs of a measurement where known. seconds: from the cells of the same model that
    this study has trained; None where there are none, and for measurements. A "measure" job runs in its cell's folder.
    """

    id: str
    kind: Literal["train", "measure"]
    cell_id: str
    after: tuple[str, ...]
    workers: int
    tokens: int
    flops: float
    memory_bytes: float
    seconds: float | None


@dataclass(frozen=True)
class Known:
    """What the ledger says of a job. busy_s: seconds of training and measuring, of all attempts."""

    state: str
    busy_s: float
    tokens: int


@dataclass(frozen=True)
class Plan:
    """jobs: those still to run. changed: cell id → fields that differ from the nearest cell trained before.

    lost: finished cells whose record and checkpoints are gone, so that they train again.
    """

    study: Study
    folder: Path
    cells: tuple[Cell, ...]
    jobs: tuple[Job, ...]
    disk_bytes: float
    slots: int
    changed: dict[str, list[str]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """Cells that are not finished and will be run."""
        return len({job.cell_id for job in self.jobs if job.kind == "train"})

    def totals(self) -> dict[str, Any]:
        """Sums over the jobs still to run. device_hours and the makespan's bound are None until a rate is known."""
        seconds = [job.seconds for job in self.jobs]
        known = [s for s in seconds if s is not None]
        work = sum(s * job.workers for s, job in zip(known, self.jobs, strict=True)) if None not in seconds else None
        return {
            "tokens": sum(job.tokens for job in self.jobs),
            "tokens_if_separate": sum(job.tokens for job in self.jobs),
            "flops": sum(job.flops for job in self.jobs),
            "device_hours": None if work is None else work / 3600,
            "price": None,
            "disk_bytes": self.disk_bytes,
            "makespan_lower_bound_s": None if work is None else max([work / self.slots, *known]),
        }

    def as_json(self) -> dict[str, Any]:
        """The document of `gridlaw plan --json`."""
        jobs = [
            {
                "id": job.id,
                "kind": job.kind,
                "cell": job.cell_id,
                "after": list(job.after),
                "workers": job.workers,
                "tokens": job.tokens,
                "flops": job.flops,
                "memory_bytes": job.memory_bytes,
                "seconds": job.seconds,
            }
            for job in self.jobs
        ]
        return {
            "study": self.study.name,
            "cells": [{**_row(cell), "layer_residual": cost.layer_residual(cell.model)} for cell in self.cells],
            "jobs": jobs,
            "totals": self.totals(),
            "missing": self.missing,
            "changed": self.changed,
            "lost": list(self.lost),
        }

    def study_document(self, source: Path) -> dict[str, Any]:
        """study.json: the resolved study, enough to read its results without the study file."""
        question = self.study.question
        chance = min(data.chance for data in self.study.data.values())
        return {
            "name": self.study.name,
            "source": str(source),
            "question": None if question is None else {**question.model_dump(), "chance": chance},
            "notes": list(self.study.notes),
            "arms": [arm.model_dump() for arm in self.study.arms],
            "sizes": [size.model_dump() for size in self.study.sizes],
            "recipe": self.study.recipe.model_dump(mode="json"),
            "measures": [{"name": m.name, "identity": measurement_id(m)} for m in self.study.measures],
            "cells": [
                {
                    **_row(cell),
                    "job_id": cell.id,
                    "windows": sorted({layer.window for layer in cell.model.layers if layer.window}),
                    "full_layers": [i for i, layer in enumerate(cell.model.layers) if layer.mixer == "full"],
                    "identity": cell.document,
                }
                for cell in self.cells
            ],
        }

    def task(self, job: Job) -> Task:
        """The order a gang gets for a job."""
        cell = next(cell for cell in self.cells if cell.id == job.cell_id)
        data = self.study.data[cell.data]
        machine = self.study.machine
        evaluate_at, checkpoint_at = self.study.evaluations.steps(
            cell.steps, self.study.recipe.batch_size * data.context
        )
        return Task(
            kind=job.kind,
            job_id=job.id,
            cell_id=cell.id,
            folder=self.folder / "jobs" / cell.id,
            model=cell.model,
            data=data,
            data_identity=cell.document["data"],
            recipe=self.study.recipe,
            seed=cell.seed,
            steps=cell.steps,
            measures=tuple((measurement_id(measure), measure) for measure in self.study.measures),
            evaluate_at=evaluate_at,
            checkpoint_at=checkpoint_at,
            workers=job.workers,
            zero_stage=machine.zero_stage,
            micro_batch=machine.micro_batch,
            threads=machine.threads,
            recompute=machine.recompute,
            log_every=machine.log_every,
        )


def stored_document(root: Path, name: str) -> dict[str, Any]:
    """The study.json of a study under a root, what `Plan.study_document` made. Raises InputError."""
    path = root / name / "study.json"
    try:
        if path.parent.parent != root or path.parent.name != name:
            raise FileNotFoundError(name)
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(
            f"study: {name!r} is neither a study file nor a study under {root}; give a .py file, or run the study first"
        ) from None
    except ValueError:
        document = None
    if not isinstance(document, dict) or not document.keys() >= {"name", "source", "arms", "cells", "measures"}:
        raise InputError(f"study: {path} is damaged; run the study's file again to write it anew")
    return document


def measurement_id(measure: Any) -> str:
    """Identity of a measurement: what is measured and how, whatever checkpoint it is taken on."""
    return identity.digest({"measure": measure.name, **json.loads(json.dumps(measure.identity()))})


def make(
    study: Study,
    folder: Path,
    known: Mapping[str, Known],
    earlier: Mapping[str, dict[str, Any]] | None = None,
    slots: int = 1,
) -> Plan:
    """The jobs a study still needs.

    folder: STUDY_ROOT/NAME. known: job id → what the ledger says. earlier: cell id → what `ledger_row` wrote of the
    cells seen before, to explain new identities. slots: devices that work at once. Raises InputError.
    """
    cells = expand(study)
    earlier = earlier or {}
    paces = _seconds_a_token({cell.id: cell.document for cell in cells}, earlier, known)
    jobs, changed, lost = [], {}, []
    for cell in cells:
        state = known.get(cell.id)
        if state is None and earlier:
            changed[cell.id] = _nearest_change(cell, earlier)
        if state is None or state.state not in ("finished", "diverged"):
            jobs.append(_train_job(study, cell, paces))
        elif state.state == "finished" and _is_gone(folder / "jobs" / cell.id):
            lost.append(cell.id)
            jobs.append(_train_job(study, cell, paces))
        elif state.state == "finished":
            jobs += _measure_job(study, folder, cell)
    training = {job.cell_id for job in jobs if job.kind == "train"}
    disk = sum(_disk_bytes(study, cell) for cell in cells if cell.id in training)
    explained = {cell: why for cell, why in changed.items() if why}
    return Plan(study, folder, cells, tuple(jobs), disk, slots, explained, tuple(lost))


def _train_job(study: Study, cell: Cell, paces: Mapping[str, float]) -> Job:
    pace = paces.get(_model_key(cell.document))
    machine = study.machine
    micro_batch = machine.micro_batch or study.recipe.batch_size // machine.workers
    return Job(
        id=cell.id,
        kind="train",
        cell_id=cell.id,
        after=(),
        workers=machine.workers,
        tokens=cell.budget_tokens,
        flops=cost.training_flops(cell.model, cell.budget_tokens, machine.recompute),
        memory_bytes=cost.memory(
            cell.model,
            study.recipe.optimizer,
            micro_batch,
            machine.zero_stage,
            machine.workers,
            study.recipe.precision,
            machine.recompute,
        ).total,
        seconds=None if pace is None else cell.budget_tokens * pace,
    )


def _model_key(document: Mapping[str, Any]) -> str:
    return json.dumps(document["model"], sort_keys=True)


def _seconds_a_token(
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


def _is_gone(job_folder: Path) -> bool:
    return not (job_folder / "record.jsonl").exists() and not any((job_folder / "checkpoints").glob("*"))


def _measure_job(study: Study, folder: Path, cell: Cell) -> list[Job]:
    wanted = {measurement_id(measure) for measure in study.measures}
    absent = wanted - record.measurements(folder / "jobs" / cell.id / "record.jsonl")
    if not absent:
        return []
    job_id = f"{cell.id}-{identity.digest({'measurements': sorted(absent)})[:6]}"
    return [Job(job_id, "measure", cell.id, (), 1, 0, 0.0, 4.0 * cell.params, None)]


def _disk_bytes(study: Study, cell: Cell) -> float:
    """Weights of every kept checkpoint, optimizer state of the newest, and about 200 bytes a recorded number."""
    evaluate_at, checkpoint_at = study.evaluations.steps(cell.steps, cell.budget_tokens // cell.steps)
    lines = cell.steps / study.machine.log_every * 3 + len(evaluate_at) * 20 * len(study.measures)
    return 4.0 * cell.params * (len(checkpoint_at) + 3) + 200 * lines


def _nearest_change(cell: Cell, earlier: Mapping[str, dict[str, Any]]) -> list[str]:
    """The shortest list of differing fields over earlier cells of the same arm, size, data condition and seed."""
    place = ("arm", "size", "data", "seed")
    alike = [old for old in earlier.values() if all(old[key] == getattr(cell, key) for key in place)]
    return min((identity.differences(old["document"], cell.document) for old in alike), key=len, default=[])


def ledger_row(cell: Cell) -> dict[str, Any]:
    """What the ledger keeps of a cell, for `make(earlier=…)`."""
    return {**_row(cell), "document": cell.document}


def _row(cell: Cell) -> dict[str, Any]:
    row = asdict(cell)
    return {
        key: row[key]
        for key in ("id", "arm", "size", "data", "budget_tokens", "seed", "params", "non_embedding_params")
    }
