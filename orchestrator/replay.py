"""Replays records into MLflow: exactly once, with their own times and with tokens as the step axis.

The records on disk are the truth; MLflow is a copy to look at. What was delivered is noted beside each record
(tracking.json: store, run, byte offset, state). The note may lag behind the store, never run ahead of it, and MLflow
stores a point of the same name, value, time and step once: a replay after a kill at any moment adds nothing twice.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.mlflow_store import BATCH, MlflowStore, Point, StoredRun, make_default
from orchestrator.tracked_runs import CellState, Run, planned_runs, study_state

OPEN = frozenset({"pending", "blocked"})
KEYS = ("gridlaw.cell", "gridlaw.job", "gridlaw.kind")  # the first there is says which run it is: trunks have no cell


@dataclass(frozen=True)
class Note:
    """tracking.json: what of one run was delivered where.

    offset: bytes of the record; described: digest of name, tags and params; files: whether the artifacts are there.
    """

    uri: str
    run_id: str | None = None
    offset: int = 0
    described: str = ""
    state: CellState | None = None
    files: bool = False

    @classmethod
    def read(cls, folder: Path, uri: str) -> "Note":
        """The note of a folder; an empty one where there is none, it is torn, or it is about another store."""
        try:
            stored = json.loads((folder / "tracking.json").read_text())
            state = stored.pop("state")
            note = cls(**stored, state=CellState(**state) if state else None)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls(uri)
        return note if note.uri == uri else cls(uri)

    def write(self, folder: Path) -> None:
        """Replaces the note in one move."""
        new = folder / "tracking.json.new"
        new.write_text(json.dumps(asdict(self)))
        os.replace(new, folder / "tracking.json")


def read_points(record: Path, offset: int) -> Iterator[tuple[int, list[Point]]]:
    """Batches of about 1000 points behind a byte offset, each with the offset after its last whole line.

    A torn last line is left for later. Values that are null or not finite are no points. A record that does not have a
    line ending at the offset was written anew and is read from its start.
    """
    points: list[Point] = []
    if not record.exists():
        return
    with record.open("rb") as lines:
        if offset:
            lines.seek(offset - 1)
            if lines.read(1) != b"\n":
                offset = lines.seek(0)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            points += _points(line)
            if len(points) >= BATCH:
                yield offset, points
                points = []
    yield offset, points


def _points(line: bytes) -> list[Point]:
    try:
        entry = json.loads(line)
        time_ms, tokens, metrics = round(entry["time"] * 1000), int(entry["tokens"]), entry.get("metrics") or {}
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # a line torn by a crash and then written after: its writer repeats what it held
    return [
        Point(re.sub(r"[^\w\-./: ]", "_", name, flags=re.ASCII), float(value), time_ms, tokens)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]


def _last_time_ms(record: Path) -> int | None:
    """When the last whole line was written."""
    if not record.exists():
        return None
    with record.open("rb") as lines:
        lines.seek(max(0, record.stat().st_size - 65536))
        for line in reversed(lines.read().splitlines()):
            try:
                return round(json.loads(line)["time"] * 1000)
            except (ValueError, TypeError, KeyError):
                continue
    return None


def _first_time_ms(record: Path) -> int | None:
    if not record.exists():
        return None
    with record.open("rb") as lines:
        try:
            return round(json.loads(lines.readline())["time"] * 1000)
        except (ValueError, TypeError, KeyError):
            return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class Replay:
    """Brings one study's runs in one store up to date, a pass at a time. Notes are read from disk once, then kept."""

    def __init__(self, root: Path, document: Mapping[str, Any], tracking_uri: str | None) -> None:
        self.uri = tracking_uri or "default"  # the default store moves with its root, so notes do not hold its path
        self._root = root
        self._tracking_uri = tracking_uri
        self._study = str(document["name"])
        self.parent, self.runs = planned_runs(root / self._study, document)
        self._notes = {run.folder: Note.read(run.folder, self.uri) for run in [self.parent, *self.runs]}
        self._store: MlflowStore | None = None
        if tracking_uri is None and not (root / "mlflow.db").exists():
            self._notes = {folder: Note(self.uri) for folder in self._notes}

    def states(self, told: Mapping[str, CellState], leaving: bool) -> list[tuple[Run, CellState]]:
        """Every run that has something to show, parent first, and the state it is to be in.

        leaving: the driver goes away, so nothing is running any more.
        """
        wanted = []
        for run in self.runs:
            state = told.get(str(run.job), CellState("pending"))
            if leaving and state.state == "running":
                state = replace(state, state="stopped")
            if state.state not in OPEN or _size(run.record) or self._notes[run.folder].run_id:
                wanted.append((run, state))
        return [(self.parent, study_state(told, self.runs) if leaving else CellState("running")), *wanted]

    def is_done(self, told: Mapping[str, CellState]) -> bool:
        """Whether the store has everything, by the notes alone."""
        return all(self._is_done(run, state) for run, state in self.states(told, leaving=True))

    def _is_done(self, run: Run, state: CellState) -> bool:
        note = self._notes[run.folder]
        files = note.files or not all(path.exists() for path in run.files)
        read = note.offset == _size(run.record) or all(
            offset == note.offset for offset, _ in read_points(run.record, note.offset)
        )
        return bool(note.run_id) and note.described == run.digest and note.state == state and files and read

    def waiting(self) -> int:
        """Points on disk that the store does not have."""
        return sum(
            len(points) for run in self.runs for _, points in read_points(run.record, self._notes[run.folder].offset)
        )

    def forget_store(self) -> None:
        """After a failure: the next pass opens the store again and looks which runs it has."""
        self._store = None

    def deliver(self, told: Mapping[str, CellState], leaving: bool, go_on: Callable[[], bool]) -> None:
        """One pass: runs and states of all, then points, then files. Ends early between calls once `go_on` is false.

        Raises what MLflow raises; a pass may be repeated after any of it.
        """
        if self._store is None:
            self._store = self._open()
        wanted = self.states(told, leaving)
        # When time is short, what the store shows as running comes first.
        for run, state in sorted(wanted, key=lambda each: leaving and not self._shows_running(each[0])):
            if go_on():
                self._deliver_state(self._store, run, state)
        for run, _ in wanted[1:]:
            note = self._notes[run.folder]
            if _size(run.record) != note.offset:
                for offset, points in read_points(run.record, note.offset):
                    if not go_on():
                        return
                    self._store.log(str(note.run_id), points)
                    self._note(run, offset=offset)
        for run, _ in wanted:
            note = self._notes[run.folder]
            if not note.files and all(path.exists() for path in run.files) and go_on():
                for path in run.files:
                    self._store.log_file(str(note.run_id), path)
                self._note(run, files=True)

    def open_parent(self) -> tuple[MlflowStore, str]:
        """The store and the id of the study's own run, made if it is not there."""
        store = self._store = self._open()
        if self._notes[self.parent.folder].run_id is None:
            self._deliver_state(store, self.parent, CellState("stopped"))
        return store, str(self._notes[self.parent.folder].run_id)

    def _open(self) -> MlflowStore:
        """Opens the store and makes the notes agree with the runs that are there. Ends what a killed driver left."""
        place = self._tracking_uri or make_default(self._root)
        store = MlflowStore(place, self._study, self._root / "mlartifacts")
        there: dict[str, StoredRun] = {}
        for stored in store.runs():
            key = next((stored.tags[tag] for tag in KEYS if tag in stored.tags), None)
            if stored.tags.get("gridlaw.study") == self._study and key:
                there.setdefault(key, stored)
        for run in [self.parent, *self.runs]:
            key, note = run.job or "study", self._notes[run.folder]
            found = there.pop(key) if key in there else None
            if found is None or note.run_id != found.run_id:
                note = Note(self.uri, run_id=found.run_id if found else None)
            elif note.state and note.state.status != found.status:
                note = replace(note, state=None)
            self._notes[run.folder] = note
        for left in there.values():
            if left.status == "RUNNING":
                store.set_status(left.run_id, "KILLED", round(time.time() * 1000))
        return store

    def _deliver_state(self, store: MlflowStore, run: Run, state: CellState) -> None:
        note = self._notes[run.folder]
        if note.run_id is None:
            start = _first_time_ms(run.record) or round(time.time() * 1000)
            tags = run.tags | self._parent_tag(run)
            note = self._note(run, run_id=store.create_run(run.name, tags, start))
        if note.described != run.digest:
            store.describe(str(note.run_id), run.name, run.tags | self._parent_tag(run), run.params)
            note = self._note(run, described=run.digest, files=False)
        if note.state != state:
            tags = {"state": state.state, "cause": state.cause or "", "attempts": str(state.attempts), **state.tags}
            store.tag(str(note.run_id), {f"gridlaw.{key}": value for key, value in tags.items()})
            end = _last_time_ms(run.record) if run.job else None
            store.set_status(str(note.run_id), state.status, end or round(time.time() * 1000))
            self._note(run, state=state)

    def _shows_running(self, run: Run) -> bool:
        state = self._notes[run.folder].state
        return run.job is None or (state is not None and state.status == "RUNNING")

    def _parent_tag(self, run: Run) -> dict[str, str]:
        return {"mlflow.parentRunId": str(self._notes[self.parent.folder].run_id)} if run.job else {}

    def _note(self, run: Run, **delivered: Any) -> Note:
        note = self._notes[run.folder] = replace(self._notes[run.folder], **delivered)
        run.folder.mkdir(parents=True, exist_ok=True)  # a cell can fail before its job made the folder
        note.write(run.folder)
        return note
