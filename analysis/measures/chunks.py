"""Held-out documents for measures: made once a process, put through the model in pieces of one shape.

Measures run under no_grad, not inference_mode: what a model keeps from its first call (RoPE angles) must still be good
for training when that call was a measure.
"""

import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from model.lm import LanguageModel
from orchestrator.data.stream import Data, FactSet

# Tokens of one piece: what a core's cache holds of a small model's activations, and what fills an accelerator.
_TOKENS_CPU, _TOKENS_ACCELERATOR = 2**11, 2**16


@functools.lru_cache(maxsize=8)
def facts(data: Data, documents: int) -> FactSet:
    return data.facts(documents)


@functools.lru_cache(maxsize=8)
def held_out(data: Data, documents: int) -> np.ndarray:
    return data.held_out(documents)


def pieces(model: LanguageModel, tokens: np.ndarray) -> Iterator[tuple[range, Tensor]]:
    """(rows, their tokens [B, T] on the model's device); tokens: int64 [documents, T].

    B is the same for every piece, or a compiled model would be compiled again for the last: its rows are then followed
    by copies of the first document, which the caller ignores.
    """
    documents, length = tokens.shape
    device = next(model.parameters()).device
    most = _TOKENS_CPU if device.type == "cpu" else _TOKENS_ACCELERATOR
    rows = max(1, min(documents, most // length))
    for start in range(0, documents, rows):
        piece = tokens[start : start + rows]
        if len(piece) < rows:
            piece = np.concatenate([piece, np.repeat(tokens[:1], rows - len(piece), axis=0)])
        yield range(start, min(start + rows, documents)), torch.from_numpy(piece).to(device)
