"""What a study found: when each arm's capability emerges, how fast against the reference, and whether all end level.

Finished cells are fitted. Failed, diverged and unfinished ones are counted, never fitted.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from analysis import claims
from analysis.arm_emergence import Condition, Emergence, Question, fit_arm, times
from analysis.axes import losses
from analysis.claims import Claim
from analysis.comparisons import (
    SameCeiling,
    SpeedRatio,
    equivalence_adjusted,
    holm_adjusted,
    same_ceiling,
    speed_ratio,
)
from analysis.law_document import Fitted
from analysis.laws.emergence import emergence_level
from analysis.results import Results, collect
from analysis.size_emergence import SizeRow, size_json, size_rows
from analysis.study_scaling import study_fits


@dataclass(frozen=True)
class StudyFit:
    """Everything found. left_out: cells not in the fits: id, arm, size, data, seed, state, cause, tokens_done."""

    study: str
    question: Question | None
    arms: tuple[str, ...]  # in study order
    emergence: tuple[Emergence, ...]
    speed_ratios: tuple[SpeedRatio, ...]
    same_ceiling: tuple[SameCeiling, ...]
    scaling: tuple[Fitted, ...]  # a law an arm
    t50_by_size: tuple[SizeRow, ...]
    claims: tuple[Claim, ...]  # what the study file claims, in its order
    counts: dict[str, int]
    left_out: tuple[dict[str, Any], ...]

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return tuple(dict.fromkeys(row.condition for row in self.emergence))


def fit_study(root: Path | str, name: str) -> StudyFit:
    """Fits the study `name` under `root` as far as it is finished. Raises InputError where the study is unknown."""
    return fit_results(collect(root, name))


def fit_results(results: Results, ahead: float | None = None) -> StudyFit:
    """The fit of tables already collected. A study without a question has no emergence. ahead: N to predict T50 at."""
    asked = results.study.get("question")
    question = None
    emergence: tuple[Emergence, ...] = ()
    if asked:
        chance = asked.get("chance")
        question = Question(asked["capability"], chance, asked["reference"], asked["margin"], emergence_level(chance))
        emergence = _emergence_rows(results, question)
    pairs = [
        (row, reference)
        for row in emergence
        for reference in emergence
        if question and row.condition == reference.condition and row.arm != reference.arm == question.reference
    ]
    scaling = tuple(study_fits(results))
    left_out = results.runs.filter(pl.col("state") != "finished")
    return StudyFit(
        study=results.study["name"],
        question=question,
        arms=results.arms,
        emergence=emergence,
        speed_ratios=holm_adjusted([speed_ratio(arm, reference) for arm, reference in pairs]),
        same_ceiling=equivalence_adjusted(
            holm_adjusted([same_ceiling(arm, ref, question.margin) for arm, ref in pairs if question])
        ),
        scaling=scaling,
        t50_by_size=tuple(_by_size(emergence, results.runs, ahead)),
        claims=claims.judge(results, emergence, scaling),
        counts=results.counts(),
        left_out=tuple(
            left_out.select("id", "arm", "size", "data", "seed", "state", "cause", "tokens_done").to_dicts()
        ),
    )


def as_json(fit: StudyFit) -> dict[str, Any]:
    """The document of `gridlaw fit --json`: JSON types alone, every number finite or null."""
    question = fit.question
    return {
        "study": fit.study,
        "question": None if question is None else asdict(question),
        "emergence": [emergence_json(row, question) for row in fit.emergence if question],
        "speed_ratios": [flat(row) for row in fit.speed_ratios],
        "same_ceiling": [flat(row) for row in fit.same_ceiling],
        "scaling": [law.document for law in fit.scaling],
        "findings": [claims.as_json(row) for row in fit.claims],
        "t50_by_size": [size_json(row) for row in fit.t50_by_size],
        "counts": fit.counts,
        "left_out": list(fit.left_out),
    }


def emergence_json(row: Emergence, question: Question) -> dict[str, Any]:
    seeds = [
        {
            "cell": seed.id,
            "seed": seed.seed,
            "emerged": seed.curve.emerged,
            "t50_tokens": seed.curve.t50_tokens,
            "crossing_tokens": seed.curve.crossing_tokens,
            "bracket": list(seed.curve.bracket),
            "ceiling": seed.curve.ceiling,
            "slope": seed.curve.slope,
            "forms": seed.forms and asdict(seed.forms) | {"spread": seed.forms.spread},
            "dispersion": seed.curve.dispersion,
            "t50_flops": times(seed.curve.t50_tokens, row.flops_per_token),
            "t50_loss": seed.loss,
            "last_tokens": seed.curve.last_tokens,
            "last_value": seed.curve.last_value,
            "flags": list(seed.curve.flags),
        }
        for seed in row.seeds
    ]
    return flat(row) | {
        "capability": question.capability,
        "seeds": len(row.seeds),
        "censored": row.censored,
        "by_seed": seeds,
    }


def flat(row: Emergence | SpeedRatio | SameCeiling) -> dict[str, Any]:
    """Fields of a row with its condition beside them, tuples as lists, an open end of an interval as None."""
    fields = {
        key: [None if end in (math.inf, -math.inf) else end for end in value] if isinstance(value, tuple) else value
        for key, value in vars(row).items()
    }
    del fields["condition"]
    if isinstance(row, SpeedRatio):
        fields["slopes"] = row.slopes and asdict(row.slopes)
    return fields | asdict(row.condition)


def _by_size(emergence: tuple[Emergence, ...], runs: pl.DataFrame, ahead: float | None) -> list[SizeRow]:
    """Rows of every arm. N of a size is that of its arm: arms of one size may differ by a residual."""
    found = []
    for arm in dict.fromkeys(row.arm for row in emergence):
        mine = runs.filter(pl.col("arm") == arm).select("size", "non_embedding_params")
        found += size_rows([row for row in emergence if row.arm == arm], dict(mine.iter_rows()), ahead)
    return found


def _emergence_rows(results: Results, question: Question) -> tuple[Emergence, ...]:
    values = results.metrics.filter((pl.col("metric") == question.capability) & pl.col("value").is_finite())
    answers = dict(results.answers.filter(pl.col("metric") == question.capability).select("id", "answers").iter_rows())
    loss = losses(results)
    rows = []
    for data, size in results.runs.select("data", "size").unique(maintain_order=True).iter_rows():
        for arm in results.arms:
            cells = results.runs.filter((pl.col("arm") == arm) & (pl.col("size") == size) & (pl.col("data") == data))
            if cells.height:
                largest = cells.filter(pl.col("budget_tokens") == pl.col("budget_tokens").max()).sort("seed")
                condition = Condition(data, size)
                rows.append(fit_arm(arm, condition, largest, values, question, answers, loss and loss[1]))
    return tuple(rows)
