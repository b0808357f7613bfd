"""Workers, driver and tracking server killed at random moments, again and again: nothing lost, doubled or changed.

GRIDLAW_SOAK_KILLS says how many kills; GRIDLAW_SOAK_SEED which moments and victims are drawn.
"""

import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parent))
from commands import Command, command_line, losses, mlflow_runs, record, rows
from mlflow_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.cluster, pytest.mark.timeout(12 * 3600)]

KILLS = int(os.environ.get("GRIDLAW_SOAK_KILLS", "20"))
SEED = int(os.environ.get("GRIDLAW_SOAK_SEED", "0"))


def test_random_kills_change_nothing(
    make_study: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    study, unbroken = make_study(seeds=(0, 1, 2), steps=600), tmp_path / "unbroken"
    command = Command(study, unbroken)
    output = command.ends()
    assert command.process.returncode == 0, output
    chance = random.Random(SEED)
    killed: Counter[str] = Counter()
    rounds = 0
    while killed.total() < KILLS:
        rounds += 1
        root = tmp_path / f"round{rounds}"
        root.mkdir()
        server = Server(root)
        server.start()
        try:
            _a_round(study, root, server, chance, killed)
        finally:
            server.send(signal.SIGKILL)
        assert losses(root) == losses(unbroken)
        assert _in_store(root) == _on_disk(root)
        runs = mlflow_runs(root, "server.db")
        assert len(runs) == len(mlflow_runs(unbroken)) and {status for _, _, status in runs} == {"FINISHED"}
        with capfd.disabled():
            print(f"\n{killed.total()} kills ({dict(killed)}) in {rounds} rounds, seed {SEED}")


def _a_round(study: Path, root: Path, server: Server, chance: random.Random, killed: Counter[str]) -> None:
    """One study from nothing to its end, with kills on the way as long as any are left."""
    for _ in range(KILLS + 10):
        command = Command(study, root, "--tracking-uri", server.uri)
        while command.process.poll() is None and killed.total() < KILLS:
            victim = chance.choice(("worker", "worker", "driver", "server"))
            _wait(command, chance.uniform(0, 6))
            if victim == "worker" and (workers := command.workers()):
                try:
                    chance.choice(workers).kill()
                except psutil.NoSuchProcess:
                    continue
            elif victim == "driver" and command.process.poll() is None:
                command.process.kill()
            elif victim == "server":
                server.send(signal.SIGKILL)
                _wait(command, chance.uniform(0, 5))
                server.start()
            else:
                continue
            killed[victim] += 1
        command.ends()
        _nobody_is_left(command)
        if command.process.returncode == 0 and "wait for MLflow" not in command.output:
            return
    raise AssertionError(f"the study did not come to its end: {command.output}")


def _wait(command: Command, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and command.process.poll() is None:
        command.look()
        time.sleep(0.05)


def _nobody_is_left(command: Command) -> None:
    deadline = time.monotonic() + 10
    while command.left_over() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [command_line(process) for process in command.left_over()] == []


Points = Counter[tuple[str, str, float, int, int]]


def _on_disk(root: Path) -> Points:
    """Finite points of all records: (cell, name, value, time in ms, tokens)."""
    points: Points = Counter()
    for (job_id,) in rows(root, "SELECT id FROM jobs"):
        for line in record(root, job_id):
            for name, value in line.get("metrics", {}).items():
                if value is not None:
                    points[job_id, name, value, round(line["time"] * 1000), line["tokens"]] += 1
    return points


def _in_store(root: Path) -> Points:
    cells = {cell["id"] for cell in json.loads((root / "tiny/study.json").read_text())["cells"]}
    query = """SELECT tags.value, metrics.key, metrics.value, timestamp, step FROM metrics
               JOIN tags ON tags.run_uuid = metrics.run_uuid AND tags.key = 'gridlaw.cell'"""
    with closing(sqlite3.connect(root / "server.db")) as store:
        return Counter(row for row in store.execute(query).fetchall() if row[0] in cells)
