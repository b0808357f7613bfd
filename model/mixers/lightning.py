"""Lightning attention: linear attention whose heads forget at constant rates (arXiv 2401.04658, gates of MiniMax-01).

S ← e^{-s_h} S + k_t v_tᵀ        o_t = Sᵀ q_t
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from model.config import Layer, ModelConfig, rotary_width
from model.draws import matrix
from model.mixers.chunks import HALF, chunked_linear_attention
from model.mixers.mixer import Angles, Mixer, State, refuse_below_one
from model.norms import RMSNorm
from model.positions import rotate

CHUNK = 64  # the fastest of 16 to 256 measured on a CPU, within a tenth; what comes out does not depend on it


@dataclass(frozen=True)
class LightningSettings:
    """heads: as many as the attention layers have by default. slopes: "alibi", the same in every layer, or
    "layer-scaled", which fall towards none in the last."""

    heads: int | None = None
    slopes: Literal["alibi", "layer-scaled"] = "alibi"

    def __post_init__(self) -> None:
        refuse_below_one(self, "heads")
        if self.slopes not in ("alibi", "layer-scaled"):
            raise ValueError(f"slopes: {self.slopes!r} is no rule; choose alibi or layer-scaled")


class Lightning(nn.Module):
    """One Lightning attention layer, [B, T, D] → [B, T, D]; every head has keys and values of its own."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        layer = config.layers[index]
        settings = _settings(layer)
        d, self.head_dim, self.heads = config.d_model, config.head_dim, settings.heads or config.n_heads
        self.turned = rotary_width(config.head_dim, layer.rope)
        self.rates = decay_rates(self.heads, settings.slopes, index, len(config.layers))
        width = self.heads * self.head_dim
        self.query = nn.Linear(d, width, bias=False)
        self.key = nn.Linear(d, width, bias=False)
        self.value = nn.Linear(d, width, bias=False)
        self.gate = nn.Linear(d, width, bias=False)
        self.output = nn.Linear(width, d, bias=False)
        self.query_norm = RMSNorm(self.head_dim, config.norm_eps, config.norm_gain)
        self.key_norm = RMSNorm(self.head_dim, config.norm_eps, config.norm_gain)
        self.norm = RMSNorm(width, config.norm_eps, config.norm_gain)

    def forward(self, x_BTD: Tensor, angles: Angles) -> Tensor:
        return self.prefill(x_BTD, angles)[0]

    def prefill(self, x_BTD: Tensor, angles: Angles) -> tuple[Tensor, State]:
        q, k, v, g = self._projected(x_BTD, angles)
        out, memory = chunked_linear_attention(q, k, v, g, CHUNK)
        return self._finish(x_BTD, out), {"memory": memory}

    def step(self, x_B1D: Tensor, angles: Angles, state: State) -> tuple[Tensor, State]:
        out, memory = reference_linear_attention(*self._projected(x_B1D, angles), state["memory"])
        return self._finish(x_B1D, out), {"memory": memory}

    def empty_state(self, batch: int) -> State:
        return {"memory": self.output.weight.new_zeros(batch, self.heads, self.head_dim, self.head_dim)}

    def _projected(self, x_BTD: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys normed, rotated and scaled, values, all [B, T, H, K]; decays [B, T, H]."""
        q, k, v = (
            project(x_BTD).unflatten(-1, (self.heads, self.head_dim)) for project in (self.query, self.key, self.value)
        )
        q, k = self.query_norm(q), self.key_norm(k)
        if self.turned:
            q, k = (rotate(x.transpose(1, 2), *angles[self.turned]).transpose(1, 2) for x in (q, k))
        g_H = torch.tensor([-rate for rate in self.rates], dtype=self.output.weight.dtype, device=x_BTD.device)
        return q * self.head_dim**-0.5, k, v, g_H.expand(*x_BTD.shape[:2], -1)

    def _finish(self, x_BTD: Tensor, out_BTHV: Tensor) -> Tensor:
        return self.output(self.norm(out_BTHV.flatten(2)) * self.gate(x_BTD).sigmoid())


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8i/H), i = 1 … H; between powers of two, those of the smaller and every other one of the larger (ALiBi)."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    return slopes + [2 ** (-4 * i / whole) for i in range(1, 2 * whole, 2)][: heads - whole]


def decay_rates(heads: int, rule: Literal["alibi", "layer-scaled"], index: int, depth: int) -> list[float]:
    """s_h of each head. "layer-scaled" multiplies the slopes of 0-based layer `index` by 1 - index/(depth-1) + 1e-5."""
    scale = 1.0 if rule == "alibi" else 1 - index / max(1, depth - 1) + 1e-5
    return [slope * scale for slope in alibi_slopes(heads)]


def reference_linear_attention(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, state_BHKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs [B, T, H, V], final state [B, H, K, V]) of the rule above, token by token, in float32 at least.

    g: logarithms of the decays, -s_h at every token.
    """
    q, k, v, g = (x.float() if x.dtype in HALF else x for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if state_BHKV is None else state_BHKV
    out = []
    for t in range(v.shape[1]):
        state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(out, 1).to(v_BTHV.dtype), state


def _settings(layer: Layer) -> LightningSettings:
    settings = layer.settings or LightningSettings()
    assert isinstance(settings, LightningSettings)
    return settings


def _width(config: ModelConfig, layer: Layer) -> int:
    return (_settings(layer).heads or config.n_heads) * config.head_dim


def _parameters(config: ModelConfig, layer: Layer) -> tuple[int, int]:
    width = _width(config, layer)
    return 5 * config.d_model * width, 2 * config.head_dim + width if config.norm_gain else 0


def _flops(config: ModelConfig, layer: Layer, length: int) -> float:
    """H[2C(K+V) + 4KV], the products in chunks of C = 64 and with the state between them."""
    return _width(config, layer) * (2 * 64 * 2 + 4 * config.head_dim)


def _state(config: ModelConfig, layer: Layer, length: int) -> int:
    return _width(config, layer) * config.head_dim


LIGHTNING = Mixer(
    module=Lightning,
    parameters=_parameters,
    flops=_flops,
    state=_state,
    matrices=frozenset({"query", "key", "value", "gate", "output"}),
    first={"query": matrix, "key": matrix, "value": matrix, "gate": matrix},
    settings=LightningSettings,
    heads=lambda config, layer: _settings(layer).heads or config.n_heads,
)
