"""The short causal convolution in front of recurrent mixers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class CausalConvolution(nn.Module):
    """silu of a depthwise convolution over a token and those before it, [B, T, C] → [B, T, C].

    The weight is [C, 1, taps], last tap on the current token, as torch.nn.Conv1d keeps it.
    """

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        return F.silu(_Taps.apply(x_BTC, self.weight, self.bias))

    def empty_state(self, batch: int) -> Tensor:
        """The inputs before the first token, zeros [B, taps-1, C]."""
        channels, _, taps = self.weight.shape
        return self.weight.new_zeros(batch, taps - 1, channels)

    def state_after(self, x_BTC: Tensor) -> Tensor:
        """The last taps-1 inputs, [B, taps-1, C], zeros before the first."""
        kept = self.weight.shape[2] - 1
        return F.pad(x_BTC[:, -kept:], (0, 0, max(0, kept - x_BTC.shape[1]), 0))

    def step(self, x_B1C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token more, and the state after it."""
        seen_BWC = torch.cat([state.to(x_B1C.dtype), x_B1C], 1)
        return self(seen_BWC)[:, -1:], seen_BWC[:, 1:]


class _Taps(Function):
    """The convolution as one product a tap, in float32 at least, on [B, T, C] as projections leave it: a torch
    convolution wants channels before tokens, which costs a transposition each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, weight.dtype))
        taps = weight.squeeze(1).T.contiguous()
        ctx.save_for_backward(wide, taps)
        ctx.biased, ctx.dtype = bias is not None, x.dtype
        out = wide * taps[-1] if bias is None else torch.addcmul(bias, wide, taps[-1])
        for lag in range(1, min(len(taps), x.shape[1])):
            out[:, lag:].addcmul_(wide[:, :-lag], taps[-1 - lag])
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, taps = ctx.saved_tensors
        wide = gradient.to(x.dtype)
        d_x, d_taps = wide * taps[-1], torch.zeros_like(taps)
        d_taps[-1] = (wide * x).sum((0, 1))
        for lag in range(1, min(len(taps), x.shape[1])):
            d_x[:, :-lag].addcmul_(wide[:, lag:], taps[-1 - lag])
            d_taps[-1 - lag] = (wide[:, lag:] * x[:, :-lag]).sum((0, 1))
        return d_x.to(ctx.dtype), d_taps.T.unsqueeze(1), wide.sum((0, 1)) if ctx.biased else None
