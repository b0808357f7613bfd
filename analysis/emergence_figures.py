"""Emergence, drawn: all arms in one picture with their T50s, and every seed on its own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.arm_emergence import Condition, Emergence, Question, mean_curve
from analysis.drawing import (
    FAINT,
    INK,
    NOTE,
    SMALL,
    WIDTH,
    Drawn,
    Stroke,
    end_labels,
    new_figure,
    plain,
    save,
    tokens_axis,
)
from analysis.hover import emergence_hover
from analysis.selection import seed_lines, span
from analysis.wording import capability_text, first_upper


def draw_emergence(
    rows: Sequence[Emergence], values: pl.DataFrame, question: Question, condition: Condition,
    style: dict[str, Stroke], folder: Path,
) -> Drawn:  # fmt: skip
    figure, alt, data = emergence_picture(rows, values, question, style)
    title = f"When {capability_text(question.capability)} emerges"
    return save(
        figure, folder, "emergence", condition, title, alt, data, emergence_hover(rows, values, question, style)
    )


def emergence_picture(
    rows: Sequence[Emergence], values: pl.DataFrame, question: Question, style: dict[str, Stroke]
) -> tuple[Figure, str, pl.DataFrame]:
    """(figure, caption, numbers). values: arm, seed, tokens, value."""
    rows = [row for row in rows if row.seeds]
    low, high = reach(rows, values)
    foot = 0.3 + 0.17 * len(rows)
    figure = new_figure(WIDTH, 2.5 + foot)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.5, foot])
    figure.subplots_adjust(hspace=0.1)
    grid = np.geomspace(low, high, 300)
    labels = []
    for row in rows:
        stroke = style[row.arm]
        for line in seed_lines(values, row.arm):
            above.plot(line["tokens"], line["value"], color=stroke.colour, linewidth=0.7, alpha=0.4)
        curve = mean_curve(row, grid)
        last = np.mean([seed.curve.last_value for seed in row.seeds])
        if curve is not None and row.t50_tokens is not None and row.ceiling is not None:
            above.plot(grid, curve, color=stroke.colour, linestyle=stroke.dash, linewidth=1.9)
            half = (row.floor + row.ceiling) / 2
            above.plot(row.t50_tokens, half, "o", color=stroke.colour, markersize=5, markeredgecolor="white", zorder=4)
            last = curve[-1]
        labels.append((row.arm, float(last), stroke))
    plain(above)
    _capability_axis(above, values, question)
    if question.chance:
        above.axhline(question.chance, color=NOTE, linewidth=0.9, linestyle=":")
        labels.append(("chance", question.chance, Stroke(FAINT, ":")))
    end_labels(above, labels, gap=0.075)
    tokens_axis(below, low, high)
    _t50_strip(below, rows, style)
    above.tick_params(labelbottom=False)
    alt = (
        "Above: the capability of every seed (thin) and the fitted mean of each arm (thick) over training tokens, with "
        "T50 as a dot. Below: T50 of each arm (dot), its 95% interval over seeds (bar; an arrow where it leaves the "
        "axis), each seed (ring), and, beside the axis, seeds that never emerged."
    )
    return figure, alt, values.select("arm", "seed", "tokens", "value").sort("arm", "seed", "tokens")


def reach(rows: Sequence[Emergence], values: pl.DataFrame) -> tuple[float, float]:
    """Tokens drawn: all, but for what lies far before the first T50, where curves are flat."""
    low, high = span(values)
    found = [seed.curve.t50_tokens for row in rows for seed in row.seeds if seed.curve.t50_tokens is not None]
    return (max(low, min(found) / 30) if found else low), high


def _capability_axis(axes: Axes, values: pl.DataFrame, question: Question) -> None:
    """Percent from 0 to 100, or to what was reached where that is far below."""
    reached = max(float(values.select(pl.col("value").max()).item()), question.level)
    top = 1.0 if reached > 0.7 else 1.15 * reached
    axes.set_ylim(-0.02 * top, 1.02 * top)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    axes.set_ylabel(first_upper(capability_text(question.capability)), color=INK, fontsize=SMALL)


def _t50_strip(axes: Axes, rows: Sequence[Emergence], style: dict[str, Stroke]) -> None:
    """T50 by arm on the tokens axis: a dot with its interval, a ring a seed; seeds that never emerged in words."""
    left, right = axes.get_xlim()
    for place, row in enumerate(rows):
        colour = style[row.arm].colour
        if row.t50_ci:
            ends = np.clip(row.t50_ci, left, right)
            axes.plot(ends, [place, place], color=colour, linewidth=2.0, alpha=0.5, solid_capstyle="butt")
            for edge, beyond, arrow in ((left, row.t50_ci[0] < left, "<"), (right, row.t50_ci[1] > right, ">")):
                if beyond:
                    axes.plot(edge, place, arrow, color=colour, markersize=5.5, clip_on=False, zorder=5)
        for seed in row.seeds:
            if seed.curve.t50_tokens:
                axes.plot(
                    seed.curve.t50_tokens, place, "o", markersize=3.8, markerfacecolor="none", markeredgecolor=colour,
                    markeredgewidth=0.8,
                )  # fmt: skip
        if row.t50_tokens:
            axes.plot(row.t50_tokens, place, "o", color=colour, markersize=5, markeredgecolor="white", zorder=4)
        if row.censored:
            axes.annotate(
                f"{row.censored} of {len(row.seeds)} never", (1.04, place), ha="left", va="center",
                xycoords=("axes fraction", "data"), fontsize=SMALL - 0.5, color=INK, annotation_clip=False,
            )  # fmt: skip
    plain(axes).set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.arm for row in rows])
    axes.set_ylabel("T50", color=INK, fontsize=SMALL)


def draw_seeds(
    rows: Sequence[Emergence], values: pl.DataFrame, question: Question, condition: Condition,
    style: dict[str, Stroke], folder: Path,
) -> Drawn:  # fmt: skip
    rows = [row for row in rows if row.seeds]
    low, high = span(values)
    columns = min(3, len(rows))
    height = -(-len(rows) // columns)
    figure = new_figure(1.45 * columns + 0.4, 1.2 * height + 0.4)
    panels = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False).ravel()
    figure.subplots_adjust(hspace=0.36, wspace=0.12)
    grid = np.geomspace(low, high, 200)
    for axes, row in zip(panels, rows, strict=False):
        colour = style[row.arm].colour
        stuck = {seed.seed for seed in row.seeds if not seed.curve.emerged}
        for line in seed_lines(values, row.arm):
            never = line["seed"][0] in stuck
            axes.plot(
                line["tokens"], line["value"], color=INK if never else colour, linewidth=0.7,
                linestyle="--" if never else "-", marker=".", markersize=1.5,
            )  # fmt: skip
        for seed in row.seeds:
            if seed.curve.t50_tokens:
                axes.plot(grid, seed.curve.at(grid), color=colour, linewidth=2.6, alpha=0.22)
                axes.plot([seed.curve.t50_tokens] * 2, [0, 0.05], color=colour, linewidth=1.6)
        plain(axes).tick_params(labelsize=SMALL - 1)
        _capability_axis(axes, values, question)
        axes.set_ylabel("")
        axes.set_title(f"{row.arm}: {row.emerged} of {len(row.seeds)}", fontsize=SMALL, color=INK, loc="left", pad=3)
        tokens_axis(axes, low, high, label="", subs=(1, 3))
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    for i in range(len(rows)):
        if i + columns >= len(rows):
            panels[i].tick_params(labelbottom=True)
            panels[i].set_xlabel("Training tokens", color=INK, fontsize=SMALL)
    figure.supylabel(first_upper(capability_text(question.capability)), fontsize=SMALL, color=INK, x=0.0)
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
        "One panel an arm, with how many of its seeds emerged: each seed's measured values and, broad and pale, its "
        "fitted curve, with T50 as a tick at the foot. Dashed black: seeds that never emerged.",
        pl.DataFrame(curves, schema=["arm", "seed", "emerged", "t50_tokens", "ceiling", "slope"], orient="row"),
    )
