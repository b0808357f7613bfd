"""A study whose tuning trials are not trained but made up: a loss curve in place of every training job."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from test_study import SIZE, Noise

from orchestrator import identity, plan
from orchestrator.jobs import Job, Known
from orchestrator.ledger import AttemptEnd, JobRow, Ledger
from orchestrator.loop import Waiting
from orchestrator.measure import Measurement
from orchestrator.plan import Plan
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Study
from orchestrator.submit import _tuner
from orchestrator.tuning.settings import Tuning

STEP = 2 * 64  # tokens
BIG = SIZE.model_copy(update={"name": "big", "d_model": 32, "d_ff": 64})
HUGE = SIZE.model_copy(update={"name": "huge", "d_model": 64, "d_ff": 128})
Curve = Callable[[float, float], float | None]  # (rate, share of the trial) → loss; None where it diverges


class Validation:
    name = "validation"

    def identity(self) -> dict[str, Any]:
        return {"documents": 8}

    def capabilities(self, data: Any) -> tuple[str, ...]:
        return ()

    def __call__(self, model: Any, data: Any) -> Measurement:
        raise NotImplementedError


def tuned(tuning: dict[str, Any] | None = None, **changes: Any) -> Study:
    settings = {"low": 1e-3, "high": 1e-1, "budget": 20 * STEP, "trials": 8, "rungs": (0.25,), **(tuning or {})}
    fields = {
        "name": "tuned",
        "arms": [Arm(name="full", pattern="full")],
        "sizes": [SIZE],
        "budgets": [6400],
        "seeds": [0, 1],
        "data": Noise(),
        "recipe": Recipe(learning_rate=0.02, batch_size=2),
        "measures": [Validation()],
        "tuning": Tuning(**settings),
    }
    return Study(**{**fields, **changes})


def valley(at: float) -> Curve:
    """Lowest at a rate, in the middle of a trial too."""
    return lambda rate, share: 3 - share + 0.2 * math.log(rate / at) ** 2


class Killed(Exception):
    """The driver's end, between any two steps."""


def _ready_trials(ledger: Ledger, jobs: Sequence[Job]) -> list[JobRow]:
    rows = ledger.snapshot()
    pending = [job for job in jobs if rows[job.id].state == "pending"]
    waiting = Waiting(pending, {row.id for row in rows.values() if row.state == "finished"})
    return sorted(
        (rows[job.id] for job in waiting.ready.by_length(()) if rows[job.id].kind == "tune"), key=lambda row: row.id
    )


class FakeDriver:
    """One session: runs the trials of a plan in an order drawn from `order`, each as long as a line of its record.

    kill_after: number of jobs ended in this session before the driver dies; half of the time before the tuner is told.
    """

    def __init__(self, study: Study, folder: Path, curve: Curve | dict[str, Curve], order: int = 0) -> None:
        self.study, self.folder, self.curve = study, folder, curve
        self.random = random.Random(order)
        self.ran: list[tuple[str, float]] = []
        self.told: list[str] = []
        (folder / "jobs").mkdir(parents=True, exist_ok=True)

    def plan(self) -> Plan:
        known = {}
        if Ledger.is_at(self.folder / "ledger.db"):
            with Ledger.read(self.folder / "ledger.db") as ledger:
                known = {
                    row.id: Known(row.state, row.busy_s, row.tokens, row.tokens_done > 0)
                    for row in ledger.snapshot().values()
                }
        return plan.make(self.study, self.folder, known)

    def run(self, kill_after: int | None = None) -> dict[str, float]:
        """The rates handed to cells by id, once no trial is left to run; cells themselves are not run."""
        planned = self.plan()
        with Ledger.open(self.folder / "ledger.db") as ledger:
            ids = [job.id for job in planned.jobs]
            ledger.recover()
            ledger.reopen(planned.lost)
            ledger.add(planned.jobs)
            ledger.retry(ids)
            tuner = _tuner(planned, ledger, self.told.append)
            assert tuner is not None
            tuner.begin()
            ledger.block()
            session = ledger.start_session(2, None)
            by_id = {job.id: job for job in planned.jobs}
            while ready := _ready_trials(ledger, planned.jobs):
                job = by_id[self.random.choice(ready).id]
                ledger.start_attempt(job.id, session, 0, warm=True, available=0.0)
                task = tuner.task(planned.task(job))
                outcome = self.train(task, by_id)
                if kill_after == len(self.ran) and self.random.random() < 0.5:
                    raise Killed
                ledger.end_attempt(job.id, AttemptEnd(outcome, "finished", tokens=job.tokens))
                if kill_after == len(self.ran):
                    raise Killed
                tuner.ended(job.id)
                ledger.block()
            tasks = [planned.task(job) for job in planned.jobs if job.kind == "train"]
            blocked = {row.id for row in ledger.snapshot().values() if row.state == "blocked"}
            return {
                task.cell_id: (tuner.task(task) if tuner.decides(task) else task).recipe.learning_rate
                for task in tasks
                if task.cell_id not in blocked
            }

    def train(self, task: Any, jobs: dict[str, Any]) -> str:
        cell = next(cell for cell in self.plan().cells if cell.id == task.cell_id)
        curve = self.curve[cell.size] if isinstance(self.curve, dict) else self.curve
        loss = curve(task.recipe.learning_rate, task.steps / 20)
        self.ran.append((task.job_id, task.recipe.learning_rate))
        if loss is None:
            task.folder.mkdir(exist_ok=True)
            (task.folder / "record.jsonl").touch()
            return "diverged"
        self.write(task, loss)
        return "finished"

    def write(self, task: Any, loss: float) -> None:
        task.folder.mkdir(exist_ok=True)
        (task.folder / "checkpoints").mkdir(exist_ok=True)
        measured = {"measurement": identity.of_measure(Validation()), "source": "validation"}
        value = None if math.isnan(loss) else loss
        line = {"step": task.steps, "tokens": task.steps * STEP, "time": 0.0, **measured}
        with open(task.folder / "record.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "metrics": {"validation/loss": value}}) + "\n")

    def found(self, name: str = "full@tiny") -> dict[str, Any]:
        return json.loads((self.folder / "tuning" / f"{name}.json").read_text())
