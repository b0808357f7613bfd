"""Every formula of cost: parameters, FLOPs, memory. No torch here: planning must not import it.

One convention for FLOPs: two a multiply-add, forward pass, per token, causal attention halved (a query of T tokens sees
(T+1)/2 on average). Embedding look-ups, norms, RoPE, key shift and softmax count 0. Training is three forward passes,
four when the whole forward is recomputed.
"""

from dataclasses import dataclass
from typing import Literal

from model.config import Layer, ModelConfig


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, each counted once.

    matrices: the part of attention and mlp that Muon may step. head is 0 where it is tied to the embedding.
    """

    embedding: int
    head: int
    attention: int
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
        return self.attention + self.mlp


def parameters(config: ModelConfig) -> Parameters:
    """Parameters of a decoder by component; gains are QK-norm gains and key shifts."""
    table = config.vocab_size * config.d_model
    depth = len(config.layers)
    return Parameters(
        embedding=table,
        head=0 if config.tied_embeddings else table,
        attention=sum(_mixer_matrices(config, layer) for layer in config.layers),
        mlp=depth * _mlp_matrices(config),
        norms=(2 * depth + 1) * config.d_model if config.norm_gain else 0,
        gains=sum(_mixer_gains(config, layer) for layer in config.layers),
    )


def _mixer_matrices(config: ModelConfig, layer: Layer) -> int:
    """Queries and output [D, H·K] each, keys and values [D, G·K] each."""
    if layer.mixer not in ("full", "swa"):
        raise ValueError(f"mixer: {layer.mixer!r} has no cost formula; add it to model/cost.py")
    return 2 * config.d_model * config.head_dim * (config.n_heads + config.n_kv_heads)


def _mixer_gains(config: ModelConfig, layer: Layer) -> int:
    normed = 0 if config.qk_norm is None else config.n_heads + config.n_kv_heads
    return normed + (config.n_kv_heads if config.key_shift else 0)


def _mlp_matrices(config: ModelConfig) -> int:
    return (3 if config.mlp == "swiglu" else 2) * config.d_model * config.d_ff


def visible_tokens(layer: Layer, length: int) -> float:
    """Tokens a query sees, averaged over a sequence of `length`: (T+1)/2, or w - w(w-1)/(2T) for a window w < T."""
    if layer.window is None or layer.window >= length:
        return (length + 1) / 2
    return layer.window - layer.window * (layer.window - 1) / (2 * length)


def layer_flops(config: ModelConfig, layer: Layer, length: int) -> float:
    """Forward FLOPs a token of one layer (mixer and MLP) in sequences of `length` tokens."""
    products = 4 * config.n_heads * config.head_dim * visible_tokens(layer, length)
    return 2 * (_mixer_matrices(config, layer) + _mlp_matrices(config)) + products


def forward_flops_per_token(config: ModelConfig, length: int | None = None) -> float:
    """Forward FLOPs a token of the whole model, head included; length defaults to the training context."""
    length = config.context if length is None else length
    head = 2 * config.d_model * config.vocab_size
    return sum(layer_flops(config, layer, length) for layer in config.layers) + head


def training_flops(config: ModelConfig, tokens: int, recompute: bool = False) -> float:
    """FLOPs of training on `tokens` tokens in sequences of the training context."""
    return (4 if recompute else 3) * forward_flops_per_token(config) * tokens


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


def optimizer_state_bytes(config: ModelConfig, optimizer: Literal["adamw", "muon"]) -> float:
    """Float32 optimizer state as it is stored with a checkpoint: one moment where Muon steps, two where AdamW does."""
    counts = parameters(config)
    return 4 * (counts.matrices * (1 if optimizer == "muon" else 2) + 2 * (counts.total - counts.matrices))


@dataclass(frozen=True)
class Memory:
    """Bytes a device needs to train: model and optimizer state, activations of one micro-batch, logits, and what is
    there for a moment: gradients inside the widest MLP, matrices that Muon orthogonalises together.

    On a CPU in float32 the peak of real steps was 0.99 times the total where states outweigh and 1.16 where activations
    do (0.7 GB each); tests/orchestrator/test_memory.py holds it to 0.85 to 1.4. In bfloat16 activations are those of
    GPU kernels: on a CPU they stay float32 in places and take about twice that.
    """

    state: float
    activations: float
    logits: float
    working: float

    @property
    def total(self) -> float:
        return self.state + self.activations + self.logits + self.working


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
    passing = 2 * wide * tokens * (4 * config.d_ff + 4 * config.d_model)
    stacked = min(STACK_ELEMENTS, counts.matrices) if optimizer == "muon" else 0
    # The logits, their softmax and their gradient, float32; of stacked matrices the updates and five bfloat16 products.
    return Memory(state, wide * kept * tokens * len(config.layers), 3 * 4 * logits, passing + 16 * stacked)


STACK_ELEMENTS = 2**24  # of matrices Muon orthogonalises together: beyond some MB no time to gain
LOSS_LOGITS = 2**24  # logits a loss holds at once: beyond, the head runs in chunks of tokens
