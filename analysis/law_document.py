"""A scaling law as it is told: values with errors and intervals, what is not identified, what to distrust."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.laws.bootstrap import Kind, Replicates, bootstrap, spread
from analysis.laws.scaling import (
    FORMS,
    ILL_CONDITIONED,
    TERM_OF,
    UNIDENTIFIED,
    Form,
    Interval,
    Law,
    Points,
    fit_law,
    one_ray,
)

Document = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How a law is fitted. limits: of alpha and beta. runs: [points], for a bootstrap of whole runs."""

    form: Form = FORMS["chinchilla"]
    limits: Mapping[str, Interval] = field(default_factory=dict)
    kind: Kind = "residual"
    replicates: int = 400
    runs: Sequence[object] | None = None
    predict: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Fitted:
    """A law, its refits (None where there are none), the points, and the document. names: of the points."""

    law: Law
    replicates: Replicates | None
    points: Points
    document: Document
    names: tuple[str, ...] = ()


def fitted(points: Points, settings: Settings, held_out: Points | None = None) -> Fitted:
    """Fits and tells. Raises ValueError where the points cannot be fitted."""
    law = fit_law(points, settings.form, settings.limits)
    refits = bootstrap(points, law, settings.kind, settings.replicates, settings.runs) if settings.replicates else None
    found: Document = {"law": law.form.name} | {name: None for name in ("E", "A", "B", "alpha", "beta")}
    found |= {"objective": law.objective} | law.values
    found |= {"se": spread(refits) if refits and len(refits.theta) > 1 else {}, "ci": _intervals(law, refits)}
    found |= {
        "n": len(points), "excluded": {}, "condition_number": law.condition, "flags": _flags(law, refits, points),
        "holdout": None if held_out is None else judged(law, held_out), "fit": judged(law, points),
        "at_bound": list(law.at_bound), "identified": None, "compute_optimal": _optimal(law, refits),
        "bootstrap": None if refits is None else {
            "kind": refits.kind, "replicates": settings.replicates, "failed": refits.failed,
            "at_bound": refits.at_bound,
        },
        "predictions": [_prediction(law, refits, n, d) for n, d in settings.predict],
    }  # fmt: skip
    ray = one_ray(points) if len(law.form.powers) == 2 else None
    if ray is not None or law.condition > UNIDENTIFIED:
        _withdraw(found, points, settings, ray)
    found["sensitivity"] = [] if ray is not None else _sensitivity(points, law, settings, found)
    return Fitted(law, refits, points, found)


def judged(law: Law, points: Points) -> dict[str, float | None]:
    """R2 (None where all losses are one), RMSE and MAE of predicted losses, in the unit of the loss."""
    error = law.predict(points.n, points.d) - points.loss
    about = float(((points.loss - points.loss.mean()) ** 2).sum())
    return {
        "r2": None if about == 0 else float(1 - (error**2).sum() / about),
        "rmse": float(np.sqrt((error**2).mean())),
        "mae": float(np.abs(error).mean()),
    }


def _intervals(law: Law, refits: Replicates | None) -> dict[str, Any]:
    if refits is None:
        return {}
    found: dict[str, Any] = {}
    for name, values in refits.values().items():
        if name == "E" and not law.form.constant:
            continue
        ci = refits.interval(values)
        found[name] = None if ci is None else [0.0 if name in law.vanished else ci[0], ci[1]]
    return found


def _flags(law: Law, refits: Replicates | None, points: Points) -> list[str]:
    flags = [f"{power} at bound {_nearest(law, power):g}" for power in law.at_bound]
    for name in law.vanished:
        flags.append(f"{name} at 0: " + ("no constant is seen, its interval is one-sided" if name == "E" else
                                         "the losses do not ask for this term"))  # fmt: skip
    if not law.agreed:
        flags.append("two sets of starts disagree: the optimum is not certain")
    if ILL_CONDITIONED < law.condition <= UNIDENTIFIED:
        flags.append(f"ill-conditioned ({law.condition:.2g}): parameters trade against each other")
    spare = len(points) - law.form.parameters
    if spare < 1:
        flags.append("as many parameters as points: no interval")
    elif refits and refits.interval(refits.theta[:, 0]) is None:
        flags.append("too few sound refits: no interval")
    for power in law.form.powers:
        if len(np.unique(points.variable(power))) == 2:
            flags.append(f"{'n' if power == 'alpha' else 'd'}: two values only, {power} is not tested by a third")
    if refits and refits.failed > 0.05:
        flags.append(f"{100 * refits.failed:.0f}% of refits failed: too few distinct points drawn")
    if refits and refits.at_bound > 0.05:
        flags.append(f"{100 * refits.at_bound:.0f}% of refits at a bound: intervals lean on it")
    return flags


def _nearest(law: Law, power: str) -> float:
    low, high = law.limits[power]
    return low if abs(law.values[power] - low) < abs(law.values[power] - high) else high


def _withdraw(found: Document, points: Points, settings: Settings, ray: float | None) -> None:
    """Takes back A, B and exponents that the design cannot tell apart; gives what it does identify."""
    why = f"D = {ray:.4g} N at every point" if ray is not None else f"condition number {found['condition_number']:.1g}"
    found["flags"] = [flag for flag in found["flags"] if not flag.startswith(("A at", "B at", "alpha at", "beta at"))]
    found["flags"].append(f"A and B are not identified ({why}): no A, B, alpha, beta")
    found |= dict.fromkeys(("A", "B", "alpha", "beta", "compute_optimal"))
    for kept in (found["se"], found["ci"]):
        for name in ("A", "B", "ln_A", "ln_B", "alpha", "beta"):
            kept.pop(name, None)
    if ray is None:
        return
    single = Form("size" if settings.form.constant else "size-no-constant", data=False,
                  constant=settings.form.constant)  # fmt: skip
    along = fitted(Points(points.loss, points.n), replace(settings, form=single, predict=(), runs=settings.runs))
    values = along.document
    found |= {"E": values["E"], "se": {k: v for k, v in values["se"].items() if k == "E"}}
    found["ci"] = {name: values["ci"].get(name) for name in ("E",) if name in values["ci"]}
    found["identified"] = {
        "E": values["E"], "exponent": values["alpha"], "exponent_ci": values["ci"].get("alpha"),
        "ratio": ray, "A_plus_B_ratio_power": values["A"], "A_plus_B_ratio_power_ci": values["ci"].get("A"),
    }  # fmt: skip


def _optimal(law: Law, refits: Replicates | None) -> Document | None:
    """a, b of N* ~ C^a and D* ~ C^b under C = 6 N D: a = beta / (alpha + beta)."""
    if len(law.form.powers) < 2 or law.vanished not in ((), ("E",)):
        return None
    alpha, beta = law.values["alpha"], law.values["beta"]
    ci = None
    if refits is not None:
        values = refits.values()
        ci = refits.interval(values["beta"] / (values["alpha"] + values["beta"]))
    a = beta / (alpha + beta)
    return {"a": a, "a_ci": ci and list(ci), "b": 1 - a, "b_ci": ci and [1 - ci[1], 1 - ci[0]]}


def _prediction(law: Law, refits: Replicates | None, n: float, d: float) -> Document:
    ci = refits.interval(refits.predict(n, d)) if refits is not None else None
    return {"n": n, "d": d, "loss": float(law.predict(n, d)), "ci": ci and list(ci)}


def _sensitivity(points: Points, law: Law, settings: Settings, found: Document) -> list[Document]:
    """The exponents without the smallest budget, and without the smallest size: where warm-up and undecayed runs sit.

    An exponent that leaves its own interval is flagged.
    """
    rows = []
    for power in law.form.powers:
        values = points.variable(power)
        rest: NDArray[np.bool_] = values > values.min()
        name = "n" if power == "alpha" else "d"
        try:
            without = fit_law(points.take(rest), law.form, settings.limits)
        except ValueError:
            continue
        rows.append({"without": f"{name} = {values.min():g}", "n": int(rest.sum())} | without.values)
        for exponent in law.form.powers:
            ci = found["ci"].get(exponent)
            if ci and TERM_OF[exponent] not in without.vanished and not ci[0] <= without.values[exponent] <= ci[1]:
                found["flags"].append(
                    f"{exponent} is {without.values[exponent]:.3g} without {name} = {values.min():g}, outside its "
                    f"interval: are the smallest runs of the same kind?"
                )
    return rows
