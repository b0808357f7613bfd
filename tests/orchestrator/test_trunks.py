"""Budgets that share a trunk: planned with less training, trained to the same numbers as each by itself."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_study import Noise
from tiny_gang import HeldOutLoss

from orchestrator import cells, identity, plan
from orchestrator.jobs import Known
from orchestrator.plan import Plan
from orchestrator.recipe import Recipe
from orchestrator.record import RecordWriter, read
from orchestrator.study import Arm, Evaluations, Machine, Size, Study
from orchestrator.training import job
from orchestrator.training.checkpoint import NoWholeCheckpoint
from orchestrator.training.engine import end_process_group, start_process_group

SIZE = Size(name="tiny", d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32)
STEP = 4 * 64  # tokens


def grid(budgets: tuple[int | str, ...] = (10 * STEP, 20 * STEP, 40 * STEP), **changes: Any) -> Study:
    recipe = {"learning_rate": 0.02, "batch_size": 4, "warmup_steps": 3, **changes.pop("recipe", {})}
    return Study(
        **{
            "name": "tiny",
            "arms": (Arm(name="full", pattern="full"),),
            "sizes": (SIZE,),
            "budgets": budgets,
            "seeds": (0,),
            "data": {"noise": Noise()},
            "recipe": Recipe(**recipe),
            "measures": (HeldOutLoss(),),
            "evaluations": Evaluations(every_tokens=2 * STEP, checkpoints=3),
            "machine": Machine(log_every=1),
            **changes,
        }
    )


def made(study: Study, folder: Path, known: dict[str, Known] | None = None) -> Plan:
    return plan.make(study, folder, known or {})


def test_a_trunk_is_cut_where_each_budget_leaves_it(tmp_path: Path) -> None:
    planned = made(grid(), tmp_path)
    trunks, branches = planned.jobs[:3], planned.jobs[3:]
    assert [(t.kind, t.steps, t.tokens) for t in trunks] == [
        ("trunk", 7, 7 * STEP),
        ("trunk", 14, 7 * STEP),
        ("trunk", 28, 14 * STEP),
    ]
    assert [t.after for t in trunks] == [(), (trunks[0].id,), (trunks[1].id,)]
    assert [(b.kind, b.after, b.tokens) for b in branches] == [
        ("train", (trunks[0].id,), 3 * STEP),
        ("train", (trunks[1].id,), 6 * STEP),
        ("train", (trunks[2].id,), 12 * STEP),
    ]
    totals = planned.totals()
    assert (totals["tokens"], totals["tokens_if_separate"]) == (49 * STEP, 70 * STEP)


def test_six_budgets_cost_less_than_half(tmp_path: Path) -> None:
    budgets = ("100N", "200N", "400N", "600N", "800N", "1000N")
    study = grid(budgets, recipe={"decay_fraction": 0.1}, evaluations=Evaluations())
    totals = made(study, tmp_path).totals()
    assert totals["tokens_if_separate"] / totals["tokens"] == pytest.approx(3100 / (900 + 310), rel=1e-3)
    assert totals["tokens_if_separate"] / totals["tokens"] > 2.2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": {"decay_fraction": 1.0}}, "decays from the first step"),
        ({"machine": Machine(share_trunks=False)}, "machine.share_trunks is off"),
        ({"budgets": (10 * STEP,)}, None),
    ],
)
def test_what_cannot_be_shared_is_trained_by_itself(
    tmp_path: Path, changes: dict[str, Any], reason: str | None
) -> None:
    planned = made(grid(**changes), tmp_path)
    assert {job.kind for job in planned.jobs} == {"train"} and not any(job.after for job in planned.jobs)
    assert planned.separate is None if reason is None else reason in str(planned.separate)


def test_sharing_changes_no_identity(tmp_path: Path) -> None:
    shared, separate = (cells.expand(grid(machine=Machine(share_trunks=share))) for share in (True, False))
    assert [cell.id for cell in shared] == [cell.id for cell in separate]


def test_a_later_budget_goes_on_from_the_trunk_that_is_there(tmp_path: Path) -> None:
    before = made(grid(), tmp_path)
    for planned in before.jobs:
        with closing(RecordWriter(tmp_path / "jobs" / planned.id / "record.jsonl", STEP)) as record:
            record.measured(1, "heldout", {}, identity.of_measure(HeldOutLoss()))
    known = {planned.id: Known("finished", 1.0, planned.tokens, True) for planned in before.jobs}
    (longer,) = made(grid((10 * STEP, 20 * STEP, 40 * STEP, 80 * STEP)), tmp_path, known).jobs
    assert (longer.after, longer.tokens) == ((before.jobs[2].id,), (80 - 28) * STEP)
    (between,) = made(grid((10 * STEP, 20 * STEP, 30 * STEP, 40 * STEP)), tmp_path, known).jobs
    assert (between.after, between.tokens) == ((before.jobs[1].id,), (30 - 14) * STEP)

    shutil.rmtree(tmp_path / "jobs" / before.jobs[2].id)
    (longer,) = made(grid((10 * STEP, 20 * STEP, 40 * STEP, 80 * STEP)), tmp_path, known).jobs
    assert longer.after == (before.jobs[1].id,)


def test_a_cell_that_has_begun_goes_on_by_itself(tmp_path: Path) -> None:
    study = grid()
    begun = made(study, tmp_path).jobs[4]
    planned = made(study, tmp_path, {begun.id: Known("pending", 1.0, begun.tokens, True)})
    assert next(job for job in planned.jobs if job.id == begun.id).after == ()
    assert [job.steps for job in planned.jobs if job.kind == "trunk"] == [7, 28]


@pytest.fixture(scope="module")
def one_worker() -> Iterator[None]:
    start_process_group(rank=0, world=1, port=0)
    yield
    end_process_group()


def train(planned: Plan, kinds: tuple[str, ...] = ("trunk", "train")) -> None:
    for each in planned.jobs:
        if each.kind in kinds:
            assert job.run(planned.task(each), 0, lambda: False).state == "finished"


def measured(folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """What a record says of each source and step, speed left out."""
    lines = [line for line in read(folder / "record.jsonl") if "metrics" in line]
    assert len({(line["source"], line["step"]) for line in lines}) == len(lines)
    return {
        (line["source"], line["step"]): {k: v for k, v in line["metrics"].items() if "per_second" not in k}
        for line in lines
    }


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_each_branch_equals_a_training_of_its_own(tmp_path: Path, one_worker: None, optimizer: str) -> None:
    recipe = {"optimizer": optimizer, "learning_rate": 0.02 if optimizer == "muon" else 3e-3}
    shared = made(grid(recipe=recipe), tmp_path / "shared")
    separate = made(grid(recipe=recipe, machine=Machine(log_every=1, share_trunks=False)), tmp_path / "separate")
    train(shared)
    train(separate)
    for cell in shared.cells:
        ours, theirs = shared.folder / "jobs" / cell.id, separate.folder / "jobs" / cell.id
        own = measured(theirs)
        assert {key: value for key, value in measured(ours).items() if key in own} == own
        for kept in sorted((theirs / "checkpoints").iterdir()):
            stored = [job / "checkpoints" / kept.name / "weights.safetensors" for job in (ours, theirs)]
            one, other = (safetensors.torch.load_file(path) for path in stored)
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)
        events = [line["cause"] for line in read(ours / "record.jsonl") if line.get("event") == "started"]
        assert len(events) == 1 and events[0].startswith("branched off trunk")


def test_a_branch_killed_while_it_takes_over_takes_over_again(tmp_path: Path, one_worker: None) -> None:
    planned = made(grid(), tmp_path)
    train(planned, ("trunk",))
    branch = planned.jobs[3]
    folder = tmp_path / "jobs" / branch.id
    (folder / ".adopting" / "step-00000007").mkdir(parents=True)
    (folder / "record.adopting").write_text('{"half a li')
    assert job.run(planned.task(branch), 0, lambda: False).state == "finished"
    assert sorted(step for source, step in measured(folder) if source == "train") == list(range(1, 11))
    assert not (folder / ".adopting").exists() and not (folder / "record.adopting").exists()


def test_a_branch_of_a_damaged_trunk_says_so(tmp_path: Path, one_worker: None) -> None:
    planned = made(grid(), tmp_path)
    train(planned, ("trunk",))
    trunk = tmp_path / "jobs" / planned.jobs[0].id / "checkpoints" / "step-00000007"
    (trunk / "COMMITTED").unlink()
    with pytest.raises(NoWholeCheckpoint, match=r"trunk is not whole \(marker missing"):
        job.run(planned.task(planned.jobs[3]), 0, lambda: False)
    assert not (tmp_path / "jobs" / planned.jobs[3].id / "checkpoints").exists()


def test_a_branch_links_what_the_trunk_holds(tmp_path: Path, one_worker: None) -> None:
    planned = made(grid(), tmp_path)
    train(planned)
    kept = [
        tmp_path / "jobs" / planned.jobs[i].id / "checkpoints" / "step-00000002" / "weights.safetensors" for i in (0, 3)
    ]
    assert kept[0].stat().st_ino == kept[1].stat().st_ino
