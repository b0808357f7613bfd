"""The whole initialisation, in one table."""

import hashlib
import math

import torch
from torch import Tensor, nn

from model.config import ModelConfig


def _spread(name: str, parameter: Tensor, config: ModelConfig) -> tuple[float, float]:
    """Mean and standard deviation of a parameter's first values, by the end of its name."""
    owner, _, last = name.rpartition(".")
    part = owner.rpartition(".")[2] if last == "weight" else last
    matrix = (0.0, 1 / math.sqrt(parameter.shape[-1]))
    head = (0.0, 0.5 / math.sqrt(config.d_model))
    table = {
        "embedding": head if config.tied_embeddings else (0.0, 1.0),
        "head": head,
        "query": matrix,
        "key": matrix,
        "value": matrix,
        "output": (0.0, 0.0),
        "gate": matrix,
        "up": matrix,
        "down": (0.0, 0.0),
        "gain": (1.0, 0.0),
        "query_gain": (config.qk_norm or 0.0, 0.0),
        "key_gain": (config.qk_norm or 0.0, 0.0),
        "key_shift": (0.0, 0.0),
    }
    if part not in table:
        raise ValueError(f"{name}: no initialisation is written for it; add {part!r} to the table in initialize.py")
    return table[part]


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fills every parameter from (config, seed) alone, whatever the device.

    Each draws from a generator of its own, seeded by (seed, name): a parameter that two arms share by name and shape
    starts the same in both, so arms of one seed are paired.
    """
    for name, parameter in model.named_parameters():
        mean, deviation = _spread(name, parameter, config)
        parameter.fill_(mean)
        if deviation:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(drawn.mul_(deviation).to(parameter))
