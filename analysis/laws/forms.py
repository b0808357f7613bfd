"""How far T50 depends on the form of the curve: logistic, Gompertz, and no form at all.

Gompertz:  p(x) = L + (U - L) exp(-ln 2 * e^{-k (x - m)}),  half-way at x = m as the logistic is.

Real curves are neither. The spread over forms is an error that no interval over seeds contains.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from analysis.laws.emergence import SLOPE_BOUNDS, Curve

Floats = NDArray[np.float64]
LN2 = float(np.log(2.0))
FORM_MATTERS = 1.25  # largest over smallest T50 from which on the form is worth a flag


@dataclass(frozen=True)
class Forms:
    """T50 in tokens by form; half_way: where straight lines between points over log tokens first reach (L + U) / 2 of
    the logistic. spread: the largest over the smallest. gompertz_better: its squared error is the smaller."""

    logistic: float
    gompertz: float | None
    half_way: float | None
    gompertz_better: bool

    @property
    def spread(self) -> float:
        found = [t for t in (self.logistic, self.gompertz, self.half_way) if t is not None]
        return max(found) / min(found)


def gompertz(x: Floats, floor: float, upper: float, midpoint: float, slope: float) -> Floats:
    """Values at x = log10 tokens."""
    return np.asarray(floor + (upper - floor) * np.exp(-LN2 * np.exp(np.clip(-slope * (x - midpoint), -700, 50))))


def forms(tokens: ArrayLike, value: ArrayLike, curve: Curve) -> Forms | None:
    """T50 by form, on the points that gave `curve`; None where it has no T50."""
    if curve.t50_tokens is None or curve.upper is None or curve.slope is None or curve.midpoint is None:
        return None
    t, y = np.asarray(tokens, dtype=float), np.asarray(value, dtype=float)
    keep = np.isfinite(t) & np.isfinite(y) & (t > 0)
    order = np.argsort(t[keep], kind="stable")
    x, y = np.log10(t[keep][order]), y[keep][order]
    low, high = x[0] - np.ptp(x), x[-1] + np.ptp(x)
    floor = curve.floor

    def residual(theta: Floats) -> Floats:
        return np.asarray(gompertz(x, floor, theta[2], theta[0], theta[1]) - y)

    fits = [
        least_squares(
            residual, [np.clip(curve.midpoint + move, low, high), np.clip(k, *SLOPE_BOUNDS), curve.upper],
            bounds=([low, SLOPE_BOUNDS[0], floor], [high, SLOPE_BOUNDS[1], 1.0 + 1e-9]), x_scale=[0.1, 1.0, 0.1],
        )
        for move, k in ((0.0, 0.75 * curve.slope), (-0.1, 0.5 * curve.slope))
    ]  # fmt: skip
    best = min(fits, key=lambda fit: fit.cost)
    m, k, upper = best.x
    end = gompertz(x[-1:], floor, upper, m, k)[0]
    sound = end >= floor + 0.8 * (upper - floor)  # half-way to a ceiling not in sight is no T50
    logistic_cost = 0.5 * float(((curve.at(10**x) - y) ** 2).sum())
    return Forms(
        curve.t50_tokens,
        float(10**m) if sound else None,
        _first_reached(x, y, (floor + curve.upper) / 2),
        bool(best.cost < logistic_cost),
    )


def _first_reached(x: Floats, y: Floats, level: float) -> float | None:
    above = np.flatnonzero(y >= level)
    if not len(above) or above[0] == 0:
        return None
    i = int(above[0])
    share = (level - y[i - 1]) / (y[i] - y[i - 1])
    return float(10 ** (x[i - 1] + share * (x[i] - x[i - 1])))
