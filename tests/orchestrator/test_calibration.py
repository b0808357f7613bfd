"""What is timed and what is left out; the command's test times a real study."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_study import Noise
from test_trunks import STEP, grid

from orchestrator import calibration, identity, plan, throughput
from orchestrator.errors import InputError
from orchestrator.study import PAPER_SIZES, Arm, Machine


def test_each_model_is_timed_once_whatever_its_budgets_and_seeds() -> None:
    study = grid(seeds=(0, 1), arms=(Arm(name="full", pattern="full"), Arm(name="swa", pattern="swa-8 full")))
    cells = plan.make(study, Path("none"), {}).cells
    assert len(cells) == 12
    assert [cell.arm for cell in calibration.distinct(study, cells)] == ["full", "swa"]


@pytest.mark.parametrize("change", [{"micro_batch": 2}, {"workers": 2}, {"zero_stage": 1}])
def test_how_steps_are_cut_is_part_of_a_speed(change: dict[str, int]) -> None:
    study, other = grid(), grid(machine=Machine(log_every=1, **change))  # type: ignore[arg-type]
    cell = plan.make(study, Path("none"), {}).cells[0]
    assert throughput.key(study, cell) != throughput.key(other, cell)
    assert throughput.key(study, cell) == throughput.key(grid(machine=Machine(log_every=7)), cell)


def test_what_would_take_minutes_is_not_timed() -> None:
    large = grid((10**6,), sizes=(PAPER_SIZES["S5"],))
    assert not calibration.too_large(grid(), plan.make(grid(), Path("none"), {}).cells[0], "cpu")
    paper = grid((10**6,), sizes=(PAPER_SIZES["S5"],), data={"long": Noise(context=16_384)})
    cell = plan.make(paper, Path("none"), {}).cells[0]
    assert calibration.too_large(paper, cell, "cpu") and not calibration.too_large(paper, cell, "cuda")
    assert calibration.too_large(large, plan.make(large, Path("none"), {}).cells[0], "cpu")


@pytest.mark.parametrize("beside", [1, 2])
def test_as_many_are_timed_together_as_run_at_once(tmp_path: Path, beside: int) -> None:
    study = grid((10 * STEP,), recipe={"batch_size": 4})
    cell = plan.make(study, Path("none"), {}).cells[0]
    speed = calibration.measure(study, cell, "cpu", "CPU x", tmp_path / "root", beside)
    assert speed.key == throughput.key(study, cell) and speed.beside == beside
    assert beside <= speed.steps <= beside * calibration.MOST_STEPS
    assert speed.tokens_per_second > 0 and speed.start_seconds > 0 and speed.commit_seconds > 0
    assert list(speed.measure_seconds) == [identity.of_measure(study.measures[0])]
    assert list((tmp_path / "root").iterdir()) == [], "checkpoints that were timed are gone"


@pytest.mark.timeout(120)
def test_processes_leave_alone_what_the_parent_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process group made before the fork cannot be destroyed after it: its threads are not there."""
    study = grid((10 * STEP,))
    cell = plan.make(study, Path("none"), {}).cells[0]
    draw = Noise.batch

    def collecting(*args: Any) -> Any:
        gc.collect()
        return draw(*args)

    gc.disable()
    try:
        calibration.measure(study, cell, "cpu", "CPU x", tmp_path)
        monkeypatch.setattr(Noise, "batch", collecting)
        assert calibration.measure(study, cell, "cpu", "CPU x", tmp_path, 2).beside == 2
    finally:
        gc.enable()


@pytest.mark.parametrize("beside", [1, 2])
def test_a_fault_in_a_step_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, beside: int) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such batch\nat all")

    study = grid((10 * STEP,))
    cell = plan.make(study, Path("none"), {}).cells[0]
    monkeypatch.setattr(Noise, "batch", fail)
    with pytest.raises(InputError, match=r"^--calibrate: full tiny: RuntimeError: no such batch$"):
        calibration.measure(study, cell, "cpu", "CPU x", tmp_path, beside)


def test_a_process_that_dies_is_no_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study = grid((10 * STEP,))
    cell = plan.make(study, Path("none"), {}).cells[0]
    monkeypatch.setattr(Noise, "batch", lambda *args: os._exit(9))
    with pytest.raises(
        InputError, match=r"^--calibrate: full tiny: a process ended with exit code 9; give fewer --cpus"
    ):
        calibration.measure(study, cell, "cpu", "CPU x", tmp_path, 2)
