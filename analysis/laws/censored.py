"""Two arms of seeds, some of which never emerged: how far apart their log tokens are, no seed dropped or clipped.

    log10 T50 of a seed ~ Normal(mean of its arm, spread common to both arms)

A seed is known exactly, within a bracket, or from one side alone (never emerged: above its last tokens). The spread is
common because a censored arm has too few known seeds to tell one of its own. A seed that never would emerge is read as
one that emerges late; no data of this kind can tell the two apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq, minimize
from scipy.special import log_ndtr

Bracket = tuple[float, float]  # log10 tokens; equal ends: known exactly; one end may be infinite
Floats = NDArray[np.float64]

LOG_DENSITY = -0.5 * np.log(2 * np.pi)  # of a standard normal at 0
FARTHEST = 100.0  # decades: an end of an interval that lies beyond is open


@dataclass(frozen=True)
class Shift:
    """Mean of the first arm minus mean of the second, in log10 tokens.

    estimate: infinite where every seed of one arm is known from one side alone; the interval is then open on that side.
    None where the seeds say nothing of it. ci, p: None with fewer than two seeds in an arm, and where a spread of zero
    explains every bracket. p: two-sided, of no difference.
    """

    estimate: float | None
    ci: Bracket | None
    p: float | None


@dataclass(frozen=True)
class Fit:
    """The greatest log-likelihood, with the mean of each arm and the common spread there, in log10 tokens."""

    log_likelihood: float
    means: tuple[float, ...]
    spread: float


def shift(a: Sequence[Bracket], b: Sequence[Bracket], confidence: float = 0.95) -> Shift:
    """The difference of two arms of seeds by maximum likelihood, with the interval of its profile likelihood.

    Twice the fall of the log-likelihood, W, is read as W = n log(1 + t^2 / (n - 2)), t of Student with n - 2 degrees of
    freedom over n seeds. That is exact without censoring, where the interval is the pooled t interval; the customary
    chi-square covers 86% at 3 seeds an arm. Coverage is over all studies: among those alone where a whole arm happens
    to be stuck, which is where the bound is furthest off, it is lower (84% at 3 seeds with odds of one half).

    Raises ValueError for an empty arm or for ends that are no bracket.
    """
    one, two = ends_of(a), ends_of(b)
    n = len(one) + len(two)
    if _spreadless(one, two):
        return Shift(_without_spread(one, two), None, None)
    if min(len(one), len(two)) < 2:
        return Shift(_greatest(one, two)[1], None, None)
    t = stats.t.ppf((1 + confidence) / 2, n - 2)
    ci = profile_interval(one, two, float(n * np.log1p(t * t / (n - 2))))
    return Shift(_greatest(one, two)[1], ci, p_value(one, two, 0.0))


def location(a: Sequence[Bracket], confidence: float = 0.95) -> Shift:
    """The mean of one arm in log10 tokens (10^mean is its median T50) with the interval of its profile likelihood.

    Read on Student's t with n - 1 degrees of freedom, as `shift` is with n - 2; without censoring it is the t interval
    of a mean. p is None. ci: None with fewer than two seeds, where a spread of zero explains every bracket, and where
    all seeds are known from one side alone: a spread wide enough explains any mean then.
    """
    ends = ends_of(a)
    n = len(ends)
    if side := _open_side(ends):
        return Shift(float("inf") * side, None, None)
    if ends[:, 0].max() < ends[:, 1].min() or np.ptp(ends) == 0:  # one point in all brackets
        inner = np.array([ends[:, 0].max(), ends[:, 1].min()])
        known = inner[np.isfinite(inner)]
        return Shift(float(known.mean()), None, None)
    fit = maximise([ends])
    if n < 2:
        return Shift(fit.means[0], None, None)
    t = stats.t.ppf((1 + confidence) / 2, n - 1)
    wanted = fit.log_likelihood - float(n * np.log1p(t * t / (n - 1))) / 2
    low, high = (passage(lambda mean: _at_mean(ends, mean) - wanted, fit.means[0], side) for side in (-1, 1))
    return Shift(fit.means[0], (low, high), None)


def _at_mean(ends: Floats, mean: float) -> float:
    """The greatest log-likelihood of one arm at a fixed mean."""
    return maximise([ends - mean], centred=True).log_likelihood


def p_value(one: Floats, two: Floats, difference: float) -> float:
    """Two-sided p of `difference`: below 5% exactly outside the 95% interval of `shift`."""
    n = len(one) + len(two)
    fall = 2 * (_greatest(one, two)[0] - _log_likelihood(one, two, difference))
    return float(2 * stats.t.sf(np.sqrt((n - 2) * np.expm1(max(0.0, fall) / n)), n - 2))


def profile_interval(one: Floats, two: Floats, fall: float) -> Bracket:
    """Differences at which twice the profile log-likelihood is less than `fall` below its greatest.

    one, two: ends [seeds, 2], not both without spread. An end is infinite where the likelihood never falls as far.
    """
    greatest, estimate = _greatest(one, two)
    if np.isfinite(estimate):
        ends = [_end(one, two, greatest - fall / 2, estimate, side) for side in (-1, 1)]
        return ends[0], ends[1]
    finite = np.concatenate([one, two]).ravel()
    reach = float(np.ptp(finite[np.isfinite(finite)]))
    inside = _end(one, two, greatest - fall / 2, reach * np.sign(estimate), int(-np.sign(estimate)), outwards=True)
    return (inside, estimate) if estimate > 0 else (estimate, inside)


def maximise(arms: Sequence[Floats], centred: bool = False) -> Fit:
    """The likeliest means and spread of `arms`, each ends [seeds, 2]; at least one must need a spread. centred: the
    means are 0, the spread alone is found.

    In (mean / spread, 1 / spread) the log-likelihood is concave (Burridge 1981, JRSS B 43:41-45), so what is found is
    the only maximum, at a fixed difference as well.
    """
    ends = np.concatenate(arms)
    arm = np.repeat(np.arange(len(arms)), [len(each) for each in arms])
    known = np.where(np.isfinite(ends), ends, ends[:, ::-1]).mean(1)
    centre = 0.0 if centred else float(known.mean())
    unit = max(float(np.sqrt(((known - centre) ** 2).mean())), 1e-6)
    start = [0.0 if centred else (known[arm == i].mean() - centre) / unit for i in range(len(arms))]
    lows, highs = ((ends - centre) / unit).T
    bounds = [(0.0, 0.0) if centred else (None, None)] * len(arms) + [(1e-6, None)]
    best = minimize(
        _loss, [*start, 1.0], args=(lows, highs, arm), jac=True, method="L-BFGS-B", bounds=bounds,
        options={"ftol": 1e-13, "gtol": 1e-8},
    )  # fmt: skip
    exact = int((lows == highs).sum())
    means = tuple(float(m / best.x[-1] * unit + centre) for m in best.x[:-1])
    return Fit(float(-best.fun - exact * np.log(unit)), means, float(unit / best.x[-1]))


def _loss(theta: Floats, lows: Floats, highs: Floats, arm: NDArray[np.int64]) -> tuple[float, Floats]:
    """(minus log-likelihood, gradient) at theta = (mean / spread of each arm, 1 / spread)."""
    precision = theta[-1]
    below, above = precision * lows - theta[arm], precision * highs - theta[arm]
    exact = lows == highs
    # Both tails are taken on the left, where log_ndtr keeps its digits.
    flip = below > 0
    left, right = np.where(flip, -above, below), np.where(flip, -below, above)
    log_right = log_ndtr(right)
    finite_low, finite_high = (np.where(np.isfinite(x), x, 0.0) for x in (lows, highs))
    # A share is meaningless at an exact seed, a density at an infinite end: np.where takes the one that is not.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_share = log_right + np.log1p(-np.exp(log_ndtr(left) - log_right))
        at_low, at_high = (np.exp(LOG_DENSITY - z * z / 2 - log_share) for z in (below, above))
        log_density = np.log(precision) + LOG_DENSITY - below * below / 2
        by_mean = np.where(exact, below, at_low - at_high)
        known, within = 1 / precision - below * finite_low, at_high * finite_high - at_low * finite_low
        by_precision = np.where(exact, known, within)
    gradient = np.append(np.bincount(arm, by_mean, len(theta) - 1), by_precision.sum())
    return -float(np.where(exact, log_density, log_share).sum()), -gradient


def _greatest(one: Floats, two: Floats) -> tuple[float, float]:
    """(greatest log-likelihood, difference there). A mean far out explains an arm known from one side wholly."""
    sides = _open_side(one), _open_side(two)
    if not any(sides):
        fit = maximise([one, two])
        return fit.log_likelihood, fit.means[0] - fit.means[1]
    bounded = maximise([arm for arm, side in zip((one, two), sides, strict=True) if not side])
    return bounded.log_likelihood, float("inf") * (sides[0] - sides[1])


def _log_likelihood(one: Floats, two: Floats, difference: float) -> float:
    return maximise([np.concatenate([one - difference, two])]).log_likelihood


def _end(one: Floats, two: Floats, wanted: float, start: float, side: int, outwards: bool = False) -> float:
    """Where the profile passes `wanted`, from `start` towards `side`.

    outwards: `start` may lie short of the passage; it is first moved away from `side` until it does not.
    """

    def over(difference: float) -> float:
        return _log_likelihood(one, two, difference) - wanted

    step = 0.25
    while outwards and over(start) < 0:
        start -= side * step
        step *= 2
    return passage(over, start, side)


def passage(over: Callable[[float], float], start: float, side: int) -> float:
    """Where `over` passes 0 from `start`, at which it is not below, towards `side`; infinite beyond FARTHEST."""
    step = 0.25
    while over(start + side * step) > 0:
        step *= 2
        if step > FARTHEST:
            return float("inf") * side
    return float(brentq(over, start, start + side * step, xtol=1e-6))


def ends_of(brackets: Sequence[Bracket]) -> Floats:
    ends = np.asarray(brackets, dtype=float).reshape(-1, 2)
    if not len(ends):
        raise ValueError("seeds: an arm is empty; a difference needs one seed in each")
    if not (ends[:, 0] <= ends[:, 1]).all() or not np.isfinite(ends).any(1).all():
        raise ValueError(f"bracket: {ends.tolist()} holds ends out of order or both infinite; give (low, high)")
    return ends


def _open_side(ends: Floats) -> int:
    """1 where no seed has an upper end, -1 where none has a lower end, else 0."""
    return int(np.isinf(ends[:, 1]).all()) - int(np.isinf(ends[:, 0]).all())


def _spreadless(one: Floats, two: Floats) -> bool:
    """Whether the likelihood is greatest at a spread of zero: each arm's brackets have a point in common.

    Brackets that only touch share their edge with odds of one half each, which a spread can better, unless a seed known
    exactly makes the likelihood infinite.
    """
    gaps = [arm[:, 0].max() - arm[:, 1].min() for arm in (one, two)]
    exact = any((arm[:, 0] == arm[:, 1]).any() for arm in (one, two))
    return max(gaps) < 0 or (exact and max(gaps) <= 0)


def _without_spread(one: Floats, two: Floats) -> float | None:
    sides = _open_side(one), _open_side(two)
    if sides[0] != sides[1]:
        return float("inf") * (sides[0] - sides[1])
    exact = all((arm[:, 0] == arm[:, 1]).all() for arm in (one, two))
    return float(one[:, 0].mean() - two[:, 0].mean()) if exact else None
