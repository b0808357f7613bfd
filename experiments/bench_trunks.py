"""What shared trunks save: one study with and without them, `python -m experiments.bench_trunks`.

Eight models (four arms, two seeds) at three budgets are trained twice on this machine, budgets as branches of a trunk
and each by itself. Prints tokens, busy and wall seconds of both, and how far losses and last weights are apart. Exits 1
where they differ or trunks train more tokens.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import safetensors.torch
import typer

from orchestrator import record
from orchestrator.data.recall import RecallLanguage
from orchestrator.fleet import FleetOptions
from orchestrator.ledger import Ledger
from orchestrator.plan import Plan
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Machine, Size, Study
from orchestrator.submit import make_plan, submit
from orchestrator.timing import timing

BATCH, CONTEXT = 4, 128


def grid(name: str, share: bool, steps: int) -> Study:
    """Budgets of `steps`, twice and four times as many steps."""
    return Study(
        name=name,
        arms=tuple(Arm(name=word, pattern=f"{word} full") for word in ("full", "swa-4", "swa-16", "swa-64")),
        sizes=(Size(name="tiny", d_model=32, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=16, d_ff=64),),
        budgets=tuple(steps * factor * BATCH * CONTEXT for factor in (1, 2, 4)),
        seeds=(0, 1),
        data={"near": RecallLanguage(context=CONTEXT, g_min=4)},
        recipe=Recipe(learning_rate=0.02, batch_size=BATCH, decay_fraction=0.2),
        machine=Machine(share_trunks=share),
    )


def trained(study: Study, root: Path) -> tuple[Plan, dict[str, float | None]]:
    """Plans and runs a study; how long it took by its ledger."""
    options = FleetOptions()
    plan = make_plan(study, root, options.slots())
    result = submit(plan, Path(__file__), options).result
    assert result is not None and result.exit_code == 0, result
    with Ledger.read(plan.folder / "ledger.db") as ledger:
        return plan, timing(ledger)


def apart(one: Path, other: Path) -> tuple[float, float]:
    """(largest difference of a training loss, largest difference of a last weight) of two jobs' folders."""
    losses: list[dict[int, float]] = []
    weights: list[dict[str, Any]] = []
    for folder in (one, other):
        lines = [line for line in record.read(folder / "record.jsonl") if line.get("source") == "train"]
        losses.append({line["step"]: line["metrics"]["train/loss"] for line in lines})
        newest = max(folder.glob("checkpoints/step-*"))
        weights.append(safetensors.torch.load_file(newest / "weights.safetensors"))
    logged = losses[0].keys() & losses[1].keys()  # a trunk also logs where it ends
    assert logged and weights[0].keys() == weights[1].keys()
    return (
        max(abs(losses[0][step] - losses[1][step]) for step in logged),
        max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0]),
    )


def main(steps: Annotated[int, typer.Option(help="steps of the smallest budget")] = 150) -> None:
    """Budgets as branches of shared trunks against each by itself."""
    with tempfile.TemporaryDirectory(prefix="gl") as folder:
        root = Path(folder)
        plans, times = {}, {}
        for name, share in (("shared", True), ("separate", False)):
            plans[name], times[name] = trained(grid(name, share, steps), root)
            tokens, jobs = plans[name].totals()["tokens"], len(plans[name].jobs)
            print(f"{name:9} {jobs} jobs, {tokens} tokens, {json.dumps(times[name])}", flush=True)
        far = [
            apart(*(plans[name].folder / "jobs" / cell.id for name in ("shared", "separate")))
            for cell in plans["shared"].cells
        ]
    for figure, ratio in (
        ("tokens", plans["separate"].totals()["tokens"] / plans["shared"].totals()["tokens"]),
        ("busy", (times["separate"]["busy_core_s"] or 0) / (times["shared"]["busy_core_s"] or 1)),
        ("wall", (times["separate"]["makespan_s"] or 0) / (times["shared"]["makespan_s"] or 1)),
    ):
        print(f"{figure:9} {ratio:.2f} times without trunks")
    loss, weight = (max(values) for values in zip(*far, strict=True))
    print(f"losses apart by at most {loss:.1e}, last weights by {weight:.1e}, over {len(far)} cells")
    sys.exit(loss > 0 or weight > 0)


if __name__ == "__main__":
    typer.run(main)
