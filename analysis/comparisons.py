"""Arm against reference: how many times the tokens, and whether both end level.

A seed that never emerged is neither dropped nor given a T50: it is counted as censored at its last tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from analysis.arm_emergence import (
    NO_SEED,
    NO_SPREAD,
    ONE_SEED,
    Condition,
    Emergence,
    power,
    powers,
    seed_bracket,
    times,
    times_ends,
)
from analysis.laws.censored import Shift, shift
from analysis.laws.emergence import ENDS_ABOVE, NEVER_EMERGED
from analysis.laws.intervals import Difference, Interval, holm, welch
from analysis.laws.slopes import Parallel, parallel

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
    where no seed of the reference emerged. in_flops, in_flops_ci: the ratio of training FLOPs to T50. loss_difference,
    loss_ci, loss_p: Welch on the loss at T50, over the seeds that have both. slopes: whether the curves are parallel;
    where they are not, the ratio holds at T50 alone and those at other levels stand here.
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
    in_flops: float | None
    in_flops_ci: Interval | None
    loss_difference: float | None
    loss_ci: Interval | None
    loss_p: float | None
    slopes: Parallel | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class SameCeiling:
    """Ceiling of `arm` minus ceiling of `reference`, over emerged seeds, all of which must have reached a plateau and
    stayed on it.

    p, p_holm: of no difference, as in SpeedRatio. p_equivalent: of two one-sided tests, adjusted like p_holm.
    equivalent: at 5% they put the difference within the margin; None where they cannot be made.
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
    crossed = bool(c and d) and len(c) == len(arm.seeds) and len(d) == len(reference.seeds)
    crossing = welch(c, d) if crossed else None
    whole: Difference | Shift | None = some
    if flags:
        both = bool(arm.seeds and reference.seeds)
        whole = (
            shift([seed_bracket(s) for s in arm.seeds], [seed_bracket(s) for s in reference.seeds]) if both else None
        )
    if whole and whole.ci is None:
        flags.append(ONE_SEED if min(len(arm.seeds), len(reference.seeds)) == 1 else NO_SPREAD)
    at_loss, base_loss = ([seed.loss for seed in row.seeds if seed.loss is not None] for row in (arm, reference))
    loss = welch(at_loss, base_loss) if at_loss and base_loss else None
    cost = None
    if arm.flops_per_token and reference.flops_per_token:
        cost = arm.flops_per_token / reference.flops_per_token
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
        in_flops=times(power(estimate), cost),
        in_flops_ci=times_ends(powers(whole.ci) if whole else None, cost),
        loss_difference=loss.estimate if loss else None,
        loss_ci=loss.ci if loss else None,
        loss_p=loss.p if loss else None,
        slopes=parallel([seed.curve for seed in arm.seeds], [seed.curve for seed in reference.seeds]),
        flags=tuple(flags),
    )


def holm_adjusted(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with p_holm, over the arms compared with one reference under one condition."""
    adjusted = _holm([row.condition for row in rows], [row.p for row in rows])
    return tuple(replace(row, p_holm=p) for row, p in zip(rows, adjusted, strict=True))


def equivalence_adjusted(rows: Sequence[SameCeiling]) -> tuple[SameCeiling, ...]:
    """The rows with p_equivalent adjusted in the same way, and `equivalent` judged by it."""
    adjusted = _holm([row.condition for row in rows], [row.p_equivalent for row in rows])
    return tuple(
        replace(row, p_equivalent=p, equivalent=None if p is None else p < 0.05)
        for row, p in zip(rows, adjusted, strict=True)
    )


def _holm(conditions: Sequence[Condition], values: Sequence[float | None]) -> list[float | None]:
    adjusted: dict[int, float] = {}
    for condition in dict.fromkeys(conditions):
        family = {i: p for i, p in enumerate(values) if conditions[i] == condition and p is not None}
        adjusted |= dict(zip(family, holm(list(family.values())), strict=True))
    return [adjusted.get(i) for i in range(len(values))]


def same_ceiling(arm: Emergence, reference: Emergence, margin: float) -> SameCeiling:
    """margin: the largest difference that counts as the same, in the capability's unit."""
    flags = []
    for row in (arm, reference):
        unfitted = sum(seed.curve.emerged and seed.curve.ceiling is None for seed in row.seeds)
        if not row.emerged:
            flags.append(f"{row.arm}: {'no seed emerged' if row.seeds else NO_SEED}")
        elif unfitted:
            flags.append(f"{row.arm}: {unfitted} of {row.emerged} emerged seeds without a fitted ceiling")
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
