"""What figures share of the tables: conditions, their finished cells, the lines of their seeds."""

from collections.abc import Iterator

import polars as pl

from analysis.arm_emergence import Condition
from analysis.results import Results


def conditions(results: Results) -> list[Condition]:
    """The conditions of a study, in its order."""
    return [Condition(*row) for row in results.runs.select("data", "size").unique(maintain_order=True).iter_rows()]


def finished(results: Results, condition: Condition) -> pl.DataFrame:
    """id, arm, seed of the finished cells of a condition, at the largest budget of each arm."""
    here = results.runs.filter((pl.col("data") == condition.data) & (pl.col("size") == condition.size))
    largest = here.filter(pl.col("budget_tokens") == pl.col("budget_tokens").max().over("arm"))
    return largest.filter(pl.col("state") == "finished").select("id", "arm", "seed")


def values_of(results: Results, condition: Condition) -> pl.DataFrame:
    """Finite metrics of the finished cells of a condition, with arm and seed, from the first step on."""
    values = results.metrics.filter(pl.col("value").is_finite() & (pl.col("tokens") > 0))
    return values.join(finished(results, condition), on="id")


def seed_lines(values: pl.DataFrame, arm: str) -> Iterator[pl.DataFrame]:
    """The rows of one arm, a table a seed, ascending in tokens."""
    mine = values.filter(pl.col("arm") == arm).sort("seed", "tokens")
    for _, line in mine.group_by("seed", maintain_order=True):
        yield line


def span(values: pl.DataFrame) -> tuple[float, float]:
    """(least, greatest) tokens."""
    low, high = values.select(low=pl.col("tokens").min(), high=pl.col("tokens").max()).row(0)
    return float(low), float(high)
