"""Softmax attention with grouped queries: full, or over a sliding window."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import Layer, ModelConfig, rotary_width
from model.draws import matrix
from model.kernels import SINK_WIDTH, attend
from model.local_attention import visible
from model.mixers.mixer import Angles, Mixer, State
from model.norms import rms_norm
from model.positions import rotate


class Attention(nn.Module):
    """One attention layer, [B, T, D] → [B, T, D]; `full` has no window, `swa` has one.

    Keys are made in this order: projection, QK-norm, key shift, RoPE. The shift comes before RoPE so that the previous
    token's key is read at the key's own position, and after the norm so that it can sharpen the scores: before it,
    recall took 1.2 to 1.8 times the tokens to emerge (three arms of the quickstart, one seed each).
    window, sinks and query_scale may be set at evaluation too (model.limits): they hold no parameters.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        layer = config.layers[index]
        d, width = config.d_model, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, width
        self.window = layer.window
        self.sinks = layer.sinks
        self.query_scale = 1.0
        self.turned = rotary_width(width, layer.rope)
        self.eps = config.norm_eps
        self.query = nn.Linear(d, self.heads * width, bias=False)
        self.key = nn.Linear(d, self.kv_heads * width, bias=False)
        self.value = nn.Linear(d, self.kv_heads * width, bias=False)
        self.output = nn.Linear(self.heads * width, d, bias=False)
        normed = config.qk_norm is not None
        self.query_gain = nn.Parameter(torch.empty(self.heads)) if normed else None
        self.key_gain = nn.Parameter(torch.empty(self.kv_heads)) if normed else None
        self.key_shift = nn.Parameter(torch.empty(self.kv_heads)) if config.key_shift else None
        self.sink_logit = nn.Parameter(torch.empty(self.heads)) if config.sink_logit else None

    def queries_and_keys(self, x_BTD: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Queries [B, H, T, K] and keys [B, G, T, K] as they meet in the scores."""
        query, key = self._normed(x_BTD)
        return self._placed(query, key, F.pad(key[:, :, :-1], (0, 0, 1, 0)), angles)

    def forward(self, x_BTD: Tensor, angles: Angles) -> Tensor:
        return self._mixed(*self.queries_and_keys(x_BTD, angles), self._values(x_BTD))

    def prefill(self, x_BTD: Tensor, angles: Angles) -> tuple[Tensor, State]:
        query, key = self._normed(x_BTD)
        state = {"previous": key[:, :, -1:]} if self.key_shift is not None else {}
        query, key = self._placed(query, key, F.pad(key[:, :, :-1], (0, 0, 1, 0)), angles)
        value = self._values(x_BTD)
        state |= {"key": self._within_reach(key), "value": self._within_reach(value)}
        return self._mixed(query, key, value), state

    def step(self, x_B1D: Tensor, angles: Angles, state: State) -> tuple[Tensor, State]:
        query, key = self._normed(x_B1D)
        after = {"previous": key} if self.key_shift is not None else {}
        query, key = self._placed(query, key, state.get("previous", key), angles)
        for name, new in (("key", key), ("value", self._values(x_B1D))):
            after[name] = self._within_reach(torch.cat([state[name].to(new.dtype), new], 2))
        key, value = after["key"], after["value"]
        if self.sink_logit is not None:
            query, key, value = _with_sink(query, key, value, self.sink_logit)
        mixed = F.scaled_dot_product_attention(
            query.to(value.dtype), key.to(value.dtype), value, enable_gqa=self.heads != self.kv_heads
        )
        return self.output(mixed[..., : self.head_dim].transpose(1, 2).flatten(2)), after

    def empty_state(self, batch: int) -> State:
        """Keys and values as they meet the queries, [B, G, 0, K]: a window layer keeps W of them, others all."""
        like = self.key.weight
        state = {name: like.new_zeros(batch, self.kv_heads, 0, self.head_dim) for name in ("key", "value")}
        if self.key_shift is not None:
            state["previous"] = like.new_zeros(batch, self.kv_heads, 1, self.head_dim)
        return state

    def _normed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query(x_BTD).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        key = self.key(x_BTD).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        if self.query_gain is not None and self.key_gain is not None:
            query = rms_norm(query, self.eps, self.query_gain[:, None, None])
            key = rms_norm(key, self.eps, self.key_gain[:, None, None])
        return query, key

    def _placed(self, query: Tensor, key: Tensor, previous: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Queries and keys shifted, rotated and scaled; previous: the key of the token before each."""
        if self.key_shift is not None:
            key = key + self.key_shift[:, None, None] * previous
        if self.turned:
            query, key = rotate(query, *angles[self.turned]), rotate(key, *angles[self.turned])
        if self.query_scale != 1.0:
            query = query * self.query_scale
        return query, key

    def _values(self, x_BTD: Tensor) -> Tensor:
        return self.value(x_BTD).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.sink_logit is None:
            mixed = attend(query, key, value, self.window, self.sinks)
        else:
            nothing = F.pad(query, (0, 0, 1, 0))  # a query for the sink's own place, dropped again
            query, key, value = _with_sink(nothing, key, value, self.sink_logit)
            mixed = attend(query, key, value, self.window, self.sinks + 1)[:, :, 1:, : self.head_dim]
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _within_reach(self, kept_BGTK: Tensor) -> Tensor:
        """What the newest token sees of [B, G, T, K], and later ones still may: the sinks and the last W tokens."""
        if self.window is None or kept_BGTK.shape[2] <= self.window + self.sinks:
            return kept_BGTK
        return torch.cat([kept_BGTK[:, :, : self.sinks], kept_BGTK[:, :, -self.window :]], 2)


def _with_sink(query: Tensor, key: Tensor, value: Tensor, logit_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same attention with one key more, first and of value 0, whose score is `logit_H` for every query.

    Any kernel then computes it: the score travels in a number more of each query, which only the new key reads. Widths
    grow by SINK_WIDTH, and kernels divide scores by the root of the width, so that queries are scaled back.
    """
    width = key.shape[-1] + SINK_WIDTH
    query = query * math.sqrt(width / key.shape[-1])
    score = (logit_H * math.sqrt(width)).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    query = torch.cat([query, score, query.new_zeros(*query.shape[:-1], SINK_WIDTH - 1)], -1)
    key = F.pad(key, (0, SINK_WIDTH, 1, 0))
    sink = torch.zeros_like(key[:, :, :1])
    sink[..., -SINK_WIDTH] = 1
    return query, torch.cat([sink, key[:, :, 1:]], 2), F.pad(value, (0, SINK_WIDTH, 1, 0))


def reference_attention(
    query_BHTK: Tensor,
    key_BGTK: Tensor,
    value_BGTK: Tensor,
    window: int | None,
    sinks: int = 0,
    sink_logit_H: Tensor | None = None,
) -> Tensor:
    """What every kernel must equal, [B, H, T, K]: repeated heads, the whole T×T product, an explicit mask, softmax.

    sink_logit_H: a score more in each head's softmax, of a value that is 0.
    """
    length, width = query_BHTK.shape[2:]
    ratio = query_BHTK.shape[1] // key_BGTK.shape[1]
    key, value = key_BGTK.repeat_interleave(ratio, 1), value_BGTK.repeat_interleave(ratio, 1)
    position = torch.arange(length, device=query_BHTK.device)
    scores = query_BHTK @ key.mT / math.sqrt(width)
    scores = scores.masked_fill(~visible(position, position, window, sinks), -math.inf)
    if sink_logit_H is None:
        return scores.softmax(-1) @ value
    sink = sink_logit_H[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ value


def visible_tokens(layer: Layer, length: int) -> float:
    """Tokens a query sees, averaged over a sequence of `length`: (T+1)/2, or w - w(w-1)/(2T) for a window w < T, and
    with s sinks s - s(w + (s-1)/2)/T more (fewer where w + s > T)."""
    if layer.window is None or layer.window >= length:
        return (length + 1) / 2
    beyond = length - layer.window  # queries that leave tokens behind: one, then two, …
    sinks = min(layer.sinks, beyond)
    return layer.window + (sinks * (beyond - (sinks - 1) / 2) - layer.window * (layer.window - 1) / 2) / length


def _parameters(config: ModelConfig, layer: Layer) -> tuple[int, int]:
    """Queries and output [D, H·K] each, keys and values [D, G·K] each; QK-norm gains, key shifts, logits of sinks."""
    gains = 0 if config.qk_norm is None else config.n_heads + config.n_kv_heads
    gains += config.n_kv_heads if config.key_shift else 0
    gains += config.n_heads if config.sink_logit else 0
    return 2 * config.d_model * config.head_dim * (config.n_heads + config.n_kv_heads), gains


def _flops(config: ModelConfig, layer: Layer, length: int) -> float:
    return 4 * config.n_heads * config.head_dim * visible_tokens(layer, length)


def _state(config: ModelConfig, layer: Layer, length: int) -> int:
    kept = length if layer.window is None else min(layer.window + layer.sinks, length)
    return config.n_kv_heads * config.head_dim * (2 * kept + (1 if config.key_shift else 0))


FULL = Mixer(
    module=Attention,
    parameters=_parameters,
    flops=_flops,
    state=_state,
    matrices=frozenset({"query", "key", "value", "output"}),
    first={"query": matrix, "key": matrix, "value": matrix},
)
SLIDING_WINDOW = replace(FULL, windowed=True)
