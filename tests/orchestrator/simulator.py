"""A cluster in miniature: the driver's own loop, ledger and scheduler over gangs that only pass the time.

Time is simulated and jumps from event to event; what the driver itself needs is processor time, measured.
"""

import heapq
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from orchestrator import scheduler
from orchestrator.driver import _Loop, _Orders, _Signals
from orchestrator.fleet import Fleet, FleetEvent, GangReady, JobEnded
from orchestrator.jobs import Job
from orchestrator.ledger import Ledger
from orchestrator.plan import Plan
from orchestrator.training.task import Outcome
from orchestrator.worker import Failure

FLOPS = 4e14  # a second, of one device


@dataclass
class Gang:
    id: int
    workers: int
    nodes: tuple[int, ...]
    state: str = "starting"
    job: str | None = None


@dataclass
class SimulatedFleet:
    """Gangs on `nodes` nodes of `per_node` devices, packed on one node where it has room.

    work: job → device seconds left. loses: share of the jobs that lose a worker once, at a random moment; they go on
    from a checkpoint at most `interval` seconds older. start_s: of a gang.
    """

    nodes: int
    per_node: int
    work: dict[str, float]
    loses: float = 0.0
    start_s: float = 30.0
    interval: float = 600.0
    seed: int = 0
    stop_after: int | None = None
    now: float = 0.0
    straddling: int = 0
    jobs_run: int = 0
    most: int = 0
    held: dict[int, Gang] = field(default_factory=dict)
    signals: _Signals = field(default_factory=_Signals)

    def __post_init__(self) -> None:
        self.slots = self.nodes * self.per_node
        self._events: list[tuple[float, int, int, str | None]] = []
        self._ids, self._order = itertools.count(1), itertools.count()
        self._random = random.Random(self.seed)
        self._doomed = {job for job in sorted(self.work) if self._random.random() < self.loses}

    def gangs(self) -> list[tuple[int, int, str]]:
        return [(gang.id, gang.workers, gang.state) for gang in self.held.values()]

    def running(self) -> dict[int, str]:
        return {gang.id: gang.job for gang in self.held.values() if gang.job is not None}

    def create(self, workers: int) -> int:
        used = Counter(node for gang in self.held.values() for node in gang.nodes)
        free = {node: self.per_node - used[node] for node in range(self.nodes)}
        whole = [node for node in free if free[node] >= workers]
        if whole:
            places = (min(whole, key=lambda node: free[node]),) * workers
        else:
            spread = [node for node in sorted(free, key=lambda n: -free[n]) for _ in range(free[node])]
            places, self.straddling = tuple(spread[:workers]), self.straddling + 1
        gang = Gang(next(self._ids), workers, places)
        self.held[gang.id] = gang
        self.most = max(self.most, sum(gang.workers for gang in self.held.values()))
        assert self.most <= self.slots
        self._push(self.start_s, gang.id, None)
        return gang.id

    def retire(self, gang_id: int) -> None:
        del self.held[gang_id]

    def start(self, gang_id: int, job_id: str, payload: bytes) -> None:
        gang = self.held[gang_id]
        gang.state, gang.job = "busy", job_id
        seconds = self.work[job_id] / gang.workers
        if job_id in self._doomed:
            self._doomed.discard(job_id)
            lived = self._random.random() * seconds
            kept = lived - lived % self.interval
            self.work[job_id] -= kept * gang.workers
            self._push(lived, gang_id, "lost")
        else:
            self._push(seconds, gang_id, "finished")

    def poll(self, timeout: float) -> Sequence[FleetEvent]:
        while self._events:
            self.now, _, gang_id, what = heapq.heappop(self._events)
            gang = self.held.get(gang_id)
            if gang is None:
                continue
            job, gang.job, gang.state = gang.job, None, "idle"
            if what is None:
                return [GangReady(gang_id)]
            assert job is not None
            self.jobs_run += 1
            if self.jobs_run == self.stop_after:
                self.signals.first = signal.SIGINT
            if what == "lost":
                self.retire(gang_id)
                return [JobEnded(gang_id, job, Failure("lost", "a worker died"))]
            return [JobEnded(gang_id, job, Outcome(what, None, 1, 1.0, 1.0, 0.0))]  # type: ignore[arg-type]
        return []

    def stop(self, gang_id: int) -> None:
        self._push(0.0, gang_id, "stopped")

    def progress(self) -> dict[str, tuple[int, float]]:
        return {job: (0, 0.0) for job in self.running().values()}

    def _push(self, delay: float, gang_id: int, what: str | None) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), gang_id, what))


@dataclass(frozen=True)
class Simulated:
    """makespan_s and lower_bound_s are simulated; driver_s is what the driver's loop, ledger and scheduler took."""

    makespan_s: float
    lower_bound_s: float
    driver_s: float
    jobs: int
    straddling: int

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.lower_bound_s


def simulate(plan: Plan, folder: Path, *, loses: float = 0.0, stop_after: int | None = None) -> Simulated:
    """Runs a plan on 8 nodes of 8 devices to its end, where every job must have finished, or for so many jobs.

    Durations differ by 10% from what their FLOPs say.
    """
    chance = random.Random(1)
    work = {job.id: job.flops / FLOPS * chance.lognormvariate(0.0, 0.1) for job in plan.jobs}
    fleet = SimulatedFleet(8, 8, dict(work), loses, stop_after=stop_after)
    ledger = Ledger.open(folder / "ledger.db")
    ledger.add(plan.jobs)
    session = ledger.start_session(fleet.slots, None)
    began = time.process_time()
    loop = _Loop(
        cast(Fleet, fleet),
        ledger,
        session,
        cast(_Orders, _NoOrders()),
        None,
        plan.jobs,
        lambda event: None,
        fleet.signals,
        hung_s=1e9,
    )
    loop.run(lambda: None)
    driver_s = time.process_time() - began
    assert stop_after or ledger.counts()["finished"] == len(plan.jobs), ledger.counts()
    ledger.close()
    return Simulated(fleet.now, lower_bound(plan.jobs, work, fleet.slots), driver_s, fleet.jobs_run, fleet.straddling)


def lower_bound(jobs: Sequence[Job], work: Mapping[str, float], slots: int) -> float:
    """Seconds no schedule can beat: all work over all devices, or the longest chain of jobs."""
    seconds = {job.id: work[job.id] / job.workers for job in jobs}
    return max(sum(work.values()) / slots, *scheduler.chains(jobs, seconds).values())


class _NoOrders:
    def packed(self, job_id: str) -> bytes:
        return b""
