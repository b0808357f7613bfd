"""How many seeds an arm would decide a comparison, if what was measured is the truth: power of Welch's test.

The spread between seeds is taken as seen, which two seeds know poorly: an order of magnitude, not a promise.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from analysis.arm_emergence import Emergence

POWER = 0.8
MOST = 50  # seeds an arm beyond which a study is not made to decide


def for_ratio(arm: Emergence, reference: Emergence, alpha: float) -> int | None:
    """Seeds an arm that show the speed ratio measured, with probability POWER; None beyond MOST, or without spreads."""
    logs = [_logs(row) for row in (arm, reference)]
    if min(map(len, logs)) < 2:
        return None
    difference = abs(float(np.mean(logs[0]) - np.mean(logs[1])))
    return _least(logs, lambda error, free: float(stats.nct.sf(stats.t.isf(alpha / 2, free), free, difference / error)))


def for_ceiling(arm: Emergence, reference: Emergence, margin: float, alpha: float) -> int | None:
    """Seeds an arm that show the ceilings to be within `margin`; None beyond MOST, or where they are measured apart."""
    both = (arm, reference)
    ceilings = [[seed.curve.ceiling for seed in row.seeds if seed.curve.ceiling is not None] for row in both]
    if min(map(len, ceilings)) < 2:
        return None
    inside = margin - abs(float(np.mean(ceilings[0]) - np.mean(ceilings[1])))
    if inside <= 0:
        return None
    return _least(ceilings, lambda error, free: float(stats.nct.sf(stats.t.isf(alpha, free), free, inside / error)))


def for_contrast(samples: Sequence[Sequence[float]], distance: float, alpha: float) -> int | None:
    """Seeds an arm that put the interval of a contrast to one side of a bound `distance` away from what was measured.

    samples: of each arm, times its weight. None as in `for_ratio`."""
    if not samples or min(map(len, samples)) < 2:
        return None
    return _least(
        samples, lambda error, free: float(stats.nct.sf(stats.t.isf(alpha / 2, free), free, distance / error))
    )


def _least(arms: Sequence[Sequence[float]], power: Callable[[float, float], float]) -> int | None:
    """The least number of seeds, above those there are, at which power(standard error, degrees of freedom) suffices."""
    spreads = np.array([np.var(values, ddof=1) for values in arms])
    if spreads.sum() == 0:
        return None
    for n in range(max(3, *(len(values) + 1 for values in arms)), MOST + 1):
        free = (n - 1) * spreads.sum() ** 2 / (spreads**2).sum()
        if power(float(np.sqrt(spreads.sum() / n)), float(free)) >= POWER:
            return n
    return None


def _logs(row: Emergence) -> list[float]:
    return [float(np.log10(t)) for t in (seed.curve.t50_tokens for seed in row.seeds) if t is not None]
