"""Where a study stands, from a ledger and records written here."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from experiments import show, status
from orchestrator.ledger import AttemptEnd, Ledger
from orchestrator.tuning import results


@dataclass(frozen=True)
class Job:
    id: str
    kind: str = "train"
    after: tuple[str, ...] = ()
    workers: int = 1
    tokens: int = 1000
    flops: float = 1.0

    @property
    def cell_id(self) -> str:
        return self.id


def cells(*ids: str) -> list[dict[str, object]]:
    return [{"id": i, "arm": "full", "size": "s", "data": "d", "budget_tokens": 1000, "seed": 0} for i in ids]


def write_record(folder: Path, job_id: str, *paces: float) -> None:
    record = folder / "jobs" / job_id / "record.jsonl"
    record.parent.mkdir(parents=True)
    rows = [{"step": i, "metrics": {"train/tokens_per_second": pace}} for i, pace in enumerate(paces)]
    record.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "met')


def test_before_the_first_run_everything_is_pending(tmp_path: Path) -> None:
    document = status.read("tiny", tmp_path, cells("a", "b"))
    assert document["counts"] == {"pending": 2}
    assert document["seconds_left"] is None
    assert document["makespan_s"] == 0.0
    assert list(tmp_path.iterdir()) == []


def test_the_time_left_follows_the_pace_and_the_slots(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.add([Job("a"), Job("b"), Job("c"), Job("e")])
        session = ledger.start_session(2, None)
        for job_id in ("a", "b", "e"):
            ledger.start_attempt(job_id, session, 1, warm=False, available=0.0)
        ledger.end_attempt("a", AttemptEnd("finished", "finished", None, 1000, 10.0, 9.0, 1.0))
        ledger.end_attempt("e", AttemptEnd("diverged", "diverged", "not finite", 300))
        ledger.progress(session, {"b": 500})
    write_record(tmp_path, "b", 50.0, 70.0)
    document = status.read("tiny", tmp_path, cells("a", "b", "c", "d", "e"))
    assert document["counts"] == {"pending": 2, "running": 1, "finished": 1, "diverged": 1}
    running = document["cells"][1]
    # 1000 tokens took 10 s: 5 s for the rest of b, 10 s each for c and d, on two slots; e is over.
    assert (running["tokens_per_second"], running["seconds_left"]) == (70.0, 5.0)
    assert document["seconds_left"] == pytest.approx(12.5)
    assert (document["tokens_per_second"], document["busy_core_s"]) == (70.0, 10.0)
    assert document["cells"][4]["cause"] == "not finite"


def test_the_longest_cell_bounds_the_time_left(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.add([Job("b")])
        ledger.start_attempt("b", ledger.start_session(8, None), 1, warm=False, available=0.0)
    write_record(tmp_path, "b", 100.0)
    assert status.read("tiny", tmp_path, cells("b"))["seconds_left"] == pytest.approx(10.0)


def test_tuning_shows_how_far_it_is_and_what_to_be_warned_of(tmp_path: Path) -> None:
    rows = [
        {**row, "size": size, "tuning": {"name": f"full@{size}", "id": "x"}}
        for row, size in zip(cells("a", "b"), ("s", "t"), strict=True)
    ]
    trials = [Job(f"a-{i}", "tune") for i in range(4)]
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.add([Job("a"), Job("b"), *trials])
        ledger.query("UPDATE jobs SET cell_id = 'a' WHERE kind = 'tune'")
        ledger.settle(["a-0"], "finished", "pruned after 5 steps")
    found = {"name": "full@t", "id": "x", "rate": 0.1, "interval": [0.09, 0.2], "method": "best trial"}
    results.write(tmp_path, {**found, "at_edge": "high", "warnings": ["full t: at the edge"]})
    document = status.read("tiny", tmp_path, rows)
    assert [(row["size"], row["rate"], row["ended"], len(row["jobs"])) for row in document["tuning"]] == [
        ("s", None, 1, 4),
        ("t", 0.1, 0, 0),
    ]
    assert document["warnings"] == ["full t: at the edge"]
    assert len(document["cells"]) == 2, "trials are no cells"
    console = Console(width=80)
    with console.capture() as capture:
        console.print(show.status(document))
    assert "tuning: 1 of 2 learning rates known, 1 of 4 trial jobs over" in capture.get()
    assert "full t: at the edge" in capture.get()
    line = show.event("diverged", "a-1", "non-finite loss at step 3", document)
    assert line == "full s tuning trial diverged (1 of 4 jobs over): non-finite loss at step 3"


def test_the_finding_of_other_trials_is_none(tmp_path: Path) -> None:
    results.write(tmp_path, {"name": "full@s", "id": "old", "rate": 0.1})
    assert results.read(tmp_path, "full@s", "new") is None
    assert results.read(tmp_path, "full@s", "old") == {"name": "full@s", "id": "old", "rate": 0.1}
    (tmp_path / "tuning/full@s.json").write_text('{"name": "full@s", "id": "ol')
    assert results.read(tmp_path, "full@s", "old") is None
