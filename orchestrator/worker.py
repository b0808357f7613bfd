"""One process of a gang: a Ray actor that stays warm and trains one job after another.

Imported by the driver too, so nothing heavy stands at the top: torch and DeepSpeed are imported in the actor alone.
"""

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import ray
import ray.cloudpickle

from orchestrator.scheduler import FailureKind
from orchestrator.training.task import Outcome, Task

# (task, rank, should_stop, progress) → how it ended. progress takes the tokens done so far.
JobFunction = Callable[[Task, int, Callable[[], bool], Callable[[int], None]], Outcome]

PARENT_POLL_S = 0.5


@dataclass(frozen=True)
class Failure:
    """Why a job did not end by itself. cause: "ExceptionType: first line"; detail: the traceback, if there is one."""

    kind: FailureKind
    cause: str
    detail: str = ""


@dataclass(frozen=True)
class Address:
    """Where rank 0 of a gang waits for the others."""

    host: str
    port: int


@ray.remote(concurrency_groups={"control": 1})
class Worker:
    """Answers `ping` and `stop` in a thread of its own while `run` trains."""

    def __init__(self, folder: str, device: str, local: bool, job: bytes | None) -> None:
        """folder: the driver's working folder. local: Ray is the driver's own. job: pickled, instead of training."""
        if local:
            threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
        if os.path.isdir(folder):
            os.chdir(folder)
        self._local = local
        self._stop, self._busy = threading.Event(), False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._told_to_go)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # our own node holds it back (`cluster`)
        self._tokens = 0
        self._moved = time.monotonic()
        self._job: JobFunction = _training_job(device) if job is None else ray.cloudpickle.loads(job)

    @ray.method(concurrency_group="control")
    def address(self) -> Address:
        """This machine's address and a port that was free a moment ago."""
        host = "127.0.0.1" if self._local else ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return Address(host, probe.getsockname()[1])

    @ray.method(concurrency_group="control")
    def ping(self) -> tuple[int, float]:
        """(tokens done by the running job, seconds since that last changed)."""
        return self._tokens, time.monotonic() - self._moved

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Ask the running job to checkpoint and return, for good: a job sent before but not begun yet stops too."""
        self._stop.set()

    def ready(self) -> int:
        """Returns the process id, once everything is imported."""
        return os.getpid()

    def run(self, payload: bytes, rank: int, address: Address | None) -> Outcome | Failure:
        """Train one job as `rank` of the gang that meets at `address` (None: alone). payload: a pickled Task."""
        self._tokens, self._moved, self._busy = 0, time.monotonic(), True
        try:
            task: Task = ray.cloudpickle.loads(payload)
            os.environ.update(_gang_environment(rank, task.workers, address))
            return self._job(task, rank, self._stop.is_set, self._progress)
        except Exception as error:
            return failure_of(error)
        finally:
            self._busy = False

    def _told_to_go(self, *_: object) -> None:
        """SIGTERM: this machine is wanted for something else, or goes down. A job at work checkpoints first."""
        if not self._busy:
            os._exit(0)
        self._stop.set()

    def _progress(self, tokens: int) -> None:
        self._tokens, self._moved = tokens, time.monotonic()


def failure_of(error: BaseException) -> Failure:
    """What an exception in a worker means for its job."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    cause = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    text = str(error).lower()
    kind: FailureKind = "bug"
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        kind = "out of memory"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind, cause = "disk full", f"disk full: {error.filename or 'a file'} cannot be written; make room, run again"
    elif "eaddrinuse" in text or "address already in use" in text:
        kind = "address in use"
    return Failure(kind, cause, "".join(traceback.format_exception(error)))


def _gang_environment(rank: int, workers: int, address: Address | None) -> dict[str, str]:
    """What torch.distributed and DeepSpeed read outside their own launchers; all of it must be there."""
    meeting = address or Address("127.0.0.1", 0)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",  # Ray shows each worker its own device only
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
    }


def _training_job(device: str) -> JobFunction:
    # DeepSpeed's autotuning imports MLflow where it can: 2 of the 5 s a worker takes to start, and neither is needed.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    from orchestrator.training import engine, job

    def train(task: Task, rank: int, should_stop: Callable[[], bool], progress: Callable[[int], None]) -> Outcome:
        try:
            engine.start_process_group(rank, task.workers, int(os.environ["MASTER_PORT"]), os.environ["MASTER_ADDR"])
            return job.run(task, rank, should_stop, progress, device)
        finally:
            engine.end_process_group()

    return train


def _die_with_parent(parent: int) -> None:
    """Ends this process when the Ray node that started it is gone: a killed driver must leave nobody training.

    The node's agents are taken along: they would first try for a minute to tell a node that is no more.
    """
    family = psutil.Process(parent).children()
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    for process in family:
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid():
                process.kill()
    os._exit(1)
