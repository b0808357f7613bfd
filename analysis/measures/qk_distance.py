"""How far each head's query and key projections are from those of another checkpoint (arXiv 2606.15378)."""

from typing import Any

from torch import Tensor

from model.limits import softmax_heads
from model.lm import LanguageModel


def qk_distances(model: LanguageModel, reference: LanguageModel) -> list[dict[str, Any]]:
    """One row a softmax head: layer, head, distance ‖ΔQ‖ + ‖ΔK‖ of its rows, and relative, each norm over that of the
    reference, summed. Keys of grouped heads are those of their group.

    Raises ValueError for models of different shapes.
    """
    if model.config != reference.config:
        raise ValueError("reference: is another decoder; give a checkpoint of the same cell")
    rows = []
    for (layer, ours), theirs in zip(softmax_heads(model).items(), softmax_heads(reference).values(), strict=True):
        for own, other in zip(ours, theirs, strict=True):
            ratio = own.mixer.heads // own.mixer.kv_heads
            for index, head in enumerate(own.heads):
                told = [
                    _distance(
                        getattr(own.mixer, name).weight, getattr(other.mixer, name).weight, place, own.mixer.head_dim
                    )
                    for name, place in (("query", index), ("key", index // ratio))
                ]
                rows.append(
                    {
                        "layer": layer,
                        "head": head,
                        "distance": sum(distance for distance, _ in told),
                        "relative": sum(distance / norm for distance, norm in told),
                    }
                )
    return rows


def _distance(weight: Tensor, reference: Tensor, head: int, width: int) -> tuple[float, float]:
    """(norm of the difference, norm of the reference) of a head's rows."""
    rows = slice(head * width, (head + 1) * width)
    return (weight[rows] - reference[rows]).norm().item(), reference[rows].norm().item()
