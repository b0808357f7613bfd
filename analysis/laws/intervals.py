"""How sure: intervals and tests over seeds. Every spread is between seeds, never between checkpoints of one run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

Interval = tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """Mean of the first group minus mean of the second.

    ci: Welch's t interval, None with fewer than two seeds in a group or with no spread in either. p: two-sided, of no
    difference. p_equivalent: the larger of the two one-sided tests against the margin, None without a margin.
    """

    estimate: float
    ci: Interval | None
    p: float | None
    p_equivalent: float | None = None


def welch(a: Sequence[float], b: Sequence[float], confidence: float = 0.95, margin: float | None = None) -> Difference:
    """Welch's comparison of two groups of seeds, with two one-sided tests of |difference| < margin.

    Raises ValueError for an empty group or a margin that is not positive.
    """
    if not len(a) or not len(b):
        raise ValueError("seeds: a group is empty; a difference needs one seed in each")
    if margin is not None and not margin > 0:
        raise ValueError(f"margin: {margin} is not positive; give the largest difference that counts as the same")
    one, two = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    estimate = float(one.mean() - two.mean())
    if min(len(one), len(two)) < 2 or (np.ptp(one) == 0 and np.ptp(two) == 0):
        return Difference(estimate, None, None)
    # Written out: scipy's ttest_ind takes a millisecond a call, and simulations of studies make many thousands.
    shares = one.var(ddof=1) / len(one), two.var(ddof=1) / len(two)
    error = float(np.sqrt(sum(shares)))
    free = float(sum(shares) ** 2 / (shares[0] ** 2 / (len(one) - 1) + shares[1] ** 2 / (len(two) - 1)))
    wide = float(special.stdtrit(free, (1 + confidence) / 2)) * error
    p = 2 * float(special.stdtr(free, -abs(estimate) / error))
    equivalent = None if margin is None else float(special.stdtr(free, (abs(estimate) - margin) / error))
    return Difference(estimate, (estimate - wide, estimate + wide), p, equivalent)


def contrast(
    groups: Sequence[Sequence[float]], weights: Sequence[float], confidence: float = 0.95
) -> tuple[float, Interval | None]:
    """(weighted sum of the groups' means, its t interval) without a common spread: Welch's where weights are 1 and -1.

    Degrees of freedom after Satterthwaite (1946, Biometrics Bulletin 2:110). The interval is None with fewer than two
    seeds in a group or with no spread in any. Raises ValueError for an empty group.
    """
    if not all(len(group) for group in groups):
        raise ValueError("seeds: a group is empty; a contrast needs one seed in each")
    estimate = float(sum(weight * np.mean(group) for weight, group in zip(weights, groups, strict=True)))
    counts = np.array([len(group) for group in groups])
    if counts.min() < 2:
        return estimate, None
    shares = np.square(weights) * [np.var(group, ddof=1) for group in groups] / counts
    if not shares.sum():
        return estimate, None
    free = float(shares.sum() ** 2 / (shares**2 / (counts - 1)).sum())
    wide = float(special.stdtrit(free, (1 + confidence) / 2) * np.sqrt(shares.sum()))
    return estimate, (estimate - wide, estimate + wide)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Student's t interval of a mean; None with fewer than two values or no spread."""
    if len(values) < 2 or np.ptp(values) == 0:
        return None
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    return float(low), float(high)


def share_interval(successes: int, n: int, confidence: float = 0.95) -> Interval | None:
    """Exact (Clopper-Pearson) interval of a share; None of nothing. Raises ValueError for successes outside 0..n."""
    if n == 0 and successes == 0:
        return None
    ci = stats.binomtest(successes, n).proportion_ci(confidence, method="exact")
    return float(ci.low), float(ci.high)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of p-values of one family, in the order given."""
    adjusted = [0.0] * len(p)
    running = 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda j: p[j])):
        running = max(running, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = running
    return adjusted
