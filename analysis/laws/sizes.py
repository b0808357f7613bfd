"""T50 as a law of size: log10 T50 = a + b log10 N, and what it says of a larger model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.laws.intervals import Interval

FAR = 10.0  # times the largest size fitted: a prediction farther out says so


@dataclass(frozen=True)
class SizeLaw:
    """exponent: b. seeds: T50s fitted. sizes: distinct N among them. residual: their standard deviation in log10."""

    level: float
    exponent: float
    exponent_ci: Interval | None
    centre: float
    spread: float
    residual: float | None
    seeds: int
    sizes: int
    largest: float

    def predict(self, n: float, confidence: float = 0.95) -> tuple[float, Interval | None]:
        """T50 of one new seed of size n, with its prediction interval; None with fewer than three T50s."""
        away = np.log10(n) - self.centre
        middle = self.level + self.exponent * away
        if self.residual is None:
            return float(10**middle), None
        error = self.residual * np.sqrt(1 + 1 / self.seeds + away**2 / self.spread)
        wide = stats.t.ppf((1 + confidence) / 2, self.seeds - 2) * error
        return float(10**middle), (float(10 ** (middle - wide)), float(10 ** (middle + wide)))

    def far(self, n: float) -> bool:
        return n > FAR * self.largest


def size_law(n: Sequence[float], t50: Sequence[float]) -> SizeLaw:
    """Least squares over T50s [seeds] of sizes n [seeds]. Raises ValueError for fewer than two sizes."""
    x, y = np.log10(np.asarray(n, dtype=float)), np.log10(np.asarray(t50, dtype=float))
    sizes = len(np.unique(x))
    if sizes < 2:
        raise ValueError(f"sizes: {sizes} with a T50; a law of size needs two")
    line = stats.linregress(x, y)
    free = len(x) - 2
    residual = ci = None
    if free > 0:
        residual = float(np.sqrt(((y - line.intercept - line.slope * x) ** 2).sum() / free))
        wide = stats.t.ppf(0.975, free) * line.stderr
        ci = (float(line.slope - wide), float(line.slope + wide))
    return SizeLaw(
        float(y.mean()), float(line.slope), ci, float(x.mean()), float(((x - x.mean()) ** 2).sum()), residual, len(x),
        sizes, float(np.max(n)),
    )  # fmt: skip
