"""The loop that runs a study: ledger → scheduler → fleet → ledger, until nothing is ready or somebody says stop."""

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from orchestrator import cluster, scheduler
from orchestrator.errors import InputError
from orchestrator.fleet import Fleet, FleetOptions
from orchestrator.ledger import JobRow, Ledger, PlannedJob, State
from orchestrator.loop import Event, Loop, Tuner
from orchestrator.training.task import Task

HUNG_S = 1800.0
DELIVERY_S = 60.0  # what MLflow may take once nothing trains any more; making its tables takes ten on a busy machine
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

AnyJob = TypeVar("AnyJob", bound=PlannedJob)


class Tracking(Protocol):
    """What follows the records while jobs run (`orchestrator.tracking.Tracker`)."""

    def start(self) -> None: ...
    def stop(self, timeout: float) -> Any: ...


@dataclass(frozen=True)
class RunResult:
    """exit_code: 0 every job has finished; 1 some failed, diverged or are blocked; 128 + signal when stopped by one.

    causes: lines that explain the jobs that did not finish, the same cause of many jobs once.
    """

    exit_code: int
    counts: dict[State, int]
    causes: list[str]
    stopped_by: signal.Signals | None = None


def run(
    jobs: Sequence[AnyJob],
    task_of: Callable[[AnyJob], Task],
    ledger: Ledger,
    options: FleetOptions,
    *,
    cells: Mapping[str, Mapping[str, Any]] | None = None,
    study_folder: Path | None = None,
    tracker: Tracking | None = None,
    tuner: Tuner | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    started: float | None = None,
    hung_s: float = HUNG_S,
) -> RunResult:
    """Run what is missing of `jobs`. The caller holds the study (`lock.held`).

    cells: what the ledger keeps of each cell. study_folder: whose modules travel to the workers by value. started: unix
    seconds from which the makespan counts. hung_s: a job whose tokens stand still for so long counts as lost.
    tuner: gives tasks their learning rate when they start. Raises InputError before anything is started, and where a
    tuning trial does not measure what is tuned.
    """
    ledger.recover()
    ledger.add(jobs, cells)
    ids = [job.id for job in jobs]
    ledger.retry(ids)
    if tuner is not None:
        tuner.begin()
    ledger.block()
    rows = ledger.snapshot(ids)
    missing = [job for job in jobs if rows[job.id].state == "pending"]
    if not missing:
        if tracker is not None:
            tracker.start()
            tracker.stop(DELIVERY_S)
        return _result(ledger, ids, [], None)
    workers = max(job.workers for job in missing)
    if options.address is None:
        _check_fits(workers, options.slots())
    if study_folder is not None:
        cluster.ship_by_value(study_folder)
    tasks = {job.id: _absolute(task_of(job)) for job in missing}
    for task in {id(task.data): task for task in tasks.values()}.values():
        cluster.pack(task)  # what one of them cannot send, none of the same data can: it is said before all starts
    with _Signals() as signals, ExitStack() as held:
        if tracker is not None:
            held.callback(lambda: tracker.stop(1.0 if signals.first else DELIVERY_S))
        try:
            fleet = Fleet(options)
        except SystemExit:  # Ray's own answer to a SIGTERM while it starts
            signals.first = signals.first or signal.SIGTERM
            return _result(ledger, ids, [], signals.first)
        try:
            fleet.request(sum(job.workers for job in missing), workers)
            _check_fits(workers, fleet.slots)
            session = ledger.start_session(fleet.slots, options.address, started)
            loop = Loop(
                fleet,
                ledger,
                session,
                missing,
                tasks,
                cluster.pack,
                tuner=tuner,
                on_event=on_event,
                signals=signals,
                hung_s=hung_s,
            )
            loop.run(tracker.start if tracker is not None else lambda: None)
        finally:
            fleet.close()
            ledger.recover()
        ledger.end_session(session)
    return _result(ledger, ids, loop.lines, signals.first)


def _absolute(task: Task) -> Task:
    """For workers that start in another folder than the driver's."""
    return replace(task, folder=task.folder.resolve(), trunk=task.trunk and task.trunk.resolve())


def _check_fits(workers: int, slots: int) -> None:
    if workers > slots:
        raise InputError(f"machine.workers: {workers} do not fit on {slots} slots; lower it or raise --cpus")


class _Signals:
    """Notes the first of STOPS; the second one raises KeyboardInterrupt, which ends everything at once.

    One that is ignored (SIGHUP under nohup) stays so.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in STOPS}
            self._before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.first is not None:
            raise KeyboardInterrupt
        self.first = signal.Signals(number)


def _result(ledger: Ledger, ids: Sequence[str], lines: list[str], stopped_by: signal.Signals | None) -> RunResult:
    counts = ledger.counts(ids)
    alike: dict[str, list[JobRow]] = {}
    for row in ledger.snapshot(ids).values():
        if row.state in ("failed", "diverged", "blocked"):
            alike.setdefault(f"{row.state} {scheduler.grouped_cause(row.cause or '')}", []).append(row)
    causes = []
    for rows in alike.values():
        named = ", ".join(row.id for row in rows[:3]) + (", …" if len(rows) > 3 else "")
        causes.append(f"{len(rows)} {rows[0].state}: {rows[0].cause} (job {named})")
    code = 0 if counts["finished"] == len(ids) else 1
    return RunResult(128 + stopped_by if stopped_by and code else code, counts, [*lines, *causes], stopped_by)
