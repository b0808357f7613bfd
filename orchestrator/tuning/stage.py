"""The tuning stage of a plan: which trials are still to run, and which rates are known before anything runs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cells import Cell
from orchestrator.measure import Measure
from orchestrator.training.task import Task
from orchestrator.tuning import groups as grouping
from orchestrator.tuning import outcome, results
from orchestrator.tuning.groups import NO_CELLS_SEED, Group, Key, TrialJob

if TYPE_CHECKING:
    from orchestrator.jobs import Known
    from orchestrator.study import Study


@dataclass(frozen=True)
class Stage:
    """groups: by (arm, size, data condition). rates: by group name, of those whose tuning is over."""

    groups: Mapping[Key, Group]
    rates: Mapping[str, float]
    measure: Measure
    study_folder: Path

    def group_of(self, cell: Cell) -> Group | None:
        """The group that gives a cell its rate; None where the study gives it."""
        return self.groups.get((cell.arm, cell.size, cell.data))

    def rate_of(self, cell: Cell) -> float | None:
        """The rate of a cell, once it is known; None too where no tuning gives it."""
        group = self.group_of(cell)
        return self.rates.get(group.name) if group else None

    def waits_for(self, cell: Cell) -> tuple[str, ...]:
        """Ids of the trials that must have ended before a cell can train."""
        group = self.group_of(cell)
        return () if group is None or group.name in self.rates else group.last

    def open_groups(self, cells: Iterable[Cell]) -> list[Group]:
        """Groups whose trials give these cells a rate that is not known yet, laws resolved to what they are over."""
        found: dict[str, Group] = {}
        for cell in cells:
            group = self.group_of(cell)
            if group and group.name not in self.rates:
                found |= {each.name: each for each in group.over or (group,) if each.name not in self.rates}
        return list(found.values())

    def to_run(
        self, cells: Iterable[Cell], known: Mapping[str, "Known"], is_gone: Callable[[Path], bool]
    ) -> tuple[list[TrialJob], list[str]]:
        """The jobs of the trials that these cells wait for, and the ids of those among them that have lost their files.

        known: what the ledger says of jobs. is_gone: whether a job's folder has nothing left in it.
        """
        wanted, lost = [], []
        for job in (job for group in self.open_groups(cells) for job in group.jobs):
            state = known.get(job.id)
            over = state is not None and state.state in ("finished", "diverged")
            if over and state and state.begun and is_gone(self.study_folder / "jobs" / job.id):
                lost.append(job.id)
            elif over:
                continue
            wanted.append(job)
        return wanted, lost

    def documents(self, known: Mapping[str, "Known"]) -> dict[str, dict[str, Any]]:
        """Identities of the trials that have trained, by job, for what they tell of a model's pace."""
        begun = [job for job in self.jobs.values() if job.id in known and known[job.id].begun]
        return {job.id: self.by_name[job.group].search for job in begun}

    def cell_of(self, job: TrialJob, cells: Iterable[Cell]) -> Cell:
        """One that shares model and data with a trial."""
        group = self.by_name[job.group]
        return next(cell for cell in cells if (cell.arm, cell.size, cell.data) == (group.arm, group.size, group.data))

    def task(self, job_id: str, task: Task) -> Task:
        """The order for a trial's job, made of that for a cell of its group."""
        job = self.jobs[job_id]
        group = self.by_name[job.group]
        return replace(
            task,
            kind="tune",
            job_id=job.id,
            folder=self.study_folder / "jobs" / job.id,
            seed=NO_CELLS_SEED + group.tuning.seed,
            steps=job.steps,
            schedule_steps=job.steps,
            measures=((group.measure_id, self.measure),),
            evaluate_at=(job.steps,),
            checkpoint_at=(job.steps,),
            trunk=None,
        )

    def trial_rows(self) -> list[dict[str, Any]]:
        """A row of study.json for each trial at each rung, whether it has run or not."""
        return [
            {
                "id": job.id,
                "group": group.name,
                "arm": group.arm,
                "size": group.size,
                "data": group.data,
                "number": job.number,
                "tokens": job.tokens,
            }
            for group in self.groups.values()
            for job in group.jobs
        ]

    def found_below(self, group: Group) -> dict[str, dict[str, Any]] | None:
        """The findings a law rests on, by name; None while one of them is not there."""
        found = {each.name: results.read(self.study_folder, each.name, each.id) for each in group.over}
        there = {name: each for name, each in found.items() if each}
        return there if len(there) == len(found) else None

    @cached_property
    def by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups.values()}

    @cached_property
    def jobs(self) -> dict[str, TrialJob]:
        return {job.id: job for group in self.groups.values() for job in group.jobs}


def of_study(study: "Study", folder: Path) -> Stage | None:
    """None where nothing is tuned. folder: STUDY_ROOT/NAME. Raises InputError."""
    groups = grouping.of_study(study)
    if not groups:
        return None
    found = {group.name: results.read(folder, group.name, group.id) for group in groups.values()}
    stage = Stage(
        groups, {name: each["rate"] for name, each in found.items() if each}, grouping.measure_of(study), folder
    )
    by_law = {group.name: stage.found_below(group) for group in groups.values() if group.over and not found[group.name]}
    late = {name: outcome.of_law(stage.by_name[name], below)["rate"] for name, below in by_law.items() if below}
    return replace(stage, rates={**stage.rates, **late})
