"""What would run, and what it costs: the graph of jobs, known before anything starts."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from model import cost
from orchestrator import estimates, identity, jobs, scheduler, throughput, trunks
from orchestrator.cells import Cell, expand
from orchestrator.devices import Device
from orchestrator.errors import InputError
from orchestrator.estimates import Times
from orchestrator.jobs import Job, Known
from orchestrator.study import Study
from orchestrator.throughput import Speed
from orchestrator.training.task import Task
from orchestrator.trunks import Trunk
from orchestrator.tuning import stage as tuning
from orchestrator.tuning.groups import TrialJob
from orchestrator.tuning.stage import Stage


@dataclass(frozen=True)
class Plan:
    """jobs: those still to run. changed: cell id → fields that differ from the nearest cell trained before.

    lost: finished jobs whose record and checkpoints are gone, so that they train again. separate: why budgets share no
    trunk, None where they do or there is but one. tuning: where learning rates come from; None where the study gives
    them all.
    """

    study: Study
    folder: Path
    cells: tuple[Cell, ...]
    jobs: tuple[Job, ...]
    disk_bytes: float
    slots: int
    changed: dict[str, list[str]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    trunks: tuple[tuple[Trunk, ...], ...] = ()
    separate: str | None = None
    tuning: Stage | None = None
    device: Device = field(default_factory=Device)

    @property
    def missing(self) -> int:
        """Cells that are not finished and will be run."""
        return len({job.cell_id for job in self.jobs if job.kind == "train"})

    def totals(self) -> dict[str, Any]:
        """Sums over the jobs still to run. device_hours and the makespan's bound are None until a rate is known."""
        known = {job.id: job.seconds for job in self.jobs if job.seconds is not None}
        work = sum(known[job.id] * job.workers for job in self.jobs) if len(known) == len(self.jobs) else None
        budgets = {cell.id: cell.budget_tokens for cell in self.cells}
        return {
            "tokens": sum(job.tokens for job in self.jobs),
            "tokens_if_separate": sum(
                budgets[job.cell_id] if self.before(job) else job.tokens for job in self.jobs if job.kind != "trunk"
            ),
            "flops": sum(job.flops for job in self.jobs),
            "device_hours": None if work is None else work / 3600,
            "price": None if work is None or self.device.price is None else work / 3600 * self.device.price,
            "disk_bytes": self.disk_bytes,
            "memory_bytes": max((job.memory_bytes for job in self.jobs), default=0.0),
            "seconds_sources": dict(Counter(job.seconds_source for job in self.jobs if job.seconds_source)),
            "makespan_lower_bound_s": None
            if work is None
            else max([work / self.slots, *scheduler.chains(self.jobs, known).values()]),
        }

    def as_json(self) -> dict[str, Any]:
        """The document of `gridlaw plan --json`."""
        return {
            "study": self.study.name,
            "cells": [
                {
                    **_row(cell),
                    **self._origin(cell),
                    "learning_rate": self._rate(cell),
                    "layer_residual": cost.layer_residual(cell.model),
                }
                for cell in self.cells
            ],
            "jobs": [job.as_json() for job in self.jobs],
            "totals": self.totals(),
            "device": {**asdict(self.device), "count": self.slots},
            "missing": self.missing,
            "changed": self.changed,
            "lost": list(self.lost),
            "separate": self.separate,
        }

    def study_document(self, source: Path) -> dict[str, Any]:
        """study.json: the resolved study, enough to read its results without the study file."""
        question = self.study.question
        chance = next(data.chance for data in self.study.data.values())
        return {
            "name": self.study.name,
            "source": str(source),
            "question": None if question is None else {**question.model_dump(), "chance": chance},
            "findings": [finding.model_dump(mode="json") for finding in self.study.findings],
            "notes": list(self.study.notes),
            "arms": [arm.model_dump() for arm in self.study.arms],
            "sizes": [size.model_dump() for size in self.study.sizes],
            "recipe": self.study.recipe.model_dump(mode="json"),
            "learning_rates": self.study.learning_rates,
            "tuning": self.study.tuning and self.study.tuning.model_dump(mode="json"),
            "measures": [{"name": m.name, "identity": identity.of_measure(m)} for m in self.study.measures],
            "cells": [
                {
                    **_row(cell),
                    **self._origin(cell),
                    "job_id": cell.id,
                    "windows": sorted({layer.window for layer in cell.model.layers if layer.window}),
                    "full_layers": [i for i, layer in enumerate(cell.model.layers) if layer.mixer == "full"],
                    "identity": cell.document,
                }
                for cell in self.cells
            ],
            "trials": self.tuning.trial_rows() if self.tuning else [],
            "trunks": [
                {
                    **{key: value for key, value in _row(trunk.cell).items() if key in ("arm", "size", "data", "seed")},
                    **_trunk_row(trunk),
                }
                for line in self.trunks
                for trunk in line
            ],
        }

    def task(self, job: Job) -> Task:
        """The order a gang gets for a job."""
        cell = self._cell[job.cell_id]
        rate = self._rate(cell)
        recipe = self.study.recipe if rate is None else self.study.recipe.at_rate(rate)
        task = jobs.task(self.study, self.folder, job, cell, recipe, self.before(job))
        return self.tuning.task(job.id, task) if self.tuning and job.kind == "tune" else task

    def _rate(self, cell: Cell) -> float | None:
        """The learning rate of a cell; None while its tuning is not over."""
        if self.tuning and self.tuning.group_of(cell):
            return self.tuning.rate_of(cell)
        return self.study.recipe_of(cell.arm, cell.size).learning_rate

    def before(self, job: Job) -> Trunk | None:
        """The trunk that a job starts from."""
        return self._trunk.get(job.after[0]) if job.after else None

    def _origin(self, cell: Cell) -> dict[str, Any]:
        """Where a cell's first steps and its rate come from, for the documents."""
        group = self.tuning.group_of(cell) if self.tuning else None
        return {"trunk": self._trunk_row(cell), "tuning": {"name": group.name, "id": group.id} if group else None}

    def _trunk_row(self, cell: Cell) -> dict[str, Any] | None:
        """The trunk that a cell leaves where its own decay begins."""
        trunk = self._leaves.get(cell.id)
        return _trunk_row(trunk) if trunk else None

    @cached_property
    def _leaves(self) -> dict[str, Trunk]:
        return {cell_id: trunk for line in self.trunks for trunk in line for cell_id in trunk.cells}

    @cached_property
    def _trunk(self) -> dict[str, Trunk]:
        return {trunk.id: trunk for line in self.trunks for trunk in line}

    @cached_property
    def _cell(self) -> dict[str, Cell]:
        return {cell.id: cell for cell in self.cells}


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


def make(
    study: Study,
    folder: Path,
    known: Mapping[str, Known],
    earlier: Mapping[str, dict[str, Any]] | None = None,
    slots: int = 1,
    speeds: Iterable[Speed] = (),
    device: Device | None = None,
) -> Plan:
    """The jobs a study still needs.

    folder: STUDY_ROOT/NAME. known: job id → what the ledger says. earlier: cell id → what `ledger_row` wrote of the
    cells seen before, to explain new identities. slots: devices that work at once. speeds: the root's throughput
    table. Raises InputError.
    """
    cells = expand(study)
    earlier = earlier or {}
    stage = tuning.of_study(study, folder)
    device = device or Device()
    documents = {cell.id: cell.document for cell in cells} | (stage.documents(known) if stage else {})
    times = Times(
        estimates.trained_paces(documents, earlier, known) if device.here else {},
        throughput.on(speeds, device.name, device.threads),
        device,
    )
    missing, measurements, changed = [], [], {}
    lines = trunks.of_study(cells, study.recipe) if study.machine.share_trunks else ()
    lost = [
        job_id
        for job_id in (*(trunk.id for line in lines for trunk in line), *(cell.id for cell in cells))
        if job_id in known and known[job_id].state == "finished" and jobs.is_gone(folder / "jobs" / job_id)
    ]
    for cell in cells:
        state = known.get(cell.id)
        if state is None and earlier:
            changed[cell.id] = _nearest_change(cell, earlier)
        if state is None or cell.id in lost or state.state not in ("finished", "diverged"):
            missing.append(cell)
        elif state.state == "finished":
            measurements += jobs.of_measurements(study, folder, cell, times)
    begun = {cell.id for cell in missing if cell.id in known and known[cell.id].begun and cell.id not in lost}
    plan = trunks.branching(
        lines,
        study.recipe,
        [cell for cell in missing if cell.id not in begun],
        [job_id for job_id, job in known.items() if job.state == "finished" and job_id not in lost],
    )
    by_id = {cell.id: cell for cell in cells}
    trials, gone = stage.to_run(missing, known, jobs.is_gone) if stage else ([], [])
    lost += gone

    def training(kind: Literal["train", "trunk"], job_id: str, cell: Cell, steps: int, ids: Iterable[str]) -> Job:
        sharing, tuned = [by_id[cell_id] for cell_id in ids], stage.waits_for(cell) if stage else ()
        return jobs.of_training(study, kind, job_id, cell, steps, plan.before.get(job_id), sharing, times, tuned)

    def trial(planned: TrialJob, stage: Stage) -> Job:
        measure = stage.by_name[planned.group].measure_id
        return jobs.of_trial(study, stage.cell_of(planned, cells), planned, measure, times)

    to_run = [
        *(trial(planned, stage) for planned in trials if stage),
        *(training("trunk", trunk.id, trunk.cell, trunk.steps, trunk.cells) for trunk in plan.trunks),
        *(training("train", cell.id, cell, cell.steps, [cell.id]) for cell in missing),
        *measurements,
    ]
    disk = estimates.disk_bytes(study, by_id, to_run, slots)
    explained = {cell: why for cell, why in changed.items() if why}
    separate = trunks.why_not(len(study.budgets), study.recipe, study.machine.share_trunks, lines)
    used = [job_id for job_id in lost if any(job.id == job_id for job in to_run)]
    return Plan(
        study, folder, cells, tuple(to_run), disk, slots, explained, tuple(used), lines, separate, stage, device
    )


def _nearest_change(cell: Cell, earlier: Mapping[str, dict[str, Any]]) -> list[str]:
    """The shortest list of differing fields over earlier cells of the same arm, size, data condition and seed."""
    place = ("arm", "size", "data", "seed")
    alike = [old for old in earlier.values() if all(old[key] == getattr(cell, key) for key in place)]
    return min((identity.differences(old["document"], cell.document) for old in alike), key=len, default=[])


def _trunk_row(trunk: Trunk) -> dict[str, Any]:
    return {"id": trunk.id, "tokens": trunk.steps * trunk.cell.tokens_per_step}


def ledger_row(cell: Cell) -> dict[str, Any]:
    """What the ledger keeps of a cell, for `make(earlier=…)`."""
    return {**_row(cell), "document": cell.document}


def _row(cell: Cell) -> dict[str, Any]:
    columns = ("id", "arm", "size", "data", "budget_tokens", "seed", "params", "non_embedding_params")
    return {key: getattr(cell, key) for key in columns}
