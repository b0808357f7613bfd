"""Figures whose values can be hovered, as plain data for Plotly: {"data": traces, "layout": …}.

They show what the printed figures show, in the same colours; a click in the legend hides an arm.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from analysis.arm_emergence import Emergence, Question, mean_curve
from analysis.drawing import COLOURS, DASHES, INK, Hover, Stroke, tokens_text
from analysis.law_document import Fitted
from analysis.selection import seed_lines, span
from analysis.size_emergence import SizeRow
from analysis.wording import capability_text, first_upper

APART = 1.07  # times: predictions at one N are drawn beside one another
GRID = "#E6E6E6"
DASH_NAMES = dict(zip(map(str, DASHES), ("solid", "dash", "dot"), strict=True))


def emergence_hover(
    rows: Sequence[Emergence], values: pl.DataFrame, question: Question, style: dict[str, Stroke]
) -> Hover:
    """Every seed, the fitted mean of each arm, and T50 with its interval. values: arm, seed, tokens, value."""
    traces: list[dict[str, Any]] = []
    low, high = span(values)
    grid = np.geomspace(low, high, 120)
    for row in (row for row in rows if row.seeds):
        stroke = style[row.arm]
        for line in seed_lines(values, row.arm):
            seed = line["seed"][0]
            texts = [f"<b>{row.arm}</b>, seed {seed}<br>{tokens_text(t)} tokens: {v:.1%}" for t, v in
                     line.select("tokens", "value").iter_rows()]  # fmt: skip
            traces.append(_line(row.arm, line["tokens"], line["value"], stroke, texts, width=1, opacity=0.45))
        curve = mean_curve(row, grid)
        if curve is not None and row.t50_tokens is not None and row.ceiling is not None:
            texts = [f"<b>{row.arm}</b>, fitted mean<br>{tokens_text(t)} tokens: {v:.1%}" for t, v in
                     zip(grid, curve, strict=True)]  # fmt: skip
            traces.append(_line(row.arm, grid, curve, stroke, texts, width=3, legend=True))
            traces.append(_t50(row, stroke))
        else:
            traces.append(_line(row.arm, [low], [row.floor], stroke, [""], width=3, legend=True))
    percent = {"title": {"text": first_upper(capability_text(question.capability))}, "tickformat": ".0%"}
    return {"data": traces, "layout": _layout(low, high, "Training tokens", percent)}


def _t50(row: Emergence, stroke: Stroke) -> dict[str, Any]:
    assert row.t50_tokens is not None and row.ceiling is not None
    ends = f"<br>95% {tokens_text(row.t50_ci[0])}–{tokens_text(row.t50_ci[1])}" if row.t50_ci else ""
    flops = f"<br>{row.t50_flops:.3g} training FLOPs" if row.t50_flops else ""
    loss = f"<br>at a loss of {row.t50_loss:.3f}" if row.t50_loss is not None else ""
    text = f"<b>{row.arm}</b><br>T50 {tokens_text(row.t50_tokens)} tokens{ends}{flops}{loss}"
    trace = _line(row.arm, [row.t50_tokens], [(row.floor + row.ceiling) / 2], stroke, [text])
    return trace | {"mode": "markers", "marker": {"size": 11, "color": stroke.colour, "line": _edge()}}


def loss_hover(values: pl.DataFrame, metric: str, arms: Sequence[str], style: dict[str, Stroke], label: str) -> Hover:
    """Loss of every seed over tokens. values: arm, seed, metric, tokens, value."""
    mine = values.filter(pl.col("metric") == metric)
    traces = []
    for arm in arms:
        for i, line in enumerate(seed_lines(mine, arm)):
            seed = line["seed"][0]
            texts = [f"<b>{arm}</b>, seed {seed}<br>{tokens_text(t)} tokens: {v:.4f}" for t, v in
                     line.select("tokens", "value").iter_rows()]  # fmt: skip
            traces.append(_line(arm, line["tokens"], line["value"], style[arm], texts, width=1.4, legend=i == 0))
    return {"data": traces, "layout": _layout(*span(mine), "Training tokens", {"title": {"text": label}})}


def law_hover(fit: Fitted) -> Hover:
    """Points and law of one arm over tokens, a line a size; over size where tokens do not vary."""
    law, points = fit.law, fit.points
    over_d = law.form.data
    x = points.variable("beta" if over_d else "alpha")
    sizes = np.unique(points.variable("alpha")) if over_d and law.form.size else [None]
    low, high = float(x.min()), float(x.max())
    grid = np.geomspace(low, high, 80)
    traces = []
    for i, size in enumerate(sizes):
        stroke = Stroke(COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)])
        group = "law" if size is None else f"N = {tokens_text(size)}"
        n, d = (np.full(80, size), grid) if size is not None else (grid, grid)
        curve = law.predict(n if law.form.size else None, d if law.form.data else None)
        texts = [f"<b>{group}</b>, law<br>{tokens_text(t)}: {v:.4f}" for t, v in zip(grid, curve, strict=True)]
        traces.append(_line(group, grid, curve, stroke, texts, width=2.4, legend=True))
        here = np.ones(len(points), dtype=bool) if size is None else points.variable("alpha") == size
        expected = law.predict(points.n, points.d)
        texts = [_point_text(fit, j, group, float(x[j]), float(expected[j])) for j in map(int, np.flatnonzero(here))]
        trace = _line(group, x[here], points.loss[here], stroke, texts)
        traces.append(trace | {"mode": "markers", "marker": {"size": 8, "color": stroke.colour, "line": _edge()}})
    loss = {"title": {"text": "Loss"}, "type": "log", "nticks": 6, "tickformat": ".3~g"}
    return {"data": traces, "layout": _layout(low, high, "Training tokens D" if over_d else "Parameters N", loss)}


def _point_text(fit: Fitted, j: int, group: str, x: float, expected: float) -> str:
    name, loss = fit.names[j] if fit.names else group, float(fit.points.loss[j])
    away = f"{100 * (loss / expected - 1):+.2f}%"
    return f"<b>{name}</b><br>{tokens_text(x)}: loss {loss:.4f}<br>law {expected:.4f}, {away}"


def size_hover(rows: Sequence[SizeRow], style: dict[str, Stroke]) -> Hover:
    """T50 of every seed over N, the law of each arm with its prediction."""
    traces = []
    rows = [row for row in rows if row.points]
    everything = [n for row in rows for n in (*(n for n, _ in row.points), row.ahead) if n]
    for place, row in enumerate(rows):
        stroke, name = style[row.arm], row.arm or "all"
        n, t50 = map(list, zip(*row.points, strict=True))
        texts = [f"<b>{name}</b>, N {tokens_text(a)}<br>T50 {tokens_text(b)} tokens" for a, b in row.points]
        trace = _line(name, n, t50, stroke, texts, legend=True)
        traces.append(trace | {"mode": "markers", "marker": {"size": 8, "color": stroke.colour, "line": _edge()}})
        if row.law is None or row.ahead is None or row.t50_tokens is None:
            continue
        grid = np.geomspace(min(n), row.ahead, 60)
        curve = [row.law.predict(each)[0] for each in grid]
        traces.append(_line(name, grid, curve, stroke, [f"<b>{name}</b>, law<br>N {tokens_text(a)}: {tokens_text(b)}"
                                                        for a, b in zip(grid, curve, strict=True)]))  # fmt: skip
        if row.ci:
            text = f"<b>{name}</b>, predicted at N {tokens_text(row.ahead)}<br>{tokens_text(row.t50_tokens)} tokens"
            text += f"<br>95% {tokens_text(row.ci[0])}–{tokens_text(row.ci[1])}"
            point = _line(name, [row.ahead * APART**place], [row.t50_tokens], stroke, [text])
            up, down = row.ci[1] - row.t50_tokens, row.t50_tokens - row.ci[0]
            bar = {"type": "data", "symmetric": False, "array": [up], "arrayminus": [down], "color": stroke.colour}
            traces.append(point | {"mode": "markers", "error_y": bar, "marker": {"symbol": "circle-open", "size": 10}})
    tokens = [t for row in rows for _, t in row.points] + [end for row in rows if row.ci for end in row.ci]
    vertical = {"title": {"text": "T50, tokens"}, "type": "log"} | _ticks(min(tokens), max(tokens))
    return {
        "data": traces,
        "layout": _layout(min(everything), max(everything) * APART ** len(rows), "Parameters N", vertical),
    }


def _line(
    name: str, x: Any, y: Any, stroke: Stroke, texts: Sequence[str], width: float = 1.5, opacity: float = 1.0,
    legend: bool = False,
) -> dict[str, Any]:  # fmt: skip
    return {
        "type": "scatter", "mode": "lines", "name": name, "legendgroup": name, "showlegend": legend,
        "x": [float(value) for value in x], "y": [float(value) for value in y], "opacity": opacity,
        "line": {"color": stroke.colour, "dash": DASH_NAMES[str(stroke.dash)], "width": width},
        "text": list(texts), "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _layout(low: float, high: float, label: str, vertical: dict[str, Any]) -> dict[str, Any]:
    axis = {"gridcolor": GRID, "linecolor": "#8A8A8A", "ticks": "outside", "tickcolor": "#8A8A8A", "zeroline": False}
    wide = [float(np.log10(low)) - 0.03, float(np.log10(high)) + 0.03]
    return {
        "height": 420, "margin": {"l": 64, "r": 12, "t": 36, "b": 52}, "hovermode": "closest", "plot_bgcolor": "white",
        "paper_bgcolor": "white", "font": {"family": "system-ui, Arial, sans-serif", "size": 13, "color": INK},
        "xaxis": axis | {"type": "log", "range": wide, "title": {"text": label}} | _ticks(low, high),
        "yaxis": axis | vertical, "hoverlabel": {"bgcolor": "white", "font": {"color": INK}},
    }  # fmt: skip


def _ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 of each decade; at 1 alone of many decades, at more of less than one."""
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    steps: tuple[float, ...] = (1, 1.5, 2, 3, 4, 6, 8) if high / low < 8 else (1, 2, 5) if last - first < 4 else (1,)
    at = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return {"tickvals": at, "ticktext": [tokens_text(value) for value in at]}


def _edge() -> dict[str, Any]:
    return {"color": "white", "width": 1}
