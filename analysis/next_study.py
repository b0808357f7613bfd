"""The next study: which further seeds, and which budgets, would narrow which interval most.

From what is finished: the spread between seeds, and the share that never emerges, are taken as they were seen; studies
with more seeds are drawn from them and put through the same comparison. Further budgets and sizes are drawn from each
arm's scaling law with its residuals. What is promised is the median width over the studies drawn; it leans on the
spread seen so far, which few seeds know poorly.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.arm_emergence import Emergence
from analysis.findings import StudyFit
from analysis.laws.bootstrap import Replicates
from analysis.laws.huber import minimise
from analysis.laws.intervals import welch
from analysis.laws.scaling import Law, Points, stated

Floats = NDArray[np.float64]

MORE_SEEDS = (1, 2, 3, 5, 8)
DRAWS = 600
FEWEST_SEEDS = 2


def proposals(fit: StudyFit, seed: int = 0) -> dict[str, Any]:
    """{"proposals": rows from the most to the least gain a run, "notes"}. now, then: width of the 95% interval, of a
    speed ratio as its upper over its lower end less 1, of an exponent as their difference."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    at = {(row.arm, row.condition): row for row in fit.emergence}
    for ratio in fit.speed_ratios:
        pair = at[ratio.arm, ratio.condition], at[ratio.reference, ratio.condition]
        name = f"{ratio.arm} / {ratio.reference}, {ratio.condition.data} {ratio.condition.size}"
        logs = [_logs(row) for row in pair]
        if min(map(len, logs)) < FEWEST_SEEDS:
            notes.append(f"{name}: fewer than two T50s in an arm, its spread is unknown: train two seeds of each first")
            continue
        rows += _more_seeds(name, pair, logs, rng)
    for law in fit.scaling:
        rows += _more_budgets(f"{law.document['arm']}, {law.document['data']}", law.law, law.points, rng)
    rows.sort(key=lambda row: -row["gain_a_run"])
    if not rows:
        notes.append("nothing to plan from: finish two seeds an arm, or three budgets, first")
    return {"study": fit.study, "proposals": rows, "notes": notes}


def _logs(row: Emergence) -> list[float]:
    return [float(np.log10(t)) for t in (seed.curve.t50_tokens for seed in row.seeds) if t is not None]


def _more_seeds(
    name: str, pair: Sequence[Emergence], logs: Sequence[Sequence[float]], rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Interval of a speed ratio with further seeds in both arms."""
    spreads = [float(np.std(values, ddof=1)) for values in logs]
    if max(spreads) == 0:
        return []
    emerges = [len(values) / max(1, len(row.seeds)) for values, row in zip(logs, pair, strict=True)]
    difference = float(np.mean(logs[0]) - np.mean(logs[1]))
    counts = [len(row.seeds) for row in pair]
    now = _width(counts, spreads, emerges, difference, rng)
    found = []
    for more in MORE_SEEDS:
        then = _width([count + more for count in counts], spreads, emerges, difference, rng)
        runs = 2 * more
        found.append(
            {"what": f"{more} seeds an arm: ratio {name}", "kind": "seeds", "more": more, "runs": runs, "now": now[0],
             "then": then[0], "power_now": now[1], "power_then": then[1],
             "gain_a_run": 100 * (1 - then[0] / now[0]) / runs}
        )  # fmt: skip
    return found


def _width(
    counts: Sequence[int], spreads: Sequence[float], emerges: Sequence[float], difference: float,
    rng: np.random.Generator,
) -> tuple[float, float]:  # fmt: skip
    """(median of upper end over lower end less 1, share of studies whose interval leaves out 1)."""
    widths, shown = [], 0
    for _ in range(DRAWS):
        arms: list[list[float]] = []
        for count, spread, share, middle in zip(counts, spreads, emerges, (difference, 0.0), strict=True):
            known = max(FEWEST_SEEDS, int(rng.binomial(count, share)))
            arms.append(list(rng.normal(middle, spread, known)))
        ci = welch(arms[0], arms[1]).ci
        if ci is not None:
            widths.append(10 ** min(ci[1] - ci[0], 300.0) - 1)
            shown += not ci[0] <= 0 <= ci[1]
    return float(np.median(widths)), shown / DRAWS


def _more_budgets(name: str, law: Law, points: Points, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Interval of each exponent with one more budget, or one more size, at each value of the other variable."""
    free = max(1, len(points) - law.form.parameters)
    residual = (np.log(points.loss) - np.log(law.predict(points.n, points.d))) * np.sqrt(len(points) / free)
    now = _exponent_widths(law, residual, points, rng)
    found = []
    for power, which, times in [(p, w, t) for p in law.form.powers for w in ("n", "d") for t in (0.5, 2.0, 4.0)]:
        grown, before = _extended(law, points, which, times), now[power]
        if grown is None or before is None:
            continue
        then = _exponent_widths(law, residual, grown, rng)[power]
        runs = len(grown) - len(points)
        if then is None:
            continue
        word = {"n": "size", "d": "budget"}[which]
        end = "largest" if times > 1 else "smallest"
        found.append(
            {"what": f"a {word} {times:g}x the {end}: {power} of {name}", "kind": word, "more": 1, "runs": runs,
             "now": before, "then": then, "gain_a_run": 100 * (1 - then / before) / runs}
        )  # fmt: skip
    return found


def _extended(law: Law, points: Points, which: str, times: float) -> Points | None:
    """The points with one more value of a variable, all losses on the law."""
    if (which == "n" and not law.form.size) or (which == "d" and not law.form.data):
        return None
    columns = {"n": points.n, "d": points.d}
    mine = columns[which]
    assert mine is not None
    edge = mine.max() if times > 1 else mine.min()
    joined: dict[str, Floats | None] = {}
    for key, values in columns.items():
        if values is None:
            joined[key] = None
            continue
        fresh = values[mine == edge] * (times if key == which else 1.0)
        joined[key] = np.concatenate([values, fresh])
    return Points(law.predict(joined["n"], joined["d"]), joined["n"], joined["d"])


def _exponent_widths(law: Law, residual: Floats, points: Points, rng: np.random.Generator) -> dict[str, float | None]:
    """Widths of the exponents' intervals in studies of these N and D, whose errors are drawn from `residual`."""
    problem, centre = stated(points, law.form, law.limits)
    count = len(law.form.powers)
    start = law.theta.copy()
    for i, power in enumerate(law.form.powers):
        start[i] -= start[count + i] * (centre[power] - law.centre[power])
    y = np.log(law.predict(points.n, points.d)) + rng.choice(residual, (DRAWS, len(points)))
    theta, _ = minimise(problem, np.repeat(start[None], DRAWS, axis=0), y, np.ones((1, len(points))))
    refits = Replicates(law.form, "residual", theta, centre, 0.0, 0.0, len(points))
    found: dict[str, float | None] = {}
    for power in law.form.powers:
        ci = refits.interval(refits.values()[power])
        found[power] = None if ci is None else ci[1] - ci[0]
    return found
