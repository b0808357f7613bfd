"""Tables a person reads: they fit the terminal and say what the document says."""

from typing import Any

import pytest
from rich.console import Console, RenderableType

from experiments import show


def lines(table: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def cell(arm: str, seed: int, state: str, done: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "id": f"{arm}{seed}", "arm": arm, "size": "tiny", "data": "recall", "budget_tokens": 1_843_200,
        "seed": seed, "state": state, "attempts": 1, "cause": None, "tokens_done": done, "tokens_per_second": None,
    } | more  # fmt: skip


def document(cells: list[dict[str, Any]]) -> dict[str, Any]:
    states = [row["state"] for row in cells]
    return {
        "study": "window_laziness", "cells": cells, "counts": {state: states.count(state) for state in set(states)},
        "makespan_s": 500.0, "busy_core_s": 900.0, "lower_bound_s": 450.0, "overhead_s_per_job": 0.1,
        "tokens_per_second": 46_000.0, "seconds_left": 1234.0,
    }  # fmt: skip


def sixty(arms: int) -> list[dict[str, Any]]:
    states = ["finished"] * 20 + ["running"] * 2 + ["pending"] * 36 + ["failed", "diverged"]
    causes = {"failed": "RuntimeError: " + "a long cause " * 20, "diverged": "train/loss is not finite at step 3"}
    return [
        cell(f"swa-{i % arms}-nope", i // arms, state, 900_000, cause=causes.get(state), seconds_left=40.0)
        for i, state in enumerate(states)
    ]


@pytest.mark.parametrize("arms", [1, 6, 30, 60])
def test_sixty_cells_fit_a_small_terminal(arms: int) -> None:
    shown = lines(show.status(document(sixty(arms)), 80, 24))
    assert len(shown) <= 23  # the last line is the cursor's
    assert max(map(len, shown)) <= 80
    text = "\n".join(shown)
    assert "20 finished" in text and "about 20 min 34 s left" in text
    assert "RuntimeError" in text and "not finite" in text


def test_210_cells_are_read_in_a_small_terminal() -> None:
    """Arms and sizes have a line each, the six budgets no room: 7 x 5 x 6 cells in 80 x 24."""
    cells = [
        cell(f"swa-{arm}-nope", seed=0, state="running" if arm == 3 else "pending", done=budget // 2)
        | {"size": size, "budget_tokens": budget, "cause": "OSError: " + "long " * 40}
        for arm in range(7)
        for size in ("S1", "S2", "S3", "S4", "S5")
        for budget in range(10**9, 7 * 10**9, 10**9)
    ]
    shown = lines(show.status(document(cells), 80, 24))
    assert len(shown) <= 24 and max(map(len, shown)) <= 80
    for arm in range(7):
        (line,) = [line for line in shown if line.startswith(f"swa-{arm}-nope ")]
        assert line.split()[1] == "30" and "50%" in line
    assert [line.split()[:2] for line in shown if line.startswith("S")] == [[f"S{i}", "42"] for i in range(1, 6)]


def test_arms_that_run_come_first_where_not_all_fit() -> None:
    cells = [cell(f"arm-{i}", 0, "running" if i == 59 else "pending") for i in range(60)]
    shown = lines(show.status(document(cells), 80, 24))
    assert shown[4].startswith("arm-59")
    assert any("more" in line for line in shown)


def test_a_few_cells_have_a_line_each() -> None:
    cells = [cell("full", 0, "running", 921_600, tokens_per_second=23_456.0, seconds_left=61.0)]
    cells += [cell("full", 1, "pending", attempts=0), cell("swa-8", 0, "blocked", cause="it needs job 1")]
    shown = lines(show.status(document(cells)))
    (running,) = (line for line in shown if line.startswith("full seed 0"))
    assert all(word in running for word in ("running", "50%", "23.5k", "1 min 01 s"))
    assert any("1 x it needs job 1" in line for line in shown)


def test_a_condition_that_varies_is_named() -> None:
    cells = [cell("full", 0, "pending", data=data) for data in ("g-min-4", "g-min-48")]
    text = "\n".join(lines(show.status(document(cells))))
    assert "full g-min-4 seed 0" in text and "tiny" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0"), (999, "999"), (1_843_200, "1.84M"), (2.5e15, "2.5P"), (0.02, "0.02")]
)
def test_counts(value: float | None, text: str) -> None:
    assert show.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0 s"), (59.4, "59 s"), (500, "8 min 20 s"), (3900, "1 h 05 min"), (1e6, "11 d 13 h")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert show.duration(seconds) == text


ASKED = {
    "question": {"capability": "recall/accuracy/beyond-128", "reference": "full", "margin": 0.05},
    "counts": {"finished": 3, "pending": 7},
}


def test_findings_keep_conditions_apart() -> None:
    at = {"size": "tiny", "budget_tokens": 1_843_200}
    found: dict[str, Any] = {
        "t50_tokens": 6e5, "t50_ci": [5e5, 7e5], "ceiling": None, "seeds": 5, "censored": 1
    }  # fmt: skip
    emergence = [{"arm": "swa-128-nope", "data": data, **at, **found} for data in ("g-min-4", "g-min-48")]
    ratios = [
        {"arm": "swa-128-nope", "reference": "full", "ratio": ratio, "ci": [0.5, 2.0], "p": 0.25, "data": data, **at}
        for data, ratio in (("g-min-4", 1.1), ("g-min-48", 1.7))
    ]
    shown = lines(show.findings({"emergence": emergence, "speed_ratios": ratios, "same_ceiling": [], **ASKED}))
    near, far = (next(line for line in shown if f" {data} " in line) for data in ("g-min-4", "g-min-48"))
    assert "1.10" in near and "1.70" in far
    assert all(word in near for word in ("600k", "500k-700k", "4/5", "0.50-2.00"))
    assert max(map(len, shown)) <= 80


def test_findings_do_not_take_not_shown_for_different() -> None:
    at = {"data": "recall", "size": "tiny", "budget_tokens": 1_843_200}
    row = {"t50_tokens": None, "t50_ci": None, "ceiling": 0.9, "seeds": 3, "censored": 3} | at
    ratio = {"ratio": None, "ci": [1.71, None], "at_least": 2.46, "at_most": None} | at
    level = {"equivalent": False, "p_holm": 0.3} | at
    tables = (("emergence", row), ("speed_ratios", ratio), ("same_ceiling", level))
    shown = lines(show.findings({name: [{"arm": "swa-128"} | fields] for name, fields in tables} | ASKED))
    line = next(line for line in shown if line.startswith("swa-128"))
    assert all(words in line for words in ("> 2.46", "> 1.71", "undecided")) and len(line) <= 80
    assert "Of 10 cells 3 are in the fit; left out: 7 pending." in shown
    different = {"same_ceiling": [{"arm": "swa-128", **level, "p_holm": 0.01}]}
    shown = lines(show.findings({name: [{"arm": "swa-128"} | fields] for name, fields in tables} | ASKED | different))
    assert next(line for line in shown if line.startswith("swa-128")).endswith(" no")


def test_a_run_tells_where_it_is() -> None:
    told = show.event("retried", "swa-80", "the worker died", document([cell("swa-8", 0, "pending")]))
    assert told == "swa-8 seed 0 retried (0/1, about 20 min 34 s left): the worker died"
    assert show.event("stopping", None, "SIGINT: checkpointing 2 jobs", document([])).startswith("SIGINT")


def test_a_plan_says_how_far_layers_are_from_full_attention() -> None:
    arms = [cell("full", 0, "pending", layer_residual=0.0), cell("gdn", 0, "pending", layer_residual=-0.0012)]
    totals = {"tokens": 0, "flops": 0, "disk_bytes": 0, "device_hours": None, "price": None}
    planned = {"study": "arms", "jobs": [], "totals": totals, "missing": 0, "lost": [], "separate": None}
    rows = [{**row, "params": 1000} for row in arms]
    assert lines(show.plan({**planned, "cells": rows}))[-1].strip() == (
        "parameters of a layer against full attention: gdn -0.12%"
    )
    assert "full attention" not in "".join(lines(show.plan({**planned, "cells": rows[:1]})))
