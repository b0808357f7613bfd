"""One layer of the decoder: norm, mixer, norm, MLP, each added to the residual stream."""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.config import ModelConfig
from model.mixers.mixer import Angles, MixerModule, State
from model.mixers.table import mixer_of
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

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        layer = config.layers[index]
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps, config.norm_gain)
        self.mixer: MixerModule = mixer_of(layer).module(config, index)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps, config.norm_gain)
        self.mlp = MLPS[config.mlp](config.d_model, layer.d_ff or config.d_ff)

    def forward(self, x_BTD: Tensor, angles: Angles) -> Tensor:
        return self._rest(x_BTD, self.mixer(self.mixer_norm(x_BTD), angles))

    def prefill(self, x_BTD: Tensor, angles: Angles) -> tuple[Tensor, State]:
        """As forward, with the mixer's state after the last token."""
        mixed, state = self.mixer.prefill(self.mixer_norm(x_BTD), angles)
        return self._rest(x_BTD, mixed), state

    def step(self, x_B1D: Tensor, angles: Angles, state: State) -> tuple[Tensor, State]:
        """One token more, [B, 1, D] → [B, 1, D]; angles of its position."""
        mixed, state = self.mixer.step(self.mixer_norm(x_B1D), angles, state)
        return self._rest(x_B1D, mixed), state

    def _rest(self, x_BTD: Tensor, mixed_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + mixed_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))
