"""Linear attention with a decay a head and token, in chunks: what Lightning attention and Mamba-2 compute.

    S_t = e^{g_t} S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t

Within a chunk of C tokens all pairs meet in one product, as in attention; between chunks the state S carries on. Decays
are exponentials of differences of cumulated g, never quotients of exponentials, so that none overflows. Shapes: N
chunks, R value heads a key head, and P = B·G pairs of sequence and key head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

HALF = (torch.bfloat16, torch.float16)


def chunked_linear_attention(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, chunk: int, state_BHKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs [B, T, H, V], state after the last token [B, H, K, V]); H value heads share G key heads in runs of H/G.

    g: logarithms of the decays, at most 0. state: before the first token, zeros by default. Products run in float32 at
    least, whatever autocast says; the outputs have the type of v. One key head for several value heads is never copied.
    """
    with torch.autocast(v_BTHV.device.type, enabled=False):
        q, k, v, g = (x.float() if x.dtype in HALF else x for x in (q_BTGK, k_BTGK, v_BTHV, g_BTH))
        if state_BHKV is None:
            state_BHKV = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
        out, state = _LinearAttention.apply(q, k, v, g, state_BHKV, chunk)
    return out.to(v_BTHV.dtype), state


def split(x_BTHK: Tensor, chunk: int) -> Tensor:
    """[B, T, H, K] → contiguous [N, B·H, C, K], the last chunk filled up with zeros."""
    b, length, heads, width = x_BTHK.shape
    padded = F.pad(x_BTHK, (0, 0, 0, 0, 0, -length % chunk))
    return padded.view(b, -1, chunk, heads, width).permute(1, 0, 3, 2, 4).reshape(-1, b * heads, chunk, width)


def join(x_NPCK: Tensor, b: int, length: int) -> Tensor:
    """The inverse of `split`: [B, T, H, K]."""
    chunks, pairs, chunk, width = x_NPCK.shape
    ordered = x_NPCK.view(chunks, b, pairs // b, chunk, width).permute(1, 0, 3, 2, 4)
    return ordered.reshape(b, chunks * chunk, pairs // b, width)[:, :length]


def decays(g_BTH: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decays within chunks, of P = B·H sequences: from the chunk's start to each token [N, P, C, 1], from each token to
    the chunk's end [N, P, C, 1], over the chunk [N, P, 1, 1], and from token j to token i >= j [N, P, C, C], 0 above.

    Sums are taken in float64: in float32 the difference of two large ones loses what small decays follow a large one.
    """
    total_NPC = split(g_BTH[..., None].double(), chunk).squeeze(-1).cumsum(-1)
    between = (total_NPC[..., :, None] - total_NPC[..., None, :]).to(g_BTH.dtype)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=g_BTH.device).triu_(1)
    between.masked_fill_(future, -torch.inf).exp_()
    to_end = (total_NPC[..., -1:] - total_NPC).to(g_BTH.dtype).exp_()
    from_start = total_NPC.to(g_BTH.dtype).exp_()
    return from_start[..., None], to_end[..., None], from_start[..., -1:, None], between


def decay_gradient(token_NPC: Tensor, end_NP: Tensor, b: int, length: int) -> Tensor:
    """Gradient of g [B, T, H] from those of its sums within chunks: of each token's, and of the chunk's whole sum."""
    token_NPC[..., -1] += end_NP
    summed = token_NPC.flip(-1).cumsum(-1).flip(-1)
    return join(summed[..., None], b, length).squeeze(-1)


class _LinearAttention(Function):
    """Derived by hand. The gradient of a sum of g up to token i is o_i·do_i - v_i·dv_i, for scaling the state's past
    scales what is read against what is written; so no gradient of the C×C decays is ever formed."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        b, length, heads, width = v.shape
        groups = k.shape[2]
        ratio = heads // groups
        ctx.shape = b, length, groups, ratio
        start, end, whole, between = decays(g, chunk)
        q, k, v = split(q, chunk), split(k, chunk), split(v, chunk)
        scores = _per_head(q @ k.mT, ratio)
        weights = scores * between
        states = _states(k.mT @ _beside(v * end, ratio), whole, _beside(state.flatten(0, 1), ratio), ratio)
        out = (weights @ v).addcmul_(_apart(q @ states[:-1], ratio), start)
        ctx.save_for_backward(q, k, v, out, weights, between, start, end, whole, states)
        last = _apart(states[-1], ratio).view(b, heads, -1, width)
        return join(out, b, length), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, weights, between, start, end, whole, states = ctx.saved_tensors
        b, length, _, ratio = ctx.shape
        d_out = split(d_out, out.shape[2])
        read = _beside(d_out * start, ratio)
        # Gradients of the states, last first: the scan of the forward pass, run backwards.
        back = _states(
            (q.mT @ read).flip(0), whole.flip(0), _beside(d_last.reshape(-1, *d_last.shape[2:]), ratio), ratio
        )
        after, d_state = back[:-1].flip(0), _apart(back[-1], ratio).view_as(d_last)
        d_v = (weights.mT @ d_out).addcmul_(_apart(k @ after, ratio), end)
        d_scores = (d_out @ v.mT).mul_(between)
        if ratio > 1:
            d_scores = d_scores.unflatten(1, (-1, ratio)).sum(2)
        d_q = (d_scores @ k).add_(read @ states[:-1].mT)
        d_k = (d_scores.mT @ q).add_(_beside(v * end, ratio) @ after.mT)
        ended = _apart((states[1:] * after).sum(2, keepdim=True), ratio).sum((2, 3))
        d_g = decay_gradient((out * d_out - v * d_v).sum(-1), ended, b, length)
        return join(d_q, b, length), join(d_k, b, length), join(d_v, b, length), d_g, d_state, None


def _per_head(x_NPCC: Tensor, ratio: int) -> Tensor:
    return x_NPCC if ratio == 1 else x_NPCC.repeat_interleave(ratio, 1)


def _beside(x_PRKV: Tensor, ratio: int) -> Tensor:
    """[..., P·R, K, V] → [..., P, K, R·V]: the heads that share a key side by side, for one product with it."""
    if ratio == 1:
        return x_PRKV
    return x_PRKV.unflatten(-3, (-1, ratio)).transpose(-3, -2).flatten(-2)


def _apart(x_PKV: Tensor, ratio: int) -> Tensor:
    """The inverse of `_beside`."""
    if ratio == 1:
        return x_PKV
    return x_PKV.unflatten(-1, (ratio, -1)).transpose(-3, -2).flatten(-4, -3)


def _states(added: Tensor, whole: Tensor, first: Tensor, ratio: int) -> Tensor:
    """[N+1, P, K, R·V]: `first`, and after each chunk the state before it, decayed, plus what is added."""
    chunks, pairs, width, values = added.shape
    states = torch.empty(chunks + 1, pairs, width, values, dtype=added.dtype, device=added.device)
    states[0] = first
    heads = states.view(chunks + 1, pairs, width, ratio, -1)
    decay = whole.view(chunks, pairs, 1, ratio, 1)
    for n, new in enumerate(added.view(chunks, pairs, width, ratio, -1).unbind()):
        torch.addcmul(new, heads[n], decay[n], out=heads[n + 1])
    return states
