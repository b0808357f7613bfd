"""Cost of a model: parameters, FLOPs, memory. What a mixer adds is a formula in its own file.

One convention for FLOPs: two a multiply-add, forward pass, per token, causal attention halved (a query of T tokens sees
(T+1)/2 on average); products within chunks are not halved, as they are computed whole. Embedding look-ups, norms, RoPE,
key shift, decays and softmax count 0. Training is three forward passes, four when the whole forward is recomputed.
"""

from dataclasses import dataclass, replace
from typing import Literal

from model.config import Layer, ModelConfig
from model.mixers.table import mixer_of


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, each counted once.

    mixers and mlp are the matrices that Muon may step; gains are what mixers have beside them: QK-norm gains and key
    shifts, convolutions, decays, norms of their own. norms are those around mixers and MLPs, and the last one. head is
    0 where it is tied to the embedding.
    """

    embedding: int
    head: int
    mixers: int
    mlp: int
    norms: int
    gains: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.non_embedding

    @property
    def non_embedding(self) -> int:
        """N of the scaling laws: all but the embedding and the head."""
        return self.matrices + self.norms + self.gains

    @property
    def matrices(self) -> int:
        return self.mixers + self.mlp


def parameters(config: ModelConfig) -> Parameters:
    """Parameters of a decoder by component."""
    table = config.vocab_size * config.d_model
    mixers = [mixer_of(layer).parameters(config, layer) for layer in config.layers]
    return Parameters(
        embedding=table,
        head=0 if config.tied_embeddings else table,
        mixers=sum(matrices for matrices, _ in mixers),
        mlp=sum(_mlp_matrices(config, layer) for layer in config.layers),
        norms=(2 * len(config.layers) + 1) * config.d_model if config.norm_gain else 0,
        gains=sum(rest for _, rest in mixers),
    )


def _mlp_matrices(config: ModelConfig, layer: Layer) -> int:
    return (3 if config.mlp == "swiglu" else 2) * config.d_model * (layer.d_ff or config.d_ff)


def layer_flops(config: ModelConfig, layer: Layer, length: int) -> float:
    """Forward FLOPs a token of one layer (mixer and MLP) in sequences of `length` tokens."""
    mixer = mixer_of(layer)
    matrices = mixer.parameters(config, layer)[0] + _mlp_matrices(config, layer)
    return 2 * matrices + mixer.flops(config, layer, length)


def forward_flops_per_token(config: ModelConfig, length: int | None = None) -> float:
    """Forward FLOPs a token of the whole model, head included; length defaults to the training context."""
    length = config.context if length is None else length
    head = 2 * config.d_model * config.vocab_size
    return sum(layer_flops(config, layer, length) for layer in config.layers) + head


def training_flops(config: ModelConfig, tokens: int, recompute: bool = False) -> float:
    """FLOPs of training on `tokens` tokens in sequences of the training context."""
    return (4 if recompute else 3) * forward_flops_per_token(config) * tokens


def matched(config: ModelConfig) -> ModelConfig:
    """The decoder with each layer's d_ff set so that the layer has the parameters of a full-attention one, to rounding.

    Raises ValueError where a mixer alone has more, or where the nearest d_ff leaves more than 1% of the layer.
    """
    full = mixer_of(Layer("full")).parameters(config, Layer("full"))
    whole = _layer_parameters(config, Layer("full"))
    step = _mlp_matrices(config, Layer("full", d_ff=1))
    layers = []
    for layer in config.layers:
        mixer = mixer_of(layer).parameters(config, layer)
        d_ff = round((whole - sum(mixer)) / step)
        if d_ff < 1 or abs(sum(mixer) + step * d_ff - whole) > whole / 100:
            raise ValueError(
                f"match_parameters: no d_ff brings a {layer.mixer} layer with {sum(mixer)} parameters in its mixer to "
                f"the {whole} of a full-attention layer; give the mixer fewer heads or the size a larger d_ff"
            )
        layers.append(layer if sum(mixer) == sum(full) else replace(layer, d_ff=d_ff))
    return replace(config, layers=tuple(layers))


def layer_residual(config: ModelConfig) -> float:
    """How far the parameters of a layer (mixer and MLP) are from those of a full-attention layer of the same decoder,
    over the latter: of the layer that is furthest, with its sign; 0 where all have the same."""
    whole = _layer_parameters(config, Layer("full"))
    return max((_layer_parameters(config, layer) / whole - 1 for layer in config.layers), key=abs)


def _layer_parameters(config: ModelConfig, layer: Layer) -> int:
    return sum(mixer_of(layer).parameters(config, layer)) + _mlp_matrices(config, layer)


def decoding_state(config: ModelConfig, length: int) -> int:
    """Numbers a sequence keeps while it is decoded, after `length` tokens: keys and values, states, convolutions."""
    return sum(mixer_of(layer).state(config, layer, length) for layer in config.layers)


def bytes_per_parameter(optimizer: Literal["adamw", "muon"], zero_stage: int, workers: int) -> float:
    """Weights, gradients and optimizer state a device, bytes a parameter, over `workers` devices.

    Mixed precision: 2 weight + 2 gradient, then a float32 copy of the weight and the moments (AdamW two, Muon one).
    In float32 the copy is not needed and weight and gradient are 4 each: the same sum at stage 0.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage: {zero_stage} is unknown; choose 0, 1, 2 or 3")
    state = {"adamw": 12, "muon": 8}[optimizer]
    weight, gradient = 2, 2
    sharded = (
        (state if zero_stage >= 1 else 0) + (gradient if zero_stage >= 2 else 0) + (weight if zero_stage >= 3 else 0)
    )
    return weight + gradient + state - sharded + sharded / workers


@dataclass(frozen=True)
class Memory:
    """Bytes a device needs to train: model and optimizer state, activations of one micro-batch, logits."""

    state: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.state + self.activations + self.logits


def memory(
    config: ModelConfig,
    optimizer: Literal["adamw", "muon"],
    sequences: int,
    zero_stage: int = 0,
    workers: int = 1,
    precision: Literal["float32", "bfloat16"] = "float32",
    recompute: bool = False,
) -> Memory:
    """Memory a device while `sequences` training sequences pass through it at once.

    optimizer: what steps the matrices inside layers; AdamW steps the rest. Activations about 32d + 4·kv_width + 4·heads
    bytes a token and layer in bfloat16, twice that in float32; 2d (4d) where the forward is recomputed.
    """
    counts = parameters(config)
    state = counts.matrices * bytes_per_parameter(optimizer, zero_stage, workers)
    state += (counts.total - counts.matrices) * bytes_per_parameter("adamw", zero_stage, workers)
    tokens = sequences * config.context
    wide = 2 if precision == "float32" else 1
    kept = 2 * config.d_model
    if not recompute:
        kept = 32 * config.d_model + 4 * config.n_kv_heads * config.head_dim + 4 * config.n_heads
    logits = min(tokens * config.vocab_size, LOSS_LOGITS)
    # The logits and their gradient, float32.
    return Memory(state, wide * kept * tokens * len(config.layers), 2 * 4 * logits)


LOSS_LOGITS = 2**24  # logits a loss holds at once: beyond, the head runs in chunks of tokens
