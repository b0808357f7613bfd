"""The command under kills, signals and crowds: real studies of tiny models, each run as a process of its own."""

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parent))
from commands import (
    Command,
    all_finished,
    command_line,
    goes_on_to_the_unbroken_end,
    is_under_way,
    losses,
    mlflow_runs,
    record,
    rows,
)

pytestmark = [pytest.mark.drill, pytest.mark.cluster]


def test_1_and_2_only_what_is_missing_runs(make_study: Callable[..., Path], tmp_path: Path, unbroken: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(unbroken, root)
    ledger = [rows(root, f"SELECT * FROM {table}") for table in ("jobs", "attempts", "sessions")]
    runs = mlflow_runs(root)
    again = Command(make_study(), root)
    while again.process.poll() is None:
        again.look()
        time.sleep(0.02)
    assert again.process.returncode == 0, again.ends()
    assert not {name for name in again.names if "ray" in name or "python" in name or name == "gcs_server"}
    assert [rows(root, f"SELECT * FROM {table}") for table in ("jobs", "attempts", "sessions")] == ledger
    assert mlflow_runs(root) == runs

    wider = Command(make_study(sizes=(16, 24)), root)
    output = wider.ends()
    assert wider.process.returncode == 0, output
    assert rows(root, "SELECT attempts, count(*) FROM jobs GROUP BY attempts") == [(1, 4)]
    assert {run_id for run_id, _, _ in runs} < {run_id for run_id, _, _ in mlflow_runs(root)}
    assert losses(unbroken).items() <= losses(root).items()


def test_4_a_killed_worker_costs_one_attempt(make_study: Callable[..., Path], tmp_path: Path, unbroken: Path) -> None:
    root = tmp_path / "root"
    command = Command(make_study(), root)
    command.wait_for(is_under_way(root, 100))
    command.workers()[0].kill()
    output = command.ends()
    assert command.process.returncode == 0, output
    assert sorted(rows(root, "SELECT state, attempts FROM jobs")) == [("finished", 1), ("finished", 2)]
    assert losses(root) == losses(unbroken)
    assert len(mlflow_runs(root)) == len(mlflow_runs(unbroken))
    assert command.left_over() == []


def test_5_a_killed_driver_leaves_nobody(make_study: Callable[..., Path], tmp_path: Path, unbroken: Path) -> None:
    root = tmp_path / "root"
    command = Command(make_study(), root)
    command.wait_for(is_under_way(root, 100))
    assert command.workers()
    command.process.kill()
    command.process.wait()
    began = time.monotonic()
    while command.left_over() and time.monotonic() - began < 5:
        time.sleep(0.05)
    assert command.left_over() == []
    goes_on_to_the_unbroken_end(make_study(), root, unbroken)
    assert ("lost", "the driver was lost") in rows(root, "SELECT state, cause FROM attempts")


def test_5_a_driver_killed_while_ray_starts_leaves_nobody(make_study: Callable[..., Path], tmp_path: Path) -> None:
    """Its node's agents are there and no worker yet that would take them along."""
    command = Command(make_study(), tmp_path / "root")

    def agents() -> list[psutil.Process]:
        return [child for child in command.look() if "agent.py" in " ".join(command_line(child))]

    command.wait_for(agents)
    time.sleep(0.5)  # they are at work
    command.process.kill()
    command.process.wait()
    began = time.monotonic()
    while command.left_over() and time.monotonic() - began < 5:
        time.sleep(0.05)
    assert [command_line(process) for process in command.left_over()] == []


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        pytest.param(signal.SIGINT, "driver", marks=pytest.mark.slow),
        (signal.SIGINT, "group"),
        pytest.param(signal.SIGTERM, "driver", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "group", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "group", marks=pytest.mark.slow),
    ],
)
def test_6_a_stop_checkpoints_and_leaves_nobody(
    make_study: Callable[..., Path], tmp_path: Path, unbroken: Path, number: signal.Signals, whom: str
) -> None:
    root = tmp_path / "root"
    command = Command(make_study(), root)
    running = command.wait_for(is_under_way(root, 100))
    began = time.monotonic()
    (os.killpg if whom == "group" else os.kill)(command.process.pid, number)
    output = command.ends(30)
    assert time.monotonic() - began < 10
    assert command.process.returncode == 128 + number, output
    assert command.left_over() == []
    for job_id in running:
        last = record(root, job_id)[-1]
        assert last["event"] == "stopped"
        assert (root / f"tiny/jobs/{job_id}/checkpoints/step-{last['step']:08d}/COMMITTED").exists()
    assert {state for (state,) in rows(root, "SELECT state FROM jobs")} <= {"pending", "finished"}
    assert "RUNNING" not in {status for _, _, status in mlflow_runs(root)}
    goes_on_to_the_unbroken_end(make_study(), root, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_6_a_stop_while_ray_starts_leaves_nobody(
    make_study: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    command = Command(make_study(), tmp_path / "root")
    command.wait_for(lambda: any("gcs_server" in name for name in (command.look() and command.names)))
    os.kill(command.process.pid, number)
    output = command.ends(60)
    assert command.process.returncode == 128 + number, output
    assert "go on with: gridlaw run" in output and "Traceback" not in output and "wait for MLflow" not in output
    assert command.left_over() == []
    assert {state for (state,) in rows(tmp_path / "root", "SELECT state FROM jobs")} == {"pending"}


@pytest.mark.slow
def test_6_a_stop_while_everything_is_starting(make_study: Callable[..., Path], tmp_path: Path) -> None:
    command = Command(make_study(), tmp_path / "root")
    command.wait_for(lambda: [child for child in command.look() if child.name() == "raylet"])
    began = time.monotonic()
    os.killpg(command.process.pid, signal.SIGINT)
    command.ends(60)
    assert time.monotonic() - began < 20
    assert command.left_over() == []


@pytest.mark.slow
def test_11_wide_cells_never_hold_more_than_the_slots(make_study: Callable[..., Path], tmp_path: Path) -> None:
    root = tmp_path / "root"
    command = Command(make_study(seeds=(0, 1), workers=2, steps=40), root, cpus=4)
    command.wait_for(lambda: len(command.workers()) > 4 or all_finished(root, 4))
    most = len(command.workers())
    output = command.ends()
    assert command.process.returncode == 0, output
    assert most <= 4
    attempts = rows(root, "SELECT started, ended FROM attempts")
    assert len(attempts) == 4
    assert max(sum(2 for a, b in attempts if a <= moment < b) for moment, _ in attempts) <= 4


@pytest.mark.slow
def test_12_another_program_holds_port_29500(make_study: Callable[..., Path], tmp_path: Path) -> None:
    with taken(29500):
        command = Command(make_study(workers=2, steps=40), tmp_path / "root", cpus=4)
        output = command.ends()
    assert command.process.returncode == 0, output
    assert rows(tmp_path / "root", "SELECT state, attempts FROM jobs") == [("finished", 1), ("finished", 1)]


def test_14_and_23_a_study_with_its_own_modules(make_study: Callable[..., Path], tmp_path: Path) -> None:
    """A helper beside the study reaches the workers as it was read; a `model.py` there shadows nothing."""
    study, root = make_study(seeds=(0, 1)), tmp_path / "root"
    folder = study.parent
    for name in ("model.py", "analysis.py", "orchestrator.py", "experiments.py"):
        (folder / name).write_text("raise ImportError('the study folder must not shadow our rooms')\n")
    helper = folder / "counting_measure.py"
    helper.write_text(
        "from dataclasses import dataclass\n"
        "from orchestrator.measure import Measurement\n"
        "@dataclass(frozen=True)\n"
        "class Constant:\n"
        "    name: str = 'constant'\n"
        "    def identity(self):\n"
        "        return {}\n"
        "    def capabilities(self, data):\n"
        "        return ()\n"
        "    def __call__(self, model, data):\n"
        "        return Measurement({'constant/value': 0.25})\n"
    )
    text = study.read_text().replace("    machine=", "    measures=[Constant()],\n    machine=")
    study.write_text("from counting_measure import Constant\n" + text)
    command = Command(study, root)
    command.wait_for(is_under_way(root, 10))
    helper.write_text("raise RuntimeError('edited while the study ran')\n")
    study.write_text("this is no Python any more")
    output = command.ends()
    assert command.process.returncode == 0, output
    for (job_id,) in rows(root, "SELECT id FROM jobs"):
        values = [e["metrics"]["constant/value"] for e in record(root, job_id) if e.get("source") == "constant"]
        assert values and set(values) == {0.25}


class taken:
    """Holds a TCP port, or knows that somebody else does."""

    def __init__(self, port: int) -> None:
        self.port, self.socket = port, socket.socket()

    def __enter__(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.bind(("", self.port))
            self.socket.listen()

    def __exit__(self, *_: object) -> None:
        self.socket.close()
