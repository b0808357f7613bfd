"""Whether what has been trained can go on at the ZeRO stage the study now asks for: said before anything starts."""

import json
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.plan import Plan


def check(plan: Plan) -> None:
    """Raises InputError naming the cell where optimizer state was saved at another ZeRO stage.

    The optimizers of different stages keep different things. Another number of workers is no hindrance: at stage 0 each
    holds all of the state, above it is cut anew (`training.shares`).
    """
    machine = plan.study.machine
    cells = {cell.id: cell for cell in plan.cells}
    for job in plan.jobs:
        if job.kind == "measure":
            continue
        jobs = plan.folder / "jobs"
        folder = jobs / job.id
        saved = _newest_state(folder)
        if saved is None and (trunk := plan.before(job)):
            folder = jobs / trunk.id
            saved = _newest_state(folder)
        if saved is None:
            continue
        cell = cells[job.cell_id]
        what = f"{cell.arm} {cell.size} {cell.budget_tokens} tokens seed {cell.seed} ({job.id})"
        stage = saved["zero_stage"]
        if stage != machine.zero_stage:
            raise InputError(
                f"machine.zero_stage: {machine.zero_stage}, but {what} stands at step {saved['step']} of stage "
                f"{stage}; set it back to {stage} to go on, or delete {folder} to train from step 0"
            )


def _newest_state(job_folder: Path) -> dict[str, Any] | None:
    """Of the newest committed checkpoint with optimizer state, its manifest. Damaged ones are the job's to judge."""
    for marker in sorted(job_folder.glob("checkpoints/step-*/COMMITTED"), reverse=True):
        try:
            manifest = json.loads((marker.parent / "MANIFEST.json").read_text(encoding="utf-8"))
            if any(name.startswith("optimizer-") for name in manifest["files"]):
                return {key: manifest[key] for key in ("step", "zero_stage")}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None
