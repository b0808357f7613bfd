"""Laws of anybody's table: one law, or one a group and whether they share exponents; isoFLOP minima; emergence."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from analysis.arm_emergence import Condition, Emergence, Question, fit_arm
from analysis.comparisons import equivalence_adjusted, holm_adjusted, same_ceiling, speed_ratio
from analysis.findings import emergence_json, flat
from analysis.foreign import Sheet
from analysis.law_document import Fitted, Settings, fitted
from analysis.laws.emergence import emergence_level
from analysis.laws.isoflop import FLOPS_A_TOKEN, Optimal, isoflop
from analysis.laws.joint import joint_law
from analysis.laws.scaling import Points
from analysis.size_emergence import SizeRow, size_json, size_row
from orchestrator.errors import InputError

Document = dict[str, Any]
ALL = ""  # the group of a table without groups


@dataclass(frozen=True)
class TableFit:
    """The document, and by group what figures are drawn from."""

    document: Document
    laws: Mapping[str, Fitted]
    held_out: Mapping[str, Points | None]


def scaling(sheet: Sheet, settings: Settings) -> TableFit:
    """Raises InputError where a group's points cannot be fitted."""
    laws: dict[str, Fitted] = {}
    held: dict[str, Points | None] = {}
    aside = sheet.held_out if sheet.held_out is not None else np.zeros(sheet.rows, dtype=bool)
    for name, here in _groups(sheet).items():
        runs = sheet.labels.get("run")
        mine = None if runs is None else [runs[i] for i in np.flatnonzero(here & ~aside)]
        try:
            held[name] = _points(sheet, here & aside) if (here & aside).any() else None
            laws[name] = fitted(_points(sheet, here & ~aside), replace(settings, runs=mine), held[name])
        except ValueError as error:
            raise InputError(f"{_group(sheet, name)}{error}") from None
    documents = []
    for name, fit in laws.items():
        excluded = dict(sheet.excluded) | ({"holdout": len(out)} if (out := held[name]) is not None else {})
        named = {"group": name} if "group" in sheet.labels else {}
        documents.append(named | fit.document | {"excluded": excluded, "columns": dict(sheet.columns)})
    if "group" not in sheet.labels:
        return TableFit(documents[0] | {"said": list(sheet.said)}, laws, held)
    joint = None
    if len(laws) > 1:
        points = {name: fit.points for name, fit in laws.items()}
        shared = joint_law(points, {name: fit.law for name, fit in laws.items()}, settings.form, limits=settings.limits)
        joint = asdict(shared) | {"better": "joint" if shared.bic_joint <= shared.bic_apart else "apart"}
    document = {"law": settings.form.name, "groups": documents, "joint": joint, "said": list(sheet.said)}
    return TableFit(document, laws, held)


@dataclass(frozen=True)
class TableMinima:
    """The document, and by group the minima with the points they come from: (N, loss, FLOPs), each [points]."""

    document: Document
    minima: Mapping[str, Optimal]
    points: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]]


def optimal(sheet: Sheet) -> TableMinima:
    """IsoFLOP minima by budget and the compute-optimal exponents, of each group. Raises InputError."""
    found: list[Document] = []
    minima: dict[str, Optimal] = {}
    points = {}
    for name, here in _groups(sheet).items():
        n = sheet.numbers["n"][here]
        flops = (
            sheet.numbers["flops"][here] if "flops" in sheet.numbers else FLOPS_A_TOKEN * n * sheet.numbers["d"][here]
        )
        try:
            row = isoflop(n, sheet.numbers["loss"][here], flops)
            minima[name], points[name] = row, (n, sheet.numbers["loss"][here], flops)
        except ValueError as error:
            raise InputError(f"{_group(sheet, name)}{error}") from None
        told = {key: value for key, value in asdict(row).items() if key != "budgets"}
        found.append({"group": name} | told | {"n": int(here.sum())})
    head = {
        "law": "isoflop",
        "columns": dict(sheet.columns),
        "said": list(sheet.said),
        "excluded": dict(sheet.excluded),
    }
    own = {"groups": found} if "group" in sheet.labels else {k: v for k, v in found[0].items() if k != "group"}
    return TableMinima(head | own, minima, points)


@dataclass(frozen=True)
class TableEmergence:
    """The document, and what figures are drawn from: rows, their points (arm, size, seed, tokens, value), size laws."""

    document: Document
    rows: tuple[Emergence, ...]
    values: pl.DataFrame
    by_size: tuple[SizeRow, ...]
    question: Question


@dataclass(frozen=True)
class Asked:
    """How a table's emergence is fitted. answers: questions behind each value. ahead: N at which T50 is predicted."""

    chance: float | None = None
    level: float | None = None
    reference: str | None = None
    margin: float = 0.05
    answers: float | None = None
    ahead: float | None = None


def emergence(sheet: Sheet, asked: Asked) -> TableEmergence:
    """Emergence of each group over its seeds, against `reference` where one is named, and over N where there is one.

    A group with several N is fitted at each, and has a law of size of its own; groups of one N each share a law.
    Raises InputError.
    """
    level = emergence_level(asked.chance) if asked.level is None else asked.level
    reference = asked.reference
    question = Question(sheet.columns["value"], asked.chance, reference or ALL, asked.margin, level)
    groups, n = _groups(sheet), sheet.numbers.get("n")
    if n is not None:
        groups = dict(sorted(groups.items(), key=lambda item: float(np.median(n[item[1]]))))
    apart = n is not None and any(len(np.unique(n[here])) > 1 for here in groups.values())
    rows: list[Emergence] = []
    parts: list[pl.DataFrame] = []
    sizes: list[float | None] = []
    for name, here in groups.items():
        for size in np.unique(n[here]) if n is not None else (None,):
            mine = here if size is None or n is None else here & (n == size)
            condition = Condition(ALL, f"{size:g}" if apart else ALL)
            row, points = _arm(sheet, name, condition, mine, question, asked.answers)
            rows.append(row)
            parts.append(points.select(pl.lit(name).alias("arm"), pl.lit(condition.size).alias("size"), pl.all()))
            sizes.append(None if size is None else float(size))
    if reference is not None and reference not in [row.arm for row in rows]:
        raise InputError(f"--reference: no group {reference!r}; there are {', '.join(groups)}")
    pairs = [
        (row, base)
        for row in rows
        for base in rows
        if row.arm != base.arm == reference and row.condition == base.condition
    ]
    by_size = _by_size(rows, sizes, apart, asked.ahead) if n is not None else []
    named = [_named(emergence_json(row, question)) for row in rows]
    document = {
        "law": "emergence",
        "emergence": [row | ({} if size is None else {"n": size}) for row, size in zip(named, sizes, strict=True)],
        "speed_ratios": [_named(flat(row)) for row in holm_adjusted([speed_ratio(*pair) for pair in pairs])],
        "same_ceiling": [
            _named(flat(row))
            for row in equivalence_adjusted(holm_adjusted([same_ceiling(*pair, asked.margin) for pair in pairs]))
        ],
        "t50_by_size": [_named(size_json(row)) for row in by_size],
        "columns": dict(sheet.columns), "said": list(sheet.said), "excluded": dict(sheet.excluded),
    }  # fmt: skip
    return TableEmergence(document, tuple(rows), pl.concat(parts), tuple(by_size), question)


def _by_size(
    rows: Sequence[Emergence], sizes: Sequence[float | None], apart: bool, ahead: float | None
) -> list[SizeRow]:
    """A row a group of several N, or one for all groups together."""
    found = []
    for name in dict.fromkeys(row.arm for row in rows) if apart else (ALL,):
        seeds = [
            (n, seed.curve.t50_tokens)
            for row, n in zip(rows, sizes, strict=True)
            if n is not None and (not apart or row.arm == name)
            for seed in row.seeds
        ]
        points = tuple((n, t50) for n, t50 in seeds if t50 is not None)
        found.append(size_row(name, ALL, points, len(seeds) - len(points), ahead))
    return found


def _arm(
    sheet: Sheet, name: str, condition: Condition, here: NDArray[np.bool_], question: Question, answers: float | None
) -> tuple[Emergence, pl.DataFrame]:
    """(emergence of one group at one N, its points: seed, tokens, value[, loss])."""
    labels = [sheet.labels["seed"][i] for i in np.flatnonzero(here)] if "seed" in sheet.labels else ["0"] * here.sum()
    ids = list(dict.fromkeys(labels))
    tokens = sheet.numbers["tokens"][here]
    cells = pl.DataFrame({"id": ids, "seed": ids, "state": "finished", "budget_tokens": float(tokens.max())})
    if "flops" in sheet.numbers:
        cells = cells.with_columns(flops_per_token=pl.lit(_flops_per_token(sheet, name, here)))
    values = pl.DataFrame({"id": labels, "tokens": tokens, "value": sheet.numbers["value"][here]})
    losses = None
    if "loss" in sheet.numbers:
        losses = values.with_columns(value=pl.Series(sheet.numbers["loss"][here])).filter(pl.col("tokens") > 0)
        losses = losses.sort("id", "tokens")
    behind = None if answers is None else dict.fromkeys(ids, answers)
    try:
        row = fit_arm(name, condition, cells, values, question, behind, losses)
    except ValueError as error:
        raise InputError(str(error)) from None
    return row, values.rename({"id": "seed"})


def _flops_per_token(sheet: Sheet, name: str, here: NDArray[np.bool_]) -> float:
    tokens = sheet.numbers["tokens"][here]
    per = sheet.numbers["flops"][here & (sheet.numbers["tokens"] > 0)] / tokens[tokens > 0]
    if not len(per) or np.ptp(per) > 0.01 * per.max():
        raise InputError(
            f"--flops: {_group(sheet, name)}not the same number a token in each row; fit over the column itself with "
            f"--tokens {sheet.columns['flops']}"
        )
    return float(np.median(per))


def _named(row: Document) -> Document:
    """A study's row with the table's word: "group" for "arm"."""
    return {"group": row.get("arm")} | {key: value for key, value in row.items() if key not in ("data", "size", "arm")}


def _groups(sheet: Sheet) -> dict[str, NDArray[np.bool_]]:
    if "group" not in sheet.labels:
        return {ALL: np.ones(sheet.rows, dtype=bool)}
    labels = np.array(sheet.labels["group"])
    return {str(name): labels == name for name in dict.fromkeys(sheet.labels["group"])}


def _group(sheet: Sheet, name: str) -> str:
    return f"group {name!r}: " if "group" in sheet.labels else ""


def _points(sheet: Sheet, where: NDArray[np.bool_]) -> Points:
    n, d = (sheet.numbers[role][where] if role in sheet.numbers else None for role in ("n", "d"))
    return Points(sheet.numbers["loss"][where], n, d)
