"""Claims written before the run, judged by the rule written with them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import polars as pl

from analysis.arm_emergence import Condition, Emergence
from analysis.claim_figures import FEWEST_PAIRS, FIGURES, Figure, Told
from analysis.law_document import Fitted
from analysis.laws.intervals import Interval
from analysis.results import Results
from analysis.seeds_needed import MOST, POWER, for_contrast
from analysis.selection import conditions
from orchestrator.finding import OVER_SIZES, Finding, arms_of, words

ALPHA = 0.05
Verdict = Literal["shown", "not shown", "undecided"]


@dataclass(frozen=True)
class Claim:
    """A finding under one condition. size: None where it is over all. verdict: "shown" where the whole 95% interval
    lies in the claimed range, "not shown" where the whole of it lies outside, else "undecided". decide: what would
    decide it, None once decided. value, ci: ratios as ratios."""

    finding: Finding
    data: str
    size: str | None
    verdict: Verdict
    value: float | None
    ci: Interval | None
    n: tuple[int, ...]
    decide: str | None
    flags: tuple[str, ...]


def judge(results: Results, emergence: tuple[Emergence, ...], scaling: tuple[Fitted, ...]) -> tuple[Claim, ...]:
    """Every finding of the study, under each condition it is about."""
    told = Told(results, emergence, scaling)
    found = []
    for document in results.study.get("findings", []):
        finding = Finding.model_validate(document)
        whole = isinstance(finding.statistic, OVER_SIZES)
        seen: set[tuple[str, str | None]] = set()
        for condition in conditions(results):
            place = condition.data, None if whole else condition.size
            if place not in seen and finding.data in (None, condition.data) and finding.size in (None, condition.size):
                seen.add(place)
                figure = FIGURES[finding.statistic.kind](finding.statistic, told, condition)
                left = _unfinished(results, finding, place)
                figure = replace(figure, why=(*figure.why, *left))
                found.append(claim(finding, condition, place[1], figure, results.study["name"]))
    return tuple(found)


def _unfinished(results: Results, finding: Finding, place: tuple[str, str | None]) -> tuple[str, ...]:
    """A note where cells that the claim is about are not in its figure."""
    arms = [arm for group in arms_of(finding.statistic).values() for arm in group]
    cells = results.runs.filter(pl.col("arm").is_in(arms) & (pl.col("data") == place[0]))
    if place[1] is not None:
        cells = cells.filter(pl.col("size") == place[1])
    states = [
        f"{n} {state}" for state, n in cells["state"].value_counts().sort("state").iter_rows() if state != "finished"
    ]
    return (f"of {cells.height} cells not in it: {', '.join(states)}",) if states else ()


def claim(finding: Finding, condition: Condition, size: str | None, figure: Figure, study: str = "STUDY") -> Claim:
    """A finding with its verdict."""
    above, below = (bound if bound is None else _scale(bound, figure) for bound in (finding.above, finding.below))
    verdict = judged(figure.ci, above, below)
    return Claim(
        finding=finding,
        data=condition.data,
        size=size,
        verdict=verdict,
        value=None if figure.value is None else _unscale(figure.value, figure),
        ci=None if figure.ci is None else (_unscale(figure.ci[0], figure), _unscale(figure.ci[1], figure)),
        n=figure.n,
        decide=_decide(figure, above, below, study) if verdict == "undecided" else None,
        flags=figure.why,
    )


def judged(ci: Interval | None, above: float | None, below: float | None) -> Verdict:
    """The rule on an interval: an end on the bound itself is not within it."""
    if ci is None:
        return "undecided"
    low, high = ci
    if (above is None or low > above) and (below is None or high < below):
        return "shown"
    if (above is not None and high <= above) or (below is not None and low >= below):
        return "not shown"
    return "undecided"


def as_json(row: Claim) -> dict[str, Any]:
    """A row of `findings` in `gridlaw fit --json`."""
    ends = None if row.ci is None else [float(end) if np.isfinite(end) else None for end in row.ci]
    return {
        "claim": row.finding.claim, "data": row.data, "size": row.size, "verdict": row.verdict, "value": row.value,
        "ci": ends, "n": list(row.n), "rule": row.finding.rule,
        "figure": words(row.finding.statistic), "statistic": row.finding.statistic.model_dump(mode="json"),
        "decide": row.decide, "paper": row.finding.paper, "flags": list(row.flags),
    }  # fmt: skip


def _decide(figure: Figure, above: float | None, below: float | None, study: str) -> str:
    pairs = len(figure.n) == 1 and len(figure.samples) == 1
    unit = "pairs" if pairs else "seeds an arm"
    if figure.value is None or not figure.samples or min(map(len, figure.samples)) < 2:
        return f"further seeds; gridlaw fit {study} --next says which would narrow intervals most"
    away = [abs(figure.value - bound) for bound in (above, below) if bound is not None]
    seeds = for_contrast(figure.samples, min(away), ALPHA)
    if seeds is None:
        return f"not even {MOST} {unit}, if what was measured is the truth"
    seeds = max(seeds, FEWEST_PAIRS) if pairs else seeds
    return f"about {seeds} {unit} with {100 * POWER:.0f}% power, if what was measured is the truth"


def _scale(bound: float, figure: Figure) -> float:
    return float(np.log10(bound)) if figure.ratio and bound > 0 else bound if not figure.ratio else -np.inf


def _unscale(value: float, figure: Figure) -> float:
    if not figure.ratio:
        return value
    return float(10.0**value) if value < 300 else np.inf
