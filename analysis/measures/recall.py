"""Recall by distance: whether a fact stated earlier in the document is known when asked, by how far back it stands."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor
from torch.nn import functional as F

from analysis.measures.chunks import facts, pieces
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.measure import Measurement


class RecallByDistance(BaseModel):
    """recall/accuracy/BUCKET and recall/loss/BUCKET for buckets of distance in tokens: "1-8", …, "beyond-128".

    edges: last distance of each bucket but the open one; put the windows of the study's arms here. An answer is right
    iff each of its tokens is the arg-max, the tokens before it given. Loss: nats a token of the answer. A bucket
    without answers has no metric.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    documents: int = Field(default=96, gt=0)
    edges: tuple[int, ...] = (8, 32, 128)

    @field_validator("edges")
    @classmethod
    def _ascend(cls, edges: tuple[int, ...]) -> tuple[int, ...]:
        if not edges or edges[0] < 1 or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"{edges} are no edges; give ascending distances in tokens, such as (8, 32, 128)")
        return edges

    @property
    def name(self) -> str:
        return "recall"

    @property
    def buckets(self) -> tuple[str, ...]:
        starts = (1, *(edge + 1 for edge in self.edges))
        return (*(f"{a}-{b}" for a, b in zip(starts, self.edges, strict=False)), f"beyond-{self.edges[-1]}")

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def capabilities(self, data: Data) -> tuple[str, ...]:
        starts = (1, *(edge + 1 for edge in self.edges))
        return tuple(
            f"recall/accuracy/{bucket}"
            for bucket, start in zip(self.buckets, starts, strict=True)
            if start < data.context - 1  # the first token states nothing, the last is not asked from
        )

    @torch.no_grad()
    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        asked = facts(data, self.documents)
        right, loss = np.empty(len(asked.answer), dtype=bool), np.empty(len(asked.answer))
        for rows, piece in pieces(model, asked.tokens):
            here = np.flatnonzero((asked.document >= rows.start) & (asked.document < rows.stop))
            hidden_BTD = model.hidden(model.embedding(piece[:, :-1]))
            right[here], loss[here] = score_answers(
                model.logits,
                hidden_BTD,
                piece[:, 1:],
                asked.document[here] - rows.start,
                asked.answer[here],
                asked.length[here],
            )
        bucket = np.searchsorted(self.edges, asked.distance)
        metrics, table = {}, []
        for index, name in enumerate(self.buckets):
            inside = bucket == index
            n = int(inside.sum())
            if n:
                metrics[f"recall/accuracy/{name}"] = float(right[inside].mean())
                metrics[f"recall/loss/{name}"] = float(loss[inside].mean())
            table.append({"bucket": name, "answers": n, "right": int(right[inside].sum())})
        return Measurement(metrics, table)


def score_answers(
    logits_of: Callable[[Tensor], Tensor],
    hidden_BTD: Tensor,
    targets_BT: Tensor,
    document: np.ndarray,
    answer: np.ndarray,
    length: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(all tokens are the arg-max, mean loss a token in nats) of each answer: arrays [answers].

    logits_of is the head, asked for the states that answers need only; hidden[b, t] predicts targets[b, t].
    document, answer, length: int64 [answers] as in FactSet, document a row of `hidden`: an answer's first token is
    targets[document, answer - 1].
    """
    owner = np.repeat(np.arange(len(answer)), length)
    place = answer[owner] - 1 + np.arange(len(owner)) - (np.cumsum(length) - length)[owner]
    targets = targets_BT[document[owner], place]
    logits = logits_of(hidden_BTD[document[owner], place]).float()
    wrong = (logits.argmax(-1) != targets).cpu().numpy()
    loss = F.cross_entropy(logits, targets, reduction="none").cpu().numpy()
    count = len(answer)
    return np.bincount(owner, wrong, count) == 0, np.bincount(owner, loss, count) / length
