"""When one arm's capability emerges, over its seeds.

Finished cells are fitted; others never are. A seed that never emerged is censored: it stays in every count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from analysis.axes import loss_at
from analysis.laws.censored import Bracket, location
from analysis.laws.emergence import Curve, fit_curve
from analysis.laws.forms import FORM_MATTERS, Forms, forms
from analysis.laws.intervals import Interval, mean_interval, share_interval

ONE_SEED = "one seed: no interval"
ONE_T50 = "one seed has a T50: no interval"
NO_SEED = "no finished seed"
NO_SPREAD = "no spread between seeds: no interval"


@dataclass(frozen=True)
class Condition:
    """What two arms must share to be compared."""

    data: str
    size: str


@dataclass(frozen=True)
class Question:
    """What the study asks: when `capability` (a metric in [0, 1]) emerges, against the arm `reference`.

    chance: value of guessing. margin: difference of ceilings that counts as the same. level: what counts as emerged.
    """

    capability: str
    chance: float | None
    reference: str
    margin: float
    level: float


@dataclass(frozen=True)
class SeedCurve:
    """One finished cell's emergence. forms: its T50 by form of curve, None without a T50. loss: at its T50."""

    id: str
    seed: int
    curve: Curve
    forms: Forms | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Emergence:
    """One arm under one condition, over its finished seeds.

    t50_tokens: geometric mean over the seeds that have one, t50_ci its 95% t interval over seeds. ceiling: mean U
    over seeds with a plateau. slope: mean k. crossing_tokens: geometric mean over the seeds that emerged. censored:
    seeds that never emerged. share_ci: exact binomial interval. The cells are those of the largest budget:
    smaller ones of the same seed are the same training seen earlier, not further evidence. form_spread: largest over
    smallest T50 among forms of curve, geometric mean over seeds: an error that no interval here contains.
    t50_flops: T50 in training FLOPs. t50_loss: mean loss at T50 over the seeds that have both, with its t interval.
    dispersion: mean phi over the fitted seeds. median_tokens: median T50 of all seeds by the censored lognormal model,
    those that never emerged counted as later than their last tokens, median_ci its profile interval; None where no
    seed emerged.
    """

    arm: str
    condition: Condition
    budget_tokens: int
    seeds: tuple[SeedCurve, ...]
    t50_tokens: float | None
    t50_ci: Interval | None
    floor: float
    ceiling: float | None
    ceiling_ci: Interval | None
    slope: float | None
    crossing_tokens: float | None
    median_tokens: float | None
    median_ci: Interval | None
    t50_flops: float | None
    t50_flops_ci: Interval | None
    t50_loss: float | None
    t50_loss_ci: Interval | None
    flops_per_token: float | None
    dispersion: float | None
    form_spread: float | None
    share_emerged: float | None
    share_ci: Interval | None
    flags: tuple[str, ...]

    @property
    def emerged(self) -> int:
        return sum(seed.curve.emerged for seed in self.seeds)

    @property
    def censored(self) -> int:
        return len(self.seeds) - self.emerged

    @property
    def last_tokens(self) -> float | None:
        return max((seed.curve.last_tokens for seed in self.seeds), default=None)


def fit_arm(
    arm: str, condition: Condition, cells: pl.DataFrame, values: pl.DataFrame, question: Question,
    answers: Mapping[str, float] | None = None, losses: pl.DataFrame | None = None,
) -> Emergence:  # fmt: skip
    """cells: rows of runs of this arm, at one budget, with flops_per_token where known. values: rows of metrics (id,
    tokens, value) of the capability. answers: behind each value, by id. losses: rows (id, tokens, value), ascending."""
    seeds, flags = [], []
    for cell in cells.filter(pl.col("state") == "finished").iter_rows(named=True):
        mine = values.filter((pl.col("id") == cell["id"]) & (pl.col("tokens") > 0))
        if mine.is_empty():
            flags.append(f"seed {cell['seed']}: not measured")
            continue
        tokens, value = mine["tokens"].to_numpy(), mine["value"].to_numpy()
        curve = fit_curve(tokens, value, question.chance, (answers or {}).get(cell["id"]), question.level)
        loss = None if losses is None else loss_at(curve.t50_tokens, losses.filter(pl.col("id") == cell["id"]))
        seeds.append(SeedCurve(cell["id"], cell["seed"], curve, forms(tokens, value, curve), loss))
    curves = [seed.curve for seed in seeds]
    for flag in dict.fromkeys(flag for curve in curves for flag in curve.flags):
        flags.append(f"{flag}: {sum(flag in curve.flags for curve in curves)} of {len(curves)} seeds")
    logs = [np.log10(t) for t in (curve.t50_tokens for curve in curves) if t is not None]
    crossings = [np.log10(t) for t in (curve.crossing_tokens for curve in curves) if t is not None]
    ceilings = [curve.ceiling for curve in curves if curve.ceiling is not None]
    spreads = [np.log10(seed.forms.spread) for seed in seeds if seed.forms]
    form_spread = power(mean(spreads))
    if form_spread is not None and form_spread > FORM_MATTERS:
        flags.append(f"T50 moves by {100 * (form_spread - 1):.0f}% with the form of the curve")
    slopes = [curve.slope for curve in curves if curve.slope is not None and curve.ceiling is not None]
    emerged = sum(curve.emerged for curve in curves)
    ci, ceiling_ci = mean_interval(logs), mean_interval(ceilings)
    at_t50 = [seed.loss for seed in seeds if seed.loss is not None]
    cost = None
    if "flops_per_token" in cells.columns and cells["flops_per_token"].n_unique() == 1:
        cost = cells["flops_per_token"][0]
    t50, t50_ci = power(mean(logs)), powers(ci)
    median, median_ci = t50, t50_ci
    if len(logs) < len(curves):
        median, median_ci = _median(seeds) if emerged else (None, None)
    if not curves:
        flags.append(NO_SEED)
    elif logs and ci is None:
        flags.append(NO_SPREAD if len(logs) > 1 else ONE_SEED if len(curves) == 1 else ONE_T50)
    floor = question.chance if question.chance is not None else mean([curve.floor for curve in curves])
    return Emergence(
        arm=arm,
        condition=condition,
        budget_tokens=cells["budget_tokens"][0],
        seeds=tuple(seeds),
        t50_tokens=t50,
        t50_ci=t50_ci,
        floor=0.0 if floor is None else floor,
        ceiling=mean(ceilings),
        ceiling_ci=None if ceiling_ci is None else (max(0.0, ceiling_ci[0]), min(1.0, ceiling_ci[1])),
        slope=mean(slopes),
        crossing_tokens=power(mean(crossings)),
        median_tokens=median,
        median_ci=median_ci,
        t50_flops=times(t50, cost),
        t50_flops_ci=times_ends(t50_ci, cost),
        t50_loss=mean(at_t50),
        t50_loss_ci=mean_interval(at_t50),
        flops_per_token=cost,
        dispersion=mean([curve.dispersion for curve in curves if curve.dispersion is not None]),
        form_spread=form_spread,
        share_emerged=emerged / len(curves) if curves else None,
        share_ci=share_interval(emerged, len(curves)),
        flags=tuple(flags),
    )


def _median(seeds: Sequence[SeedCurve]) -> tuple[float | None, Interval | None]:
    """(median T50, interval) with censored seeds."""
    middle = location([seed_bracket(seed) for seed in seeds])
    if middle.estimate is None or not np.isfinite(middle.estimate):
        return None, None
    return power(middle.estimate), powers(middle.ci)


def seed_bracket(seed: SeedCurve) -> Bracket:
    """What is known of a seed's log10 T50: (low, high).

    The T50 where the curve has one: it is what is compared, its error is small against the spread between seeds, and
    the bracket, as wide as evaluations are apart, would throw it away. Else the bracket of the crossing, which lies
    near the T50. Stuck: above the last tokens.
    """
    if seed.curve.t50_tokens is not None:
        return (float(np.log10(seed.curve.t50_tokens)),) * 2
    low, high = seed.curve.bracket
    return -np.inf if low is None else float(np.log10(low)), np.inf if high is None else float(np.log10(high))


def mean_curve(row: Emergence, tokens: np.ndarray) -> np.ndarray | None:
    """The logistic with the mean parameters of the seeds that have a T50; None where none has."""
    fitted = [seed.curve for seed in row.seeds if seed.curve.t50_tokens is not None]
    if not fitted or row.ceiling is None or row.slope is None or row.t50_tokens is None:
        return None
    away = row.slope * (np.log10(tokens) - np.log10(row.t50_tokens))
    return row.floor + (row.ceiling - row.floor) / (1 + np.exp(-away))


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def power(log: float | None) -> float | None:
    return None if log is None else float(10.0**log)


def powers(ci: Interval | None) -> Interval | None:
    return None if ci is None else (float(10.0 ** ci[0]), float(10.0 ** ci[1]))


def times(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor


def times_ends(ci: Interval | None, factor: float | None) -> Interval | None:
    return None if ci is None or factor is None else (ci[0] * factor, ci[1] * factor)
