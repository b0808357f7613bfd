"""The ledger: states, attempts and causes survive a lost driver; readers never disturb the writer."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.ledger import AttemptEnd, Ledger
from orchestrator.timing import timing


@dataclass(frozen=True)
class Job:
    id: str
    after: tuple[str, ...] = ()
    workers: int = 1
    flops: float = 1.0
    tokens: int = 100
    kind: str = "train"

    @property
    def cell_id(self) -> str:
        return self.id


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Ledger:
    return Ledger.open(tmp_path / "ledger.db", clock=clock)


def finish(ledger: Ledger, job_id: str, session: int = 1, busy_s: float = 1.0) -> None:
    ledger.start_attempt(job_id, session, 1, warm=False, available=0.0)
    ledger.end_attempt(job_id, AttemptEnd("finished", "finished", tokens=100, busy_s=busy_s))


def test_jobs_wait_for_what_they_need(ledger: Ledger) -> None:
    ledger.add([Job("trunk"), Job("branch", after=("trunk",)), Job("orphan", after=("not-in-this-plan",))])
    assert [row.id for row in ledger.ready()] == ["trunk"]
    ledger.start_session(2, None)
    finish(ledger, "trunk")
    assert [row.id for row in ledger.ready()] == ["branch"]


def test_a_known_job_keeps_its_state_when_planned_again(ledger: Ledger) -> None:
    ledger.add([Job("a")])
    ledger.start_session(2, None)
    finish(ledger, "a")
    ledger.add([Job("a", workers=2, flops=7.0), Job("b")], cells={"a": {"seed": 0}})
    rows = ledger.snapshot()
    assert (rows["a"].state, rows["a"].workers, rows["a"].flops) == ("finished", 2, 7.0)
    assert ledger.counts() == {"pending": 1, "blocked": 0, "running": 0, "finished": 1, "diverged": 0, "failed": 0}
    assert ledger.counts(["b"])["finished"] == 0
    assert ledger.cells() == {"a": {"seed": 0}}


def test_failure_blocks_all_that_follows_and_a_new_submission_tries_again(ledger: Ledger) -> None:
    ledger.add([Job("a"), Job("b", after=("a",)), Job("c", after=("b",)), Job("d")])
    session = ledger.start_session(2, None)
    ledger.start_attempt("a", session, 1, warm=False, available=0.0)
    ledger.end_attempt("a", AttemptEnd("failed", "failed", "RuntimeError: no"))
    assert sorted(ledger.block()) == ["b", "c"]
    assert ledger.snapshot()["b"].cause == "it needs job a, which is failed"
    assert [row.id for row in ledger.ready()] == ["d"]
    ledger.retry(["a", "b", "c"])
    assert [row.id for row in ledger.ready()] == ["a", "d"]
    assert ledger.block() == []


def test_a_diverged_job_is_not_tried_again(ledger: Ledger) -> None:
    ledger.add([Job("a"), Job("b", after=("a",))])
    session = ledger.start_session(2, None)
    ledger.start_attempt("a", session, 1, warm=False, available=0.0)
    ledger.end_attempt("a", AttemptEnd("diverged", "diverged", "loss is nan at step 3", tokens=30))
    ledger.retry(["a", "b"])
    assert ledger.snapshot()["a"].state == "diverged"
    assert ledger.block() == ["b"]


def test_a_finished_job_whose_files_are_gone_can_be_opened_again(ledger: Ledger) -> None:
    ledger.add([Job("a"), Job("b")])
    session = ledger.start_session(2, None)
    for job in ("a", "b"):
        ledger.start_attempt(job, session, 1, warm=False, available=0.0)
        ledger.end_attempt(job, AttemptEnd("finished", "finished", tokens=30))
    ledger.reopen(["a"])
    assert [(row.id, row.tokens_done) for row in ledger.ready()] == [("a", 0)]
    assert ledger.snapshot()["b"].state == "finished"


def test_damage_inside_a_ledger_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        ledger.add([Job(f"job {i}") for i in range(500)])
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2 :] = b"\xff" * (len(whole) - len(whole) // 2)
    path.write_bytes(whole)
    for use in (Ledger.open, Ledger.read):
        with pytest.raises(InputError, match=r"ledger.db is damaged .*; move it away"):
            use(path)


def test_what_a_killed_driver_left_is_pending_again(tmp_path: Path, clock: Clock) -> None:
    killed = Ledger.open(tmp_path / "ledger.db", clock=clock)
    killed.add([Job("a"), Job("b")])
    session = killed.start_session(2, None)
    killed.start_attempt("a", session, 1, warm=False, available=1000.0)
    clock.now = 1005.0
    killed.progress(session, {"a": 40})
    clock.now = 2000.0

    ledger = Ledger.open(tmp_path / "ledger.db", clock=clock)
    assert ledger.recover() == 1
    row = ledger.snapshot()["a"]
    assert (row.state, row.attempts, row.tokens_done) == ("pending", 1, 40)
    (attempt,) = ledger.query("SELECT * FROM attempts")
    assert (attempt["state"], attempt["cause"], attempt["ended"]) == ("lost", "the driver was lost", 1005.0)
    assert ledger.recover() == 0
    assert ledger.start_attempt("a", ledger.start_session(2, None), 1, warm=False, available=2000.0) == 2


def test_progress_never_goes_back(ledger: Ledger) -> None:
    ledger.add([Job("a")])
    session = ledger.start_session(2, None)
    ledger.progress(session, {"a": 40})
    ledger.progress(session, {"a": 0})
    assert ledger.snapshot()["a"].tokens_done == 40


def test_a_reader_reads_beside_the_writer_and_cannot_write(ledger: Ledger) -> None:
    ledger.add([Job("a")])
    with Ledger.read(ledger.path) as reader:
        assert reader.counts()["pending"] == 1
        ledger.add([Job("b")])
        assert reader.counts()["pending"] == 2
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.add([Job("c")])


def test_a_path_with_spaces_question_marks_and_umlauts(tmp_path: Path) -> None:
    path = tmp_path / "Größen & 100% of it?" / "ledger.db"
    path.parent.mkdir()
    Ledger.open(path).add([Job("a")])
    assert list(Ledger.read(path).snapshot()) == ["a"]


def test_no_ledger_another_format_and_no_database_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has not been run yet"):
        Ledger.read(tmp_path / "ledger.db")
    (tmp_path / "text.db").write_text("no database, but long enough to have a header " * 40)
    with pytest.raises(InputError, match="is damaged"):
        Ledger.open(tmp_path / "text.db")
    Ledger.open(tmp_path / "later.db").query("PRAGMA user_version = 99")
    with pytest.raises(InputError, match="format 99"):
        Ledger.open(tmp_path / "later.db")


def test_timing(ledger: Ledger, clock: Clock) -> None:
    """Two slots; start-up 4 s, then jobs of 6 and 3 s on one gang (the second warm, 0.5 s more) and 8 s on two."""
    assert set(timing(ledger).values()) == {None}
    ledger.add([Job("a"), Job("b"), Job("c", workers=2)])
    session = ledger.start_session(2, None, started=996.0)
    for job_id, warm, available, busy_s, ended in (
        ("a", False, 1000.0, 6.0, 1006.0),
        ("b", True, 1006.0, 3.0, 1009.5),
        ("c", False, 1009.5, 8.0, 1018.0),
    ):
        ledger.start_attempt(job_id, session, 1, warm=warm, available=available)
        clock.now = ended
        ledger.end_attempt(job_id, AttemptEnd("finished", "finished", tokens=100, busy_s=busy_s))
    clock.now = 5000.0
    ledger.end_session(session)
    assert timing(ledger) == pytest.approx(
        {"makespan_s": 22.0, "busy_core_s": 25.0, "lower_bound_s": 12.5, "overhead_s_per_job": 0.5}
    )
    assert timing(ledger, ["c"])["lower_bound_s"] == 8.0
