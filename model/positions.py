"""Rotary positions: the angles of RoPE, their extension to longer contexts, and the scale of queries beyond them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def rope_angles(length: int, width: int, base: float, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE, float32 [T, width/2]: position t turns pair i by t·base^(-2i/width).

    Pair i is (i, i + width/2): the half-split layout of Llama and its exports.
    """
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency
    return angles.cos(), angles.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sense: int) -> Tensor:
    pairs = x.unflatten(-1, (2, -1))
    turned = pairs * cos.unsqueeze(-2)
    turned[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-sense)
    turned[..., 1, :].addcmul_(pairs[..., 0, :], sin, value=sense)
    return turned.flatten(-2)


class _Rotated(Function):
    """A rotation's gradient is turned back by the same angles: half the time of the automatic backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, -1), None, None


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of x by its position's angle (cos, sin [T, R/2]). The products run in float32 at least.

    Where R is less than K, the first R numbers of a head turn among themselves and the others stay (GPT-NeoX).
    """
    turned = 2 * cos.shape[-1]
    if turned < x_BHTK.shape[-1]:
        return torch.cat([rotate(x_BHTK[..., :turned], cos, sin), x_BHTK[..., turned:]], -1)
    wide = x_BHTK.to(torch.promote_types(x_BHTK.dtype, cos.dtype))
    return _Rotated.apply(wide, cos.to(wide.dtype), sin.to(wide.dtype)).to(x_BHTK.dtype)


def ntk_base(base: float, factor: float, width: int) -> float:
    """RoPE base for a context `factor` times longer (NTK-aware): the slowest pair slows by just that factor."""
    return base * factor ** (width / (width - 2))


def query_scale(length: int, trained: int) -> float:
    """Factor on full-layer queries at inference beyond the trained length: max(1, ln n / ln n_train)."""
    return max(1.0, math.log(length) / math.log(trained))
