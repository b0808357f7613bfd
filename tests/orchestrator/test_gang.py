"""Gangs of two: the weights, losses and checkpoints of one worker, in processes that train one job after another."""

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_gang import MODEL, gang, outcomes, tiny_task

from model.lm import build
from orchestrator.errors import InputError
from orchestrator.recipe import Recipe
from orchestrator.record import read
from orchestrator.training import job, shares
from orchestrator.training.checkpoint import committed, load_optimizer_state, load_weights
from orchestrator.training.engine import Engine, PortTaken, end_process_group, start_process_group

STEPPED = [(stage, workers) for stage in (0, 1, 2) for workers in (1, 2)]
ONE_STEP = {"steps": 1, "evaluate_at": (), "checkpoint_at": (1,), "recipe": {"warmup_steps": 0, "decay_fraction": 0}}
HALF: dict[str, Any] = {"workers": 2, "steps": 6, "checkpoint_at": (6,), "recipe": {"decay_fraction": 0}}
# Of a loss: gradients of two workers add up in another order, and Muon orthogonalises in bfloat16.
TOLERANCE = {"muon": 2e-3, "adamw": 1e-5}
SHARDED = [(optimizer, stage) for optimizer in ("muon", "adamw") for stage in (1, 2)]


def sharded(optimizer: str, stage: int, workers: int, steps: int) -> dict[str, Any]:
    """Changes for a job whose optimizer state is kept in shares, at a rate that does not depend on its length."""
    rate = 0.02 if optimizer == "muon" else 3e-3
    recipe = {"decay_fraction": 0, "optimizer": optimizer, "learning_rate": rate}
    return {"zero_stage": stage, "workers": workers, "steps": steps, "checkpoint_at": (6, steps), "recipe": recipe}


@pytest.fixture(autouse=True)
def one_worker() -> Iterator[None]:
    start_process_group(rank=0, world=1, port=0)
    yield
    end_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """One gang of two warm processes runs all these jobs, of one and of two workers in turn."""
    root = tmp_path_factory.mktemp("gang")
    changes: dict[str, dict[str, Any]] = {
        **{f"{stage}-{workers}": {"zero_stage": stage, "workers": workers, **ONE_STEP} for stage, workers in STEPPED},
        "whole": {"workers": 2},
        "replicated": HALF,
        "shared": {"zero_stage": 1, **HALF},
        **{f"{o}-{s}-unbroken": sharded(o, s, 1, 12) for o, s in SHARDED},
        **{f"{o}-{s}-from-{w}": sharded(o, s, w, 6) for o, s in SHARDED for w in (1, 2)},
        **{f"{o}-{s}-from-{w} on": sharded(o, s, 3 - w, 12) for o, s in SHARDED for w in (1, 2)},
        "diverging": {"workers": 2, "recipe": {"learning_rate": 1e6}},
        "uneven": {"workers": 2, "recipe": {"batch_size": 3}},
    }
    first = [(name, change) for name, change in changes.items() if not name.endswith(" on")]
    jobs = [{"folder": str(root / name), **change} for name, change in first]
    ended = dict(zip([name for name, _ in first], outcomes(gang(jobs, 2)), strict=True))
    for name in (name for name in changes if "-from-" in name and not name.endswith(" on")):
        shutil.copytree(root / name, root / f"{name} on")
    jobs = [{"folder": str(root / name), **changes[name]} for name in changes if name.endswith(" on")]
    return root, ended | dict(zip([n for n in changes if n.endswith(" on")], outcomes(gang(jobs, 2)), strict=True))


def losses(folder: Path) -> dict[int, float]:
    lines = read(folder / "record.jsonl")
    return {line["step"]: line["metrics"]["train/loss"] for line in lines if line.get("source") == "train"}


@pytest.mark.parametrize(("stage", "workers"), STEPPED)
def test_one_step_is_that_of_one_worker_at_stage_0(
    trained: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path, stage: int, workers: int
) -> None:
    """test_optimizers holds the step of one worker at stage 0 to PyTorch's own."""
    start, wanted, model = build(MODEL, 0), build(MODEL, 0), build(MODEL, 1)
    task = tiny_task(tmp_path, **ONE_STEP)
    engine = Engine(wanted, task.recipe)
    engine.step(task.data.batch(task.seed, 0, engine.rows), 1.0)
    engine.close()
    load_weights(committed(trained[0] / f"{stage}-{workers}" / "checkpoints")[0], model)
    for (name, ours), theirs, first in zip(
        model.named_parameters(), wanted.parameters(), start.parameters(), strict=True
    ):
        assert (ours - theirs).norm() <= 0.06 * (theirs - first).norm() + 1e-7, name


def test_two_workers_change_no_loss(trained: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path) -> None:
    job.run(tiny_task(tmp_path), 0, lambda: False)
    assert trained[1]["whole"]["state"] == "finished"
    assert losses(trained[0] / "whole") == pytest.approx(losses(tmp_path), abs=2e-3)
    steps = [line["step"] for line in read(trained[0] / "whole" / "record.jsonl") if line.get("source") == "validation"]
    assert steps == [4, 6, 8, 12], "rank 0 measures, and nobody else"


def test_one_worker_goes_on_from_two_or_refuses_another_stage(trained: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    root, ended = trained
    assert [ended[name]["state"] for name in ("replicated", "shared")] == ["finished", "finished"]
    outcome = job.run(tiny_task(root / "replicated", recipe={"decay_fraction": 0}), 0, lambda: False)
    assert (outcome.state, outcome.tokens) == ("finished", 12 * 128)
    with pytest.raises(InputError, match=r"machine\.zero_stage: 0, but .* saved at stage 1"):
        job.run(tiny_task(root / "shared"), 0, lambda: False)
    assert max(losses(root / "shared")) == 6, "refused before training"


@pytest.mark.parametrize(("optimizer", "stage"), SHARDED)
@pytest.mark.parametrize("before", [1, 2])
def test_shares_are_cut_anew_for_other_workers(
    trained: tuple[Path, dict[str, dict[str, Any]]], optimizer: str, stage: int, before: int
) -> None:
    root, ended = trained
    name = f"{optimizer}-{stage}-from-{before}"
    assert ended[f"{name} on"].get("state") == "finished", ended[f"{name} on"]
    unbroken, ours = losses(root / f"{optimizer}-{stage}-unbroken"), losses(root / f"{name} on")
    print(name, max(abs(ours[step] - unbroken[step]) for step in unbroken))
    assert ours == pytest.approx(unbroken, abs=TOLERANCE[optimizer])


@pytest.mark.parametrize(("optimizer", "stage"), SHARDED)
def test_shares_of_two_join_to_what_one_worker_has(
    trained: tuple[Path, dict[str, dict[str, Any]]], optimizer: str, stage: int
) -> None:
    recipe = Recipe(learning_rate=0.02, batch_size=4, optimizer=optimizer)  # type: ignore[arg-type]
    engine = Engine(build(MODEL, 0), recipe, zero_stage=stage)
    sizes = engine.group_sizes
    engine.close()
    one, two = (
        [load_optimizer_state(committed(trained[0] / f"{optimizer}-{stage}-from-{w}" / "checkpoints")[0], rank)
         for rank in range(w)] for w in (1, 2)
    )  # fmt: skip
    joined, back = shares.reshare(two, sizes, 0, 1), [shares.reshare(one, sizes, rank, 2) for rank in (0, 1)]
    for got, wanted in ((joined, one[0]), *zip(back, two, strict=True)):
        got, wanted = (state["parts"][0] if "parts" in state else state for state in (got, wanted))
        for group in (0, 1):
            assert got["state"][group].keys() == wanted["state"][group].keys()
            for key, value in wanted["state"][group].items():
                ours, theirs = (torch.as_tensor(x).float() for x in (got["state"][group][key], value))
                assert ours.shape == theirs.shape, key
                assert (ours - theirs).norm() <= 0.05 * theirs.norm(), key
    exact = [shares.reshare([joined], sizes, rank, 2) for rank in (0, 1)]
    for got, wanted in zip(exact, two, strict=True):
        got, wanted = (state["parts"][0] if "parts" in state else state for state in (got, wanted))
        assert all(torch.equal(torch.as_tensor(got["state"][g][k]), torch.as_tensor(v))
                   for g in (0, 1) for k, v in wanted["state"][g].items())  # fmt: skip


def test_both_ranks_see_what_rank_0_sees(trained: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """A rank that did not know would wait in the next collective, and the gang would never end."""
    _, ended = trained
    assert ended["diverging"]["cause"] == "a weight beyond 10000 at step 1 (learning rate 1e+06)"
    assert ended["uneven"]["error"].startswith("InputError: batch_size: 3 is not a multiple of 2 workers")


def test_a_taken_port_is_told_apart() -> None:
    end_process_group()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1: address already in use"):
            start_process_group(rank=0, world=2, port=port)
