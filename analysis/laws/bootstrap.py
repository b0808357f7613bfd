"""How sure a scaling law is: refits of resampled data, all at once, started from the optimum.

Three ways to resample. "residual": every point keeps its N and D and gets another point's residual, so no size can be
missing from a replicate; the default, as sizes are few. "pairs": points drawn anew. "runs": whole runs drawn anew, for
checkpoints that share a run or a trunk, whose errors are one error.

Intervals are percentiles, moved outwards as Student's t is wider than a normal at few points (Hesterberg 2015,
arXiv 1411.5279, "expanded percentile"); residuals are scaled by sqrt(n / (n - p)). Coverage is held by a simulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from analysis.laws.huber import minimise
from analysis.laws.scaling import TERM_OF, ZERO, Form, Interval, Law, Points, natural, predict, stated

Floats = NDArray[np.float64]
Kind = Literal["residual", "pairs", "runs"]
KINDS: tuple[Kind, ...] = ("residual", "pairs", "runs")
FEWEST = 40  # replicates without which an end of a 95% interval is a guess


@dataclass(frozen=True)
class Replicates:
    """Refits of one law. theta: [replicates, parameters] of those that have an optimum. failed, at_bound: shares of all
    replicates without one (too few distinct points drawn), and with an exponent on its bound or E at 0. independent:
    points, or runs, behind them."""

    form: Form
    kind: Kind
    theta: Floats
    centre: Mapping[str, float]
    failed: float
    at_bound: float
    independent: int

    def values(self) -> dict[str, Floats]:
        """E, A, B, alpha, beta [replicates]."""
        return natural(self.form, self.theta, self.centre)

    def predict(self, n: float | None, d: float | None) -> Floats:
        """Losses [replicates] at one n and d."""
        return predict(self.form, self.theta, self.centre, n, d)

    def interval(self, values: Floats, confidence: float = 0.95) -> Interval | None:
        """The expanded percentile interval of a function of the replicates; None with too few of them."""
        spare = self.independent - self.form.parameters
        if len(values) < FEWEST or spare < 1:
            return None
        t = stats.t.ppf((1 + confidence) / 2, spare)
        # Residuals are already scaled by sqrt(n / (n - p)); pairs and runs are narrow by that factor.
        narrow = 1.0 if self.kind == "residual" else np.sqrt(self.independent / spare)
        outer = float(stats.norm.cdf(t * narrow))
        # Ranks p (B + 1): the customary p (B - 1) + 1 draws the tails of few replicates inwards.
        low, high = np.quantile(values, [1 - outer, outer], method="weibull")
        return float(low), float(high)


def bootstrap(
    points: Points, law: Law, kind: Kind = "residual", count: int = 400, runs: Sequence[object] | None = None,
    seed: int = 0,
) -> Replicates:  # fmt: skip
    """`count` refits of `law` to resampled `points`. runs: [points], the run of each, for kind "runs".

    Raises ValueError for kind "runs" without runs, or with fewer than three.
    """
    rng = np.random.default_rng(seed)
    problem, centre = stated(points, law.form, law.limits)
    y = np.log(points.loss)
    n, p = len(points), law.form.parameters
    weight, seen, independent = np.ones((1, n)), y[None], n
    if kind == "residual":
        fitted = problem.predicted(law.theta)
        residual = (y - fitted) * np.sqrt(n / max(1, n - p))
        seen = fitted + residual[rng.integers(0, n, (count, n))]
    else:
        run = np.arange(n) if kind == "pairs" else _numbered(runs)
        independent = int(run.max()) + 1
        drawn = rng.multinomial(independent, np.full(independent, 1 / independent), count).astype(float)
        weight = drawn[:, run]
    sound = np.ones(count, dtype=bool)
    for power in law.form.powers:  # an exponent needs two values of its variable
        _, value = np.unique(points.variable(power), return_inverse=True)
        present = np.stack([weight[:, value == i].any(1) for i in range(value.max() + 1)], axis=1)
        sound &= present.sum(1) >= 2
    sound &= (weight > 0).sum(1) >= p
    theta, _ = minimise(problem, np.repeat(law.theta[None], count, axis=0), seen, weight)
    exponents = theta[:, len(law.form.powers) : 2 * len(law.form.powers)]
    limits = np.array([law.limits[power] for power in law.form.powers])
    bound = (np.isclose(exponents, limits[:, 0], rtol=1e-6) | np.isclose(exponents, limits[:, 1], rtol=1e-6)).any(1)
    if law.form.constant:
        bound |= np.exp(theta[:, -1]) < ZERO * points.loss.min()
    at_bound = float(bound[sound].mean()) if sound.any() else 0.0
    return Replicates(
        law.form, kind, theta[sound], centre, float(1 - sound.mean()), at_bound, independent,
    )  # fmt: skip


def spread(replicates: Replicates) -> dict[str, float]:
    """Standard errors of E, alpha, beta, and of ln A and ln B, whose own have no finite variance."""
    found = {}
    for name, values in replicates.values().items():
        if name in TERM_OF.values():
            found[f"ln_{name}"] = float(np.log(values).std(ddof=1))
        elif name != "E" or replicates.form.constant:
            found[name] = float(values.std(ddof=1))
    return found


def _numbered(runs: Sequence[object] | None) -> NDArray[np.int64]:
    if runs is None:
        raise ValueError("runs: the bootstrap of whole runs needs the run of each point; name its column")
    _, numbers = np.unique(np.asarray([str(run) for run in runs]), return_inverse=True)
    if numbers.max() < 2:
        raise ValueError(f"runs: {numbers.max() + 1} of them; whole runs cannot be resampled from fewer than 3")
    return np.asarray(numbers, dtype=np.int64)
