"""Arm against reference: how many times the tokens, and whether both end level.

A seed that never emerged is neither dropped nor given a T50: it is counted as censored at its last tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from analysis.arm_emergence import NO_SEED, NO_SPREAD, ONE_SEED, Condition, Emergence, SeedCurve, power, powers
from analysis.laws.censored import Bracket, Shift, shift
from analysis.laws.emergence import ENDS_ABOVE, NEVER_EMERGED
from analysis.laws.intervals import Difference, Interval, holm, welch

Method = Literal["welch", "censored lognormal"]
WELCH: Method = "welch"
CENSORED: Method = "censored lognormal"


@dataclass(frozen=True)
class SpeedRatio:
    """T50 of `arm` over T50 of `reference`, the ratio of geometric means over seeds.

    method: "welch" on log10 T50 where every finished seed of both has one, else "censored lognormal" over each seed's
    `seed_bracket`; None where neither can be made. ratio: None where all seeds of one arm are stuck; ci is then open:
    (low, inf) or (0, high). p_holm: over the arms compared with one reference. emerged_only, emerged_only_ci: Welch
    over the seeds that have a T50, a description that leaves the others out. crossing, crossing_ci: the ratio of the
    interpolated crossings, where every seed crossed. at_least: where no seed of the arm emerged and each of the
    reference did: tokens seen over the reference's T50, true of these seeds; ci says it of the arms. at_most: the same
    where no seed of the reference emerged.
    """

    arm: str
    reference: str
    condition: Condition
    budget_tokens: int
    method: Method | None
    ratio: float | None
    ci: Interval | None
    p: float | None
    p_holm: float | None
    emerged_only: float | None
    emerged_only_ci: Interval | None
    crossing: float | None
    crossing_ci: Interval | None
    at_least: float | None
    at_most: float | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class SameCeiling:
    """Ceiling of `arm` minus ceiling of `reference`, over emerged seeds, all of which must have reached a plateau and
    stayed on it.

    p, p_holm: of no difference, as in SpeedRatio. equivalent: two one-sided tests at 5% put the difference within the
    margin; None where they cannot be made.
    """

    arm: str
    reference: str
    condition: Condition
    budget_tokens: int
    margin: float
    difference: float | None
    ci: Interval | None
    p: float | None
    p_holm: float | None
    p_equivalent: float | None
    equivalent: bool | None
    flags: tuple[str, ...]


Row = TypeVar("Row", SpeedRatio, SameCeiling)


def speed_ratio(arm: Emergence, reference: Emergence) -> SpeedRatio:
    """p_holm is left to `holm_adjusted`."""
    a, b = _logs(arm, "t50_tokens"), _logs(reference, "t50_tokens")
    c, d = _logs(arm, "crossing_tokens"), _logs(reference, "crossing_tokens")
    flags = []
    for row in (arm, reference):
        if not row.seeds:
            flags.append(f"{row.arm}: {NO_SEED}")
        elif row.censored:
            flags.append(f"{row.arm}: {row.censored} of {len(row.seeds)} seeds {NEVER_EMERGED}, counted as censored")
        without = row.emerged - len(_logs(row, "t50_tokens"))
        if without:
            flags.append(f"{row.arm}: {without} of {row.emerged} emerged seeds without a T50, counted by bracket")
    some = welch(a, b) if a and b else None
    crossing = welch(c, d) if c and d and not arm.censored and not reference.censored else None
    whole: Difference | Shift | None = some
    if flags:
        both = bool(arm.seeds and reference.seeds)
        whole = (
            shift([seed_bracket(s) for s in arm.seeds], [seed_bracket(s) for s in reference.seeds]) if both else None
        )
    if whole and whole.ci is None:
        flags.append(ONE_SEED if min(len(arm.seeds), len(reference.seeds)) == 1 else NO_SPREAD)
    estimate = whole.estimate if whole and whole.estimate is not None and np.isfinite(whole.estimate) else None
    told = whole is not None and (estimate is not None or whole.ci is not None)
    return SpeedRatio(
        arm=arm.arm,
        reference=reference.arm,
        condition=arm.condition,
        budget_tokens=arm.budget_tokens,
        method=None if not told else WELCH if isinstance(whole, Difference) else CENSORED,
        ratio=power(estimate),
        ci=powers(whole.ci) if whole else None,
        p=whole.p if whole else None,
        p_holm=None,
        emerged_only=power(some.estimate) if some else None,
        emerged_only_ci=powers(some.ci) if some else None,
        crossing=power(crossing.estimate) if crossing else None,
        crossing_ci=powers(crossing.ci) if crossing else None,
        at_least=_bound(arm, reference),
        at_most=None if (most := _bound(reference, arm)) is None else 1 / most,
        flags=tuple(flags),
    )


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


def holm_adjusted(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with p_holm, over the arms compared with one reference under one condition."""
    adjusted: dict[int, float] = {}
    for condition in dict.fromkeys(row.condition for row in rows):
        family = {i: row.p for i, row in enumerate(rows) if row.condition == condition and row.p is not None}
        adjusted |= dict(zip(family, holm(list(family.values())), strict=True))
    return tuple(replace(row, p_holm=adjusted.get(i)) for i, row in enumerate(rows))


def same_ceiling(arm: Emergence, reference: Emergence, margin: float) -> SameCeiling:
    """margin: the largest difference that counts as the same, in the capability's unit."""
    flags = []
    for row in (arm, reference):
        rising = sum(seed.curve.emerged and seed.curve.ceiling is None for seed in row.seeds)
        if not row.emerged:
            flags.append(f"{row.arm}: {'no seed emerged' if row.seeds else NO_SEED}")
        elif rising:
            flags.append(f"{row.arm}: {rising} of {row.emerged} emerged seeds without a plateau")
        elif above := sum(ENDS_ABOVE in seed.curve.flags for seed in row.seeds):
            flags.append(f"{row.arm}: {above} of {row.emerged} emerged seeds end above their fitted ceiling")
    test = None
    if not flags:
        ceilings = [[seed.curve.ceiling for seed in row.seeds if seed.curve.ceiling] for row in (arm, reference)]
        test = welch(ceilings[0], ceilings[1], margin=margin)
        if test.ci is None:
            flags.append(ONE_SEED if min(map(len, ceilings)) == 1 else NO_SPREAD)
        flags += [f"{row.arm}: over the {row.emerged} seeds that emerged" for row in (arm, reference) if row.censored]
    return SameCeiling(
        arm=arm.arm,
        reference=reference.arm,
        condition=arm.condition,
        budget_tokens=arm.budget_tokens,
        margin=margin,
        difference=test.estimate if test else None,
        ci=test.ci if test else None,
        p=test.p if test else None,
        p_holm=None,
        p_equivalent=test.p_equivalent if test else None,
        equivalent=test.p_equivalent < 0.05 if test and test.p_equivalent is not None else None,
        flags=tuple(flags),
    )


def _logs(row: Emergence, what: str) -> list[float]:
    values = (getattr(seed.curve, what) for seed in row.seeds)
    return [float(np.log10(value)) for value in values if value is not None]


def _bound(stuck: Emergence, other: Emergence) -> float | None:
    """Tokens seen by all of `stuck` over the T50 of `other`; None unless no seed of one emerged, each of the other."""
    logs = _logs(other, "t50_tokens")
    if not stuck.seeds or stuck.emerged or not logs or len(logs) < len(other.seeds):
        return None
    return float(min(seed.curve.last_tokens for seed in stuck.seeds) / 10 ** np.mean(logs))
