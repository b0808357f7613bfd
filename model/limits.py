"""What may be changed at evaluation without training: how far layers see, and the scale of their queries."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from model.lm import LanguageModel
from model.mixers.attention import Attention
from model.mixers.heads import HeadWise
from model.positions import query_scale


class SoftmaxHeads(NamedTuple):
    """The softmax heads of one mixer in a layer. heads: their numbers among all softmax heads of the layer."""

    name: str
    heads: range
    mixer: Attention


def softmax_heads(model: LanguageModel) -> dict[int, list[SoftmaxHeads]]:
    """The layers with softmax heads by 0-based index: one mixer's, or several where they share a layer."""
    found: dict[int, list[SoftmaxHeads]] = {}
    for index, (block, layer) in enumerate(zip(model.blocks, model.config.layers, strict=True)):
        mixers = block.mixer.parts if isinstance(block.mixer, HeadWise) else [block.mixer]
        first = 0
        for part, mixer in zip(layer.each(), mixers, strict=True):
            if isinstance(mixer, Attention):
                found.setdefault(index, []).append(SoftmaxHeads(part.mixer, range(first, first + mixer.heads), mixer))
                first += mixer.heads
    return found


def chosen_layers(model: LanguageModel, indices: Iterable[int]) -> dict[int, list[SoftmaxHeads]]:
    """Some of `softmax_heads`. Raises ValueError for a layer that has none."""
    known = softmax_heads(model)
    for index in indices:
        if index not in known:
            raise ValueError(f"layers: {index} is no softmax attention layer; choose from {sorted(known)}")
    return {index: known[index] for index in indices}


@contextmanager
def limited(model: LanguageModel, windows: Mapping[int, int], sinks: int = 0) -> Iterator[None]:
    """Within the context, layer i sees at most its last windows[i] tokens and the first `sinks` of the sequence.

    A layer's own window still holds where it is smaller. Raises ValueError for a layer without softmax attention, a
    window below 1, or sinks below 0.
    """
    if sinks < 0:
        raise ValueError(f"sinks: {sinks} is negative; give 0 or more")
    chosen = []
    for index, window in windows.items():
        if window < 1:
            raise ValueError(f"windows: layer {index} has window {window}; a window counts the current token, so >= 1")
        chosen += [(part.mixer, window) for part in chosen_layers(model, [index])[index]]
    before = [(mixer, mixer.window, mixer.sinks) for mixer, _ in chosen]
    try:
        for mixer, window in chosen:
            if mixer.window is None or window < mixer.window:
                mixer.window, mixer.sinks = window, sinks
        yield
    finally:
        for mixer, own, sinks_before in before:
            mixer.window, mixer.sinks = own, sinks_before


@contextmanager
def scaled_queries(model: LanguageModel, length: int) -> Iterator[None]:
    """Within the context, full layers scale their queries for sequences of `length` tokens (positions.query_scale)."""
    layers = [part.mixer for parts in softmax_heads(model).values() for part in parts if part.name == "full"]
    before = [mixer.query_scale for mixer in layers]
    try:
        for mixer in layers:
            mixer.query_scale = query_scale(length, model.config.context)
        yield
    finally:
        for mixer, scale in zip(layers, before, strict=True):
            mixer.query_scale = scale
