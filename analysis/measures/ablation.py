"""Head ablation: recall without the heads that look most at answers, against as many others of the same layers."""

from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from analysis.measures.recall import RecallByDistance
from analysis.measures.retrieval_heads import RetrievalHeads
from model.interventions import ablated
from model.limits import softmax_heads
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.measure import Measurement


class HeadAblation(BaseModel):
    """ablation/top/METRIC: recall without the `top` heads of the highest retrieval score (`RetrievalHeads`);
    ablation/random/METRIC: without as many others of the same layers, the mean over `draws` of them.

    by: what stands in for a head's output, zero or its mean over documents and tokens. rows: each draw. Where the
    layers of the top heads have too few others, there is nothing random. Nothing at all without full attention.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    top: int = Field(default=2, gt=0)
    draws: int = Field(default=3, gt=0)
    by: Literal["zero", "mean"] = "mean"
    documents: int = Field(default=32, gt=0)
    edges: tuple[int, ...] = (8, 32, 128)

    @property
    def name(self) -> str:
        return "ablation"

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def capabilities(self, data: Data) -> tuple[str, ...]:
        recall = self._recall().capabilities(data)
        return tuple(f"ablation/{which}/{metric}" for which in ("top", "random") for metric in recall)

    @torch.no_grad()
    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        scored = RetrievalHeads(documents=self.documents)(model, data).rows
        best = sorted(scored, key=lambda row: -row["score"])[: self.top]
        if not best:
            return Measurement({})
        top = [(row["layer"], row["head"]) for row in best]
        heads = softmax_heads(model)
        others = [
            (layer, head)
            for layer in dict.fromkeys(layer for layer, _ in top)
            for part in heads[layer]
            for head in part.heads
            if (layer, head) not in top
        ]
        draw = np.random.default_rng(0)
        sets = {"top": [top]}
        if len(others) >= len(top):
            sets["random"] = [
                [others[i] for i in draw.choice(len(others), len(top), replace=False)] for _ in range(self.draws)
            ]
        metrics: dict[str, float] = {}
        rows = []
        for which, chosen in sets.items():
            told = [self._without(model, data, heads) for heads in chosen]
            metrics |= {f"ablation/{which}/{k}": float(np.mean([t[k] for t in told])) for k in told[0]}
            rows += [
                {"which": which, "draw": i, "heads": " ".join(f"L{la}H{h}" for la, h in heads), "metric": k, "value": v}
                for i, (heads, values) in enumerate(zip(chosen, told, strict=True))
                for k, v in values.items()
            ]
        return Measurement(metrics, rows)

    def _without(self, model: LanguageModel, data: Data, heads: list[tuple[int, int]]) -> dict[str, float]:
        by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            by_layer.setdefault(layer, []).append(head)
        with ablated(model, by_layer, self.by):
            return self._recall()(model, data).metrics

    def _recall(self) -> RecallByDistance:
        return RecallByDistance(documents=self.documents, edges=self.edges)
