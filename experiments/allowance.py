"""What a run may take of this machine: devices, disk, hours."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.doctor import nearest_existing, usable_cpus
from experiments.show import count
from orchestrator.errors import InputError

if TYPE_CHECKING:
    from orchestrator.study import Study


def gpus_of(gpus: int | None) -> int:
    """The GPUs to use of this machine: as many as asked for, else all."""
    if gpus == 0:
        return 0
    import torch

    there = torch.cuda.device_count()
    if gpus is not None and gpus > there:
        raise InputError(f"--gpus: {gpus} asked for, this machine has {there}; give fewer, or --gpus 0 for its CPUs")
    return there if gpus is None else gpus


def slots_of(study: "Study", cpus: int | None, gpus: int | None) -> int:
    """Workers at once on this machine: one a GPU, or as many as have `machine.threads` CPUs each."""
    slots = gpus_of(gpus) or (cpus or usable_cpus()) // study.machine.threads
    if not slots:
        raise InputError(
            f"machine.threads: {study.machine.threads} a worker, but there are {cpus or usable_cpus()} CPUs to use; "
            f"lower it or raise --cpus"
        )
    return slots


def check_limits(document: dict[str, Any], folder: Path, max_hours: float | None) -> None:
    """Raises InputError where the plan would not fit the disk or exceeds what the user allows."""
    totals = document["totals"]
    free = shutil.disk_usage(nearest_existing(folder)).free
    if totals["disk_bytes"] > free:
        raise InputError(
            f"disk: the study needs {count(totals['disk_bytes'])}B, {count(free)}B are free at {folder}; "
            f"keep fewer checkpoints (evaluations.checkpoints) or give another --root"
        )
    if max_hours is not None and totals["device_hours"] is None:
        raise InputError(
            f"--max-hours: {max_hours:g} cannot be held, the time of "
            f"{sum(job['seconds'] is None for job in document['jobs'])} jobs is not known before an arm has run here; "
            f"run one seed without the limit first"
        )
    if max_hours is not None and totals["device_hours"] > max_hours:
        raise InputError(
            f"--max-hours: {max_hours:g} is below the plan's {totals['device_hours']:.2f} device hours; "
            f"raise it or drop cells"
        )
