"""Whether what has been trained can go on with the workers the study now asks for: said before anything starts."""

import json
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.plan import Plan


def check(plan: Plan) -> None:
    """Raises InputError naming the cell where optimizer state was saved for other workers or another ZeRO stage.

    At stage 0 every worker holds all of it, so that any number goes on. Above, each holds a share of flat tensors whose
    layout depends on stage and number of workers.
    """
    machine = plan.study.machine
    cells = {cell.id: cell for cell in plan.cells}
    for job in plan.jobs:
        if job.kind == "measure":
            continue
        jobs = plan.folder / "jobs"
        folder = jobs / job.id
        saved = _newest_state(folder)
        if saved is None and job.after:
            folder = jobs / job.after[0]
            saved = _newest_state(folder)
        if saved is None:
            continue
        cell = cells[job.cell_id]
        what = f"{cell.arm} {cell.size} {cell.budget_tokens} tokens seed {cell.seed} ({job.id})"
        stage, workers = saved["zero_stage"], saved["workers"]
        restart = f"or delete {folder} to train from step 0"
        if stage != machine.zero_stage:
            raise InputError(
                f"machine.zero_stage: {machine.zero_stage}, but {what} stands at step {saved['step']} of stage "
                f"{stage}; set it back to {stage} to go on, {restart}"
            )
        if stage > 0 and workers != machine.workers:
            raise InputError(
                f"machine.workers: {machine.workers}, but {what} stands at step {saved['step']} of {workers} workers "
                f"at ZeRO stage {stage}; set it back to {workers} to go on, {restart}"
            )


def _newest_state(job_folder: Path) -> dict[str, Any] | None:
    """Of the newest committed checkpoint with optimizer state, its manifest. Damaged ones are the job's to judge."""
    for marker in sorted(job_folder.glob("checkpoints/step-*/COMMITTED"), reverse=True):
        try:
            manifest = json.loads((marker.parent / "MANIFEST.json").read_text(encoding="utf-8"))
            if any(name.startswith("optimizer-") for name in manifest["files"]):
                return {key: manifest[key] for key in ("step", "workers", "zero_stage")}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None
