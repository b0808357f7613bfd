"""Laws as tables for a paper: LaTeX (booktabs) and Markdown, the same cells in both, and CSV with every digit."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from analysis.table_laws import TableFit

NONE = "–"
HEADS = {
    "E": ("E", "$E$"),
    "A": ("A", "$A$"),
    "B": ("B", "$B$"),
    "alpha": ("α", r"$\alpha$"),
    "beta": ("β", r"$\beta$"),
}
SPECIAL = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
           "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}  # fmt: skip


def write_tables(fit: TableFit, folder: Path) -> list[str]:
    """folder/laws.{tex,md,csv}: a law a row."""
    names, rows = _cells(fit)
    (folder / "laws.md").write_text(markdown(names, rows), encoding="utf-8")
    (folder / "laws.tex").write_text(latex(names, rows), encoding="utf-8")
    full = [
        {"group": group, "law": law.law.form.name}
        | {name: law.document[name] for name in HEADS}
        | {f"{name}_{end}": (law.document["ci"].get(name) or (None, None))[i]
           for name in HEADS for i, end in enumerate(("low", "high"))}
        | {"objective": law.document["objective"], "n": law.document["n"], "flags": "; ".join(law.document["flags"])}
        for group, law in fit.laws.items()
    ]  # fmt: skip
    pl.DataFrame(full, infer_schema_length=None).write_csv(folder / "laws.csv")
    return ["laws.md", "laws.tex", "laws.csv"]


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = [HEADS[name][0] if name in HEADS else name for name in names]
    lines = [
        heads,
        ["---"] + ["---:"] * (len(names) - 1),
        *[[cell.replace("|", r"\|") for cell in row] for row in rows],
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = [HEADS[name][1] if name in HEADS else escaped(name) for name in names]
    body = [" & ".join(escaped(cell).replace("–", "--") for cell in row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}; brackets: 95% bootstrap intervals",
            rf"\begin{{tabular}}{{l{'r' * (len(names) - 1)}}}",
            r"\toprule",
            " & ".join(heads) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def escaped(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def _cells(fit: TableFit) -> tuple[list[str], list[list[str]]]:
    shown = [name for name in HEADS if any(law.document[name] is not None for law in fit.laws.values())]
    rows = []
    for group, law in fit.laws.items():
        document = law.document
        cells = [group or document["law"]]
        cells += [_with_interval(document[name], document["ci"].get(name)) for name in shown]
        rows.append([*cells, f"{document['objective']:.4g}", str(document["n"])])
    return ["law", *shown, "objective", "points"], rows


def _with_interval(value: float | None, ci: Any) -> str:
    if value is None:
        return NONE
    return number(value) + (f" [{number(ci[0])}, {number(ci[1])}]" if ci else "")


def number(value: float) -> str:
    """Three figures, or power notation where a plain number would be long."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        power = math.floor(math.log10(abs(value)))
        return f"{value / 10**power:.2f}e{power}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
