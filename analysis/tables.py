"""A fit as flat tables, a row a comparison or arm: what the report keeps as CSV."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from analysis.arm_emergence import Emergence
from analysis.comparisons import SameCeiling, SpeedRatio
from analysis.law_document import Fitted
from analysis.laws.intervals import Interval
from analysis.size_emergence import SizeRow

Cells = dict[str, Any]


def emergence_table(rows: Sequence[Emergence]) -> pl.DataFrame:
    """An arm a row. Tokens are counts, levels and shares in [0, 1]."""
    return _table(
        [
            {"data": r.condition.data, "size": r.condition.size, "arm": r.arm, "budget_tokens": r.budget_tokens}
            | {"seeds": len(r.seeds), "emerged": r.emerged, "share_emerged": r.share_emerged}
            | _ends("share", r.share_ci)
            | {"t50_tokens": r.t50_tokens}
            | _ends("t50", r.t50_ci)
            | {"crossing_tokens": r.crossing_tokens, "floor": r.floor, "ceiling": r.ceiling}
            | _ends("ceiling", r.ceiling_ci)
            | {"t50_flops": r.t50_flops}
            | _ends("t50_flops", r.t50_flops_ci)
            | {"t50_loss": r.t50_loss}
            | _ends("t50_loss", r.t50_loss_ci)
            | {"slope": r.slope, "dispersion": r.dispersion, "flags": "; ".join(r.flags)}
            for r in rows
        ]
    )


def ratio_table(rows: Sequence[SpeedRatio]) -> pl.DataFrame:
    """A comparison a row, the intervals unadjusted."""
    return _table(
        [
            {"data": r.condition.data, "size": r.condition.size, "arm": r.arm, "reference": r.reference}
            | {"method": r.method, "ratio": r.ratio}
            | _ends("ratio", r.ci)
            | {"p": r.p, "p_holm": r.p_holm, "emerged_only": r.emerged_only}
            | _ends("emerged_only", r.emerged_only_ci)
            | {"crossing": r.crossing}
            | _ends("crossing", r.crossing_ci)
            | {"in_flops": r.in_flops}
            | _ends("in_flops", r.in_flops_ci)
            | {"loss_difference": r.loss_difference}
            | _ends("loss_difference", r.loss_ci)
            | {"at_least": r.at_least, "at_most": r.at_most, "flags": "; ".join(r.flags)}
            for r in rows
        ]
    )


def ceiling_table(rows: Sequence[SameCeiling]) -> pl.DataFrame:
    """A comparison a row, differences in the capability's unit."""
    return _table(
        [
            {"data": r.condition.data, "size": r.condition.size, "arm": r.arm, "reference": r.reference}
            | {"difference": r.difference}
            | _ends("difference", r.ci)
            | {"p": r.p, "p_holm": r.p_holm, "margin": r.margin, "p_equivalent": r.p_equivalent}
            | {"equivalent": r.equivalent, "flags": "; ".join(r.flags)}
            for r in rows
        ]
    )


def size_table(rows: Sequence[SizeRow]) -> pl.DataFrame:
    """An arm a row that has a law of size."""
    return _table(
        [
            {"data": r.data, "arm": r.arm, "sizes": r.sizes, "seeds": len(r.points)}
            | {"a": r.law.level - r.law.exponent * r.law.centre, "b": r.law.exponent}
            | _ends("b", r.law.exponent_ci)
            | {"predicted_n": r.ahead, "predicted_t50_tokens": r.t50_tokens}
            | _ends("predicted_t50", r.ci)
            | {"flags": "; ".join(r.flags)}
            for r in rows
            if r.law
        ]
    )


def scaling_table(laws: Sequence[Fitted]) -> pl.DataFrame:
    """A law a row, every digit kept."""
    names = ("E", "A", "B", "alpha", "beta")
    return _table(
        [
            {key: law.document[key] for key in ("data", "arm", "law", "loss", "n", "objective", *names)}
            | {key: end for name in names for key, end in _ends(name, law.document["ci"].get(name)).items()}
            | {"flags": "; ".join(law.document["flags"])}
            for law in laws
        ]
    )


def _ends(name: str, ci: Interval | None) -> Cells:
    low, high = (end if np.isfinite(end) else None for end in ci) if ci else (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def _table(rows: list[Cells]) -> pl.DataFrame:
    return pl.DataFrame(rows, infer_schema_length=None)
