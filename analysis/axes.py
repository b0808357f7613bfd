"""Emergence on two further axes: training FLOPs, and loss.

FLOPs: an arm costs the same FLOPs at every token, so its curve over FLOPs is its curve over tokens, moved: T50 times
FLOPs a token, an exact change of unit. Loss: that of a seed where its curve is half-way, between evaluations on a
straight line over log tokens. Arms that differ in T50 and not in that loss differ in how fast their loss falls, not in
what loss the capability asks for (Du et al. 2024, arXiv 2403.15796).
"""

import numpy as np
import polars as pl

from analysis.results import FINAL_LOSS_LINES, Results

LOSSES = ("validation/loss", "train/loss")  # the first that was measured


def losses(results: Results) -> tuple[str, pl.DataFrame] | None:
    """(metric, rows of id, tokens, value ascending in tokens); None where no loss was recorded.

    Training losses are of single batches: a running mean over FINAL_LOSS_LINES lines stands for them.
    """
    values = results.metrics.filter(pl.col("value").is_finite() & (pl.col("tokens") > 0))
    for metric in LOSSES:
        mine = values.filter(pl.col("metric") == metric).select("id", "tokens", "value").sort("id", "tokens")
        if mine.is_empty():
            continue
        if metric == "train/loss":
            mean = pl.col("value").rolling_mean(FINAL_LOSS_LINES, min_samples=1, center=True).over("id")
            mine = mine.with_columns(value=mean)
        return metric, mine
    return None


def loss_at(tokens: float | None, line: pl.DataFrame) -> float | None:
    """Loss of one cell at `tokens`. line: (tokens, value) ascending. None outside of what was measured."""
    if tokens is None or line.height < 2 or not line["tokens"][0] <= tokens <= line["tokens"][-1]:
        return None
    return float(np.interp(np.log(tokens), np.log(line["tokens"].to_numpy()), line["value"].to_numpy()))
