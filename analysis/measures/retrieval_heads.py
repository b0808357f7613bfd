"""Retrieval heads: which heads look at the answer when a fact is asked (arXiv 2606.15378, retrieval score)."""

from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from analysis.measures.chunks import facts, pieces
from model.capture import attention_rows
from model.limits import softmax_heads
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.measure import Measurement


class RetrievalHeads(BaseModel):
    """retrieval/LlHh: attention of head h of layer l, both from 0, to the answer when the fact is asked; in [0, 1].

    The query is the position that predicts the answer's first token; the answer is all its tokens where last stated;
    the score is the mean over facts stated more than `beyond` tokens back, because nearer ones are found by position
    too. Full-attention heads only. rows: the whole matrix.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    documents: int = Field(default=32, gt=0)
    beyond: int = Field(default=32, ge=0)

    @property
    def name(self) -> str:
        return "retrieval"

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def capabilities(self, data: Data) -> tuple[str, ...]:
        return ()

    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        full = {
            layer: [head for part in parts if part.name == "full" for head in part.heads]
            for layer, parts in softmax_heads(model).items()
        }
        layers = [layer for layer, heads in full.items() if heads]
        asked = facts(data, self.documents)
        far = np.flatnonzero(asked.distance > self.beyond)
        if not layers or not far.size:
            return Measurement({})
        total: dict[int, Tensor] = {}
        for rows, piece in pieces(model, asked.tokens[:, :-1]):
            here = far[(asked.document[far] >= rows.start) & (asked.document[far] < rows.stop)]
            document = asked.document[here] - rows.start
            # Which of its document's facts each is: documents differ in how many they ask, so the last places stay 0.
            order = np.arange(len(here)) - np.searchsorted(document, document)
            queries = np.zeros((len(piece), int(order.max(initial=0)) + 1), dtype=np.int64)
            queries[document, order] = asked.answer[here] - 1
            attention = attention_rows(model, piece, torch.from_numpy(queries), layers)
            for layer, rows_BHQT in attention.items():
                rows_NHT = rows_BHQT[document, :, order][:, full[layer]]
                mass_NH = answer_mass(rows_NHT, asked.stated[here], asked.length[here])
                total[layer] = total.get(layer, 0) + mass_NH.sum(0).double().cpu()
        table = [
            {"layer": layer, "head": head, "score": score / len(far)}
            for layer, sums in total.items()
            for head, score in zip(full[layer], sums.tolist(), strict=True)
        ]
        return Measurement({f"retrieval/L{row['layer']}H{row['head']}": row["score"] for row in table}, table)


def answer_mass(attention_NHT: Tensor, stated: np.ndarray, length: np.ndarray) -> Tensor:
    """Attention on each answer's tokens, [N, H], from one query row each; stated, length: int64 [N] as in FactSet."""
    position = torch.arange(attention_NHT.shape[-1], device=attention_NHT.device)
    start, end = (torch.from_numpy(x).to(position.device)[:, None] for x in (stated, stated + length))
    answer_NT = (position >= start) & (position < end)
    return (attention_NHT * answer_NT[:, None]).sum(-1)
