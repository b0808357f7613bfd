"""What law each arm's loss follows, over the finished cells of a study.

A cell's final loss is a point: held-out loss where it was measured, else training loss. N is non-embedding parameters
unless asked otherwise. An arm with two sizes and two budgets has the law of both; with one of them varied, the law of
that one. The constant E needs more points than a small study has: it is in where two points can be spared for it.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import polars as pl

from analysis.drawing import tokens_text
from analysis.law_document import Fitted, Settings, fitted
from analysis.laws.scaling import FORMS, Form, Points
from analysis.results import Results

SizeOf = Literal["non_embedding_params", "params"]
LOSSES = ("validation/loss", "train_loss")
FEWEST_TRUNKS = 8  # to draw anew
MANY = 500  # points from which on refits are dear
SPARE = 2  # points beyond the parameters that a law must leave


def study_laws(results: Results, size_of: SizeOf = "non_embedding_params") -> list[dict[str, Any]]:
    """The laws of a study as JSON, an arm and condition a row; none where nothing varies enough."""
    return [fit.document for fit in study_fits(results, size_of)]


def study_fits(results: Results, size_of: SizeOf = "non_embedding_params") -> list[Fitted]:
    runs = results.runs.filter(pl.col("state") == "finished")
    loss = next((name for name in LOSSES if name in runs.columns and runs[name].is_finite().any()), None)
    if loss is None:
        return []
    found = []
    for data in runs["data"].unique(maintain_order=True):
        for arm in results.arms:
            mine = runs.filter((pl.col("arm") == arm) & (pl.col("data") == data) & pl.col(loss).is_finite())
            fit = _arm_law(mine.filter(pl.col(loss) > 0), loss, size_of)
            if fit is not None:
                fit.document.update({"arm": arm, "data": data, "loss": loss, "size_of": size_of})
                found.append(fit)
    return found


def _arm_law(runs: pl.DataFrame, loss: str, size_of: SizeOf) -> Fitted | None:
    form = _form(runs, size_of)
    if form is None:
        return None
    points = Points(
        runs[loss].to_numpy(),
        runs[size_of].to_numpy().astype(float) if form.size else None,
        runs["budget_tokens"].to_numpy().astype(float) if form.data else None,
    )
    # Budgets of one size and seed are branches of one trunk: their errors are one error.
    trunks = [f"{size}/{seed}" for size, seed in runs.select("size", "seed").iter_rows()]
    count = 400 if len(points) <= MANY else 200
    whole = _shared(trunks) and len(set(trunks)) >= FEWEST_TRUNKS
    fit = fitted(
        points, Settings(form, kind="runs" if whole else "residual", replicates=count, runs=trunks if whole else None)
    )
    if _shared(trunks) and not whole:
        fit.document["flags"].append(
            f"{len(set(trunks))} trunks: too few to draw whole trunks anew; budgets of one trunk count as unrelated"
        )
    names = [
        f"{size}, {tokens_text(tokens)} tokens, seed {seed}"
        for size, tokens, seed in runs.select("size", "budget_tokens", "seed").iter_rows()
    ]
    return replace(fit, names=tuple(names))


def _shared(trunks: list[str]) -> bool:
    return len(set(trunks)) < len(trunks)


def _form(runs: pl.DataFrame, size_of: SizeOf) -> Form | None:
    """The richest law that leaves SPARE points; None with one size and one budget."""
    sizes, budgets = runs[size_of].n_unique(), runs["budget_tokens"].n_unique()
    if runs.is_empty() or max(sizes, budgets) < 2:
        return None
    # Budgets in multiples of N vary with it: a grid of one budget a size shows a ray, not two variables.
    ray = bool(np.ptp(np.log((runs["budget_tokens"] / runs[size_of]).to_numpy())) < 1e-2)
    varied = ("size",) if ray or budgets < 2 else ("data",) if sizes < 2 else ("size", "data")
    names = {("size", "data"): ("chinchilla", "no-constant"), ("size",): ("size", "size-no-constant"),
             ("data",): ("data", "data-no-constant")}[varied]  # fmt: skip
    places = runs.select(size_of, "budget_tokens").n_unique()
    for name in names:
        form = FORMS[name]
        # Three values of a variable bend a curve on log axes; two only tilt it.
        bent = not form.constant or max(sizes if form.size else 0, budgets if form.data else 0) >= 3
        if bent and places >= form.parameters and runs.height >= form.parameters + SPARE:
            return form
    return None
