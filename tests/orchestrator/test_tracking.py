"""The tracker: never in the way, whatever the server does, and everything arrives once it answers."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.replay import Note
from orchestrator.tracked_runs import CellState
from orchestrator.tracking import Tracker, up_to_date

sys.path.insert(0, str(Path(__file__).parent))
from mlflow_server import Server
from tracked_study import (
    CELLS,
    FINISHED,
    in_store,
    on_disk,
    record_lines,
    record_of,
    replay,
    statuses,
    study_document,
)


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
