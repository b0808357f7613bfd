"""One layer of the decoder: norm, mixer, norm, MLP, each added to the residual stream."""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.config import Layer, ModelConfig
from model.mixers.table import MIXERS
from model.norms import RMSNorm


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), [B, T, D] → [B, T, D]."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class SquaredReLU(nn.Module):
    """down(relu(up(x))²), [B, T, D] → [B, T, D]."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(_Squared.apply(self.up(x_BTD)))


class _Squared(Function):
    """relu(x)². Its gradient 2·relu(x) needs the saved relu only; the automatic one keeps and reads both steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (gradient * positive).mul_(2)


MLPS: dict[str, type[nn.Module]] = {"swiglu": SwiGLU, "relu2": SquaredReLU}


class Block(nn.Module):
    """Pre-norm residual layer, [B, T, D] → [B, T, D]."""

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps, config.norm_gain)
        self.mixer = MIXERS[layer.mixer](config, layer)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps, config.norm_gain)
        self.mlp = MLPS[config.mlp](config.d_model, config.d_ff)

    def forward(self, x_BTD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.mixer(self.mixer_norm(x_BTD), angles)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))
