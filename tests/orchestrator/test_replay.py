"""Records and MLflow agree, each point once, whatever is killed or torn in between."""

import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.mlflow_store import MlflowStore
from orchestrator.replay import Note, Replay, read_points
from orchestrator.tracked_runs import CellState, budget_words, flatten, run_names
from orchestrator.tracking import log_report, up_to_date

sys.path.insert(0, str(Path(__file__).parent))
from tracked_study import (
    CELLS,
    FINISHED,
    STEP_TOKENS,
    in_store,
    on_disk,
    record_lines,
    record_of,
    replay,
    statuses,
    study_document,
    tags_and_params,
)

# --- names and reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(1_843_200, "1.8M"), (2_000_000, "2M"), (12_500_000, "12M"), (7_000_000_000, "7B"), (20_480, "20k"), (900, "900")],
)
def test_budgets_read_well(tokens: int, words: str) -> None:
    assert budget_words(tokens) == words


def test_run_names_are_readable_and_all_different() -> None:
    document = study_document()
    assert list(run_names(document).values()) == ["swa-8 laptop 1.8M seed 0", "swa-8 laptop 1.8M seed 1"]
    _, second = document["cells"]
    second |= {"seed": 0, "budget_tokens": 1_845_248}  # the same to two digits
    assert list(run_names(document).values()) == ["swa-8 laptop 1843200 seed 0", "swa-8 laptop 1845248 seed 0"]
    second |= {"budget_tokens": 1_843_200, "data": "g-min-48"}
    assert list(run_names(document).values()) == [
        "swa-8 laptop recall 1.8M seed 0",
        "swa-8 laptop g-min-48 1.8M seed 0",
    ]


def test_flatten_dots_keys_and_keeps_lists_as_text() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None}) == {"a.b": 1, "a.c.d": "[1, 2]", "e": None}


def test_a_torn_last_line_is_left_for_later(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    whole = record_lines(1, 4)
    record.write_text(whole + '{"step": 4, "tok')
    ((offset, points),) = read_points(record, 0)
    assert offset == len(whole)
    assert [(point.name, point.tokens) for point in points][:2] == [
        ("train/loss", STEP_TOKENS),
        ("train/tokens_per_second", STEP_TOKENS),
    ]
    record.write_text(whole + record_lines(4, 5))
    ((_, more),) = read_points(record, offset)
    assert {point.tokens for point in more} == {4 * STEP_TOKENS}


def test_a_record_written_anew_is_read_from_its_start(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text(record_lines(1, 3))
    ((_, points),) = read_points(record, 10_000)
    assert {point.tokens for point in points} == {STEP_TOKENS, 2 * STEP_TOKENS}


# --- exactly once -------------------------------------------------------------------------------------------------


def test_store_and_records_hold_the_same_points_however_often_replayed(root: Path) -> None:
    replay(root)
    assert in_store(root / "mlflow.db") == on_disk(root)
    assert {step for *_, step in in_store(root / "mlflow.db")} == {step * STEP_TOKENS for step in range(1, 200)}
    replay(root)
    for note in root.glob("tiny/**/tracking.json"):
        note.unlink()
    replay(root)
    with record_of(root, CELLS[0]).open("a") as record:
        record.write(record_lines(200, 230))
    replay(root)
    assert in_store(root / "mlflow.db") == on_disk(root)
    assert set(statuses(root / "mlflow.db")) == {"tiny", "swa-8 laptop 1.8M seed 0", "swa-8 laptop 1.8M seed 1"}


@pytest.mark.parametrize("stored", [False, True], ids=["before the store has it", "before it is noted"])
def test_killed_between_batches_nothing_is_lost_or_doubled(
    root: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    with record_of(root, CELLS[1]).open("a") as record:
        record.write(record_lines(200, 1500))
    log, calls = MlflowStore.log, 0

    def killed(store: MlflowStore, run_id: str, points: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            if stored:
                log(store, run_id, points)
            raise KeyboardInterrupt
        log(store, run_id, points)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MlflowStore, "log", killed)
        replay(root)
    assert in_store(root / "mlflow.db") != on_disk(root)
    replay(root)
    assert in_store(root / "mlflow.db") == on_disk(root)


def test_killed_before_a_new_run_is_noted_no_second_run_is_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(note: Note, folder: Path) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Note, "write", killed)
            replay(root)
    replay(root)
    assert set(statuses(root / "mlflow.db").values()) == {"FINISHED"}
    assert in_store(root / "mlflow.db") == on_disk(root)


def test_another_store_gets_everything_and_the_first_stays(root: Path, empty_store: Path, tmp_path: Path) -> None:
    replay(root)
    other = Path(shutil.copy(empty_store, tmp_path / "other.db"))
    assert not up_to_date(root, study_document(), FINISHED, f"sqlite:///{other}")
    replay(root, uri=f"sqlite:///{other}")
    assert in_store(other) == on_disk(root) == in_store(root / "mlflow.db")
    assert up_to_date(root, study_document(), FINISHED, f"sqlite:///{other}")


def test_a_deleted_store_is_filled_again(root: Path, empty_store: Path) -> None:
    replay(root)
    root = root.rename(root.with_name("umbenannt"))  # the store goes with its root; MLflow keeps deleted files open
    assert up_to_date(root, study_document(), FINISHED)
    (root / "mlflow.db").unlink()
    assert not up_to_date(root, study_document(), FINISHED)
    shutil.copy(empty_store, root / "mlflow.db")
    replay(root)
    assert in_store(root / "mlflow.db") == on_disk(root)


# --- what runs carry and how they end -----------------------------------------------------------------------------


def test_a_run_carries_its_cell(root: Path) -> None:
    replay(root)
    tags, params = tags_and_params(root / "mlflow.db", "swa-8 laptop 1.8M seed 1")
    assert params["recipe.learning_rate"] == "0.02"
    assert params["model.layers"] == '[{"mixer": "swa", "window": 8}]'
    plain = ("arm", "size", "data", "budget_tokens", "seed", "params", "non_embedding_params", "pattern", "positions")
    assert [params[key] for key in plain] == [
        *("swa-8", "laptop", "recall", "1843200", "1", "143000", "131000", "swa-8 full", "nope-full")
    ]
    assert (tags["gridlaw.study"], tags["gridlaw.cell"], tags["gridlaw.state"]) == ("tiny", CELLS[1], "finished")
    with closing(sqlite3.connect(root / "mlflow.db")) as store:
        (parent,) = store.execute("SELECT run_uuid FROM tags WHERE key='gridlaw.kind' AND value='study'").fetchone()
        (start, end) = store.execute("SELECT start_time, end_time FROM runs WHERE name LIKE '%seed 1'").fetchone()
    assert tags["mlflow.parentRunId"] == parent
    assert (start, end) == (1_764_559_860_000, 1_764_559_865_123 + 199_000)
    assert len(list((root / "mlartifacts").rglob("config.json"))) == len(CELLS)
    assert len(list((root / "mlartifacts").rglob("study.json"))) == 1


@pytest.mark.parametrize(
    ("state", "status", "whole"),
    [
        ("diverged", "FAILED", "FAILED"),
        ("failed", "FAILED", "FAILED"),
        ("pending", "KILLED", "KILLED"),
        ("blocked", "KILLED", "KILLED"),
        ("running", "KILLED", "KILLED"),  # the driver is leaving: nothing runs any more
    ],
)
def test_how_runs_end(root: Path, state: str, status: str, whole: str) -> None:
    replay(root, FINISHED | {CELLS[1]: CellState(state, "loss is not finite at step 3", 2)})
    assert statuses(root / "mlflow.db") == {
        "tiny": whole,
        "swa-8 laptop 1.8M seed 0": "FINISHED",
        "swa-8 laptop 1.8M seed 1": status,
    }
    tags, _ = tags_and_params(root / "mlflow.db", "swa-8 laptop 1.8M seed 1")
    assert tags["gridlaw.state"] == ("stopped" if state == "running" else state)
    assert (tags["gridlaw.cause"], tags["gridlaw.attempts"]) == ("loss is not finite at step 3", "2")


def test_a_killed_driver_leaves_running_and_the_next_one_mends_it(root: Path) -> None:
    states = {cell: CellState("running", None, 1) for cell in CELLS}
    Replay(root, study_document(), None).deliver(states, leaving=False, go_on=lambda: True)  # and never again: killed
    assert set(statuses(root / "mlflow.db").values()) == {"RUNNING"}
    smaller = study_document(CELLS[:1])  # the other cell has been taken out of the study meanwhile
    states = {CELLS[0]: CellState("finished", None, 2)}
    Replay(root, smaller, None).deliver(states, leaving=True, go_on=lambda: True)
    assert statuses(root / "mlflow.db") == {
        "tiny": "FINISHED",
        "swa-8 laptop 1.8M seed 0": "FINISHED",
        "swa-8 laptop 1.8M seed 1": "KILLED",
    }


def test_a_cell_that_has_not_begun_has_no_run(root: Path) -> None:
    record_of(root, CELLS[1]).unlink()
    replay(root, FINISHED | {CELLS[1]: CellState("pending")})
    assert statuses(root / "mlflow.db") == {"tiny": "KILLED", "swa-8 laptop 1.8M seed 0": "FINISHED"}


def test_the_report_is_stored_with_the_study(root: Path, tmp_path: Path) -> None:
    replay(root)
    report = tmp_path / "report"
    report.mkdir()
    (report / "emergence.png").write_bytes(b"\x89PNG")
    assert log_report(root, "tiny", report) is None
    assert len(list((root / "mlartifacts").rglob("artifacts/report/emergence.png"))) == 1
    assert statuses(root / "mlflow.db")["tiny"] == "FINISHED"
    assert up_to_date(root, study_document(), FINISHED)
    assert "cannot be reached" in str(log_report(root, "tiny", report, "http://unreachable.invalid:1"))
