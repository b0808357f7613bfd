"""Records and MLflow agree, each point once, whatever is killed, torn or unreachable in between."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.mlflow_store import MlflowStore, make_default
from orchestrator.replay import Note, Replay, read_points
from orchestrator.tracked_runs import CellState, budget_words, flatten, run_names
from orchestrator.tracking import Tracker, log_report, up_to_date

CELLS = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
FINISHED = {cell: CellState("finished", None, 1) for cell in CELLS}
STEP_TOKENS = 2048


def study_document(cells: tuple[str, ...] = CELLS) -> dict[str, Any]:
    recipe = {"optimizer": "muon", "learning_rate": 0.02, "betas": [0.9, 0.95]}
    return {
        "name": "tiny",
        "arms": [{"name": "swa-8", "pattern": "swa-8 full", "positions": "nope-full"}],
        "sizes": [{"name": "laptop"}],
        "recipe": recipe,
        "cells": [
            {
                "id": cell,
                "arm": "swa-8",
                "size": "laptop",
                "data": "recall",
                "budget_tokens": 1_843_200,
                "seed": seed,
                "params": 143_000,
                "non_embedding_params": 131_000,
                "job_id": f"job-{cell}",
                "windows": [8],
                "full_layers": [1, 3],
                "identity": {"recipe": recipe, "model": {"d_model": 64, "layers": [{"mixer": "swa", "window": 8}]}},
            }
            for seed, cell in enumerate(cells)
        ],
    }


def record_lines(first: int, last: int) -> str:
    """Steps first..last-1 as a job writes them; every seventh loss is not finite."""
    lines = []
    for step in range(first, last):
        metrics = {
            "train/loss": None if step % 7 == 0 else 3.0 + 1 / (step + 1),
            "train/tokens_per_second": 24e3 + step,
        }
        place = {"step": step, "tokens": step * STEP_TOKENS, "time": 1_764_559_865.123 + step}
        lines.append({**place, "source": "train", "metrics": metrics})
        if step % 60 == 0:
            recall = {"recall/accuracy/beyond-128": step / 1000, "retrieval/L1H2": float("nan")}
            lines.append({**place, "source": "recall", "measurement": "m1", "metrics": recall, "rows": [{"layer": 1}]})
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables and nothing in them: making them takes longer than all else here."""
    root = tmp_path_factory.mktemp("50% größer")
    make_default(root)
    assert sorted(path.name for path in root.iterdir()) == [".mlflow.lock", "mlflow.db"]
    return root / "mlflow.db"


@pytest.fixture
def root(tmp_path: Path, empty_store: Path) -> Path:
    """A study root, in a path with spaces and letters beyond ASCII, with the records of two cells."""
    root = tmp_path / "Läufe und mehr"
    document = study_document()
    for cell in CELLS:
        job = root / "tiny/jobs" / f"job-{cell}"
        job.mkdir(parents=True)
        (job / "config.json").write_text('{"d_model": 64}')
        started = {"step": 0, "tokens": 0, "time": 1_764_559_860.0, "event": "started", "cause": None}
        (job / "record.jsonl").write_text(json.dumps(started) + "\n" + record_lines(1, 200))
    (root / "tiny/study.json").write_text(json.dumps(document))
    shutil.copy(empty_store, root / "mlflow.db")
    return root


def record_of(root: Path, cell: str) -> Path:
    return root / "tiny/jobs" / f"job-{cell}" / "record.jsonl"


def on_disk(root: Path) -> Counter[tuple[str, str, float, int, int]]:
    """Finite points of all records: (cell, name, value, time in ms, tokens), read independently of the code tested."""
    points: Counter[tuple[str, str, float, int, int]] = Counter()
    for cell in CELLS:
        for line in record_of(root, cell).read_text().splitlines():
            entry = json.loads(line)
            for name, value in entry.get("metrics", {}).items():
                if value is not None and value == value:
                    points[cell, name, value, round(entry["time"] * 1000), entry["tokens"]] += 1
    return points


def in_store(database: Path) -> Counter[tuple[str, str, float, int, int]]:
    query = """SELECT tags.value, metrics.key, metrics.value, timestamp, step FROM metrics
               JOIN tags ON tags.run_uuid = metrics.run_uuid AND tags.key = 'gridlaw.cell'"""
    with closing(sqlite3.connect(database)) as store:
        return Counter(store.execute(query).fetchall())


def statuses(database: Path) -> dict[str, str]:
    """MLflow status by run name; fails where a name is there twice."""
    with closing(sqlite3.connect(database)) as store:
        rows = store.execute("SELECT name, status FROM runs").fetchall()
    assert len(rows) == len({name for name, _ in rows})
    return dict(rows)


def tags_and_params(database: Path, name: str) -> tuple[dict[str, str], dict[str, str]]:
    with closing(sqlite3.connect(database)) as store:
        tags, params = (
            dict(
                store.execute(
                    f"SELECT key, value FROM {table} JOIN runs ON runs.run_uuid = {table}.run_uuid WHERE name = ?",
                    (name,),
                ).fetchall()
            )
            for table in ("tags", "params")
        )
    return tags, params


def replay(root: Path, states: dict[str, CellState] = FINISHED, uri: str | None = None) -> None:
    Replay(root, study_document(), uri).deliver(states, leaving=True, go_on=lambda: True)


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


# --- the tracker --------------------------------------------------------------------------------------------------


def test_up_to_date_imports_no_mlflow(root: Path) -> None:
    replay(root)
    program = f"""
import json, sys
from pathlib import Path
from orchestrator.tracking import CellState, up_to_date
root = Path({str(root)!r})
document = json.loads((root / "tiny/study.json").read_text())
states = {{cell["id"]: CellState("finished", None, 1) for cell in document["cells"]}}
print(up_to_date(root, document, states), "mlflow" in sys.modules)
record = root / "tiny/jobs/job-{CELLS[0]}/record.jsonl"
record.write_text(record.read_text() + {record_lines(200, 201)!r})
print(up_to_date(root, document, states))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["True", "False", "False"]


def test_the_tracker_follows_and_prints_nothing(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker(root, study_document())
    tracker.update({CELLS[0]: CellState("running", None, 1)})
    tracker.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not Note.read(record_of(root, CELLS[0]).parent, "default").files:
        time.sleep(0.1)
    assert statuses(root / "mlflow.db")["swa-8 laptop 1.8M seed 0"] == "RUNNING"
    tracker.update(FINISHED)
    assert tracker.stop(30).reason is None
    assert set(statuses(root / "mlflow.db").values()) == {"FINISHED"}
    assert in_store(root / "mlflow.db") == on_disk(root)
    assert capfd.readouterr() == ("", "")


def test_an_absent_server_costs_nothing_and_what_waits_is_counted(root: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    tracker = Tracker(root, study_document(), uri)
    tracker.start()
    tracker.update(FINISHED)
    began = time.monotonic()
    pending = tracker.stop(30)
    assert time.monotonic() - began < 20
    assert pending.points == on_disk(root).total()
    assert pending.reason == f"{uri} cannot be reached (Connection refused)"
    assert not up_to_date(root, study_document(), FINISHED, uri)


def test_a_server_that_never_answers_holds_nobody(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = Tracker(root, study_document(), f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        tracker.start()
        tracker.update(FINISHED)
        pending = tracker.stop(1.5)
        assert time.monotonic() - began < 5
    assert pending.points == on_disk(root).total() and pending.reason


# --- a real server ------------------------------------------------------------------------------------------------


class Server:
    """An MLflow server of its own, which can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self.process = subprocess.Popen(
            command,
            start_new_session=True,
            env=os.environ | quiet,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)
        raise TimeoutError("the MLflow server did not start")

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(30)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    if server.process is not None and server.process.poll() is None:
        server.send(signal.SIGKILL)


def wait_for(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.2)
    assert condition()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_the_server_goes_and_comes_back(
    root: Path, server: Server, monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    database = server.folder / "server.db"
    tracker = Tracker(root, study_document(), server.uri)
    tracker.update(dict.fromkeys(CELLS, CellState("running", None, 1)))
    tracker.start()
    wait_for(lambda: in_store(database) == on_disk(root), 60)
    server.send(fault)
    for step in range(200, 260, 10):
        for cell in CELLS:
            with record_of(root, cell).open("a") as record:
                record.write(record_lines(step, step + 10))
        time.sleep(1)
    assert in_store(database) != on_disk(root)
    server.start() if fault == signal.SIGKILL else server.send(signal.SIGCONT)
    wait_for(lambda: in_store(database) == on_disk(root), 90)
    tracker.update(FINISHED)
    assert tracker.stop(30).reason is None
    assert set(statuses(database).values()) == {"FINISHED"}


@pytest.mark.slow
def test_the_server_is_gone_at_the_end_and_the_next_driver_delivers(root: Path, server: Server) -> None:
    tracker = Tracker(root, study_document(), server.uri)
    tracker.update(dict.fromkeys(CELLS, CellState("running", None, 1)))
    tracker.start()
    wait_for(lambda: in_store(server.folder / "server.db") == on_disk(root), 60)
    server.send(signal.SIGKILL)
    with record_of(root, CELLS[0]).open("a") as record:
        record.write(record_lines(200, 220))
    missing = (on_disk(root) - in_store(server.folder / "server.db")).total()
    tracker.update(FINISHED)
    pending = tracker.stop(30)
    assert (pending.points, bool(pending.reason)) == (missing, True)
    server.start()
    tracker = Tracker(root, study_document(), server.uri)
    tracker.update(FINISHED)
    tracker.start()
    assert tracker.stop(30).reason is None
    assert in_store(server.folder / "server.db") == on_disk(root)
    assert set(statuses(server.folder / "server.db").values()) == {"FINISHED"}


@pytest.mark.slow
def test_a_driver_killed_anywhere_makes_no_second_run(root: Path) -> None:
    (root / "mlflow.db").unlink()
    with record_of(root, CELLS[1]).open("a") as record:
        record.write(record_lines(200, 20_000))
    program = f"""
import json, time
from pathlib import Path
from orchestrator.tracking import CellState, Tracker
root = Path({str(root)!r})
document = json.loads((root / "tiny/study.json").read_text())
tracker = Tracker(root, document)
tracker.update({{cell["id"]: CellState("running", None, 1) for cell in document["cells"]}})
tracker.start()
time.sleep(600)
"""
    making = root / ".mlflow-making/mlflow.db"
    for begun in (making.exists, (root / "mlflow.db").exists, lambda: in_store(root / "mlflow.db")):
        driver = subprocess.Popen([sys.executable, "-c", program])
        wait_for(begun, 60)
        driver.kill()
        driver.wait(30)
    tracker = Tracker(root, study_document())
    tracker.update(FINISHED)
    tracker.start()
    assert tracker.stop(120).reason is None
    assert in_store(root / "mlflow.db") == on_disk(root)
    assert set(statuses(root / "mlflow.db").values()) == {"FINISHED"}
