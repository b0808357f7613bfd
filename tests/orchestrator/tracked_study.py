"""A study of two cells as it lies on disk, and what a tracking store holds of it, read with SQL alone."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from orchestrator.replay import Replay
from orchestrator.tracked_runs import CellState

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
