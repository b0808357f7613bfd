import numpy as np
import pytest

from analysis.laws.emergence import fit_curve
from analysis.laws.intervals import holm, mean_interval, share_interval, welch


@pytest.mark.parametrize("seeds", [3, 4, 5])
def test_the_interval_of_a_speed_ratio_covers(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    repeats, true = 2000, np.log10(1.5)
    covered = 0
    for _ in range(repeats):
        ci = welch(rng.normal(6 + true, 0.08, seeds), rng.normal(6, 0.08, seeds)).ci
        assert ci is not None
        covered += ci[0] <= true <= ci[1]
    assert 0.93 <= covered / repeats <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5])
def test_fitted_curves_cover_where_checkpoint_errors_do_not(seeds: int) -> None:
    """From noisy curves to the interval: the whole way, 400 studies. Errors within one curve miss the seeds' spread."""
    rng = np.random.default_rng(1)
    tokens = np.arange(1, 16) * 122_880.0
    repeats, true = 400, np.log10(1.4)
    covered = naive = 0
    for _ in range(repeats):
        arms = []
        for centre in (5.9 + true - 0.1, 5.8):
            curves = []
            for m in rng.normal(centre, 0.06, seeds):
                p = 1 / 32 + 0.87 / (1 + np.exp(-14 * (np.log10(tokens) - m)))
                curves.append(fit_curve(tokens, rng.binomial(290, p) / 290, 1 / 32, n_trials=290))
            arms.append(curves)
        (a, b), difference = arms, true
        logs = [[curve.midpoint for curve in arm if curve.midpoint is not None] for arm in arms]
        test = welch(*logs)
        assert test.ci is not None
        covered += test.ci[0] <= difference <= test.ci[1]
        error = np.sqrt(sum((c.midpoint_se or 0) ** 2 for c in (*a, *b))) / seeds
        naive += abs(test.estimate - difference) <= 1.96 * error
    assert 0.93 <= covered / repeats <= 0.97
    assert naive / repeats < 0.6


def test_welch_agrees_with_a_hand_computation() -> None:
    # means 2 and 5, variances 1 and 4, three each: se = sqrt(5/3), df = (5/3)^2 / ((1/3)^2/2 + (4/3)^2/2) = 2.9412
    test = welch([1, 2, 3], [3, 5, 7])
    assert test.estimate == -3 and test.ci is not None
    assert test.ci[1] - test.ci[0] == pytest.approx(2 * 3.2171 * np.sqrt(5 / 3), rel=1e-3)
    assert test.p == pytest.approx(0.1045, abs=5e-4)


def test_fewer_than_two_seeds_have_no_interval() -> None:
    test = welch([5.9], [5.7, 5.8], margin=0.1)
    assert test.estimate == pytest.approx(0.15) and test.ci is test.p is test.p_equivalent is None
    assert mean_interval([5.9]) is None
    assert welch([1.0, 1.0], [1.0, 1.0]).ci is None  # no spread is no certainty


def test_equivalence_needs_the_whole_interval_inside_the_margin() -> None:
    near = [0.90, 0.91, 0.89, 0.905]
    assert (welch(near, [x + 0.005 for x in near], margin=0.05).p_equivalent or 1) < 0.05
    assert (welch(near, [x + 0.045 for x in near], margin=0.05).p_equivalent or 0) > 0.05
    with pytest.raises(ValueError, match="margin"):
        welch(near, near, margin=0.0)


def test_shares_have_exact_intervals() -> None:
    assert share_interval(4, 6) == pytest.approx((0.22278, 0.95673), abs=1e-4)
    assert share_interval(0, 5) == pytest.approx((0, 1 - 0.025 ** (1 / 5)))
    assert share_interval(5, 5) == pytest.approx((0.025 ** (1 / 5), 1))
    assert share_interval(0, 0) is None


def test_holm_steps_down_and_stays_monotone() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
