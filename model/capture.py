"""Attention rows of a model as it reads: only those asked for, never a whole T×T matrix."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.limits import chosen_layers, softmax_heads
from model.lm import LanguageModel
from model.local_attention import visible
from model.mixers.attention import Attention
from model.mixers.mixer import Angles


@torch.no_grad()
def attention_rows(
    model: LanguageModel, tokens_BT: Tensor, positions: Tensor, layers: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """What each head attends to at given query positions: layer → probabilities, float32 at least, [B, H, Q, T].

    positions: int64 [Q], or [B, Q] where documents ask at places of their own. layers: 0-based indices of softmax
    layers, all of them by default; H their softmax heads, numbered as `model.limits.softmax_heads` does. A row sums to
    1 over the tokens its layer sees, less what goes to a learned sink, and is 0 elsewhere; limits set by model.limits
    hold here too. Memory is B·H·Q·T a layer. Raises ValueError for a layer without softmax attention or a position
    outside the sequence.
    """
    wanted = softmax_heads(model) if layers is None else chosen_layers(model, layers)
    batch, length = tokens_BT.shape
    positions_BQ = positions.to(tokens_BT.device).expand(batch, -1)
    if ((positions_BQ < 0) | (positions_BQ >= length)).any():
        raise ValueError(f"positions: {positions.tolist()} leaves 0..{length - 1}; ask inside the sequence")

    rows: dict[int, list[Tensor]] = {index: [] for index in wanted}
    hooks = []
    for index, parts in wanted.items():

        def keep(mixer: nn.Module, inputs: tuple[Tensor, Angles], index: int = index) -> None:
            assert isinstance(mixer, Attention)
            rows[index].append(_rows(mixer, *inputs, positions_BQ))

        hooks += [part.mixer.register_forward_pre_hook(keep) for part in parts]
    try:
        model.hidden(model.embedding(tokens_BT))
    finally:
        for hook in hooks:
            hook.remove()
    return {index: torch.cat(heads, 1) for index, heads in rows.items()}


def _rows(mixer: Attention, x_BTD: Tensor, angles: Angles, positions_BQ: Tensor) -> Tensor:
    query_BHTK, key_BGTK = mixer.queries_and_keys(x_BTD, angles)
    batch, heads, length, width = query_BHTK.shape
    groups, asked = key_BGTK.shape[1], positions_BQ.shape[1]
    index = positions_BQ[:, None, :, None].expand(batch, heads, asked, width)
    query = query_BHTK.gather(2, index).view(batch, groups, heads // groups * asked, width)
    scores = (query @ key_BGTK.mT).view(batch, heads, asked, length) / math.sqrt(width)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    seen_BQT = visible(positions_BQ, torch.arange(length, device=x_BTD.device), mixer.window, mixer.sinks)
    scores = scores.masked_fill_(~seen_BQT[:, None], -math.inf)
    if mixer.sink_logit is None:
        return scores.softmax(-1)
    sink = mixer.sink_logit.to(scores.dtype)[:, None, None].expand(batch, heads, asked, 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
