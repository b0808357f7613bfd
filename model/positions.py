"""Rotary positions: the angles of RoPE, their extension to longer contexts, and the scale of NoPE queries."""

import math

import torch
from torch import Tensor


def rope_angles(length: int, width: int, base: float, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE, float32 [T, width]: position t turns pair i by t·base^(-2i/width).

    Pair i is (i, i + width/2): the half-split layout of Llama and its exports.
    """
    frequency_K = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angle_TK = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency_K
    angle_TK = torch.cat((angle_TK, angle_TK), dim=-1)
    return angle_TK.cos(), angle_TK.sin()


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turns each pair of x by its position's angle; x keeps its type."""
    first, second = x_BHTK.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BHTK * cos_TK + turned * sin_TK).to(x_BHTK.dtype)


def ntk_base(base: float, factor: float, width: int) -> float:
    """RoPE base for a context `factor` times longer (NTK-aware): the slowest pair slows by just that factor."""
    return base * factor ** (width / (width - 2))


def query_scale(length: int, trained: int) -> float:
    """Factor on full-layer queries at inference beyond the trained length: max(1, ln n / ln n_train)."""
    return max(1.0, math.log(length) / math.log(trained))
