"""What a run may take of this machine: its CPUs and GPUs."""

from typing import TYPE_CHECKING

from experiments.doctor import usable_cpus
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
