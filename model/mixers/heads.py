"""Several mixers side by side in one layer, each with some of its heads: "swa-128:3+full" (as in Hymba,
arXiv 2411.13676, without its norms between them).

The outputs of the parts add up: each has an output projection of its own, which together are one over all heads.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from model.config import Layer, ModelConfig
from model.mixers.mixer import Angles, Mixer, MixerModule, State


def head_wise(mixers: Mapping[str, Mixer]) -> Mixer:
    """The mixer of layers that have `parts`, each one of `mixers`. Its sizes are the sums of theirs."""

    def shares(config: ModelConfig, layer: Layer) -> list[tuple[Mixer, ModelConfig, Layer]]:
        return [(mixers[part.mixer], *_share(mixers[part.mixer], config, layer, part)) for part in layer.parts]

    def module(config: ModelConfig, index: int) -> nn.Module:
        parts = []
        for mixer, own, part in shares(config, config.layers[index]):
            layers = (*config.layers[:index], part, *config.layers[index + 1 :])
            parts.append(mixer.module(replace(own, layers=layers), index))
        return HeadWise(parts)

    def parameters(config: ModelConfig, layer: Layer) -> tuple[int, int]:
        counts = [mixer.parameters(own, part) for mixer, own, part in shares(config, layer)]
        return sum(matrices for matrices, _ in counts), sum(rest for _, rest in counts)

    def flops(config: ModelConfig, layer: Layer, length: int) -> float:
        return sum(mixer.flops(own, part, length) for mixer, own, part in shares(config, layer))

    def state(config: ModelConfig, layer: Layer, length: int) -> int:
        return sum(mixer.state(own, part, length) for mixer, own, part in shares(config, layer))

    return Mixer(module, parameters, flops, state, matrices=frozenset())


class HeadWise(nn.Module):
    """The sum of its parts, [B, T, D] → [B, T, D]. Its state is theirs, each name behind the number of the part."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x_BTD: Tensor, angles: Angles) -> Tensor:
        return torch.stack([part(x_BTD, angles) for part in self._parts()]).sum(0)

    def prefill(self, x_BTD: Tensor, angles: Angles) -> tuple[Tensor, State]:
        return _joined([part.prefill(x_BTD, angles) for part in self._parts()])

    def step(self, x_B1D: Tensor, angles: Angles, state: State) -> tuple[Tensor, State]:
        return _joined([part.step(x_B1D, angles, _of(k, state)) for k, part in enumerate(self._parts())])

    def empty_state(self, batch: int) -> State:
        return _states([part.empty_state(batch) for part in self._parts()])

    def _parts(self) -> list[MixerModule]:
        return cast(list[MixerModule], list(self.parts))


def _joined(results: list[tuple[Tensor, State]]) -> tuple[Tensor, State]:
    return torch.stack([out for out, _ in results]).sum(0), _states([state for _, state in results])


def _states(states: list[State]) -> State:
    return {f"{k}.{name}": kept for k, state in enumerate(states) for name, kept in state.items()}


def _of(k: int, state: State) -> State:
    return {name.partition(".")[2]: kept for name, kept in state.items() if name.startswith(f"{k}.")}


def _share(mixer: Mixer, config: ModelConfig, layer: Layer, part: Layer) -> tuple[ModelConfig, Layer]:
    """The decoder and layer that a part would be alone. Raises ValueError where its share is no whole heads."""
    whole = sum(other.weight for other in layer.parts)

    def share(heads: int, what: str) -> int:
        own, rest = divmod(heads * part.weight, whole)
        if rest or not own:
            raise ValueError(
                f"pattern: {layer.word!r} gives {part.mixer} {part.weight} of {whole} parts of {what} {heads}, which "
                f"are no whole heads; choose weights whose sum divides {heads}"
            )
        return own

    if mixer.heads is None:
        own = replace(
            config, n_heads=share(config.n_heads, "n_heads"), n_kv_heads=share(config.n_kv_heads, "n_kv_heads")
        )
        return own, part
    heads = share(mixer.heads(config, part), f"{part.mixer}'s heads")
    return config, replace(part, settings=replace(part.settings, heads=heads))
