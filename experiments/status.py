"""Where a study stands: read from its ledger and records, beside a running driver or without one."""

import contextlib
import json
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from experiments import show
from orchestrator.ledger import STATES, JobRow, Ledger
from orchestrator.timing import timing
from orchestrator.tuning import results

Document = dict[str, Any]
QUICK_S = 0.02


def read(name: str, folder: Path, cells: Sequence[Document]) -> Document:
    """The document of `gridlaw status --json`.

    cells: rows of study.json or of a plan, with `id` the id of the cell's training job too. A cell the ledger does not
    know is pending; one that waits for its trunk shows how far that is. tokens_per_second: of what runs, and the sum.
    tuning: a row a group of cells with one tuned rate: how many of its jobs have ended, and the rate once it is known.
    seconds_left: from the pace of each arm so far, spread over the slots; None while no cell has a pace.
    """
    jobs: dict[str, JobRow] = {}
    used: dict[str, float | None] = {}
    slots = 1
    ledger_file = folder / "ledger.db"
    if Ledger.is_at(ledger_file):
        with Ledger.read(ledger_file) as ledger:
            jobs = ledger.snapshot()
            used = timing(ledger)
            sessions = ledger.query("SELECT slots FROM sessions ORDER BY id DESC LIMIT 1")
            slots = sessions[0]["slots"] if sessions else 1
    trunks = _trunks(cells, jobs)
    running = [each["id"] for each in (*cells, *trunks) if each["id"] in jobs and jobs[each["id"]].state == "running"]
    paces = {job_id: _tokens_per_second(folder, job_id) for job_id in running}
    rows = [_row(cell, jobs, paces) for cell in cells]
    trials = _trials(cells, jobs)
    others = [_row(each, jobs, paces) for each in (*trunks, *(trial for group in trials.values() for trial in group))]
    seconds = _seconds_left([*rows, *others], jobs, slots)
    found = results.of_cells(folder, cells)
    counts = Counter(row["state"] for row in rows)
    return {
        "study": name,
        "cells": rows,
        "counts": {state: counts[state] for state in STATES if counts[state]},
        **{key: used.get(key) or 0.0 for key in ("makespan_s", "busy_core_s", "lower_bound_s", "overhead_s_per_job")},
        "tokens_per_second": sum(pace for pace in paces.values() if pace),
        "seconds_left": seconds,
        "tuning": _tuning(cells, trials, jobs, found),
        "warnings": [line for each in found.values() for line in each["warnings"]],
    }


def _trials(cells: Sequence[Document], jobs: dict[str, JobRow]) -> dict[str, list[Document]]:
    """Group name → a row like a cell's for each job of its tuning trials that the ledger knows."""
    tuned = {cell["id"]: cell for cell in cells if cell.get("tuning")}
    found: dict[str, list[Document]] = defaultdict(list)
    for job in jobs.values():
        if job.kind == "tune" and job.cell_id in tuned:
            cell = tuned[job.cell_id]
            found[cell["tuning"]["name"]].append({**cell, "id": job.id, "budget_tokens": job.tokens, "trunk": None})
    return found


def _tuning(
    cells: Sequence[Document], trials: dict[str, list[Document]], jobs: dict[str, JobRow], found: dict[str, Document]
) -> list[Document]:
    rows = {}
    for cell in cells:
        name = cell["tuning"]["name"] if cell.get("tuning") else None
        if name and name not in rows:
            told = found.get(name, {})
            rows[name] = {
                **{key: cell[key] for key in ("arm", "size", "data")},
                "jobs": [trial["id"] for trial in trials.get(name, [])],
                "ended": sum(jobs[trial["id"]].state in ("finished", "diverged") for trial in trials.get(name, [])),
                **{key: told.get(key) for key in ("rate", "interval", "method", "at_edge")},
            }
    return list(rows.values())


class Look:
    """Where a study stands, read anew whenever asked; where that takes long, no more than a tenth of the time."""

    def __init__(self, name: str, folder: Path, cells: Sequence[Document]) -> None:
        self._read = lambda: read(name, folder, cells)
        self._lock = threading.Lock()
        self._next = -math.inf
        self._document: Document = {}

    def __call__(self) -> Document:
        with self._lock:  # a live table asks from a thread of its own
            began = time.monotonic()
            if began >= self._next:
                self._document = self._read()
                took = time.monotonic() - began
                self._next = time.monotonic() + (9 * took if took > QUICK_S else 0.0)
            return self._document

    def anew(self) -> Document:
        """However long it takes."""
        self._next = -math.inf
        return self()


def _trunks(cells: Sequence[Document], jobs: dict[str, JobRow]) -> list[Document]:
    """A row like a cell's for each trunk the ledger knows."""
    trunks = {cell["trunk"]["id"]: cell for cell in cells if cell.get("trunk")}
    return [
        {**cell, "id": trunk_id, "budget_tokens": cell["trunk"]["tokens"], "trunk": None}
        for trunk_id, cell in trunks.items()
        if trunk_id in jobs
    ]


def _row(cell: Document, jobs: dict[str, JobRow], paces: dict[str, float | None]) -> Document:
    job = jobs.get(cell["id"])
    row = {
        **{key: cell[key] for key in ("id", "arm", "size", "data", "budget_tokens", "seed")},
        "state": job.state if job else "pending",
        "attempts": job.attempts if job else 0,
        "cause": job.cause if job else None,
        "tokens_done": job.tokens_done if job else 0,
        "tokens_per_second": paces.get(cell["id"]),
    }
    trunk = jobs.get(cell["trunk"]["id"]) if cell.get("trunk") else None
    if trunk and row["state"] == "pending":
        row["tokens_done"] = max(row["tokens_done"], trunk.tokens_done)
    return {**row, "trunk": trunk.id if trunk else None, "trunk_state": trunk.state if trunk else None}


def _tokens_per_second(folder: Path, job_id: str) -> float | None:
    """Of the newest training line in a job's record; reads its last 8 KiB only."""
    record = folder / "jobs" / job_id / "record.jsonl"
    try:
        with record.open("rb") as file:
            file.seek(max(0, record.stat().st_size - 8192))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    for line in reversed(lines[:-1]):  # what follows the last newline is still being written
        try:
            pace = json.loads(line).get("metrics", {}).get("train/tokens_per_second")
        except ValueError:
            continue
        if pace is not None:
            return float(pace)
    return None


def _seconds_left(rows: list[Document], jobs: dict[str, JobRow], slots: int) -> float | None:
    """Also sets `seconds_left` of each running row."""
    work: dict[tuple[str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for row in rows:
        job = jobs.get(row["id"])
        if job and job.state == "finished" and job.busy_s:
            tokens, busy = work[row["arm"], row["size"]]
            work[row["arm"], row["size"]] = (tokens + job.tokens, busy + job.busy_s)
    paces = {key: tokens / busy for key, (tokens, busy) in work.items()}
    for row in rows:
        if row["tokens_per_second"]:
            paces.setdefault((row["arm"], row["size"]), row["tokens_per_second"])
    if not paces:
        return None
    usual = sum(paces.values()) / len(paces)
    left = []
    for row in rows:
        if row["state"] in ("pending", "running", "blocked"):
            job = jobs.get(row["id"])
            begins = row["budget_tokens"] - job.tokens if job else 0  # where its trunk ends
            tokens = row["budget_tokens"] - max(row["tokens_done"], begins)
            seconds = tokens / paces.get((row["arm"], row["size"]), usual)
            left.append((seconds, job.workers if job else 1))
            if row["state"] == "running":
                row["seconds_left"] = seconds
    return max(sum(s * workers for s, workers in left) / slots, *(s for s, _ in left)) if left else 0.0


@contextmanager
def following(look: Callable[[], Document], console: Console, every_s: float = 1.0) -> Iterator[None]:
    """A live table of a study while the body runs. What is printed on the console meanwhile stays above it."""

    def table() -> RenderableType:
        return show.status(look(), console.width, console.height)

    with Live(get_renderable=table, console=console, refresh_per_second=1 / every_s, vertical_overflow="crop"):
        yield


def watch(look: Callable[[], Document], console: Console, every_s: float = 1.0) -> None:
    """Shows a study until no cell is running or waiting, or the user has seen enough (Ctrl-C)."""
    with following(look, console, every_s), contextlib.suppress(KeyboardInterrupt):
        while any(look()["counts"].get(state) for state in ("running", "pending", "blocked")):
            time.sleep(every_s)
