"""What is tuned: each arm at each size on each data condition, by trials of its own or by the law over other sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from model import cost
from model.config import ModelConfig
from orchestrator import identity
from orchestrator.errors import InputError
from orchestrator.measure import Measure
from orchestrator.tuning.settings import Tuning

if TYPE_CHECKING:
    from orchestrator.study import Arm, Size, Study

RULE = 1  # raise by hand whenever the same trials would be asked for, pruned or read in another way
NO_CELLS_SEED = 2**31  # cells' seeds are below it: a trial shares its data with the other trials alone


@dataclass(frozen=True)
class TrialJob:
    """One trial at one rung: a whole training of `steps`. id: for the last rung that of the trial itself."""

    id: str
    group: str
    number: int
    after: tuple[str, ...]
    steps: int
    tokens: int


@dataclass(frozen=True)
class Group:
    """All cells that share one tuned rate.

    name: "arm@size", as its file is called. n: non-embedding parameters. search: identity of its trials but for their
    number, {} where a law gives the rate. over: the groups a law is fitted over, else (). rungs: steps of the trainings
    by which trials are compared, the last one their full length; () with a law. rate_document: stands for the rate in a
    cell's identity.
    """

    name: str
    arm: str
    size: str
    data: str
    n: int
    tokens_per_step: int
    tuning: Tuning
    measure_id: str
    search: dict[str, Any]
    rungs: tuple[int, ...]
    rate_document: dict[str, Any]
    over: tuple["Group", ...] = ()

    @cached_property
    def id(self) -> str:
        """Changes whenever the rate might."""
        return identity.digest({**self.search, "rate": self.rate_document, "n": self.n})

    @cached_property
    def search_id(self) -> str:
        """Of the trials, however many there are to be: more of them go on from those there are."""
        return identity.digest(self.search)

    def trial_id(self, number: int) -> str:
        return identity.digest({**self.search, "trial": number})

    def job_id(self, number: int, steps: int) -> str:
        trial = self.trial_id(number)
        return trial if steps == self.rungs[-1] else f"{trial}-{steps}"

    @cached_property
    def jobs(self) -> tuple[TrialJob, ...]:
        """Every trial at every rung. A rung waits for all trials of its round to have ended the one below, and a round
        for the one before: what is asked for and pruned depends on results alone, not on who was first."""
        return tuple(self._jobs())

    @property
    def last(self) -> tuple[str, ...]:
        """Ids of the jobs with which the tuning ends."""
        if self.over:
            return tuple(job_id for group in self.over for job_id in group.last)
        return tuple(self.job_id(number, self.rungs[-1]) for number in self.tuning.rounds()[-1])

    def _jobs(self) -> Iterator[TrialJob]:
        before: tuple[str, ...] = ()
        for numbers in self.tuning.rounds() if self.rungs else ():
            for steps in self.rungs:
                ids = tuple(self.job_id(number, steps) for number in numbers)
                for number, job_id in zip(numbers, ids, strict=True):
                    yield TrialJob(job_id, self.name, number, before, steps, steps * self.tokens_per_step)
                before = ids


Key = tuple[str, str, str]  # arm, size, data condition


def of_study(study: "Study") -> dict[Key, Group]:
    """The groups of a study by (arm, size, data condition); {} where nothing is tuned. Raises InputError."""
    found: dict[Key, Group] = {}
    if study.tuning is None:
        return found
    for data in study.data:
        for arm in study.arms:
            sizes = [size for size in study.sizes if study.is_tuned(arm.name, size.name)]
            tuned = [size for size in sizes if study.tuning.tunes(size.name)]
            for size in tuned:
                found[arm.name, size.name, data] = _with_trials(study, study.tuning, arm, size, data)
            over = tuple(found[arm.name, size.name, data] for size in tuned)
            by_law = [size for size in sizes if size not in tuned]
            if by_law and len({group.n for group in over}) < len(over):
                raise InputError(
                    f"tuning.sizes: two of {', '.join(group.size for group in over)} have the same number of "
                    f"parameters, which fixes no law LR(N); tune sizes that differ"
                )
            for size in by_law:
                found[arm.name, size.name, data] = _by_law(study, study.tuning, arm, size, data, over)
    return found


def measure_of(study: "Study") -> Measure:
    """The measure that gives what is minimised."""
    assert study.tuning is not None
    name = study.tuning.metric.split("/")[0]
    return next(measure for measure in study.measures if measure.name == name)


def _name(study: "Study", arm: str, size: str, data: str) -> str:
    return "@".join([arm, size, *([data] if len(study.data) > 1 else [])])


def _with_trials(study: "Study", tuning: Tuning, arm: "Arm", size: "Size", data: str) -> Group:
    source = study.data[data]
    model = study.model_of(arm, size, source)
    n = cost.parameters(model).non_embedding
    tokens_per_step = study.recipe.batch_size * source.context
    tokens = tuning.budget if isinstance(tuning.budget, int) else float(tuning.budget[:-1]) * n
    steps = round(tokens / tokens_per_step)
    if steps < 1:
        raise InputError(
            f"tuning.budget: {tuning.budget} is {tokens:.0f} tokens, below one step of {tokens_per_step}; raise it"
        )
    rungs = (*sorted({max(1, round(rung * steps)) for rung in tuning.rungs} - {steps}), steps)
    measure_id = identity.of_measure(measure_of(study))
    rule = {
        "rule": RULE,
        "measure": measure_id,
        "rungs": list(rungs),
        **tuning.model_dump(include={"low", "high", "together", "metric", "sampler", "seed"}),
    }
    whole = identity.document(model, source, study.recipe, steps, NO_CELLS_SEED + tuning.seed)
    return Group(
        name=_name(study, arm.name, size.name, data),
        arm=arm.name,
        size=size.name,
        data=data,
        n=n,
        tokens_per_step=tokens_per_step,
        tuning=tuning,
        measure_id=measure_id,
        search=identity.with_rate(whole, rule),
        rungs=rungs,
        rate_document={**rule, "trials": tuning.trials},
    )


def _by_law(study: "Study", tuning: Tuning, arm: "Arm", size: "Size", data: str, over: tuple[Group, ...]) -> Group:
    model: ModelConfig = study.model_of(arm, size, study.data[data])
    return Group(
        name=_name(study, arm.name, size.name, data),
        arm=arm.name,
        size=size.name,
        data=data,
        n=cost.parameters(model).non_embedding,
        tokens_per_step=over[0].tokens_per_step,
        tuning=tuning,
        measure_id=over[0].measure_id,
        search={},
        rungs=(),
        rate_document={"rule": RULE, "law_over": [group.id for group in over]},
        over=over,
    )
