"""What a T50 hangs on: the form of the curve, its slope against another arm's, the model's size; isoFLOP minima."""

import numpy as np
import pytest

from analysis.laws.emergence import Curve, fit_curve
from analysis.laws.forms import forms, gompertz
from analysis.laws.isoflop import isoflop
from analysis.laws.sizes import size_law
from analysis.laws.slopes import parallel

TOKENS = np.geomspace(1e5, 1e7, 17)
X = np.log10(TOKENS)


def logistic(slope: float, t50: float, ceiling: float = 0.9) -> np.ndarray:
    return 0.03 + (ceiling - 0.03) / (1 + np.exp(-slope * (X - np.log10(t50))))


def test_gompertz_is_half_way_at_its_midpoint() -> None:
    assert gompertz(np.array([6.0]), 0.1, 0.9, 6.0, 5.0)[0] == pytest.approx(0.5)


def test_a_gompertz_curve_is_recovered_as_one() -> None:
    value = gompertz(X, 0.03, 0.9, 5.9, 4.0)
    curve = fit_curve(TOKENS, value, 0.03)
    found = forms(TOKENS, value, curve)
    assert found and found.gompertz == pytest.approx(10**5.9, rel=1e-3) and found.gompertz_better
    assert found.spread > 1.02 and found.half_way == pytest.approx(10**5.9, rel=0.08)


def test_a_logistic_curve_is_better_as_one() -> None:
    value = logistic(8, 8e5)
    found = forms(TOKENS, value, fit_curve(TOKENS, value, 0.03))
    assert found and not found.gompertz_better and found.logistic == pytest.approx(8e5, rel=1e-3)
    assert forms(TOKENS, np.full(17, 0.03), fit_curve(TOKENS, np.full(17, 0.03), 0.03)) is None


def curves(slope: float, t50: float, seed: int) -> list[Curve]:
    rng = np.random.default_rng(seed)
    return [
        fit_curve(TOKENS, logistic(slope * np.exp(rng.normal(0, 0.08)), t50 * np.exp(rng.normal(0, 0.05))), 0.03)
        for _ in range(5)
    ]


def test_parallel_curves_have_one_ratio_and_others_several() -> None:
    same = parallel(curves(8, 1.2e6, 0), curves(8, 6e5, 1))
    assert same and same.parallel is True and same.at_levels == ()
    other = parallel(curves(4, 1.2e6, 2), curves(10, 6e5, 3))
    assert other and other.parallel is False and other.slope_ratio == pytest.approx(0.4, rel=0.15)
    ratios = [level.ratio for level in other.at_levels]
    assert ratios == sorted(ratios) and ratios[-1] > 1.3 * ratios[0], "a flatter curve falls behind as it rises"


def test_t50_over_size_predicts_a_larger_model_with_its_interval() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        n = np.repeat([1e6, 4e6, 1.6e7], 3)
        law = size_law(n, 1e9 * (n / 1e6) ** -0.4 * 10 ** rng.normal(0, 0.05, 9))
        new = 1e9 * 160**-0.4 * 10 ** rng.normal(0, 0.05)
        _, ci = law.predict(1.6e8)
        assert ci and law.exponent_ci
        covered += ci[0] <= new <= ci[1]
    assert 0.93 <= covered / 400 <= 0.97
    assert size_law([1e6, 1e7], [1e9, 1e8]).predict(1e8) == (pytest.approx(1e7), None)
    with pytest.raises(ValueError, match="needs two"):
        size_law([1e6, 1e6], [1e9, 2e9])


def test_isoflop_minima_are_refused_or_flagged_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="needs three"):
        isoflop([1e7, 2e7], [3.0, 2.9], [1e18, 1e18])
    down = isoflop([1e7, 2e7, 4e7], [2.0, 2.5, 2.0], [1e18] * 3)
    assert down.a is None and any("opens downwards" in flag for flag in down.flags)
