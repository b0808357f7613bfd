"""Mamba-2: a state-space layer whose heads forget by a scalar of their own (arXiv 2405.21060; state-spaces/mamba).

h ← e^{dt·A} h + dt·B xᵀ        y = hᵀC + D x
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import Layer, ModelConfig
from model.draws import constant, log_uniform_rate, matrix, step_bias, taps
from model.mixers.chunks import HALF, chunked_linear_attention
from model.mixers.convolution import CausalConvolution
from model.mixers.mixer import Angles, Mixer, State, refuse_below_one
from model.norms import RMSNorm

CHUNK = 64  # the fastest of 32 to 256 measured on a CPU; what comes out does not depend on it


@dataclass(frozen=True)
class Mamba2Settings:
    """head_dim: values of a head (P). d_state: width of B and C (N), shared by all heads. expand: inner width over
    d_model. conv_width: taps of the short convolution, the current token's included. heads: as many as fill the inner
    width by default."""

    head_dim: int = 64
    d_state: int = 128
    expand: int = 2
    conv_width: int = 4
    heads: int | None = None

    def __post_init__(self) -> None:
        refuse_below_one(self, "head_dim", "d_state", "expand", "conv_width", "heads")


class Mamba2(nn.Module):
    """One Mamba-2 layer with one group of B and C, [B, T, D] → [B, T, D]. It has no positions."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.d_state, taps = _shape(config, config.layers[index])
        inner, self.inner = (self.heads * self.head_dim,) * 2
        self.input = nn.Linear(config.d_model, 2 * inner + 2 * self.d_state + self.heads, bias=False)
        self.conv = CausalConvolution(inner + 2 * self.d_state, taps, bias=True)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(inner, config.norm_eps, config.norm_gain)
        self.output = nn.Linear(inner, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor, angles: Angles) -> Tensor:
        gate, convolved, dt = self._projected(x_BTD)
        return self._finish(gate, self._scan(self.conv(convolved), dt, None)[0])

    def prefill(self, x_BTD: Tensor, angles: Angles) -> tuple[Tensor, State]:
        gate, convolved, dt = self._projected(x_BTD)
        out, memory = self._scan(self.conv(convolved), dt, None)
        return self._finish(gate, out), {"conv": self.conv.state_after(convolved), "memory": memory}

    def step(self, x_B1D: Tensor, angles: Angles, state: State) -> tuple[Tensor, State]:
        gate, convolved, dt = self._projected(x_B1D)
        convolved, conv = self.conv.step(convolved, state["conv"])
        out, memory = self._scan(convolved, dt, state["memory"])
        return self._finish(gate, out), {"conv": conv, "memory": memory}

    def empty_state(self, batch: int) -> State:
        memory = self.A_log.new_zeros(batch, self.heads, self.d_state, self.head_dim)
        return {"conv": self.conv.empty_state(batch), "memory": memory}

    def _projected(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z, (x, B, C) before the convolution, dt before its bias."""
        gate, convolved, dt = self.input(x_BTD).split([self.inner, self.inner + 2 * self.d_state, self.heads], -1)
        return gate, convolved, dt

    def _scan(self, convolved: Tensor, dt: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        x, b, c = convolved.split([self.inner, self.d_state, self.d_state], -1)
        dt = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        # One token from a state is cheaper without a chunk around it.
        scan = chunked_state_space if memory is None else reference_state_space
        return scan(x.unflatten(-1, (self.heads, -1)), dt, -self.A_log.exp(), b, c, self.D, memory)

    def _finish(self, gate: Tensor, out_BTHP: Tensor) -> Tensor:
        return self.output(self.norm(out_BTHP.flatten(2) * F.silu(gate)))


def reference_state_space(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_H: Tensor,
    state_BHNP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [B, T, H, P], final state [B, H, N, P]) of the rule above, token by token, in float32 at least; A < 0."""
    x, dt, b, c = (y.float() if y.dtype in HALF else y for y in (x_BTHP, dt_BTH, B_BTN, C_BTN))
    state = x.new_zeros(x.shape[0], x.shape[2], b.shape[2], x.shape[3]) if state_BHNP is None else state_BHNP
    out = []
    for t in range(x.shape[1]):
        kept_BH = (dt[:, t] * A_H).exp()
        new_BHP = dt[:, t, :, None] * x[:, t]
        state = kept_BH[..., None, None] * state + b[:, t, None, :, None] * new_BHP[:, :, None]
        out.append((state * c[:, t, None, :, None]).sum(2) + D_H[:, None] * x[:, t])
    return torch.stack(out, 1).to(x_BTHP.dtype), state


def chunked_state_space(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_H: Tensor,
    state_BHNP: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """What `reference_state_space` gives, as linear attention in chunks: C asks, B is the key of all heads, dt·x the
    value, dt·A the logarithm of the decay."""
    values = dt_BTH[..., None] * x_BTHP
    out, state = chunked_linear_attention(C_BTN[:, :, None], B_BTN[:, :, None], values, dt_BTH * A_H, chunk, state_BHNP)
    return torch.addcmul(out, x_BTHP, D_H[:, None]).to(x_BTHP.dtype), state


def _shape(config: ModelConfig, layer: Layer) -> tuple[int, int, int, int]:
    """Heads, head width, state width, taps. Raises ValueError where heads do not fill the inner width."""
    settings = layer.settings or Mamba2Settings()
    assert isinstance(settings, Mamba2Settings)
    inner = settings.expand * config.d_model
    if settings.heads is None and inner % settings.head_dim:
        raise ValueError(
            f"mamba2 head_dim: {settings.head_dim} does not divide the inner width {inner} (expand x d_model); "
            f"choose a divisor of it"
        )
    return settings.heads or inner // settings.head_dim, settings.head_dim, settings.d_state, settings.conv_width


def _parameters(config: ModelConfig, layer: Layer) -> tuple[int, int]:
    heads, width, states, taps = _shape(config, layer)
    inner = heads * width
    matrices = config.d_model * (3 * inner + 2 * states + heads)
    return matrices, (taps + 1) * (inner + 2 * states) + 3 * heads + (inner if config.norm_gain else 0)


def _flops(config: ModelConfig, layer: Layer, length: int) -> float:
    """2CN + H(2CP + 4NP), the products in chunks of C = 256 and with the state between them, and the convolution."""
    heads, width, states, taps = _shape(config, layer)
    products = 2 * 256 * states + heads * (2 * 256 * width + 4 * states * width)
    return products + 2 * taps * (heads * width + 2 * states)


def _state(config: ModelConfig, layer: Layer, length: int) -> int:
    heads, width, states, taps = _shape(config, layer)
    return heads * width * states + (taps - 1) * (heads * width + 2 * states)


MAMBA2 = Mixer(
    module=Mamba2,
    parameters=_parameters,
    flops=_flops,
    state=_state,
    matrices=frozenset({"input", "output"}),
    first={
        "input": matrix,
        "conv": taps,
        "bias": constant(0.0),
        "dt_bias": step_bias,
        "A_log": log_uniform_rate(1, 16),
        "D": constant(1.0),
    },
    rotary=False,
    settings=Mamba2Settings,
    heads=lambda config, layer: _shape(config, layer)[0],
)
