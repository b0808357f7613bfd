"""How log tokens move with a number the arms carry, some seeds never having emerged: `censored` with a slope.

log10 T50 of a seed ~ Normal(level + slope x, spread common to all)
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats
from scipy.optimize import minimize_scalar

from analysis.laws.censored import Bracket, Shift, ends_of, maximise, passage

FEWEST_KNOWN = 3


def trend(seeds: Sequence[Bracket], x: Sequence[float], confidence: float = 0.95) -> Shift:
    """The slope in log10 tokens a unit of x, with the interval of its profile likelihood, read as in `censored.shift`.

    Departures of the arms from a line count as spread, so the interval is wide where there is no line. estimate and ci
    are None where fewer than three seeds, or seeds at one x alone, are known exactly. p is None.
    Raises ValueError for ends that are no bracket.
    """
    ends, at = ends_of(seeds), np.asarray(x, dtype=float)
    exact = ends[:, 0] == ends[:, 1]
    if exact.sum() < FEWEST_KNOWN or np.ptp(at[exact]) == 0:
        return Shift(None, None, None)
    at = at - at.mean()

    def likelihood(slope: float) -> float:
        return maximise([ends - slope * at[:, None]]).log_likelihood

    start, level = np.polyfit(at[exact], ends[exact, 0], 1)
    if np.allclose(start * at[exact] + level, ends[exact, 0], rtol=0, atol=1e-9):  # no spread to judge by
        return Shift(float(start), None, None)
    best = minimize_scalar(lambda slope: -likelihood(slope), bracket=(start, start + 0.05))
    n = len(ends)
    t = stats.t.ppf((1 + confidence) / 2, n - 2)
    wanted = -float(best.fun) - float(n * np.log1p(t * t / (n - 2))) / 2
    low, high = (passage(lambda slope: likelihood(slope) - wanted, float(best.x), side) for side in (-1, 1))
    return Shift(float(best.x), (low, high), None)
