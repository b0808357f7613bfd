"""Optuna's part in tuning: which rates are tried, kept in a journal on disk. The one file that knows Optuna."""

import hashlib
import math
import statistics
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import optuna
from optuna.distributions import FloatDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from orchestrator.errors import InputError
from orchestrator.record import cut_torn_line
from orchestrator.tuning.settings import Tuning

PARAMETER = "learning_rate"


@dataclass(frozen=True)
class Tried:
    """A trial as it stands. losses: by steps completed. state: "open" while it has not been told how it ended."""

    number: int
    rate: float
    state: Literal["open", "complete", "pruned", "failed"]
    losses: Mapping[int, float]


STATES: dict[TrialState, Literal["complete", "pruned", "failed"]] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def open_journal(path: Path) -> JournalStorage:
    """The journal of all searches of a study, repaired after a torn write. The caller holds the study's lock.

    What follows a torn line would make the whole journal unreadable, so the line is cut before anything is appended. A
    killed driver leaves Optuna's lock behind as well, which would be waited for.
    Raises InputError where it is damaged otherwise.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        cut_torn_line(path)
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"tuning: {path} is damaged ({type(error).__name__}: {error}); move it away: the next run writes it anew "
            f"from the trials' records"
        ) from error


class Search:
    """The trials of one arm at one size. Every call may be repeated after a kill at any moment and adds nothing twice.

    Rates depend on seed, number and the results of earlier rounds alone: lost, the same ones are asked for again.
    """

    def __init__(self, storage: JournalStorage, name: str, tuning: Tuning) -> None:
        self._tuning = tuning
        self._study = optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True)

    def trials(self) -> list[Tried]:
        """By number, as far as they have been asked for."""
        return [_tried(trial) for trial in self._frozen() if PARAMETER in trial.params]

    def ask(self, numbers: range) -> None:
        """Makes these trials, unless they are there; all before them have ended."""
        if len(self.trials()) >= numbers.stop:
            return
        rates = self._spread(len(numbers)) if numbers.start == 0 else self._proposed(numbers)
        for number, rate in zip(numbers, rates, strict=True):
            there = self._frozen()
            if number >= len(there):
                self._study.enqueue_trial({PARAMETER: rate})
            if number >= len(there) or there[number].state == TrialState.WAITING:
                trial = self._study.ask()
            elif PARAMETER not in there[number].params:  # killed just before the last line here
                trial = Trial(self._study, there[number]._trial_id)
            else:
                continue
            assert trial.number == number
            trial.suggest_float(PARAMETER, self._tuning.low, self._tuning.high, log=True)

    def report(self, steps: int, losses: Mapping[int, float]) -> None:
        """The losses of trials, by number, at a rung."""
        for number, loss in losses.items():
            there = self._frozen()[number]
            if not there.state.is_finished() and steps not in there.intermediate_values:
                Trial(self._study, there._trial_id).report(loss, steps)

    def better_half(self, steps: int, up_to: int) -> set[int]:
        """Of all trials below number `up_to` that reached a rung, those that are not in the worse half of them."""
        losses = {trial.number: trial.losses[steps] for trial in self.trials()[:up_to] if steps in trial.losses}
        ranked = sorted(losses, key=lambda number: (losses[number], number))
        return set(ranked[: math.ceil(len(ranked) / 2)])

    def end(self, state: Literal["complete", "pruned", "failed"], numbers: Collection[int]) -> None:
        """Tells how trials ended; those already told stay as they are. A diverged trial has failed: it has no loss."""
        word = next(word for word, ours in STATES.items() if ours == state)
        for number in numbers:
            there = self._frozen()[number]
            if not there.state.is_finished():
                value = there.intermediate_values[max(there.intermediate_values)] if state == "complete" else None
                self._study.tell(number, value, state=word)

    def _frozen(self) -> Sequence[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _spread(self, count: int) -> list[float]:
        """The first round: even in the logarithm."""
        low, high = self._tuning.low, self._tuning.high
        return [low * (high / low) ** ((i + 0.5) / count) for i in range(count)]

    def _proposed(self, numbers: range) -> list[float]:
        """The sampler's choice for a round, from all trials before it.

        Optuna's samplers leave out failed trials, its Gaussian process pruned ones too, and would go on trying where
        these were. So they are asked over a copy in memory, in which every trial has a loss.
        """
        space = FloatDistribution(self._tuning.low, self._tuning.high, log=True)
        copy = optuna.create_study(direction="minimize")
        before = self.trials()[: numbers.start]
        for trial, loss in zip(before, supposed_losses(before), strict=True):
            told = optuna.trial.create_trial(
                params={PARAMETER: trial.rate}, distributions={PARAMETER: space}, value=loss
            )
            copy.add_trial(told)
        rates = []
        for number in numbers:
            copy.sampler = self._sampler(number)
            rates.append(copy.ask({PARAMETER: space}).params[PARAMETER])
        return rates

    def _sampler(self, number: int) -> BaseSampler:
        """One a trial: a sampler's own random numbers would begin again with every start of the driver."""
        words = f"{self._tuning.seed} {number}".encode()
        seed = int.from_bytes(hashlib.sha256(words).digest()[:4], "big")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if self._tuning.sampler == "tpe":
                return TPESampler(seed=seed, n_startup_trials=2, constant_liar=True, multivariate=False)
            return GPSampler(
                seed=seed, n_startup_trials=2, deterministic_objective=False, warn_independent_sampling=False
            )


def supposed_losses(trials: Sequence[Tried]) -> list[float]:
    """A loss for each trial, as if none had been pruned or had failed; all have ended.

    A pruned one is taken to have gone on like the median of those that did, a failed one to be as far behind the worst
    as that is behind the best. Where all have failed, lower rates are taken for better.
    """
    last = max((max(trial.losses) for trial in trials if trial.state == "complete"), default=0)
    whole = [trial for trial in trials if trial.state == "complete"]
    supposed: dict[int, float] = {}
    for trial in trials:
        if trial.state == "pruned":
            rung = max(trial.losses)
            gains = [other.losses[rung] - other.losses[last] for other in whole if rung in other.losses]
            supposed[trial.number] = trial.losses[rung] - (statistics.median(gains) if gains else 0.0)
        elif trial.state == "complete":
            supposed[trial.number] = trial.losses[last]
    if not supposed:
        return [math.log(trial.rate) for trial in trials]
    worst, best = max(supposed.values()), min(supposed.values())
    return [supposed.get(trial.number, worst + (worst - best)) for trial in trials]


def _tried(trial: FrozenTrial) -> Tried:
    return Tried(
        trial.number, trial.params[PARAMETER], STATES.get(trial.state, "open"), dict(trial.intermediate_values)
    )
