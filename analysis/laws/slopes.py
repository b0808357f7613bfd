"""Are two arms' emergence curves parallel? Only then is one ratio true at every level of the capability.

A common slope k is tested by Welch on log k over seeds. Where it differs, the ratio of tokens depends on the level, and
it is given at several.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.laws.emergence import Curve
from analysis.laws.intervals import Interval, welch

LEVELS = (0.25, 0.5, 0.75)
ALPHA = 0.05


@dataclass(frozen=True)
class LevelRatio:
    """Tokens at which one arm has `value` over those of the other: geometric means over seeds whose curve has it."""

    value: float
    ratio: float
    ci: Interval | None


@dataclass(frozen=True)
class Parallel:
    """slope_ratio: geometric mean k of the arm over the reference's. p: of equal slopes; parallel: p >= 5%, None where
    there are too few seeds to test. at_levels: ratios of T_c where the slopes differ, else empty."""

    slope_ratio: float
    ci: Interval | None
    p: float | None
    parallel: bool | None
    at_levels: tuple[LevelRatio, ...]


def parallel(arm: Sequence[Curve], reference: Sequence[Curve], levels: Sequence[float] = LEVELS) -> Parallel | None:
    """None where an arm has no seed with a T50."""
    slopes = [
        [float(np.log10(curve.slope)) for curve in curves if curve.slope and curve.t50_tokens is not None]
        for curves in (arm, reference)
    ]
    if not all(slopes):
        return None
    test = welch(slopes[0], slopes[1])
    same = None if test.p is None else test.p >= ALPHA
    found = []
    for level in levels if same is False else ():
        logs = [
            [float(np.log10(t)) for t in (curve.tokens_at(level) for curve in curves) if t is not None]
            for curves in (arm, reference)
        ]
        if all(logs):
            at = welch(logs[0], logs[1])
            found.append(LevelRatio(level, float(10**at.estimate), _powers(at.ci)))
    return Parallel(float(10**test.estimate), _powers(test.ci), test.p, same, tuple(found))


def _powers(ci: Interval | None) -> Interval | None:
    return None if ci is None else (float(10 ** ci[0]), float(10 ** ci[1]))
