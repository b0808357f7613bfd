"""Which job starts where. Pure: it sees jobs, gangs and slots, and answers with actions; nothing here knows Ray.

The ready job with the longest way to go, all that waits for it included, is placed first, and nothing behind a job that
does not fit is started: slots drain until its whole gang fits. With jobs in order of length this starves nobody and
costs at most one shorter job's time.
"""

import re
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Literal, Protocol

MAX_ATTEMPTS = 3
SAME_CAUSE_LIMIT = 3


@dataclass(frozen=True)
class ReadyJob:
    """length: of the longest chain of jobs that begins with this one, in FLOPs a worker."""

    id: str
    workers: int
    length: float


@dataclass(frozen=True)
class Gang:
    """A gang holds its slots as long as it is there; only an "idle" one takes a job."""

    id: int
    workers: int
    state: Literal["starting", "idle", "busy"]


@dataclass(frozen=True)
class Start:
    job_id: str
    gang_id: int


@dataclass(frozen=True)
class Create:
    workers: int


@dataclass(frozen=True)
class Retire:
    gang_id: int


Action = Start | Create | Retire


class PlannedJob(Protocol):
    """A job, the ids of those it waits for, and how much work it is."""

    @property
    def id(self) -> str: ...
    @property
    def after(self) -> Collection[str]: ...
    @property
    def workers(self) -> int: ...
    @property
    def flops(self) -> float: ...


class Queue:
    """The jobs that can start, the one with the longest way to go first, kept so while jobs end.

    A job is ready once all it waits for has finished; `after` a job that is neither among `jobs` nor finished, never.
    taken: jobs that run already.
    """

    def __init__(self, jobs: Iterable[PlannedJob], finished: Collection[str] = (), taken: Collection[str] = ()) -> None:
        jobs, done, away = list(jobs), set(finished), set(taken)
        lengths = chains(jobs, {job.id: job.flops / job.workers for job in jobs})
        self._jobs = {job.id: ReadyJob(job.id, job.workers, lengths[job.id]) for job in jobs}
        self._waits = {job.id: set(job.after) - done for job in jobs}
        self._behind: dict[str, list[str]] = defaultdict(list)
        for job in jobs:
            for before in job.after:
                self._behind[before].append(job.id)
        free = (job.id for job in jobs if not self._waits[job.id] and job.id not in away)
        self.ready = sorted((self._jobs[job_id] for job_id in free), key=_order)

    def take(self, job_id: str) -> None:
        """A job starts."""
        del self.ready[bisect_left(self.ready, _order(self._jobs[job_id]), key=_order)]

    def put_back(self, job_id: str) -> str:
        """A job that was taken can start again."""
        insort(self.ready, self._jobs[job_id], key=_order)
        return job_id

    def finished(self, job_id: str) -> list[str]:
        """A job has finished: the ids of those that can start now."""
        free = []
        for behind in self._behind[job_id]:
            self._waits[behind].discard(job_id)
            if not self._waits[behind]:
                free.append(self.put_back(behind))
        return free


def _order(job: ReadyJob) -> tuple[float, str]:
    return -job.length, job.id


def chains(jobs: Iterable[PlannedJob], length: Mapping[str, float]) -> dict[str, float]:
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


def decide(ready: Iterable[ReadyJob], gangs: Sequence[Gang], slots: int) -> list[Action]:
    """What to do now. After all actions, workers reserved never exceed `slots`.

    A gang retired here makes room: the next call, without it, creates the other.
    """
    actions: list[Action] = []
    free = slots - sum(gang.workers for gang in gangs)
    unclaimed = sorted((gang for gang in gangs if gang.state in ("idle", "starting")), key=lambda gang: gang.id)
    for job in sorted(ready, key=_order):
        fitting = [gang for gang in unclaimed if gang.workers == job.workers]
        gang = next((gang for gang in fitting if gang.state == "idle"), None)
        if gang is not None:
            unclaimed.remove(gang)
            actions.append(Start(job.id, gang.id))
        elif fitting:
            unclaimed.remove(fitting[0])
        elif job.workers <= free:
            free -= job.workers
            actions.append(Create(job.workers))
        else:
            # Idle gangs of other sizes make room, as far as they must; if busy ones must end first, that is the drain.
            idle = [gang for gang in unclaimed if gang.state == "idle"]
            needed = job.workers - free
            for gang in sorted(idle, key=lambda gang: gang.workers):
                if needed <= 0:
                    break
                needed -= gang.workers
                actions.append(Retire(gang.id))
            break
    return actions


FailureKind = Literal["lost", "bug", "out of memory", "disk full", "address in use"]


def retries(kind: FailureKind, attempts: int) -> bool:
    """Whether a job goes on from its last checkpoint after its `attempts`-th attempt failed.

    Only a lost worker may be chance. A bug, a full disk or too little memory would be met again at once.
    """
    return kind == "lost" and attempts < MAX_ATTEMPTS


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
