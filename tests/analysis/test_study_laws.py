"""The laws of a study: which form its grid allows, and what to train next."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from analysis.findings import fit_results
from analysis.next_study import proposals
from analysis.results import RUNS, Results, collect
from analysis.study_scaling import study_laws

from .conftest import FakeArm, Write


def grid(sizes: int, budgets: int, seeds: int = 1, per_n: bool = False, noise: float = 2e-3) -> Results:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for i, n in enumerate(np.geomspace(1e6, 1e8, sizes)):
        for d in np.geomspace(20, 2000, budgets) * n if per_n else np.geomspace(1e9, 1e11, budgets):
            for seed in range(seeds):
                loss = (1.7 + 90 * n**-0.3 + 400 * d**-0.28) * np.exp(rng.normal(0, noise))
                rows.append(
                    {"id": str(len(rows)), "job_id": "", "arm": "full", "size": f"s{i}", "data": "text",
                     "budget_tokens": int(d), "seed": seed, "params": int(1.3 * n), "non_embedding_params": int(n),
                     "state": "finished", "attempts": 1, "tokens_done": int(d), "cause": None, "train_loss": loss}
                )  # fmt: skip
    study = {"name": "grid", "arms": [{"name": "full"}], "question": None, "cells": []}
    empty = pl.DataFrame(schema={"metric": pl.String, "value": pl.Float64})
    return Results(Path("."), study, pl.DataFrame(rows, schema=RUNS), empty, empty)


@pytest.mark.parametrize(
    ("sizes", "budgets", "law"),
    [(4, 5, "chinchilla"), (2, 2, None), (1, 6, "data"), (6, 1, "size"), (1, 1, None), (2, 4, "chinchilla")],
)
def test_a_grid_has_the_law_it_can_bear(sizes: int, budgets: int, law: str | None) -> None:
    found = study_laws(grid(sizes, budgets))
    assert [row["law"] for row in found] == ([law] if law else [])


def test_the_law_of_an_arm_is_recovered_with_its_definition_of_n() -> None:
    (law,) = study_laws(grid(5, 6, seeds=2))
    assert law["arm"] == "full" and law["loss"] == "train_loss" and law["size_of"] == "non_embedding_params"
    assert law["ci"]["alpha"][0] <= 0.3 <= law["ci"]["alpha"][1]
    assert law["bootstrap"]["kind"] == "runs", "budgets of one size and seed share a trunk"
    (total,) = study_laws(grid(5, 6, seeds=2), "params")
    assert total["alpha"] == pytest.approx(law["alpha"], rel=1e-3) and total["A"] > law["A"]


def test_seeds_alone_leave_scaling_empty(write_study: Write) -> None:
    assert study_laws(collect(write_study(), "laziness")) == []


def test_more_seeds_narrow_the_ratio_and_the_first_narrow_most(write_study: Write) -> None:
    arms = (FakeArm("full", (0.8, 0.7, 0.75)), FakeArm("swa-8", (0.6, 0.5, 0.55)))
    results = collect(write_study(arms), "laziness")
    found = proposals(fit_results(results))["proposals"]
    by_more = {row["more"]: row["then"] for row in found}
    assert by_more[8] < by_more[3] < by_more[1] < found[0]["now"]
    assert found[0]["more"] == 1 and found[0]["gain_a_run"] > 0


def test_further_budgets_narrow_an_exponent() -> None:
    results = grid(4, 5, noise=1e-2)
    found = proposals(fit_results(results))["proposals"]
    assert {row["kind"] for row in found} == {"size", "budget"}
    best = max(found, key=lambda row: row["gain_a_run"])
    assert best["then"] < best["now"]


def test_one_seed_is_too_few_to_plan_from(write_study: Write) -> None:
    results = collect(write_study((FakeArm("full", (0.8,)), FakeArm("swa-8", (0.6,)))), "laziness")
    told = proposals(fit_results(results))
    assert told["proposals"] == [] and "two seeds" in told["notes"][0]
