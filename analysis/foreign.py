"""Anybody's table: CSV, TSV, Parquet or JSON lines, its columns named or guessed aloud, every bad value refused.

A number that is wrong fits silently to a wrong law. So each is refused in one line with its row, unless the user says
that such rows be left out, and then they are counted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from orchestrator.errors import InputError

Floats = NDArray[np.float64]

# Usual names by role, likeliest first, compared without case and punctuation.
USUAL = {
    "n": ("n", "nonembeddingparams", "nonembeddingparameters", "nnonembedding", "nonembedparams", "params",
          "parameters", "nparams", "numparams", "modelsize", "modelparams", "totalparams"),
    "d": ("d", "tokens", "trainingtokens", "traintokens", "ntokens", "numtokens", "budgettokens", "datasize"),
    "loss": ("loss", "validationloss", "valloss", "evalloss", "testloss", "finalloss", "trainloss", "bpb"),
    "flops": ("flops", "c", "compute", "trainingflops", "trainflops", "budgetflops"),
    "tokens": ("tokens", "trainingtokens", "traintokens", "tokensseen", "d", "ntokens"),
    "value": ("value", "accuracy", "acc", "capability", "score"),
}  # fmt: skip
PERPLEXITIES = ("perplexity", "ppl", "valppl", "longppl", "loss")
SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
INFINITE = 1e300  # MLflow stores infinity as 1.797e308
UNIT_GAP = 1e3  # neighbours in the sorted column farther apart than this were written in two units
CONDITION = re.compile(r"^\s*(.+?)\s*(<=|>=|==|!=|=|<|>)\s*(.+?)\s*$")


@dataclass(frozen=True)
class Sheet:
    """Rows that are fit for fitting. numbers: by role, each [rows]. labels: text columns by role. columns: role → name.

    said: what was guessed, for the user to see. excluded: rows left out, by reason.
    """

    numbers: Mapping[str, Floats]
    labels: Mapping[str, list[str]]
    columns: Mapping[str, str]
    said: tuple[str, ...] = ()
    excluded: Mapping[str, int] = field(default_factory=dict)
    held_out: NDArray[np.bool_] | None = None

    @property
    def rows(self) -> int:
        return len(next(iter(self.numbers.values())))


@dataclass(frozen=True)
class Wanted:
    """What to read. named: role → column, None to guess. labels: role → text column. conditions: rows to leave out.

    holdout: "largest" (the largest N, or D without one) or a condition. forgiving: bad and repeated rows are left out.
    """

    named: Mapping[str, str | None]
    labels: Mapping[str, str] = field(default_factory=dict)
    log: bool = False
    conditions: Sequence[str] = ()
    holdout: str | None = None
    forgiving: bool = False


def is_table(path: str) -> bool:
    return Path(path).suffix.lower() in (".csv", ".tsv", ".txt", ".parquet", ".jsonl", ".ndjson")


def read(path: Path, wanted: Wanted) -> Sheet:
    """The rows of a table. Raises InputError, naming column, row and remedy, for whatever is wrong with it."""
    frame = _frame(path)
    columns, said = _columns(path, frame.columns, wanted)
    excluded: dict[str, int] = {}
    frame = frame.with_row_index("__row", offset=2 if path.suffix.lower() in (".csv", ".tsv", ".txt") else 1)
    for condition in wanted.conditions:
        drop = _where(frame, condition, columns)
        excluded[condition] = int(drop.sum())
        frame = frame.filter(pl.Series(~drop))
    rows = frame["__row"].to_numpy()
    numbers: dict[str, Floats] = {}
    bad = np.zeros(frame.height, dtype=bool)
    for role in (role for role in wanted.named if role in columns):
        values, why = _numbers(frame[columns[role]], role, numbers.get("n"))
        if role == "loss" and wanted.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                logged = np.log(values)
            why = [w or (f"its logarithm {x:.3g} is not above 0" if not x > 0 else "")
                   for w, x in zip(why, logged, strict=True)]  # fmt: skip
            values = logged
        wrong = np.array([bool(w) for w in why], dtype=bool)
        if wrong.any() and not wanted.forgiving:
            i = int(np.flatnonzero(wrong)[0])
            raise InputError(
                f"{columns[role]}: row {rows[i]} is {frame[columns[role]][i]!r}: {why[i]}; mend it, or leave such rows "
                f"out with --drop-bad ({wrong.sum()} of {frame.height} rows)"
            )
        bad |= wrong
        numbers[role] = values
    repeated = frame.select(~pl.struct(pl.exclude("__row")).is_first_distinct()).to_series().to_numpy()
    if repeated.any() and not wanted.forgiving:
        raise InputError(
            f"{path.name}: row {rows[repeated][0]} repeats an earlier row ({repeated.sum()} of {frame.height} do); a "
            f"point counted twice weighs twice: drop them, or pass --drop-bad"
        )
    excluded |= {why: int(n) for why, n in (("bad", bad.sum()), ("repeated", (repeated & ~bad).sum())) if n}
    keep = ~(bad | repeated)
    if not keep.any():
        raise InputError(f"{path.name}: no rows left to fit; excluded: {excluded or 'none'}")
    for role in ("n", "d", "flops", "tokens"):
        if role in numbers:
            _one_unit(columns[role], numbers[role][keep])
    numbers = {role: values[keep] for role, values in numbers.items()}
    labels = {role: [str(x) for x in frame[name].filter(pl.Series(keep))] for role, name in wanted.labels.items()}
    held = None
    if wanted.holdout:
        held = _held_out(frame.filter(pl.Series(keep)), wanted.holdout, columns, numbers)
    return Sheet(numbers, labels, columns, tuple(said), excluded, held)


def _frame(path: Path) -> pl.DataFrame:
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            frame = pl.scan_parquet(path).collect()
        elif kind in (".jsonl", ".ndjson"):
            frame = pl.scan_ndjson(path, infer_schema_length=None).collect()
        else:
            separator = "\t" if kind == ".tsv" else ","
            frame = pl.scan_csv(path, separator=separator, infer_schema=False).collect()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as {kind or 'a table'} ({str(error).splitlines()[0]})") from None
    if not frame.height:
        raise InputError(f"{path.name}: no rows; a table needs a line of column names and a line a point")
    return frame


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _columns(path: Path, present: Sequence[str], wanted: Wanted) -> tuple[dict[str, str], list[str]]:
    columns: dict[str, str] = {}
    said: list[str] = []
    for role, name in [*wanted.named.items(), *wanted.labels.items()]:
        if name is not None:
            if name not in present:
                raise InputError(f"--{role}: no column {name!r} in {path.name}; it has {', '.join(present)}")
            columns[role] = name
            continue
        usual = (PERPLEXITIES if wanted.log and role == "loss" else ()) + USUAL[role]
        found = [column for each in usual for column in present if _plain(column) == each]
        free = [column for column in dict.fromkeys(found) if column not in columns.values()]
        if not free:
            raise InputError(
                f"--{role}: no column of {path.name} has a usual name for it; name one of {', '.join(present)}"
            )
        columns[role] = free[0]
        others = f", not {', '.join(free[1:])}" if free[1:] else ""
        said.append(f"{role} is read from column {free[0]!r}{others} (--{role} names another)")
    return columns, said


def _numbers(column: pl.Series, role: str, n: Floats | None) -> tuple[Floats, list[str]]:
    """(values, why each is wrong or ""). Text may be "125M", and of tokens "200n": multiples of N."""
    values = np.full(len(column), np.nan)
    why = [""] * len(column)
    if column.dtype.is_numeric():
        values = column.cast(pl.Float64).fill_null(np.nan).to_numpy().copy()
    else:
        for i, text in enumerate(column):
            values[i] = _number(str(text or ""), None if n is None else float(n[i]))
            if np.isnan(values[i]) and str(text or "").strip().lower() not in ("", "nan", "null", "none"):
                why[i] = "not a number"
    for i, value in enumerate(values):
        if why[i]:
            continue
        if np.isnan(value):
            why[i] = "no value"
        elif abs(value) >= INFINITE:
            why[i] = "not finite" if np.isinf(value) else "stands for infinity, as MLflow stores it"
        elif role in ("n", "d", "flops", "loss") and value <= 0:
            why[i] = "not above 0, and a logarithm is taken"
        elif role == "value" and not 0 <= value <= 1:
            why[i] = "outside [0, 1]; give shares, not percent"
        elif role == "tokens" and value < 0:
            why[i] = "below 0"
    return values, why


def _number(text: str, n: float | None) -> float:
    text = text.strip().replace("_", "")
    for suffix, factor in (*SUFFIXES.items(), ("n", n)):
        if factor is not None and text.lower().endswith(suffix) and text[:-1].strip():
            try:
                return float(text[:-1]) * factor
            except ValueError:
                continue
    try:
        return float(text)
    except ValueError:
        return np.nan


def _one_unit(name: str, values: Floats) -> None:
    distinct = np.unique(values[values > 0])
    gaps = distinct[1:] / distinct[:-1]
    if len(gaps) and gaps.max() > UNIT_GAP and name.lower() != "step" and len(distinct) > 1:
        i = int(gaps.argmax())
        # A first checkpoint may lie far before the second; a unit changed somewhere leaves several values on each side.
        if distinct[i] < 1e5:
            raise InputError(
                f"{name}: {distinct[i]:g} and {distinct[i + 1]:g} stand in one column with nothing between; it looks "
                f"like two units: write all in plain counts"
            )


def _where(frame: pl.DataFrame, condition: str, columns: Mapping[str, str]) -> NDArray[np.bool_]:
    """Rows that meet "COLUMN < 5e8", "D >= 1B", "model == S4"; roles (n, d, loss) stand for their columns."""
    match = CONDITION.match(condition)
    if not match:
        raise InputError(f"{condition!r}: no condition; write COLUMN < VALUE, with <, <=, >, >=, == or !=")
    name, sign, text = match.groups()
    column = name if name in frame.columns else columns.get(name.lower())
    if column is None:
        known = ", ".join(c for c in frame.columns if c != "__row")
        raise InputError(f"{condition!r}: no column {name!r}; the table has {known}")
    against = _number(text, None)
    if np.isnan(against):
        if sign not in ("=", "==", "!="):
            raise InputError(f"{condition!r}: {text!r} is no number to compare with")
        same = np.array([str(x) == text for x in frame[column]])
        return ~same if sign == "!=" else same
    n = None
    if "n" in columns and column != columns["n"]:
        n, _ = _numbers(frame[columns["n"]], "n", None)
    values, _ = _numbers(frame[column], "", n)
    signs = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "!=": np.not_equal}
    return np.asarray(signs.get(sign, np.equal)(values, against))


def _held_out(
    frame: pl.DataFrame, holdout: str, columns: Mapping[str, str], numbers: Mapping[str, Floats]
) -> NDArray[np.bool_]:
    if holdout == "largest":
        by = numbers.get("n", numbers.get("d"))
        if by is None:
            raise InputError("--holdout: largest needs a column of sizes or tokens")
        held = by == by.max()
    else:
        held = _where(frame, holdout, columns)
    if held.all() or not held.any():
        raise InputError(f"--holdout: {holdout!r} holds {held.sum()} of {len(held)} rows; some must stay on each side")
    return np.asarray(held)
