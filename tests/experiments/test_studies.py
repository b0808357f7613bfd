"""The studies that ship: they load, and their grids are what their files say."""

from pathlib import Path

import pytest

from model.cost import layer_residual
from orchestrator.cells import expand
from orchestrator.study import load

STUDIES = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize(
    ("name", "cells"), [("quickstart", 5 * 2), ("window_laziness", 2 * 3 * 2 * 5), ("seven_arms", 7 * 2)]
)
def test_recall_studies(name: str, cells: int) -> None:
    study = load(STUDIES / f"{name}.py")
    grid = expand(study)
    assert (study.name, len(grid)) == (name, cells)
    assert {cell.budget_tokens for cell in grid} == {900 * 2048}
    assert all(cell.params == pytest.approx(143_000, rel=0.01) for cell in grid)
    assert study.question is not None and study.question.capability == "recall/accuracy/beyond-128"
    assert any("Key shift" in note for note in study.notes)
    # No window reaches as far as the question asks.
    assert all(layer.window is None or layer.window <= 128 for cell in grid for layer in cell.model.layers)


def test_seven_arms_have_equal_layers() -> None:
    grid = expand(load(STUDIES / "seven_arms.py"))
    mixers = ["full", "swa", "swa", "swa", "lightning", "mamba2", "gdn"]
    assert len({cell.seed for cell in grid}) == 2
    assert [cell.model.layers[0].mixer for cell in grid] == 2 * mixers
    assert all([layer.mixer for layer in cell.model.layers[1::2]] == ["full", "full"] for cell in grid)
    assert all(abs(layer_residual(cell.model)) < 0.01 for cell in grid)


def test_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    study = load(STUDIES / "own_text.py")
    assert [cell.arm for cell in expand(study)] == ["full", "swa-64"] * 2
