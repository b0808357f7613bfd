"""A study folder as training leaves it, with curves drawn from known laws instead of trained."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.ledger import AttemptEnd, Ledger

TOKENS_A_STEP = 2048
STEPS = 900
CHANCE = 1 / 32
ANSWERS = 490  # behind each value of the capability


@dataclass(frozen=True)
class FakeArm:
    """T50 in millions of tokens by seed; None stays at chance. state: by seed, "finished" by default.

    second_rise: what the last two evaluations lie above the curve.
    """

    name: str
    t50: tuple[float | None, ...]
    ceiling: float = 0.9
    states: tuple[str, ...] = ()
    second_rise: float = 0.0


@dataclass(frozen=True)
class FakeSize:
    """n: parameters without embeddings. slower: times the T50 of the arm."""

    name: str
    n: int
    slower: float = 1.0


TINY = (FakeSize("tiny", 143_000),)


@dataclass(frozen=True)
class FakeJob:
    id: str
    cell_id: str
    tokens: int
    kind: str = "train"
    after: tuple[str, ...] = ()
    workers: int = 1
    flops: float = 1e12


LAZINESS = (
    FakeArm("full", (0.80, 0.83, 0.68), 0.87),
    FakeArm("swa-8", (0.78, 0.80, 0.63), 0.90, ("finished", "finished", "failed")),
    FakeArm("swa-128", (None, 1.05, 1.19), 0.88),
    FakeArm("swa-8-nope", (0.60, 0.54, 0.60), 0.99, ("finished", "finished", "diverged")),
    FakeArm("swa-128-nope", (0.68, 0.56, 0.69), 0.98, ("finished", "finished", "running")),
)
Write = Callable[..., Path]


@pytest.fixture
def write_study(tmp_path: Path) -> Write:
    """write_study(arms, name=…, data=…) → STUDY_ROOT."""

    def write(arms: tuple[FakeArm, ...] = LAZINESS, **options: Any) -> Path:
        return write_fake_study(tmp_path, arms, **options)

    return write


def write_fake_study(
    root: Path,
    arms: tuple[FakeArm, ...] = LAZINESS,
    name: str = "laziness",
    data: tuple[str, ...] = ("recall",),
    reference: str | None = None,
    noise: float = 0.02,
    sizes: tuple[FakeSize, ...] = TINY,
    budgets: tuple[int, ...] = (STEPS,),
) -> Path:
    """sizes, budgets (in steps): with several, the final loss of a cell is 1.2 + (N / 143k)^-0.4 + (D / 1e6)^-0.5."""
    folder = root / name
    cells = [
        (
            {
                "id": f"{a:04x}{d:02x}{s:01x}{b:01x}{seed:04x}", "arm": arm.name, "size": size.name, "data": condition,
                "budget_tokens": steps * TOKENS_A_STEP, "seed": seed, "params": size.n + 12_000,
                "non_embedding_params": size.n, "job_id": f"{a:04x}{d:02x}{s:01x}{b:01x}{seed:04x}",
                "windows": [], "full_layers": [1, 3], "identity": {},
            },
            arm,
        )
        for d, condition in enumerate(data)
        for s, size in enumerate(sizes)
        for b, steps in enumerate(budgets)
        for seed in range(max(len(arm.t50) for arm in arms))
        for a, arm in enumerate(arms)
        if seed < len(arm.t50)
    ]  # fmt: skip
    document = {
        "name": name, "source": f"{name}.py",
        "question": {
            "capability": "recall/accuracy/beyond-128", "chance": CHANCE,
            "reference": reference or arms[0].name, "margin": 0.05,
        },
        "notes": ["Key shift: every softmax layer adds a learned multiple of the previous token's key to each key."],
        "arms": [{"name": arm.name, "pattern": "swa-8 full", "positions": "rope"} for arm in arms],
        "sizes": [{"name": size.name} for size in sizes], "recipe": {"batch_size": 8},
        "cells": [cell for cell, _ in cells],
        "measures": [{"name": m, "identity": f"{m}-1"} for m in ("recall", "validation", "retrieval")],
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps(document), encoding="utf-8")
    with Ledger.open(folder / "ledger.db") as ledger:
        ledger.add(
            FakeJob(
                cell["job_id"], cell["id"], cell["budget_tokens"], flops=6.0 * cell["params"] * cell["budget_tokens"]
            )
            for cell, _ in cells
        )
        session = ledger.start_session(2, None)
        for cell, arm in cells:
            state = arm.states[cell["seed"]] if arm.states else "finished"
            steps = {"finished": cell["budget_tokens"] // TOKENS_A_STEP, "pending": 0}.get(state, 420)
            if state == "pending":
                continue
            ledger.start_attempt(cell["job_id"], session, 0, warm=True, available=0.0)
            slower = next(size.slower for size in sizes if size.name == cell["size"])
            scaled = len(sizes) > 1 or len(budgets) > 1
            _write_record(folder / "jobs" / cell["job_id"], cell, arm, steps, state, noise, slower, scaled)
            cause = {"failed": "out of memory", "diverged": "loss is not finite at step 420"}.get(state)
            if state != "running":
                ledger.end_attempt(cell["job_id"], AttemptEnd(state, state, cause, steps * TOKENS_A_STEP, 80.0))
            else:
                ledger.progress(session, {cell["job_id"]: steps * TOKENS_A_STEP})
    return root


def _write_record(
    folder: Path, cell: dict[str, Any], arm: FakeArm, steps: int, state: str, noise: float, slower: float, scaled: bool
) -> None:
    rng = np.random.default_rng([cell["seed"], len(arm.name), int(cell["id"], 16) % 1009])
    middle = None if (t50 := arm.t50[cell["seed"]]) is None else t50 * slower
    off = np.exp(rng.normal(0, 0.004))

    def validation(tokens: float) -> float:
        if scaled:
            n = cell["non_embedding_params"]
            return float((1.2 + (n / 143_000) ** -0.4 + (tokens / 1e6) ** -0.5) * off)
        return float(1.9 + 2.4 * np.exp(-tokens / 3e5) - 0.25 * level(tokens))

    found_by = rng.permutation(8)[:2]  # which heads do it differs from seed to seed

    def level(tokens: float) -> float:
        if middle is None:
            return CHANCE
        rise = 1 / (1 + np.exp(-14 * (np.log10(tokens) - 6 - np.log10(middle))))
        late = arm.second_rise if tokens > 800 * TOKENS_A_STEP else 0.0
        return float(CHANCE + (arm.ceiling - CHANCE) * rise + late)

    lines: list[dict[str, Any]] = [{"step": 0, "tokens": 0, "time": 0.0, "event": "started", "cause": None}]
    for step in range(10, steps + 1, 10):
        tokens = step * TOKENS_A_STEP
        at = {"step": step, "tokens": tokens, "time": step * 0.09}
        loss = 1.9 + 2.4 * np.exp(-tokens / 3e5) - 0.25 * level(tokens) + rng.normal(0, 0.02)
        if state == "diverged" and step == steps:
            loss = None
        lines.append({**at, "source": "train", "metrics": {"train/loss": loss, "train/learning_rate": 0.02}})
        if step % 60 and step != steps:
            continue
        p = float(np.clip(level(tokens) + rng.normal(0, noise), 0, 1))
        recall = {"recall/accuracy/1-8": min(1.0, p + 0.05), "recall/accuracy/beyond-128": p}
        rows = [{"bucket": "beyond-128", "answers": ANSWERS, "right": round(p * ANSWERS)}]
        lines.append({**at, "source": "recall", "measurement": "recall-1", "metrics": recall, "rows": rows})
        valid = {"validation/loss": validation(tokens)}
        lines.append({**at, "source": "validation", "measurement": "validation-1", "metrics": valid, "rows": []})
        if step in (60, 120, 180, 300, 540, 900):
            heads = [
                {
                    "layer": 1 + 2 * (i // 4),
                    "head": i % 4,
                    "score": 0.02 + (0.7 * level(tokens) if i in found_by else 0),
                }
                for i in range(8)
            ]
            lines.append(
                {**at, "source": "retrieval", "measurement": "retrieval-1", "rows": heads,
                 "metrics": {f"retrieval/L{row['layer']}H{row['head']}": row["score"] for row in heads}}
            )  # fmt: skip
    if state in ("finished", "diverged"):
        lines.append({"step": steps, "tokens": steps * TOKENS_A_STEP, "time": 81.0, "event": state, "cause": None})
    folder.mkdir(parents=True)
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
