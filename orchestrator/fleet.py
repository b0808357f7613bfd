"""Ray, and all that is known of it: a node or a cluster, gangs of warm workers on it, and what becomes of them.

Nothing here blocks on a batch: every gang is polled by itself, so that a dead worker is one gang's matter.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import ray
import ray.cloudpickle
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator import cluster, scheduler
from orchestrator.errors import InputError
from orchestrator.training.task import Outcome
from orchestrator.worker import Address, Failure, JobFunction, Worker

NODES_S = 2.0  # between looks at a cluster's nodes
GROW_S = 120.0  # what a cluster may take to make room for the widest job
MOST_REQUESTED = 1000  # workers; a cluster's own limit is met far earlier
PEER_GRACE_S = 2.0  # how long the other ranks of a failed gang may take to say why they failed


@dataclass(frozen=True)
class FleetOptions:
    """cpus: to use, None for all there are. gpus: to use, None for all of a cluster; with any, a worker takes one of
    them, else `threads` CPUs. address: of a running Ray cluster, None to start Ray here. job: instead of the training
    job, for tests.
    """

    cpus: int | None = None
    gpus: int | None = 0
    address: str | None = None
    threads: int = 1
    job: JobFunction | None = None

    def slots(self) -> int:
        """Workers that fit on this machine at once."""
        return self.gpus or (self.cpus or len(os.sched_getaffinity(0))) // self.threads


@dataclass(frozen=True)
class GangReady:
    gang_id: int


@dataclass(frozen=True)
class JobEnded:
    gang_id: int
    job_id: str
    result: Outcome | Failure


@dataclass(frozen=True)
class GangLost:
    """A gang that died while it was starting; its slots are free again. node_lost: the gang is not to blame."""

    gang_id: int
    cause: str
    node_lost: bool = False


FleetEvent = GangReady | JobEnded | GangLost


@dataclass
class _Gang:
    id: int
    nodes: tuple[str, ...]
    place: PlacementGroup
    actors: list[Any]
    starting: list[Any]
    state: Literal["starting", "idle", "busy"] = "starting"
    job_id: str | None = None
    payload: bytes = b""
    address: Any = None  # reference to rank 0's Address, before the runs are sent
    runs: list[Any] = field(default_factory=list)  # references of the ranks still running
    results: list[Any] = field(default_factory=list)
    ping: Any = None
    tokens: int = 0
    still_s: float = 0.0
    stopping: bool = False

    @property
    def workers(self) -> int:
        return len(self.nodes)


class Fleet:
    """Gangs by id. Use as a context manager: leaving it ends every process it started."""

    def __init__(self, options: FleetOptions) -> None:
        """Start Ray here or join a cluster. Raises InputError when the cluster cannot be reached."""
        self.options = options
        self._ids = itertools.count(1)
        self._gangs: dict[int, _Gang] = {}
        self._temp: Path | None = None
        self._job = None if options.job is None else ray.cloudpickle.dumps(options.job)
        if options.address is None:
            self.nodes, self._gpus = {"local": options.slots()}, options.gpus or 0
            self._most: int | None = None
            self._temp = cluster.start(options.slots(), options.threads, self._gpus)
        else:
            cluster.join(options.address)
            self._most, self._gpus = _share(ray.cluster_resources(), options)
            self.nodes = self._nodes()
        self._looked = time.monotonic()
        self._events: list[FleetEvent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """Workers that fit on all nodes together."""
        return sum(self.nodes.values())

    def gangs(self) -> list[scheduler.Gang]:
        """Every gang that holds slots."""
        return [scheduler.Gang(gang.id, gang.nodes, gang.state) for gang in self._gangs.values()]

    def running(self) -> dict[int, str]:
        """Busy gang → its job."""
        return {gang.id: gang.job_id for gang in self._gangs.values() if gang.job_id is not None}

    def request(self, workers: int, widest: int) -> None:
        """Ask a cluster that grows on demand for room; it is released by `close`. Waits while `widest` does not fit."""
        if self._temp is None:
            request_resources(bundles=[self._bundle] * min(workers, MOST_REQUESTED))
            deadline = time.monotonic() + GROW_S
            while self.slots < widest and time.monotonic() < deadline:
                time.sleep(NODES_S)
                self.nodes = self._nodes()

    def create(self, nodes: Sequence[str]) -> int:
        """Begin to start a gang, a worker on each of `nodes`; `GangReady` tells when it can work.

        The caller keeps to what the nodes hold.
        """
        bundle = self._bundle
        on = None if self._temp else [{"ray.io/node-id": node} for node in nodes]
        place = placement_group([bundle] * len(nodes), strategy="PACK", bundle_label_selector=on)
        variables = cluster.worker_environment(self.options.threads, bool(self._gpus))
        actors = [
            Worker.options(  # type: ignore[attr-defined]
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank),
                # On our own node the workers inherit them, and Ray's prestarted processes can be used.
                runtime_env=None if self._temp else {"env_vars": variables},
            ).remote(os.getcwd(), "cuda" if self._gpus else "cpu", self._temp is not None, self._job)
            for rank in range(len(nodes))
        ]
        gang = _Gang(next(self._ids), tuple(nodes), place, actors, [actor.ready.remote() for actor in actors])
        self._gangs[gang.id] = gang
        return gang.id

    def start(self, gang_id: int, job_id: str, payload: bytes) -> None:
        """Give an idle gang a job: a Task pickled by `pack`."""
        gang = self._gangs[gang_id]
        gang.state, gang.job_id, gang.payload, gang.tokens, gang.still_s = "busy", job_id, payload, 0, 0.0
        gang.stopping = False
        if gang.workers == 1:
            self._send(gang, None)
        else:
            gang.address = gang.actors[0].address.remote()

    def _send(self, gang: _Gang, address: Address | None) -> None:
        gang.address = None
        gang.runs = [actor.run.remote(gang.payload, rank, address) for rank, actor in enumerate(gang.actors)]

    def stop(self, gang_id: int) -> None:
        """Ask a busy gang to checkpoint and end its job."""
        self._gangs[gang_id].stopping = True
        for actor in self._gangs[gang_id].actors:
            actor.stop.remote()

    def retire(self, gang_id: int) -> None:
        """End a gang and free its slots."""
        gang = self._gangs.pop(gang_id)
        for actor in gang.actors:
            ray.kill(actor)
        remove_placement_group(gang.place)

    def progress(self) -> dict[str, tuple[int, float]]:
        """Running job → (tokens done, seconds since they last changed), as of the last answers; asks anew."""
        if self._temp is None and time.monotonic() - self._looked > NODES_S:
            self._looked = time.monotonic()
            self._follow_nodes()
        for gang in self._gangs.values():
            if gang.state != "busy":
                continue
            if gang.ping is not None and ray.wait([gang.ping], timeout=0)[0]:
                with contextlib.suppress(ray.exceptions.RayError):  # `poll` finds the dead
                    gang.tokens, gang.still_s = ray.get(gang.ping)
                gang.ping = None
            if gang.ping is None:
                gang.ping = gang.actors[0].ping.remote()
        return {g.job_id: (g.tokens, g.still_s) for g in self._gangs.values() if g.job_id is not None}

    def poll(self, timeout: float) -> list[FleetEvent]:
        """What happened, waiting up to `timeout` seconds for something to."""
        if self._events:
            events, self._events = self._events, []
            return events
        waiting = [ref for gang in self._gangs.values() for ref in _references(gang)]
        if not waiting:
            time.sleep(timeout)
            return []
        ray.wait(waiting, num_returns=1, timeout=timeout)
        return [event for gang in list(self._gangs.values()) if (event := self._advance(gang)) is not None]

    def _advance(self, gang: _Gang) -> FleetEvent | None:
        if gang.state == "starting":
            done, left = ray.wait(gang.starting, num_returns=len(gang.starting), timeout=0)
            failure = _first_failure(done)
            if failure is not None:
                self.retire(gang.id)
                return GangLost(gang.id, failure.cause)
            if left:
                return None
            gang.state, gang.starting = "idle", []
            return GangReady(gang.id)
        if gang.state == "idle":
            return None
        if gang.address is not None:
            if not ray.wait([gang.address], timeout=0)[0]:
                return None
            address = _result(gang.address)
            if isinstance(address, Failure):
                return self._end(gang, address)
            self._send(gang, address)
            return None
        _collect(gang, 0)
        if any(isinstance(result, Failure) for result in gang.results):
            # The others hang in a collective or fail as its consequence; one of them may know the reason.
            _collect(gang, PEER_GRACE_S)
            failures = [result for result in gang.results if isinstance(result, Failure)]
            return self._end(gang, min(failures, key=_nearness_to_reason))
        return None if gang.runs else self._end(gang, gang.results[0])

    def _end(self, gang: _Gang, result: Outcome | Failure) -> JobEnded:
        job_id = gang.job_id
        assert job_id is not None
        if isinstance(result, Failure) and (gang.workers > 1 or result.kind != "bug"):
            self.retire(gang.id)  # its other ranks may hang, and its memory and sockets are not to be trusted
        elif isinstance(result, Outcome) and result.state == "stopped" and not gang.stopping:
            self.retire(gang.id)  # its machine was told to go, and it did in time what `stop` asks for
            result = replace(result, cause="a worker was told to end (SIGTERM), or its node to go")
        gang.state, gang.job_id, gang.runs, gang.results, gang.ping = "idle", None, [], [], None
        return JobEnded(gang.id, job_id, result)

    def kill(self, gang_id: int, cause: str) -> JobEnded:
        """End a busy gang at once; its job counts as lost."""
        return self._end(self._gangs[gang_id], Failure("lost", cause))

    @property
    def _bundle(self) -> dict[str, float]:
        """What one worker takes."""
        return {"GPU": 1.0, "CPU": 1.0} if self._gpus else {"CPU": float(self.options.threads)}

    def _nodes(self) -> dict[str, int]:
        """Node id → workers it holds: of the nodes that are alive and stay so, no more than were asked for."""
        leaving = cluster.draining_nodes()
        nodes: dict[str, int] = {}
        for node in ray.nodes():
            if node["Alive"] and node["NodeID"] not in leaving:
                slots = min(int(node["Resources"].get(kind, 0) // need) for kind, need in self._bundle.items())
                slots = slots if self._most is None else min(slots, self._most - sum(nodes.values()))
                if slots:
                    nodes[node["NodeID"]] = slots
        return nodes

    def _follow_nodes(self) -> None:
        """Takes up what has joined the cluster. On a node that is about to go jobs are checkpointed first."""
        self.nodes = self._nodes()
        for gang in list(self._gangs.values()):
            if all(node in self.nodes for node in gang.nodes):
                continue
            if gang.state == "busy":
                if not gang.stopping:
                    self.stop(gang.id)  # where the node is gone already `poll` finds the dead
            else:
                self.retire(gang.id)
                self._events.append(GangLost(gang.id, "its node has left the cluster", node_lost=True))

    def close(self) -> None:
        """Shut Ray down (or leave the cluster) with no child process left."""
        for gang_id in list(self._gangs):
            with contextlib.suppress(Exception):  # Ray may be gone already
                self.retire(gang_id)
        if self._temp is None:
            with contextlib.suppress(Exception):
                request_resources(bundles=[])
        cluster.leave(self._temp)


def _share(total: dict[str, float], options: FleetOptions) -> tuple[int | None, int]:
    """(the most workers to have, None for all that fit; GPUs to use) of a cluster's resources. Raises InputError where
    more is asked for than there is."""
    there = {"cpus": int(total.get("CPU", 0)), "gpus": int(total.get("GPU", 0))}
    for what, asked in (("cpus", options.cpus), ("gpus", options.gpus)):
        if asked is not None and asked > there[what]:
            cluster.leave(None)
            raise InputError(f"--{what}: {asked} asked for, the cluster has {there[what]}; give fewer")
    gpus = there["gpus"] if options.gpus is None else options.gpus
    if gpus:
        return options.gpus, gpus
    return options.cpus and options.cpus // options.threads, 0


def _references(gang: _Gang) -> list[Any]:
    return [gang.address] if gang.address is not None else gang.starting or gang.runs


def _collect(gang: _Gang, timeout: float) -> None:
    if gang.runs:
        done, gang.runs = ray.wait(gang.runs, num_returns=len(gang.runs), timeout=timeout)
        gang.results += [_result(reference) for reference in done]


def _result(reference: Any) -> Any:
    """The value of a finished reference, or the Failure it stands for."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayActorError as error:
        return Failure("lost", f"a worker died: {' '.join(str(error).split())[:300]}")
    except Exception as error:  # an exception in the worker's start
        cause = getattr(error, "cause", None) or error
        return Failure("bug", f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}")


def _first_failure(references: list[Any]) -> Failure | None:
    results = (_result(reference) for reference in references)
    return next((result for result in results if isinstance(result, Failure)), None)


def _nearness_to_reason(failure: Failure) -> int:
    """Of several ranks' failures: a lost peer makes the others fail with errors of the transport, not the reverse."""
    return ("out of memory", "disk full", "address in use", "lost", "bug").index(failure.kind)
