"""RMSNorm, with and without a gain."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _Normed(Function):
    """x / sqrt(mean(x²) + eps). Derived by hand: the automatic backward of the CPU takes seven times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        # Squares are taken in float32 at least: a bfloat16 mean of squares loses the norm itself.
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = wide * scale
        ctx.save_for_backward(normed, scale)
        return normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        normed, scale = ctx.saved_tensors
        wide = gradient.to(normed.dtype)
        along = (wide * normed).mean(-1, keepdim=True)
        return torch.addcmul(wide, normed, along, value=-1).mul_(scale).to(gradient.dtype), None


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x over the root mean square of its last axis, in the type of x."""
    return _Normed.apply(x, eps)


class RMSNorm(nn.Module):
    """`rms_norm` over the last axis, times a learned gain [width] unless gain is False."""

    def __init__(self, width: int, eps: float, gain: bool) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.empty(width)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        normed = rms_norm(x, self.eps)
        return normed if self.gain is None else normed * self.gain
