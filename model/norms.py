"""RMSNorm, with and without a gain."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _Normed(Function):
    """gain · x / sqrt(mean(x²) + eps). Derived by hand: the automatic backward of the CPU takes four times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, gain: Tensor | None) -> Tensor:
        # Squares are taken in float32 at least: a bfloat16 mean of squares loses the norm itself.
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(wide, scale, gain)
        return (wide * (scale if gain is None else scale * gain)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, scale, gain = ctx.saved_tensors
        wide = gradient.to(x.dtype)
        along = (wide * x).sum(-1, keepdim=True).mul_(scale)
        outer = scale if gain is None else scale * gain
        inner = (along * outer).mul_(scale).div_(-x.shape[-1])
        x_gradient = torch.addcmul(wide * outer, x, inner).to(gradient.dtype)
        return x_gradient, None, None if gain is None else along.sum_to_size(gain.shape).to(gain.dtype)


def rms_norm(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """x over the root mean square of its last axis, in the type of x.

    gain: one factor a row, broadcast against [..., 1]: [H, 1, 1] for heads of x [B, H, T, K].
    """
    return _Normed.apply(x, eps, gain)


class RMSNorm(nn.Module):
    """`rms_norm` over the last axis, times a learned gain [width] unless gain is False."""

    def __init__(self, width: int, eps: float, gain: bool) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.empty(width)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        normed = rms_norm(x, self.eps)
        return normed if self.gain is None else normed * self.gain
