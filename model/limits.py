"""What may be changed at evaluation without training: how far layers see, and the scale of their queries."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from model.lm import LanguageModel
from model.mixers.attention import Attention
from model.positions import query_scale


def attention_layers(model: LanguageModel, mixer: str | None = None) -> dict[int, Attention]:
    """The softmax layers by 0-based index; of one mixer name ("full", "swa") where given."""
    return {
        index: block.mixer
        for index, (block, layer) in enumerate(zip(model.blocks, model.config.layers, strict=True))
        if isinstance(block.mixer, Attention) and mixer in (None, layer.mixer)
    }


def _softmax_layer(model: LanguageModel, index: int) -> Attention:
    layers = attention_layers(model)
    if index not in layers:
        raise ValueError(f"layer: {index} is no softmax attention layer; choose from {sorted(layers)}")
    return layers[index]


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
        chosen.append((_softmax_layer(model, index), window))
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
    layers = attention_layers(model, "full").values()
    before = [mixer.query_scale for mixer in layers]
    try:
        for mixer in layers:
            mixer.query_scale = query_scale(length, model.config.context)
        yield
    finally:
        for mixer, scale in zip(layers, before, strict=True):
            mixer.query_scale = scale
