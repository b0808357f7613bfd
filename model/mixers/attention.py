"""Softmax attention with grouped queries: full, or over a sliding window."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import Layer, ModelConfig
from model.kernels import attend, visible
from model.norms import rms_norm
from model.positions import rotate


class Attention(nn.Module):
    """One attention layer, [B, T, D] → [B, T, D]; `full` has no window, `swa` has one.

    Keys are made in this order: projection, QK-norm, key shift, RoPE. The shift comes before RoPE so that the previous
    token's key is read at the key's own position, and after the norm so that it can sharpen the scores: before it,
    recall took 1.2 to 1.8 times the tokens to emerge (three arms of the quickstart, one seed each).
    window, sinks and query_scale may be set at evaluation (model.limits): they hold no parameters.
    """

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__()
        d, width = config.d_model, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, width
        self.window = layer.window
        self.sinks = 0
        self.query_scale = 1.0
        self.rope = layer.rope
        self.eps = config.norm_eps
        self.query = nn.Linear(d, self.heads * width, bias=False)
        self.key = nn.Linear(d, self.kv_heads * width, bias=False)
        self.value = nn.Linear(d, self.kv_heads * width, bias=False)
        self.output = nn.Linear(self.heads * width, d, bias=False)
        normed = config.qk_norm is not None
        self.query_gain = nn.Parameter(torch.empty(self.heads)) if normed else None
        self.key_gain = nn.Parameter(torch.empty(self.kv_heads)) if normed else None
        self.key_shift = nn.Parameter(torch.empty(self.kv_heads)) if config.key_shift else None

    def queries_and_keys(self, x_BTD: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries [B, H, T, K] and keys [B, G, T, K] as they meet in the scores."""
        query = self.query(x_BTD).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        key = self.key(x_BTD).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        if self.query_gain is not None and self.key_gain is not None:
            query = rms_norm(query, self.eps, self.query_gain[:, None, None])
            key = rms_norm(key, self.eps, self.key_gain[:, None, None])
        if self.key_shift is not None:
            key = key + self.key_shift[:, None, None] * F.pad(key[:, :, :-1], (0, 0, 1, 0))
        if self.rope:
            query, key = rotate(query, *angles), rotate(key, *angles)
        if self.query_scale != 1.0:
            query = query * self.query_scale
        return query, key

    def forward(self, x_BTD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        query, key = self.queries_and_keys(x_BTD, angles)
        value = self.value(x_BTD).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        mixed = attend(query, key, value, self.window, self.sinks)
        return self.output(mixed.transpose(1, 2).flatten(2))


def reference_attention(
    query_BHTK: Tensor, key_BGTK: Tensor, value_BGTK: Tensor, window: int | None, sinks: int = 0
) -> Tensor:
    """What every kernel must equal, [B, H, T, K]: repeated heads, the whole T×T product, an explicit mask, softmax."""
    length, width = query_BHTK.shape[2:]
    ratio = query_BHTK.shape[1] // key_BGTK.shape[1]
    key, value = key_BGTK.repeat_interleave(ratio, 1), value_BGTK.repeat_interleave(ratio, 1)
    position = torch.arange(length, device=query_BHTK.device)
    scores = query_BHTK @ key.mT / math.sqrt(width)
    scores = scores.masked_fill(~visible(position, position, window, sinks), -math.inf)
    return scores.softmax(-1) @ value
