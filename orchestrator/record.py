"""A job's record: one JSON object a line, append-only, written by one process and read by anyone at any time.

A line is a measurement (`source`, `step`, `metrics`, with `measurement` and `rows` where a measure made it) or an
`event`. It is whole once its newline is on disk: readers ignore a torn last line, the next writer cuts it.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import polars as pl

from orchestrator.errors import InputError

Event = Literal["started", "resumed", "finished", "diverged", "stopped"]
SCHEMA = {
    "step": pl.Int64,
    "tokens": pl.Int64,
    "time": pl.Float64,
    "source": pl.String,
    "measurement": pl.String,
    "metric": pl.String,
    "value": pl.Float64,
}


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a record, in the order written; [] where there is no record yet.

    Raises InputError naming the line where one before the last is none of ours: that is damage, not a torn write.
    """
    if not path.exists():
        return []
    pieces = path.read_bytes().split(b"\n")
    whole, torn = pieces[:-1], pieces[-1]
    lines = []
    for number, piece in enumerate(whole, 1):
        try:
            line = json.loads(piece)
            if not _is_line(line):
                raise ValueError("no line of a record")
        except ValueError:
            if number == len(whole) and not torn:
                break  # a power cut can leave a last line of the right length and the wrong bytes
            raise InputError(
                f"{path}:{number}: no line of a record; restore the file, or delete the job's folder to train it again"
            ) from None
        lines.append(line)
    return lines


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or not all(_is_number(line.get(key)) for key in ("step", "tokens", "time")):
        return False
    metrics = line.get("metrics")
    return "event" in line or (
        isinstance(line.get("source"), str)
        and isinstance(metrics, dict)
        and all(value is None or _is_number(value) for value in metrics.values())
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def read_with_rows(path: Path) -> list[dict[str, Any]]:
    """The lines that hold a measure's rows, in order: the rest of a finished record is in its Parquet."""
    # Parsing every line of ten thousand records takes minutes; the few with rows are found by their bytes.
    content = path.read_bytes() if path.exists() else b""
    if b'"rows"' not in content:
        return []
    return [json.loads(piece) for piece in content.split(b"\n")[:-1] if b'"rows"' in piece]


def measurements(path: Path) -> set[str]:
    """Identities of the measurements a record holds; empty where there is no record."""
    return {line["measurement"] for line in read(path) if line.get("measurement")}


def table(lines: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """The measurements among `lines`, long: one row a metric; a value that was not finite is null."""
    rows = [
        (line["step"], line["tokens"], line["time"], line["source"], line.get("measurement"), metric, value)
        for line in lines
        if "metrics" in line
        for metric, value in line["metrics"].items()
    ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def to_parquet(record: Path, parquet: Path) -> None:
    """Writes the record's `table` as Parquet, whole or not at all."""
    partial = parquet.with_suffix(".partial")
    table(read(record)).write_parquet(partial)
    partial.replace(parquet)


@contextmanager
def exclusive(folder: Path, wait_s: float = 30.0) -> Iterator[None]:
    """Holds the job's folder for this process alone; the lock ends with the process, however it ends.

    An orphan of a dead driver may still be writing. Raises TimeoutError when it has not let go after `wait_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{folder}: another process has held this job for {wait_s:.0f} s; end it and run again"
                    ) from None
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)


def adopt(path: Path, other: Path) -> None:
    """Makes a record of all that another one measured, without its events. Whole or not at all."""
    lines = [line for line in read(other) if "metrics" in line]
    partial = path.with_suffix(".adopting")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines))
    partial.replace(path)


class RecordWriter:
    """The one writer of a record. Cuts a torn last line and writes nothing the record already holds."""

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tokens_per_step = tokens_per_step
        self._file = path.open("ab")
        cut_torn_line(path)
        lines = read(path)
        self._held = {_key(line) for line in lines if "metrics" in line}
        self._last_event: str | None = next((line["event"] for line in reversed(lines) if "event" in line), None)

    @property
    def last_event(self) -> str | None:
        return self._last_event

    def holds(self, source: str, step: int, measurement: str | None = None) -> bool:
        return (source, measurement, step) in self._held

    def measured(
        self,
        step: int,
        source: str,
        metrics: Mapping[str, float],
        measurement: str | None = None,
        rows: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Appends one measurement, unless the record holds that (source, measurement, step) from before a resume."""
        if self.holds(source, step, measurement):
            return
        line: dict[str, Any] = {"source": source}
        if measurement is not None:
            line["measurement"] = measurement
        line["metrics"] = dict(metrics)
        if rows:
            line["rows"] = list(rows)
        self._append(step, line)
        self._held.add((source, measurement, step))

    def event(
        self, step: int, event: Event, cause: str | None = None, kernels: Mapping[str, str] | None = None
    ) -> None:
        """kernels: pattern word → the kernel that computes it from here on, with "started" and "resumed"."""
        self._append(step, {"event": event, "cause": cause} | ({} if kernels is None else {"kernels": dict(kernels)}))
        self._last_event = event

    def _append(self, step: int, content: dict[str, Any]) -> None:
        line = {"step": step, "tokens": step * self._tokens_per_step, "time": time.time(), **content}
        self._file.write(json.dumps(_plain(line), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Puts the lines on the disk itself: a checkpoint must never be ahead of its record."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _key(line: Mapping[str, Any]) -> tuple[str, str | None, int]:
    return line["source"], line.get("measurement"), line["step"]


def cut_torn_line(path: Path) -> None:
    """Cuts what a write that was cut short has left at the end of a file of JSON lines."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    last = content[content.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end]
    try:
        json.loads(last or b"{}")
    except ValueError:
        end -= len(last)
    if end < len(content):
        os.truncate(path, end)


def _plain(value: Any) -> Any:
    """JSON types: numpy scalars become Python's, non-finite numbers null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
