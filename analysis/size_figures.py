"""T50 over model size, drawn: seeds, the law of each arm, and what it predicts of a larger model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib import ticker
from matplotlib.figure import Figure

from analysis.drawing import (
    INK,
    TEXT,
    WIDTH,
    Drawn,
    Stroke,
    end_labels,
    new_figure,
    plain,
    save,
    tokens_axis,
    tokens_text,
)
from analysis.hover import APART, size_hover
from analysis.size_emergence import SizeRow


def draw_sizes(rows: Sequence[SizeRow], style: dict[str, Stroke], folder: Path) -> Drawn:
    """All arms of a study; data conditions apart by name."""
    several = len({row.data for row in rows}) > 1
    named = [replace(row, arm=f"{row.arm}, {row.data}") if several else row for row in rows]
    look = {one.arm: style[row.arm] for one, row in zip(named, rows, strict=True)}
    figure, caption, data = size_picture(named, look)
    return save(figure, folder, "t50-by-size", None, "T50 over model size", caption, data, size_hover(named, look))


def size_picture(rows: Sequence[SizeRow], style: dict[str, Stroke]) -> tuple[Figure, str, pl.DataFrame]:
    """(figure, caption, numbers). At least one row must have a point."""
    rows = [row for row in rows if row.points]
    figure = new_figure(WIDTH, 2.8)
    axes = plain(figure.add_subplot())
    everything = [n for row in rows for n in (*(n for n, _ in row.points), row.ahead) if n]
    low, high = min(everything), max(everything) * APART ** len(rows)
    numbers: list[tuple[object, ...]] = []
    labels = []
    lone = len(rows) == 1
    for place, row in enumerate(rows):
        stroke, name = style[row.arm], row.arm or "all"
        n, t50 = (np.array(column) for column in zip(*row.points, strict=True))
        axes.plot(n, t50, "o", markersize=4, mfc="none", mec=stroke.colour, mew=1.0)
        numbers += [(name, "seed", a, b, None, None) for a, b in row.points]
        if row.law is None or row.ahead is None or row.t50_tokens is None:
            labels.append((name, float(t50[n.argmax()]), stroke))
            continue
        grid = np.geomspace(n.min(), row.ahead, 80)
        told = [row.law.predict(float(each)) for each in grid]
        curve = np.array([middle for middle, _ in told])
        seen = grid <= row.law.largest
        axes.plot(grid[seen], curve[seen], color=stroke.colour, linewidth=1.6)
        axes.plot(grid[~seen], curve[~seen], color=stroke.colour, linewidth=1.4, linestyle=(0, (3, 2)))
        bands = [ci or (np.nan, np.nan) for _, ci in told]
        if lone:  # several bands on one another show none
            low_ends, high_ends = zip(*bands, strict=True)
            axes.fill_between(grid, low_ends, high_ends, color=stroke.colour, alpha=0.14, linewidth=0)
        elif row.ci:
            axes.plot([row.ahead * APART**place] * 2, row.ci, color=stroke.colour, linewidth=1.6, alpha=0.6)
        axes.plot(
            row.ahead * APART**place, row.t50_tokens, "o", markersize=5, color=stroke.colour, mec="white", zorder=4
        )
        numbers += [(name, "law", float(a), float(b), *ends) for a, b, ends in zip(grid, curve, bands, strict=True)]
        labels.append((name, row.t50_tokens, stroke))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: tokens_text(y)))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_ylabel("T50, training tokens", color=INK, fontsize=TEXT)
    tokens_axis(axes, low, high, "Parameters N")
    if not lone:
        end_labels(axes, labels, gap=0.08)
    data = pl.DataFrame(numbers, schema=["arm", "kind", "n", "t50_tokens", "low", "high"], orient="row", strict=False)
    return figure, _caption(rows, lone), data


def _caption(rows: Sequence[SizeRow], lone: bool) -> str:
    text = "T50 of each seed (rings) over parameters N"
    if not any(row.law for row in rows):
        return f"{text}; no law: {rows[0].flags[0]}."
    where = "Band" if lone else "Bar"
    text += (
        f", and log T50 = a + b log N by least squares over seeds; dashed beyond the sizes trained, with its "
        f"prediction (dot). {where}: 95% prediction interval of one new seed."
    )
    told = "; ".join(
        f"{row.arm + ': ' if row.arm else ''}b = {row.law.exponent:.2f}"
        + (f" ({row.law.exponent_ci[0]:.2f} to {row.law.exponent_ci[1]:.2f})" if row.law.exponent_ci else "")
        for row in rows
        if row.law
    )
    beside = " Predictions are of one N, drawn beside one another." if not lone else ""
    return f"{text}{beside} {told}."
