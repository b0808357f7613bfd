"""Tuning while a driver runs: asks Optuna, reads what trials left, prunes, and hands cells the rates found.

All of it follows from three things on disk: the ledger says which jobs have ended, the records what they reached, the
journal what Optuna was told. `_go_through` goes through a search from its beginning and does what is still to be done:
a driver killed between any two steps is taken up by the next one.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator import record
from orchestrator.errors import InputError
from orchestrator.ledger import Ledger
from orchestrator.tuning import outcome, results
from orchestrator.tuning.groups import Group
from orchestrator.tuning.stage import Stage

if TYPE_CHECKING:
    from orchestrator.training.task import Task
    from orchestrator.tuning.search import Search, Tried

ENDED = ("finished", "diverged")


class Tuner:
    """What the driver asks when a job starts or ends. The caller holds the study's lock.

    groups: those whose trials the plan runs. group_of: cell id → the group that gives its rate. tell: takes lines for
    the user.
    """

    def __init__(
        self,
        stage: Stage,
        groups: Sequence[Group],
        group_of: Mapping[str, Group],
        ledger: Ledger,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._stage, self._groups, self._group_of, self._ledger, self._tell = stage, groups, group_of, ledger, tell
        self._folder = stage.study_folder
        self._rates = dict(stage.rates)
        self._searches: dict[str, Search] = {}
        self._jobs = {job.id: group for group in groups for job in group.jobs}

    def begin(self) -> None:
        """Takes up what is there. Raises InputError where the journal is damaged."""
        if self._groups:
            from orchestrator.tuning.search import Search, open_journal

            journal = open_journal(self._folder / results.FOLDER / "journal.log")
            for group in self._groups:
                self._searches[group.name] = Search(journal, group.search_id, group.tuning)
                self._advance(group)
        self._resolve_laws()

    def decides(self, task: "Task") -> bool:
        """Whether the task's rate has to be asked for, just before it starts."""
        group = self._group_of.get(task.cell_id) if task.kind != "measure" else None
        return task.job_id in self._jobs or (group is not None and group.name not in self._stage.rates)

    def task(self, task: "Task") -> "Task":
        """The task with its rate, whose trials have ended by now."""
        if group := self._jobs.get(task.job_id):
            rate = self._searches[group.name].trials()[self._stage.jobs[task.job_id].number].rate
        else:
            rate = self._rates[self._group_of[task.cell_id].name]
        return replace(task, recipe=task.recipe.at_rate(rate))

    def ended(self, job_id: str) -> None:
        """A job has ended by itself, and the ledger knows."""
        if group := self._jobs.get(job_id):
            self._advance(group)

    def is_trial(self, job_id: str) -> bool:
        return job_id in self._jobs

    def _advance(self, group: Group) -> None:
        """Does what is to be done for a group. A fault there ends its search, not the run of what does not need it."""
        if group.name in self._rates:
            return
        try:
            self._go_through(group)
        except InputError as error:
            rows = self._ledger.snapshot([job.id for job in group.jobs]).values()
            self._ledger.settle([row.id for row in rows if row.state not in (*ENDED, "running")], "failed", str(error))
            self._tell(str(error))

    def _go_through(self, group: Group) -> None:
        search = self._searches[group.name]
        rows = self._ledger.snapshot([job.id for job in group.jobs])
        for numbers in group.tuning.rounds():
            search.ask(numbers)
            alive = list(numbers)
            for steps in group.rungs:
                tried = {trial.number: trial for trial in search.trials()}
                jobs = {number: group.job_id(number, steps) for number in alive}
                waiting = [n for n in alive if tried[n].state == "open" and rows[jobs[n]].state not in ENDED]
                if waiting:
                    return
                losses = {number: self._loss(group, tried[number], steps) for number in alive}
                reached = {number: loss for number, loss in losses.items() if loss is not None}
                search.report(steps, reached)
                failed = [number for number in alive if number not in reached]
                search.end("failed", failed)
                self._skip(group, failed, steps, "diverged")
                going_on = list(reached)
                if steps == group.rungs[-1]:
                    search.end("complete", going_on)
                else:
                    better = search.better_half(steps, numbers.stop)
                    going_on = [number for number in reached if number in better]
                    pruned = [number for number in reached if number not in better]
                    search.end("pruned", pruned)
                    self._skip(group, pruned, steps, "pruned")
                self._settle_told(group, [number for number in alive if tried[number].state != "open"])
                alive = going_on
                self._tidy(jobs.values())
        self._resolve(group, search.trials())

    def _loss(self, group: Group, trial: "Tried", steps: int) -> float | None:
        """What a trial reached at a rung; None where it diverged or its loss was not finite."""
        if trial.state != "open":
            return trial.losses.get(steps)
        lines = record.read(self._folder / "jobs" / group.job_id(trial.number, steps) / "record.jsonl")
        for line in lines:
            if line["step"] == steps and line.get("measurement") == group.measure_id:
                if group.tuning.metric not in line["metrics"]:
                    known = ", ".join(line["metrics"])
                    raise InputError(f"tuning.metric: {group.tuning.metric!r} is not measured; choose from {known}")
                loss = line["metrics"][group.tuning.metric]
                return loss if loss is not None and math.isfinite(loss) else None
        return None

    def _skip(self, group: Group, numbers: Sequence[int], steps: int, why: str) -> None:
        """What is left of trials that go no further counts as done."""
        later = [group.job_id(number, rung) for number in numbers for rung in group.rungs if rung > steps]
        self._ledger.settle(later, "finished", f"{why} after {steps} steps")

    def _settle_told(self, group: Group, numbers: Sequence[int]) -> None:
        """Trials that Optuna knows the end of need no job, whatever became of the ledger."""
        self._ledger.settle([group.job_id(n, rung) for n in numbers for rung in group.rungs], "finished", None)

    def _tidy(self, job_ids: Iterable[str]) -> None:
        """Drops checkpoints of trials that have ended: nothing goes on from them."""
        for job_id in job_ids:
            shutil.rmtree(self._folder / "jobs" / job_id / "checkpoints", ignore_errors=True)

    def _resolve(self, group: Group, trials: Sequence["Tried"]) -> None:
        found = outcome.of_trials(group, trials)
        if found is None:
            cause = (
                f"every one of {len(trials)} tuning trials of {group.arm} {group.size} diverged; lower tuning.low "
                f"{group.tuning.low:g} and tuning.high {group.tuning.high:g}"
            )
            self._ledger.settle(group.last[-1:], "diverged", cause)
            self._tell(cause)
            return
        self._write(found)
        self._resolve_laws()

    def _resolve_laws(self) -> None:
        for group in self._stage.groups.values():
            if group.over and results.read(self._folder, group.name, group.id) is None:
                found = self._stage.found_below(group)
                if found:
                    self._write(outcome.of_law(group, found))

    def _write(self, found: Mapping[str, Any]) -> None:
        results.write(self._folder, found)
        self._rates[found["name"]] = found["rate"]
        self._tell(results.sentence(found))
        for line in found["warnings"]:
            self._tell(f"warning: {line}")
