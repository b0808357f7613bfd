"""What a study hands over to be measured. The measures themselves live in `analysis.measures`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from model.lm import LanguageModel
    from orchestrator.data.stream import Data


@dataclass(frozen=True)
class Measurement:
    """metrics: name → value, names as MLflow keys ("recall/accuracy/1-8"); rows: finer results, one table row each."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)


class Measure(Protocol):
    """A capability or mechanism measurement on a model in evaluation, without gradients."""

    @property
    def name(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """All that changes the numbers, as JSON types: hashed into the measurement's own identity."""
        ...

    def capabilities(self, data: "Data") -> tuple[str, ...]:
        """Its metrics in [0, 1] that a question can be about, on such data."""
        ...

    def __call__(self, model: "LanguageModel", data: "Data") -> Measurement: ...
