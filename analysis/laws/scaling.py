"""Scaling laws: loss over parameters N and tokens D.

    L(N, D) = E + A / N^alpha + B / D^beta

with or without the constant E, and in one variable alone. Fitted on log loss in log-sum-exp form with a Huber loss
(Hoffmann et al. 2022, arXiv 2203.15556, Approach 3), N and D centred at their mean logarithm. The loss has several
basins: the optimum is the best of many fixed starts on the true loss, accepted when a second set of starts agrees.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import qmc

from analysis.laws.huber import Problem, minimise

Floats = NDArray[np.float64]
Interval = tuple[float, float]

TERM_OF = {"alpha": "A", "beta": "B"}
DELTA = 1e-3  # Huber's width on log loss
EXPONENT_BOUNDS = (1e-3, 3.0)
AGREEMENT = 1e-6  # between the optima of two sets of starts, relative
ILL_CONDITIONED, UNIDENTIFIED = 1e3, 1e6
SAME_RATIO = 5e-3  # spread of log(D / N) below which a design is one ray
ZERO = 1e-6  # a term below this share of the loss is none at all
VANISHED = 45.0  # how far below the smallest loss, in logarithms, a term without effect is put


@dataclass(frozen=True)
class Form:
    """Which terms a law has."""

    name: str
    size: bool = True
    data: bool = True
    constant: bool = True

    @property
    def powers(self) -> tuple[str, ...]:
        """("alpha", "beta"), or one of them."""
        return ("alpha",) * self.size + ("beta",) * self.data

    @property
    def parameters(self) -> int:
        return 2 * len(self.powers) + self.constant


FORMS = {
    form.name: form
    for form in (
        Form("chinchilla"),
        Form("no-constant", constant=False),
        Form("size", data=False),
        Form("data", size=False),
        Form("size-no-constant", data=False, constant=False),
        Form("data-no-constant", size=False, constant=False),
    )
}


@dataclass(frozen=True)
class Points:
    """Losses with their N and D, all [points], finite and positive. n or d may be None where the form has no such term.

    Raises ValueError naming the first value that is not finite and positive.
    """

    loss: Floats
    n: Floats | None = None
    d: Floats | None = None

    def __post_init__(self) -> None:
        for name, values in (("loss", self.loss), ("n", self.n), ("d", self.d)):
            if values is None:
                continue
            if values.shape != self.loss.shape or values.ndim != 1:
                raise ValueError(f"{name}: shape {values.shape} against {self.loss.shape} losses; give one a point")
            wrong = ~(np.isfinite(values) & (values > 0))
            if wrong.any():
                raise ValueError(
                    f"{name}: {values[wrong][0]:g} is not a finite number above 0, which a logarithm needs"
                )

    def __len__(self) -> int:
        return len(self.loss)

    def variable(self, power: str) -> Floats:
        """N of alpha, D of beta. Raises ValueError where it is absent."""
        values = self.n if power == "alpha" else self.d
        if values is None:
            raise ValueError(f"{'n' if power == 'alpha' else 'd'}: the law has this term and the points have no column")
        return values

    def take(self, where: NDArray[np.bool_]) -> "Points":
        return Points(
            self.loss[where], None if self.n is None else self.n[where], None if self.d is None else self.d[where]
        )


@dataclass(frozen=True)
class Law:
    """A fitted law. theta: (log terms at the centre, exponents[, log E]); centre: mean ln N and ln D by exponent.

    objective: the sum of Huber losses of log residuals. agreed: two sets of starts found the same optimum. condition:
    condition number of the column-scaled Jacobian. at_bound: exponents on their bound. vanished: those of E, A, B that
    add nothing to any point.
    """

    form: Form
    theta: Floats
    centre: Mapping[str, float]
    objective: float
    points: int
    agreed: bool
    condition: float
    at_bound: tuple[str, ...]
    vanished: tuple[str, ...]
    limits: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """E, A, B, alpha, beta as far as the form has them; what vanished is 0."""
        found = {name: float(value) for name, value in natural(self.form, self.theta, self.centre).items()}
        return found | dict.fromkeys(self.vanished, 0.0)

    def predict(self, n: ArrayLike | None = None, d: ArrayLike | None = None) -> Floats:
        """Loss at n and d, broadcast against each other."""
        return predict(self.form, self.theta, self.centre, n, d)


def natural(form: Form, theta: Floats, centre: Mapping[str, float]) -> dict[str, Floats]:
    """E, A, B, alpha, beta [...] of theta [..., parameters]; E is 0 where the form has none."""
    powers = form.powers
    found: dict[str, Floats] = {"E": np.exp(theta[..., -1]) if form.constant else np.zeros(theta.shape[:-1])}
    for i, power in enumerate(powers):
        exponent = theta[..., len(powers) + i]
        with np.errstate(over="ignore"):
            found[TERM_OF[power]] = np.exp(theta[..., i] + exponent * centre[power])
        found[power] = exponent
    return found


def predict(form: Form, theta: Floats, centre: Mapping[str, float], n: ArrayLike | None, d: ArrayLike | None) -> Floats:
    """Losses of theta [..., parameters] at one n and d, or of one theta at n and d [points]."""
    total = np.exp(theta[..., -1]) if form.constant else np.zeros(theta.shape[:-1])
    for i, power in enumerate(form.powers):
        at = np.log(np.asarray(n if power == "alpha" else d, dtype=float)) - centre[power]
        total = total + np.exp(theta[..., i] - theta[..., len(form.powers) + i] * at)
    return np.asarray(total)


def fit_law(points: Points, form: Form, bounds: Mapping[str, Interval] | None = None) -> Law:
    """The optimum of `form` on `points`. bounds: of alpha and beta, EXPONENT_BOUNDS by default.

    Raises ValueError for fewer distinct points than parameters, and for a variable with a single value.
    """
    _enough(points, form)
    limits = {power: (bounds or {}).get(power, EXPONENT_BOUNDS) for power in form.powers}
    problem, centre = stated(points, form, limits)
    y = np.log(points.loss)[None]
    theta, loss, agreed = _optimum(problem, form, y, limits)
    if form.constant:
        theta, loss = _without_constant(points, form, limits, theta, loss)
    gone = vanished_terms(problem, form, theta)
    at = tuple(
        power
        for i, power in enumerate(form.powers)
        if np.isclose(theta[len(form.powers) + i], limits[power], rtol=1e-6, atol=1e-9).any()
        and TERM_OF[power] not in gone
    )
    condition = condition_number(problem, _split(form, theta) if one_ray(points) else theta)
    return Law(form, theta, centre, loss, len(points), agreed, condition, at, gone, limits)


def stated(points: Points, form: Form, limits: Mapping[str, Interval]) -> tuple[Problem, dict[str, float]]:
    """The problem that `fit_law` solves, and the mean logarithms it is centred at."""
    count, width = len(form.powers), form.parameters
    terms = np.zeros((count + form.constant, len(points), width))
    y = np.log(points.loss)
    # A term may exceed the loss at the centre where a small model or budget is far from it: by exp(8) at most.
    lower, upper = np.full(width, y.min() - VANISHED), np.full(width, y.max() + 8.0)
    centre = {}
    for i, power in enumerate(form.powers):
        x = np.log(points.variable(power))
        centre[power] = float(x.mean())
        terms[i, :, i], terms[i, :, count + i] = 1.0, centre[power] - x
        lower[count + i], upper[count + i] = limits[power]
    if form.constant:
        terms[-1, :, -1] = 1.0
    return Problem(terms, lower, upper, DELTA), centre


def vanished_terms(problem: Problem, form: Form, theta: Floats) -> tuple[str, ...]:
    """Those of E, A, B whose share of the loss is below ZERO at every point."""
    largest = problem.shares(theta).max(-1)
    names = (*(TERM_OF[power] for power in form.powers), *("E",) * form.constant)
    return tuple(name for name, share in zip(names, largest, strict=True) if share < ZERO)


def condition_number(problem: Problem, theta: Floats) -> float:
    """Of the Jacobian of log loss by theta, columns scaled to one length, terms that vanished left out."""
    jacobian = problem.jacobian(theta)
    length = np.linalg.norm(jacobian, axis=0)
    keep = length > ZERO * length.max()
    singular = np.linalg.svd(jacobian[:, keep] / length[keep], compute_uv=False)
    return float(min(singular[0] / max(singular[-1], 1e-300), 1e18))


def one_ray(points: Points) -> float | None:
    """D / N where it is the same at every point, so that A and B cannot be told apart; else None."""
    if points.n is None or points.d is None:
        return None
    logs = np.log(points.d / points.n)
    return float(np.exp(logs.mean())) if np.ptp(logs) < SAME_RATIO else None


def _split(form: Form, theta: Floats) -> Floats:
    """theta with the larger power term shared evenly between A and B: another law of the same values on one ray."""
    i = int(theta[0] < theta[1])
    even = theta.copy()
    even[:2], even[2:4] = theta[i] - np.log(2), theta[2 + i]
    return even


def _enough(points: Points, form: Form) -> None:
    for power in form.powers:
        values = points.variable(power)
        if len(np.unique(values)) < 2:
            name = "n" if power == "alpha" else "d"
            raise ValueError(
                f"{name}: every point has {values[0]:g}; {power} needs two values at least, "
                f"or use the law of the other variable alone"
            )
    columns = [np.log(points.loss)] + [np.log(points.variable(power)) for power in form.powers]
    distinct = len(np.unique(np.stack(columns, axis=1), axis=0))
    if distinct < form.parameters:
        raise ValueError(f"points: {distinct} distinct ones for the {form.parameters} parameters of {form.name}")


def _optimum(problem: Problem, form: Form, y: Floats, limits: Mapping[str, Interval]) -> tuple[Floats, float, bool]:
    """(theta, loss, whether two sets of starts agree). A third and fourth are asked where they do not."""
    ones = np.ones_like(y)
    best, seen = None, np.inf
    for which in range(4):
        theta, loss = minimise(problem, _starts(form, y[0], limits, which), y, ones)
        i = int(loss.argmin())
        agreed = best is not None and abs(float(loss[i]) - seen) <= AGREEMENT * max(seen, 1e-12)
        if loss[i] < seen:
            best, seen = theta[i], float(loss[i])
        if agreed:
            break
    assert best is not None
    return best, seen, agreed


def _starts(form: Form, y: Floats, limits: Mapping[str, Interval], which: int) -> Floats:
    """Starts [starts, parameters] from a fixed sequence: exponents over their usual range, shares of the loss."""
    count = len(form.powers)
    place = qmc.Sobol(2 * count + form.constant, seed=which).random(32 if form.constant else 16)
    theta = np.zeros((len(place), form.parameters))
    weights = -np.log(np.clip(place[:, count:], 1e-3, 1 - 1e-3))
    shares = np.log(weights / weights.sum(1, keepdims=True))
    for i, power in enumerate(form.powers):
        low, high = (np.clip(limit, *limits[power]) for limit in (0.03, 1.5))
        theta[:, count + i] = low * (high / low) ** place[:, i] if low > 0 else place[:, i] * high
        theta[:, i] = np.median(y) + shares[:, i]
    if form.constant:
        theta[:, -1] = np.minimum(np.median(y) + shares[:, -1], y.min())
    return theta


def _without_constant(
    points: Points, form: Form, limits: Mapping[str, Interval], theta: Floats, loss: float
) -> tuple[Floats, float]:
    """E put VANISHED below the losses where that is as good: log E has no optimum there, only a dying slope."""
    bare = Form("", form.size, form.data, constant=False)
    problem, _ = stated(points, bare, limits)
    y = np.log(points.loss)[None]
    found, losses = minimise(problem, theta[None, :-1], y, np.ones_like(y))
    if np.exp(theta[-1]) < ZERO * points.loss.min() or losses[0] <= loss * (1 + 1e-9):
        return np.append(found[0], np.log(points.loss.min()) - VANISHED), float(losses[0])
    return theta, loss
