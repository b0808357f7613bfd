"""Findings in words, each with its certainty. Every sentence is made from the fit; none is written beforehand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from analysis.arm_emergence import Condition, Emergence
from analysis.comparisons import CENSORED, SameCeiling, SpeedRatio
from analysis.drawing import tokens_text
from analysis.findings import StudyFit
from analysis.seeds_needed import MOST, for_ceiling, for_ratio

ALPHA = 0.05
MOST_SEEDS = 3  # of an arm, named in one sentence


@dataclass(frozen=True)
class Sentence:
    """certainty: "shown" (a test at 5%, Holm-adjusted, says so), "measured" (a value that no test tells from none),
    "seen" (a plain count)."""

    text: str
    certainty: Literal["shown", "measured", "seen"]


def sentences(fit: StudyFit, condition: Condition) -> list[Sentence]:
    """What the fit says of one condition: the order of the arms, who did not emerge, how fast, how high."""
    rows = [row for row in fit.emergence if row.condition == condition]
    at = {row.arm: row for row in rows}
    ratios = [row for row in fit.speed_ratios if row.condition == condition]
    ceilings = [row for row in fit.same_ceiling if row.condition == condition]
    found = _order(rows) + [sentence for row in rows for sentence in _emergence(row)]
    found += [_speed(row, at[row.arm], at[row.reference], len(ratios)) for row in ratios]
    found += [_ceiling(row, at[row.arm], at[row.reference], len(ceilings)) for row in ceilings]
    return found


def head_sentences(heads: pl.DataFrame, arms: Sequence[str]) -> list[Sentence]:
    """The head of each arm that puts most of its attention on the answer, at the last checkpoint of each seed.

    heads: arm, seed, tokens, layer, head, score.
    """
    found = []
    last = heads.filter(pl.col("tokens") == pl.col("tokens").max().over("arm", "seed"))
    for arm in arms:
        mine = last.filter(pl.col("arm") == arm).sort("score", descending=True)
        tops = mine.group_by("seed", maintain_order=True).first().sort("seed")
        if tops.is_empty():
            continue
        said = [
            f"layer {layer}, head {head}: {score:.2f} of its attention on the answer (seed {seed})"
            for seed, layer, head, score in tops.select("seed", "layer", "head", "score").iter_rows()
        ]
        shown = "; ".join(said[:MOST_SEEDS]) + ("; …" if len(said) > MOST_SEEDS else "")
        found.append(Sentence(f"{arm}, the head that retrieves most: {shown}.", "seen"))
    return found


def capability_text(metric: str) -> str:
    """recall/accuracy/beyond-128 → "recall accuracy beyond 128 tokens"; other names lose their slashes."""
    parts = metric.split("/")
    if len(parts) != 3:
        return " ".join(parts)
    where = parts[2].replace("-", " ") if parts[2].startswith("beyond-") else f"at {parts[2].replace('-', '–')}"
    return f"{parts[0]} {parts[1]} {where} tokens"


def first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def points_text(share: float) -> str:
    """A signed difference of shares in percentage points."""
    return f"{100 * share:+.1f}".replace("-", "−")


def ratio_text(row: SpeedRatio) -> str:
    """A speed ratio with its interval, as it stands beside its row of a figure or table."""
    value, ci = (row.ratio, row.ci) if row.ratio else (row.emerged_only, row.emerged_only_ci)
    for words, bound, end in (("over", row.at_least, 0), ("under", row.at_most, 1)):
        if bound:
            return f"{words} {bound:.2f}×" + (f" (95% {words} {row.ci[end]:.2f})" if row.ci else "")
    if row.ratio is None and row.ci:
        low, high = row.ci
        return f"95% over {low:.2f}×" if math.isinf(high) else f"95% under {high:.2f}×"
    if not value:
        return "no ratio"
    return f"{value:.2f}× ({ci[0]:.2f}–{ci[1]:.2f})" if ci else f"{value:.2f}× (no interval)"


def ratio_note(row: SpeedRatio) -> str:
    """What a ratio counts as censored, or why it is none, in two lines at most; empty where there is nothing to say."""
    return "\n".join(row.flags[:2])


def _order(rows: Sequence[Emergence]) -> list[Sentence]:
    """T50 of every arm that has one, the fastest first."""
    known = sorted((row for row in rows if row.t50_tokens), key=lambda row: row.t50_tokens or 0)
    if len(known) < 2:
        return []
    said = ", ".join(f"{row.arm} {tokens_text(row.t50_tokens or 0)}" for row in known)
    return [Sentence(f"Tokens to half of the ceiling (T50), the fastest arm first: {said}.", "measured")]


def _emergence(row: Emergence) -> list[Sentence]:
    if not row.seeds or not row.censored or row.last_tokens is None:
        return []
    n, tokens = len(row.seeds), tokens_text(row.last_tokens)
    whom = f"none of {n} seeds" if not row.emerged else f"{row.censored} of {n} seeds never"
    low, high = row.share_ci or (0.0, 1.0)
    share = f"95% interval of the share that emerges {100 * low:.0f}–{100 * high:.0f}%"
    return [Sentence(f"{row.arm}: {whom} emerged within {tokens} tokens ({share}).", "seen")]


def _speed(row: SpeedRatio, arm: Emergence, reference: Emergence, family: int) -> Sentence:
    if row.ratio and row.ci and row.p_holm is not None and row.p is not None:
        numbers = f"95% interval {row.ci[0]:.2f}–{row.ci[1]:.2f}, {p_text(row.p_holm)} after Holm{_counted(row)}"
        if row.p_holm < ALPHA:
            return Sentence(
                f"{row.arm} needs {row.ratio:.2f}× the tokens of {row.reference} to emerge ({numbers}).", "shown"
            )
        seeds = f"{_seeds(arm)} against {_seeds(reference)}"
        return Sentence(
            f"{row.arm} emerged with {row.ratio:.2f}× the tokens of {row.reference} ({numbers}; {seeds}). "
            + _more(for_ratio(arm, reference, ALPHA / max(1, family)), "a difference of this size"),
            "measured",
        )
    if row.ratio:
        return Sentence(
            f"{row.arm} emerged with {row.ratio:.2f}× the tokens of {row.reference}, without an interval "
            f"({'; '.join(row.flags)}); two seeds an arm give one.",
            "measured",
        )
    if row.at_least or row.at_most or row.ci:
        return _bound(row)
    why = "; ".join(row.flags)
    if row.emerged_only:
        ci = f" (95% interval {row.emerged_only_ci[0]:.2f}–{row.emerged_only_ci[1]:.2f})" if row.emerged_only_ci else ""
        return Sentence(
            f"{row.arm} against {row.reference}, tokens to emerge: no ratio of all seeds, because {why}. Over the "
            f"seeds with a T50 alone it is {row.emerged_only:.2f}×{ci}, which leaves the others out.",
            "measured",
        )
    return Sentence(f"{row.arm} against {row.reference}, tokens to emerge: no ratio, because {why}.", "seen")


def _seeds(row: Emergence) -> str:
    return f"{len(row.seeds)} seed" + "s" * (len(row.seeds) != 1)


def _more(seeds: int | None, what: str) -> str:
    if seeds is None:
        return f"Even {MOST} seeds an arm would not show {what}."
    return f"About {seeds} seeds an arm would show {what}."


def _bound(row: SpeedRatio) -> Sentence:
    """One arm wholly stuck: its side of the ratio is known, no ratio is."""
    if row.at_least:
        seen = f"no seed of {row.arm} emerged, though trained for {row.at_least:.2f}× the T50 of {row.reference}"
    elif row.at_most:
        seen = f"no seed of {row.reference} emerged, {row.arm} did within {row.at_most:.2f}× of its tokens"
    else:
        seen = "; ".join(row.flags)
    if row.ci is None or row.p is None or row.p_holm is None:
        return Sentence(f"{row.arm} against {row.reference}: {seen}; no ratio can be given.", "seen")
    words, end = ("more", row.ci[0]) if math.isinf(row.ci[1]) else ("less", row.ci[1])
    numbers = f"{seen}; {p_text(row.p_holm)} after Holm{_counted(row)}"
    if row.p_holm < ALPHA:
        return Sentence(
            f"{row.arm} needs {words} than {end:.2f}× the tokens of {row.reference} to emerge, with 95% confidence "
            f"({numbers}).",
            "shown",
        )
    return Sentence(
        f"{row.arm} needs {words} than {end:.2f}× the tokens of {row.reference}, with 95% confidence; whether more or "
        f"fewer is not shown ({numbers}).",
        "measured",
    )


def _counted(row: SpeedRatio) -> str:
    return "" if row.method != CENSORED else f"; {CENSORED} model, {'; '.join(row.flags)}"


def _ceiling(row: SameCeiling, arm: Emergence, reference: Emergence, family: int) -> Sentence:
    if row.difference is None or row.ci is None:
        why = "; ".join(row.flags)
        ends = [_last(each) for each in (arm, reference)]
        if None in ends:
            return Sentence(
                f"{row.arm} against {row.reference}, level at the end: not compared, because {why}.", "seen"
            )
        return Sentence(
            f"{row.arm} stood at {ends[0]} at its last evaluation, {row.reference} at {ends[1]}; ceilings are not "
            f"compared, because {why}.",
            "seen",
        )
    low, high = row.ci
    numbers = f"{points_text(row.difference)} points, 95% interval {points_text(low)} to {points_text(high)}"
    over = "".join(f"; {flag}" for flag in row.flags)
    if row.equivalent:
        return Sentence(
            f"{row.arm} and {row.reference} end at the same level within {100 * row.margin:g} points ({numbers}; "
            f"equivalence {p_text(row.p_equivalent or 0.0)} after Holm{over}).",
            "shown",
        )
    if row.p_holm is not None and row.p_holm < ALPHA:
        where = "above" if row.difference > 0 else "below"
        return Sentence(
            f"{row.arm} ends {where} {row.reference} ({numbers}; {p_text(row.p_holm)} after Holm{over}).", "shown"
        )
    alike = f"that both end within {100 * row.margin:g} points"
    more = "" if abs(row.difference) >= row.margin else (
        " " + _more(for_ceiling(arm, reference, row.margin, ALPHA / max(1, family)), alike)
    )  # fmt: skip
    return Sentence(
        f"{row.arm} ended {points_text(row.difference)} points from {row.reference} (95% interval {points_text(low)} "
        f"to {points_text(high)}{over}): neither a difference nor a common level is shown.{more}",
        "measured",
    )


def _last(row: Emergence) -> str | None:
    values = [seed.curve.last_value for seed in row.seeds]
    return f"{100 * sum(values) / len(values):.0f}%" if values else None
