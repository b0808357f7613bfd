"""Compute-optimal sizes from IsoFLOP curves: at each budget C a parabola of loss over log N, and its minimum.

After Hoffmann et al. 2022 (arXiv 2203.15556), Approach 2: N* ~ C^a, D* ~ C^b with D* = C / (6 N*).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from analysis.laws.intervals import Interval

Floats = NDArray[np.float64]

SAME_BUDGET = 0.05  # budgets whose logarithms differ by less are one
FLOPS_A_TOKEN = 6.0  # times N


@dataclass(frozen=True)
class Minimum:
    """One budget's parabola. n, d: its minimum; None where it opens downwards or has fewer than three sizes.

    inside: the minimum lies between the smallest and the largest size that was trained. bend: of the parabola,
    loss + bend (ln N - ln n)^2.
    """

    flops: float
    sizes: int
    n: float | None
    d: float | None
    loss: float | None
    inside: bool
    bend: float | None = None


@dataclass(frozen=True)
class Optimal:
    """a, b: exponents of N* and D* over C, over the minima inside their range; Student's intervals."""

    minima: tuple[Minimum, ...]
    a: float | None
    a_ci: Interval | None
    b: float | None
    b_ci: Interval | None
    flags: tuple[str, ...]
    budgets: tuple[int, ...] = ()  # of each point, its place among minima


def isoflop(n: Sequence[float] | Floats, loss: Sequence[float] | Floats, flops: Sequence[float] | Floats) -> Optimal:
    """Minima by budget from points [points], and the exponents they follow. Raises ValueError where none has three."""
    size, y, c = (np.asarray(values, dtype=float) for values in (n, loss, flops))
    order = np.argsort(c, kind="stable")
    budget = np.concatenate([[0], np.cumsum(np.diff(np.log(c[order])) > SAME_BUDGET)])
    at_budget = np.empty(len(c), dtype=int)
    at_budget[order] = budget
    place = tuple(map(int, at_budget))
    minima = []
    for which in range(budget[-1] + 1):
        here = order[budget == which]
        minima.append(_minimum(size[here], y[here], float(np.exp(np.log(c[here]).mean()))))
    if all(row.sizes < 3 for row in minima):
        raise ValueError(f"sizes: at most {max(row.sizes for row in minima)} a budget; a parabola needs three")
    flags = [f"budget {row.flops:.3g}: fewer than three sizes" for row in minima if row.sizes < 3]
    flags += [f"budget {row.flops:.3g}: no minimum, the parabola opens downwards" for row in minima
              if row.sizes >= 3 and row.n is None]  # fmt: skip
    flags += [f"budget {row.flops:.3g}: minimum outside the sizes trained, left out" for row in minima
              if row.n is not None and not row.inside]  # fmt: skip
    used = [(row.flops, row.n) for row in minima if row.n is not None and row.inside]
    if len(used) < 2:
        return Optimal(tuple(minima), None, None, None, None, (*flags, "fewer than two minima: no exponents"), place)
    x, at = (np.log(column) for column in zip(*used, strict=True))
    line = stats.linregress(x, at)
    a, ci = float(line.slope), None
    if len(used) > 2:
        wide = float(stats.t.ppf(0.975, len(used) - 2) * line.stderr)
        ci = (a - wide, a + wide)
    else:
        flags.append("two minima: no interval")
    return Optimal(tuple(minima), a, ci, 1 - a, None if ci is None else (1 - ci[1], 1 - ci[0]), tuple(flags), place)


def _minimum(n: Floats, loss: Floats, flops: float) -> Minimum:
    x = np.log(n)
    sizes = len(np.unique(n))
    if sizes < 3:
        return Minimum(flops, sizes, None, None, None, False)
    middle = x.mean()
    bend, slope, level = np.polyfit(x - middle, loss, 2)
    if bend <= 0:
        return Minimum(flops, sizes, None, None, None, False)
    at = -slope / (2 * bend)
    best = float(np.exp(at + middle))
    inside = bool(x.min() <= at + middle <= x.max())
    lowest = float(level + slope * at + bend * at**2)
    return Minimum(flops, sizes, best, flops / (FLOPS_A_TOKEN * best), lowest, inside, float(bend))
