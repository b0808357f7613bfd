"""The figures of a study: emergence by arm and by seed, speed ratios, retrieval heads, losses.

An arm has the same name and colour in all of them. Beside every picture lie the numbers it shows.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

import numpy as np
import polars as pl
from matplotlib import ticker
from matplotlib.axes import Axes

from analysis.arm_emergence import Condition
from analysis.comparisons import CENSORED, SpeedRatio
from analysis.drawing import (
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
    strokes,
    tokens_axis,
)
from analysis.emergence_figures import draw_emergence, draw_seeds
from analysis.findings import StudyFit
from analysis.head_figures import draw_retrieval_heads
from analysis.hover import loss_hover
from analysis.law_figures import draw_law
from analysis.results import Results
from analysis.selection import conditions, seed_lines, span, values_of
from analysis.size_figures import draw_sizes
from analysis.tables import ratio_table
from analysis.wording import first_upper, ratio_note, ratio_text

WIDEST_RATIO = 8.0  # an interval beyond, or below its inverse, is cut, with an arrow


def draw_all(results: Results, fit: StudyFit, folder: Path) -> list[Drawn]:
    """Draws what the tables hold into `folder`, and returns it in the order of reading. Nothing to show, no figure."""
    style = strokes(fit.arms)
    drawn: list[Drawn | None] = []
    for condition in conditions(results):
        rows = [row for row in fit.emergence if row.condition == condition]
        if fit.question and any(row.seeds for row in rows):
            values = values_of(results, condition).filter(pl.col("metric") == fit.question.capability)
            drawn.append(draw_emergence(rows, values, fit.question, condition, style, folder))
            drawn.append(draw_seeds(rows, values, fit.question, condition, style, folder))
        ratios = [row for row in fit.speed_ratios if row.condition == condition]
        drawn.append(_speed_ratios(ratios, condition, style, folder))
        drawn.append(draw_retrieval_heads(results, rows, condition, folder))
        drawn.append(_losses(results, condition, style, folder))
    for row in fit.t50_by_size:
        if row.law:
            drawn.append(draw_sizes(fit.t50_by_size, style, folder))
            break
    drawn += [draw_law(law, folder) for law in fit.scaling]
    return [figure for figure in drawn if figure]


def _speed_ratios(
    ratios: Sequence[SpeedRatio], condition: Condition, style: dict[str, Stroke], folder: Path
) -> Drawn | None:
    if not any(row.ratio or row.emerged_only or row.at_least or row.at_most or row.ci for row in ratios):
        return None
    most = _widest(ratios)
    figure = new_figure(2.6, 0.6 + 0.36 * len(ratios))
    axes = plain(figure.add_subplot())
    axes.axvline(1.0, color=INK, linewidth=1.0)
    for place, row in enumerate(ratios):
        colour = style[row.arm].colour
        value, ci = (row.ratio, row.ci) if row.method else (row.emerged_only, row.emerged_only_ci)
        bound = row.at_least or row.at_most
        if ci:
            axes.plot(np.clip(ci, 1 / most, most), [place] * 2, color=colour, linewidth=2, solid_capstyle="butt")
            for edge, beyond, arrow in ((1 / most, ci[0] < 1 / most, "<"), (most, ci[1] > most, ">")):
                if beyond:
                    axes.plot(edge, place, arrow, color=colour, markersize=6, clip_on=False, zorder=5)
        if value and 1 / most <= value <= most:
            fill = colour if row.method else "white"
            axes.plot(value, place, "o", markersize=6, mfc=fill, mec=colour, mew=1.4, zorder=4)
        elif bound:
            at = float(np.clip(bound, 1 / most, most))
            axes.plot(at, place, ">" if row.at_least else "<", markersize=6, mfc="white", mec=colour, mew=1.4, zorder=4)
        if row.method == CENSORED and row.emerged_only and 1 / most <= row.emerged_only <= most:
            axes.plot(row.emerged_only, place, "o", markersize=3.5, mfc="white", mec=colour, mew=1.0, zorder=5)
        _beside(axes, place, ratio_text(row), "\n".join(wrap(_short(row), 34)))
    axes.set_xscale("log")
    axes.set_xlim(1 / most, most)
    ticks = {1 / 8: "⅛×", 1 / 4: "¼×", 1 / 2: "½×", 1: "1×", 2: "2×", 4: "4×", 8: "8×"}
    shown = [tick for tick in ticks if 1 / most <= tick <= most]
    axes.set_xticks(shown, [ticks[tick] for tick in shown])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_yticks(range(len(ratios)), [row.arm for row in ratios])
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    axes.set_xlabel(f"T50 over the T50 of {ratios[0].reference} (left of 1: faster)", color=INK, fontsize=SMALL)
    return save(
        figure,
        folder,
        "speed-ratios",
        condition,
        f"Speed against {ratios[0].reference}",
        "Speed ratio of each arm with its 95% interval (unadjusted). A seed that never emerged is counted as "
        "censored at its last tokens, as the row says; small and hollow beside it: over the seeds with a T50 alone. "
        "Triangle: no seed of one arm emerged, so these seeds bound the ratio, and the interval has one end.",
        ratio_table(ratios),
    )


def _widest(ratios: Sequence[SpeedRatio]) -> float:
    """The power of two that holds every estimate and interval on either side of 1, from 2 to `WIDEST_RATIO`."""
    reach = 2.0
    for row in ratios:
        ends = (*(row.ci or ()), *(row.emerged_only_ci or ()))
        for value in (row.ratio, row.emerged_only, row.at_least, row.at_most, *ends):
            while value and np.isfinite(value) and reach < WIDEST_RATIO and max(value, 1 / value) > reach:
                reach *= 2
    return reach


def _short(row: SpeedRatio) -> str:
    """What is censored, or why there is no interval; "reference" for its name."""
    first = ratio_note(row).split("\n")[0].removeprefix(f"{row.arm}: ")
    return first.replace(f"{row.reference}: ", "reference: ").replace(", counted as censored", "")


def _beside(axes: Axes, place: float, text: str, note: str) -> None:
    """`text` right of a row of the axes, a fainter note beneath it."""
    lines = 1 + len(note.splitlines())
    for words, up, points, colour in ((text, 3.8 * (lines - 1), SMALL, INK), (note, -5.0, SMALL - 1.5, NOTE)):
        axes.annotate(
            words,
            (1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(8, up),
            textcoords="offset points",
            va="center",
            fontsize=points,
            color=colour,
            annotation_clip=False,
        )


def _losses(results: Results, condition: Condition, style: dict[str, Stroke], folder: Path) -> Drawn | None:
    values = values_of(results, condition).filter(pl.col("metric").str.ends_with("/loss"))
    kinds = {"train/loss": "Training loss (nats a token)", "validation/loss": "Held-out loss (nats a token)"}
    shown = [metric for metric in kinds if metric in set(values["metric"])]
    if not shown:
        return None
    values = values.filter(pl.col("metric").is_in(shown))
    figure = new_figure(WIDTH, 2.3 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False).ravel()
    for axes, metric in zip(panels, shown, strict=True):
        mine = values.filter(pl.col("metric") == metric)
        arms = [arm for arm in results.arms if arm in set(mine["arm"])]
        labels = []
        for arm in arms:
            for line in seed_lines(mine, arm):
                axes.plot(line["tokens"], line["value"], color=style[arm].colour, linewidth=0.4, alpha=0.3)
            mean = mine.filter(pl.col("arm") == arm).group_by("tokens").agg(pl.col("value").mean()).sort("tokens")
            stroke = style[arm]
            (drawn,) = axes.plot(
                mean["tokens"], mean["value"], color=stroke.colour, linestyle=stroke.dash, linewidth=1.3
            )
            drawn.set_marker("o" if mean.height == 1 else "")
            labels.append((arm, float(mean["value"][-1]), style[arm]))
        plain(axes)
        axes.set_ylabel(kinds[metric], color=INK, fontsize=SMALL)
        tokens_axis(axes, *span(values), label="Training tokens" if metric == shown[-1] else "")
        end_labels(axes, labels, gap=0.085)
    figure.subplots_adjust(hspace=0.1)
    names = [kinds[metric].split(" (")[0].lower() for metric in shown]
    return save(
        figure,
        folder,
        "losses",
        condition,
        "Losses",
        f"{first_upper(' and '.join(names))} over training tokens: the mean of each arm's seeds (thick) and each seed "
        "(thin).",
        values.select("arm", "seed", "metric", "tokens", "value").sort("metric", "arm", "seed", "tokens"),
        loss_hover(values, shown[-1], results.arms, style, kinds[shown[-1]]),
    )
