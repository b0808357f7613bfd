"""Ray itself: a node of its own for one driver, or a cluster that runs already; and what travels to its workers."""

import contextlib
import ctypes
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import ray
import ray.cloudpickle

from orchestrator.errors import InputError
from orchestrator.training.task import Task

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("model", "orchestrator", "analysis", "experiments")
PREFIX = "gridlaw-"
START_TRIES = 3  # Ray gives its own processes 20 s to answer, which a busy machine may miss
CONNECT_TIMEOUT_S = 5.0
HELD = (signal.SIGTERM, signal.SIGHUP)  # what a whole process group gets when it is to end
HTTP2_SETTINGS = b"\x04"  # a frame's type, its fourth byte; Ray speaks gRPC, which begins with one each way
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00" + HTTP2_SETTINGS + b"\x00" * 5
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Some of Ray's processes rename themselves, and then only their open logs tell whose they are.
KEEPER = """
import os, signal, sys, time
sys.stdin.buffer.read()
folder, quiet = sys.argv[1], 0

def is_of_the_node(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        if os.fsencode(folder) in file.read():
            return True
    return any(os.readlink(f"/proc/{pid}/fd/{fd}").startswith(folder) for fd in os.listdir(f"/proc/{pid}/fd"))

while quiet < 5:  # what is being started when its parent is killed shows a moment later
    quiet += 1
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) != os.getpid() and is_of_the_node(pid):
                os.kill(int(pid), signal.SIGKILL)
                quiet = 0
        except OSError:
            pass
    time.sleep(0.1)
"""
OBJECT_STORE_BYTES = 80 * 2**20  # about Ray's least: only tasks and outcomes pass through it


def start(slots: int, threads: int, gpus: int) -> Path:
    """Ray on this machine. Returns its folder, which is short: a socket's path may have 107 bytes, and Ray adds 70.

    Raises InputError where Ray does not start.
    """
    default = tempfile.gettempdir()
    base = Path(default if len(default) <= 12 else "/tmp")
    _remove_abandoned(base)
    # Others on this machine must not reach our Ray. Set for good: Ray reads it once a process.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray").setLevel(logging.ERROR)
    reason = ""
    for _ in range(START_TRIES):
        try:
            return _start_once(base, slots, threads, gpus)
        except Exception as error:  # Ray raises bare ones where its processes do not answer in time
            reason = " ".join(str(error).split())[:200]
    raise InputError(
        f"ray: it did not start in {START_TRIES} tries ({reason}); the machine may be overloaded, run again"
    )


def _start_once(base: Path, slots: int, threads: int, gpus: int) -> Path:
    temp = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    # The lock is held, and its descriptor open, while this process lives.
    fcntl.flock(os.open(temp, os.O_RDONLY), fcntl.LOCK_EX)
    _adopt_orphans()
    _set_keeper(temp)
    try:
        with _inherited({"RAY_USAGE_STATS_ENABLED": "0", **worker_environment(threads, bool(gpus))}):
            ray.init(
                address="local",
                num_cpus=slots * threads,
                num_gpus=gpus,
                include_dashboard=False,
                logging_level="error",
                log_to_driver=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(temp),
            )
    except BaseException:
        leave(temp)
        raise
    return temp


def _set_keeper(temp: Path) -> None:
    """A process that ends the node should this one die before workers are there to see it. Linux only."""
    if sys.platform == "linux":
        read, _write = os.pipe()  # never written to: the keeper sees it closed when this process ends, however it does
        subprocess.Popen([sys.executable, "-I", "-S", "-c", KEEPER, temp], stdin=read, start_new_session=True)
        os.close(read)


def _adopt_orphans() -> None:
    """Where a node fails half-started its agents outlive it: as our children they are found and ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _remove_abandoned(base: Path) -> None:
    """Folders of drivers that were killed: nobody holds their lock."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def join(address: str) -> None:
    """A running cluster. Raises InputError at once where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if not host or not port.isdigit():
            raise OSError("it is no HOST:PORT")
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(HTTP2_HELLO)
            if connection.recv(9)[3:4] != HTTP2_SETTINGS:
                raise OSError("no Ray answers there")
    except OSError as error:
        raise InputError(
            f"--address: {address!r} cannot be reached ({error}); start Ray there, or leave it out to use this machine"
        ) from None
    try:
        with _inherited({}):
            ray.init(address=address, logging_level="error", log_to_driver=False)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"--address: {address!r} is no Ray cluster this version can join ({reason})") from None


def draining_nodes() -> set[str]:
    """Ids of nodes that have been told to go: preempted, or scaled down. Ray itself places nothing there any more."""
    return set(ray._private.state.state.get_draining_nodes())


def leave(temp: Path | None) -> None:
    """Disconnect; with the folder `start` returned also end that node, leaving no child process."""
    if temp is None:
        ray.shutdown()
        return
    children = psutil.Process().children(recursive=True)
    # Ray would send SIGTERM, which its processes hold back (`_inherited`), and wait a second for each of them.
    killer = threading.Thread(target=_kill_once_disconnected, args=(children,))
    killer.start()
    ray.shutdown()
    killer.join()
    while left := [child for child in {*children, *_adopted()} if _lives(child)]:
        _kill(left)
        time.sleep(0.01)
    shutil.rmtree(temp, ignore_errors=True)


def _kill_once_disconnected(children: list[psutil.Process]) -> None:
    while ray.is_initialized():
        time.sleep(0.02)
    _kill(children)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _adopted() -> list[psutil.Process]:
    """Processes of Ray that became ours when their parent ended: a worker may be started while the node goes down."""
    adopted = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name().startswith("ray::"):
                adopted.append(child)
    return adopted


def _lives(process: psutil.Process) -> bool:
    """A zombie does not; one that we have inherited is reaped."""
    try:
        with contextlib.suppress(ChildProcessError):  # somebody else's, or Ray has waited for it
            os.waitpid(process.pid, os.WNOHANG)
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def worker_environment(threads: int, gpu: bool) -> dict[str, str]:
    """Variables a worker must have before it imports torch."""
    variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return variables if gpu else {**variables, "DS_ACCELERATOR": "cpu"}


def pack(task: Task) -> bytes:
    """A Task as bytes for `Fleet.start`. Raises InputError when the study's objects cannot be sent."""
    try:
        return ray.cloudpickle.dumps(task)
    except Exception as error:
        raise InputError(f"job {task.job_id}: data and measures must be picklable, but {error}") from error


def ship_by_value(folder: Path) -> list[str]:
    """Send classes and functions of modules in a study's folder by value: workers need none of its files.

    Returns the modules' names. What a worker gets is what the driver had imported, whatever becomes of the files.
    """
    folder = folder.resolve()
    shipped = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.split(".")[0] in ROOMS or name == "__main__" or "site-packages" in Path(file).parts:
            continue
        if Path(file).resolve().is_relative_to(folder):
            ray.cloudpickle.register_pickle_by_value(module)
            shipped.append(name)
    return shipped


@contextlib.contextmanager
def _inherited(variables: dict[str, str]) -> Iterator[None]:
    """For the processes started meanwhile: our rooms before a study folder's, `variables`, none of the signals HELD.

    Ray puts the working folder first on its workers' import path, so that folder must be ours for the moment. A group's
    SIGTERM must not reach Ray before the workers have checkpointed; Ray itself holds back SIGINT, and kills by SIGKILL.
    Here its handlers give way to those of before: what came meanwhile is theirs.
    """
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *HELD)} if main else {}
    before = {name: os.environ.get(name) for name in variables}
    folder = os.getcwd()
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    os.environ.update(variables)
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(folder)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for number, handler in handlers.items():
            if handler is not None:  # None: not set by Python, so Ray has left it alone too
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
