"""The options that verbs of the command share, each with its help and what it refuses."""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.errors import InputError, shortened


def _as_root(root: Path) -> Path:
    """Raises InputError for what can be no folder; one that is not there yet can."""
    try:
        usable = root.is_dir() or not root.exists()
        reason = "a file, no folder"
    except OSError as error:
        usable, reason = False, error.strerror or "not usable"
    if not usable:
        raise InputError(f"--root: {shortened(root)} is no folder for studies ({reason}); give another")
    return root


def _as_tracking(uri: str | None) -> str | None:
    if uri is not None and not re.match(r"(https?|sqlite|postgresql|mysql|mssql|databricks)(\+\w+)?:", uri):
        raise InputError(
            f"--tracking-uri: {shortened(uri)!r} is no address of an MLflow store; give http://HOST:PORT or "
            f"sqlite:///PATH, or leave it out"
        )
    return uri


def _as_figure(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """Raises InputError for nan, which no comparison refuses, and for inf."""
    if value is not None and not math.isfinite(value):
        raise InputError(f"{parameter.opts[0]}: {value} is no figure; give a number, or leave it out")
    return value


StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study file, or the name of a study under the root.")
]
RootOption = Annotated[Path, typer.Option("--root", help="Folder of the studies.", callback=_as_root)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
CpusOption = Annotated[int | None, typer.Option("--cpus", min=1, help="CPU cores to use; default: all usable ones.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs to use; default: all there are.")]
AddressOption = Annotated[str | None, typer.Option("--address", help="A Ray cluster; default: this machine.")]
TrackingOption = Annotated[
    str | None, typer.Option("--tracking-uri", help="An MLflow server; default: ROOT/mlflow.db.", callback=_as_tracking)
]
FlopsOption = Annotated[
    float | None,
    typer.Option("--device-flops", min=1, help="Peak FLOP/s of a device, for models not timed.", callback=_as_figure),
]
MfuOption = Annotated[
    float, typer.Option("--mfu", min=0.001, max=1, help="Share of the peak that training reaches.", callback=_as_figure)
]
PriceOption = Annotated[
    float | None, typer.Option("--price", min=0, help="Price of a device hour.", callback=_as_figure)
]
HoursOption = Annotated[
    float | None,
    typer.Option("--max-hours", min=0, help="Refuse above this many device hours.", callback=_as_figure),
]
CostOption = Annotated[
    float | None, typer.Option("--max-cost", min=0, help="Refuse above this cost; needs --price.", callback=_as_figure)
]
DiskOption = Annotated[
    str | None, typer.Option("--max-disk", help="Refuse above this many bytes (20G); default: what is free.")
]
