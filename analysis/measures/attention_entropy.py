"""How spread the attention of each head is, at the last positions of held-out documents."""

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from analysis.measures.chunks import held_out, pieces
from model.capture import attention_rows
from model.limits import softmax_heads
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.measure import Measurement


class AttentionEntropy(BaseModel):
    """entropy/LlHh: of head h of layer l, over the logarithm of how many tokens it sees: 0 is one, 1 all alike.

    Mean over the last `queries` positions of held-out documents. rows: also the entropy itself in nats, and for heads
    with a window its share of the logarithm of all earlier tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    documents: int = Field(default=16, gt=0)
    queries: int = Field(default=4, gt=0)

    @property
    def name(self) -> str:
        return "entropy"

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def capabilities(self, data: Data) -> tuple[str, ...]:
        return ()

    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        tokens = held_out(data, self.documents)[:, :-1]
        length = tokens.shape[1]
        places = torch.arange(max(1, length - self.queries), length)  # a query that sees itself alone has no share
        total: dict[int, Tensor] = {}
        for rows, piece in pieces(model, tokens):
            for layer, rows_BHQT in attention_rows(model, piece, places).items():
                summed = entropy(rows_BHQT[: len(rows)]).double().sum(0).cpu()
                total[layer] = total.get(layer, torch.zeros(())) + summed
        table = []
        for layer, parts in softmax_heads(model).items():
            mean_HQ = total[layer] / len(tokens)
            for part in parts:
                seen_Q = places + 1 if part.mixer.window is None else (places + 1).clamp(max=part.mixer.window)
                for head in part.heads:
                    table.append(
                        {
                            "layer": layer,
                            "head": head,
                            "entropy": mean_HQ[head].mean().item(),
                            "share_of_all": share(mean_HQ[head], places + 1),
                            "share_of_seen": share(mean_HQ[head], seen_Q),
                        }
                    )
        metrics = {f"entropy/L{r['layer']}H{r['head']}": r["share_of_seen"] for r in table}
        return Measurement({name: value for name, value in metrics.items() if value is not None}, table)


def entropy(probabilities: Tensor) -> Tensor:
    """-Σ p ln p over the last axis, in nats; 0 ln 0 is 0."""
    return -torch.special.xlogy(probabilities, probabilities).sum(-1)


def share(entropy_Q: Tensor, seen_Q: Tensor) -> float | None:
    """Mean of entropy over ln(tokens seen), of the queries that see more than one; None where none does."""
    several = seen_Q > 1
    if not several.any():
        return None
    return (entropy_Q[several] / seen_Q[several].double().log()).mean().item()
