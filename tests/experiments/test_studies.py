"""The studies that ship: they load, and their grids are what their files say."""

import re
import time
from pathlib import Path

import pytest

from model.cost import layer_residual
from orchestrator import plan
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


def test_tuned_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    study = load(STUDIES / "tuned_rates.py")
    rates = {(cell.arm, cell.size): cell.document["recipe"]["learning_rate"] for cell in expand(study)}
    assert len(rates) == 6
    assert all(("law_over" in rate) == (size == "d128") for (_, size), rate in rates.items())


def test_the_papers_scaling_study_has_its_grid(tmp_path: Path) -> None:
    study = load(STUDIES / "paper_scaling.py")
    grid = expand(study)
    assert len(grid) == 7 * 5 * 6
    # Published (S5 inferred); full attention has it exactly, the others within the residual of whole MLP columns.
    published = {"S1": 14_999_424, "S2": 31_470_080, "S3": 64_901_760, "S4": 104_427_264, "S5": 476_852_480}
    assert {cell.size: cell.non_embedding_params for cell in grid if cell.arm == "full"} == published
    assert all(abs(layer_residual(cell.model)) < 0.01 for cell in grid)
    times = {(cell.size, round(cell.budget_tokens / published[cell.size], 1)) for cell in grid if cell.arm == "full"}
    assert times == {(size, n) for size in published for n in (100, 200, 300, 400, 500, 1000)}
    assert {(cell.model.context, cell.document["recipe"]["optimizer"]) for cell in grid} == {(16_384, "muon")}


PAPER = {"paper_scaling": 210, "paper_mechanism": 4 * 5, "paper_design": 8 * 5}


@pytest.mark.parametrize("suffix", ["", "_laptop"])
@pytest.mark.parametrize("name", PAPER)
def test_the_papers_studies_plan_in_time(name: str, suffix: str, tmp_path: Path) -> None:
    began = time.process_time()
    study = load(STUDIES / f"{name}{suffix}.py")
    planned = plan.make(study, tmp_path / study.name, {})
    assert time.process_time() - began < 5
    assert (study.name, len(planned.cells)) == (name + suffix, PAPER[name])
    assert study.findings and study.notes and not list(tmp_path.iterdir())
    assert sum(finding.paper is not None for finding in study.findings) >= 2
    # Recall is asked beyond what every window sees.
    reach = max(layer.window or 0 for cell in planned.cells for layer in cell.model.layers)
    assert study.question is not None and study.question.capability == f"recall/accuracy/beyond-{reach}"
    # A twin has the same arms but for their windows, and work for an hour of two cores at 20,000 tokens/s each.
    if suffix:
        kinds = [
            [re.sub(r"\d+", "W", arm.pattern) for arm in each.arms] for each in (study, load(STUDIES / f"{name}.py"))
        ]
        assert kinds[0] == kinds[1]
        assert planned.totals()["tokens"] < 2 * 3600 * 20_000


def test_the_papers_mechanism_limits_what_it_names() -> None:
    study = load(STUDIES / "paper_mechanism_laptop.py")
    (limits,) = [measure for measure in study.measures if measure.name == "constrained"]
    known = limits.capabilities(next(iter(study.data.values())))
    asked = [f.statistic for f in study.findings if f.statistic.kind == "within"]
    assert {arm for each in asked for arm in each.arm} == {"swa-8", "swa-32", "swa-128"}
    assert all(each.metric in known and each.against_metric in known for each in asked)
