"""The loop of one driver session: what is ready goes to the fleet, what comes back to the ledger.

It keeps in memory what is ready and what waits for what, so that an event costs the same however large the study is.
Fleet and clock are handed in: a simulation runs a study of months in seconds.
"""

import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from orchestrator import scheduler
from orchestrator.fleet import FleetEvent, GangLost, GangReady, JobEnded
from orchestrator.ledger import AttemptEnd, Ledger, PlannedJob, State
from orchestrator.training.task import Outcome, Task
from orchestrator.worker import Failure

POLL_S = 0.25
PROGRESS_S = 1.0
STOP_GRACE_S = 6.0  # of the 10 s a stop may take; Ray's own end takes two
PORT_TRIES = 5


@dataclass(frozen=True)
class Event:
    """Something to tell the user. job_id: None where it concerns the whole run."""

    kind: Literal[
        "fleet", "started", "finished", "diverged", "stopped", "retried", "failed", "blocked", "stopping", "tuned"
    ]
    job_id: str | None
    text: str


class Crew(Protocol):
    """The fleet as the loop sees it (`orchestrator.fleet.Fleet`)."""

    @property
    def nodes(self) -> Mapping[str, int]: ...
    def gangs(self) -> Sequence[scheduler.Gang]: ...
    def running(self) -> Mapping[int, str]: ...
    def create(self, nodes: Sequence[str]) -> int: ...
    def start(self, gang_id: int, job_id: str, payload: bytes) -> None: ...
    def stop(self, gang_id: int) -> None: ...
    def retire(self, gang_id: int) -> None: ...
    def kill(self, gang_id: int, cause: str) -> JobEnded: ...
    def progress(self) -> Mapping[str, tuple[int, float]]: ...
    def poll(self, timeout: float) -> Sequence[FleetEvent]: ...


class Tuner(Protocol):
    """What finds learning rates while jobs run (`orchestrator.tuning.tuner.Tuner`)."""

    def begin(self) -> None: ...
    def is_trial(self, job_id: str) -> bool: ...
    def decides(self, task: Task) -> bool: ...
    def task(self, task: Task) -> Task: ...
    def ended(self, job_id: str) -> None: ...


class Signals(Protocol):
    """first: the signal that asked for an end, once there was one."""

    @property
    def first(self) -> signal.Signals | None: ...


class Waiting:
    """Jobs that wait for others, and those that have become ready. taken: those that run already."""

    def __init__(
        self, jobs: Iterable[PlannedJob], finished: Collection[str], taken: Collection[str] = frozenset()
    ) -> None:
        jobs = list(jobs)
        self._lengths = scheduler.chains(jobs, {job.id: job.flops / job.workers for job in jobs})
        self._workers = {job.id: job.workers for job in jobs}
        self._after = {job.id: set(job.after).difference(finished) for job in jobs}
        self._before: dict[str, list[str]] = {}
        for job in jobs:
            for before in self._after[job.id]:
                self._before.setdefault(before, []).append(job.id)
        free = (job.id for job in jobs if not self._after[job.id] and job.id not in taken)
        self.ready = scheduler.ReadyJobs(self.job(job_id) for job_id in free)

    def job(self, job_id: str) -> scheduler.ReadyJob:
        return scheduler.ReadyJob(job_id, self._workers[job_id], self._lengths[job_id])

    def finished(self, job_id: str) -> list[str]:
        """Ids of the jobs that waited for this one last; they are ready now."""
        freed = []
        for after in self._before.pop(job_id, []):
            self._after[after].discard(job_id)
            if not self._after[after]:
                self.ready.add(self.job(after))
                freed.append(after)
        return freed


class Loop:
    """State of one session: which gang runs which job, since when gangs and jobs could have gone on.

    jobs: what this session is to run. tasks: theirs. pack: a task as the bytes that travel. tuner: gives a task its
    learning rate when it starts.
    """

    def __init__(
        self,
        fleet: Crew,
        ledger: Ledger,
        session: int,
        jobs: Sequence[PlannedJob],
        tasks: Mapping[str, Task],
        pack: Callable[[Task], bytes],
        *,
        on_event: Callable[[Event], None],
        signals: Signals,
        hung_s: float,
        tuner: Tuner | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.fleet, self.ledger, self.session = fleet, ledger, session
        self.jobs, self.tasks, self.pack, self.tuner, self.clock = jobs, dict(tasks), pack, tuner, clock
        self.signals, self.hung_s = signals, hung_s
        self._on_event = on_event
        self.lines: list[str] = []
        self._events: list[Event] = []
        self._losses: Counter[str] = Counter()  # of this session
        self._port_tries: Counter[str] = Counter()
        self._micro_batch: dict[tuple[Any, int], int] = {}  # (model, a worker's share) → what fits its memory
        self._failures: list[str] = []
        self._ready_since: dict[str, float] = {}
        self._free_since: dict[int, float] = {}
        self._warm: set[int] = set()
        self._broken: str | None = None
        self._stop_at: float | None = None
        self._line_up()

    def run(self, on_first_start: Callable[[], None] = lambda: None) -> None:
        """Returns when no job runs and none can be started.

        on_first_start: what can wait until the workers have their processors for themselves no more.
        """
        told, first_start = 0.0, True
        with self._noted():
            self._schedule()
        while True:
            running = self.fleet.running()
            if running and first_start:
                first_start = False
                on_first_start()
            if self.signals.first and self._stop_at is None:
                self._stop_at = self.clock() + STOP_GRACE_S
                self._on_event(Event("stopping", None, f"{self.signals.first.name}: checkpointing {len(running)} jobs"))
                for gang in running:
                    self.fleet.stop(gang)
            if not running and (self._stop_at is not None or self._broken or not self._waiting.ready):
                return
            if self._stop_at is not None and self.clock() > self._stop_at:
                for job_id in running.values():
                    cause = f"killed {STOP_GRACE_S:.0f} s after it was asked to stop"
                    self.ledger.end_attempt(job_id, AttemptEnd("lost", "pending", cause))
                return
            events = self.fleet.poll(POLL_S)
            with self._noted():
                for event in events:
                    self._handle(event)
                if self.clock() - told > PROGRESS_S:
                    told = self.clock()
                    self._tell_progress()
                if self._stop_at is None and not self._broken:
                    self._schedule()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """What happens meanwhile is told once the ledger shows it."""
        with self.ledger.together():
            yield
        events, self._events = self._events, []
        for event in events:
            self._on_event(event)

    def _schedule(self) -> None:
        actions = scheduler.decide(self._waiting.ready, self.fleet.gangs(), self.fleet.nodes)
        for action in actions:
            match action:
                case scheduler.Create(nodes):
                    self.fleet.create(nodes)
                case scheduler.Retire(gang_id):
                    self.fleet.retire(gang_id)
                case scheduler.Start(job_id, gang_id):
                    self._start(job_id, gang_id)
        if any(isinstance(action, scheduler.Retire) for action in actions):
            self._schedule()  # onto the slots just freed

    def _start(self, job_id: str, gang_id: int) -> None:
        available = max(self._ready_since.pop(job_id), self._free_since.get(gang_id, 0.0))
        warm = gang_id in self._warm
        self._waiting.ready.remove(self._waiting.job(job_id))
        self.ledger.start_attempt(job_id, self.session, gang_id, warm=warm, available=available)
        self._warm.add(gang_id)
        self.fleet.start(gang_id, job_id, self.pack(self._fitted(self.tasks[job_id])))
        self._events.append(Event("started", job_id, f"on gang {gang_id}"))

    def _fitted(self, task: Task) -> Task:
        """The task with its learning rate, and the micro-batch that fits where one like it ran out of memory before."""
        if self.tuner is not None and self.tuner.decides(task):
            task = self.tuner.task(task)
        if not self._micro_batch:
            return task
        found = self._micro_batch.get(_memory_key(task))
        if found is None or found >= (task.micro_batch or _memory_key(task)[1]):
            return task
        return replace(task, micro_batch=found, note=f"micro-batch {found}, as memory did not suffice for more")

    def _handle(self, event: FleetEvent) -> None:
        self._free_since[event.gang_id] = self.clock()
        match event:
            case JobEnded(_, job_id, Outcome() as outcome):
                self._end(job_id, outcome)
            case JobEnded(_, job_id, Failure() as failure):
                self._fail(job_id, failure)
            case GangLost(_, cause, node_lost):
                self._events.append(Event("fleet", None, f"a gang died: {cause}"))
                if not node_lost:
                    self._failures.append(cause)
                    self._break_if_repeated()
            case GangReady():
                pass

    def _end(self, job_id: str, outcome: Outcome) -> None:
        job: State = "pending" if outcome.state == "stopped" else outcome.state
        trial = self.tuner if self.tuner is not None and self.tuner.is_trial(job_id) else None
        if job == "diverged" and trial is not None:
            job = "finished"  # with no loss, which is all that the others need to know
        end = AttemptEnd(
            outcome.state, job, outcome.cause, outcome.tokens, outcome.busy_s, outcome.train_s, outcome.measure_s
        )
        self.ledger.end_attempt(job_id, end)
        if trial is not None and job != "pending":
            trial.ended(job_id)
            self._block()  # where no trial gave a rate
            self._line_up()  # what is left of a pruned trial counts as done
        elif job == "finished":
            self._now_ready(self._waiting.finished(job_id))
        elif job == "pending":
            self._is_ready(job_id)
        self._events.append(Event(outcome.state, job_id, outcome.cause or ""))
        if job == "diverged":
            self._block()

    def _fail(self, job_id: str, failure: Failure) -> None:
        cause = failure.cause
        again = False
        if failure.kind == "lost":
            self._losses[job_id] += 1
            again = scheduler.retries(failure.kind, self._losses[job_id])
        elif failure.kind == "address in use":  # chance, and the port's fault alone
            self._port_tries[job_id] += 1
            again = self._port_tries[job_id] < PORT_TRIES
        elif failure.kind == "out of memory":
            key = _memory_key(self.tasks[job_id])
            smaller = scheduler.smaller_micro_batch(key[1], self._fitted(self.tasks[job_id]).micro_batch)
            if smaller is not None:
                again, self._micro_batch[key] = True, smaller
                cause += f"; again with micro-batch {smaller}"
        self.ledger.end_attempt(
            job_id, AttemptEnd("lost" if failure.kind == "lost" else "failed", "pending" if again else "failed", cause)
        )
        if again:
            self._is_ready(job_id)
            self._events.append(Event("retried", job_id, cause))
            return
        self._events.append(Event("failed", job_id, cause + ("\n" + failure.detail if failure.detail else "")))
        self._failures.append(failure.cause)
        self._block()
        self._break_if_repeated()

    def _is_ready(self, job_id: str) -> None:
        self._waiting.ready.add(self._waiting.job(job_id))
        self._now_ready([job_id])

    def _line_up(self) -> None:
        """Lines the jobs up by what the ledger says of them."""
        rows = self.ledger.snapshot()
        states = {job.id: rows[job.id].state for job in self.jobs}
        self._waiting = Waiting(
            [job for job in self.jobs if states[job.id] in ("pending", "running")],
            finished={row.id for row in rows.values() if row.state == "finished"},
            taken={job_id for job_id, state in states.items() if state == "running"},
        )
        self._now_ready(job.id for job in self._waiting.ready.by_length(()))

    def _now_ready(self, job_ids: Iterable[str]) -> None:
        now = self.clock()
        for job_id in job_ids:
            self._ready_since.setdefault(job_id, now)

    def _block(self) -> None:
        blocked = self.ledger.block()
        rows = self.ledger.snapshot(blocked)
        for job_id in blocked:
            self._events.append(Event("blocked", job_id, rows[job_id].cause or ""))

    def _break_if_repeated(self) -> None:
        cause = scheduler.broken_by(self._failures)
        if cause is not None and self._broken is None:
            self._broken = cause
            self.lines.append(f"stopped: {scheduler.SAME_CAUSE_LIMIT} failures of one cause: {cause}")
            self._events.append(Event("fleet", None, self.lines[-1]))

    def _tell_progress(self) -> None:
        progress = self.fleet.progress()
        self.ledger.progress(self.session, {job: tokens for job, (tokens, _) in progress.items()})
        for gang, job in list(self.fleet.running().items()):
            if progress[job][1] > self.hung_s:
                self._handle(self.fleet.kill(gang, f"no step for {self.hung_s:.0f} s"))


def _memory_key(task: Task) -> tuple[Any, int]:
    """What decides whether a micro-batch fits: the model, and the sequences of one worker."""
    return task.model, task.recipe.batch_size // task.workers
