"""The shape of one decoder, as plain frozen data."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Layer:
    """One layer's token mixer.

    mixer: a key of `model.mixers.table.MIXERS`.
    window: tokens a query sees, the current one included; None where the mixer has no window.
    rope: whether queries and keys are rotated (False is NoPE); False where the mixer has no rotary positions.
    settings: the mixer's own choices, a dataclass of its file; None for their defaults.
    d_ff: hidden width of this layer's MLP; None for the model's.
    """

    mixer: str
    window: int | None = None
    rope: bool = True
    settings: Any = None
    d_ff: int | None = None


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
