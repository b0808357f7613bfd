"""RMSNorm, with and without a gain."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) over the last axis, times a learned gain [width] unless gain is False."""

    def __init__(self, width: int, eps: float, gain: bool) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.gain = nn.Parameter(torch.empty(width)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.gain, self.eps)
