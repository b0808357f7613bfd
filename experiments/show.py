"""Tables for people. Each takes the JSON document of its verb, so that both say the same."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

ALPHA = 0.05

Document = dict[str, Any]
MOST_LINES = 24  # of a plan's table, a terminal's height

STYLES = {"finished": "green", "running": "cyan", "failed": "red", "diverged": "magenta", "blocked": "yellow"}


def count(value: float | None) -> str:
    """1843200 → 1.84M."""
    if value is None:
        return "-"
    for unit, suffix in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
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


def hours(value: float) -> str:
    """Two decimals up to a hundred, none beyond."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


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
    """What would run: a line for each point of the grid, seeds together, or where these are many one for each arm and
    one for each size; totals, and why identities are new.
    """
    cells, totals = document["cells"], document["totals"]
    keys = _varying(cells, "data", "size", "budget_tokens")
    jobs: dict[str, list[Document]] = defaultdict(list)
    for job in document["jobs"]:
        jobs[job["cell"]].append(job)
    points = _grouped(cells, lambda cell: _label(cell, keys))
    if len(points) <= MOST_LINES:
        body: RenderableType = _costs("arm", points, jobs)
    else:
        tables: list[RenderableType] = []
        for axis in ("arm", *_varying(cells, "data", "size")):
            tables += [*([Text()] if tables else []), _costs(axis, _grouped(cells, itemgetter(axis)), jobs)]
        body = Group(*tables)
    kinds = Counter(job["kind"] for job in document["jobs"])
    lines = [
        f"{document['study']}: {len(cells)} cells, {document['missing']} to train; "
        f"{', '.join(f'{n} {kind} jobs' for kind, n in kinds.items()) or 'nothing to run'}",
        f"{count(totals['tokens'])} tokens, {count(totals['flops'])}FLOP, {count(totals['disk_bytes'])}B on disk",
    ]
    if document["jobs"]:
        lines += _time_lines(document)
    if document["separate"]:
        lines.append(f"each budget is trained by itself: {document['separate']}")
    elif kinds["trunk"]:
        apart = totals["tokens_if_separate"]
        lines.append(
            f"budgets share trunks: apart they take {count(apart)} tokens, {apart / totals['tokens']:.2f} times"
        )
    if kinds["tune"]:
        tokens = count(sum(job["tokens"] for job in document["jobs"] if job["kind"] == "tune"))
        unknown = sum(cell["learning_rate"] is None for cell in cells)
        lines.append(f"learning rates of {unknown} cells are tuned first: {tokens} tokens, less what is pruned")
    arms = points if len(points) <= MOST_LINES else _grouped(cells, itemgetter("arm"))
    residuals = {arm: max((cell["layer_residual"] for cell in group), key=abs) for arm, group in arms.items()}
    if any(residuals.values()):
        by_arm = ", ".join(f"{arm} {residual:+.2%}" for arm, residual in residuals.items() if residual)
        lines.append(f"parameters of a layer against full attention: {by_arm}")
    if document["lost"]:
        lines.append(f"{len(document['lost'])} finished cells have lost their files and train again")
    reasons = Counter("; ".join(why) for why in document.get("changed", {}).values())
    lines += [f"new identity ({n} cells): {why}" for why, n in reasons.most_common(5)]
    return Group(body, Text(), *(Text(line) for line in lines))


def _grouped(cells: Iterable[Document], label: Callable[[Document], str]) -> dict[str, list[Document]]:
    groups: dict[str, list[Document]] = defaultdict(list)
    for cell in cells:
        groups[label(cell)].append(cell)
    return groups


def _costs(head: str, groups: dict[str, list[Document]], jobs: dict[str, list[Document]]) -> Table:
    """A line a group of cells: what their jobs take. Time is that of one device after the other."""
    table = _table(head, "cells", "to run", "params", "tokens", "FLOPs", "memory", "time", tight=True)
    for label, group in groups.items():
        wanted = [job for cell in group for job in jobs[cell["id"]]]
        seconds = [job["seconds"] and job["seconds"] * job["workers"] for job in wanted]
        params = [count(cell["params"]) for cell in sorted(group, key=lambda cell: cell["params"])]
        table.add_row(
            label,
            str(len(group)),
            str(sum(bool(jobs[cell["id"]]) for cell in group)),
            params[0] if params[0] == params[-1] else f"{params[0]}-{params[-1]}",
            count(sum(job["tokens"] for job in wanted)),
            count(sum(job["flops"] for job in wanted)),
            count(max((job["memory_bytes"] for job in wanted), default=None)) + "B" * bool(wanted),
            duration(None if None in seconds else sum(seconds)),
        )
    return table


def _time_lines(document: Document) -> list[str]:
    totals, device, jobs = document["totals"], document["device"], document["jobs"]
    sources = totals["seconds_sources"]
    unknown = len(jobs) - sum(sources.values())
    lines = []
    if totals["device_hours"] is not None:
        lines.append(
            f"{hours(totals['device_hours'])} device hours, at least {duration(totals['makespan_lower_bound_s'])} on "
            f"{device['count']} devices" + (f", price {totals['price']:.2f}" if totals["price"] is not None else "")
        )
    meant = {
        "trained": "as these models trained here before",
        "calibrated": "as timed on such a device",
        "estimated": f"from FLOPs at {count(device['flops'])}FLOP/s a device",
    }
    lines += [f"time of {n} jobs {meant[source]}" for source, n in sources.items()]
    if unknown:
        lines.append(f"time of {unknown} jobs not known: plan --calibrate, or --device-flops and --mfu")
    return lines


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
    tuning = _tuning(document)
    room = height - len(tail) - 5 - len(tuning)
    one_each = len(cells) <= room
    body = _cell_table(cells, [*keys, "seed"], width) if one_each else _by_axis(cells, keys, room, width)
    return Group(head, *tuning, body, *tail)


def _by_axis(cells: list[Document], keys: list[str], room: int, width: int) -> RenderableType:
    together = list(keys)
    apart: list[str] = []
    while together and len({_label(cell, together) for cell in cells}) > room:
        apart.insert(0, together.pop())
    arms = _grouped(cells, lambda cell: _label(cell, together))
    blocks: list[RenderableType] = [_group_table("arm", arms, room, width)]
    room -= len(arms)
    for key in apart:
        groups = _grouped(cells, _value_of(key))
        if len(groups) + 2 <= room:
            blocks += [Text(), _group_table("budget" if key == "budget_tokens" else key, groups, room, width)]
            room -= len(groups) + 2
    return Group(*blocks)


def _value_of(key: str) -> Callable[[Document], str]:
    return lambda cell: count(cell[key]) if key == "budget_tokens" else str(cell[key])


def _tuning(document: Document) -> list[Text]:
    """A line on tuning that goes on, and what is to be warned of."""
    groups = document.get("tuning", [])
    lines = [Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in document.get("warnings", [])]
    still = [group for group in groups if group["rate"] is None]
    if still:
        ended, jobs = sum(group["ended"] for group in still), sum(len(group["jobs"]) for group in still)
        known = f"{len(groups) - len(still)} of {len(groups)} learning rates known"
        lines.insert(0, Text(f"tuning: {known}, {ended} of {jobs} trial jobs over", style=STYLES["running"]))
    return [*lines, Text()] if lines else []


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
    trial = next((group for group in document.get("tuning", []) if job_id in group["jobs"]), None)
    if trial is not None:
        why = "" if kind in ("started", "finished") else f": {text}"
        place = f"{trial['arm']} {trial['size']} tuning trial"
        return f"{place} {kind} ({trial['ended']} of {len(trial['jobs'])} jobs over){why}"
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
    of one of them emerged. level: whether both are shown to end alike, or to differ.
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
            _level(ceiling) if ceiling else "",
        )
    question, counts = document["question"], document["counts"]
    lines = []
    if question and rows:
        lines = [
            f"T50: tokens to half of the ceiling in {question['capability']}; seeds: emerged of finished.",
            f"ratio: of T50 to that of {question['reference']}; level: whether it ends where {question['reference']} "
            f"ends, within {question['margin']:g}.",
        ]
    missing = {state: n for state, n in counts.items() if state != "finished" and n}
    if missing:
        named = ", ".join(f"{n} {state}" for state, n in missing.items())
        lines.append(f"Of {sum(counts.values())} cells {counts.get('finished', 0)} are in the fit; left out: {named}.")
    return Group(table, *(Text(line, style="dim") for line in lines))


def _level(row: Document) -> str:
    if row["equivalent"]:
        return "yes"
    return "no" if row["p_holm"] is not None and row["p_holm"] < ALPHA else "undecided"


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
