"""Studies of tiny models run by the command as processes of their own, and what they leave on disk."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

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
        self.output = ""
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
            self.output = self.process.communicate(timeout=seconds)[0]
            return self.output
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


def command_line(process: psutil.Process) -> list[str]:
    """What a process runs; empty for one that is gone."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


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


def mlflow_runs(root: Path, file: str = "mlflow.db") -> list[tuple[Any, ...]]:
    return rows(root, "SELECT run_uuid, name, status FROM runs ORDER BY run_uuid", file)


def goes_on_to_the_unbroken_end(study: Path, root: Path, unbroken: Path) -> None:
    command = Command(study, root)
    output = command.ends()
    assert command.process.returncode == 0, output
    assert {state for (state,) in rows(root, "SELECT state FROM jobs")} == {"finished"}
    assert losses(root) == losses(unbroken)
    assert "RUNNING" not in {status for _, _, status in mlflow_runs(root)}
    assert len(mlflow_runs(root)) == len(mlflow_runs(unbroken))


def all_finished(root: Path, n: int) -> bool:
    path = root / "tiny/ledger.db"
    if not path.exists():
        return False
    try:
        return rows(root, "SELECT count(*) FROM jobs WHERE state = 'finished'") == [(n,)]
    except sqlite3.OperationalError:
        return False
