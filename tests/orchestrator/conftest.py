"""A study root that is tracked, for the tests of replay and of the tracker; studies for the drills."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.mlflow_store import make_default

sys.path.insert(0, str(Path(__file__).parent))
from commands import STEPS, STUDY, Command
from tracked_study import CELLS, record_lines, study_document


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """A job flushes them for the rest of its process, which here is that of all tests; Hypothesis draws them."""
    yield
    torch.set_flush_denormal(False)


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


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a run that nothing disturbed: both arms, seed 0."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "tiny.py").write_text(f"SEEDS, SIZES, WORKERS, STEPS = (0,), (16,), 1, {STEPS}\n" + STUDY)
    command = Command(folder / "tiny.py", folder / "root")
    output = command.ends()
    assert command.process.returncode == 0, output
    return folder / "root"
