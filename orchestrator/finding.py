"""What a study claims, written before it runs: a claim, the figure that decides it, and where that figure must lie.

A finding is data. It changes no training, so no cell's identity holds it; `analysis.claims` reads the figures.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

PLAIN = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _as_group(arms: Any) -> Any:
    return (arms,) if isinstance(arms, str) else arms


Arms = Annotated[tuple[str, ...], BeforeValidator(_as_group), Field(min_length=1)]
Number = Annotated[float, Field(strict=True)]


class SpeedRatio(BaseModel):
    """T50 of the question's capability in `arm` over that in `against`: a ratio of tokens, from geometric means.

    Several arms are a group: each counts once, however many seeds it has. Seeds that never emerged are censored.
    """

    model_config = PLAIN
    kind: Literal["speed ratio"] = "speed ratio"
    arm: Arms
    against: Arms


class EndLevel(BaseModel):
    """Ceiling of the question's capability in `arm` less that in `against`, over the seeds that emerged."""

    model_config = PLAIN
    kind: Literal["end level"] = "end level"
    arm: Arms
    against: Arms


class Difference(BaseModel):
    """Final value of a metric in `arm` less that in `against`, in the metric's unit, mean over all finished seeds."""

    model_config = PLAIN
    kind: Literal["difference"] = "difference"
    metric: str
    arm: Arms
    against: Arms


class Within(BaseModel):
    """Final value of one metric less that of another in the same model, mean over seeds: what a constraint costs.

    Several arms: each seed's mean over them.
    """

    model_config = PLAIN
    kind: Literal["within"] = "within"
    metric: str
    against_metric: str
    arm: Arms


class Trend(BaseModel):
    """By what factor T50 of the question's capability grows where a number that the arms carry doubles.

    labels: the number of each arm, such as its window: {"swa-8": 8, "swa-32": 32, "swa-128": 128}.
    """

    model_config = PLAIN
    kind: Literal["trend"] = "trend"
    labels: dict[str, Annotated[float, Field(gt=0)]]

    @model_validator(mode="after")
    def _varies(self) -> "Trend":
        if len(set(self.labels.values())) < 2:
            raise ValueError(f"labels: {self.labels} do not vary; give arms of two numbers at least")
        return self


class MetricRatio(BaseModel):
    """Final value of a metric in `arm` over that in `against`: the geometric mean over pairs alike in size and seed.

    budget: the smallest or largest budget alone, or None for all, each pair then the mean over its budgets: those of
    one size and seed share a trunk and so an error.
    """

    model_config = PLAIN
    kind: Literal["metric ratio"] = "metric ratio"
    metric: str
    arm: Arms
    against: Arms
    budget: Literal["smallest", "largest"] | None = None


class LawDifference(BaseModel):
    """An exponent of the scaling law of `arm` less that of `against`; power: alpha is of N, beta of D."""

    model_config = PLAIN
    kind: Literal["law difference"] = "law difference"
    power: Literal["alpha", "beta"]
    arm: str
    against: str


Statistic = Annotated[
    SpeedRatio | EndLevel | Difference | Within | Trend | MetricRatio | LawDifference, Field(discriminator="kind")
]
RATIOS = (SpeedRatio, Trend, MetricRatio)
OVER_SIZES = (MetricRatio, LawDifference)


class Finding(BaseModel):
    """A claim and its rule: the statistic lies above `above`, below `below`, or between the two.

    Shown where its whole 95% interval does, not shown where the whole interval lies outside, else undecided.
    data, size: the condition it is about; without them it is judged under each. paper: what the study it is after
    reports.

        Finding(
            claim="A window of 128 emerges later than one of 8",
            statistic=SpeedRatio(arm="swa-128", against="swa-8"),
            above=1,
        )
    """

    model_config = PLAIN
    claim: Annotated[str, Field(min_length=1)]
    statistic: Statistic
    above: Number | None = None
    below: Number | None = None
    data: str | None = None
    size: str | None = None
    paper: str | None = None

    @model_validator(mode="after")
    def _has_a_rule(self) -> "Finding":
        if self.above is None and self.below is None:
            raise ValueError(f"{self.claim!r} has no rule; give above, below or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(f"above: {self.above:g} is not under below {self.below:g}; nothing lies between them")
        if isinstance(self.statistic, RATIOS) and min(x for x in (self.above, self.below) if x is not None) <= 0:
            raise ValueError(f"{self.claim!r}: a ratio is always above 0; give a rule above 0, such as above=1")
        if self.size is not None and isinstance(self.statistic, OVER_SIZES):
            raise ValueError(f"size: {self.size!r}, but a {self.statistic.kind} is over all sizes; leave size out")
        return self

    @property
    def rule(self) -> str:
        """The range claimed, as words: "above 1", "between −0.05 and 0.05"."""
        low, high = (None if x is None else f"{x:g}".replace("-", "−") for x in (self.above, self.below))
        if low and high:
            return f"between {low} and {high}"
        return f"above {low}" if low else f"below {high}"


def check(
    findings: Collection[Finding],
    arms: Collection[str],
    sizes: Collection[str],
    data: Mapping[str, Any],
    measures: Collection[Any],
    capability: str | None,
) -> None:
    """Raises ValueError, one line, for a finding that this study can never judge."""
    capabilities = {name for measure in measures for source in data.values() for name in measure.capabilities(source)}
    names = {"train", *(measure.name for measure in measures)}
    for number, finding in enumerate(findings):
        asked, place = finding.statistic, f"findings.{number}"
        for field, value, known in (("size", finding.size, sizes), ("data", finding.data, data)):
            if value is not None and value not in known:
                raise ValueError(f"{place}.{field}: {value!r} is none of the study's; choose from {', '.join(known)}")
        for field, group in arms_of(asked).items():
            for arm in group:
                if arm not in arms:
                    raise ValueError(f"{place}.{field}: {arm!r} is no arm; arms: {', '.join(arms)}")
        if shared := set.intersection(*map(set, pair)) if len(pair := list(arms_of(asked).values())) == 2 else set():
            raise ValueError(
                f"{place}: {', '.join(sorted(shared))} stands on both sides; compare an arm with others than itself"
            )
        if isinstance(asked, SpeedRatio | EndLevel | Trend) and capability is None:
            raise ValueError(f"{place}: a {asked.kind} is of the question's capability; give the study a question")
        for field in ("metric", "against_metric"):
            metric = getattr(asked, field, None)
            if metric is None:
                continue
            if metric.split("/")[0] not in names:
                raise ValueError(
                    f"{place}.{field}: {metric!r} is of no measure of the study, which has {', '.join(sorted(names))}; "
                    f"add the measure that gives it"
                )
            if "/accuracy/" in metric and metric not in capabilities:
                given = [name for name in sorted(capabilities) if name.split("/")[0] == metric.split("/")[0]]
                raise ValueError(
                    f"{place}.{field}: {metric!r} is none of what the measures give; choose from "
                    f"{', '.join(given) or 'other metrics'}"
                )
        if (
            isinstance(asked, Difference)
            and asked.metric in capabilities
            and None not in (finding.above, finding.below)
        ):
            # All seeds of a few may happen to emerge: their small spread says nothing of those that would not.
            raise ValueError(
                f"{place}: that {asked.metric!r} is alike over all seeds cannot be shown where some may never emerge; "
                f"claim it of the seeds that did, with EndLevel"
            )


def words(asked: Any) -> str:
    """A statistic read aloud: "T50 of swa-128 over that of swa-8"."""
    arm, against = (", ".join(_as_group(getattr(asked, side, ()))) for side in ("arm", "against"))
    if isinstance(asked, SpeedRatio):
        return f"T50 of {arm} over that of {against}"
    if isinstance(asked, EndLevel):
        return f"Ceiling of {arm} less that of {against}"
    if isinstance(asked, Difference):
        return f"{asked.metric} of {arm} less that of {against}"
    if isinstance(asked, Within):
        return f"{asked.metric} less {asked.against_metric} in {arm}"
    if isinstance(asked, Trend):
        return f"Growth of T50 where the label doubles ({', '.join(f'{k}: {v:g}' for k, v in asked.labels.items())})"
    if isinstance(asked, MetricRatio):
        where = f", {asked.budget} budget" if asked.budget else ""
        return f"{asked.metric} of {arm} over that of {against}{where}"
    return f"{asked.power} of {arm} less that of {against}"


def arms_of(asked: Any) -> dict[str, tuple[str, ...]]:
    """The arms of a statistic, by field."""
    if isinstance(asked, Trend):
        return {"labels": tuple(asked.labels)}
    fields = {field: getattr(asked, field) for field in ("arm", "against") if hasattr(asked, field)}
    return {field: _as_group(value) for field, value in fields.items()}
