"""The training job: same losses however it is cut, split or interrupted; divergence is seen and named."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_gang import HeldOutLoss, gang, tiny_task

from model.lm import LanguageModel, build
from orchestrator.errors import InputError
from orchestrator.record import read
from orchestrator.training import checkpoint, job
from orchestrator.training.checkpoint import committed
from orchestrator.training.engine import end_process_group, start_process_group
from orchestrator.training.task import Outcome, Task


@pytest.fixture(scope="module", autouse=True)
def one_worker() -> Iterator[None]:
    start_process_group(rank=0, world=1, port=0)
    yield
    end_process_group()


def run(task: Task, stop_after: int | None = None) -> Outcome:
    """Runs alone; asks to stop after that many steps of this attempt."""
    asked = iter(range(1, 10**6))
    return job.run(task, 0, lambda: stop_after is not None and next(asked) >= stop_after)


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["metrics"]["train/loss"] for line in read(folder / "record.jsonl") if _is(line, "train")}


def events(folder: Path) -> list[tuple[str, str | None]]:
    return [(line["event"], line["cause"]) for line in read(folder / "record.jsonl") if "event" in line]


def _is(line: dict[str, Any], source: str) -> bool:
    return line.get("source") == source


def assert_each_once_and_rising(folder: Path) -> None:
    seen: dict[Any, list[int]] = {}
    for line in read(folder / "record.jsonl"):
        if "metrics" in line:
            seen.setdefault((line["source"], line.get("measurement")), []).append(line["tokens"])
    assert all(tokens == sorted(set(tokens)) for tokens in seen.values()), seen


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("unbroken")
    run(tiny_task(folder))
    return losses(folder)


def test_a_job_trains_measures_and_commits(tmp_path: Path) -> None:
    told: list[int] = []
    outcome = job.run(
        tiny_task(tmp_path, steps=60, evaluate_at=(20, 60), checkpoint_at=(6, 60), log_every=25),
        0,
        lambda: False,
        told.append,
    )
    assert (outcome.state, outcome.cause, outcome.tokens) == ("finished", None, 60 * 4 * 32)
    assert outcome.busy_s == pytest.approx(outcome.train_s + outcome.measure_s)
    assert sorted(set(told)) == [128 * step for step in range(61)]
    assert told == sorted(told)
    lines = read(tmp_path / "record.jsonl")
    assert [line["step"] for line in lines if _is(line, "train")] == [25, 50, 60]
    assert [line.get("kernels") for line in lines if "event" in line] == [{"swa-8": "blocks", "full": "causal"}, None]
    assert [line["step"] for line in lines if _is(line, "validation")] == [6, 20, 60]
    assert {line["measurement"] for line in lines if _is(line, "validation")} == {"heldout-1"}
    assert [found.step for found in committed(tmp_path / "checkpoints")] == [6, 60]
    assert losses(tmp_path)[60] < 2.0  # from ln 32 = 3.47
    assert events(tmp_path) == [("started", None), ("finished", None)]
    assert (tmp_path / "record.parquet").exists()


def test_run_again_a_finished_job_does_nothing(tmp_path: Path) -> None:
    run(tiny_task(tmp_path))
    before = (tmp_path / "record.jsonl").read_bytes()
    outcome = run(tiny_task(tmp_path))
    assert (outcome.state, outcome.busy_s) == ("finished", 0.0)
    assert (tmp_path / "record.jsonl").read_bytes() == before


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_stopped_anywhere_it_goes_on_bit_for_bit(tmp_path: Path, stage: int, optimizer: str) -> None:
    whole = tiny_task(tmp_path / "whole", zero_stage=stage, recipe={"optimizer": optimizer})
    cut = tiny_task(tmp_path / "cut", zero_stage=stage, recipe={"optimizer": optimizer})
    run(whole)
    states = [run(cut, stop_after=5).state, run(cut, stop_after=2).state, run(cut).state]
    assert states == ["stopped", "stopped", "finished"]
    assert losses(cut.folder) == losses(whole.folder)
    assert_each_once_and_rising(cut.folder)
    assert [found.step for found in committed(cut.folder / "checkpoints")] == [6, 12]
    assert [event for event, _ in events(cut.folder)] == [
        "started", "stopped", "resumed", "stopped", "resumed", "finished",
    ]  # fmt: skip


def test_killed_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Killed while it trains, wherever that is: steps are many so that the kill falls between two checkpoints."""
    long = {"steps": 160, "evaluate_at": (30, 120), "checkpoint_at": (20, 80, 160)}
    whole, cut = tiny_task(tmp_path / "whole", **long), tiny_task(tmp_path / "cut", **long)
    (process,) = gang([{"folder": str(cut.folder), **long}], 1)
    while not (cut.folder / "checkpoints" / "step-00000020").exists():
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.1)
    process.kill()
    process.communicate()
    run(whole)
    assert 20 <= max(losses(cut.folder)) < 160
    run(cut)
    assert losses(cut.folder) == losses(whole.folder)
    assert_each_once_and_rising(cut.folder)


def test_a_damaged_newest_checkpoint_is_said_and_passed_over(tmp_path: Path, unbroken: dict[int, float]) -> None:
    run(tiny_task(tmp_path), stop_after=8)
    (tmp_path / "checkpoints" / "step-00000008" / "COMMITTED").unlink()
    run(tiny_task(tmp_path))
    assert events(tmp_path)[2] == ("resumed", "resumed at step 6; step-00000008 skipped: marker missing")
    assert losses(tmp_path) == unbroken
    assert_each_once_and_rising(tmp_path)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_micro_batches_change_no_loss(tmp_path: Path, stage: int, unbroken: dict[int, float]) -> None:
    run(tiny_task(tmp_path, micro_batch=1, zero_stage=stage))
    ours = losses(tmp_path)
    assert ours[1] == pytest.approx(unbroken[1], abs=1e-6)
    assert ours == pytest.approx(unbroken, abs=2e-3)  # bfloat16 Newton-Schulz magnifies float32 rounding


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_rate_of_a_million_diverges(tmp_path: Path, stage: int, optimizer: str) -> None:
    recipe = {"learning_rate": 1e6, "optimizer": optimizer}
    outcome = run(tiny_task(tmp_path, zero_stage=stage, recipe=recipe))
    assert (outcome.state, outcome.cause) == ("diverged", "a weight beyond 10000 at step 1 (learning rate 1e+06)")
    assert events(tmp_path)[-1] == ("diverged", outcome.cause)
    assert not committed(tmp_path / "checkpoints")


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("name", ["blocks.0.mixer.query.weight", "head.weight"])
def test_a_nan_gradient_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, optimizer: str, name: str
) -> None:
    calls = iter(range(1, 100))

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (float("nan") if next(calls) == 8 else 1.0)

    def poisoned(*arguments: Any) -> LanguageModel:
        model = build(*arguments)
        model.get_parameter(name).register_hook(poison)
        return model

    monkeypatch.setattr(job, "build", poisoned)
    outcome = run(tiny_task(tmp_path, zero_stage=stage, recipe={"optimizer": optimizer}))
    assert outcome.state == "diverged"
    assert outcome.cause and "non-finite" in outcome.cause and "at step 8 " in outcome.cause
    assert outcome.tokens == 8 * 128
    assert [found.step for found in committed(tmp_path / "checkpoints")] == [6]


def test_a_nan_loss_diverges_and_is_written_as_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective, calls = LanguageModel.objective, iter(range(1, 100))

    def poisoned(self: LanguageModel, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        minimised, cross_entropy = objective(self, *arguments)
        return minimised, cross_entropy + (float("inf") if self.training and next(calls) == 3 else 0.0)

    monkeypatch.setattr(LanguageModel, "objective", poisoned)
    outcome = run(tiny_task(tmp_path))
    assert outcome.cause == "non-finite loss at step 3 (learning rate 0.02)"
    assert losses(tmp_path)[3] is None


def test_new_measures_run_on_stored_checkpoints(tmp_path: Path) -> None:
    run(tiny_task(tmp_path))
    known = [line for line in read(tmp_path / "record.jsonl") if _is(line, "validation") and line["step"] in (6, 12)]
    measures = (("heldout-1", HeldOutLoss()), ("heldout-2", HeldOutLoss("again")))
    outcome = run(tiny_task(tmp_path, kind="measure", measures=measures))
    assert (outcome.state, outcome.tokens, outcome.train_s) == ("finished", 12 * 128, 0.0)
    new = [line for line in read(tmp_path / "record.jsonl") if _is(line, "again")]
    assert [line["step"] for line in new] == [6, 12]
    assert [line["metrics"]["again/loss"] for line in new] == [line["metrics"]["validation/loss"] for line in known]
    assert_each_once_and_rising(tmp_path)
    stopped = run(tiny_task(tmp_path, kind="measure", measures=(("heldout-3", HeldOutLoss("half")),)), stop_after=2)
    assert stopped.state == "stopped"
    assert not any(_is(line, "half") for line in read(tmp_path / "record.jsonl")), "a measure is stored whole"
    with pytest.raises(InputError, match="no whole checkpoint to measure"):
        run(tiny_task(tmp_path / "empty", kind="measure"))


def test_work_is_saved_between_checkpoints_and_the_save_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SAVE_EVERY_S", 0.0)
    run(tiny_task(tmp_path), stop_after=9)
    assert [found.step for found in committed(tmp_path / "checkpoints")] == [6, 9]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"micro_batch": 3}, "micro_batch: 3 does not divide a worker's 4 sequences"),
        ({"zero_stage": 3}, "zero_stage: 3 is not built"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(tiny_task(tmp_path, **changes))


def test_bfloat16_trains_close_to_float32(tmp_path: Path, unbroken: dict[int, float]) -> None:
    run(tiny_task(tmp_path, recipe={"precision": "bfloat16"}))
    ours = losses(tmp_path)
    assert ours != unbroken
    assert ours == pytest.approx(unbroken, abs=0.05)


@pytest.mark.parametrize("changes", [{}, {"zero_stage": 2, "micro_batch": 2}, {"recipe": {"precision": "bfloat16"}}])
def test_layers_run_again_give_the_same_losses(tmp_path: Path, changes: dict[str, Any]) -> None:
    told = {}
    for recompute in (False, True):
        folder = tmp_path / str(recompute)
        run(tiny_task(folder, recompute=recompute, **changes))
        told[recompute] = losses(folder)
    assert told[True] == told[False]


def test_a_z_loss_is_trained_on_and_not_recorded(tmp_path: Path, unbroken: dict[int, float]) -> None:
    run(tiny_task(tmp_path, recipe={"z_loss": 1.0}))
    ours = losses(tmp_path)
    assert ours[1] == unbroken[1], "the first loss is before any step"
    assert ours[12] != pytest.approx(unbroken[12], abs=1e-4)
    partition = {}
    for z_loss in (0.0, 1.0):
        model = build(tiny_task(tmp_path).model, 0)
        folder = tmp_path if z_loss else tmp_path / "without"
        if not z_loss:
            run(tiny_task(folder))
        checkpoint.load_weights(committed(folder / "checkpoints")[-1], model)
        partition[z_loss] = model(torch.arange(32)[None]).logsumexp(-1).square().mean().item()
    assert partition[1.0] < 0.8 * partition[0.0]


def test_data_that_changed_since_the_plan_is_not_trained_on(tmp_path: Path) -> None:
    task = tiny_task(tmp_path)
    was = {**task.data_identity, "text": "0a1b"}
    with pytest.raises(InputError, match=r'data: no longer .* \(text: "0a1b" -> null\); restore it, or run the study'):
        run(replace(task, data_identity=was))
    assert not list(tmp_path.iterdir())
