"""When a capability emerges: one logistic curve a seed over x = log10 tokens.

    p(x) = L + (U - L) * sigmoid(k (x - m)),   T50 = 10^m

Fitted by quasi-binomial likelihood. Outcomes are bimodal: a seed emerges or stays stuck, and a stuck seed is not given
a curve (its likelihood is flat and any midpoint would do) but is censored at its last tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit

SLOPE_BOUNDS = (0.3, 60.0)  # k, per decade of tokens
FEWEST_POINTS = 5
PLATEAU = 0.8  # share of the rise that the fitted curve must have made at the last point
ABOVE = 0.05  # a last point so far above the fitted ceiling says that the curve rises a second time
LARGEST_FALL = 0.2  # share of the rise that a curve may lose after its peak and still count as monotone
EDGE = 1e-6  # keeps p off 0 and 1, where the likelihood is infinite

NEVER_EMERGED = "never emerged"
NO_PLATEAU = "no plateau"
NON_MONOTONE = "non-monotone"
ENDS_ABOVE = "ends above its fitted ceiling"
SLOPE_AT_BOUND = "k at bound"
TOO_FEW_POINTS = "too few points"
EMERGED_BEFORE = "emerged before the first point"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """The emergence of one seed. Tokens are plain counts; `midpoint` m and its error are in log10 tokens.

    emerged: a point reached `level`. floor: L. ceiling: U, None without a plateau: U is then a guess, and with it m.
    midpoint, slope, upper: the fit, None where the seed never emerged, its curve falls again or is too thin to fit.
    crossing_tokens: where the straight line between two points over log tokens first reaches `level`. bracket: (last
    tokens below, first tokens at or above) `level`; the second is None for a censored seed, the first for one that was
    above from the start. midpoint_se: error within this one curve, scaled by the dispersion; it says nothing of the
    spread between seeds. dispersion: phi, how many times the squared residuals exceed those of independent answers (1:
    binomial); None where the number of answers is not known, without which it has no meaning.
    """

    level: float
    emerged: bool
    floor: float
    ceiling: float | None
    midpoint: float | None
    midpoint_se: float | None
    slope: float | None
    dispersion: float | None
    upper: float | None  # fitted U, with a plateau or without: to draw
    crossing_tokens: float | None
    bracket: tuple[float | None, float | None]
    last_tokens: float
    last_value: float
    flags: tuple[str, ...]

    @property
    def t50_tokens(self) -> float | None:
        """10^m, None without a fit or without a plateau: half-way to an unknown ceiling is unknown."""
        return None if self.midpoint is None or self.ceiling is None else float(10.0**self.midpoint)

    def tokens_at(self, value: float) -> float | None:
        """Tokens at which the fitted curve has `value`; None unless L < value < U."""
        if self.midpoint is None or self.slope is None or self.upper is None or not self.floor < value < self.upper:
            return None
        return float(10.0 ** (self.midpoint - np.log((self.upper - value) / (value - self.floor)) / self.slope))

    def at(self, tokens: ArrayLike) -> Floats:
        """Fitted values at `tokens`. Raises ValueError where there is no fitted curve."""
        if self.midpoint is None or self.slope is None or self.upper is None:
            raise ValueError(f"curve: no fit ({', '.join(self.flags)}); look at `midpoint` first")
        x = np.log10(np.asarray(tokens, dtype=float))
        return np.asarray(self.floor + (self.upper - self.floor) * expit(self.slope * (x - self.midpoint)))


def emergence_level(chance: float | None) -> float:
    """The value that counts as emerged: 0.5, or half-way from chance to 1 where guessing already gives 0.5 or more.

    It is fixed before the data are seen and the same for every arm, so no arm's ceiling moves another's verdict.
    """
    return 0.5 if chance is None or chance < 0.5 else (1.0 + chance) / 2.0


def fit_curve(
    tokens: ArrayLike,
    value: ArrayLike,
    chance: float | None = None,
    n_trials: float | None = None,
    level: float | None = None,
) -> Curve:
    """The emergence curve of one seed from `value` [points] in [0, 1] at `tokens` [points].

    chance: the floor L where it is known; None fits it. n_trials: answers behind each value, for the dispersion; no
    estimate or error depends on it. level: what counts as emerged, `emergence_level(chance)` by default.
    Points at 0 tokens have no logarithm and are left out, as are values that are not finite. Raises ValueError for
    unequal lengths, values outside [0, 1], or nothing left to fit.
    """
    x, y = _points(tokens, value)
    level = emergence_level(chance) if level is None else level
    crossing, bracket = _crossing(x, y, level)
    emerged = bool((y >= level).any())
    flags = [] if emerged else [NEVER_EMERGED]
    rise = float(y.max() - (y[0] if chance is None else chance))
    if y.max() - y[-1] > LARGEST_FALL * rise and (emerged or rise > 0.1):  # a stuck seed's noise is no fall
        flags.append(NON_MONOTONE)
    if emerged and bracket[0] is None:
        flags.append(EMERGED_BEFORE)
    if emerged and len(x) < FEWEST_POINTS:
        flags.append(TOO_FEW_POINTS)
    floor = float(y.min()) if chance is None else chance
    ceiling = midpoint = error = slope = dispersion = upper = None
    if not flags:  # each of the flags so far says that a logistic is the wrong description of these points
        floor, upper, midpoint, slope = _maximise(x, y, chance)
        p = _logistic(x, floor, upper, midpoint, slope)
        phi, error = _dispersion(x, y, p, (floor, upper, midpoint, slope), chance is None)
        dispersion = None if n_trials is None else n_trials * phi
        if slope > SLOPE_BOUNDS[1] * (1 - 1e-3) or slope < SLOPE_BOUNDS[0] * (1 + 1e-3):
            flags.append(SLOPE_AT_BOUND)
        if p[-1] < floor + PLATEAU * (upper - floor):
            flags.append(NO_PLATEAU)
        else:
            ceiling = upper
            if y[-1] > upper + ABOVE:
                flags.append(ENDS_ABOVE)
    return Curve(
        level, emerged, floor, ceiling, midpoint, error, slope, dispersion, upper, crossing, bracket,
        float(10.0 ** x[-1]), float(y[-1]), tuple(flags),
    )  # fmt: skip


def _points(tokens: ArrayLike, value: ArrayLike) -> tuple[Floats, Floats]:
    """(log10 tokens, values), ascending, both [points]."""
    t, y = np.asarray(tokens, dtype=float), np.asarray(value, dtype=float)
    if t.shape != y.shape or t.ndim != 1:
        raise ValueError(f"value: shape {y.shape} against tokens of shape {t.shape}; give one value for each point")
    keep = np.isfinite(t) & np.isfinite(y) & (t > 0)
    t, y = t[keep], y[keep]
    if not len(t):
        raise ValueError("tokens: no point with tokens above 0 and a finite value; nothing to fit")
    if y.min() < 0 or y.max() > 1:
        raise ValueError(f"value: {y.min():g} to {y.max():g} leaves [0, 1]; give a capability, not a score in percent")
    order = np.argsort(t, kind="stable")
    return np.log10(t[order]), y[order]


def _crossing(x: Floats, y: Floats, level: float) -> tuple[float | None, tuple[float | None, float | None]]:
    above = np.flatnonzero(y >= level)
    if not len(above):
        return None, (float(10.0 ** x[-1]), None)
    i = int(above[0])
    if i == 0:
        return None, (None, float(10.0 ** x[0]))
    share = (level - y[i - 1]) / (y[i] - y[i - 1])
    return float(10.0 ** (x[i - 1] + share * (x[i] - x[i - 1]))), (float(10.0 ** x[i - 1]), float(10.0 ** x[i]))


def _logistic(x: Floats, floor: float, upper: float, midpoint: float, slope: float) -> Floats:
    return np.clip(floor + (upper - floor) * expit(slope * (x - midpoint)), EDGE, 1 - EDGE)


def _maximise(x: Floats, y: Floats, chance: float | None) -> tuple[float, float, float, float]:
    """(L, U, m, k) of the greatest quasi-likelihood.

    Free parameters are (m, log k, r[, L]) with U = L + r (1 - L), so that L <= U <= 1 is a box. Starts: the best cells
    of a grid over (m, k), each with its least-squares rise; the best polished one is accepted.
    """
    width = float(x[-1] - x[0])
    low, high = x[0] - width, x[-1] + width

    def loss(theta: Floats) -> tuple[float, Floats]:
        m, k, r = theta[0], np.exp(theta[1]), theta[2]
        floor = theta[3] if chance is None else chance
        s = expit(k * (x - m))
        p = floor + r * (1 - floor) * s
        inside = (p > EDGE) & (p < 1 - EDGE)
        p = np.clip(p, EDGE, 1 - EDGE)
        by_p = np.where(inside, (p - y) / (p * (1 - p)), 0.0)  # d loss / d p
        bend = r * (1 - floor) * s * (1 - s)
        grad = [-k * (by_p * bend).sum(), k * (by_p * bend * (x - m)).sum(), (1 - floor) * (by_p * s).sum()]
        if chance is None:
            grad.append((by_p * (1 - r * s)).sum())
        return float(-(y * np.log(p) + (1 - y) * np.log1p(-p)).sum()), np.array(grad)

    bounds = [(low, high), (np.log(SLOPE_BOUNDS[0]), np.log(SLOPE_BOUNDS[1])), (1e-3, 1.0)]
    if chance is None:
        bounds.append((0.0, 0.5))
    fits = [
        minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-13, "gtol": 1e-8})
        for start in _starts(x, y, chance)
    ]
    best = min(fits, key=lambda fit: fit.fun).x
    floor = float(best[3]) if chance is None else chance
    return floor, floor + float(best[2]) * (1 - floor), float(best[0]), float(np.exp(best[1]))


def _starts(x: Floats, y: Floats, chance: float | None, count: int = 4) -> list[Floats]:
    floor = float(y.min()) if chance is None else chance
    midpoints = np.linspace(x[0], x[-1], 24)
    slopes = np.geomspace(1.0, 40.0, 8)
    m, k = (grid.ravel() for grid in np.meshgrid(midpoints, slopes))
    s = expit(k[:, None] * (x - m[:, None]))  # [grid, points]
    r = np.clip((s @ (y - floor)) / ((s * s).sum(1) * (1 - floor)), 0.05, 1.0)
    squares = ((floor + r[:, None] * (1 - floor) * s - y) ** 2).sum(1)
    best = np.argsort(squares, kind="stable")
    spread = [int(best[0])]  # starts apart from one another, or all polish to one basin
    for i in map(int, best):
        if len(spread) == count:
            break
        if all(abs(m[i] - m[j]) > 0.1 * (x[-1] - x[0]) or abs(np.log(k[i] / k[j])) > 1 for j in spread):
            spread.append(i)
    return [np.array([m[i], np.log(k[i]), r[i]] + ([floor] if chance is None else [])) for i in spread]


def _dispersion(
    x: Floats, y: Floats, p: Floats, at: tuple[float, float, float, float], free_floor: bool
) -> tuple[float, float | None]:
    """(phi at one answer a value, error of m): Pearson's chi-square over the degrees of freedom, and Fisher's error
    scaled by it, from which the number of answers cancels."""
    floor, upper, m, k = at
    s = expit(k * (x - m))
    bend = (upper - floor) * s * (1 - s)
    columns = [-k * bend, bend * (x - m), s] + ([1 - s] if free_floor else [])
    jacobian = np.stack(columns, axis=1)  # [points, parameters]
    weight = 1 / (p * (1 - p))
    phi = float((weight * (y - p) ** 2).sum() / max(1, len(x) - jacobian.shape[1]))
    variance = float(np.linalg.pinv(jacobian.T @ (weight[:, None] * jacobian))[0, 0])
    return phi, float(np.sqrt(phi * variance)) if variance > 0 else None
