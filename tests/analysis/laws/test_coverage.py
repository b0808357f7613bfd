"""Intervals hold what they promise: simulated studies, whole way from noisy values to the interval."""

import numpy as np
import pytest
from scipy import stats

from analysis.laws.bootstrap import Replicates
from analysis.laws.emergence import fit_curve
from analysis.laws.huber import minimise
from analysis.laws.intervals import welch
from analysis.laws.scaling import EXPONENT_BOUNDS, FORMS, Points, stated

REPEATS, REFITS = 400, 400  # as many refits as the command makes
REPEATS_OF_FEW = 1000  # of designs of at most 20 points, which are quick and lie nearest the edges


def design(k: int) -> tuple[np.ndarray, np.ndarray, float, float, float, bool]:
    """One of 30: (N, D, alpha, beta, noise, with a constant); budgets absolute or in multiples of N."""
    rng = np.random.default_rng([7, k])
    sizes, budgets = int(rng.integers(3, 7)), int(rng.integers(4, 8))
    size = np.geomspace(1e7, 10 ** rng.uniform(8, 9.3), sizes)
    if k % 2:
        n, times = (grid.ravel() for grid in np.meshgrid(size, np.geomspace(10, 10 ** rng.uniform(2.2, 3), budgets)))
        d = n * times
    else:
        n, d = (g.ravel() for g in np.meshgrid(size, np.geomspace(1e9, 10 ** rng.uniform(10.3, 11.5), budgets)))
    alpha, beta = rng.uniform(0.25, 0.5, 2)
    return n, d, float(alpha), float(beta), float(10 ** rng.uniform(-2.6, -1.7)), k % 3 != 0


def coverage(k: int) -> tuple[float, float]:
    """Shares of simulated studies of design k whose 95% intervals hold alpha, and beta. Errors are normal, in every
    fifth design Student's with 4 degrees of freedom."""
    n, d, alpha, beta, noise, constant = design(k)
    form = FORMS["chinchilla" if constant else "no-constant"]
    rng = np.random.default_rng(k)
    centred = [values / np.exp(np.log(values).mean()) for values in (n, d)]
    loss = 1.7 * constant + 0.8 * centred[0] ** -alpha + 0.8 * centred[1] ** -beta
    problem, centre = stated(Points(loss, n, d), form, dict.fromkeys(form.powers, EXPONENT_BOUNDS))
    truth = np.array([np.log(0.8), np.log(0.8), alpha, beta] + [np.log(1.7)] * constant)
    points, parameters = len(n), form.parameters
    repeats = REPEATS_OF_FEW if points <= 20 else REPEATS
    error = rng.normal(0, 1, (repeats, points))
    if k % 5 == 4:
        error = rng.standard_t(4, (repeats, points)) / np.sqrt(2)
    y = np.log(loss) + noise * error
    theta, _ = minimise(problem, np.repeat(truth[None], repeats, 0), y, np.ones((1, points)))
    fit = problem.predicted(theta)
    residual = (y - fit) * np.sqrt(points / (points - parameters))
    picked = rng.integers(0, points, (repeats, REFITS, points))
    drawn = fit[:, None] + np.take_along_axis(residual[:, None], picked, axis=2)
    starts = np.repeat(theta, REFITS, axis=0)
    refits, _ = minimise(problem, starts, drawn.reshape(-1, points), np.ones((1, points)))
    covered = []
    for mine in refits.reshape(repeats, REFITS, -1):
        replicates = Replicates(form, "residual", mine, centre, 0.0, 0.0, points)
        cis = [replicates.interval(mine[:, i]) for i in (2, 3)]
        covered.append([ci is not None and ci[0] <= true <= ci[1] for ci, true in zip(cis, (alpha, beta), strict=True)])
    by_alpha, by_beta = np.mean(covered, axis=0)
    return float(by_alpha), float(by_beta)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(30))
def test_intervals_of_exponents_cover(k: int) -> None:
    shares = coverage(k)
    assert 0.90 <= np.mean(shares) <= 0.98, shares


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_speed_ratios_cover_under_correlated_checkpoints(seeds: int) -> None:
    """Errors of one run's checkpoints go together (autocorrelation .8), as they do along one training."""
    rng = np.random.default_rng(seeds)
    tokens = np.arange(1, 16) * 122_880.0
    true, covered = float(np.log10(1.4)), []
    for _ in range(REPEATS):
        arms: list[list[float]] = []
        for middle in (5.8 + true, 5.8):
            found = []
            for m in rng.normal(middle, 0.06, seeds):
                walk = rng.normal(0, 1, 15)
                for i in range(1, 15):
                    walk[i] = 0.8 * walk[i - 1] + 0.6 * walk[i]
                p = 1 / 32 + 0.87 / (1 + np.exp(-14 * (np.log10(tokens) - m))) + 0.02 * walk
                curve = fit_curve(tokens, np.clip(p, 0, 1), 1 / 32)
                if curve.midpoint is not None:
                    found.append(curve.midpoint)
            arms.append(found)
        ci = welch(*arms).ci
        assert ci is not None
        covered.append(ci[0] <= true <= ci[1])
    assert 0.93 <= np.mean(covered) <= 0.97


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_equivalence_is_seldom_claimed_of_arms_a_margin_apart(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    claims = [
        (welch(rng.normal(0.9, 0.02, seeds), rng.normal(0.85, 0.02, seeds), margin=0.05).p_equivalent or 1) < 0.05
        for _ in range(2000)
    ]
    assert np.mean(claims) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 2000)
    assert stats.binomtest(int(np.sum(claims)), 2000, 0.05, alternative="greater").pvalue > 0.01
