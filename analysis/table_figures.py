"""Figures of a table's emergence and of its isoFLOP minima, as a paper prints them, each with its numbers beside it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib import colormaps, colors, ticker

from analysis.drawing import (
    COLOURS,
    INK,
    SMALL,
    TEXT,
    WIDTH,
    Stroke,
    end_labels,
    new_figure,
    plain,
    strokes,
    tokens_axis,
    tokens_text,
    write,
)
from analysis.emergence_figures import emergence_picture
from analysis.laws.isoflop import Optimal
from analysis.size_figures import size_picture
from analysis.table_laws import TableEmergence, TableMinima

MOST_ARMS = 8  # a ninth colour cannot be told from the others


def write_emergence(fit: TableEmergence, folder: Path) -> list[str]:
    """emergence.* with a curve a group (a group and N), t50-by-size.* where the table has N; returns the names."""
    apart = len({row.condition.size for row in fit.rows}) > 1
    names = [_name(row.arm, row.condition.size if apart else "") for row in fit.rows]
    rows = [replace(row, arm=name) for row, name in zip(fit.rows, names, strict=True)]
    labels = {(row.arm, row.condition.size): name for row, name in zip(fit.rows, names, strict=True)}
    named = [labels[key] for key in fit.values.select("arm", "size").iter_rows()]
    values = fit.values.with_columns(arm=pl.Series(named, dtype=pl.String)).filter(pl.col("tokens") > 0)
    style = strokes(names) if len(names) <= MOST_ARMS else _in_order(names)
    figure, caption, data = emergence_picture(rows, values, fit.question, style)
    written = write(figure, folder, "emergence", data, caption)
    if any(row.points for row in fit.by_size):
        arms = [row.arm for row in fit.by_size]
        figure, caption, data = size_picture(fit.by_size, strokes(arms))
        written += write(figure, folder, "t50-by-size", data, caption)
    return written


def write_isoflop(fit: TableMinima, folder: Path) -> list[str]:
    """isoflop.* (loss over N, a parabola a budget) and optimal-size.* (N* over FLOPs) of each group."""
    written: list[str] = []
    for group, minima in fit.minima.items():
        tail = f"-{_slug(group)}" if group else ""
        written += _parabolas(minima, *fit.points[group], folder, f"isoflop{tail}")
        if minima.a is not None:
            written += _optimal_sizes(minima, folder, f"optimal-size{tail}")
    return written


def _parabolas(
    minima: Optimal, n: np.ndarray, loss: np.ndarray, flops: np.ndarray, folder: Path, name: str
) -> list[str]:
    figure = new_figure(WIDTH, 2.7)
    axes = plain(figure.add_subplot())
    budgets = np.array(minima.budgets)
    hues = _shades(len(minima.minima))
    rows: list[tuple[object, ...]] = []
    labels = []
    for i, row in enumerate(minima.minima):
        here = budgets == i
        axes.plot(n[here], loss[here], "o", color=hues[i], markersize=3.2)
        rows += [("point", float(c), float(a), float(b)) for c, a, b in zip(flops[here], n[here], loss[here],
                                                                            strict=True)]  # fmt: skip
        end = float(loss[here][n[here].argmax()])
        if row.n is not None and row.loss is not None and row.bend is not None:
            grid = np.geomspace(n[here].min(), n[here].max(), 60)
            curve = row.loss + row.bend * np.log(grid / row.n) ** 2
            axes.plot(grid, curve, color=hues[i], linewidth=1.3)
            end = float(curve[-1])
            if row.inside:
                axes.plot(row.n, row.loss, "D", color=hues[i], markersize=5.5, mec="white", zorder=4)
            rows += [("parabola", row.flops, float(a), float(b)) for a, b in zip(grid, curve, strict=True)]
            rows.append(("minimum" if row.inside else "minimum outside", row.flops, row.n, row.loss))
        labels.append((_power(row.flops), end, Stroke(hues[i], "-")))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.set_ylabel("Loss", color=INK, fontsize=TEXT)
    tokens_axis(axes, float(n.min()), float(n.max()), "Parameters N")
    end_labels(axes, labels, gap=0.07)
    data = pl.DataFrame(rows, schema=["kind", "flops", "n", "loss"], orient="row")
    caption = (
        "Loss over parameters at each budget of training FLOPs: what was trained (dots), a parabola in log N, and its "
        "minimum (diamond) where it lies between the sizes trained. No bands: a budget has few sizes."
    )
    return write(figure, folder, name, data, caption)


def _optimal_sizes(minima: Optimal, folder: Path, name: str) -> list[str]:
    used = [(row.flops, row.n) for row in minima.minima if row.n is not None and row.inside]
    c, n = (np.array(column) for column in zip(*used, strict=True))
    a = minima.a or 0.0
    at = np.exp(np.log(n).mean() + a * (np.log(c) - np.log(c).mean()))
    figure = new_figure(WIDTH, 2.4)
    axes = plain(figure.add_subplot())
    axes.plot(c, at, color=COLOURS[0], linewidth=1.6)
    axes.plot(c, n, "D", color=COLOURS[0], markersize=5.5, mec="white", zorder=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: tokens_text(y)))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("Training FLOPs C", color=INK, fontsize=TEXT)
    axes.set_ylabel("Compute-optimal N", color=INK, fontsize=TEXT)
    ci = minima.a_ci
    within = f" (95% {ci[0]:.3f}–{ci[1]:.3f})" if ci else " (two minima: no interval)"
    axes.set_title(f"N* ~ C^{a:.3f}{within}", fontsize=SMALL, color=INK, loc="left")
    caption = (
        f"Compute-optimal size of each budget (diamonds) and the power law through them, N* ~ C^{a:.3f}{within}, by "
        f"least squares of the logarithms with Student's interval; D* = C / (6 N*) ~ C^{1 - a:.3f}."
    )
    data = pl.DataFrame({"flops": c, "n": n, "law": at})
    return write(figure, folder, name, data, caption)


def _name(arm: str, size: str) -> str:
    return " ".join(filter(None, (arm, f"N {tokens_text(float(size))}" if size else ""))) or "all"


def _power(flops: float) -> str:
    """5.6e18 as print has it."""
    power = int(np.floor(np.log10(flops * 1.005)))
    return rf"${flops / 10.0**power:.1f}\cdot10^{{{power}}}$ FLOPs"


def _shades(count: int) -> list[str]:
    """Colours in an order, from dark to light, none too light on white."""
    return [colors.to_hex(colormaps["viridis"](x)) for x in np.linspace(0.0, 0.85, max(count, 2))[:count]]


def _in_order(names: Sequence[str]) -> dict[str, Stroke]:
    return {name: Stroke(shade, "-") for name, shade in zip(names, _shades(len(names)), strict=True)}


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)[:60]
