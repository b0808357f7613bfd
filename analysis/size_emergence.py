"""T50 over model size: log10 T50 = a + b log10 N, an arm a law over its seeds of all sizes, and what it says of a model
larger than any trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.arm_emergence import Emergence
from analysis.laws.intervals import Interval
from analysis.laws.sizes import SizeLaw, size_law

AHEAD = 10.0  # times the largest size: how far the prediction looks
FEWEST_SIZES = 3  # two are joined by a line whatever T50 does


@dataclass(frozen=True)
class SizeRow:
    """One arm under one data condition. points: (N, T50 in tokens) of each seed that has one. unseen: seeds without.

    law: None with fewer than FEWEST_SIZES sizes that have a T50; the flags then say so. ahead: the N predicted, and
    t50_tokens, ci: T50 of one new seed there, with its 95% prediction interval.
    """

    arm: str
    data: str
    points: tuple[tuple[float, float], ...]
    unseen: int
    law: SizeLaw | None
    ahead: float | None
    t50_tokens: float | None
    ci: Interval | None
    flags: tuple[str, ...]

    @property
    def sizes(self) -> int:
        return len({n for n, _ in self.points})


def size_rows(rows: Sequence[Emergence], params: Mapping[str, float], ahead: float | None = None) -> list[SizeRow]:
    """A row an arm and data condition. params: N by size. ahead: N to predict, AHEAD times the largest by default."""
    found = []
    for arm, data in dict.fromkeys((row.arm, row.condition.data) for row in rows):
        mine = [row for row in rows if (row.arm, row.condition.data) == (arm, data)]
        seeds = [(params[row.condition.size], seed.curve.t50_tokens) for row in mine for seed in row.seeds]
        points = tuple((float(n), t50) for n, t50 in seeds if t50 is not None)
        found.append(size_row(arm, data, points, len(seeds) - len(points), ahead))
    return found


def size_row(
    arm: str, data: str, points: tuple[tuple[float, float], ...], unseen: int, ahead: float | None = None
) -> SizeRow:
    sizes = len({n for n, _ in points})
    if sizes < FEWEST_SIZES:
        why = f"T50 is known at {sizes} size{'s' * (sizes != 1)}: a law of size needs {FEWEST_SIZES}"
        return SizeRow(arm, data, points, unseen, None, None, None, None, (why,))
    law = size_law([n for n, _ in points], [t50 for _, t50 in points])
    at = ahead or AHEAD * law.largest
    t50, ci = law.predict(at)
    flags = []
    if unseen:
        flags.append(
            f"{unseen} of {unseen + len(points)} seeds have no T50 and are not in the law, which is optimistic"
        )
    if law.far(at):
        flags.append(f"N {at:.3g} is {at / law.largest:.0f} times the largest size fitted")
    return SizeRow(arm, data, points, unseen, law, at, t50, ci, tuple(flags))


def size_json(row: SizeRow) -> dict[str, object]:
    """Nulls where there is no law."""
    law = row.law
    return {
        "arm": row.arm, "data": row.data, "sizes": row.sizes, "seeds": len(row.points), "without_t50": row.unseen,
        "a": law and law.level - law.exponent * law.centre, "b": law and law.exponent,
        "b_ci": law and law.exponent_ci, "residual": law and law.residual,
        "points": [{"n": n, "t50_tokens": t50} for n, t50 in row.points],
        "prediction": law and {"n": row.ahead, "t50_tokens": row.t50_tokens, "ci": row.ci},
        "flags": list(row.flags),
    }  # fmt: skip
