"""The `fit` verb: laws of a study, or of anybody's table."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.errors import InputError

LawName = StrEnum(
    "LawName",
    ["chinchilla", "no-constant", "size", "data", "size-no-constant", "data-no-constant", "isoflop", "emergence"],
)
Resampled = StrEnum("Resampled", ["residual", "pairs", "runs"])
Document = dict[str, Any]
CHINCHILLA, RESIDUAL = LawName("chinchilla"), Resampled("residual")

LawOption = Annotated[
    LawName, typer.Option("--law", help="Of a table: chinchilla is E + A/N^alpha + B/D^beta; size, data: one variable.")
]
NOption = Annotated[str | None, typer.Option("--n", help="Column of parameters; guessed from usual names if left out.")]
DOption = Annotated[str | None, typer.Option("--d", help="Column of training tokens; '200n' in it is 200 times N.")]
LossOption = Annotated[str | None, typer.Option("--loss", help="Column of losses.")]
LogOption = Annotated[bool, typer.Option("--log", help="The loss column is a perplexity: its logarithm is fitted.")]
FlopsOption = Annotated[str | None, typer.Option("--flops", help="Column of budgets, for isoflop; else 6 N D.")]
TokensOption = Annotated[str | None, typer.Option("--tokens", help="Column of tokens seen, for emergence.")]
ValueOption = Annotated[str | None, typer.Option("--value", help="Column of a capability in [0, 1], for emergence.")]
GroupOption = Annotated[str | None, typer.Option("--group", help="Column of groups: a law each.")]
SeedOption = Annotated[str | None, typer.Option("--seed", help="Column of seeds, for emergence.")]
RunOption = Annotated[str | None, typer.Option("--run", help="Column of runs, for --bootstrap runs.")]
BootstrapOption = Annotated[Resampled, typer.Option("--bootstrap", help="What is drawn anew for the intervals.")]
ReplicatesOption = Annotated[int, typer.Option("--replicates", min=0, max=100_000, help="Refits; 0 for no intervals.")]
HoldoutOption = Annotated[
    str | None, typer.Option("--holdout", help="Predicted, not fitted: 'largest' or a condition, 'N > 1e9'.")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", help="Rows left out: 'D < 5e8'. May be given again.")
]
DropBadOption = Annotated[bool, typer.Option("--drop-bad", help="Leave out bad and repeated rows, and count them.")]
AlphaOption = Annotated[str, typer.Option("--alpha", metavar="LOW,HIGH", help="Bounds of alpha.")]
BetaOption = Annotated[str, typer.Option("--beta", metavar="LOW,HIGH", help="Bounds of beta.")]
PredictOption = Annotated[
    list[str] | None,
    typer.Option("--predict", metavar="N,D", help="A loss to predict, may be given again; of emergence, a size N."),
]
ChanceOption = Annotated[float | None, typer.Option("--chance", min=0, max=1, help="The floor of the capability.")]
LevelOption = Annotated[float | None, typer.Option("--level", min=0, max=1, help="What counts as emerged.")]
ReferenceOption = Annotated[str | None, typer.Option("--reference", help="The group that others are compared with.")]
AnswersOption = Annotated[
    float | None, typer.Option("--answers", min=1, help="Questions behind each value: gives the dispersion.")
]
MarginOption = Annotated[float, typer.Option("--margin", min=1e-9, max=1, help="Ceilings this near count as one.")]
FiguresOption = Annotated[
    Path | None,
    typer.Option("--figures", help="Folder for figures (PNG, SVG, PDF, CSV) and tables (LaTeX, Markdown)."),
]
NextOption = Annotated[bool, typer.Option("--next", help="Of a study: what further seeds and budgets would narrow.")]


def table(path: Path, law: str, options: Document, figures: Path | None) -> Document:
    """The document of a table's fit. options: as the command got them. Raises InputError."""
    from analysis import foreign, table_figures, table_laws
    from analysis.law_document import Settings
    from analysis.laws.scaling import FORMS

    labels = {role: options[role] for role in ("group", "seed", "run") if options[role] is not None}
    named: dict[str, str | None]
    if law == "emergence":
        named = {"tokens": options["tokens"], "value": options["value"]}
        named |= {role: options[role] for role in ("n", "loss", "flops") if options[role] is not None}
    elif law == "isoflop":
        named = {"n": options["n"], "loss": options["loss"]}
        named |= {"flops": options["flops"]} if options["flops"] is not None else {"d": options["d"]}
    else:
        form = FORMS[law]
        roles = ("n",) * form.size + ("d",) * form.data
        named = {role: options[role] for role in (*roles, "loss")}
    wanted = foreign.Wanted(
        named, labels, options["log"], options["exclude"] or (), options["holdout"], options["drop_bad"]
    )
    sheet = foreign.read(path, wanted)
    if law == "emergence":
        asked = table_laws.Asked(
            options["chance"], options["level"], options["reference"], options["margin"], options["answers"],
            ahead_of(options["predict"]),
        )  # fmt: skip
        found = table_laws.emergence(sheet, asked)
        if figures is not None:
            found.document["figures"] = table_figures.write_emergence(found, figures)
        return found.document
    if law == "isoflop":
        minima = table_laws.optimal(sheet)
        if figures is not None:
            minima.document["figures"] = table_figures.write_isoflop(minima, figures)
        return minima.document
    if options["bootstrap"] == "runs" and "run" not in labels:
        raise InputError("--bootstrap runs: needs the run of each row; name its column with --run")
    settings = Settings(
        form,
        {power: _bounds(power, options[power]) for power in form.powers},
        options["bootstrap"],
        options["replicates"],
        predict=tuple(_at(text) for text in options["predict"] or ()),
    )
    fit = table_laws.scaling(sheet, settings)
    if figures is not None:
        from analysis import law_figures

        fit.document["figures"] = law_figures.write(fit, figures)
    return fit.document


def ahead_of(texts: list[str] | None) -> float | None:
    """The N at which T50 is predicted; None where it is not asked for. Raises InputError."""
    if not texts:
        return None
    try:
        (n,) = (float(text) for text in texts)
    except ValueError:
        raise InputError(f"--predict: {', '.join(texts)} is not one number; of T50 write a size alone, 7e9") from None
    if not 0 < n < 1e300:
        raise InputError(f"--predict: {texts[0]!r} is no size above 0; write it in parameters, 7e9")
    return n


def _bounds(name: str, text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--{name}: {text!r} is not two numbers; write LOW,HIGH as in 0.2,0.3") from None
    if not 0 < low < high < 100:
        raise InputError(f"--{name}: {text!r} is no range of an exponent; give 0 < LOW < HIGH < 100")
    return low, high


def _at(text: str) -> tuple[float, float]:
    try:
        n, d = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--predict: {text!r} is not two numbers; write N,D as in 7e9,1e12") from None
    if not (0 < n < 1e300 and 0 < d < 1e300):
        raise InputError(f"--predict: {text!r} is not above 0; write N,D as in 7e9,1e12")
    return n, d
