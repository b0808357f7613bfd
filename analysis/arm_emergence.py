"""When one arm's capability emerges, over its seeds.

Finished cells are fitted; others never are. A seed that never emerged is censored: it stays in every count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

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
    """One finished cell's emergence. forms: its T50 by form of curve, None without a T50."""

    id: str
    seed: int
    curve: Curve
    forms: Forms | None = None


@dataclass(frozen=True)
class Emergence:
    """One arm under one condition, over its finished seeds.

    t50_tokens: geometric mean over the seeds that have one, t50_ci its 95% t interval over seeds. ceiling: mean U
    over seeds with a plateau. slope: mean k. crossing_tokens: geometric mean over the seeds that emerged. censored:
    seeds that never emerged. share_ci: exact binomial interval. The cells are those of the largest budget:
    smaller ones of the same seed are the same training seen earlier, not further evidence. form_spread: largest over
    smallest T50 among forms of curve, geometric mean over seeds: an error that no interval here contains.
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


def fit_arm(arm: str, condition: Condition, cells: pl.DataFrame, values: pl.DataFrame, question: Question) -> Emergence:
    """cells: rows of runs of this arm, at one budget. values: rows of metrics (id, tokens, value) of the capability."""
    seeds, flags = [], []
    for cell in cells.filter(pl.col("state") == "finished").iter_rows(named=True):
        mine = values.filter((pl.col("id") == cell["id"]) & (pl.col("tokens") > 0))
        if mine.is_empty():
            flags.append(f"seed {cell['seed']}: not measured")
            continue
        curve = fit_curve(mine["tokens"].to_numpy(), mine["value"].to_numpy(), question.chance, level=question.level)
        by_form = forms(mine["tokens"].to_numpy(), mine["value"].to_numpy(), curve)
        seeds.append(SeedCurve(cell["id"], cell["seed"], curve, by_form))
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
        t50_tokens=power(mean(logs)),
        t50_ci=None if ci is None else (10 ** ci[0], 10 ** ci[1]),
        floor=0.0 if floor is None else floor,
        ceiling=mean(ceilings),
        ceiling_ci=None if ceiling_ci is None else (max(0.0, ceiling_ci[0]), min(1.0, ceiling_ci[1])),
        slope=mean(slopes),
        crossing_tokens=power(mean(crossings)),
        form_spread=form_spread,
        share_emerged=emerged / len(curves) if curves else None,
        share_ci=share_interval(emerged, len(curves)),
        flags=tuple(flags),
    )


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def power(log: float | None) -> float | None:
    return None if log is None else float(10.0**log)


def powers(ci: Interval | None) -> Interval | None:
    return None if ci is None else (float(10.0 ** ci[0]), float(10.0 ** ci[1]))
