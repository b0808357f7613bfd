"""A needle in a haystack, by its depth and the length of the text: where in a long text a fact can be found."""

from itertools import product
from typing import Any, Protocol, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from analysis.measures.chunks import pieces
from analysis.measures.recall import score_answers
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.errors import InputError
from orchestrator.measure import Measurement


class Haystack(Protocol):
    """What data offers whose facts can be put where one wants them."""

    def needle(
        self, row: int, length: int, depth: float, others: int, choices: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(text up to the answer int64 [length], the answer's tokens int64), the answer one of `choices`."""


class Needles(BaseModel):
    """needle/accuracy/LENGTH, over all depths; rows: one a depth and length.

    lengths: tokens of the text up to the answer; None for a quarter, a half and all of the context but the answer.
    depths: of the fact, 0 at the start, 1 right before it is asked. others: facts besides, which could be mistaken for
    it. documents: of each depth and length. An answer is right iff each of its tokens is the arg-max.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    others: int = Field(default=3, ge=0)
    documents: int = Field(default=16, gt=0)

    @field_validator("depths")
    @classmethod
    def _are_depths(cls, depths: tuple[float, ...]) -> tuple[float, ...]:
        if not depths or min(depths) < 0 or max(depths) > 1:
            raise ValueError(f"{depths} are no depths; give numbers from 0, the start, to 1, the end")
        return depths

    @property
    def name(self) -> str:
        return "needle"

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def capabilities(self, data: Data) -> tuple[str, ...]:
        return tuple(f"needle/accuracy/{length}" for length in self._lengths(data)) if hasattr(data, "needle") else ()

    @torch.no_grad()
    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        if not hasattr(data, "needle"):
            raise InputError(f"Needles: {type(data).__name__} puts no facts where one wants them; use another measure")
        rows = [
            {"length": length, "depth": depth, "accuracy": self._accuracy(model, cast(Haystack, data), length, depth)}
            for length, depth in product(self._lengths(data), self.depths)
        ]
        return Measurement(
            {
                f"needle/accuracy/{length}": float(np.mean([r["accuracy"] for r in rows if r["length"] == length]))
                for length in self._lengths(data)
            },
            rows,
        )

    def _lengths(self, data: Data) -> tuple[int, ...]:
        if self.lengths:
            return self.lengths
        answer = len(cast(Haystack, data).needle(0, data.context // 2, 0.0, 0)[1])
        return data.context // 4, data.context // 2, data.context - answer

    def _accuracy(self, model: LanguageModel, data: Haystack, length: int, depth: float) -> float:
        made = [data.needle(row, length, depth, self.others) for row in range(self.documents)]
        tokens = np.array([np.concatenate(pair) for pair in made])
        right = 0
        for rows, piece in pieces(model, tokens):
            first = np.full(len(rows), length)
            scored, _ = score_answers(
                model.logits,
                model.hidden(model.embedding(piece[:, :-1])),
                piece[:, 1:],
                np.arange(len(rows)),
                first,
                np.full(len(rows), tokens.shape[1] - length),
            )
            right += int(scored.sum())
        return right / self.documents
