import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from analysis.arm_emergence import ONE_SEED
from analysis.findings import as_json, fit_study

from .conftest import FakeArm, Write

CONTRACT = Path(__file__).parents[3] / "shared" / "check_contract.py"


def rows(document: dict[str, Any], table: str, arm: str) -> dict[str, Any]:
    return next(row for row in document[table] if row["arm"] == arm)


def test_t50s_are_recovered_and_stuck_seeds_counted(write_study: Write) -> None:
    document = as_json(fit_study(write_study(noise=0.005), "laziness"))
    full = rows(document, "emergence", "full")
    assert full["t50_tokens"] == pytest.approx((0.80 * 0.83 * 0.68) ** (1 / 3) * 1e6, rel=0.02)
    assert full["t50_ci"][0] < full["t50_tokens"] < full["t50_ci"][1]
    assert full["ceiling"] == pytest.approx(0.87, abs=0.02) and full["floor"] == 1 / 32
    stuck = rows(document, "emergence", "swa-128")
    assert (stuck["seeds"], stuck["censored"], stuck["share_emerged"]) == (3, 1, pytest.approx(2 / 3))
    assert stuck["share_ci"] == pytest.approx([0.0943, 0.9916], abs=1e-4)
    assert "never emerged: 1 of 3 seeds" in stuck["flags"]
    assert [seed["emerged"] for seed in stuck["by_seed"]] == [False, True, True]


def test_a_stuck_seed_counts_as_censored(write_study: Write) -> None:
    document = as_json(fit_study(write_study(noise=0.005), "laziness"))
    ratio = rows(document, "speed_ratios", "swa-128")
    assert ratio["method"] == "censored lognormal"
    assert ratio["emerged_only"] == pytest.approx(1.45, rel=0.03)
    # Late, at the earliest where it was last seen: later than the seeds that emerged make it alone.
    assert ratio["ratio"] > (1.05 * 1.19 * 1.84) ** (1 / 3) / (0.80 * 0.83 * 0.68) ** (1 / 3)
    assert ratio["ci"][0] < ratio["ratio"] < ratio["ci"][1]
    assert ratio["p"] < ratio["p_holm"] < 1
    assert ratio["flags"] == ["swa-128: 1 of 3 seeds never emerged, counted as censored"]
    assert rows(document, "speed_ratios", "swa-8")["method"] == "welch"
    ceiling = rows(document, "same_ceiling", "swa-128")
    assert ceiling["flags"] == ["swa-128: over the 2 seeds that emerged"]


def test_unfinished_cells_are_counted_and_not_fitted(write_study: Write) -> None:
    document = as_json(fit_study(write_study(), "laziness"))
    assert document["counts"] == {"diverged": 1, "failed": 1, "finished": 12, "running": 1}
    assert {cell["state"] for cell in document["left_out"]} == {"diverged", "failed", "running"}
    assert rows(document, "emergence", "swa-8-nope")["seeds"] == 2


def test_a_real_difference_survives_holm(write_study: Write) -> None:
    slow = FakeArm("slow", (1.20, 1.22, 1.19, 1.23), 0.9)
    same = FakeArm("same", (0.60, 0.62, 0.59, 0.61), 0.9)
    document = as_json(fit_study(write_study((FakeArm("full", (0.61, 0.60, 0.62, 0.59), 0.9), slow, same)), "laziness"))
    ratio = rows(document, "speed_ratios", "slow")
    assert ratio["ratio"] == pytest.approx(2.0, rel=0.05) and ratio["ci"][0] > 1.5
    assert ratio["p"] < ratio["p_holm"] < 0.001
    assert rows(document, "speed_ratios", "same")["p_holm"] > 0.05
    assert rows(document, "same_ceiling", "same")["equivalent"] is True


def test_one_seed_has_no_interval_and_says_so(write_study: Write) -> None:
    arms = (FakeArm("full", (0.8,)), FakeArm("swa-8", (0.6,)))
    document = as_json(fit_study(write_study(arms), "laziness"))
    ratio = rows(document, "speed_ratios", "swa-8")
    assert ratio["ratio"] == pytest.approx(0.75, rel=0.1) and ratio["ci"] is ratio["p"] is None
    assert ONE_SEED in ratio["flags"] and ONE_SEED in rows(document, "emergence", "full")["flags"]


def test_where_a_curve_that_rises_again_ends_is_not_known(write_study: Write) -> None:
    arms = (FakeArm("full", (0.6, 0.62, 0.58), 0.98), FakeArm("swa-8", (0.6, 0.63, 0.57), 0.75, second_rise=0.2))
    document = as_json(fit_study(write_study(arms), "laziness"))
    assert rows(document, "emergence", "swa-8")["flags"] == ["ends above its fitted ceiling: 3 of 3 seeds"]
    ceiling = rows(document, "same_ceiling", "swa-8")
    assert ceiling["difference"] is ceiling["equivalent"] is None
    assert ceiling["flags"] == ["swa-8: 3 of 3 emerged seeds end above their fitted ceiling"]
    assert rows(document, "speed_ratios", "swa-8")["ratio"] == pytest.approx(1.0, rel=0.15)


def test_an_arm_wholly_stuck_is_bounded_from_below(write_study: Write) -> None:
    arms = (FakeArm("full", (0.8, 0.7)), FakeArm("swa-128", (None, None)))
    document = as_json(fit_study(write_study(arms), "laziness"))
    assert rows(document, "emergence", "swa-128")["t50_tokens"] is None
    ratio = rows(document, "speed_ratios", "swa-128")
    assert ratio["ratio"] is ratio["emerged_only"] is None
    assert ratio["at_least"] == pytest.approx(1.8432 / (0.8 * 0.7) ** 0.5, rel=0.03)
    assert 1 < ratio["ci"][0] < ratio["at_least"] and ratio["ci"][1] is None and ratio["p"] < 0.05
    assert rows(document, "same_ceiling", "swa-128")["difference"] is None


def test_a_reference_wholly_stuck_bounds_from_above(write_study: Write) -> None:
    arms = (FakeArm("full", (None, None)), FakeArm("swa-8", (0.8, 0.7)))
    ratio = rows(as_json(fit_study(write_study(arms), "laziness")), "speed_ratios", "swa-8")
    assert ratio["ratio"] is ratio["at_least"] is None
    assert ratio["at_most"] == pytest.approx((0.8 * 0.7) ** 0.5 / 1.8432, rel=0.03)
    assert ratio["ci"][0] == 0 and ratio["at_most"] < ratio["ci"][1] < 1


def test_an_emerged_seed_without_a_t50_counts_by_its_bracket(write_study: Write) -> None:
    arms = (FakeArm("full", (0.62, 0.60, 0.66)), FakeArm("late", (1.75, 1.10, 1.20)))  # 1.75M: no plateau by 1.84M
    ratio = rows(as_json(fit_study(write_study(arms, noise=0.005), "laziness")), "speed_ratios", "late")
    assert ratio["method"] == "censored lognormal"
    assert ratio["flags"] == ["late: 1 of 3 emerged seeds without a T50, counted by bracket"]
    assert ratio["ratio"] == pytest.approx((1.75 * 1.1 * 1.2) ** (1 / 3) / (0.62 * 0.60 * 0.66) ** (1 / 3), rel=0.05)


def test_data_conditions_are_compared_apart(write_study: Write) -> None:
    arms = (FakeArm("full", (0.8, 0.7)), FakeArm("swa-8", (0.6, 0.62)))
    document = as_json(fit_study(write_study(arms, data=("near", "far")), "laziness"))
    assert [(row["data"], row["arm"]) for row in document["speed_ratios"]] == [("near", "swa-8"), ("far", "swa-8")]
    assert len(document["emergence"]) == 4


def test_nothing_finished_is_no_error(write_study: Write) -> None:
    arms = (FakeArm("full", (0.8,), states=("pending",)), FakeArm("swa-8", (0.6,), states=("running",)))
    document = as_json(fit_study(write_study(arms), "laziness"))
    assert [row["flags"] for row in document["emergence"]] == [["no finished seed"]] * 2
    assert document["speed_ratios"][0]["ratio"] is None


def test_the_json_is_what_design_promises(write_study: Write) -> None:
    if not CONTRACT.exists():
        pytest.skip("no ../shared/check_contract.py beside this checkout")
    spec = importlib.util.spec_from_file_location("check_contract", CONTRACT)
    assert spec and spec.loader
    contract = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contract)
    for arms in ((FakeArm("full", (0.8,)), FakeArm("swa-128", (None,))), None):
        root = write_study(arms, name="bare") if arms else write_study()
        document = as_json(fit_study(root, "bare" if arms else "laziness"))
        text = json.dumps(document, allow_nan=False)
        assert contract.departures(contract.SHAPES["fit"], json.loads(text)) == []


def test_a_study_without_a_question_has_no_emergence(write_study: Write) -> None:
    root = write_study((FakeArm("full", (0.8,)),))
    study = root / "laziness" / "study.json"
    study.write_text(json.dumps(json.loads(study.read_text()) | {"question": None}), encoding="utf-8")
    document = as_json(fit_study(root, "laziness"))
    assert document["emergence"] == document["speed_ratios"] == [] and document["counts"] == {"finished": 1}
