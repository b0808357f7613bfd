"""The shape of one decoder, as plain frozen data. No torch here: planning must not import it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layer:
    """One layer's token mixer.

    mixer: a key of `model.mixers.table.MIXERS`.
    window: tokens a query sees, the current one included; None where the mixer has no window.
    rope: whether queries and keys are rotated (False is NoPE).
    """

    mixer: str
    window: int | None = None
    rope: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, `layers` of (norm, mixer, norm, MLP), final norm, head.

    qk_norm: initial value of the learned per-head gains on RMS-normalised queries and keys; None for no QK-norm.
    key_shift: adds a learned per-head multiple (initially 0) of the previous token's key to each key.
    context: tokens of a training sequence.
    """

    vocab_size: int
    context: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    layers: tuple[Layer, ...]
    mlp: Literal["swiglu", "relu2"] = "swiglu"
    norm_gain: bool = True
    norm_eps: float = 1e-6
    qk_norm: float | None = None
    key_shift: bool = False
    tied_embeddings: bool = False
    rope_base: float = 1e4

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive; give a whole number of 1 or more")
        if not self.layers:
            raise ValueError("layers: empty; give at least one layer")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads: {self.n_kv_heads} does not divide n_heads {self.n_heads}; choose a divisor of it"
            )
        if self.head_dim % 2 and any(layer.rope for layer in self.layers):
            raise ValueError(f"head_dim: {self.head_dim} is odd, RoPE turns pairs; choose an even width")


def parse_pattern(pattern: str, n_layers: int, positions: Literal["rope", "nope", "nope-full"]) -> tuple[Layer, ...]:
    """The layers of a pattern: words such as "swa-8 full", repeated until there are `n_layers`.

    A word is `full`, or `swa-W` with window W (the current token counts). Positions: `rope` on every layer, `nope` on
    none, `nope-full` on all but the full-attention layers. Raises ValueError naming the word and the remedy.
    """
    words = pattern.split()
    if not words:
        raise ValueError('pattern: empty; write mixer words such as "swa-8 full"')
    if n_layers % len(words):
        raise ValueError(
            f"pattern: {pattern!r} has {len(words)} words, which does not divide {n_layers} layers; "
            f"change the pattern or n_layers"
        )
    period = []
    for word in words:
        mixer, _, width = word.partition("-")
        if word == "full":
            window = None
        elif mixer == "swa":
            try:
                window = int(width)
            except ValueError:
                raise ValueError(f"pattern: {word!r} names no window; write swa-W, W the tokens seen") from None
            if window < 1:
                raise ValueError(f"pattern: {word!r} has window {window}; a window counts the current token, so W >= 1")
        else:
            raise ValueError(f"pattern: {word!r} is no known mixer; known: full, swa-W")
        period.append(Layer(mixer, window, positions == "rope" or (positions == "nope-full" and mixer != "full")))
    return tuple(period) * (n_layers // len(words))
