"""What the rest of the model needs to know of a token mixer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from model.config import Layer, ModelConfig
from model.draws import Draw

# RoPE cosines and sines, float32 [T, R/2] each, by how many numbers R of a head turn.
Angles = Mapping[int, tuple[Tensor, Tensor]]
State = dict[str, Tensor]  # what one layer keeps of the tokens read, batch first


class MixerModule(Protocol):
    """What a layer asks of its mixer, an nn.Module."""

    def __call__(self, x_BTD: Tensor, angles: Angles) -> Tensor:
        """[B, T, D] → [B, T, D], from an empty state."""

    def empty_state(self, batch: int) -> State:
        """The state before the first token."""

    def prefill(self, x_BTD: Tensor, angles: Angles) -> tuple[Tensor, State]:
        """As a call, with the state after the last token."""

    def step(self, x_B1D: Tensor, angles: Angles, state: State) -> tuple[Tensor, State]:
        """One token more: [B, 1, D] → [B, 1, D]. angles: of that token's position alone, [1, R/2]."""


@dataclass(frozen=True)
class Mixer:
    """module(config, index of the layer) builds it. All numbers are of one layer.

    parameters: (in matrices that Muon may step, in all else). flops: forward FLOPs a token beyond those matrices, in
    sequences of a length. state: numbers kept a sequence while decoding after so many tokens.
    matrices: names of the submodules whose weight is such a matrix. first: rules of first values by name.
    windowed: the pattern's word ends in a window ("swa-128"). rotary: the layer's rope flag means something.
    settings: a frozen dataclass of the mixer's own choices, None where it has none. heads: how many heads of its own it
    has, a setting; None where they are the decoder's n_heads.
    """

    module: Callable[[ModelConfig, int], Any]
    parameters: Callable[[ModelConfig, Layer], tuple[int, int]]
    flops: Callable[[ModelConfig, Layer, int], float]
    state: Callable[[ModelConfig, Layer, int], int]
    matrices: frozenset[str]
    first: Mapping[str, Draw] = field(default_factory=dict)
    windowed: bool = False
    rotary: bool = True
    settings: type | None = None
    heads: Callable[[ModelConfig, Layer], int] | None = None


def refuse_below_one(settings: object, *names: str) -> None:
    """Raises ValueError for the first of the fields that is set and not positive."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}: {value!r} is not positive; give a whole number of 1 or more")
