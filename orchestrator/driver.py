"""The loop that runs a study: ledger → scheduler → fleet → ledger, until nothing is ready or somebody says stop."""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from orchestrator import cluster, scheduler
from orchestrator.errors import InputError
from orchestrator.fleet import Fleet, FleetOptions, GangLost, JobEnded
from orchestrator.ledger import AttemptEnd, JobRow, Ledger, PlannedJob, State
from orchestrator.training.task import Outcome, Task
from orchestrator.worker import Failure

POLL_S = 0.25
PROGRESS_S = 1.0
STOP_GRACE_S = 6.0  # of the 10 s a stop may take; Ray's own end takes two
HUNG_S = 1800.0
DELIVERY_S = 60.0  # what MLflow may take once nothing trains any more; making its tables takes ten on a busy machine
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PORT_TRIES = 5

AnyJob = TypeVar("AnyJob", bound=PlannedJob)


class Tracking(Protocol):
    """What follows the records while jobs run (`orchestrator.tracking.Tracker`)."""

    def start(self) -> None: ...
    def stop(self, timeout: float) -> Any: ...


@dataclass(frozen=True)
class Event:
    """Something to tell the user. job_id: None where it concerns the whole run."""

    kind: Literal["fleet", "started", "finished", "diverged", "stopped", "retried", "failed", "blocked", "stopping"]
    job_id: str | None
    text: str


@dataclass(frozen=True)
class RunResult:
    """exit_code: 0 every job has finished; 1 some failed, diverged or are blocked; 128 + signal when stopped by one.

    causes: lines that explain the jobs that did not finish, the same cause of many jobs once.
    """

    exit_code: int
    counts: dict[State, int]
    causes: list[str]
    stopped_by: signal.Signals | None = None


@contextmanager
def study_lock(folder: Path) -> Iterator[None]:
    """Hold a study for one driver. Raises InputError naming the process that holds it; a dead one holds nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "run.lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise InputError(
                f"study: {folder.name} is being run by process {holder}; wait for it, or stop it with Ctrl-C there"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def run(
    jobs: Sequence[AnyJob],
    task_of: Callable[[AnyJob], Task],
    ledger: Ledger,
    options: FleetOptions,
    *,
    cells: Mapping[str, Mapping[str, Any]] | None = None,
    study_folder: Path | None = None,
    tracker: Tracking | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    started: float | None = None,
    hung_s: float = HUNG_S,
) -> RunResult:
    """Run what is missing of `jobs`. The caller holds `study_lock`.

    cells: what the ledger keeps of each cell. study_folder: whose modules travel to the workers by value. started: unix
    seconds from which the makespan counts. hung_s: a job whose tokens stand still for so long counts as lost.
    Raises InputError before anything is started.
    """
    ledger.recover()
    ledger.add(jobs, cells)
    ids = [job.id for job in jobs]
    ledger.retry(ids)
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
    tasks = [task_of(job) for job in missing]
    payloads = {task.job_id: cluster.pack(replace(task, folder=task.folder.resolve())) for task in tasks}
    with _Signals() as signals, ExitStack() as held:
        if tracker is not None:
            held.callback(lambda: tracker.stop(1.0 if signals.first else DELIVERY_S))
        try:
            fleet = Fleet(options)
        except SystemExit:  # Ray's own answer to a SIGTERM while it starts
            signals.first = signals.first or signal.SIGTERM
            return _result(ledger, ids, [], signals.first)
        try:
            _check_fits(workers, fleet.slots)
            session = ledger.start_session(fleet.slots, options.address, started)
            loop = _Loop(fleet, ledger, session, payloads, on_event, signals, hung_s)
            loop.run(tracker.start if tracker is not None else lambda: None)
        finally:
            fleet.close()
            ledger.recover()
        ledger.end_session(session)
    return _result(ledger, ids, loop.lines, signals.first)


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


class _Loop:
    """State of one session: which gang runs which job, since when gangs and jobs could have gone on."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        session: int,
        payloads: Mapping[str, bytes],
        on_event: Callable[[Event], None],
        signals: _Signals,
        hung_s: float,
    ) -> None:
        self.fleet, self.ledger, self.session, self.payloads = fleet, ledger, session, payloads
        self.on_event, self.signals, self.hung_s = on_event, signals, hung_s
        self.lines: list[str] = []
        self._attempts: dict[str, int] = {}  # of this session
        self._port_tries: dict[str, int] = {}
        self._failures: list[str] = []
        self._ready_since: dict[str, float] = {}
        self._free_since: dict[int, float] = {}
        self._warm: set[int] = set()
        self._broken: str | None = None
        self._stop_at: float | None = None

    def run(self, on_first_start: Callable[[], None]) -> None:
        """Returns when no job runs and none can be started.

        on_first_start: what can wait until the workers have their processors for themselves no more.
        """
        told, first_start = 0.0, True
        self._schedule()
        while True:
            running = self.fleet.running()
            if running and first_start:
                first_start = False
                on_first_start()
            if self.signals.first and self._stop_at is None:
                self._stop_at = time.monotonic() + STOP_GRACE_S
                self.on_event(Event("stopping", None, f"{self.signals.first.name}: checkpointing {len(running)} jobs"))
                for gang in running:
                    self.fleet.stop(gang)
            if not running and (self._stop_at is not None or self._broken or not self._ready()):
                return
            if self._stop_at is not None and time.monotonic() > self._stop_at:
                for job_id in running.values():
                    cause = f"killed {STOP_GRACE_S:.0f} s after it was asked to stop"
                    self.ledger.end_attempt(job_id, AttemptEnd("lost", "pending", cause))
                return
            for event in self.fleet.poll(POLL_S):
                self._handle(event)
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                self._tell_progress()
            if self._stop_at is None and not self._broken:
                self._schedule()

    def _ready(self) -> list[scheduler.ReadyJob]:
        rows = [row for row in self.ledger.ready() if row.id in self.payloads]
        return [scheduler.ReadyJob(row.id, row.workers, row.flops) for row in rows]

    def _schedule(self) -> None:
        now = time.time()
        ready = self._ready()
        for job in ready:
            self._ready_since.setdefault(job.id, now)
        gangs = [scheduler.Gang(*gang) for gang in self.fleet.gangs()]
        actions = scheduler.decide(ready, gangs, self.fleet.slots)
        for action in actions:
            match action:
                case scheduler.Create(workers):
                    self.fleet.create(workers)
                case scheduler.Retire(gang_id):
                    self.fleet.retire(gang_id)
                case scheduler.Start(job_id, gang_id):
                    self._start(job_id, gang_id)
        if any(isinstance(action, scheduler.Retire) for action in actions):
            self._schedule()  # onto the slots just freed

    def _start(self, job_id: str, gang_id: int) -> None:
        available = max(self._ready_since.pop(job_id), self._free_since.get(gang_id, 0.0))
        warm = gang_id in self._warm
        self.ledger.start_attempt(job_id, self.session, gang_id, warm=warm, available=available)
        self._attempts[job_id] = self._attempts.get(job_id, 0) + 1
        self._warm.add(gang_id)
        self.fleet.start(gang_id, job_id, self.payloads[job_id])
        self.on_event(Event("started", job_id, f"on gang {gang_id}"))

    def _handle(self, event: Any) -> None:
        self._free_since[event.gang_id] = time.time()
        match event:
            case JobEnded(_, job_id, Outcome() as outcome):
                self._end(job_id, outcome)
            case JobEnded(_, job_id, Failure() as failure):
                self._fail(job_id, failure)
            case GangLost(_, cause):
                self._failures.append(cause)
                self.on_event(Event("fleet", None, f"a gang died: {cause}"))
                self._break_if_repeated()

    def _end(self, job_id: str, outcome: Outcome) -> None:
        job: State = "pending" if outcome.state == "stopped" else outcome.state
        self.ledger.end_attempt(
            job_id,
            AttemptEnd(
                outcome.state,
                job,
                outcome.cause,
                outcome.tokens,
                outcome.busy_s,
                outcome.train_s,
                outcome.measure_s,
            ),
        )
        self.on_event(Event(outcome.state, job_id, outcome.cause or ""))
        if job == "diverged":
            self._block()

    def _fail(self, job_id: str, failure: Failure) -> None:
        again = scheduler.retries(failure.kind, self._attempts[job_id])
        if failure.kind == "address in use":  # chance, and the port's fault alone
            self._port_tries[job_id] = self._port_tries.get(job_id, 0) + 1
            again = self._port_tries[job_id] < PORT_TRIES
        self.ledger.end_attempt(
            job_id,
            AttemptEnd("lost" if failure.kind == "lost" else "failed", "pending" if again else "failed", failure.cause),
        )
        if again:
            self.on_event(Event("retried", job_id, failure.cause))
            return
        self.on_event(Event("failed", job_id, failure.cause + ("\n" + failure.detail if failure.detail else "")))
        self._failures.append(failure.cause)
        self._block()
        self._break_if_repeated()

    def _block(self) -> None:
        for job_id in self.ledger.block():
            self.on_event(Event("blocked", job_id, self.ledger.snapshot([job_id])[job_id].cause or ""))

    def _break_if_repeated(self) -> None:
        cause = scheduler.broken_by(self._failures)
        if cause is not None and self._broken is None:
            self._broken = cause
            self.lines.append(f"stopped: {scheduler.SAME_CAUSE_LIMIT} failures of one cause: {cause}")
            self.on_event(Event("fleet", None, self.lines[-1]))

    def _tell_progress(self) -> None:
        progress = self.fleet.progress()
        self.ledger.progress(self.session, {job: tokens for job, (tokens, _) in progress.items()})
        for gang, job in self.fleet.running().items():
            if progress[job][1] > self.hung_s:
                self._handle(self.fleet.kill(gang, f"no step for {self.hung_s:.0f} s"))


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
