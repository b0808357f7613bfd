import numpy as np
import pytest
from scipy import stats

from analysis.laws.censored import Bracket, location, maximise, p_value, profile_interval, shift

INF = float("inf")
# Five seeds an arm evaluated every factor of two; two seeds of the second never emerged.
A: list[Bracket] = [(9.3, 9.6), (9.6, 9.9), (9.3, 9.6), (9.6, 9.9), (9.6, 9.9)]
B: list[Bracket] = [(9.9, 10.2), (9.6, 9.9), (10.2, INF), (9.9, 10.2), (10.2, INF)]


def exact(*logs: float) -> list[Bracket]:
    return [(log, log) for log in logs]


def ends(brackets: list[Bracket]) -> np.ndarray:
    return np.array(brackets)


def seeds(rng: np.random.Generator, mean: float, spread: float, n: int, last: float, every: float | None) -> np.ndarray:
    """Ends [n, 2] of n seeds that are stuck beyond `last`; every: width of the brackets, None for exact seeds."""
    x = rng.normal(mean, spread, n)
    low = x if every is None else last - every * np.ceil((last - x) / every)
    high = x if every is None else low + every
    return np.stack([np.where(x < last, low, last), np.where(x < last, high, INF)], axis=1)


def test_the_worked_case() -> None:
    fit = maximise([ends(A), ends(B)])
    assert fit.means[0] == pytest.approx(9.6295, abs=1e-4)
    assert fit.spread == pytest.approx(0.1731, abs=1e-4)
    found = shift(B, A)
    assert found.estimate == pytest.approx(0.4848, abs=1e-4)
    assert 10 ** (found.estimate or 0) == pytest.approx(3.054, abs=1e-3)
    low, high = profile_interval(ends(B), ends(A), stats.chi2.ppf(0.95, 1))
    assert (10**low, 10**high) == pytest.approx((1.66, 6.04), abs=0.01)
    # Read on Student's t, as chi-square is too narrow at so few seeds, it is wider.
    assert found.ci and found.ci[0] < low and found.ci[1] > high


def test_dropping_or_clipping_stuck_seeds_makes_the_arm_look_faster() -> None:
    middle = np.mean(A)
    dropped = [np.mean(bracket) for bracket in B if bracket[1] < INF]
    clipped = [*dropped, *(low for low, high in B if high == INF)]
    ratios = [10 ** (np.mean(arm) - middle) for arm in (dropped, clipped)]
    assert ratios == pytest.approx([2.09, 2.63], abs=0.01)
    assert max(ratios) < 10 ** (shift(B, A).estimate or 0)
    seen = shift([bracket for bracket in B if bracket[1] < INF], A)  # touching brackets: a spread betters none
    assert 10 ** (seen.estimate or 0) == pytest.approx(2.03, abs=0.01)


def test_without_censoring_it_is_the_pooled_t_test() -> None:
    a, b = (5.9, 5.8, 6.0, 5.87), (6.1, 6.3, 6.15)
    found, pooled = shift(exact(*a), exact(*b)), stats.ttest_ind(a, b)
    assert found.ci == pytest.approx(tuple(pooled.confidence_interval()), abs=1e-5)
    assert found.p == pytest.approx(pooled.pvalue, rel=1e-5)


def test_arms_change_places_and_units_change_nothing() -> None:
    found, turned = shift(B, A), shift(A, B)
    assert turned.estimate == pytest.approx(-(found.estimate or 0), abs=1e-6)
    assert found.ci and turned.ci == pytest.approx((-found.ci[1], -found.ci[0]), abs=1e-5)
    moved = shift(*([(low - 3, high - 3) for low, high in arm] for arm in (B, A)))
    assert (moved.ci, moved.p) == (pytest.approx(found.ci, abs=1e-5), pytest.approx(found.p, rel=1e-4))


def test_the_interval_is_where_p_exceeds_five_percent() -> None:
    ci = shift(B, A).ci
    assert ci
    assert [p_value(ends(B), ends(A), end) for end in ci] == pytest.approx([0.05, 0.05], abs=1e-5)


def test_an_arm_wholly_stuck_gives_one_end_and_no_estimate() -> None:
    stuck, reference = [(6.2, INF)] * 3, exact(5.90, 5.85, 5.95)
    found = shift(stuck, reference)
    assert found.estimate == INF and found.ci and found.ci[1] == INF
    assert 0 < found.ci[0] < 6.2 - 5.9 and found.p and found.p < 0.01
    turned = shift(reference, stuck)
    assert turned.estimate == -INF and turned.ci == pytest.approx((-INF, -found.ci[0]), abs=1e-5)
    assert shift([(5.7, INF)] * 3, reference).p == pytest.approx(1.0, abs=0.2)  # stopped before the reference emerges


def test_what_seeds_do_not_say_is_none() -> None:
    both = shift([(6.2, INF)] * 3, [(6.2, INF)] * 3)
    assert both.estimate is both.ci is both.p is None
    one = shift([(6.2, INF)], exact(5.9, 5.8))
    assert one.estimate == INF and one.ci is one.p is None
    same = shift([(5.9, 6.0)] * 3, [(6.0, 6.2)] * 3)  # one bracket an arm: nothing says how far seeds lie apart
    assert same.estimate is same.ci is None
    with pytest.raises(ValueError, match="empty"):
        shift([], exact(5.9))
    with pytest.raises(ValueError, match="out of order"):
        shift([(6.0, 5.0)], exact(5.9))


@pytest.mark.parametrize(("n", "every"), [(3, None), (4, None), (5, None), (5, 0.1)])
def test_the_interval_covers_where_seeds_are_stuck(n: int, every: float | None) -> None:
    """800 studies with T50 1.5 times the reference's; 35% of the arm's seeds are stuck, few of the reference's."""
    rng = np.random.default_rng(n)
    spread, true, last = 0.1, np.log10(1.5), 6.2
    mean = last + spread * stats.norm.ppf(0.35)
    p, stuck = [], []
    for _ in range(800):
        arm, reference = (seeds(rng, m, spread, n, last, every) for m in (mean, mean - true))
        if shift_is_known(arm, reference):
            p.append(p_value(arm, reference, true))
            stuck.append(bool(np.isinf([*arm, *reference]).any()))
    covered = np.array(p) > 0.05
    assert len(p) > 700 and 0.6 < np.mean(stuck) < 0.97
    assert 0.93 <= covered.mean() <= 0.97
    assert 0.93 <= covered[stuck].mean() <= 0.975
    t = stats.t.isf(np.array(p) / 2, 2 * n - 2)
    by_chi_square = 2 * n * np.log1p(t * t / (2 * n - 2)) < stats.chi2.ppf(0.95, 1)
    assert by_chi_square.mean() < (0.90 if n == 3 else covered.mean())


def shift_is_known(*arms: np.ndarray) -> bool:
    """Some arm's brackets have no inner point in common, so that there is a spread."""
    return any(arm[:, 0].max() >= arm[:, 1].min() for arm in arms)


def test_the_median_of_one_arm_is_the_t_interval_where_no_seed_is_censored() -> None:
    x = (5.9, 5.8, 6.0, 5.87)
    found = location(exact(*x))
    assert found.estimate == pytest.approx(np.mean(x), abs=1e-6)
    assert found.ci == pytest.approx(tuple(stats.ttest_1samp(x, 0).confidence_interval()), abs=1e-5)
    assert location([(6.2, INF)] * 3).ci is None and (location(B).estimate or 0) > np.mean(A)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "every"), [(3, None), (5, None), (8, None), (5, 0.1)])
def test_the_median_covers_where_a_fifth_of_the_seeds_is_stuck(n: int, every: float | None) -> None:
    rng = np.random.default_rng(n)
    mean = 6.2 - 0.1 * stats.norm.isf(0.2)
    found = [location([tuple(row) for row in seeds(rng, mean, 0.1, n, 6.2, every)]).ci for _ in range(400)]
    covered = [ci[0] <= mean <= ci[1] for ci in found if ci]
    assert len(covered) > 380 and 0.93 <= np.mean(covered) <= 0.97
