"""A cluster in virtual time under the real plan, ledger, scheduler and loop: jobs of drawn lengths, workers that die.

`python simulator.py [MULTIPLE]` prints what a study of MULTIPLE times 210 x 3 cells costs the driver.
"""

import heapq
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator import plan, scheduler
from orchestrator.data.recall import RecallLanguage
from orchestrator.fleet import FleetEvent, GangReady, JobEnded
from orchestrator.ledger import Ledger
from orchestrator.loop import Loop
from orchestrator.plan import Job, Plan
from orchestrator.recipe import Recipe
from orchestrator.study import PAPER_SIZES, Arm, Study
from orchestrator.training.task import Outcome
from orchestrator.worker import Failure

WORKERS = {"S1": 1, "S2": 1, "S3": 2, "S4": 4, "S5": 8}
FLOPS_A_SECOND = 4e14  # of one device
GANG_START_S = 10.0
SAVED_EVERY_S = 30.0  # as `training.job.SAVE_EVERY_S`


def paper_grid(seeds: int = 3) -> Study:
    """Seven arms x S1..S5 x six budgets x seeds, as in arXiv 2606.15378; attention arms in place of recurrent ones."""
    patterns = {"full": "full", **{f"swa-{w}": f"swa-{w} full" for w in (64, 128, 256, 512, 1024, 2048)}}
    return Study(
        name="paper",
        arms=tuple(Arm(name=name, pattern=pattern) for name, pattern in patterns.items()),
        sizes=tuple(PAPER_SIZES.values()),
        budgets=("100N", "200N", "400N", "600N", "800N", "1000N"),
        seeds=tuple(range(seeds)),
        data={"recall": RecallLanguage(context=2048)},
        recipe=Recipe(learning_rate=0.02, batch_size=256, warmup_steps=100, decay_fraction=0.1),
    )


def planned(study: Study, folder: Path, slots: int = 64) -> Plan:
    """The study's plan, each size with its own number of workers."""
    made = plan.make(study, folder, {}, slots=slots)
    sizes = {cell.id: cell.size for cell in made.cells}
    return replace(made, jobs=tuple(replace(job, workers=WORKERS[sizes[job.cell_id]]) for job in made.jobs))


@dataclass
class _Gang:
    nodes: tuple[str, ...]
    state: Any = "starting"
    job_id: str | None = None
    serial: int = 0  # of what it does, so that events of what was called off are known


@dataclass
class FakeFleet:
    """Gangs that start, work and die in virtual time. seconds: of each job alone. loss: chance a job's worker dies.

    straddled: jobs begun on more nodes than they needed.
    """

    nodes: dict[str, int]
    seconds: Mapping[str, float]
    loss: float
    chance: random.Random
    now: float = 0.0
    straddled: int = 0
    busy_s: float = 0.0  # slots x seconds
    lost: Counter[str] = field(default_factory=Counter)
    _saved: dict[str, float] = field(default_factory=dict)
    _gangs: dict[int, _Gang] = field(default_factory=dict)
    _events: list[tuple[float, int, int, int, Any]] = field(default_factory=list)
    _made: int = 0

    def gangs(self) -> Sequence[scheduler.Gang]:
        return [scheduler.Gang(i, gang.nodes, gang.state) for i, gang in self._gangs.items()]

    def running(self) -> Mapping[int, str]:
        return {i: gang.job_id for i, gang in self._gangs.items() if gang.job_id is not None}

    def create(self, nodes: Sequence[str]) -> int:
        self._made += 1
        self._gangs[self._made] = _Gang(tuple(nodes))
        held = Counter(node for gang in self._gangs.values() for node in gang.nodes)
        assert all(held[node] <= n for node, n in self.nodes.items()), "a node holds more than it can"
        self._in(GANG_START_S, self._made, None)
        return self._made

    def start(self, gang_id: int, job_id: str, payload: bytes) -> None:
        gang = self._gangs[gang_id]
        assert gang.state == "idle"
        gang.state, gang.job_id = "busy", job_id
        self.straddled += len(set(gang.nodes)) > 1 and len(gang.nodes) <= max(self.nodes.values())
        done = self._saved.get(job_id, 0.0)
        left = self.seconds[job_id] - done
        if self.chance.random() < self.loss and not self.lost[job_id]:
            ran = self.chance.uniform(0, left)
            self._saved[job_id] = done + ran // SAVED_EVERY_S * SAVED_EVERY_S
            self._in(ran, gang_id, Failure("lost", "a worker died"))
        else:
            ran = left
            self._in(ran, gang_id, Outcome("finished", None, 1, ran, ran, 0.0))
        self.busy_s += ran * len(gang.nodes)

    def retire(self, gang_id: int) -> None:
        del self._gangs[gang_id]

    def poll(self, timeout: float) -> list[FleetEvent]:
        """The next event, however far in the future it lies."""
        while self._events:
            self.now, _, gang_id, serial, result = heapq.heappop(self._events)
            gang = self._gangs.get(gang_id)
            if gang is None or gang.serial != serial:
                continue
            job_id, gang.job_id, gang.state = gang.job_id, None, "idle"
            if job_id is None:
                return [GangReady(gang_id)]
            if isinstance(result, Failure):
                self.lost[job_id] += 1
                self.retire(gang_id)
            return [JobEnded(gang_id, job_id, result)]
        return []

    def progress(self) -> Mapping[str, tuple[int, float]]:
        return {job_id: (0, 0.0) for job_id in self.running().values()}

    def stop(self, gang_id: int) -> None:
        raise NotImplementedError

    def kill(self, gang_id: int, cause: str) -> JobEnded:
        raise NotImplementedError

    def _in(self, seconds: float, gang_id: int, result: Any) -> None:
        gang = self._gangs[gang_id]
        gang.serial += 1
        heapq.heappush(self._events, (self.now + seconds, len(self._events), gang_id, gang.serial, result))


@dataclass(frozen=True)
class Simulated:
    """makespan_s, bound_s: virtual. own_s: real seconds of the driver. lower bound: of the lengths that were drawn."""

    makespan_s: float
    bound_s: float
    own_s: float
    jobs: int
    attempts: int
    straddled: int

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s


def simulate(
    jobs: Sequence[Job], folder: Path, *, nodes: int = 8, slots: int = 8, loss: float = 0.0, seed: int = 0
) -> Simulated:
    """Runs jobs to their end. Lengths vary by 10% from what the plan's FLOPs say."""
    chance = random.Random(seed)
    seconds = {job.id: job.flops / job.workers / FLOPS_A_SECOND * chance.lognormvariate(0, 0.1) for job in jobs}
    fleet = FakeFleet({f"node{i}": slots for i in range(nodes)}, seconds, loss, chance)
    work = sum(seconds[job.id] * job.workers for job in jobs)
    with Ledger.open(folder / "ledger.db", clock=lambda: fleet.now) as ledger:
        ledger.add(jobs)
        session = ledger.start_session(nodes * slots, None)
        tasks: dict[str, Any] = {job.id: job for job in jobs}
        began = time.perf_counter()
        loop = Loop(
            fleet,
            ledger,
            session,
            jobs,
            tasks,
            lambda task: b"",
            on_event=lambda event: None,
            signals=SimpleNamespace(first=None),
            hung_s=1e9,
            clock=lambda: fleet.now,
        )
        loop.run()
        own = time.perf_counter() - began
        (left,) = ledger.query("SELECT count(*) AS n FROM jobs WHERE state != 'finished'")
        assert left["n"] == 0 and not loop.lines
        (attempts,) = ledger.query("SELECT count(*) AS n FROM attempts")
    bound = max([work / (nodes * slots), *scheduler.chains(jobs, seconds).values()])
    return Simulated(fleet.now, bound, own, len(jobs), attempts["n"], fleet.straddled)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temp:
        began = time.perf_counter()
        made = planned(paper_grid(3 * int((sys.argv[1:] or ["1"])[0])), Path(temp))
        print(f"{len(made.cells)} cells, {len(made.jobs)} jobs planned in {time.perf_counter() - began:.1f} s")
        for loss in (0.0, 0.05):
            Path(temp, str(loss)).mkdir()
            done = simulate(made.jobs, Path(temp, str(loss)), loss=loss)
            print(
                f"loss {loss}: makespan {done.makespan_s / 86400:.2f} days = {done.ratio:.3f} of the bound, "
                f"{done.attempts} attempts, {done.straddled} straddled, "
                f"{1000 * done.own_s / done.jobs:.2f} ms of the driver a job"
            )
        print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB")
