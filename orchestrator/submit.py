"""A study handed in: what its ledger knows, what is missing, and all that has to stand ready while the rest runs."""

import contextlib
import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import lock, throughput
from orchestrator import plan as planning
from orchestrator.devices import Device
from orchestrator.errors import InputError
from orchestrator.jobs import Known
from orchestrator.ledger import Ledger
from orchestrator.plan import Plan
from orchestrator.study import Study
from orchestrator.tuning import results as tuning_results

if TYPE_CHECKING:
    from orchestrator.driver import Event, RunResult
    from orchestrator.fleet import FleetOptions
    from orchestrator.tracked_runs import CellState
    from orchestrator.tracking import Pending, Tracker
    from orchestrator.tuning.tuner import Tuner


@dataclass(frozen=True)
class Submission:
    """ran: whether anything was missing. result: of what ran, None when nothing was missing.

    waiting: points that have not reached the tracking server yet, and why; None when nothing was to be delivered.
    """

    ran: bool
    result: "RunResult | None"
    waiting: "Pending | None" = None


@dataclass
class _CellTracker:
    """A tracker that is told where the cells stand whenever that changes, and last of all before it stops."""

    tracker: "Tracker"
    ledger: Ledger
    folder: Path
    document: dict[str, Any]
    waiting: "Pending | None" = None

    def start(self) -> None:
        self.tracker.update(run_states(self.ledger, self.folder, self.document))
        self.tracker.start()

    def update(self, job_id: str | None) -> None:
        """After an event of a job, or of the whole run."""
        self.tracker.update(run_states(self.ledger, self.folder, self.document, None if job_id is None else [job_id]))

    def stop(self, timeout: float) -> Any:
        self.tracker.update(run_states(self.ledger, self.folder, self.document))
        self.waiting = self.tracker.stop(timeout)
        return self.waiting


def run_states(
    ledger: Ledger, folder: Path, document: dict[str, Any], job_ids: Collection[str] | None = None
) -> "dict[str, CellState]":
    """Where each run the ledger knows stands: cells by their training job, whose id is theirs, trunks and trials too.

    folder: STUDY_ROOT/NAME; document: its study.json. What tuning has found stands in the tags.
    job_ids: of these alone.
    """
    from orchestrator.tracked_runs import CellState

    tags = tuning_results.tags(folder, document)
    return {
        row.id: CellState(row.state, row.cause, row.attempts, tags.get(row.id, {}))
        for row in ledger.snapshot(job_ids).values()
        if row.kind != "measure"
    }


def make_plan(study: Study, root: Path, slots: int, device: Device | None = None) -> Plan:
    """The plan of a study in the light of what its ledger, if there is one, knows. Creates nothing.

    device: what a worker runs on, None where time does not matter.
    """
    folder = root / study.name
    known: dict[str, Known] = {}
    earlier: dict[str, dict[str, Any]] = {}
    if Ledger.is_at(folder / "ledger.db"):
        with Ledger.read(folder / "ledger.db") as ledger:
            known = {
                job.id: Known(job.state, job.busy_s, job.tokens, job.tokens_done > 0)
                for job in ledger.snapshot().values()
            }
            earlier = ledger.cells()
    return planning.make(study, folder, known, earlier, slots, throughput.read(root) if device else (), device)


def submit(
    plan: Plan,
    source: Path,
    options: "FleetOptions",
    *,
    tracking_uri: str | None = None,
    on_event: "Callable[[Event], None]" = lambda event: None,
    started: float | None = None,
) -> Submission:
    """Runs what a plan misses. source: the study file, whose folder's modules travel with it.

    Raises InputError before anything is started; a study folder that was not there before is then gone again.
    """
    folder, root = plan.folder, plan.folder.parent
    document = json.loads(json.dumps(plan.study_document(source)))
    if not plan.jobs and _is_delivered(plan, document, tracking_uri):
        return Submission(False, None)
    from orchestrator import driver
    from orchestrator.tracking import Tracker

    made = _make(folder)
    with lock.held(folder):
        try:
            _write(folder / "study.json", document)
            for cell in document["cells"]:
                (folder / "jobs" / cell["id"]).mkdir(exist_ok=True)
                _write(folder / "jobs" / cell["id"] / "config.json", cell)
            with Ledger.open(folder / "ledger.db") as ledger:
                ledger.reopen([*plan.lost, *(job.id for job in plan.jobs if job.kind == "measure")])
                tracker = _CellTracker(Tracker(root, document, tracking_uri), ledger, folder, document)

                def told(event: "Event") -> None:
                    tracker.update(event.job_id)
                    on_event(event)

                tuner = _tuner(plan, ledger, lambda line: told(driver.Event("tuned", None, line)))

                result = driver.run(
                    plan.jobs,
                    plan.task,
                    ledger,
                    options,
                    cells={cell.id: planning.ledger_row(cell) for cell in plan.cells},
                    study_folder=source.parent,
                    tracker=tracker,
                    tuner=tuner,
                    on_event=told,
                    started=started,
                )
        except InputError:
            if made:
                shutil.rmtree(folder)
                for parent in made[1:]:
                    with contextlib.suppress(OSError):  # somebody else's files are in it by now
                        parent.rmdir()
            raise
    return Submission(bool(plan.jobs), result, tracker.waiting)


def _tuner(plan: Plan, ledger: Ledger, tell: Callable[[str], None]) -> "Tuner | None":
    """What finds the rates of a plan's cells; None where the study gives them all."""
    if plan.tuning is None:
        return None
    from orchestrator.tuning.tuner import Tuner

    by_id = {cell.id: cell for cell in plan.cells}
    waiting = [by_id[job.cell_id] for job in plan.jobs if job.kind != "measure"]
    group_of = {cell.id: group for cell in plan.cells if (group := plan.tuning.group_of(cell))}
    return Tuner(plan.tuning, plan.tuning.open_groups(waiting), group_of, ledger, tell)


def _is_delivered(plan: Plan, document: dict[str, Any], tracking_uri: str | None) -> bool:
    """Whether study.json and the tracking store already say what they should. Imports no MLflow."""
    from orchestrator.tracking import up_to_date

    try:
        if json.loads((plan.folder / "study.json").read_text(encoding="utf-8")) != document:
            return False
    except (OSError, ValueError):
        return False
    with Ledger.read(plan.folder / "ledger.db") as ledger:
        states = run_states(ledger, plan.folder, document)
        return up_to_date(plan.folder.parent, document, states, tracking_uri)


def _make(folder: Path) -> list[Path]:
    """Makes a study's folder; returns the folders that were not there before, the deepest first."""
    absent = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "jobs").mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"--root: {folder.parent} cannot be written ({error.strerror}); give another") from None
    return absent


def _write(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    partial.replace(path)  # a reader never sees half of it
