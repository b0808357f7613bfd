"""A study root that is tracked, for the tests of replay and of the tracker."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from orchestrator.mlflow_store import make_default

sys.path.insert(0, str(Path(__file__).parent))
from tracked_study import CELLS, record_lines, study_document


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
