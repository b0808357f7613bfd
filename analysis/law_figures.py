"""A scaling law as a paper prints it: curves over points, residuals, the exponents' intervals; and its tables.

Each figure is PNG, SVG and PDF, with the numbers it shows as CSV and its caption as text beside it. What a band is,
the caption says.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing import (
    COLOURS,
    INK,
    NOTE,
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
from analysis.drawing import write as write_figure
from analysis.hover import law_hover
from analysis.law_document import Fitted
from analysis.laws.scaling import Points
from analysis.print_tables import write_tables
from analysis.table_laws import TableFit

MOST_CURVES = 7  # an eighth line cannot be told from the others


def write(fit: TableFit, folder: Path) -> list[str]:
    """Draws and tabulates every group's law into `folder`; returns the files' names."""
    folder.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    for group, law in fit.laws.items():
        tail = f"-{_slug(group)}" if group else ""
        names += _law_figure(law, fit.held_out[group], folder, f"law{tail}")
        names += _residual_figure(law, fit.held_out[group], folder, f"residuals{tail}")
    if len(fit.laws) > 1:
        names += _exponents_figure(fit, folder)
    return names + write_tables(fit, folder)


def draw_law(fit: Fitted, folder: Path) -> Drawn:
    """The law of a study's arm."""
    figure, caption, data = _picture(fit, None)
    arm, where = fit.document["arm"], fit.document["data"]
    title = f"Loss of {arm} on {where}"
    return save(figure, folder, f"law-{_slug(arm)}-{_slug(where)}", None, title, caption, data, law_hover(fit))


def _law_figure(fit: Fitted, held_out: Points | None, folder: Path, name: str) -> list[str]:
    figure, caption, data = _picture(fit, held_out)
    return write_figure(figure, folder, name, data, caption)


def _picture(fit: Fitted, held_out: Points | None) -> tuple[Figure, str, pl.DataFrame]:
    law, points = fit.law, fit.points
    by, along = ("n", "d") if law.form.data else ("", "n")
    figure = new_figure(WIDTH, 2.7)
    axes = plain(figure.add_subplot())
    everything = [points] + ([held_out] if held_out is not None else [])
    low = min(_variable(part, along).min() for part in everything)
    high = max(_variable(part, along).max() for part in everything)
    grid = np.geomspace(low, high, 80)
    levels = _levels(everything) if by and law.form.size else [None]
    labels: list[tuple[str, float, Stroke]] = []
    rows: list[tuple[object, ...]] = []
    for i, level in enumerate(levels):
        colour = COLOURS[i % len(COLOURS)]
        n, d = (np.full(80, level), grid) if level is not None else (grid, grid)
        middle = law.predict(n, d)
        if fit.replicates is not None and len(fit.replicates.theta):
            band = np.array([fit.replicates.interval(fit.replicates.predict(a, b)) or (np.nan, np.nan)
                             for a, b in zip(n, d, strict=True)])  # fmt: skip
            axes.fill_between(grid, band[:, 0], band[:, 1], color=colour, alpha=0.15, linewidth=0)
        else:
            band = np.full((80, 2), np.nan)
        axes.plot(grid, middle, color=colour, linewidth=1.8)
        rows += [("curve", level, float(x), float(y), float(a), float(b))
                 for x, y, (a, b) in zip(grid, middle, band, strict=True)]  # fmt: skip
        for part, filled in zip(everything, (True, False), strict=False):
            here = np.ones(len(part), dtype=bool) if level is None else np.isclose(_variable(part, "n"), level)
            x, y = _variable(part, along)[here], part.loss[here]
            axes.plot(x, y, "o", markersize=3.5, mfc=colour if filled else "white", mec=colour, mew=1.2, zorder=3)
            rows += [("fitted point" if filled else "held-out point", level, float(a), float(b), None, None)
                     for a, b in zip(x, y, strict=True)]  # fmt: skip
        if level is not None:
            labels.append((f"N = {tokens_text(level)}", float(middle[-1]), Stroke(colour, "-")))
    _loss_axis(axes)
    tokens_axis(axes, low, high, "Training tokens D" if along == "d" else "Parameters N")
    end_labels(axes, labels, gap=0.075)
    data = pl.DataFrame(rows, schema=["kind", "n", along, "loss", "low", "high"], orient="row", strict=False)
    more = "; open circles: held out, not fitted" if held_out is not None else ""
    left = ""
    total = len(np.unique(np.concatenate([_variable(part, "n") for part in everything]))) if law.form.size else 1
    if len(levels) < total and levels != [None]:
        left = f" {len(levels)} of {total} sizes are drawn."
    caption = (
        f"Loss over {'training tokens by size' if along == 'd' else 'parameters'}, with the law "
        f"{formula(fit)}. Dots: the {len(points)} points fitted{more}. Band: 95% bootstrap interval "
        f"({_kind(fit)}) of the law itself, not of a new point; its width says nothing of other data.{left}"
    )
    return figure, caption, data


def _residual_figure(fit: Fitted, held_out: Points | None, folder: Path, name: str) -> list[str]:
    law = fit.law
    figure = new_figure(WIDTH, 2.1)
    axes = plain(figure.add_subplot())
    along = "d" if law.form.data else "n"
    rows = []
    for part, filled in ((fit.points, True), (held_out, False)):
        if part is None:
            continue
        x = _variable(part, along)
        away = 100 * (part.loss / law.predict(part.n, part.d) - 1)
        colour = COLOURS[0]
        axes.plot(x, away, "o", markersize=3.5, mfc=colour if filled else "white", mec=colour, mew=1.2)
        rows += [(filled, float(a), float(b)) for a, b in zip(x, away, strict=True)]
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.set_ylabel("Loss above the law (%)", color=INK, fontsize=TEXT)
    xs = [row[1] for row in rows]
    tokens_axis(axes, min(xs), max(xs), "Training tokens D" if along == "d" else "Parameters N")
    caption = "Loss of each point above the law, in percent of the law" + (
        "; open circles: held out." if held_out is not None else "."
    )
    return write_figure(
        figure, folder, name, pl.DataFrame(rows, schema=["fitted", along, "percent"], orient="row"), caption
    )


def _exponents_figure(fit: TableFit, folder: Path) -> list[str]:
    powers = next(iter(fit.laws.values())).law.form.powers
    groups = list(fit.laws)
    figure = new_figure(WIDTH, 1.1 + 0.36 * len(groups))
    rows = []
    for axes, power in zip(figure.subplots(1, len(powers), sharey=True, squeeze=False).ravel(), powers, strict=True):
        for place, group in enumerate(groups):
            document = fit.laws[group].document
            value, ci = document[power], document["ci"].get(power)
            rows.append((group, power, value, *(ci or (None, None))))
            if ci:
                axes.plot(ci, [place, place], color=COLOURS[0], linewidth=2, alpha=0.6, solid_capstyle="butt")
            if value is not None:
                axes.plot(value, place, "o", color=COLOURS[0], markersize=6, markeredgecolor="white")
        plain(axes).set_ylim(len(groups) - 0.5, -0.5)
        axes.set_yticks(range(len(groups)), groups)
        axes.set_xlabel({"alpha": "α, of parameters", "beta": "β, of tokens"}[power], color=INK, fontsize=TEXT)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
        if (joint := fit.document.get("joint")) is not None:
            axes.axvline(joint["exponents"][power], color=NOTE, linewidth=1.0, linestyle=":")
    figure.subplots_adjust(wspace=0.12)
    first = next(iter(fit.laws.values()))
    caption = (
        f"Exponents of each group's own law with their 95% bootstrap intervals ({_kind(first)}). Dotted: the exponents "
        f"all groups share in the joint law."
    )
    data = pl.DataFrame(rows, schema=["group", "exponent", "value", "low", "high"], orient="row", strict=False)
    return write_figure(figure, folder, "exponents", data, caption)


def formula(fit: Fitted) -> str:
    """L = 1.7 + 440/N^0.35 + 690/D^0.31; words where A and B are not identified."""
    found = fit.document
    if any(found[name] is None for name in fit.law.form.powers):
        return f"{fit.law.form.name} (A and B not identified)"
    parts = [f"{found['E']:.4g}"] if fit.law.form.constant else []
    for power, term, variable in (("alpha", "A", "N"), ("beta", "B", "D")):
        if found[power] is not None:
            parts.append(f"{found[term]:.4g}/{variable}^{found[power]:.3g}")
    return "L = " + " + ".join(parts)


def _levels(parts: Sequence[Points]) -> list[float]:
    """The sizes drawn: all, or MOST_CURVES of them spread evenly, the ends among them."""
    sizes = np.unique(np.concatenate([_variable(part, "n") for part in parts]))
    if len(sizes) > MOST_CURVES:
        sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, MOST_CURVES).round().astype(int))]
    return [float(size) for size in sizes]


def _variable(points: Points, which: str) -> np.ndarray:
    return points.variable("alpha" if which == "n" else "beta")


def _kind(fit: Fitted) -> str:
    return "none drawn" if fit.replicates is None else f"{fit.replicates.kind}, {len(fit.replicates.theta)} refits"


def _loss_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:.3g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    low, high = axes.get_ylim()
    if high / low < 4:  # too short for the ticks of a decade
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.set_ylabel("Loss (log axis)", color=INK, fontsize=TEXT)


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)[:60]
