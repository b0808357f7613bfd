"""Which job starts where. Pure: it sees jobs, gangs and nodes, and answers with actions; nothing here knows Ray.

The ready job with the longest way to go, all that waits for it included, is placed first. A gang stays on one node, if
any node is wide enough. For a job that fits nowhere yet a node is kept free: its slots drain until the gang fits, while
other nodes go on. With jobs in order of length this starves nobody and costs at most one shorter job's time.
"""

import heapq
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Literal, Protocol

MAX_LOSSES = 3
SAME_CAUSE_LIMIT = 3


@dataclass(frozen=True)
class ReadyJob:
    """length: of the longest chain of jobs that begins with this one, in FLOPs a worker."""

    id: str
    workers: int
    length: float

    @property
    def rank(self) -> tuple[float, str]:
        return -self.length, self.id


class ReadyJobs:
    """Ready jobs by width, longest first, so that `decide` looks at none but those that have a chance to start."""

    def __init__(self, jobs: Iterable[ReadyJob] = ()) -> None:
        self._by_workers: dict[int, list[ReadyJob]] = {}
        for job in jobs:
            self.add(job)

    def __len__(self) -> int:
        return sum(map(len, self._by_workers.values()))

    def add(self, job: ReadyJob) -> None:
        insort(self._by_workers.setdefault(job.workers, []), job, key=lambda job: job.rank)

    def remove(self, job: ReadyJob) -> None:
        jobs = self._by_workers[job.workers]
        del jobs[bisect_left(jobs, job.rank, key=lambda job: job.rank)]
        if not jobs:
            del self._by_workers[job.workers]

    def by_length(self, skipped: Collection[int]) -> Iterator[ReadyJob]:
        """Longest first. skipped: widths to leave out, read anew before each job."""
        heads = [(jobs[0].rank, workers, 0) for workers, jobs in self._by_workers.items()]
        heapq.heapify(heads)
        while heads:
            _, workers, place = heapq.heappop(heads)
            if workers in skipped:
                continue
            jobs = self._by_workers[workers]
            yield jobs[place]
            if place + 1 < len(jobs):
                heapq.heappush(heads, (jobs[place + 1].rank, workers, place + 1))


@dataclass(frozen=True)
class Gang:
    """nodes: of each of its workers. It holds their slots from "starting" on; only an "idle" one takes a job."""

    id: int
    nodes: tuple[str, ...]
    state: Literal["starting", "idle", "busy"]

    @property
    def workers(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True)
class Start:
    job_id: str
    gang_id: int


@dataclass(frozen=True)
class Create:
    """nodes: one for each worker."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Retire:
    gang_id: int


Action = Start | Create | Retire


class Chained(Protocol):
    """A job and the ids of those it waits for."""

    @property
    def id(self) -> str: ...
    @property
    def after(self) -> Collection[str]: ...


def chains(jobs: Iterable[Chained], length: Mapping[str, float]) -> dict[str, float]:
    """For each job the longest sum of lengths along jobs that wait for each other, from that job on."""
    after = {job.id: job.after for job in jobs}
    longest: dict[str, float] = dict.fromkeys(after, 0.0)  # while going through: of what comes after the job
    for job_id in reversed(list(TopologicalSorter(after).static_order())):
        if job_id in longest:
            longest[job_id] += length[job_id]
            for before in after[job_id]:
                if before in longest:
                    longest[before] = max(longest[before], longest[job_id])
    return longest


def decide(ready: ReadyJobs, gangs: Sequence[Gang], slots: Mapping[str, int]) -> list[Action]:
    """What to do now. slots: workers that each node holds. After all actions none has more than that reserved.

    A gang retired here frees its slots only once it is gone: the next call, without it, creates the other.
    """
    actions: list[Action] = []
    room = _Room(dict(slots), gangs)
    waiting: set[int] = set()  # widths of which one job has a node kept free; those behind it have no better chance
    for job in ready.by_length(waiting):
        if not room.open:
            break
        gang = room.take(job.workers)
        if gang is not None:
            if gang.state == "idle":
                actions.append(Start(job.id, gang.id))
            continue
        place = room.place(job.workers)
        if place:
            actions.append(Create(place))
        else:
            actions += [Retire(gang.id) for gang in room.keep(job.workers)]
            waiting.add(job.workers)
    return actions


@dataclass
class _Room:
    """What is left of the nodes while `decide` goes through the jobs. open: nodes not kept free for a job."""

    slots: dict[str, int]
    gangs: Sequence[Gang]
    free: dict[str, int] = field(init=False)
    open: list[str] = field(init=False)
    unclaimed: list[Gang] = field(init=False)

    def __post_init__(self) -> None:
        held = Counter(node for gang in self.gangs for node in gang.nodes)
        self.free = {node: n - held[node] for node, n in self.slots.items()}
        self.unclaimed = sorted(
            (gang for gang in self.gangs if gang.state != "busy"), key=lambda gang: (gang.state != "idle", gang.id)
        )
        self.open = list(self.slots)
        self._close_full()

    def take(self, workers: int) -> Gang | None:
        """A gang of that width that nobody has claimed, an idle one first."""
        for gang in self.unclaimed:
            if gang.workers == workers and all(node in self.open for node in gang.nodes):
                self.unclaimed.remove(gang)
                self._close_full()
                return gang
        return None

    def place(self, workers: int) -> tuple[str, ...]:
        """Nodes for a new gang, empty where it does not fit: the fullest that can take it whole, else few free ones."""
        if workers <= max(self.slots.values(), default=0):
            fitting = [node for node in self.open if self.free[node] >= workers]
            nodes = [min(fitting, key=lambda node: self.free[node])] * workers if fitting else []
        else:
            emptiest = sorted(self.open, key=lambda node: -self.free[node])
            nodes = [node for node in emptiest for _ in range(self.free[node])][:workers]
        if len(nodes) < workers:
            return ()
        for node in nodes:
            self.free[node] -= 1
        self._close_full()
        return tuple(nodes)

    def keep(self, workers: int) -> list[Gang]:
        """Keeps free for a job the nodes on which the most is free. The idle gangs that make room for it there."""
        idle = [gang for gang in self.unclaimed if gang.state == "idle"]
        spare = {node: self.free[node] for node in self.open}
        for node in (node for gang in idle for node in gang.nodes if node in spare):
            spare[node] += 1
        kept: list[str] = []
        on_one = workers <= max(self.slots.values(), default=0)
        able = [node for node in spare if not on_one or self.slots[node] >= workers]
        for node in sorted(able, key=lambda node: -spare[node]):
            if sum(self.slots[each] for each in kept) < workers:
                kept.append(node)
        needed = workers - sum(self.free[node] for node in kept)
        retired = []
        for gang in sorted(idle, key=lambda gang: gang.workers):
            if needed > 0 and any(node in kept for node in gang.nodes):
                retired.append(gang)
                needed -= sum(node in kept for node in gang.nodes)
        self.unclaimed = [gang for gang in self.unclaimed if gang not in retired]
        self.open = [node for node in self.open if node not in kept]
        return retired

    def _close_full(self) -> None:
        """Nodes on which nothing can start any more need no further look."""
        claimable = {node for gang in self.unclaimed for node in gang.nodes}
        self.open = [node for node in self.open if self.free[node] > 0 or node in claimable]


FailureKind = Literal["lost", "bug", "out of memory", "disk full", "address in use"]


def retries(kind: FailureKind, losses: int) -> bool:
    """Whether a job goes on from its last checkpoint as it was, after its `losses`-th lost worker.

    Only a lost worker may be chance. A bug or a full disk would be met again at once; for too little memory there is
    `smaller_micro_batch`.
    """
    return kind == "lost" and losses < MAX_LOSSES


def smaller_micro_batch(share: int, micro_batch: int | None) -> int | None:
    """The next one to try where memory did not suffice: about half, a divisor of a worker's share of sequences.

    None where one sequence at a time was too much.
    """
    now = min(micro_batch or share, share)
    return next((smaller for smaller in range(now // 2, 0, -1) if share % smaller == 0), None)


def grouped_cause(cause: str) -> str:
    """A cause without what differs from job to job: numbers, hashes and paths."""
    first_line = cause.strip().splitlines()[0] if cause.strip() else ""
    without_paths = re.sub(r"(/[^\s'\":]+)+", "…", first_line)
    without_hashes = re.sub(r"\b(0x)?(?=[a-f]*\d)[0-9a-f]{6,}\b", "#", without_paths)
    return re.sub(r"\d+(\.\d+)?", "#", without_hashes)


def broken_by(causes: Iterable[str]) -> str | None:
    """The cause that has failed `SAME_CAUSE_LIMIT` jobs, in the words of its first failure; None while there is none.

    It is then a fault of the code or the machine, and the jobs still waiting would only repeat it.
    """
    first: dict[str, str] = {}
    count: Counter[str] = Counter()
    for cause in causes:
        group = grouped_cause(cause)
        first.setdefault(group, cause)
        count[group] += 1
    return next((first[group] for group, n in count.items() if n >= SAME_CAUSE_LIMIT), None)
