"""The whole initialisation: one table, and the rules that mixers add for their own parameters."""

import hashlib
import math

import torch
from torch import nn

from model.config import ModelConfig
from model.draws import Draw, constant, matrix, normal
from model.mixers.table import mixer_of


def _rule(name: str, config: ModelConfig) -> Draw:
    """How a parameter starts, by the end of its name."""
    owner, _, last = name.rpartition(".")
    part = owner.rpartition(".")[2] if last == "weight" else last
    head = normal(0.5 / math.sqrt(config.d_model))
    table = {
        "embedding": head if config.tied_embeddings else normal(1.0),
        "head": head,
        "output": constant(0.0),
        "gate": matrix,
        "up": matrix,
        "down": constant(0.0),
        "gain": constant(1.0),
        "query_gain": constant(config.qk_norm or 0.0),
        "key_gain": constant(config.qk_norm or 0.0),
        "key_shift": constant(0.0),
        "sink_logit": constant(0.0),
    }
    if name.startswith("blocks."):
        _, index, inside, *deeper = name.split(".")
        layer = config.layers[int(index)]
        if layer.parts and deeper[0] == "parts":
            layer = layer.parts[int(deeper[1])]
        table |= mixer_of(layer).first if inside == "mixer" else {}
    if part not in table:
        raise ValueError(f"{name}: no initialisation is written for it; add {part!r} to its mixer or to initialize.py")
    return table[part]


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fills every parameter from (config, seed) alone, whatever the device.

    Each draws from a generator of its own, seeded by (seed, name): a parameter that two arms share by name and shape
    starts the same in both, so arms of one seed are paired.
    """
    for name, parameter in model.named_parameters():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        parameter.copy_(_rule(name, config)(parameter, generator))
