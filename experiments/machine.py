"""The devices a plan is made for: those of this machine, or others that are named."""

import os
from pathlib import Path

from rich.console import Console

from experiments.allowance import gpus_of
from orchestrator import devices, throughput
from orchestrator.cells import expand
from orchestrator.devices import Device
from orchestrator.errors import InputError
from orchestrator.study import Study
from orchestrator.submit import make_plan

# Resident memory of a worker before it trains: torch and DeepSpeed 500 MB as measured, and what Ray adds.
WORKER_BYTES = 6e8


def device_here(study: Study, slots: int, gpus: int | None, flops: float | None, price: float | None) -> Device:
    """A device of this machine with its share of the memory. slots: workers at once on it. flops: what it is taken to
    sustain, None for unknown."""
    threads = study.machine.threads
    if gpus_of(gpus):
        import torch

        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
        return Device(torch.cuda.get_device_name(0), threads, flops, memory, True, price)
    return Device(_cpu(), threads, flops, _memory() / slots - WORKER_BYTES, True, price)


def device_to_run_on(
    study: Study, slots: int, gpus: int | None, flops: float | None, price: float | None, here: bool
) -> Device:
    """As `device_here`; of a cluster, whose devices are not known before it is joined, what is said of them."""
    return (
        device_here(study, slots, gpus, flops, price) if here else Device("", study.machine.threads, flops, price=price)
    )


def device_named(
    study: Study, name: str, mfu: float, price: float | None, calibrate: bool, flops: float | None
) -> Device:
    """A device of `devices.NAMED` that is not here, at a share `mfu` of its peak. Raises InputError."""
    if calibrate:
        raise InputError(f"--calibrate: times this machine, and --device {name} plans for another; give one of them")
    if flops is not None:
        raise InputError(f"--device-flops: the peak of --device {name} is known; give one of them")
    return devices.elsewhere(name, study.recipe.precision, mfu, price)


def calibrate(study: Study, root: Path, slots: int, gpus: int | None, console: Console) -> None:
    """Times the models of what a study still has to train, on one device of this machine, into the root's table."""
    if not gpus_of(gpus):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported
    from orchestrator import calibration

    name = device_here(study, slots, gpus, None, None).name
    torch_device = "cuda" if gpus_of(gpus) else "cpu"
    cells = {cell.id: cell for cell in expand(study)}
    planned = make_plan(study, root, slots)
    models = calibration.distinct(study, [cells[job.cell_id] for job in planned.jobs])
    beside = min(slots, sum(job.workers for job in planned.jobs))
    for number, cell in enumerate(models, 1):
        label = f"{cell.arm} {cell.size} ({number} of {len(models)})"
        if calibration.too_large(study, cell, torch_device):
            console.print(f"{label}: a step takes too long here; say --device-flops and --mfu", soft_wrap=True)
            continue
        speed = calibration.measure(study, cell, torch_device, name, root, beside)
        throughput.add(root, [speed])
        said = f"{speed.tokens_per_second:,.0f} tokens/s over {speed.steps} steps, {speed.beside} workers at once"
        console.print(f"{label}: {said}", soft_wrap=True)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {models[0] if models else 'unknown'}"


def _memory() -> float:
    """Bytes this machine has, or its container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        allowed = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        allowed = "max"
    return min(total, int(allowed)) if allowed.isdigit() else total
