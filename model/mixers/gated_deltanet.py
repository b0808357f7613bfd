"""Gated DeltaNet: a state that forgets by a gate and writes by the delta rule (arXiv 2412.06464; layer as in fla).

S ← e^{g_t} S;  u = β_t (v_t - Sᵀ k_t);  S ← S + k_t uᵀ;  o_t = Sᵀ q_t
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.config import Layer, ModelConfig
from model.draws import log_uniform_rate, matrix, step_bias, taps
from model.kernels import fla_gated_delta_rule, fla_takes
from model.mixers.chunks import HALF, Tiles, decay_gradient, decays_of, padded
from model.mixers.convolution import CausalConvolution
from model.mixers.mixer import Angles, Mixer, State, refuse_below_one
from model.norms import RMSNorm, rms_norm

CHUNK = 64  # the fastest of 16 to 256 measured on a CPU, within a tenth; what comes out does not depend on it
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
    """What `reference_gated_delta_rule` gives, over chunks of tokens: flash-linear-attention's where it can."""
    if fla_takes(k_BTHK, v_BTHV):
        return fla_gated_delta_rule(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    with torch.autocast(v_BTHV.device.type, enabled=False):
        q, k, v, g, beta = (padded(x, chunk) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
        if state_BHKV is None:
            state_BHKV = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
        out, state = _GatedDelta.apply(q, k, v, g, beta, state_BHKV, chunk)
    return out[:, : v_BTHV.shape[1]].to(v_BTHV.dtype), state


class _GatedDelta(Function):
    """What the tokens of a chunk write depends on each other. Before β it is Y_v - Y_k S, S its first state, and

        (I + M β) [Y_v | Y_k] = [V | e^G K],   M_ij = k_i·k_j e^{G_i - G_j} for j < i,

    a triangular system, solved with its unknowns as rows. Given what is written, the rest is linear attention. The
    transposed system gives the gradients; they are derived by hand, and hold at β = 0 too.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        tiles, out = Tiles(v, chunk), torch.empty_like(v)
        first = state.flatten(0, 1)
        states = first.new_empty(tiles.chunks + 1, *first.shape)
        states[0] = first
        kept = []
        for tile in tiles:
            start, end, whole, between = decays_of(tiles.take(g[..., None], tile))
            q_XCK, k_XCK, v_XCV = tiles.take(q, tile), tiles.take(k, tile), tiles.take(v, tile)
            beta_XC1 = tiles.take(beta[..., None], tile)
            alike = (k_XCK @ k_XCK.mT).mul_(between)
            system = alike * beta_XC1.mT
            values, keys = _solved(system, v_XCV), _solved(system, k_XCK * start)
            written, deleted, ended = values * beta_XC1, keys * beta_XC1, k_XCK * end
            over = whole.unflatten(0, (-1, len(first)))
            for m, (value, key, last) in enumerate(_by_chunk(first, written, deleted, ended)):
                now, after = states[tile.start + m], states[tile.start + m + 1]
                value.baddbmm_(key, now, alpha=-1)
                torch.mul(now, over[m], out=after).baddbmm_(last.mT, value)
            weights = (q_XCK @ k_XCK.mT).mul_(between)
            read = (q_XCK @ states[tile].flatten(0, 1)).mul_(start)
            tiles.put(out, tile, read.baddbmm_(weights, written))
            kept += [start, end, whole, between, alike, values, keys, written, weights]
        ctx.save_for_backward(q, k, beta, states, *kept)
        ctx.chunk = chunk
        return out, states[-1].view(state.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        q, k, beta, states, *kept = ctx.saved_tensors
        d_out = d_out.contiguous()
        tiles, carried = Tiles(d_out, ctx.chunk), d_last.flatten(0, 1)
        d_q, d_k, d_v, d_beta = (torch.empty_like(x) for x in (q, k, d_out, beta))
        d_g = torch.empty_like(beta)
        for tile in reversed(tiles):
            *kept, start, end, whole, between, alike, values, keys, written, weights = kept
            q_XCK, k_XCK = tiles.take(q, tile), tiles.take(k, tile)
            beta_XC1, d_XCV = tiles.take(beta[..., None], tile), tiles.take(d_out, tile)
            before, d_read = states[tile].flatten(0, 1), d_XCV * start
            deleted, ended = keys * beta_XC1, k_XCK * end
            over = whole.unflatten(0, (-1, len(carried)))
            d_written = weights.mT @ d_XCV
            after = q_XCK.mT @ d_read
            chunks = list(enumerate(_by_chunk(carried, d_written, deleted, ended, after)))
            for m, (d_value, key, last, d_state) in reversed(chunks):
                d_value.baddbmm_(last, carried)
                earlier = torch.addcmul(d_state, carried, over[m])
                d_state.copy_(carried)
                carried = earlier.baddbmm_(key.mT, d_value, alpha=-1)
            # (I + M β)ᵀ x = gradients of β [Y_v | Y_k]; the products of x with what was solved are the gradient of β.
            system = (alike * beta_XC1).mT
            d_values = _solved(system, d_written, upper=True)
            d_keys = _solved(system, d_written @ before.mT, upper=True).neg_()
            tiles.put(d_beta[..., None], tile, (d_values * values).sum(2, True) + (d_keys * keys).sum(2, True))
            d_values.mul_(beta_XC1)
            d_keys.mul_(beta_XC1)
            d_system = (d_values @ values.mT).baddbmm_(d_keys, keys.mT).mul_(-beta_XC1.mT)
            d_system.diagonal(dim1=1, dim2=2).zero_()
            tiles.put(d_v, tile, d_values)
            d_start, d_end = d_keys.mul_(start), (written @ after.mT).mul_(end)
            d_query, d_weights = d_read @ before.mT, d_XCV @ written.mT
            reads = (d_query * q_XCK).sum(2).add_((d_start * k_XCK).sum(2))
            d_whole = (before * after).sum((1, 2)).mul_(whole.flatten())
            pairs = (d_weights * weights).addcmul_(d_system, alike)
            tiles.put(d_g[..., None], tile, decay_gradient(pairs, reads, (d_end * k_XCK).sum(2), d_whole))
            d_scores, d_alike = d_weights.mul_(between), d_system.mul_(between)
            tiles.put(d_q, tile, d_query.baddbmm_(d_scores, k_XCK))
            d_key = d_end.add_(d_start).baddbmm_(d_scores.mT, q_XCK)
            tiles.put(d_k, tile, d_key.baddbmm_(d_alike, k_XCK).baddbmm_(d_alike.mT, k_XCK))
        return d_q, d_k, d_v, d_g, d_beta, carried.view(d_last.shape), None


def _solved(system_XCC: Tensor, right_XCK: Tensor, upper: bool = False) -> Tensor:
    """x of (I + L) x = right, L the system's part under its diagonal, or above it where `upper`.

    Asked for transposed, for then what LAPACK takes and leaves column by column lies as everything else does.
    """
    solve = torch.linalg.solve_triangular
    return solve(system_XCC.mT, right_XCK.mT, upper=not upper, left=False, unitriangular=True).mT


def _by_chunk(state: Tensor, *parts_XCK: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The parts of each chunk of a tile, [P, C, K], as many as there are states."""
    return zip(*(part.unflatten(0, (-1, len(state))).unbind() for part in parts_XCK), strict=True)


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
    heads=lambda config, layer: _shape(config, layer)[0],
)
