"""Emergence, drawn: all arms in one picture with their T50s, and every seed on its own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib import ticker
from matplotlib.axes import Axes

from analysis.arm_emergence import Condition, Emergence, Question
from analysis.drawing import FAINT, INK, NOTE, Drawn, Stroke, end_labels, new_figure, plain, save, tokens_axis
from analysis.selection import seed_lines, span
from analysis.wording import capability_text, first_upper


def draw_emergence(
    rows: Sequence[Emergence], values: pl.DataFrame, question: Question, condition: Condition,
    style: dict[str, Stroke], folder: Path,
) -> Drawn:  # fmt: skip
    rows = [row for row in rows if row.seeds]
    low, high = span(values)
    figure = new_figure(8.4, 4.6 + 0.26 * len(rows))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4.0, 0.7 + 0.26 * len(rows)])
    figure.subplots_adjust(hspace=0.1)
    grid = np.geomspace(low, high, 300)
    labels = []
    for row in rows:
        stroke = style[row.arm]
        for line in seed_lines(values, row.arm):
            above.plot(line["tokens"], line["value"], color=stroke.colour, linewidth=0.8, alpha=0.45)
        curve = _mean_curve(row, grid)
        last = np.mean([seed.curve.last_value for seed in row.seeds])
        if curve is not None and row.t50_tokens is not None and row.ceiling is not None:
            above.plot(grid, curve, color=stroke.colour, linestyle=stroke.dash, linewidth=2.4)
            half = (row.floor + row.ceiling) / 2
            above.plot(
                row.t50_tokens, half, "o", color=stroke.colour, markersize=6.5, markeredgecolor="white", zorder=4
            )
            last = curve[-1]
        labels.append((row.arm, float(last), stroke))
    plain(above).set_ylim(-0.02, 1.02)
    above.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    above.set_ylabel(first_upper(capability_text(question.capability)), color=INK, fontsize=9.5)
    if question.chance is not None:
        above.axhline(question.chance, color=NOTE, linewidth=0.9, linestyle=":")
        labels.append(("chance", question.chance, Stroke(FAINT, ":")))
    end_labels(above, labels)
    _t50_strip(below, rows, style, high)
    tokens_axis(below, low, high)
    above.tick_params(labelbottom=False)
    return save(
        figure,
        folder,
        "emergence",
        condition,
        f"When {capability_text(question.capability)} emerges",
        "Above: the capability of every seed (thin) and the fitted mean of each arm (thick) over training tokens, with "
        "T50 as a dot. Below: T50 of each arm with its 95% interval, each seed, and seeds that never emerged.",
        values.select("arm", "seed", "tokens", "value").sort("arm", "seed", "tokens"),
    )


def _t50_strip(axes: Axes, rows: Sequence[Emergence], style: dict[str, Stroke], high: float) -> None:
    """T50 by arm on the tokens axis: a dot with its interval, a ring for each seed, an arrow for each censored one."""
    for place, row in enumerate(rows):
        colour = style[row.arm].colour
        if row.t50_ci:
            axes.plot(row.t50_ci, [place, place], color=colour, linewidth=2.2, alpha=0.55, solid_capstyle="butt")
        for seed in row.seeds:
            if seed.curve.t50_tokens:
                axes.plot(
                    seed.curve.t50_tokens, place, "o", markersize=5, markerfacecolor="none", markeredgecolor=colour
                )
        if row.t50_tokens:
            axes.plot(row.t50_tokens, place, "o", color=colour, markersize=7, markeredgecolor="white", zorder=4)
        if row.censored:
            axes.plot(high, place, ">", color=colour, markersize=6, clip_on=False, zorder=5)
            axes.annotate(
                f"{row.censored} of {len(row.seeds)} never emerged", (1.03, place), ha="left", va="center",
                xycoords=("axes fraction", "data"), fontsize=8.5, color=INK, annotation_clip=False,
            )  # fmt: skip
    plain(axes).set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.arm for row in rows])
    axes.set_ylabel("T50", color=INK, fontsize=9.5)


def draw_seeds(
    rows: Sequence[Emergence], values: pl.DataFrame, question: Question, condition: Condition,
    style: dict[str, Stroke], folder: Path,
) -> Drawn:  # fmt: skip
    rows = [row for row in rows if row.seeds]
    low, high = span(values)
    columns = min(3, len(rows))
    height = -(-len(rows) // columns)
    figure = new_figure(2.9 * columns + 0.8, 2.3 * height + 0.5)
    panels = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False).ravel()
    figure.subplots_adjust(hspace=0.28, wspace=0.1)
    grid = np.geomspace(low, high, 200)
    for axes, row in zip(panels, rows, strict=False):
        colour = style[row.arm].colour
        stuck = {seed.seed for seed in row.seeds if not seed.curve.emerged}
        for line in seed_lines(values, row.arm):
            never = line["seed"][0] in stuck
            axes.plot(
                line["tokens"], line["value"], color=INK if never else colour, linewidth=1.0,
                linestyle="--" if never else "-", marker=".", markersize=3,
            )  # fmt: skip
        for seed in row.seeds:
            if seed.curve.t50_tokens:
                axes.plot(grid, seed.curve.at(grid), color=colour, linewidth=3.5, alpha=0.22)
                axes.plot([seed.curve.t50_tokens] * 2, [0, 0.05], color=colour, linewidth=1.6)
        plain(axes).set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
        axes.set_title(
            f"{row.arm}: {row.emerged} of {len(row.seeds)} emerged", fontsize=9.5, color=INK, loc="left",
        )  # fmt: skip
        tokens_axis(axes, low, high, label="")
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    for i in range(len(rows)):
        if i + columns >= len(rows):
            panels[i].tick_params(labelbottom=True)
            panels[i].set_xlabel("Training tokens", color=INK, fontsize=9.5)
    figure.supylabel(first_upper(capability_text(question.capability)), fontsize=9.5, color=INK, x=0.03)
    curves = [
        (row.arm, seed.seed, seed.curve.emerged, seed.curve.t50_tokens, seed.curve.ceiling, seed.curve.slope)
        for row in rows
        for seed in row.seeds
    ]
    return save(
        figure,
        folder,
        "seeds",
        condition,
        "Seed by seed",
        "One panel an arm: each seed's measured values and, broad and pale, its fitted curve, with T50 as a tick at "
        "the foot. Dashed black: seeds that never emerged.",
        pl.DataFrame(curves, schema=["arm", "seed", "emerged", "t50_tokens", "ceiling", "slope"], orient="row"),
    )


def _mean_curve(row: Emergence, tokens: np.ndarray) -> np.ndarray | None:
    """The logistic with the mean parameters of the seeds that have a T50; None where none has."""
    fitted = [seed.curve for seed in row.seeds if seed.curve.t50_tokens is not None]
    if not fitted or row.ceiling is None or row.slope is None or row.t50_tokens is None:
        return None
    away = row.slope * (np.log10(tokens) - np.log10(row.t50_tokens))
    return row.floor + (row.ceiling - row.floor) / (1 + np.exp(-away))
