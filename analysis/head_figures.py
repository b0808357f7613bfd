"""Which heads retrieve, drawn: layer x head over checkpoints, a panel for each arm and seed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from analysis.arm_emergence import Condition, Emergence
from analysis.drawing import FAINT, INK, Drawn, new_figure, save, tokens_text
from analysis.results import Results
from analysis.selection import finished


def draw_retrieval_heads(
    results: Results, rows: Sequence[Emergence], condition: Condition, folder: Path
) -> Drawn | None:
    """rows: the arms' emergence, to mark stuck seeds. None where no head was scored."""
    heads = results.heads.join(finished(results, condition), on="id")
    if heads.is_empty():
        return None
    arms = [arm for arm in results.arms if arm in set(heads["arm"])]
    seeds = sorted(set(heads["seed"]))
    names = {arm: _heads(heads.filter(pl.col("arm") == arm)) for arm in arms}
    rows_of = [len(names[arm]) for arm in arms]
    stuck = {(row.arm, seed.seed) for row in rows for seed in row.seeds if not seed.curve.emerged}
    top = max(float(heads.select(pl.col("score").max()).item()), 1e-9)
    figure = new_figure(1.4 + 2.0 * len(seeds), 1.1 + sum(0.5 + 0.1 * n for n in rows_of))
    figure.set_layout_engine("constrained", h_pad=0.06, w_pad=0.04)
    panels = figure.subplots(len(arms), len(seeds), squeeze=False, height_ratios=rows_of)
    image = None
    for (i, j), axes in np.ndenumerate(panels):
        mine = heads.filter((pl.col("arm") == arms[i]) & (pl.col("seed") == seeds[j]))
        axes.tick_params(length=0, labelsize=7, labelcolor=INK)
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        axes.set_yticks([])
        note = ", never emerged" if (arms[i], seeds[j]) in stuck else ""
        axes.set_title(f"{arms[i]}, seed {seeds[j]}{note}", fontsize=7.5, color=INK, loc="left", pad=3)
        if mine.is_empty():
            axes.text(0.5, 0.5, "not finished", transform=axes.transAxes, ha="center", fontsize=8, color=FAINT)
            continue
        at = sorted(set(mine["tokens"]))
        labels = names[arms[i]]
        grid = np.full((len(labels), len(at)), np.nan)
        for layer, head, tokens, score in mine.select("layer", "head", "tokens", "score").iter_rows():
            grid[labels.index((layer, head)), at.index(tokens)] = score
        image = axes.pcolormesh(grid, vmin=0, vmax=top, cmap="cividis", edgecolors="white", linewidth=0.3)
        axes.invert_yaxis()
        if i == len(arms) - 1:
            axes.set_xticks(np.arange(len(at)) + 0.5, [tokens_text(t) for t in at], rotation=60)
        if j == 0:
            axes.set_yticks(np.arange(len(labels)) + 0.5, [f"L{layer}H{head}" for layer, head in labels], fontsize=6)
    figure.supxlabel("Training tokens of the checkpoint", fontsize=9, color=INK)
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=0.6, aspect=30)
        bar.set_label("Retrieval score: attention mass on the answer", fontsize=8.5, color=INK)
        bar.ax.tick_params(labelsize=8)
        bar.outline.set_visible(False)
    return save(
        figure,
        folder,
        "retrieval-heads",
        condition,
        "Which heads retrieve",
        "Retrieval score of every full-attention head (rows; L1H0 is layer 1, head 0, counted from 0) at each "
        "checkpoint (columns), by arm and seed. Which heads take the part differs by seed, so seeds are not averaged.",
        heads.select("arm", "seed", "tokens", "layer", "head", "score").sort("arm", "seed", "tokens", "layer", "head"),
    )


def _heads(heads: pl.DataFrame) -> list[tuple[int, int]]:
    """(layer, head) of every head scored, in order."""
    return heads.select("layer", "head").unique().sort("layer", "head").rows()
