"""What a job will take: seconds and memory of a worker, and bytes on disk."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model import cost
from orchestrator.cells import Cell
from orchestrator.study import Study


@dataclass(frozen=True)
class Known:
    """What the ledger says of a job. busy_s: seconds of training and measuring, of all attempts.

    tokens: planned, of this job alone. begun: whether it has trained a step.
    """

    state: str
    busy_s: float
    tokens: int
    begun: bool


def trained_paces(
    documents: Mapping[str, dict[str, Any]], earlier: Mapping[str, dict[str, Any]], known: Mapping[str, Known]
) -> dict[str, float]:
    """Seconds a token of each model that has been trained, by `model_key`, over its finished cells.

    documents: cell id → identity document. earlier: cells of earlier plans, as `plan.ledger_row` wrote them.
    """
    totals: dict[str, tuple[float, int]] = {}
    for cell_id, state in known.items():
        document = documents.get(cell_id) or earlier.get(cell_id, {}).get("document")
        if document and state.state == "finished":
            busy, tokens = totals.get(model_key(document), (0.0, 0))
            totals[model_key(document)] = (busy + state.busy_s, tokens + state.tokens)
    return {key: busy / tokens for key, (busy, tokens) in totals.items() if tokens}


def model_key(document: Mapping[str, Any]) -> str:
    """The model of a cell's identity document, as a key."""
    return json.dumps(document["model"], sort_keys=True)


def worker_memory(study: Study, cell: Cell) -> float:
    """Bytes one worker needs to train a cell."""
    machine = study.machine
    micro_batch = machine.micro_batch or study.recipe.batch_size // machine.workers
    return cost.memory(
        cell.model,
        study.recipe.optimizer,
        micro_batch,
        machine.zero_stage,
        machine.workers,
        study.recipe.precision,
    ).total


def disk_bytes(study: Study, cell: Cell, steps: int) -> float:
    """Weights of every checkpoint kept, optimizer state of the newest, and about 200 bytes a recorded number.

    A branch keeps the trunk's checkpoints too: on one file system as links, which this counts as copies.
    """
    evaluate_at, checkpoint_at = study.evaluations.steps(cell.steps, cell.tokens_per_step)
    lines = steps / study.machine.log_every * 3 + len(evaluate_at) * 20 * len(study.measures)
    return 4.0 * cell.params * (len(checkpoint_at) + 3) + 200 * lines
