"""One law a group, or one law whose exponents all groups share: which do the data ask for?

The joint law gives every group its own E, A and B and all groups one alpha and one beta. The likelihood ratio is that
of Laplace errors, whose likelihood a narrow Huber loss is: 2 n log(S_joint / S_apart). Its distribution under shared
exponents is not chi-square at few points: it is drawn, by refitting both to residuals resampled about the joint law.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.laws.huber import Problem, minimise
from analysis.laws.scaling import DELTA, EXPONENT_BOUNDS, Form, Interval, Law, Points, stated

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Joint:
    """exponents: the shared ones. p: of shared exponents, None with one group. bic_apart, bic_joint: smaller is better.

    at: E, A, B by group under the joint law.
    """

    exponents: dict[str, float]
    objective: float
    ratio: float
    p: float
    bic_apart: float
    bic_joint: float
    at: dict[str, dict[str, float]]


def joint_law(
    groups: Mapping[str, Points], laws: Mapping[str, Law], form: Form, replicates: int = 199, seed: int = 0,
    limits: Mapping[str, Interval] | None = None,
) -> Joint:  # fmt: skip
    """The joint law of `groups` against their own `laws`. Raises ValueError for fewer than two groups."""
    if len(groups) < 2:
        raise ValueError(f"groups: {len(groups)}; exponents are shared between two at least")
    bounds = {power: (limits or {}).get(power, EXPONENT_BOUNDS) for power in form.powers}
    names = list(groups)
    parts = [stated(groups[name], form, bounds) for name in names]
    problem = _together([part for part, _ in parts], form)
    y = np.concatenate([np.log(groups[name].loss) for name in names])[None]
    sizes = [len(groups[name]) for name in names]
    starts = _starts([laws[name].theta for name in names], form, len(names))
    theta, losses = minimise(problem, starts, y, np.ones_like(y))
    best, shared = theta[losses.argmin()], float(losses.min())
    apart = sum(law.objective for law in laws.values())
    n = int(y.size)
    count = len(form.powers)
    ratio = 2 * n * np.log(max(shared, 1e-300) / max(apart, 1e-300))

    rng = np.random.default_rng(seed)
    fitted = problem.predicted(best)
    spare = max(1, n - problem.terms.shape[2])
    residual = (y[0] - fitted) * np.sqrt(n / spare)
    drawn = fitted + residual[rng.integers(0, n, (replicates, n))]
    _, joint_loss = minimise(problem, np.repeat(best[None], replicates, 0), drawn, np.ones((1, n)))
    apart_loss = np.zeros(replicates)
    ends = np.cumsum([0, *sizes])
    for i, (part, name) in enumerate(zip((part for part, _ in parts), names, strict=True)):
        mine = drawn[:, ends[i] : ends[i + 1]]
        _, own = minimise(part, np.repeat(laws[name].theta[None], replicates, 0), mine, np.ones((1, sizes[i])))
        apart_loss += own
    null = 2 * n * np.log(np.maximum(joint_loss, 1e-300) / np.maximum(apart_loss, 1e-300))
    at = {}
    for i, (name, (_, centre)) in enumerate(zip(names, parts, strict=True)):
        own_terms = best[_own(i, form, len(names))]
        at[name] = {"E": float(np.exp(own_terms[-1])) if form.constant else 0.0}
        for j, power in enumerate(form.powers):
            exponent = best[j]
            at[name]["A" if power == "alpha" else "B"] = float(np.exp(own_terms[j] + exponent * centre[power]))
    many, few = len(names) * form.parameters, count + len(names) * (count + form.constant)
    return Joint(
        {power: float(best[j]) for j, power in enumerate(form.powers)},
        shared,
        float(ratio),
        float((1 + (null >= ratio).sum()) / (1 + replicates)),
        float(2 * n * np.log(max(apart, 1e-300)) + many * np.log(n)),
        float(2 * n * np.log(max(shared, 1e-300)) + few * np.log(n)),
        at,
    )


def _own(group: int, form: Form, groups: int) -> slice:
    """Where a group's own terms stand among the parameters: after the shared exponents."""
    width = len(form.powers) + form.constant
    first = len(form.powers) + group * width
    return slice(first, first + width)


def _together(parts: Sequence[Problem], form: Form) -> Problem:
    count, groups = len(form.powers), len(parts)
    width = count + groups * (count + form.constant)
    points = sum(part.terms.shape[1] for part in parts)
    terms = np.zeros((count + form.constant, points, width))
    lower, upper = np.zeros((2, width))
    row = 0
    for group, part in enumerate(parts):
        n = part.terms.shape[1]
        own = _own(group, form, groups)
        kept = [*range(count), *([2 * count] if form.constant else [])]  # log terms, and log E
        terms[:, row : row + n, own] = part.terms[:, :, kept]
        terms[:, row : row + n, :count] = part.terms[:, :, count : 2 * count]
        lower[own], upper[own] = part.lower[kept], part.upper[kept]
        lower[:count], upper[:count] = part.lower[count : 2 * count], part.upper[count : 2 * count]
        row += n
    return Problem(terms, lower, upper, DELTA)


def _starts(thetas: Sequence[Floats], form: Form, groups: int) -> Floats:
    """From the groups' own terms, with the exponents of each group in turn, their mean, and a grid about it."""
    count = len(form.powers)
    kept = [*range(count), *([2 * count] if form.constant else [])]
    own = np.concatenate([theta[kept] for theta in thetas])
    each = np.stack([theta[count : 2 * count] for theta in thetas])
    middle = each.mean(0)
    grid = np.stack(np.meshgrid(*[[0.5, 1.0, 1.5]] * count), axis=-1).reshape(-1, count) * middle
    return np.stack([np.concatenate([exponents, own]) for exponents in (*each, *grid)])
