"""The devices a plan is for: what they sustain, hold and cost."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import InputError

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Named:
    """flops: published dense peak, FLOP/s, by precision of the recipe. memory_bytes: of one device."""

    flops: dict[Precision, float]
    memory_bytes: float


# Peaks from NVIDIA's data sheets of the SXM forms, without sparsity (H100 and H200 print bfloat16 with it, twice this):
# "NVIDIA H100 Tensor Core GPU", "NVIDIA H200 Tensor Core GPU", "NVIDIA A100 Tensor Core GPU". float32 is that of the
# plain units: torch multiplies float32 matrices in full precision unless told otherwise.
NAMED = {
    "A100": Named({"bfloat16": 312e12, "float32": 19.5e12}, 80e9),
    "H100": Named({"bfloat16": 989.4e12, "float32": 67e12}, 80e9),
    "H200": Named({"bfloat16": 989.4e12, "float32": 67e12}, 141e9),
}


@dataclass(frozen=True)
class Device:
    """What each worker runs on.

    name: as in the throughput table. threads: of one worker. flops: FLOP/s it is taken to sustain where nothing was
    measured, None where that is not said. memory_bytes: for one worker, None where unknown. here: whether it is this
    machine's, so that what the study has trained tells its speed. price: of a device-hour.
    """

    name: str = ""
    threads: int = 1
    flops: float | None = None
    memory_bytes: float | None = None
    here: bool = True
    price: float | None = None

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("CPU")


def elsewhere(name: str, precision: Precision, mfu: float, price: float | None) -> Device:
    """A named device that is not here, at a share `mfu` of its peak. Raises InputError for a name that is not known."""
    known = NAMED.get(name.upper())
    if known is None:
        raise InputError(
            f"--device: {name!r} is not known; choose from {', '.join(NAMED)}, or give its peak in FLOP/s with "
            f"--device-flops"
        )
    return Device(name.upper(), 1, known.flops[precision] * mfu, known.memory_bytes, False, price)
