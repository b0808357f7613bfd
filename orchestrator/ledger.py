"""The truth about every job of a study: one SQLite file, written by the driver alone, read by anybody.

States: pending (would run), blocked (a job it needs has failed), running, finished, diverged, failed. A stopped or lost
attempt leaves its job pending, to go on from its last committed checkpoint.
"""

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from orchestrator.errors import InputError

State = Literal["pending", "blocked", "running", "finished", "diverged", "failed"]
STATES: tuple[State, ...] = ("pending", "blocked", "running", "finished", "diverged", "failed")

NO_RATE = "it has no learning rate: "

VERSION = 1
SCHEMA = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, cell_id TEXT NOT NULL, workers INTEGER NOT NULL,
    tokens INTEGER NOT NULL, flops REAL NOT NULL, state TEXT NOT NULL DEFAULT 'pending',
    attempts INTEGER NOT NULL DEFAULT 0, cause TEXT, tokens_done INTEGER NOT NULL DEFAULT 0,
    busy_s REAL NOT NULL DEFAULT 0);
CREATE TABLE job_after (job_id TEXT NOT NULL, after_id TEXT NOT NULL, PRIMARY KEY (job_id, after_id));
CREATE TABLE attempts (
    job_id TEXT NOT NULL, number INTEGER NOT NULL, session INTEGER NOT NULL, available REAL NOT NULL,
    started REAL NOT NULL, ended REAL, state TEXT NOT NULL, cause TEXT, gang INTEGER NOT NULL, warm INTEGER NOT NULL,
    busy_s REAL NOT NULL DEFAULT 0, train_s REAL NOT NULL DEFAULT 0, measure_s REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, number));
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, started REAL NOT NULL, seen REAL NOT NULL, ended REAL, slots INTEGER NOT NULL,
    address TEXT);
CREATE TABLE cells (id TEXT PRIMARY KEY, document TEXT NOT NULL);
"""


class PlannedJob(Protocol):
    """What the ledger keeps of a job of the plan. tokens: planned; flops: of the whole job, over all its workers."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def cell_id(self) -> str: ...
    @property
    def after(self) -> Collection[str]: ...
    @property
    def workers(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def flops(self) -> float: ...


@dataclass(frozen=True)
class JobRow:
    """Where one job stands. busy_s: seconds of training and measuring over all its attempts, for `tokens_done`.

    Of a lost attempt, which cannot say, all its seconds count: its tokens do too.
    """

    id: str
    kind: str
    cell_id: str
    workers: int
    tokens: int
    flops: float
    state: State
    attempts: int
    cause: str | None
    tokens_done: int
    busy_s: float


@dataclass(frozen=True)
class AttemptEnd:
    """attempt: how it ended in its own word ("finished", "stopped", "lost", …). job: the state its job gets."""

    attempt: str
    job: State
    cause: str | None = None
    tokens: int | None = None
    busy_s: float = 0.0
    train_s: float = 0.0
    measure_s: float = 0.0


class Ledger:
    """The ledger file. `open` is for the one driver of a study, `read` for everybody else."""

    def __init__(self, connection: sqlite3.Connection, path: Path, clock: Callable[[], float]) -> None:
        self._db = connection
        self.path = path
        self._clock = clock
        self._together = False

    @classmethod
    def open(cls, path: Path, *, clock: Callable[[], float] = time.time) -> Self:
        """Open for writing, creating the file. Whoever calls holds the study's lock (`lock.held`)."""
        db = _connect(path, "rwc")
        ledger = cls(db, path, clock)
        if path.stat().st_size == 0:
            with ledger._transaction():
                for statement in filter(str.strip, SCHEMA.split(";")):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {VERSION}")
        _check_version(db, path)
        return ledger

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether there is a ledger: a driver killed in its first moments leaves an empty file, which is none."""
        return path.exists() and path.stat().st_size > 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open read-only, at any time, beside a running driver. Raises InputError when there is no ledger."""
        if not cls.is_at(path):
            raise InputError(f"ledger: {path} does not exist; the study has not been run yet (gridlaw run)")
        db = _connect(path, "ro")
        _check_version(db, path)
        return cls(db, path, time.time)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is noted meanwhile is committed at once, at the end: a commit takes the disk 10 ms."""
        self._together = True
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        else:
            if self._db.in_transaction:
                self._db.execute("COMMIT")
        finally:
            self._together = False

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        if self._together:
            yield
            return
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # ---- the driver's side -------------------------------------------------------------------------------------

    def add(self, jobs: Iterable[PlannedJob], cells: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Enter the jobs of a plan; known ones keep their state. cells: cell id → the document its id is a hash of."""
        with self._transaction():
            for job in jobs:
                self._db.execute(
                    "INSERT INTO jobs (id, kind, cell_id, workers, tokens, flops) VALUES (?, ?, ?, ?, ?, ?)"
                    " ON CONFLICT (id) DO UPDATE SET cell_id = excluded.cell_id, workers = excluded.workers,"
                    " tokens = excluded.tokens, flops = excluded.flops",
                    (job.id, job.kind, job.cell_id, job.workers, job.tokens, job.flops),
                )
                self._db.execute("DELETE FROM job_after WHERE job_id = ?", (job.id,))
                self._db.executemany(
                    "INSERT INTO job_after VALUES (?, ?)", [(job.id, before) for before in dict.fromkeys(job.after)]
                )
            for cell_id, document in (cells or {}).items():
                self._db.execute(
                    "INSERT OR REPLACE INTO cells VALUES (?, ?)", (cell_id, json.dumps(document, sort_keys=True))
                )

    def recover(self) -> int:
        """Take up what a killed driver left: its running attempts are closed, their jobs pending. Returns how many.

        A lost attempt ends when its driver was last seen, so that the time nobody ran counts nowhere.
        """
        with self._transaction():
            lost = self._db.execute(
                "UPDATE attempts SET state = 'lost', cause = 'the driver was lost', ended = max(started,"
                " (SELECT seen FROM sessions WHERE sessions.id = attempts.session)) WHERE state = 'running'"
            ).rowcount
            self._db.execute(
                "UPDATE jobs SET state = 'pending', busy_s = busy_s + (SELECT ended - started FROM attempts"
                " WHERE attempts.job_id = jobs.id AND attempts.number = jobs.attempts) WHERE state = 'running'"
            )
            self._db.execute("UPDATE sessions SET ended = seen WHERE ended IS NULL")
        return lost

    def retry(self, job_ids: Collection[str]) -> None:
        """Give failed and blocked jobs another go, as a new submission does. Diverged ones stay: they would again."""
        with self._transaction():
            self._db.executemany(
                "UPDATE jobs SET state = 'pending', cause = NULL WHERE id = ? AND state IN ('failed', 'blocked')",
                [(job_id,) for job_id in job_ids],
            )

    def settle(self, job_ids: Collection[str], state: State, cause: str | None) -> None:
        """Set what jobs that do not run are taken for: the rest of a pruned trial, or a search without a result."""
        with self._transaction():
            self._db.executemany(
                "UPDATE jobs SET state = ?, cause = ? WHERE id = ? AND state != ?",
                [(state, cause, job_id, state) for job_id in job_ids],
            )

    def reopen(self, job_ids: Collection[str]) -> None:
        """Make finished jobs pending again, because what they left is gone."""
        with self._transaction():
            self._db.executemany(
                "UPDATE jobs SET state = 'pending', tokens_done = 0, busy_s = 0 WHERE id = ? AND state = 'finished'",
                [(job_id,) for job_id in job_ids],
            )

    def start_session(self, slots: int, address: str | None, started: float | None = None) -> int:
        """Note that a driver runs, from `started` (unix seconds) on. Returns the session's id."""
        now = self._clock()
        cursor = self._db.execute(
            "INSERT INTO sessions (started, seen, slots, address) VALUES (?, ?, ?, ?)",
            (now if started is None else started, now, slots, address),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def end_session(self, session: int) -> None:
        now = self._clock()
        self._db.execute("UPDATE sessions SET seen = ?, ended = ? WHERE id = ?", (now, now, session))

    def start_attempt(self, job_id: str, session: int, gang: int, *, warm: bool, available: float) -> int:
        """Note a start. available: unix seconds from which both job and gang could have. Returns the number."""
        with self._transaction():
            (number,) = self._db.execute("SELECT attempts + 1 FROM jobs WHERE id = ?", (job_id,)).fetchone()
            self._db.execute(
                "UPDATE jobs SET state = 'running', cause = NULL, attempts = ? WHERE id = ?", (number, job_id)
            )
            self._db.execute(
                "INSERT INTO attempts (job_id, number, session, available, started, state, gang, warm)"
                " VALUES (?, ?, ?, ?, ?, 'running', ?, ?)",
                (job_id, number, session, available, self._clock(), gang, warm),
            )
        return int(number)

    def end_attempt(self, job_id: str, end: AttemptEnd) -> None:
        """Close the running attempt of a job and set what the job becomes."""
        with self._transaction():
            busy_s = end.busy_s
            if end.attempt == "lost":
                query = "SELECT started FROM attempts WHERE job_id = ? AND state = 'running'"
                busy_s = self._clock() - self._db.execute(query, (job_id,)).fetchone()[0]
            self._db.execute(
                "UPDATE attempts SET ended = ?, state = ?, cause = ?, busy_s = ?, train_s = ?, measure_s = ?"
                " WHERE job_id = ? AND state = 'running'",
                (self._clock(), end.attempt, end.cause, end.busy_s, end.train_s, end.measure_s, job_id),
            )
            self._db.execute(
                "UPDATE jobs SET state = ?, cause = ?, busy_s = busy_s + ?, tokens_done = coalesce(?, tokens_done)"
                " WHERE id = ?",
                (end.job, end.cause, busy_s, end.tokens, job_id),
            )

    def progress(self, session: int, tokens_done: Mapping[str, int]) -> None:
        """Note tokens of running jobs, and that the driver lives."""
        with self._transaction():
            self._db.execute("UPDATE sessions SET seen = ? WHERE id = ?", (self._clock(), session))
            self._db.executemany(
                "UPDATE jobs SET tokens_done = max(tokens_done, ?) WHERE id = ?",
                [(tokens, job_id) for job_id, tokens in tokens_done.items()],
            )

    def block(self) -> list[str]:
        """Mark pending jobs that need a failed or blocked one as blocked, and those of a diverged one as diverged.

        What a trunk diverges in, each of its branches would have diverged in. Returns the ids.
        """
        blocked: list[str] = []
        with self._transaction():
            while True:  # a blocked job blocks those after it in turn
                rows = self._db.execute(
                    "SELECT job_after.job_id, before.id, before.state, before.cause, before.kind FROM job_after"
                    " JOIN jobs ON jobs.id = job_after.job_id JOIN jobs AS before ON before.id = job_after.after_id"
                    " WHERE jobs.state = 'pending' AND before.state IN ('failed', 'diverged', 'blocked')"
                    " GROUP BY job_after.job_id"
                ).fetchall()
                if not rows:
                    return blocked
                for job_id, before_id, state, why, kind in rows:
                    after: State = "diverged" if state == "diverged" else "blocked"
                    cause = f"it needs job {before_id}, which is {state}"
                    if kind == "tune":
                        reason = why or f"job {before_id} is {state}"
                        after, cause = "blocked", NO_RATE + reason.removeprefix(NO_RATE)
                    elif after == "diverged":
                        cause = why if why.startswith("its trunk") else f"its trunk {before_id}: {why}"
                    self._db.execute("UPDATE jobs SET state = ?, cause = ? WHERE id = ?", (after, cause, job_id))
                    blocked.append(job_id)

    # ---- anybody's side ----------------------------------------------------------------------------------------

    def snapshot(self, job_ids: Collection[str] | None = None) -> dict[str, JobRow]:
        """Every job (or those named and known) by id."""
        if job_ids is None:
            return {row.id: row for row in self._rows("SELECT * FROM jobs")}
        named = "SELECT * FROM jobs WHERE id IN (SELECT value FROM json_each(?))"
        return {row.id: row for row in self._rows(named, (json.dumps(list(job_ids)),))}

    def counts(self, job_ids: Collection[str] | None = None) -> dict[State, int]:
        """Jobs in each state, zeros included."""
        found = Counter(row.state for row in self.snapshot(job_ids).values())
        return {state: found[state] for state in STATES}

    def cells(self) -> dict[str, dict[str, Any]]:
        """Cell id → the document its id is a hash of, for every cell this study ever planned to run."""
        return {cell_id: json.loads(document) for cell_id, document in self._db.execute("SELECT * FROM cells")}

    def query(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        """Rows of a SELECT, by column name."""
        return self._db.execute(sql, parameters).fetchall()

    def _rows(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[JobRow]:
        return [JobRow(*row) for row in self._db.execute(sql + " ORDER BY id", parameters)]


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=5.0, isolation_level=None)
    except sqlite3.OperationalError as error:
        raise InputError(f"ledger: {path} cannot be opened ({error}); is the folder writable?") from error
    db.row_factory = sqlite3.Row
    return db


def _check_version(db: sqlite3.Connection, path: Path) -> None:
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (damage,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if damage != "ok":
            raise sqlite3.DatabaseError(damage.replace("\n", " "))
    except sqlite3.OperationalError:
        raise  # locked, or the disk is full
    except sqlite3.DatabaseError as error:
        raise InputError(
            f"ledger: {path} is damaged ({error}); move it away: the next run makes it anew and finds what is trained"
        ) from error
    if version != VERSION:
        raise InputError(f"ledger: {path} has format {version}, not {VERSION}; use the gridlaw that wrote it")
