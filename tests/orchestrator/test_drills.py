"""The command under kills, signals and crowds: real studies of tiny models, each run as a process of its own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 300
STUDY = """
from orchestrator.data.recall import RecallLanguage
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Backbone, Evaluations, Machine, Size, Study

study = Study(
    name="tiny",
    arms=[Arm(name="full", pattern="full"), Arm(name="swa-8", pattern="swa-8 full")],
    sizes=[Size(name=f"d{d}", d_model=d, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32) for d in SIZES],
    budgets=[STEPS * 4 * 64],
    seeds=SEEDS,
    data=RecallLanguage(context=64, facts_per_document=(2, 4)),
    recipe=Recipe(learning_rate=0.02, batch_size=4),
    backbone=Backbone(mlp="relu2", norm_gain=False),
    evaluations=Evaluations(every_tokens=50 * 4 * 64, checkpoints=4),
    machine=Machine(workers=WORKERS),
)
"""

pytestmark = [pytest.mark.drill, pytest.mark.cluster]


class Command:
    """One `gridlaw run`, leader of a process group of its own as under a shell."""

    def __init__(self, study: Path, root: Path, *options: str, cpus: int = 2) -> None:
        self.root = root
        arguments = ["run", str(study), "--root", str(root), "--cpus", str(cpus), "--gpus", "0", *options]
        self.process = subprocess.Popen(
            # -P as in the installed command: the working folder is not on the import path.
            [sys.executable, "-P", "-m", "experiments.command", *arguments],
            cwd=study.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.family = [psutil.Process(self.process.pid)]
        self.command_line = list(self.process.args)
        self.names: set[str] = set()  # of its children

    def wait_for(self, what: Callable[[], Any], seconds: float = 180) -> Any:
        """Polls until `what` is true; fails when the command ends first. Notes every process started meanwhile."""
        for _ in range(int(seconds / 0.05)):
            self.look()
            if found := what():
                return found
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)
        raise AssertionError(f"not seen in {seconds} s")

    def look(self) -> list[psutil.Process]:
        try:
            children = self.family[0].children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                # Between fork and exec a child still bears its parent's name: MLflow asks `uname` that way.
                if child.cmdline() != self.command_line:
                    self.names.add(child.name())
        self.family += [child for child in children if child not in self.family]
        return children

    def kill(self) -> None:
        """What is left of a run whose test has failed: its node and workers follow it by themselves."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def ends(self, seconds: float = 240) -> str:
        try:
            return self.process.communicate(timeout=seconds)[0]
        finally:
            self.kill()

    def workers(self) -> list[psutil.Process]:
        """Actors: what they fork bears their name for a moment, but has another parent."""
        found = []
        for child in self.look():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "ray::Worker" in " ".join(child.cmdline()) and child.parent().name() == "raylet":
                    found.append(child)
        return found

    def left_over(self) -> list[psutil.Process]:
        return [process for process in self.family if lives(process)]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def no_command_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    commands: list[Command] = []
    begin = Command.__init__

    def noted(self: Command, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        commands.append(self)

    monkeypatch.setattr(Command, "__init__", noted)
    yield
    for command in commands:
        command.kill()


@pytest.fixture
def make_study(tmp_path: Path) -> Callable[..., Path]:
    def make(
        seeds: tuple[int, ...] = (0,), sizes: tuple[int, ...] = (16,), workers: int = 1, steps: int = STEPS
    ) -> Path:
        path = tmp_path / "study folder" / "tiny.py"
        path.parent.mkdir(exist_ok=True)
        values = f"SEEDS, SIZES, WORKERS, STEPS = {seeds}, {sizes}, {workers}, {steps}\n"
        path.write_text(values + STUDY)
        return path

    return make


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a run that nothing disturbed: both arms, seed 0."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "tiny.py").write_text(f"SEEDS, SIZES, WORKERS, STEPS = (0,), (16,), 1, {STEPS}\n" + STUDY)
    command = Command(folder / "tiny.py", folder / "root")
    output = command.ends()
    assert command.process.returncode == 0, output
    return folder / "root"


def rows(root: Path, sql: str, file: str = "tiny/ledger.db") -> list[tuple[Any, ...]]:
    with sqlite3.connect(root / file) as db:
        return db.execute(sql).fetchall()


def record(root: Path, job_id: str) -> list[dict[str, Any]]:
    path = root / "tiny/jobs" / job_id / "record.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def losses(root: Path) -> dict[str, list[tuple[int, float]]]:
    """job → (tokens, training loss) as logged, which must be strictly increasing in tokens."""
    found = {}
    for (job_id,) in rows(root, "SELECT id FROM jobs ORDER BY id"):
        points = [(e["tokens"], e["metrics"]["train/loss"]) for e in record(root, job_id) if e.get("source") == "train"]
        assert [tokens for tokens, _ in points] == sorted({tokens for tokens, _ in points})
        found[job_id] = points
    return found


def is_under_way(root: Path, step: int) -> Callable[[], list[str]]:
    """Jobs that have logged `step` and have not finished."""

    def look() -> list[str]:
        jobs = root / "tiny/jobs"
        ids = [path.name for path in jobs.iterdir()] if jobs.exists() else []
        steps = {job_id: [line["step"] for line in record(root, job_id) if "metrics" in line] for job_id in ids}
        return [job_id for job_id, done in steps.items() if done and step <= max(done) < STEPS]

    return look


def mlflow_runs(root: Path) -> list[tuple[Any, ...]]:
    return rows(root, "SELECT run_uuid, name, status FROM runs ORDER BY run_uuid", "mlflow.db")


def goes_on_to_the_unbroken_end(study: Path, root: Path, unbroken: Path) -> None:
    command = Command(study, root)
    output = command.ends()
    assert command.process.returncode == 0, output
    assert {state for (state,) in rows(root, "SELECT state FROM jobs")} == {"finished"}
    assert losses(root) == losses(unbroken)
    assert "RUNNING" not in {status for _, _, status in mlflow_runs(root)}
    assert len(mlflow_runs(root)) == len(mlflow_runs(unbroken))


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
    command.wait_for(lambda: len(command.workers()) > 4 or _all_finished(root, 4))
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


def _all_finished(root: Path, n: int) -> bool:
    path = root / "tiny/ledger.db"
    if not path.exists():
        return False
    try:
        return rows(root, "SELECT count(*) FROM jobs WHERE state = 'finished'") == [(n,)]
    except sqlite3.OperationalError:
        return False


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
