"""The report of a study: one self-contained page that says what was found, and how surely."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import polars as pl
from plotly.offline import get_plotlyjs

from analysis.arm_emergence import Condition
from analysis.axes import losses
from analysis.claims import Claim
from analysis.comparisons import SameCeiling
from analysis.drawing import Drawn, strokes, tokens_text
from analysis.figures import draw_all
from analysis.findings import StudyFit, fit_results
from analysis.laws.intervals import Interval
from analysis.print_tables import number
from analysis.results import Results, collect
from analysis.selection import conditions, finished
from analysis.tables import ceiling_table, emergence_table, ratio_table, scaling_table, size_table
from analysis.wording import ALPHA, capability_text, head_sentences, p_text, points_text, ratio_text, sentences
from orchestrator.finding import RATIOS, words
from orchestrator.tuning import results as tuning_results

NONE = "–"


def write(root: Path | str, name: str) -> Path:
    """Writes report/report.html, its figures and its tables as CSV; returns the page's path. Raises InputError."""
    results = collect(root, name)
    fit = fit_results(results)
    folder = results.folder / "report"
    figures = draw_all(results, fit, folder / "figures")
    tables = _write_tables(results, fit, folder)
    page = folder / "report.html"
    page.write_text(render(results, fit, figures, tables), encoding="utf-8")
    return page


def render(results: Results, fit: StudyFit, figures: Sequence[Drawn], tables: Sequence[str]) -> str:
    """The page as HTML; figures are embedded."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "tokens": lambda value: tokens_text(value) if value else NONE,
        "token_range": lambda ci: _range(ci, tokens_text),
        "percent": lambda value: NONE if value is None else _percent(value),
        "percent_range": lambda ci: _range(ci, _percent),
        "times": lambda value: f"{value:.2f}×" if value else NONE,
        "times_range": lambda ci: _range(ci, "{:.2f}".format),
        "open_range": _open_range,
        "points": lambda value: NONE if value is None else points_text(value),
        "points_range": lambda ci: _range(ci, points_text, " to "),
        "ratio": ratio_text,
        "p": lambda p: NONE if p is None else p_text(p).removeprefix("p = "),
        "verdict": _verdict,
        "figure": _figure,
        "statistic": words,
        "flops": lambda value: f"{value:.3g}" if value else NONE,
        "flops_range": lambda ci: _range(ci, "{:.2g}".format),
        "loss": lambda value: NONE if value is None else f"{value:.3f}",
        "loss_range": lambda ci: _range(ci, lambda end: f"{end:.3f}".replace("-", "−"), " to "),
        "signed": lambda value: NONE if value is None else f"{value:+.3f}".replace("-", "−"),
        "number": lambda value: NONE if value is None else _minus(value),
        "number_range": lambda ci: _range(ci, _minus, "–" if not ci or ci[0] >= 0 else " to "),
        "embedded": lambda path: base64.b64encode(path.read_bytes()).decode("ascii"),
    }
    return environment.get_template("report.html.j2").render(
        study=results.study,
        question=fit.question,
        capability=capability_text(fit.question.capability) if fit.question else None,
        level=_percent(fit.question.level) if fit.question else None,
        total=results.runs.height,
        counts_text=", ".join(f"{count} {state}" for state, count in fit.counts.items()),
        colours={arm: stroke.colour for arm, stroke in strokes(fit.arms).items()},
        parts=[_part(results, fit, condition, figures) for condition in conditions(results)],
        whole=[figure for figure in figures if figure.condition is None],
        claims=fit.claims,
        several={name for name in ("data", "size") if results.runs[name].n_unique() > 1},
        scaling=[law.document for law in fit.scaling],
        by_size=fit.t50_by_size,
        sizes=results.runs["size"].n_unique(),
        loss_name=loss[0] if (loss := losses(results)) else None,
        plotly=get_plotlyjs() if any(figure.hover for figure in figures) else None,
        hover={figure.name: figure.hover for figure in figures if figure.hover},
        left_out=fit.left_out,
        notes=[*results.study.get("notes", []), *_rates(results)],
        tables=tables,
    )


def _rates(results: Results) -> list[str]:
    """A line for each learning rate that was tuned, and for what is to be warned of."""
    found = tuning_results.of_cells(results.folder, results.study["cells"]).values()
    return [line for each in found for line in (tuning_results.sentence(each), *each["warnings"])]


def _part(results: Results, fit: StudyFit, condition: Condition, figures: Sequence[Drawn]) -> dict[str, Any]:
    """What the page says of one condition."""
    ratios = [row for row in fit.speed_ratios if row.condition == condition]
    ceilings = [row for row in fit.same_ceiling if row.condition == condition]
    heads = results.heads.join(finished(results, condition), on="id")
    return {
        "title": f"{condition.data}, size {condition.size}",
        "sentences": sentences(fit, condition) + head_sentences(heads, results.arms),
        "emergence": [row for row in fit.emergence if row.condition == condition],
        "by_arm": {row.arm: row for row in ratios},
        "ratios": list(zip(ratios, ceilings, strict=True)),
        "figures": [figure for figure in figures if figure.condition == condition],
    }


def _write_tables(results: Results, fit: StudyFit, folder: Path) -> list[str]:
    tables: dict[str, pl.DataFrame] = {
        "runs.csv": results.runs,
        "emergence.csv": emergence_table(fit.emergence),
        "speed_ratios.csv": ratio_table(fit.speed_ratios),
        "same_ceiling.csv": ceiling_table(fit.same_ceiling),
        "t50_by_size.csv": size_table(fit.t50_by_size),
        "scaling.csv": scaling_table(fit.scaling),
    }
    folder.mkdir(exist_ok=True)
    written = [name for name, table in tables.items() if table.height]
    for name in written:
        tables[name].write_csv(folder / name)
    return written


def _percent(value: float) -> str:
    return f"{100 * value:.1f}".removesuffix(".0") + "%"


def _verdict(ceiling: SameCeiling) -> str:
    if ceiling.equivalent:
        return "same"
    if ceiling.p_holm is not None and ceiling.p_holm < ALPHA:
        return "differ"
    return "not shown"


def _figure(row: Claim) -> str:
    """What was measured of a claim, with its interval and seeds."""
    text = _times if isinstance(row.finding.statistic, RATIOS) else _minus
    said = "no value yet" if row.value is None else text(row.value)
    if row.ci is None:
        said += ", no interval"
    else:
        low, high = (None if np.isinf(end) or (text is _times and end == 0) else text(end) for end in row.ci)
        both = f"{low} to {high}" if low and high else f"above {low}" if low else f"below {high}"
        said = f"95% interval {both}" if row.value is None else f"{said}, 95% interval {both}"
    return f"{said}; n = {' and '.join(map(str, row.n))}"


def _times(value: float) -> str:
    return f"{value:.3f}×" if value < 10 else f"{value:.3g}×"  # a loss ratio needs its third decimal


def _minus(value: float) -> str:
    return number(value).replace("-", "−")


def _open_range(ci: Interval | None) -> str:
    if ci is None:
        return ""
    low, high = ci
    return f"over {low:.2f}" if np.isinf(high) else f"under {high:.2f}" if low == 0 else f"{low:.2f}–{high:.2f}"


def _range(ci: Interval | None, text: Any, between: str = "–") -> str:
    return "" if ci is None else f"{text(ci[0])}{between}{text(ci[1])}"
