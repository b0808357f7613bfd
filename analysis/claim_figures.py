"""The figure behind each claim: a function a statistic, from a study's tables to a value with its 95% interval."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from analysis.arm_emergence import Condition, Emergence, seed_bracket
from analysis.law_document import Fitted
from analysis.laws.censored import shift
from analysis.laws.censored_trend import trend
from analysis.laws.emergence import ENDS_ABOVE, NEVER_EMERGED
from analysis.laws.intervals import Interval, contrast, mean_interval
from analysis.results import Results
from analysis.selection import finished
from orchestrator import finding

Samples = tuple[tuple[float, ...], ...]
# Below these a rearrangement of the seeds looks as extreme in more than one study of twenty, whatever the spread says.
FEWEST_A_SIDE, FEWEST_PAIRS, FEWEST_IN_TREND = 3, 5, 6


@dataclass(frozen=True)
class Figure:
    """value, low, high: in log10 where `ratio`; an end may be infinite, low and high are None where there is no
    interval. n: seeds of each side, or pairs. samples: of each arm, times its weight, where the interval is theirs.
    why: what counts as censored or is left out, or why there is none."""

    value: float | None
    ci: Interval | None
    n: tuple[int, ...]
    ratio: bool = False
    samples: Samples = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Told:
    """What the statistics read: the tables, and the fits made of them."""

    results: Results
    emergence: tuple[Emergence, ...]
    scaling: tuple[Fitted, ...]

    def arms(self, names: Sequence[str], condition: Condition) -> list[Emergence]:
        rows = {row.arm: row for row in self.emergence if row.condition == condition}
        return [rows[name] for name in names if name in rows]


def of_contrast(sides: Sequence[Sequence[Sequence[float]]], ratio: bool, why: Sequence[str] = ()) -> Figure:
    """First group of arms less the second; sides: of each group, of each arm, the seeds' values. Arms count alike."""
    n = tuple(sum(map(len, side)) for side in sides)
    arms = [arm for side in sides for arm in side]
    if not all(map(len, arms)):
        return Figure(None, None, n, ratio, why=(*why, "an arm has no seed with a value"))
    weights = [sign / len(side) for side, sign in zip(sides, (1, -1), strict=True) for _ in side]
    value, ci = contrast(arms, weights)
    samples = tuple(tuple(weight * x for x in arm) for arm, weight in zip(arms, weights, strict=True))
    if min(n) < FEWEST_A_SIDE:
        ci, why = None, (*why, f"{min(n)} seeds on one side: below {FEWEST_A_SIDE} chance alone looks like a finding")
    elif ci is None:
        why = (*why, "an arm has one seed, or none varies: no interval")
    return Figure(value, ci, n, ratio, samples, tuple(why))


def of_pairs(values: Sequence[float], ratio: bool, what: str) -> Figure:
    """Mean of paired differences. what: the pairs, in words, plural."""
    if not values:
        return Figure(None, None, (0,), ratio, why=(f"no {what} with both values",))
    ci, why = mean_interval(values), tuple[str, ...]()
    if len(values) < FEWEST_PAIRS:
        ci, why = None, (f"{len(values)} {what}: below {FEWEST_PAIRS} chance alone looks like a finding",)
    return Figure(float(np.mean(values)), ci, (len(values),), ratio, (tuple(values),), why)


def speed_ratio(asked: finding.SpeedRatio, told: Told, condition: Condition) -> Figure:
    """Welch over the arms' seeds; with censored ones the censored lognormal model over each group's seeds together."""
    groups = [told.arms(names, condition) for names in (asked.arm, asked.against)]
    rows = [row for group in groups for row in group]
    why = _censored(rows)
    if not why or not all(row.seeds for row in rows):
        return of_contrast([[_logs(row) for row in group] for group in groups], True)
    sides = [[seed_bracket(seed) for row in group for seed in row.seeds] for group in groups]
    n = tuple(map(len, sides))
    if min(n) < FEWEST_A_SIDE:
        return Figure(None, None, n, True, why=(*why, f"{min(n)} seeds on one side: needs {FEWEST_A_SIDE}"))
    whole = shift(sides[0], sides[1])
    value = whole.estimate if whole.estimate is not None and np.isfinite(whole.estimate) else None
    return Figure(value, whole.ci, n, True, why=why)


def end_level(asked: finding.EndLevel, told: Told, condition: Condition) -> Figure:
    """Welch over the ceilings of the seeds that emerged, all of which must have reached a plateau and stayed on it."""
    groups = [told.arms(names, condition) for names in (asked.arm, asked.against)]
    rows = [row for group in groups for row in group]
    n = tuple(sum(row.emerged for row in group) for group in groups)
    for row in rows:
        rising = sum(s.curve.emerged and (s.curve.ceiling is None or ENDS_ABOVE in s.curve.flags) for s in row.seeds)
        if rising:
            return Figure(None, None, n, why=(f"{row.arm}: {rising} of {row.emerged} emerged seeds on no plateau yet",))
    left_out = [f"{row.arm}: over the {row.emerged} seeds that emerged" for row in rows if row.censored]
    levels = [
        [[s.curve.ceiling for s in row.seeds if s.curve.ceiling is not None] for row in group] for group in groups
    ]
    return of_contrast(levels, False, left_out)


def difference(asked: finding.Difference, told: Told, condition: Condition) -> Figure:
    sides = [
        [list(_final(told.results, condition, name, asked.metric).values()) for name in names]
        for names in (asked.arm, asked.against)
    ]
    return of_contrast(sides, False)


def within(asked: finding.Within, told: Told, condition: Condition) -> Figure:
    by_seed: dict[int, list[float]] = {}
    for name in asked.arm:
        one, two = (_final(told.results, condition, name, metric) for metric in (asked.metric, asked.against_metric))
        for seed in one.keys() & two.keys():
            by_seed.setdefault(seed, []).append(one[seed] - two[seed])
    whole = [float(np.mean(values)) for _, values in sorted(by_seed.items()) if len(values) == len(asked.arm)]
    return of_pairs(whole, False, "seeds")


def over_label(asked: finding.Trend, told: Told, condition: Condition) -> Figure:
    """The slope of log T50 over log2 of the label: a contrast of the arms' means, or its censored likelihood."""
    rows = told.arms(list(asked.labels), condition)
    if not rows or not all(row.seeds for row in rows):
        return Figure(None, None, (sum(len(row.seeds) for row in rows),), True, why=("an arm has no finished seed",))
    doublings = np.log2([asked.labels[row.arm] for row in rows])
    n = (sum(len(row.seeds) for row in rows),)
    if n[0] < FEWEST_IN_TREND:
        return Figure(None, None, n, True, why=(f"{n[0]} seeds: a trend needs {FEWEST_IN_TREND}",))
    if why := _censored(rows):
        seeds = [(seed_bracket(seed), x) for row, x in zip(rows, doublings, strict=True) for seed in row.seeds]
        slope = trend([bracket for bracket, _ in seeds], [x for _, x in seeds])
        none = () if slope.ci else ("too few seeds emerged for a trend",)
        return Figure(slope.estimate, slope.ci, n, True, why=(*why, *none))
    away = doublings - doublings.mean()
    weights, logs = away / (away**2).sum(), [_logs(row) for row in rows]
    value, ci = contrast(logs, weights)
    samples = tuple(tuple(float(w * x) for x in arm) for arm, w in zip(logs, weights, strict=True) if w)
    return Figure(value, ci, n, True, samples, () if ci else ("an arm has one seed, or none varies: no interval",))


def metric_ratio(asked: finding.MetricRatio, told: Told, condition: Condition) -> Figure:
    """Pairs of (size, seed); condition.size is not read."""
    runs = told.results.runs.filter(pl.col("data") == condition.data)
    if asked.metric not in runs.columns:
        return Figure(None, None, (0,), True, why=("not measured yet",))
    rank = pl.col("budget_tokens").rank("dense").over("arm", "size")
    runs = runs.with_columns(rank=rank, ranks=rank.max().over("arm", "size"))
    if asked.budget:
        runs = runs.filter(pl.col("rank") == (1 if asked.budget == "smallest" else pl.col("ranks")))
    value = pl.col(asked.metric)
    runs = runs.filter((pl.col("state") == "finished") & value.is_finite() & (value > 0))
    sides = [
        runs.filter(pl.col("arm").is_in(names))
        .group_by("size", "seed", "rank")
        .agg(log=value.log10().mean(), arms=pl.len())
        .filter(pl.col("arms") == len(names))
        for names in (asked.arm, asked.against)
    ]
    pairs = sides[0].join(sides[1], on=("size", "seed", "rank")).with_columns(apart=pl.col("log") - pl.col("log_right"))
    values = pairs.group_by("size", "seed").agg(pl.col("apart").mean()).sort("size", "seed")["apart"].to_list()
    return of_pairs(values, True, "pairs of size and seed")


def law_difference(asked: finding.LawDifference, told: Told, condition: Condition) -> Figure:
    """The two bootstrap intervals joined by variance estimates recovered (Zou and Donner 2008, Stat Med 27:1693)."""
    laws = {law.document["arm"]: law.document for law in told.scaling if law.document["data"] == condition.data}
    found = []
    for arm in (asked.arm, asked.against):
        law = laws.get(arm)
        value, ci = (law[asked.power], law["ci"].get(asked.power)) if law else (None, None)
        if law is None or value is None or ci is None:
            return Figure(None, None, (0, 0), why=(f"{arm}: no {asked.power} with an interval yet",))
        if asked.power in law["at_bound"]:
            return Figure(None, None, (0, 0), why=(f"{arm}: {asked.power} is at its bound",))
        found.append((value, *ci, law["n"], [flag for flag in law["flags"] if "trunks: too few" in flag]))
    (a, a_low, a_high, a_n, a_flags), (b, b_low, b_high, b_n, b_flags) = found
    low = a - b - float(np.hypot(a - a_low, b_high - b))
    high = a - b + float(np.hypot(a_high - a, b - b_low))
    # An interval that takes budgets of one trunk for unrelated is too narrow to decide by.
    flags = tuple(dict.fromkeys((*a_flags, *b_flags)))
    return Figure(a - b, None if flags else (low, high), (a_n, b_n), why=flags)


FIGURES: Mapping[str, Callable[[Any, Told, Condition], Figure]] = {
    "speed ratio": speed_ratio, "end level": end_level, "difference": difference, "within": within,
    "trend": over_label, "metric ratio": metric_ratio, "law difference": law_difference,
}  # fmt: skip


def _censored(rows: Sequence[Emergence]) -> tuple[str, ...]:
    """A note of each arm some of whose seeds have no T50."""
    return tuple(
        f"{row.arm}: {len(row.seeds) - len(_logs(row))} of {len(row.seeds)} seeds {NEVER_EMERGED} or have no T50, "
        f"counted as censored"
        for row in rows
        if len(_logs(row)) < len(row.seeds)
    )


def _logs(row: Emergence) -> list[float]:
    return [float(np.log10(t)) for t in (seed.curve.t50_tokens for seed in row.seeds) if t is not None]


def _final(results: Results, condition: Condition, arm: str, metric: str) -> dict[int, float]:
    """Final value of a metric by seed, at the largest budget."""
    if metric not in results.runs.columns:
        return {}
    last = finished(results, condition).filter(pl.col("arm") == arm).select("id", "seed")
    table = last.join(results.runs.select("id", metric), on="id").filter(pl.col(metric).is_finite())
    return dict(table.select("seed", metric).iter_rows())
