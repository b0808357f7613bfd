"""Optimizer state saved by one number of workers at ZeRO stage 1 or 2, cut anew for another.

There a group's parameters are one flat tensor, padded to a multiple of twice the workers, and each rank holds one equal
share of it. AdamW's moments are shares too. Muon's momentum is kept whole for every matrix that a share touches, so the
matrix on a border is held on both sides. (As in DeepSpeed 0.19's `stage_1_and_2.py`, which converts neither itself.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WHOLE = "momentum_buffer"  # state kept by matrix, not by share

State = dict[str, Any]


def reshare(saved: Sequence[State], sizes: Sequence[Sequence[int]], rank: int, workers: int) -> State:
    """The state of `rank` of `workers`, from those of all ranks that saved. sizes: elements a parameter, by group.

    Raises ValueError where a share is not as long as the layout says.
    """
    if "parts" in saved[0]:  # AdamW for every group: one part
        return {"parts": [reshare([state["parts"][0] for state in saved], sizes, rank, workers)]}
    ours: dict[int, dict[str, Any]] = {}
    for group, elements in enumerate(sizes):
        shares = [state["state"].get(group, {}) for state in saved]
        names = {name for share in shares for name in share}
        ours[group] = {name: _entry(name, shares, elements, rank, workers) for name in sorted(names)}
    return {**saved[0], "state": ours}


def _entry(name: str, shares: Sequence[dict[str, Any]], elements: Sequence[int], rank: int, workers: int) -> Any:
    values = [share.get(name) for share in shares]
    first = next(value for value in values if value is not None)
    if not isinstance(first, Tensor) or first.ndim == 0:  # steps taken: the same on every rank
        return first
    if name == WHOLE:
        whole: dict[int, Tensor] = {}
        for old_rank, value in enumerate(values):
            touched = _touched(elements, old_rank, len(shares))
            held = first.new_empty(0) if value is None else value
            _check(name, held, sum(elements[i] for i in touched))
            whole |= dict(zip(touched, held.split([elements[i] for i in touched]), strict=True))
        return torch.cat([first.new_empty(0), *(whole[i] for i in _touched(elements, rank, workers))])
    for value in values:
        _check(name, value, _share(elements, len(shares)))
    flat = torch.cat([value for value in values if value is not None])[: sum(elements)]
    padded = torch.cat([flat, flat.new_zeros(_share(elements, workers) * workers - len(flat))])
    return padded.split(_share(elements, workers))[rank].clone()


def _share(elements: Sequence[int], workers: int) -> int:
    """Elements of a rank's share, padding included."""
    return 2 * -(-sum(elements) // (2 * workers))


def _touched(elements: Sequence[int], rank: int, workers: int) -> list[int]:
    """The parameters of which a rank's share holds any element, in order."""
    start, end = rank * _share(elements, workers), (rank + 1) * _share(elements, workers)
    touched, offset = [], 0
    for i, size in enumerate(elements):
        if offset < end and offset + size > start:
            touched.append(i)
        offset += size
    return touched


def _check(name: str, value: Tensor | None, expected: int) -> None:
    if value is None or len(value) != expected:
        there = "missing" if value is None else f"{len(value)} elements"
        raise ValueError(f"optimizer state {name}: {there}, where the layout of ZeRO shares has {expected}")
