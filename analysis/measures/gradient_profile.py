"""Gradient influence: how much the input at each distance moves what the model says at the end (arXiv 2606.15378)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from analysis.measures.chunks import held_out
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.measure import Measurement


class GradientProfile(BaseModel):
    """rows: influence by distance from the last position, mean over documents; influence/near and influence/far: its
    shares nearer and farther than half the context.

    The target is the sum over the vocabulary of the mean logits of the last `last` positions; influence is the L2 norm
    of its gradient at an input embedding.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    documents: int = Field(default=8, gt=0)
    last: int = Field(default=20, gt=0)

    @property
    def name(self) -> str:
        return "influence"

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def capabilities(self, data: Data) -> tuple[str, ...]:
        return ()

    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        tokens = held_out(data, self.documents)[:, :-1]
        device = next(model.parameters()).device
        # One document at a time: a profile of long texts then takes the memory of one.
        profiles = [
            influence(lambda x: model.logits(model.hidden(x)), model.embedding(row[None]).detach(), self.last)[0]
            for row in torch.from_numpy(tokens).to(device)
        ]
        by_distance = torch.stack(profiles).double().mean(0).flip(0).cpu().numpy()
        half = len(by_distance) // 2
        whole = by_distance.sum() or 1.0
        return Measurement(
            {
                "influence/near": float(by_distance[:half].sum() / whole),
                "influence/far": float(by_distance[half:].sum() / whole),
            },
            [{"distance": d, "influence": float(v)} for d, v in enumerate(by_distance) if np.isfinite(v)],
        )


def influence(logits_of: Callable[[Tensor], Tensor], embedded_BTD: Tensor, last: int) -> Tensor:
    """L2 norm of the target's gradient at each input, [B, T]. logits_of: input embeddings to logits [B, T, V]."""
    with torch.enable_grad():
        inputs = embedded_BTD.detach().requires_grad_()
        target = logits_of(inputs)[:, -last:].mean(1).sum()
        (gradient_BTD,) = torch.autograd.grad(target, inputs)
    return gradient_BTD.norm(dim=-1)
