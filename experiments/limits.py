"""What a plan may cost: refused before anything starts where it costs more."""

import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import show
from experiments.doctor import nearest_existing
from orchestrator.errors import InputError

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Limits:
    """hours: device hours. cost: in the unit of the price. disk_bytes: None for what is free at the root."""

    hours: float | None = None
    cost: float | None = None
    disk_bytes: float | None = None

    def hold(self, document: dict[str, Any], folder: Path) -> None:
        """Raises InputError where the plan of `document` exceeds a limit, or one cannot be promised."""
        totals, device = document["totals"], document["device"]
        usage = shutil.disk_usage(nearest_existing(folder))
        free = usage.free if usage.total else math.inf  # of no real disk, as /proc: writing there is refused later
        disk = free if self.disk_bytes is None else self.disk_bytes
        if totals["disk_bytes"] > disk:
            room = f"{show.count(free)}B are free at {folder}" if self.disk_bytes is None else "--max-disk allows less"
            raise InputError(
                f"disk: the study needs {show.count(totals['disk_bytes'])}B, {room}; keep fewer checkpoints "
                f"(evaluations.checkpoints) or give another --root"
            )
        there = device["memory_bytes"]
        if there is not None and totals["memory_bytes"] > there:
            raise InputError(
                f"memory: a worker needs {show.count(totals['memory_bytes'])}B, a device has {show.count(there)}B for "
                f"it ({device['name']}); lower machine.micro_batch, raise machine.zero_stage with more workers, "
                f"or drop the largest size"
            )
        for option, limit, figure, what in (
            ("--max-hours", self.hours, totals["device_hours"], "device hours"),
            ("--max-cost", self.cost, totals["price"], "cost"),
        ):
            if limit is None:
                continue
            if totals["device_hours"] is None:
                unknown = sum(job["seconds"] is None for job in document["jobs"])
                raise InputError(
                    f"{option}: {limit:g} cannot be held, the time of {unknown} of {len(document['jobs'])} jobs is not "
                    f"known; run gridlaw plan --calibrate first, or say --device-flops and --mfu"
                )
            if figure is None:
                raise InputError(f"{option}: {limit:g} needs the price of a device hour; give --price")
            if figure > limit:
                raise InputError(f"{option}: {limit:g} is below the plan's {figure:.2f} {what}; raise it or drop cells")


def as_bytes(text: str | None) -> float | None:
    """Bytes of "500M", "20G", "1.5TB". Raises InputError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text.strip())
    if not found:
        raise InputError(f"--max-disk: {text!r} is no number of bytes; write 500M, 20G or 1.5T")
    return float(found[1]) * UNITS[found[2]]
