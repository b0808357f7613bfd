"""Claims judged by their rules: on studies whose truth is known, at the bounds, and where nothing is the case."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import claims, report
from analysis.arm_emergence import Condition
from analysis.claim_figures import FIGURES, Told, law_difference, of_contrast, of_pairs
from analysis.claims import judged
from analysis.findings import as_json, fit_study
from analysis.laws.censored import Bracket, shift
from analysis.laws.censored_trend import trend
from analysis.laws.intervals import Interval, contrast, welch
from orchestrator import finding
from orchestrator.finding import EndLevel, Finding, MetricRatio, SpeedRatio, Trend

from .conftest import FakeArm, FakeSize, Write

ARMS = (
    FakeArm("swa-8", (0.61, 0.60, 0.62, 0.59), 0.90),
    FakeArm("swa-32", (0.80, 0.82, 0.79, 0.81), 0.90),
    FakeArm("swa-128", (1.05, 1.06, 1.07, 1.04), 0.905),
    FakeArm("nope", (0.60, 0.62, 0.59, 0.615), 0.90),
)
WINDOWS = {"swa-8": 8, "swa-32": 32, "swa-128": 128}


def claimed(root: Path, *findings: Finding) -> list[dict[str, Any]]:
    """The rows of `fit --json` for these findings of the study "laziness" under the root."""
    path = root / "laziness" / "study.json"
    study = json.loads(path.read_text(encoding="utf-8"))
    study["findings"] = [each.model_dump(mode="json") for each in findings]
    path.write_text(json.dumps(study), encoding="utf-8")
    document = as_json(fit_study(root, "laziness"))
    json.dumps(document, allow_nan=False)
    return document["findings"]


def test_a_speed_ratio_is_shown_contradicted_or_left_open(write_study: Write) -> None:
    ratio = SpeedRatio(arm="swa-128", against="swa-8")
    rows = claimed(
        write_study(ARMS, noise=0.005),
        Finding(claim="later", statistic=ratio, above=1.1, paper="later"),
        Finding(claim="sooner", statistic=ratio, below=1),
        Finding(claim="nope sooner", statistic=SpeedRatio(arm="nope", against="swa-8"), below=1),
        Finding(claim="both later", statistic=SpeedRatio(arm=("swa-32", "swa-128"), against="swa-8"), above=1),
    )
    assert [row["verdict"] for row in rows] == ["shown", "not shown", "undecided", "shown"]
    assert rows[0]["value"] == pytest.approx(1.055 / 0.605, rel=0.03)
    assert rows[0]["ci"][0] < rows[0]["value"] < rows[0]["ci"][1]
    assert (rows[0]["rule"], rows[0]["paper"], rows[0]["n"], rows[0]["decide"]) == ("above 1.1", "later", [4, 4], None)
    assert re.match(r"(about \d+|not even 50) seeds an arm", rows[2]["decide"])
    assert rows[3]["value"] == pytest.approx((0.805 * 1.055) ** 0.5 / 0.605, rel=0.03) and rows[3]["n"] == [8, 4]


def test_a_trend_over_windows_is_a_factor_a_doubling(write_study: Write) -> None:
    (row,) = claimed(write_study(ARMS, noise=0.005), Finding(claim="lazier", statistic=Trend(labels=WINDOWS), above=1))
    assert row["verdict"] == "shown" and row["value"] == pytest.approx((1.055 / 0.605) ** 0.25, rel=0.01)


def test_stuck_seeds_count_as_late_in_ratio_and_trend(write_study: Write) -> None:
    arms = (*ARMS[:2], FakeArm("swa-128", (1.05, 1.06, None, None)))
    late, trending = claimed(
        write_study(arms, noise=0.005),
        Finding(claim="later", statistic=SpeedRatio(arm="swa-128", against="swa-8"), above=1),
        Finding(claim="lazier", statistic=Trend(labels=WINDOWS), above=1),
    )
    assert late["verdict"] == trending["verdict"] == "shown"
    assert late["value"] > 1.06 / 0.605 and trending["value"] > (1.055 / 0.605) ** 0.25
    assert "swa-128: 2 of 4 seeds never emerged" in late["flags"][0]


def test_end_levels_are_equal_within_a_margin_or_not(write_study: Write) -> None:
    arms = (*ARMS, FakeArm("low", (0.60, 0.62, 0.59, 0.615), 0.80))
    rows = claimed(
        write_study(arms, noise=0.005),
        *(
            Finding(claim=arm, statistic=EndLevel(arm=arm, against="swa-8"), above=-0.05, below=0.05)
            for arm in ("nope", "low")
        ),
    )
    assert [row["verdict"] for row in rows] == ["shown", "not shown"]
    assert rows[1]["value"] == pytest.approx(-0.1, abs=0.02)


def test_final_metrics_compare_between_arms_and_within(write_study: Write) -> None:
    far, near = "recall/accuracy/beyond-128", "recall/accuracy/1-8"
    harder = finding.Within(metric=far, against_metric=near, arm=("a", "b"))
    rows = claimed(
        write_study((FakeArm("a", (0.6,) * 5, 0.97), FakeArm("b", (0.6,) * 5, 0.5))),
        Finding(claim="b ends lower", statistic=finding.Difference(metric=far, arm="b", against="a"), below=-0.2),
        Finding(claim="far is harder", statistic=harder, below=0),
        Finding(claim="unmeasured", statistic=finding.Difference(metric="x/y", arm="b", against="a"), below=0),
    )
    assert [row["verdict"] for row in rows] == ["shown", "shown", "undecided"]
    assert rows[0]["value"] == pytest.approx(-0.47, abs=0.03)
    assert rows[1]["value"] == pytest.approx(-0.04, abs=0.015) and rows[1]["n"] == [5]
    assert rows[2]["value"] is rows[2]["ci"] is None and "further seeds" in rows[2]["decide"]


def test_a_metric_ratio_pairs_sizes_and_seeds(write_study: Write) -> None:
    sizes = tuple(FakeSize(f"S{i}", n) for i, n in enumerate((100_000, 200_000, 400_000)))
    root = write_study((FakeArm("a", (0.5, 0.6)), FakeArm("b", (0.5, 0.6))), sizes=sizes, budgets=(300, 900))
    ratio = {"metric": "validation/loss", "arm": "a", "against": "b"}
    rows = claimed(
        root,
        Finding(claim="alike", statistic=MetricRatio(**ratio), above=0.97, below=1.03),
        Finding(claim="alike at first", statistic=MetricRatio(**ratio, budget="smallest"), above=0.97, below=1.03),
        Finding(claim="a is worse", statistic=MetricRatio(**ratio, budget="largest"), above=1.05),
    )
    assert [row["verdict"] for row in rows] == ["shown", "shown", "not shown"]
    assert all(row["n"] == [6] and row["size"] is None for row in rows)


def test_each_condition_has_a_row_unless_one_is_named(write_study: Write) -> None:
    root = write_study(ARMS, data=("near", "far"))
    later = {"claim": "later", "statistic": SpeedRatio(arm="swa-128", against="swa-8"), "above": 1}
    rows = claimed(root, Finding.model_validate(later), Finding.model_validate({**later, "data": "far"}))
    assert [row["data"] for row in rows] == ["near", "far", "far"]


def test_two_seeds_decide_nothing(write_study: Write) -> None:
    arms = (FakeArm("a", (0.60, 0.61)), FakeArm("b", (1.20, 1.21)))
    (row,) = claimed(
        write_study(arms, noise=0.002), Finding(claim="later", statistic=SpeedRatio(arm="b", against="a"), above=1)
    )
    assert row["verdict"] == "undecided" and row["value"] == pytest.approx(2, rel=0.05) and row["ci"] is None
    assert "2 seeds on one side" in row["flags"][0] and row["decide"].startswith("about 3 seeds")


def test_an_arm_without_a_finished_seed_leaves_a_claim_open(write_study: Write) -> None:
    lost = FakeArm("swa-128", (1.05, 1.06, 1.07), states=("failed",) * 3)
    arms = (*ARMS[:2], lost, FakeArm("stuck", (None, None, 1.0, 1.1)))
    rows = claimed(
        write_study(arms),
        Finding(claim="later", statistic=SpeedRatio(arm=("stuck", "swa-128"), against="swa-8"), above=1),
        Finding(claim="lazier", statistic=Trend(labels=WINDOWS), above=1),
    )
    assert all(row["verdict"] == "undecided" and row["value"] is None for row in rows)
    assert all("3 failed" in row["flags"][-1] and "no " in row["flags"][-2] for row in rows)


def test_a_study_without_findings_has_none(write_study: Write) -> None:
    assert as_json(fit_study(write_study(), "laziness"))["findings"] == []


@pytest.mark.parametrize(
    ("ci", "verdict"),
    [
        ((1.01, 2.0), "shown"),
        ((1.0, 2.0), "undecided"),  # an end on the bound is not beyond it
        ((0.5, 1.0), "not shown"),
        ((0.5, 1.01), "undecided"),
        ((1.5, float("inf")), "shown"),
        ((2.5, 4.0), "shown"),
        (None, "undecided"),
    ],
)
def test_the_rule_at_its_bound(ci: Interval | None, verdict: str) -> None:
    assert judged(ci, 1.0, None) == verdict


@pytest.mark.parametrize(
    ("ci", "verdict"),
    [
        ((-0.04, 0.04), "shown"),
        ((-0.05, 0.04), "undecided"),
        ((-0.2, 0.2), "undecided"),
        ((0.05, 0.2), "not shown"),
        ((-0.2, -0.05), "not shown"),
        ((0.0, 0.05), "undecided"),
    ],
)
def test_the_rule_between_two_bounds(ci: Interval, verdict: str) -> None:
    assert judged(ci, -0.05, 0.05) == verdict


def test_a_contrast_of_two_arms_is_welch() -> None:
    a, b = [1.0, 1.2, 0.9, 1.4], [0.5, 0.7, 0.4]
    test, (value, ci) = welch(a, b), contrast([a, b], [1, -1])
    assert value == pytest.approx(test.estimate) and ci == pytest.approx(test.ci)
    assert contrast([[1.0], b], [1, -1])[1] is None and contrast([[1.0, 1.0], [0.0, 0.0]], [1, -1])[1] is None
    with pytest.raises(ValueError, match="empty"):
        contrast([[], b], [1, -1])


def test_a_censored_trend_over_two_arms_is_their_shift() -> None:
    one: list[Bracket] = [(5.9, 5.9), (6.0, 6.0), (5.95, 5.95)]
    two: list[Bracket] = [(6.1, 6.1), (6.2, 6.2), (6.3, np.inf)]
    slope, apart = trend([*one, *two], [0, 0, 0, 1, 1, 1]), shift(two, one)
    assert slope.estimate == pytest.approx(apart.estimate, abs=1e-4)
    assert slope.ci == pytest.approx(apart.ci, abs=1e-3)
    assert trend([*one, (6.3, np.inf)], [0, 0, 0, 1]).ci is None


def laws(flags: Sequence[str] = (), at_bound: Sequence[str] = ()) -> Any:
    def law(arm: str, beta: float) -> Any:
        document = {
            "arm": arm, "data": "d", "beta": beta, "ci": {"beta": [beta - 0.03, beta + 0.04]}, "n": 30,
            "flags": list(flags), "at_bound": list(at_bound),
        }  # fmt: skip
        return type("Law", (), {"document": document})()

    return Told(None, (), (law("a", 0.5), law("b", 0.4)))  # type: ignore[arg-type]


def test_exponents_differ_by_their_intervals() -> None:
    asked, here = finding.LawDifference(power="beta", arm="a", against="b"), Condition("d", "")
    figure = law_difference(asked, laws(), here)
    assert figure.value == pytest.approx(0.1) and figure.ci == pytest.approx((0.05, 0.15))
    assert law_difference(asked, laws(["5 trunks: too few to draw whole trunks anew"]), here).ci is None
    assert "bound" in law_difference(asked, laws(at_bound=["beta"]), here).why[0]
    assert "no beta" in law_difference(asked, Told(None, (), ()), here).why[0]  # type: ignore[arg-type]


Draw = Callable[[np.random.Generator], Interval | None]


def _emerged(rng: np.random.Generator, k: int, share: float = 1.0) -> list[Bracket]:
    stuck = rng.random(k) > share
    return [(6.27, np.inf) if s else (t, t) for t, s in zip(rng.normal(5.85, 0.06, k).tolist(), stuck, strict=True)]


def _levels(rng: np.random.Generator, k: int, share: float) -> list[float]:
    """Final recall of seeds of which a share emerges."""
    return list(np.where(rng.random(k) < share, 0.9, 0.04) + rng.normal(0, 0.02, k))


NO_EFFECT: dict[str, tuple[Draw, tuple[float | None, float | None], int]] = {
    "T50 of unequal spread": (
        lambda rng: of_contrast([[list(rng.normal(0, s, 3))] for s in (0.1, 0.3)], True).ci, (0, None), 2000,
    ),
    "groups of arms of two seeds": (
        lambda rng: of_contrast([[list(rng.normal(0, s, 2)) for _ in range(3)] for s in (0.1, 0.3)], True).ci,
        (0, None), 2000,
    ),
    "trend": (
        lambda rng: contrast([list(rng.normal(0, 0.15, 3)) for _ in range(3)], [-0.25, 0, 0.25])[1], (0, None), 2000,
    ),
    "recall of which some seeds emerge": (
        lambda rng: of_contrast([[_levels(rng, 3, 0.5)], [_levels(rng, 3, 0.5)]], False).ci, (0, None), 2000,
    ),
    "constraint that costs as often as it gives": (
        lambda rng: of_pairs(list(rng.choice([0.8, -0.8], 5) + rng.normal(0, 0.02, 5)), False, "seed").ci,
        (0, None), 2000,
    ),
    "levels just as far apart as the margin": (
        lambda rng: of_contrast([[list(rng.normal(0.05, 0.02, 3))], [list(rng.normal(0, 0.03, 3))]], False).ci,
        (-0.05, 0.05), 2000,
    ),
    "T50 with stuck seeds": (lambda rng: shift(_emerged(rng, 5, 0.6), _emerged(rng, 5, 0.6)).ci, (0, None), 300),
    "trend with stuck seeds": (
        lambda rng: trend([*_emerged(rng, 14, 0.7), (6.27, np.inf)], [x for x in (3, 5, 7) for _ in range(5)]).ci,
        (0, None), 200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_EFFECT)
def test_where_nothing_is_the_case_little_is_shown(case: str) -> None:
    draw, (above, below), studies = NO_EFFECT[case]
    rng = np.random.default_rng(8)
    shown = sum(judged(draw(rng), above, below) == "shown" for _ in range(studies))
    assert shown / studies <= 0.05


def test_what_would_decide_decides_four_times_in_five() -> None:
    rng = np.random.default_rng(0)
    figure = of_contrast([[[0.02, 0.06, 0.10]], [[0.0, 0.04, 0.01]]], True)
    row = claims.claim(
        Finding(claim="later", statistic=SpeedRatio(arm="a", against="b"), above=1), Condition("d", "s"), "s", figure
    )
    assert row.verdict == "undecided" and row.decide
    (seeds,) = map(int, re.findall(r"about (\d+) seeds", row.decide))
    spreads = np.std([0.02, 0.06, 0.10], ddof=1), np.std([0.0, 0.04, 0.01], ddof=1)
    means = 0.06, 0.05 / 3
    drawn = (
        of_contrast([[list(rng.normal(m, s, seeds))] for m, s in zip(means, spreads, strict=True)], True).ci
        for _ in range(1000)
    )
    assert 0.77 < np.mean([judged(ci, 0, None) == "shown" for ci in drawn]) < 0.93


def test_every_statistic_has_its_figure() -> None:
    kinds = {kind.model_fields["kind"].default for kind in finding.Statistic.__origin__.__args__}  # type: ignore[attr-defined]
    assert set(FIGURES) == kinds


def test_the_report_says_what_was_claimed(write_study: Write) -> None:
    late = SpeedRatio(arm="swa-128", against="swa-8")
    root = write_study(ARMS, noise=0.005)
    claimed(
        root,
        Finding(
            claim="A <large> window is late",
            statistic=late,
            above=1.1,
            paper="so",
        ),
        Finding(claim="nope is sooner", statistic=SpeedRatio(arm="nope", against="swa-8"), below=1),
    )
    html = report.write(root, "laziness").read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", html.split("What was claimed before the run")[1]))
    assert "A &lt;large&gt; window is late" in text
    assert "T50 of swa-128 over that of swa-8: 1.7" in text
    assert re.search(r"×, 95% interval 1\.\d{3}× to 1\.\d{3}×; n = 4 and 4\. Claimed: above 1\.1\.", text)
    assert "The paper: so." in text and "Would decide it: " in text
