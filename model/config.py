"""The shape of one decoder, as plain frozen data."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Layer:
    """One layer's token mixer.

    mixer: a key of `model.mixers.table.MIXERS`.
    window: tokens a query sees, the current one included; None where the mixer has no window.
    rope: whether queries and keys are rotated (False is NoPE), or the share of a head's width that is (partial RoPE,
    between 0 and 1); False where the mixer has no rotary positions.
    settings: the mixer's own choices, a dataclass of its file; None for their defaults.
    d_ff: hidden width of this layer's MLP; None for the model's.
    sinks: first tokens of the sequence seen besides the window (arXiv 2309.17453); 0 where the mixer has no window.
    parts: of a "heads" layer, the layers that share its heads; weight: how many shares of them such a part has.
    """

    mixer: str
    window: int | None = None
    rope: bool | float = True
    settings: Any = None
    d_ff: int | None = None
    sinks: int = 0
    parts: tuple["Layer", ...] = ()
    weight: int = 1

    @property
    def word(self) -> str:
        """As a pattern names it: "swa-8", "swa-8:3+full"."""
        if self.parts:
            return "+".join(part.word + (f":{part.weight}" if part.weight > 1 else "") for part in self.parts)
        return self.mixer if self.window is None else f"{self.mixer}-{self.window}"

    def each(self) -> tuple["Layer", ...]:
        """Its parts, or itself where it has none."""
        return self.parts or (self,)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, `layers` of (norm, mixer, norm, MLP), final norm, head.

    qk_norm: initial value of the learned per-head gains on RMS-normalised queries and keys; None for no QK-norm.
    key_shift: adds a learned per-head multiple (initially 0) of the previous token's key to each key.
    sink_logit: adds a learned per-head score (initially 0) to what each softmax runs over: a head may attend to nothing
    (as in gpt-oss). logit_scale: factor on the head's logits. logit_softcap: cap c, logits become c·tanh(logits/c).
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
    sink_logit: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None

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
        for layer in self.parts():
            turned = rotary_width(self.head_dim, layer.rope)
            if turned % 2 or (layer.rope and not turned):
                share = "" if layer.rope is True else f" of which {layer.rope} turn"
                raise ValueError(
                    f"head_dim: {self.head_dim}{share} makes RoPE turn {turned} numbers, and it turns pairs; choose an "
                    f"even width"
                )

    def parts(self) -> tuple[Layer, ...]:
        """Its layers, and in place of those whose heads several mixers share, these."""
        return tuple(part for layer in self.layers for part in layer.each())


def rotary_width(head_dim: int, rope: bool | float) -> int:
    """How many of a head's first numbers RoPE turns: int(p·d)."""
    return int(rope * head_dim)
