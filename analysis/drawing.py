"""The hand in which every figure is drawn: colours, axes in tokens, labels that keep apart, files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib import rc_context, ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

from analysis.arm_emergence import Condition

# Okabe and Ito's colours, told apart with any common colour blindness; their yellow is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
WIDTH = 3.5  # inches, of the axes alone: with its labels a figure is read at the width of a paper's column, 3.3
TEXT, SMALL = 9.0, 8.0  # points
PIXELS = 200  # an inch, of a PNG
Hover = dict[str, Any]  # {"data": traces, "layout": …}
INK, NOTE, FAINT = "#222222", "#5F5F5F", "#8A8A8A"
UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e5, 1e6, "M"), (1e3, 1e3, "k"))


@dataclass(frozen=True)
class Stroke:
    """How an arm is drawn, in every figure of its study."""

    colour: str
    dash: Any


@dataclass(frozen=True)
class Drawn:
    """One figure on disk. svg, png, pdf: the picture; csv: the numbers it shows; alt: what is to be seen, in words.

    condition: None for a figure over all of them. hover: the same as a figure of Plotly's, whose values can be hovered.
    """

    name: str
    condition: Condition | None
    title: str
    alt: str
    svg: Path
    png: Path
    csv: Path
    hover: Hover | None = None

    @property
    def pdf(self) -> Path:
        return self.svg.with_suffix(".pdf")


def strokes(arms: Sequence[str]) -> dict[str, Stroke]:
    """A colour an arm, by its place in the study; the dash tells arms of one colour apart when there are many."""
    return {
        arm: Stroke(COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]) for i, arm in enumerate(arms)
    }


def tokens_text(tokens: float) -> str:
    """Engineering notation with three figures: 0.5M, 1.84M, 12.6B."""
    for least, unit, letter in UNITS:
        if tokens >= least:
            return f"{tokens / unit:.3g}{letter}" if tokens / unit < 999.5 else f"{tokens / unit:.0f}{letter}"
    return f"{tokens:.0f}"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, width and height in inches, bound to no window."""
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes) -> Axes:
    """Two spines and a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=SMALL, color=FAINT, which="both")
    axes.grid(True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    return axes


def tokens_axis(
    axes: Axes, low: float, high: float, label: str = "Training tokens", subs: tuple[int, ...] = (1, 2, 5)
) -> None:
    """A log axis from `low` to `high` tokens with labels at `subs` of each decade; a span too short is widened."""
    if high / low < 3:
        low, high = low / 1.7, high * 1.7
    axes.set_xscale("log")
    axes.set_xlim(low / 1.05, high * 1.05)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=subs if high / low < 300 else (1,)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: tokens_text(x)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel(label, color=INK, fontsize=TEXT)


def kept_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to `places` that are at least `gap` apart and within low..high, in the same order.

    More places than fit share the range evenly.
    """
    if not places:
        return []
    gap = min(gap, (high - low) / max(1, len(places) - 1))
    order = np.argsort(places, kind="stable")
    steps = gap * np.arange(len(places))
    # Least squares under y[i+1] - y[i] >= gap is isotonic regression of y[i] - i*gap.
    level = isotonic_regression(np.asarray(places, dtype=float)[order] - steps).x
    apart = np.empty(len(places))
    apart[order] = np.clip(level, low, high - steps[-1]) + steps
    return apart.tolist()


def end_labels(axes: Axes, labels: Sequence[tuple[str, float, Stroke]], gap: float = 0.055) -> None:
    """Names right of the axes, each at the height (data) of its curve's end, kept apart, with a line leading there."""
    place = axes.transData + axes.transAxes.inverted()  # a log axis has its own idea of half-way
    heights = [float(place.transform((axes.get_xlim()[1], y))[1]) for _, y, _ in labels]
    for (name, _, stroke), start, end in zip(labels, heights, kept_apart(heights, gap, 0.02, 0.98), strict=True):
        axes.plot(
            [1.0, 1.025, 1.045], [start, end, end], transform=axes.transAxes, clip_on=False,
            color=stroke.colour, linewidth=1.6, solid_capstyle="butt",
        )  # fmt: skip
        axes.text(1.055, end, name, transform=axes.transAxes, va="center", fontsize=SMALL, color=INK)


def save(
    figure: Figure, folder: Path, what: str, condition: Condition | None, title: str, alt: str, data: pl.DataFrame,
    hover: Hover | None = None,
) -> Drawn:  # fmt: skip
    """Writes folder/what-data-size.{svg,png,pdf,csv}, folder/what.… without a condition."""
    name = f"{what}-{condition.data}-{condition.size}" if condition else what
    write(figure, folder, name, data, alt)
    svg, png, csv = (folder / f"{name}.{kind}" for kind in ("svg", "png", "csv"))
    return Drawn(name, condition, title, alt, svg, png, csv, hover)


def write(figure: Figure, folder: Path, name: str, data: pl.DataFrame, caption: str) -> list[str]:
    """Writes folder/name.{png,svg,pdf,csv,caption.txt}; returns their names. The same data give the same SVG, byte for
    byte."""
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "path", "pdf.fonttype": 42}):
        figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
        figure.savefig(folder / f"{name}.pdf", bbox_inches="tight", metadata={"CreationDate": None})
        figure.savefig(folder / f"{name}.png", bbox_inches="tight", dpi=PIXELS)
    data.write_csv(folder / f"{name}.csv")
    (folder / f"{name}.caption.txt").write_text(caption + "\n", encoding="utf-8")
    return [f"{name}.{kind}" for kind in ("png", "svg", "pdf", "csv", "caption.txt")]
