"""The recall language: filler text in which key-value facts recur, near in half the documents and far in the other.

Tokens are fillers, then keys, then values. Filler is an order-1 Markov chain: each state has `successors` successors,
drawn from a Zipf-1 unigram, with Zipf-1.2 probabilities. A fact is a key and its value, side by side on a grid of two
tokens that starts at 0 or 1. A fact comes back again and again (with one statement and one question a fact, small
models learn nothing), and each return can be answered from the one before.
"""

import functools
from itertools import accumulate
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.data.draws import Space, generator, log_uniform
from orchestrator.data.stream import FactSet
from orchestrator.errors import InputError

_BINS = 4096  # successor probabilities are multiples of 1/4096


class RecallLanguage(BaseModel):
    """Documents of context + 1 tokens: fillers, keys and values are the counts of each kind of token.

    Facts a document: log-uniform in `facts_per_document`. Short documents (half): gaps log-uniform in 4 to 32 tokens,
    first statement in the first 90%. Long documents (half): gaps log-uniform in g_min to context - 4 tokens, first
    statement in the first half. A fact whose place is taken goes to the next free one. g_min decides how much a window
    can answer. language: which Markov chain; the same for every seed of a study.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    context: int = Field(default=256, ge=32)
    g_min: int = Field(default=4, ge=2)
    facts_per_document: tuple[int, int] = (2, 16)
    fillers: int = Field(default=32, ge=2, le=1024)
    keys: int = Field(default=32, ge=1)
    values: int = Field(default=32, ge=2)
    successors: int = Field(default=16, ge=1)
    language: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _fits_together(self) -> "RecallLanguage":
        fewest, most = self.facts_per_document
        if not 1 <= fewest <= most <= self.keys:
            raise ValueError(
                f"facts_per_document: {self.facts_per_document} does not fit; "
                f"give (fewest, most), from 1 to the {self.keys} distinct keys"
            )
        if self.g_min >= self.context - 4:
            raise ValueError(
                f"g_min: {self.g_min} leaves no long gap in {self.context} tokens; give less than {self.context - 4}"
            )
        if self.successors > self.fillers:
            raise ValueError(f"successors: {self.successors} exceeds the fillers; give {self.fillers} or fewer")
        return self

    @property
    def vocab_size(self) -> int:
        return self.fillers + self.keys + self.values

    @property
    def chance(self) -> float:
        return 1 / self.values

    @property
    def fact_distances(self) -> tuple[int, int]:
        return 4, self.context - 4

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def check(self) -> None:
        """Nothing outside the fields is needed, and those are checked when given."""

    def batch(self, seed: int, step: int, rows: range) -> np.ndarray:
        """Rows of the training batch of a step: int64 [len(rows), T+1]."""
        return self._documents("training", seed, step, rows)

    def held_out(self, documents: int) -> np.ndarray:
        """Documents like the training ones, from random numbers no seed trains on: int64 [documents, T+1]."""
        return self._documents("held out", 0, 0, range(documents))

    def facts(self, documents: int) -> FactSet:
        """Documents of filler with 12 facts (fewer below 192 tokens of context), each stated once and asked once.

        Distances are even, from 4 to context - 4: three facts in four at a uniform distance, the fourth at a
        log-uniform one, without which the nearest bucket would hold 3% of the answers.
        """
        per_document = min(12, self.context // 16, self.keys)
        rows, answers = [], []
        for row in range(documents):
            draw = generator("facts", 0, row=row)
            document = self._filler(draw.random((1, self.context + 2)))[0]
            offset = int(draw.integers(2))
            keys = self.fillers + draw.permutation(self.keys)[:per_document]
            values = self.fillers + self.keys + draw.integers(self.values, size=per_document)
            pairs = _place_pairs(draw, per_document, (self.context + 1 - offset) // 2, self.context)
            for key, value, (stated, asked) in zip(keys, values, pairs, strict=True):
                for slot in (stated, asked):
                    document[offset + 2 * slot : offset + 2 * slot + 2] = key, value
            rows.append(document)
            answers += sorted((row, offset + 2 * asked + 1, offset + 2 * stated + 1) for stated, asked in pairs)
        document_, answer, stated_ = np.array(answers, dtype=np.int64).reshape(-1, 3).T
        return FactSet(
            tokens=np.array(rows, dtype=np.int64).reshape(-1, self.context + 1),
            document=document_,
            answer=answer,
            stated=stated_,
            distance=answer - stated_,
            length=np.ones_like(answer),
        )

    def needle(
        self, row: int, length: int, depth: float, others: int, choices: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(filler with one fact at a depth, 0 first and 1 last, and `others` elsewhere, up to its key again: int64
        [length], the value: int64 [1]). choices: of how many values it is one, all by default. The same for every arm;
        raises InputError where the facts do not fit."""
        draw = generator("needle", 0, row=row)
        offset = (length - 1) % 2
        slots = (length - 1 - offset) // 2  # the last token is the key that is asked
        if others + 1 > min(slots, self.keys):
            raise InputError(f"others: {others} facts do not fit {length} tokens of {self.keys} keys; give fewer")
        document = self._filler(draw.random((1, length + 1)))[0]
        keys = self.fillers + draw.permutation(self.keys)[: others + 1]
        values = self.fillers + self.keys + draw.integers(self.values, size=others + 1)
        asked = round(depth * (slots - 1))
        free = np.delete(np.arange(slots), asked)
        values[0] = self.fillers + self.keys + draw.integers(choices or self.values)
        for key, value, slot in zip(keys, values, [asked, *draw.choice(free, others, replace=False)], strict=True):
            document[offset + 2 * slot : offset + 2 * slot + 2] = key, value
        document[-1] = keys[0]
        return document, values[:1]

    def _documents(self, space: Space, seed: int, step: int, rows: range) -> np.ndarray:
        """int64 [len(rows), T+1]. Row by row from one block of uniforms, so that a row does not depend on its batch."""
        length, most, slots = self.context + 1, self.facts_per_document[1], self.context // 2 + 1
        sizes = (length + 1, 3, self.keys, most, most, slots + most)
        uniforms = np.empty((len(rows), sum(sizes)))
        for u, row in zip(uniforms, rows, strict=True):
            u[:] = generator(space, seed, step, row).random(u.size)
        fill, shape, key, value, first, gap = np.split(uniforms, np.cumsum(sizes)[:-1], axis=1)

        documents = self._filler(fill)
        offsets = (shape[:, 0] < 0.5).astype(np.int64)
        short = shape[:, 1:2] < 0.5
        counts = log_uniform(shape[:, 2], self.facts_per_document[0], most + 1).astype(np.int64)
        keys = self.fillers + np.argsort(key, axis=1)[:, :most]
        values = self.fillers + self.keys + (value * self.values).astype(np.int64)
        starts = (first * np.where(short, 0.9, 0.5) * ((length - offsets) // 2)[:, None]).astype(np.int64)
        low, high = np.where(short, 4, self.g_min), np.where(short, min(32, self.context - 4), self.context - 4)
        gaps = (log_uniform(gap, low, high) / 2).astype(np.int64)

        for row in range(len(rows)):
            offset = int(offsets[row])
            facts = _recur(starts[row, : counts[row]].tolist(), gaps[row].tolist(), (length - offset) // 2)
            taken = np.flatnonzero(facts >= 0)
            documents[row, offset + 2 * taken] = keys[row, facts[taken]]
            documents[row, offset + 2 * taken + 1] = values[row, facts[taken]]
        return documents

    def _filler(self, uniforms: np.ndarray) -> np.ndarray:
        """Filler tokens, int64 [B, N], from uniforms [B, N+1]; the first of a row draws the state before it."""
        table = _markov(self.language, self.fillers, self.successors)
        before = (uniforms[:, 0] * self.fillers).astype(np.int64).tolist()
        bins = (uniforms[:, 1:] * _BINS).astype(np.int64).tolist()

        def follow(state: int, chosen: int) -> int:
            return table[state][chosen]

        rows = [[*accumulate(row, follow, initial=state)][1:] for state, row in zip(before, bins, strict=True)]
        return np.array(rows, dtype=np.int64).reshape(-1, uniforms.shape[1] - 1)


@functools.cache
def _markov(language: int, fillers: int, successors: int) -> list[list[int]]:
    """The chain as inverse cumulative distribution: the next state for each of 4096 equal parts of probability."""
    draw = generator("language", language)
    ranks = np.arange(1, fillers + 1)
    # u^(1/weight), the largest first: drawing without replacement with probability proportional to weight = 1/rank.
    chosen = np.argsort(-(draw.random((fillers, fillers)) ** ranks), axis=1)[:, :successors]
    weights = np.arange(1, successors + 1) ** -1.2
    edges = np.round(np.cumsum(weights) / weights.sum() * _BINS).astype(np.int64)
    return np.repeat(chosen, np.diff(edges, prepend=0), axis=1).tolist()


def _recur(starts: list[int], gaps: list[int], slots: int) -> np.ndarray:
    """Which fact stands in each slot, -1 for none: int64 [slots]. starts and gaps in slots; a gap is used once."""
    owner = [-1] * slots
    gap = iter(gaps)
    for fact, slot in enumerate(starts):
        while slot < slots:
            while owner[slot] >= 0:
                slot += 1
                if slot == slots:
                    break
            else:
                owner[slot] = fact
                slot += next(gap)
    return np.array(owner)


def _place_pairs(draw: np.random.Generator, pairs: int, slots: int, context: int) -> list[tuple[int, int]]:
    """(stated, asked) slots of facts that share none, at distances as `facts` says."""
    free = np.ones(slots, dtype=bool)

    def distance(near: bool) -> int:
        u = draw.random()
        return int(log_uniform(u, 4, context - 2) if near else 4 + u * (context - 6)) // 2

    placed = []
    # The longest first: they have the fewest places, and losing them would bend the distribution.
    wanted = sorted((distance(i % 4 == 3) for i in range(pairs)), reverse=True)
    while wanted:
        apart = wanted[0]
        places = np.flatnonzero(free[:-apart] & free[apart:])
        if places.size:
            stated = int(draw.choice(places))
            free[[stated, stated + apart]] = False
            placed.append((stated, stated + apart))
            wanted.pop(0)
        else:
            wanted[0] = distance(False)
    return placed
