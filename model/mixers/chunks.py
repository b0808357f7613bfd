"""Linear attention with a decay a head and token, in chunks: what Lightning attention and Mamba-2 compute.

    S_t = e^{g_t} S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t

Within a chunk of C tokens all pairs meet in one product, as in attention; between chunks the state S carries on. Decays
are exponentials of differences of cumulated g, never quotients of exponentials, so that none overflows.

Chunks are taken a tile of them at a time, so that what lies between two products stays in the cache: over the whole
sequence at once the same products take two to three times as long. Shapes: M chunks in a tile, P = B·G pairs of
sequence and key head, X = M·P, R value heads a key head, Y = X·R.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.kernels import fla_linear_attention, fla_takes

WEAKEST = -80.0  # logarithm of a decay from which nothing is left to see
HALF = (torch.bfloat16, torch.float16)
TILE = 2**16  # pairs of tokens in a tile, over all its heads: the fastest of 2^14 to 2^17 measured on a CPU


def chunked_linear_attention(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, chunk: int, state_BHKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs [B, T, H, V], state after the last token [B, H, K, V]); H value heads share G key heads in runs of H/G.

    g: logarithms of the decays, at most 0. state: before the first token, zeros by default. Products run in float32 at
    least, whatever autocast says; the outputs have the type of v. One key head for several value heads is never copied.
    Where flash-linear-attention can, it computes the same in its own chunks and in half precision.
    """
    if fla_takes(k_BTGK, v_BTHV):
        return fla_linear_attention(q_BTGK, k_BTGK, v_BTHV, g_BTH, state_BHKV)
    with torch.autocast(v_BTHV.device.type, enabled=False):
        q, k, v, g = (padded(x, chunk) for x in (q_BTGK, k_BTGK, v_BTHV, g_BTH))
        if state_BHKV is None:
            state_BHKV = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
        out, state = _LinearAttention.apply(q, k, v, g, state_BHKV, chunk)
    return out[:, : v_BTHV.shape[1]].to(v_BTHV.dtype), state


def padded(x_BT: Tensor, chunk: int) -> Tensor:
    """[B, T, …] in float32 at least, contiguous, filled with zeros to whole chunks: they write and forget nothing."""
    wide = x_BT.float() if x_BT.dtype in HALF else x_BT
    missing = -x_BT.shape[1] % chunk
    return F.pad(wide, (0, 0) * (x_BT.ndim - 2) + (0, missing)) if missing else wide.contiguous()


class Tiles:
    """The walk over sequences [B, T, H, …] of whole chunks, a few chunks at a time."""

    def __init__(self, like_BTH: Tensor, chunk: int) -> None:
        self.b, length, heads = like_BTH.shape[:3]
        self.chunk, self.chunks = chunk, length // chunk
        self.size = max(1, TILE // (self.b * heads * chunk * chunk))

    def __iter__(self) -> Iterator[slice]:
        """The chunks of each tile, first to last."""
        return (slice(n, min(n + self.size, self.chunks)) for n in range(0, self.chunks, self.size))

    def __reversed__(self) -> Iterator[slice]:
        return reversed(list(iter(self)))

    def take(self, x_BTHK: Tensor, tile: slice) -> Tensor:
        """A tile's tokens, [M·B·H, C, K]."""
        return self._view(x_BTHK, tile).reshape(-1, self.chunk, x_BTHK.shape[3])

    def put(self, x_BTHK: Tensor, tile: slice, part_XCK: Tensor) -> None:
        """Writes a tile's tokens."""
        view = self._view(x_BTHK, tile)
        view.copy_(part_XCK.reshape(view.shape))

    def _view(self, x_BTHK: Tensor, tile: slice) -> Tensor:
        """[M, B, H, C, K]"""
        parts = x_BTHK.view(self.b, self.chunks, self.chunk, *x_BTHK.shape[2:])
        return parts[:, tile].permute(1, 0, 3, 2, 4)


class Decays(NamedTuple):
    """Decays in each of Y chunks: from its start to each token [Y, C, 1], from each token to its end [Y, C, 1], over
    all of it [Y, 1, 1], and from token j to token i >= j [Y, C, C], 0 for i < j."""

    start: Tensor
    end: Tensor
    whole: Tensor
    between: Tensor


def decays_of(g_YC1: Tensor) -> Decays:
    """Sums are taken in float64: in float32 the difference of large ones loses the weak decays after a strong one.

    Decays below e^-80 stay there: on a CPU an exponential takes ten to fifty times as long where it underflows, and
    products with what it then leaves take longer too.
    """
    total = g_YC1.double().cumsum(1)
    between = (total - total.mT).to(g_YC1.dtype).clamp_(WEAKEST, 0).exp_().tril_()
    start = total.to(g_YC1.dtype).clamp(min=WEAKEST).exp_()
    end = (total[:, -1:] - total).to(g_YC1.dtype).clamp_(min=WEAKEST).exp_()
    return Decays(start, end, start[:, -1:], between)


def decay_gradient(pairs: Tensor, reads: Tensor, writes: Tensor, whole: Tensor) -> Tensor:
    """Gradient of g [Y, C, 1]: for each token the sum over all decays that cross it.

    Given are the products of each decay with its gradient: `pairs` of tokens [Y, C, C], `reads` from the start and
    `writes` to the end [Y, C], over the `whole` chunk [Y]. Only what crosses is added up, nothing taken away again: of
    the terms that would cancel, float32 leaves more than what crosses a strong decay.
    """
    chunk = pairs.shape[-1]
    ones = torch.ones(chunk, chunk, dtype=pairs.dtype, device=pairs.device)
    from_before = (pairs.view(-1, chunk) @ ones.triu(1)).view_as(pairs)
    crossing = from_before.mul_(ones.tril()).sum(1).add_(reads.flip(-1).cumsum(-1).flip(-1)).add_(whole[:, None])
    crossing[:, 1:].add_(writes[:, :-1].cumsum(-1))
    return crossing[..., None]


class _LinearAttention(Function):
    """Both passes walk the tiles, the backward one from the last; gradients are derived by hand."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        ratio = v.shape[2] // k.shape[2]
        tiles, out = Tiles(v, chunk), torch.empty_like(v)
        first = _beside(state.flatten(0, 1), ratio)
        states = first.new_empty(tiles.chunks + 1, *first.shape)
        states[0] = first
        kept = []
        for tile in tiles:
            decays = decays_of(tiles.take(g[..., None], tile))
            q_XCK, k_XCK, v_YCV = tiles.take(q, tile), tiles.take(k, tile), tiles.take(v, tile)
            added = k_XCK.mT @ _beside(v_YCV * decays.end, ratio)
            for n, new in enumerate(added.view(-1, *first.shape), tile.start):
                _keep(states[n], decays.whole, n - tile.start, new, ratio, states[n + 1])
            read = _apart(q_XCK @ states[tile].flatten(0, 1), ratio).mul_(decays.start)
            weights = _times_each(q_XCK @ k_XCK.mT, decays.between, ratio)
            tiles.put(out, tile, torch.baddbmm(read, weights, v_YCV))
            kept += [read, weights, *decays]
        ctx.save_for_backward(q, k, v, states, *kept)
        ctx.chunk = chunk
        return out, _apart(states[-1], ratio).view(state.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, states, *kept = ctx.saved_tensors
        ratio, wants_decay = v.shape[2] // k.shape[2], ctx.needs_input_grad[3]
        tiles = Tiles(v, ctx.chunk)
        d_out, d_q, d_k, d_v = d_out.contiguous(), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        d_g = v.new_empty(v.shape[:3]) if wants_decay else None
        carried = _beside(d_last.flatten(0, 1), ratio)
        for tile in reversed(tiles):
            *kept, read, weights, start, end, whole, between = kept
            q_XCK, k_XCK, v_YCV = tiles.take(q, tile), tiles.take(k, tile), tiles.take(v, tile)
            d_YCV = tiles.take(d_out, tile)
            d_read = _beside(d_YCV * start, ratio)
            d_states = (q_XCK.mT @ d_read).view(-1, *carried.shape)
            after = torch.empty_like(d_states)
            for m in reversed(range(len(after))):
                after[m] = carried
                carried = _keep(carried, whole, m, d_states[m], ratio)
            before, after = states[tile].flatten(0, 1), after.flatten(0, 1)
            written = _apart(k_XCK @ after, ratio).mul_(end)
            tiles.put(d_v, tile, torch.baddbmm(written, weights.mT, d_YCV))
            d_weights = d_YCV @ v_YCV.mT
            if d_g is not None:
                d_whole = _apart(before * after, ratio).sum((1, 2)) * whole.flatten()
                pairs, reads, writes = d_weights * weights, (read * d_YCV).sum(-1), (written * v_YCV).sum(-1)
                tiles.put(d_g[..., None], tile, decay_gradient(pairs, reads, writes, d_whole))
            d_scores = d_weights.mul_(between)
            if ratio > 1:
                d_scores = d_scores.unflatten(0, (-1, ratio)).sum(1)
            tiles.put(d_q, tile, torch.baddbmm(d_read @ before.mT, d_scores, k_XCK))
            tiles.put(d_k, tile, torch.baddbmm(_beside(v_YCV * end, ratio) @ after.mT, d_scores.mT, q_XCK))
        return d_q, d_k, d_v, d_g, _apart(carried, ratio).view(d_last.shape), None


def _times_each(scores_XCC: Tensor, between_YCC: Tensor, ratio: int) -> Tensor:
    """Scores of a key head times the decays of each of its value heads."""
    if ratio == 1:
        return scores_XCC.mul_(between_YCC)
    return (scores_XCC[:, None] * between_YCC.unflatten(0, (-1, ratio))).flatten(0, 1)


def _beside(x_YKV: Tensor, ratio: int) -> Tensor:
    """[X·R, K, V] → [X, K, R·V]: the heads that share a key side by side, for one product with it."""
    return x_YKV if ratio == 1 else x_YKV.unflatten(0, (-1, ratio)).transpose(1, 2).flatten(2)


def _apart(x_XKV: Tensor, ratio: int) -> Tensor:
    """The inverse of `_beside`."""
    return x_XKV if ratio == 1 else x_XKV.unflatten(2, (ratio, -1)).transpose(1, 2).flatten(0, 1)


def _keep(state: Tensor, whole: Tensor, m: int, new: Tensor, ratio: int, out: Tensor | None = None) -> Tensor:
    """A state [P, K, R·V] decayed over chunk m of a tile, and what is new."""
    pairs, width, _ = state.shape
    decay = whole.view(-1, pairs, 1, ratio, 1)[m]
    shape = pairs, width, ratio, -1
    out = torch.empty_like(state) if out is None else out
    torch.addcmul(new.view(shape), state.view(shape), decay, out=out.view(shape))
    return out
