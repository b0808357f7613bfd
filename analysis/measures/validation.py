"""Loss on held-out documents."""

import math
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from analysis.measures.chunks import held_out, pieces
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.data.text import TextCorpus
from orchestrator.measure import Measurement


class ValidationLoss(BaseModel):
    """validation/loss: mean cross-entropy of every token of held-out documents, in nats.

    On text also validation/bits_per_byte, which compares across tokenisers.
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
        total = 0.0
        for rows, piece in pieces(model, tokens):
            losses_BT = model.token_losses(piece[:, :-1], piece[:, 1:])
            total += losses_BT[: len(rows)].double().sum().item()
        metrics = {"validation/loss": total / tokens[:, 1:].size}
        if isinstance(data, TextCorpus):
            metrics["validation/bits_per_byte"] = total / math.log(2) / data.bytes_of(tokens[:, 1:])
        return Measurement(metrics)
