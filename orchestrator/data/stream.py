"""What every data source offers. Content is a function of (seed, step, row) alone, at any data-parallel width."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class FactSet:
    """Held-out documents with facts stated and later asked, the same for every arm.

    tokens: int64 [documents, T+1]. Each answer is `length` tokens; all arrays below are int64 [answers].
    document: row of `tokens`. answer: position of the answer's first token when asked; a model predicts it from
    position answer-1. stated: position of the answer's first token where the fact was last stated.
    distance: answer - stated, in tokens. length: tokens of the answer.
    """

    tokens: np.ndarray
    document: np.ndarray
    answer: np.ndarray
    stated: np.ndarray
    distance: np.ndarray
    length: np.ndarray


class Data(Protocol):
    """Sequences to train on and held-out ones to measure on. Frozen and hashable: measures keep what they drew."""

    def __hash__(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def chance(self) -> float:
        """Accuracy of guessing a whole answer."""
        ...

    @property
    def fact_distances(self) -> tuple[int, int]:
        """No fact is asked nearer or farther than these, in tokens."""
        ...

    def identity(self) -> dict[str, Any]:
        """All that changes the tokens, as JSON types. File contents by digest, never by path."""
        ...

    def check(self) -> None:
        """Raises InputError where the data cannot be produced (a missing file)."""
        ...

    def batch(self, seed: int, step: int, rows: range) -> np.ndarray:
        """Rows of the training batch of a step: int64 [len(rows), T+1]; inputs [:, :-1], targets [:, 1:]."""
        ...

    def held_out(self, documents: int) -> np.ndarray:
        """Sequences like the training ones, never trained on, the same for every seed: int64 [documents, T+1]."""
        ...

    def facts(self, documents: int) -> FactSet:
        """Held-out documents with facts at known distances."""
        ...
