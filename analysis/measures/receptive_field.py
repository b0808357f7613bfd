"""Receptive-field constraint: what recall and loss lose when full or efficient layers see less (arXiv 2606.15378)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from analysis.measures.recall import RecallByDistance
from analysis.measures.validation import ValidationLoss
from model.interventions import forgetful
from model.limits import limited, softmax_heads
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.measure import Measurement

Which = Literal["full", "efficient"]


class ReceptiveField(BaseModel):
    """constrained/full-W/METRIC and constrained/efficient-W/METRIC: recall by distance and loss of a trained model
    whose full layers, or other layers, see W tokens; the unconstrained values are those of the measures themselves.

    Recurrent layers are restarted W tokens back; a layer's own window holds where it is narrower. windows: W. sinks:
    first tokens that limited softmax layers see too. edges: of recall's buckets. documents: of recall, half as
    many for the loss. A kind of layer that the model lacks is left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    windows: tuple[int, ...] = (8, 32)
    sinks: int = Field(default=0, ge=0)
    documents: int = Field(default=16, gt=0)
    edges: tuple[int, ...] = (8, 32, 128)

    @field_validator("windows")
    @classmethod
    def _are_windows(cls, windows: tuple[int, ...]) -> tuple[int, ...]:
        if not windows or min(windows) < 1:
            raise ValueError(f"{windows} are no windows; give tokens that a layer may see, such as (8, 32)")
        return windows

    @property
    def name(self) -> str:
        return "constrained"

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def capabilities(self, data: Data) -> tuple[str, ...]:
        recall = RecallByDistance(documents=self.documents, edges=self.edges).capabilities(data)
        return tuple(
            f"constrained/{which}-{window}/{metric}"
            for window in self.windows
            for which in ("full", "efficient")
            for metric in recall
        )

    @torch.no_grad()
    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        measures = (
            RecallByDistance(documents=self.documents, edges=self.edges),
            ValidationLoss(documents=-(-self.documents // 2)),
        )
        metrics: dict[str, float] = {}
        rows = []
        mixers = {layer.mixer for layer in model.config.parts()}
        kinds: dict[Which, bool] = {"full": "full" in mixers, "efficient": bool(mixers - {"full"})}
        for which in [kind for kind, there in kinds.items() if there]:
            for window in self.windows:
                with constrained(model, which, window, self.sinks):
                    told = {k: v for measure in measures for k, v in measure(model, data).metrics.items()}
                metrics |= {f"constrained/{which}-{window}/{name}": value for name, value in told.items()}
                rows += [{"limited": which, "window": window, "metric": k, "value": v} for k, v in told.items()]
        return Measurement(metrics, rows)


@contextmanager
def constrained(model: LanguageModel, which: Which, window: int, sinks: int = 0) -> Iterator[None]:
    """Within the context, the full layers of the model, or all others, see at most the last `window` tokens.

    A layer whose heads full attention and others share is limited in those alone that are meant.
    """
    mixers = ("full",) if which == "full" else ("swa",)
    with ExitStack() as limits:
        limits.enter_context(limited(model, dict.fromkeys(softmax_heads(model), window), sinks, mixers))
        if which == "efficient":
            limits.enter_context(forgetful(model, window))
        yield
