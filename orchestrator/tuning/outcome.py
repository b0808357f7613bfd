"""From trials to the rate of a group, with its interval and what is to be warned of."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.tuning import optimum
from orchestrator.tuning.groups import Group

if TYPE_CHECKING:
    from orchestrator.tuning.search import Tried


def of_trials(group: Group, trials: Sequence["Tried"]) -> dict[str, Any] | None:
    """What the trials of a group say; None where every one of them has failed.

    interval, at_edge, method: as `optimum.Optimum` has them.
    """
    complete = [trial for trial in trials if trial.state == "complete"]
    if not complete:
        return None
    tuning = group.tuning
    losses = [trial.losses[group.rungs[-1]] for trial in complete]
    best = optimum.find([trial.rate for trial in complete], losses, tuning.low, tuning.high)
    warnings = []
    if best.at_edge:
        remedy = f"lower tuning.low {tuning.low:g}" if best.at_edge == "low" else f"raise tuning.high {tuning.high:g}"
        warnings.append(
            f"{group.arm} {group.size}: the best learning rate, {best.rate:.3g}, lies at the {best.at_edge} edge of "
            f"the range tried; {remedy}"
        )
    return {
        **_about(group),
        "rate": best.rate,
        "interval": [best.low, best.high],
        "method": best.method,
        "at_edge": best.at_edge,
        "warnings": warnings,
        "trials": [
            {
                "number": trial.number,
                "rate": trial.rate,
                "state": trial.state,
                "losses": {str(steps * group.tokens_per_step): loss for steps, loss in sorted(trial.losses.items())},
            }
            for trial in trials
        ],
        "law": None,
    }


def of_law(group: Group, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the law over the groups of `group.over` says. found: their findings by name."""
    below = [(each, found[each.name]) for each in group.over]
    law = optimum.fit([(each.n, told["rate"], *told["interval"]) for each, told in below])
    rate, tuning = law.rate(group.n), group.tuning
    warnings = [
        f"{group.arm} {group.size}: its law of learning rates rests on {each.size}, whose best lies at the edge of the "
        f"range tried"
        for each, told in below
        if told["at_edge"]
    ]
    edge = "low" if rate < tuning.low else "high" if rate > tuning.high else None
    if edge:
        warnings.append(
            f"{group.arm} {group.size}: the law gives a learning rate of {rate:.3g}, beyond the range tried "
            f"({tuning.low:g} to {tuning.high:g})"
        )
    return {
        **_about(group),
        "rate": rate,
        "interval": list(law.interval(group.n)),
        "method": "law",
        "at_edge": edge,
        "warnings": warnings,
        "trials": [],
        "law": law.as_json(),
    }


def _about(group: Group) -> dict[str, Any]:
    return {key: getattr(group, key) for key in ("name", "id", "arm", "size", "data", "n")}
