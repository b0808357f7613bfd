"""A fit as flat tables, a row a comparison or arm: what the report keeps as CSV."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from analysis.arm_emergence import Emergence
from analysis.comparisons import SameCeiling, SpeedRatio
from analysis.laws.intervals import Interval

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
            | {"slope": r.slope, "flags": "; ".join(r.flags)}
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


def _ends(name: str, ci: Interval | None) -> Cells:
    low, high = (end if np.isfinite(end) else None for end in ci) if ci else (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def _table(rows: list[Cells]) -> pl.DataFrame:
    return pl.DataFrame(rows, infer_schema_length=None)
