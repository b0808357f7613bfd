"""Laws for people: one table a law, what is not identified said beneath it."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from experiments.show import count

Document = dict[str, Any]
SYMBOLS = ("E", "A", "B", "alpha", "beta")


def table(document: Document) -> RenderableType:
    """The fit of a table, whichever law it was."""
    if document["law"] == "emergence":
        return emergence(document)
    if document["law"] == "isoflop":
        return Group(*(_minima(row) for row in document.get("groups", [document])))
    parts: list[RenderableType] = [_law(row) for row in document.get("groups", [document])]
    if joint := document.get("joint"):
        exponents = ", ".join(f"{name} {value:.4g}" for name, value in joint["exponents"].items())
        parts.append(
            Text(
                f"shared exponents: {exponents}; p = {joint['p']:.3f} that groups share them; BIC "
                f"{joint['bic_joint']:.1f} shared, {joint['bic_apart']:.1f} apart: {joint['better']} is better"
            )
        )
    return Group(*parts)


def law_lines(rows: list[Document]) -> RenderableType:
    """The scaling laws of a study, a line an arm."""
    if not rows:
        return Text()
    lines = _columns("arm", "law", *SYMBOLS, "points")
    for row in rows:
        lines.add_row(row["arm"], row["law"], *(_number(row[name]) for name in SYMBOLS), str(row["n"]))
    return Group(Text(), lines)


def claim_lines(rows: list[Document]) -> RenderableType:
    """The study's own claims with their verdicts, a line each; nothing where it makes none."""
    if not rows:
        return Text()
    lines = Table(box=None, pad_edge=False, header_style="bold")
    lines.add_column("claim", ratio=1)
    for name in ("verdict", "value", "95%", "claimed"):
        lines.add_column(name, no_wrap=True)
    places = {(row["data"], row["size"]) for row in rows}
    for row in rows:
        at = f" ({', '.join(filter(None, (row['data'], row['size'])))})" if len(places) > 1 else ""
        ends = row["ci"] and "-".join("?" if end is None else f"{end:.3g}" for end in row["ci"])
        lines.add_row(Text(row["claim"] + at), row["verdict"], _number(row["value"]), ends or "-", row["rule"])
    return Group(Text(), lines)


def size_lines(rows: list[Document]) -> RenderableType:
    """T50 over size, a line an arm; one line why where no arm has a law."""
    name = "group" if rows and "group" in rows[0] else "arm"
    with_law = [row for row in rows if row["b"] is not None]
    if not with_law:
        return Text(f"T50 by size: {rows[0]['flags'][0]}." if rows else "", style="dim")
    lines = _columns(name, "T50 ~ N^b", "95%", "seeds", "sizes", "at N", "T50", "95%")
    for row in with_law:
        told = row["prediction"]
        lines.add_row(
            row[name] or "all", _number(row["b"]), _range(row["b_ci"]), str(row["seeds"]), str(row["sizes"]),
            count(told["n"]), count(told["t50_tokens"]), _range(told["ci"], count),
        )  # fmt: skip
    notes = [f"{row[name] or 'all'}: {flag}" for row in rows for flag in row["flags"]]
    return Group(Text(), lines, *(Text(note, style="yellow") for note in notes))


def _law(row: Document) -> RenderableType:
    lines = _columns("", "value", "95%", "s.e.")
    for name in SYMBOLS:
        if row[name] is None and name not in row["ci"]:
            continue
        error = row["se"].get(name)
        lines.add_row(name, _number(row[name]), _range(row["ci"].get(name)), "" if error is None else f"{error:.3g}")
    head = f"{row['law']}{' of ' + row['group'] if row.get('group') else ''}: {row['n']} points"
    if row["excluded"]:
        head += f", left out: {', '.join(f'{n} ({why})' for why, n in row['excluded'].items())}"
    fit = row["fit"]
    notes = [
        f"objective {row['objective']:.9g}, condition number {row['condition_number']:.3g}, R2 {_number(fit['r2'])}"
    ]
    if best := row["compute_optimal"]:
        notes.append(f"compute-optimal: N ~ C^{best['a']:.3f} {_range(best['a_ci'])}, D ~ C^{best['b']:.3f}")
    if found := row["identified"]:
        notes.append(
            f"identified: E {_number(found['E'])}, exponent {_number(found['exponent'])}, "
            f"A + B * {found['ratio']:.4g}^-exponent = {_number(found['A_plus_B_ratio_power'])}"
        )
    if out := row["holdout"]:
        notes.append(f"held out: R2 {_number(out['r2'])}, RMSE {out['rmse']:.4g}, MAE {out['mae']:.4g}")
    for at in row["predictions"]:
        notes.append(f"at N {count(at['n'])}, D {count(at['d'])}: loss {at['loss']:.4f} {_range(at['ci'])}")
    return Group(Text(head), lines, *map(Text, notes), *(Text(flag, style="yellow") for flag in row["flags"]), Text())


def emergence(document: Document) -> RenderableType:
    """When a capability emerges in each group."""
    lines = _columns("group", "T50", "95%", "form spread", "emerged", "ceiling", "crossing")
    notes = []
    for row in document["emergence"]:
        spread, name = row.get("form_spread"), _group_name(row)
        lines.add_row(
            name, count(row["t50_tokens"]), _range(row["t50_ci"], count),
            "" if spread is None else f"{spread:.2f}x", f"{row['seeds'] - row['censored']}/{row['seeds']}",
            _number(row["ceiling"]), count(row["crossing_tokens"]),
        )  # fmt: skip
        notes += [f"{name}: {flag}" for flag in row["flags"]]
    for row in document["speed_ratios"]:
        if row["ratio"] is not None:
            notes.append(f"{row['group']} over {row['reference']}: {row['ratio']:.3g} {_range(row['ci'])}")
    return Group(lines, *(Text(note, style="yellow") for note in notes), size_lines(document["t50_by_size"]))


def _group_name(row: Document) -> str:
    size = "" if row.get("n") is None else f"N {count(row['n'])}"
    return " ".join(filter(None, (row["group"], size))) or "all"


def _minima(row: Document) -> RenderableType:
    lines = _columns("FLOPs", "sizes", "best N", "best D", "loss")
    for at in row["minima"]:
        lines.add_row(
            f"{at['flops']:.3g}", str(at["sizes"]), count(at["n"]), count(at["d"]),
            _number(at["loss"]) + ("" if at["inside"] else " (outside)"),
        )  # fmt: skip
    head = f"isoflop{' of ' + row['group'] if row.get('group') else ''}"
    found = "" if row["a"] is None else (
        f"N* ~ C^{row['a']:.3f} {_range(row['a_ci'])}, D* ~ C^{row['b']:.3f} {_range(row['b_ci'])}"
    )  # fmt: skip
    return Group(Text(head), lines, Text(found), *(Text(flag, style="yellow") for flag in row["flags"]))


def proposals(document: Document) -> RenderableType:
    """What to train next, the most telling first."""
    lines = _columns("what", "more runs", "interval now", "then", "narrower", "a run")
    for row in document["proposals"]:
        lines.add_row(
            row["what"], str(row["runs"]), f"{row['now']:.3g}", f"{row['then']:.3g}",
            f"{100 * (1 - row['then'] / row['now']):.0f}%", f"{row['gain_a_run']:.1f}%",
        )  # fmt: skip
    return Group(lines, *(Text(note, style="yellow") for note in document["notes"]))


def _columns(*names: str) -> Table:
    lines = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        lines.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _range(ci: list[float] | None, text: Any = None) -> str:
    return "" if not ci else "-".join((text or _number)(end) for end in ci)
