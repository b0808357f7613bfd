"""T50 over model size: a law an arm, over seeds of all sizes, and what it says of a model ten times the largest."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from analysis.arm_emergence import Emergence
from analysis.laws.sizes import size_law

AHEAD = 10.0  # times the largest size: how far the prediction looks


def size_laws(rows: Sequence[Emergence], params: Mapping[str, float]) -> list[dict[str, Any]]:
    """As JSON, an arm and data condition a row. params: N by size. None for arms with a T50 at fewer than two sizes."""
    found = []
    for arm, data in dict.fromkeys((row.arm, row.condition.data) for row in rows):
        mine = [row for row in rows if (row.arm, row.condition.data) == (arm, data)]
        points = [
            (params[row.condition.size], seed.curve.t50_tokens)
            for row in mine
            for seed in row.seeds
            if seed.curve.t50_tokens is not None
        ]
        if len({n for n, _ in points}) < 2:
            continue
        law = size_law(*zip(*points, strict=True))
        ahead = AHEAD * law.largest
        t50, ci = law.predict(ahead)
        censored = sum(row.censored for row in mine)
        flags = [f"{censored} seeds never emerged and are not in this law: it is optimistic"] if censored else []
        if law.sizes == 2:
            flags.append("two sizes: that T50 is a power of size is not tested by a third")
        if ci is None:
            flags.append("two T50s: no interval")
        found.append(
            {"arm": arm, "data": data, "exponent": law.exponent, "exponent_ci": law.exponent_ci, "seeds": law.seeds,
             "sizes": law.sizes, "law": asdict(law), "prediction": {"n": ahead, "t50_tokens": t50, "ci": ci},
             "flags": flags}
        )  # fmt: skip
    return found
