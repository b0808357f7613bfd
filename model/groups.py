"""Which optimizer steps which parameter: matrices inside layers (Muon may), and everything else (AdamW)."""

from torch import nn
from torch.nn import Parameter

from model.mixers.table import MIXERS

Named = list[tuple[str, Parameter]]

# By name, because shape alone misleads: embeddings and the head are two-dimensional too.
MATRICES = frozenset({"gate", "up", "down"}).union(*(mixer.matrices for mixer in MIXERS.values()))


def matrices(model: nn.Module) -> Named:
    """The 2-D matrices inside layers: what Muon may step. Never embeddings, head, gains or convolutions."""
    return grouped(model)[0]


def others(model: nn.Module) -> Named:
    """Every parameter that is not one of `matrices`."""
    return grouped(model)[1]


def grouped(model: nn.Module) -> tuple[Named, Named]:
    """(`matrices`, `others`): each parameter in exactly one, tied ones counted once.

    Raises ValueError naming a parameter inside a layer whose name and shape disagree on where it belongs.
    """
    inside: Named = []
    outside: Named = []
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        listed = last == "weight" and owner.rpartition(".")[2] in MATRICES
        if name.startswith("blocks.") and listed != (parameter.ndim == 2):
            raise ValueError(
                f"{name}: shape {list(parameter.shape)} and the matrices its mixer names disagree on its optimizer; "
                f"name it among them"
            )
        (inside if name.startswith("blocks.") and listed else outside).append((name, parameter))
    return inside, outside
