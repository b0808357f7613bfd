"""Gated DeltaNet: a state that forgets by a gate and writes by the delta rule (arXiv 2412.06464; layer as in fla).

S ← e^{g_t} S;  u = β_t (v_t - Sᵀ k_t);  S ← S + k_t uᵀ;  o_t = Sᵀ q_t
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.config import Layer, ModelConfig
from model.draws import log_uniform_rate, matrix, step_bias, taps
from model.mixers.chunks import HALF, decay_gradient, decays, join, split
from model.mixers.convolution import CausalConvolution
from model.mixers.mixer import Angles, Mixer, State, refuse_below_one
from model.norms import RMSNorm, rms_norm

CHUNK = 64
L2_EPS = 1e-6


@dataclass(frozen=True)
class GatedDeltaNetSettings:
    """heads: as many as the attention layers have by default. key_dim, value_dim: of a head, head_dim by default.
    conv_width: taps of the short convolution, the current token's included."""

    heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    conv_width: int = 4

    def __post_init__(self) -> None:
        refuse_below_one(self, "heads", "key_dim", "value_dim", "conv_width")


class GatedDeltaNet(nn.Module):
    """One Gated DeltaNet layer, [B, T, D] → [B, T, D]. Decays and convolutions order tokens: no positions."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        layer = config.layers[index]
        self.heads, self.key_dim, self.value_dim, taps = _shape(config, layer)
        d, keys, values = config.d_model, self.heads * self.key_dim, self.heads * self.value_dim
        self.query = nn.Linear(d, keys, bias=False)
        self.key = nn.Linear(d, keys, bias=False)
        self.value = nn.Linear(d, values, bias=False)
        self.gate = nn.Linear(d, values, bias=False)
        self.beta = nn.Linear(d, self.heads, bias=False)
        self.decay = nn.Linear(d, self.heads, bias=False)
        self.output = nn.Linear(values, d, bias=False)
        self.query_conv = CausalConvolution(keys, taps, bias=False)
        self.key_conv = CausalConvolution(keys, taps, bias=False)
        self.value_conv = CausalConvolution(values, taps, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(self.value_dim, config.norm_eps, config.norm_gain)

    def forward(self, x_BTD: Tensor, angles: Angles) -> Tensor:
        mixed = [conv(project(x_BTD)) for _, project, conv in self._convolved()]
        return self._finish(x_BTD, self._recur(x_BTD, mixed, None)[0])

    def prefill(self, x_BTD: Tensor, angles: Angles) -> tuple[Tensor, State]:
        state, mixed = {}, []
        for name, project, conv in self._convolved():
            projected = project(x_BTD)
            mixed.append(conv(projected))
            state[name] = conv.state_after(projected)
        out, state["memory"] = self._recur(x_BTD, mixed, None)
        return self._finish(x_BTD, out), state

    def step(self, x_B1D: Tensor, angles: Angles, state: State) -> tuple[Tensor, State]:
        after, mixed = {}, []
        for name, project, conv in self._convolved():
            out, after[name] = conv.step(project(x_B1D), state[name])
            mixed.append(out)
        out, after["memory"] = self._recur(x_B1D, mixed, state["memory"])
        return self._finish(x_B1D, out), after

    def empty_state(self, batch: int) -> State:
        state = {name: conv.empty_state(batch) for name, _, conv in self._convolved()}
        state["memory"] = self.A_log.new_zeros(batch, self.heads, self.key_dim, self.value_dim)
        return state

    def _convolved(self) -> tuple[tuple[str, nn.Linear, CausalConvolution], ...]:
        return (
            ("query_conv", self.query, self.query_conv),
            ("key_conv", self.key, self.key_conv),
            ("value_conv", self.value, self.value_conv),
        )

    def _recur(self, x_BTD: Tensor, mixed: list[Tensor], memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rule over convolved queries, keys and values; memory: the state before one token, None for none."""
        q, k, v = mixed
        q, k = (l2_norm(x.unflatten(-1, (self.heads, self.key_dim))) for x in (q, k))
        q = q * self.key_dim**-0.5
        v = v.unflatten(-1, (self.heads, self.value_dim))
        rate, bias = self.A_log.exp(), self.dt_bias
        g = -rate * F.softplus(self.decay(x_BTD).to(rate.dtype) + bias)
        beta = self.beta(x_BTD).to(rate.dtype).sigmoid()
        # One token from a state is cheaper without a chunk around it.
        rule = reference_gated_delta_rule if memory is not None else chunked_gated_delta_rule
        return rule(q, k, v, g, beta, state_BHKV=memory)

    def _finish(self, x_BTD: Tensor, out_BTHV: Tensor) -> Tensor:
        gate = F.silu(self.gate(x_BTD))
        return self.output(self.norm(out_BTHV).flatten(2) * gate)


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x²) + 1e-6) over the last axis."""
    width = x.shape[-1]
    return rms_norm(x, L2_EPS / width) * width**-0.5


def reference_gated_delta_rule(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, state_BHKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs [B, T, H, V], final state [B, H, K, V]) of the rule above, token by token, in float32 at least."""
    q, k, v, g, beta = (x.float() if x.dtype in HALF else x for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
    b, length, heads, width = v.shape
    state = v.new_zeros(b, heads, k.shape[3], width) if state_BHKV is None else state_BHKV
    out = []
    for t in range(length):
        state = g[:, t, :, None, None].exp() * state
        recalled_BHV = (state * k[:, t, :, :, None]).sum(2)
        written_BHV = beta[:, t, :, None] * (v[:, t] - recalled_BHV)
        state = state + k[:, t, :, :, None] * written_BHV[:, :, None, :]
        out.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(out, 1).to(v_BTHV.dtype), state


def chunked_gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """What `reference_gated_delta_rule` gives, by products over chunks of tokens."""
    with torch.autocast(v_BTHV.device.type, enabled=False):
        q, k, v, g, beta = (x.float() if x.dtype in HALF else x for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
        if state_BHKV is None:
            state_BHKV = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
        out, state = _GatedDelta.apply(q, k, v, g, beta, state_BHKV, chunk)
    return out.to(v_BTHV.dtype), state


class _GatedDelta(Function):
    """What the tokens of a chunk write, Y before β, depends on each other: Y = e^G K S + … is the triangular system

        (I + M β) Y = [V | e^G K],   M_ij = k_i·k_j e^{G_i - G_j} for j < i,

    solved for both right sides at once, so that written = β (Y_v - Y_k S) once the chunk's first state S is known.
    Given what is written, the rest is linear attention. The gradient is derived by hand: the one of a sum of g is
    o·do - v·dv there too, and those of β and M come out of one solve with the transposed system.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        b, length, _, width = v.shape
        ctx.shape = b, length
        start, end, whole, between = decays(g, chunk)
        q, k, v, beta = split(q, chunk), split(k, chunk), split(v, chunk), split(beta[..., None], chunk)
        alike = (k @ k.mT).mul_(between)
        solved = _solve(alike * beta.mT, torch.cat([v, k * start], -1), transposed=False)
        values, keys = (solved * beta).split([width, k.shape[-1]], -1)
        keys, ended = keys.contiguous(), k * end
        written = values.contiguous()
        states = state.new_empty(len(k) + 1, *state.flatten(0, 1).shape)
        states[0] = state.flatten(0, 1)
        for n in range(len(k)):
            torch.baddbmm(written[n], keys[n], states[n], alpha=-1, out=written[n])
            torch.baddbmm(states[n] * whole[n], ended[n].mT, written[n], out=states[n + 1])
        weights = (q @ k.mT).mul_(between)
        out = (weights @ written).add_((q * start) @ states[:-1])
        ctx.save_for_backward(
            q, k, v, beta, out, weights, alike, between, solved, keys, written, states, start, end, whole
        )
        return join(out, b, length), states[-1].view_as(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, out, weights, alike, between, solved, keys, written, states, start, end, whole = (
            ctx.saved_tensors
        )
        b, length = ctx.shape
        d_out = split(d_out, q.shape[2])
        d_written, ended = weights.mT @ d_out, k * end
        read = (q * start).mT @ d_out
        after = torch.empty_like(states)
        after[-1] = d_last.flatten(0, 1)
        for n in reversed(range(len(k))):
            torch.baddbmm(d_written[n], ended[n], after[n + 1], out=d_written[n])
            torch.baddbmm(
                torch.addcmul(read[n], after[n + 1], whole[n]), keys[n].mT, d_written[n], alpha=-1, out=after[n]
            )
        d_solved = torch.cat([d_written, d_written @ states[:-1].mT.neg()], -1)
        # Before β: of the right sides d_right·β; of β itself the product with what was solved.
        d_right = _solve(alike * beta, d_solved, transposed=True)
        d_beta = (d_right * solved).sum(-1)
        d_right *= beta
        d_alike = (d_right @ (solved * beta).mT).mul_(between).tril_(-1).neg_()
        d_v, d_k_right = d_right.split([v.shape[-1], k.shape[-1]], -1)
        d_scores = (d_out @ written.mT).mul_(between)
        d_q = (d_scores @ k).addcmul_(d_out @ states[:-1].mT, start)
        d_k = (d_scores.mT @ q).add_((d_alike + d_alike.mT) @ k)
        d_k.addcmul_(d_k_right, start).addcmul_(written @ after[1:].mT, end)
        ends = (states[1:] * after[1:]).sum((2, 3))
        d_g = decay_gradient((out * d_out).sum(-1).sub_((v * d_v).sum(-1)), ends, b, length)
        d_q, d_k, d_v = join(d_q, b, length), join(d_k, b, length), join(d_v, b, length)
        return d_q, d_k, d_v, d_g, join(d_beta[..., None], b, length).squeeze(-1), after[0].view_as(d_last), None


def _solve(below: Tensor, right: Tensor, transposed: bool) -> Tensor:
    """x of (I + L) x = right, or of (I + L)ᵀ x = right; L what `below` has under its diagonal."""
    system = below.mT if transposed else below
    return torch.linalg.solve_triangular(system, right, upper=transposed, unitriangular=True)


def _shape(config: ModelConfig, layer: Layer) -> tuple[int, int, int, int]:
    """Heads, key width, value width, taps."""
    settings = layer.settings or GatedDeltaNetSettings()
    assert isinstance(settings, GatedDeltaNetSettings)
    return (
        settings.heads or config.n_heads,
        settings.key_dim or config.head_dim,
        settings.value_dim or config.head_dim,
        settings.conv_width,
    )


def _parameters(config: ModelConfig, layer: Layer) -> tuple[int, int]:
    heads, keys, values, taps = _shape(config, layer)
    matrices = config.d_model * heads * (2 * keys + 3 * values + 2)
    return matrices, heads * (2 * keys + values) * taps + 2 * heads + (values if config.norm_gain else 0)


def _flops(config: ModelConfig, layer: Layer, length: int) -> float:
    """H[2C(3K+2V) + 6KV + 2C²/3], the system's solution and the products in chunks of C = 64, and the convolutions."""
    heads, keys, values, taps = _shape(config, layer)
    products = 2 * 64 * (3 * keys + 2 * values) + 6 * keys * values + 2 * 64**2 / 3
    return heads * products + 2 * taps * heads * (2 * keys + values)


def _state(config: ModelConfig, layer: Layer, length: int) -> int:
    heads, keys, values, taps = _shape(config, layer)
    return heads * keys * values + (taps - 1) * heads * (2 * keys + values)


GATED_DELTANET = Mixer(
    module=GatedDeltaNet,
    parameters=_parameters,
    flops=_flops,
    state=_state,
    matrices=frozenset({"query", "key", "value", "gate", "beta", "decay", "output"}),
    first={
        "query": matrix,
        "key": matrix,
        "value": matrix,
        "gate": matrix,
        "beta": matrix,
        "decay": matrix,
        "query_conv": taps,
        "key_conv": taps,
        "value_conv": taps,
        "A_log": log_uniform_rate(0, 16),
        "dt_bias": step_bias,
    },
    rotary=False,
    settings=GatedDeltaNetSettings,
)
