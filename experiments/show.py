"""Tables for people. Each takes the JSON document of its verb, so that both say the same."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Document = dict[str, Any]

STYLES = {"finished": "green", "running": "cyan", "failed": "red", "diverged": "magenta", "blocked": "yellow"}


def count(value: float | None) -> str:
    """1843200 → 1.84M."""
    if value is None:
        return "-"
    for unit, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Two units at most: 45 s, 8 min 20 s, 3 h 05 min, 12 d 07 h."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def _table(*columns: str, tight: bool = False) -> Table:
    """The first column is text, the others numbers. tight: one blank between columns, not two."""
    table = Table(box=None, pad_edge=False, collapse_padding=tight, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True, overflow="ellipsis")
    return table


def _varying(cells: Sequence[Document], *keys: str) -> list[str]:
    """Those of `keys` in which the cells differ: a column that says the same everywhere is left out."""
    return [key for key in keys if len({cell.get(key) for cell in cells}) > 1]


def _label(cell: Document, keys: Iterable[str]) -> str:
    return " ".join([cell["arm"], *(count(cell[k]) if k == "budget_tokens" else str(cell[k]) for k in keys)])


def plan(document: Document) -> RenderableType:
    """What would run: a line an arm (and size, data, budget where they vary), totals, and why identities are new."""
    cells, totals = document["cells"], document["totals"]
    keys = _varying(cells, "data", "size", "budget_tokens")
    jobs: dict[str, list[Document]] = defaultdict(list)
    for job in document["jobs"]:
        jobs[job["cell"]].append(job)
    groups: dict[str, list[Document]] = defaultdict(list)
    for cell in cells:
        groups[_label(cell, keys)].append(cell)
    table = _table("arm", "cells", "to run", "params", "tokens", "FLOPs", "memory", "time")
    for label, group in groups.items():
        wanted = [job for cell in group for job in jobs[cell["id"]]]
        seconds = [job["seconds"] for job in wanted]
        table.add_row(
            label,
            str(len(group)),
            str(sum(bool(jobs[cell["id"]]) for cell in group)),
            count(group[0]["params"]),
            count(sum(job["tokens"] for job in wanted)),
            count(sum(job["flops"] for job in wanted)),
            count(max((job["memory_bytes"] for job in wanted), default=None)) + "B" * bool(wanted),
            duration(None if None in seconds else sum(seconds)),
        )
    kinds = Counter(job["kind"] for job in document["jobs"])
    lines = [
        f"{document['study']}: {len(cells)} cells, {document['missing']} to train; "
        f"{', '.join(f'{n} {kind} jobs' for kind, n in kinds.items()) or 'nothing to run'}",
        f"{count(totals['tokens'])} tokens, {count(totals['flops'])}FLOP, {count(totals['disk_bytes'])}B on disk",
    ]
    if totals["device_hours"] is not None:
        lines.append(
            f"{totals['device_hours']:.2f} device hours, at least {duration(totals['makespan_lower_bound_s'])} here"
            + (f", price {totals['price']:.2f}" if totals["price"] is not None else "")
        )
    elif kinds["measure"]:
        lines.append("time: not known for measurements on stored checkpoints")
    elif document["jobs"]:
        lines.append("time: not known before the first cell of each arm has run on this root")
    if document["separate"]:
        lines.append(f"each budget is trained by itself: {document['separate']}")
    elif kinds["trunk"]:
        apart = totals["tokens_if_separate"]
        lines.append(
            f"budgets share trunks: apart they take {count(apart)} tokens, {apart / totals['tokens']:.2f} times"
        )
    if document["lost"]:
        lines.append(f"{len(document['lost'])} finished cells have lost their files and train again")
    reasons = Counter("; ".join(why) for why in document.get("changed", {}).values())
    lines += [f"new identity ({n} cells): {why}" for why, n in reasons.most_common(5)]
    return Group(table, Text(), *(Text(line) for line in lines))


def status(document: Document, width: int = 80, height: int = 24) -> RenderableType:
    """Where a study stands, within `width` x `height` characters.

    A line a cell where they fit; else a line for each arm, size, data condition and budget, or for as many of these
    together as fit, an arm at least, and below them a line for each value of what was left out, while there is room.
    """
    cells = document["cells"]
    keys = _varying(cells, "data", "size", "budget_tokens")
    head = _headline(document)
    causes = Counter(cell["cause"] for cell in cells if cell["cause"] and cell["state"] != "finished")
    tail = [
        Text(f"{n} x {cause}", style="red", no_wrap=True, overflow="ellipsis") for cause, n in causes.most_common(3)
    ]
    room = height - len(tail) - 5
    one_each = len(cells) <= room
    body = _cell_table(cells, [*keys, "seed"], width) if one_each else _grouped(cells, keys, room, width)
    return Group(head, body, *tail)


def _grouped(cells: list[Document], keys: list[str], room: int, width: int) -> RenderableType:
    together = list(keys)
    apart: list[str] = []
    while together and len({_label(cell, together) for cell in cells}) > room:
        apart.insert(0, together.pop())
    arms: dict[str, list[Document]] = defaultdict(list)
    for cell in cells:
        arms[_label(cell, together)].append(cell)
    blocks: list[RenderableType] = [_group_table("arm", arms, room, width)]
    room -= len(arms)
    for key in apart:
        groups: dict[str, list[Document]] = defaultdict(list)
        for cell in cells:
            groups[count(cell[key]) if key == "budget_tokens" else str(cell[key])].append(cell)
        if len(groups) + 2 <= room:
            blocks += [Text(), _group_table("budget" if key == "budget_tokens" else key, groups, room, width)]
            room -= len(groups) + 2
    return Group(*blocks)


def _headline(document: Document) -> RenderableType:
    done = sum(cell["tokens_done"] for cell in document["cells"])
    total = sum(cell["budget_tokens"] for cell in document["cells"]) or 1
    left = document.get("seconds_left")
    rate = document.get("tokens_per_second")
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(document["study"], style="bold")
    text.append("  ")
    for state, n in document["counts"].items():
        text.append(f"{n} {state}  ", style=STYLES.get(state, "dim"))
    facts = [f"{done / total:.0%} of {count(total)} tokens"]
    facts += [f"{count(rate)} tokens/s"] if rate else []
    facts += [f"{duration(document['makespan_s'])} so far"]
    facts += [f"about {duration(left)} left"] if left else []
    return Group(text, Text(", ".join(facts), no_wrap=True, overflow="ellipsis"), Text())


def _bar(done: float, total: float, width: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=min(done, total), width=width)


def _cell_table(cells: list[Document], keys: list[str], width: int) -> Table:
    table = _table("cell", "state", "progress", "", "tokens/s", "left", "attempts")
    for cell in cells:
        share = cell["tokens_done"] / max(1, cell["budget_tokens"])
        table.add_row(
            _label(cell, [key for key in keys if key != "seed"]) + f" seed {cell['seed']}",
            _state(cell),
            _bar(cell["tokens_done"], cell["budget_tokens"], max(6, width // 8)),
            f"{share:.0%}",
            count(cell.get("tokens_per_second")) if cell["state"] == "running" else "",
            duration(cell.get("seconds_left")) if cell["state"] == "running" else "",
            str(cell["attempts"]) if cell["attempts"] > 1 else "",
        )
    return table


def _state(cell: Document) -> Text:
    if cell["state"] == "pending" and cell.get("trunk_state") == "running":
        return Text("in trunk", style=STYLES["running"])
    return Text(cell["state"], style=STYLES.get(cell["state"], "dim"))


def _group_table(name: str, groups: dict[str, list[Document]], room: int, width: int) -> Table:
    table = _table(name, "cells", "done", "running", "wait", "lost", "progress", "", "left")
    moving = sorted(groups, key=lambda label: not any(cell["state"] == "running" for cell in groups[label]))
    shown = moving[: room - 1] if len(groups) > room else list(groups)
    for label in shown:
        group = groups[label]
        states = Counter(cell["state"] for cell in group)
        done = sum(cell["tokens_done"] for cell in group)
        total = sum(cell["budget_tokens"] for cell in group)
        left = [cell["seconds_left"] for cell in group if cell.get("seconds_left")]
        table.add_row(
            label,
            str(len(group)),
            str(states["finished"]),
            str(states["running"] or ""),
            str(states["pending"] + states["blocked"] or ""),
            str(states["failed"] + states["diverged"] or ""),
            _bar(done, total, max(6, width // 8)),
            f"{done / max(1, total):.0%}",
            duration(sum(left)) if left else "",
        )
    if len(shown) < len(groups):
        table.add_row(f"... {len(groups) - len(shown)} more", *[""] * 8)
    return table


def event(kind: str, job_id: str | None, text: str, document: Document) -> str:
    """One line of a run's log: `swa-8 tiny seed 0 finished (3/10, about 4 min 10 s left)`."""
    cell = next((cell for cell in document["cells"] if job_id and job_id.startswith(cell["id"])), None)
    trunk = next((cell for cell in document["cells"] if job_id and cell.get("trunk") == job_id), None)
    if cell is None and trunk is not None:
        cell, kind = trunk, f"trunk {kind}"
    if cell is None:
        return " ".join(filter(None, (job_id, text or kind)))
    keys = _varying(document["cells"], "data", "size", "budget_tokens")
    over = sum(document["counts"].get(state, 0) for state in ("finished", "diverged", "failed"))
    left = f", about {duration(document['seconds_left'])} left" if document.get("seconds_left") else ""
    cause = f": {text}" if text and not kind.endswith(("started", "finished")) else ""
    return f"{_label(cell, keys)} seed {cell['seed']} {kind} ({over}/{len(document['cells'])}{left}){cause}"


def findings(document: Document) -> RenderableType:
    """When the capability emerged in each arm.

    T50: in tokens. seeds: those that emerged, of all. ratio: of T50 to the reference's, or what bounds it where no seed
    of one of them emerged. level: whether both are shown to end alike, unknown where one of them has
    no ceiling; that they are not shown to does not say that they differ.
    """
    at = ("arm", "data", "size", "budget_tokens")
    ratios = {tuple(row.get(key) for key in at): row for row in document["speed_ratios"]}
    ceilings = {tuple(row.get(key) for key in at): row for row in document["same_ceiling"]}
    rows = document["emergence"]
    keys = _varying(rows, "data", "size", "budget_tokens")
    table = _table("arm", "T50", "95%", "seeds", "ceiling", "ratio", "95%", "level", tight=True)
    for row in rows:
        here = tuple(row.get(key) for key in at)
        ratio, ceiling = ratios.get(here, {}), ceilings.get(here, {})
        table.add_row(
            _label(row, keys),
            count(row["t50_tokens"]),
            _interval(row["t50_ci"], count),
            f"{row['seeds'] - row['censored']}/{row['seeds']}",
            "-" if row["ceiling"] is None else f"{row['ceiling']:.2f}",
            _ratio(ratio),
            _interval(ratio.get("ci"), lambda x: f"{x:.2f}"),
            {True: "yes", False: "not shown", None: "unknown"}[ceiling["equivalent"]] if ceiling else "",
        )
    return table


def _ratio(row: Document) -> str:
    for sign, value in (("", row.get("ratio")), ("> ", row.get("at_least")), ("< ", row.get("at_most"))):
        if value is not None:
            return f"{sign}{value:.2f}"
    return ""


def _interval(ends: Sequence[float | None] | None, text: Any) -> str:
    if not ends:
        return ""
    if ends[1] is None and ends[0] is not None:
        return f"> {text(ends[0])}"
    return "-".join("?" if end is None else text(end) for end in ends)
