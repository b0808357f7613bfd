"""Layer-wise probing: at which layer the last token's state tells what a fact's value is (arXiv 2606.15378)."""

from typing import Any, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from analysis.measures.chunks import pieces
from analysis.measures.needles import Haystack
from model.capture import last_states
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.errors import InputError
from orchestrator.measure import Measurement

VALUES = 8  # numbers that differ in the last digit


class Probing(BaseModel):
    """probing/after-L: accuracy of a linear probe for the fact's value on the residual stream after L layers; chance is
    1/8. rows: also on what each layer adds, and with the training labels shuffled, which must come out near chance.

    Documents state one fact at `depth` and end where its value would follow; one in five of them is held out. Logistic
    regression, one against the rest, C = 0.1, on standardised features.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    documents: int = Field(default=160, ge=80)
    depth: float = Field(default=0.25, ge=0, le=1)
    others: int = Field(default=0, ge=0)

    @property
    def name(self) -> str:
        return "probing"

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def capabilities(self, data: Data) -> tuple[str, ...]:
        return ()

    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        if not hasattr(data, "needle"):
            raise InputError(f"Probing: {type(data).__name__} puts no facts where one wants them; use another measure")
        length = data.context // 2
        made = [
            cast(Haystack, data).needle(row, length, self.depth, self.others, VALUES) for row in range(self.documents)
        ]
        values = np.array([answer[-1] for _, answer in made])
        tokens = np.array([document for document, _ in made])
        states = torch.cat([last_states(model, piece)[:, : len(rows)] for rows, piece in pieces(model, tokens)], 1)
        stream_LND = states.double().cpu().numpy()
        table: list[dict[str, Any]] = []
        for layer, after_ND in enumerate(stream_LND):
            added = after_ND - stream_LND[layer - 1] if layer else after_ND
            for what, features in (("residual", after_ND), ("change", added)):
                if layer or what == "residual":
                    told = probe(features, values)
                    table.append({"layer": layer, "features": what, "accuracy": told[0], "shuffled": told[1]})
        return Measurement(
            {f"probing/after-{r['layer']}": r["accuracy"] for r in table if r["features"] == "residual"}, table
        )


def probe(features_ND: np.ndarray, values_N: np.ndarray) -> tuple[float, float]:
    """(accuracy on the held-out fifth, the same after training on shuffled labels)."""
    train, test, seen, asked = train_test_split(features_ND, values_N, test_size=0.2, stratify=values_N, random_state=0)
    shuffled = np.random.default_rng(0).permutation(seen)
    told = []
    for labels in (seen, shuffled):
        regression = OneVsRestClassifier(LogisticRegression(C=0.1, max_iter=1000))
        told.append(float(make_pipeline(StandardScaler(), regression).fit(train, labels).score(test, asked)))
    return told[0], told[1]
