"""Sliding-window attention in blocks, in plain torch: the kernel of a CPU, work T·(C+w) a head."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

BLOCK = 32  # queries a tile: the fastest of 16 to 256 measured on a CPU, for windows of 8 to 2048
KEEP = 512  # widest window whose probabilities are kept: beyond, T·w floats a head outweigh every other activation
HALF = (torch.bfloat16, torch.float16)


def local_attention(query_BHTK: Tensor, key_BGTK: Tensor, value_BGTK: Tensor, window: int, sinks: int = 0) -> Tensor:
    """Causal softmax attention over the last `window` tokens, the current one counted, and the first `sinks`,
    [B, H, T, K]."""
    return _Local.apply(query_BHTK, key_BGTK, value_BGTK, window, sinks)


def visible(query: Tensor, key: Tensor, window: int | None, sinks: int = 0) -> Tensor:
    """Whether the keys at positions [..., T] are seen by the queries at positions [..., Q]: bool [..., Q, T]."""
    distance = query[..., :, None] - key[..., None, :]
    seen = distance >= 0
    return seen if window is None else seen & ((distance < window) | (key[..., None, :] < sinks))


class _Local(Function):
    """Sliding-window attention in blocks of C queries, each against the C+w-1+s keys it can see: work T·(C+w+s).

    Rows of a query block are (token, head of the group), so grouped keys are never copied. Scores in float32 at least.
    The backward recomputes the probabilities of wide windows and keeps those of narrow ones.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int, sinks: int) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            b, heads, length, width = query.shape
            groups = key.shape[1]
            ratio = heads // groups
            q, k, v = _rows(query, groups), _rows(key, groups), _rows(value, groups)
            bias = _bias(window, ratio, q)
            out = torch.empty_like(q)
            kept = []
            for rows, keys, mask in _tiles(length, window, sinks, ratio, bias):
                p = _probabilities(q[:, rows], _taken(k, keys), mask)
                out[:, rows] = torch.bmm(p, _taken(v, keys))
                if window <= KEEP:
                    kept.append(p)
            ctx.save_for_backward(q, k, v, out, bias, *kept)
            ctx.shape, ctx.seen, ctx.dtype = (b, heads, groups, length, width), (window, sinks), query.dtype
            return _heads(out, b, length).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        with torch.autocast(gradient.device.type, enabled=False):
            q, k, v, out, bias, *kept = ctx.saved_tensors
            b, heads, groups, length, width = ctx.shape
            (window, sinks), ratio, scale = ctx.seen, heads // groups, 1 / math.sqrt(width)
            g = _rows(gradient, groups)
            # sum_j p_j (g·v_j), the part of a score's gradient that the softmax takes away, equals g·out.
            taken = (g * out).sum(-1, keepdim=True)
            dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for i, (rows, keys, mask) in enumerate(_tiles(length, window, sinks, ratio, bias)):
                p = kept[i] if kept else _probabilities(q[:, rows], _taken(k, keys), mask)
                _add(dv, keys, torch.bmm(p.mT, g[:, rows]))
                ds = torch.bmm(g[:, rows], _taken(v, keys).mT).sub_(taken[:, rows]).mul_(p)
                dq[:, rows] = torch.bmm(ds, _taken(k, keys))
                _add(dk, keys, torch.bmm(ds.mT, q[:, rows]))
            dq, dk, dv = (_heads(x, b, length).to(ctx.dtype) for x in (dq.mul_(scale), dk.mul_(scale), dv))
            return dq, dk, dv, None, None


def _rows(x_BHTK: Tensor, groups: int) -> Tensor:
    """[B, H, T, K] → contiguous [B·G, T·(H/G), K], in float32 at least."""
    b, heads, length, width = x_BHTK.shape
    wide = x_BHTK.float() if x_BHTK.dtype in HALF else x_BHTK
    ordered = wide.view(b, groups, heads // groups, length, width).transpose(2, 3)
    return ordered.reshape(b * groups, length * heads // groups, width)


def _heads(rows: Tensor, b: int, length: int) -> Tensor:
    """The inverse of `_rows`, laid out as [B, T, H, K] so that heads join without a copy."""
    groups, ratio, width = rows.shape[0] // b, rows.shape[1] // length, rows.shape[2]
    ordered = rows.view(b, groups, length, ratio, width).permute(0, 2, 1, 3, 4)
    return ordered.reshape(b, length, groups * ratio, width).transpose(1, 2)


def _bias(window: int, ratio: int, like: Tensor) -> Tensor:
    """0 or -inf for a block's queries against the keys from window-1 before it on: [C·(H/G), C+w-1]."""
    keys = torch.arange(BLOCK + window - 1, device=like.device)
    seen = visible(keys[window - 1 :], keys, window)
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, -math.inf).repeat_interleave(ratio, 0)


Keys = tuple[slice, slice]  # of the sinks that lie before the window, and from the window on


def _tiles(length: int, window: int, sinks: int, ratio: int, bias: Tensor) -> list[tuple[slice, Keys, Tensor]]:
    """For each block: its rows, the keys it can see, and the bias between them."""
    tiles = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        first = max(0, start - window + 1)
        offset = start - window + 1
        mask = bias[: (end - start) * ratio, first - offset : end - offset]
        before = min(sinks, first)
        if before < min(sinks, end):  # sinks reach into what the window sees only in part
            keys = torch.arange(first, end, device=bias.device)
            seen = visible(torch.arange(start, end, device=bias.device), keys, window, sinks)
            mask = torch.zeros_like(seen, dtype=bias.dtype).masked_fill_(~seen, -math.inf).repeat_interleave(ratio, 0)
        if before:
            mask = torch.cat([mask.new_zeros(len(mask), before), mask], 1)
        tiles.append((slice(start * ratio, end * ratio), (slice(0, before), slice(first, end)), mask))
    return tiles


def _taken(x: Tensor, keys: Keys) -> Tensor:
    before, near = keys
    return torch.cat([x[:, before], x[:, near]], 1) if before.stop else x[:, near]


def _add(x: Tensor, keys: Keys, part: Tensor) -> None:
    """x[:, keys] += part. Not baddbmm_: into a strided slice it runs matrix by matrix, four times slower."""
    before, near = keys
    if before.stop:
        x[:, before] += part[:, : before.stop]
    x[:, near] += part[:, before.stop :]


def _probabilities(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return torch.baddbmm(mask, q, k.mT, alpha=1 / math.sqrt(q.shape[-1])).softmax(-1)
