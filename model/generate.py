"""Greedy text after a prompt, from states and caches: a new token costs one step, the prompt is not read again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.lm import LanguageModel


@torch.no_grad()
def generate(model: LanguageModel, prompts: Sequence[Tensor], tokens: int, batch: int = 16) -> list[Tensor]:
    """The `tokens` most likely next tokens, one at a time, after each prompt int64 [T]: int64 [tokens] each.

    Prompts of one length are read together, at most `batch` of them: states of prompts of different lengths have no
    common shape, and filling the shorter ones up would be read by recurrent layers.
    """
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    written: dict[int, Tensor] = {}
    for alike in by_length.values():
        for start in range(0, len(alike), batch):
            chosen = alike[start : start + batch]
            for index, text in zip(chosen, _greedy(model, [prompts[i] for i in chosen], tokens), strict=True):
                written[index] = text
    return [written[index] for index in range(len(prompts))]


def _greedy(model: LanguageModel, prompts: list[Tensor], tokens: int) -> Tensor:
    """int64 [B, tokens]"""
    logits_BV, state = model.prefill(torch.stack(prompts).to(next(model.parameters()).device))
    new = [logits_BV.argmax(-1)]
    while len(new) < tokens:
        logits_BV, state = model.step(new[-1], state)
        new.append(logits_BV.argmax(-1))
    return torch.stack(new, 1)
