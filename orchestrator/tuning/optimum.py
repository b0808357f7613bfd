"""Where a tuning curve has its minimum, and the law these minima follow over sizes."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

EDGE = 0.1  # outer share of the range, in the logarithm, where a best rate says that the range was too narrow
WINDOW = math.log(3)  # trials this near the best one are fitted: loss curves are parabolas in ln LR near their minimum
FEWEST = 5  # trials that leave something over to judge the scatter by
COVERAGE = 0.95


@dataclass(frozen=True)
class Optimum:
    """The best rate of one arm at one size.

    method: "parabola", fitted to the trials near the best one, with its 95% interval low to high; or "best trial" where
    these show no valley: then low and high are the trials on either side, or the end of the range where there is none.
    at_edge: the end of the range it lies at, if any.
    """

    rate: float
    low: float
    high: float
    at_edge: str | None
    method: str


def find(rates: Sequence[float], losses: Sequence[float], low: float, high: float) -> Optimum:
    """The minimum of losses over rates, both of finished trials (one at least). low, high: the range searched."""
    x, y = np.log(rates), np.asarray(losses, float)
    ends = math.log(low), math.log(high)
    best = float(x[np.argmin(y)])
    near = np.abs(x - best) <= WINDOW
    found = _valley(x[near] - best, y[near])
    if found is not None:
        at, (left, right) = best + found[0], (best + end for end in found[1])
        left, right = max(left, ends[0]), min(right, ends[1])
    else:
        at, left, right = best, max(x[x < best], default=ends[0]), min(x[x > best], default=ends[1])
    margin = EDGE * (ends[1] - ends[0])
    edge = "low" if at < ends[0] + margin else "high" if at > ends[1] - margin else None
    method = "best trial" if found is None else "parabola"
    return Optimum(math.exp(at), math.exp(left), math.exp(right), edge, method)


def _valley(x: np.ndarray, y: np.ndarray) -> tuple[float, tuple[float, float]] | None:
    """(lowest point, its 95% interval by the delta method) of a parabola; None where it has none within the points."""
    free = len(x) - 3
    if len(set(x)) < FEWEST:
        return None
    (curve, slope, height), covariance = np.polyfit(x, y, 2, cov="unscaled")
    if curve <= 0 or not x.min() <= (at := -slope / (2 * curve)) <= x.max():
        return None
    variance = ((y - np.polyval((curve, slope, height), x)) ** 2).sum() / free
    gradient = np.array([slope / (2 * curve**2), -1 / (2 * curve), 0.0])
    half = stats.t.ppf((1 + COVERAGE) / 2, free) * math.sqrt(variance * gradient @ covariance @ gradient)
    return float(at), (float(at - half), float(at + half))


@dataclass(frozen=True)
class Law:
    """ln LR = intercept + slope ln N by least squares. slope_ci is None over two sizes: a line through two is exact."""

    intercept: float
    slope: float
    slope_ci: tuple[float, float] | None
    points: tuple[tuple[int, float, float, float], ...]  # (N, rate, low, high) of each size's optimum

    def rate(self, n: float) -> float:
        return math.exp(self.intercept + self.slope * math.log(n))

    def interval(self, n: float) -> tuple[float, float]:
        """Of LR(n), over three sizes and more: the 95% t interval of the line.

        Two leave nothing to judge the scatter by: there it is all that lines through the intervals of both give.
        """
        x = np.log([point[0] for point in self.points])
        at = math.log(n)
        if len(x) > 2:
            spread = _spread(x, np.log([point[1] for point in self.points]))
            half = spread * math.sqrt(1 / len(x) + (at - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())
            return self.rate(n) * math.exp(-half), self.rate(n) * math.exp(half)
        weights = [(x[1] - at) / (x[1] - x[0]), (at - x[0]) / (x[1] - x[0])]
        ends = [
            sum(
                weight * math.log(point[2 if (weight > 0) == lower else 3])
                for weight, point in zip(weights, self.points, strict=True)
            )
            for lower in (True, False)
        ]
        return math.exp(ends[0]), math.exp(ends[1])

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "points": [dict(zip(("n", "rate", "low", "high"), point, strict=True)) for point in self.points],
            "interval": "t" if len(self.points) > 2 else "through both intervals",
        }


def fit(points: Sequence[tuple[int, float, float, float]]) -> Law:
    """The law through (N, rate, low, high) of two sizes or more that differ in N."""
    points = sorted(points)
    x, y = np.log([point[0] for point in points]), np.log([point[1] for point in points])
    slope, intercept = np.polyfit(x, y, 1)
    ci = None
    if len(points) > 2:
        spread = _spread(x, y)
        half = spread / math.sqrt(((x - x.mean()) ** 2).sum())
        ci = (float(slope - half), float(slope + half))
    return Law(float(intercept), float(slope), ci, tuple(points))


def _spread(x: np.ndarray, y: np.ndarray) -> float:
    """t quantile times the residuals' standard deviation, of a line through three points or more."""
    slope, intercept = np.polyfit(x, y, 1)
    free = len(x) - 2
    variance = ((y - intercept - slope * x) ** 2).sum() / free
    return float(stats.t.ppf((1 + COVERAGE) / 2, free) * math.sqrt(variance))
