"""What a study says about its learning rates: how they are tuned, or which they are."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

Rate = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
FEWEST_FOR_A_LAW = 2


class Tuning(BaseModel):
    """Tunes `recipe.learning_rate` for each arm at each size, so that no arm is compared at a rate that suits another.

    With Muon the rate of AdamW's part moves along: the recipe gives the ratio of the two.

    low, high: the range searched, uniformly in the logarithm. trials: of each (arm, size, data condition), in all,
    after any number of restarts. budget: training tokens of a trial, absolute or in multiples of N ("20N").
    together: trials asked for at once, without the results of each other; the same on any number of slots.
    rungs: shares of a trial's budget at which the worse half is pruned. Each is a training of its own with a decay of
    its own, as a loss taken before the decay favours low rates. Short trainings favour high ones: prune where the range
    is far too wide to try in full, at half of the budget rather than less.
    sizes: names of the sizes tuned, None for all. The others take the law LR(N) of their arm over the tuned ones.
    metric: what is minimised, of a measure of the study, at the end of a trial.
    sampler: Optuna's Gaussian process or tree of Parzen estimators. seed: of the sampler and of the trials' data.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    low: Rate
    high: Rate
    budget: StrictInt | str
    trials: int = Field(default=12, ge=3, le=1000)
    together: int = Field(default=4, ge=1)
    rungs: tuple[Fraction, ...] = ()
    sizes: tuple[str, ...] | None = None
    metric: str = "validation/loss"
    sampler: Literal["gp", "tpe"] = "gp"
    seed: int = Field(default=0, ge=0, lt=2**31)

    @field_validator("budget")
    @classmethod
    def _is_a_budget(cls, budget: int | str) -> int | str:
        if not (re.fullmatch(r"\d+(\.\d+)?N", budget) if isinstance(budget, str) else budget > 0):
            raise ValueError(f'{budget!r} is no budget; give tokens (204_800) or a multiple of N ("20N")')
        return budget

    @model_validator(mode="after")
    def _fits_together(self) -> "Tuning":
        if self.low >= self.high:
            raise ValueError(
                f"low: {self.low:g} is not below high {self.high:g}; give the lower end of the range first"
            )
        if self.trials > self.together and self.trials % self.together:
            fewer = self.trials - self.trials % self.together
            choice = f"{fewer} or {fewer + self.together}"
            raise ValueError(f"trials: {self.trials} is no multiple of together {self.together}; give {choice}")
        if list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(f"rungs: {self.rungs} do not ascend; give each fraction once, the smallest first")
        return self

    def tunes(self, size: str) -> bool:
        return self.sizes is None or size in self.sizes

    def rounds(self) -> list[range]:
        """Numbers of the trials asked for together."""
        return [range(i, min(i + self.together, self.trials)) for i in range(0, self.trials, self.together)]


def by_hand(rates: Mapping[str, float], arm: str, size: str) -> float | None:
    """The rate a study gives for "arm size", else for "arm"."""
    return rates.get(f"{arm} {size}", rates.get(arm))


def check(
    tuning: Tuning | None,
    rates: Mapping[str, float],
    arms: Collection[str],
    sizes: Collection[str],
    measures: Collection[str],
) -> None:
    """Raises ValueError, one line, where names are unknown or a law would rest on too few sizes."""
    known = {*arms, *(f"{arm} {size}" for arm in arms for size in sizes)}
    for name, rate in rates.items():
        if name not in known:
            raise ValueError(
                f"learning_rates: {name!r} is neither an arm nor an arm and a size; arms: {', '.join(arms)}; "
                f"sizes: {', '.join(sizes)}"
            )
        if not rate > 0:
            raise ValueError(f"learning_rates: {rate} of {name!r} is no rate; give a number above 0")
    if tuning is None:
        return
    for size in tuning.sizes or ():
        if size not in sizes:
            raise ValueError(f"tuning.sizes: {size!r} is no size; sizes: {', '.join(sizes)}")
    needed = tuning.metric.split("/")[0]
    if needed not in measures:
        raise ValueError(
            f"tuning.metric: {tuning.metric!r} is given by none of the study's measures; add "
            f"{'ValidationLoss()' if needed == 'validation' else f'the measure {needed!r}'} to measures"
        )
    for arm in arms:
        open_sizes = [size for size in sizes if by_hand(rates, arm, size) is None]
        tuned = [size for size in open_sizes if tuning.tunes(size)]
        if len(tuned) < len(open_sizes) and len(tuned) < FEWEST_FOR_A_LAW:
            raise ValueError(
                f"tuning.sizes: arm {arm!r} is tuned at {len(tuned)} size{'s' * (len(tuned) != 1)}, a law LR(N) for "
                f"the others needs {FEWEST_FOR_A_LAW}; name more sizes, or give learning_rates by hand"
            )
