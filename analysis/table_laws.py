"""Laws of anybody's table: one law, or one a group and whether they share exponents; isoFLOP minima; emergence."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from analysis.arm_emergence import Condition, Emergence, Question, fit_arm
from analysis.comparisons import holm_adjusted, same_ceiling, speed_ratio
from analysis.findings import emergence_json, flat
from analysis.foreign import Sheet
from analysis.law_document import Fitted, Settings, fitted
from analysis.laws.emergence import emergence_level
from analysis.laws.isoflop import FLOPS_A_TOKEN, isoflop
from analysis.laws.joint import joint_law
from analysis.laws.scaling import Points
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


def optimal(sheet: Sheet) -> Document:
    """IsoFLOP minima by budget and the compute-optimal exponents, of each group. Raises InputError."""
    found = []
    for name, here in _groups(sheet).items():
        n = sheet.numbers["n"][here]
        flops = (
            sheet.numbers["flops"][here] if "flops" in sheet.numbers else FLOPS_A_TOKEN * n * sheet.numbers["d"][here]
        )
        try:
            row = isoflop(n, sheet.numbers["loss"][here], flops)
        except ValueError as error:
            raise InputError(f"{_group(sheet, name)}{error}") from None
        found.append({"group": name} | asdict(row) | {"n": int(here.sum())})
    head = {
        "law": "isoflop",
        "columns": dict(sheet.columns),
        "said": list(sheet.said),
        "excluded": dict(sheet.excluded),
    }
    return head | (
        {"groups": found} if "group" in sheet.labels else {k: v for k, v in found[0].items() if k != "group"}
    )


def emergence(
    sheet: Sheet, chance: float | None, level: float | None, reference: str | None, margin: float
) -> Document:
    """Emergence of each group over its seeds, and against `reference` where one is named. Raises InputError."""
    question = Question(
        sheet.columns["value"], chance, reference or ALL, margin, emergence_level(chance) if level is None else level
    )
    rows = []
    for name, here in _groups(sheet).items():
        seeds = [sheet.labels["seed"][i] for i in np.flatnonzero(here)] if "seed" in sheet.labels else None
        rows.append(_arm(name, sheet.numbers["tokens"][here], sheet.numbers["value"][here], seeds, question))
    if reference is not None and reference not in [row.arm for row in rows]:
        raise InputError(f"--reference: no group {reference!r}; there are {', '.join(row.arm for row in rows)}")
    pairs = [(row, base) for row in rows for base in rows if row.arm != base.arm == reference]
    return {
        "law": "emergence",
        "emergence": [_named(emergence_json(row, question)) for row in rows],
        "speed_ratios": [_named(flat(row)) for row in holm_adjusted([speed_ratio(*pair) for pair in pairs])],
        "same_ceiling": [_named(flat(row)) for row in holm_adjusted([same_ceiling(*pair, margin) for pair in pairs])],
        "columns": dict(sheet.columns), "said": list(sheet.said), "excluded": dict(sheet.excluded),
    }  # fmt: skip


def _arm(
    name: str, tokens: NDArray[np.float64], value: NDArray[np.float64], seeds: Sequence[str] | None, question: Question
) -> Emergence:
    labels = list(seeds) if seeds is not None else ["0"] * len(tokens)
    ids = list(dict.fromkeys(labels))
    cells = pl.DataFrame({"id": ids, "seed": ids, "state": "finished", "budget_tokens": float(tokens.max())})
    values = pl.DataFrame({"id": labels, "tokens": tokens, "value": value})
    try:
        return fit_arm(name, Condition(ALL, ALL), cells, values, question)
    except ValueError as error:
        raise InputError(str(error)) from None


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
