"""The throughput table: how fast each model trains on each device, as measured by `gridlaw plan --calibrate`."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator import identity
from orchestrator.cells import Cell
from orchestrator.errors import InputError
from orchestrator.study import Study

FILE = "throughput.json"


@dataclass(frozen=True)
class Speed:
    """One worker of one setting on one device.

    key: of what is trained (`key`). params: of the model, for readers. tokens_per_second: mean over `steps` steps of
    `beside` workers at once. measure_seconds: measurement identity → seconds a call. kernels: in the order of the
    layers, each once. date: ISO 8601, UTC. start_seconds: from a job to its first step, what that step takes more than
    others included. commit_seconds: of a checkpoint with optimizer state.
    """

    key: str
    params: int
    device: str
    threads: int
    tokens_per_second: float
    steps: int
    measure_seconds: dict[str, float]
    kernels: list[str]
    torch: str
    date: str
    start_seconds: float = 0.0
    commit_seconds: float = 0.0
    beside: int = 1


def key(study: Study, cell: Cell) -> str:
    """Identity of all that a worker's speed depends on beside its device: the model and how its steps are run."""
    machine, recipe = study.machine, study.recipe
    return identity.digest(
        {
            "model": cell.document["model"],
            "sequences": recipe.batch_size // machine.workers_of(cell.size),
            "micro_batch": machine.micro_batch,
            "recompute": machine.recompute,
            "zero_stage": machine.zero_stage,
            "optimizer": recipe.optimizer,
            "precision": recipe.precision,
        }
    )


def read(root: Path) -> list[Speed]:
    """All entries of a root's table, none where there is no table to read. Raises InputError for a damaged one."""
    path = root / FILE
    try:
        return [Speed(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except OSError:
        return []
    except (ValueError, TypeError):
        raise InputError(f"--root: {path} is damaged; delete it and run gridlaw plan --calibrate again") from None


def add(root: Path, speeds: Iterable[Speed]) -> None:
    """Enters speeds into a root's table; a newer one takes the place of an older one of the same setting and device."""
    table = {(old.key, old.device, old.threads): old for old in read(root)}
    table |= {(new.key, new.device, new.threads): new for new in speeds}
    try:
        root.mkdir(parents=True, exist_ok=True)
        partial = root / f".{FILE}"
        partial.write_text(json.dumps([asdict(speed) for speed in table.values()], indent=1), encoding="utf-8")
        partial.replace(root / FILE)
    except OSError as error:
        raise InputError(f"--root: {root} cannot be written ({error.strerror}); give another") from None


def on(speeds: Iterable[Speed], device: str, threads: int) -> dict[str, Speed]:
    """The entries of one device, by key. device: its name or a word of it ("H100" for "NVIDIA H100 80GB HBM3").

    threads: of a worker, told apart on CPUs alone.
    """
    words = device.lower().split()
    return {
        speed.key: speed
        for speed in speeds
        if words
        and all(word in speed.device.lower().replace("-", " ").split() for word in words)
        and (speed.threads == threads or not speed.device.startswith("CPU"))
    }


def measured_seconds(speed: Speed, wanted: Iterable[Any]) -> float | None:
    """Seconds of one evaluation: of all the measurements named, None where one was not timed."""
    seconds = [speed.measure_seconds.get(measurement) for measurement in wanted]
    known = [value for value in seconds if value is not None]
    return sum(known) if len(known) == len(seconds) else None
