"""Loss on held-out documents."""

import math
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from analysis.measures.chunks import held_out, pieces
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.data.text import TextCorpus
from orchestrator.measure import Measurement


class ValidationLoss(BaseModel):
    """validation/loss: mean cross-entropy of every token of held-out documents, in nats.

    On text also validation/bits_per_byte, which compares across tokenisers. rows: the mean loss by position, in
    stretches that double: what a longer context adds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    documents: int = Field(default=96, gt=0)

    @property
    def name(self) -> str:
        return "validation"

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def capabilities(self, data: Data) -> tuple[str, ...]:
        return ()

    @torch.no_grad()
    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        tokens = held_out(data, self.documents)
        summed = np.zeros(tokens.shape[1] - 1)
        for rows, piece in pieces(model, tokens):
            losses_BT = model.token_losses(piece[:, :-1], piece[:, 1:])
            summed += losses_BT[: len(rows)].double().sum(0).cpu().numpy()
        total = float(summed.sum())
        metrics = {"validation/loss": total / tokens[:, 1:].size}
        if isinstance(data, TextCorpus):
            metrics["validation/bits_per_byte"] = total / math.log(2) / data.bytes_of(tokens[:, 1:])
        return Measurement(metrics, by_position(summed / len(tokens)))


def by_position(losses: np.ndarray) -> list[dict[str, Any]]:
    """Mean loss of the tokens predicted from 1, 2–3, 4–7, … tokens; losses: of each position, the first from one."""
    edges = [2**i for i in range(len(losses).bit_length())]
    return [
        {"from": start, "to": min(2 * start - 1, len(losses)), "loss": float(losses[start - 1 : 2 * start - 1].mean())}
        for start in edges
    ]
