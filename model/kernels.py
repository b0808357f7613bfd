"""Which kernel computes attention: the only file that chooses one, or imports a library of them.

All compute the same: softmax over scores/sqrt(K), where key j is visible to query i iff 0 <= i-j < window (the window
counts the current token) or j < sinks and j <= i. A kernel that cannot honour a setting refuses it and says why.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

BLOCK = 32  # queries a tile: the fastest of 16 to 256 measured on a CPU, for windows of 8 to 2048
KEEP = 512  # widest window whose probabilities are kept: beyond, T·w floats a head outweigh every other activation
HALF = (torch.bfloat16, torch.float16)


def visible(query: Tensor, key: Tensor, window: int | None, sinks: int = 0) -> Tensor:
    """Whether the keys at positions [..., T] are seen by the queries at positions [..., Q]: bool [..., Q, T]."""
    distance = query[..., :, None] - key[..., None, :]
    seen = distance >= 0
    return seen if window is None else seen & ((distance < window) | (key[..., None, :] < sinks))


@dataclass(frozen=True)
class Kernel:
    """compute(query [B, H, T, K], key [B, G, T, K], value [B, G, T, K], window, sinks) → [B, H, T, K].

    refusal(query, window, sinks): why the kernel cannot, or None where it can.
    """

    compute: Callable[[Tensor, Tensor, Tensor, int | None, int], Tensor]
    refusal: Callable[[Tensor, int | None, int], str | None]


def attend(
    query_BHTK: Tensor,
    key_BGTK: Tensor,
    value_BGTK: Tensor,
    window: int | None,
    sinks: int = 0,
    kernel: str | None = None,
) -> Tensor:
    """Causal softmax attention, [B, H, T, K]; H query heads share G key heads in runs of H/G.

    window None sees every earlier token. kernel: a name of KERNELS, or None for the first that does not refuse.
    Raises ValueError where the named kernel refuses.
    """
    # Under autocast the values come in half precision, the normed and rotated queries and keys in float32.
    query_BHTK, key_BGTK = query_BHTK.to(value_BGTK.dtype), key_BGTK.to(value_BGTK.dtype)
    if window is not None and window >= query_BHTK.shape[2]:
        window = None
    name = choose(query_BHTK, window, sinks, kernel)
    return KERNELS[name].compute(query_BHTK, key_BGTK, value_BGTK, window, sinks)


def choose(query_BHTK: Tensor, window: int | None, sinks: int = 0, kernel: str | None = None) -> str:
    """The name of the kernel that `attend` takes for such queries. Raises ValueError where the named one refuses."""
    if window is not None and window >= query_BHTK.shape[2]:
        window = None
    for name, candidate in KERNELS.items():
        if kernel not in (None, name):
            continue
        reason = candidate.refusal(query_BHTK, window, sinks)
        if reason is None:
            return name
        if kernel is not None:
            raise ValueError(f"kernel: {kernel} refuses, {reason}; leave the choice open or take another")
    raise ValueError(f"kernel: {kernel!r} is not known; choose from {', '.join(KERNELS)}")


def _flash_refusal(query: Tensor, window: int | None, sinks: int) -> str | None:
    if flash_attn_func is None:
        return "flash-attn is not installed"
    if query.device.type != "cuda" or query.dtype not in HALF:
        return f"it needs bfloat16 or float16 on CUDA, not {query.dtype} on {query.device.type}"
    if query.shape[-1] > 256:
        return f"head_dim {query.shape[-1]} is above 256"
    return "it has no sinks" if sinks and window is not None else None


def _flash(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: int) -> Tensor:
    # Its window is a distance, both ends included: (w-1, 0) is the w of this file.
    reach = (-1, -1) if window is None else (window - 1, 0)
    return flash_attn_func(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=True, window_size=reach
    ).transpose(1, 2)


def _causal_refusal(query: Tensor, window: int | None, sinks: int) -> str | None:
    return None if window is None else f"it has no window, and {window} is shorter than the sequence"


def _causal(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: int) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def _blocks_refusal(query: Tensor, window: int | None, sinks: int) -> str | None:
    if window is None:
        return "it needs a window shorter than the sequence"
    return "it has no sinks" if sinks else None


def _blocks(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: int) -> Tensor:
    assert window is not None
    return _Local.apply(query, key, value, window)


class _Local(Function):
    """Sliding-window attention in blocks of C queries, each against the C+w-1 keys it can see: work T·(C+w).

    Rows of a query block are (token, head of the group), so grouped keys are never copied. Scores in float32 at least.
    The backward recomputes the probabilities of wide windows and keeps those of narrow ones.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            b, heads, length, width = query.shape
            groups = key.shape[1]
            ratio = heads // groups
            q, k, v = _rows(query, groups), _rows(key, groups), _rows(value, groups)
            bias = _bias(window, ratio, q)
            out = torch.empty_like(q)
            kept = []
            for rows, keys, mask in _tiles(length, window, ratio, bias):
                p = _probabilities(q[:, rows], k[:, keys], mask)
                out[:, rows] = torch.bmm(p, v[:, keys])
                if window <= KEEP:
                    kept.append(p)
            ctx.save_for_backward(q, k, v, out, bias, *kept)
            ctx.shape, ctx.window, ctx.dtype = (b, heads, groups, length, width), window, query.dtype
            return _heads(out, b, length).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        with torch.autocast(gradient.device.type, enabled=False):
            q, k, v, out, bias, *kept = ctx.saved_tensors
            b, heads, groups, length, width = ctx.shape
            ratio, scale = heads // groups, 1 / math.sqrt(width)
            g = _rows(gradient, groups)
            # sum_j p_j (g·v_j), the part of a score's gradient that the softmax takes away, equals g·out.
            taken = (g * out).sum(-1, keepdim=True)
            dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for i, (rows, keys, mask) in enumerate(_tiles(length, ctx.window, ratio, bias)):
                p = kept[i] if kept else _probabilities(q[:, rows], k[:, keys], mask)
                # Not baddbmm_: into a strided slice it runs matrix by matrix, four times slower.
                dv[:, keys] += torch.bmm(p.mT, g[:, rows])
                ds = torch.bmm(g[:, rows], v[:, keys].mT).sub_(taken[:, rows]).mul_(p)
                dq[:, rows] = torch.bmm(ds, k[:, keys])
                dk[:, keys] += torch.bmm(ds.mT, q[:, rows])
            dq, dk, dv = (_heads(x, b, length).to(ctx.dtype) for x in (dq.mul_(scale), dk.mul_(scale), dv))
            return dq, dk, dv, None


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


def _tiles(length: int, window: int, ratio: int, bias: Tensor) -> list[tuple[slice, slice, Tensor]]:
    """For each block: its rows, the keys it can see, and the bias between them."""
    tiles = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        first = max(0, start - window + 1)
        offset = start - window + 1
        mask = bias[: (end - start) * ratio, first - offset : end - offset]
        tiles.append((slice(start * ratio, end * ratio), slice(first, end), mask))
    return tiles


def _probabilities(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return torch.baddbmm(mask, q, k.mT, alpha=1 / math.sqrt(q.shape[-1])).softmax(-1)


def _masked(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: int) -> Tensor:
    position = torch.arange(query.shape[2], device=query.device)
    grouped = query.shape[1] != key.shape[1]
    mask = visible(position, position, window, sinks)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


KERNELS = {
    "flash-attn": Kernel(_flash, _flash_refusal),
    "causal": Kernel(_causal, _causal_refusal),
    "blocks": Kernel(_blocks, _blocks_refusal),
    # Honours everything, at the cost of a full T×T product: for limits set at evaluation, never chosen for training.
    "masked": Kernel(_masked, lambda query, window, sinks: None),
}
