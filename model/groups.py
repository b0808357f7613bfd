"""Which optimizer steps which parameter."""

from torch import nn
from torch.nn import Parameter


def matrices(model: nn.Module) -> list[tuple[str, Parameter]]:
    """The 2-D matrices inside layers, by name: what Muon may step. Never embeddings, head, gains or key shifts."""
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.") and name.endswith(".weight") and parameter.ndim == 2
    ]


def others(model: nn.Module) -> list[tuple[str, Parameter]]:
    """Every parameter that is not one of `matrices`."""
    stepped = {name for name, _ in matrices(model)}
    return [(name, parameter) for name, parameter in model.named_parameters() if name not in stepped]
