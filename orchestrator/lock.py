"""One driver a study: who holds it, and how it is asked from outside to end."""

import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from orchestrator.errors import InputError

POLL_S = 0.1


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a study for one driver. Raises InputError naming the process that holds it; a dead one holds nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "run.lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, host = _read(folder)
            raise InputError(
                f"study: {folder.name} is being run by process {pid}{_elsewhere(host)}; wait for it, or stop it with "
                f"gridlaw stop {folder.name}"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}")
        file.flush()
        yield


def stop_holder(folder: Path, wait_s: float) -> int | None:
    """Ask the driver of a study to end, as Ctrl-C does, and wait for that. Returns its process id.

    None where it has not ended after `wait_s`. Raises InputError where there is none, or not on this machine.
    """
    if not _is_held(folder):
        raise InputError(f"study: {folder.name} is not being run; nothing to stop")
    pid, host = _read(folder)
    if host != socket.gethostname():
        raise InputError(f"study: {folder.name} is being run by process {pid}{_elsewhere(host)}; stop it there")
    try:
        driver = psutil.Process(int(pid))
        driver.send_signal(signal.SIGTERM)  # a shell lets what it starts in the background ignore SIGINT
    except (ValueError, psutil.NoSuchProcess):
        raise InputError(f"study: {folder.name} is held by process {pid}, which is no driver; try again") from None
    except psutil.AccessDenied:
        raise InputError(f"study: {folder.name} is being run by process {pid} of another user; ask them") from None
    deadline = time.monotonic() + wait_s
    while _is_held(folder) or _lives(driver):
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    return int(pid)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_held(folder: Path) -> bool:
    try:
        with open(folder / "run.lock", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _read(folder: Path) -> tuple[str, str]:
    """(process id, host) of who holds a study."""
    pid, _, host = (folder / "run.lock").read_text(encoding="utf-8").partition(" ")
    return pid or "unknown", host or "unknown"


def _elsewhere(host: str) -> str:
    return "" if host == socket.gethostname() else f" on {host}"
