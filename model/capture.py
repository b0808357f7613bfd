"""Attention rows of a model as it reads: only those asked for, never a whole T×T matrix."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.limits import attention_layers
from model.lm import LanguageModel
from model.local_attention import visible
from model.mixers.attention import Attention


@torch.no_grad()
def attention_rows(
    model: LanguageModel, tokens_BT: Tensor, positions: Tensor, layers: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """What each head attends to at given query positions: layer → probabilities, float32 at least, [B, H, Q, T].

    positions: int64 [Q], or [B, Q] where documents ask at places of their own. layers: 0-based indices of softmax
    layers, all of them by default. A row sums to 1 over the tokens its layer sees and is 0 elsewhere; limits set by
    model.limits hold here too. Memory is B·H·Q·T a layer. Raises ValueError for a layer without softmax attention or a
    position outside the sequence.
    """
    known = attention_layers(model)
    wanted = list(known) if layers is None else list(layers)
    for index in wanted:
        if index not in known:
            raise ValueError(f"layers: {index} is no softmax attention layer; choose from {sorted(known)}")
    batch, length = tokens_BT.shape
    positions_BQ = positions.to(tokens_BT.device).expand(batch, -1)
    if ((positions_BQ < 0) | (positions_BQ >= length)).any():
        raise ValueError(f"positions: {positions.tolist()} leaves 0..{length - 1}; ask inside the sequence")

    rows: dict[int, Tensor] = {}
    hooks = []
    for index in wanted:

        def keep(mixer: nn.Module, inputs: tuple[Tensor, tuple[Tensor, Tensor]], index: int = index) -> None:
            assert isinstance(mixer, Attention)
            rows[index] = _rows(mixer, *inputs, positions_BQ)

        hooks.append(known[index].register_forward_pre_hook(keep))
    try:
        model.hidden(model.embedding(tokens_BT))
    finally:
        for hook in hooks:
            hook.remove()
    return rows


def _rows(mixer: Attention, x_BTD: Tensor, angles: tuple[Tensor, Tensor], positions_BQ: Tensor) -> Tensor:
    query_BHTK, key_BGTK = mixer.queries_and_keys(x_BTD, angles)
    batch, heads, length, width = query_BHTK.shape
    groups, asked = key_BGTK.shape[1], positions_BQ.shape[1]
    index = positions_BQ[:, None, :, None].expand(batch, heads, asked, width)
    query = query_BHTK.gather(2, index).view(batch, groups, heads // groups * asked, width)
    scores = (query @ key_BGTK.mT).view(batch, heads, asked, length) / math.sqrt(width)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    seen_BQT = visible(positions_BQ, torch.arange(length, device=x_BTD.device), mixer.window, mixer.sinks)
    return scores.masked_fill_(~seen_BQT[:, None], -math.inf).softmax(-1)
